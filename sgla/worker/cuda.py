"""The runner of a decoder on an NVIDIA GPU:
state lives on the device, decode steps are graph replays, and results are read a step late.

A step is launched without waiting for the one before it: plans carry no token ids, the token table on the
device does. ``launch`` returns a ``Flight``; once its event has passed, ``finish`` turns it into the
StepResult.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from sgla.dist.lockstep import PlannedLockstep
from sgla.messages import DENOISE, SAMPLE, VERIFIED, StepPlan, StepResult
from sgla.worker.batch import StateColumns, eager_order, state_columns
from sgla.worker.crossing import Crossing
from sgla.worker.device_state import upload
from sgla.worker.flights import Flight
from sgla.worker.gpu_context import Divides
from sgla.worker.gpu_experts import GpuExperts
from sgla.worker.gpu_steps import Launched
from sgla.worker.graphs import NOBODY
from sgla.worker.kv import zero_pages
from sgla.worker.loop import Computed
from sgla.worker.prompt_graphs import prompts_last
from sgla.worker.state import column
from sgla.worker.told import Proposals, Told, with_told, without_told
from sgla.worker.verify import DeviceDrafts, Verify, spread

DECODE_FLAGS = bytes([SAMPLE])
NO_STATES = StateColumns(NOBODY, NOBODY, np.zeros((0, 3), np.int32))


class Alike(NamedTuple):
    """The graph that all ranks take which compute a step together, each with its own part: rows, at least, of
    one of decode rows, or tokens of one that reads prompts; none of either: no graph."""

    rows: int = 0
    tokens: int = 0


class CudaRunner(GpuExperts):
    """Launches steps."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight | Computed:
        """Queue the step on the GPU. Waits for nothing."""
        counted = self._counts(plan)
        return self._launch_part(plan, counted) if plan.parts else self._launch(plan, counted)

    def _launch_part(self, plan: StepPlan, counted: bool) -> Flight | Computed:
        """Its own part of a step that ranks compute together. What each has to do stands in the plan, so all
        call the same collectives, and take graphs of one size if there are any for all parts."""
        lockstep, parts = self.shard.lockstep, [part if part and part.slots else None for part in plan.parts]
        assert isinstance(lockstep, PlannedLockstep)
        there = [None if part is None else self._verified(part) for part in parts]
        counts = [0 if part is None else self._tokens_of(part) for part in there]
        graph = not counted and self._in_graphs(max(counts))
        alike = self._alike([part for part in there if part is not None]) if graph else Alike()
        own = parts[lockstep.rank]
        lockstep.counts = None if any(alike) else counts  # in a graph all have as many
        try:
            if own is not None:
                return self._launch(own, counted, alike)
            if any(counts):
                self._take_part(alike)
            return Computed(plan.step, StepResult(step=plan.step, tokens=b""))
        finally:
            lockstep.counts = None

    def _in_graphs(self, tokens: int) -> bool:
        """Whether ranks that have so many at most may take graphs, in which all get the tokens of all."""
        lockstep, model = self.shard.lockstep, self.steps.model
        assert isinstance(lockstep, PlannedLockstep)
        if model.spec.moe is None:
            return True
        return lockstep.in_graphs(
            tokens, model.spec.hidden * self.steps.dtype.itemsize, model.spec.moe.routing.top_k
        )

    def _verified(self, part: StepPlan) -> StepPlan:
        """With a row for each token that is computed: all that rows may guess, or are told of."""
        return spread(part if self.shard.pipe is None else with_told(part))

    def _tokens_of(self, part: StepPlan) -> int:
        """Of one rank, or of what its set shares out."""
        divides, q_lens = self.steps.divides, column(part.q_lens)
        return divides.share_of(q_lens) if isinstance(divides, Divides) else int(q_lens.sum())

    def _alike(self, parts: list[StepPlan]) -> Alike:
        """A rank sees of the others what the plan says of them."""
        if all(self._decodes(part) for part in parts):
            return Alike(rows=max((len(part.slots) // 4 for part in parts), default=0))
        if all(self._reads(part) for part in parts):
            return Alike(tokens=max(int(column(part.q_lens).sum()) for part in parts))
        return Alike()

    def _take_part(self, alike: Alike) -> None:
        """In a step without rows of this rank."""
        states = NO_STATES if self.steps.tables.states else None
        if alike.rows:
            self.graphs.run(NOBODY, NOBODY, states, least=alike.rows)
        elif alike.tokens:
            self.prompts.run(NOBODY, NOBODY, NOBODY, NOBODY.astype(np.uint8), states, least=alike.tokens)
        else:
            self.steps.take_part()

    def _launch(self, plan: StepPlan, counted: bool, alike: Alike | None = None) -> Flight | Computed:
        """``alike``: None where each rank has the same plan."""
        late = self._late(plan)
        self.copies.begin(plan.copies)
        self.copies.drop(plan.dropped)
        if not plan.slots:
            return Computed(plan.step, StepResult(step=plan.step, tokens=b""))
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        self.steps.admit(plan)
        if plan.zeroed:
            zero_pages(self.steps.kv, [upload(column(pages)).long() for pages in plan.zeroed])
        if self.constraints is not None:
            for new in plan.new:
                self.constraints.admit(new)
        verify = None
        if self.steps.drafts is not None:
            verify, plan = self._guess(self.steps.drafts, plan, counted)
        if self.canvases is not None:
            for new in plan.new:
                self.canvases.admit(new)
            if any(flags & DENOISE for flags in plan.flags):
                self._await(late)
                return Computed(plan.step, self.canvases.denoise(plan))
        slots, starts = column(plan.slots), column(plan.starts)
        rows = len(slots)
        graph = not counted and self._decodes(plan) if alike is None else alike.rows > 0
        graph = graph and not self._reads_pictures(slots, starts)
        own = verify if self.shard.samples else None  # on other stages nobody knows what is right
        if graph:
            self._await(late)
            states = state_columns(plan, slots, starts, self.steps.tables.host)
            least = 0 if alike is None else alike.rows
            out, landed, pending = self.graphs.run(slots, starts, states, verify, least)
            count = rows if self.shard.samples else 0
            flight = self.flights.begin(plan, begin, out, count, landed, pending, [], own)
            if self.host is not None:
                self.host.toll.beside(flight)
        else:
            launched = self._extend(plan, slots, starts, verify, counted, late, alike)
            out, count, scored, pending, extras = launched
            flight = self.flights.begin(plan, begin, out, count, None, pending, scored, own)
            flight.extras = extras
        if self.host is not None:
            self.host.toll.launched(flight)
        if self.outputs is not None:
            self.outputs.learn(plan)  # behind the launch, which comes late for the GPU if steps are brief
            self.outputs.remember(flight)
        if self.chains is not None and (graph or verify is not None):
            self.chains.remember(flight, rows if graph else 0)
        return flight

    def _late(self, plan: StepPlan) -> list[Crossing]:
        """Copies to the device that have been told of, whose layers the step has to wait for."""
        if self.host is None:
            return []
        self.host.settle_for(plan.copies)
        late = self.host.awaited(plan)
        if self.chains is None and not plan.zeroed:
            return late
        self._await(late)
        return []

    def _await(self, late: list[Crossing], kept: Sequence[Tensor] = ()) -> None:
        if late and self.host is not None:
            self.host.wait(late, kept)

    def _guess(self, drafts: DeviceDrafts, plan: StepPlan, counted: bool) -> tuple[Verify | None, StepPlan]:
        """What its rows guess, and the plan with a row for each of that."""
        if plan.new:
            drafts.admit(plan.new)
        if self.shard.pipe is not None:
            told = self._told(drafts, plan)
            return told, plan if told is None else told.plan
        deep = VERIFIED
        if self.chains is not None:
            plan, deep = self.chains.limit_drafts(plan, drafts.leaves and self._bears(plan, counted))
        guided = self.constraints is not None and self.constraints.any(column(plan.slots))
        verify = Verify(drafts, plan, guided, deep) if plan.drafts else None
        if verify is None:
            drafts.skip(plan)
        if self.chains is not None:
            self.chains.follow(plan, deep)
        return verify, plan if verify is None else verify.plan

    def _told(self, drafts: DeviceDrafts, plan: StepPlan) -> Told | None:
        """What its rows are told that they guess. The last stage guesses behind what they draw."""
        guess, chains = None, self.chains
        if chains is not None:
            plan, _ = chains.limit_drafts(plan)
            chains.follow(without_told(plan), VERIFIED)
            guess = partial(chains.follow, deep=VERIFIED)
        if not plan.drafts:
            drafts.skip(plan)
            return None
        return Told(drafts, plan, Proposals(drafts, plan, guess) if self.shard.samples else None)

    def _bears(self, plan: StepPlan, counted: bool) -> bool:
        """Whether its guesses may have leaves: where a graph of decode rows is going to compute them."""
        q_lens = column(plan.q_lens)
        if plan.drafts:
            q_lens = np.where(column(plan.drafts) < 0, q_lens, 1).astype(np.int32)
        if counted or self._reads_pictures(column(plan.slots), column(plan.starts)):
            return False
        return self._decodes(replace(plan, q_lens=q_lens.tobytes()))

    def _decodes(self, plan: StepPlan) -> bool:
        """It is a step of decode rows alone, and there is a graph for it."""
        rows = len(plan.slots) // 4
        return (
            self._captures
            and rows <= self.graphs.limit
            and plan.flags == DECODE_FLAGS * rows
            and len(plan.q_lens) == 4 * rows
            and int(column(plan.q_lens).max()) == 1
            and not self._brings_states(plan)
        )

    def _reads(self, plan: StepPlan) -> bool:
        """There is a graph for what it reads of prompts, whatever rows ask for besides."""
        if not (self._captures and self.steps.reads_in_graphs) or self._brings_states(plan):
            return False
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        states = state_columns(plan, slots, starts, self.steps.tables.host)
        return self.prompts.takes(starts, q_lens, np.frombuffer(plan.flags, np.uint8), states)

    @property
    def queueing(self) -> bool:
        """Pieces of copies between the GPU and the host's memory are."""
        return self.host is not None and self.host.under_way

    @torch.inference_mode()
    def release(self, flight: Flight) -> None:
        """Queue the rest of a step that is held. The steps before have been finished."""
        self.flights.release(flight)

    @torch.inference_mode()
    def finish(self, flight: Flight | Computed) -> StepResult:
        """The result of a launched step, in order; blocks until it is there."""
        if isinstance(flight, Computed):
            return flight.result
        result = self.flights.finish(flight)
        self.profiler.step()
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        flight = self.launch(plan)
        if isinstance(flight, Flight) and flight.held:
            self.release(flight)
        return self.finish(flight)

    def _extend(
        self,
        plan: StepPlan,
        slots: Any,
        starts: Any,
        verify: Verify | None,
        counted: bool,
        late: list[Crossing],
        alike: Alike | None,
    ) -> Launched:
        """A step with prompt tokens, or one that brings hidden states, or whose experts are counted. It waits
        for what is ``late`` layer by layer, which a graph cannot. ``alike``: as that of ``_launch``."""
        q_lens, flags = column(plan.q_lens), np.frombuffer(plan.flags, np.uint8)
        if alike is None:
            graph = not (counted or late or self._reads_pictures(slots, starts))
            graph = graph and self._reads(plan)
            decodes = q_lens == 1
            graph = graph and (self.steps.apart or not self.steps.share_much(slots[decodes], starts[decodes]))
        else:
            graph = alike.tokens > 0
        if graph:
            states = state_columns(plan, slots, starts, self.steps.tables.host)
            least = 0 if alike is None else alike.tokens
            out, count, pending = self.prompts.run(slots, starts, q_lens, flags, states, verify, least)
            launched = Launched(out, count, [], pending, None)
        else:
            with self.steps.awaiting(partial(self._await, late) if late else None):
                launched = self.steps.run_eagerly(plan, verify, whole=counted)
            self._await(late)
        if self.chains is not None and self.chains.reads_prompts:
            order = prompts_last(q_lens, flags) if graph else eager_order(starts, q_lens)
            first = np.empty_like(q_lens)
            first[order] = q_lens[order].cumsum() - q_lens[order]
            prompts = (q_lens > 1) | ((flags & SAMPLE) == 0)
            if prompts.any():
                self.chains.behind(slots[prompts], starts[prompts], q_lens[prompts], first[prompts])
        return launched

    def _reads_pictures(self, slots: Any, starts: Any) -> bool:
        """It has tokens of pictures, or before some."""
        pictures = self.steps.pictures
        return pictures is not None and pictures.reads(slots.tolist(), starts.tolist())

    def _brings_states(self, plan: StepPlan) -> bool:
        """It has rows that bring something of each token; where other ranks have parts, which do not know,
        whenever there may be some."""
        if self.shard.lockstep is not None:
            return self.config.enable_return_hidden_states
        wanted = self.config.enable_return_hidden_states or self.config.enable_return_routed_experts
        return wanted and bool(self.steps.tables.host.brings[column(plan.slots)].any())
