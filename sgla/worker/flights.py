"""The end of a step on a GPU: its samples, beside what a graph draws, and their way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgla.dist.pipe import Pipe
from sgla.messages import SAMPLE, Failed, StepPlan, StepResult
from sgla.sampling import faults
from sgla.sampling.constraints import Constraints, Masks
from sgla.sampling.device import DeviceSampler, Pending, Scored, to_host
from sgla.sampling.runs import ragged
from sgla.sampling.sampler import Samples
from sgla.worker.device_state import DeviceTables
from sgla.worker.pooler import add_vectors
from sgla.worker.state import Int32s, column
from sgla.worker.verify import Verify

LATE = 4  # steps behind which all that were launched before are over: more than may be in flight


class Vector(Protocol):
    """On the host, complete when the step is."""

    def numpy(self) -> Any: ...


class Extras(NamedTuple):
    """What some steps bring beside tokens, pinned: ``vectors``, with their rows, of prompts that are
    complete, and ``hidden`` states, float32 [q_len, width] of each row that wants them."""

    vectors: list[tuple[int, Vector]]
    hidden: list[Tensor]


def over(flight: Flight, step: int, pipe: Pipe | None = None) -> bool:
    """Whether it is over for sure, on all ranks, when ``step`` is launched, of which a ``pipe`` has more in
    flight. Steps with later numbers are of a scheduler that is gone."""
    late = LATE if pipe is None else max(LATE, pipe.stages + 2)
    return not step - late < flight.step < step


@dataclass(slots=True)
class Flight:
    """A launched step, whose ``count`` tokens are the first of ``out`` on the GPU. ``pending``: its rows, if
    a draw by temperature is not all that they want and they are not sampled yet; ``on_host``: their slots and
    positions. A step that is ``held`` waits with these for the result of the step before, since grammars do.
    Once ``end`` has passed, ``tokens``, pinned, holds the ids, negative where there is none
    (``sampling/faults.py``). ``unmet``: (i, why) of samples whose grammar cannot go on. ``verify``: what has
    made ``plan``, where rows may guess. What kernels store in the host's memory is kept here until it is
    finished."""

    plan: StepPlan
    out: Tensor
    count: int
    pending: Pending | None
    scored: list[Scored]
    begin: torch.cuda.Event
    end: torch.cuda.Event
    due: float = 0.0  # when it will end is not known
    held: bool = False
    waited: bool = False  # it was held
    tokens: Tensor | None = None
    unmet: list[tuple[int, str]] = field(default_factory=list)
    on_host: tuple[Any, Any] | None = None
    extras: Extras | None = None
    verify: Verify | None = None

    @property
    def step(self) -> int:
        return self.plan.step

    def brought(self) -> list[tuple[int, list[int]]]:
        """Slots of the rows that sample, and their tokens. ``end`` has passed."""
        assert self.tokens is not None
        tokens = self.tokens.numpy()[: self.count].tolist()
        if self.verify is not None:
            return self.verify.came_of(tokens)
        rows = np.flatnonzero(np.frombuffer(self.plan.flags, np.uint8) & SAMPLE)
        slots = column(self.plan.slots)[rows].tolist()
        return [(slot, [token]) for slot, token in zip(slots, tokens) if token >= 0]

    @property
    def done(self) -> bool:
        return not self.held and self.end.query()


class Flights:
    """``constraints`` is None on ranks that do not sample, where no step is held. ``labels``: vectors are
    log-probabilities of labels."""

    def __init__(
        self,
        tables: DeviceTables,
        sampler: DeviceSampler,
        constraints: Constraints | None,
        labels: bool = True,
    ) -> None:
        self._tables, self._sampler, self._constraints, self._labels = tables, sampler, constraints, labels
        self._last_end: torch.cuda.Event | None = None

    def begin(
        self,
        plan: StepPlan,
        begin: torch.cuda.Event,
        out: Tensor,
        count: int,
        landed: Tensor | None,
        pending: Pending | None,
        scored: list[Scored],
        verify: Verify | None = None,
    ) -> Flight:
        """The forward pass of ``plan`` has been queued.
        ``landed``: pinned memory that it brings the tokens to by itself."""
        end = torch.cuda.Event(enable_timing=True)
        flight = Flight(plan, out, count, pending, scored, begin, end, tokens=landed, verify=verify)
        constraints = self._constraints
        flight.on_host = pending and pending.on_host
        flight.held = pending is not None and constraints is not None and constraints.any(pending.on_host[0])
        flight.waited = flight.held
        if not flight.held:
            self._sample(flight, None)
        return flight

    def release(self, flight: Flight) -> None:
        """Queue the rest of a step that is held, while the GPU computes it.
        The step before has been finished."""
        assert flight.held
        assert flight.pending is not None
        assert self._constraints is not None
        slots, positions = flight.pending.on_host
        read = positions[:0]
        if flight.verify is not None:
            positions, read = flight.verify.hear(positions)
            flight.on_host = slots, positions
        masks, flight.unmet = self._constraints.masks(slots, positions, flight.out.device, read)
        self._sample(flight, masks)
        if flight.verify is not None:
            flight.verify.know(self._constraints)

    def _sample(self, flight: Flight, masks: Masks | None) -> None:
        verify = flight.verify
        if flight.pending is not None:
            if verify is not None:
                verify.restore()
            flight.scored += self._sampler.sample(flight.pending, masks)
            flight.pending = None  # or logits of every step in flight would be kept
        if verify is not None:
            verify.accept(flight.out)
        if flight.tokens is None:
            flight.tokens = to_host(flight.out[: flight.count])
        flight.end.record()
        flight.held = False

    def finish(self, flight: Flight) -> StepResult:
        """The result, in order; blocks until it is there."""
        assert flight.tokens is not None, "the step is held"
        flight.end.synchronize()
        gap = self._last_end.elapsed_time(flight.begin) / 1e3 if self._last_end is not None else 0.0
        self._last_end = flight.end
        tokens = flight.tokens.numpy()
        result = StepResult(
            step=flight.step,
            tokens=tokens.tobytes(),
            seconds=flight.begin.elapsed_time(flight.end) / 1e3,
            gap=max(0.0, gap),
        )
        for scored in flight.scored:
            block = scored.block()
            if block is None:
                result.failed.append(faults.no_logprobs(scored.row))
            else:
                result.logprobs.append(block)
        if flight.extras is not None:
            self._add(flight.extras, result)
        unmet, samples = flight.unmet, Samples(tokens, [], [], {}, set())
        if flight.on_host is not None and self._constraints is not None:
            came = tokens if flight.verify is None else np.where(flight.verify.came(), tokens, -1)
            taken = self._constraints.take(*flight.on_host, came)
            unmet = unmet + taken.failed
            ones = np.ones(len(tokens), np.int32)
            samples = samples._replace(forced=taken.forced, known=taken.known)
            result.tokens, result.counts = ragged(samples, np.arange(len(tokens), dtype=np.int32), ones)
            self._put(*flight.on_host, taken.forced)
        if unmet or (len(tokens) and tokens.min() < 0):
            result.failed += self._failed(flight.plan, unmet, tokens)
        if flight.verify is not None:
            flight.verify.fold(result, samples)
        return result

    def _add(self, extras: Extras, result: StepResult) -> None:
        result.hidden = [states.numpy().tobytes() for states in extras.hidden]
        add_vectors(result, ((row, vector.numpy()) for row, vector in extras.vectors), self._labels)

    def _failed(self, plan: StepPlan, unmet: list[tuple[int, str]], tokens: Any) -> list[Failed]:
        """Samples whose grammar cannot go on, and those without a token."""
        rows = np.flatnonzero(np.frombuffer(plan.flags, np.uint8) & SAMPLE)
        slots = column(plan.slots)[rows]
        return [Failed(int(rows[i]), why) for i, why in unmet] + [
            faults.no_token(int(rows[i]), int(tokens[i]), self._sampler.ruled(slots[i]))
            for i in np.flatnonzero(tokens < 0)
        ]

    def _put(self, slots: Any, positions: Any, forced: dict[int, Int32s]) -> None:
        """Bring forced tokens into the token table. Queued behind the next step, which may be on its way; it
        returns the first of them."""
        if not forced:
            return
        parts = []
        for i, tokens in forced.items():
            place = positions[i] + 1 + np.arange(len(tokens))
            parts.append(np.stack([np.full(len(tokens), slots[i]), place, tokens]))
        self._tables.put(np.concatenate(parts, axis=1))

    def forget(self) -> None:
        """What comes next is not behind the last step."""
        self._last_end = None
