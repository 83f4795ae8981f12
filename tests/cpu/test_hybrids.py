"""Families whose layers keep a state: tiny random checkpoints against HF transformers, float32 on the CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VOCAB, Eager, check_against_hf, random_prompts, save_checkpoint
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny import check_draws, make_core, over_two_ranks, run, submit, tiny_config

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, UnsupportedValue
from sgla.hub.source import ModelSource, open_source
from sgla.kernels.ops import StateLayer
from sgla.ledger import ledger
from sgla.loading import load
from sgla.loading.load import load_model
from sgla.messages import StepPlan, Submit
from sgla.model.families import FAMILIES as DECODERS
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.sched.core import Core
from sgla.worker.cpu import CpuRunner

PAGE, EVERY = 16, 32
MODELS = Path(__file__).parents[2] / "bench/models"
PROMPTS = random_prompts([1, 7, 33, 90])
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
HEADS = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
THIRD = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHORT = {"layer_types": ["conv", "full_attention", "conv"]}
ROUTED = {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KIMI = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 8,
    "linear_num_heads": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
BAILING = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -0.5,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", HEADS | EXPERTS | {"num_hidden_layers": 4}),
    "qwen3-next, one head for each, mixed": (
        "qwen3_next",
        HEADS
        | EXPERTS
        | THIRD
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "mlp_only_layers": [1]}
        | {"norm_topk_prob": False, "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5": ("qwen3_5_text", HEADS | {"num_hidden_layers": 4}),
    "qwen3.5, all rotated, tied": (
        "qwen3_5_text",
        HEADS
        | THIRD
        | {"linear_key_head_dim": 16, "num_key_value_heads": 6, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0}},
    ),
    "qwen3.5 moe": ("qwen3_5_moe_text", HEADS | EXPERTS | THIRD | {"intermediate_size": ...}),
    "olmo hybrid": (
        "olmo_hybrid",
        THIRD | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8},
    ),
    "olmo hybrid, rotated": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "linear_allow_neg_eigval": False}
        | {"num_hidden_layers": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 12},
    ),
    "bailing": ("bailing_hybrid", BAILING | {"num_hidden_layers": 4, "layer_group_size": 2}),
    "bailing, no bound, queries with a latent": (
        "bailing_hybrid",
        BAILING
        | THIRD
        | {"q_lora_rank": 24, "kda_safe_gate": False, "short_conv_kernel_size": 3}
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "kimi": ("kimi_linear", KIMI | {"num_hidden_layers": 5}),
    "kimi, dense, queries with a latent": (
        "kimi_linear",
        KIMI
        | THIRD
        | {"q_lora_rank": 24, "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "n_group": 2}
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "minimax": (
        "minimax",
        {"num_local_experts": 4, "head_dim": 8, "block_size": 16, "linear_attn_alpha_factor": 1.5}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "lfm2": ("lfm2", SHORT | {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2}),
    "lfm2, biases, tied": (
        "lfm2",
        {"full_attn_idxs": [0, 2], "conv_L_cache": 4, "conv_bias": True, "head_dim": 12}
        | {"block_auto_adjust_ff_dim": False, "block_ff_dim": 80, "tie_word_embeddings": True},
    ),
    "lfm3": (
        "lfm3",
        {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 9, "tie_word_embeddings": True},
    ),
    "lfm3, listed, biases": (
        "lfm3",
        {"layer_types": ["sliding_attention", "conv", "full_attention"], "head_dim": 8}
        | {"conv_bias": True, "conv_L_cache": 4, "sliding_window": 20},
    ),
    "lfm2 moe": ("lfm2_moe", SHORT | ROUTED),
    "lfm2 moe, without a bias": (
        "lfm2_moe",
        SHORT | ROUTED | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In torch, in a CPU program in chunks, and a prompt alone; 20 greedy tokens."""
    model_type, changes = FAMILIES[name]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for key, p in hf.named_parameters() if p.dim() > 1 and "bias" not in key)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    check_against_hf(Eager(model, budget=150).generate(PROMPTS, 20), 20, hf)
    check_against_hf(Eager(model, budget=40, native=True).generate(PROMPTS, 20), 20, hf)
    check_against_hf(Eager(model, native=True).generate(PROMPTS[2:3], 20), 20, hf)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5 moe"])
@torch.no_grad()
def test_what_is_joined_on_gpus_is_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of the same x, and the shared expert with the others; over two ranks, too."""
    model_type, changes = FAMILIES[name]
    changes = changes | THIRD | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 40}
    save_checkpoint(tmp_path, model_type, **changes)
    apart = load_model(open_source(tmp_path))
    expected = Eager(apart).prompt_logprobs(PROMPTS)
    monkeypatch.setattr(load, "joins", lambda: True)
    joined = load_model(open_source(tmp_path))
    torch.testing.assert_close(Eager(joined).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-4)
    for part in (joined, load_model(open_source(tmp_path), shard=Shard(1, 2))):
        assert part.blocks[0].attention.ba is part.blocks[1].attention.gate is None
    quantized = load_model(open_source(tmp_path), quantization="int8")
    assert quantized.blocks[0].attention.ba.kind == "f32"
    own, heads = part.blocks[0].attention, part.blocks[1].attention
    rates = apart.blocks[0].attention.ba.dequant().unflatten(0, (2, 2, -1))[:, 1].flatten(0, 1)
    assert torch.equal(own.inputs.dequant()[-len(rates) :], rates)
    gate = apart.blocks[1].attention.gate.dequant()
    assert torch.equal(heads.qkv.dequant()[-len(gate) // 2 :], gate[len(gate) // 2 :])


def test_the_text_part_of_a_checkpoint_with_towers(tmp_path: Path) -> None:
    """Towers, and the layers that guess further tokens, are left out."""
    save_checkpoint(tmp_path, *FAMILIES["qwen3.5 moe"][:1], **FAMILIES["qwen3.5 moe"][1])
    text = json.loads((tmp_path / "config.json").read_text())
    expected = Eager(load_model(open_source(tmp_path))).prompt_logprobs(PROMPTS)
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    more = ("model.visual.merger.norm.weight", "mtp.fc.weight")
    save_file(
        tensors | {name: torch.zeros(3) for name in more}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text
        | {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "full_attention_interval": 4},
        "vision_config": {"depth": 27},
        "image_token_id": 248056,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert torch.equal(Eager(load_model(open_source(tmp_path))).prompt_logprobs(PROMPTS), expected)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported.*'silu' is"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], word: str) -> None:
    own = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    config = SMALL | HEADS | EXPERTS | own
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_theta": 5e3}
    spec = read_decoder(config | {"rope_parameters": rope})
    assert spec.attention[0] == spec.attention[2]  # delta nets, but for every fourth layer
    with pytest.raises(ConfigError, match=word):
        read_decoder(config | change)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        *(
            (kind, {"hidden_act": "gelu_pytorch_tanh"})
            for kind in ("minimax", "kimi_linear", "bailing_hybrid")
        ),
        *(
            (kind, {"hidden_act": "gelu_pytorch_tanh"})
            for kind in ("olmo_hybrid", "qwen3_5_text", "deepseek_v4")
        ),
        ("gemma3n_text", {"hidden_activation": "silu"}),
    ],
)
def test_activations_that_layers_have_built_in_are_the_only_ones(
    model_type: str, change: dict[str, str]
) -> None:
    name = next(name for name, family in DECODERS.items() if model_type in family.types)
    with pytest.raises(UnsupportedValue, match=f"{next(iter(change))} .* is not supported"):
        read_decoder({"architectures": [name], "model_type": model_type} | change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"head_dim": 7}, "even head_dim"),
        ({"conv_L_cache": 1}, "conv_L_cache"),
        ({"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types"),
        ({"full_attn_idxs": 2}, "full_attn_idxs"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"block_ffn_dim_multiplier": 1e9}, "block_ffn_dim_multiplier"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_convolutions_that_cannot_be_are_refused(change: dict[str, Any], word: str) -> None:
    config = SMALL | {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
    spec = read_decoder(config | {"full_attn_idxs": [1], "tie_embedding": True})
    assert spec.tied
    assert spec.intermediate == 256
    assert [bool(layer.unit(int)) for layer in spec.attention] == [True, False, True]
    with pytest.raises(ConfigError, match=word):
        read_decoder(config | change)


def test_what_states_cannot_do_is_refused() -> None:
    """By name, before weights load; and states are counted beside tokens."""
    model = json.loads((MODELS / "qwen3.6-35b-a3b/config.json").read_text())
    machine = Machine(cores=8, memory_total=1 << 40, memory_available=1 << 39)
    with pytest.raises(ConfigError, match="--deterministic cannot"):
        resolve(Config(model="x", deterministic=True), machine, model)
    found = resolve(Config(model="x", device="cpu", dtype="bfloat16", kv_cache_bytes=8 << 30), machine, model)
    rows = ledger(found.config, model)
    assert rows["kv_bytes_per_token"] == 10 * 2 * 2 * 256 * 2
    assert rows["state_bytes"] == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert rows["states"] * rows["state_bytes"] + rows["kv_tokens"] * 20480 <= (8 << 30) + PAGE * 20480
    assert rows["states"] == 66


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(folder, "qwen3_next", seed=1, **HEADS, **EXPERTS, num_hidden_layers=4)
    return open_source(folder)


def make_runner(source: ModelSource, **changes: Any) -> CpuRunner:
    return CpuRunner(tiny_config(**changes), source, 0, 1, "", lambda progress: None)


@pytest.fixture(scope="module")
def runner(source: ModelSource) -> CpuRunner:
    return make_runner(source, native_kernels=True)


def core_of(runner: CpuRunner, pages: int = 0, states: int = 0, **limits: Any) -> Core:
    """With checkpoints every ``EVERY`` tokens."""
    first, *between, last = runner.facts.groups
    groups = [
        replace(first, pages=pages or first.pages),
        *between,
        replace(last, every=EVERY, pages=states or last.pages),
    ]
    return make_core(runner.facts, groups=groups, **limits)


def requests() -> list[Submit]:
    """Longer than several steps, behind a prefix that others share, and shorter."""
    rng = random.Random(5)
    prompt = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    shared = prompt(100)
    return [
        submit("long", prompt(150), 40),
        submit("first", shared + prompt(5), 30, temperature=0.8, seed=3),
        submit("second", shared + prompt(50), 20, temperature=0.9, seed=4),
        submit("short", prompt(3), 60, temperature=1.0, seed=7),
    ]


@pytest.fixture(scope="module")
def alone(source: ModelSource) -> dict[str, list[int]]:
    """What each gives by itself, without a cache."""
    runner = make_runner(source)
    check_draws(runner)
    tokens: dict[str, list[int]] = {}
    for request in requests():
        tokens |= run(runner, [request], core_of(runner, depth=1, prefix_cache=False)).tokens()
    return tokens


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"depth": 1, "step_tokens": 64}, marks=pytest.mark.slow),
        {"depth": 3, "step_tokens": 9},
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
    ],
)
def test_text_is_the_same_in_any_batch(
    runner: CpuRunner, alone: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    """And behind a prefix whose state is read."""
    core = core_of(runner, **limits)
    assert run(runner, requests(), core).tokens() == alone
    cached = run(runner, requests(), core)
    assert cached.tokens() == alone
    assert cached["second"][0].cached_tokens >= 96 * limits.get("prefix_cache", True)


def test_states_go_back_behind_wrong_guesses(source: ModelSource) -> None:
    """Texts that repeat themselves, of which some guesses are right."""
    texts = [
        submit("a", [5, 6, 7] * 6, 30, allowed=[9]),
        submit("b", [7, 6, 5] * 6, 28, temperature=1.0, allowed=[3, 4], seed=1),
    ]
    expected = run(make_runner(source), texts, prefix_cache=False).tokens()
    runner = make_runner(source, speculative_algorithm="ngram", speculative_num_draft_tokens=4)
    for depth in (1, 3):
        core = core_of(runner, drafts=4, depth=depth)
        assert run(runner, texts, core).tokens() == expected
        stats = core.stats()
        assert 8 < sum(stats.right_at) < stats.draft_tokens


@pytest.mark.parametrize("limits", [{"states": 3}, {"pages": 18, "reserve": 0.0}])
def test_retracted_requests_go_on(
    runner: CpuRunner, alone: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    """Where states or pages are short."""
    core = core_of(runner, **limits)
    assert run(runner, requests(), core).tokens() == alone
    assert core.stats().preemptions > 0 or "states" in limits


def test_a_second_turn_computes_its_new_tokens(runner: CpuRunner) -> None:
    core, computed = core_of(runner), [0]
    execute = runner.execute

    def count(plan: StepPlan) -> Any:
        computed[0] += sum(memoryview(plan.q_lens).cast("i"))
        return execute(plan)

    prompt = requests()[0].tokens
    runner.execute = count  # type: ignore[method-assign]
    answer = run(runner, [submit("a", prompt, 43)], core).tokens()["a"]
    text = prompt + answer
    assert computed[0] == len(text) - 1
    computed[0] = 0
    question = [7, 8, 9]
    run(runner, [submit("b", [*text, *question], 1)], core)
    assert computed[0] == len(text) % EVERY + len(question)
    del runner.execute  # type: ignore[attr-defined]


def test_a_second_turn_begins_where_a_prompt_ended_with_a_page(runner: CpuRunner) -> None:
    """The answer fills no page."""
    page, prompt = runner.facts.page_size, requests()[0].tokens
    for pages in (1, 3):
        core, text = make_core(runner.facts), prompt[: pages * page]
        answer = run(runner, [submit("a", text, 5)], core).tokens()["a"]
        again = run(runner, [submit("b", [*text, *answer, 7, 8, 9], 1)], core)
        assert again["b"][0].cached_tokens == pages * page


def test_what_others_leave_is_not_read(runner: CpuRunner, alone: dict[str, list[int]]) -> None:
    """Whatever a free unit holds; it may be no number."""
    core = core_of(runner, depth=1)
    recurrent, plan = core._memory.recurrent, core.plan
    assert recurrent is not None
    states = [layer for layer in runner.kv if isinstance(layer, StateLayer)]

    def poison_and_plan(now: float) -> StepPlan | None:
        for layer in states if not core._queues.flights else []:
            for units in (layer.conv, layer.memory):
                units[[0, *recurrent.pool._free]] = torch.nan
        return plan(now)

    core.plan = poison_and_plan  # type: ignore[method-assign]
    assert len(states) == 3
    for _ in range(2):
        assert run(runner, requests(), core).tokens() == alone


async def test_two_ranks_equal_one(source: ModelSource, alone: dict[str, list[int]]) -> None:
    """States are split by heads."""
    assert (await over_two_ranks(source, requests())).tokens() == alone


@pytest.mark.parametrize(
    "name",
    ["lfm3", "lfm2 moe", "kimi", "olmo hybrid", "bailing", pytest.param("minimax", marks=pytest.mark.slow)],
)
async def test_other_states_are_kept(name: str, tmp_path: Path) -> None:
    """Units without memory, beside latents, and without a convolution: in a batch, in chunks, behind a prefix
    and over two ranks, as alone."""
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, seed=1, **changes)
    source, wanted = open_source(tmp_path), requests()[1:3]
    runner = make_runner(source, native_kernels=True)
    check_draws(runner)
    alone: dict[str, list[int]] = {}
    for request in wanted:
        alone |= run(runner, [request], core_of(runner, depth=1, prefix_cache=False)).tokens()
    core = core_of(runner, step_tokens=24)
    assert run(runner, wanted, core).tokens() == alone
    again = run(runner, wanted, core)
    assert again.tokens() == alone
    assert again["second"][0].cached_tokens >= 96
    assert (await over_two_ranks(source, wanted)).tokens() == alone


def test_a_step_in_parts_leaves_the_same_states(
    runner: CpuRunner, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows of logits exist at a time, so a prompt with logprobs is computed in parts; others go on from
    the states that it leaves on the way."""
    monkeypatch.setattr(runner, "_most_logits", 20)
    core = core_of(runner)
    long, first, second, _ = requests()
    scored = [replace(r, sampling=replace(r.sampling, prompt_logprobs=1)) for r in (long, first)]
    found = run(runner, scored, core).tokens()
    assert found == {rid: alone[rid] for rid in ("long", "first")}
    behind = run(runner, [second], core)
    assert behind.tokens()["second"] == alone["second"]
    assert behind["second"][0].cached_tokens == 96
