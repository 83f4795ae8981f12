"""Families with Mamba layers: tiny random checkpoints against HF transformers, float32 on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, Eager, check_against_hf, random_prompts, save_checkpoint
from test_hybrids import core_of, make_runner
from tiny import over_two_ranks, run, submit

from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.loading.load import load_model
from sgla.messages import Submit
from sgla.model.mamba_spec import MambaSpec
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import kv_groups, state_of

PROMPTS = random_prompts([1, 7, 33, 90])
GROUPS = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
ONE_GROUP = GROUPS | {"mamba_n_groups": 1}
GRANITE = {
    "intermediate_size": 40,
    "shared_intermediate_size": 72,
    "num_local_experts": 6,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
FACTORS = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.5, 0.7, 1.2, 1.1, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
}
BIASES = {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True}
NEMOTRON = {
    "num_hidden_layers": ...,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "n_routed_experts": 6,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}
MIXED = {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]}
ALONE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
MAMBA2 = dict.fromkeys(ALONE, ...) | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granitemoehybrid", GROUPS | GRANITE | {"layer_types": KINDS}),
    "granite, dense, rotated, one group, limits": (
        "granitemoehybrid",
        ONE_GROUP
        | GRANITE
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "mamba_proj_bias": True}
        | {"position_embedding_type": "rope", "time_step_limit": [0.1, 0.9], "mamba_d_conv": 3},
    ),
    "granite without mamba": ("granitemoehybrid", GROUPS | GRANITE | {"layer_types": KINDS[1:2] * 3}),
    "bamba": ("bamba", ONE_GROUP | {"attn_layer_indices": [1], "mamba_conv_bias": False}),
    "falcon, factors": ("falcon_h1", GROUPS | FACTORS | {"mamba_d_ssm": 60}),
    "falcon, norm behind the gate": (
        "falcon_h1",
        GROUPS | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon, norm, biases": ("falcon_h1", GROUPS | BIASES | {"mamba_d_ssm": 96, "mamba_rms_norm": True}),
    "nemotron": ("nemotron_h", NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    "nemotron, experts in groups, biases": (
        "nemotron_h",
        NEMOTRON | MIXED | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "use_bias": True},
    ),
    "nemotron, latent experts": ("nemotron_h", NEMOTRON | MIXED | {"moe_latent_size": 32}),
    "jamba": ("jamba", JAMBA | {"num_experts": 6}),
    "jamba, biases, no experts": (
        "jamba",
        JAMBA
        | {"num_experts": 1, "attn_layer_offset": 0, "mamba_dt_rank": 5, "mamba_proj_bias": True}
        | {"mamba_d_conv": 3, "mamba_conv_bias": False},
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba": ("mamba", dict.fromkeys(ALONE, ...) | {"state_size": 8}),
    "mamba, biases, untied": (
        "mamba",
        dict.fromkeys(ALONE, ...)
        | {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "conv_kernel": 3, "expand": 3}
        | {"tie_word_embeddings": False},
    ),
    "falcon mamba": ("falcon_mamba", dict.fromkeys(ALONE, ...) | {"mixer_rms_eps": 1e-4}),
    "mamba2, one group, tied": ("mamba2", MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In torch, and 20 greedy tokens of a CPU program in chunks; a prompt alone."""
    model_type, changes = FAMILIES[name]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for key, p in hf.named_parameters() if p.dim() > 1 and "bias" not in key)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    if "limits" in name:  # transformers' steps of one token do not have them
        alone = Eager(model).generate(PROMPTS[2:3], 20)
        assert Eager(model, budget=9, native=True).generate(PROMPTS, 20)[2].tokens == alone[0].tokens
        return
    check_against_hf(Eager(model, budget=40, native=True).generate(PROMPTS, 20), 20, hf)
    check_against_hf(Eager(model, native=True).generate(PROMPTS[2:3], 20), 20, hf)


SERVED = [
    *("granite, dense, rotated, one group, limits", "nemotron, latent experts", "falcon mamba"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("falcon, factors", "jamba, biases, no experts", "mamba2")
    ),
]


def requests() -> list[Submit]:
    """Longer than several steps, behind a prefix that others share, and shorter."""
    shared, long, tail, short = random_prompts([60, 70, 30, 3])
    return [
        submit("long", long, 6),
        submit("first", shared + tail[:5], 6),
        submit("second", shared + tail, 8, temperature=0.9, seed=4),
        submit("short", short, 12),
    ]


@pytest.mark.parametrize("name", SERVED)
async def test_text_is_the_same_in_any_batch(name: str, tmp_path: Path) -> None:
    """Alone without a cache, together in small steps, behind prefixes whose states are read, where states
    are short, and over two ranks."""
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, seed=1, **changes)
    source = open_source(tmp_path)
    eager, alone = make_runner(source), dict[str, list[int]]()
    for request in requests():
        alone |= run(eager, [request], core_of(eager, depth=1, prefix_cache=False)).tokens()
    runner = make_runner(source, native_kernels=True)
    core = core_of(runner, step_tokens=40)
    assert run(runner, requests(), core).tokens() == alone
    cached = run(runner, requests(), core)
    assert cached.tokens() == alone
    assert cached["second"][0].cached_tokens >= 48
    assert run(runner, requests(), core_of(runner, states=3)).tokens() == alone
    assert (await over_two_ranks(source, requests())).tokens() == alone


def test_what_ranks_keep() -> None:
    """Heads and groups are split; one group is every rank's, and what does not divide is refused."""
    config = SMALL | GROUPS | {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}
    config |= {"mamba_d_ssm": 96, "mamba_n_heads": 12}
    spec = read_decoder(config)
    for groups, ranks, channels in ((2, 2, 48 + 2 * 8), (1, 4, 24 + 2 * 8), (2, 1, 96 + 4 * 8)):
        own = read_decoder(config | {"mamba_n_groups": groups})
        kept = state_of(own, ranks, 0)
        conv, memory = kept[0].unit
        assert conv.shape == (channels, 3)
        assert memory.shape == (12 // ranks, 8, 8)
    first, last = kv_groups(state_of(spec, 1), 512, "float32")
    assert first.layers == last.layers == (0, 1, 2)
    assert first.token_bytes == 3 * 2 * 2 * 8 * 4
    for size, changes in ((3, {}), (4, {}), (5, {"mamba_n_groups": 1})):
        with pytest.raises(ConfigError, match="heads of a Mamba in"):
            build_for(read_decoder(config | changes), size)


def build_for(spec: ModelSpec, ranks: int) -> None:
    from sgla.layers.build import Build
    from sgla.model.mamba import Mamba

    layer = replace(next(a.mamba for a in spec.attention))  # type: ignore[attr-defined]
    assert isinstance(layer, MambaSpec)
    Mamba(Build(Shard(0, ranks)), "x", spec.hidden, layer, 1e-5)


@pytest.mark.parametrize(
    ("architecture", "change", "word"),
    [
        ("Bamba", {"mamba_n_heads": 5}, "not the 96 values"),
        ("Bamba", {"mamba_n_groups": 4}, "4 groups"),
        ("Bamba", {"mamba_d_conv": 1}, "conv_kernel"),
        ("Bamba", {"hidden_act": "gelu_new"}, "hidden_act"),
        ("Bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        ("Bamba", {"time_step_limit": [0.5]}, "time_step_limit"),
        ("Bamba", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("FalconH1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("FalconH1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba", "attention", "sliding_attention"]}, "layer_types"),
        ("GraniteMoeHybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("Jamba", {"attn_layer_offset": 3}, "attn_layer_offset"),
        ("Jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ("Jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        ("NemotronH", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
        ("NemotronH", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("NemotronH", {"attention_bias": True}, "attention_bias"),
        ("NemotronH", {"moe_latent_size": 8, "mlp_bias": True}, "moe_latent_size"),
    ],
)
def test_what_cannot_be_is_refused(architecture: str, change: dict[str, Any], word: str) -> None:
    types = {"Bamba": "bamba", "Jamba": "jamba", "FalconH1": "falcon_h1", "NemotronH": "nemotron_h"}
    own = {"architectures": [f"{architecture}ForCausalLM"]}
    own["model_type"] = types.get(architecture, "granitemoehybrid")  # type: ignore[assignment]
    sizes = {"NemotronH": {"hybrid_override_pattern": "ME*-"}, "Jamba": JAMBA}.get(architecture, GROUPS)
    config = SMALL | sizes | ({"mamba_d_ssm": 96} if architecture == "FalconH1" else {}) | own
    read_decoder(config)
    with pytest.raises(ConfigError, match=word):
        read_decoder(config | change)
