"""Weights in 8-bit floating point with a scale for each output channel, or for 128 or 32 input channels of
it.

CPU kernels multiply them in groups of 128 whose largest numbers are from 224 to 448: numbers below a 512th of
these lose bits.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.cpu.panels import Kind
from sgla.kernels.rehearsal import under_way
from sgla.quant.weight import Weight

MAX = 448.0
GROUP, MX_GROUP = 128, 32  # channels of k with one scale


class E4M3(Weight):
    """e4m3 numbers (arXiv 2209.05433) ``[n, k]``, float32 scales ``[n]``."""

    kind, native = "fp8", True

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

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        numbers, scale = self.tensors
        return "e4m3", _grouped(numbers, scale[:, None].expand(-1, -(-self.k // GROUP)))


class E4M3Groups(Weight):
    """e4m3 numbers ``[n, k]``, float32 scales ``[n, ceil(k / GROUP)]``: has blocks of 128 x 128 as they
    are."""

    kind, native = "fp8g128", True

    def __init__(self, n: int, k: int, *tensors: Tensor) -> None:
        super().__init__(n, k, *tensors)
        self._blocks: Tensor | None = None
        self._looked = False

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        """In blocks, counted from the first row."""
        n, k = dense.shape
        groups = F.pad(dense.float(), (0, -k % GROUP)).view(n, -1, GROUP)
        scale = _shared(groups.abs().amax(-1).clamp_min(1e-30) / MAX)
        numbers = (groups / scale[..., None]).clamp_(-MAX, MAX).to(torch.float8_e4m3fn)
        return cls(n, k, numbers.view(n, -1)[:, :k].contiguous(), scale)

    def blocks(self) -> Tensor | None:
        """The scales of whole blocks ``[n / GROUP, k / GROUP]``, if every GROUP rows from the first one on
        share theirs. From then on they do, whatever is written: numbers are rounded once more for that."""
        scale = self.tensors[1]
        if not self._looked and not (scale.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._looked = True
            whole = len(scale) == self.n and self.home is None and self.n % GROUP == 0
            if whole and torch.equal(scale, _shared(scale)):
                with torch.inference_mode(False):  # threads that load write to it
                    self._blocks = scale[::GROUP].clone(memory_format=torch.contiguous_format)
        return self._blocks

    def scales(self) -> Tensor | None:
        blocks = None if under_way() else self.blocks()
        return self.scale if blocks is None else blocks

    def _write(self, at: int, part: Weight) -> None:
        super()._write(at, part)
        owners: list[tuple[int, E4M3Groups]] = [(0, self), *self._views]
        for first, own in owners:
            own._share(at - first, at - first + part.n)

    def _share(self, start: int, stop: int) -> None:
        """Have the rows ``start:stop`` share scales with those of their blocks, if all others do."""
        start, stop = max(start // GROUP * GROUP, 0), min(-(-stop // GROUP) * GROUP, self.n)
        if self._blocks is None or start >= stop:
            return
        numbers, scale = (t[start:stop] for t in self.tensors)
        common = _shared(scale)
        if not torch.equal(scale, common):
            least = torch.finfo(common.dtype).tiny  # so that zeros stay zeros
            by = (scale / common.clamp_min(least)).repeat_interleave(GROUP, 1)[:, : self.k]
            numbers.copy_((numbers.float() * by).to(numbers.dtype))
            scale.copy_(common)
        self._blocks[start // GROUP : stop // GROUP] = common[::GROUP]

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

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        return "e4m3", _grouped(*self.tensors)

    @classmethod
    def of_native(cls, n: int, k: int, *tensors: Tensor) -> Weight:
        codes, scale = tensors
        signs, rest = (codes & 8) << 4, (codes >> 1 & 0x78) | (codes & 7)
        return cls(n, k, (signs | rest).view(torch.float8_e4m3fn)[:, :k].contiguous(), scale)


class MXFP8(Weight):
    """e4m3 numbers ``[n, k]`` and exponents, 127 more than they mean, of 32 channels each, uint8
    ``[n, blocks of 128 * 4]`` (OCP Microscaling Formats 1.0)."""

    kind, native = "mxfp8", True

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

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        numbers, exponents = self.tensors
        return "e4m3", _grouped(numbers, None, exponents.int() - 127)


def _shared(scale: Tensor) -> Tensor:
    """The largest of every GROUP rows, for each of them."""
    largest = [part.amax(0).expand(len(part), -1) for part in scale.split(GROUP)]
    return torch.cat(largest)


def _grouped(numbers: Tensor, scale: Tensor | None, exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What CPU kernels read, uint8 ``[n, ceil(k / 32) * 32]`` with sign and mantissa in the lower bits, and
    float32 ``[n, ceil(k / 128)]``: numbers times powers of two, so that the largest of 128 is from 224 to
    448. ``exponents``: those of 32 channels each, int32 ``[n, blocks * 4]``."""
    n, k = numbers.shape
    parts = F.pad(numbers.view(torch.uint8), (0, -k % GROUP)).view(n, -1, GROUP // MX_GROUP, MX_GROUP)
    top = (parts & 127).amax(-1).view(torch.float8_e4m3fn).float()
    room = torch.frexp(MAX / top)[1] - 1  # by how much numbers could be doubled
    if exponents is not None:
        room -= exponents.view(room.shape)
    common = room.masked_fill(top == 0, 999).amin(-1, keepdim=True).masked_fill_((top == 0).all(-1, True), 0)
    up = common if exponents is None else common + exponents.view(room.shape)
    moved = torch.ldexp(parts.view(torch.float8_e4m3fn).float(), up[..., None]) if up.any() else None
    codes = parts if moved is None else moved.to(torch.float8_e4m3fn).view(torch.uint8)
    turned = (codes & 0x78) << 1 | codes >> 4 & 8 | codes & 7
    down = torch.ldexp(torch.ones(common.shape[:2]), -common[..., 0])
    found = down if scale is None else down * scale
    found = found.masked_fill(top.isnan().any(-1), torch.nan)  # which the kernels do not know
    return turned.view(n, -1)[:, : -(-k // MX_GROUP) * MX_GROUP].contiguous(), found
