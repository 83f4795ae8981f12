"""Scales of an 8-bit KV cache in a file beside the model (``--quantization-param-path``), in the format of
vLLM and SGLang: by what k and v of a layer are divided on each rank. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.homes import expanded
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.spec import ModelSpec

NAME = "quantization_param_path"
# Settings that it is not together with, and why.
REFUSED = dict.fromkeys(("cp", "dcp", "dp_attention"), "its scales are of ranks that share the heads out")


class Scales(msgspec.Struct):
    """``scaling_factor``: by rank and layer."""

    dtype: str
    scaling_factor: dict[int, dict[int, float]]


class File(msgspec.Struct):
    kv_cache: Scales
    model_type: str | None = None


def check_scales(config: Config, spec: ModelSpec | EncoderSpec | None, model: Mapping[str, Any]) -> None:
    """Raise ConfigError for a file that is not for this model; ``spec`` and ``model``, the content of its
    config.json: None and empty if it is not known."""
    if config.quantization_param_path is None:
        return
    if config.kv_cache_dtype != "fp8":
        raise _unfit("is for --kv-cache-dtype fp8; give that too, or leave it out")
    check_apart(config, "--quantization-param-path", REFUSED)
    if isinstance(spec, ModelSpec):
        read_scales(config, spec, 0, model)


def read_scales(
    config: Config, spec: ModelSpec, rank: int, model: Mapping[str, Any]
) -> list[tuple[float, float]] | None:
    """Of k and v of the layers that ``rank`` has; None without a file. Raises ConfigError."""
    if config.quantization_param_path is None:
        return None
    path = expanded(config.quantization_param_path)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=File)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _unfit(f"{path}: {why}; give a JSON file of KV scales") from error
    tables = [table for table in (model, model.get("text_config")) if table]
    kinds = {table["model_type"] for table in tables if table.get("model_type")}
    if found.model_type is not None and kinds and found.model_type not in kinds:
        raise _unfit(f"{path}: it is for models of type {found.model_type[:60]}; leave it out")
    if found.kv_cache.dtype != "float8_e4m3fn":
        raise _unfit(
            f"{path}: its scales are for {found.kv_cache.dtype[:60]}, and the cache is float8_e4m3fn"
        )
    ranks = found.kv_cache.scaling_factor
    if sorted(ranks) != list(range(config.tp)):
        raise _unfit(f"{path}: it has scales of {len(ranks)} ranks, and --tp is {config.tp}")
    for layers in ranks.values():
        if sorted(layers) != list(range(spec.layers)):
            raise _unfit(f"{path}: it has scales of {len(layers)} layers, and the model has {spec.layers}")
        if not all(0 < scale < inf for scale in layers.values()):
            raise _unfit(f"{path}: scales must be finite and above 0")
    own = ranks[rank]
    return [(own[layer], own[layer]) for layer in spec.held]


def _unfit(what: str) -> ConfigError:
    return ConfigError(f"--quantization-param-path {what}", param=NAME)
