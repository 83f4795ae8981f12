"""Checkpoints of HQQ (mobiusml.github.io/hqq_blog). Loads no torch.

Beside ``X.W_q``, whose bytes (int32 for 3 bits) have numbers of rows that lie far apart, there are ``X.zero``
and ``X.scale``, floating-point numbers of each group, and the layer's settings, a tensor each. Groups along
the input channels (axis 1) stay integers, whose constants are float16; others become floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.errors import WeightError
from sgla.hub.reader import Reader
from sgla.quant.formats import FORMATS, devices, of_groups
from sgla.quant.gptq import GROUP, SCALES
from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

_READ = ("nbits", "group_size", "axis")
_SAID = """shape packing unpack_view_dtype view_as_float quant_scale quant_zero compute_dtype offload_meta
    encoded_state_dict stores_quant_config channel_wise optimize round_zero"""
_BITS = (1, 2, 3, 4, 8)


class Hqq(Method):
    name = "hqq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({**config, "ignore": config.get("skip_modules")})
        c = Reader("hqq", config)
        given = c.table("quant_config")
        if not given:
            raise c.error("quant_config", "an object that has weight_quant_params")
        alone = "weight_quant_params" in given
        tables = [c] if alone else [Reader("hqq: quant_config", given)]
        entries = [("", "quant_config")] if alone else [(tag, tag) for tag in given]
        self._tags = {tag: _storages(Reader("hqq", tables[0].table(key))) for tag, key in entries}
        self.storage = self.stored()
        self.devices = devices(kind for kinds in self._tags.values() for kind in kinds.values())

    def stored(self, device: str = "cpu") -> str:
        kinds = {kinds[device] for kinds in self._tags.values()}
        return "" if "" in kinds or not kinds else max(kinds, key=lambda kind: (FORMATS[kind].bytes, kind))

    def covers(self, module: str) -> bool:
        return super().covers(module) and self._tag(module) is not None

    def _tag(self, module: str) -> str | None:
        """Settings are for all layers, or for those whose names end so."""
        return next((tag for tag in self._tags if not tag or module.endswith(f".{tag}")), None)

    def kept(self, module: str, device: str = "cpu") -> str:
        tag = self._tag(module)
        return "" if tag is None else self._tags[tag][device]

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.W_q": Held(types=("U8", "I32")),
            f"{module}.scale": Held(types=SCALES),
            f"{module}.zero": Held(types=SCALES),
            **{f"{module}.{key}": Held() for key in _READ},
            **{f"{module}.{key}": Held(optional=True) for key in _SAID.split()},
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.flat import Planes, PlanesAcross

        bits, group, axis = (_number(f"{module}.{key}", stored) for key in _READ)
        for key in ("quant_scale", "quant_zero", "view_as_float"):
            if f"{module}.{key}" in stored and _number(f"{module}.{key}", stored):
                raise WeightError(f"{module}.{key} is true, which is not supported")
        if bits not in _BITS or axis not in (0, 1) or group < 1 or n * k % group or (axis and k % group):
            raise WeightError(f"{module} has {bits} bits in groups of {group} along axis {axis}")
        rows, columns = (n * k // group, group) if axis else (group, n * k // group)
        wanted = -(-rows // (10 if bits == 3 else 8 // bits)), columns
        if tuple(stored[f"{module}.W_q"].shape) != wanted:
            shape = list(stored[f"{module}.W_q"].shape)
            raise WeightError(f"{module}.W_q has shape {shape}, expected {list(wanted)}")
        for part in ("scale", "zero"):
            tensor = stored[f"{module}.{part}"]
            if max(tensor.shape) != n * k // group or min(tensor.shape) != 1:
                raise WeightError(
                    f"{module}.{part} has shape {list(tensor.shape)}, not {n * k // group} values"
                )
        made = Planes if axis else PlanesAcross
        parts = stored[f"{module}.W_q"], stored[f"{module}.zero"], stored[f"{module}.scale"]
        return made(*parts, (n, k), bits, group)


def _storages(settings: Reader) -> dict[str, str]:
    """Of layers with these settings, for each kind of device. Raises ConfigError."""
    c = Reader("hqq", settings.table("weight_quant_params"))
    bits, axis = c.integer("nbits", 8), c.integer("axis", 1, 0) if c.given("axis") else 0
    if bits not in _BITS:
        raise c.error("nbits", " or ".join(map(str, _BITS)))
    group = c.integer("group_size", 1 << 17) if c.given("group_size") else 0
    if axis == 0 or group % GROUP or group == 0:
        return {"cpu": "", "cuda": ""}
    return {"cpu": "int4" if bits <= 4 else "int8", "cuda": of_groups(bits, group, whole=False)}


def _number(name: str, stored: Mapping[str, StoredTensor]) -> int:
    found = stored[name].values().flatten()
    if len(found) != 1:
        raise WeightError(f"{name} is no number")
    return int(found[0])
