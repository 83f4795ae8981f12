"""Weights in the order the native linear kernel reads them (see csrc/cpu/gemm.h)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.cpu.native import library, memory

Kind = Literal[
    "f32",
    "bf16",
    "int8",
    "int5",
    "int4",
    "q8_0",
    "q5_0",
    "q4_0",
    "iq4_nl",
    "e2m1",
    "e4m3",
    "nf4",
    "fp4",
    "nvfp4",
]
# Those with a scale alone, and what is 0 of their quants.
HALF: dict[Kind, int] = {"q8_0": 128, "q5_0": 16, "q4_0": 8, "iq4_nl": 128, "e2m1": 16}
# Those with scales in float32 (csrc/cpu/gemm.h: wide): channels of k with one, channels that lie together,
# and rows of dwords of these.
WIDE: dict[Kind, tuple[int, int, int]] = {
    "e4m3": (128, 32, 8),
    "nf4": (64, 32, 4),
    "fp4": (64, 32, 4),
    "nvfp4": (256, 64, 9),
}
KINDS: list[Kind] = ["f32", "bf16", "int8", "int5", "int4", *HALF, *WIDE]
# What the codes of four bits mean, ``HALF`` more (csrc/cpu/gemm.h).
CODES: dict[Kind, tuple[int, ...]] = {
    "iq4_nl": (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241),
    "e2m1": (16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4),
}
Format = Literal[Kind, "fixed"]  # fixed: bfloat16 weights for products in integers (csrc/cpu/fixed.h)
FORMATS: list[Format] = [
    "f32",
    "bf16",
    "int8",
    "int4",
    "fixed",
    "q8_0",
    "q5_0",
    "q4_0",
    "int5",
    "iq4_nl",
    "e2m1",
    *WIDE,
]  # the order of ``Kind`` in program.h

FIXED_LEVELS = ("avx512_vnni", "avx2")  # where these beat float32 and there is no bfloat16 product
PAIR_LEVELS = ("amx", "avx512_bf16", "i8mm")  # that multiply bfloat16 by bfloat16
BYTE_LEVELS = ("i8mm", "dotprod")  # that multiply in integers of 8 bits (csrc/cpu/bytes.h)
WIDTH = 32  # output channels of a panel
SHARE = 16  # panels worth a thread
GROUP = 32  # channels of k with one scale
# Dword rows of channels with one scale.
GROUP_ROWS = {"int8": 8, "int5": 5, "int4": 4, "q8_0": 8, "q5_0": 5, "q4_0": 4}
GROUP_ROWS |= dict.fromkeys(CODES, 4)
GROUP_ROWS |= {kind: span // unit * rows for kind, (span, unit, rows) in WIDE.items()}
FIXED_GROUP, FIXED_HEAD = 64, WIDTH * 2  # channels of k, and bytes of their scales
_EDGES = threading.Lock()  # of who writes some rows of a panel, and reads the others for it
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}  # others: uint8
_PER_DWORD = {"f32": 1, "bf16": 2}  # elements of the plain tensor; others: 4 bytes


@dataclass(slots=True)
class Panels:
    """One linear's weight ``[n, k]``; the plain tensors are those of ``quant.Weight``. ``isa``: the
    level of the kernels that read them.

    ``data`` uint8: panels of 32 channels as rows of 32 dwords; int8, int5 and int4 in groups of 32 led by 32
    scales and 32 minima in float16, those of ``HALF`` by scales alone,
    ``fixed`` in groups of 64 led by 32 scales in bfloat16, ``WIDE`` in theirs led by 32 scales in float32.
    """

    kind: Format
    n: int
    k: int
    data: Tensor
    isa: str

    @classmethod
    def of(
        cls,
        kind: Kind,
        k: int,
        data: Tensor,
        scale: Tensor | None = None,
        minimum: Tensor | None = None,
        *,
        isa: str = "",
        out: Tensor | None = None,
    ) -> Panels:
        """Reorder plain CPU tensors for the kernels of level ``isa`` (default: the best library's).
        ``out``: where such panels lie already."""
        n, isa = data.shape[0], isa or library().isa
        kind, data, scale, minimum = _known(kind, data, scale, minimum, isa)
        if kind == "bf16" and isa in FIXED_LEVELS:
            return cls._fixed(n, k, data, isa, out)
        per_dword = _PER_DWORD.get(kind, 4)
        data = _padded(data, per_dword)
        dwords = data.shape[1] // per_dword
        constants = [values for values in (scale, minimum) if values is not None]
        group, head = GROUP_ROWS.get(kind, dwords), sum(WIDTH * c.element_size() for c in constants)
        count, groups = -(-n // WIDTH), -(-dwords // group)
        if out is None:
            out = memory.take(count * (groups * head + dwords * WIDTH * 4))
        pack, row, panel = library().dll.sgla_pack, dwords * 4, out.numel() // count

        def pack_some(first: int, last: int) -> None:
            rows = min(n, last * WIDTH) - first * WIDTH
            pack(
                data.data_ptr() + first * WIDTH * row,
                rows,
                dwords,
                group,
                head,
                out.data_ptr() + first * panel,
            )

        _in_threads(count, pack_some)
        if kind == "e4m3":  # of four channels first the former two k of each, then the latter
            halves = out.view(torch.int16).view(-1, 4, 2)
            out.view(torch.int16).view(-1, 2, 4).copy_(halves.transpose(1, 2).clone())
        if constants:
            heads = _heads(out, count, groups, group, head).view(constants[0].dtype)
            for part, values in enumerate(constants):
                padded = F.pad(values, (0, 0, 0, -n % WIDTH)).view(count, WIDTH, -1)
                heads[:, :, part * WIDTH : (part + 1) * WIDTH] = padded.transpose(1, 2)
        return cls(kind, n, k, out, isa)

    def put(
        self, at: int, kind: Kind, data: Tensor, scale: Tensor | None = None, minimum: Tensor | None = None
    ) -> None:
        """Replace the rows from ``at`` on, in place. The tensors are as ``of`` was given them. Threads may
        replace others meanwhile, of the same panel, too."""
        first, last = at // WIDTH, -(-(at + data.shape[0]) // WIDTH)
        start, stop = first * WIDTH, min(last * WIDTH, self.n)
        size = self.data.numel() // -(-self.n // WIDTH)
        out = self.data[first * size : last * size]
        kind, *given = _known(kind, data, scale, minimum, self.isa)
        kept = data.shape[0] < stop - start  # some panels keep rows
        with _EDGES if kept else nullcontext():
            if kept:
                whole = replace(self, n=stop - start, data=out).plain()
                for own, new in zip(whole, given):
                    if own is not None and new is not None:
                        own[at - start : at - start + new.shape[0]] = new
                given = list(whole)
            assert given[0] is not None
            Panels.of(kind, self.k, given[0], given[1], given[2], isa=self.isa, out=out)

    @classmethod
    def _fixed(cls, n: int, k: int, data: Tensor, isa: str, out: Tensor | None) -> Panels:
        data = _padded(data, FIXED_GROUP)
        count, width = -(-n // WIDTH), data.shape[1]
        panel = width // FIXED_GROUP * (FIXED_HEAD + FIXED_GROUP * WIDTH * 2)
        out, pack = memory.take(count * panel) if out is None else out, library().dll.sgla_pack_fixed

        def pack_some(first: int, last: int) -> None:
            rows = min(n, last * WIDTH) - first * WIDTH
            pack(data.data_ptr() + first * WIDTH * width * 2, rows, width, out.data_ptr() + first * panel)

        _in_threads(count, pack_some)
        return cls("fixed", n, k, out, isa)

    def some(self, rows: Tensor) -> tuple[Panels, Tensor]:
        """The panels with ``rows`` int64[n] of these, and where they are in them."""
        numbers, where = torch.unique(rows // WIDTH, return_inverse=True)
        data = self.data.view(-(-self.n // WIDTH), -1)[numbers].flatten()
        return replace(self, n=len(numbers) * WIDTH, data=data), where * WIDTH + rows % WIDTH

    def plain(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The tensors ``of`` was given: data (of ``fixed`` as rounded), scale, minimum."""
        count = -(-self.n // WIDTH)
        if self.kind == "fixed":
            body = self.data.view(count, -(-self.k // FIXED_GROUP), -1)
            scale = body[:, :, :FIXED_HEAD].contiguous().view(torch.bfloat16)  # [panels, groups, 32]
            pairs = (
                body[:, :, FIXED_HEAD:].contiguous().view(torch.int16).view(*scale.shape[:2], -1, WIDTH, 2)
            )
            values = pairs * scale[:, :, None, :, None]
            return values.permute(0, 3, 1, 2, 4).reshape(count * WIDTH, -1)[: self.n, : self.k], None, None
        if self.kind not in GROUP_ROWS:
            data = self._rows(self.data.view(torch.int32).view(count, -1, WIDTH))
            return data[:, : self.k], None, None
        span, unit, rows = WIDE.get(self.kind, (GROUP, GROUP, GROUP_ROWS[self.kind]))
        groups, head = -(-self.k // span), WIDTH * (2 if self.kind in HALF else 4)
        group, dwords = GROUP_ROWS[self.kind], -(-self.k // unit) * rows
        heads = _heads(self.data, count, groups, group, head).clone(memory_format=torch.contiguous_format)
        heads = heads.view(torch.float32 if self.kind in WIDE else torch.float16)
        constants = [h.transpose(1, 2).reshape(-1, groups)[: self.n] for h in heads.split(WIDTH, dim=2)]
        row = torch.arange(dwords)
        where = (row // group + 1) * (head // 4) + row * WIDTH
        body = self.data.view(torch.int32).view(count, -1)[:, where[:, None] + torch.arange(WIDTH)]
        if self.kind == "e4m3":
            halves = body.view(torch.int16).view(-1, 2, 4).transpose(1, 2)
            body = halves.contiguous().view(torch.int32).view(body.shape)
        return self._rows(body), constants[0], constants[1] if len(constants) > 1 else None

    def _rows(self, dwords: Tensor) -> Tensor:
        """Dwords [panels, k, 32] -> plain rows [n, ...]."""
        rows = dwords.transpose(1, 2).reshape(-1, dwords.shape[1])[: self.n]
        return rows.clone(memory_format=torch.contiguous_format).view(_DTYPES.get(self.kind, torch.uint8))


def _heads(data: Tensor, count: int, groups: int, rows: int, size: int) -> Tensor:
    """The bytes before groups of so many rows of dwords, ``[count, groups, size]``; the last one may be
    shorter."""
    strides = data.numel() // count, rows * WIDTH * 4 + size, 1
    return data.as_strided((count, groups, size), strides)


def _known(
    kind: Kind, data: Tensor, scale: Tensor | None, minimum: Tensor | None, isa: str
) -> tuple[Kind, Tensor, Tensor | None, Tensor | None]:
    """As a kind that the kernels of this level have."""
    missing: tuple[str, ...] = (
        (*HALF, "int5") if isa == "generic" else ("q5_0", "int5") if isa in BYTE_LEVELS else ()
    )
    if kind not in missing:
        return kind, data, scale, minimum
    assert scale is not None
    if kind in ("int5", "q5_0"):
        data = join_fifth(data)
    if kind in CODES:
        data = torch.tensor(CODES[kind], dtype=torch.uint8)[
            torch.stack([data & 15, data >> 4], -1).flatten(1).long()
        ]
    low = minimum if kind == "int5" else scale * -HALF[kind]
    return "int4" if kind == "q4_0" else "int8", data, scale, low


def cut_fifth(q: Tensor) -> Tensor:
    """Values from 0 to 31, uint8 ``[n, groups * 32]`` -> as q5_0 and int5 have them, uint8
    ``[n, groups * 20]``: each half of a dword has three and a bit of the last one (csrc/cpu/gemm.h)."""
    pairs = _paired(q)
    whole = pairs[..., :15].unflatten(-1, (5, 3)) << torch.tensor([0, 5, 10])
    return _dwords(whole.sum(-1) | (pairs[..., 15:] >> torch.arange(5) & 1) << 15)


def join_fifth(data: Tensor) -> Tensor:
    """The inverse of ``cut_fifth``."""
    halves = _halves(data, 5)
    whole = halves[..., None] >> torch.tensor([0, 5, 10]) & 31
    last = ((halves >> 15) << torch.arange(5)).sum(-1, keepdim=True)
    return _in_order(torch.cat([whole.flatten(-2), last], -1), len(data))


def _paired(q: Tensor) -> Tensor:
    """int64 ``[n, groups, 2, 16]``: what lower and upper halves of dwords have, in the order in which kernels
    take them out."""
    return q.view(len(q), -1, 4, 2, 4).transpose(2, 3).flatten(3).long()


def _in_order(pairs: Tensor, n: int) -> Tensor:
    """The inverse of ``_paired``."""
    return pairs.unflatten(-1, (4, 4)).transpose(2, 3).reshape(n, -1).to(torch.uint8)


def _dwords(halves: Tensor) -> Tensor:
    """uint8 ``[n, groups * rows * 4]`` of int64 ``[n, groups, 2, rows]``."""
    return halves.transpose(2, 3).to(torch.int16).reshape(len(halves), -1).view(torch.uint8)


def _halves(data: Tensor, rows: int) -> Tensor:
    """The inverse of ``_dwords``."""
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int16)
    return words.view(len(data), -1, rows, 2).transpose(2, 3).long() & 0xFFFF


def _padded(data: Tensor, multiple: int) -> Tensor:
    """Rows contiguous, of a length that is a multiple; no copy if they are."""
    missing = -data.shape[1] % multiple
    return (F.pad(data, (0, missing)) if missing else data).contiguous()


def _in_threads(panels: int, work: Callable[[int, int], None]) -> None:
    """``work(first, last)`` on ranges that make up all panels."""
    parts = min(len(os.sched_getaffinity(0)), -(-panels // SHARE))
    if parts == 1:
        return work(0, panels)
    bounds = [panels * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(work, bounds, bounds[1:]))
