"""The tensors of GGUF files, and the storages that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgla.hub.gguf_blocks import LazyTensor
from sgla.hub.source import ModelSource
from sgla.model.spec import ModelSpec
from sgla.quant.groups import GROUP, Groups
from sgla.quant.weight import Weight, storage

# Formats that have the values of others without loss, the smaller ones first.
HOLDS: dict[str, set[str]] = {
    "q5_0": {"q5_0", "q4_0"},
    "q8_0": {"q8_0", "q5_0", "q4_0"},
    "int4": {"int4", "q4_0"},
    "int8": {"int8", "int4", "q8_0", "q5_0", "q4_0"},
}


def kinds_of_file(source: ModelSource, spec: ModelSpec, plain: str, ranks: int) -> dict[str, str]:
    """The formats of the matrices of a GGUF file;
    those that are multiplied as one have the smallest that is enough for all."""
    kinds = {tensor.name: tensor.kept or plain for tensor in source.gguf().tensors()}
    for i in range(spec.layers):
        layer = f"model.layers.{i}"
        for module, parts in (("self_attn", ("q", "k", "v")), ("mlp", ("gate", "up"))):
            names = [f"{layer}.{module}.{part}_proj.weight" for part in parts]
            found = {kinds[name] for name in names}
            if len(found) > 1:
                kinds |= dict.fromkeys(names, next((k for k, held in HOLDS.items() if found <= held), plain))
        out = f"{layer}.self_attn.o_proj.weight"
        attention = spec.attention[i]
        if attention.heads // ranks * attention.v_dim % GROUP and kinds[out] != plain:
            kinds[out] = "q8_0"  # which may be cut inside of a group
    return kinds


@dataclass(frozen=True)
class Blocks:
    """A tensor in a GGUF file."""

    tensor: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def dense(self, rows: range | None = None) -> Tensor:
        return torch.from_numpy(self.tensor.numpy(rows))

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """Types in groups of 32 have the same constants as ours, so where these are wide enough for their
        quants they are taken over as they are."""
        made, bits = storage(kind), self.tensor.bits
        if bits is None or not (issubclass(made, Groups) and made.holds(bits, self.tensor.symmetric)):
            return made.read(self, rows, columns)
        parts = self.tensor.quants(rows)
        assert parts is not None
        return made.of(bits, *map(torch.from_numpy, parts)).cut(columns)
