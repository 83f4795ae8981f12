"""``config_groups`` of a ``quantization_config``: how the numbers of linear layers are stored, as
compressed-tensors writes it, and ModelOpt after it. Loads no torch.

As there, a group has no other keys than these. Those that say how numbers were found are passed over, and all
others have a value that is honoured, or end the start with their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sgla.hub.reader import Reader

_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_SAID = ("num_bits", "type", "symmetric", "dynamic")  # which may not be null
_FOUND = ("observer", "observer_kwargs")
_NUMBERS = (
    *(*_SAID, *_FOUND),
    *("strategy", "group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype"),
)
_SCALES = ("float16", "bfloat16", "float32", "float64")
_ZEROS = ("int8", "int32")


class Scheme(NamedTuple):
    """A group: what it says itself, and of numbers; empty where it says nothing of them."""

    group: Reader
    weights: Reader
    inputs: Reader
    outputs: Reader


def schemes(config: Mapping[str, Any]) -> list[Scheme]:
    """Raises ConfigError for a key that there is not."""
    outer, found = Reader("quantization_config", config), []
    groups = Reader("quantization_config.config_groups", outer.table("config_groups"))
    for name in groups.values:
        table, place = groups.table(name), f"config_groups.{name[:40]}"
        group = Reader(place, table)
        _check_keys(group, _GROUP)
        weights, inputs, outputs = (_numbers(group, part) for part in _GROUP[1:4])
        if weights.flag("dynamic"):
            raise weights.error("dynamic", "false: the scales of weights are stored")
        found.append(Scheme(group, weights, inputs, outputs))
    return found


def unrounded(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to say of a file that was made for activations of fewer bits, which are not rounded."""
    groups = schemes(config)
    if groups:
        rounds = any(group.inputs.values for group in groups)
    else:
        says = config.get("quant_method") in ("modelopt", "mxfp8")
        rounds = says and not str(config.get("quant_algo")).startswith("W4A16")
    return ("the checkpoint's activations are not rounded",) if rounds else ()


def check_floats(scheme: Scheme) -> None:
    """Raises ConfigError unless weights, and inputs if they are rounded, are symmetric e4m3 numbers."""
    for c in (scheme.weights, scheme.inputs):
        if c is scheme.inputs and not c.values:
            continue
        if (c.values.get("type"), c.values.get("num_bits")) != ("float", 8):
            raise c.error(
                "type" if c.values.get("type") != "float" else "num_bits", "float numbers of 8 bits"
            )
        if not c.flag("symmetric") and c.given("symmetric"):
            raise c.error("symmetric", "true")
        if c.values.get("actorder"):
            raise c.error("actorder", "null")
    check_types(scheme.weights)
    weights, inputs = scheme.weights.values, scheme.inputs.values
    if weights.get("strategy", "tensor") not in ("tensor", "channel", "block"):
        raise scheme.weights.error("strategy", "tensor, channel or block")
    if weights.get("group_size", -1) != -1:
        raise scheme.weights.error("group_size", "null")
    if inputs.get("strategy", "tensor") not in ("tensor", "token", "group"):
        raise scheme.inputs.error("strategy", "tensor, token or group")
    scheme.inputs.flag("dynamic")


def _numbers(group: Reader, part: str) -> Reader:
    found = Reader(f"{group.architecture}.{part}", group.table(part))
    _check_keys(found, _NUMBERS)
    given = Reader(found.architecture, group.values.get(part) or {})
    for key in _SAID:
        if key in given.values and not given.given(key):
            raise given.error(key, "a value, or left out")
    return found


def _check_keys(c: Reader, known: tuple[str, ...]) -> None:
    for key in c.values:
        if key not in known:
            raise c.error(key[:40], "left out: neither compressed-tensors nor sgla has such a key")


def check_types(weights: Reader) -> None:
    """Raises ConfigError for scales of e4m3 or e8m0, which have others beside them."""
    for key, known in (("scale_dtype", _SCALES), ("zp_dtype", _ZEROS)):
        if weights.given(key) and str(weights.values[key]).removeprefix("torch.") not in known:
            raise weights.error(key, " or ".join(known))
