"""Weights of e2m1 numbers: in MXFP4 (OCP Microscaling Formats 1.0) 32 share a power of two, in NVFP4 16 share
a number in e4m3."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.cpu.panels import Kind
from sgla.quant.weight import Weight

GROUP = 32
BLOCK = 128  # channels of k that lie together
NVFP4_GROUP, E4M3_MAX = 16, 448.0
HIGHEST = 22  # more than an exponent that CPU kernels are given means, of frexp
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
# Kernels read a code as a bfloat16 that is 2 ** -126 times the number, and multiply it by one with the stored
# exponent, so that it becomes 2 ** -64 times what it means: half of the exponents are left on either side.
BIAS = 127 + 126 - 64
# Where the code of each group of a block lies in 16 bits: its lower bits, and its sign. Kernels make bfloat16
# of two codes of a word with a shift and a mask for each.
PLACES = ((6, 15), (3, 12), (0, 13), (9, 14))


class E2M1(Weight):
    """int32 ``[n, blocks * 16]`` and an exponent of each group, uint8 ``[n, blocks * 4]``, ``BIAS`` more than
    the power of two. Word ``q`` of a block has the channels ``2 q`` and ``2 q + 1`` of its four groups in its
    lower and upper half, at ``PLACES``. Kernels for GPUs alone."""

    kind = "mxfp4"

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        """Numbers that MXFP4 has stay as they are if their power of two is from -61 to 64."""
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % BLOCK)).view(n, -1, GROUP)
        exponents = (torch.frexp(groups.abs().amax(-1))[1] - 3 + BIAS).clamp_(128, 253)
        scaled = torch.ldexp(groups, (BIAS - exponents)[..., None])
        codes = torch.bucketize(scaled.abs(), torch.tensor(MIDDLES, device=dense.device), right=False)
        return cls(n, k, _words(codes.int() | (scaled < 0).int() << 3), exponents.to(torch.uint8))

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        words, exponents = tensors
        values = torch.ldexp(_values(_codes(words)), exponents.int()[..., None] - BIAS)
        return values.view(len(words), -1)[:, :k]

    def columns(self, start: int, stop: int) -> Self:
        if start % GROUP or stop % GROUP:
            raise ConfigError(f"mxfp4 weights split over ranks in groups of {GROUP}; use another --tp")
        return self.pack(self.dequant()[:, start:stop])


class NVFP4(Weight):
    """int32 ``[n, blocks * 16]`` as of ``E2M1``, a scale of each 16 numbers, e4m3 ``[n, blocks * 8]``, and a
    float32 ``[n]`` by which these are multiplied."""

    kind, native = "nvfp4", True

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, factor: Tensor) -> Self:
        """From codes of four bits ``[n, k]``, e4m3 ``[n, ceil(k / 16)]`` and float32 ``[n]``."""
        n, k = codes.shape
        words = _words(F.pad(codes.int(), (0, -k % BLOCK)).view(n, -1, GROUP))
        more = -(-k // BLOCK) * (BLOCK // NVFP4_GROUP) - scale.shape[1]
        padded = F.pad(scale.view(torch.uint8), (0, more)).view(torch.float8_e4m3fn)
        return cls(n, k, words, padded, factor)

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % NVFP4_GROUP)).view(n, -1, NVFP4_GROUP)
        most = groups.abs().amax(-1)
        factor = most.amax(1).clamp_min(1e-30) / (6 * E4M3_MAX)
        scale = (most / (6 * factor[:, None])).to(torch.float8_e4m3fn)
        divisor = (scale.float() * factor[:, None]).masked_fill(scale.float() == 0, 1.0)
        scaled = groups / divisor[..., None]
        codes = torch.bucketize(scaled.abs(), torch.tensor(MIDDLES, device=dense.device), right=False)
        codes = codes.int() | (scaled < 0).int() << 3
        return cls.of(codes.view(n, -1)[:, :k], scale, factor)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        words, scale, factor = tensors
        values = _values(_codes(words)).view(len(words), -1, NVFP4_GROUP) * scale.float()[..., None]
        return (values * factor[:, None, None]).view(len(words), -1)[:, :k]

    def columns(self, start: int, stop: int) -> Self:
        if start % NVFP4_GROUP or stop % NVFP4_GROUP:
            raise ConfigError(f"nvfp4 weights split over ranks in groups of {NVFP4_GROUP}; use another --tp")
        words, scale, factor = self.tensors
        codes = _codes(words).view(self.n, -1)[:, start:stop]
        return self.of(codes, scale[:, start // NVFP4_GROUP : stop // NVFP4_GROUP], factor)

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        """For 64 channels four scales, a byte each, then eight words of codes: the first of eight channels in
        the lowest bits. Scales have a bit more of exponent and no sign, which codes have."""
        words, scale, factor = self.tensors
        units, spans = -(-self.k // 64), -(-self.k // 256)
        values = F.pad(scale.float(), (0, -scale.shape[1] % 4)).view(self.n, -1, 4)[:, :units]
        mantissa, exponent = torch.frexp(values.abs())
        codes = _codes(words).view(self.n, -1, 4, NVFP4_GROUP)[:, :units] ^ (values < 0).int()[..., None] << 3
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (codes.view(self.n, units, 8, 8) << shifts).sum(-1, dtype=torch.int32)
        bytes_ = (exponent + HIGHEST << 3) + (mantissa * 16).int() - 8
        bytes_ = bytes_.masked_fill(values == 0, 0).to(torch.uint8).view(torch.int32)
        data = torch.cat([bytes_, packed], -1).view(self.n, -1).view(torch.uint8)
        unknown = values.isnan().any(-1).any(-1)
        return "nvfp4", (data, factor.masked_fill(unknown, torch.nan)[:, None].expand(-1, spans))

    @classmethod
    def of_native(cls, n: int, k: int, *tensors: Tensor) -> Weight:
        data, factor = tensors
        rows = data.view(n, -1, 9, 4)
        held = rows[:, :, 0].flatten(1).int()
        scale = torch.ldexp((held & 7) / 8 + 1, (held >> 3) - HIGHEST - 1).masked_fill(held == 0, 0.0)
        pairs = rows[:, :, 1:].flatten(1)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, :k]
        groups = -(-k // NVFP4_GROUP)
        return cls.of(codes, scale.to(torch.float8_e4m3fn)[:, :groups], factor[:, 0].contiguous())


def _codes(words: Tensor) -> Tensor:
    """The inverse of ``_words``."""
    halves = torch.stack([words, words >> 16], -1).view(len(words), -1, 1, GROUP)  # block, group, channel
    bits = [halves >> low & 7 | (halves >> sign & 1) << 3 for low, sign in PLACES]
    return torch.cat(bits, 2).view(len(words), -1, GROUP)


def _values(codes: Tensor) -> Tensor:
    """The numbers of int32 codes."""
    small = ((codes & 7) << 22 | (codes >> 3) << 31).view(torch.float32)  # 2 ** -126 times the number
    return small * 2.0**126


def _words(codes: Tensor) -> Tensor:
    """int32 ``[n, blocks * 16]`` of the codes int32 ``[n, groups, GROUP]``."""
    pairs = codes.view(len(codes), -1, 4, GROUP // 2, 2)
    placed = [(c & 7) << low | (c >> 3) << sign for c, (low, sign) in zip(pairs.unbind(2), PLACES)]
    halves = torch.stack(placed).sum(0, dtype=torch.int32)
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)
