"""A weight format as a package outside might bring it: -1, 0 and 1 in two bits, with a scale for each output
channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.quant import formats, methods
from sgla.quant.method import Held, Method
from sgla.quant.weight import SourceTensor, StoredTensor, Weight, storage


def places(device: torch.device) -> Tensor:
    """The bits where digits begin. Made on the device: a graph cannot hold a copy from the host."""
    return 2 * torch.arange(4, dtype=torch.uint8, device=device)


class Ternary(Weight):
    """uint8 ``[n, ceil(k / 4)]``, float32 scales ``[n]``."""

    kind = "ternary"

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        scale = dense.float().abs().amax(1)
        digits = (dense.float() / scale.clamp_min(1e-30)[:, None]).round() + 1
        return cls(n, k, bits(digits.to(torch.uint8)), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        data, scale = tensors
        digits = (data[..., None] >> places(data.device) & 3).view(len(data), -1)[:, :k]
        return (digits.float() - 1) * scale[:, None]

    def columns(self, start: int, stop: int) -> Self:
        made = self.pack(self.dequant()[:, start:stop])
        return type(self)(self.n, stop - start, made.data, self.tensors[1])


def bits(digits: Tensor) -> Tensor:
    digits = F.pad(digits, (0, -digits.shape[1] % 4)).view(len(digits), -1, 4)
    return (digits << places(digits.device)).sum(-1, dtype=torch.uint8)


class TernaryMethod(Method):
    name, storage, devices = "toy-ternary", "ternary", ("cpu", "cuda")

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {f"{module}.digits": Held((n, -(-k // 4)), ("U8",)), f"{module}.scale": Held((n,), ("F32",))}

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        return Digits(stored[f"{module}.digits"], stored[f"{module}.scale"], (n, k))


@dataclass
class Digits:
    digits: StoredTensor
    scale: StoredTensor
    shape: tuple[int, ...]

    def dense(self, rows: range | None = None) -> Tensor:
        return self._rows(rows or range(self.shape[0])).dequant()

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return (self._rows(rows) if kind == "ternary" else storage(kind).pack(self.dense(rows))).cut(columns)

    def _rows(self, rows: range) -> Ternary:
        return Ternary(len(rows), self.shape[1], self.digits.values(rows), self.scale.values(rows))


def register() -> None:
    formats.register(formats.Format("ternary", "toy_weights:Ternary", 0.25))
    methods.register("toy-ternary", "toy_weights:TernaryMethod")
