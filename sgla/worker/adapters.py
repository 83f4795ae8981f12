"""A rank's adapters: those it has in host memory, and those at the places of the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgla.config import Config
from sgla.errors import InvalidField
from sgla.kernels.batch import ForwardBatch
from sgla.layers.adapters import Adapters
from sgla.loading.adapter import Piece, read_adapter
from sgla.messages import Copy, Moved
from sgla.worker.state import Int32s, SlotTables, column

READERS = 2  # adapters that are read at a time


def places_of(config: Config, dtype: str) -> Adapters | None:
    """Where the layers make room for adapters; None: the server has none."""
    if not config.enable_lora:
        return None
    return Adapters(
        config.max_loras,
        config.max_lora_rank,
        torch.float32 if dtype == "float32" else torch.bfloat16,
        frozenset(config.lora_target_modules),
    )


class AdapterStore:
    """``pin``: of what is read, for copies to a device that run beside its steps."""

    def __init__(self, adapters: Adapters, pin: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.adapters = adapters
        self._pin = pin
        self._host: dict[int, list[Piece]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def drop(self, args: dict[str, Any]) -> None:
        """Forget the adapter ``number``."""
        self._host.pop(args["number"], None)

    def load(self, args: dict[str, Any]) -> Future[dict[str, Any]]:
        """Read the adapter of the folder ``path`` under a ``number``, in a thread, so that steps go on.
        Raises InvalidField, the future InvalidAdapter."""
        number = args["number"]
        if number in self._host:
            raise InvalidField(f"there is an adapter {number}", param="number")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, "adapter")
        return self._threads.submit(self._load, number, Path(args["path"]))

    def _load(self, number: int, folder: Path) -> dict[str, Any]:
        with torch.inference_mode():
            pieces, content = read_adapter(folder, self.adapters)
        if self._pin is not None:
            pieces = [piece._replace(a=self._pin(piece.a), b=self._pin(piece.b)) for piece in pieces]
        self._host[number] = pieces
        nbytes = sum(piece.a.nbytes + piece.b.nbytes for piece in pieces)
        return {"bytes": nbytes, "content": content}

    def bring(self, copy: Copy) -> list[Piece] | None:
        """Copy an adapter to a place, without waiting for the device, and return what must stay meanwhile;
        None: it is gone."""
        (number,), (place,) = column(copy.sources[0]), column(copy.targets[0])
        pieces = self._host.get(int(number))
        if pieces is None:
            return None
        for stack in self.adapters.stacks:
            stack.clear(int(place))
        for target, a, b in pieces:
            target.stack.put(int(place), target.part, a, b)
        return pieces


class AdaptedForward:
    """A forward pass that knows which rows have which adapter: ``plain`` for steps in which none has any."""

    def __init__(
        self,
        adapters: Adapters,
        tables: SlotTables,
        plain: Callable[[ForwardBatch], torch.Tensor],
        adapted: Callable[[ForwardBatch], torch.Tensor],
    ) -> None:
        self._rows, self._tables, self._plain, self._adapted = adapters.rows, tables, plain, adapted

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        tokens = token_places(self._tables.place, batch.slots.numpy(), batch.q_start.numpy())
        self._rows.set(tokens, tokens[batch.sample_rows.numpy()])
        return (self._adapted if self._rows.active else self._plain)(batch)


def token_places(places: Int32s, slots: Int32s, q_start: Int32s) -> Int32s:
    """int32[T]: the places of the slots, each as often as its row has tokens."""
    return np.repeat(places[slots], np.diff(q_start))


class DirectCopies:
    """Copies of adapters on a CPU, which have ended when they have begun."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._ended: list[Moved] = []

    @property
    def under_way(self) -> bool:
        return bool(self._ended)

    def begin(self, copy: Copy) -> None:
        self._ended.append(Moved(copy.transfer, self._store.bring(copy) is not None))

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None: ...
