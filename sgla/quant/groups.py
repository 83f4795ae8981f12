"""Weights in few bits, in groups of 32 along k that have their own constants.

``int8`` and ``int4``: ``w = q * scale + minimum`` with q in 0..255 or 0..15 and both constants float16;
int4's are fitted (``_fit``). So int4 holds GGUF's Q4_0 and Q4_1 without loss, ``int5`` these, Q5_0 and Q5_1,
int8 all of these and Q8_0. ``q8_0``, ``q5_0`` and ``q4_0`` are GGUF's types of that name, ``w = (q - half of
the range) * scale``. The four bits of ``iq4_nl`` and ``e2m1`` (MXFP4) are places in a table.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.cpu.panels import CODES, HALF, cut_fifth, join_fifth
from sgla.kernels.cpu.panels import GROUP as GROUP
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


class Int5(Affine):
    kind, bits = "int5", 5


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


class Coded(Groups):
    """A scale and a table of what the codes mean."""

    bits = 4
    codes: ClassVar[tuple[int, ...]]  # what they mean, ``zero`` more
    zero: ClassVar[int]

    @classmethod
    def of(cls, bits: int, q: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        """Of numbers that the table has."""
        codes = torch.zeros(256, dtype=torch.uint8)
        for code in reversed(range(16)):  # of two for 0 the first
            codes[cls.codes[code]] = code
        q = q.int() + (cls.zero - (1 << bits - 1))
        return cls(*q.shape, cls._quants(codes[q.long()]), scale.half())

    @classmethod
    def holds(cls, bits: int, symmetric: bool) -> bool:
        return False

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % GROUP), mode="replicate").view(n, -1, GROUP)
        scale = cls._scale(groups.abs().amax(-1)).half()
        values, codes = (cls._table(dense.device) - cls.zero).sort()
        middles = (values[1:] + values[:-1]) / 2
        found = torch.bucketize(groups / scale.float().masked_fill(scale == 0, 1.0)[..., None], middles)
        return cls(n, k, cls._quants(codes[found].view(n, -1)[:, :k]), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        data, scale = tensors
        values = cls._table(data.device)[cls._values(data).long()] - cls.zero
        return (values * scale.float()[..., None]).view(data.shape[0], -1)[:, :k]

    @classmethod
    def _table(cls, device: torch.device) -> Tensor:
        return torch.tensor(cls.codes, dtype=torch.float32, device=device)

    @classmethod
    @abstractmethod
    def _scale(cls, largest: Tensor) -> Tensor:
        """Of groups whose largest numbers these are."""


class IQ4_NL(Coded):
    kind, codes, zero = "iq4_nl", CODES["iq4_nl"], HALF["iq4_nl"]

    @classmethod
    def _scale(cls, largest: Tensor) -> Tensor:
        return _up(largest / 113)


class E2M1(Coded):
    """Twice the numbers of MXFP4, whose scales are powers of two."""

    kind, codes, zero = "e2m1", CODES["e2m1"], HALF["e2m1"]

    @classmethod
    def _scale(cls, largest: Tensor) -> Tensor:
        """As OCP's specification has it: the largest power of two that is not above the largest number, by
        that of 6, which is 4; of numbers between 6 and 8 times it the largest become 6."""
        return torch.ldexp(torch.ones_like(largest), (torch.frexp(largest)[1] - 4).clamp(-24, 15))


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
