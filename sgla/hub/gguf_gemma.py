"""What the keys of a GGUF file say of Gemma 4 (``Layout.kinds``): layers with windows have heads of their
own, and the last layers read what others keep; and of Gemma 3n (``Layout.altup``), whose residual stream is
several wide."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout
from sgla.hub.gguf_ropes import FREQS, Tables

PATTERN, HEADS, WIDTH = (
    "attention.sliding_window_pattern",
    "attention.head_count_kv",
    "feed_forward_length",
)
SHARED = "attention.shared_kv_layers"
SPARSE = "activation_sparsity_scale"  # how many deviations from the mean values must be to count
PER_LAYER = "embedding_length_per_layer_input"
_STILL = 1e30  # by which frequencies are divided that do not turn


def slides(keys: Mapping[str, Any], layer: int) -> bool:
    return bool(keys[PATTERN][layer])


def reads(keys: Mapping[str, Any], layers: int, layer: int) -> bool:
    """Whether a layer reads what another keeps."""
    return layer >= layers - keys.get(SHARED, 0)


def layer_sizes(keys: Mapping[str, Any], layer: int) -> dict[str, int]:
    """Of the letters of ``HFTensor.dims``."""
    head_dim = keys["attention.key_length_swa" if slides(keys, layer) else "attention.key_length"]
    return {
        "q": keys["attention.head_count"] * head_dim,
        "k": _of(keys[HEADS], layer) * head_dim,
        "h": head_dim,
        "f": _of(keys[WIDTH], layer),
    }


def _of(value: Any, layer: int) -> int:
    found: int = value[layer] if isinstance(value, list) else value
    return found


def check_lists(layout: Layout, keys: Mapping[str, Any]) -> None:
    """Raises ConfigError for lists that are not one number a layer."""
    for key in (PATTERN, HEADS, WIDTH):
        if isinstance(found := keys.get(key), list) and len(found) != keys["block_count"]:
            raise ConfigError(f"{layout.name}.{key} has {len(found)} values, not one a layer")
    if (shared := keys.get(SHARED, 0)) >= keys["block_count"]:
        raise ConfigError(f"{layout.name}.{SHARED} is {shared}, of {keys['block_count']} layers")


def kinds(
    layout: Layout,
    keys: Mapping[str, Any],
    layers: int,
    tables: Tables,
    joined: bool,
    per_layer: int,
) -> dict[str, Any]:
    """In HF's words: the heads of both kinds, how they turn, and how wide MLPs are. ``joined``: one matrix
    makes keys and values of layers without windows; ``per_layer``: tokens that have values of their own for
    each layer. Raises ConfigError for what HF's class has not."""
    name = layout.name
    for length in ("attention.value_length", "attention.value_length_swa"):
        key = length.replace("value", "key")
        if keys.get(length, keys[key]) != keys[key]:
            raise ConfigError(f"{name}.{length} is {keys[length]}, and only {keys[key]} is supported")
    sliding = [i for i in range(layers) if slides(keys, i)]
    whole = [i for i in range(layers) if not slides(keys, i)]
    heads = [_one(f"{name}.{HEADS}", [_of(keys[HEADS], i) for i in chosen]) for chosen in (sliding, whole)]
    narrow, wide = keys["attention.key_length_swa"], keys["attention.key_length"]
    shared = keys.get(SHARED, 0)
    inner = _one(f"{name}.{WIDTH}", [_of(keys[WIDTH], i) for i in range(layers - shared)])
    most = _one(f"{name}.{WIDTH}", [_of(keys[WIDTH], i) for i in range(layers - shared, layers)])
    if most not in (0, inner, 2 * inner):
        raise ConfigError(f"{name}.{WIDTH} of the last layers is {most}, neither {inner} nor {2 * inner}")
    own = {"head_dim": wide, "num_key_value_heads": heads[1]}
    return {
        "head_dim": narrow,
        "num_key_value_heads": heads[0] or heads[1],
        "per_layer_config": {str(i): own for i in whole},
        "layer_types": ["sliding_attention" if slides(keys, i) else "full_attention" for i in range(layers)],
        "attention_k_eq_v": joined,
        "num_kv_shared_layers": shared,
        "intermediate_size": inner,
        "use_double_wide_mlp": most == 2 * inner,
        "hidden_size_per_layer_input": keys.get(PER_LAYER, 0),
        "vocab_size_per_layer_input": per_layer or 1,
        "enable_moe_block": bool(keys.get("expert_count")),
        "rope_parameters": {
            "sliding_attention": _plain(name, keys, "_swa", narrow, 1e4),
            "full_attention": _plain(name, keys, "", wide, 1e6)
            | {"rope_type": "proportional", "partial_rotary_factor": _share(tables[FREQS])},
        },
    }


def stream_sizes(keys: Mapping[str, Any], rank: int) -> dict[str, int]:
    """Of the letters of ``HFTensor.dims``."""
    inputs = keys["altup.num_inputs"]
    return {"A": inputs, "B": inputs**2, "e": inputs - 1, "U": rank}


def streams(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int], layers: int) -> dict[str, Any]:
    """In HF's words. Raises ConfigError for lists that are not one number a layer."""
    far = keys[SPARSE]
    if len(far) != layers:
        raise ConfigError(f"{layout.name}.{SPARSE} has {len(far)} values, not one a layer")
    return {
        "activation_sparsity_pattern": [NormalDist().cdf(value) for value in far],
        "altup_active_idx": keys["altup.active_idx"],
        "altup_num_inputs": keys["altup.num_inputs"],
        "hidden_size_per_layer_input": sizes["W"],
        "laurel_rank": sizes["U"],
        "num_kv_shared_layers": keys.get(SHARED, 0),
        "vocab_size_per_layer_input": sizes["V"] or 1,
    }


def _one(key: str, values: list[int]) -> int:
    """The number that all are; 0 of none. Raises ConfigError."""
    if len(set(values)) > 1:
        raise ConfigError(f"{key} has {len(set(values))} different values for layers of one kind")
    return values[0] if values else 0


def _plain(name: str, keys: Mapping[str, Any], kind: str, head_dim: int, base: float) -> dict[str, Any]:
    rotated = keys.get(f"rope.dimension_count{kind}", head_dim)
    if rotated != head_dim:
        raise ConfigError(f"{name}.rope.dimension_count{kind} is {rotated}, and only {head_dim} is supported")
    return {"rope_type": "default", "rope_theta": keys.get(f"rope.freq_base{kind}", base)}


def _share(factors: list[float]) -> float:
    """Of a head: the first of its frequencies turn as they are, the others not at all."""
    turning = factors.count(1.0)
    if any(value != 1.0 for value in factors[:turning]) or any(value < _STILL for value in factors[turning:]):
        raise ConfigError(f"{FREQS}: frequencies turn as they are, or not at all")
    return turning / len(factors)
