"""flashinfer's prefill, planned on the host once a step.

For rows that have no prefix in the pages the kernel reads k and v as the projection left them, which is
faster than gathering pages.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from sgla.attention.base import RISING, AttentionShape, DeviceBatch, Int32s, Unusable, kv_beside
from sgla.device import Device
from sgla.kernels.ops import KVLayer, Scoring

WORKSPACE = 256 << 20
PLANS = 4  # a plan's pinned buffer is read by the device later: as many as steps may be queued, and one more


class FlashInferExtend:
    name, captured, grows, narrow = "flashinfer", True, False, False

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        """Raises Unusable: whatever is broken in its installation is met by importing and compiling."""
        self._shape = shape
        try:
            self._make(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            line = str(error).partition(chr(10))[0]
            raise Unusable(f"it does not work here: {type(error).__name__}: {line}") from error

    def _make(self, device: Device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        shape = self._shape
        self._common = {
            "causal": True,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        kernel = "fa3" if device.wgmma else "fa2"
        self._paged = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=kernel) for _ in range(PLANS)
        ]
        self._whole = [
            BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel) for _ in range(PLANS)
        ]
        self._tokens = 0  # of the planned step's rows that read pages, which come first
        self.in_place = False  # whether others read what lies beside q
        one = np.ones(1, np.int32)  # to compile both kernels, or to find out that it is impossible
        self._plan_whole(one)
        self._plan_paged(one - 1, one, one, one[None] - 1)

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Why it cannot be used if its installation is whole, or None."""
        if importlib.util.find_spec("flashinfer") is None:
            return "it is not installed (pip install flashinfer-python)"
        if shape.sinks:
            return "layers have sinks"
        if shape.rising:
            return RISING
        if shape.mixed:
            return shape.mixed
        if shape.windows != {0}:
            return "layers have a sliding window"
        if shape.together:
            return "tokens of a picture see each other"
        if shape.softcap:
            return "scores have a soft cap"
        if shape.head_dim not in (64, 128):
            return f"head dimension {shape.head_dim} is not 64 or 128"
        if shape.dtype != torch.bfloat16:
            return f"the KV cache is {shape.dtype}, not bfloat16"
        return None

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        whole = rows.q_lens == rows.kv_lens
        behind = len(whole) - int(whole.sum())
        if not whole[behind:].all():
            behind = len(whole)
        self._tokens, self.in_place = int(rows.q_lens[:behind].sum()), behind < len(whole)
        if self.in_place:
            self._plan_whole(rows.q_lens[behind:])
        if behind:
            slots, q_lens, kv_lens = (column[:behind] for column in rows[:3])
            self._plan_paged(slots, q_lens, kv_lens, rows.page_table)

    def _plan_whole(self, lens: Int32s) -> None:
        shape, starts = self._shape, _cumulative(lens)
        self._whole.append(self._whole.pop(0))
        self._whole[0].plan(starts, starts, shape.heads, shape.kv_heads, shape.head_dim, **self._common)

    def _plan_paged(self, slots: Int32s, q_lens: Int32s, kv_lens: Int32s, page_table: Int32s) -> None:
        shape = self._shape
        pages = -(-kv_lens // shape.page_size)
        owned = np.arange(int(pages.max())) < pages[:, None]
        indices = torch.from_numpy(page_table[slots, : owned.shape[1]][owned]).pin_memory()
        self._paged.append(self._paged.pop(0))
        self._paged[0].plan(
            _cumulative(q_lens),
            _cumulative(pages),
            indices.to("cuda", non_blocking=True),
            torch.from_numpy((kv_lens - (pages - 1) * shape.page_size).astype(np.int32)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            **self._common,
        )

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        n, shape = self._tokens, self._shape
        heads, y = (t.unflatten(1, (shape.heads, shape.head_dim)) for t in (q, out))
        if n:
            # [pages, Hkv, page_size, hd], as they lie in memory
            self._paged[0].run(heads[:n], (kv.k.transpose(1, 2), kv.v.transpose(1, 2)), out=y[:n])
        if self.in_place:
            k, v = kv_beside(q[n:], shape)
            self._whole[0].run(heads[n:], k, v, out=y[n:])


def _cumulative(counts: Int32s) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32))
