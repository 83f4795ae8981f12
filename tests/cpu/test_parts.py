"""Units of a server with other ranks, put together: what comes out is what this server's ranks have."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny import LLAMA

from sgla.dist import Shard
from sgla.messages import CacheGroup
from sgla.model.read import read_decoder
from sgla.model.spec import ModelSpec
from sgla.model.state import kv_groups, own_heads, state_of
from sgla.peers import PeerRefused
from sgla.worker.kv import Arena, Zeros, allocate_kv, memory_of, paged, untouched
from sgla.worker.parts import Fit, Part, parts_of_units
from sgla.worker.peering import fitting

PAGE = 4


def as_on_gpus(pages: int, page_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    arena = Arena(1 << 10, 1, lambda size, kind: torch.empty(*size, dtype=kind))
    return arena.zeros(pages, page_size, shape, dtype)


class Rank:
    """A page on one rank, whose values say of which layer, head, token and dim they are."""

    def __init__(self, spec: ModelSpec, rank: int, size: int, dtype: str, zeros: Zeros) -> None:
        heads = spec.attention[0].kv_heads
        state = state_of(spec, size, rank)
        kv = allocate_kv(state, kv_groups(state, 64, dtype), [1], PAGE, dtype, zeros)
        for i, layer in enumerate(paged(kv)):
            own = list(own_heads(heads, rank, size))
            for j, x in enumerate(layer.tensors):
                count = x[0].numel() // len(own)
                told = torch.arange(heads * 16).view(1, heads, 16)[:, own, :count] + 7 * i + 3 * j
                x.copy_((told if x.dim() == 3 else told.unflatten(2, (PAGE, -1)).transpose(1, 2)) % 113)
        self.parts = parts_of_units(kv, spec, 1)
        [tensors] = memory_of(kv, 1)
        self.unit = b"".join(tensor[0].numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("zeros", [untouched, as_on_gpus])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_units_of_other_ranks_are_those_of_these(dtype: str, zeros: Zeros) -> None:
    for heads in (1, 2, 3, 4):
        spec = read_decoder(LLAMA | {"num_attention_heads": 12, "num_key_value_heads": heads, "head_dim": 2})
        sizes = [size for size in (1, 2, 3, 4) if heads >= size or size % heads == 0]
        ranks = {size: [Rank(spec, rank, size, dtype, zeros) for rank in range(size)] for size in sizes}
        for size, others in product(sizes, sizes):
            for rank, own in enumerate(ranks[size]):
                assert own.parts == ranks[others][0].parts
                fit = Fit(own.parts, [len(own.unit)], rank, size, others)
                read = [ranks[others][source].unit for source in fit.sources]
                assert [[len(unit)] for unit in read] == fit.nbytes
                assert bytes(fit.join(0, read)) == own.unit
                assert fit.whole is (size == others)


def test_no_more_ranks_are_read_than_have_something() -> None:
    part = [[Part(8, 1, 4)]]
    assert [Fit(part, [0], rank, 4, 2).sources for rank in range(4)] == [[0], [0], [1], [1]]
    assert [Fit(part, [0], rank, 2, 4).sources for rank in range(2)] == [[0, 1], [2, 3]]
    latent = [[Part(1, 1, 4)]]
    assert [Fit(latent, [0], rank, 2, 4).sources for rank in range(2)] == [[0], [2]]


@pytest.mark.parametrize(
    ("groups", "others"), [([CacheGroup(9), CacheGroup(9, every=64)], 2), ([CacheGroup(9)], 0)]
)
def test_what_cannot_be_read_is_refused(groups: list[CacheGroup], others: int) -> None:
    parts = [[Part(2, 1, 4)], []][: len(groups)]
    with pytest.raises(PeerRefused, match=f"ranks: 1 here, {others} there"):
        fitting(parts, groups, [8, 8], Shard(), others)
    assert fitting(parts, groups, [8, 8], Shard(), 1).whole
