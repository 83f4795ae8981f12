"""Numbers with scales for rows or blocks, as one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgla.quant.channels import E4M3, GROUP, MXFP8, E4M3Groups
from sgla.quant.weight import SourceTensor, StoredTensor, Weight, storage

POWERS = ("U8", "F8_E8M0")  # types of exponents, as safetensors calls them


def powers(stored: Tensor) -> Tensor:
    """int32, of exponents of either type."""
    return stored.view(torch.uint8).int()


@dataclass(frozen=True)
class Powers:
    """A SourceTensor of exponents (``POWERS``), bytes that are 127 more than they mean: powers of two."""

    exponents: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.exponents.shape

    def dense(self, rows: range | None = None) -> Tensor:
        found = powers(self.exponents.values(rows))
        return torch.ldexp(torch.ones_like(found, dtype=torch.float32), found - 127)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        raise ValueError("scales are no matrix")


@dataclass(frozen=True)
class Scaled:
    """``numbers`` ``[n, k]`` times ``scale``:
    of shape [], [1], [n], [n, 1], or one value a block of rows and columns."""

    numbers: StoredTensor
    scale: SourceTensor
    block: tuple[int, int]  # (1, k): a scale for each row; (n, k): for everything

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def _scale(self, rows: range) -> Tensor:
        """float32 ``[len(rows), blocks along k]``."""
        height, width = self.block
        values = self.scale.dense().float().view(-(-self.shape[0] // height), -(-self.shape[1] // width))
        part = values[rows.start // height : -(-rows.stop // height)].repeat_interleave(height, 0)
        return part[rows.start % height :][: len(rows)]

    def dense(self, rows: range | None = None) -> Tensor:
        rows = rows or range(self.shape[0])
        columns = self._scale(rows).repeat_interleave(self.block[1], 1)[:, : self.shape[1]]
        numbers = self.numbers.values(rows)
        return numbers.float() * columns.to(numbers.device)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """As it is, if the storage has a scale where the file has one; else it is rounded once more."""
        k, width = self.shape[1], self.block[1]
        if kind == "fp8" and width >= k:
            scale = self._scale(rows)[:, 0].contiguous()
            return E4M3(len(rows), k, self.numbers.values(rows), scale).cut(columns)
        if kind == "fp8g128" and (width >= k or width % GROUP == 0):
            scale = self._scale(rows).repeat_interleave(-(-min(width, k) // GROUP), 1)
            groups = scale[:, : -(-k // GROUP)].contiguous()
            return E4M3Groups(len(rows), k, self.numbers.values(rows), groups).cut(columns)
        if kind == "mxfp8" and isinstance(self.scale, Powers):
            exponents = self.scale.exponents.values(rows).view(torch.uint8)
            return MXFP8.of(self.numbers.values(rows), exponents).cut(columns)
        return storage(kind).read(self, rows, columns)
