"""Checkpoints of torchao, as transformers writes them to safetensors. Loads no torch.

Beside ``X._weight_qdata`` there are ``X._weight_scale`` and, of integers, ``X._weight_zero_point``, or of
int4 in tiles (``tile_packed_to_4d``) both in ``X._weight_scale_and_zero``. What activations are to be rounded
to is not honoured. Layers may have settings of their own, by their names or by expressions (``FqnToConfig``).
(torchao 0.18: prototype/safetensors, and the tensors' ``dequantize``; packing of int4: FBGEMM's ``pack_int4``
and ``int4_row_quantize_zp``, PyTorch's ``int4mm.cu``.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sgla.errors import WeightError
from sgla.hub.reader import Reader, shown
from sgla.quant.compressed import LINEAR, Mixed
from sgla.quant.formats import devices, of_groups
from sgla.quant.fp8 import covered
from sgla.quant.gptq import SCALES
from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor


class _Type(NamedTuple):
    """``tensor``: int8 with a scale for each row, ints in groups, int4 in bytes or tiles, or e4m3."""

    tensor: str
    storage: str
    rounds: bool = False  # activations, too


_TYPES = {
    "Int8WeightOnlyConfig": _Type("int8", "q8_0"),
    "Int8DynamicActivationInt8WeightConfig": _Type("int8", "q8_0", True),
    "Float8WeightOnlyConfig": _Type("fp8", "fp8"),
    "Float8DynamicActivationFloat8WeightConfig": _Type("fp8", "fp8"),
    "IntxWeightOnlyConfig": _Type("intx", "int8"),
    "Int8DynamicActivationIntxWeightConfig": _Type("intx", "int8", True),
    "Int4WeightOnlyConfig": _Type("int4", "int4"),
}
_TILES, _GROUPS_OF_TILES = "tile_packed_to_4d", (32, 64, 128, 256)
_ROUNDED = "the checkpoint was made for activations of 8 bits, which are not rounded here"


def torchao(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    said = Reader("torchao: quant_type", Reader("torchao", config).table("quant_type")).table("default")
    if said.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return TorchAo(config, said)
    c = Reader("torchao: quant_type", Reader("torchao: quant_type", said).table("_data"))
    key = "fqn_to_config" if c.given("fqn_to_config") else "module_fqn_to_config"
    layers = Reader("torchao: quant_type", c.table(key, nulls=True))
    parts: list[tuple[list[str], Method]] = []
    left = []
    for name, given in layers.values.items():
        target = LINEAR if name == "_default" else _target(name)
        if given is None:
            left.append(target)
        else:
            parts.append(([target], TorchAo(config, layers.table(name))))
    if not parts:
        raise c.error(key, "an object that has the settings of some layers")
    return Mixed({**config, "ignore": left}, parts)


def _target(name: str) -> str:
    """A layer's name, or an expression for whole names, of what may be its parameter's."""
    name = name.removesuffix("$").removesuffix("weight").removesuffix(".").removesuffix("\\")
    return f"re:(?:{name[3:]})$" if name.startswith("re:") else name


def _value(table: Mapping[str, Any], key: str) -> Any:
    """What torchao writes as an object with its type."""
    found = table.get(key)
    return found.get("_data") if isinstance(found, Mapping) else found


class TorchAo(Method):
    """``said``: how the numbers are stored, as torchao writes a configuration."""

    name = "torchao"

    def __init__(self, config: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        super().__init__(config)
        c = Reader("torchao", config)
        kind, data = said.get("_type"), Reader("torchao", said).table("_data")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise c.error("quant_type", f"a default of {', '.join(_TYPES)}, not {shown(kind)}")
        self.type = _TYPES[kind]
        packing = str(_value(data, "int4_packing_format") or "plain").lower()
        if self.type.tensor == "int4" and packing not in ("plain", _TILES):
            wanted = f"int4 with int4_packing_format plain or {_TILES}"
            raise c.error("quant_type", f"{wanted}, not {shown(packing)}")
        self.bits, self.storage = 4 if self.type.tensor == "int4" else 8, self.type.storage
        self.symmetric = self.type.tensor == "int8"
        group = data.get("group_size", 128 if self.type.tensor == "int4" else 32)
        if self.type.tensor == "intx":
            group = self._intx(data, group)
        self._group = group if type(group) is int and group > 0 else 0
        self._tiles = self.type.tensor == "int4" and packing == _TILES
        if self._tiles and self._group not in _GROUPS_OF_TILES:
            raise c.error("quant_type", f"{_TILES} with a group_size of {_GROUPS_OF_TILES}")
        self._on_gpus = self._storage_of_gpus(self._group)
        self.devices = devices([self.storage, self._on_gpus])
        self.notes = (_ROUNDED,) if self.type.rounds else ()
        if self.type.tensor == "fp8":
            self.name = "fp8"  # what this needs of a GPU

    def _intx(self, data: Mapping[str, Any], group: Any) -> Any:
        """What is said of integers that have a byte each: their bits, whether they have zeros, and how many
        channels have constants in common, which is returned (0: all)."""
        said = {key.removeprefix("weight_"): value for key, value in data.items()}
        bits = re.fullmatch(r"int([1-8])", str(_value(said, "dtype")))
        self.bits = int(bits[1]) if bits else 8
        self.symmetric = str(_value(said, "mapping_type")).startswith("SYMMETRIC")
        wide = 4 if self.bits <= 4 else 8
        self.storage = f"q{wide}_0" if self.symmetric else f"int{wide}"
        granularity = said.get("granularity")
        if isinstance(granularity, Mapping):
            inner = granularity.get("_data")
            return inner.get("group_size", 0) if isinstance(inner, Mapping) else 0
        return group

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        name, four = f"{module}._weight", self.type.tensor == "int4"
        if self._tiles:
            rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024  # as they are padded
            return {
                f"{name}_qdata": Held((rows // 8, columns // 128, 32, 4), ("I32",)),
                f"{name}_scale_and_zero": Held((columns // self._group, rows, 2), SCALES),
            }
        types = ("F8_E4M3",) if self.type.tensor == "fp8" else ("I8", "U8") if four else ("I8",)
        zeros = SCALES if four else ("I8",)
        return {
            f"{name}_qdata": Held((n, k // 2 if four else k), types),
            f"{name}_scale": Held(types=SCALES),
            f"{name}_zero_point": Held(types=zeros, optional=not four),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants
        from sgla.quant.scaled import Scaled

        name = f"{module}._weight"
        if self._tiles:
            parts = stored[f"{name}_qdata"], None, stored[f"{name}_scale_and_zero"]
            return quants.Int4Tiles(*parts, (n, k), 4, self._group)
        numbers, scale, zeros = (stored.get(f"{name}_{part}") for part in ("qdata", "scale", "zero_point"))
        assert numbers is not None
        assert scale is not None
        shape = tuple(scale.shape)
        if self.type.tensor == "fp8":
            return Scaled(numbers, scale, covered(f"{name}_scale", shape, (n, k), (128, 128)))
        turned = shape[::-1] if self.type.tensor == "int4" else shape
        group = k // max(turned[-1], 1) if len(turned) == 2 and turned[-1] else 0
        if turned != (n, k // max(group, 1)) or (zeros is not None and tuple(zeros.shape) != shape):
            raise WeightError(
                f"{name}_scale or _zero_point has shape {list(shape)}, which does not fit {[n, k]}"
            )
        if self.type.tensor == "int4":
            return quants.Int4Bytes(numbers, zeros, scale, (n, k), 4, group)
        if self.symmetric and zeros is not None and bool(zeros.values().any()):
            raise WeightError(f"{name}_zero_point is not 0, though the numbers are symmetric")
        return quants.Bytes(numbers, None if self.symmetric else zeros, scale, (n, k), self.bits, group)

    def _storage_of_gpus(self, group: int) -> str:
        """``group``: channels with one scale, where they are not a row's."""
        if self.type.tensor == "fp8":
            return self.storage
        if self.type.tensor == "int4":
            return of_groups(4, group, whole=False)
        return of_groups(self.bits, 0 if self.type.tensor == "int8" else group)

    def stored(self, device: str = "cpu") -> str:
        return self.storage if device == "cpu" else self._on_gpus

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.stored(device)
