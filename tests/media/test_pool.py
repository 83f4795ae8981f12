"""The processes for media: what they do, and that their limits hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec
import pytest

from sgla.errors import BadRequest, InvalidField
from sgla.media.crossing import LARGE, Memory, Record, packed, unpacked
from sgla.media.picture import Picture
from sgla.media.pool import Died, Pool

HERE = "tests.media.test_pool"


def flipped(picture: Picture, times: int) -> Picture:
    return Picture.of(picture.width, picture.height, picture.pixels[:: 1 if times % 2 == 0 else -1])


def pid() -> int:
    print("no answer")
    return os.getpid()


def hoard(size: int) -> int:
    return len(bytearray(size))


def loop() -> None:
    while True:
        pass


def refuse() -> None:
    raise InvalidField("send another", param="image")


def die() -> None:
    os._exit(3)


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr("sgla.media.pool.BUSY", 100)  # the machine may be busy
    pool = Pool(processes=1, memory=256 << 20, seconds=0.5, modules=["tests.media.test_pool"])
    yield pool
    await pool.close()


async def test_tasks_within_and_beyond_the_limits(pool: Pool) -> None:
    picture = Picture.of(2, 1, b"abcdef")
    turned = await pool.run(f"{HERE}:flipped", picture, 3, result=Picture)
    assert turned == Picture.of(1, 2, b"fedcba")
    assert turned.digest != picture.digest
    first = await pool.run(f"{HERE}:pid", result=int)
    with pytest.raises(InvalidField, match="send another") as refused:
        await pool.run(f"{HERE}:refuse", result=None)
    assert refused.value.param == "image"
    with pytest.raises(BadRequest, match="more than 256 MiB of memory"):
        await pool.run(f"{HERE}:hoard", 1 << 30, result=int)
    assert await pool.run(f"{HERE}:pid", result=int) == first
    with pytest.raises(Died, match="its process ended"):
        await pool.run(f"{HERE}:die", result=None)
    second = await pool.run(f"{HERE}:pid", result=int)
    with pytest.raises(Died, match=r"more than 0.5 s"):
        await pool.run(f"{HERE}:loop", result=None)
    third = await pool.run(f"{HERE}:pid", result=int)
    assert len({first, second, third, os.getpid()}) == 4


async def test_a_cancelled_task_frees_its_place(pool: Pool) -> None:
    running = asyncio.ensure_future(pool.run(f"{HERE}:loop", result=None))
    waiting = asyncio.ensure_future(pool.run(f"{HERE}:pid", result=int))
    await asyncio.sleep(0)
    running.cancel()
    assert await waiting > 0
    assert running.cancelled()


@pytest.mark.parametrize("size", [0, 3, LARGE, 3 * LARGE + 1])
async def test_large_parts_cross_as_small_ones_do(pool: Pool, size: int) -> None:
    picture = Picture.of(1, size, bytes(range(256)) * (3 * size // 256) + bytes(3 * size % 256))
    assert await pool.run(f"{HERE}:flipped", picture, 0, result=Picture) == Picture.of(
        size, 1, picture.pixels
    )


def test_parts_that_are_missing_are_told() -> None:
    data, parts = packed({"a": [b"x" * LARGE, b"y"], "b": (bytearray(LARGE), 1)})
    record, memory = msgspec.msgpack.decode(data, type=Record), Memory()
    memory.write(parts)
    found = memory.read(record.sizes)
    assert unpacked(record, found, dict) == {"a": [b"x" * LARGE, b"y"], "b": [bytes(LARGE), 1]}
    with pytest.raises(EOFError):
        memory.read(record.sizes)
