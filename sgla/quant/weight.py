"""Weights of linear layers in the formats the kernels read.

``f32`` and ``bf16`` are plain. ``int8`` and ``int4``: groups of 32 along k, ``w = q * scale + minimum`` with q in 0..255 or 0..15 and
both constants float16; int4's are fitted (``_fit``). So int4 holds GGUF's Q4_0 and Q4_1 without loss, int8 these, Q5_0, Q5_1 and Q8_0. ``fp8``: e4m3
(arXiv 2209.05433), one float32 scale per output channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.panels import GROUP, Kind, Panels

LEVELS = {"int8": 255, "int4": 15}  # the largest q
E4M3_MAX = 448.0
STEPS = (14.0, 14.5, 15.0, 15.5, 16.0)  # into which int4 may cut the span of a group, which has 15
TOGETHER = 1 << 13  # groups that are fitted at a time: they stay in a core's cache


@dataclass(slots=True)
class Weight:
    """One linear's weight ``[n, k]``.

    ``data`` is float32, bfloat16 or e4m3 ``[n, k]``; for int8 uint8 ``[n, groups * 32]``, for int4 uint8 ``[n, groups * 16]``, the
    even k in the low nibble. ``scale`` float16[n, groups] (int8, int4) or float32[n] (fp8); ``minimum`` float16[n, groups].
    """

    kind: Kind
    n: int
    k: int
    data: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None
    panels: Panels | None = None  # set by ``to_panels``, which empties the tensors above
    parts: list[Weight] | None = None  # set by ``split``, which does too

    @classmethod
    def of_groups(cls, kind: Kind, q: Tensor, scale: Tensor, minimum: Tensor) -> Weight:
        """int8 or int4 from quants ``[n, k]`` and float16 constants ``[n, ceil(k / 32)]``."""
        n, k = q.shape
        q = F.pad(q.to(torch.uint8), (0, -k % GROUP))
        data = q[:, 0::2] | q[:, 1::2] << 4 if kind == "int4" else q
        return cls(kind, n, k, data, scale.half(), minimum.half())

    @property
    def nbytes(self) -> int:
        if self.parts is not None:
            return sum(part.nbytes for part in self.parts)
        parts = (self.data, self.scale, self.minimum) if self.panels is None else (self.panels.data,)
        return sum(t.nbytes for t in parts if t is not None)

    def to_panels(self, isa: str = "") -> Panels:
        """Move to the order of the native CPU kernels, once; plain copies are given up. Raises BuildError.

        ``isa``: the level of the kernels, the best one if empty.
        """
        if self.panels is None:
            self.panels = Panels.of(self.kind, self.k, self.data, self.scale, self.minimum, isa)
            self.data, self.scale, self.minimum = self.data.new_empty(0), None, None
        return self.panels

    def _parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return (self.data, self.scale, self.minimum) if self.panels is None else self.panels.plain()

    def dequant(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense ``[n, k]``; no copy if it has this dtype already."""
        return _dense(self.kind, self.k, *self._parts()).to(dtype)

    def take(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 ``[len(ids), k]``."""
        rows = ids.long()
        data, scale, minimum = (None if t is None else t[rows] for t in self._parts())
        assert data is not None
        return _dense(self.kind, self.k, data, scale, minimum).float()

    def rows(self, start: int, stop: int) -> Weight:
        """Output channels ``start:stop``; the whole weight is itself, so that tied layers share their panels."""
        if (start, stop) == (0, self.n):
            return self
        data, scale, minimum = (None if t is None else t[start:stop] for t in self._parts())
        assert data is not None
        return Weight(self.kind, stop - start, self.k, data, scale, minimum)

    def split(self, count: int) -> list[Weight]:
        """Equal parts by rows, the same ones every time, for good: each may move to panels of its own."""
        if self.parts is None:
            self.parts = [self.part(i, count) for i in range(count)]
            self.data, self.scale, self.minimum = self.data.new_empty(0), None, None
        return self.parts

    def part(self, index: int, count: int) -> Weight:
        """One of ``count`` equal parts by rows."""
        if self.parts is not None:
            return self.parts[index]
        data, scale, minimum = (None if t is None else t.chunk(count)[index] for t in self._parts())
        assert data is not None
        return Weight(self.kind, self.n // count, self.k, data, scale, minimum)

    def columns(self, start: int, stop: int) -> Weight:
        """Input channels ``start:stop``; for int8 and int4 ``start`` must begin a group of 32."""
        data, scale, minimum = self._parts()
        if self.kind not in LEVELS:
            return Weight(self.kind, self.n, stop - start, data[:, start:stop], scale)
        assert start % GROUP == 0
        assert stop % GROUP == 0 or stop == self.k
        assert scale is not None
        assert minimum is not None
        first, last = start // GROUP, -(-stop // GROUP)
        width = GROUP if self.kind == "int8" else GROUP // 2  # bytes of a group
        data = data[:, first * width : last * width]
        return Weight(self.kind, self.n, stop - start, data, scale[:, first:last], minimum[:, first:last])


def pack(weight: Tensor, kind: Kind) -> Weight:
    """Bring a dense ``[n, k]`` into ``kind``; no copy if it is stored that way already."""
    n, k = weight.shape
    if kind == "f32" or kind == "bf16":
        return Weight(kind, n, k, weight.to(torch.float32 if kind == "f32" else torch.bfloat16))
    w = weight.float()
    if kind == "fp8":
        scale = w.abs().amax(1).clamp_min(1e-30) / E4M3_MAX
        return Weight(
            kind, n, k, (w / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
        )
    groups = F.pad(w, (0, -k % GROUP), mode="replicate").view(n, -1, GROUP)
    low, high = groups.amin(-1).half(), groups.amax(-1)
    scale = (high - low.float()) / LEVELS[kind]
    # Up, where float16 has few bits left or none, or the top of a group of tiny weights would be cut off.
    scale = torch.where(scale < 2.0**-14, (scale * 2.0**24).ceil() * 2.0**-24, scale).half()
    if kind == "int4":
        for x, s, m in zip(
            *(t.reshape(-1, size).split(TOGETHER) for t, size in ((groups, GROUP), (scale, 1), (low, 1)))
        ):
            _fit(x.T.contiguous(), s[:, 0], m[:, 0])
    divisor = scale.float().masked_fill(scale == 0, 1.0)
    q = ((groups - low.float()[..., None]) / divisor[..., None]).round_().clamp_(0, LEVELS[kind])
    return Weight.of_groups(kind, q.view(n, -1)[:, :k], scale, low)


def _fit(x: Tensor, scale: Tensor, low: Tensor) -> None:
    """Move int4's constants, float16 ``[groups]``, to those with the smallest squared error of ``x``, float32 ``[32, groups]``: for each
    number of ``STEPS`` the straight line that fits best to the quants of these steps, or the given one. (After llama.cpp's
    make_qkx2_quants.)"""
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


def concat(weights: list[Weight]) -> Weight:
    """Stack weights of one kind and one k along n (q, k and v into one linear)."""
    first = weights[0]
    assert all(w.kind == first.kind and w.k == first.k for w in weights)

    def cat(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        present = [p for p in parts if p is not None]
        return torch.cat(present) if present else None

    data, scale, minimum = (cat(parts) for parts in zip(*(w._parts() for w in weights), strict=True))
    assert data is not None
    return Weight(first.kind, sum(w.n for w in weights), first.k, data, scale, minimum)


def _dense(kind: Kind, k: int, data: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
    if kind == "f32" or kind == "bf16":
        return data
    assert scale is not None
    if kind == "fp8":
        return data.float() * scale[:, None]
    assert minimum is not None
    q = data if kind == "int8" else torch.stack([data & 15, data >> 4], dim=-1)
    q = q.view(data.shape[0], -1, GROUP)
    return (q * scale.float()[..., None] + minimum.float()[..., None]).view(data.shape[0], -1)[:, :k]
