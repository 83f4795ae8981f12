"""Matrices of e2m1 numbers, two in each byte, as checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.quant.e2m1 import NVFP4, NVFP4_GROUP
from sgla.quant.groups import E2M1
from sgla.quant.mxfp4 import BIAS, VALUES
from sgla.quant.scaled import POWERS, powers
from sgla.quant.weight import StoredTensor, Weight, storage


@dataclass(frozen=True)
class Nibbles:
    """``packed`` ``[n, k / 2]`` bytes, the first of two numbers in the lower bits; ``scales``
    ``[n, k / group]``: e4m3, or exponents (``POWERS``). ``factor``: of all scales; ``divides`` them, or
    multiplies."""

    packed: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    group: int
    factor: StoredTensor | None = None
    divides: bool = False

    def dense(self, rows: range | None = None) -> Tensor:
        rows = rows or range(self.shape[0])
        codes = self._codes(rows)
        values = torch.tensor(VALUES, device=codes.device)[codes.long()]
        return values * self._scale(rows).repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        if kind == "nvfp4" and self.group == NVFP4_GROUP:
            scale = self.scales.values(rows)
            factor = torch.full((len(rows),), self._factor(), device=scale.device)
            return NVFP4.of(self._codes(rows), scale, factor).cut(columns)
        if kind != "e2m1" or self.scales.type not in POWERS:
            return storage(kind).read(self, rows, columns)
        codes = self._codes(rows)
        doubled = torch.tensor([int(2 * value) + 16 for value in VALUES], device=codes.device)
        scale = self._scale(rows) / 2
        if scale.amax() > torch.finfo(torch.float16).max:
            raise WeightError("an exponent of MXFP4 numbers is beyond float16; take --quantization none")
        return E2M1.of(5, doubled[codes.long()], scale, scale).cut(columns)

    def _codes(self, rows: range) -> Tensor:
        pairs = self.packed.values(rows).view(torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)

    def _scale(self, rows: range) -> Tensor:
        """float32 ``[len(rows), groups]``."""
        found = self.scales.values(rows)
        if self.scales.type in POWERS:
            return torch.ldexp(torch.ones(found.shape, device=found.device), powers(found) - BIAS)
        return found.float() * self._factor()

    def _factor(self) -> float:
        """Of all scales."""
        if self.factor is None:
            return 1.0
        factor = self.factor.values().float().view(-1)[0]
        return float(1.0 / factor if self.divides else factor)
