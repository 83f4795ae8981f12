"""Adapters on a GPU: which rows of a step have which, and the copies that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.lora import Rows, Tiles, tiles_of
from sgla.kernels.triton.lora import FEW, MANY, sort
from sgla.messages import Copy, Moved
from sgla.worker.adapters import AdapterStore
from sgla.worker.device_state import DeviceTables, upload


class AdaptedRows:
    """Fills ``rows`` for each step: on the host for eager ones, on the device for graphs of at most ``most``
    rows."""

    def __init__(self, rows: Rows, tables: DeviceTables, most: int) -> None:
        self.rows, self._tables = rows, tables
        self._places, self._order = torch.zeros(2, most, dtype=torch.int32, device="cuda")
        self._runs = torch.zeros(most, 3, dtype=torch.int32, device="cuda")

    def any(self, slots: Any) -> bool:
        """Whether one of them has an adapter."""
        return bool(self._tables.host.place[slots].any())

    def begin(self, slots: Any, q_lens: Any, sampled: Any) -> None:
        """Of an eager step: ``sampled`` are its tokens that logits are wanted of."""
        rows, places = self.rows, self._tables.host.place[slots]
        rows.active = bool(places.any())
        if not rows.active:
            return
        tokens = np.repeat(places, q_lens)
        sizes = MANY if q_lens.max() > 1 else FEW, FEW
        tiles = [tiles_of(own, size) for own, size in zip((tokens, tokens[sampled]), sizes)]
        parts = [tokens, tokens[sampled], *(part.reshape(-1) for pair in tiles for part in pair)]
        own, last, *made = upload(np.concatenate(parts)).split([len(part) for part in parts])
        rows.places = own, last
        order, runs = made[::2], [part.view(-1, 3) for part in made[1::2]]
        rows.tiles = Tiles(order[0], runs[0], sizes[0]), Tiles(order[1], runs[1], sizes[1])

    @contextmanager
    def graph(self, slots: Tensor) -> Iterator[None]:
        """Inside of a graph of rows of one token."""
        rows, place, count = self.rows, self._tables.place, len(slots)
        assert place is not None
        rows.places = (self._places[:count],) * 2
        rows.tiles = (Tiles(self._order[:count], self._runs[:count], FEW),) * 2
        sort(rows, place, slots)
        rows.active = True
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
