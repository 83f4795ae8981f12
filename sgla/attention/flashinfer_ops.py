"""flashinfer's prefill, planned on the host once a step.

Where no row has a prefix in the pages, the kernel reads k and v as the projection left them, which is faster than
gathering pages.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from sgla.attention.base import DeviceBatch, Shape
from sgla.kernels.ops import KVLayer

WORKSPACE = 256 << 20
PLANS = 4  # a plan's pinned buffer is read by the device later: as many as steps may be queued, and one more


class FlashInferExtend:
    name = "flashinfer"

    def __init__(self, shape: Shape, scale: float) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        self._shape, self._scale = shape, scale
        hopper = torch.cuda.get_device_capability()[0] == 9
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        kernel = "fa3" if hopper else "fa2"
        self._paged = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=kernel) for _ in range(PLANS)
        ]
        self._whole = [
            BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel) for _ in range(PLANS)
        ]
        self.ragged = False  # of the planned step: q, k and v lie side by side

    @staticmethod
    def refuses(shape: Shape) -> str | None:
        """Why flashinfer cannot be used, or None."""
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if shape.windows != {0}:
            return "layers have a sliding window"
        if shape.softcap:
            return "scores have a soft cap"
        if shape.head_dim not in (64, 128):
            return f"head dimension {shape.head_dim} is not 64 or 128"
        if shape.dtype != torch.bfloat16:
            return f"the KV cache is {shape.dtype}, not bfloat16"
        return None

    def plan(self, batch: DeviceBatch) -> None:
        rows, shape = batch.extend, self._shape
        assert rows is not None
        self.ragged = bool((rows.q_lens == rows.kv_lens).all())
        starts = torch.from_numpy(np.concatenate([[0], rows.q_lens.cumsum()]).astype(np.int32))
        common = {
            "causal": True,
            "sm_scale": self._scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        if self.ragged:
            self._whole.append(self._whole.pop(0))
            self._whole[0].plan(starts, starts, shape.heads, shape.kv_heads, shape.head_dim, **common)
            return
        pages = -(-rows.kv_lens // shape.page_size)
        owned = np.arange(int(pages.max())) < pages[:, None]
        indices = torch.from_numpy(rows.page_table[rows.slots, : owned.shape[1]][owned]).pin_memory()
        self._paged.append(self._paged.pop(0))
        self._paged[0].plan(
            starts,
            torch.from_numpy(np.concatenate([[0], pages.cumsum()]).astype(np.int32)),
            indices.to("cuda", non_blocking=True),
            torch.from_numpy((rows.kv_lens - (pages - 1) * shape.page_size).astype(np.int32)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            **common,
        )

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        shape, tokens = self._shape, q.shape[0]
        heads = q.unflatten(1, (shape.heads, shape.head_dim))
        out = q.new_empty(tokens, shape.heads, shape.head_dim)
        if self.ragged:
            k, v = _beside(q, shape)
            self._whole[0].run(heads, k, v, out=out)
        else:
            pages = (
                kv.k.transpose(1, 2),
                kv.v.transpose(1, 2),
            )  # [pages, Hkv, page_size, hd], as they lie in memory
            self._paged[0].run(heads, pages, out=out)
        return out.view(tokens, -1)


def _beside(q: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """k and v ``[T, Hkv, hd]`` that follow q in each row of the projection's output."""
    width = shape.kv_heads * shape.head_dim
    assert q.stride(0) == q.shape[1] + 2 * width
    at, size = q.storage_offset() + q.shape[1], (q.shape[0], shape.kv_heads, shape.head_dim)
    strides = (q.stride(0), shape.head_dim, 1)
    return q.as_strided(size, strides, at), q.as_strided(size, strides, at + width)
