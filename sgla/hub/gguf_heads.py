"""Heads of the model of a GGUF file, in HF words: their size, what of it turns, and the scale of queries."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout


def heads(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int], layers: int) -> dict[str, Any]:
    """Of keys and values for each. ``sizes``: by the letters of ``HFTensor.dims``. Raises ConfigError."""
    head_dim, count = sizes["h"], keys["attention.head_count"]
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"heads of {head_dim} values are not supported; their size must be even")
    found: dict[str, Any] = {}
    if "num_key_value_heads" in layout.known:
        found["num_key_value_heads"] = sizes["k"] // head_dim
    share = layout.names.get("partial_rotary_factor", "partial_rotary_factor")
    partly, sized = share in layout.known, "head_dim" in layout.known
    rotated = keys.get("rope.dimension_count", head_dim)
    _check(layout, keys, "attention.value_length", head_dim)
    if not partly and layout.rotates:
        _check(layout, keys, "rope.dimension_count", head_dim)
    if partly and rotated > head_dim:
        raise ConfigError(
            f"{layout.name}.rope.dimension_count is {rotated}, and heads have {head_dim} values"
        )
    if partly:
        found[share] = rotated / head_dim
    if sized:
        found["head_dim"] = head_dim
    else:
        _check(layout, keys, "attention.key_length", keys["embedding_length"] // count)
    return found | _scale(layout, keys, head_dim, layers)


def _check(layout: Layout, keys: Mapping[str, Any], name: str, size: int) -> None:
    if keys.get(name, size) != size:
        raise ConfigError(
            f"{layout.name}.{name} is {keys[name]}, and only the size of a head, {size}, is supported"
        )


def _scale(layout: Layout, keys: Mapping[str, Any], head_dim: int, layers: int) -> dict[str, Any]:
    """Of queries."""
    default = float(head_dim**-0.5)
    if layout.by_width == layers:
        default = float((keys["embedding_length"] / keys["attention.head_count"]) ** -0.5)
    scale = keys.get("attention.scale") or default
    if "attention_multiplier" in layout.known:
        return {"attention_multiplier": scale}
    if "query_pre_attn_scalar" in layout.known:
        scalar = scale**-2
        whole = isclose(scalar, round(scalar), rel_tol=1e-5)
        return {"query_pre_attn_scalar": round(scalar) if whole else scalar}
    if not isclose(scale, default, rel_tol=1e-5):
        raise ConfigError(
            f"{layout.name}.attention.scale is {scale:g}, and only 1/sqrt({head_dim}) is supported"
        )
    return {}


def latent_sizes(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """The letters of ``HFTensor.dims`` that latent attention has besides. Raises ConfigError where all of a
    key is rotated."""
    heads, rotated, rank = sizes["n"], keys["rope.dimension_count"], keys["attention.kv_lora_rank"]
    still = keys.get("attention.key_length_mla", sizes["h"]) - rotated
    value = keys.get("attention.value_length_mla", keys.get("attention.value_length", sizes["d"] // heads))
    scorers = keys.get("attention.indexer.head_count", 0)
    score_dim = keys.get("attention.indexer.key_length", 0)
    if still < 1:
        raise ConfigError(f"{layout.name}.rope.dimension_count is {rotated}, which is all of a head's key")
    return {
        "a": keys.get("attention.q_lora_rank", 0),
        "r": rank,
        "l": rank + rotated,
        "u": heads * (still + rotated),
        "g": still,
        "y": value,
        "o": heads * value,
        "b": heads * (still + value),
        "H": scorers,
        "D": score_dim,
        "I": scorers * score_dim,
    }


def latent(
    layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int], grouped: bool
) -> dict[str, Any]:
    """Of latents (MLA). ``grouped``: experts are chosen in groups. Raises ConfigError."""
    count, rotated, rank = keys["attention.head_count"], keys["rope.dimension_count"], sizes["r"]
    mla = "attention.key_length_mla" in keys
    said = {
        "attention.head_count_kv": 1 if mla else count,
        "attention.key_length": rank + rotated if mla else sizes["h"],
        "attention.value_length": rank if mla else sizes["y"],
    }
    if layout.deltas:  # Kimi's converter writes a width that no layer has
        del said["attention.value_length"], said["attention.head_count_kv"]
    for key, value in said.items():
        if keys.get(key, value) != value:
            raise ConfigError(f"{layout.name}.{key} is {keys[key]}, and only {value} is supported")
    if not isclose(scale := keys.get("attention.scale") or 1.0, 1.0):
        raise ConfigError(f"{layout.name}.attention.scale is {scale:g}, which is not supported")
    found: dict[str, Any] = {
        "num_key_value_heads": count,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": sizes["g"],
        "v_head_dim": sizes["y"],
    }
    if "topk_method" in layout.known:
        found["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return found
