"""A group of a trainer, which has rank 0 and sends weights, and of those who take them: made as SGLang, vLLM
and OpenRLHF make it, beside the group of this server's own ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sgla import clock

PATIENCE = 60.0  # seconds for the others to join, and for what a trainer has announced
GRACE = 5.0  # and for a library to find out by itself
LOOK = 0.0005  # seconds between looks


class Rendezvous(NamedTuple):
    """Where a group meets, and this process in it. ``backend``: gloo or nccl."""

    address: str
    port: int
    rank: int
    size: int
    name: str
    backend: str


class TrainerGroup:
    def __init__(self, meeting: Rendezvous) -> None:
        """Waits for all. Raises what torch does: RuntimeError and its kin, ValueError."""
        limit = timedelta(seconds=PATIENCE)
        where = f"tcp://{meeting.address}:{meeting.port}"
        store, rank, size = next(rendezvous(where, meeting.rank, meeting.size, timeout=limit))
        store.set_timeout(limit)
        kind = dist.Backend(meeting.backend)
        self.device = "cuda" if meeting.backend == "nccl" else "cpu"
        # NCCL's own watch ends the process: it comes long after ours.
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            kind,
            dist.PrefixStore(meeting.name, store),
            group_name=meeting.name,
            timeout=30 * limit if self.device == "cuda" else limit,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._group = group

    def receive(self, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Tensor]:
        """What the trainer broadcasts, in this order. Raises RuntimeError if it does not come; the group is of
        no use then."""
        made = {
            name: torch.empty(*shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in wanted.items()
        }
        works = [dist.broadcast(_sent(tensor), 0, self._group, async_op=True) for tensor in made.values()]
        due = clock.now() + PATIENCE + GRACE
        while not all(work.is_completed() for work in works):
            if clock.now() > due:
                raise RuntimeError(f"the trainer has sent nothing for {PATIENCE:.0f} s")
            sleep(LOOK)
        for work in works:
            work.wait()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return made

    def close(self) -> None:
        """Leave the group, whatever its state is."""
        end = c10d._abort_process_group if self.device == "cuda" else dist.destroy_process_group
        with suppress(RuntimeError, ValueError):
            end(self._group)


def _sent(tensor: Tensor) -> Tensor:
    """As libraries know it, which know no floats of 8 bits: what crosses are bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
