"""Pictures and sounds of requests, prepared for the model's tower in processes of their own. What is made of
one lies in memory that workers open, once for all requests that have it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import finalize

from sgla.actors.encoding import Encoding
from sgla.actors.shelf import Made, Shelf, Shown
from sgla.errors import BadRequest, InvalidField, Overloaded
from sgla.media.arrays import ALIGNED, joined
from sgla.media.picture import Picture
from sgla.media.pool import Pool
from sgla.media.sound import Sound
from sgla.media.video import Video
from sgla.messages import Array, Prepared, Window
from sgla.model.vision.sizes import OF_VIDEOS, checked_sizes
from sgla.model.vision.spec import Settings, Vision
from sgla.per_client import PerClient

MODULES = ("sgla.media.without_torch", "sgla.media.prepare")
OF_KIND = {
    "image": "transformers.image_processing_backends",
    "audio": "transformers.feature_extraction_utils",
}
MOST = 1 << 28  # bytes of what is made of one picture
TOGETHER = 1 << 31  # of all that are there
PATIENCE = 60.0  # seconds that a request waits for room
PREPARE, WAKE = "sgla.media.prepare:prepare", "sgla.media.prepare:wake"
PREPARE_VIDEO, PREPARE_LOG_MEL = "sgla.media.prepare:prepare_video", "sgla.media.prepare:prepare_log_mel"
PREPARE_SOUNDS = {  # by ``Vision.heard``
    "once": "sgla.media.prepare:prepare_sound",
    "windows": "sgla.media.prepare:prepare_windows",
    "chunks": "sgla.media.prepare:prepare_chunks",
    "trimmed": "sgla.media.prepare:prepare_trimmed",
    "masked": "sgla.media.prepare:prepare_masked",
}
THINGS = {"image": "picture", "video": "video", "audio": "sound"}
T = TypeVar("T")
Fields = tuple[str, str, list[int], int, list[int]]  # of an Array
Medium = Picture | Sound | Video
# Settings of files that processors would honour before what a request gives.
BEFORE = {"size": ("min_pixels", "max_pixels"), "fps": ("num_frames",), "num_frames": ("fps",)}


class Asked(NamedTuple):
    """``mark``: what tells pictures of these ``sizes``, and of ``several``, apart from others; ``whose``: and
    all things from those of other clients, where it is not b""."""

    mark: bytes
    whose: bytes
    sizes: dict[str, Any]
    several: bool

    def digest_of(self, shown: Shown) -> bytes:
        """Of what is made of it."""
        mark = self.whose if shown.kind == "audio" else self.mark + self.whose
        return hashlib.sha256(shown.digest + mark).digest() if mark else shown.digest


class Full(Exception):
    """There is no room for a picture now."""


class PictureRoom:
    """``config`` and ``settings``: of the model's files; ``sizes``: in place of some of these. A client has
    all ``processes`` but one; a task so many ``seconds`` of a CPU. ``kept``: bytes of what requests to come
    may have again. ``apart``: what is made for a client, here and by the tower, is used by no other."""

    def __init__(
        self,
        vision: Vision,
        config: Mapping[str, Any],
        settings: Settings,
        sizes: Mapping[str, Any] = MappingProxyType({}),
        processes: int = 2,
        seconds: float = 10.0,
        kept: int = 0,
        apart: bool = False,
    ) -> None:
        self._processor = vision.processor_of(settings)
        self._vision, self._sizes = vision, checked_sizes(vision, sizes)
        self._settings = settings
        self._extra = vision.prepares(config, settings)
        film = vision.film
        self._film = "" if film is None else film.processor
        paced = {} if film is None or film.paced is None else {"tokens_per_second": film.paced(config)}
        self._filming = self._extra | paced
        modules = [*MODULES, *(OF_KIND[kind] for kind in vision.takers if kind in OF_KIND)]
        self._pool = Pool(processes, seconds=seconds, modules=modules)
        self._turns = PerClient(max(1, processes - 1))
        self._making: dict[bytes, asyncio.Future[None]] = {}  # by digest
        self._shelf = Shelf(kept)
        self._apart = apart
        self._bytes: Counter[str] = Counter()  # by client
        self._lines = PerClient(1)  # who waits for room
        self._freed = asyncio.Event()
        self.encoding: Encoding | None = None  # where features are made, if that is not in the workers

    async def wake(self) -> None:
        """Start a process, which imports transformers for seconds: no picture has to wait for that."""
        with suppress(BadRequest):
            settings = self._settings_of(self._vision.kind, self._sizes)
            await self._pool.run(WAKE, self._processor, settings, result=type(None))

    def _asked(self, sizes: Mapping[str, Any], several: bool = False, client: str = "") -> Asked:
        """Raises InvalidField, UnsupportedField."""
        given = self._sizes | checked_sizes(self._vision, sizes)
        said = json.dumps([given, several], sort_keys=True).encode()
        mark = hashlib.sha256(said).digest() if given or several else b""
        whose = hashlib.sha256(client.encode()).digest() if self._apart else b""
        return Asked(mark, whose, given, several)

    def _settings_of(self, kind: str, given: Mapping[str, Any]) -> str:
        """Those of the files with ``given`` ones: JSON."""
        if kind == "audio":
            return json.dumps(dict(self._settings.sounds))
        videos = kind == "video"
        known = self._settings.videos if videos else self._settings.images
        hidden = {name for each in given for name in BEFORE.get(each, ())}
        known = {name: known[name] for name in known if name not in hidden}
        own = {name: given[name] for name in given if videos or name not in OF_VIDEOS}
        return json.dumps(known | own)

    def known(self, source: bytes, sizes: Mapping[str, Any], several: bool) -> Prepared | None:
        """What is kept of the thing in a file, by the file's digest, as ``prepare`` would give it to a prompt
        that has ``several``. It takes no room, so whoever has it may wait for some."""
        self._shelf.asked += 1
        if (shown := self._shelf.shows(source)) is None:
            return None
        try:
            asked = self._asked(sizes, self._vision.alone and several)
        except BadRequest:
            return None  # ``prepare`` tells why
        found = self._shelf.lend(asked.digest_of(shown))
        self._shelf.found += found is not None
        return found

    def kept(self) -> tuple[int, int, int]:
        """Files that were looked for, those found, and bytes of what lies there."""
        return self._shelf.asked, self._shelf.found, self._shelf.bytes

    def came(self, source: bytes, medium: Medium) -> None:
        """This is in a file with the digest ``source``."""
        self._shelf.came(source, Shown(medium.digest, kind_of(medium)))

    async def prepare(
        self,
        pictures: Sequence[Medium | Prepared],
        client: str,
        sizes: Mapping[str, Any] = MappingProxyType({}),
        window: Window | None = None,
    ) -> list[Prepared]:
        """In their order, also those that are ``known``; ``window``: the part that is wanted of sounds that
        are heard window by window. What a request has already is had without waiting, since others may wait
        for its room. Raises as ``_whole`` does."""
        if window is None:
            return await self._whole(pictures, client, sizes)
        asked = self._asked(sizes, client=client)
        there = [self._shelf.get(digest_of(picture, asked)) for picture in pictures]
        whole = [one for one in there if one is not None]
        if len(whole) < len(pictures):
            whole = await self._whole(pictures, client, sizes)
        return [windowed(one, window) for one in whole]

    async def _whole(
        self, pictures: Sequence[Medium | Prepared], client: str, sizes: Mapping[str, Any]
    ) -> list[Prepared]:
        """In their order. ``sizes``: see ``model/vision/sizes.py``. Where there is no room, those of a client
        wait in a line. Raises what the pool raises, InvalidField, UnsupportedField and Overloaded."""
        several = self._vision.alone and len(pictures) > 1
        asked = self._asked(sizes, several, client)
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
        self, pictures: Sequence[Medium | Prepared], client: str, asked: Asked, end: float
    ) -> list[Prepared]:
        """``_all`` as soon as there is room. Raises TimeoutError at the ``end``."""
        while (made := await self._all(pictures, client, asked)) is None:
            self._freed.clear()
            async with asyncio.timeout_at(end):
                await self._freed.wait()
        return made

    async def _all(
        self, pictures: Sequence[Medium | Prepared], client: str, asked: Asked
    ) -> list[Prepared] | None:
        """None if there is no room for one: nobody keeps some while waiting for others, so whoever waits gets
        room in the end. Raises InvalidField if there never is."""
        made = {picture.digest: picture for picture in pictures if isinstance(picture, Prepared)}
        turn = self._turns.of(client)
        for picture in pictures:
            if not isinstance(picture, Prepared) and picture.digest not in made:
                try:
                    async with turn:
                        made[picture.digest] = await self._one(picture, client, asked)
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

    async def _one(self, picture: Medium, client: str, asked: Asked) -> Prepared:
        digest = digest_of(picture, asked)
        while True:
            known = self._shelf.get(digest)
            if known is not None:
                return known
            if (making := self._making.get(digest)) is None:
                break
            await asyncio.wait([making])
        self._making[digest] = made = asyncio.get_running_loop().create_future()
        try:
            return await self._made(picture, digest, client, asked)
        finally:
            del self._making[digest]
            made.set_result(None)

    async def _made(self, picture: Medium, digest: bytes, client: str, asked: Asked) -> Prepared:
        if self._bytes[client] > TOGETHER // 2 or self._bytes.total() > TOGETHER:
            raise Full
        made = Made(kind_of(picture))
        try:
            fields = await self._pool.run(*self._task(picture, asked), made.path, MOST, result=list[Fields])
            if self.encoding is not None:
                fields += await self._features(self.encoding, digest, fields, made.path)
        except BadRequest as error:
            if error.param is None:  # it takes too much of something
                error.message = f"a {THINGS[made.kind]} cannot be prepared: {error.message}"
                error.param = "messages"
            raise
        made.arrays = [Array(*entry) for entry in fields]
        self._bytes[client] += made.size
        return self._shelf.put(digest, made, partial(self._gone, made.size, client))

    def _task(self, picture: Medium, asked: Asked) -> tuple[Any, ...]:
        """Of a process: the function, and all but its last two arguments."""
        settings = self._settings_of(kind_of(picture), asked.sizes)
        if isinstance(picture, Video):
            return PREPARE_VIDEO, picture, self._film, settings, self._filming
        if isinstance(picture, Sound):
            hearing = self._vision.hearing
            assert hearing is not None
            prepare = PREPARE_LOG_MEL if hearing.crossed else PREPARE_SOUNDS[hearing.heard]
            return prepare, picture, hearing.processor_of(self._settings), settings
        return PREPARE, picture, self._processor, settings, self._extra, asked.several

    async def _features(
        self, encoding: Encoding, digest: bytes, fields: list[Fields], file: str
    ) -> list[Fields]:
        """Have another server make them, and write them behind what is in the file."""
        told = [field[:4] for field in fields]
        data = await _to_its_end(Path(file).read_bytes)
        arrays, more = joined(await encoding.features(digest, told, data))
        begin = -(-len(data) // ALIGNED) * ALIGNED

        def write() -> None:
            with open(file, "r+b") as out:
                out.seek(begin)
                out.write(more)

        await _to_its_end(write)
        return [(name, kind, shape, begin + first, []) for name, kind, shape, first in arrays]

    def _gone(self, size: int, client: str) -> None:
        self._bytes[client] -= size
        if not self._bytes[client]:
            del self._bytes[client]
        self._freed.set()

    async def close(self) -> None:
        await self._pool.close()


def kind_of(picture: Medium) -> str:
    return {Sound: "audio", Video: "video"}.get(type(picture), "image")


def digest_of(picture: Medium | Prepared, asked: Asked) -> bytes:
    """Of what is made of it."""
    if isinstance(picture, Prepared):
        return picture.digest
    return asked.digest_of(Shown(picture.digest, kind_of(picture)))


def windowed(whole: Prepared, window: Window) -> Prepared:
    """A part of a spectrogram, which begins elsewhere in the same file."""
    (log_mel,) = whole.arrays
    frames, width = log_mel.shape
    first, end = window.first, min(window.end, frames)
    part = Array(log_mel.name, log_mel.dtype, [end - first, width], log_mel.first + 4 * width * first)
    digest = hashlib.sha256(whole.digest + struct.pack("<qq", first, end)).digest()
    made = Prepared(digest, whole.file, [part])
    finalize(made, id, whole)  # which is there, with its file, as long as the part is
    return made


async def _to_its_end(work: Callable[[], T]) -> T:
    """In a thread. Whoever is cancelled waits for it, or it might find another file under the same number."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
