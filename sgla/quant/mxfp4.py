"""Experts in MXFP4, as gpt-oss is published: 32 numbers of 4 bits share an exponent (OCP Microscaling Formats
1.0). GPUs keep them so, CPUs with scales in float16. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from torch import Tensor

    from sgla.quant.weight import SourceTensor, StoredTensor, Weight

GROUP = 32
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_HALF, *(-value for value in _HALF))  # of four bits
BIAS = 127  # of the exponents


class Mxfp4(Method):
    """Beside ``X_blocks`` ``[E, n, k / 32, 16]``, two numbers a byte, the first in the lower bits, there are
    the exponents ``X_scales`` ``[E, n, k / 32]``. All other layers are plain."""

    name, storage, devices = "mxfp4", "mxfp4", ("cpu", "cuda")
    experts_alone = True

    def stored(self, device: str = "cpu") -> str:
        return "e2m1" if device == "cpu" else self.storage

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.stored(device)

    def covers(self, module: str) -> bool:
        return ".experts." in module and super().covers(module)

    def stack(self, name: str, shape: tuple[int, ...]) -> dict[str, Held]:
        experts, k, n = shape
        groups = experts, n, k // GROUP
        return {
            f"{name}_blocks": Held((*groups, GROUP // 2), ("U8",)),
            f"{name}_scales": Held(groups, ("U8",)),
        }

    def take_stack(
        self, name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
    ) -> SourceTensor:
        return Expanded(stored[f"{name}_blocks"], stored[f"{name}_scales"], shape)


@dataclass(frozen=True)
class Expanded:
    """The numbers of experts ``[E, k, n]``."""

    blocks: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]

    def dense(self, rows: range | None = None) -> Tensor:
        import torch

        blocks, exponents = self.blocks.values(rows), self.scales.values(rows)
        table = torch.tensor(VALUES, device=blocks.device)
        pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1)
        numbers = torch.ldexp(pairs.flatten(-2), exponents[..., None].int() - BIAS)
        return numbers.flatten(-2).transpose(1, 2)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        raise ValueError("experts are read as a stack")
