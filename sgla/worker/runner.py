"""What the runners of all devices and models have in common: how a rank starts, what it says of itself, and
how it answers commands. How a step is computed is the part of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sgla import clock
from sgla.config import Config
from sgla.errors import UnsupportedField
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.messages import Control, Facts, Pooling, Progress, StepPlan, StepResult
from sgla.worker.adapters import AdapterStore
from sgla.worker.place import Place, take_place
from sgla.worker.profile import Profiler


class Runner(ABC):
    """One rank of a model. Loads on construction; ``report`` hears of the progress.
    Raises ConfigError and its kin.

    ``pooling``: of a model that answers with vectors. ``matchers``: of a rank that samples, for a model whose
    outputs may have a grammar. ``adapters``: None where rows cannot have any.
    """

    facts: Facts
    matchers: Matchers | None = None
    adapters: AdapterStore | None = None

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        rank: int,
        size: int,
        rendezvous: str,
        report: Callable[[Progress], None],
        pooling: Pooling | None = None,
    ) -> None:
        self.pooling = pooling
        self._seconds: dict[str, float] = {}
        self._report = report
        self.profiler = Profiler(rank)
        with self._phase("ranks"):
            self.place: Place = take_place(config, rank, size, Path(rendezvous) / "store")
        self.shard = self.place.shard
        with self._phase("weights"):
            self._load(config, source)
        with torch.inference_mode():
            self._settle(config)
            with self._phase("warmup"):
                report(Progress(phase="warmup"))
                self._warm_up()
        self.facts.timings |= self._seconds

    @abstractmethod
    def _load(self, config: Config, source: ModelSource) -> None:
        """Check what is asked for, then make the model with its weights."""

    def _settle(self, config: Config) -> None:  # noqa: B027  (most do nothing)
        """What is done between loading and the first step."""

    @abstractmethod
    def _warm_up(self) -> None:
        """Steps without a request, so that the first one does not wait."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step."""

    def close(self) -> None:  # noqa: B027  (most have nothing)
        """Give back what others may want to have. No step runs."""

    def control(self, command: Control) -> dict[str, Any] | Future[dict[str, Any]]:
        """An answer, which may come later. Verbs: ``memory``; ``profile_start`` with ``folder`` and
        ``steps``; ``profile_stop``; those of ``AdapterStore``; those of ``grammar/matcher.py``, for models
        that generate; those of ``ChangingRunner``. Raises UnsupportedField, InvalidField."""
        match command.verb:
            case "memory":
                return {"ledger": self.facts.ledger | self.place.usage()}
            case "profile_start":
                return self.profiler.start(command.args)
            case "profile_stop":
                return self.profiler.stop()
            case "sleep" | "wake" | "weights_update" | "weights_receive" | "weights_take" | "weights_show":
                raise UnsupportedField(
                    f"memory and weights of such a model cannot be changed or shown on --device "
                    f"{self.place.device.kind}"
                )
            case "adapter_load" | "adapter_drop" if self.adapters is not None:
                return self.adapters.control(command)
            case "vocabulary" | "grammar" if self.facts.grammars:
                return self.matchers.control(command.verb, command.args) if self.matchers else {}
        raise UnsupportedField(f"there is no control command {command.verb!r}", param="verb")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds to the seconds that ``Facts.timings`` has under this name."""
        begun = clock.now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + clock.now() - begun
