"""Sources -> pictures, sounds and videos: within the limits of a prompt, and by turns between clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType
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
from sgla.media.source import MAX_PATH, digest_of, form_of, path_of
from sgla.messages import Prepared

Known = Callable[[bytes], Prepared | None]  # by the digest of a file


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

    async def pictures(
        self,
        prompts: Sequence[Sequence[Source]],
        ingress: Ingress,
        share: Share,
        sizes: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[list[Medium | Prepared]]:
        """And sounds and videos, of each prompt, of sources that were checked; one that is there twice is
        loaded once. They stay in ``share``. ``sizes``: see ``sizes``. Raises BadRequests that name the place,
        and what ``share`` does."""
        tasks: dict[object, asyncio.Task[Medium | Prepared]] = {}
        keys = [[(_key(source), len(sources) > 1) for source in sources] for sources in prompts]
        try:
            for source, key in zip(chain.from_iterable(prompts), chain.from_iterable(keys)):
                if key not in tasks:
                    kept = partial(_kept, ingress.pictures, sizes=sizes, several=key[1])
                    tasks[key] = asyncio.ensure_future(self._placed(source, ingress, share, kept))
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [[tasks[key].result() for key in own] for own in keys]

    async def _placed(self, source: Source, ingress: Ingress, share: Share, kept: Known) -> Medium | Prepared:
        try:
            return await self._loaded(source, ingress, share, kept)
        except BadRequest as error:
            error.message = f"{source.place}: {error.message}"
            error.param = source.place
            raise

    async def _loaded(self, source: Source, ingress: Ingress, share: Share, kept: Known) -> Medium | Prepared:
        text, form = source.text, form_of(source.text)
        if form == "url":
            data = await self._fetcher.get(text, share)
            try:
                return await self._seen(source.kind, data, "file", ingress, share, kept)
            finally:
                share.give(len(data))
        if form == "path":  # what is there may change
            made = await self.decoded(source.kind, path_of(text), form, ingress, share.client)
            share.take(made.size)
            return made
        # The text counts already, as a part of the body.
        data = text.encode("utf-8", "surrogatepass")
        return await self._seen(source.kind, data, form, ingress, share, kept)

    async def _seen(
        self, kind: str, data: bytes, form: str, ingress: Ingress, share: Share, kept: Known
    ) -> Medium | Prepared:
        """What is kept of it, or else what it shows."""
        digest = await digest_of(kind, data, form)
        if (known := kept(digest)) is not None:
            return known
        made = await self.decoded(kind, data, form, ingress, share.client)
        share.take(made.size)
        if ingress.pictures is not None:
            ingress.pictures.came(digest, made)
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


def _kept(room: Any, digest: bytes, sizes: Mapping[str, Any], several: bool) -> Prepared | None:
    """``room``: of the model, if it has one."""
    known: Prepared | None = None if room is None else room.known(digest, sizes, several)
    return known


def _key(source: Source) -> object:
    """Equal texts of some length are only looked for where they are one object."""
    return source.kind, source.text if len(source.text) <= MAX_PATH else id(source.text)
