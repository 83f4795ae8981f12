"""What the runners of all devices and models have in common: how a rank starts, what it says of itself, and
how it answers commands. How a step is computed is the part of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sgla import clock
from sgla.config import Config
from sgla.dist.meeting import store_of
from sgla.errors import UnsupportedField
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.messages import Control, Facts, Moved, Pooling, Progress, StepPlan, StepResult
from sgla.model.read import read_decoder
from sgla.model.spec import ModelSpec
from sgla.model.stages import stages_of
from sgla.worker.adapters import AdapterStore
from sgla.worker.copies import Copies
from sgla.worker.loop import Reply
from sgla.worker.place import Place, take_place
from sgla.worker.profile import Profiler

Command = Callable[[dict[str, Any]], Reply | None]  # None: there is nothing to say
# Verbs of what becomes of memory and weights, which not all runners honour (``ChangingRunner``).
CHANGES = (
    "may_change",
    "sleep",
    "wake",
    "weights_update",
    "weights_receive",
    "weights_take",
    "weights_show",
    "weights_check",
    "trainer_join",
    "trainer_leave",
)


# Verbs of the counts of experts that tokens choose, which CPUs have.
COUNTS = ("experts_start", "experts_stop", "experts_dump")


class Runner(ABC):
    """One rank of a model. Loads on construction; ``report`` hears of the progress.
    Raises ConfigError and its kin.

    ``pooling``: of a model that answers with vectors. ``matchers``: of a rank that samples, for a model whose
    outputs may have a grammar. ``adapters``: None where rows cannot have any. ``copies``: what plans copy to
    and from.
    """

    config: Config
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
        self.copies = Copies()
        self._seconds: dict[str, float] = {}
        self._report = report
        self.profiler = Profiler(rank)
        with self._phase("ranks"):
            self.place: Place = take_place(config, rank, size, store_of(rendezvous))
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

    def _stage(self, source: ModelSource) -> ModelSpec:
        """The model, as this rank's stage has it. Raises ConfigError."""
        spec, pipe = read_decoder(source.config), self.shard.pipe
        return spec if pipe is None else stages_of(self.config, spec)[pipe.stage]

    def _settle(self, config: Config) -> None:  # noqa: B027  (most do nothing)
        """What is done between loading and the first step."""

    @abstractmethod
    def _warm_up(self) -> None:
        """Steps without a request, so that the first one does not wait."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step."""

    @property
    def copying(self) -> bool:
        """Some copy has not been told of by ``moved``."""
        return self.copies.under_way

    @property
    def queueing(self) -> bool:
        """A copy goes on as somebody calls ``moved``, not by threads."""
        return False

    @torch.inference_mode()
    def moved(self) -> list[Moved]:
        """The copies that have ended since the last call."""
        return self.copies.ended()

    def close(self) -> None:
        """Give back what others may want to have. No step runs."""
        self.copies.close()

    def control(self, command: Control) -> Reply:
        """A reply, which may come later. Raises UnsupportedField, InvalidField."""
        run = self._commands().get(command.verb)
        if run is None:
            raise UnsupportedField(f"there is no control command {command.verb!r}", param="verb")
        return run(command.args) or {}

    def _commands(self) -> dict[str, Command]:
        """What is done by verb: ``memory``; ``profile_start`` with ``folder`` and ``steps``;
        ``profile_stop``; those of ``AdapterStore``; those of ``grammar/matcher.py``, for models that
        generate; ``CHANGES``; ``COUNTS``."""
        found: dict[str, Command] = {
            "memory": lambda args: {"ledger": self.facts.ledger | self.place.usage()},
            "profile_start": self.profiler.start,
            "profile_stop": lambda args: self.profiler.stop(),
        }
        found |= dict.fromkeys(CHANGES, self._stay) | dict.fromkeys(COUNTS, self._uncounted)
        if self.adapters is not None:
            found |= {"adapter_load": self.adapters.load, "adapter_drop": self.adapters.drop}
        if self.facts.grammars:
            found |= {verb: partial(self._match, verb) for verb in ("vocabulary", "grammar")}
        return found

    def _match(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        return self.matchers.control(verb, args) if self.matchers else {}

    def _uncounted(self, args: dict[str, Any]) -> None:
        raise UnsupportedField(f"experts are not counted on --device {self.place.device.kind}")

    def _stay(self, args: dict[str, Any]) -> None:
        raise UnsupportedField(
            "memory and weights of such a model cannot be changed or shown on --device "
            f"{self.place.device.kind}"
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds to the seconds that ``Facts.timings`` has under this name."""
        begun = clock.now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + clock.now() - begun
