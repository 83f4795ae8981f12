"""The keys that each method's ``quantization_config`` has. Loads no torch.

As in ``model/config_keys.py``: those that a method reads, and those that only say how its numbers were found,
are known. Those that change what the numbers mean are refused by name; all others are noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import shown
from sgla.quant.method import LISTS


@dataclass(frozen=True)
class Keys:
    """``known``: those that a method reads or that do not matter. ``fixed``: those that it does not read,
    each with the only value that it may have, if any. ``noted``: those whose values are not used, each with
    what it is."""

    known: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    noted: Mapping[str, str] = field(default_factory=dict)


_GPTQMODEL = {"adapter": None, "rotation": None, "pack_dtype": "int32"}
_CACHE = "--kv-cache-dtype fp8 quantizes the KV cache, by the file's scales if each layer has them"
_GPTQ = """bits group_size desc_act sym format checkpoint_format dynamic method meta backend damp_percent
    damp_auto_increment static_groups true_sequential act_group_aware mse parallel_packing
    offload_to_disk offload_to_disk_path pack_impl gptaq gptaq_alpha v2 v2_alpha hyb_act mock_quantization
    model_name_or_path model_file_base_name dataset tokenizer batch_size pad_token_id max_input_length
    model_seqlen cache_block_outputs block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize use_cuda_fp16 use_exllama disable_exllama exllama_config"""
_METHODS = {
    "gptq": Keys(f"{_GPTQ} lm_head is_marlin_format", _GPTQMODEL),
    "awq": Keys(
        _GPTQ.replace(" dynamic ", " ")
        + " w_bit q_group_size version zero_point do_fuse fuse_max_seq_len modules_to_fuse",
        _GPTQMODEL | {"dynamic": {}, "lm_head": False},
    ),
    "auto-round": Keys(
        """bits group_size sym data_type packing_format extra_config block_name_to_quantize autoround_version
        amp backend batch_size dataset enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
        gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr nsamples quant_block_list
        quant_nontext_module scale_dtype seqlen to_quant_block_names act_bits act_data_type act_dynamic
        act_group_size act_sym activation_scheme fmt""",
        {"super_bits": None, "super_group_size": None},
    ),
    "fp8": Keys(
        "fmt weight_block_size activation_scheme scale_fmt dequantize config_groups expert_dtype",
        {"modules_to_convert": None},
        {"kv_cache_scheme": _CACHE},
    ),
    "mxfp8": Keys("fmt weight_block_size activation_scheme scale_fmt dequantize"),
    "fbgemm_fp8": Keys(
        "weight_block_size", noted={"activation_scale_ub": "a bound of the activations, which are not cut"}
    ),
    "modelopt": Keys(
        "quant_algo config_groups producer weight_block_size quantized_layers group_size",
        noted={"kv_cache_quant_algo": _CACHE, "kv_cache_scheme": _CACHE},
    ),
    "compressed-tensors": Keys(
        "config_groups format quantization_status global_compression_ratio version sparsity_config "
        "transform_config run_compressed dequantize use_optimized_inference provider",
        noted={"kv_cache_scheme": _CACHE},
    ),
    "mxfp4": Keys("dequantize"),
    "bitsandbytes": Keys(
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type "
        "bnb_4bit_quant_storage bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload "
        "llm_int8_has_fp16_weight llm_int8_threshold",
        {"bnb_4bit_target_parameters": None},
    ),
    "hqq": Keys("quant_config skip_modules"),
    "w4afp8": Keys(
        "group_size weight_block_size activation_scheme linear_activation_scheme moe_activation_scheme fmt "
        "moe_weight_format",
        {"linear_weight_format": "fp8"},
    ),
    "torchao": Keys("quant_type quant_type_kwargs untie_embedding_weights include_input_output_embeddings"),
}


def check_method_keys(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to say of the keys that are not used. Raises ConfigError for those that change what the numbers
    mean. A method that is registered from outside has no table."""
    keys = _METHODS.get(kind.removeprefix("intel/"))
    if keys is None:
        return ()
    known, notes, unknown = {*keys.known.split(), *LISTS, "quant_method"}, [], []
    for key, value in config.items():
        if key in known or value is None:
            continue
        if key in keys.noted:
            notes.append(f"config.json: quantization_config: {key} is not used ({keys.noted[key]})")
        elif key not in keys.fixed:
            unknown.append(key)
        elif value != keys.fixed[key] and value not in (False, "", [], {}):
            wanted = keys.fixed[key] or "none"
            raise ConfigError(
                f"config.json: quantization_config: {key} {shown(value)} is not supported for {kind}; "
                f"{wanted} is",
                param="model",
            )
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        names = ", ".join(key[:40] for key in unknown[:8])
        notes.append(
            f"config.json: quantization_config: keys of {kind} that sgla does not know: {names}{more}"
        )
    return tuple(notes)
