"""Launcher of ``prompt_gemm.cu``: linear layers of prompts, with what follows them."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from sgla.kernels.cuda.batch_gemm import GELU, MAX_ROWS, SILU, STORE, Sending
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.ops import KVLayer

HEADS, TURN = 5, 6  # EPILOGUE, beside those of batch_gemm
TOKENS, COLUMNS = 128, 256  # of a tile
CLUSTER, STAGES = 2, 4
BAND = 8  # about so many tiles of a cluster's tokens share the weights that the L2 cache has
THREADS = 384
SHARED = STAGES * (128 * (TOKENS + COLUMNS) + 16) + 1024


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "bias", "out", "positions", "out_loc", "cos_sin", "q_norm", "k_norm", "k_pages", "v_pages",
            )
        ),
        ("page_stride", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in (
                "token_stride", "head_stride", "page_size", "q_heads", "kv_heads", "beside", "m", "n", "k",
                "out_stride", "tiles", "row_tiles", "band", "turned", "every",
            )
        ),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_int * 12),  # tensor maps are aligned to 64 bytes
    )  # fmt: skip


class _SendParams(ctypes.Structure):
    _fields_ = (
        *_Params._fields_[:-1],
        ("inbox", ctypes.c_void_p * 8),
        ("state", ctypes.c_void_p),
        ("half", ctypes.c_longlong),
        ("rank", ctypes.c_int),
        ("pad", ctypes.c_int * 7),
    )


def refuses(m: int, n: int, k: int, gated: bool = False) -> str | None:
    """Why ``m`` rows cannot be multiplied by a weight ``[n, k]``, or None."""
    if m <= MAX_ROWS:
        return f"it needs more than {MAX_ROWS} rows"
    if n % (64 if gated else 32) or k % 64 or k < 512:
        return (
            "it needs an input width from 512 on that is a multiple of 64, and "
            "an output width that is one of 32 (gated 64)"
        )
    return None


def fills(m: int, n: int) -> bool:
    """Whether tiles of ``m`` rows and ``n`` columns leave no more than a tenth of the GPU idle."""
    return m * n > 0.9 * rounds(m, n) * (processors() // CLUSTER) * TOKENS * CLUSTER * COLUMNS


def rounds(m: int, n: int) -> int:
    """Of tiles, one of which a cluster has at a time."""
    tiles = -(-m // (TOKENS * CLUSTER)) * -(-n // COLUMNS)
    return -(-tiles // (processors() // CLUSTER))


def holds_heads(projection: Projection, kv: KVLayer) -> bool:
    """Whether ``linear_heads`` can store to these pages."""
    dim = kv.k.shape[-1]
    return kv.k.dtype == torch.bfloat16 and dim in (64, 128) and projection.cos_sin.shape[1] == dim


@cache
def _kernel(epilogue: int, dim: int, ranks: int) -> Kernel:
    defines = {"EPILOGUE": epilogue, "HD": dim, "STAGES": STAGES} | ({"SEND": ranks} if ranks else {})
    return Kernel("prompt_gemm.cu", "prompt_gemm", defines, SHARED, CLUSTER)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    send: Sending | None = None,
) -> Tensor:
    """``epilogue(x @ weight.T + bias)``: x bf16 ``[m, k]`` contiguous, weight bf16 ``[n, k]``, bias float32.

    STORE; SILU, GELU: the rows of ``weight`` are gate then up, out ``[m, n / 2]``. With ``send`` and STORE
    the other ranks get the result, too.
    """
    gated = epilogue in (SILU, GELU)
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    _launch(x, weight, epilogue, out, send=send, bias=bias)
    return out


def linear_turned(x: Tensor, weight: Tensor, bias: Tensor | None, angles: Tensor, columns: int) -> Tensor:
    """``linear``, of whose first ``columns`` each pair is turned by an angle of its token:
    ``angles`` float32 ``[m, dim]``, cosine and sine of each pair, for every ``dim`` columns anew."""
    dim = angles.shape[1]
    assert columns % dim == 0 == dim % 8
    assert angles.is_contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, TURN, out, bias=bias, cos_sin=angles, turned=columns, every=dim)
    return out


def linear_heads(
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    projection: Projection,
    kv: KVLayer,
    out_loc: Tensor,
    in_place: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """``ops.qk_norm_rope_store(x @ weight.T + bias, ...)``. ``in_place``: q is the first columns of what the
    projection would be, with k and v beside it."""
    page_size, kv_heads, dim = kv.k.shape[1:]
    q_heads = weight.shape[0] // dim - 2 * kv_heads
    page_stride, token_stride, head_stride, _ = kv.k.stride()
    assert kv.k.stride() == kv.v.stride()
    assert positions.dtype == out_loc.dtype == torch.int32
    out = x.new_empty(x.shape[0], (q_heads + 2 * kv_heads * in_place) * dim)
    _launch(
        x, weight, HEADS, out, dim, bias=bias, positions=positions, out_loc=out_loc,
        cos_sin=projection.cos_sin,
        q_norm=projection.q_norm, k_norm=projection.k_norm, eps=projection.eps, k_pages=kv.k, v_pages=kv.v,
        page_stride=page_stride, token_stride=token_stride, head_stride=head_stride, page_size=page_size,
        q_heads=q_heads, kv_heads=kv_heads, beside=int(in_place),
    )  # fmt: skip
    return out[:, : q_heads * dim]


def _launch(
    x: Tensor,
    weight: Tensor,
    epilogue: int,
    out: Tensor,
    dim: int = 128,
    send: Sending | None = None,
    **fields: Tensor | float | None,
) -> None:
    """``fields``: of the parameters; what is not named is zero."""
    (m, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous(), "the tensor map knows no padding"
    tiles, row_tiles = -(-n // COLUMNS), -(-m // (TOKENS * CLUSTER))
    params: Any = (_Params if send is None else _SendParams)(
        w=_weight_map(weight.data_ptr(), n, k),
        x=_map(x.data_ptr(), (k, m), (2 * k,), (64, TOKENS)),
        m=m, n=n // 2 if epilogue in (SILU, GELU) else n, k=k,
        out_stride=out.stride(0), tiles=tiles, row_tiles=row_tiles, band=_band(row_tiles),
    )  # fmt: skip
    for name, value in {"out": out, **fields}.items():
        setattr(params, name, value.data_ptr() if isinstance(value, Tensor) else value)
    if send is not None:
        assert epilogue == STORE
        params.inbox, params.state, params.half, params.rank = send.inboxes, send.state, send.half, send.rank
    clusters = min(tiles * row_tiles, processors() // CLUSTER)
    _kernel(epilogue, dim, 0 if send is None else send.ranks).launch(clusters * CLUSTER, THREADS, params)


def _band(row_tiles: int) -> int:
    """Of the bands, all but the last one; that is no small rest, which would read all weights for itself."""
    return -(-row_tiles // max(1, round(row_tiles / BAND)))


_map = lru_cache(1 << 10)(tensor_map)


@lru_cache(1 << 14)
def _weight_map(data: int, n: int, k: int) -> ctypes.Array[ctypes.c_uint64]:
    """Of every 32 rows, in the order 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, ..:
    four lanes have two columns each of every eight."""
    return tensor_map(data, (k, 2, 4, 4, n // 32), (2 * k, 16 * k, 4 * k, 64 * k), (64, 2, 4, 4, 4))
