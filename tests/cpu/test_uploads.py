"""Few numbers on their way to a GPU, each from memory that nobody writes to before they have been fetched,
and on their way back. The kernel runs in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("there is a GPU, and no interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

import interpreter
from test_token_table import OnCpu

from sgla.kernels.triton.fetch import FEW, are_few
from sgla.messages import PROMPT_LOGPROBS
from sgla.sampling import device
from sgla.sampling.device import to_host
from sgla.worker import device_state, warm_up
from sgla.worker.device_state import SLIP, SLIPS, Slips
from sgla.worker.gpu_steps import GpuSteps


class Event:
    """Of a stream that has passed the first ``passed`` of those recorded on it."""

    passed = recorded = 0

    def __init__(self) -> None:
        self.number = 0

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.passed


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interpreter.patch_once()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.passed = Event.recorded = 0
    with OnCpu():
        yield


@pytest.mark.parametrize("shape", [(1,), (3, 5), (SLIP,), (2, SLIP // 2)])
def test_numbers_arrive(shape: tuple[int, ...]) -> None:
    host = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)[..., ::-1]
    there = Slips().upload(host.astype(np.int32))
    assert there is not None
    assert there.dtype == torch.int32
    assert there.tolist() == host.tolist()


def test_more_and_none_are_copied() -> None:
    assert Slips().upload(np.zeros(SLIP + 1, np.int32)) is None
    assert Slips().upload(np.zeros(0, np.int32)) is None


def test_a_slip_is_written_to_when_it_has_been_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    fetch = device_state.fetch

    def seen(source: Any, target: Any) -> None:
        read.append(source.data_ptr())
        fetch(source, target)

    monkeypatch.setattr(device_state, "fetch", seen)
    slips, one = Slips(), np.ones(1, np.int32)
    for _ in range(SLIPS):
        assert slips.upload(one) is not None
    assert len(set(read)) == SLIPS
    assert slips.upload(one) is None, "all are under way"
    Event.passed = 2
    assert slips.upload(one) is not None
    assert slips.upload(one) is not None
    assert set(read[SLIPS:]) == set(read[:2])
    assert slips.upload(one) is None


def test_one_that_takes_long_holds_up_no_other() -> None:
    slips, one = Slips(), np.ones(1, np.int32)
    slips.upload(one)
    late = slips._slips[0][1]
    for _ in range(3 * SLIPS):
        Event.passed = Event.recorded
        late.number = Event.recorded + 1
        assert slips.upload(one) is not None
    assert len(slips._slips) == 2


def test_few_results_are_stored_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of them would wait for all of a prefix that leaves."""
    stored: list[int] = []
    fetch = device.fetch

    def seen(source: Any, target: Any) -> None:
        stored.append(source.numel())
        fetch(source, target)

    monkeypatch.setattr(device, "fetch", seen)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    tokens, values = torch.arange(7, dtype=torch.int32), torch.rand(3, 1500)
    assert to_host(tokens).equal(tokens)
    assert to_host(values).equal(values)
    assert stored == [7, 4500]
    others = [tokens[1:], values.T, values.bfloat16(), values[:0], torch.zeros(FEW + 1)]
    assert not any(are_few(x) for x in others), "what is not asked for before the start is copied"
    assert all(to_host(x).equal(x) for x in others)
    assert stored == [7, 4500]


def test_what_nobody_keeps_is_stored_before_its_memory_is_given_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the step that is measured before the start, for whose logprobs nobody waits."""
    done: list[str] = []
    steps: Any = SimpleNamespace(
        slots=4, context_len=64, step_tokens=32, pictures=None, attention=SimpleNamespace(grows=True)
    )
    steps.run_eagerly = lambda plan: done.append("logprobs" if plan.flags[0] & PROMPT_LOGPROBS else "others")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    warm_up._read_most(steps)
    assert done[:2] == ["logprobs", "waited"]


@pytest.mark.parametrize(("drafts", "divided"), [(None, True), ("some", False)])
def test_what_steps_take_is_measured_of_whole_ones_where_rows_guess(
    drafts: Any, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rows are not shared out, and there may be many."""
    seen: list[bool] = []
    steps: Any = GpuSteps.__new__(GpuSteps)
    steps.drafts, steps.divides, steps.shard = drafts, "ranks", SimpleNamespace(samples=False)

    def peak(run: Any, steps: Any) -> int:
        seen.append(steps.divides is not None)
        return 0

    monkeypatch.setattr(warm_up, "_peak", peak)
    warm_up.measure(steps)
    assert seen[-1] == divided
    assert steps.divides == "ranks"
