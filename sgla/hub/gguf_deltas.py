"""What the keys of a GGUF file say of gated delta nets (``Layout.deltas``), and the order of their heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

RECURRENT = "attention.recurrent_layers"
_EVERY = 4  # layers there is one with attention, where no key says it


def is_delta(keys: Mapping[str, Any], layer: int) -> bool:
    if RECURRENT in keys:
        return bool(keys[RECURRENT][layer])
    return bool((layer + 1) % keys.get("full_attention_interval", _EVERY))


def delta_sizes(layout: Layout, keys: Mapping[str, Any]) -> dict[str, int]:
    """Of the letters of ``HFTensor.dims``. Raises ConfigError for heads that do not divide."""
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


def deltas(keys: Mapping[str, Any], sizes: Mapping[str, int], layers: int) -> dict[str, Any]:
    """In HF's words: which layers are delta nets, and their shape."""
    return {
        "layer_types": ["linear_attention" if is_delta(keys, i) else "full_attention" for i in range(layers)],
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
