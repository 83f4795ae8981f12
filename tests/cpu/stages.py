"""Stages of a pipeline as runners of one process, which hand hidden states to each other in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec.structs import replace
from tiny import make_core, tiny_config
from torch import Tensor

from sgla.dist import Shard, gpus
from sgla.dist.pipe import Pipe
from sgla.hub.source import ModelSource
from sgla.messages import Facts, StepPlan, StepResult
from sgla.sched.core import Core
from sgla.worker import place
from sgla.worker.cpu import CpuRunner


class Local(Pipe):
    """``before`` and ``behind``: what is on its way from and to the stages beside."""

    def __init__(self, stage: int, stages: int, before: deque[Tensor], behind: deque[Tensor]) -> None:
        super().__init__(stage, stages, 1, stage)
        self._from, self._to = before, behind

    def take(self, out: Tensor) -> None:
        out.copy_(self._from.popleft())

    def give(self, x: Tensor) -> None:
        self._to.append(x.clone())


class Stages:
    """An executor. The stages before the last compute a step as soon as it is planned, and the last one when
    it is drained: so they are as far apart as can be."""

    def __init__(
        self, source: ModelSource, count: int, make: Callable[..., Any] = CpuRunner, **changes: Any
    ) -> None:
        ways = [deque[Tensor]() for _ in range(count + 1)]
        config = tiny_config(**changes | {"pp": count})
        self.runners: list[Any] = []
        for stage in range(count):
            shard = Shard(pipe=Local(stage, count, ways[stage], ways[stage + 1]))

            @contextmanager
            def join(*_: Any, shard: Shard = shard) -> Iterator[Shard]:
                yield shard

            joined = gpus.Joined(shard, "")
            with (
                mock.patch.object(place, "join", join),
                mock.patch.object(gpus, "join_gpus", lambda *_, joined=joined, **named: joined),
            ):
                self.runners.append(make(config, source, stage, count, "", lambda progress: None))
        self.plans: deque[StepPlan] = deque()
        self.most = 0  # steps in flight

    @property
    def facts(self) -> Facts:
        found = [runner.facts for runner in self.runners]
        same = zip(*(facts.groups for facts in found))
        return replace(found[-1], groups=[min(groups, key=lambda group: group.pages) for groups in same])

    def core(self, **limits: Any) -> Core:
        count = len(self.runners)
        return make_core(self.facts, **{"stages": count, "depth": count + 1} | limits)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.most = max(self.most, len(self.plans))
        for runner in self.runners[:-1]:
            assert runner.execute(plan).tokens == b""

    def drain(self) -> list[StepResult]:
        return [self.runners[-1].execute(self.plans.popleft())]
