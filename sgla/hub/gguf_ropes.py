"""What the keys of a GGUF file say of rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout


def rope_scaling(
    layout: Layout, keys: Mapping[str, Any], factors: list[float] | None
) -> dict[str, Any] | None:
    """In HF's words. As in llama.cpp a factor without a type is linear, and a factor of 0 is none."""
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and attention != 1.0:
        raise ConfigError(f"{layout.name}.rope.scaling.attn_factor is supported with yarn alone")
    plain = kind == "none" or (kind == "linear" and factor == 1.0)
    if factors is not None:  # Llama 3.x: the scaling comes as a table
        if not plain:
            raise ConfigError("rope_freqs.weight and rope.scaling at once are not supported")
        return {"rope_type": "factors", "factors": factors}
    if plain:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        given = {hf: keys.get(f"rope.scaling.{name}") for name, hf in names.items()}
        scaling |= {hf: value for hf, value in given.items() if value is not None}
        scaling |= layout.yarn
        warmer = keys.get("rope.scaling.yarn_log_multiplier", 0.0)
        if warmer:
            scaling["mscale_all_dim"] = 10 * warmer
        stretched = factor > 1 and not layout.latent
        scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0 if stretched else 1.0)
    return scaling
