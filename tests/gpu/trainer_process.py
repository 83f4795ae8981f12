"""A trainer in a process of its own, for ``test_gpu_updates.py``: ``pickle OUT`` writes tensors of the GPU as
SGLang's clients do and waits for its end; ``nccl PORT`` broadcasts them from the second GPU."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sgla.loading.tensors import packed


def tensors_of(shapes: dict[str, list[int]]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(7)
    return {
        name: (
            torch.randn(shape, generator=random) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        )
        .bfloat16()
        .cuda()
        for name, shape in shapes.items()
    }


def main() -> None:
    kind, where, shapes = sys.argv[1], sys.argv[2], json.loads(sys.stdin.readline())
    if kind == "pickle":
        tensors = tensors_of(shapes)
        torch.cuda.synchronize()
        Path(where).write_bytes(packed(tensors.items()))
    else:
        torch.cuda.set_device(1)
        tensors, limit = tensors_of(shapes), timedelta(seconds=60)
        store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{where}", 0, 2, timeout=limit))
        group, _ = c10d._new_process_group_helper(
            2, 0, [], dist.Backend("nccl"), dist.PrefixStore("g", store), group_name="g", timeout=limit
        )
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        for tensor in tensors.values():
            dist.broadcast(tensor, 0, group)
        torch.cuda.synchronize()
    print("sent", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
