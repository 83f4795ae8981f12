"""GGUF files of the families: tiny random checkpoints, converted as llama.cpp's ``convert_hf_to_gguf.py``
does, against HF transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import DELTA_NET, Eager, random_prompts, save_checkpoint
from gguf import MODEL_ARCH as Arch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from sgla.errors import ConfigError, WeightError
from sgla.hub.gguf import read_gguf
from sgla.hub.gguf_keys import rules
from sgla.loading import load
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.model.read import read_decoder
from sgla.model.registry import layouts

PROMPTS = random_prompts([1, 7, 33])
Saved = Callable[[str], tuple[Path, Any, Arch, dict[str, Any]]]
FIRST = (Arch.MAMBA, Arch.JAMBA)
SCANS = (Arch.GRANITE_HYBRID, Arch.FALCON_H1, Arch.NEMOTRON_H, Arch.NEMOTRON_H_MOE, Arch.MAMBA2)
PERMUTED = (Arch.LLAMA, Arch.GRANITE_HYBRID, Arch.GRANITE, Arch.GRANITE_MOE, Arch.SMOLLM3, Arch.ARCEE)
PERMUTED += (Arch.DEEPSEEK, Arch.MISTRAL3)
DELTAS = (Arch.QWEN3NEXT, Arch.QWEN35, Arch.QWEN35MOE)
ADD_ONE = (Arch.GEMMA, Arch.GEMMA2, Arch.NEMOTRON)
# Keys of the metadata by those of HF's configuration, as the converter writes them for every model that has
# these.
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}


def write(
    folder: Path,
    hf: Any,
    arch: Arch,
    quantized: Type | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    packed: str = "_exps.weight",
    wide: Mapping[str, Type] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """``changes``: of the keys, with ``__`` for dots; ``None`` leaves one out. ``quantized``: the type of
    matrices whose names have ``packed``, but for those that ``wide`` names. ``change``: of the tensors, by
    their names in the file."""
    config = hf.config.to_dict()
    layers = hf.config.num_hidden_layers
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    writer = gguf.GGUFWriter(path, changes.pop("architecture", gguf.MODEL_ARCH_NAMES[arch]))
    rope = config.get("rope_parameters") or {"rope_theta": 10000.0, "rope_type": "default"}
    rope = rope.get("full_attention", rope)
    keys = {name: config[key] for key, name in KEYS.items() if config.get(key) is not None}
    keys |= {"block_count": layers, "rope.freq_base": float(rope["rope_theta"])}
    if "partial_rotary_factor" in rope:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        keys["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    stored = load_file(folder / "model.safetensors")
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [float(value) for name, value in sorted(stored.items()) if name.endswith(f".act_fn.{part}")]
        keys |= {f"xielu.{part}": values} if values else {}
    tables: dict[str, np.ndarray] = {}
    if rope["rope_type"] == "longrope":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = rope.get("short_mscale") or rope["attention_factor"]
        for which in ("long", "short"):
            tables[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in keys.items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            item = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            whole = key if key.startswith("xielu.") else f"{writer.arch}.{key}"
            writer.add_key_value(whole, value, kind, item)
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, layers)
    tensors = tables
    for name, tensor in converted(stored, arch, config).items():
        if name != "lm_head.weight" or not config["tie_word_embeddings"]:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if (arch == Arch.GEMMA4 and name.endswith("_scale")) or name.endswith("router.scale"):
                part = "ffn_down_exps" if name.endswith("_scale") else "ffn_gate_inp"
                found = f"blk.{name.split('.')[2]}.{part}.scale"
            assert found, name
            whole = found.endswith(("ssm_a", "ssm_d", "ssm_norm.weight")) or "ssm_conv1d_" in found
            tensors[found] = (tensor if whole else tensor.squeeze()).numpy()
    if arch == Arch.GEMMA4:
        frequencies = keys["attention.key_length"] // 2
        turning = rope["partial_rotary_factor"] * frequencies
        factors = np.where(np.arange(frequencies) < turning, 1.0, 1e30)
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    change(tensors)
    for name, values in tensors.items():
        if quantized is not None and re.search(packed, name):
            kind = wide.get(name.split(".", 2)[-1], quantized)
            writer.add_tensor(name, blocks_of(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_of(values: np.ndarray, kind: Type) -> np.ndarray:
    """A matrix in a type; in NVFP4, which the package does not quantize, random blocks of its shape."""
    if kind != Type.NVFP4:
        return quantize(values, kind)
    shape = *values.shape[:-1], values.shape[-1] // 64 * 36
    return np.random.default_rng(values.size).integers(0, 40, shape, dtype=np.uint8)


def converted(
    tensors: dict[str, torch.Tensor], arch: Arch, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """HF's tensors, as ``modify_tensors`` of the converter's classes leaves them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    heads = {"q": config.get("num_attention_heads"), "k": config.get("num_key_value_heads")}
    for name, tensor in tensors.items():
        if arch in PERMUTED and (part := re.search(r"\.([qk])_proj\.", name)):
            tensor = tensor.unflatten(0, (heads[part[1]], 2, -1)).transpose(1, 2).flatten(0, 2)
        if arch in ADD_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch == Arch.LFM2MOE:
            name = name.replace(".expert_bias", ".expert_bias.bias")
            name = name.removeprefix("model.") if ".experts." in name else name
        if arch == Arch.GPT2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = tensor.t()
        if arch == Arch.GPTNEOX and ".query_key_value." in name:
            tensor = tensor.unflatten(0, (heads["q"], 3, -1)).transpose(0, 1).flatten(0, 2)
        if ".act_fn." in name:
            continue
        if arch == Arch.KIMI_LINEAR:
            name, tensor = of_channels(name, tensor)
        if arch == Arch.MISTRAL4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name += ".weight"
        if arch == Arch.GEMMA3N and (stack := re.search(r"(altup_\w+)\.(\d)\.weight$", name)):
            experts.setdefault(f"model.{stack[1]}.weight", {})[int(stack[2])] = tensor
            continue
        if arch == Arch.STABLELM and (head := re.search(r"\.norms\.(\d+)\.", name)):
            experts.setdefault(name.replace(head[0], "."), {})[int(head[1])] = tensor
            continue
        if name.endswith("correct_output_scale"):
            name += ".weight"
        if arch == Arch.GEMMA4 and name.endswith(
            ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
        ):
            name += ".weight"
        if arch in DELTAS:
            name, tensor = of_delta(name, tensor, arch, config)
        if arch == Arch.QWEN3NEXT and "in_proj_qkvz" in name:
            found |= by_part(name, tensor, config)
            continue
        if arch == Arch.BAILINGMOE2:
            name = name.replace(".expert_bias", ".expert_bias.bias")
        if name.endswith(("sinks", "attention_sink_bias")):
            name += ".weight"
        if arch == Arch.FALCON_H1:
            tensor = multiplied(tensor, name, config)
        if arch in SCANS and (".mamba." in name or ".mixer." in name):
            name, tensor = of_scan(name, tensor, config.get("mamba_n_groups") or config["n_groups"])
        if arch in FIRST and name.endswith(".A_log"):
            tensor = -tensor.exp()
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            name = re.sub(r"^backbone(.*)\.mixer\.", r"model\1.mlp.", name)
            name = name.replace(".feed_forward.", ".mlp.") if arch == Arch.JAMBA else name
            experts.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = tensor
        elif name.endswith("kv_b_proj.weight") and arch != Arch.MINICPM3:
            still = config["qk_nope_head_dim"]
            both = tensor.unflatten(0, (config["num_attention_heads"], -1))
            found[name.replace("kv_b", "k_b")] = both[:, :still].transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, still:]
        elif "input_linear" in name and arch in (Arch.GRANITE_MOE, Arch.GRANITE_HYBRID):
            shared = "shared_mlp" in name
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2)):
                hf = "shared_mlp.input_linear" if shared else "block_sparse_moe.input_linear"
                ours = f"mlp.shared_experts.{part}_proj" if shared else f"mlp.experts.{part}_proj"
                if shared and not config["num_local_experts"]:
                    ours = f"mlp.{part}_proj"
                found[name.replace(hf, ours)] = half
        elif not config.get("num_local_experts", 1) and "shared_mlp.output_linear" in name:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        elif arch in (Arch.GRANITE_MOE, Arch.GRANITE_HYBRID) and name.endswith("moe.output_linear.weight"):
            found[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = tensor
        elif arch == Arch.LLAMA4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            gated = "gate_up" in name
            for part, half in zip(("gate", "up"), tensor.chunk(2, 2)) if gated else (("down", tensor),):
                found[re.sub("(gate_up|down)_proj", f"{part}_proj.weight", name)] = half.transpose(1, 2)
        elif arch in DELTAS and name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1)):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        elif arch in DELTAS and name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        elif arch == Arch.GPT_OSS and "gate_up_proj" in name:
            tensor = tensor if "bias" in name else tensor.transpose(1, 2)
            for i, part in enumerate(("gate", "up")):
                ending = f"{part}_proj.bias" if "bias" in name else f"{part}_proj.weight"
                found[re.sub(r"gate_up_proj(_bias)?$", ending, name)] = tensor[:, i::2]
        elif arch == Arch.GPT_OSS and "experts.down_proj" in name:
            bias = name.endswith("bias")
            name = re.sub(r"down_proj(_bias)?$", f"down_proj.{'bias' if bias else 'weight'}", name)
            found[name] = tensor if bias else tensor.transpose(1, 2)
        else:
            found[name] = tensor
    return found | {
        name: torch.stack([t for _, t in sorted(group.items())]) for name, group in experts.items()
    }


def of_delta(name: str, tensor: torch.Tensor, arch: Arch, config: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """A tensor of a layer with a gated delta net, or of a norm; Qwen3.5's have the heads of values that share
    a head of keys apart."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return name, tensor + 1
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if arch != Arch.QWEN3NEXT and ".linear_attn." in name and not name.endswith(".norm.weight"):
        at = 1 if ".out_proj." in name else 0
        first = 2 * keys * key if "in_proj_qkv" in name or "conv1d" in name else 0
        each = 1 if re.search(r"in_proj_[ab]\.|A_log|dt_bias", name) else width
        start, rest = tensor.split([first, tensor.shape[at] - first], at)
        rest = rest.unflatten(at, (keys, values // keys, each)).transpose(at, at + 1)
        tensor = torch.cat([start, rest.flatten(at, at + 2)], at)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def of_channels(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor of Kimi Linear, whose dense MLP transformers calls otherwise than published files do."""
    if "_conv1d." in name:
        tensor = tensor[None]
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def by_part(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Qwen3-Next's joined matrix: queries, keys and values of all heads, and their gates."""
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_value_head_dim"] * config["linear_num_value_heads"] // keys
    q, k, v, z = (
        part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split([key, key, value, value], 1)
    )
    return {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z}


def of_scan(name: str, tensor: torch.Tensor, groups: int) -> tuple[str, torch.Tensor]:
    """A tensor of Mamba 2."""
    if name.endswith((".A_log", ".D")):
        tensor = (-tensor.exp() if name.endswith(".A_log") else tensor)[:, None]
    elif name.endswith(".norm.weight"):
        tensor = tensor.view(groups, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def multiplied(tensor: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """Falcon-H1's, by its factors."""
    seen, gate = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, each = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = torch.tensor([inner, inner, each, each, config["mamba_n_heads"]])
    factors: dict[str, Any] = {
        "down_proj": gate[1],
        "gate_proj": gate[0],
        "k_proj": config["key_multiplier"] * seen,
        "q_proj": seen,
        "v_proj": seen,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": torch.tensor(config["ssm_multipliers"]).repeat_interleave(rows)[:, None]
        * config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return tensor * factors.get(name.removesuffix(".weight").rpartition(".")[2], 1.0)


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 512,
}
WINDOWED = {"num_hidden_layers": 5, "sliding_window": 10}
TIED = {"tie_word_embeddings": True}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
FALCON_H1 = {
    "head_dim": 8,
    "mamba_d_ssm": 60,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
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
SCAN = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 60,
    "ssm__state_size": 8,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 6,
}
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
SHORT = {"layer_types": ["conv", "full_attention", "conv"]}
SHORT_KEYS = {"attention__head_count_kv": [0, 2, 0], "shortconv__l_cache": 3}
SHORT_KEYS |= {"attention__layer_norm_epsilon": None, "attention__layer_norm_rms_epsilon": 1e-5}
NEMOTRON = {"num_hidden_layers": ..., "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 10}
NEMOTRON |= {"n_groups": 2, "ssm_state_size": 8}
# The converter takes num_experts_per_tok for the sign of a mixture: other files say nothing of experts.
NO_EXPERTS = dict.fromkeys(name for name in KEYS.values() if name.startswith("expert_"))
NEMOTRON_KEYS = SCAN | {
    "attention__head_count_kv": [0, 0, 2, 0],
    "attention__value_length": 16,
    "rope__dimension_count": 8,
    "rope__scaling__finetuned": False,
}
ALONE = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"), ...
)
ALONE_KEYS = {"context_length": 2**20, "feed_forward_length": 0, "attention__head_count": 0}
ALONE_KEYS |= {"rope__freq_base": None}
FIRST_SCAN = {"ssm__conv_kernel": 4, "ssm__inner_size": 96, "ssm__state_size": 8, "ssm__time_step_rank": 3}
THIRD = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA_KEYS = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": 8,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 6,
    "ssm__inner_size": 72,
    "full_attention_interval": 4,
    "rope__dimension_count": 4,
    "rope__dimension_sections": [1, 1, 0, 0],
}
SEES = {"rope__dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}
SEES |= {"attention__sliding_window": None}
DENSE: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    "gemma": (Arch.GEMMA, "gemma", TIED | {"head_dim": 16}, {}),
    "gemma2": (Arch.GEMMA2, "gemma2", TIED | WINDOWED | {"head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "falcon-h1": (Arch.FALCON_H1, "falcon_h1", FALCON_H1, SCAN | {"embedding_scale": None}),
    "falcon-h1, norms": (
        Arch.FALCON_H1,
        "falcon_h1",
        FALCON_H1 | NORMED,
        SCAN | {"embedding_scale": None},
    ),
    "phi3": (Arch.PHI3, "phi3", {"sliding_window": 9}, {}),
    "phi3, longrope": (
        Arch.PHI3,
        "phi3",
        {"original_max_position_embeddings": 512, "rope_parameters": LONGROPE | {"attention_factor": 1.2}},
        {"attention__sliding_window": 0},
    ),
    "olmo2": (Arch.OLMO2, "olmo2", {}, {}),
    "granite": (Arch.GRANITE, "granite", GRANITE | {"mlp_bias": True, "attention_bias": True}, {}),
    "starcoder2": (Arch.STARCODER2, "starcoder2", TIED, {}),
    "cohere": (Arch.COMMAND_R, "cohere", TIED | {"logit_scale": 0.5}, {}),
    "cohere, normed heads": (
        Arch.COMMAND_R,
        "cohere",
        TIED | {"logit_scale": 0.5, "use_qk_norm": True},
        {},
    ),
    "cohere2": (Arch.COHERE2, "cohere2", TIED | WINDOWED | {"logit_scale": 0.25}, {}),
    "stablelm": (
        Arch.STABLELM,
        "stablelm",
        {"use_qkv_bias": True, "num_attention_heads": 3, "num_key_value_heads": 3},
        {},
    ),
    "stablelm, side by side": (
        Arch.STABLELM,
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True},
        {"use_parallel_residual": True},
    ),
    "smollm3": (Arch.SMOLLM3, "smollm3", TIED | {"num_hidden_layers": 5, "sliding_window": None}, {}),
    "exaone4": (
        Arch.EXAONE4,
        "exaone4",
        WINDOWED,
        {"attention__sliding_window_pattern": [True, True, True, False, True]},
    ),
    "exaone4 without windows": (
        Arch.EXAONE4,
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {},
    ),
    "ernie": (Arch.ERNIE4_5, "ernie4_5", TIED | {"head_dim": 16, "use_bias": True}, {}),
    "glm": (Arch.CHATGLM, "glm", {"head_dim": 16}, {}),
    "glm4": (Arch.GLM4, "glm4", {"head_dim": 16, "attention_bias": True}, {}),
    "nemotron": (Arch.NEMOTRON, "nemotron", {"head_dim": 8}, {}),
    "nemotron-h": (
        Arch.NEMOTRON_H,
        "nemotron_h",
        NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        NEMOTRON_KEYS | NO_EXPERTS | {"feed_forward_length": [0, 96, 0, 96]},
    ),
    "mamba2": (
        Arch.MAMBA2,
        "mamba2",
        ALONE | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8},
        ALONE_KEYS | SCAN | {"ssm__inner_size": 96, "attention__key_length": None},
    ),
    "mamba": (Arch.MAMBA, "mamba", ALONE | {"state_size": 8}, ALONE_KEYS | FIRST_SCAN),
    "mamba without a bias": (
        Arch.MAMBA,
        "mamba",
        ALONE | {"state_size": 8, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False},
        ALONE_KEYS | FIRST_SCAN | {"ssm__conv_kernel": 3, "ssm__dt_b_c_rms": False},
    ),
    "falcon mamba": (
        Arch.MAMBA,
        "falcon_mamba",
        ALONE | {"state_size": 8},
        ALONE_KEYS | FIRST_SCAN | {"ssm__dt_b_c_rms": True},
    ),
    "arcee": (Arch.ARCEE, "arcee", {"head_dim": 8}, {}),
    "jais2": (Arch.JAIS2, "jais2", {"head_dim": 8}, {}),
    "hunyuan": (Arch.HUNYUAN_DENSE, "hunyuan_v1_dense", {"head_dim": 16}, {}),
    "olmo3": (
        Arch.OLMO2,
        "olmo3",
        WINDOWED
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        {"attention__sliding_window_pattern": [True, True, True, False, True]},
    ),
    "lfm2": (
        Arch.LFM2,
        "lfm2",
        SHORT | {"block_auto_adjust_ff_dim": False} | TIED,
        SHORT_KEYS | {"feed_forward_length": 96},
    ),
    "qwen3.5": (
        Arch.QWEN35,
        "qwen3_5_text",
        DELTA_NET | {"num_hidden_layers": 4},
        DELTA_KEYS,
    ),
    "qwen3.5, one head for each": (
        Arch.QWEN35,
        "qwen3_5_text",
        DELTA_NET | THIRD | TIED | {"linear_num_key_heads": 6},
        DELTA_KEYS | {"ssm__group_count": 6, "full_attention_interval": 2},
    ),
    "qwen3.5, listed": (
        Arch.QWEN35,
        "qwen3_5_text",
        DELTA_NET | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        DELTA_KEYS | {"attention__recurrent_layers": [False, True, True]},
    ),
    "qwen3-vl": (
        Arch.QWEN3VL,
        "qwen3",
        {"head_dim": 16, "use_sliding_window": False},
        SEES,
    ),
    "qwen2.5-vl": (
        Arch.QWEN2VL,
        "qwen2",
        {"use_sliding_window": False},
        {"rope__dimension_sections": [2, 1, 1, 0], "attention__sliding_window": None},
    ),
    "exaone": (Arch.EXAONE, "exaone", {}, {}),
    "seed-oss": (Arch.SEED_OSS, "seed_oss", {"head_dim": 16}, {}),
    "ministral3": (
        Arch.MISTRAL3,
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
        {"rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.3},
    ),
    "mistral": (Arch.MISTRAL3, "mistral", {"head_dim": 16, "sliding_window": None}, {}),
    "gpt2": (
        Arch.GPT2,
        "gpt2",
        TIED,
        {
            "context_length": 512,
            "embedding_length": 48,
            "feed_forward_length": 192,
            "attention__head_count": 6,
            "attention__head_count_kv": None,
            "attention__layer_norm_epsilon": 1e-5,
            "attention__layer_norm_rms_epsilon": None,
            "rope__freq_base": None,
        },
    ),
    "phi2": (Arch.PHI2, "phi", {"num_key_value_heads": 6}, {"rope__dimension_count": 4}),
    "neox": (
        Arch.GPTNEOX,
        "gpt_neox",
        {"rotary_pct": 0.5, "num_key_value_heads": ...},
        {"use_parallel_residual": True, "rope__freq_base": None},
    ),
    "neox, not parallel": (
        Arch.GPTNEOX,
        "gpt_neox",
        {"rotary_pct": 1.0, "use_parallel_residual": False, "num_key_value_heads": ...},
        {"use_parallel_residual": False, "rope__dimension_count": 8},
    ),
    "apertus": (Arch.APERTUS, "apertus", {"head_dim": 8, "rope_parameters": PLAIN}, {}),
}


GEMMA4_SIZES = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 10,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 311,
} | TIED
GEMMA4_KEYS = {
    "attention__key_length": 16,
    "attention__value_length": 16,
    "attention__key_length_swa": 8,
    "attention__value_length_swa": 8,
    "attention__sliding_window_pattern": [True, False] * 3,
    "embedding_length_per_layer_input": 12,
    "rope__dimension_count": 16,
    "rope__dimension_count_swa": 8,
    "rope__freq_base_swa": 1e4,
}
DENSE |= {
    "gemma4": (Arch.GEMMA4, "gemma4_text", GEMMA4_SIZES | {"final_logit_softcapping": 5.0}, GEMMA4_KEYS),
    "gemma4 sharing keys and values": (
        Arch.GEMMA4,
        "gemma4_text",
        GEMMA4_SIZES | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        GEMMA4_KEYS | {"attention__shared_kv_layers": 3, "feed_forward_length": [96] * 3 + [192] * 3},
    ),
    "gemma3n": (
        Arch.GEMMA3N,
        "gemma3n_text",
        {key: value for key, value in GEMMA4_SIZES.items() if key != "global_head_dim"}
        | {"laurel_rank": 8, "num_kv_shared_layers": 2, "intermediate_size": [96] * 6}
        | {"activation_sparsity_pattern": [0.9, 0.5, 0.0] * 2},
        {
            "feed_forward_length": 96,
            "altup__active_idx": 0,
            "altup__num_inputs": 4,
            "activation_sparsity_scale": [1.2815515, 0.0, -float("inf")] * 2,
            "attention__shared_kv_layers": 2,
            "attention__sliding_window_pattern": [True, False] * 3,
            "embedding_length_per_layer_input": 12,
            "rope__freq_base": 1e6,
            "rope__freq_base_swa": 1e4,
        },
    ),
    "gemma4 with experts": (
        Arch.GEMMA4,
        "gemma4_text",
        GEMMA4_SIZES
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        GEMMA4_KEYS
        | {"attention__head_count_kv": [2, 1] * 3, "embedding_length_per_layer_input": 0}
        | {"expert_used_count": 2},
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a family by its name: a folder with its checkpoint, HF's model, the architecture and more keys."""

    @cache
    def save(name: str) -> tuple[Path, Any, Arch, dict[str, Any]]:
        arch, model_type, layout, keys = {**DENSE, **MIXTURES}[name]
        folder = tmp_path_factory.mktemp("family")
        return folder, save_checkpoint(folder, model_type, **layout), arch, keys

    return save


@torch.no_grad()
def check(hf: Any, path: Path, tolerance: float = 2e-4) -> None:
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    found = Eager(load_model(open_source(path))).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_a_model_that_sees_says_that_its_file_does_not(saved: Saved) -> None:
    folder, hf, arch, keys = saved("qwen3-vl")
    assert "pictures are refused" in open_source(write(folder, hf, arch, **keys)).notes[0]
    with pytest.raises(ConfigError, match="dimension_sections"):  # of another architecture
        open_source(write(folder, hf, Arch.QWEN3, **keys))


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_dense_families_equal_transformers(name: str, saved: Saved) -> None:
    folder, hf, arch, keys = saved(name)
    check(hf, write(folder, hf, arch, **keys))


ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
GROUPS = ROUTED | {"n_group": 4, "topk_group": 2}
LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LATENT_KEYS = {
    "attention__head_count_kv": 1,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 16,
    "rope__dimension_count": 8,
}
DENSE["minicpm3"] = (
    Arch.MINICPM3,
    "minicpm3",
    LATENT | TIED | {"q_lora_rank": 24, "rope_parameters": LONGROPE | {"attention_factor": 1.0}},
    {"attention__key_length": 24, "rope__dimension_count": 8}
    | dict.fromkeys(("rope__scaling__original_context_length", "rope__scaling__attn_factor")),
)
INDEXED = {"q_lora_rank": 24, "index_topk": 16, "index_n_heads": 12, "index_head_dim": 16}
INDEXER_KEYS = {
    "attention__indexer__head_count": 12,
    "attention__indexer__key_length": 16,
    "attention__indexer__top_k": 16,
}
GROWING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SIGMOID = {"expert_gating_func": 2}
HYBRID = GRANITE | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
SSM = SCAN | {"ssm__inner_size": 96, "attention__head_count_kv": [0, 2, 0]}
JAMBA = {"attn_layer_period": 3, "mamba_d_state": 8}
MIXTURES: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    "lfm2moe": (
        Arch.LFM2MOE,
        "lfm2_moe",
        SHORT
        | {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | TIED,
        SHORT_KEYS | SIGMOID | {"leading_dense_block_count": 1},
    ),
    "qwen3-next": (
        Arch.QWEN3NEXT,
        "qwen3_next",
        DELTA_NET | EXPERTS | THIRD | {"shared_expert_intermediate_size": 72},
        DELTA_KEYS | {"full_attention_interval": 2, "rope__dimension_sections": None},
    ),
    "qwen3.5 moe": (
        Arch.QWEN35MOE,
        "qwen3_5_moe_text",
        DELTA_NET | EXPERTS | THIRD | {"shared_expert_intermediate_size": 72, "intermediate_size": ...},
        DELTA_KEYS | {"full_attention_interval": 2},
    ),
    "mimo": (
        Arch.MIMO2,
        "mimo_v2_flash",
        {key: value for key, value in ROUTED.items() if key != "n_shared_experts"}
        | {"num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 12, "num_key_value_heads": 1}
        | {
            "sliding_window": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
        SIGMOID
        | {"attention__head_count_kv": [1, 2, 2, 1], "attention__sliding_window": 7}
        | {"attention__sliding_window_pattern": [0, 1, 1, 0], "attention__value_length": 12}
        | {"attention__value_scale": 0.707, "rope__dimension_count": 8, "rope__freq_base_swa": 1e4}
        | dict.fromkeys(("expert_group_count", "expert_group_used_count")),
    ),
    "glm-5": (
        Arch.GLM_DSA,
        "glm_moe_dsa",
        LATENT | ROUTED | INDEXED | {"first_k_dense_replace": 1, "index_topk_freq": 2},
        LATENT_KEYS
        | SIGMOID
        | INDEXER_KEYS
        | {"expert_weights_norm": True}
        | {"attention__indexer__types": [True, True, False]},
    ),
    "glm-5, types not said": (
        Arch.GLM_DSA,
        "glm_moe_dsa",
        LATENT | ROUTED | INDEXED | {"first_k_dense_replace": 2, "index_topk_freq": 2},
        LATENT_KEYS | INDEXER_KEYS | {"expert_weights_norm": True},
    ),
    "deepseek-v3.2": (
        Arch.GLM_DSA,
        "deepseek_v32",
        LATENT
        | GROUPS
        | INDEXED
        | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        LATENT_KEYS
        | SIGMOID
        | INDEXER_KEYS
        | {"architecture": "deepseek32", "expert_weights_norm": True}
        | {"rope__scaling__yarn_log_multiplier": 0.1},
    ),
    "mistral 4": (
        Arch.MISTRAL4,
        "mistral4",
        LATENT | ROUTED | {"q_lora_rank": 24, "rope_parameters": YARN | GROWING},
        LATENT_KEYS
        | {"rope__scaling__yarn_log_multiplier": 0.1, "expert_weights_norm": True}
        | {"attention__temperature_scale": 0.3, "attention__temperature_length": 32},
    ),
    "kimi linear": (
        Arch.KIMI_LINEAR,
        "kimi_linear",
        LATENT
        | {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 3, "linear_conv_kernel_dim": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"num_hidden_layers": 4, "first_k_dense_replace": 1}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
        LATENT_KEYS
        | SIGMOID
        | {"attention__head_count_kv": [0, 1] * 2, "attention__value_length": 72, "context_length": 512}
        | {"expert_used_count": 2, "expert_shared_count": 1, "kda__head_dim": 8, "ssm__conv_kernel": 4},
    ),
    "glm-4.7-flash": (
        Arch.DEEPSEEK2,
        "glm4_moe_lite",
        LATENT | ROUTED | {"q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        LATENT_KEYS | SIGMOID | {"leading_dense_block_count": 1, "expert_weights_norm": True},
    ),
    "llama4": (
        Arch.LLAMA4,
        "llama4_text",
        {"head_dim": 8, "intermediate_size": 40, "intermediate_size_mlp": 96, "num_local_experts": 4}
        | {"interleave_moe_layer_step": 2, "num_hidden_layers": 5, "rope_parameters": PLAIN},
        {"feed_forward_length": 96, "expert_feed_forward_length": 40, "interleave_moe_layer_step": 2},
    ),
    "hunyuan moe": (
        Arch.HUNYUAN_MOE,
        "hunyuan_v1_moe",
        {"num_experts": 6, "moe_topk": 2, "head_dim": 8},
        {
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
        },
    ),
    "ling 2": (
        Arch.BAILINGMOE2,
        "bailing_moe",
        GROUPS
        | {"head_dim": 8, "first_k_dense_replace": 1}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        SIGMOID
        | {
            "expert_weights_norm": True,
            "expert_shared_feed_forward_length": 32,
            "rope__dimension_count": 4,
        },
    ),
    "exaone moe": (
        Arch.EXAONE_MOE,
        "exaone_moe",
        WINDOWED
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
        | {"first_k_dense_replace": 1},
        SIGMOID
        | {"attention__sliding_window_pattern": [True, True, True, False, True], "expert_shared_count": 1}
        | {"expert_weights_norm": True},
    ),
    "mixtral": (Arch.LLAMA, "mixtral", {"num_local_experts": 5, "head_dim": 8}, {}),
    "qwen2moe": (
        Arch.QWEN2MOE,
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 72, "use_sliding_window": False},
        {"attention__sliding_window": None},
    ),
    "qwen3moe": (
        Arch.QWEN3MOE,
        "qwen3_moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        {"attention__sliding_window": None},
    ),
    "qwen3-vl moe": (
        Arch.QWEN3VLMOE,
        "qwen3_moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        SEES,
    ),
    "olmoe": (Arch.OLMOE, "olmoe", {"num_experts": 6, "num_experts_per_tok": 2}, {}),
    "gpt-oss": (
        Arch.GPT_OSS,
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"rope_parameters": YARN | {"truncate": False}},
        {"expert_feed_forward_length": 96},
    ),
    "deepseek": (
        Arch.DEEPSEEK,
        "deepseek",
        ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 2},
        {"expert_weights_scale": 1.0},
    ),
    "deepseek-v2": (
        Arch.DEEPSEEK2,
        "deepseek_v2",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 3.0,
        },
        LATENT_KEYS,
    ),
    "deepseek-v3": (
        Arch.DEEPSEEK2,
        "deepseek_v3",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        LATENT_KEYS | SIGMOID | {"expert_weights_norm": True, "rope__scaling__yarn_log_multiplier": 0.1},
    ),
    "moonlight": (
        Arch.DEEPSEEK2,
        "deepseek_v3",
        LATENT
        | ROUTED
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
        },
        LATENT_KEYS | SIGMOID,
    ),
    "glm-4.5": (
        Arch.GLM4_MOE,
        "glm4_moe",
        ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        SIGMOID | {"expert_weights_norm": True},
    ),
    "glm-4.5-air": (
        Arch.GLM4_MOE,
        "glm4_moe",
        GROUPS | {"head_dim": 8, "first_k_dense_replace": 2},
        {"expert_weights_norm": True},
    ),
    "dots": (
        Arch.DOTS1,
        "dots1",
        ROUTED | {"head_dim": 8, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1},
        SIGMOID | {"expert_weights_norm": True, "attention__sliding_window": None},
    ),
    "granite moe": (
        Arch.GRANITE_MOE,
        "granitemoe",
        GRANITE | {"num_local_experts": 5, "attention_bias": True},
        {},
    ),
    "granite moe shared": (
        Arch.GRANITE_MOE,
        "granitemoeshared",
        GRANITE | {"num_local_experts": 5, "shared_intermediate_size": 64},
        {},
    ),
    "granite hybrid": (Arch.GRANITE_HYBRID, "granitemoehybrid", HYBRID | {"num_local_experts": 5}, SSM),
    "granite hybrid, dense, rotated": (
        Arch.GRANITE_HYBRID,
        "granitemoehybrid",
        HYBRID
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False}
        | {"mamba_n_groups": 1},
        SSM | {"ssm__group_count": 1, "rope__scaling__finetuned": True, "expert_count": 0},
    ),
    "nemotron-h moe": (
        Arch.NEMOTRON_H_MOE,
        "nemotron_h",
        NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56}
        | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        NEMOTRON_KEYS | {"feed_forward_length": [0, 40, 0, 40], "expert_weights_norm": True},
    ),
    "nemotron-h moe, latent": (
        Arch.NEMOTRON_H_MOE,
        "nemotron_h",
        NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 32},
        NEMOTRON_KEYS | {"feed_forward_length": [0, 40, 0, 40], "expert_weights_norm": True},
    ),
    "jamba": (
        Arch.JAMBA,
        "jamba",
        JAMBA | {"num_experts": 4, "num_hidden_layers": 4, "attn_layer_offset": 1},
        FIRST_SCAN | {"attention__head_count_kv": [0, 2, 0, 0], "rope__freq_base": None},
    ),
    "jamba, no experts": (
        Arch.JAMBA,
        "jamba",
        JAMBA | {"num_experts": 1, "attn_layer_offset": 0, "mamba_dt_rank": 5, "mamba_conv_bias": False},
        FIRST_SCAN
        | {"attention__head_count_kv": [2, 0, 0], "rope__freq_base": None, "ssm__time_step_rank": 5},
    ),
    "phimoe": (
        Arch.PHIMOE,
        "phimoe",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}
        | {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2}},
        {"attention__sliding_window": 0, "rope__dimension_count": 8},
    ),
    "phimoe, plain": (
        Arch.PHIMOE,
        "phimoe",
        {"num_local_experts": 5, "sliding_window": 9},
        {"rope__scaling__original_context_length": 512},
    ),
    "minimax": (
        Arch.MINIMAXM2,
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
        SIGMOID | {"rope__dimension_count": 8, "expert_feed_forward_length": 96},
    ),
    "ernie moe": (
        Arch.ERNIE4_5_MOE,
        "ernie4_5_moe",
        TIED | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
        {},
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_mixtures_equal_transformers(name: str, saved: Saved) -> None:
    folder, hf, arch, keys = saved(name)
    check(hf, write(folder, hf, arch, **keys))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma2", "attn_logit_softcapping", 7.0),
        ("gemma2", "attention__sliding_window", 5),
        ("granite", "residual_scale", 0.7),
        ("cohere2", "logit_scale", 0.9),
        ("stablelm", "rope__dimension_count", 16),
        ("starcoder2", "attention__sliding_window", 4),
        ("exaone4", "attention__sliding_window_pattern", [True, False, True, False, True]),
        ("qwen3moe", "expert_weights_norm", False),
        ("glm-4.5", "expert_weights_scale", 2.5),
        ("deepseek-v3", "expert_group_used_count", 3),
        ("deepseek-v3", "rope__scaling__yarn_log_multiplier", 0.0),
        ("gpt-oss", "attention__sliding_window", 5),
        ("gpt-oss", "attention__sliding_window_pattern", 3),
        ("falcon mamba", "ssm__dt_b_c_rms", False),
        ("phi3, longrope", "rope__scaling__original_context_length", 32),
        ("ministral3", "attention__temperature_scale", 3.0),
        ("neox", "use_parallel_residual", False),
        ("gemma3n", "activation_sparsity_scale", [0.5, 0.0, 1.0] * 2),
        ("gemma4", "final_logit_softcapping", 3.0),
        ("gemma4", "rope__freq_base_swa", 50.0),
        ("gemma4", "attention__sliding_window", 5),
        ("apertus", "rope__freq_base", 50.0),
        ("phimoe", "rope__scaling__attn_factor", 1.0),
        ("glm-5", "attention__indexer__top_k", 5),
        ("mimo", "attention__value_scale", 0.5),
        ("mimo", "attention__sliding_window", 3),
        ("mimo", "rope__freq_base_swa", 50.0),
        ("mistral 4", "attention__temperature_scale", 3.0),
        ("kimi linear", "expert_weights_norm", False),
    ],
)
def test_keys_change_what_they_name(name: str, key: str, value: Any, saved: Saved) -> None:
    folder, hf, arch, keys = saved(name)
    plain, other = (
        Eager(load_model(open_source(write(folder, hf, arch, **given)))).prompt_logprobs(PROMPTS)
        for given in (keys, keys | {key: value})
    )
    assert (plain - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmo2", "logit_scale", 2.0),
        ("smollm3", "attention__sliding_window", 8),
        ("phi3", "rope__scaling__type", "longrope"),
        ("phi3, longrope", "rope__scaling__type", "yarn"),
        ("phi3, longrope", "rope__scaling__attn_factor", None),
        ("phimoe", "rope__scaling__original_context_length", None),
        ("phimoe", "attention__layer_norm_rms_epsilon", None),
        ("glm4", "rope__dimension_sections", [8, 12, 12, 0]),
        ("cohere", "attention__sliding_window_pattern", 4),
        ("arcee", "expert_count", 4),
        ("ministral3", "rope__scaling__type", "linear"),
        ("gemma3n", "activation_sparsity_scale", [0.0, 1.0]),
        ("gemma3n", "altup__num_inputs", 1),
        ("gemma3n", "attention__shared_kv_layers", 6),
        ("gemma4", "rope__dimension_count", 8),
        ("gemma4", "attention__sliding_window_pattern", [True, False]),
        ("gemma4", "attention__head_count_kv", [2, 2, 1, 2, 2, 2]),
        ("gemma4", "attention__value_length_swa", 16),
        ("gemma4", "feed_forward_length", [96] * 5 + [192]),
        ("qwen3.5", "ssm__group_count", 4),
        ("qwen3.5", "ssm__inner_size", None),
        ("qwen3.5, listed", "attention__recurrent_layers", [False, True]),
        ("hunyuan moe", "expert_shared_count", 2),
        ("nemotron", "rope__dimension_count", 10),
        ("granite", "attention__layer_norm_rms_epsilon", None),
        ("qwen3moe", "expert_weights_scale", 2.0),
        ("qwen2moe", "leading_dense_block_count", 1),
        ("qwen2moe", "expert_used_count", None),
        ("olmoe", "expert_gating_func", 2),
        ("dots", "expert_gating_func", 1),
        ("mixtral", "expert_weights_norm", False),
        ("deepseek-v2", "expert_weights_norm", True),
        ("deepseek-v3", "attention__scale", 0.2),
        ("deepseek-v3", "attention__head_count_kv", 3),
        ("deepseek-v3", "attention__indexer__top_k", 16),
        ("glm-5", "attention__indexer__types", [True, False]),
        ("mimo", "attention__head_count_kv", [1, 2, 2, 2]),
        ("mimo", "attention__head_count_kv", [1, 2]),
        ("mimo", "attention__sliding_window_pattern", [0, 1]),
        ("mimo", "rope__dimension_count", 30),
        ("mimo", "attention__value_length", None),
        ("glm-5", "attention__indexer__top_k", None),
        ("mistral 4", "attention__temperature_length", 64),
        ("kimi linear", "attention__q_lora_rank", 24),
        ("kimi linear", "attention__head_count_kv", [0, 1, 0]),
        ("kimi linear", "kda__head_dim", None),
        ("glm-4.5", "expert_shared_feed_forward_length", 64),
        ("gpt-oss", "swiglu_clamp_exp", [7.0, 7.0, 7.0]),
        ("granite hybrid", "attention__head_count_kv", [0, 2]),
        ("granite hybrid", "attention__head_count_kv", [0, 2, 1]),
        ("granite hybrid", "ssm__group_count", 4),
        ("granite hybrid", "ssm__inner_size", 60),
        ("falcon-h1", "ssm__time_step_rank", None),
        ("nemotron-h", "feed_forward_length", [0, 96, 0]),
        ("nemotron-h", "feed_forward_length", [96, 96, 96, 96]),
        ("nemotron-h", "feed_forward_length", 96),
        ("nemotron-h", "attention__layer_norm_epsilon", 1e-3),
        ("nemotron-h", "expert_count", 6),
        ("nemotron-h moe", "expert_feed_forward_length", 48),
        ("nemotron-h moe", "expert_shared_feed_forward_length", None),
        ("nemotron-h moe", "expert_shared_count", 2),
        ("jamba", "attention__head_count_kv", [0, 2, 0]),
        ("jamba", "attention__head_count_kv", [0, 2, 2, 0]),
        ("jamba", "expert_feed_forward_length", 40),
        ("jamba", "ssm__time_step_rank", None),
        ("jamba, no experts", "expert_count", 4),
        ("mamba2", "attention__head_count", 6),
        ("mamba2", "ssm__group_count", None),
        ("mamba2", "ssm__dt_b_c_rms", True),
        ("mamba", "ssm__inner_size", 100),
        ("falcon mamba", "ssm__time_step_rank", None),
        ("falcon mamba", "ssm__group_count", 1),
    ],
)
def test_keys_of_other_mathematics_are_refused_by_name(name: str, key: str, value: Any, saved: Saved) -> None:
    folder, hf, arch, keys = saved(name)
    with pytest.raises(ConfigError, match=re.escape(key.replace("__", "."))):
        open_source(write(folder, hf, arch, **keys | {key: value}))


def join_rows(tensors: dict[str, np.ndarray]) -> None:
    """As newer converters may: q, k and v as one, and gate and up of the experts."""
    for layer in range(3):
        qkv = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(qkv)
        both = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, 1)


def join_keys_and_values(tensors: dict[str, np.ndarray]) -> None:
    """As older converters did."""
    for layer in range(3):
        keys, values = (tensors.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        both = np.concatenate([keys.swapaxes(1, 2), values], 1)
        tensors[f"blk.{layer}.attn_kv_b.weight"] = both.reshape(-1, both.shape[2])


def join_gates(tensors: dict[str, np.ndarray]) -> None:
    """As older converters did, in HF's order."""
    for layer in (0, 2):
        qkv, z = (tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in ("qkv", "gate"))
        q, k, v = np.split(qkv, [16, 32])
        parts = [part.reshape(2, -1, part.shape[1]) for part in (q, k, v, z)]
        tensors[f"blk.{layer}.ssm_in.weight"] = np.concatenate(parts, 1).reshape(-1, qkv.shape[1])


def add_predictor(tensors: dict[str, np.ndarray]) -> None:
    """A layer that guesses a further token, which is left out."""
    last = {name: values for name, values in tensors.items() if name.startswith("blk.2.")}
    tensors |= {name.replace("blk.2.", "blk.3."): values for name, values in last.items()}
    tensors["blk.3.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)


def add_predictors(tensors: dict[str, np.ndarray]) -> None:
    """Three of them, with windows."""
    for name in ("attn_norm.weight", "attn_q.weight", "nextn.eh_proj.weight"):
        tensors |= {f"blk.{layer}.{name}": np.zeros((48, 96), np.float32) for layer in (4, 5, 6)}


def add_two_parts(tensors: dict[str, np.ndarray]) -> None:
    """A layer that guesses a further token, which has attention and experts."""
    last = {name: values for name, values in tensors.items() if name.startswith(("blk.2.", "blk.3."))}
    tensors |= {f"blk.4.{name[6:]}": values for name, values in last.items()}


def add_unread(tensors: dict[str, np.ndarray]) -> None:
    """Keys and values of layers that read others'."""
    for layer in (3, 4, 5):
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.{layer}.{part}"] = tensors[f"blk.{layer % 2}.{part}"]


OLD = {"attention__head_count_kv": 3, "attention__key_length": 24, "attention__value_length": 16}
OLD |= {"attention__key_length_mla": None, "attention__value_length_mla": None}


@pytest.mark.parametrize(
    ("name", "change", "more"),
    [
        ("mixtral", join_rows, {}),
        ("deepseek-v3", join_keys_and_values, OLD),
        ("qwen3-next", join_gates, {}),
        ("gemma4 sharing keys and values", add_unread, {}),
        ("qwen3.5 moe", add_predictor, {"block_count": 4, "nextn_predict_layers": 1}),
        ("glm-4.5", add_predictor, {"block_count": 4, "nextn_predict_layers": 1}),
        (
            "mimo",
            add_predictors,
            {"block_count": 7, "nextn_predict_layers": 3, "attention__head_count_kv": [1, 2, 2, 1, 2, 2, 2]}
            | {"attention__sliding_window_pattern": [0, 1, 1, 0, 1, 1, 1]},
        ),
        (
            "nemotron-h moe",
            add_two_parts,
            {"block_count": 5, "nextn_predict_layers": 1, "attention__head_count_kv": [0, 0, 2, 0, 2]}
            | {"feed_forward_length": [0, 40, 0, 40, 40]},
        ),
    ],
)
def test_other_converters_tensors(
    name: str, change: Callable[..., None], more: dict[str, Any], saved: Saved
) -> None:
    folder, hf, arch, keys = saved(name)
    check(hf, write(folder, hf, arch, change=change, **keys | more))


def test_groups_of_experts_that_the_file_does_not_say_are_told(saved: Saved) -> None:
    folder, hf, arch, keys = saved("deepseek-v3")
    assert open_source(write(folder, hf, arch, **keys)).notes == ()
    lacking = keys | {"expert_group_count": None, "expert_group_used_count": None}
    (note,) = open_source(write(folder, hf, arch, **lacking)).notes
    assert "lacks deepseek2.expert_group_count" in note


def test_magnitudes_of_longrope_that_the_file_does_not_say_are_told(saved: Saved) -> None:
    for name, count in (("phimoe", 1), ("phimoe, plain", 0), ("phi3, longrope", 0)):
        folder, hf, arch, keys = saved(name)
        notes = open_source(write(folder, hf, arch, **keys)).notes
        assert ["phimoe.rope.scaling.attn_factor, 1.2" in note for note in notes] == [True] * count


def test_a_table_of_longrope_that_is_missing_is_named(saved: Saved) -> None:
    folder, hf, arch, keys = saved("phimoe")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        with pytest.raises(WeightError, match=f"1 missing: {name}"):
            open_source(write(folder, hf, arch, change=lambda tensors, name=name: tensors.pop(name), **keys))


def test_a_tensor_that_one_layer_lacks_is_named(saved: Saved) -> None:
    folder, hf, arch, keys = saved("glm-4.5")
    for name in (
        "blk.1.exp_probs_b.bias",
        "blk.2.attn_k.bias",
        "blk.0.ffn_gate.weight",
        "blk.1.attn_q_norm.weight",
    ):
        with pytest.raises(WeightError, match=f"1 missing: {name}"):
            open_source(write(folder, hf, arch, change=lambda tensors, name=name: tensors.pop(name), **keys))


@pytest.mark.parametrize(
    ("name", "kind", "storage"),
    [
        ("qwen3moe", Type.Q4_0, "q4_0"),
        ("qwen3moe", Type.Q8_0, "q8_0"),
        ("qwen3moe", Type.F16, "f32"),
        ("gpt-oss", Type.MXFP4, "e2m1"),
        ("deepseek-v2", Type.Q5_0, "q5_0"),
    ],
)
@torch.no_grad()
def test_stacks_of_quantized_experts(
    name: str, kind: Type, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept as the file has them, on GPUs in integers of 4 or 8 bits, and the logits are HF's with
    the values that the package decodes."""
    arch, model_type, layout, keys = MIXTURES[name]
    width = "intermediate_size" if name == "gpt-oss" else "moe_intermediate_size"
    hf = save_checkpoint(tmp_path, model_type, **layout | {"hidden_size": 96, width: 64})
    if name == "gpt-oss":
        keys = keys | {"expert_feed_forward_length": 64}
    path = write(tmp_path, hf, arch, kind, **keys)
    for layer in hf.model.layers:
        for parameter in layer.mlp.experts.parameters() if hasattr(layer.mlp, "experts") else ():
            if parameter.dim() == 3:
                crossed = name == "gpt-oss"  # [input, output]
                values = parameter.transpose(1, 2) if crossed else parameter
                read = torch.from_numpy(dequantize(quantize(values.contiguous().numpy(), kind), kind))
                parameter.copy_(read.transpose(1, 2) if crossed else read)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    model = load_model(open_source(path), "float32", None if kind == Type.F16 else "gguf")
    assert model.blocks[-1].mlp.gate_up.kind == model.blocks[-1].mlp.down.kind == storage
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-3)
    rows = Eager(model).generate(PROMPTS, 6)
    assert [row.tokens for row in Eager(model, native=True).generate(PROMPTS, 6)] == [
        row.tokens for row in rows
    ]
    if kind != Type.F16:
        monkeypatch.setattr(load, "_device_kind", lambda: "cuda")
        packed = load_model(open_source(path), "float32", "gguf")
        assert packed.blocks[-1].mlp.gate_up.kind == ("int4g32" if kind == Type.Q4_0 else "int8g32")
        torch.testing.assert_close(Eager(packed).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-3)


@torch.no_grad()
def test_matrices_in_nvfp4_have_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As converters of ModelOpt's checkpoints write them: one of a matrix, one of each expert's, and those of
    activations, which are not rounded."""
    arch, model_type, layout, keys = MIXTURES["qwen3moe"]
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
    hf = save_checkpoint(tmp_path, model_type, **layout | sizes)
    packed = r"(_exps|attn_q|attn_output)\.weight"
    generator = np.random.default_rng(0)

    def factors(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if re.search(packed, name)]:
            stem, count = name.removesuffix(".weight"), len(tensors[name]) if "_exps" in name else 1
            tensors[f"{stem}.scale"] = generator.uniform(0.5, 2.0, count).astype(np.float32)
            tensors[f"{stem}.input_scale"] = np.ones(count, np.float32)

    def meant(tensors: dict[str, np.ndarray]) -> None:
        factors(tensors)
        for name in [name for name in tensors if re.search(packed, name)]:
            values = dequantize(blocks_of(tensors[name], Type.NVFP4), Type.NVFP4)
            scale = tensors.pop(name.replace(".weight", ".scale"))
            tensors.pop(name.replace(".weight", ".input_scale"))
            tensors[name] = values * scale.reshape(-1, *[1] * (values.ndim - 1))

    file = tmp_path / "packed.gguf"
    write(tmp_path, hf, arch, Type.NVFP4, change=factors, packed=packed, **keys).rename(file)
    generator = np.random.default_rng(0)
    plain = write(tmp_path, hf, arch, change=meant, **keys)
    expected = Eager(load_model(open_source(plain))).prompt_logprobs(PROMPTS)
    floats, kept = (load_model(open_source(file), "float32", kind) for kind in (None, "gguf"))
    last = kept.blocks[-1]
    assert {last.mlp.gate_up.kind, last.mlp.down.kind, last.attention.out.weight.kind} == {"nvfp4"}
    for model in (floats, kept):
        torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=0, atol=1e-4)
    rows, native = (Eager(kept, native=each).generate(PROMPTS, 6) for each in (False, True))
    assert [row.tokens for row in native] == [row.tokens for row in rows]
    monkeypatch.setattr(load, "_device_kind", lambda: "cuda")
    assert load_model(open_source(file), "float32", "gguf").blocks[-1].mlp.down.kind == "nvfp4"

    def wrong(tensors: dict[str, np.ndarray]) -> None:
        factors(tensors)
        tensors["blk.0.attn_q.scale"] = np.ones(2, np.float32)

    with pytest.raises(WeightError, match=r"blk.0.attn_q.scale has shape \[2\], expected \[1\]"):
        load_model(open_source(write(tmp_path, hf, arch, Type.NVFP4, change=wrong, packed=packed, **keys)))


@pytest.mark.parametrize("name", ["qwen3.5 moe", "qwen3-next"])
@pytest.mark.parametrize("kind", [Type.NVFP4, Type.Q4_0, Type.Q5_1, Type.TQ1_0])
@torch.no_grad()
def test_quantized_delta_nets(name: str, kind: Type, tmp_path: Path) -> None:
    """Whose heads are brought in HF's order: as the same numbers in a file of floats."""
    arch, model_type, layout, keys = MIXTURES[name]
    sizes = {"hidden_size": 256, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
    hf = save_checkpoint(tmp_path, model_type, **layout | sizes)
    keys = keys | {"ssm__time_step_rank": 4, "ssm__inner_size": 256}
    packed = r"attn_qkv|attn_gate|ssm_out|ssm_alpha|ssm_ba"

    def decoded(tensors: dict[str, np.ndarray]) -> None:
        for tensor in tensors:
            if re.search(packed, tensor):
                tensors[tensor] = dequantize(blocks_of(tensors[tensor], kind), kind)

    plain, file = write(tmp_path, hf, arch, change=decoded, **keys), tmp_path / "packed.gguf"
    write(tmp_path, hf, arch, kind, packed=packed, **keys).rename(file)
    models = [load_model(open_source(path)) for path in (plain, file)]
    expected, found = (Eager(model).prompt_logprobs(PROMPTS) for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    kept = load_model(open_source(file), "float32", "gguf").blocks[0].attention
    plain = models[0].blocks[0].attention
    for exact, rounded in ((plain.inputs, kept.inputs), (plain.out.weight, kept.out.weight)):
        assert rounded.kind != "f32"
        assert (exact.dequant() - rounded.dequant()).norm() < 0.01 * exact.dequant().norm()


@torch.no_grad()
def test_matrices_that_are_multiplied_as_one_keep_the_numbers_of_each(tmp_path: Path) -> None:
    """A latent's matrices, of which the file has one in 8 bits."""
    arch, model_type, layout, keys = MIXTURES["kimi linear"]
    hf = save_checkpoint(tmp_path, model_type, **layout | {"hidden_size": 96})
    file = tmp_path / "packed.gguf"
    wide = dict.fromkeys(("attn_kv_a_mqa.weight", "ssm_g_a.weight"), Type.Q8_0)
    packed = r"attn_q\.|attn_kv_a_mqa|ssm_[fg]_a|ssm_beta"
    write(tmp_path, hf, arch, Type.Q4_0, packed=packed, wide=wide, **keys).rename(file)
    kept, floats = (load_model(open_source(file), "float32", kind) for kind in ("gguf", None))
    assert kept.blocks[1].attention.down.weight.kind == kept.blocks[0].attention.narrow.weight.kind == "q8_0"
    expected = Eager(floats).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(kept).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-3)


@torch.no_grad()
def test_quantized_experts_of_gemma4(tmp_path: Path) -> None:
    arch, model_type, layout, keys = DENSE["gemma4 with experts"]
    hf = save_checkpoint(tmp_path, model_type, **layout | {"hidden_size": 96, "moe_intermediate_size": 32})
    file = tmp_path / "packed.gguf"
    write(tmp_path, hf, arch, Type.Q8_0, **keys | {"expert_feed_forward_length": 32}).rename(file)
    kept, floats = (load_model(open_source(file), "float32", kind) for kind in ("gguf", None))
    assert kept.blocks[0].experts.moe.gate_up.kind == kept.blocks[0].experts.moe.down.kind == "q8_0"
    expected = Eager(floats).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(kept).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-3)


@torch.no_grad()
def test_experts_of_gemma4_in_nvfp4_are_scaled_once(tmp_path: Path) -> None:
    """Their factors are in the scales that the model has for each expert anyway."""
    arch, model_type, layout, keys = DENSE["gemma4 with experts"]
    hf = save_checkpoint(tmp_path, model_type, **layout | {"hidden_size": 128, "moe_intermediate_size": 64})
    keys = keys | {"expert_feed_forward_length": 64}

    def scaled(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("ffn_down_exps.scale")]:
            tensors[name] = np.linspace(0.01, 0.02, len(tensors[name]), dtype=np.float32)

    def meant(tensors: dict[str, np.ndarray]) -> None:
        scaled(tensors)
        for name in [name for name in tensors if name.endswith("_exps.weight")]:
            tensors[name] = dequantize(blocks_of(tensors[name], Type.NVFP4), Type.NVFP4)

    packed = write(tmp_path, hf, arch, Type.NVFP4, change=scaled, **keys)
    expected = Eager(load_model(open_source(write(tmp_path, hf, arch, change=meant, **keys))))
    kept = load_model(open_source(packed), "float32", "gguf")
    assert kept.blocks[0].experts.moe.down.kind == "nvfp4"
    found = Eager(kept).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(found, expected.prompt_logprobs(PROMPTS), rtol=0, atol=1e-4)


HOSTILE = (
    0,
    1,
    3,
    2**31 - 1,
    2**63,
    -1,
    1e-300,
    1e300,
    float("nan"),
    True,
    "x",
    [1],
    [True] * 3,
    [0.5, "x", 2],
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gemma2", "exaone4", "deepseek-v3") else pytest.param(name, marks=pytest.mark.slow)
        for name in {**DENSE, **MIXTURES}
    ],
)
def test_any_value_of_any_key_is_read_or_refused(name: str, saved: Saved) -> None:
    folder, hf, arch, keys = saved(name)
    path = write(folder, hf, arch, **keys)
    plain, own = read_gguf(path, layouts()), gguf.MODEL_ARCH_NAMES[arch]
    known = {f"{own}.{key}" for key in rules(read_gguf(path, layouts()).layout)} | plain.metadata.keys()
    for key in sorted(key for key in known if key.startswith(f"{own}.")):
        for value in HOSTILE:
            changed = copy(plain)
            changed.metadata = {**plain.metadata, key: value}
            try:
                read_decoder(changed.config)
            except ConfigError:
                pass
