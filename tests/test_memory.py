"""Memory that was freed goes back to the system."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sgla import memory
from sgla.observe.memory import MemoryWatch

pytestmark = pytest.mark.skipif(not memory.CAN, reason="needs glibc")

CHILD = """
from sgla import memory
memory.keep_little()
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


async def test_it_is_given_back_once_after_each_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 150, 200, 200, 120, 123, 123, 90, 90, 105, 105, 99, 99])
    given: list[int] = []
    now = 0

    def resident() -> int:
        nonlocal now
        now = next(sizes, now)
        return now << 20

    monkeypatch.setattr(memory, "resident", resident)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(now))
    monkeypatch.setattr("sgla.observe.memory.INTERVAL", 0.001)
    watch = MemoryWatch()
    while next(iter(given[1:]), None) is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    watch.close()
    assert given == [200, 105]
