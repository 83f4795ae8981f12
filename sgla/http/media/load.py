"""Sources -> pictures: within the limits of a prompt, and by turns between clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from sgla.config import MediaSettings
from sgla.errors import BadRequest, InvalidField, UnsupportedField
from sgla.http.bodies import Share
from sgla.http.media.fetch import Fetcher
from sgla.http.media.parts import Source
from sgla.http.ports import Ingress
from sgla.http.turns import Desk
from sgla.media.picture import Limits, Picture
from sgla.media.pool import processes_of
from sgla.media.source import MAX_PATH, form_of, path_of

DECODE = "sgla.media.decode:picture"
MOST = 64  # pictures of a prompt, where --limit-mm-per-prompt does not say


class Media:
    """What requests bring beside text."""

    def __init__(self, settings: MediaSettings) -> None:
        self.most = settings.limit_mm_per_prompt.get("image", MOST)
        self._limits = Limits(
            settings.max_media_bytes, settings.max_image_pixels, settings.allowed_media_path or ""
        )
        self._fetcher = Fetcher(settings)
        self._desk = Desk(processes_of(settings.media_processes))

    def sizes(self, given: dict[str, Any] | None, ingress: Ingress) -> dict[str, Any]:
        """The ``mm_processor_kwargs`` of a request, which are looked at with its pictures. Raises
        UnsupportedField for a model that takes none."""
        if given and (ingress.facts is None or "image" not in ingress.facts.media):
            name = "mm_processor_kwargs"
            raise UnsupportedField(f"{name}: this model takes no images; leave it out", param=name)
        return given or {}

    def check(self, sources: Sequence[Source], ingress: Ingress) -> None:
        """Raise for the first picture of a prompt that the model or the server does not take."""
        if not sources:
            return
        place = sources[0].place
        if ingress.facts is None or "image" not in ingress.facts.media:
            raise UnsupportedField(f"{place}: this model takes no images; leave it out", param=place)
        if find_spec("PIL") is None:
            raise UnsupportedField(
                f"{place}: this server reads no pictures: it lacks Pillow (pip install 'sgla[mm]')",
                param=place,
            )
        if len(sources) > self.most:
            raise InvalidField(
                f"the prompt has {len(sources)} pictures; {self.most} (--limit-mm-per-prompt) may be",
                param=sources[self.most].place,
            )

    async def pictures(self, sources: Sequence[Source], ingress: Ingress, share: Share) -> list[Picture]:
        """Of sources that were checked; a source that is there twice is loaded once. The pictures stay in
        ``share``. Raises BadRequests that name the place, and what ``share`` does."""
        tasks: dict[object, asyncio.Task[Picture]] = {}
        try:
            for source in sources:
                if (key := _key(source)) not in tasks:
                    tasks[key] = asyncio.ensure_future(self._placed(source, ingress, share))
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [tasks[_key(source)].result() for source in sources]

    async def _placed(self, source: Source, ingress: Ingress, share: Share) -> Picture:
        try:
            return await self._picture(source.text, ingress, share)
        except BadRequest as error:
            error.message = f"{source.place}: {error.message}"
            error.param = source.place
            raise

    async def _picture(self, text: str, ingress: Ingress, share: Share) -> Picture:
        form = form_of(text)
        if form == "url":
            data = await self._fetcher.get(text, share)
            try:
                async with self._turn(share.client):
                    picture = await self._decoded(data, "file", ingress)
            finally:
                share.give(len(data))
        else:  # the text counts already, as a part of the body
            async with self._turn(share.client):
                data = path_of(text) if form == "path" else text.encode("utf-8", "surrogatepass")
                picture = await self._decoded(data, form, ingress)
        share.take(len(picture.pixels))
        return picture

    async def _decoded(self, data: bytes, form: str, ingress: Ingress) -> Picture:
        return await ingress.media.run(DECODE, data, form, self._limits, result=Picture)

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        """One of a client waits for a process; all may run that have got one."""
        async with self._desk.own(client):
            await self._desk.everybodys.acquire()
        try:
            yield
        finally:
            self._desk.everybodys.release()

    async def close(self) -> None:
        await self._fetcher.close()


def _key(source: Source) -> object:
    """Equal texts of some length are only looked for where they are one object."""
    return source.text if len(source.text) <= MAX_PATH else id(source.text)
