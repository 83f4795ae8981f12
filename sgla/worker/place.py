"""Where a rank computes: its threads or its GPU, and its memory. Other devices bring places of their own
(``device.Platform``)."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor

from sgla.config import Config
from sgla.device import Device, platform
from sgla.dist import Shard, join
from sgla.dist.all_to_all import AllToAll
from sgla.dist.deepep import DeepEP
from sgla.dist.lockstep import Lockstep, PlannedLockstep, SharedRows
from sgla.dist.meeting import TIMEOUT
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.kernels.device import describe, use
from sgla.kernels.dispatch import using
from sgla.kernels.placement import Placement
from sgla.kernels.sent_moe import Traffic
from sgla.memory import give_back
from sgla.nodes import ranks_of
from sgla.worker.forward import Forward, compiled
from sgla.worker.memory import available_bytes, resident_bytes


class Place(Protocol):
    """``torch`` is where tensors are made; ``notes`` are for the start-up report."""

    shard: Shard
    device: Device
    torch: torch.device
    notes: list[str]

    def free(self) -> int:
        """Bytes that can still be had."""

    def usage(self) -> dict[str, int]:
        """What the rank takes now, by name, in bytes."""

    def begin_thread(self) -> None:
        """In a thread that computes, too."""

    def compiled(self, forward: Forward, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        """``forward`` as fast as it can be here, and a note on that for the start-up report."""


class Cpu:
    """Threads of this machine. ``threads``: how many this rank has."""

    def __init__(self, config: Config, rank: int, size: int, store: str) -> None:
        self.threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.local_ranks)
        torch.set_num_threads(1 if config.native_kernels else self.threads)
        self._group = ExitStack()
        timeout = config.dist_timeout or TIMEOUT
        shard = self._group.enter_context(join(rank, size, store, config.pp, timeout, config.cp))
        self.shard = replace(shard, whole_experts=config.ep > 1, placement=_placement(config))
        if config.dp_attention:
            lockstep = Lockstep(shard.rank, shard.size, shard.group, _traffic(config, shard))
            context = None if shard.context is None else shard.context.alone
            self.shard = Shard(pipe=shard.pipe, lockstep=lockstep, mlps=self.shard, context=context)
        self.device, self.torch, self.notes = Device("cpu", "cpu"), torch.device("cpu"), list[str]()

    def free(self) -> int:
        return available_bytes()

    def usage(self) -> dict[str, int]:
        return resident_bytes()

    def begin_thread(self) -> None: ...

    def compiled(self, forward: Forward, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        return compiled(forward, limits, self.threads, native)


def _placement(config: Config) -> Placement | None:
    """Of experts, some of which are on several ranks."""
    return Placement(config.ep, config.redundant_experts) if config.redundant_experts else None


def _traffic(config: Config, shard: Shard) -> Traffic | None:
    """Between the ranks that share experts out, if tokens are sent to those of theirs alone."""
    if config.moe_a2a_backend == "deepep":
        return DeepEP(shard.size, shard.group)
    return AllToAll(shard.rank, shard.size, shard.group) if config.sends_tokens else None


class NoPages:
    """For the attention over pages in models without any, whose attention is another op."""

    in_place = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("an encoder has no pages")


class Gpu:
    """The NVIDIA GPU ``index`` of this host, which has the rank's number among those of the host."""

    def __init__(self, config: Config, rank: int, size: int, store: str) -> None:
        from sgla.dist.gpus import join_gpus

        self.index = rank - ranks_of(config).start
        timeout, local = config.dist_timeout or TIMEOUT, ranks_of(config)
        shard, ranks = join_gpus(rank, size, store, config.pp, timeout, local=local, contexts=config.cp)
        self.shard = replace(shard, whole_experts=config.ep > 1, placement=_placement(config))
        if config.dp_attention:
            traffic = _traffic(config, shard)
            lockstep = PlannedLockstep(shard.rank, shard.size, shard.exchange, shard.group, traffic)
            context = None if shard.context is None else shard.context.alone
            self.shard = Shard(pipe=shard.pipe, lockstep=lockstep, mlps=self.shard, context=context)
        if config.sequence_parallel:
            rows = SharedRows(shard.rank, shard.size, shard.exchange, shard.group)
            self.shard = replace(self.shard, rows=rows)
        torch.set_num_threads(1)
        self.device, self.torch = describe(), torch.device("cuda")
        use(self.device)
        self.notes = [ranks] if ranks else []

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def usage(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info()
        return {"free": free, "total": total}

    def begin_thread(self) -> None:
        torch.cuda.set_device(self.index)

    def compiled(self, forward: Forward, limits: ProgramLimits, native: bool) -> tuple[Forward, str]:
        """Op by op, for models without pages."""
        from sgla.kernels.gpu import GpuOps

        lowered = GpuOps(NoPages())

        def run(batch: ForwardBatch) -> Tensor:
            with using(lowered):
                return forward(batch)

        return run, ""


def take_place(config: Config, rank: int, size: int, store: str) -> Place:
    """That of rank ``rank`` of ``size``, which meet through ``store``. Raises ConfigError."""
    place: Place = resolve_name(platform(config.device).place)(config, rank, size, store)
    return place


def drop_garbage() -> None:
    """Return to the system, or to the GPU, what a model had that nobody refers to any more."""
    gc.unfreeze()  # a model is older than the last freeze
    gc.collect()
    give_back()
    gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
