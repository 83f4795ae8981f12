"""What was prepared of pictures, for requests that have them again."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from sgla.actors.pictures import PictureRoom
from sgla.actors.setup import make_pictures
from sgla.actors.shelf import Made, Shelf
from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.media.picture import Picture
from sgla.media.sound import Sound
from sgla.messages import Array, Window
from sgla.model.hearing.whisper import WHISPER
from sgla.model.vision.llava_next import LLAVA_ONEVISION
from sgla.model.vision.qwen2_vl import QWEN2_VL
from sgla.model.vision.spec import Settings


def made(size: int) -> Made:
    one = Made("image")
    os.write(one.descriptor, bytes(size))
    one.arrays = [Array("values", "uint8", [size], 0)]
    return one


def put(shelf: Shelf, name: bytes, size: int) -> Any:
    return shelf.put(name, made(size), lambda: None)


def there(shelf: Shelf, *names: bytes) -> list[bool]:
    return [shelf.get(name) is not None for name in names]


def test_the_longest_unused_goes_first_and_what_is_in_use_stays() -> None:
    shelf = Shelf(30)
    for name in (b"a", b"b", b"c"):
        put(shelf, name, 10)
    a = shelf.get(b"a")
    assert a is not None
    assert os.path.getsize(a.file) == 10
    put(shelf, b"d", 10)  # in place of b, which was not used since
    assert there(shelf, b"a", b"b", b"c", b"d") == [True, False, True, True]
    put(shelf, b"e", 20)  # in place of c and d: a is used
    assert there(shelf, b"a", b"c", b"d", b"e") == [True, False, False, True]
    assert shelf.bytes == 30
    e = shelf.get(b"e")
    f = put(shelf, b"f", 10)
    assert there(shelf, b"f", b"a", b"e") == [True, True, True]
    assert shelf.lend(b"f") is None, "there is no room for it, but a request has it"
    file = f.file
    del f
    assert not os.path.exists(file)
    assert shelf.get(b"f") is None
    put(shelf, b"g", 31)
    assert there(shelf, b"a", b"e", b"g") == [True, True, False]
    del a, e
    put(shelf, b"h", 30)
    assert there(shelf, b"a", b"e", b"h") == [False, False, True]


def test_what_goes_is_there_until_its_request_ends() -> None:
    shelf, ended = Shelf(10), list[str]()
    mine = shelf.put(b"a", made(10), lambda: ended.append("a"))
    lent = shelf.lend(b"a")
    assert lent is not None
    assert lent == mine
    assert shelf.lend(b"a") is lent
    del mine
    assert ended == ["a"], "of its room; it lies on the shelf, which has its own"
    put(shelf, b"b", 10)
    assert there(shelf, b"a", b"b") == [True, False]
    file = lent.file
    del lent
    put(shelf, b"b", 10)
    assert not os.path.exists(file)


def test_things_are_no_more_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (12, 12))
    shelf = Shelf(1 << 20)
    for i in range(9):
        put(shelf, bytes([i]), 1)
    assert there(shelf, *(bytes([i]) for i in range(9))) == [False] * 6 + [True] * 3


PIXELS = Picture.of(28, 28, bytes(3 * 28 * 28))
ROWS = Settings({"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}}, {})


class Pool:
    """Makes a byte of everything."""

    asked = 0

    async def run(self, function: str, *args: Any, result: Any) -> Any:
        self.asked += 1
        with open(args[-2], "wb") as file:
            file.write(b"1")
        return [("values", "uint8", [1], 0, [])]


async def test_what_is_known_of_a_file_depends_on_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    room = PictureRoom(QWEN2_VL, {}, ROWS, kept=1 << 20)
    monkeypatch.setattr(room, "_pool", pool := Pool())
    assert room.known(b"file", {}, False) is None
    [first] = await room.prepare([PIXELS], "a")
    assert room.known(b"file", {}, False) is None, "nobody has said what it shows"
    room.came(b"file", PIXELS)
    assert room.known(b"file", {}, False) == room.known(b"file", {}, True) == first
    assert room.known(b"file", {"max_pixels": 9000}, False) is None
    assert room.known(b"file", {"no_such": 1}, False) is None
    [small] = await room.prepare([PIXELS], "a", {"max_pixels": 9000})
    assert room.known(b"file", {"max_pixels": 9000}, False) == small != first
    known = room.known(b"file", {}, False)
    assert known is not None
    # Beside one that has to be made, and for somebody else.
    other = Picture.of(28, 28, bytes([1]) * (3 * 28 * 28))
    both = await room.prepare([other, known, PIXELS], "b")
    assert [one.digest for one in both] == [other.digest, first.digest, first.digest]
    assert pool.asked == 3
    assert room.kept() == (8, 4, 3)
    assert room._bytes == {"a": 2, "b": 1}
    del first, small, both, known
    gc.collect()
    assert not room._bytes
    assert room.known(b"file", {}, False) is not None


async def test_one_of_several_is_another_and_sounds_have_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    room = PictureRoom(LLAVA_ONEVISION, {}, Settings({}, {}), kept=1 << 20)
    monkeypatch.setattr(room, "_pool", Pool())
    await room.prepare([PIXELS], "a")
    room.came(b"file", PIXELS)
    assert room.known(b"file", {}, False) is not None
    assert room.known(b"file", {}, True) is None
    sound = Sound.of(bytes(4))
    room.came(b"sound", sound)
    assert room.known(b"sound", {}, False) is None


async def test_nothing_is_kept_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    room = PictureRoom(QWEN2_VL, {}, ROWS)
    monkeypatch.setattr(room, "_pool", pool := Pool())
    room.came(b"file", PIXELS)
    for _ in range(2):
        await room.prepare([PIXELS], "a")
        assert room.known(b"file", {}, False) is None
    assert pool.asked == 2


@pytest.mark.parametrize("isolate", [False, True])
async def test_keys_may_have_pictures_of_their_own(
    isolate: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Features are found by digests: those of others would make an answer come earlier."""
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    config = {"architectures": ["Qwen2VLForConditionalGeneration"]}
    source = ModelSource("dummy", tmp_path, (), config, {})
    _, room = make_pictures(Config(api_key=["one", "two"], isolate_keys=isolate), source)
    assert room is not None
    monkeypatch.setattr(room, "_pool", pool := Pool())
    found = [(await room.prepare([PIXELS], name))[0] for name in ("a", "b", "a")]
    assert len({one.digest for one in found}) == pool.asked == (2 if isolate else 1)
    assert found[0] == found[2]
    sizes = {"max_pixels": 9000}
    others = await asyncio.gather(*(room.prepare([PIXELS], name, sizes) for name in ("a", "b", "a")))
    assert len({made[0].digest for made in others} | {one.digest for one in found}) == (4 if isolate else 2)
    room.came(b"file", PIXELS)
    assert (room.known(b"file", {}, False) is None) == isolate


async def test_keys_may_have_sounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window by window."""
    room = PictureRoom(WHISPER, {}, Settings({}, {}), apart=True)

    async def run(function: str, *args: Any, result: Any) -> Any:
        with open(args[-2], "wb") as file:
            file.write(bytes(4 * 8))
        return [("log_mel", "float32", [4, 2], 0, [])]

    monkeypatch.setattr(room._pool, "run", run)
    sound, window = Sound.of(bytes(4)), Window(1, 3)
    found = [(await room.prepare([sound], name, window=window))[0] for name in ("a", "b", "a")]
    assert found[0].digest == found[2].digest != found[1].digest
    assert found[0].file == found[2].file != found[1].file
