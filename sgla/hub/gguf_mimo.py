"""What the keys of a GGUF file say of MiMo-V2 (``Layout.wider``): layers with windows have more KV heads, and
values are narrower than keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

COUNTS, PATTERN = "attention.head_count_kv", "attention.sliding_window_pattern"
VALUE_SCALE = "attention.value_scale"


def slides(keys: Mapping[str, Any], layer: int) -> bool:
    return bool(keys[PATTERN][layer])


def check_lists(layout: Layout, keys: Mapping[str, Any]) -> None:
    """Raises ConfigError for lists that are not one number a layer, and for numbers of KV heads that HF's
    class has not."""
    for key in (COUNTS, PATTERN):
        if len(keys[key]) != keys["block_count"]:
            raise ConfigError(f"{layout.name}.{key} has {len(keys[key])} values, not one a layer")
    counts, few = keys[COUNTS], _few(keys)
    if counts != [2 * few if flag else few for flag in keys[PATTERN]]:
        raise ConfigError(f"{layout.name}.{COUNTS}: layers with windows must have twice as many as others")


def _few(keys: Mapping[str, Any]) -> int:
    """KV heads of layers without windows."""
    pairs = zip(keys[COUNTS], keys[PATTERN])
    return next((count // 2 if flag else count for count, flag in sorted(pairs, key=lambda pair: pair[1])), 0)


def wider_sizes(keys: Mapping[str, Any], layer: int) -> dict[str, int]:
    """Of the letters of ``HFTensor.dims``."""
    count = keys[COUNTS][layer]
    return {
        "k": count * keys["attention.key_length"],
        "K": count * keys["attention.value_length"],
        "o": keys["attention.head_count"] * keys["attention.value_length"],
    }


def wider(layout: Layout, keys: Mapping[str, Any], layers: int, sparse: list[int]) -> dict[str, Any]:
    """In HF's words: heads, which layers have windows and which experts, and how each kind turns. The window
    of a file does not count the token itself. Raises ConfigError."""
    head_dim = keys["attention.key_length"]
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise ConfigError(
            f"{layout.name}.rope.dimension_count is {rotated}, and heads have {head_dim} values"
        )
    turns = {
        "rope_type": "default",
        "partial_rotary_factor": rotated / head_dim,
    }
    return {
        "head_dim": head_dim,
        "v_head_dim": keys["attention.value_length"],
        "num_key_value_heads": _few(keys),
        "attention_value_scale": keys.get(VALUE_SCALE) or 1.0,
        "sliding_window_size": keys["attention.sliding_window"],
        "layer_types": [f"{'sliding' if slides(keys, i) else 'full'}_attention" for i in range(layers)],
        "mlp_layer_types": ["sparse" if i in sparse else "dense" for i in range(layers)],
        "rope_parameters": {
            "full_attention": turns | {"rope_theta": keys["rope.freq_base"]},
            "sliding_attention": turns | {"rope_theta": keys.get("rope.freq_base_swa", 1e4)},
        },
    }
