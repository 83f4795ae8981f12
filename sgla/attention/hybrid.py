"""Prefill that leaves whole prompts to one backend, and prompts behind a prefix in the pages to another."""

from __future__ import annotations

from torch import Tensor

from sgla.attention.base import AttentionShape, DeviceBatch, Extend
from sgla.device import Device
from sgla.kernels.ops import KVLayer, Scoring


class WholeOrPaged:
    """``whole`` reads k and v beside q; it need not understand the pages' format, as ``paged`` does."""

    captured, grows, narrow = True, False, True

    def __init__(self, whole: Extend, paged: Extend) -> None:
        self._whole, self._paged, self._now = whole, paged, paged
        self.name = f"{whole.name} and {paged.name}"

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return None

    @property
    def in_place(self) -> bool:
        return self._now is self._whole

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        self._now = self._whole if (rows.q_lens == rows.kv_lens).all() else self._paged
        self._now.plan(batch)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        self._now.forward(q, kv, batch, scoring, out)
