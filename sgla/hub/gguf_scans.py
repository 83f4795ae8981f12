"""What the keys of a GGUF file say of Mambas (``Layout.scans``), and of short convolutions
(``Layout.convolves``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_deltas import is_delta
from sgla.hub.gguf_layout import Layout

_COUNTS = "attention.head_count_kv"
_WIDTHS = "feed_forward_length"


def most(value: Any) -> Any:
    """Of a list over layers, which is one number wherever it is not 0."""
    return max(value) if isinstance(value, list) else value


def mixer_of(layout: Layout, keys: Mapping[str, Any], layer: int) -> str:
    if layout.scans == "only":
        return "mamba"
    if layout.deltas:
        return "delta" if is_delta(layout, keys, layer) else "attention"
    if layout.scans == "alone" and keys[_WIDTHS][layer]:
        return "mlp"
    other = "conv" if layout.convolves else "mamba" if layout.scans in ("instead", "alone") else ""
    return other if other and not keys[_COUNTS][layer] else "attention"


def _check_lists(layout: Layout, keys: Mapping[str, Any], layers: int) -> None:
    """Raises ConfigError for lists that are not one number a layer, and for layers with two parts where they
    have one."""
    for key in (_COUNTS, _WIDTHS):
        if isinstance(found := keys.get(key), list) and len(found) != keys["block_count"]:
            raise ConfigError(f"{layout.name}.{key} has {len(found)} values, not one a layer")
    if layout.scans != "alone":
        return
    for i in range(layers):
        if keys[_COUNTS][i] and keys[_WIDTHS][i]:
            raise ConfigError(
                f"{layout.name}.{_COUNTS} and {layout.name}.{_WIDTHS} both say that layer {i} is theirs"
            )
    width = most(keys[_WIDTHS])
    if keys.get(f"expert_{_WIDTHS}", width) != width:
        raise ConfigError(
            f"{layout.name}.expert_{_WIDTHS} is {keys[f'expert_{_WIDTHS}']}, and {layout.name}.{_WIDTHS} "
            f"{width}"
        )


def _convolutions(layout: Layout, keys: Mapping[str, Any]) -> dict[str, Any]:
    """In HF's words: which layers are convolutions, and that the width of MLPs is said as it is. Raises
    ConfigError."""
    counts = keys[_COUNTS]
    if len(counts) != keys["block_count"]:
        raise ConfigError(f"{layout.name}.{_COUNTS} has {len(counts)} values, not one a layer")
    found: dict[str, Any] = {"layer_types": ["full_attention" if count else "conv" for count in counts]}
    key = "block_auto_adjust_ff_dim"
    return found | ({key: False} if key in layout.known else {})


def scan_sizes(layout: Layout, keys: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Of the letters of ``Place.dims``, and of an MLP that mixtures share. Raises ConfigError for what does
    not divide."""
    if layout.convolves:
        return {"w": keys["shortconv.l_cache"]}
    _check_lists(layout, keys, layers)
    inner = keys["ssm.inner_size"]
    if layout.scans in ("instead", "only") and inner % keys["embedding_length"]:
        raise ConfigError(f"{layout.name}.ssm.inner_size is {inner}, not a multiple of the width")
    sizes = _first_mamba(keys) if layout.first_mamba else _mamba(layout, keys)
    if "shared_intermediate_size" in layout.known and not layout.mixture:
        sizes["f"] = keys.get("expert_shared_feed_forward_length") or keys[_WIDTHS]
    return sizes


def _first_mamba(keys: Mapping[str, Any]) -> dict[str, int]:
    inner, state, rank = (keys[f"ssm.{name}"] for name in ("inner_size", "state_size", "time_step_rank"))
    return {
        "i": 2 * inner,
        "c": inner,
        "w": keys["ssm.conv_kernel"],
        "j": inner,
        "S": state,
        "R": rank,
        "T": rank + 2 * state,
    }


def _mamba(layout: Layout, keys: Mapping[str, Any]) -> dict[str, int]:
    inner, heads, groups = (keys[f"ssm.{name}"] for name in ("inner_size", "time_step_rank", "group_count"))
    for name, count, whole in (("time_step_rank", heads, inner), ("group_count", groups, heads)):
        if whole % count:
            raise ConfigError(f"{layout.name}.ssm.{name} is {count}, and does not divide {whole}")
    channels = inner + 2 * groups * keys["ssm.state_size"]
    return {
        "i": inner + channels + heads,
        "c": channels,
        "w": keys["ssm.conv_kernel"],
        "j": inner,
        "z": heads,
        "x": groups,
        "p": inner // groups,
    }


def _periods(layout: Layout, keys: Mapping[str, Any], layers: int, sparse: list[int]) -> dict[str, int]:
    """In HF's words: which layers have attention, and which have experts."""
    found = _every(layout, _COUNTS, "attn_layer", [i for i in range(layers) if keys[_COUNTS][i]], layers)
    if keys["expert_count"] == 1 and not sparse:
        return found
    return found | _every(layout, "expert_count", "expert_layer", sparse, layers)


def _every(layout: Layout, key: str, name: str, chosen: list[int], layers: int) -> dict[str, int]:
    """Raises ConfigError for layers that no period and offset give."""
    offset = chosen[0] if chosen else layers
    period = chosen[1] - offset if len(chosen) > 1 else layers
    if chosen != list(range(offset, layers, period)) or offset >= period:
        raise ConfigError(
            f"{layout.name}.{key}: the layers {chosen} are not every so many-th one, which alone is supported"
        )
    return {f"{name}_period": period, f"{name}_offset": offset}


def scans(
    layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int], layers: int, sparse: list[int]
) -> dict[str, Any]:
    """In HF's words: which layers are Mambas, and their shape; or which are convolutions. ``sparse``: layers
    with experts."""
    if not layout.scans:
        return _convolutions(layout, keys) if layout.convolves else {}
    found: dict[str, Any] = {"state_size": keys["ssm.state_size"], "conv_kernel": sizes["w"]}
    if layout.first_mamba:
        found["mamba_dt_rank" if layout.periodic else "time_step_rank"] = sizes["R"]
    else:
        each = sizes["j"] // sizes["z"]
        found |= {"num_heads": sizes["z"], "mamba_head_dim": each, "n_groups": sizes["x"]}
    if layout.scans in ("instead", "only"):
        found["expand"] = sizes["j"] // sizes["d"]
    found = {layout.names.get(name, name): size for name, size in found.items()}
    if layout.scans == "beside":
        return found | {"mamba_d_ssm": sizes["j"], "mamba_norm_before_gate": False}
    if layout.scans == "only":
        return found | {"intermediate_size": sizes["j"]}
    if layout.scans == "alone":
        kind = "moe" if layout.mixture else "mlp"
        mixers = [mixer_of(layout, keys, i) for i in range(layers)]
        kinds = [kind if mixer == "mlp" else mixer for mixer in mixers]
        return found | {"layers_block_type": kinds, "intermediate_size": sizes["f"]}
    if layout.periodic:
        return found | _periods(layout, keys, layers, sparse)
    if not layout.mixture:
        found |= {"num_local_experts": 0, "shared_intermediate_size": sizes["f"]}
    return found | {
        "layer_types": ["attention" if heads else "mamba" for heads in keys[_COUNTS]],
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else "nope",
    }
