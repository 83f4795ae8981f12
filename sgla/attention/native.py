"""Our CUDA decode kernel: lengths and pages are read on the device and work is cut evenly, so a graph replays it as is."""

from __future__ import annotations

from torch import Tensor

from sgla.attention.base import DeviceBatch, Shape
from sgla.kernels.cuda import decode_attention
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.ops import KVLayer

TILE = decode_attention.TILE


class NativeDecode:
    name = "native"

    def __init__(self, shape: Shape) -> None:
        self._kernel = decode_attention.DecodeAttention(
            shape.max_rows, shape.kv_heads, shape.group, shape.head_dim
        )

    @staticmethod
    def refuses(shape: Shape) -> str | None:
        """Why this kernel cannot be used, or None."""
        return decode_attention.supported(shape.dtype, shape.head_dim, shape.group, shape.page_size)

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: DeviceBatch,
        scale: float,
        window: int,
        softcap: float,
        projection: Projection | None = None,
    ) -> Tensor:
        """With ``projection``, q is the output of the q, k, v projection: see the kernel."""
        n = batch.decode_rows
        return self._kernel(
            q, kv.k, kv.v, batch.page_table, batch.slots[:n], batch.kv_len[:n], batch.cum[window], scale, window, softcap, projection,
        )  # fmt: skip
