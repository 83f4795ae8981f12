"""Pictures and sounds of requests, prepared for the model's tower in processes of their own. What is made of
one lies in memory that workers open, once for all requests that have it at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary, finalize

from sgla.errors import BadRequest, InvalidField, Overloaded
from sgla.media.picture import Picture
from sgla.media.pool import Pool
from sgla.media.sound import Sound
from sgla.messages import Array, Prepared
from sgla.model.vision.sizes import checked_sizes
from sgla.model.vision.spec import Settings, Vision
from sgla.per_client import PerClient

MODULES = {
    "image": ("sgla.media.without_torch", "sgla.media.prepare", "transformers.image_processing_backends"),
    "audio": ("sgla.media.without_torch", "sgla.media.prepare", "transformers.feature_extraction_utils"),
}
MOST = 1 << 28  # bytes of what is made of one picture
TOGETHER = 1 << 31  # of all that are there
PATIENCE = 60.0  # seconds that a request waits for room
PREPARE, WAKE = "sgla.media.prepare:prepare", "sgla.media.prepare:wake"
PREPARE_SOUND = "sgla.media.prepare:prepare_sound"
Fields = tuple[str, str, list[int], int, list[int]]  # of an Array


class Full(Exception):
    """There is no room for a picture now."""


class PictureRoom:
    """``config`` and ``settings``: of the model's files; ``sizes``: in place of some of these. A client has
    all ``processes`` but one."""

    def __init__(
        self,
        vision: Vision,
        config: Mapping[str, Any],
        settings: Settings,
        sizes: Mapping[str, Any] = MappingProxyType({}),
        processes: int = 2,
    ) -> None:
        self._processor = vision.processor_of(settings)
        self._vision, self._sizes = vision, checked_sizes(vision, sizes)
        self._settings = dict(settings.images)
        self._extra = vision.prepares(config, settings)
        self._pool = Pool(processes, modules=MODULES[vision.kind])
        self._turns = PerClient(max(1, processes - 1))
        self._making: dict[bytes, asyncio.Future[None]] = {}  # by digest
        self._there: WeakValueDictionary[bytes, Prepared] = WeakValueDictionary()
        self._bytes: Counter[str] = Counter()  # by client
        self._lines = PerClient(1)  # who waits for room
        self._freed = asyncio.Event()

    async def wake(self) -> None:
        """Start a process, which imports transformers for seconds: no picture has to wait for that."""
        with suppress(BadRequest):
            await self._pool.run(WAKE, self._processor, self._asked({})[1], result=type(None))

    def _asked(self, sizes: Mapping[str, Any], several: bool = False) -> tuple[bytes, str]:
        """What tells pictures of these ``sizes``, and of ``several``, apart from others, and settings with
        them: JSON. Raises InvalidField, UnsupportedField."""
        given = self._sizes | checked_sizes(self._vision, sizes)
        said = json.dumps([given, several], sort_keys=True).encode()
        mark = hashlib.sha256(said).digest() if given or several else b""
        return mark, json.dumps(self._settings | given)

    async def prepare(
        self,
        pictures: Sequence[Picture | Sound],
        client: str,
        sizes: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Prepared]:
        """In their order. ``sizes``: see ``model/vision/sizes.py``. Where there is no room, those of a client
        wait in a line. Raises what the pool raises, InvalidField, UnsupportedField and Overloaded."""
        several = self._vision.alone and len(pictures) > 1
        mark, settings = self._asked(sizes, several)
        asked = mark, settings, several
        line = self._lines.of(client)
        if not line.locked() and (made := await self._all(pictures, client, asked)) is not None:
            return made
        end = asyncio.get_running_loop().time() + PATIENCE
        try:
            async with asyncio.timeout_at(end):
                await line.acquire()
            try:
                return await self._waited(pictures, client, asked, end)
            finally:
                line.release()
        except TimeoutError:
            raise Overloaded(
                f"{self._vision.things} of requests take {TOGETHER >> 30} GiB, or yours half of that, and "
                f"there was no room within {PATIENCE:g} s; retry later",
                retry_after=5.0,
            ) from None

    async def _waited(
        self, pictures: Sequence[Picture | Sound], client: str, asked: tuple[bytes, str, bool], end: float
    ) -> list[Prepared]:
        """``_all`` as soon as there is room. Raises TimeoutError at the ``end``."""
        while (made := await self._all(pictures, client, asked)) is None:
            self._freed.clear()
            async with asyncio.timeout_at(end):
                await self._freed.wait()
        return made

    async def _all(
        self, pictures: Sequence[Picture | Sound], client: str, asked: tuple[bytes, str, bool]
    ) -> list[Prepared] | None:
        """None if there is no room for one: nobody keeps some while waiting for others, so whoever waits gets
        room in the end. Raises InvalidField if there never is."""
        made: dict[bytes, Prepared] = {}
        turn = self._turns.of(client)
        for picture in pictures:
            if picture.digest not in made:
                try:
                    async with turn:
                        made[picture.digest] = await self._one(picture, client, *asked)
                except Full:
                    self._check_together(made.values())
                    return None
        return [made[picture.digest] for picture in pictures]

    def _check_together(self, made: Iterable[Prepared]) -> None:
        if sum(os.stat(one.file).st_size for one in made) > TOGETHER // 2:
            raise InvalidField(
                f"{self._vision.things} of a request take more than {TOGETHER >> 31} GiB once they are "
                "prepared; send fewer or smaller ones",
                param="messages",
            )

    async def _one(
        self, picture: Picture | Sound, client: str, mark: bytes, settings: str, several: bool
    ) -> Prepared:
        digest = hashlib.sha256(picture.digest + mark).digest() if mark else picture.digest
        while True:
            known = self._there.get(digest)
            if known is not None:
                return known
            if (making := self._making.get(digest)) is None:
                break
            await asyncio.wait([making])
        self._making[digest] = made = asyncio.get_running_loop().create_future()
        try:
            return await self._made(picture, digest, settings, client, several)
        finally:
            del self._making[digest]
            made.set_result(None)

    async def _made(
        self, picture: Picture | Sound, digest: bytes, settings: str, client: str, several: bool
    ) -> Prepared:
        if self._bytes[client] > TOGETHER // 2 or self._bytes.total() > TOGETHER:
            raise Full
        fd = os.memfd_create("picture", os.MFD_CLOEXEC)
        file = f"/proc/{os.getpid()}/fd/{fd}"
        if isinstance(picture, Sound):
            asked: tuple[Any, ...] = (PREPARE_SOUND, picture, self._processor, settings, file, MOST)
        else:
            asked = (PREPARE, picture, self._processor, settings, self._extra, several, file, MOST)
        try:
            fields = await self._pool.run(*asked, result=list[Fields])
        except BaseException:
            os.close(fd)
            raise
        prepared = Prepared(digest, file, [Array(*entry) for entry in fields])
        size = os.fstat(fd).st_size
        self._bytes[client] += size
        self._there[digest] = prepared
        finalize(prepared, self._gone, fd, size, client)
        return prepared

    def _gone(self, fd: int, size: int, client: str) -> None:
        self._bytes[client] -= size
        if not self._bytes[client]:
            del self._bytes[client]
        os.close(fd)
        self._freed.set()

    async def close(self) -> None:
        await self._pool.close()
