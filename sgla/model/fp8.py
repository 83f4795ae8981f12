"""Checkpoints whose linear weights are e4m3 numbers with scales beside them.

``X.weight_scale``: one for the tensor, or one for each output channel (compressed-tensors, FBGEMM, ModelOpt).
``X.weight_scale_inv``: one for each block of 128 x 128, by which the numbers are multiplied in spite of its
name (DeepSeek-V3, arXiv 2412.19437; Qwen3-FP8). Scales of activations and of a KV cache are not used: the
former are made for each token, the latter are measured at start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sgla.errors import WeightError
from sgla.quant.channels import E4M3
from sgla.quant.weight import SourceTensor, Weight, storage

_SCALE = re.compile(r"(.*)_scale(_inv)?$")
_UNUSED = re.compile(r".*\.(input|output|activation|q|k|v|kv)_scale$")


@dataclass(frozen=True)
class Scaled:
    """``numbers`` ``[n, k]`` times ``scale``:
    of shape [], [1], [n], [n, 1], or one value a block of rows and columns."""

    numbers: SourceTensor
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
        numbers = self.numbers.dense(rows)
        return numbers.float() * columns.to(numbers.device)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """As it is, if whole rows have one scale;
        blocks of a row are brought to one, which rounds once more."""
        if kind != "fp8" or self.block[1] < self.shape[1]:
            return storage(kind).read(self, rows, columns)
        scale = self._scale(rows)[:, 0].contiguous()
        return E4M3(len(rows), self.shape[1], self.numbers.dense(rows), scale).cut(columns)


def join_scales(
    tensors: Iterator[tuple[str, SourceTensor]], block: tuple[int, int], e4m3: set[str]
) -> Iterator[tuple[str, SourceTensor]]:
    """Tensors with their scales.
    ``block``: that of ``weight_scale_inv``; ``e4m3``: names of the tensors of that type.

    Raises WeightError naming e4m3 tensors without a scale and scales of a wrong shape.
    """
    found = dict(tensors)
    scales = {match[1]: name for name in found if (match := _SCALE.match(name)) and match[1] in e4m3}
    if missing := sorted(e4m3 - scales.keys()):
        raise WeightError(
            f"{len(missing)} tensors are e4m3 numbers without a scale ({missing[0]}_scale or _scale_inv)"
        )
    unused = set(scales.values())
    for name, tensor in found.items():
        if name in scales:
            scale = found[scales[name]]
            yield name, Scaled(tensor, scale, _block(scales[name], tuple(scale.shape), tensor.shape, block))
        elif name not in unused and not _UNUSED.match(name):
            yield name, tensor


def _block(
    name: str, scale: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, int]:
    if len(shape) != 2:
        raise WeightError(
            f"{name} is of a tensor of e4m3 numbers of shape {list(shape)}; only matrices may be of that type"
        )
    n, k = shape
    if scale in ((), (1,), (1, 1)):
        return n, k
    if scale in ((n,), (n, 1)):
        return 1, k
    if scale == (-(-n // block[0]), -(-k // block[1])):
        return block
    raise WeightError(
        f"{name} has shape {list(scale)}, which fits neither the {n} rows of its weight nor blocks of "
        f"{block[0]} x {block[1]} in {list(shape)}"
    )
