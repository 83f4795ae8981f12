"""GGUF files of the families: tiny random checkpoints, converted as llama.cpp's ``convert_hf_to_gguf.py`` does, against HF transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from gguf import MODEL_ARCH as Arch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from gguf.quants import quantize
from safetensors.torch import load_file

from sgla.errors import ConfigError
from sgla.model.load import load_model
from sgla.model.source import open_source

PROMPTS = random_prompts([1, 7, 33])
PERMUTED = (Arch.LLAMA, Arch.GRANITE, Arch.GRANITE_MOE, Arch.SMOLLM3, Arch.ARCEE)
ADD_ONE = (Arch.GEMMA, Arch.GEMMA2, Arch.NEMOTRON)
# Keys of the metadata by those of HF's configuration, as the converter writes them for every model that has these.
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
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


def write(folder: Path, hf: Any, arch: Arch, quantized: Type | None = None, **changes: Any) -> Path:
    """``changes``: of the keys, with ``__`` for dots; ``None`` leaves one out. ``quantized``: the type of matrices of experts."""
    config = hf.config.to_dict()
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[arch])
    rope = config["rope_parameters"]
    keys = {name: config[key] for key, name in KEYS.items() if config.get(key) is not None}
    keys |= {"block_count": layers, "rope.freq_base": float(rope["rope_theta"])}
    if "partial_rotary_factor" in rope:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        keys["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in keys.items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            item = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(f"{writer.arch}.{key}", value, kind, item)
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in converted(load_file(folder / "model.safetensors"), arch, config).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        values = np.ascontiguousarray(tensor.squeeze().numpy())
        if quantized is not None and "_exps.weight" in found:
            writer.add_tensor(found, quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def converted(
    tensors: dict[str, torch.Tensor], arch: Arch, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """HF's tensors, as ``modify_tensors`` of the converter's classes leaves them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads")}
    for name, tensor in tensors.items():
        if arch in PERMUTED and (part := re.search(r"\.([qk])_proj\.", name)):
            tensor = tensor.unflatten(0, (heads[part[1]], 2, -1)).transpose(1, 2).flatten(0, 2)
        if arch in ADD_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("sinks"):
            name += ".weight"
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            experts.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = tensor
        elif name.endswith("kv_b_proj.weight"):
            still = config["qk_nope_head_dim"]
            both = tensor.unflatten(0, (config["num_attention_heads"], -1))
            found[name.replace("kv_b", "k_b")] = both[:, :still].transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, still:]
        elif "input_linear" in name and arch == Arch.GRANITE_MOE:
            shared = "shared_mlp" in name
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2)):
                hf = "shared_mlp.input_linear" if shared else "block_sparse_moe.input_linear"
                ours = f"mlp.shared_experts.{part}_proj" if shared else f"mlp.experts.{part}_proj"
                found[name.replace(hf, ours)] = half
        elif arch == Arch.GRANITE_MOE and "output_linear" in name and "shared" not in name:
            found[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = tensor
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


WINDOWED = {"num_hidden_layers": 5, "sliding_window": 10}
TIED = {"tie_word_embeddings": True}
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
DENSE: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    "gemma": (Arch.GEMMA, "gemma", TIED | {"head_dim": 16}, {}),
    "gemma2": (Arch.GEMMA2, "gemma2", TIED | WINDOWED | {"head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "phi3": (Arch.PHI3, "phi3", {"sliding_window": 9}, {}),
    "olmo2": (Arch.OLMO2, "olmo2", {}, {}),
    "granite": (Arch.GRANITE, "granite", GRANITE | {"mlp_bias": True, "attention_bias": True}, {}),
    "starcoder2": (Arch.STARCODER2, "starcoder2", TIED, {}),
    "cohere": (Arch.COMMAND_R, "cohere", TIED | {"logit_scale": 0.5}, {}),
    "cohere2": (Arch.COHERE2, "cohere2", TIED | WINDOWED | {"logit_scale": 0.25}, {}),
    "stablelm": (Arch.STABLELM, "stablelm", {"use_qkv_bias": True, "num_attention_heads": 3, "num_key_value_heads": 3}, {}),
    "smollm3": (Arch.SMOLLM3, "smollm3", TIED | {"num_hidden_layers": 5, "sliding_window": None}, {}),
    "exaone4": (Arch.EXAONE4, "exaone4", WINDOWED, {"attention__sliding_window_pattern": [True, True, True, False, True]}),
    "exaone4 without windows": (
        Arch.EXAONE4, "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {},
    ),
    "ernie": (Arch.ERNIE4_5, "ernie4_5", TIED | {"head_dim": 16, "use_bias": True}, {}),
    "glm": (Arch.CHATGLM, "glm", {"head_dim": 16}, {}),
    "glm4": (Arch.GLM4, "glm4", {"head_dim": 16, "attention_bias": True}, {}),
    "nemotron": (Arch.NEMOTRON, "nemotron", {"head_dim": 8}, {}),
    "arcee": (Arch.ARCEE, "arcee", {"head_dim": 8}, {}),
    "seed-oss": (Arch.SEED_OSS, "seed_oss", {"head_dim": 16}, {}),
}  # fmt: skip


@torch.no_grad()
def check(folder: Path, hf: Any, path: Path, tolerance: float = 2e-4) -> None:
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    found = Eager(load_model(open_source(path))).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_dense_families_equal_transformers(name: str, tmp_path: Path) -> None:
    arch, model_type, layout, keys = DENSE[name]
    hf = save_checkpoint(tmp_path, model_type, **layout)
    check(tmp_path, hf, write(tmp_path, hf, arch, **keys))


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
    ],
)
def test_keys_change_what_they_name(name: str, key: str, value: Any, tmp_path: Path) -> None:
    arch, model_type, layout, keys = DENSE[name]
    hf = save_checkpoint(tmp_path, model_type, **layout)
    plain, other = (
        Eager(load_model(open_source(write(tmp_path, hf, arch, **given)))).prompt_logprobs(PROMPTS)
        for given in (keys, keys | {key: value})
    )
    assert (plain - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmo2", "attention__sliding_window", 4096),
        ("olmo2", "logit_scale", 2.0),
        ("smollm3", "attention__sliding_window", 8),
        ("phi3", "rope__scaling__type", "longrope"),
        ("stablelm", "use_parallel_residual", True),
        ("glm4", "rope__dimension_sections", [8, 12, 12, 0]),
        ("cohere", "attention__sliding_window_pattern", 4),
        ("arcee", "expert_count", 4),
        ("nemotron", "rope__dimension_count", 10),
        ("granite", "attention__layer_norm_rms_epsilon", None),
    ],
)
def test_keys_of_other_mathematics_are_refused_by_name(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    arch, model_type, layout, keys = DENSE[name]
    hf = save_checkpoint(tmp_path, model_type, **layout)
    with pytest.raises(ConfigError, match=re.escape(key.replace("__", "."))):
        open_source(write(tmp_path, hf, arch, **keys | {key: value}))
