"""Adapters on a GPU: which rows of a step have which, and the copies that bring them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.lora import Placed, Rows, Tiles, tiles_of
from sgla.kernels.triton.fetch import fetch
from sgla.kernels.triton.lora import FEW, MANY, SOME, sort
from sgla.messages import Copy, Moved
from sgla.worker.adapters import AdapterStore
from sgla.worker.device_state import DeviceTables, upload

SHARED = 4  # rows that an adapter has on average, up to which a step takes them apart


def apart_of(sizes: list[int], count: int) -> list[int]:
    """Those of ``sizes`` of graphs that steps take whose rows ``differ``, of so many adapters."""
    most = SHARED * count
    end = next((i for i, size in enumerate(sizes, 1) if size >= most), len(sizes))
    return [size for size in sizes[:end] if size > FEW] if most > FEW else []


class AdaptedRows:
    """Fills ``rows`` for each step: on the host for eager ones, on the device for graphs of at most ``most``
    rows of one token; those that read prompts have ``AdaptedPrompts``. ``count``: of places."""

    def __init__(self, rows: Rows, tables: DeviceTables, most: int, count: int) -> None:
        self.rows, self.count, self._tables = rows, count, tables
        self._places, self._order = torch.zeros(2, most, dtype=torch.int32, device="cuda")
        self._runs = torch.zeros(most, 3, dtype=torch.int32, device="cuda")

    def any(self, slots: Any) -> bool:
        """Whether one of them has an adapter."""
        return bool(self._tables.host.place[slots].any())

    def differ(self, slots: Any) -> bool:
        """Whether they are more than a tile takes, with an adapter for each ``SHARED`` of them at least."""
        places = self._tables.host.place[slots]
        return FEW < len(places) <= SHARED * len(set(places[places > 0].tolist()))

    def begin(self, slots: Any, q_lens: Any, sampled: Any) -> None:
        """Of an eager step: ``sampled`` are its tokens that logits are wanted of."""
        self.rows.active = self.any(slots)
        if self.rows.active:
            self.rows.place(self.placed(slots, q_lens, sampled))

    def placed(self, slots: Any, q_lens: Any, sampled: Any) -> Placed:
        """Of such rows, or of some of a step's, of which none need have an adapter."""
        tokens = np.repeat(self._tables.host.place[slots], q_lens)
        size = MANY if q_lens.max() > 1 else FEW
        parts = _parts(tokens, tokens[sampled], size)
        return _placed(upload(np.concatenate(parts)).split([len(part) for part in parts]), size)

    def places_of(self, slots: Any) -> Any:
        return self._tables.host.place[slots]

    @contextmanager
    def graph(self, slots: Tensor, apart: bool) -> Iterator[None]:
        """Inside of a graph of rows of one token; ``apart``: of ``Rows``."""
        rows, place, count = self.rows, self._tables.place, len(slots)
        assert place is not None
        rows.places = (self._places[:count],) * 2
        rows.tiles = (Tiles(self._order[:count], self._runs[:count], FEW),) * 2
        sort(rows, place, slots)
        rows.active, rows.apart = True, apart
        try:
            yield
        finally:
            rows.active = rows.apart = False


class AdaptedPrompts:
    """Fills what ``adapted`` has for graphs that read prompts, of at most ``tokens`` and as many ``samples``,
    on the host, in pinned buffers, of which there are ``stages``."""

    def __init__(self, adapted: AdaptedRows, tokens: int, samples: int, stages: int) -> None:
        self._adapted = adapted
        self._lengths = self._sizes(tokens, samples)
        self._columns = torch.zeros(sum(self._lengths), dtype=torch.int32, device="cuda")
        self._pinned = [torch.zeros_like(self._columns, device="cpu").pin_memory() for _ in range(stages)]
        self._stage = 0

    def _sizes(self, tokens: int, samples: int) -> list[int]:
        """Of what ``_parts`` makes, at most: all samples may be rows of one token."""
        tiles = min(samples, self._adapted.count) + tokens // SOME
        return [tokens, samples, tokens, 3 * tiles, samples, 3 * samples]

    @contextmanager
    def graph(self, tokens: int, samples: int) -> Iterator[None]:
        """Inside of a graph of so many."""
        rows = self._adapted.rows
        columns = self._columns.split(self._lengths)
        sizes = self._sizes(tokens, samples)
        rows.place(_placed([part[:size] for part, size in zip(columns, sizes)], SOME))
        rows.active = True
        try:
            yield
        finally:
            rows.active = False

    def fill(self, slots: Any, q_lens: Any, sampled: Any) -> None:
        """Before the replay. ``slots``: of the rows in the order of the graph's tokens; ``sampled``: those of
        its samples."""
        tokens, samples = np.repeat(self._adapted.places_of(slots), q_lens), self._adapted.places_of(sampled)
        pinned = self._pinned[self._stage]
        self._stage = (self._stage + 1) % len(self._pinned)
        host = pinned.numpy()
        host[:] = 0
        at = 0
        for part, size in zip(_parts(tokens, samples, SOME), self._lengths):
            host[at : at + len(part)] = part
            at += size
        fetch(pinned, self._columns)


def _parts(tokens: Any, sampled: Any, size: int) -> list[Any]:
    """int32 columns of the places of a step's tokens, and of those that are sampled: what ``_placed`` has on
    the device. ``size``: of the tiles of tokens."""
    tiles = tiles_of(tokens, size), tiles_of(sampled, FEW)
    return [tokens, sampled, *(part.reshape(-1) for part in chain(*tiles))]


def _placed(columns: Sequence[Tensor], size: int) -> Placed:
    tokens, sampled, order, runs, last, ends = columns
    return Placed(
        (tokens, sampled), (Tiles(order, runs.view(-1, 3), size), Tiles(last, ends.view(-1, 3), FEW))
    )


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
