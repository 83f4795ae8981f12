"""A rank's adapters: those it has in host memory, and those at the places of the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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


class Image(NamedTuple):
    """An adapter as it lies at a place, up to its own highest rank: ``memory`` [rank, width]; ``ranks``: of
    each stack."""

    memory: torch.Tensor
    ranks: list[int]


class AdapterStore:
    """``pin``: of what is read, for copies to a device that run beside its steps."""

    def __init__(self, adapters: Adapters, pin: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.adapters = adapters
        self._pin = pin
        self._host: dict[int, Image] = {}
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
            self.keep(number, pieces)
        return {"bytes": self._host[number].memory.nbytes, "content": content}

    def keep(self, number: int, pieces: list[Piece]) -> None:
        """An adapter, as it will lie at a place."""
        stacks = self.adapters.stacks
        places = {id(stack): i for i, stack in enumerate(stacks)}
        ranks, most = [0] * len(stacks), max((len(piece.a) for piece in pieces), default=0)
        memory = torch.zeros(most, self.adapters.width, dtype=self.adapters.dtype, device="cpu")
        for (stack, part, *_), a, b in pieces:
            stack.put(memory, part, a, b)
            place = places[id(stack)]
            ranks[place] = max(ranks[place], len(a))
        self._host[number] = Image(memory if self._pin is None else self._pin(memory), ranks)

    def bring(self, copy: Copy) -> Image | None:
        """Copy an adapter to a place, without waiting for the device, and return what must stay meanwhile;
        None: it is gone."""
        (number,), (place,) = column(copy.sources[0]), column(copy.targets[0])
        image, to = self._host.get(int(number)), self.adapters.memory[int(place) - 1]
        if image is None:
            return None
        to[: len(image.memory)].copy_(image.memory, non_blocking=True)
        to[len(image.memory) :].zero_()
        for stack, rank in zip(self.adapters.stacks, image.ranks):
            stack.ranks[int(place) - 1] = rank
        return image


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
