"""Medusa (arXiv 2401.10774), without its trees: heads that guess from the last hidden state of a model, each
a token further on than the one before. The tensors are those of the authors' checkpoints."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.vocab import LMHead
from sgla.model.base import Decoder


class MedusaHead:
    """``layers`` steps of ``x + silu(W x + b)``, and an output layer of its own."""

    def __init__(self, build: Build, name: str, hidden: int, vocab: int, layers: int, bias: bool) -> None:
        whole = range(hidden)
        self.steps = [
            MergedColumnLinear(build, hidden, [(f"{name}.{i}.linear", hidden, whole)], bias)
            for i in range(layers)
        ]
        self.out = LMHead(build, f"{name}.{layers}", vocab, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states ``[S, d]`` -> logits float32 ``[S, vocab]``."""
        return self.out(self._read(x))

    def part(self, x: Tensor) -> Tensor:
        """The same of this rank's part of the vocabulary, ``out.own``."""
        return self.out.part(self._read(x))

    def _read(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = ops.add(x, ops.activate(step(x), "silu"))
        return x


class Medusa:
    """Head i guesses the token i + 2 places behind the one whose hidden state it reads."""

    def __init__(self, target: Decoder, build: Build, heads: int, layers: int, bias: bool) -> None:
        spec = target.spec
        self.width = spec.hidden
        self.heads = [MedusaHead(build, str(i), spec.hidden, spec.vocab, layers, bias) for i in range(heads)]
