"""Copies that are told of before they have ended: whoever reads what they bring finds it there, and nobody
writes to where they read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from late_streams import Waits, late

from sgla import clock
from sgla.messages import Copy, NewRow, RowSampling, StepPlan, int32
from sgla.worker import crossing, gpu_tiers
from sgla.worker.crossing import PASSED, SHARE, Chunk, Crossing, Route, Toll
from sgla.worker.gpu_tiers import HostTier

LAYERS, UNITS, PLACES, STAGED = 8, 24, 30, 64


def move_rows(targets: Any, sources: Any, sizes: Any) -> None:
    for ends in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*ends)


@contextmanager
def late_copies(row: int = 0, decodes: float = 0.0) -> Iterator[Waits]:
    """``row``: bytes from which on they cross without being staged beside decode steps, 0: none do;
    ``decodes``: how often there is one."""
    draw = Random(row)
    rows = {
        "ROW": row,
        "LONG": 2 * row + 6,
        "NEVER_STAGED": 3 * row + 9,
        "PIECE": 2 * STAGED,
        "in_batches": lambda: row > 0,
        "copy_rows": move_rows,
    }
    runs = patch.multiple(
        Toll,
        runs=property(lambda toll: draw.random() < decodes),
        busy=property(lambda toll: draw.random() < 0.5),
    )
    on_host = patch.object(crossing, "upload", torch.from_numpy)
    with late() as waits, patch.multiple(gpu_tiers, STAGED=STAGED, **rows), on_host, runs:
        yield waits


class Room:
    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)


class World:
    """A device with two cache groups, a tier beside it, and what a scheduler believes of both: of each group
    the text of each unit, and of each place. Who is under way is not touched."""

    def __init__(self, seed: int, split: bool = False) -> None:
        self.draw = Random(seed)
        widths = (3, 8)  # bytes of a unit in a layer
        made = torch.zeros(LAYERS, UNITS, widths[1], dtype=torch.uint8)  # at one distance from each other
        self.memory = [[torch.zeros(UNITS, widths[0], dtype=torch.uint8) for _ in range(LAYERS)], [*made]]
        rooms = [Room(w * LAYERS * (PLACES + 1)) for w in widths]
        staging = torch.zeros(2, 2, STAGED, dtype=torch.uint8)
        self.tier = HostTier(self.memory, rooms, staging, bands=3, split=split)
        self.tier._in._second.speed = self.draw.choice([0.05, 0.2, 1.0])
        self.device = [[0] * UNITS for _ in widths]
        self.beside = [[0] * (PLACES + 1) for _ in widths]
        self.texts = self.copies = 0
        self.under_way: dict[int, tuple[bool, list[list[int]], list[list[int]]]] = {}

    def free(self, number: int, of_device: bool) -> list[list[int]]:
        """Some of each group that no copy has which has not been told of."""
        found = []
        for g, count in enumerate((UNITS, UNITS) if of_device else (PLACES + 1, PLACES + 1)):
            busy = {
                x for _, units, places in self.under_way.values() for x in (units if of_device else places)[g]
            }
            there = [x for x in range(0 if of_device else 1, count) if x not in busy]
            found.append(self.draw.sample(there, min(number, len(there))))
        return found

    def copy(self) -> None:
        inward, number = self.draw.random() < 0.6, self.draw.randrange(1, 9)
        units, places = self.free(number, True), self.free(number, False)
        if self.draw.random() < 0.5:
            units, places = [sorted(column) for column in units], [sorted(column) for column in places]
        pairs = [list(zip(u, p)) for u, p in zip(units, places)]
        units, places = ([[pair[i] for pair in group] for group in pairs] for i in range(2))
        self.copies += 1
        slack = self.draw.choice([0.0, 1e9]) if inward else 0.0
        ends = ("host", "device", places, units) if inward else ("device", "host", units, places)
        source, target, sources, targets = ends
        columns = [int32(x) for x in sources], [int32(x) for x in targets]  # type: ignore[arg-type]
        self.under_way[self.copies] = inward, units, places
        self.tier.begin(Copy(self.copies, source, target, *columns, slack=slack))

    def hear(self) -> None:
        for moved in self.tier.ended():
            inward, units, places = self.under_way.pop(moved.transfer)
            for g, (own, there) in enumerate(zip(units, places)):
                for unit, place in zip(own, there):
                    if inward:
                        self.device[g][unit] = self.beside[g][place]
                    else:
                        self.beside[g][place] = self.device[g][unit]

    def step(self) -> None:
        """Reads some units layer by layer, and writes others."""
        read = self.free(self.draw.randrange(6), True)
        row = NewRow(slot=0, tokens=b"", prompt_len=1, pages=[int32(u) for u in read], sampling=RowSampling())
        plan = StepPlan(step=0, slots=b"", starts=b"", q_lens=b"", flags=b"", new=[row])
        late = self.tier.awaited(plan)
        for layer in range(LAYERS):
            kept = [tensors[layer] for tensors in self.memory]
            if late:
                self.tier.wait(late, kept)
            for g, units in enumerate(read):
                for unit in units:
                    assert self.memory[g][layer][unit].unique().tolist() == [self.device[g][unit]]
        self.tier.wait(late)
        for g, units in enumerate(read):
            for unit in units[: len(units) // 2]:
                self.texts = self.texts % 250 + 1
                self.device[g][unit] = self.texts
                for tensor in self.memory[g]:
                    tensor[unit] = self.texts

    def verify(self) -> None:
        while self.tier.under_way:
            self.hear()
        assert not self.under_way
        for g, tensors in enumerate(self.memory):
            for tensor in tensors:
                assert tensor.amin(1).tolist() == tensor.amax(1).tolist() == self.device[g]


def played(seed: int) -> int:
    """How often a step found a layer not to be there."""
    with late_copies(*((0, 0.0), (1, 1.0), (8, 0.5))[seed % 3]) as waits:
        world = World(seed, split=bool(seed // 3 % 2))
        for _ in range(150):
            world.draw.choice([world.copy, world.hear, world.hear, world.step, world.step])()
        world.verify()
    return waits.count


def test_random_copies_and_steps() -> None:
    assert sum(played(seed) for seed in range(40)) > 100


def test_what_is_settled_is_there_for_all() -> None:
    with late_copies():
        world = World(0)
        world.tier._sections[0].beside.fill_(7)
        units = [int32([3, 4]), int32([5])]
        other = Copy(2, "device", "disk", [int32([9]), int32([5])], [b"", b""])
        world.tier.begin(Copy(1, "host", "device", [int32([1, 2]), int32([1])], units, slack=1e9))
        told: list[Any] = []
        while not told:
            told = world.tier.ended()
        assert world.tier.under_way
        world.tier.settle_for([Copy(2, "device", "disk", [int32([9]), int32([6])], [b"", b""])])
        assert world.tier._early
        world.tier.settle_for([other])
        assert not world.tier._early
        assert not world.tier.ended()  # once
        while world.tier.under_way:
            assert not world.tier.ended()


@pytest.mark.parametrize(
    ("seconds", "done", "slack", "told"),
    [
        (1.0, 9, 0.0, False),  # nobody says how long the step is
        (1.0, 9, 0.2, True),  # 0.11 s are left, and 0.17 s of the step before it comes to the last band
        (1.0, 9, 0.1, False),
        (1.0, 1, 100.0, False),  # the first layers are not there
        (1.0, 2, 100.0, True),
        (0.01, 9, 0.019, False),  # the step is briefer than its launch would be
        (0.01, 9, 0.021, True),
        (1.0, 10, 0.0, True),
    ],
)
def test_when_a_copy_is_told_of(
    monkeypatch: pytest.MonkeyPatch, seconds: float, done: int, slack: float, told: bool
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 5.0 + seconds)
    one = Crossing(1, slack, total=10, firsts=2, done=done, begun=5.0, bands=6)
    assert one.may_be_told is told


def test_decode_steps_pay_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s, while chunks take 1 ms each and may be queued whenever somebody looks."""
    now, toll, begun = 5.0, Toll(), SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(clock, "now", lambda: now)

    def queued(seconds: float) -> int:
        nonlocal now
        count, end = 0, now + seconds
        while now < end:
            if not toll.due("in", begun):
                toll.take("in", 1e-3)
                count += 1
            now += 1e-3
        return count

    assert queued(1.0) == pytest.approx(1000, abs=2)  # beside nothing
    launched, running, over = (
        SimpleNamespace(begin=SimpleNamespace(query=lambda at=at: at > 0), done=at > 1) for at in range(3)
    )
    toll.beside(launched)
    assert queued(1.0) == pytest.approx(1000, abs=2)
    toll.beside(running)
    assert queued(10.0) == pytest.approx(10.0 * SHARE / 1e-3, abs=10)
    assert toll.due("in", SimpleNamespace(query=lambda: False)), "it would come behind what is launched"
    for _ in range(3):
        toll.beside(launched)
    assert queued(10.0) == pytest.approx(10.0 * SHARE / 1e-3, abs=10)
    assert not toll.busy
    toll.launched(running)
    assert toll.busy
    running.done = launched.done = True
    assert not toll.busy
    assert queued(1.0) == pytest.approx(1000, abs=2)
    assert not toll.due("in", SimpleNamespace(query=lambda: False))


@pytest.mark.parametrize("ends", [False, True])
def test_what_leaves_gets_its_turn_beside_what_comes_without_end(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """While steps go on, which may end meanwhile."""
    now, toll, begun = 5.0, Toll(), SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(clock, "now", lambda: now)
    step = SimpleNamespace(begin=begun, done=False)
    toll.beside(step)
    went = []
    for i in range(10_000):
        step.done = ends and i % 1000 == 0
        for lane in ("in", "out"):
            if not toll.due(lane, begun):
                toll.take(lane, 1e-5)
                went.append(lane)
        now += 1e-5
    assert went.count("in") > 100
    first, *others = "".join(lane[0] for lane in went).split("o")
    assert len(first) <= PASSED + 1, "one has gone before the other lane asks"
    assert max(map(len, others)) <= PASSED


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("hurries", [True, False])
@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("never", [True, False])
def test_rows_cross_by_themselves_beside_decode_steps_that_nobody_waits_behind(
    monkeypatch: pytest.MonkeyPatch, decodes: bool, hurries: bool, long: bool, busy: bool, never: bool
) -> None:
    """In pieces of few rows, behind what was launched before, for their own price; else as one, staged unless
    its rows are long and other steps run, or so long that they are never."""
    monkeypatch.setattr(crossing, "ROWS", 6)
    waited, crossed, staged, paid = [], [], [], []
    with late_copies(decodes=float(decodes)):
        toll: Any = SimpleNamespace(
            runs=decodes,
            busy=busy,
            due=lambda *_: False,
            take=lambda _, s, before: paid.append(before + s),
        )
        route = Route(lambda *_: None, lambda c, *_: staged.append(len(c.units)), 2.0, lambda c: None, 1.0)
        lane = crossing.Lane(torch.zeros(2, 64, dtype=torch.uint8), route, toll)
        lane._route = route._replace(rows=lambda chunk: crossed.append(len(chunk.units)))
        lane._second.wait_event = waited.append  # type: ignore[assignment]
        units = np.arange(8, dtype=np.int32)
        one = Crossing(1, total=80, firsts=80, bands=1)
        lane.add(one, [Chunk(0, units, units, width=10, rows=2, long=long, never_staged=never, closes=True)])
        begin = lane._waiting[0][1]
        if hurries:
            lane.queue(one, 0)
        while not one.over:
            lane.go_on()
    apart = decodes and not hurries
    pieces = [3, 3, 2] if apart else [8]
    by_rows = apart or never or (long and busy and not hurries)
    assert (crossed, staged) == ((pieces, []) if by_rows else ([], pieces))
    assert paid[0] == 10.0 * pieces[0] * (1.0 if by_rows else 2.0)
    assert (begin in waited) is by_rows
    assert one.queued == 8


def test_rows_of_places_far_away_are_found() -> None:
    """Beyond what numbers of 32 bits say."""
    found: list[Any] = []
    with late_copies(row=1), patch.object(gpu_tiers, "copy_rows", lambda *ends: found.extend(ends)):
        world = World(0)
        section = world.tier._sections[0]
        assert section.parts is not None
        place, width = 30_000, 400_000
        parts = section.parts._replace(beside=np.zeros(1, np.int64), far=np.array([width]))
        world.tier._sections[0] = section._replace(parts=parts)
        there = np.array([place], np.int32)
        chunk = Chunk(0, there, there, width=width, rows=1, long=False, never_staged=False, closes=True)
        world.tier._rows(chunk, inward=True)
    assert found[1][0] == place * width


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("decodes", [0.0, 0.5, 1.0])
def test_each_layer_is_what_it_was(split: bool, row: int, decodes: float) -> None:
    """In whatever way units leave and come back, to others."""
    draw = torch.Generator().manual_seed(1)
    with late_copies(row=row, decodes=decodes):
        world = World(0, split=split)
        for tensor in (tensor for tensors in world.memory for tensor in tensors):
            tensor.random_(0, 256, generator=draw)
        was = [[tensor.clone() for tensor in tensors] for tensors in world.memory]
        units, others = [9, 4, 5, 6, 20, 21], [1, 12, 13, 2, 3, 4]
        places, ends = [int32([7, 8, 9, 10, 2, 3])] * 2, ("device", "host")
        world.tier.begin(Copy(1, *ends, [int32(units)] * 2, places))
        while world.tier.under_way:
            world.tier.ended()
        world.tier.begin(Copy(2, *ends[::-1], places, [int32(others)] * 2))
        while world.tier.under_way:
            world.tier.ended()
    for tensors, before in zip(world.memory, was):
        assert all(torch.equal(tensor[others], old[units]) for tensor, old in zip(tensors, before))


@pytest.mark.parametrize(("split", "rows"), [(False, 6 * 4), (True, 3 * 4)])
def test_units_that_follow_each_other_on_both_sides_are_one_row(split: bool, rows: int) -> None:
    """Of each tensor, where what it has of them lies together."""
    units, places = (np.array(column, np.int32) for column in ([4, 5, 6, 20, 21, 22], [8, 9, 10, 11, 12, 14]))
    with late_copies(row=1):
        section = next(s for s in World(0, split=split).tier._sections if s.band == 2 and s.group == 1)
        assert section.parts is not None
        here, there, sizes = section.parts.rows(units, places)
    layers = len(section.parts.width)
    assert len(here) == len(there) == len(sizes) == rows * layers // 4
    assert sizes.reshape(-1, layers)[:, 0].tolist() == ([24, 16, 8] if split else [8] * 6)
    assert (here.reshape(-1, layers)[0] == section.parts.address + 4 * 8).all()


def test_what_looks_that_come_late_have_missed_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is little; and what is under way when steps begin is paid for then."""
    now, toll, begun = 5.0, Toll(), SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(clock, "now", lambda: now)
    toll.beside(SimpleNamespace(begin=begun, done=False))  # type: ignore[arg-type]
    piece = SHARE * crossing.LATE  # so long one waits behind each

    def taken(looks: int, every: float) -> int:
        nonlocal now
        count = 0
        for _ in range(looks):
            if not toll.due("in", begun):
                toll.take("in", piece)
                count += 1
            now += every * crossing.LATE
        return count

    assert taken(1000, 0.6) == pytest.approx(600, abs=2)
    now += 1.0
    assert taken(3, 0.01) == 2, "all that time has been made up for"
    now += 1.0
    for _ in range(100):
        toll.take("in", piece, before=3 * piece)
    assert taken(39, 0.1) == 0, "four are under way"
    assert taken(10, 0.1) > 0
