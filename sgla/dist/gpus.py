"""Ranks on the GPUs of one host: NCCL for large messages, stores into each other's memory for small ones."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from sgla.dist.meeting import TIMEOUT, is_far, open_store
from sgla.dist.shard import Shard, shard_of
from sgla.errors import ConfigError
from sgla.kernels.device import describe
from sgla.kernels.cuda.all_reduce import AllReduce, inbox_bytes
from sgla.kernels.cuda.decode_step import MAX_RANKS

MESSAGE = 132 << 20  # bytes, of 8,448 tokens (a step) 8,192 wide; larger sums are NCCL's

# Multicast gains nothing here,
# and a process that dies while it uses it can leave the switch between the GPUs in disorder.
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class Joined(NamedTuple):
    shard: Shard
    note: str  # how the ranks exchange data


def join_gpus(
    rank: int,
    size: int,
    store: str,
    stages: int = 1,
    timeout: float = TIMEOUT,
    message: int = MESSAGE,
    local: range | None = None,
    contexts: int = 1,
) -> Joined:
    """Take the GPU that has the rank's number on this host, whose ranks are ``local`` (None: all), meet the
    others through ``store`` (``open_store``), and stay until the process ends. The ranks of a stage, or of
    one of the ``contexts``, exchange sums by themselves.

    ``timeout`` in seconds holds for the collectives of NCCL, which then end the process. ``message``: bytes
    up to which sums go through the peers' memory. Raises ConfigError if there are too few GPUs.
    """
    local = range(size) if local is None else local
    count = torch.cuda.device_count()
    if not count:
        why = "the driver shows none" if torch.version.cuda else f"{torch.__version__} is a CPU build"
        raise ConfigError(f"--device cuda: torch sees no GPU, {why}", param="device")
    if len(local) > count:
        raise ConfigError(
            f"--tp x --pp x --cp: {len(local)} ranks need {len(local)} GPUs; torch sees {count}", param="tp"
        )
    gpu = rank - local.start
    torch.cuda.set_device(gpu)
    if size == 1:
        return Joined(Shard(), "")
    for name, value in _NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    if not is_far(store):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl",
        store=open_store(store, size, timeout),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", gpu),  # connects now, while the store exists
    )
    dist.barrier()
    shard = shard_of(rank, size, stages, contexts, timeout)
    if shard.size == 1:
        return Joined(shard, "")
    first = shard.number - shard.rank - local.start
    refused = _refuses(range(first, first + shard.size), len(local))
    if refused:
        return Joined(shard, f"ranks: NCCL alone, because {refused}")
    return Joined(
        replace(shard, exchange=PeerMemory(shard, message, gpu)),
        f"ranks: sums up to {message >> 20} MiB through the peers' memory, larger ones through NCCL",
    )


def _refuses(gpus: range, count: int) -> str | None:
    """Why the ranks on these, of the ``count`` that ranks of this host have, cannot store into each other's
    memory, or None; the same on every rank."""
    if gpus.start < 0 or gpus.stop > count:
        return "they are on several hosts"
    if len(gpus) > MAX_RANKS:
        return f"there are more than {MAX_RANKS} ranks"
    if not all(describe(index).tma for index in gpus):
        return "the GPUs are older than compute capability 9.0"
    pairs = ((a, b) for a in gpus for b in gpus if a != b)
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        return "the GPUs cannot access each other's memory"
    return None


class PeerMemory(AllReduce):
    """``AllReduce`` over memory that torch lets the ranks share."""

    def __init__(self, shard: Shard, message: int, gpu: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = shard.group or dist.group.WORLD
        assert group is not None
        device = torch.device("cuda", gpu)
        self._memory = symmetric.empty(inbox_bytes(shard.size, message), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self._memory, group)
        self.clear(self._memory)
        torch.cuda.synchronize()
        dist.barrier(group)  # nobody sends before all have cleared
        torch.cuda.synchronize()
        super().__init__(list(handle.buffer_ptrs), shard.rank, message)
