"""Launcher of ``decode_attention.cu``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel

TILE = 16  # tokens; ``cum`` counts these
STAGES = 3
WARPS, BLOCKS = 4, 2  # of a block; of a multiprocessor
SHORT_WARPS, SHORT_BLOCKS = (
    2,
    4,
)  # for many pairs whose prefix is taken off, so that few tiles are left of each
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
]


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in POINTERS),
        ("page_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("q_stride", "table_stride", "rows", "kv_heads", "window")),
        *(
            (name, ctypes.c_float)
            for name in ("eps", "scale", "softcap", "k_inverse", "v_inverse", "v_scale")
        ),
    )


class Projection(NamedTuple):
    """What turns the projection's output into q, k and v: see ``ops.qk_norm_rope_store``. ``cos_sin`` covers whole heads."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class PrefixParts(NamedTuple):
    """What a row's first ``skip`` tokens (int32[R], whole tiles) gave: the partial results ``first[r]`` to ``first[r + 1]``
    (int32[R + 1]) of ``out`` float32 ``[*, Hq, hd]``, unnormalised, with maxima (in units of log2) and sums in ``ml``."""

    skip: Tensor
    first: Tensor
    out: Tensor
    ml: Tensor


def supported(dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> str | None:
    """None, or why this kernel cannot be used."""
    if torch.cuda.get_device_capability()[0] < 9:
        return "it needs compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"it needs a bfloat16 KV cache, not {dtype}"
    if head_dim not in (64, 128, 256):
        return f"it needs a head dimension of 64, 128 or 256, not {head_dim}"
    if group > 8:
        return f"it takes at most 8 query heads a KV head, not {group}"
    if page_size % TILE:
        return f"it needs a page size that is a multiple of {TILE}"
    return None


@cache
def _kernel(
    head_dim: int,
    group: int,
    page_tiles: int,
    softcap: bool,
    warps: int,
    stages: int,
    min_tiles: int,
    fused: bool,
    cascade: bool,
    fp8: bool,
) -> Kernel:
    stages += 2 * fp8  # of half the size
    ring = warps * stages * 2 * TILE * head_dim * (1 if fp8 else 2)
    merge = warps * group * head_dim * 4 + warps * 8 * 2 * 4
    defines = {"HD": head_dim, "GROUP": group, "WARPS": warps, "STAGES": stages}
    defines |= {
        "SOFTCAP": int(softcap),
        "PAGE_TILES": page_tiles,
        "MIN_TILES": min_tiles,
        "FUSED": int(fused),
        "CASCADE": int(cascade),
        "FP8": int(fp8),
    }
    return Kernel("decode_attention.cu", "decode_attention", defines, ring + merge)


class DecodeAttention:
    """Workspaces for up to ``rows`` rows; shared by all layers, whose launches follow each other on one stream."""

    def __init__(self, rows: int, kv_heads: int, group: int, head_dim: int) -> None:
        device = torch.device("cuda")
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.stages = STAGES if head_dim <= 128 else 2
        blocks = self._processors * max(BLOCKS, SHORT_BLOCKS)
        self._part = torch.empty(2 * blocks, group, head_dim, device=device)
        self._part_ml = torch.empty(2 * blocks, group, 2, device=device)
        self._count = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        self.min_tiles = 8

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
    ) -> Tensor:
        """q bf16 ``[R or more, Hq * hd]`` -> the same shape, R rows of it; with ``projection`` q is ``[R, (Hq + 2 Hkv) * hd]`` as it comes from the
        linear layer, and the new token's k and v are written to the pages. k, v ``[pages, page_size, Hkv, hd]`` whose tokens of one page and head
        are contiguous. ``cum`` int32[R + 1] counts the 16-token tiles before each row, for this window and without those
        that ``prefix`` covers. Rows with ``kv_len`` 0 are left as they are. k and v are bf16, or e4m3 to be multiplied by
        ``kv_scales``."""
        _, page_size, kv_heads, dim = k.shape
        assert k.stride(1) == dim, "tokens of one page and head must be contiguous"
        width = q.shape[1] - (2 * kv_heads * dim if projection else 0)
        group = width // (kv_heads * dim)
        out = q.new_empty(q.shape[0], width)
        extra: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        eps = 0.0
        if projection is not None:
            assert projection.cos_sin.shape[1] == dim
            extra, eps = (projection.q_norm, projection.k_norm, projection.cos_sin), projection.eps
        assert prefix is None or not window
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
        )
        log2e = 1.4426950408889634
        fp8, (k_scale, v_scale) = k.dtype == torch.float8_e4m3fn, kv_scales
        unit = 256.0 if fp8 else 1.0  # what the kernel multiplies by is so much smaller
        scale = scale * k_scale * unit
        params = _Params(
            *(None if t is None else t.data_ptr() for t in tensors),
            k.stride(0), k.stride(2), q.stride(0), page_table.stride(0), slots.shape[0], kv_heads, window, eps,
            scale / softcap if softcap else scale * log2e, softcap * log2e,
            1 / k_scale, 1 / v_scale, v_scale * unit,
        )  # fmt: skip
        short = prefix is not None and slots.shape[0] * kv_heads >= self._processors * SHORT_BLOCKS
        warps, blocks = (SHORT_WARPS, SHORT_BLOCKS) if short else (WARPS, BLOCKS)
        kernel = _kernel(
            dim,
            group,
            page_size // TILE,
            softcap > 0,
            warps,
            self.stages,
            self.min_tiles,
            projection is not None,
            prefix is not None,
            fp8,
        )
        kernel.launch(self._processors * blocks, warps * 32, params)
        return out
