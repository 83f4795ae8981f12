"""Kernels that draw tokens, against torch, at the vocabularies of real models."""

from __future__ import annotations

import pytest
import torch
from draws import DISTRIBUTIONS, possible
from test_gpu_kernels import BF16, relative
from token_tables import in_rows

from sgla.quant.weight import pack
from sgla.sampling.draw import Distribution, draw

pytest.importorskip("triton")


@pytest.mark.parametrize("spread", [0.2, 3.0, 12.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(50, 0.9, 0.0), (0, 0.95, 0.0), (20, 1.0, 0.0), (0, 1.0, 0.1), (1, 0.5, 0.0)],
)
@pytest.mark.parametrize("vocab", [151936, 5001])
def test_thresholds(vocab: int, top_k: int, top_p: float, min_p: float, spread: float) -> None:
    from sgla.kernels.cuda import thresholds

    rows, temperature = 40, 0.8
    logits = torch.randn(rows, vocab, device="cuda") * spread
    slots = torch.arange(rows, device="cuda").int().flip(0)
    full = lambda value: torch.full((rows,), value, device="cuda")  # noqa: E731
    found = thresholds.find_thresholds(
        logits, slots, full(temperature), full(top_k).int(), full(top_p), full(min_p)
    )
    kept = (logits >= found[:, None]).sum(-1)
    order = logits.sort(-1, descending=True).values.double()
    if top_k:
        order = order[:, :top_k]
    p = (order / temperature).softmax(-1)
    expected = (p.cumsum(-1) - p < top_p).sum(-1) if top_p < 1 else torch.full_like(kept, order.shape[1])
    if min_p:
        expected = torch.minimum(expected, (p >= min_p * p[:, :1]).sum(-1))
    # Equal up to the token at the threshold, and to the tokens that the kernel takes for equal to it or finds
    # too light to draw.
    full_p = (logits.double() / temperature).softmax(-1).sort(-1, descending=True).values
    below = torch.cat([torch.zeros(rows, 1, device="cuda"), full_p.cumsum(-1)], 1)
    few, many = torch.minimum(kept, expected)[:, None], torch.maximum(kept, expected)[:, None]
    apart = (below.gather(1, many) - below.gather(1, few))[:, 0]
    assert (kept >= 1).all()
    assert (apart <= full_p.gather(1, few.clamp(max=vocab - 1))[:, 0] + 2e-5).all(), (kept, expected, apart)


@pytest.mark.parametrize("m", [9, 33, 64, 90, 100, 137, 192])
@pytest.mark.parametrize(("n", "first"), [(151936, 0), (10008, 4000)])
def test_the_output_layer_draws_what_is_drawn_from_its_logits(m: int, n: int, first: int) -> None:
    from sgla.kernels.cuda import batch_gemm
    from sgla.kernels.triton import sampling

    config = batch_gemm.draw_config(m)
    assert config is not None
    weight = torch.randn(n, 1024, dtype=BF16, device="cuda") * 0.05
    x = torch.randn(m, 1024, dtype=BF16, device="cuda")
    slots, positions = torch.randperm(m, device="cuda").int(), torch.arange(1, m + 1, device="cuda").int()
    seeds = torch.randint(0, 1 << 62, (m,), device="cuda")
    temperatures = torch.rand(m, device="cuda") * 2
    temperatures[::5] = 0
    weight[n // 2] = weight[17]  # greedy rows take the first of equal ones
    keys = torch.full((m,), sampling.WORST, dtype=torch.int64, device="cuda")
    plain = torch.zeros(1, dtype=torch.int32, device="cuda")
    fused = batch_gemm.DrawInputs(slots, positions, seeds, temperatures, keys, plain, first)
    logits = batch_gemm.linear(x, weight, config, epilogue=batch_gemm.DRAW, draw=fused)
    assert relative(logits, x.double() @ weight.double().t()) < 1e-5
    assert (keys == sampling.WORST).all()
    tables, outs = torch.zeros(2, m, m + 2, device="cuda").int(), torch.zeros(2, m, device="cuda").int()
    sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(tables[0]), outs[0], first=first)
    plain += 1
    for _ in range(3):
        untouched = batch_gemm.linear(x, weight, config, epilogue=batch_gemm.DRAW, draw=fused, out=logits * 0)
        sampling.follow(keys, slots, positions, in_rows(tables[1]), outs[1])
        assert not untouched.any()
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(tables[0], tables[1])


@pytest.mark.parametrize("m", [9, 64, 137, 192])
@pytest.mark.parametrize("n", [151936, 10008])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_output_layer_knows_logits_that_give_no_token(m: int, n: int, greedy: bool) -> None:
    """The same rows as the draw from logits, and the other rows as they were."""
    from sgla.kernels.cuda import batch_gemm
    from sgla.kernels.triton import sampling

    config = batch_gemm.draw_config(m)
    assert config is not None
    weight = torch.randn(n, 1024, dtype=BF16, device="cuda") * 0.05
    x = torch.randn(m, 1024, dtype=BF16, device="cuda")
    slots, positions = torch.arange(m, device="cuda").int(), torch.arange(1, m + 1, device="cuda").int()
    seeds = torch.randint(0, 1 << 62, (m,), device="cuda")
    temperatures = torch.full((m,), 0.0 if greedy else 0.9, device="cuda")
    keys = torch.full((m,), sampling.WORST, dtype=torch.int64, device="cuda")
    fused = batch_gemm.DrawInputs(slots, positions, seeds, temperatures, keys, torch.ones_like(slots[:1]), 0)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        table, out = torch.zeros(m, m + 2, device="cuda").int(), torch.zeros(m, device="cuda").int()
        batch_gemm.linear(x, weight, config, epilogue=batch_gemm.DRAW, draw=fused)
        sampling.follow(keys, slots, positions, in_rows(table), out)
        return table, out

    good = draw()[1]
    x[3], x[m - 1] = float("nan"), float("inf")  # all logits are NaN, or infinite and NaN
    table, out = draw()
    rows = torch.arange(m, device="cuda")
    broken = (rows == 3) | (rows == m - 1)
    assert torch.equal(out, torch.where(broken, -1, good))
    assert torch.equal(table[rows, positions.long()], out.clamp(min=0))
    x[3], x[m - 1] = 0.5, 0.25
    weight[n - 1] = float("nan")  # one logit of every row
    assert (draw()[1] == -1).all()
    logits = (x.float() @ weight.float().t()).contiguous()
    other = torch.zeros(m, device="cuda").int()
    sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(table), other)
    assert (other == -1).all()


@pytest.mark.parametrize("limited", [False, True])
def test_draws_from_logits_that_give_no_token(limited: bool) -> None:
    from sgla.kernels.cuda.thresholds import find_thresholds
    from sgla.kernels.triton import sampling

    rows, vocab = 6, 151936
    logits = torch.randn(rows, vocab, device="cuda")
    logits[0, 777], logits[1, vocab - 1], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3], logits[4, 1:] = float("nan"), float("-inf")
    slots, positions = (torch.arange(i, rows + i, device="cuda").int() for i in range(2))
    temperatures = torch.tensor([0.0, 0.8] * 3, device="cuda")
    for _ in range(2):
        full = lambda value: torch.full((rows,), value, device="cuda")  # noqa: E731
        thresholds = None
        if limited:
            thresholds = find_thresholds(logits, slots, temperatures, full(40).int(), full(0.9), full(0.05))
        table, out = torch.zeros(rows, rows + 1, device="cuda").int(), torch.zeros(rows, device="cuda").int()
        sampling.sample(
            logits,
            slots,
            positions,
            torch.arange(rows, device="cuda"),
            temperatures,
            in_rows(table),
            out,
            thresholds,
        )
        assert out[:5].tolist() == [-1, -1, -2, -1, 0]
        assert 0 <= int(out[5]) < vocab
        assert torch.equal(table[slots.long(), positions.long()], out.clamp(min=0))
        temperatures = temperatures.flip(0)


def test_sampling_at_full_vocabulary() -> None:
    from sgla.kernels.cuda.thresholds import find_thresholds
    from sgla.kernels.triton import sampling

    rows, vocab = 64, 151936
    logits = torch.randn(rows, vocab, device="cuda") * 3
    slots = torch.arange(rows, device="cuda").int().flip(0)
    temperatures = torch.full((rows,), 0.8, device="cuda")
    temperatures[:8] = 0
    table, out = torch.zeros(rows, 32, device="cuda").int(), torch.zeros(rows, device="cuda").int()
    seeds, positions = torch.arange(rows, device="cuda"), torch.full((rows,), 9, device="cuda").int()
    top_ks = torch.full((rows,), 50, device="cuda").int()
    top_ps, min_ps = torch.full((rows,), 0.9, device="cuda"), torch.zeros(rows, device="cuda")
    thresholds = find_thresholds(logits, slots, temperatures, top_ks, top_ps, min_ps)
    sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(table), out, thresholds)
    top = logits.topk(50)
    p = (top.values.double() / 0.8).softmax(-1)
    kept = (p.cumsum(-1) - p < 0.9).sum(-1)
    for r in range(rows):
        slot = int(slots[r])
        assert table[slot, 9] == out[r]
        if slot < 8:
            assert out[r] == top.indices[r, 0]
        else:
            assert (
                abs(int((logits[r] >= thresholds[r]).sum()) - int(kept[r])) <= 1
            )  # rounding of the cumulative sum
            assert logits[r, out[r].long()] >= thresholds[r]


@pytest.mark.parametrize("each", DISTRIBUTIONS)
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_draws_are_those_of_the_cpu(vocab: int, each: Distribution) -> None:
    from sgla.kernels.cuda.thresholds import find_thresholds
    from sgla.kernels.triton import sampling

    rows, position = 24, 9
    logits = torch.randn(rows, vocab, device="cuda") * torch.rand(rows, 1, device="cuda") * 6
    logits[:, :5000:7] = float("-inf")
    slots, positions = (
        torch.arange(rows, device="cuda").int(),
        torch.full((rows,), position, device="cuda").int(),
    )
    seeds = torch.randint(0, 1 << 62, (rows,), device="cuda")
    full = lambda value: torch.full((rows,), value, device="cuda")  # noqa: E731
    temperatures, thresholds = full(each.temperature), None
    if each != Distribution(each.temperature):
        thresholds = find_thresholds(
            logits, slots, temperatures, full(each.top_k).int(), full(each.top_p), full(each.min_p)
        )
    table, out = torch.zeros(rows, position + 1, device="cuda").int(), torch.zeros(rows, device="cuda").int()
    sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(table), out, thresholds)
    asked = list(zip(logits.cpu().numpy(), seeds.tolist(), out.tolist(), strict=True))
    assert all(token in possible(row, each, seed, position) for row, seed, token in asked)
    assert sum(token == draw(row, each, seed, position) for row, seed, token in asked) >= rows - 2


@pytest.mark.parametrize("kind", ["int4g64", "int8g128"])
def test_the_best_of_rounded_logits_are_compared_by_exact_ones(kind: str) -> None:
    """Of a wide vocabulary, greedy and drawn."""
    from sgla.kernels.triton import sampling

    torch.manual_seed(2)
    rows, vocab, k = 32, 150_000, 2048
    hidden = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, k, device="cuda", dtype=torch.bfloat16) * (4 / k**0.5)
    exact = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    rounded = torch.mm(hidden, pack(weight, kind).dequant(torch.bfloat16).t(), out_dtype=torch.float32)
    slots, positions = torch.arange(rows, device="cuda").int(), torch.arange(1, rows + 1, device="cuda").int()
    seeds, temperatures = torch.arange(rows, device="cuda"), torch.full((rows,), 0.8, device="cuda")
    temperatures[::2] = 0

    def drawn(logits: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(rows, rows + 1, dtype=torch.int32, device="cuda")
        out = torch.zeros(rows, dtype=torch.int32, device="cuda")
        sampling.sample(logits, slots, positions, seeds, temperatures, in_rows(table), out)
        return out

    wanted, coarse, given = drawn(exact), drawn(rounded), (slots, positions, seeds, temperatures)
    sampling.sharpen(rounded, *given, sampling.Exact(hidden, weight))
    torch.cuda.synchronize()
    kept = rounded > -torch.inf
    assert set(kept.sum(1).tolist()) == {-(-vocab // sampling.PIECE)}
    torch.testing.assert_close(rounded[kept], exact[kept], rtol=1e-3, atol=1e-2)
    assert (drawn(rounded) == wanted).sum() >= rows - 2
    assert kind != "int4g64" or (coarse == wanted).sum() < rows - 2
