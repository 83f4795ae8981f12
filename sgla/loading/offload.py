"""Layers whose weights stay in pinned memory of the host and are copied to the GPU ahead of use, in each step
anew (``--cpu-offload-gb``)."""

from __future__ import annotations

import mmap
import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from sgla import clock
from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.rehearsal import under_way
from sgla.quant.weight import Weight

STAGES = 2  # one is read while the next one is filled
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Offload:
    """``layers``: which of them, in order. They share ``STAGES`` places on the GPU, so what computes finds a
    layer's weights where they always are, in CUDA graphs, too. Copies run on a stream of their own."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self._turns = {layer: turn for turn, layer in enumerate(self.layers)}
        self._copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]  # places, host
        self._places: dict[tuple[Any, ...], list[Tensor]] = {}
        self._arrived: list[Any] = [None for _ in self.layers]
        self._stream = torch.cuda.Stream()
        self._mark = torch.zeros(1)
        self._pinned: list[int] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return sum(host.nbytes for copies in self._copies for _, host in copies)

    def weight(self, module: str, storage: type[Weight], n: int, k: int) -> Weight | None:
        """The uninitialized weight of ``module``, or None if its layer stays on the GPU."""
        found = _LAYER.match(module)
        turn = self._turns.get(int(found[1])) if found else None
        if turn is None:
            return None
        tensors = storage.pack(torch.zeros(1, k)).tensors
        shapes = [((n, *t.shape[1:]), t.dtype) for t in tensors]
        place = (turn % STAGES, *shapes)
        used = {places.data_ptr() for places, _ in self._copies[turn]}
        known = self._places.setdefault(place, [])
        fitting = [at for at in range(0, len(known), len(shapes)) if known[at].data_ptr() not in used]
        if not fitting:
            fitting = [len(known)]
            known += [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        places = known[fitting[0] : fitting[0] + len(shapes)]
        weight = storage(n, k, *places)
        weight.home = tuple(pinned(shape, dtype) for shape, dtype in shapes)
        self._pinned += [home.data_ptr() for home in weight.home]
        self._copies[turn] += zip(places, weight.home)
        return weight

    def wrap(self, blocks: list[Any]) -> None:
        """Have the blocks of these layers wait for their weights."""
        for turn, layer in enumerate(self.layers):
            blocks[layer] = _Block(blocks[layer], partial(self._wait, turn), partial(self._leave, turn))
        blocks[0] = _Block(blocks[0], self._begin, None)

    def measure(self) -> float:
        """Seconds that the copies of a step take."""
        torch.cuda.synchronize()
        begun = clock.now()
        for turn in range(len(self.layers)):
            self._fetch(turn)
        torch.cuda.synchronize()
        return clock.now() - begun

    def _begin(self, x: Tensor) -> None:
        if under_way():
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for turn in range(min(STAGES, len(self.layers))):
            self._fetch(turn)

    def _fetch(self, turn: int) -> None:
        with torch.cuda.stream(self._stream):
            for place, host in self._copies[turn]:
                place.copy_(host, non_blocking=True)
            self._arrived[turn] = self._stream.record_event()

    def _wait(self, turn: int, x: Tensor) -> None:
        """A kernel that follows may fetch weights before the one before it has ended (programmatic dependent
        launch). That before it is the mark's, which begins when the copy is done."""
        if under_way():
            return
        torch.cuda.current_stream().wait_event(self._arrived[turn])
        self._mark.add_(1)

    def _leave(self, turn: int, x: Tensor) -> None:
        if under_way() or turn + STAGES >= len(self.layers):
            return
        self._mark.add_(1)
        self._stream.wait_stream(torch.cuda.current_stream())
        self._fetch(turn + STAGES)


class _Block:
    """A block that calls ``before`` and ``behind``, each with its residual update, or with the streams that
    are all it is given and makes, as nodes of a record."""

    def __init__(
        self, block: Any, before: Callable[[Tensor], None], behind: Callable[[Tensor], None] | None
    ) -> None:
        self._block, self._before, self._behind = block, before, behind

    def __call__(self, x: Tensor, *others: Any) -> Tensor | tuple[Tensor, Tensor]:
        made = self._block(ops.inplace(self._before, x), *others)
        x = made if isinstance(made, Tensor) else made[0]
        x = x if self._behind is None else ops.inplace(self._behind, x)
        return x if isinstance(made, Tensor) else (x, made[1])


def copying(layers: int, of: int, nbytes: int, seconds: float) -> str:
    """What copies of so many bytes cost in each step."""
    rate = nbytes / max(seconds, 1e-9) / 1e9
    return (
        f"--cpu-offload-gb: the matrices of {layers} of {of} layers ({nbytes / (1 << 30):.1f} GiB) lie in "
        f"the host's memory; a step copies them, which takes {seconds * 1e3:.1f} ms at the {rate:.0f} GB/s "
        "measured, however few tokens it has"
    )


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of the host that a GPU copies from by itself, in pages of its own; torch's allocator would round
    its size up to a power of two. Whoever gives it up has to ``_unpin`` it first. Raises ConfigError."""
    size = prod(shape) * dtype.itemsize
    tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(*shape)
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if error:
        raise ConfigError(
            f"--cpu-offload-gb: {size >> 20} MiB of the host's memory cannot be pinned (CUDA error {error}); "
            "raise the limit of locked memory (ulimit -l), or lower --cpu-offload-gb",
            param="cpu_offload_gb",
        )
    return tensor


def _unpin(pointers: list[int]) -> None:
    """Else the GPU would take the pages for those of whatever memory has their addresses later."""
    torch.cuda.synchronize()
    for pointer in pointers:
        torch.cuda.cudart().cudaHostUnregister(pointer)
