"""What the keys of a GGUF file say of rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

# Tensors with numbers by which frequencies are divided: all, or those of short contexts and of long ones.
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
Tables = Mapping[str, list[float]]  # by the tensor's name


def rope_scaling(layout: Layout, keys: Mapping[str, Any], tables: Tables) -> dict[str, Any] | None:
    """In HF's words. As in llama.cpp a factor without a type is linear, and a factor of 0 is none. Raises
    ConfigError."""
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    if layout.longrope and (SHORT in tables or LONG in tables):
        return _longrope(layout, keys, factor, tables)
    kind = keys.get("rope.scaling.type", "linear")
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    if kind == "longrope":
        raise ConfigError(f"{layout.name}.rope.scaling.type is longrope, and there is no {LONG}")
    if kind != "yarn" and attention != 1.0:
        raise ConfigError(f"{layout.name}.rope.scaling.attn_factor is supported with yarn alone")
    plain = kind == "none" or (kind == "linear" and factor == 1.0)
    if FREQS in tables:  # Llama 3.x: the scaling comes as a table
        if not plain:
            raise ConfigError(f"{FREQS} and rope.scaling at once are not supported")
        return {"rope_type": "factors", "factors": tables[FREQS]}
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
        if layout.growing:
            return scaling | _growing(layout, keys, 10 * warmer if layout.latent else warmer)
        if warmer:
            scaling["mscale_all_dim"] = 10 * warmer
        stretched = factor > 1 and not layout.latent
        scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0 if stretched else 1.0)
    return scaling


def _growing(layout: Layout, keys: Mapping[str, Any], warmer: float) -> dict[str, Any]:
    """Of queries that grow with their positions."""
    scale, length = ("attention.temperature_" + name for name in ("scale", "length"))
    trained = keys.get("rope.scaling.original_context_length")
    if keys.get(length, trained) != trained:
        raise ConfigError(
            f"{layout.name}.{length} is {keys[length]}, and only rope.scaling.original_context_length, "
            f"{trained}, is supported"
        )
    magnitude = {"mscale": warmer, "mscale_all_dim": warmer} if warmer else {}
    return magnitude | {"llama_4_scaling_beta": keys.get(scale, layout.missing.get(scale))}


def _longrope(layout: Layout, keys: Mapping[str, Any], factor: float, tables: Tables) -> dict[str, Any]:
    """Phi's (arXiv 2402.13753)."""
    kind = keys.get("rope.scaling.type", "longrope")
    if kind != "longrope" or factor != 1.0:
        raise ConfigError(
            f"{layout.name}.rope.scaling.type is {kind} with a factor of {factor:g}, and {LONG} is longrope's"
        )
    trained, attention = (f"rope.scaling.{name}" for name in ("original_context_length", "attn_factor"))
    for key in (trained, attention):
        if key not in keys and key not in layout.missing:
            raise ConfigError(f"the GGUF metadata lacks {layout.name}.{key}")
    magnitudes = ("short_mscale", "long_mscale") if layout.mscales else ("attention_factor",)
    return {
        "rope_type": "longrope",
        "short_factor": tables.get(SHORT, []),
        "long_factor": tables.get(LONG, []),
        "original_max_position_embeddings": keys.get(trained, keys["context_length"]),
    } | dict.fromkeys(magnitudes, keys.get(attention, layout.missing.get(attention)))
