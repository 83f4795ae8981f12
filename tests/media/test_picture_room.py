"""What a tower reads of pictures, in memory that workers open."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgla.actors.pictures import PictureRoom
from sgla.config import Config
from sgla.errors import BadRequest, ConfigError, InvalidField, Overloaded
from sgla.hub.source import ModelSource
from sgla.media import by_name, prepare
from sgla.media.picture import Picture
from sgla.media.pool import Died
from sgla.model.vision.llava import LLAVA
from sgla.model.vision.llava_next import LLAVA_ONEVISION
from sgla.model.vision.qwen2_vl import QWEN2_VL
from sgla.model.vision.served import vision_of
from sgla.model.vision.sizes import checked_sizes
from sgla.model.vision.spec import Settings

SIZE = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
MADE = {"pixel_values": np.arange(6, dtype=np.float32).reshape(1, 6), "grid": np.array([[1, 2]])}


class Here:
    """The pool, without a process."""

    def __init__(self) -> None:
        self.asked = 0

    async def run(self, function: str, *args: Any, result: Any) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        return prepare.prepare(*args)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> PictureRoom:
    monkeypatch.setattr(prepare, "arrays_of", lambda *args: MADE)
    room = PictureRoom(LLAVA, {}, Settings(SIZE, {}))
    monkeypatch.setattr(room, "_pool", Here())
    return room


def files() -> list[str]:
    """Of pictures, that this process has."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [target for link in links if "memfd:picture" in (target := os.path.realpath(link))]


def pictures(*colours: int) -> list[Picture]:
    return [Picture.of(1, 1, bytes([colour] * 3)) for colour in colours]


async def test_a_picture_is_prepared_once_and_lies_there_as_long_as_somebody_has_it(
    room: PictureRoom,
) -> None:
    made = await room.prepare(pictures(1, 2, 1), "a")
    assert made[0] is made[2]
    again = await room.prepare(pictures(2), "a")
    assert again == [made[1]]
    assert room._pool.asked == 2  # type: ignore[attr-defined]
    values, grid = made[0].arrays
    data = Path(made[0].file).read_bytes()
    assert np.frombuffer(data, values.dtype, 6, values.first).tolist() == list(range(6))
    assert (grid.values, grid.shape) == ([1, 2], [1, 2])
    file = made[0].file
    del made, again
    gc.collect()
    assert not os.path.exists(file)
    assert not room._bytes


async def test_what_does_not_fit_is_refused_and_leaves_nothing(
    room: PictureRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files()
    monkeypatch.setattr("sgla.actors.pictures.MOST", 8)
    with pytest.raises(InvalidField, match="send a smaller one"):
        await room.prepare(pictures(3), "a")
    monkeypatch.setattr("sgla.actors.pictures.MOST", 800)
    monkeypatch.setattr("sgla.actors.pictures.TOGETHER", 400)
    with pytest.raises(InvalidField, match="send fewer or smaller ones"):
        await room.prepare(pictures(*range(9)), "a")
    gc.collect()
    assert files() == before


async def test_a_client_with_many_pictures_leaves_a_process_to_others(room: PictureRoom) -> None:
    under_way: list[int] = []
    ends = asyncio.Event()

    async def run(function: str, picture: Picture, *args: Any, result: Any) -> Any:
        under_way.append(picture.pixels[0])
        await ends.wait()
        return prepare.prepare(picture, *args)

    room._pool.run = run  # type: ignore[method-assign]
    many = [asyncio.ensure_future(room.prepare(pictures(colour, colour + 1), "a")) for colour in (1, 3)]
    other = asyncio.ensure_future(room.prepare(pictures(9), "b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert under_way == [1, 9]
    ends.set()
    assert len(await other) == 1
    assert [len(made) for made in await asyncio.gather(*many)] == [2, 2]


async def test_half_of_the_room_is_for_others(room: PictureRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = await room.prepare(pictures(1), "a")
    monkeypatch.setattr("sgla.actors.pictures.TOGETHER", room._bytes["a"] + 1)
    monkeypatch.setattr("sgla.actors.pictures.PATIENCE", 0.01)
    with pytest.raises(Overloaded, match=r"no room within 0\.01 s"):
        await room.prepare(pictures(2), "a")
    assert len(await room.prepare(pictures(3), "b")) == len(kept) == 1


async def test_requests_wait_for_room_in_a_line(room: PictureRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that would fill it together, each with a part of it, do not stop each other."""
    monkeypatch.setattr("sgla.actors.pictures.TOGETHER", 6 * 80)
    order: list[str] = []

    async def asked(name: str, *colours: int) -> None:
        made = await room.prepare(pictures(*colours), "a")
        assert len(made) == len(colours)
        assert room._bytes["a"] <= 4 * 80
        order.append(name)
        await asyncio.sleep(0.01)

    given = {"first": (1, 2, 3), "second": (4, 5, 6), "third": (7,), "gone": (8,), "fourth": (9,)}
    tasks = {name: asyncio.ensure_future(asked(name, *colours)) for name, colours in given.items()}
    for _ in range(3):
        await asyncio.sleep(0)
    tasks.pop("gone").cancel()
    await asyncio.wait_for(asyncio.gather(*tasks.values()), 5)
    assert sorted(order) == ["first", "fourth", "second", "third"]
    assert not room._bytes


async def test_what_prepares_is_started_before_a_picture_comes(
    room: PictureRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def run(function: str, *args: Any, result: Any) -> None:
        asked.append((function, args))
        raise Died("its process ended")  # which the first picture will tell of

    monkeypatch.setattr(room._pool, "run", run)
    await room.wake()
    [(function, (name, settings))] = asked
    assert function == "sgla.media.prepare:wake"
    prepare.wake(name, settings)
    assert by_name.processor_of.cache_info().currsize


ROWS = Settings({"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 2048}}, {})


async def test_sizes_make_another_picture_of_it(tmp_path: Path) -> None:
    """Of the server, and of a request, whose own count for more."""
    picture = Picture.of(48, 64, bytes(48 * 64 * 3))

    async def grid(room: PictureRoom, **sizes: Any) -> tuple[list[int], bytes]:
        room._pool = Here()  # type: ignore[assignment]
        [made] = await room.prepare([picture], "a", sizes)
        return next(array.values for array in made.arrays if array.name == "image_grid_thw"), made.digest

    plain, small = PictureRoom(QWEN2_VL, {}, ROWS), PictureRoom(QWEN2_VL, {}, ROWS, {"max_pixels": 1024})
    whole, digest = await grid(plain)
    assert whole == [1, 8, 12]
    assert digest == picture.digest
    less, other = await grid(plain, max_pixels=1024)
    assert less == [1, 6, 8]
    assert (await grid(small)) == (less, other)
    assert other != digest
    assert (await grid(plain, size={"shortest_edge": 256, "longest_edge": 1024}))[0] == less
    more, _ = await grid(small, max_pixels=4096)
    assert more == [1, 12, 16]
    assert (await grid(plain, min_pixels=4096, max_pixels=8192))[0] == [1, 14, 20]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"do_resize": False}, "with 'do_resize' is not supported.* takes min_pixels, max_pixels, size"),
        ({"max_pixels": 0}, "max_pixels must be a whole number"),
        ({"max_pixels": "5"}, "max_pixels must be a whole number"),
        ({"size": {"depth": 3}}, "size must have some of shortest_edge"),
        ({"size": {"shortest_edge": 1.5}}, r"size\.shortest_edge must be"),
        ({"image": 3}, "'image' must be an object"),
        ({"image": {"max_pixels": 9}, "fps": 2}, "with 'image' is not supported"),
    ],
)
async def test_other_settings_of_processors_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why) as found:
        await PictureRoom(QWEN2_VL, {}, ROWS).prepare(pictures(1), "a", given)
    assert found.value.param == "mm_processor_kwargs"
    for inside in ("image", "images_kwargs"):  # as SGLang and transformers have it
        assert checked_sizes(QWEN2_VL, {inside: {"max_pixels": 9}}) == {"max_pixels": 9}
    with pytest.raises(BadRequest, match="takes none"):
        checked_sizes(LLAVA, {"max_pixels": 9})


@pytest.mark.parametrize(
    ("architecture", "given", "why"),
    [
        ("LlamaForCausalLM", {"max_pixels": 9}, "is for models that take pictures"),
        ("Qwen2VLForConditionalGeneration", {"do_resize": False}, "--mm-processor-kwargs: .*'do_resize'"),
    ],
)
def test_a_start_refuses_what_no_request_may_have(
    architecture: str, given: dict[str, Any], why: str, tmp_path: Path
) -> None:
    source = ModelSource("dummy", tmp_path, (), {"architectures": [architecture]}, {})
    with pytest.raises(ConfigError, match=why):
        vision_of(Config(mm_processor_kwargs=given), source)


async def test_a_client_leaves_a_process_to_others_and_a_picture_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = PictureRoom(LLAVA, {}, Settings(SIZE, {}), processes=3)
    asked: list[tuple[bytes, asyncio.Future[None]]] = []

    async def run(function: str, picture: Picture, *rest: Any, result: Any) -> list[Any]:
        asked.append((picture.pixels[:1], asyncio.get_running_loop().create_future()))
        await asked[-1][1]
        return []

    monkeypatch.setattr(room._pool, "run", run)
    tasks = [asyncio.ensure_future(room.prepare(pictures(colour), "a")) for colour in (1, 2, 3, 1)]
    tasks.append(asyncio.ensure_future(room.prepare(pictures(1), "b")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert [colour for colour, _ in asked] == [b"\1", b"\2"], "and b waits for what a has begun"
    tasks[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(colour for colour, _ in asked[2:]) == [b"\1", b"\3"], "b begins it anew"
    for _, done in asked:
        if not done.done():
            done.set_result(None)
    found = await asyncio.gather(*tasks[1:])
    assert found[2] == found[3]
    assert len(asked) == 4


async def test_one_of_several_pictures_is_another_than_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in LLaVA-OneVision; where a family makes no difference, they are the same."""
    asked: list[bool] = []
    monkeypatch.setattr(prepare, "arrays_of", lambda *args: asked.append(args[-1]) or MADE)
    for vision, same in ((LLAVA, True), (LLAVA_ONEVISION, False)):
        room = PictureRoom(vision, {}, Settings(SIZE, {}))
        monkeypatch.setattr(room, "_pool", Here())
        (alone,) = await room.prepare(pictures(1), "")
        first, _ = await room.prepare(pictures(1, 2), "")
        assert (first.digest == alone.digest) == same
    assert asked == [False, False, False, True, True]


async def test_what_takes_too_much_says_so_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    room = PictureRoom(LLAVA, {}, Settings(SIZE, {}))

    async def run(*task: Any, result: Any) -> list[Any]:
        raise BadRequest("it takes more than 1024 MiB of memory")

    monkeypatch.setattr(room._pool, "run", run)
    with pytest.raises(BadRequest) as found:
        await room.prepare(pictures(1), "a")
    assert found.value.message.startswith("a picture cannot be prepared: it takes more than 1024 MiB")
    assert found.value.param == "messages"
