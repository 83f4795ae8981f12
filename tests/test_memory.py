"""Memory that was freed goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

import pytest

from sgla import memory
from sgla.observe.memory import MemoryWatch

pytestmark = pytest.mark.skipif(not memory.CAN, reason="needs glibc")

CHILD = """
from sgla import memory
memory.return_memory_early()
blocks = [bytearray(3000) for _ in range(40_000)]
kept = blocks[::100]  # so that no heap shrinks by itself
del blocks
before = memory.resident()
memory.give_back()
print(before - memory.resident())
"""


async def test_what_was_freed_goes_back() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    assert int(told) > 40 << 20


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([100, 150, 200, *([200] * 8), 300, *([300] * 4), *([101] * 9)], [3, 5, 9, 12, 14]),
        # Slow growth behind long pauses.
        ([100, *([150] * 15), *range(151, 165), *([101] * 9)], [2, 4, 8, 16, 26, 28]),
    ],
)
async def test_it_is_given_back_after_growth_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, looks: list[int], expected: list[int]
) -> None:
    given: list[int] = []
    look = -1

    def resident() -> int:
        nonlocal look
        look += 1
        return looks[min(look, len(looks) - 1)] << 20

    monkeypatch.setattr(memory, "resident", resident)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(look))
    monkeypatch.setattr("sgla.observe.memory.INTERVAL", 0.001)
    watch = MemoryWatch()
    while look < len(looks):
        await asyncio.sleep(0.001)
    watch.close()
    assert given == expected


async def test_what_failed_requests_leave_is_collected_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """As an error and its traceback refer to each other."""

        def __init__(self) -> None:
            self.itself = self

    held = weakref.ref(Held())
    given: list[object] = []
    looked: list[int] = []
    monkeypatch.setattr(memory, "resident", lambda: (200 if looked else 100) << 20)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(held()))
    monkeypatch.setattr("sgla.observe.memory.INTERVAL", 0.001)
    gc.disable()
    try:
        watch = MemoryWatch()
        looked.append(1)
        while not given:
            await asyncio.sleep(0.001)
        watch.close()
    finally:
        gc.enable()
    assert given[0] is None
