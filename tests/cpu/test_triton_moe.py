"""The kernels of the mixture of experts against the torch oracle. They run in Triton's interpreter,
where there is no GPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sgla.device import nvidia
from sgla.kernels import device, ops
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.gpu import mixture
from sgla.kernels.ops import Biases
from sgla.kernels.placement import Part, Placement
from sgla.kernels.routing import Clamped, Routing
from sgla.kernels.triton import e2m1, moe, moe_tiles
from sgla.kernels.triton.moe import Tile, Tiles
from sgla.model.read import read_decoder
from sgla.quant.weight import pack

MODELS = Path(__file__).parents[2] / "bench/models"


def test_routes_as_the_oracle_and_breaks_ties_by_number() -> None:
    logits = torch.randn(7, 12)
    logits[3, ::2], logits[3, 1::2] = -0.0, 0.0
    for normalize in (True, False):
        routing = Routing(3, normalize=normalize)
        p, ids = moe.route(logits, routing)
        expected, best = ops.route(logits, routing)
        torch.testing.assert_close(p, expected)
        assert ids[3].tolist() == [0, 1, 2]
        others = [0, 1, 2, 4, 5, 6]
        assert torch.equal(ids[others].long(), best[others])


ROUTINGS = {  # and experts, bias of the logits, bias of the choice
    "gpt-oss": (Routing(4, normalize=True), 32, True, False),
    "DeepSeek-V2": (Routing(3, groups=4, kept=2, scale=16.0), 20, False, False),
    "DeepSeek-V3": (Routing(4, "sigmoid", True, 8, 4, True, 1e-20, 2.5), 32, False, True),
    "GLM-4.7": (Routing(4, "sigmoid", True, least=1e-20, scale=1.8), 24, False, True),
    "GLM-4.5 in one group of two": (Routing(3, "sigmoid", groups=2, kept=1, two=True), 12, False, True),
    "ERNIE": (Routing(6, normalize=True, least=0.9), 24, False, True),
    "shares of all, with a least sum": (Routing(3, normalize=True, least=0.9), 24, False, False),
    "GLM-4.7 with its shared expert": (Routing(4, "sigmoid", True, shared="always"), 24, False, True),
    "Qwen3.6 with its shared expert": (
        Routing(3, normalize=True, scale=2.0, shared="gated"),
        16,
        False,
        False,
    ),
    "DeepSeek-V2-Lite with its shared expert": (Routing(6, shared="always", parts=2), 24, False, False),
    "one with a gate, five times as wide": (Routing(4, shared="gated", parts=5), 16, False, False),
    "Llama 4": (Routing(1, "sigmoid"), 16, False, False),
    "Phi-3.5": (Routing(2, "sparsemixer", jitter=0.3), 12, False, False),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_by_every_rule_as_the_oracle(name: str) -> None:
    routing, experts, biased, chosen = ROUTINGS[name]
    logits = torch.randn(9, experts + (routing.shared == "gated"))
    bias, choice, factor = (torch.randn(experts) if there else None for there in (biased, chosen, biased))
    biases = Biases(bias, choice, factor=factor)
    done = torch.ones(5, dtype=torch.int32)
    p, ids = moe.route(logits, routing, biases, done)
    expected, best = ops.route(logits, routing, biases)
    assert torch.equal(ids.long(), best)
    torch.testing.assert_close(p, expected)
    assert not done.any()
    live = torch.tensor([5, 0, 1] * 3, dtype=torch.int32)
    chosen, found = moe.route(logits, routing, biases, live=live)
    assert torch.equal(found, ids.masked_fill(live[:, None] == 0, -1))
    assert torch.equal(chosen, p.masked_fill(live[:, None] == 0, 0))


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"), [(1, 5, 16), (9, 5, 4), (60, 40, 16), (700, 8, 64), (2100, 8, 64)]
)
def test_groups_hold_every_pair_once_under_its_expert(tokens: int, experts: int, rows: int) -> None:
    ids = torch.randint(0, experts, (tokens, 2), dtype=torch.int32)
    order, blocks, *_ = moe.group(ids, experts, rows)
    assert torch.equal(order.long(), ids.view(-1).argsort(stable=True))
    seen = []
    for expert, first, last in blocks.tolist():
        if expert >= 0:
            assert 0 < last - first <= rows
            assert (ids.view(-1)[order[first:last].long()] == expert).all()
            seen += range(first, last)
    assert seen == list(range(2 * tokens))


def weights(experts: int, f: int, d: int):
    return (
        torch.randn(experts, d),
        torch.randn(experts * 2 * f, d) * d**-0.5,
        torch.randn(experts * d, f) * f**-0.5,
    )


def oracle(x, router, gate_up, down, top_k: int, normalize: bool, activation="silu") -> torch.Tensor:
    packed = (pack(w, "f32") for w in (router, gate_up, down))
    return ops.moe(x, *packed, Routing(top_k, normalize=normalize), activation)


@pytest.mark.parametrize(
    ("d", "f", "rows", "tile", "activation"),
    [
        (64, 32, 16, Tile(16, 32, 4, 2, False, False), "silu"),
        (64, 48, 16, Tile(32, 16, 4, 2, True, False), "silu"),
        (40, 24, 4, Tile(16, 16, 4, 2, True, True), "silu"),
        (40, 24, 4, Tile(16, 16, 4, 2, True, True), "gelu_tanh"),
    ],
)
def test_grouped_equals_the_oracle(d: int, f: int, rows: int, tile: Tile, activation) -> None:
    experts, top_k, tokens = 6, 2, 19
    x = torch.randn(tokens, d)
    router, gate_up, down = weights(experts, f, d)
    expected = oracle(x, router, gate_up, down, top_k, True, activation)
    p, ids = moe.route(x @ router.T, Routing(top_k, normalize=True))
    groups = moe.group(ids, experts, rows)
    inner = moe.experts(x, None, gate_up, None, f, groups, tile, activation)
    y = moe.experts(inner, None, down, None, d, groups, tile)
    torch.testing.assert_close(moe.combine(y, p), expected, rtol=1e-4, atol=1e-5)
    residual, norm = torch.randn(tokens, d), torch.rand(d)
    total = residual.clone()
    normed = moe.combine_norm(y, p, total, norm, 1e-6)
    torch.testing.assert_close(total, residual + expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(normed, ops.rms_norm(total, norm, 1e-6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("d", "f", "experts", "normalize"), [(64, 32, 8, True), (40, 24, 5, False)])
def test_few_tokens_equal_the_oracle(d: int, f: int, experts: int, normalize: bool) -> None:
    tokens, top_k = 3, 2
    h, norm = torch.randn(tokens, d), torch.rand(d)
    router, gate_up, down = weights(experts, f, d)
    x, logits = moe.norm_router(h, norm, 1e-6, router)
    torch.testing.assert_close(x, ops.rms_norm(h, norm, 1e-6), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, x @ router.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moe.norm_router(x, None, 0.0, router)[1], logits)
    expected = oracle(x, router, gate_up, down, top_k, normalize)
    p, ids = moe.route(logits, Routing(top_k, normalize=normalize))
    inner = moe.few_gate_up(x, p, ids, gate_up, None, f, "silu")
    y = moe.few_down(inner, down, None, ids, d)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    total = h.clone()
    assert moe.few_down(inner, down, None, ids, d, out=total) is total
    torch.testing.assert_close(total, h + expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [2, 3, 5, 9])
def test_few_tokens_of_shared_experts_in_two_tiles(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    """As in one tile, with weights of shared experts loaded first; pairs of other ranks are left out."""
    d, f, experts, tokens = 24, 20, 12, 2
    x, p = torch.randn(tokens, d), torch.rand(tokens, top_k)
    _, gate_up, down = weights(experts, f, d)
    ids = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)]).int()
    ids[:, -1] = experts - 1
    ids[1, 0] = -1
    p[1, 0] = 0

    def computed() -> torch.Tensor:
        inner = moe.few_gate_up(x, p, ids, gate_up, None, f, "silu", shared=1)
        return moe.few_down(inner, down, None, ids, d)

    cut = moe.Few(moe.Cut(4, 16, 4), moe.Cut(2, 64, 2))  # several tiles of k
    monkeypatch.setattr(moe, "few_cuts", lambda *_: cut)
    monkeypatch.setattr(moe, "EARLY", 0)
    expected = computed()
    monkeypatch.setattr(moe, "few_cuts", lambda *_: cut._replace(two=True))
    monkeypatch.setattr(moe, "EARLY", 2)
    torch.testing.assert_close(computed(), expected, rtol=1e-5, atol=1e-6)
    each = gate_up.view(experts, 2, f, d)[ids.clamp(min=0).long()] @ x[:, None, None, :, None]
    inner = torch.nn.functional.silu(each[:, :, 0, :, 0]) * each[:, :, 1, :, 0] * p[:, :, None]
    made = down.view(experts, d, f)[ids.clamp(min=0).long()] @ inner[..., None]
    torch.testing.assert_close(expected, made[..., 0].sum(1), rtol=1e-4, atol=1e-5)


def test_places_of_few_experts() -> None:
    assert [moe.split(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13)] == [
        *((1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (8, 0), (8, 0), (8, 1), (8, 2), (8, 4), (16, 0))
    ]


CASES = [
    *(("silu", "mxfp4", *shape) for shape in ((3, 96, 64, 1), (2, 400, 96, 3), (19, 160, 96, 0))),
    ("gelu_tanh", "mxfp4", 3, 96, 64, 1),
    (Clamped(1.702, 1.0), "mxfp4", 3, 96, 64, 1),
    (Clamped(1.702, 1.0), "mxfp4", 19, 160, 96, 0),
    *(
        ("silu", kind, *shape)
        for kind in ("nvfp4", "fp8g128", "nf4", "mxfp8")
        for shape in ((2, 400, 96, 3), (19, 160, 96, 0))
    ),
    ("silu", "int4g128", 2, 400, 96, 3),
    ("silu", "int8g32", 3, 96, 64, 1),
    ("silu", "int8g32", 19, 160, 96, 0),
]


@pytest.mark.parametrize(("activation", "kind", "tokens", "d", "f", "splits"), CASES)
def test_packed_experts_equal_the_oracle(activation, kind, tokens, d, f, splits) -> None:
    experts, routing = 6, Routing(2, normalize=True)
    x = torch.randn(tokens, d)
    router, *dense = weights(experts, f, d)
    packed = [pack(router, "f32"), *(pack(w, kind) for w in dense)]
    biases = Biases(gate_up=torch.randn(experts, 2 * f), down=torch.randn(experts, d))
    expected = ops.moe(x, *packed, routing, activation, biases)
    p, ids = moe.route(x @ router.T, routing)
    groups, tile = None if splits else moe.group(ids, experts, 16), e2m1.Tile(32, 4, 2, splits)
    inner = e2m1.product(x, packed[1], biases.gate_up, f, ids, groups, tile, activation)
    y = e2m1.product(inner, packed[2], biases.down, d, ids, groups, tile)
    torch.testing.assert_close(moe.combine(y, p), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", e2m1.OTHERS)
@pytest.mark.parametrize(("rows", "biased", "fixed"), [(1, True, False), (5, False, True), (19, True, False)])
def test_a_layer_that_is_packed_is_a_mixture_of_one(rows, biased, fixed, kind, monkeypatch) -> None:
    monkeypatch.setattr(device, "_this", [nvidia("", (8, 0), 108)])
    w, x = pack(torch.randn(70, 1120), kind), torch.randn(rows, 1120)
    bias = torch.randn(70) if biased else None
    found = e2m1.linear(x, w, bias, fixed)
    torch.testing.assert_close(found, ops.linear(x, w, bias), rtol=1e-4, atol=1e-4)
    if fixed:
        assert torch.equal(found[2:3], e2m1.linear(x[2:3].contiguous(), w, bias, fixed))


@pytest.mark.parametrize("kind", ["fp8g128", "mxfp8", "nvfp4"])
def test_cards_without_e4m3_read_the_same_numbers(kind, monkeypatch) -> None:
    """All of them, but NaN."""
    w, x = pack(torch.randn(64, 1024), kind), torch.randn(2, 1024)
    [numbers] = [t.view(torch.uint8) for t in w.tensors if t.dtype == torch.float8_e4m3fn]
    codes = torch.tensor([code for code in range(256) if code & 127 < 127], dtype=torch.uint8)
    numbers.copy_(codes[torch.arange(numbers.numel()) % len(codes)].view_as(numbers))
    found = []
    for arch in ((8, 9), (8, 6)):
        monkeypatch.setattr(device, "_this", [nvidia("", arch, 82)])
        found.append(e2m1.linear(x, w))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


@pytest.fixture
def poisoned():
    """Memory that nobody has written to is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


PLAIN, PICKY = Routing(2, normalize=True), Routing(2, "sparsemixer", jitter=0.01)
WHOLE = [  # tokens, storage, activation, routing, and whether there are biases
    (2, "f32", "silu", PLAIN, False),
    (19, "f32", "gelu_tanh", PLAIN, False),
    (19, "f32", "relu2", PLAIN, False),
    (19, "f32", Clamped(1.702, 1.0), PLAIN, True),
    (2, "mxfp4", Clamped(1.702, 1.0), PLAIN, True),
    (19, "int8g32", "silu", PLAIN, False),
    (5, "f32", "silu", PICKY, False),
]


@pytest.mark.parametrize("homes", [[[0, 1], [2, 3, 4]], [[3, 0, 1], [2, 4, 3]]], ids=["each once", "copies"])
@pytest.mark.parametrize(("tokens", "kind", "activation", "routing", "biased"), WHOLE)
def test_ranks_with_whole_experts_add_up(poisoned, tokens, kind, activation, routing, biased, homes) -> None:
    """``homes``: which of 5 experts each rank has; one that both have is computed by them in turn."""
    experts, d, f = 5, 64, 32
    x, norm, residual = torch.randn(tokens, d), torch.rand(d), torch.randn(tokens, d)
    router, gate_up, down = weights(experts, f, d)
    each = f if activation == "relu2" else 2 * f
    gate_up = gate_up[: experts * each]
    inner, outer = (torch.randn(experts, each), torch.randn(experts, d)) if biased else (None, None)

    def made(part: Part):
        held = list(part.held)
        rows = (
            gate_up.view(experts, each, -1)[held].flatten(0, 1),
            down.view(experts, d, -1)[held].flatten(0, 1),
        )
        own = [b if b is None else b[held] for b in (inner, outer)]
        parts = pack(router, "f32"), *(pack(w, kind) for w in rows)
        here = replace(routing, held=part.held, copies=part.copies)
        places = torch.tensor(part.table(experts), dtype=torch.int32)
        return parts, here, Biases(gate_up=own[0], down=own[1], places=places)

    total, placement = torch.zeros(tokens, d), Placement(2, 0, {0: homes})
    for rank in range(2):
        parts, here, biases = made(placement.part(0, experts, rank))
        outputs = mixture.run(x, None, *parts, here, activation, biases)
        found, added = outputs.sum(), residual.clone()
        torch.testing.assert_close(found, ops.moe(x, *parts, here, activation, biases), rtol=1e-4, atol=1e-5)
        normed = outputs.add_norm(added, norm, 1e-6)
        torch.testing.assert_close(added, residual + found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(normed, ops.rms_norm(added, norm, 1e-6), rtol=1e-4, atol=1e-5)
        total += found
    parts, here, biases = made(Placement(1).part(0, experts, 0))
    torch.testing.assert_close(total, ops.moe(x, *parts, here, activation, biases), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "kind", "activation", "routing", "biased"), WHOLE)
def test_padding_reads_no_expert(poisoned, tokens, kind, activation, routing, biased) -> None:
    experts, d, f = 5, 64, 32
    x, live = torch.randn(tokens, d), torch.arange(tokens, dtype=torch.int32) % 3
    router, gate_up, down = weights(experts, f, d)
    each = f if activation == "relu2" else 2 * f
    added = torch.randn(experts), None, torch.randn(experts, each), torch.randn(experts, d)
    given = pack(router, "f32"), pack(gate_up[: experts * each], kind), pack(down, kind)
    counts = ExpertCounts(experts)
    counts.active = True
    more = routing, activation, Biases(*added) if biased else Biases()
    found = mixture.run(x, None, *given, *more, counts=counts, live=live).sum()
    assert sum(counts.taken()) == int((live > 0).sum()) * routing.top_k
    expected = mixture.run(x, None, *given, *more).sum()
    torch.testing.assert_close(found, expected * (live > 0)[:, None], rtol=1e-5, atol=1e-6)


def fits(tiles: Tiles, itemsize: int, room: int) -> bool:
    """Whether programs have so many bytes of shared memory."""
    stages = (
        tile.stages * tile.k * itemsize * (factors * tile.n + tiles.rows)
        for tile, factors in ((tiles.gate_up, 2), (tiles.down, 1))
    )
    return max(stages) <= room


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("hopper", [True, False])
def test_cuts_fit_the_shared_memory_of_a_program(itemsize: int, hopper: bool) -> None:
    """Of shapes that are not tuned, for any number of tokens; 99 KiB on the GPUs that have least."""
    for experts, top_k, f, d in ((7, 3, 768, 2048), (9, 2, 14336, 4096), (60, 4, 1408, 2048)):
        for tokens in (1, 5, 64, 300, 5000, 100_000):
            tiles = moe_tiles.tiles_for(tokens, experts, top_k, f, d, itemsize, hopper)
            assert fits(tiles, itemsize, (227 if hopper else 99) << 10)
            assert hopper or not (tiles.gate_up.bulk or tiles.down.bulk)


@pytest.mark.parametrize("shape", moe_tiles.TUNED)
def test_measured_cuts_can_be_launched(shape: tuple[int, int, int, int]) -> None:
    _, f, d, itemsize = shape
    lines = moe_tiles.TUNED[shape]
    assert [line.tokens for line in lines] == sorted({line.tokens for line in lines})
    for line in lines:
        assert line.rows in (16, 32, 64, 128)
        assert fits(line, itemsize, 227 << 10)
        for tile, k in ((line.gate_up, d), (line.down, f)):
            assert {tile.n, tile.k} <= {32, 64, 128, 256}
            assert tile.k * itemsize <= 256  # bytes of a row of a box, at most
            assert tile.k <= k
            assert k * itemsize % 16 == 0
            assert tile.warps in (4, 8)


@pytest.mark.parametrize(
    "model", ["qwen3-30b-a3b", "qwen3.6-35b-a3b", "glm-4.7-flash", "deepseek-v2-lite", "olmoe-1b-7b"]
)
def test_models_that_people_serve_are_tuned(model: str) -> None:
    """With the shared expert among the others. Those of gpt-oss stay packed."""
    spec = read_decoder(json.loads((MODELS / model / "config.json").read_text()))
    assert spec.moe is not None
    experts = spec.moe.experts + spec.moe.shared // spec.moe.intermediate
    for itemsize in (1, 2):
        assert (experts, spec.moe.intermediate, spec.hidden, itemsize) in moe_tiles.TUNED


@pytest.mark.parametrize("d", [48, 1025])
def test_sums_of_rows_are_in_the_order_of_ranks(d: int) -> None:
    rows, at = torch.randn(9, d) * 10, torch.tensor([[0, 3, 8], [5, -1, -1], [7, 2, -1], [1, 4, 6]]).int()
    found = moe.sum_rows(rows, at)
    expected = [rows[0] + rows[3] + rows[8], rows[5], rows[7] + rows[2], rows[1] + rows[4] + rows[6]]
    assert torch.equal(found, torch.stack(expected))
