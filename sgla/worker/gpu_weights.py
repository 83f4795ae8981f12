"""How a GPU runner gives memory and weights back, and has them again. Graphs keep the addresses of both,
which stay (``region.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sgla.errors import OutOfMemory, UnsupportedField
from sgla.hub.source import ModelSource
from sgla.model.base import CausalLM, Refills
from sgla.worker.gpu_memory import Advice, within_memory
from sgla.worker.gpu_setup import GpuSetup
from sgla.worker.memory import available_bytes, mib
from sgla.worker.pinned import Pinned, pieces
from sgla.worker.region import Region
from sgla.worker.weights import ChangingRunner

OTHERS = Advice("end what else has taken it, and wake the server again", "tags")


class GpuWeights(ChangingRunner, GpuSetup):
    """Matrices lie in a region of their own, as does the KV cache. Vectors, tables, graphs and what steps
    take in between stay."""

    _kept: Pinned | None = None  # weights, or room for them
    _whole = False  # and they are those that there are

    @property
    def refilled(self) -> bool:
        return self.steps.model.declared is not None

    def _check_sleep(self, weights: str) -> None:
        if self.regions is None:
            raise UnsupportedField(
                "this GPU has no virtual memory management, without which memory cannot be given back",
                param="tags",
            )
        region = self.regions.weights
        if not (weights and region.mapped):
            return
        if not region.size:
            raise UnsupportedField(
                f"weights cannot be given back beside {self.fixed}; give back the KV cache alone",
                param="tags",
            )
        if not (self._from_files(weights) or self._whole or self._kept):
            self._check_room(region.size)

    def _from_files(self, weights: str) -> bool:
        """They are read again."""
        return weights == "files" and not (self.fixed or self.brought)

    def _sleep(self, kv: bool, weights: str) -> None:
        self._check_sleep(weights)
        assert self.regions is not None
        region = self.regions.weights
        if self.host is not None:
            self.host.settle()
        torch.cuda.synchronize()
        if weights and region.mapped:
            if self._from_files(weights):
                self._kept, self._whole = None, False
            elif not self._whole:
                self._copy(region)
            region.unmap()
        if kv:
            self.regions.kv.unmap()
        torch.cuda.empty_cache()

    def _copy(self, region: Region) -> None:
        """To the host's memory, which is not given back later: to lock pages takes longer than to copy.
        Raises OutOfMemory."""
        if self._kept is None:
            self._kept = self._room(region.size)
        for start, stop in pieces(region.size):
            self._kept.bytes[start:stop].copy_(region.part(start, stop), non_blocking=True)
        torch.cuda.synchronize()
        self._whole = True

    def _check_room(self, size: int) -> None:
        free = available_bytes() // self.shard.of_mlps.count
        if free < size:
            raise OutOfMemory(
                f"the host has {mib(free)} for weights of {mib(size)}; POST /sleep?level=2, which reads them "
                "from the files again",
                param="level",
            )

    def _room(self, size: int) -> Pinned:
        self._check_room(size)
        try:
            return Pinned(size)
        except RuntimeError as error:
            raise OutOfMemory(f"{error}; raise ulimit -l, or POST /sleep?level=2", param="level") from error

    def _wake(self, kv: bool, weights: bool) -> None:
        """What is copied and set to zero is there for the next step, which is launched behind it."""
        if self.regions is None:
            return
        with within_memory("waking", lambda: OTHERS):
            if weights and not self.regions.weights.mapped:
                self._weights_again(self.regions.weights)
            if kv and not self.regions.kv.mapped:
                for start, stop in self.regions.kv.map():
                    self.regions.kv.part(start, stop).zero_()

    def _weights_again(self, region: Region) -> None:
        if self._whole:
            assert self._kept is not None
            for start, stop in region.map():
                region.part(start, stop).copy_(self._kept.bytes[start:stop], non_blocking=True)
            return
        for _ in region.map():
            pass
        try:
            self._read_again()
        except BaseException:
            region.unmap()
            raise

    def _read_again(self) -> None:
        self._check_files()
        self._take(self.source, sound=False)

    def _take(self, source: ModelSource, sound: bool = True) -> None:
        with self._changes() as declared:
            declared.load(source, sound=sound)

    def _look(self, source: ModelSource) -> None:
        with self._changes() as declared:
            declared.look(source)

    def _take_tensors(self, tensors: Mapping[str, Tensor], look: bool) -> None:
        with self._changes() as declared:
            declared.take(tensors, look)

    def _scramble(self) -> None:
        with self._changes() as declared:
            declared.scramble(self.source)

    @property
    def _model(self) -> CausalLM:
        return self.steps.model

    @contextmanager
    def _changes(self) -> Iterator[Refills]:
        """What comes goes where every graph finds it."""
        declared = self.steps.model.declared
        assert declared is not None
        self._whole = False
        with self.place.torch, torch.inference_mode(), within_memory("weights came", lambda: OTHERS):
            yield declared
        torch.cuda.empty_cache()
