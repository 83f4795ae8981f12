"""Weights of four bits that are places in a table, as bitsandbytes has them (arXiv 2305.14314)."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.cpu.panels import Kind
from sgla.quant.weight import Make, Weight, anywhere

GROUP = 64  # channels of k with one scale
BLOCK = 128  # channels of k that lie together
_THIRDS = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)


class Coded(Weight):
    """int32 ``[n, blocks * 16]``, the codes of eight neighbours each, the first in the lowest bits; and
    float32 ``[n, blocks * 2]``, what the numbers of the table are multiplied by. CPU kernels have these as
    integers of 14 bits."""

    native = True
    table: ClassVar[tuple[float, ...]]  # of 16

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor) -> Self:
        """From codes ``[n, k]`` and float32 ``[n, ceil(k / GROUP)]``."""
        n, k = codes.shape
        padded = F.pad(codes.int(), (0, -k % BLOCK)).view(n, -1, 8)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        words = (padded << shifts).sum(-1, dtype=torch.int32)
        return cls(n, k, words, F.pad(scale, (0, words.shape[1] // 8 - scale.shape[1])))

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % GROUP)).view(n, -1, GROUP)
        scale = groups.abs().amax(-1)
        values, places = cls.values(dense.device).sort(stable=True)
        middles = (values[1:] + values[:-1]) / 2
        codes = places[torch.bucketize(groups / scale.clamp_min(1e-30)[..., None], middles)]
        return cls.of(codes.view(n, -1)[:, :k], scale)

    @classmethod
    def empty(cls, n: int, k: int, make: Make = anywhere) -> Self:
        """Raises ConfigError where a block of a file would have channels of two rows."""
        if k % GROUP:
            raise ConfigError(
                f"{cls.kind} weights are kept in blocks of {GROUP} channels, and a layer has {k}: "
                "--quantization none computes them in --dtype",
                param="quantization",
            )
        return super().empty(n, k, make)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        words, scale = tensors
        found = cls.values(words.device)[_codes(words).long()].view(len(words), -1, GROUP)
        return (found * scale[..., None]).view(len(words), -1)[:, :k]

    @classmethod
    def values(cls, device: torch.device) -> Tensor:
        """What codes mean, float32 ``[16]``."""
        return _tensor(cls.table, device)

    def columns(self, start: int, stop: int) -> Self:
        if start % GROUP or (stop % GROUP and stop != self.k):
            raise ConfigError(f"{self.kind} weights split over ranks in groups of {GROUP}; use another --tp")
        words, scale = self.tensors
        return self.of(_codes(words)[:, start:stop], scale[:, start // GROUP : -(-stop // GROUP)])

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        words, scale = self.tensors
        data = words.view(torch.uint8)[:, : -(-self.k // 32) * 16]
        return cast(Kind, self.kind), (data, scale[:, : -(-self.k // GROUP)])

    @classmethod
    def of_native(cls, n: int, k: int, *tensors: Tensor) -> Weight:
        data, scale = tensors
        blocks = -(-k // BLOCK)
        words = F.pad(data, (0, blocks * BLOCK // 2 - data.shape[1])).view(torch.int32)
        return cls(n, k, words, F.pad(scale, (0, blocks * BLOCK // GROUP - scale.shape[1])))


@lru_cache
def _tensor(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, device=device)


def _codes(words: Tensor) -> Tensor:
    """int32 ``[n, blocks * BLOCK]``."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).flatten(1)


class NF4(Coded):
    kind = "nf4"
    table = (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    )


class FP4(Coded):
    kind = "fp4"
    table = (*_THIRDS, *(-value for value in _THIRDS))
