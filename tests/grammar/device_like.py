"""A worker whose forward pass is the CPU's and whose samples are made as on a GPU: behind it, from masks that
are made when the result before has been read, with a token table of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"  # a GPU may be there, but all tensors are the CPU's
sys.path.append(str(Path(__file__).parents[1]))
import interpreter
from token_tables import in_rows

from sgla.kernels.triton import sampling
from sgla.kernels.triton.tokens import TokenTable
from sgla.messages import RowSampling, StepPlan, StepResult
from sgla.sampling import device
from sgla.sampling.constraints import Constraints
from sgla.sampling.device import DeviceSampler, Pending
from sgla.sampling.draw import Distribution, draw
from sgla.sampling.faults import NONE_LEFT
from sgla.sampling.rules import Rule, make_rules
from sgla.worker.batch import build, read
from sgla.worker.cpu import CpuRunner
from sgla.worker.flights import Flight, Flights
from sgla.worker.state import column


class Event:
    """Passes a while after it was recorded, so that the next step is launched before."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter() + 0.001

    def query(self) -> bool:
        return time.perf_counter() >= self._at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def choose(logits: Tensor, slots: Tensor, positions: Tensor, *tables: Any) -> None:
    """For the kernel of this name."""
    seeds, temperatures, table, out = tables[:4]
    tokens = table.ids.view(table.slots, -1)
    for n, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
        temperature = float(temperatures[slot])
        if logits[n].max() == float("-inf"):
            out[n], tokens[slot, position] = NONE_LEFT, 0
            continue
        if temperature:
            out[n] = draw(logits[n].numpy(), Distribution(temperature), int(seeds[slot]), position)
        else:
            out[n] = logits[n].argmax()
        tokens[slot, position] = out[n]


def mask(logits: Tensor, rows: Tensor, words: Tensor, ends: Tensor | None = None) -> None:
    for n, (row, mask) in enumerate(zip(rows.tolist(), words.numpy().view(np.uint8))):
        allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little", count=logits.shape[1]).view(bool))
        logits[row, ~allowed] = float("-inf")
        if ends is not None and ends[n] and logits[row].max() == float("-inf"):
            logits[row, allowed] = 0.0


class HostRules:
    """For ``DeviceRules``, whose kernels are compared with these in tests/cpu/test_narrowing.py."""

    def __init__(self, tokens: TokenTable, vocab_size: int) -> None:
        self._tokens, self._vocab = tokens.ids.view(tokens.slots, -1).numpy(), vocab_size
        self._rules: dict[int, list[Rule]] = {}

    def admit(self, slot: int, prompt_len: int, sampling: RowSampling) -> bool:
        self._rules[slot] = make_rules(self._tokens[slot], prompt_len, sampling, self._vocab)
        return bool(self._rules[slot])

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, on_host: Any) -> None:
        for row, slot, position in zip(logits.numpy(), *on_host):
            for rule in self._rules[int(slot)]:
                rule.apply(row, int(position))


# This process is the worker's own. Triton's interpreter would take most of the time.
interpreter.patch_once()
torch.cuda.Event = Event  # type: ignore[misc, assignment]
sampling.sample, sampling.mask = choose, mask  # type: ignore[assignment]
device.DeviceRules = HostRules  # type: ignore[misc, assignment]


class DeviceLike(CpuRunner):
    def _load(self, *args: Any) -> None:
        super()._load(*args)
        tables, vocab = self.tables, self.model.spec.vocab
        on_device = torch.from_numpy(tables.tokens)
        self._host = np.zeros_like(tables.tokens)
        self._device = DeviceSampler(in_rows(on_device), vocab)
        assert self.matchers is not None
        self._constraints = Constraints(self._host, vocab, self.matchers, skip_forced=True, pin=False)

        def put(columns: np.ndarray) -> None:
            slots, positions, values = torch.from_numpy(columns).long()
            on_device[slots, positions] = values.int()

        self._flights = Flights(SimpleNamespace(put=put), self._device, self._constraints)  # type: ignore[arg-type]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        self.tables.apply(plan)
        for new in plan.new:
            known = column(new.tokens)
            self._host[new.slot, : len(known)] = known
            self._device.admit(new)
            self._device.temperatures[new.slot] = new.sampling.temperature
            self._device.seeds[new.slot] = new.sampling.seed
            self._constraints.admit(new)
        columns, wanted = read(plan, self.tables)
        logits = self._forward(build(columns, self.tables)).clone()
        count = len(wanted.rows)
        out = torch.zeros(count, dtype=torch.int32)
        where, positions = torch.from_numpy(wanted.slots), torch.from_numpy(wanted.positions)
        pending = None
        if count:
            if self._device.plain(wanted.slots):
                self._device.draw(logits, where, positions, out)
            else:  # graphs have drawn something by then
                self.tables.tokens[wanted.slots, wanted.positions] = 1
                pending = Pending(
                    logits, where, positions, out, wanted.rows, (wanted.slots, wanted.positions)
                )
        return self._flights.begin(plan, Event(), out, count, None, pending, [])

    @torch.inference_mode()
    def release(self, flight: Flight) -> None:
        self._flights.release(flight)

    @torch.inference_mode()
    def finish(self, flight: Flight) -> StepResult:
        return self._flights.finish(flight)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))
