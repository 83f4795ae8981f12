"""What the keys of a GGUF file say of gated delta nets (``Layout.deltas``), and the order of their heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

RECURRENT = "attention.recurrent_layers"
KDA = "kda.head_dim"
_EVERY = 4  # layers there is one with attention, where no key says it


def is_delta(layout: Layout, keys: Mapping[str, Any], layer: int) -> bool:
    if layout.deltas == "channels":
        return not keys["attention.head_count_kv"][layer]
    if RECURRENT in keys:
        return bool(keys[RECURRENT][layer])
    return bool((layer + 1) % keys.get("full_attention_interval", _EVERY))


def delta_sizes(layout: Layout, keys: Mapping[str, Any]) -> dict[str, int]:
    """Of the letters of ``HFTensor.dims``. Raises ConfigError for heads that do not divide."""
    if layout.deltas == "channels":
        return _channel_sizes(layout, keys)
    key, heads = keys["ssm.group_count"], keys["ssm.time_step_rank"]
    inner = keys["ssm.inner_size"]
    for name, count, whole in (("group_count", key, heads), ("time_step_rank", heads, inner)):
        if whole % count:
            raise ConfigError(f"{layout.name}.ssm.{name} is {count}, and does not divide {whole}")
    if len(keys.get(RECURRENT, [0] * keys["block_count"])) != keys["block_count"]:
        raise ConfigError(f"{layout.name}.{RECURRENT} has {len(keys[RECURRENT])} values, not one a layer")
    channels = 2 * key * keys["ssm.state_size"] + inner
    return {
        "i": channels + inner,
        "c": channels,
        "w": keys["ssm.conv_kernel"],
        "j": inner,
        "z": heads,
        "Z": 2 * heads,
        "p": inner // heads,
    }


def _channel_sizes(layout: Layout, keys: Mapping[str, Any]) -> dict[str, int]:
    counts, heads, width = keys["attention.head_count_kv"], keys["attention.head_count"], keys[KDA]
    if len(counts) != keys["block_count"]:
        raise ConfigError(f"{layout.name}.attention.head_count_kv has {len(counts)} values, not one a layer")
    return {"w": keys["ssm.conv_kernel"], "j": heads * width, "z": heads, "p": width}


def layer_widths(keys: Mapping[str, Any], sizes: Mapping[str, int], layer: int) -> dict[str, int]:
    """Of the rows that Kimi's layers make of queries, and of what comes out of their heads."""
    return {} if keys["attention.head_count_kv"][layer] else dict.fromkeys("uo", sizes["j"])


def deltas(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int], layers: int) -> dict[str, Any]:
    """In HF's words: which layers are delta nets, and their shape."""
    kinds = ["linear_attention" if is_delta(layout, keys, i) else "full_attention" for i in range(layers)]
    if layout.deltas == "channels":
        return {
            "layer_types": kinds,
            "linear_conv_kernel_dim": sizes["w"],
            "linear_head_dim": sizes["p"],
            "linear_num_heads": sizes["z"],
        }
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": sizes["w"],
        "linear_key_head_dim": keys["ssm.state_size"],
        "linear_value_head_dim": sizes["p"],
        "linear_num_key_heads": keys["ssm.group_count"],
        "linear_num_value_heads": sizes["z"],
    }


def heads_in_order(dims: str, keys: Mapping[str, Any], sizes: Mapping[str, int]) -> NDArray[np.int64]:
    """Files have the first head of values of each head of keys, then the second of each; HF those of a head
    of keys together. Of rows, or of columns, with these ``dims`` (``z``, ``j`` or ``c``): where each lies in
    the file."""
    groups, heads, width = keys["ssm.group_count"], sizes["z"], 1 if dims == "z" else sizes["p"]
    order = np.arange(heads * width).reshape(heads // groups, groups, width).swapaxes(0, 1).ravel()
    before = sizes["c"] - sizes["j"] if dims == "c" else 0
    return np.concatenate([np.arange(before), before + order])
