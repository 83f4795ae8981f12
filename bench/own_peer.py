"""One GPU in the place of two: what it sends comes back to itself, as if from a peer, at once.

So the kernels of a rank, and what they wait for in each other, can be timed where there is no second GPU; the
link is missing, 1 to 2 us a sum of few rows. Logits are of no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.dist.gpus import MESSAGE, Joined
from sgla.dist.shard import Shard
from sgla.kernels.cuda.all_reduce import AllReduce, P, inbox_bytes
from sgla.kernels.cuda.decode_step import MAX_RANKS


class OwnPeer(AllReduce):
    """Of two ranks the first. The second one's inbox begins so far behind its own that what it sends there is
    where the other's part is looked for."""

    def __init__(self, message: int) -> None:
        self._memory = torch.empty(inbox_bytes(2, message), dtype=torch.uint8, device="cuda")
        self.clear(self._memory)
        super().__init__([self._memory.data_ptr()] * 2, 0, message)

    def _both(self, part: int) -> Any:
        """Inboxes where a part has so many bytes."""
        own = self._inboxes[0] or 0
        return (P * MAX_RANKS)(own, own + part)

    def sending(self, rows: int, d: int) -> Any:
        found = super().sending(rows, d)
        return found and found._replace(inboxes=self._both(2 * rows * d))

    def _params(self, x: Tensor, *more: Any) -> Any:
        params = super()._params(x, *more)
        params.inbox = self._both(x.nbytes)
        return params

    def max(self, keys: Tensor) -> None:
        pass

    def for_steps(self, shape: Any) -> Any:
        return None


@dataclass(frozen=True)
class Alone(Shard):
    def all_reduce(self, x: Tensor) -> None:
        assert self.exchange is not None
        if self.exchange.takes(x):
            self.exchange.sum(x)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        for peer in self.peers():
            columns = peer.range(out.shape[1])
            out[:, columns.start : columns.stop] = x[:, : len(columns)]

    def agree(self, *values: Any) -> None:
        pass

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        pass


def join_alone(*ranks: Any, message: int = MESSAGE, **more: Any) -> Joined:
    """In the place of ``join_gpus``."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return Joined(Alone(0, 2, OwnPeer(message)), "one GPU is its own peer")
