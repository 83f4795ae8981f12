"""The token table of a GPU: ids stand in pages, and behind these in a ring of each slot. Kernels run in
Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("there is a GPU, and no interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any

import interpreter
from fake_gpu import _cpu
from token_tables import row
from torch.overrides import TorchFunctionMode

from sgla.kernels.triton.tokens import RING, put_tokens
from sgla.messages import NewRow, RowSampling, StepPlan
from sgla.worker.device_state import DeviceTables

SLOTS, CONTEXT, PAGE, PAGES = 3, 700, 4, 400
SHARED = 12  # tokens that all requests begin with, whose pages are the first


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU is done here."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: _cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return f(*map(_cpu, args), **kwargs)


class Passed:
    """In place of an event."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Passed)


def ints(values: Any) -> bytes:
    return np.asarray(values, np.int32).tobytes()


class Run:
    """Requests in slots, and all tokens that each has."""

    def __init__(self, seed: int) -> None:
        interpreter.patch_once()
        self.draw = np.random.default_rng(seed)
        self.tables = DeviceTables(SLOTS, CONTEXT, PAGE)
        self.tables.tokens.resize(PAGES)
        columns = (torch.zeros(SLOTS + 1) for _ in range(3))
        self.sampler: Any = SimpleNamespace(
            admit=lambda new: None,
            **dict(zip(("temperatures", "top_ps", "min_ps"), columns)),
            top_ks=torch.zeros(SLOTS + 1, dtype=torch.int32),
            seeds=torch.zeros(SLOTS + 1, dtype=torch.int64),
        )
        self.free = list(range(1 + SHARED // PAGE, PAGES))
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}

    def take(self, count: int) -> list[int]:
        return [self.free.pop(int(self.draw.integers(len(self.free)))) for _ in range(count)]

    def ids(self, count: int) -> list[int]:
        return self.draw.integers(1, 1 << 20, count).tolist()

    def apply(self, **columns: Any) -> None:
        plan = StepPlan(step=0, slots=b"", starts=b"", q_lens=b"", flags=b"", **columns)
        self.tables.apply(plan, self.sampler)

    def admit(self, slot: int, length: int) -> None:
        """With pages for a part of what it knows, as a prompt that is read in chunks has them."""
        self.free += self.pages.pop(slot, [])[SHARED // PAGE :]
        self.tokens[slot] = [*range(5000, 5000 + SHARED), *self.ids(length)]
        first = list(range(1, 1 + SHARED // PAGE))
        self.pages[slot] = first + self.take(int(self.draw.integers(0, length // PAGE + 2)))
        new = NewRow(
            slot=slot, tokens=ints(self.tokens[slot]), prompt_len=length, pages=[ints(self.pages[slot])],
            sampling=RowSampling(temperature=0.5, top_k=slot, seed=-slot),
        )  # fmt: skip
        self.apply(new=[new])

    def append(self, counts: dict[int, int]) -> None:
        fresh = {slot: self.take(count) for slot, count in counts.items()}
        for slot, pages in fresh.items():
            self.pages[slot] += pages
        self.apply(
            page_slots=ints([*fresh]),
            page_counts=ints([*counts.values()]),
            page_ids=[ints([page for pages in fresh.values() for page in pages])],
        )

    def sample(self, slot: int, count: int) -> None:
        """What kernels draw, which the host does not know."""
        made, at = self.ids(count), len(self.tokens[slot])
        columns = (
            torch.tensor(x, dtype=torch.int32) for x in ([slot] * count, [*range(at, at + count)], made)
        )
        put_tokens(*columns, self.tables.tokens)
        self.tokens[slot] += made

    def force(self, slot: int, count: int) -> None:
        """What a grammar forces; the host knows all before."""
        made, at = self.ids(count), len(self.tokens[slot])
        self.tables.host.tokens[slot, :at] = self.tokens[slot]
        self.tables.put(np.array([[slot] * count, [*range(at, at + count)], made], np.int32))
        self.tokens[slot] += made

    def check(self) -> None:
        """All that has pages is there, and what is behind them as far as the ring goes."""
        for slot, tokens in self.tokens.items():
            count = min(len(tokens), len(self.pages[slot]) * PAGE + RING.value)
            assert row(self.tables.tokens, slot, count) == tokens[:count]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_where_kernels_look_for_them(seed: int) -> None:
    with OnCpu():
        run = Run(seed)
        for slot in range(SLOTS):
            run.admit(slot, 40)
        for _ in range(25):
            slot, kind = int(run.draw.integers(SLOTS)), int(run.draw.integers(5))
            lacking = -(-len(run.tokens[slot]) // PAGE) - len(run.pages[slot])
            if len(run.tokens[slot]) > 450 or len(run.free) < 120:
                run.admit(slot, int(run.draw.integers(1, 60)))
            elif lacking > 0:
                run.append({slot: int(run.draw.integers(1, lacking + 1))})
            elif kind == 0:
                run.force(slot, int(run.draw.integers(1, 200)))
            elif kind == 1:
                run.append({one: 1 + one for one in run.tokens})
            else:
                run.sample(slot, int(run.draw.integers(1, 10)))
            run.check()
        assert run.sampler.top_ks.tolist() == [0, 1, 2, 0]
        assert run.sampler.seeds.tolist() == [0, -1, -2, 0]


def test_a_place_before_the_first_token_is_none() -> None:
    """Guesses that no row made have such places, in the slot of padding rows."""
    with OnCpu():
        tables = DeviceTables(SLOTS, CONTEXT, PAGE)
        tables.tokens.ids.fill_(7)
        columns = (torch.tensor(x, dtype=torch.int32) for x in ([SLOTS, 1], [-1, 0], [9, 9]))
        put_tokens(*columns, tables.tokens)
        assert (tables.tokens.ids == 9).nonzero().tolist() == [[RING.value]]


def test_tables_are_as_large_as_the_pool() -> None:
    """And not as many slots of the longest context, which would be 1 GB here."""
    with OnCpu():
        tables = DeviceTables(256, 1 << 20, 64)
        tables.tokens.resize(10_000)
        assert tables.tokens.ids.nbytes == 4 * (10_000 * 64 + 257 * RING.value)
        assert tables.page_table.nbytes == 4 * 257 * ((1 << 14) + 1)
