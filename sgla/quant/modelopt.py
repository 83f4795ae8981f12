"""Checkpoints of NVIDIA's ModelOpt: FP8, NVFP4, or some layers of each. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.hub.reader import Reader
from sgla.quant.compressed import Mixed
from sgla.quant.e2m1_files import Nvfp4
from sgla.quant.fp8 import Fp8
from sgla.quant.method import Method
from sgla.quant.methods import unsupported

_METHODS: dict[Any, type[Method]] = {"FP8": Fp8, "NVFP4": Nvfp4}


def modelopt(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    algorithm = config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        return _mixed(config)
    if not isinstance(algorithm, str) or algorithm not in _METHODS:
        raise unsupported("modelopt", config)
    return _METHODS[algorithm](config)


def _mixed(config: Mapping[str, Any]) -> Method:
    """``quantized_layers`` says of each layer how it is quantized."""
    c = Reader("modelopt", config)
    layers, names = c.table("quantized_layers"), dict[str, list[str]]()
    for name in layers:
        said = Reader("modelopt: quantized_layers", layers).table(name)
        names.setdefault(str(said.get("quant_algo")), []).append(name)
    if not layers:
        raise c.error("quantized_layers", "an object that has each layer's quant_algo")
    return Mixed(config, [(found, modelopt({**config, "quant_algo": kind})) for kind, found in names.items()])
