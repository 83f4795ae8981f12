"""Checkpoints of AutoRound (arXiv 2309.05516), whose integers lie as GPTQ or AWQ have them, and whose small
floats as in compressed-tensors. Loads no torch.

``extra_config`` says of some layers, by name or by an expression, what bits, groups and zeros they have; 16
bits or more: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sgla.hub.reader import Reader
from sgla.quant.compressed import LINEAR, compressed
from sgla.quant.fp8 import Fp8
from sgla.quant.gptq import Awq, Gptq
from sgla.quant.method import Method

_GPTQ, _AWQ, _FLOATS = "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"
_FP8 = "auto_round:fp8_static"
_SETTINGS = ("bits", "group_size", "sym")
_OF_FLOATS = (*_SETTINGS, "data_type", "act_bits")
_FORMATS = {
    ("mx_fp", 4): "mxfp4-pack-quantized",
    ("mx_fp", 8): "mxfp8-quantized",
    ("nv_fp", 4): "nvfp4-pack-quantized",
}
_WHOLE = 16  # bits from which on a layer is as it was
_EXPRESSION = re.compile(r"[*+?^$()\[\]{}|\\]")


def auto_round(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    c = Reader("auto-round", config)
    packing = config.get("packing_format", _GPTQ)
    if packing not in (_GPTQ, _AWQ, _FLOATS, _FP8):
        raise c.error("packing_format", f"{_GPTQ}, {_AWQ}, {_FLOATS} or {_FP8}")
    keys = _OF_FLOATS if packing == _FLOATS else _SETTINGS
    settings = {key: config[key] for key in keys if c.given(key)}
    tables = Reader("auto-round: extra_config", c.table("extra_config"))
    others = {_rule(name): _other(tables, name, keys) for name in tables.values}
    if packing == _FLOATS:
        return _of_floats(settings, others)
    if config.get("data_type", "int") != ("fp" if packing == _FP8 else "int"):
        raise c.error("data_type", f"that of the packing_format {packing}")
    if packing != _FP8 and _of_inputs(c) < _WHOLE:
        raise c.error("act_bits", f"16 in the packing_format {packing}")
    listed = {"ignore": [f"re:{rule}" for rule, given in others.items() if given is None]}
    if packing != _GPTQ and any(given and {**settings, **given} != settings for given in others.values()):
        raise c.error("extra_config", f"left out beside {packing}, but for layers of 16 bits")
    if packing == _FP8:
        return Fp8({**listed, "quant_method": "fp8", "fmt": config.get("fmt"), "activation_scheme": "static"})
    if packing == _AWQ:
        return Awq({**settings, **listed, "quant_method": "awq", "version": "gemm", "zero_point": True})
    rules = {f"-:{rule}" if given is None else f"+:{rule}": given or {} for rule, given in others.items()}
    return Gptq({**settings, "quant_method": "gptq", "dynamic": rules})


def _of_floats(settings: dict[str, Any], others: dict[str, dict[str, Any] | None]) -> Method:
    """As compressed-tensors says it, the settings of some layers before those of all others."""
    groups = {
        f"group_{i}": _group({**settings, **given}, f"re:{rule}")
        for i, (rule, given) in enumerate(others.items())
        if given is not None
    }
    groups["others"] = _group(settings, LINEAR)
    left = [f"re:{rule}" for rule, given in others.items() if given is None]
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": [*left, "lm_head"]}
    return compressed({**said, "config_groups": groups})


def _group(settings: dict[str, Any], target: str) -> dict[str, Any]:
    c = Reader("auto-round", settings)
    kind, bits = str(settings.get("data_type"))[:5], c.integer("bits", _WHOLE)
    if (kind, bits) not in _FORMATS:
        raise c.error("data_type", f"mx_fp of 4 or 8 bits or nv_fp of 4 in the packing_format {_FLOATS}")
    inputs, size = _of_inputs(c), settings.get("group_size")
    numbers = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": size, "symmetric": True}
    group = {"targets": [target], "format": _FORMATS[kind, bits], "weights": numbers}
    return group if inputs >= _WHOLE else group | {"input_activations": {"num_bits": inputs, "type": "float"}}


def _of_inputs(c: Reader) -> int:
    """Bits of activations."""
    return c.integer("act_bits", 64) if c.given("act_bits") else _WHOLE


def _other(tables: Reader, name: str, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings of these layers; None: they are as they were."""
    given = tables.table(name)
    bits = given.get("bits")
    if type(bits) is int and bits >= _WHOLE:
        return None
    return {key: given[key] for key in keys if key in given}


def _rule(name: str) -> str:
    return name if _EXPRESSION.search(name) else f"{re.escape(name)}$"
