"""Sources -> pictures, sounds and videos: within the limits of a prompt, and by turns between clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sgla.config import MediaSettings
from sgla.errors import BadRequest, InvalidField
from sgla.http.bodies import Share
from sgla.http.media.fetch import Fetcher
from sgla.http.media.parts import Source
from sgla.http.ports import Ingress
from sgla.http.turns import Desk
from sgla.media.pool import processes_of
from sgla.media.readers import NEEDS, READERS, Medium, check_taken, limits_of, most_of
from sgla.media.source import MAX_PATH, form_of, path_of


class Media:
    """What requests bring beside text."""

    def __init__(self, settings: MediaSettings) -> None:
        self.most = most_of(settings)
        self._limits = limits_of(settings, settings.allowed_media_path or "")
        self._fetcher = Fetcher(settings)
        self._desk = Desk(processes_of(settings.media_processes))

    def sizes(self, given: dict[str, Any] | None, ingress: Ingress) -> dict[str, Any]:
        """The ``mm_processor_kwargs`` of a request, which are looked at with its pictures. Raises
        UnsupportedField for a model that takes none."""
        if given:
            check_taken("image", ingress.facts, "mm_processor_kwargs")
        return given or {}

    def check(self, sources: Sequence[Source], ingress: Ingress) -> None:
        """Raise for the first picture, sound or video of a prompt that the model or the server does not
        take."""
        for kind in NEEDS:
            self._check([source for source in sources if source.kind == kind], kind, ingress)

    def _check(self, sources: Sequence[Source], kind: str, ingress: Ingress) -> None:
        if not sources:
            return
        check_taken(kind, ingress.facts, sources[0].place)
        if len(sources) > self.most[kind]:
            raise InvalidField(
                f"the prompt has {len(sources)} {NEEDS[kind].things}; "
                f"{self.most[kind]} (--limit-mm-per-prompt) may be",
                param=sources[self.most[kind]].place,
            )

    async def pictures(self, sources: Sequence[Source], ingress: Ingress, share: Share) -> list[Medium]:
        """And sounds and videos, of sources that were checked; one that is there twice is loaded once. They
        stay in ``share``. Raises BadRequests that name the place, and what ``share`` does."""
        tasks: dict[object, asyncio.Task[Medium]] = {}
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

    async def _placed(self, source: Source, ingress: Ingress, share: Share) -> Medium:
        try:
            return await self._loaded(source, ingress, share)
        except BadRequest as error:
            error.message = f"{source.place}: {error.message}"
            error.param = source.place
            raise

    async def _loaded(self, source: Source, ingress: Ingress, share: Share) -> Medium:
        text, form = source.text, form_of(source.text)
        if form == "url":
            data = await self._fetcher.get(text, share)
            try:
                made = await self.decoded(source.kind, data, "file", ingress, share.client)
            finally:
                share.give(len(data))
        else:  # the text counts already, as a part of the body
            data = path_of(text) if form == "path" else text.encode("utf-8", "surrogatepass")
            made = await self.decoded(source.kind, data, form, ingress, share.client)
        share.take(made.size)
        return made

    async def decoded(self, kind: str, data: bytes, form: str, ingress: Ingress, client: str) -> Medium:
        """``form``: see ``media/decode.py``. Raises what the pool raises."""
        function, made = READERS[kind]
        async with self._turn(client):
            return await ingress.media.run(function, data, form, self._limits[kind], result=made)

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
    return source.kind, source.text if len(source.text) <= MAX_PATH else id(source.text)
