"""The oracle: attention in torch operations, in float32. Needs lengths on the host, so it cannot be captured."""

from __future__ import annotations

from torch import Tensor

from sgla.attention.base import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer


class TorchDecode:
    name = "torch"
    cascades = False

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        part = rows_of(batch, 0, batch.decode_rows)
        return _oracle(q, kv, part, scale, window, softcap)


class TorchExtend:
    name = "torch"

    def plan(self, batch: DeviceBatch) -> None:
        pass

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: DeviceBatch,
        scale: float,
        window: int,
        softcap: float,
        out: Tensor,
    ) -> None:
        out.copy_(_oracle(q, kv, rows_of(batch, batch.decode_rows, batch.rows), scale, window, softcap))


def rows_of(batch: DeviceBatch, start: int, stop: int) -> DeviceBatch:
    """The batch of rows ``start:stop`` alone, as far as attention looks at it."""
    q_start = batch.q_start[start : stop + 1]
    tokens = stop if stop == batch.decode_rows else batch.tokens - batch.decode_rows
    return DeviceBatch(
        rows=stop - start,
        tokens=tokens,
        ids=batch.ids,
        positions=batch.positions,
        slots=batch.slots[start:stop],
        q_start=q_start - q_start[0],
        kv_len=batch.kv_len[start:stop],
        out_loc=batch.out_loc,
        page_table=batch.page_table,
        page_size=batch.page_size,
        sample_rows=batch.sample_rows,
    )


def _oracle(q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float) -> Tensor:
    recorder, ops.recorder = ops.recorder, None
    try:
        return ops.attention(q, kv, batch, scale, window, softcap)
    finally:
        ops.recorder = recorder
