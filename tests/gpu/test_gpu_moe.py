"""Mixtures of experts on the GPU against the torch oracle in float32, and a whole model through the
runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_gpu_runner import (
    agreement,
    assert_rows_alone_equal_all,
    generate,
    make,
    new_row,
    plan,
    prompt,
)

from sgla.kernels import ops
from sgla.kernels.cuda import experts as native
from sgla.kernels.cuda import grouped_gemm, router, token_experts
from sgla.kernels.gpu import mixture
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.routing import Clamped, Routing
from sgla.kernels.triton import elementwise, moe
from sgla.messages import PROMPT_LOGPROBS, SAMPLE
from sgla.quant.weight import pack

pytest.importorskip("triton")
BF16 = torch.bfloat16
TINY: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "bench/models/qwen3-30b-a3b/config.json").read_text()
) | {"num_hidden_layers": 2, "vocab_size": 5000}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def experts() -> Any:
    """Router, gate_up and down of 32 experts in the shapes of Qwen3-30B-A3B."""
    shapes = [(32, 2048), (32 * 2 * 768, 2048), (32 * 2048, 768)]
    return [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for n, k in shapes]


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4g128"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 100, 256, 700, 1000])
def test_mixture_equals_the_oracle(experts: Any, tokens: int, kind: Any) -> None:
    weights = pack(experts[0], "bf16"), pack(experts[1], kind), pack(experts[2], kind)
    x, norm = torch.randn(tokens, 2048, dtype=BF16, device="cuda"), torch.rand(2048, device="cuda") + 0.5
    result = mixture.run(x, (norm, 1e-6), *weights, Routing(4, normalize=True), "silu")
    normed = ops.rms_norm(x, norm, 1e-6)  # rounded, or near ties route otherwise
    expected = ops.moe(normed.float(), *weights, Routing(4, normalize=True), "silu")
    bound = 0.06 if kind == "fp8" else 0.01  # e4m3 has 3 bits of mantissa
    assert relative(result.sum(), expected) < bound
    residual = torch.randn_like(x)
    total = residual.clone()
    normed = result.add_norm(total, norm, 1e-6)
    assert relative(total, residual.float() + expected) < bound
    assert relative(normed, ops.rms_norm(total.float(), norm, 1e-6)) < 0.01
    result.add_to(residual)
    assert torch.equal(residual, total)
    before, nothing = x.clone(), torch.zeros_like(x)
    added = mixture.run(nothing, (norm, 1e-6), *weights, Routing(4, normalize=True), "silu", residual=before)
    assert torch.equal(before, x)
    assert relative(added.sum(), expected) < bound


ROUTINGS = {
    "sigmoids in groups": Routing(4, "sigmoid", True, groups=8, kept=4, two=True, least=1e-20, scale=2.5),
    "one after the other": Routing(2, "sparsemixer", jitter=0.1),
    "biases and clamps": Routing(4, normalize=True),
}


@pytest.mark.parametrize("kind", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("what", ROUTINGS)
def test_other_routing_and_experts_equal_the_oracle_in_graphs(experts: Any, what: str, kind: Any) -> None:
    """And nothing waits for the host."""
    weights = pack(experts[0], "bf16"), pack(experts[1], kind), pack(experts[2], kind)
    shapes = [(32,), (32, 2 * 768), (32, 2048)]
    added, up, out = (torch.randn(shape, device="cuda") * 0.1 for shape in shapes)
    clamped = what == "biases and clamps"
    biases = ops.Biases(added, None, up, out) if clamped else ops.Biases(correction=added)
    activation: Any = Clamped(1.702, 1.0) if clamped else "silu"
    for tokens in (1, 3, 17, 300, 1000):
        x = torch.randn(tokens, 2048, dtype=BF16, device="cuda")
        given = *weights, ROUTINGS[what], activation, biases
        expected = ops.moe.body(x.float(), *given)
        eager = mixture.run(x, None, *given).sum()
        # One token in 300 may choose otherwise near a tie.
        near = (eager - expected).norm(dim=1).argsort()[: tokens - tokens // 300]
        assert relative(eager[near], expected[near]) < (0.15 if kind == "fp8" else 0.02)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mixture.run(x, None, *given).sum()
        graph.replay()
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("tokens", [2, 3, 8, 16, 40, 300, 700])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "mxfp4", "int4g128"])
def test_padding_changes_no_other_token(experts: Any, kind: Any, tokens: int) -> None:
    """And is nothing itself, unless kernels read each token's experts."""
    weights = pack(experts[0], "bf16"), pack(experts[1], kind), pack(experts[2], kind)
    x = torch.randn(tokens, 2048, dtype=BF16, device="cuda")
    live = torch.arange(tokens, dtype=torch.int32, device="cuda") % 3
    for routing in (Routing(4, normalize=True), Routing(4, "sigmoid", True)):
        whole = mixture.run(x, None, *weights, routing, "silu").sum()
        found = mixture.run(x, None, *weights, routing, "silu", live=live).sum()
        assert relative(found[live > 0], whole[live > 0]) < 0.01
        assert not found[live == 0].any() or tokens <= mixture.FEW_INTEGERS


@pytest.mark.parametrize(
    ("count", "d", "top_k"), [(128, 2048, 8), (32, 2048, 4), (64, 1024, 2), (256, 2048, 6)]
)
def test_the_router_adds_norms_and_chooses_as_separate_kernels(count: int, d: int, top_k: int) -> None:
    assert router.refuses(count, d) is None
    w = torch.randn(count, d, dtype=BF16, device="cuda") * d**-0.5
    weight = torch.rand(d, device="cuda") + 0.5
    for rows in (1, 16, 17, 250, 512):
        x, h = (torch.randn(rows, d, dtype=BF16, device="cuda") for _ in range(2))
        for add, norm, normalize in ((True, True, True), (False, True, False), (False, False, True)):
            expected = x + h if add else x
            residual, total = (h.clone(), expected) if add else (None, None)
            if norm:
                expected = elementwise.rms_norm(expected, weight, 1e-6)
            found = router.route(
                x, w, top_k, normalize,
                residual=residual, norm=weight if norm else None, eps=1e-6, places=200,
            )  # fmt: skip
            assert found.done is not None
            assert not found.done.any()
            assert residual is None or torch.equal(residual, total)
            assert relative(found.x, expected) < 2e-3
            p, ids = moe.route(
                torch.mm(found.x, w.t(), out_dtype=torch.float32), Routing(top_k, normalize=normalize)
            )
            assert (found.ids == ids).float().mean() > 0.999  # near ties
            torch.testing.assert_close(found.probabilities, p, rtol=0, atol=1e-3)
            live = torch.arange(rows, dtype=torch.int32, device="cuda") % 3
            padded = router.route(found.x, w, top_k, normalize, places=200, live=live)
            again = router.route(found.x, w, top_k, normalize, places=200)
            assert torch.equal(padded.ids, again.ids.masked_fill(live[:, None] == 0, -1))
            assert torch.equal(padded.probabilities, again.probabilities * (live[:, None] > 0))


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("f", [768, 192])
def test_grouped_products_equal_the_oracle(f: int, skew: bool) -> None:
    """``skew``: most tokens choose the same experts, so that these have several places and others none."""
    count, d, top_k = 128, 1024, 8
    shapes = [(count, d), (count * 2 * f, d), (count * d, f)]
    w = [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for n, k in shapes]
    for tokens in (1, 3, 16, 64, 256):
        x = torch.randn(tokens, d, dtype=BF16, device="cuda")
        if skew:
            x = x * 0.2 + torch.randn(d, dtype=BF16, device="cuda")
        expected = ops.moe(
            x.float(), *(pack(part, "bf16") for part in w), Routing(top_k, normalize=True), "silu"
        )
        found = router.route(x, w[0], top_k, True, places=native.places(count))
        y = native.forward(found, w[1], w[2], "silu")
        assert relative(moe.combine(y, found.probabilities), expected) < 0.01


@pytest.mark.parametrize("shared", ["gated", "always"])
@pytest.mark.parametrize(("others", "top_k", "parts"), [(256, 8, 1), (512, 10, 1), (64, 6, 2)])
def test_a_shared_expert_behind_all_others(others: int, top_k: int, parts: int, shared: Any) -> None:
    """As Qwen3.6 and Qwen3-Next have it: numbers of more than 8 bits, and an expert of all tokens; or, as
    DeepSeek-V2-Lite has it, two."""
    d, f, count = 256, 64, others + parts
    routing = Routing(top_k, normalize=True, shared=shared, parts=parts)
    shapes = [(others + (shared == "gated"), d), (count * 2 * f, d), (count * d, f)]
    weights = [pack(torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5, "bf16") for n, k in shapes]
    norm = torch.rand(d, device="cuda") + 0.5
    for tokens in (1, 2, 3, 16, 17, 200, 256, 1000):
        x = torch.randn(tokens, d, dtype=BF16, device="cuda")
        expected = ops.moe(ops.rms_norm(x, norm, 1e-6).float(), *weights, routing, "silu")
        assert relative(mixture.run(x, (norm, 1e-6), *weights, routing, "silu").sum(), expected) < 0.015


@pytest.mark.parametrize(
    ("d", "f", "top_k", "parts"), [(2048, 768, 8, 0), (4096, 1408, 6, 2), (3072, 1536, 8, 0)]
)
def test_integers_of_few_tokens_in_a_chain_of_layers(d: int, f: int, top_k: int, parts: int) -> None:
    """As below."""
    kind, others = "int4g128", 16
    routing = Routing(top_k, normalize=True, shared="always" if parts else "", parts=max(parts, 1))
    count, norm, layers = others + parts, torch.rand(d, device="cuda") + 0.5, []
    for _ in range(3):
        shapes = ((others, d, "bf16"), (count * 2 * f, d, kind), (count * d, f, kind))
        layers.append([pack(torch.randn(n, k, device="cuda") * k**-0.5, each) for n, k, each in shapes])

    def chain(begin: torch.Tensor) -> torch.Tensor:
        stream = begin.clone()
        for weights in layers * 3:
            mixture.run(stream, (norm, 1e-6), *weights, routing, "silu").add_to(stream)
        return stream

    for tokens in (1, 2, 4):
        begin = torch.randn(tokens, d, dtype=BF16, device="cuda")
        expected = ops.moe(ops.rms_norm(begin, norm, 1e-6).float(), *layers[0], routing, "silu")
        found = mixture.run(begin, (norm, 1e-6), *layers[0], routing, "silu")
        assert isinstance(found, mixture.Few)
        assert relative(found.sum(), expected) < 0.015
        eager = chain(begin)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(begin)
        for _ in range(50):
            graph.replay()
            assert torch.equal(captured, eager)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("others", "top_k", "parts", "f"), [(256, 8, 1, 512), (64, 4, 1, 1536), (64, 6, 2, 1408)]
)
def test_experts_of_few_tokens_in_a_chain_of_layers(
    monkeypatch: pytest.MonkeyPatch, others: int, top_k: int, parts: int, f: int, kind: Any
) -> None:
    """Kernels that start early and places in two tiles: each layer is right, and graphs give the same bits
    each time, which eager launches without an early start give, too."""
    d, routing = 2048, Routing(top_k, normalize=True, shared="always", parts=parts)
    count, norm = others + parts, torch.rand(d, device="cuda") + 0.5
    layers = []
    for _ in range(3):
        shapes = [(others, d, "bf16"), (count * 2 * f, d, kind), (count * d, f, kind)]
        drawn = [torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5) for n, k, _ in shapes]
        layers.append([pack(w, storage) for w, (_, _, storage) in zip(drawn, shapes)])

    def chain(begin: torch.Tensor) -> torch.Tensor:
        stream = begin.clone()
        for _ in range(3):
            for weights in layers:
                mixture.run(stream, (norm, 1e-6), *weights, routing, "silu").add_to(stream)
        return stream

    for tokens in (1, 2):
        begin = torch.randn(tokens, d, dtype=BF16, device="cuda")
        expected = ops.moe(ops.rms_norm(begin, norm, 1e-6).float(), *layers[0], routing, "silu")
        for early, refused in ((0, "no"), (2, "no"), (2, None)):
            monkeypatch.setattr(moe, "EARLY", early)
            monkeypatch.setattr(token_experts, "refuses", lambda *_, refused=refused: refused)
            found = mixture.run(begin, (norm, 1e-6), *layers[0], routing, "silu").sum()
            assert relative(found, expected) < (0.015 if kind == "bf16" else 0.06)
        for refused in ("no", None):
            monkeypatch.setattr(token_experts, "refuses", lambda *_, refused=refused: refused)
            monkeypatch.setattr(moe, "EARLY", 0)
            eager = chain(begin)
            monkeypatch.setattr(moe, "EARLY", 2)
            chain(begin)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = chain(begin)
            for _ in range(50):
                graph.replay()
                assert torch.equal(captured, eager)


@pytest.mark.parametrize("ids", [[[-1, 3, -1, 0]], [[-1, 3, 7, 0], [2, -1, -1, -1]], [[-1, -1, -1, -1]]])
def test_few_tokens_leave_out_experts_of_other_ranks(experts: Any, ids: list[list[int]]) -> None:
    _, gate_up, down = experts
    chosen = torch.tensor(ids, dtype=torch.int32, device="cuda")
    pairs = token_experts.Chosen(torch.rand(chosen.shape, device="cuda"), chosen, 0, held=True)
    x, residual = torch.randn(2, len(ids), 2048, dtype=BF16, device="cuda")

    def found(total: torch.Tensor) -> torch.Tensor:
        inner = token_experts.gate_up(x, pairs, gate_up, 768, "silu")
        return token_experts.down(inner, pairs, down, 2048, total)

    with rehearsing():
        found(residual)
    inner = moe.few_gate_up(x, pairs.probabilities, chosen, gate_up, None, 768, "silu")
    expected = moe.few_down(inner, down, None, chosen, 2048, residual.clone())
    assert relative(found(residual.clone()), expected) < 0.01


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("count", "f", "tokens"), [(8, 192, 300), (16, 768, 1000), (128, 768, 4096), (3, 64, 700)]
)
def test_products_of_prompts_equal_the_oracle(count: int, f: int, tokens: int, activation: Any) -> None:
    """Some experts have no pairs, one or a few."""
    d, top_k = 1024, 2
    x = torch.randn(tokens, d, dtype=BF16, device="cuda")
    gate_up = torch.randn(count * 2 * f, d, dtype=BF16, device="cuda") * d**-0.5
    down = torch.randn(count * d, f, dtype=BF16, device="cuda") * f**-0.5
    ids = torch.randint(0, count - 1, (tokens, top_k), dtype=torch.int32, device="cuda")
    ids[ids == 1] = 0
    ids[7, 1] = 1
    groups = moe.group(ids, count, grouped_gemm.ROWS)
    inner = grouped_gemm.product(x, gate_up, f, groups, activation)
    y = grouped_gemm.product(inner, down, d, groups)
    order = ids.view(-1).argsort(stable=True)
    for e in range(count):
        places = (ids.view(-1)[order] == e).nonzero().view(-1)
        if not len(places):
            continue
        pairs = order[places]
        both = x[pairs // top_k].float() @ gate_up[e * 2 * f : (e + 1) * 2 * f].float().t()
        gate, up = both.split(f, 1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        assert relative(inner[places], act * up) < 0.01
        assert relative(y[pairs], inner[places].float() @ down[e * d : (e + 1) * d].float().t()) < 0.01


def test_batching_does_not_change_the_tokens() -> None:
    runner = make(TINY)
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True)
    assert agreement(together, generate(runner, prompts, 12, False)) >= 0.5
    assert len({tuple(tokens) for tokens in together.values()}) == 20
    assert_rows_alone_equal_all(runner, 0.02, share=0.8)
    torch.cuda.empty_cache()


def shortened(name: str) -> dict[str, Any]:
    """A model of ``bench/models`` with four layers."""
    model: dict[str, Any] = json.loads(
        (Path(__file__).parents[2] / f"bench/models/{name}/config.json").read_text()
    )
    decoder = model.get("text_config", model)
    decoder["num_hidden_layers"] = 4
    for kinds in {"layer_types", "mlp_layer_types"} & decoder.keys():
        decoder[kinds] = decoder[kinds][:4]
    return model


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "glm-4.7-flash"])
def test_kernels_that_start_early_change_no_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, texts = shortened(name), []
    for early in (0, 2):
        monkeypatch.setattr(moe, "EARLY", early)
        runner = make(model, kv_cache_bytes=8 << 30)
        prompts = {0: prompt(0, 300), 1: prompt(1, 150)}
        texts.append([generate(runner, some, 80, True) for some in ({0: prompts[0]}, prompts)])
        del runner
        torch.cuda.empty_cache()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["glm-4.7-flash", "deepseek-v2-lite"])
def test_rows_by_kernels_that_sum_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of one and of two rows behind prompts, by Triton's kernels and by those of CUDA: final hidden states
    are the same but for rounding, which turns few routers' choices. A whole text is no measure of it: its
    first near tie ends all likeness."""
    runner = make(shortened(name), kv_cache_bytes=8 << 30)
    lengths = [40 + 31 * slot for slot in range(12)]
    prompts = [prompt(slot, n + 1) for slot, n in enumerate(lengths)]
    for slot, tokens in enumerate(prompts):
        runner.execute(plan(0, [(slot, 0, len(tokens), SAMPLE)], [new_row(slot, tokens)]))

    @torch.inference_mode()
    def hidden(*slots: int) -> torch.Tensor:
        columns = (list(slots), [lengths[slot] for slot in slots], [1] * len(slots))
        batch = runner.steps.extend_batch(*(np.array(column, np.int32) for column in columns))
        assert batch.decode_rows == len(slots)
        return runner.steps.forward.hidden(batch).float().clone()

    rows = [(slot,) for slot in range(12)] + [(slot, slot + 1) for slot in range(0, 12, 2)]
    refuses = token_experts.refuses
    monkeypatch.setattr(token_experts, "refuses", lambda *_: "no")
    expected = [hidden(*slots) for slots in rows]
    monkeypatch.setattr(token_experts, "refuses", refuses)
    errors = [relative(hidden(*slots), wanted) for slots, wanted in zip(rows, expected)]
    assert np.mean(np.array(errors) < 0.02) >= 0.7, errors
    torch.cuda.empty_cache()


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 1792,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 5000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def test_mixtral_equals_torch() -> None:
    """Logprobs of a prompt in two chunks, and of tokens decoded alone and among others."""
    runner = make(MIXTRAL)
    tokens = prompt(2, 300)
    new = [new_row(2, tokens, prompt_logprobs=0, logprobs=0)]
    blocks = list(runner.execute(plan(0, [(2, 0, 130, PROMPT_LOGPROBS)], new)).logprobs)
    blocks += runner.execute(plan(1, [(2, 130, 170, SAMPLE | PROMPT_LOGPROBS)])).logprobs
    others = [new_row(slot, prompt(slot, 40)) for slot in range(3, 20)]
    runner.execute(plan(2, [(row.slot, 0, 40, SAMPLE) for row in others], others))
    for i in range(8):
        rows = [(2, 300 + i, 1, SAMPLE)] + [(row.slot, 40 + i // 2, 1, SAMPLE) for row in others] * (i % 2)
        blocks += runner.execute(plan(3 + i, rows)).logprobs[:1]
    found = torch.cat([torch.from_numpy(np.frombuffer(b.values, np.float32).copy()) for b in blocks])
    slots, places = torch.tensor([2], device="cuda"), torch.arange(309, device="cuda")[None]
    ids = runner.steps.tables.tokens.read(slots, places)[0]
    expected = oracle(runner, ids)[: len(found)]
    assert len(found) == 299 + 9
    errors = (found.cuda() - expected).abs()
    assert errors.median() < 0.02
    assert (errors < 0.1).float().mean() > 0.95, errors  # near ties
    torch.cuda.empty_cache()


def oracle(runner: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of all tokens but the first, by torch's operations in float32."""
    pages = -(-len(ids) // 16)
    batch = runner.steps.extend_batch(*(np.array([n], np.int32) for n in (2, 0, len(ids))))
    batch.ids = ids
    with torch.inference_mode():
        kv = runner.steps.allocate(
            [max(int(runner.steps.tables.page_table[2].max()) + 1, pages)], 16, "float32"
        )
        logits = runner.steps.model.logits(runner.steps.model.forward(batch, kv))
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None].long())[:, 0]
