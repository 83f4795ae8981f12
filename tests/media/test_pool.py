"""The processes for media: what they do, and that their limits hold."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from sgla.errors import BadRequest, InvalidField
from sgla.media.crossing import LARGE, Memory, Record, packed, unpacked
from sgla.media.picture import Picture
from sgla.media.pool import Died, Pool, _Process

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


async def test_a_process_that_dies_between_tasks_costs_none(pool: Pool) -> None:
    first = await pool.run(f"{HERE}:pid", result=int)
    [idle] = pool._idle
    os.kill(first, signal.SIGKILL)
    while idle.alive:
        await asyncio.sleep(0.01)
    assert await pool.run(f"{HERE}:pid", result=int) != first


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_is_at_work_when_a_task_has_ended(pool: Pool, cancelled: bool) -> None:
    """The files that it was to write may be others' then."""
    first = await pool.run(f"{HERE}:pid", result=int)
    running = asyncio.ensure_future(pool.run(f"{HERE}:loop", result=None))
    await asyncio.sleep(0)
    if cancelled:
        running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    with pytest.raises(asyncio.CancelledError if cancelled else Died):
        await running


async def test_nobody_waits_for_a_start_if_a_process_is_free_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(processes=3, seconds=5.0, modules=["tests.media.test_pool"])
    try:
        first = await pool.run(f"{HERE}:pid", result=int)
        start, begun, may = _Process.start, [0], asyncio.Event()

        async def slow(self: _Process, *args: Any) -> None:
            begun[0] += 1
            await may.wait()
            await start(self, *args)

        monkeypatch.setattr(_Process, "start", slow)
        found = await asyncio.gather(*(pool.run(f"{HERE}:pid", result=int) for _ in range(5)))
        assert (set(found), begun) == ({first}, [2])
        busy = asyncio.ensure_future(pool.run(f"{HERE}:loop", result=None))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(pool.run(f"{HERE}:pid", result=int)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        may.set()
        others = set(await asyncio.gather(*waiting[1:]))
        assert first not in others
        busy.cancel()
        assert begun == [2]
    finally:
        await pool.close()


async def test_a_start_that_fails_costs_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, start, left = Pool(processes=1, modules=["tests.media.test_pool"]), _Process.start, [1]

    async def fails(self: _Process, *args: Any) -> None:
        if left.pop():
            left.append(0)
            raise OSError("no memory")
        await start(self, *args)

    monkeypatch.setattr(_Process, "start", fails)
    try:
        tasks = [asyncio.ensure_future(pool.run(f"{HERE}:pid", result=int)) for _ in range(2)]
        with pytest.raises(Died, match="its process ended"):
            await tasks[0]
        assert await tasks[1] > 0
    finally:
        await pool.close()


async def test_a_process_that_cannot_be_made_costs_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, make, left = Pool(processes=1, modules=["tests.media.test_pool"]), _Process.__init__, [1]

    def fails(self: _Process) -> None:
        if left:
            left.pop()
            raise OSError("too many open files")
        make(self)

    monkeypatch.setattr(_Process, "__init__", fails)
    try:
        with pytest.raises(OSError, match="too many open files"):
            await pool.run(f"{HERE}:pid", result=int)
        async with asyncio.timeout(60):
            assert await pool.run(f"{HERE}:pid", result=int) > 0
    finally:
        await pool.close()


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
