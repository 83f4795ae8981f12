"""Families of mixtures of experts: tiny random checkpoints against HF transformers, float32 on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, Eager, decided, random_prompts, save_checkpoint
from safetensors.torch import load_file, save_file
from tiny import over_two_ranks, run, submit, tiny_config

from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import open_source
from sgla.kernels import ops
from sgla.loading import load
from sgla.loading.load import load_model
from sgla.model.read import read_decoder, read_spec
from sgla.model.sizes import parameters, weight_bytes
from sgla.model.state import state_of, token_bytes
from sgla.quant.weight import pack
from sgla.worker.cpu import CpuRunner

PROMPTS = random_prompts([1, 7, 33, 60])
LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
GROUPS = ROUTED | {"n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [2.0] * 4,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 512,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "num_local_experts": 5,
}
INDEXED = LATENT | GROUPS | {"q_lora_rank": 24, "index_topk": 12, "index_n_heads": 12, "index_head_dim": 16}
HY4 = LATENT | ROUTED | {"q_lora_rank": 24, "swiglu_limit": 0.5}
HY4 |= {"index_topk": 12, "index_n_heads": 12, "index_head_dim": 16}
LONGCAT = LATENT | {"num_hidden_layers": ..., "intermediate_size": ..., "num_layers": 2, "q_lora_rank": 24}
LONGCAT |= {"n_routed_experts": 6, "moe_topk": 3, "zero_expert_num": 3, "ffn_hidden_size": 64}
LONGCAT |= {"expert_ffn_hidden_size": 32, "head_dim": 8}
AXK = LATENT | ROUTED | {"gated_norm_rank": 6, "first_k_dense_replace": ..., "q_lora_rank": 24}
AXK |= {"index_topk": 12, "index_n_heads": 12, "index_head_dim": 16}
LLAMA4 = {
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 16,
    "floor_scale": 12,
    "attn_scale": 0.4,
}
MIMO = {key: value for key, value in GROUPS.items() if key != "n_shared_experts"}
MIMO |= {"head_dim": 24, "v_head_dim": 12, "num_key_value_heads": 1, "sliding_window": 10}
SPLIT_TOO = "qwen2", "phi", "deepseek", "minimax", "mimo"
MELLUM = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "deepseek": ("deepseek", ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 2}),
    "deepseek, some layers": (
        "deepseek",
        ROUTED | {"n_shared_experts": None, "moe_layer_freq": 2, "norm_topk_prob": True},
    ),
    "phi": ("phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.3, "lm_head_bias": True}),
    "phi, longrope": (
        "phimoe",
        {"num_local_experts": 5, "attention_bias": True, "sliding_window": 9, "rope_parameters": LONGROPE},
    ),
    "mellum": (
        "mellum",
        EXPERTS | {"num_local_experts": 6, "head_dim": 8, "sliding_window": 9} | MELLUM,
    ),
    "qwen2": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 72}),
    "qwen2 sparse, with windows": (
        "qwen2_moe",
        EXPERTS
        | {"shared_expert_intermediate_size": 72, "decoder_sparse_step": 2, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"swiglu_limit": 0.4, "swiglu_alpha": 1.5},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT
        | GROUPS
        | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 3.0, "n_shared_experts": 2},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        LATENT
        | ROUTED
        | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT
        | GROUPS
        | {"q_lora_rank": 24, "first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale_all_dim": 1.0}},
    ),
    "moonlight": (
        "deepseek_v3",
        LATENT | ROUTED | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "ling 2": ("bailing_moe", GROUPS | {"head_dim": 8, "first_k_dense_replace": 1}),
    "glm-4.5": ("glm4_moe", ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "glm-4.5-air": ("glm4_moe", GROUPS | {"head_dim": 8, "first_k_dense_replace": 2}),
    "glm-4.7-flash": ("glm4_moe_lite", LATENT | ROUTED | {"q_lora_rank": 24}),
    "dots": (
        "dots1",
        ROUTED
        | {
            "head_dim": 8,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "max_window_layers": 1,
            "sliding_window": 9,
        },
    ),
    "granite": ("granitemoe", GRANITE | {"attention_bias": True}),
    "granite with windows": (
        "granitemoe_swa",
        GRANITE | {"sliding_window": 20, "layer_rope_theta": [0, 500.0, 1e4], "shared_intermediate_size": 64},
    ),
    "granite shared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 64}),
    "ernie": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "ernie without shared experts": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 0}
        | {"moe_layer_end_index": 1, "moe_norm_min": 0.9},
    ),
    "solar": ("solar_open", ROUTED | {"head_dim": 8, "attention_bias": True}),
    "exaone": (
        "exaone_moe",
        EXPERTS | {"head_dim": 8, "num_shared_experts": 2, "sliding_window": 9, "sliding_window_pattern": 2},
    ),
    "minimax": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "llama4": ("llama4_text", LLAMA4 | {"attention_bias": True}),
    "llama4, yarn, whose factor its norms take out": ("llama4_text", LLAMA4 | {"rope_parameters": YARN}),
    "llama4, yarn, without norms": ("llama4_text", LLAMA4 | {"rope_parameters": YARN, "use_qk_norm": False}),
    "llama4 with dense layers": (
        "llama4_text",
        LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "deepseek-v3.2": ("deepseek_v32", INDEXED | {"first_k_dense_replace": 1, "rope_parameters": YARN}),
    "deepseek-v3.2, short": ("deepseek_v32", INDEXED | {"index_topk": 512}),
    "glm-5": ("glm_moe_dsa", INDEXED | {"num_hidden_layers": 4, "index_topk_freq": 2}),
    "longcat": ("longcat_flash", LONGCAT),
    "a.x k2": ("axk2", AXK),
    "a.x k2, short, with groups": ("axk2", AXK | {"n_group": 4, "topk_group": 2, "index_topk": 512}),
    "hy 4": ("hy_v4", HY4),
    "hy 4, short, other kinds": (
        "hy_v4",
        HY4
        | {"index_topk": 512, "indexer_types": ["full", "shared", "full"], "swiglu_limit": 2.0}
        | {"hc_mult": 3, "hc_magnitude": 1.5},
    ),
    "mistral 4": (
        "mistral4",
        LATENT | GROUPS | {"q_lora_rank": 24, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "mimo": ("mimo_v2_flash", MIMO),
    "hunyuan": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": 2, "head_dim": 8}),
    "hunyuan v3": ("hy_v3", EXPERTS | {"head_dim": 8, "num_shared_experts": 2}),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In torch, in a CPU program in chunks, and a prompt alone."""
    model_type, changes = FAMILIES[name]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for key, p in hf.named_parameters() if p.dim() > 1 and "bias" not in key)
    if moe := model.spec.moe:  # of experts that do nothing it has half of the matrices
        matrices -= len(moe.layers) * moe.idle * 2 * moe.intermediate * model.spec.hidden
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    whole = decided(Eager(model, budget=150).generate(PROMPTS, 6))
    assert decided(Eager(model, budget=40, native=True).generate(PROMPTS, 6)) == whole
    assert decided(Eager(model, native=True).generate(PROMPTS[2:3], 6)) == whole[2:3]


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        "glm-5",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SPLIT_TOO),
    ],
)
async def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """Shared experts, biases that enter the sum once, and tokens that each rank picks."""
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    source = open_source(tmp_path)
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    one = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    both = await over_two_ranks(source, requests)
    assert both.tokens() == run(one, requests).tokens()


@torch.no_grad()
def test_sarvam_is_another_name(tmp_path: Path) -> None:
    """Transformers runs its files with the class for GLM-4.5."""
    from transformers import AutoModelForCausalLM

    model_type, changes = FAMILIES["ling 2"]
    save_checkpoint(tmp_path, model_type, **changes)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"model_type": "sarvam_moe", "architectures": ["SarvamMoEForCausalLM"]})
    )
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(hf).__name__ == "Glm4MoeForCausalLM"
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    found = Eager(load_model(open_source(tmp_path))).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@torch.no_grad()
def test_experts_of_other_groups_count_as_nothing_or_as_zero(tmp_path: Path) -> None:
    """A.X K2's router, whose scores are below 0 here, chooses experts of groups that do not stay."""
    model_type, changes = FAMILIES["a.x k2, short, with groups"]
    hf = save_checkpoint(tmp_path, model_type, **changes).model.layers[1].mlp.gate
    hf.e_score_correction_bias.sub_(1.0)
    x, model = torch.randn(20, 48), load_model(open_source(tmp_path))
    logits, weights, ids = hf(x)
    routing = model.blocks[1].mlp.routing
    found, chosen = ops.route(logits, routing, ops.Biases(correction=hf.e_score_correction_bias))
    assert torch.equal(chosen.sort().values, ids.sort().values)
    torch.testing.assert_close(found.gather(1, chosen.argsort()), weights.gather(1, ids.argsort()))
    others = ops.route(
        logits, replace(routing, zeros=False), ops.Biases(correction=hf.e_score_correction_bias)
    )
    assert not torch.equal(others[1].sort().values, ids.sort().values)


TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
DEEPSEEK = LATENT | GROUPS | {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12}
V2 = ("deepseek_v2", DEEPSEEK | {"topk_method": "group_limited_greedy"})
V3 = ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 0})
PHI = ("phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.3})
QWEN2 = ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 72})
ERNIE = ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32})
GPT_OSS = ("gpt_oss", {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3})
# What the file says otherwise, with the same weights: the numbers are HF's, and others than before.
CHANGED: list[tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = [
    (V2, {"topk_method": "greedy"}),
    (V2, {"topk_group": 3}),
    (V2, {"n_group": 2, "topk_group": 1}),
    (V2, {"routed_scaling_factor": 0.5}),
    (V2, {"num_experts_per_tok": 2}),
    (V3, {"norm_topk_prob": False}),
    (V3, {"routed_scaling_factor": 1.0}),
    (V3, {"n_group": 2}),
    (V3, {"topk_group": 4}),
    (V3, {"num_experts_per_tok": 1}),
    (PHI, {"router_jitter_noise": 0.02}),
    (QWEN2, {"norm_topk_prob": True}),
    (QWEN2, {"num_experts_per_tok": 6}),
    (ERNIE, {"moe_k": 3}),
    (ERNIE, {"moe_norm_min": 0.9}),
    (GPT_OSS, {"swiglu_limit": 0.2}),
    (GPT_OSS, {"swiglu_alpha": 4.0}),
    (GPT_OSS, {"num_experts_per_tok": 1}),
]


@torch.no_grad()
def test_every_key_of_routing_counts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved: dict[str, tuple[Path, torch.Tensor]] = {}
    ids = random_prompts([40], 97)
    for (model_type, base), change in CHANGED:
        if model_type not in saved:
            folder = tmp_path / model_type
            save_checkpoint(folder, model_type, **base | TINY)
            saved[model_type] = folder, Eager(load_model(open_source(folder))).prompt_logprobs(ids)
        folder, before = saved[model_type]
        source = open_source(folder)
        source.config.update(change)
        found = Eager(load_model(source)).prompt_logprobs(ids)
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **change).eval()
        expected = hf(torch.tensor(ids)).logits[0].log_softmax(-1)
        assert (found - expected).abs().max() < 2e-4, f"{model_type} with {change}"
        assert (found - before).abs().max() > 1e-2, f"{model_type}: {change} is ignored"


NAMES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
}


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2, {"n_group": None}, "n_group"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (V2, {"num_experts": 5}, "num_experts"),
        (V3, {"n_group": 3}, "n_group"),
        (V3, {"n_group": 8}, "n_group"),
        (V3, {"topk_group": 5}, "topk_group"),
        (V3, {"topk_group": 1}, "topk_group"),
        (V3, {"topk_group": 0}, "topk_group"),
        (V3, {"n_routed_experts": 0}, "n_routed_experts"),
        (V3, {"n_shared_experts": 0}, "n_shared_experts"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"rope_interleave": False}, "rope_interleave"),
        (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (V3, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (QWEN2, {"num_experts": 0}, "num_experts"),
        (QWEN2, {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        (QWEN2, {"num_experts_per_tok": True}, "num_experts_per_tok"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN2, {"n_group": 2}, "n_group"),
        (ERNIE, {"moe_k": 7}, "moe_k"),
        (ERNIE, {"moe_num_experts": 0}, "moe_num_experts"),
        (ERNIE, {"moe_layer_end_index": -2}, "moe_layer_end_index"),
        (ERNIE, {"moe_norm_min": 0}, "moe_norm_min"),
        (ERNIE, {"moe_gate": "top2_fused"}, "moe_gate"),
        (ERNIE, {"use_bias": True}, "use_bias"),
        (GPT_OSS, {"num_local_experts": 0}, "num_local_experts"),
        (GPT_OSS, {"swiglu_limit": -7.0}, "swiglu_limit"),
        (GPT_OSS, {"experts_per_token": 2}, "experts_per_token"),
        (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4_new"}}, "mxfp4_new"),
        (QWEN2, {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        (("olmoe", {}), {"clip_qkv": 8.0}, "clip_qkv"),
        (("mixtral", {}), {"num_local_experts": 1 << 20}, "num_local_experts"),
        (("glm4_moe_lite", LATENT | ROUTED), {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (
            ("glm4_moe_lite", LATENT | ROUTED),
            {"mlp_layer_types": ["sparse", "dense", "thin"]},
            "mlp_layer_types",
        ),
        (("granitemoe", GRANITE), {"shared_intermediate_size": 8}, "shared_intermediate_size"),
    ],
)
def test_what_cannot_be_is_refused(family: tuple[str, Any], change: dict[str, Any], word: str) -> None:
    """By name, before anything is loaded."""
    model_type, changes = family
    config = SMALL | changes | {"architectures": [NAMES[model_type]], "model_type": model_type}
    read_decoder(config)
    with pytest.raises(ConfigError, match=word):
        read_decoder(config | change)


@torch.no_grad()
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: expanded, and kept packed. Nothing is rounded in either."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 8, "num_local_experts": 4}
    hf = save_checkpoint(tmp_path, "gpt_oss", **sizes)
    stored = load_file(tmp_path / "model.safetensors")
    for name, parameter in hf.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, k, n = parameter.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, n, k // 32), dtype=torch.uint8)
            parameter.copy_(_convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    source.config["quantization_config"] = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    }
    ids = PROMPTS[2]
    expected = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    model = load_model(source)
    torch.testing.assert_close(Eager(model).prompt_logprobs([ids]), expected, rtol=0, atol=2e-4)
    packed = load_model(source, quantization="mxfp4")
    torch.testing.assert_close(Eager(packed).prompt_logprobs([ids]), expected, rtol=0, atol=2e-4)
    kinds = {weight.kind for weight in (packed.blocks[0].mlp.gate_up, packed.blocks[1].mlp.down)}
    assert kinds == {"e2m1"}
    rows, native = (Eager(packed, native=each).generate([ids], 4) for each in (False, True))
    assert native[0].tokens == rows[0].tokens
    assert packed.lm_head.weight.kind == "f32"
    for half in (0, 1):  # ranks split what has been expanded
        load_model(source, shard=Shard(half, 2))
        part = load_model(source, quantization="mxfp4", shard=Shard(half, 2))
        whole = packed.blocks[0].mlp.down.part(0, 4).dequant()
        torch.testing.assert_close(
            part.blocks[0].mlp.down.part(0, 4).dequant(), whole[:, half * 32 :][:, :32]
        )
    del stored["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match="down_proj_scales is missing"):
        load_model(source)


@torch.no_grad()
def test_experts_of_gpt_oss_may_be_apart(tmp_path: Path) -> None:
    """As llm-compressor writes them, with a bias each; what is quantized beside them means its matrix."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "num_local_experts": 3}
    sizes["num_experts_per_tok"] = 2
    hf = save_checkpoint(tmp_path, "gpt_oss", **sizes)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        both, down = (stored.pop(f"{experts}.{part}_proj") for part in ("gate_up", "down"))
        biases = [stored.pop(f"{experts}.{part}_proj_bias") for part in ("gate_up", "down")]
        for e in range(3):
            parts = {
                "gate_proj": (both[e, :, ::2], biases[0][e, ::2]),
                "up_proj": (both[e, :, 1::2], biases[0][e, 1::2]),
                "down_proj": (down[e], biases[1][e]),
            }
            for part, (crossed, bias) in parts.items():
                stored[f"{experts}.{e}.{part}.weight"] = crossed.t().contiguous()
                stored[f"{experts}.{e}.{part}.bias"] = bias.contiguous()
    save_file(stored, path, {"format": "pt"})
    ids = PROMPTS[2]
    expected = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    model = load_model(open_source(tmp_path))
    torch.testing.assert_close(Eager(model).prompt_logprobs([ids]), expected, rtol=0, atol=2e-4)
    fp8 = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
    groups = {"g": {"targets": ["Linear"], "weights": fp8}}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    for name in [name for name in stored if ".experts." in name and name.endswith(".weight")]:
        scale = stored[name].abs().amax(1, keepdim=True) / 448
        numbers = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored |= {name: numbers, f"{name}_scale": scale}
    save_file(stored, path, {"format": "pt"})
    source = open_source(tmp_path)
    source.config["quantization_config"] = said | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    plain, packed = (load_model(source, quantization=kind) for kind in (None, "fp8"))
    assert packed.blocks[0].mlp.gate_up.kind == "fp8"
    found, wanted = (Eager(each).prompt_logprobs([ids]) for each in (packed, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    stored.pop("model.layers.1.mlp.experts.2.up_proj.bias")
    save_file(stored, path, {"format": "pt"})
    with pytest.raises(WeightError, match="1 missing: model.layers.1.mlp.experts.up_proj_bias; 2 unexpected"):
        load_model(open_source(tmp_path))


@pytest.mark.parametrize(
    ("name", "parts"), [("glm-4.7-flash", 1), ("qwen2", 1), ("qwen2", 3), ("deepseek-v2", 2)]
)
@torch.no_grad()
def test_a_shared_expert_is_one_of_the_others(
    name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or several, where its width is a multiple of theirs, on GPUs; with and without a gate; and each rank
    has its share of each."""
    model_type, changes = FAMILIES[name]
    same = {"shared_expert_intermediate_size": 40 * parts} if name == "qwen2" else {}
    hf = save_checkpoint(tmp_path, model_type, **changes | same)
    ids = PROMPTS[2]
    expected = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    apart = load_model(open_source(tmp_path))
    monkeypatch.setattr(load, "joins", lambda: True)
    joined = load_model(open_source(tmp_path))
    mixture = joined.blocks[-1].mlp
    assert (mixture.shared, apart.blocks[-1].mlp.shared is None) == (None, False)
    assert mixture.gate_up.n == apart.blocks[-1].mlp.gate_up.n + 2 * parts * mixture.intermediate
    torch.testing.assert_close(Eager(joined).prompt_logprobs([ids]), expected, rtol=0, atol=2e-4)


def test_mxfp4_holds_its_numbers_and_rounds_others_to_the_nearest() -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    codes = numbers[torch.randint(0, 16, (3, 11, 32))]
    codes[:, 4].clamp_(-1, 1)  # a group without its largest ones
    dense = torch.ldexp(codes, torch.randint(-40, 60, (3, 11, 1))).flatten(1)
    weight = pack(dense, "mxfp4")
    assert torch.equal(weight.dequant(), dense)
    assert torch.equal(weight.columns(32, 192).dequant(), dense[:, 32:192])
    assert torch.equal(weight.rows(1, 3).dequant(), dense[1:])
    with pytest.raises(ConfigError, match="groups of 32"):
        weight.columns(0, 40)
    dense = torch.rand(5, 64) * 6
    dense[:, ::32] = 6
    nearest = (dense[..., None] - numbers.abs()).abs().amin(-1)
    torch.testing.assert_close((pack(dense, "mxfp4").dequant() - dense).abs(), nearest)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek's checkpoints have one behind the last layer."""
    save_checkpoint(tmp_path, V3[0], **V3[1] | TINY)
    more = {"model.layers.2.eh_proj.weight": torch.zeros(8, 8)}
    save_file(
        load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors", {"format": "pt"}
    )
    source = open_source(tmp_path)
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        source.config.pop(key, None)
    load_model(source)
    source.config["num_nextn_predict_layers"] = 0
    with pytest.raises(WeightError, match=r"unexpected: model\.layers\.2\.eh_proj"):
        load_model(source)


def test_ax_k2_may_have_layers_that_guess(tmp_path: Path) -> None:
    """If its file says so, which transformers' does not."""
    save_checkpoint(tmp_path, "axk2", **AXK | {"num_hidden_layers": 2})
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.eh_proj.weight": torch.zeros(8, 8)}, path, {"format": "pt"})
    source = open_source(tmp_path)
    with pytest.raises(WeightError, match=r"unexpected: model\.layers\.2\.eh_proj"):
        load_model(source)
    source.config["num_nextn_predict_layers"] = 1
    load_model(source)


LARGE = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280}
# In billions with embedding and output layer: of all experts, which is what their authors say, and of those
# that a token meets.
PUBLISHED: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", LARGE, 671.0, 37.6),
    "gpt-oss-20b": ("GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9, 4.2),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeForCausalLM", {}, 14.3, 2.7),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", {"intermediate_size": 1024}, 6.9, 1.3),
    "Mixtral-8x7B": ("MixtralForCausalLM", {"num_local_experts": 8}, 46.7, 12.9),
    "ERNIE-4.5-21B-A3B": ("Ernie4_5_MoeForCausalLM", {}, 21.8, 3.4),
    "GLM-4.5-Air": ("Glm4MoeForCausalLM", {"head_dim": 128}, 106.9, 13.4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_are_published(name: str) -> None:
    architecture, config, total, active = PUBLISHED[name]
    found = parameters(read_spec(config | {"architectures": [architecture]}))
    assert [round(count / 1e9, 1) for count in found] == [total, active]


def test_a_token_has_576_values_in_each_layer_of_deepseek_v3() -> None:
    spec = read_decoder(LARGE | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert token_bytes(state_of(spec, 1), "bfloat16") == 61 * 576 * 2
