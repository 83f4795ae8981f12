"""Checkpoints of AutoRound (arXiv 2309.05516), whose integers lie as GPTQ or AWQ have them. Loads no torch.

``extra_config`` says of some layers, by name or by an expression, what bits, groups and zeros they have; 16
bits or more: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sgla.hub.reader import Reader
from sgla.quant.gptq import Awq, Gptq
from sgla.quant.method import Method

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_SETTINGS = ("bits", "group_size", "sym")
_WHOLE = 16  # bits from which on a layer is as it was
_EXPRESSION = re.compile(r"[*+?^$()\[\]{}|\\]")


def auto_round(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    c = Reader("auto-round", config)
    if config.get("data_type", "int") != "int":
        raise c.error("data_type", "int")
    packing = config.get("packing_format", _GPTQ)
    if packing not in (_GPTQ, _AWQ):
        raise c.error("packing_format", f"{_GPTQ} or {_AWQ}")
    settings = {key: config[key] for key in _SETTINGS if c.given(key)}
    tables = Reader("auto-round: extra_config", c.table("extra_config"))
    others = {_rule(name): _other(tables, name) for name in tables.values}
    left = [rule for rule, given in others.items() if given is None]
    if packing == _AWQ:
        if any(given is not None and {**settings, **given} != settings for given in others.values()):
            raise c.error("extra_config", f"left out beside {_AWQ}, but for layers of 16 bits")
        listed = {"ignore": [f"re:{rule}" for rule in left]}
        return Awq({**settings, **listed, "quant_method": "awq", "version": "gemm", "zero_point": True})
    rules = {f"-:{rule}" if given is None else f"+:{rule}": given or {} for rule, given in others.items()}
    return Gptq({**settings, "quant_method": "gptq", "dynamic": rules})


def _other(tables: Reader, name: str) -> dict[str, Any] | None:
    """The settings of these layers; None: they are as they were."""
    given = tables.table(name)
    bits = given.get("bits")
    if type(bits) is int and bits >= _WHOLE:
        return None
    return {key: given[key] for key in _SETTINGS if key in given}


def _rule(name: str) -> str:
    return name if _EXPRESSION.search(name) else f"{re.escape(name)}$"
