"""Units cross between a GPU and the host's memory and are what they were, however they lie."""

from __future__ import annotations

import time

import pytest
import torch

from sgla.messages import Copy, int32
from sgla.worker.crossing import Toll
from sgla.worker.gpu_tiers import GpuMemory, HostTier, staging
from sgla.worker.pinned import Pinned

UNITS, LAYERS, WIDTHS = 300, 6, (16384, 4096, 24)


@pytest.mark.parametrize("run", [16, 1], ids=["side by side", "apart"])
@pytest.mark.parametrize(("bands", "split"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("decodes", [False, True])
@torch.inference_mode()
def test_units_are_what_they_were(
    run: int, bands: int, split: bool, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside decode steps, too."""
    monkeypatch.setattr(Toll, "runs", decodes)
    draw = torch.Generator().manual_seed(run)
    memory = [
        [torch.randint(256, (UNITS, width), dtype=torch.uint8, generator=draw).cuda() for _ in range(LAYERS)]
        for width in WIDTHS
    ]
    rooms = [Pinned((UNITS + 1) * width * LAYERS) for width in WIDTHS]
    tier = HostTier(memory, rooms, staging(), bands, split)

    def scattered(count: int) -> list[int]:
        """Runs in any order."""
        firsts = torch.randperm(UNITS // run, generator=draw)[: count // run].tolist()
        return [first * run + i for first in firsts for i in range(run)]

    for number in range(4):
        units, places = scattered(128), [1 + place for place in scattered(128)]
        before = [[tensor[units].clone() for tensor in tensors] for tensors in memory]
        ends = [int32(units)] * len(WIDTHS), [int32(places)] * len(WIDTHS)
        for transfer, copy in enumerate(
            (Copy(2 * number, "device", "host", *ends), Copy(2 * number + 1, "host", "device", *ends[::-1]))
        ):
            tier.begin(copy)
            while tier.under_way:
                tier.ended()
                time.sleep(1e-4)
            if not transfer:
                for tensor in (tensor for tensors in memory for tensor in tensors):
                    tensor[units] = 0
                torch.cuda.synchronize()
        for tensors, kept in zip(memory, before):
            assert all(torch.equal(tensor[units], was) for tensor, was in zip(tensors, kept))


@torch.inference_mode()
def test_threads_read_and_write_what_units_hold() -> None:
    """As many at a time as they take."""
    draw = torch.Generator().manual_seed(3)
    tensors = [
        torch.randint(256, (UNITS, width), dtype=torch.uint8, generator=draw).cuda()
        for width in WIDTHS
        for _ in range(LAYERS)
    ]
    memory = GpuMemory(tensors, lambda: None)
    for count in (1, 7, min(UNITS, memory.batch)):
        units = torch.randperm(UNITS, generator=draw)[:count].tolist()
        held = torch.cat([tensor[units] for tensor in tensors], 1).cpu().numpy()
        assert (memory.read(units) == held).all()
        others = torch.randperm(UNITS, generator=draw)[:count].tolist()
        rows = memory.room(count)
        rows[:] = held[::-1]
        memory.write(others, rows)
        assert (memory.read(others) == held[::-1]).all()
