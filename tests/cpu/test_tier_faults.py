"""Copies by threads whose files fail, hang and are dropped at random: what is told to have come is what was
written under its key, what is given up touches the device no more, and all comes to an end."""

from __future__ import annotations

import errno
import threading
import time
from random import Random

import numpy as np
import pytest

from sgla.messages import KEY, Copy, int32
from sgla.worker import tiers
from sgla.worker.tiers import FileTier, HostMemory, Units

UNITS, PLACES, WIDTH = 12, 9, 8


def key_of(text: int) -> bytes:
    return text.to_bytes(KEY, "big")


class Faulty(Units):
    """Units in files that are none. ``gate``: what hangs waits for it."""

    def __init__(self, seed: int, gate: threading.Event) -> None:
        self.files: dict[int, tuple[bytes, bytes]] = {}
        self._draw, self._lock, self._gate = Random(seed), threading.Lock(), gate
        self.calm = False

    def _may_fail(self) -> None:
        with self._lock:
            chance = 1.0 if self.calm else self._draw.random()
        if chance < 0.02:
            self._gate.wait(5)
        elif chance < 0.06:
            raise OSError(errno.EIO, "broken")
        elif chance < 0.2:
            time.sleep(0.002)

    def read(self, unit: int, key: bytes) -> bytes:
        self._may_fail()
        found, data = self.files.get(unit, (b"", b""))
        if found != key:
            raise OSError("it is not what was written")
        return data

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        self._may_fail()
        with self._lock:
            full = not self.calm and self._draw.random() < 0.03
        if full:
            raise OSError(errno.ENOSPC, "full")
        self.files[unit] = key, bytes(data)

    def erase(self, unit: int) -> None:
        self._may_fail()
        self.files.pop(unit, None)

    def find(self, keys: list[bytes]) -> bytes:
        self._may_fail()
        there = {key for key, _ in self.files.values()}
        return bytes(key in there for key in keys)

    def close(self) -> None: ...


class World:
    """Two groups of units. ``texts``, ``beside``: of each unit and place, as a scheduler believes, or 0.
    What a copy has is not touched until it is told of; then all of it may be used for something else."""

    def __init__(self, seed: int, abreast: int) -> None:
        self.draw, self.gate = Random(seed), threading.Event()
        self.memory = [np.zeros((UNITS, WIDTH), np.uint8) for _ in range(2)]
        self.kept = [Faulty(seed + g, self.gate) for g in range(2)]
        memory = [HostMemory([m]) for m in self.memory]
        memory[0].batch = abreast
        self.tier = FileTier("--kv-disk", self.kept, memory, 2, abreast)
        self.texts = [[0] * UNITS for _ in range(2)]
        self.beside = [[0] * (PLACES + 1) for _ in range(2)]
        self.under_way: dict[int, tuple[bool, list[list[int]], list[list[int]]]] = {}
        self.copies = self.last = self.came = 0

    def some(self, of_device: bool, texts: list[list[int]], used: bool) -> list[list[int]]:
        found, side = [], 1 if of_device else 2
        for g, own in enumerate(texts):
            busy = {x for copy in self.under_way.values() for x in copy[side][g]}
            there = [
                i for i, text in enumerate(own) if (i or of_device) and i not in busy and (not used or text)
            ]
            found.append(self.draw.sample(there, min(len(there), self.draw.randrange(4))))
        return found

    def write(self) -> None:
        """Somebody uses a unit that no copy has."""
        for g, units in enumerate(self.some(True, self.texts, False)):
            for unit in units:
                self.last = self.last % 250 + 1
                self.texts[g][unit] = self.last
                self.memory[g][unit] = self.last

    def copy(self) -> None:
        inward = self.draw.random() < 0.5
        sources = self.some(not inward, self.beside if inward else self.texts, True)
        targets = self.some(inward, self.texts if inward else self.beside, False)
        pairs = [list(zip(s, t)) for s, t in zip(sources, targets)]
        sources, targets = ([[pair[i] for pair in group] for group in pairs] for i in range(2))
        named = self.beside if inward else self.texts
        keys = [b"".join(key_of(named[g][s]) for s in own) for g, own in enumerate(sources)]
        self.copies += 1
        units, places = (targets, sources) if inward else (sources, targets)
        self.under_way[self.copies] = inward, units, places
        for side, own in ((self.texts, targets), (self.beside, targets)):
            if (side is self.texts) == inward:
                for g, ids in enumerate(own):
                    for i in ids:
                        side[g][i] = 0
        ends = ("disk", "device") if inward else ("device", "disk")
        columns = [int32(ids) for ids in sources], [int32(ids) for ids in targets]
        self.tier.begin(Copy(self.copies, *ends, *columns, keys))

    def drop(self) -> None:
        inward = [number for number, copy in self.under_way.items() if copy[0]]
        if inward:
            self.tier.drop(self.draw.choice(inward))

    def hear(self) -> None:
        for moved in self.tier.ended():
            inward, units, places = self.under_way.pop(moved.transfer)
            for g, (own, there) in enumerate(zip(units, places)):
                for unit, place in zip(own, there) if moved.ok else ():
                    if not inward:
                        self.beside[g][place] = self.texts[g][unit]
                        continue
                    self.texts[g][unit] = self.beside[g][place]
                    self.came += 1
                    assert (self.memory[g][unit] == self.texts[g][unit]).all()
            for g, there in enumerate(places):
                for place in there if not moved.ok else ():
                    self.beside[g][place] = 0

    def check(self) -> None:
        """Nobody has written to what is not under way."""
        for g, texts in enumerate(self.texts):
            for unit, text in enumerate(texts):
                if text:
                    assert (self.memory[g][unit] == text).all()

    def end(self) -> None:
        """Who hangs goes on, and everybody comes to an end."""
        self.gate.set()
        for faulty in self.kept:
            faulty.calm = True
        due = time.monotonic() + 10
        while self.tier.under_way or any(not job.done.done() for job in self.tier._stuck):
            assert time.monotonic() < due, "a copy does not end"
            self.hear()
            self.check()
            time.sleep(0.001)
        assert not self.under_way
        self.check()


@pytest.mark.parametrize("abreast", [1, 3])
def test_random_faults(abreast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "PATIENCE", 0.03)
    came, gone = 0, 0
    for seed in range(6):
        world = World(seed, abreast)
        for i in range(200):
            world.draw.choice([world.write, world.copy, world.copy, world.hear, world.hear, world.drop])()
            if i % 40 == 39:
                world.gate.set()  # what hung is back
                time.sleep(0.002)
                world.gate.clear()
            if i % 10 == 0:
                world.check()
            time.sleep(0.0005)
        world.end()
        world.copy()  # it is used again
        while world.under_way:
            world.hear()
        world.tier.close()
        came, gone = came + world.came, gone + len(world.tier._warned)
    assert came > 50
    assert gone > 3
