"""Checkpoints of NVIDIA's ModelOpt: FP8 with scales for tensors, rows or blocks of 128 x 128, MXFP8, NVFP4,
MXFP4, or some layers of each. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.hub.reader import Reader
from sgla.quant.compressed import Mixed
from sgla.quant.e2m1_files import Mx4, Nvfp4
from sgla.quant.fp8 import Fp8, Mx8
from sgla.quant.method import Method
from sgla.quant.methods import unsupported

_METHODS: dict[str, type[Method]] = {
    "FP8": Fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8,
    "FP8_PB_WO": Fp8,
    "MXFP4": Mx4,
    "MXFP8": Mx8,
    "NVFP4": Nvfp4,
    "W4A16_NVFP4": Nvfp4,
    "W4A8_MXFP4_FP8": Mx4,
}


def modelopt(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    algorithm = config.get("quant_algo")
    kind = algorithm.upper() if isinstance(algorithm, str) else ""
    if kind == "MIXED_PRECISION":
        return _mixed(config)
    if kind not in _METHODS:
        raise unsupported("modelopt", config)
    blocks = {"weight_block_size": [128, 128]} if kind == "FP8_PB_WO" else {}
    return _METHODS[kind]({**config, **blocks, "quant_algo": kind})


def _mixed(config: Mapping[str, Any]) -> Method:
    """``quantized_layers`` says of each layer how it is quantized, as ``config_groups`` beside it do."""
    c = Reader("modelopt", config)
    alone = {key: value for key, value in config.items() if key != "config_groups"}
    layers, names = c.table("quantized_layers"), dict[str, list[str]]()
    for name in layers:
        said = Reader("modelopt: quantized_layers", layers).table(name)
        names.setdefault(str(said.get("quant_algo")), []).append(name)
    if not layers:
        raise c.error("quantized_layers", "an object that has each layer's quant_algo")
    return Mixed(alone, [(found, modelopt({**alone, "quant_algo": kind})) for kind, found in names.items()])
