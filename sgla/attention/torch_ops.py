"""The oracle: attention in torch operations, in float32.
Needs lengths on the host, so it cannot be captured."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sgla.attention.base import PARTS, AttentionShape, DeviceBatch
from sgla.device import Device
from sgla.kernels import ops
from sgla.kernels.batch import Media
from sgla.kernels.ops import KVLayer, Scoring

PLACES = 1 << 15  # places of histories that decode rows look at at a time
PAIRS = 1 << 22  # of a prompt's token and a place in its history


class TorchDecode:
    name, captured, grows, cascades, leaves, fused = "torch", False, True, False, False, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        pass

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return PARTS if shape.parts else None

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        out, rows = ops.outcome(q, kv), batch.decode_rows
        few = max(1, PLACES // int(batch.kv_len[:rows].max()))
        for begin in range(0, rows, few):
            end = min(begin + few, rows)
            part = rows_of(batch, begin, end)
            out[begin:end] = ops.attention.body(q[begin:end], kv, part, *scoring)
        return out


class TorchExtend:
    """A few tokens of a row at a time, but with all of its history."""

    name, captured, grows, narrow, in_place = "torch", False, True, True, False

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        pass

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return PARTS if shape.parts else None

    def plan(self, batch: DeviceBatch) -> None:
        pass

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        rows, at, until, canvas = batch.extend, 0, until_of(batch), batch.canvas
        assert rows is not None
        for row, (q_len, kv_len) in enumerate(zip(rows.q_lens.tolist(), rows.kv_lens.tolist())):
            few, begin = max(1, PAIRS // kv_len), 0
            while begin < q_len:
                count = min(few, q_len - begin)
                if canvas is not None:
                    count = q_len - begin
                if until is not None:  # all of a picture, whose tokens see each other
                    count = max(count, int(until[at + count - 1]) - (kv_len - q_len + begin))
                part = rows_of(batch, batch.decode_rows + row, batch.decode_rows + row + 1)
                part.q_start = part.q_start.new_tensor([0, count])
                part.kv_len = part.kv_len.new_tensor([kv_len - q_len + begin + count])
                part.media = None if until is None else Media(until, until, until=until[at : at + count])
                if canvas is not None:
                    own = slice(batch.decode_rows + at, batch.decode_rows + at + count)
                    part.canvas = replace(canvas, until=canvas.until[own], origin=canvas.origin[own])
                out[at : at + count] = ops.attention.body(q[at : at + count], kv, part, *scoring)
                at, begin = at + count, begin + count


def until_of(batch: DeviceBatch) -> Tensor | None:
    """``Media.until`` of the tokens behind the decode rows, if they need it."""
    if batch.media is None or batch.media.until is None:
        return None
    return batch.media.until[batch.decode_rows :]


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
