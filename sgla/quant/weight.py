"""Weights of linear layers in the formats the kernels read.

``f32`` and ``bf16`` are plain. ``int8`` and ``int4``: groups of 32 along k, ``w = q * scale + minimum`` with
q in 0..255 or 0..15 and both constants float16; int4's are fitted (``_fit``). So int4 holds GGUF's Q4_0 and
Q4_1 without loss, int8 these, Q5_0, Q5_1 and Q8_0. ``q8_0``, ``q5_0`` and ``q4_0`` are GGUF's types of that
name, ``w = (q - half of the range) * scale``. ``fp8``: e4m3 (arXiv 2209.05433), one float32 scale per output
channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.panels import GROUP, HALF, Kind, Panels, cut_fifth, join_fifth

LEVELS = {"int8": 255, "int4": 15, "q8_0": 255, "q5_0": 31, "q4_0": 15}  # the largest q
GROUP_BYTES = {"int8": 32, "int4": 16, "q8_0": 32, "q5_0": 20, "q4_0": 16}  # without constants
E4M3_MAX = 448.0
STEPS = (14.0, 14.5, 15.0, 15.5, 16.0)  # into which int4 may cut the span of a group, which has 15
TOGETHER = 1 << 13  # groups that are fitted at a time: they stay in a core's cache


@dataclass(slots=True)
class Weight:
    """One linear's weight ``[n, k]``.

    ``data`` is float32, bfloat16 or e4m3 ``[n, k]``; of groups uint8 ``[n, groups * GROUP_BYTES]``, for int4
    and q4_0 the even k in the low nibble, for q5_0 see ``cut_fifth``. ``scale`` float16[n, groups] or
    float32[n] (fp8); ``minimum`` float16[n, groups] (int8, int4).
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
    def of_groups(cls, kind: Kind, q: Tensor, scale: Tensor, minimum: Tensor | None) -> Weight:
        """From quants ``[n, k]``, 0 at the least, and float16 constants ``[n, ceil(k / 32)]``;
        ``minimum`` is for int8 and int4."""
        n, k = q.shape
        q = F.pad(q.to(torch.uint8), (0, -k % GROUP))
        if kind == "q5_0":
            data = cut_fifth(q)
        else:
            data = q[:, 0::2] | q[:, 1::2] << 4 if LEVELS[kind] == 15 else q
        return cls(kind, n, k, data, scale.half(), None if minimum is None else minimum.half())

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
            if self.panels.kind != "fixed":
                self.kind = self.panels.kind
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

    def pick(self, rows: Tensor) -> Weight:
        """A new weight of these output channels, int64 on the CPU."""
        data, scale, minimum = (None if t is None else t[rows.to(t.device)] for t in self._parts())
        assert data is not None
        return Weight(self.kind, len(rows), self.k, data, scale, minimum)

    def rows(self, start: int, stop: int) -> Weight:
        """Output channels ``start:stop``;
        the whole weight is itself, so that tied layers share their panels."""
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
        """Input channels ``start:stop``; where there are groups ``start`` must begin one."""
        data, scale, minimum = self._parts()
        if self.kind not in LEVELS:
            return Weight(self.kind, self.n, stop - start, data[:, start:stop], scale)
        assert start % GROUP == 0
        assert stop % GROUP == 0 or stop == self.k
        assert scale is not None
        first, last, width = start // GROUP, -(-stop // GROUP), GROUP_BYTES[self.kind]
        data = data[:, first * width : last * width]
        minimum = None if minimum is None else minimum[:, first:last]
        return Weight(self.kind, self.n, stop - start, data, scale[:, first:last], minimum)


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
    if kind in HALF:
        scale = _up(groups.abs().amax(-1) / (HALF[kind] - 1)).half()
        q = (groups / scale.float().masked_fill(scale == 0, 1.0)[..., None]).round_() + HALF[kind]
        return Weight.of_groups(kind, q.clamp_(0, LEVELS[kind]).view(n, -1)[:, :k], scale, None)
    low, high = groups.amin(-1).half(), groups.amax(-1)
    scale = _up((high - low.float()) / LEVELS[kind]).half()
    if kind == "int4":
        for x, s, m in zip(
            *(t.reshape(-1, size).split(TOGETHER) for t, size in ((groups, GROUP), (scale, 1), (low, 1)))
        ):
            _fit(x.T.contiguous(), s[:, 0], m[:, 0])
    divisor = scale.float().masked_fill(scale == 0, 1.0)
    q = ((groups - low.float()[..., None]) / divisor[..., None]).round_().clamp_(0, LEVELS[kind])
    return Weight.of_groups(kind, q.view(n, -1)[:, :k], scale, low)


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
    if kind == "q5_0":
        q = join_fifth(data)
    else:
        q = data if LEVELS[kind] == 255 else torch.stack([data & 15, data >> 4], dim=-1)
    q = q.view(data.shape[0], -1, GROUP)
    low = minimum.float() if minimum is not None else scale.float() * -HALF[kind]
    return (q * scale.float()[..., None] + low[..., None]).view(data.shape[0], -1)[:, :k]
