"""Launcher of ``decode_attention.cu``."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.device import Device
from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.kept import DIMS

Map = ctypes.Array[ctypes.c_uint64]
TILE = 16  # tokens; ``cum`` counts these
UNITS, QUERIES, RESULTS, PAGES = 16, 4, 2, 128  # as in the kernel, whose shared memory ``_kernel`` adds up
GROUP, PARTS = 8, 3  # query heads that a product takes; parts of a larger group, which read the pages each
MAX_ROWS = 2048  # whose lengths fit into shared memory, beside the ring
P = ctypes.c_void_p


POINTERS = [
    "q",
    "k",
    "v",
    "out",
    "page_table",
    "slots",
    "kv_len",
    "cum",
    "part",
    "part_ml",
    "count",
    "q_norm",
    "k_norm",
    "cos_sin",
    "skip",
    "first",
    "prefix",
    "prefix_ml",
    "sinks",
    "k_scales",
    "v_scales",
    "positions",
    "ends",
    "by",
    "also",
]


class _Params(ctypes.Structure):
    _fields_ = (
        ("pages", TensorMap),
        ("values", TensorMap),
        *((name, P) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in ("page_stride", "head_stride", "scale_page", "scale_head")),
        *((name, ctypes.c_int) for name in ("q_stride", "table_stride", "rows", "kv_heads", "window")),
        *((name, ctypes.c_int) for name in ("by_row", "by_dim", "page_heads")),
        *(
            (name, ctypes.c_float)
            for name in ("eps", "scale", "softcap", "k_inverse", "v_inverse", "v_scale")
        ),
        ("pad", ctypes.c_int * 8),  # tensor maps are aligned to 64 bytes
    )


class Projection(NamedTuple):
    """What turns the projection's output into q, k and v: see ``ops.qk_norm_rope_store``, or, with
    ``v_norm``, ``ops.qkv_norm_rope_store``.
    ``cos_sin`` covers whole heads, or as many of their first dims as ``rotates`` allows. ``by`` and ``also``:
    see ``ops.scale_queries``."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    v_norm: bool = False
    by: Tensor | None = None
    also: Tensor | None = None


def rotates(width: int, head_dim: int) -> bool:
    """Whether the kernel rotates the first ``width`` dims of each head."""
    return width % 32 == 0 and 0 < width <= head_dim


class PrefixParts(NamedTuple):
    """What a row's first ``skip`` tokens (int32[R], whole tiles) gave: the partial results ``first[r]`` to
    ``first[r + 1]`` (int32[R + 1]) of ``out`` float32 ``[*, Hq, hd]``, unnormalised, with maxima (in units of
    log2) and sums in ``ml``."""

    skip: Tensor
    first: Tensor
    out: Tensor
    ml: Tensor


def refuses(
    device: Device, dtype: torch.dtype, head_dim: int, group: int, page_size: int, rows: int
) -> str | None:
    """Why this kernel cannot be used, or None."""
    if not device.tma:
        return "it needs compute capability 9.0"
    if device.shared < SHARED[0]:
        return f"it needs {SHARED[0] >> 10} KiB of shared memory a block, not {device.shared >> 10}"
    if dtype != torch.bfloat16:
        return f"it needs a bfloat16 KV cache, not {dtype}"
    if head_dim not in (64, 128, 256):
        return f"it needs a head dimension of 64, 128 or 256, not {head_dim}"
    if group > GROUP * PARTS:
        return f"it takes at most {GROUP * PARTS} query heads a KV head, not {group}"
    if page_size % TILE:
        return f"it needs a page size that is a multiple of {TILE}"
    if rows > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, not {rows}"
    return None


class Share(NamedTuple):
    """A group of query heads as ``parts``, each with the work of a KV head: of ``heads``, the last of
    ``lack`` fewer."""

    parts: int
    heads: int
    lack: int


def share(group: int) -> Share:
    parts = -(-group // GROUP)
    heads = -(-group // parts)
    return Share(parts, heads, parts * heads - group)


class Cut(NamedTuple):
    """Warps of a block that attend, and that merge; blocks on a multiprocessor."""

    warps: int
    mergers: int
    per_sm: int

    @property
    def threads(self) -> int:
        """With those that prepare and load."""
        return 32 * (self.warps + self.mergers + (2 if self.warps > 4 else 1) + 1)


FEW, MANY = Cut(8, 4, 1), Cut(4, 2, 2)
WIDE = Cut(4, 4, 1)  # for heads of 256, whose results are twice as long


@cache
def _kernel(
    head_dim: int,
    group: Share,
    page_tiles: int,
    softcap: bool,
    cut: Cut,
    rows: int,
    fused: bool,
    cascade: bool,
    kind: torch.dtype,
    rotated: int,
    turned: bool,
    v_norm: bool = False,
    scaled: bool = False,
    leaves: bool = False,
) -> Kernel:
    """``kind``: of v; with uint8, two numbers a byte, k is int8."""
    int4 = kind == torch.uint8
    int8 = int4 or kind == torch.int8
    scales = int8 * (1 + (head_dim // DIMS if int4 else 1))  # of a token
    token = head_dim * 3 // 2 if int4 else 2 * head_dim * kind.itemsize  # bytes of k and v
    query = head_dim * 16 + token + -(-scales // 4) * 16 + 32 * int8
    result = cut.warps * (group.heads * (head_dim + 4) + 16) * 4
    fixed = 1024 + QUERIES * query + RESULTS * result + UNITS * 64 + 4 * PAGES + 16 * (rows + 1)
    stage = TILE * (token + 4 * scales) + 16
    stages = (SHARED[cut.per_sm - 1] - 64 - fixed) // stage
    assert stages >= cut.warps
    defines = {
        "HD": head_dim,
        "GROUP": group.heads,
        "SHARE": group.parts,
        "LACK": group.lack,
        "WARPS": cut.warps,
        "MERGERS": cut.mergers,
        "PER_SM": cut.per_sm,
        "STAGES": stages,
    }
    defines |= {
        "ROWS": rows,
        "SOFTCAP": int(softcap),
        "PAGE_TILES": page_tiles,
        "FUSED": int(fused),
        "CASCADE": int(cascade),
        "FP8": int(kind == torch.float8_e4m3fn),
    }
    defines |= {"INT8": 1} if int8 else {}
    defines |= {"INT4": 1} if int4 else {}
    defines |= {"ROT": rotated} if rotated != head_dim else {}
    defines |= {"TURNED": 1} if turned else {}
    defines |= {"V_NORM": 1} if v_norm else {}
    defines |= {"SCALED": 1} if scaled else {}
    defines |= {"LEAVES": 1} if leaves else {}
    return Kernel("decode_attention.cu", "decode_attention", defines, stages * stage + fixed)


def default_cut(head_dim: int, pairs: int, dtype: torch.dtype) -> Cut:
    """For so many pairs of row and KV head; ``dtype``: of keys in pages. Two blocks a multiprocessor do not
    end at the same time, but two warps fetch, which takes longest for short tiles, and more attend, which
    takes long with integers."""
    if head_dim > 128:
        return WIDE
    if dtype.itemsize > 1:
        return MANY if pairs > 3 * processors() else FEW
    return MANY if pairs > processors() // (2 if dtype.is_floating_point else 3) else FEW


@lru_cache(1 << 12)
def _page_map(pages: int, other: int, page_size: int, heads: int, token: int) -> Map:
    """Tiles of the ``pages`` of k or v, and in the same piece those of the ``other``, which lies behind (0:
    alone): ``heads`` of all pages, a ``token`` in bytes."""
    segment, both = min(token, 128), 2 if other else 1
    dims = (segment, page_size, token // segment, both, heads)  # a tile has the tokens' first bytes first
    strides = (token, segment, (other - pages) if other else token, page_size * token)
    return tensor_map(pages, dims, strides, (segment, TILE, token // segment, both, 1), bytes_=True)


class DecodeAttention:
    """Workspaces for up to ``rows`` rows;
    shared by all layers, whose launches follow each other on one stream."""

    def __init__(self, rows: int, kv_heads: int, group: int, head_dim: int) -> None:
        device = torch.device("cuda")
        self.cut: Cut | None = None
        self._rows = -(-rows // 256) * 256
        blocks, shared = processors() * max(MANY.per_sm, FEW.per_sm), share(group)
        self._part = torch.empty(2 * blocks, shared.heads, head_dim, device=device)
        self._part_ml = torch.empty(2 * blocks, shared.heads, 2, device=device)
        self._count = torch.zeros(rows * kv_heads * shared.parts, dtype=torch.int32, device=device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        page_table: Tensor,
        slots: Tensor,
        kv_len: Tensor,
        cum: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        projection: Projection | None = None,
        prefix: PrefixParts | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        sinks: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """q bf16 ``[R or more, Hq * hd]`` -> the same shape, R rows of it; with ``projection`` q is ``[R, (Hq
        + 2 Hkv) * hd]`` as it comes from the linear layer, and the new token's k and v are written to the
        pages. k, v ``[pages, page_size, Hkv, hd]`` whose tokens of one page and head are contiguous. ``cum``
        int32[R + 1] counts the 16-token tiles before each row, for this window and without those that
        ``prefix`` covers. Rows with ``kv_len`` 0 are left as they are. k and v are bf16, e4m3 to be
        multiplied by ``kv_scales``, or integers with ``scales``; they lie as ``worker/kv.py`` lays them out:
        between pages is room for whole heads, or none, and v is behind k. ``positions`` int32[R]: by which q
        and k of a ``projection`` are rotated, where these are not ``kv_len - 1``. ``ends``: see
        ``DeviceBatch``; not with a ``projection``, nor with a window."""
        pages, page_size, kv_heads, dim = k.shape
        page_heads, rest = divmod(k.stride(0), page_size * dim)
        assert not rest
        for x in (k, v):
            head = page_size * x.shape[3]
            assert x.stride() == (page_heads * head, x.shape[3], head, 1)
        assert v.data_ptr() > k.data_ptr()
        width = q.shape[1] - (2 * kv_heads * dim if projection else 0)
        group = share(width // (kv_heads * dim))
        out = q.new_empty(q.shape[0], width)
        extra: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        by, also, eps, steps = None, None, 0.0, (0, 0)
        if projection is not None:
            assert rotates(projection.cos_sin.shape[1], dim)
            extra, eps = (projection.q_norm, projection.k_norm, projection.cos_sin), projection.eps
            by, also = projection.by, projection.also
            if by is not None:
                assert by.dtype == torch.float32
                steps = (by.stride(0), 0) if by.dim() == 2 else (0, by.stride(0))
                assert also is None or (also.dtype == by.dtype and also.stride() == by.stride())
        assert prefix is None or not window
        assert ends is None or not (projection or window)
        assert scales is None or all(x.is_contiguous() for x in scales)
        tensors = (
            q,
            k,
            v,
            out,
            page_table,
            slots,
            kv_len,
            cum,
            self._part,
            self._part_ml,
            self._count,
            *extra,
            *(prefix or (None, None, None, None)),
            sinks,
            *(scales or (None, None)),
            positions,
            ends,
            by,
            also,
        )
        log2e = 1.4426950408889634
        k_scale, v_scale = kv_scales
        scale = scale * k_scale
        places, alone = (page_size, (pages - 1) * page_heads + kv_heads), v.dtype == torch.uint8
        params = _Params(
            _page_map(k.data_ptr(), 0 if alone else v.data_ptr(), *places, dim * k.element_size()),
            _page_map(v.data_ptr(), 0, *places, v.shape[3]) if alone else TensorMap(),
            *(None if t is None else t.data_ptr() for t in tensors),
            k.stride(0), k.stride(2), *(scales[0].stride()[:2] if scales else (0, 0)),
            q.stride(0), page_table.stride(0),
            slots.shape[0], kv_heads * group.parts,
            window, *steps, page_heads, eps, scale / softcap if softcap else scale * log2e, softcap * log2e,
            1 / k_scale, 1 / v_scale, v_scale,
        )  # fmt: skip
        cut = self.cut or default_cut(dim, slots.shape[0] * kv_heads * group.parts, k.dtype)
        kernel = _kernel(
            dim,
            group,
            page_size // TILE,
            softcap > 0,
            cut,
            self._rows,
            projection is not None,
            prefix is not None,
            v.dtype,
            dim if projection is None else projection.cos_sin.shape[1],
            positions is not None,
            projection is not None and projection.v_norm,
            by is not None,
            ends is not None,
        )
        kernel.launch(processors() * cut.per_sm, cut.threads, params)
        return out
