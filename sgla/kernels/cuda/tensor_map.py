"""Descriptions of tensors for the copy engine (TMA)."""

from __future__ import annotations

import ctypes

from sgla.kernels.cuda.build import check, driver

TensorMap = ctypes.c_uint64 * 16  # CUtensorMap


def tensor_map(
    data: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    bytes_: bool = False,
) -> ctypes.Array[ctypes.c_uint64]:
    """A CUtensorMap of bf16, or of ``bytes_``: ``strides`` in bytes of all dims but the first, tiles swizzled
    by 128 bytes, or by 64 or 32 if they are no wider."""
    rank = len(dims)
    room = ctypes.create_string_buffer(192)
    at = -(-ctypes.addressof(room) // 64) * 64  # it must be aligned
    encode = driver().cuTensorMapEncodeTiled
    no_interleave, no_promotion, fill_zero = 0, 0, 0
    kind, swizzle = 0 if bytes_ else 9, {32: 1, 64: 2}.get(box[0] * (1 if bytes_ else 2), 3)
    code = encode(
        ctypes.c_void_p(at), kind, rank, ctypes.c_void_p(data),
        (ctypes.c_uint64 * rank)(*dims), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1,) * rank),
        no_interleave, swizzle, no_promotion, fill_zero,
    )  # fmt: skip
    check(code, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))
