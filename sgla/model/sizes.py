"""How many bytes a model's weights and its KV cache take, from its shape. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.model.encoder import EncoderSpec
from sgla.model.registry import architecture_of, check_architecture, is_encoder
from sgla.model.spec import ModelSpec

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "int4": 0.625, "fp8": 1.0}  # of one weight


def read_spec(config: Mapping[str, Any]) -> ModelSpec | EncoderSpec:
    """The shape of the model that a config.json describes. Raises ConfigError."""
    name = architecture_of(config)
    check_architecture(name)
    return EncoderSpec.from_config(config) if is_encoder(name) else ModelSpec.from_config(config)


def weight_bytes(spec: ModelSpec | EncoderSpec, dtype: str, quantization: str | None, ranks: int) -> int:
    """Bytes of one rank's matrices; norms and scales are left out."""
    if isinstance(spec, EncoderSpec):
        return int(spec.values * BYTES[quantization or dtype])
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    mixed = len(spec.moe.layers) if spec.moe else 0
    mlps = (spec.layers - mixed) * spec.intermediate
    if spec.moe:
        mlps += mixed * spec.moe.experts * spec.moe.intermediate
    table = spec.vocab * spec.hidden * BYTES["int8" if quantization in ("int8", "int4") else dtype]
    head = 0.0 if spec.tied else table / ranks
    layers = spec.layers * attention + 3 * spec.hidden * mlps
    return int(layers * BYTES[quantization or dtype] / ranks + table + head)


def kv_bytes_per_token(spec: ModelSpec, dtype: str, kv_cache_dtype: str = "auto") -> int:
    """Of all layers and ranks together."""
    value = BYTES["fp8" if kv_cache_dtype == "fp8" else dtype]
    return int(2 * spec.layers * spec.kv_heads * spec.head_dim * value)
