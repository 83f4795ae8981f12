"""Features of pictures and sounds, which a tower makes once for all requests that have the same."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from sgla.loading.tower import Features
from sgla.messages import Array, Prepared

log = logging.getLogger(__name__)


class Maker(Protocol):
    """Makes features of a picture or a sound."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, arrays: Mapping[str, Tensor]) -> Features: ...


class FeatureCache:
    """``width``: of features; ``most``: bytes of them that are kept for requests to come."""

    def __init__(self, tower: Maker, width: int, most: int) -> None:
        self._tower, self._width, self._most = tower, width, most
        self._kept: OrderedDict[bytes, Features] = OrderedDict()  # by digest, the latest used one last
        self._bytes = 0
        self.computed = 0  # that the tower has made

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def of(self, picture: Prepared, count: int) -> Features:
        """So many; what cannot be had is no number, so that its request fails alone."""
        known = self._kept.get(picture.digest)
        if known is not None:
            self._kept.move_to_end(picture.digest)
            return known
        self.computed += 1
        try:
            made = self._tower(self.read(picture))
        except (OSError, ValueError, RuntimeError, IndexError) as error:
            log.warning("no features of a picture or a sound: %s: %s", type(error).__name__, str(error)[:300])
            made = None
        if made is None or len(made.values) != count:
            lost = torch.full((count, self._width), torch.nan, device=self._tower.device)
            return Features(lost.to(self._tower.dtype), [])
        self.keep(picture, made)
        return made

    def read(self, picture: Prepared) -> dict[str, Tensor]:
        """``arrays_of`` for the tower."""
        return arrays_of(picture, pinned=self._tower.device.type == "cuda")

    def keep(self, picture: Prepared, made: Features) -> None:
        self._kept[picture.digest] = made
        self._bytes += made.nbytes
        while self._bytes > self._most:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def arrays_of(picture: Prepared, pinned: bool = False) -> dict[str, Tensor]:
    """``pinned``: in memory that a GPU copies from while the host goes on. Raises OSError, and ValueError for
    a file that is too short."""
    with record_function("read a picture"), open(picture.file, "rb") as file:
        return {array.name: _read(file, array, pinned) for array in picture.arrays}


def _read(file: BufferedReader, array: Array, pinned: bool) -> Tensor:
    """Of a sound of an hour a window alone."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    made = torch.empty(array.shape, dtype=dtype, pin_memory=pinned)
    file.seek(array.first)
    if file.readinto(made.numpy().reshape(-1).view(np.uint8).data) != made.nbytes:
        raise ValueError(f"{array.name} of a picture ends too early")
    return made


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
