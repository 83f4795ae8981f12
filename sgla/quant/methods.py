"""Which format a checkpoint's ``quantization_config`` names. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import shown
from sgla.hub.source import SAID
from sgla.quant.method import Method
from sgla.quant.method_keys import check_method_keys

_METHODS: dict[str, str] = {}


def register(name: str, method: str) -> None:
    """Add a format: what ``quant_method`` says, and module and name of what makes a ``Method`` of
    the configuration, a class for the most part."""
    _METHODS[name] = method


register("fp8", "sgla.quant.e2m1_experts:fp8")
register("mxfp8", "sgla.quant.fp8:Mx8")
register("fbgemm_fp8", "sgla.quant.fp8:Fp8")
register("modelopt", "sgla.quant.modelopt:modelopt")
register("compressed-tensors", "sgla.quant.compressed:compressed")
register("gguf", "sgla.quant.gguf:Gguf")
register("gptq", "sgla.quant.gptq:Gptq")
register("mxfp4", "sgla.quant.mxfp4:Mxfp4")
register("bitsandbytes", "sgla.quant.bitsandbytes:bitsandbytes")
register("hqq", "sgla.quant.hqq:Hqq")
register("torchao", "sgla.quant.torchao:torchao")
register("awq", "sgla.quant.gptq:Awq")
register("w4afp8", "sgla.quant.w4afp8:w4afp8")
register("auto-round", "sgla.quant.autoround:auto_round")
register("intel/auto-round", "sgla.quant.autoround:auto_round")


def method_of(config: Mapping[str, Any]) -> Method | None:
    """None: the file is not quantized. Raises ConfigError for a method that is not supported, naming it."""
    c = quantization_config(config)
    if not c:
        return None
    if config.get("expert_dtype") is not None:  # DeepSeek V4 says it beside
        c = {"expert_dtype": config["expert_dtype"], **c}
    kind = c.get("quant_method")
    if kind is None and (c.get("load_in_8bit") or c.get("load_in_4bit")):
        kind = "bitsandbytes"  # as old files say it
    producer = c.get("producer")
    if kind is None and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        kind = "modelopt"
    if kind is None and {"bits", "group_size"} <= c.keys():
        kind = "mlx"  # which says it so
    if not isinstance(kind, str) or kind not in _METHODS:
        raise unsupported(kind or "unnamed", c)
    made: Method = resolve_name(_METHODS[kind])(c)
    made.notes += check_method_keys(kind, c)
    return made


def unsupported(kind: object, config: Mapping[str, Any]) -> ConfigError:
    """What to say of a method, or of a variant of one."""
    detail = config.get("format") or config.get("quant_algo") or ""
    return ConfigError(
        f"config.json: quantization_config: the method {shown(kind)}"
        + (f" with {shown(detail)}" if detail else "")
        + " is not supported; gptq, awq, auto-round, fp8, mxfp8, fbgemm_fp8, compressed-tensors, modelopt "
        "with FP8, MXFP8, NVFP4 or MXFP4, bitsandbytes, hqq, torchao, w4afp8, and mxfp4 for gpt-oss are. "
        "Take the model's unquantized checkpoint, with --quantization int8 or int4 if need be, or a GGUF "
        "file",
        param="model",
    )


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of quantization, in any of the places where it may stand; empty if nothing."""
    text = config.get("text_config")
    places = [
        (f"{outer}{key}", table[key])
        for outer, table in (("", config), ("text_config.", text if isinstance(text, Mapping) else {}))
        for key in SAID
        if table.get(key)
    ]
    for name, found in places:
        if not isinstance(found, dict):
            raise ConfigError(f"config.json: {name} is no object", param="model")
        if found != places[0][1]:
            raise ConfigError(f"config.json: {name} and {places[0][0]} are not the same", param="model")
    return places[0][1] if places else {}
