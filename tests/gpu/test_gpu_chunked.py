"""The fast kernels of ``--deterministic``: a token's results are the same bits whatever else there is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_prompt_attention import BF16, SLOT, expected, to_gpu

from sgla.attention.base import cut
from sgla.kernels.cuda import act_mul, batch_gemm, prompt_attention, prompt_gemm
from sgla.kernels.cuda.prompt_attention import KEYS, Chunks, Pages
from sgla.kernels.gpu import invariant

pytest.importorskip("triton")
ROWS = (0, 1), (7, 15), (3, 20), (0, 64), (9, 74), (100, 228), (0, 256), (50, 307), (1, 513), (700, 1500)


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1000, 3072), (6144, 4096), (1024, 2048), (24576, 512)])
def test_linear_is_invariant(n: int, k: int) -> None:
    x = torch.randn(2500, k, dtype=BF16, device="cuda")
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    bias = torch.randn(n, device="cuda")
    assert invariant.serves(x, w)

    def logits(x: torch.Tensor) -> torch.Tensor:
        return invariant.linear(x, w, None, torch.empty(len(x), n, dtype=torch.float32, device="cuda"))

    products = [partial(invariant.linear, weight=w, bias=b) for b in (None, bias)] + [logits]
    if n % 16 == 0:
        products += [partial(invariant.gated, weight=w, epilogue=kind) for kind in invariant.GATES.values()]
    for product in products:
        whole = product(x)
        for begin, end in ROWS:
            assert torch.equal(product(x[begin:end]), whole[begin:end]), (begin, end)
    for kind, epilogue in invariant.GATES.items() if n % 16 == 0 else ():
        apart = act_mul.act_mul(invariant.linear(x, w, None), kind)
        assert torch.equal(invariant.gated(x, w, epilogue), apart), kind
    wanted = x.double() @ w.double().t()
    assert relative(invariant.linear(x, w, bias), wanted + bias) < 5e-3
    assert relative(logits(x), wanted) < 1e-5
    gate, up = wanted.chunk(2, 1)
    if n % 16 == 0:
        assert relative(invariant.gated(x, w, batch_gemm.SILU), torch.nn.functional.silu(gate) * up) < 1e-2


@pytest.mark.parametrize("m", [5, 64, 200])
@pytest.mark.parametrize("gated", [False, True])
def test_every_cut_gives_the_same_bits(m: int, gated: bool) -> None:
    """Tiles of any size, stages of one or two panels, and the kernel of prompts."""
    n, k = 1536, 1024
    x = torch.randn(300, k, dtype=BF16, device="cuda")
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    epilogue = batch_gemm.SILU if gated else batch_gemm.STORE
    wanted = prompt_gemm.linear(x, w, epilogue=epilogue)[:m]
    sizes = [size for size in (32, 64, 128, 208) if size < 2 * m or size == 32]
    tiles = [(tile, size) for tile in invariant.TILES for size in sizes]
    cuts = [one for tile, size in tiles for one in invariant._cuts(tile, size, k, gated)]
    wrong = []
    for one in cuts:
        out = batch_gemm.linear(x[:m].contiguous(), w, one, epilogue=epilogue, rounded=gated)
        if not torch.equal(out, wanted):
            wrong.append((one, int((out != wanted).sum())))
    assert not wrong


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"), [(8, 4, 128), (2, 7, 128), (3, 3, 64), (2, 1, 128), (1, 16, 64)]
)
@pytest.mark.parametrize("blocks", [2, 8])
def test_attention_is_invariant(kv_heads: int, group: int, dim: int, blocks: int) -> None:
    """Every token of a history: in one prompt, in pieces, and as a decode row among others."""
    from sgla.kernels.triton import units

    torch.manual_seed(group)
    page, length = 16, 2600
    pages = -(-length // page)
    q = torch.randn(length, kv_heads * group * dim, device="cuda", dtype=BF16)
    k, v = (torch.full((pages + 1, kv_heads, page, dim), torch.nan, device="cuda", dtype=BF16) for _ in "kv")
    keys, values = (torch.randn(length, kv_heads, dim, device="cuda", dtype=BF16) for _ in "kv")
    table = torch.zeros(2, pages, dtype=torch.int32, device="cuda")
    table[SLOT] = torch.randperm(pages, device="cuda") + 1
    at = torch.arange(length, device="cuda")
    for pool, rows in ((k, keys), (v, values)):
        pool[table[SLOT, at // page].long(), :, at % page] = rows
    there = Pages(k.transpose(1, 2), v.transpose(1, 2), table)
    chunks = Chunks(blocks, torch.empty(prompt_attention.kept_by_blocks(dim), device="cuda"))
    tokens, scale = prompt_attention.tile_tokens(group), dim**-0.5

    def attend(q: torch.Tensor, starts: list[int], lens: list[int]) -> torch.Tensor:
        slots = np.full(len(starts), SLOT)
        tiles = to_gpu(cut(slots, np.array(starts), np.array(lens), 0, tokens))
        out = torch.full_like(q, torch.nan)
        prompt_attention.attend(q, there, None, tiles, scale, out, chunks=chunks)
        return out

    whole = attend(q, [0], [length])
    wanted = expected(q.view(length, -1, dim), keys, values, 0).flatten(1)
    torch.testing.assert_close(whole.float(), wanted, atol=6e-3, rtol=2e-2)
    for piece in (1, 63, 511, 512, 1700, 2599):
        pieces = torch.cat([q[piece:], q[:piece]])
        got = attend(pieces, [piece, 0], [length - piece, piece])
        assert torch.equal(torch.cat([got[-piece:], got[:-piece]]), whole), piece

    most = -(-length // (blocks * KEYS))
    room, sums = units.room(80, most), prompt_attention.sums_of(80, most, kv_heads * group, dim)
    kept = torch.full((sums,), torch.nan, device="cuda")
    for count in (1, 3, 80):
        chosen = torch.randperm(length, device="cuda")[:count]
        lens = (chosen + 1).int()
        lens[count // 2 + 1 :: 7] = 0  # rows that are not there
        slots = torch.full((count,), SLOT, dtype=torch.int32, device="cuda")
        made = units.units_of(slots, lens, blocks, room)
        got = torch.full((count, q.shape[1]), torch.nan, device="cuda", dtype=BF16)
        prompt_attention.attend_one(q[chosen], there, made, count, scale, got, kept)
        live = lens > 0
        assert torch.equal(got[live], whole[chosen[live]]), count
        assert torch.isnan(got[~live].float()).all()


def test_decode_rows_are_chosen() -> None:
    from sgla import attention

    shape: Any = attention.AttentionShape(
        32, 8, 128, 16, BF16, frozenset({0}), 0.0, 64, deterministic=True, context_len=4097
    )
    backend, _ = attention.choose_backend("auto", [shape])
    assert backend.decode.name == backend.extend.name == "chunked"
    assert backend.prompts is not None
