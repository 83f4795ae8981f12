"""Adapters on a GPU: which rows of a step have which, and the copies that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.lora import Rows, tiles_of
from sgla.kernels.triton.lora import TILE
from sgla.messages import Copy, Moved
from sgla.worker.adapters import AdapterStore
from sgla.worker.device_state import DeviceTables, upload


class AdaptedRows:
    """Fills ``rows`` for each step: on the host for eager ones, on the device for graphs."""

    def __init__(self, rows: Rows, tables: DeviceTables, tokens: int, sampled: int) -> None:
        self.rows, self._tables = rows, tables
        rows.tokens = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        rows.sampled = torch.zeros(sampled, dtype=torch.int32, device="cuda")

    def any(self, slots: Any) -> bool:
        """Whether one of them has an adapter."""
        return bool(self._tables.host.place[slots].any())

    def begin(self, slots: Any, q_lens: Any, sampled: Any) -> None:
        """Of an eager step: ``sampled`` are its tokens that logits are wanted of."""
        rows, places = self.rows, self._tables.host.place[slots]
        rows.active, rows.tiles = bool(places.any()), None
        if not rows.active:
            return
        tokens = np.repeat(places, q_lens)
        both = upload(np.concatenate([tokens, tokens[sampled]]))
        rows.tokens[: len(tokens)].copy_(both[: len(tokens)])
        rows.sampled[: len(sampled)].copy_(both[len(tokens) :])
        if q_lens.max() > 1:
            rows.tiles = upload(tiles_of(places, q_lens, TILE))

    @contextmanager
    def graph(self, slots: Tensor) -> Iterator[None]:
        """Inside of a graph of rows of one token."""
        rows, place = self.rows, self._tables.place
        assert place is not None
        torch.index_select(place, 0, slots, out=rows.tokens[: len(slots)])
        rows.active, rows.tiles = True, None
        try:
            yield
        finally:
            rows.active = False


class AdapterCopies:
    """Copies of adapters to their places, on a stream of their own."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._stream = torch.cuda.Stream()
        self._under_way: list[tuple[Copy, torch.cuda.Event, object]] = []
        self._failed: list[Moved] = []

    @property
    def under_way(self) -> bool:
        return bool(self._under_way or self._failed)

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            kept = self._store.bring(copy)
            if kept is None:
                self._failed.append(Moved(copy.transfer, ok=False))
                return
            end = torch.cuda.Event()
            end.record()
        self._under_way.append((copy, end, kept))

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        """Those that have ended since the last call."""
        done = [entry for entry in self._under_way if entry[1].query()]
        self._under_way = [entry for entry in self._under_way if entry not in done]
        failed, self._failed = self._failed, []
        return failed + [Moved(copy.transfer, ok=True) for copy, *_ in done]

    def close(self) -> None: ...
