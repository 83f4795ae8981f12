"""How a CPU runner gives memory and weights back, and has them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sgla.errors import ConfigError, UnsupportedField, WeightError
from sgla.hub.source import ModelSource
from sgla.kernels.placement import Placement
from sgla.model.base import CausalLM
from sgla.worker.cpu_setup import CpuSetup
from sgla.worker.experts import placed
from sgla.worker.kv import forget
from sgla.worker.place import drop_garbage
from sgla.worker.runner import Command
from sgla.worker.weights import ChangingRunner


class CpuWeights(ChangingRunner, CpuSetup):
    """Its weights are in the host's memory, so to give them back is to read them again."""

    _awake = True  # the weights are there
    refilled = True  # or made anew

    def _check_sleep(self, weights: str) -> None:
        if self._drops(weights) and self.fixed:
            raise UnsupportedField(
                f"weights cannot be given back beside {self.fixed}; give back the KV cache alone",
                param="tags",
            )

    def _drops(self, weights: str) -> bool:
        return weights not in ("", "host") and not self.brought

    def _sleep(self, kv: bool, weights: str) -> None:
        self._check_sleep(weights)
        if kv:
            forget(self.kv, len(self.facts.groups))
        if self._drops(weights) and self._awake:
            self._drop()

    def _wake(self, kv: bool, weights: bool) -> None:
        if not weights or self._awake:
            return
        self._load_again(self.source)
        try:
            self._check_files()  # once they have been read, since they may have changed meanwhile
        except ConfigError:
            self._drop()
            raise

    def _commands(self) -> dict[str, Command]:
        """Beside those of all runners ``experts_place``: whole experts are where ``homes`` says, layers and
        those of each rank. No step is under way."""
        return super()._commands() | {"experts_place": self._place}

    def _place(self, args: dict[str, Any]) -> None:
        self._check_moves(self._awake)
        placement = Placement(self.config.ep, self.config.redundant_experts, dict(args["homes"]))
        self.shard = placed(self.shard, placement)
        self._load_again(self.source)

    def _load_again(self, source: ModelSource) -> None:
        if self._awake:
            self._drop()
        self.load_again(source)
        self._awake = True

    def _take(self, source: ModelSource, sound: bool = True) -> None:
        if self.model.declared is None:
            self._load_again(source)
        else:
            self.model.declared.load(source, sound=sound)

    def _look(self, source: ModelSource) -> None:
        if self.model.declared is not None:
            self.model.declared.look(source)

    def _take_tensors(self, tensors: Mapping[str, Tensor], look: bool) -> None:
        if self.model.declared is None:
            raise WeightError("tensors cannot be taken by modules of transformers")
        self.model.declared.take(tensors, look)

    def _scramble(self) -> None:
        if self.model.declared is None:
            raise UnsupportedField("modules of transformers are not given random weights", param="action")
        self.model.declared.scramble(self.source)

    @property
    def _model(self) -> CausalLM:
        return self.model

    def _drop(self) -> None:
        self._awake = False
        del self.model, self._forward
        drop_garbage()
