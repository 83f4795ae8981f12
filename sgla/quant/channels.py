"""Weights in 8-bit floating point with a scale for each output channel, or for 128 or 32 input channels of
it."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.quant.weight import Weight

MAX = 448.0
GROUP, MX_GROUP = 128, 32  # channels of k with one scale


class E4M3(Weight):
    """e4m3 numbers (arXiv 2209.05433) ``[n, k]``, float32 scales ``[n]``. Kernels for GPUs alone."""

    kind = "fp8"

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        w = dense.float()
        scale = w.abs().amax(1).clamp_min(1e-30) / MAX
        return cls(*w.shape, (w / scale[:, None]).clamp_(-MAX, MAX).to(torch.float8_e4m3fn), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        numbers, scale = tensors
        return numbers.float() * scale[:, None]

    def columns(self, start: int, stop: int) -> Self:
        numbers, scale = self.tensors
        return type(self)(self.n, stop - start, numbers[:, start:stop], scale)


class E4M3Groups(Weight):
    """e4m3 numbers ``[n, k]``, float32 scales ``[n, ceil(k / GROUP)]``: has blocks of 128 x 128 as they are.
    Kernels for GPUs alone."""

    kind = "fp8g128"

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % GROUP)).view(n, -1, GROUP)
        scale = groups.abs().amax(-1).clamp_min(1e-30) / MAX
        numbers = (groups / scale[..., None]).clamp_(-MAX, MAX).to(torch.float8_e4m3fn)
        return cls(n, k, numbers.view(n, -1)[:, :k].contiguous(), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        numbers, scale = tensors
        return numbers.float() * scale.repeat_interleave(GROUP, 1)[:, :k]

    def columns(self, start: int, stop: int) -> Self:
        if start % GROUP or (stop % GROUP and stop != self.k):
            raise ConfigError(f"fp8 blocks split over ranks in groups of {GROUP}; use another --tp")
        numbers, scale = self.tensors
        groups = scale[:, start // GROUP : -(-stop // GROUP)]
        return type(self)(self.n, stop - start, numbers[:, start:stop], groups)


class MXFP8(Weight):
    """e4m3 numbers ``[n, k]`` and exponents, 127 more than they mean, of 32 channels each, uint8
    ``[n, blocks of 128 * 4]`` (OCP Microscaling Formats 1.0). Kernels for GPUs alone."""

    kind = "mxfp8"

    @classmethod
    def of(cls, numbers: Tensor, exponents: Tensor) -> Self:
        """From exponents ``[n, ceil(k / 32)]``."""
        n, k = numbers.shape
        more = -(-k // GROUP) * (GROUP // MX_GROUP) - exponents.shape[1]
        return cls(n, k, numbers, F.pad(exponents, (0, more), value=127))

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % MX_GROUP)).view(n, -1, MX_GROUP)
        exponents = (torch.frexp(groups.abs().amax(-1))[1] - 9).clamp_(-127, 127)
        numbers = torch.ldexp(groups, -exponents[..., None]).clamp_(-MAX, MAX).to(torch.float8_e4m3fn)
        return cls.of(numbers.view(n, -1)[:, :k].contiguous(), (exponents + 127).to(torch.uint8))

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        numbers, exponents = tensors
        wide = exponents.int().repeat_interleave(MX_GROUP, 1)[:, :k] - 127
        return torch.ldexp(numbers.float(), wide)

    def columns(self, start: int, stop: int) -> Self:
        if start % MX_GROUP or (stop % MX_GROUP and stop != self.k):
            raise ConfigError(f"mxfp8 weights split over ranks in groups of {MX_GROUP}; use another --tp")
        numbers, exponents = self.tensors
        return self.of(numbers[:, start:stop], exponents[:, start // MX_GROUP : -(-stop // MX_GROUP)])
