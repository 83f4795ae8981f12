"""Several ranks: the collectives with ranks that are streams of one GPU, and engines on several GPUs."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import layer_norm

from sgla.errors import SglaError
from sgla.kernels.cuda import all_reduce, batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.cuda.all_reduce import AllReduce, inbox_bytes
from sgla.kernels.cuda.build import processors
from sgla.kernels.ops import AddedNorm
from sgla.messages import SamplingParams

BF16 = torch.bfloat16
MESSAGE = 4 << 20
Tiles = batch_gemm.Config


class StreamRanks:
    """Ranks that share one GPU: each has a stream, and its inbox is where the others can write, as with
    several GPUs."""

    def __init__(self, count: int) -> None:
        self.memory = [
            torch.empty(inbox_bytes(count, MESSAGE), dtype=torch.uint8, device="cuda") for _ in range(count)
        ]
        for memory in self.memory:
            AllReduce.clear(memory)
        addresses = [memory.data_ptr() for memory in self.memory]
        self.ranks = [AllReduce(addresses, rank, MESSAGE) for rank in range(count)]
        self.streams = [torch.cuda.Stream() for _ in range(count)]

    def each(self, call: Any, *arguments: list[Any]) -> None:
        """``call`` with every rank and its arguments, on its stream."""
        part = max(1, processors() // len(self.ranks))  # the blocks of all ranks must be on the GPU at once
        torch.cuda.synchronize()
        with patch.object(all_reduce, "processors", return_value=part):
            for stream, own in zip(self.streams, zip(self.ranks, *arguments)):
                with torch.cuda.stream(stream):
                    call(*own)
        torch.cuda.synchronize()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("norm", ["", "alone", "added", "layer"])
@pytest.mark.parametrize(
    ("count", "rows", "d"),
    [(2, 1, 4096), (2, 256, 4096), (2, 600, 1024), (3, 7, 2048), (4, 37, 5120), (8, 9, 8192), (8, 1, 16384)],
)
def test_all_reduce(count: int, rows: int, d: int, norm: str, two_shot: bool) -> None:
    ranks = StreamRanks(count)
    weight, bias = torch.rand(2, d, device="cuda") + 0.5
    added = norm in ("added", "layer")
    for _ in range(5):  # the inboxes take turns and must be empty again
        parts = [torch.randn(rows, d, dtype=BF16, device="cuda") for _ in range(count)]
        for part in parts:
            part[:, ::7] = -0.0  # what an empty place looks like
        residual = torch.randn(rows, d, dtype=BF16, device="cuda")
        residuals = [residual.clone() for _ in range(count)]
        expected = total = torch.stack([part.double() for part in parts]).sum(0)
        if added:
            total = total + residual.double()
        if norm == "layer":
            expected = layer_norm(total, (d,), weight.double(), bias.double(), 1e-6)
        elif norm:
            expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        kept = residuals if added else [None] * count
        shift = bias if norm == "layer" else None
        norms = [AddedNorm(h, weight, 1e-6, shift) if norm else None for h in kept]
        ranks.each(AllReduce.sum, parts, norms, [two_shot] * count)
        assert all(torch.equal(part, parts[0]) for part in parts)
        assert relative(parts[0], expected) < 1e-2
        if added:
            assert all(torch.equal(h, residuals[0]) for h in residuals)
            assert relative(residuals[0], total) < 5e-3


@pytest.mark.parametrize(
    ("count", "rows", "d", "k", "tiles"),
    [
        (2, 1, 4096, 2048, None),
        (4, 3, 2056, 512, None),
        (2, 9, 4096, 2048, Tiles(128, 4, 1)),
        (2, 100, 4096, 2048, Tiles(128, 2, 1)),
        (2, 200, 1032, 1024, Tiles(64, 1, 1)),
        (4, 13, 2048, 1024, Tiles(64, 4)),
        (8, 8, 1024, 512, Tiles(192, 1, 1)),
    ],
)
def test_products_are_sent_when_they_are_made(
    count: int, rows: int, d: int, k: int, tiles: Tiles | None
) -> None:
    """As those that the sum sends, bit for bit, which take turns with them. (What is ``apart`` shares memory
    with other ranks of this GPU, which may have no room for a product beside sums that wait.)"""
    ranks, weight = StreamRanks(count), torch.rand(d, device="cuda") + 0.5

    def multiply(sent: bool, made: list[Any], rank: AllReduce, x: Any, w: Any) -> None:
        send = rank.sending(rows, d) if sent else None
        few = tiles is None
        made.append(skinny_gemm.linear(x, w, send=send) if few else batch_gemm.linear(x, w, tiles, send=send))

    def add(sent: bool, rank: AllReduce, y: Any, h: Any) -> None:
        rank.sum(y, AddedNorm(h, weight, 1e-6), sent="all" if sent else "")

    for _ in range(5):
        xs = [torch.randn(rows, k, dtype=BF16, device="cuda") for _ in range(count)]
        ws = [torch.randn(d, k, device="cuda") * k**-0.5 for _ in range(count)]
        for w in ws:
            w[4:14] = 0.0  # what an empty place looks like, but for the sign
        residual, found = torch.randn(rows, d, dtype=BF16, device="cuda"), []
        for sent in (False, True):
            made: list[torch.Tensor] = []
            residuals = [residual.clone() for _ in range(count)]
            ranks.each(partial(multiply, sent, made), xs, [w.to(BF16) for w in ws])
            ranks.each(partial(add, sent), made, residuals)
            assert all(torch.equal(y, made[0]) for y in made)
            assert all(torch.equal(h, residuals[0]) for h in residuals)
            found.append(made[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
def test_sums_begin_before_products_have_ended(rows: int) -> None:
    """Layers of them in a graph, as those whose sums send. The rank is its own peer, whose inbox begins so
    far behind its own that what goes there is where the other's part is looked for."""
    d, layers = 2048, 24
    memory = torch.empty(inbox_bytes(2, MESSAGE), dtype=torch.uint8, device="cuda")
    AllReduce.clear(memory)
    rank = AllReduce([memory.data_ptr(), memory.data_ptr() + 2 * rows * d], 0, MESSAGE)
    x, weight = torch.randn(rows, d, device="cuda").to(BF16), torch.rand(d, device="cuda") + 0.5
    ws = [(torch.randn(d, d, device="cuda") * d**-0.5).to(BF16) for _ in range(layers)]
    found: list[tuple[torch.Tensor, ...]] = []
    for sent in (False, True):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        residual = torch.zeros_like(x)

        def run(sent: bool = sent, residual: torch.Tensor = residual) -> torch.Tensor:
            y = x
            for w in ws:
                send = rank.sending(rows, d) if sent else None
                if rows < batch_gemm.MIN_ROWS:
                    y = skinny_gemm.linear(y, w, send=send)
                else:
                    y = batch_gemm.linear(y, w, Tiles(64, 2, 1), send=send)
                y = rank.sum(y, AddedNorm(residual, weight, 1e-6), sent="all" if sent else "")
            return y

        with torch.cuda.stream(stream):
            run()
            with torch.cuda.graph(graph, stream=stream):
                made = run()
            for _ in range(20):
                residual.zero_()
                graph.replay()
        torch.cuda.synchronize()
        found.append((made, residual))
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize(("rows", "d", "k"), [(300, 2048, 512), (1000, 2080, 1024)])
def test_products_of_prompts_are_sent_while_others_are_made(rows: int, d: int, k: int) -> None:
    """As those that the sum sends, bit for bit. (Beside a sum that waits this GPU has no room for them.)"""
    ranks, weight = StreamRanks(2), torch.rand(d, device="cuda") + 0.5

    def multiply(sent: bool, made: list[Any], rank: AllReduce, x: Any, w: Any) -> None:
        made.append(prompt_gemm.linear(x, w, send=rank.sending(rows, d) if sent else None))

    def add(sent: bool, rank: AllReduce, y: Any, h: Any) -> None:
        rank.sum(y, AddedNorm(h, weight, 1e-6), sent="others" if sent else "")

    for _ in range(5):
        xs = [torch.randn(rows, k, dtype=BF16, device="cuda") for _ in range(2)]
        ws = [(torch.randn(d, k, device="cuda") * k**-0.5).to(BF16) for _ in range(2)]
        residual, found = torch.randn(rows, d, dtype=BF16, device="cuda"), []
        for sent in (False, True):
            made: list[torch.Tensor] = []
            residuals = [residual.clone() for _ in range(2)]
            ranks.each(partial(multiply, sent, made), xs, ws)
            ranks.each(partial(add, sent), made, residuals)
            assert all(torch.equal(y, made[0]) for y in made)
            assert all(torch.equal(h, residuals[0]) for h in residuals)
            found.append(made[0])
        assert torch.equal(*found)


def test_sizes_may_change_from_call_to_call() -> None:
    ranks = StreamRanks(2)
    for rows in (1, 300, 2, 64, 64, 1):
        parts = [torch.randn(rows, 4096, dtype=BF16, device="cuda") for _ in range(2)]
        expected = parts[0].float() + parts[1].float()
        ranks.each(AllReduce.sum, parts)
        assert relative(parts[0], expected) < 5e-3


@pytest.mark.parametrize("norm", ["", "rms", "layer"])
@pytest.mark.parametrize(
    ("counts", "d"),
    [
        ((1, 1), 4096),
        ((3, 5), 2048),
        ((300, 1), 1024),
        ((2, 9, 4), 5120),
        ((16,) * 8, 7168),
        ((1,) * 8, 16384),
        ((500, 501), 8),
    ],
)
def test_rows_of_all_are_gathered_and_sums_are_scattered(counts: tuple[int, ...], d: int, norm: str) -> None:
    """Each rank gets the rows of all, and the sum of its own; sums of all rows take turns with them."""
    ranks, (weight, bias) = StreamRanks(len(counts)), torch.rand(2, d, device="cuda") + 0.5
    shift = bias if norm == "layer" else None
    each = [counts] * len(counts)

    def gather(rank: AllReduce, x: torch.Tensor, counts: tuple[int, ...], found: list[Any]) -> None:
        assert rank.takes_own(torch.empty(sum(counts), d, dtype=BF16, device="meta"), counts)
        found.append(rank.gather(x, counts))

    def scatter(rank: AllReduce, y: torch.Tensor, counts: tuple[int, ...], h: Any, found: list[Any]) -> None:
        found.append(rank.scatter(y, counts, AddedNorm(h, weight, 1e-6, shift) if norm else None))

    def expected_of(total: torch.Tensor) -> torch.Tensor:
        if norm == "layer":
            return layer_norm(total, (d,), weight.double(), bias.double(), 1e-6)
        factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        return total * factor if norm else total

    for _ in range(4):
        xs = [torch.randn(count, d, dtype=BF16, device="cuda") for count in counts]
        ys = [torch.randn(sum(counts), d, dtype=BF16, device="cuda") for _ in counts]
        for y in (*xs, *ys):
            y[:, ::7] = -0.0  # what an empty place looks like
        rows: list[list[Any]] = [[] for _ in counts]
        ranks.each(gather, xs, each, rows)
        assert all(torch.equal(found, torch.cat(xs)) for (found,) in rows)
        residuals = [torch.randn_like(x) for x in xs]
        totals = torch.stack([y.double() for y in ys]).sum(0).split(counts)
        if norm:
            totals = [total + h.double() for total, h in zip(totals, residuals)]
        sums: list[list[Any]] = [[] for _ in counts]
        ranks.each(scatter, ys, each, residuals, sums)
        for (found,), total, h in zip(sums, totals, residuals):
            assert relative(found, expected_of(total)) < 1e-2
            assert not norm or relative(h, total) < 5e-3
        expected = torch.stack([y.float() for y in ys]).sum(0)
        ranks.each(AllReduce.sum, ys)
        assert relative(ys[0], expected) < 5e-3


def test_rows_of_nobody_go_through_the_library() -> None:
    rank, rows = StreamRanks(2).ranks[0], torch.empty(3, 1024, dtype=BF16, device="meta")
    assert rank.takes_own(rows, (1, 2))
    assert not rank.takes_own(rows, (0, 3))


@pytest.mark.parametrize("count", [2, 5, 8])
def test_max(count: int) -> None:
    ranks = StreamRanks(count)
    for rows in (1, 256, 1000):
        keys = [torch.randint(-(1 << 62), 1 << 62, (rows,), device="cuda") | 1 for _ in range(count)]
        expected = torch.stack(keys).max(0).values
        ranks.each(AllReduce.max, keys)
        assert all(torch.equal(k, expected) for k in keys)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one KV head, tied, odd vocabulary": {
        "num_key_value_heads": 1,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 5001,
    },
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "mixture of one kernel": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
    },
    "latent": {"intermediate_size": 2048, "moe_intermediate_size": 512, "n_routed_experts": 16},
    "latent that guesses": {
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "n_routed_experts": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}
BASES = {"latent": "deepseek-v2-lite", "latent that guesses": "glm-4.7-flash"}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    from sgla.engine import Engine

    engines = []

    def make(shape: str, **changes: Any) -> Engine:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        models = Path(__file__).parents[2] / "bench/models"
        base = BASES.get(shape, "qwen3-0.6b")
        config = json.loads((models / base / "config.json").read_text())
        small = {"num_hidden_layers": 3, "vocab_size": 5000, "bos_token_id": 0, "eos_token_id": 1}
        small |= {"tie_word_embeddings": False} | SHAPES[shape]
        (folder / "config.json").write_text(json.dumps(config | small))
        settings: dict[str, Any] = {"context_length": 2048, "max_running_requests": 24, "step_tokens": 2048}
        settings |= {"load_format": "dummy", "device": "cuda", "kv_cache_bytes": 256 << 20}
        settings |= {"tokenizer": str(models / "qwen3-0.6b")} | changes
        engines.append(Engine(str(folder), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, ignore_eos=True, seed=i, **more)


def requests(longest: int = 695) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy, drawn, cut, penalized, and long enough for eager prefill."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 50},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 3},
    ]
    lengths = [20 + 45 * i for i in range(15)] + [longest]
    prompts = [[(7 * i + j * j) % 5000 for j in range(length)] for i, length in enumerate(lengths)]
    return prompts, [params(i, **kinds[i % 4]) for i in range(16)]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of tokens before the first difference: sums in bf16 depend on the split, and then the rest
    differs."""
    same = sum(next((i for i, (x, y) in enumerate(zip(p, q)) if x != y), len(p)) for p, q in zip(a, b))
    return same / sum(map(len, a))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "quantization", "whole", "rows"),
    [
        *((shape, None, False, False) for shape in ("plain", "one KV head, tied, odd vocabulary", "mixture")),
        ("mixture", "fp8", False, False),
        ("mixture", None, True, False),
        ("mixture", "fp8", True, False),
        ("plain", "fp8", False, True),
        ("mixture", "fp8", False, True),
    ],
)
def test_ranks_equal_one(
    make: Any, ranks: int, shape: str, quantization: str | None, whole: bool, rows: bool
) -> None:
    """``whole``: each expert is on one rank; ``rows``: ranks share the rows of long steps out."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    prompts, sampling = requests()
    if rows:
        prompts[-1] = [(7 * i + i * i) % 5000 for i in range(1800)]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    tokens, logprobs, gaps = [], [], []

    def run(tp: int, quantization: str | None) -> None:
        more = {"sequence_parallel": rows and tp > 1}
        engine = make(shape, tp=tp, quantization=quantization, ep=tp if whole else 1, **more)
        outputs = engine.generate(prompts, sampling)
        tokens.append([list(output.tokens) for output in outputs])
        (output,) = engine.generate([prompts[-1]], [scored])
        logprobs.append(torch.tensor([found.logprob for found in output.prompt_logprobs[1:]]))
        greedy = range(0, 16, 4)
        read = engine.generate([prompts[i] + tokens[-1][i] for i in greedy], [scored] * len(greedy))
        pairs = [
            pair
            for i, output in zip(greedy, read, strict=True)
            for pair in zip(outputs[i].logprobs, output.prompt_logprobs[len(prompts[i]) :], strict=True)
        ]
        gaps.append(sum(abs(one.logprob - other.logprob) for one, other in pairs) / len(pairs))
        engine.shutdown()

    run(1, quantization)
    run(ranks, quantization)
    difference = (logprobs[0] - logprobs[1]).abs()
    if quantization:
        # Each rank rounds its activations by itself, which must not add to the error of rounding.
        run(1, None)
        errors = [(found - logprobs[2]).abs().mean() for found in logprobs]
        assert 0 < errors[1] < 1.3 * errors[0]
    elif shape == "mixture":  # near experts tie
        assert difference.mean() < 0.1
        assert agreement(*tokens) >= 0.2
    else:
        assert difference.max() < 0.1
        assert agreement(*tokens) >= 0.6  # untrained models have many near ties
    assert gaps[1] < 2 * gaps[0] + 0.02, "decode steps and prefill disagree"
    assert len({tuple(row) for row in tokens[1]}) == 16


@needs_two
def test_a_row_alone_is_one_kernel_of_both_ranks(make: Any) -> None:
    """Its tokens are as likely as in a prompt, behind few and many; steps of several rows come between."""
    prompts = [[(7 * i + j * j) % 5000 for j in range(length)] for i, length in enumerate((20, 700, 1500))]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=0)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    gaps: list[float] = []
    for tp in (1, 2):
        engine, outputs = make("mixture of one kernel", tp=tp, prefix_cache=False), []
        for prompt in prompts:
            outputs += engine.generate([prompt], [greedy])
            engine.generate(prompts, [greedy] * 3)
        for prompt, output in zip(prompts, outputs):
            (read,) = engine.generate([[*prompt, *output.tokens]], [scored])
            pairs = zip(output.logprobs, read.prompt_logprobs[len(prompt) :], strict=True)
            gaps.append(sum(abs(decoded.logprob - seen.logprob) for decoded, seen in pairs) / 24)
        engine.shutdown()
    for one, two in zip(gaps[:3], gaps[3:], strict=True):
        assert two < 2 * one + 0.02, "decode steps and prefill disagree"


SENT: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True, "moe_a2a_backend": "alltoall"}
WAYS = [
    ("plain", {"pp": 2}),
    ("plain", {"cp": 2}),
    ("latent", {"cp": 2}),
    ("latent", {"tp": 2, "dcp": 2, "page_size": 32}),
    ("plain", {"tp": 2, "dp_attention": True}),
    ("mixture", {"tp": 2, "dp_attention": True}),
    ("latent", {"tp": 2, "ep": 2, "dp_attention": True}),
    ("latent", SENT),
    ("mixture", SENT | {"redundant_experts": 4}),
    ("mixture", SENT | {"moe_a2a_backend": "deepep"}),
    ("mixture", {"tp": 2, "ep": 2, "redundant_experts": 4}),
    ("plain", {"tp": 2, "sequence_parallel": True}),
    ("latent", {"tp": 2, "sequence_parallel": True}),
    ("mixture", {"tp": 2, "ep": 2, "sequence_parallel": True}),
    ("plain", {"tp": 2, "two_batch_overlap": True, "step_tokens": 4096}),
    ("latent", {"tp": 2, "two_batch_overlap": True, "step_tokens": 4096}),
    ("mixture", {"tp": 2, "ep": 2, "two_batch_overlap": True, "step_tokens": 4096}),
]


@needs_two
@pytest.mark.parametrize(("shape", "settings"), WAYS, ids=[f"{shape} {way}" for shape, way in WAYS])
def test_other_ways_equal_one(make: Any, shape: str, settings: dict[str, Any]) -> None:
    """A stage of the layers, parts of prompts, requests of its own, whole experts, some of them twice, or
    long steps by halves."""
    if settings.get("moe_a2a_backend") == "deepep":
        pytest.importorskip("deep_ep")
    prompts, sampling = requests(1500)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    tokens, logprobs = [], []
    for changes in ({}, settings):
        engine = make(shape, **changes)
        for _ in range(2):  # without a cached prefix and with
            tokens.append([list(output.tokens) for output in engine.generate(prompts, sampling)])
        (output,) = engine.generate([prompts[-1]], [scored])
        logprobs.append(torch.tensor([found.logprob for found in output.prompt_logprobs[1:]]))
        engine.shutdown()
    difference = (logprobs[0] - logprobs[1]).abs()
    assert difference.mean() < (0.03 if shape == "plain" else 0.1)
    least = 0.6 if shape == "plain" else 0.2  # near experts tie
    assert agreement(tokens[0], tokens[2]) >= least
    assert agreement(tokens[2], tokens[3]) >= least
    assert len({tuple(row) for row in tokens[2]}) == 16


@needs_two
@pytest.mark.parametrize("way", [{}, {"dp_attention": True}, SENT])
def test_experts_are_counted_and_move(make: Any, way: dict[str, Any]) -> None:
    """Each token chooses four in each layer, and is answered as before when experts have gone elsewhere."""
    prompts, sampling = requests()
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine = make("mixture", **{"tp": 2, "ep": 2, "redundant_experts": 4, "prefix_cache": False} | way)
    ingress, logprobs = engine._ready().ingress, []
    (output,) = engine.generate([prompts[-1]], [scored])
    logprobs.append(torch.tensor([found.logprob for found in output.prompt_logprobs[1:]]))
    engine._call(ingress.count_experts("experts_start"))
    outputs = engine.generate(prompts, sampling)
    before = [list(output.tokens) for output in outputs]
    computed = sum(map(len, prompts)) + sum(len(tokens) - 1 for tokens in before)
    told = engine._call(ingress.count_experts("experts_dump"))["ranks"]
    for layer in range(3):
        assert sum(sum(rank["experts"][layer]) for rank in told) == 4 * computed
    engine.generate(prompts, sampling)
    moved = engine._call(ingress.place_experts())
    assert all(layer["balance"] >= layer["balance_before"] - 0.02 for layer in moved)
    engine._call(ingress.count_experts("experts_stop"))
    behind = [list(output.tokens) for output in engine.generate(prompts, sampling)]
    (output,) = engine.generate([prompts[-1]], [scored])
    logprobs.append(torch.tensor([found.logprob for found in output.prompt_logprobs[1:]]))
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.1
    assert agreement(before, behind) >= 0.2


@needs_two
@pytest.mark.parametrize(
    ("guesses", "beside", "way"),
    [
        ("ngram", 1, {"tp": 2}),
        ("draft_model", 1, {"tp": 2}),
        ("draft_model", 2, {"tp": 2}),
        ("ngram", 1, {"pp": 2}),
        ("draft_model", 1, {"pp": 2}),
        ("ngram", 1, {"tp": 2, "dp_attention": True}),
        ("draft_model", 1, {"tp": 2, "dp_attention": True}),
        ("ngram", 1, {"cp": 2}),
        ("draft_model", 1, {"cp": 2}),
        ("draft_model", 2, {"cp": 2}),
    ],
)
def test_guesses_change_no_text(
    make: Any, tmp_path: Path, guesses: str, beside: int, way: dict[str, int]
) -> None:
    """Of prompts that repeat themselves; the model guesses for itself. Second guesses are for few rows. Two
    prompts are so long that the second is read, and shared out, beside rows that guess."""
    asked: dict[str, Any] = {"speculative_algorithm": guesses, "speculative_num_draft_tokens": 4}
    asked |= {"speculative_eagle_topk": beside}
    if guesses == "draft_model":  # which takes as long as what it guesses for
        asked |= {"speculative_model": str(tmp_path / "model"), "speculative_adaptive": False}
    count = 12 if beside == 1 else 3
    prompts = [[i, 7, 9, 11, 13] * 12 for i in range(count)]
    prompts += [[7, 9, 11 + i] * 500 for i in range(2)] if "cp" in way else []
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "logprobs": 1}]
    sampling, found = [params(i, **kinds[i % 2]) for i in range(len(prompts))], []
    for more in ({}, asked):
        engine = make("plain", dtype="float32", **way, **more)
        found.append([list(output.tokens) for output in engine.generate(prompts, sampling)])
        stats = engine.stats()
        engine.shutdown()
    assert found[0] == found[1]
    assert sum(stats.right_at) > 20


@needs_two
@pytest.mark.parametrize("way", [{"tp": 2}, {"tp": 2, "ep": 2, "dp_attention": True}, {"cp": 2}], ids=str)
def test_a_layer_of_the_model_guesses(make: Any, way: dict[str, Any]) -> None:
    """A mixture like the others, whole where ranks have requests of their own. Random weights are never
    right."""
    prompts, sampling = requests(1500)
    asked = {"speculative_algorithm": "mtp", "speculative_num_draft_tokens": 2, "speculative_adaptive": False}
    tokens = []
    for more in ({}, asked):
        engine = make("latent that guesses", **way, **more)
        tokens.append([list(output.tokens) for output in engine.generate(prompts, sampling)])
        stats = engine.stats()
        engine.shutdown()
    assert stats.draft_tokens > 100
    assert agreement(*tokens) >= 0.2  # near experts tie
    assert len({tuple(row) for row in tokens[1]}) == 16


@needs_two
def test_the_death_of_a_rank_ends_requests_with_an_error(make: Any) -> None:
    engine = make("plain", tp=2)
    found: list[BaseException] = []

    def generate() -> None:
        try:
            long = SamplingParams(max_tokens=900, ignore_eos=True)
            while True:
                engine.generate([[1, 2, 3]] * 8, long)
        except SglaError as error:
            found.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(1.0)
    begun = time.monotonic()
    engine._ready()._executor._ranks[1].process.kill()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - begun < 10
    assert "SIGKILL" in str(found[0])
