"""What the keys of a GGUF file say of layers of Mamba 2 (``Layout.scans``), and of short convolutions
(``Layout.convolves``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout


def mixer_of(layout: Layout, keys: Mapping[str, Any], layer: int) -> str:
    other = "conv" if layout.convolves else "mamba" if layout.scans == "instead" else ""
    return other if other and not keys["attention.head_count_kv"][layer] else "attention"


def _convolutions(layout: Layout, keys: Mapping[str, Any]) -> dict[str, Any]:
    """In HF's words: which layers are convolutions, and that the width of MLPs is said as it is. Raises
    ConfigError."""
    counts = keys["attention.head_count_kv"]
    if len(counts) != keys["block_count"]:
        raise ConfigError(f"{layout.name}.attention.head_count_kv has {len(counts)} values, not one a layer")
    found: dict[str, Any] = {"layer_types": ["full_attention" if count else "conv" for count in counts]}
    key = "block_auto_adjust_ff_dim"
    return found | ({key: False} if key in layout.known else {})


def scan_sizes(layout: Layout, keys: Mapping[str, Any]) -> dict[str, int]:
    """Of the letters of ``Place.dims``, and of an MLP that mixtures share. Raises ConfigError for what does
    not divide."""
    if layout.convolves:
        return {"w": keys["shortconv.l_cache"]}
    counts = keys.get("attention.head_count_kv")
    if isinstance(counts, list) and len(counts) != keys["block_count"]:
        raise ConfigError(f"{layout.name}.attention.head_count_kv has {len(counts)} values, not one a layer")
    inner, heads, groups = (keys[f"ssm.{name}"] for name in ("inner_size", "time_step_rank", "group_count"))
    for name, count, whole in (("time_step_rank", heads, inner), ("group_count", groups, heads)):
        if whole % count:
            raise ConfigError(f"{layout.name}.ssm.{name} is {count}, and does not divide {whole}")
    if layout.scans == "instead" and inner % keys["embedding_length"]:
        raise ConfigError(f"{layout.name}.ssm.inner_size is {inner}, not a multiple of the width")
    channels = inner + 2 * groups * keys["ssm.state_size"]
    sizes = {
        "i": inner + channels + heads,
        "c": channels,
        "w": keys["ssm.conv_kernel"],
        "j": inner,
        "z": heads,
        "x": groups,
        "p": inner // groups,
    }
    if "shared_intermediate_size" in layout.known and not layout.mixture:
        sizes["f"] = keys.get("expert_shared_feed_forward_length") or keys["feed_forward_length"]
    return sizes


def scans(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """In HF's words: which layers are Mamba 2, and their shape; or which are convolutions."""
    if not layout.scans:
        return _convolutions(layout, keys) if layout.convolves else {}
    found: dict[str, Any] = {
        "mamba_n_heads": sizes["z"],
        "mamba_d_head": sizes["j"] // sizes["z"],
        "mamba_n_groups": sizes["x"],
        "mamba_d_state": keys["ssm.state_size"],
        "mamba_d_conv": sizes["w"],
    }
    if layout.scans == "beside":
        return found | {"mamba_d_ssm": sizes["j"], "mamba_norm_before_gate": False}
    if not layout.mixture:
        found |= {"num_local_experts": 0, "shared_intermediate_size": sizes["f"]}
    return found | {
        "layer_types": ["attention" if heads else "mamba" for heads in keys["attention.head_count_kv"]],
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else "nope",
        "mamba_expand": sizes["j"] // sizes["d"],
    }
