"""flashinfer's paged prefill, planned on the host once a step."""

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
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape, self._scale = shape, scale
        hopper = torch.cuda.get_device_capability()[0] == 9
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        kernel = "fa3" if hopper else "fa2"
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=kernel) for _ in range(PLANS)
        ]
        self._wrapper = self._wrappers[0]

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
        pages = -(-rows.kv_lens // shape.page_size)
        owned = np.arange(int(pages.max())) < pages[:, None]
        indices = torch.from_numpy(rows.page_table[rows.slots, : owned.shape[1]][owned]).pin_memory()
        self._wrappers.append(self._wrappers.pop(0))
        self._wrapper = self._wrappers[0]
        self._wrapper.plan(
            torch.from_numpy(np.concatenate([[0], rows.q_lens.cumsum()]).astype(np.int32)),
            torch.from_numpy(np.concatenate([[0], pages.cumsum()]).astype(np.int32)),
            indices.to("cuda", non_blocking=True),
            torch.from_numpy((rows.kv_lens - (pages - 1) * shape.page_size).astype(np.int32)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=self._scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        pages = (
            kv.k.transpose(1, 2),
            kv.v.transpose(1, 2),
        )  # [pages, Hkv, page_size, hd], as they lie in memory
        heads = q.view(q.shape[0], -1, self._shape.head_dim)
        return self._wrapper.run(heads, pages).view_as(q)
