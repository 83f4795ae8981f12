"""What becomes of the keys of ``config.json``.

The rule: a model computes what HF's class computes with this file, and a key that asks for something else is
refused by name. The keys that HF's class reads are honoured (``Family``). Those that it ignores are not: they
are passed over if no forward pass reads them (``HARMLESS``: training, sampling, where the file comes from) or
if their value describes what the class does anyway, refused if a word of their name is one that
configurations use for mathematics, and noted otherwise. Loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError, UnsupportedValue
from sgla.hub.reader import Reader, shown
from sgla.model.family import Family
from sgla.model.windows import dual_chunk

# Keys that say "none" with a null, or are worked out then.
NULLS = frozenset(
    """
    layer_types mlp_layer_types mlp_only_layers no_rope_layers rope_scaling rope_parameters
    dual_chunk_attention_config sliding_window _sliding_window_pattern q_lora_rank qk_head_dim
    attn_logit_softcapping final_logit_softcapping num_nextn_predict_layers dim_model_base scale_depth
    text_config vision_config audio_config
    """.split()  # noqa: SIM905
)
# Keys that HF's classes read in vain, or under another name, and yet not as null.
_NOT_NULL = frozenset(
    """
    is_causal rope_interleave attention_bias mlp_bias qk_layernorm use_parallel_residual num_experts
    num_local_experts num_experts_per_tok head_dim do_layer_norm_before _remove_final_layer_norm enable_bias
    layer_norm_elementwise_affine mamba_proj_bias mamba_conv_bias mamba_d_conv mamba_expand mamba_n_groups
    mamba_dt_limit n_shared_experts embedding_fraction expansion_ratio learned_pos_emb no_bias norm_type
    apply_residual_connection_post_layernorm slow_but_exact num_hidden_layers use_attention_gate
    use_sandwich_norm use_post_norm
    """.split()  # noqa: SIM905
)
# Keys whose value is a number, where HF's class fills in a null.
_QUANTITY = re.compile(r"(num|top_k)_.+|.*(_size|_dim|_rank|_window|_embeddings)")
_NOT_NULL_OF_ENCODERS = frozenset({"add_cross_attention", "is_decoder"})

# Keys without a part in the forward pass: a whole name, or the end of one.
HARMLESS = frozenset(
    """
    architectures model_type dtype torch_dtype auto_map tokenizer_class is_composition
    bos_token eos_token pad_token mask_token
    vocab_size_or_config_json_file
    quantization_config compression_config tie_word_embeddings use_flash_attention
    initializer_cutoff_factor sparse_prediction sparse_pred_ignore_index deterministic_flash_attn
    initializer_range embedding_initializer_range initializer_factor init_std use_cache pretraining_tp
    ignore_index use_parallel_embedding dense_list mask_init_id index_share_for_mtp_iteration
    gradient_checkpointing
    cache_implementation use_flash_attn flash_attn_2_enabled
    output_attentions output_hidden_states output_past output_scores output_router_logits return_dict
    return_dict_in_generate torchscript xla_device use_bfloat16 chunk_size_feed_forward
    tie_encoder_decoder tie_weights cross_attention_hidden_size fused_rms_norm fused_mlp mm_tokens_per_image
    max_sequence_length model_max_length max_length min_length do_sample early_stopping num_beams
    num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    renormalize_logits finetuning_task task_specific_params prefix problem_type num_labels id2label label2id
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type
    sentence_transformers sbert_ce_default_activation_function matryoshka_dimensions is_matryoshka
    sinusoidal_pos_embds neftune_noise_alpha router_jitter_noise input_jitter_noise
    is_llama_config transformers.js_config
    ep_size seq_aux aux_loss_alpha moe_capacity num_nextn_predict_layers num_mtp_layers num_mtp_modules
    reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
    mtp_transformer_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings use_mtp
    enable_moe_fp32_combine layerdrop
    time_step_min time_step_max time_step_floor time_step_rank time_step_scale time_step_init_scheme
    rescale_prenorm_residual residual_in_fp32 num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype
    mamba_chunk_size mlp_expansion_factor init_method moe_shared_expert_overlap z_loss_coefficient
    use_mambapy use_falcon_mambapy use_associative_scan fused_add_norm mamba_dt_min mamba_dt_max
    mamba_dt_init_floor init_device
    mtp_loss_scaling_factor mtp_loss_factor
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    """.split()  # noqa: SIM905
)
_HARMLESS_END = re.compile(
    r".*(_token_ids?|_token_index|dropout|dropout_prob|_pdrop|_loss|_coef|_coeff|_version"
    r"|_xavier_init|_init_scale|name_or_path|commit_hash)$"
    r"|(attn|experts)_implementation.*|unsloth.*|vit_.*"
)
# Words of which the names of mathematical keys consist, in the configurations of transformers.
_MATHEMATICS = frozenset(
    """
    act activation alibi alpha attention attn beta bias bidirectional block cap capping causal chunk clamp
    clip conv decoder
    dense depth dim dims embed embedding embeddings encoder eps epsilon expert experts factor ffn freq
    frequency gate gating
    global group groups head heads hidden index indexer inner interleave interleaved intermediate kernel kv
    latent layer layernorm layers
    lightning limit linear local logit logits lora mamba mask mixer mlp moe mrope mscale mtp multiplier n
    nextn ngram nope norm
    normalization normalize ntk parallel pattern position positional positions prefix prenorm q qk qkv quant
    quantization query
    rank recurrent relative residual rms rmsnorm rope rotary routed router routing sandwich scale scales
    scaling shared sink
    sinks skip sliding smear softcap softcapping sparse sparsity ssm state step swiglu temperature theta tie
    topk untie v value window width
    """.split()  # noqa: SIM905
)
# Keys that HF's classes read only where another is missing; beside it they may be a null or a text.
_INSTEAD = {"sliding_window_pattern": "layer_types"}
_FACTORS = frozenset({"multiplier", "scale", "scales", "scaling", "factor", "mscale"})


def check_keys(architecture: str, family: Family, config: Mapping[str, Any]) -> list[str]:
    """The keys of ``config`` that nobody knows and whose names do not speak of mathematics. Raises
    ConfigError for those that ask for something else than HF's class computes; UnsupportedValue, if nothing
    else is wrong, for what HF's class computes and is not computed here."""
    if (found := config.get("model_type")) is not None and found not in family.types:
        raise UnsupportedValue(
            f"config.json: model_type {shown(found)} is not that of {architecture}, which is "
            f"{' or '.join(map(repr, family.types))}; transformers would run another class",
            param="model",
        )
    unknown, lacking = [], None
    for key, value in config.items():
        name = key.strip("_")
        unread = config.get(_INSTEAD.get(key, "")) is not None
        if not (unread and (value is None or isinstance(value, str))):
            _check_kind(architecture, family, key, value)
        if key in family.defaults or name in HARMLESS or _HARMLESS_END.match(name):
            continue
        if key in family.fixed:
            if value is None or _says(family, value, family.fixed[key]):
                continue
            kind = UnsupportedValue if key in family.honoured else ConfigError
            refused = kind(
                f"config.json: {key} {shown(value)} is not supported for {architecture}; "
                f"{family.fixed[key]!r} is",
                param="model",
            )
            if kind is ConfigError:
                raise refused
            lacking = lacking or refused
        elif key in family.same:
            other = family.same[key]
            meant = {**family.defaults, **config}[other]
            if value is not None and not _says(family, value, meant):
                raise ConfigError(
                    f"config.json: {key} is {shown(value)} and {other} {shown(meant)}; transformers reads "
                    f"one of them for {architecture}, mostly {other}: remove the other one",
                    param="model",
                )
        elif _MATHEMATICS.isdisjoint(re.findall(r"[a-z]+", name.lower())):
            unknown.append(key)
        elif not _off(name, value):
            raise ConfigError(
                f"config.json: {shown(key)} ({shown(value)}) may change what the model computes, and "
                f"{architecture} has no such key, here or in transformers; remove it if the weights were "
                "trained without it",
                param="model",
            )
    if lacking is not None:
        raise lacking
    return unknown


def _says(family: Family, value: Any, meant: Any) -> bool:
    """A list has a value for each layer."""
    if isinstance(value, list) and value and not isinstance(meant, list):
        return all(_says(family, each, meant) for each in value)
    return bool(value == meant or (isinstance(value, str) and family.words.get(value) == meant))


def _check_kind(architecture: str, family: Family, key: str, value: Any) -> None:
    """Of a key that HF's class has, whether it uses it or not. Raises ConfigError."""
    if value is None:
        if not may_be_null(family, key):
            raise ConfigError(
                f"config.json: {key} null is not supported for {architecture}; give it a value, or leave "
                "it out",
                param="model",
            )
    elif key in family.defaults and (wanted := _unlike(family, key, value)):
        raise Reader(architecture, {key: value}).error(key, wanted)


def _unlike(family: Family, key: str, value: Any) -> str:
    """What the key has, if that is another kind of value; else ""."""
    default = family.defaults[key]
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float) or (default is None and _QUANTITY.fullmatch(key)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number or (isinstance(value, list) and (family.layers_differ or key in family.by_layer)):
            return ""
        return "a whole number" if _QUANTITY.fullmatch(key) else "a number"
    if isinstance(default, str) and default != "auto":
        return "" if isinstance(value, str) else "a text"
    return "an object" if key == "rope_parameters" and not isinstance(value, dict) else ""


def may_be_null(family: Family, key: str) -> bool:
    """Whether HF's class runs with a null there, and then as is computed here."""
    if key in NULLS or key in family.nulls:
        return True
    refused = _NOT_NULL if family.model else _NOT_NULL_OF_ENCODERS
    read = key in refused and (key in family.fixed or key in family.same)
    read = read or (key in family.honoured and key.endswith(("hidden_act", "hidden_activation")))
    return key not in family.defaults and not read


def _off(name: str, value: Any) -> bool:
    """Whether a value says that there is none of what its key names."""
    if _FACTORS.isdisjoint(name.lower().split("_")):
        return value is None or value in (False, "", [], {})
    return value is None or value is False or (value is not True and value in (1, [], {}))


def noted(
    architecture: str, family: Family, config: Mapping[str, Any], unknown: list[str]
) -> tuple[str, ...]:
    """What to say of a file that is served:
    of its ``unknown`` keys, and of what it names that is not used."""
    found = []
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        names = ", ".join(key[:40] for key in unknown[:8])
        found.append(f"config.json: keys that neither transformers nor sgla reads: {names}{more}")
    if config.get("auto_map"):
        same = "it" if family.of_checkpoints else f"transformers' own {architecture}"
        found.append(
            "config.json: auto_map names code that comes with the checkpoint; it is never run, and the "
            f"model computes what {same} does"
        )
    if chunk := dual_chunk(Reader(architecture, config)):
        found.append(
            f"config.json: dual_chunk_attention_config changes attention beyond {chunk} tokens, which is "
            "not supported, so the context ends there"
        )
    return tuple(found)
