"""The CUDA runner as a whole: graphs, overlap, chunking and batching must not show in the tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan
from sgla.model import registry

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
import toy_family
import toy_latent_spec
import toy_weights

TINY: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "bench/models/qwen3-0.6b/config.json").read_text()
) | {
    "num_hidden_layers": 2,
    "vocab_size": 5000,
}
MIXTURE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "bench/models/qwen3-30b-a3b/config.json").read_text()
) | {"num_hidden_layers": 2, "vocab_size": 5000, "num_experts": 16}
PAGES = 40  # pages of a row
BROKEN = 4999  # a token that no prompt has


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def new_row(slot: int, tokens: list[int], **sampling: Any) -> NewRow:
    pages = range(1 + slot * PAGES, 1 + (slot + 1) * PAGES)
    return NewRow(
        slot=slot,
        tokens=ints(*tokens),
        prompt_len=len(tokens),
        pages=[ints(*pages)],
        sampling=RowSampling(**sampling),
    )


def plan(step: int, rows: list[tuple[int, int, int, int]], new: list[NewRow] | None = None) -> StepPlan:
    """``rows``: slot, start, length, flags."""
    slots, starts, lens, flags = zip(*rows)
    return StepPlan(
        step=step,
        slots=ints(*slots),
        starts=ints(*starts),
        q_lens=ints(*lens),
        flags=bytes(flags),
        new=new or [],
    )


def make(model: dict[str, Any] = TINY, draft: dict[str, Any] | None = None, **settings: Any) -> Any:
    """``draft``: the model that guesses."""
    from sgla.worker.cuda import CudaRunner

    common = {"max_running_requests": 24, "step_tokens": 1024, "context_length": 640}
    common["kv_cache_bytes"] = 256 << 20
    config = Config(device="cuda", load_format="dummy", **common | settings)
    guessing = None if draft is None else ModelSource("dummy", Path("."), (), draft, {})
    source = ModelSource("dummy", Path("."), (), model, {}, draft=guessing)
    return CudaRunner(config, source, 0, 1, "", lambda progress: None)


@pytest.fixture(scope="module")
def runner() -> Any:
    return make()


def prompt(slot: int, n: int) -> list[int]:
    return np.random.default_rng(slot).integers(0, 5000, n).tolist()


def generate(
    runner: Any,
    prompts: dict[int, list[int]],
    count: int,
    together: bool,
    depth: int = 2,
    **sampling: Any,
) -> dict[int, list[int]]:
    """Decode ``count`` tokens of each slot, batched or one after the other, ``depth`` steps in flight."""
    assert all(group.pages > (max(prompts) + 1) * PAGES for group in runner.facts.groups)
    out: dict[int, list[int]] = {slot: [] for slot in prompts}
    for group in [list(prompts)] if together else [[slot] for slot in prompts]:
        new = [new_row(slot, prompts[slot], seed=slot, **sampling) for slot in group]
        plans = [plan(0, [(s, 0, len(prompts[s]), SAMPLE) for s in group], new)]
        for i in range(count - 1):
            plans.append(plan(i + 1, [(s, len(prompts[s]) + i, 1, SAMPLE) for s in group]))
        flights: list[Any] = []
        for _ in range(count):
            while plans and len(flights) < depth:
                flights.append(runner.launch(plans.pop(0)))
            result = runner.finish(flights.pop(0))
            for slot, token in zip(group, np.frombuffer(result.tokens, np.int32)):
                out[slot].append(int(token))
    return out


def agreement(a: dict[int, list[int]], b: dict[int, list[int]]) -> float:
    """Share of tokens before the first difference: bf16 sums depend on the batch, so a near tie may fall the
    other way, and then the rest differs."""
    same = sum(next((i for i, (x, y) in enumerate(zip(a[s], b[s])) if x != y), len(a[s])) for s in a)
    return same / sum(map(len, a.values()))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batching_does_not_change_the_tokens(runner: Any, temperature: float) -> None:
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True, temperature=temperature)
    apart = generate(runner, prompts, 12, False, temperature=temperature)
    assert agreement(together, apart) >= 0.8
    assert len({tuple(tokens) for tokens in together.values()}) == 20


class Twice:
    """A graph whose replay is followed by the same step run eagerly; ``kept``: logits and tokens of both."""

    def __init__(
        self, graph: Any, forward: Callable[[], None], written: list[torch.Tensor], kept: list[Any]
    ) -> None:
        self._runs, self._written, self._kept = (graph.replay, forward), written, kept

    def replay(self) -> None:
        both = []
        for run in self._runs:
            for tensor in self._written:
                tensor.zero_()
            run()
            both.append([tensor.clone() for tensor in self._written])
        self._kept.append(both)


def twice(graphs: Any, monkeypatch: pytest.MonkeyPatch, name: str, forward: Callable[..., None]) -> list[Any]:
    """What is kept from now on of the graphs in the attribute ``name``."""
    written = [graphs._steps.logits, graphs._out if hasattr(graphs, "_out") else graphs.out]
    kept: list[Any] = []
    found = {
        key: Twice(graph, partial(forward, *np.atleast_1d(key).tolist()), written, kept)
        for key, graph in getattr(graphs, name).items()
    }
    monkeypatch.setattr(graphs, name, found)
    return kept


def assert_same_bits(both: Any, rows: int, logits: bool = True) -> None:
    """``logits``: they are written. (The kernel that draws on the way leaves them out.)"""
    replayed, eager = ([tensor[:rows] for tensor in written] for written in both)
    assert all(torch.equal(a, b) for a, b in zip(replayed, eager))
    assert not logits or replayed[0].any(1).all()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 9}])
def test_replay_equals_eager(runner: Any, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels in the same shapes: bit for bit, at every size, with padding."""
    kept = twice(runner.graphs, monkeypatch, "_graphs", runner.graphs._forward)
    for rows in [size - (size > 2) for size in runner.graphs.sizes] + [runner.graphs.limit]:
        kept.clear()
        generate(runner, {slot: prompt(slot, 30 + slot) for slot in range(rows)}, 4, True, **sampling)
        assert len(kept) == 3
        for both in kept:
            assert_same_bits(both, rows, logits=bool(sampling))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 9, "frequency": 1.0}])
def test_steps_in_flight_do_not_change_the_tokens(runner: Any, sampling: dict[str, Any]) -> None:
    """The host is a step behind, or not: the same kernels in the same order."""
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(12)}
    alone = generate(runner, prompts, 12, True, depth=1, **sampling)
    for depth in (2, 3):
        assert generate(runner, prompts, 12, True, depth=depth, **sampling) == alone


def assert_rows_alone_equal_all(runner: Any, bound: float, share: float = 1.0) -> None:
    """The last layer goes on with the rows that are asked for alone, through other kernels. ``share`` of them
    must be within the relative error ``bound`` (a mixture may choose other experts at a near tie)."""
    q_lens = [1, 1, 200, 90, 17]
    starts = [30, 50, 0, 0, 0]
    prompts = [prompt(slot, start + n) for slot, (start, n) in enumerate(zip(starts, q_lens))]
    new = [new_row(slot, tokens) for slot, tokens in enumerate(prompts)]
    runner.execute(plan(0, [(slot, 0, len(tokens), SAMPLE) for slot, tokens in enumerate(prompts)], new))
    columns = (np.array(column, np.int32) for column in (range(len(q_lens)), starts, q_lens))
    with torch.inference_mode():
        batch = runner.steps.extend_batch(*columns)

        def forward(*rows: torch.Tensor) -> torch.Tensor:
            return runner.steps.forward.hidden(batch, *rows).float().clone()

        every = forward()
        for count in (1, 3, 20, 150):
            rows = torch.randperm(batch.tokens)[:count].int().cuda()
            found, wanted = forward(rows), every[rows.long()]
            errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert found.shape == wanted.shape
            assert (errors < bound).float().mean() >= share, errors


def test_rows_that_sample_alone_equal_all(runner: Any) -> None:
    assert_rows_alone_equal_all(runner, 0.02)


def test_chunks_and_mixed_steps_do_not_change_the_tokens(runner: Any) -> None:
    prompts = {slot: prompt(slot, 100 + 20 * slot) for slot in range(6)}
    whole = generate(runner, prompts, 1, True)
    decoded = generate(runner, {9: prompt(9, 50)}, 8, True)[9]
    runner.execute(plan(0, [(9, 0, 50, SAMPLE)], [new_row(9, prompt(9, 50))]))
    mixed, chunked = [decoded[0]], {}
    for i, (slot, tokens) in enumerate(prompts.items()):
        rows = [(9, 50 + i, 1, SAMPLE), (slot, 0, 64, 0)]
        mixed.append(
            int(np.frombuffer(runner.execute(plan(i, rows, [new_row(slot, tokens)])).tokens, np.int32)[0])
        )
        result = runner.execute(plan(i, [(slot, 64, len(tokens) - 64, SAMPLE)]))
        chunked[slot] = np.frombuffer(result.tokens, np.int32).tolist()
    assert agreement(whole, chunked) >= 0.8
    assert mixed == decoded[: len(mixed)]


def test_a_graph_for_prompts_and_decode_rows_equals_eager(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {slot: prompt(slot, 70 + 9 * slot) for slot in range(12)}

    def tokens() -> list[list[int]]:
        new = [new_row(slot, prompts[slot]) for slot in prompts]
        runner.execute(plan(0, [(s, 0, len(prompts[s]), SAMPLE) for s in range(7)], new))
        later = [(s, 0, 40 + s, 0) if s % 2 else (s, 0, len(prompts[s]), SAMPLE) for s in range(7, 12)]
        rest = [(s, 40 + s, len(prompts[s]) - 40 - s, SAMPLE) for s in range(7, 12, 2)]
        steps = [
            [(s, len(prompts[s]) + i, 1, SAMPLE) for s in range(7)] + rows
            for i, rows in enumerate((later, rest))
        ]
        return [
            np.frombuffer(runner.execute(plan(i, rows)).tokens, np.int32).tolist()
            for i, rows in enumerate(steps)
        ]

    with monkeypatch.context() as patch:
        kept = twice(runner.prompts, patch, "_graphs", runner.prompts._forward)
        captured = tokens()
    assert len(kept) == 2  # the first step has too many tokens
    for both, sampled in zip(kept, captured):
        assert_same_bits(both, len(sampled))
    monkeypatch.setattr(runner.prompts, "limit", 0)
    eager = tokens()
    same = [a == b for one, other in zip(captured, eager) for a, b in zip(one, other)]
    assert len(same) == 19
    assert sum(same) >= 16


@pytest.mark.parametrize(("count", "split"), [(900, False), (500, True), (100, True)])
def test_a_graph_behind_a_long_history_equals_eager(
    monkeypatch: pytest.MonkeyPatch, count: int, split: bool
) -> None:
    """Of more tokens than eager steps are chosen for, and of some behind a history that is split, beside a
    decode row."""
    monkeypatch.setattr(sys.modules[__name__], "PAGES", 640)
    runner = make(context_length=16 * PAGES, max_running_requests=4)
    prompts = {0: prompt(0, 90), 1: prompt(1, 10 * 1024)}

    def found() -> tuple[list[int], list[torch.Tensor]]:
        new = [new_row(slot, tokens) for slot, tokens in prompts.items()]
        runner.execute(plan(0, [(0, 0, 90, SAMPLE)], new))
        for at in range(0, 9 * 1024, 1024):
            runner.execute(plan(1, [(1, at, 1024, 0)]))
        rows = [(0, 90, 1, SAMPLE), (1, 9 * 1024, count, 0)]
        tokens = np.frombuffer(runner.execute(plan(2, rows)).tokens, np.int32).tolist()
        pages = torch.arange(1 + PAGES + 576, 1 + PAGES + 576 + count // 16, device="cuda")
        return tokens, [x[pages].float() for layer in runner.steps.kv for x in (layer.k, layer.v)]

    asked = np.array([90, 9 * 1024]), np.array([1, count]), np.array([SAMPLE, 0], np.uint8)
    assert runner.prompts.takes(*asked)
    run: list[bool] = []

    def forward(n: int, size: int, in_parts: int, adapted: int) -> None:
        run.append(bool(in_parts))
        runner.prompts._forward(n, size, in_parts, adapted)

    with monkeypatch.context() as patch:
        kept = twice(runner.prompts, patch, "_graphs", forward)
        captured = found()
    assert run == [False] * 10 + [split]
    assert_same_bits(kept[-1], 1)
    monkeypatch.setattr(runner.prompts, "limit", 0)
    eager = found()
    for one, other in zip(captured[1], eager[1]):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_a_large_graph_of_a_mixture_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more tokens than other models have graphs for, alone and beside decode rows."""
    monkeypatch.setattr("sgla.worker.prompt_graphs.LARGE", (1536,))
    runner = make(MIXTURE, step_tokens=2048, context_length=2048)
    prompts = {slot: prompt(slot, 330 + slot) for slot in range(8)}

    def tokens() -> list[int]:
        new = [new_row(slot, tokens) for slot, tokens in prompts.items()]
        whole = [(slot, 0, len(tokens), SAMPLE) for slot, tokens in prompts.items()]
        decodes = [(slot, len(prompts[slot]), 1, SAMPLE) for slot in range(4)]
        found = [runner.execute(plan(0, whole[:4], new)), runner.execute(plan(1, decodes + whole[4:]))]
        return [token for each in found for token in np.frombuffer(each.tokens, np.int32).tolist()]

    with monkeypatch.context() as patch:
        kept = twice(runner.prompts, patch, "_graphs", runner.prompts._forward)
        captured = tokens()
    assert len(kept) == 2
    for both, rows in zip(kept, (4, 8)):
        assert_same_bits(both, rows)
    monkeypatch.setattr(runner.prompts, "limit", 0)
    assert sum(a == b for a, b in zip(captured, tokens())) >= 9


def test_short_rows_in_a_graph_equal_those_of_prompts(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of prompts behind a history, as decode rows of their slots beside others; what they leave in the
    cache, and what is sampled then."""
    prompts = {slot: prompt(slot, 300 + 16 * slot) for slot in range(6)}

    def found() -> tuple[Any, list[torch.Tensor]]:
        for s, t in prompts.items():
            begun = (s, 0, len(t), SAMPLE) if s < 3 else (s, 0, len(t) - 16 + s, 0)
            runner.execute(plan(0, [begun], [new_row(s, t)]))
        ends = [(s, *((len(t), 1) if s < 3 else (len(t) - 16 + s, 16 - s))) for s, t in prompts.items()]
        rows = [(*end, SAMPLE) for end in ends]
        tokens = [np.frombuffer(runner.execute(plan(1, rows)).tokens, np.int32)]
        after = [(s, len(t) + (s < 3), 1, SAMPLE) for s, t in prompts.items()]
        tokens.append(np.frombuffer(runner.execute(plan(2, after)).tokens, np.int32))
        pages = torch.tensor([1 + s * PAGES + len(t) // runner.facts.page_size for s, t in prompts.items()])
        kept = [x[pages.cuda()].float() for layer in runner.steps.kv for x in (layer.k, layer.v)]
        return np.stack(tokens), kept

    graphs = found()
    monkeypatch.setattr("sgla.worker.prompt_graphs.SHORT", 0)
    prompts_alone = found()
    same = (graphs[0] == prompts_alone[0]).all(0)
    assert sum(same) >= 5
    for one, other in zip(graphs[1], prompts_alone[1]):
        torch.testing.assert_close(one[same], other[same], rtol=0.05, atol=0.05)


def test_rules_and_logprobs(runner: Any) -> None:
    tokens = prompt(3, 40)
    runner.execute(plan(0, [(3, 0, 40, SAMPLE)], [new_row(3, tokens, logprobs=4)]))
    result = runner.execute(plan(1, [(3, 40, 1, SAMPLE)]))
    (block,) = result.logprobs
    ids, values = np.frombuffer(block.top_ids, np.int32), np.frombuffer(block.top_values, np.float32)
    token = np.frombuffer(result.tokens, np.int32)[0]
    assert ids[0] == token
    assert np.frombuffer(block.values, np.float32)[0] == pytest.approx(values[0])
    assert block.start == 41
    banned = int(ids[0])
    runner.execute(plan(0, [(3, 0, 40, SAMPLE)], [new_row(3, tokens, logit_bias=[(banned, -100.0)])]))
    assert np.frombuffer(runner.execute(plan(1, [(3, 40, 1, SAMPLE)])).tokens, np.int32)[0] != banned


def test_penalties_end_a_repetition(runner: Any) -> None:
    tokens = prompt(4, 40)
    plain = generate(runner, {4: tokens}, 30, True)[4]
    varied = generate(runner, {4: tokens}, 30, True, frequency=2.0, presence=2.0)[4]
    assert len(set(varied)) >= len(set(plain))
    assert len(set(varied)) > 25


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ("triton", "triton"),
        ("torch", "torch"),
        ("flex", "flex"),
        ("native", "flashinfer"),
        ("triton", "native"),
    ],
)
def test_backends_agree(runner: Any, decode: str, prefill: str) -> None:
    """Prompts in a graph, and too many of them for one."""
    if prefill == "flashinfer":
        pytest.importorskip("flashinfer")

    many = [{slot: prompt(slot, 30 + slot) for slot in range(rows)} for rows in (6, 16)]
    expected = [generate(runner, prompts, 6, True) for prompts in many]
    try:
        other = make(decode_attention_backend=decode, prefill_attention_backend=prefill)
        assert (other.steps.attention.decode.name, other.steps.attention.extend.name) == (decode, prefill)
        for prompts, tokens in zip(many, expected):
            assert agreement(generate(other, prompts, 6, True), tokens) >= 0.6
    finally:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["hunyuan-7b", "ministral-3-8b"])
def test_scaled_queries_find_keys_and_values_beside_them(name: str) -> None:
    """Whole prompts that a step reads eagerly, where the projection left them, and from the pages; decode
    rows by a kernel that scales on the way, and by one behind. Graphs go by weights that come later."""
    config = json.loads((Path(__file__).parents[2] / "bench/models" / name / "config.json").read_text())
    model = config | {"num_hidden_layers": 2, "vocab_size": 5000}
    prompts = {slot: prompt(slot, 60 + slot) for slot in range(16)}
    found = []
    for backend in ("native", "triton"):
        made = make(model, attention_backend=backend)
        assert made.steps.attention.extend.name == made.steps.attention.decode.name == backend
        torch.manual_seed(0)
        for block in made.steps.model.blocks:
            for factors in block.attention.late or (block.attention.growth,):
                with torch.inference_mode():
                    factors.uniform_(0.2, 3)
        found.append(generate(made, prompts, 6, True))
        del made
        torch.cuda.empty_cache()
    assert agreement(*found) >= 0.6


@pytest.mark.parametrize("rows", [1, 3, 12, 24])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 2}]
)
def test_a_broken_input_fails_alone_in_graphs_and_eagerly(rows: int, sampling: dict[str, Any]) -> None:
    """One embedding is NaN. The prompt's step and the decode steps behind it tell its row, and the others'
    tokens are the same bits."""
    runner = broken_runner()
    bad = rows - 1

    def tokens(poison: bool, eager: bool) -> tuple[list[list[int]], list[list[int]]]:
        prompts = [prompt(slot, 20) for slot in range(rows)]
        prompts[bad][-1] = BROKEN if poison else 14
        new = [new_row(slot, prompts[slot], seed=slot, **sampling) for slot in range(rows)]
        plans = [plan(0, [(slot, 0, 20, SAMPLE) for slot in range(rows)], new)]
        left = range(1 + bad * PAGES, 1 + (bad + 1) * PAGES)  # with NaN, by the run before
        plans[0].zeroed = [ints(*left)]
        plans += [plan(i, [(slot, 19 + i, 1, SAMPLE) for slot in range(rows)]) for i in (1, 2)]
        decodes, takes = runner._decodes, runner.prompts.takes
        if eager:
            runner._decodes, runner.prompts.takes = lambda *_: False, lambda *_: False
        try:
            results = [runner.execute(p) for p in plans]
        finally:
            runner._decodes, runner.prompts.takes = decodes, takes
        for result in results:
            assert all(failed.fault for failed in result.failed)
        found = [np.frombuffer(result.tokens, np.int32).tolist() for result in results]
        return [[t for i, t in enumerate(row) if i != bad] for row in found], [
            sorted({failed.row for failed in result.failed}) for result in results
        ]

    for eager in (False, True):
        clean, none = tokens(False, eager)
        others, failed = tokens(True, eager)
        assert none == [[]] * 3
        assert others == clean
        assert failed == [[bad]] * 3


@cache
def broken_runner() -> Any:
    runner = make(TINY | {"tie_word_embeddings": False})
    runner.steps.model.embed.weight.data[BROKEN] = float("nan")
    return runner


HEADS = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 5000},
    **{"num_attention_heads": 4, "max_position_embeddings": 1024},
}
LATENT = HEADS | {
    **{"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 4},
    **{
        "kv_lora_rank": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}
GROUPED = HEADS | {"num_key_value_heads": 2}
STARCODER2 = GROUPED | {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
COHERE = GROUPED | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
STABLELM = GROUPED | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
STABLELM |= {"qk_layernorm": True, "use_parallel_residual": True}
TOY = GROUPED | {"architectures": ["ToyForCausalLM"], "model_type": "toy", "hidden_act": "silu"}
TOY_LATENT = HEADS | {"architectures": ["ToyLatentForCausalLM"], "model_type": "toy_latent", "head_dim": 32}
HUNYUAN = GROUPED | {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
APERTUS = GROUPED | {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
LLAMA = GROUPED | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TERNARY = LLAMA | {"quantization_config": {"quant_method": "toy-ternary"}}


@pytest.mark.parametrize(
    ("model", "attention", "settings"),
    [
        pytest.param(LATENT, "triton decode, triton prefill", {}, id="latent attention"),
        pytest.param(STARCODER2, "triton decode, triton prefill", {}, id="LayerNorm with biases"),
        pytest.param(COHERE, "triton decode, triton prefill", {}, id="LayerNorm without biases"),
        pytest.param(
            COHERE | {"use_qk_norm": True}, "triton decode, triton prefill", {}, id="LayerNorm of each head"
        ),
        pytest.param(STABLELM, "triton decode, triton prefill", {}, id="the same side by side"),
        pytest.param(HUNYUAN, "triton decode, triton prefill", {}, id="norms behind the rotation"),
        pytest.param(APERTUS, "triton decode, triton prefill", {}, id="an activation that is learned"),
        pytest.param(TOY, "triton decode, triton prefill", {}, id="a family of its own"),
        pytest.param(TOY_LATENT, "triton decode, triton prefill", {}, id="latents of its own"),
        pytest.param(
            TERNARY, "triton decode, triton prefill", {"quantization": "checkpoint"}, id="a format of its own"
        ),
    ],
)
def test_tokens_are_those_of_the_cpu(model: dict[str, Any], attention: str, settings: dict[str, Any]) -> None:
    """In float32, whose tokens rounding decides seldom."""
    from sgla.worker.cpu import CpuRunner

    registry.register("ToyForCausalLM", toy_family.FAMILY)
    registry.register("ToyLatentForCausalLM", toy_latent_spec.FAMILY)
    toy_weights.register()
    on_gpu = make(model, dtype="float32", random_seed=3, **settings)
    assert any(f"attention: {attention}" in note for note in on_gpu.facts.notes)
    config = Config(
        device="cpu",
        load_format="dummy",
        dtype="float32",
        max_running_requests=24,
        step_tokens=1024,
        kv_cache_bytes=256 << 20,
        context_length=640,
        random_seed=3,
        threads=4,
        native_kernels=False,
        **settings,
    )
    source = ModelSource("dummy", Path("."), (), model, {})
    on_cpu = CpuRunner(config, source, 0, 1, "", lambda progress: None)
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(6)}
    found = generate(on_gpu, prompts, 8, True)
    expected: dict[int, list[int]] = {slot: [] for slot in prompts}
    new = [new_row(slot, tokens, seed=slot) for slot, tokens in prompts.items()]
    for i in range(8):
        rows = [(s, len(t) + i - 1 if i else 0, 1 if i else len(t), SAMPLE) for s, t in prompts.items()]
        result = on_cpu.execute(plan(i, rows, [] if i else new))
        for slot, token in zip(prompts, np.frombuffer(result.tokens, np.int32)):
            expected[slot].append(int(token))
    assert agreement(found, expected) >= 0.9
