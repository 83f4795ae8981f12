"""Weights in few bits, in groups of 32 along k that have their own constants.

``int8`` and ``int4``: ``w = q * scale + minimum`` with q in 0..255 or 0..15 and both constants float16;
int4's are fitted (``_fit``). So int4 holds GGUF's Q4_0 and Q4_1 without loss, int8 these, Q5_0, Q5_1 and
Q8_0. ``q8_0``, ``q5_0`` and ``q4_0`` are GGUF's types of that name, ``w = (q - half of the range) * scale``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.cpu.panels import GROUP as GROUP
from sgla.kernels.cpu.panels import cut_fifth, join_fifth
from sgla.quant.weight import Weight

STEPS = (14.0, 14.5, 15.0, 15.5, 16.0)  # into which int4 may cut the span of a group, which has 15
TOGETHER = 1 << 13  # groups that are fitted at a time: they stay in a core's cache


class Groups(Weight):
    """uint8 quants ``[n, groups * GROUP * bits / 8]``, those of 4 bits with the even k in the low nibble, of
    5 bits as ``cut_fifth`` has them; then constants, float16 ``[n, groups]`` each."""

    native = True
    bits: ClassVar[int]

    @classmethod
    @abstractmethod
    def of(cls, bits: int, q: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        """From quants ``[n, k]`` of so many bits, 0 at the least, and constants ``[n, ceil(k / 32)]``. They
        must be such that it ``holds`` them."""

    @classmethod
    @abstractmethod
    def holds(cls, bits: int, symmetric: bool) -> bool:
        """Whether it has all values of such quants without loss. ``symmetric``: their minimum is half of the
        range below 0."""

    @classmethod
    def _quants(cls, q: Tensor) -> Tensor:
        """As they are stored: from values ``[n, k]``."""
        q = F.pad(q.to(torch.uint8), (0, -q.shape[1] % GROUP))
        if cls.bits == 5:
            return cut_fifth(q)
        return q[:, 0::2] | q[:, 1::2] << 4 if cls.bits == 4 else q

    @classmethod
    def _values(cls, data: Tensor) -> Tensor:
        """The inverse: ``[n, groups, GROUP]``."""
        if cls.bits == 5:
            q = join_fifth(data)
        else:
            q = torch.stack([data & 15, data >> 4], dim=-1) if cls.bits == 4 else data
        return q.view(data.shape[0], -1, GROUP)

    def columns(self, start: int, stop: int) -> Self:
        """8 bits are rounded again where they are cut inside of a group."""
        if start % GROUP == 0 and (stop % GROUP == 0 or stop == self.k):
            first, last, width = start // GROUP, -(-stop // GROUP), GROUP * self.bits // 8
            constants = (t[:, first:last] for t in self.tensors[1:])
            return type(self)(self.n, stop - start, self.data[:, first * width : last * width], *constants)
        if self.bits == 8:
            return self.pack(self.dequant()[:, start:stop])
        raise ConfigError(
            f"{self.kind} weights split over ranks in groups of {GROUP}; "
            "use another --tp or --quantization int8"
        )


class Affine(Groups):
    """A scale and a minimum."""

    @classmethod
    def of(cls, bits: int, q: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        return cls(*q.shape, cls._quants(q), scale.half(), minimum.half())

    @classmethod
    def holds(cls, bits: int, symmetric: bool) -> bool:
        return bits <= cls.bits

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % GROUP), mode="replicate").view(n, -1, GROUP)
        low, high = groups.amin(-1).half(), groups.amax(-1)
        scale = _up((high - low.float()) / (2**cls.bits - 1)).half()
        cls._fit_all(groups, scale, low)
        divisor = scale.float().masked_fill(scale == 0, 1.0)
        q = ((groups - low.float()[..., None]) / divisor[..., None]).round_().clamp_(0, 2**cls.bits - 1)
        return cls.of(cls.bits, q.view(n, -1)[:, :k], scale, low)

    @classmethod
    def _fit_all(cls, groups: Tensor, scale: Tensor, low: Tensor) -> None:
        """Move the constants ``[n, groups]`` to better ones, in place."""

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        data, scale, minimum = tensors
        values = cls._values(data) * scale.float()[..., None] + minimum.float()[..., None]
        return values.view(data.shape[0], -1)[:, :k]


class Symmetric(Groups):
    """A scale alone: half of the range is 0."""

    @classmethod
    def of(cls, bits: int, q: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        return cls(*q.shape, cls._quants(q + ((1 << cls.bits - 1) - (1 << bits - 1))), scale.half())

    @classmethod
    def holds(cls, bits: int, symmetric: bool) -> bool:
        return symmetric and bits <= cls.bits

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        half = 1 << cls.bits - 1
        groups = F.pad(dense.float(), (0, -k % GROUP), mode="replicate").view(n, -1, GROUP)
        scale = _up(groups.abs().amax(-1) / (half - 1)).half()
        q = (groups / scale.float().masked_fill(scale == 0, 1.0)[..., None]).round_() + half
        return cls(n, k, cls._quants(q.clamp_(0, 2 * half - 1).view(n, -1)[:, :k]), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        data, scale = tensors
        low = scale.float() * -(1 << cls.bits - 1)
        values = cls._values(data) * scale.float()[..., None] + low[..., None]
        return values.view(data.shape[0], -1)[:, :k]


class Int8(Affine):
    kind, bits = "int8", 8


class Int4(Affine):
    kind, bits = "int4", 4

    @classmethod
    def _fit_all(cls, groups: Tensor, scale: Tensor, low: Tensor) -> None:
        parts = ((groups, GROUP), (scale, 1), (low, 1))
        for x, s, m in zip(*(t.reshape(-1, size).split(TOGETHER) for t, size in parts)):
            _fit(x.T.contiguous(), s[:, 0], m[:, 0])


class Q8_0(Symmetric):
    kind, bits = "q8_0", 8


class Q5_0(Symmetric):
    kind, bits = "q5_0", 5


class Q4_0(Symmetric):
    kind, bits = "q4_0", 4


def _up(scale: Tensor) -> Tensor:
    """Rounded up where float16 has few bits left or none,
    or the top of a group of tiny weights would be cut off."""
    return torch.where(scale < 2.0**-14, (scale * 2.0**24).ceil() * 2.0**-24, scale)


def _fit(x: Tensor, scale: Tensor, low: Tensor) -> None:
    """Move int4's constants, float16 ``[groups]``, to those with the smallest squared error of ``x``, float32
    ``[32, groups]``: for each number of ``STEPS`` the straight line that fits best to the quants of these
    steps, or the given one. (After llama.cpp's make_qkx2_quants.)"""
    bottom, mean = x.amin(0), x.mean(0)
    span = (x.amax(0) - bottom).clamp_min_(1e-30)

    def error(scale: Tensor, low: Tensor) -> Tensor:
        q = (x - low).div_(scale.masked_fill(scale == 0, 1.0)).round_().clamp_(0, 15)
        return q.mul_(scale).add_(low).sub_(x).square_().sum(0)

    best = error(scale.float(), low.float())
    for steps in STEPS:
        q = (x - bottom).mul_(steps / span).round_().clamp_(0, 15)
        middle = q.mean(0)
        q -= middle
        slope = (q * x).sum(0) / q.square_().sum(0)
        tried, start = slope.half().float(), (mean - slope * middle).half().float()
        found = error(tried, start)
        better = (found < best) & (tried > 0)
        best = torch.where(better, found, best)
        scale.copy_(torch.where(better, tried, scale))
        low.copy_(torch.where(better, start, low))
