"""Weights in MXFP4 (OCP Microscaling Formats 1.0): e2m1 numbers, 32 of which share a power of two."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.quant.weight import Weight

GROUP = 32
BLOCK = 128  # channels of k that lie together
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
        halves = torch.stack([words, words >> 16], -1).view(len(words), -1, 1, GROUP)  # block, group, channel
        bits = torch.cat([halves >> low & 7 | (halves >> sign & 1) << 3 for low, sign in PLACES], 2)
        small = ((bits & 7) << 22 | (bits >> 3) << 31).view(torch.float32)  # 2 ** -126 times the number
        values = torch.ldexp(small * 2.0**126, exponents.int().view(*bits.shape[:3], 1) - BIAS)
        return values.view(len(words), -1)[:, :k]

    def columns(self, start: int, stop: int) -> Self:
        if start % GROUP or stop % GROUP:
            raise ConfigError(f"mxfp4 weights split over ranks in groups of {GROUP}; use another --tp")
        return self.pack(self.dequant()[:, start:stop])


def _words(codes: Tensor) -> Tensor:
    """int32 ``[n, blocks * 16]`` of the codes int32 ``[n, groups, GROUP]``."""
    pairs = codes.view(len(codes), -1, 4, GROUP // 2, 2)
    placed = [(c & 7) << low | (c >> 3) << sign for c, (low, sign) in zip(pairs.unbind(2), PLACES)]
    halves = torch.stack(placed).sum(0, dtype=torch.int32)
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)
