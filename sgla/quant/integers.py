"""Weights in 4 or 8 bits for GPUs, in groups along k with a scale and a zero of their own: ``w = (q - zero) *
scale``. What GPTQ, AWQ and compressed-tensors store fits without loss (scales in bfloat16 from 2 ** -17 on).

q lies as the tensor cores' instruction wants its left side, ``m16n8k16`` of PTX and Hopper's ``wgmma`` alike:
a lane reads 16 bytes at once that are its numbers of many steps of 16 channels, and a shift and a mask make
two of them bfloat16 (128 more than they are, if of 4 bits).
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.integers import BLOCK
from sgla.quant.weight import Weight

# Of the span of a group, what the numbers of 4 bits may reach over: the smallest error wins.
SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
TOGETHER = 1 << 18  # groups that are fitted at a time


class Integers(Weight):
    """int32 ``[n, blocks * BLOCK * bits / 32]`` and constants, int32 ``[n, blocks * BLOCK / group]``: a
    float16 scale in the lower half and a bfloat16 in the upper one: 128 + zero for 4 bits, zero - 128 for 8.
    Where zeros are any numbers (not ``whole``) that is a float16: the zero for 4 bits, zero - 128 for 8.

    Of 4 bits a block is ``[lane of 4, word of 4]``; word w of lane t has the channels ``32 w + 8 p + 2 t`` at
    bit ``4 p`` and the next ones at bit ``16 + 4 p``, p from 0 to 3. Of 8 bits (q - 128) it is ``[half,
    lane, word]``, and the channels ``64 half + 16 w + 8 p + 2 t`` and the next are bytes p and ``p + 2``.
    """

    bits: ClassVar[int]
    group: ClassVar[int]
    whole: ClassVar[bool] = True

    @classmethod
    def of(cls, q: Tensor, zero: Tensor, scale: Tensor) -> Self:
        """From q uint8 ``[n, k]``, ``zero`` in the same range, integers if they must be, and scales,
        ``[n, ceil(k / group)]`` each."""
        n, k = q.shape
        more = -k % BLOCK
        groups = (k + more) // cls.group - scale.shape[1]
        shifted = zero.float() + cls._shift()
        upper = F.pad(shifted, (0, groups)).to(torch.bfloat16 if cls.whole else torch.float16)
        lower = F.pad(scale, (0, groups)).half().view(torch.int16).int() & 0xFFFF
        upper = upper.view(torch.int16).int() << 16
        words = _words(F.pad(q.to(torch.uint8), (0, more)), cls.bits)
        return cls(n, k, words, lower | upper)

    @classmethod
    def _shift(cls) -> int:
        """What is added to zeros as they are stored."""
        return -128 if cls.bits == 8 else 128 if cls.whole else 0

    @classmethod
    def unpack(cls, k: int, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse: q uint8 ``[n, k]``, float32 zeros and scales ``[n, ceil(k / group)]``."""
        words, constants = tensors
        groups = -(-k // cls.group)
        q = _numbers(words, cls.bits)[:, :k]
        halves = constants.contiguous().view(torch.int16).view(len(words), -1, 2)[:, :groups]
        scale = halves[..., 0].contiguous().view(torch.float16).float()
        shifted = halves[..., 1].contiguous().view(torch.bfloat16 if cls.whole else torch.float16).float()
        return q, shifted - cls._shift(), scale

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        if dense.is_cuda:  # a kernel instead of two hundred, which is what many small experts wait for
            from sgla.kernels.triton import integers

            return cls(n, k, *integers.pack(dense, cls.bits, cls.group, cls.whole))
        most = (1 << cls.bits) - 1
        groups = F.pad(dense.float(), (0, -k % cls.group)).view(-1, cls.group)
        found = [_fit(part, most) for part in groups.split(TOGETHER)]
        scale, zero = (torch.cat(each) for each in zip(*found))
        divisor = scale.masked_fill(scale == 0, 1.0)
        q = groups.div(divisor[:, None]).round_().add_(zero[:, None]).clamp_(0, most)
        return cls.of(q.view(n, -1)[:, :k], zero.view(n, -1), scale.view(n, -1))

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        q, zero, scale = cls.unpack(k, *tensors)
        zero, scale = (t.repeat_interleave(cls.group, 1)[:, :k] for t in (zero, scale))
        return (q - zero) * scale

    def columns(self, start: int, stop: int) -> Self:
        if start % self.group or (stop % self.group and stop != self.k):
            raise ConfigError(
                f"weights of {self.bits} bits in groups of {self.group} split over ranks between groups; "
                "use another --tp"
            )
        q, zero, scale = self.unpack(self.k, *self.tensors)
        first, last = start // self.group, -(-stop // self.group)
        return self.of(q[:, start:stop], zero[:, first:last], scale[:, first:last])


def _fit(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The constants of groups float32 ``[count, group]`` whose integers are 0 to ``most``: scales as float16
    has them, and zeros, float32 ``[count]``."""
    low, high = x.amin(1).clamp_max_(0.0), x.amax(1).clamp_min_(0.0)
    best = x.new_full(low.shape, float("inf"))
    scale, zero = torch.zeros_like(low), torch.zeros_like(low)
    for span in SPANS if most == 15 else SPANS[:1]:
        tried = ((high - low) * (span / most)).half().float()
        divisor = tried.masked_fill(tried == 0, 1.0)
        offset = (low * -span / divisor).round_().clamp_(0, most)
        q = (x / divisor[:, None]).round_().add_(offset[:, None]).clamp_(0, most)
        error = q.sub_(offset[:, None]).mul_(tried[:, None]).sub_(x).square_().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, tried, scale), torch.where(better, offset, zero)
    return scale, zero


def _words(q: Tensor, bits: int) -> Tensor:
    """int32 of q uint8 ``[n, blocks * BLOCK]``."""
    n = len(q)
    if bits == 4:
        x = q.view(n, -1, 4, 4, 4, 2).int()  # block, word, p, lane, channel of two
        x = x.permute(0, 1, 4, 2, 3, 5)  # block, lane, word, p, channel
        shifts = torch.arange(4, dtype=torch.int32, device=q.device)[:, None] * 4
    else:
        x = (q ^ 128).view(n, -1, 2, 4, 2, 4, 2).int()  # block, half, word, p, lane, channel of two
        x = x.permute(0, 1, 2, 5, 3, 4, 6)  # block, half, lane, word, p, channel
        shifts = torch.arange(2, dtype=torch.int32, device=q.device)[:, None] * 8
    shifts = shifts + torch.arange(2, dtype=torch.int32, device=q.device) * 16
    return (x << shifts).sum((-1, -2), dtype=torch.int32).view(n, -1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """The inverse of ``_words``."""
    n, count = len(words), 16 // bits
    shifts = torch.arange(count, dtype=torch.int32, device=words.device)[:, None] * bits
    shifts = shifts + torch.arange(2, dtype=torch.int32, device=words.device) * 16
    x = (words[..., None, None] >> shifts & (1 << bits) - 1).to(torch.uint8)
    if bits == 4:
        return x.view(n, -1, 4, 4, 4, 2).permute(0, 1, 3, 4, 2, 5).reshape(n, -1)
    return x.view(n, -1, 2, 4, 4, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(n, -1) ^ 128


class Int4G32(Integers):
    kind, bits, group = "int4g32", 4, 32


class Int4G64(Integers):
    kind, bits, group = "int4g64", 4, 64


class Int4G128(Integers):
    kind, bits, group = "int4g128", 4, 128


class Int8G32(Integers):
    kind, bits, group = "int8g32", 8, 32


class Int8G64(Integers):
    kind, bits, group = "int8g64", 8, 64


class Int8G128(Integers):
    kind, bits, group = "int8g128", 8, 128


class Int4M32(Int4G32):
    kind, whole = "int4m32", False


class Int4M64(Int4G64):
    kind, whole = "int4m64", False


class Int4M128(Int4G128):
    kind, whole = "int4m128", False


class Int8M32(Int8G32):
    kind, whole = "int8m32", False


class Int8M64(Int8G64):
    kind, whole = "int8m64", False


class Int8M128(Int8G128):
    kind, whole = "int8m128", False
