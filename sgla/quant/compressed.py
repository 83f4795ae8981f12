"""Checkpoints of compressed-tensors: e4m3 or int8 numbers, integers that lie packed in int32, and numbers of
four bits in floating point (NVFP4, MXFP4). Layers may differ: each group of ``config_groups`` has its
``targets``. What activations are to be rounded to is not honoured: GPUs round those of e4m3 weights, each
token by itself, and nothing else is rounded. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.errors import WeightError
from sgla.hub.reader import Reader
from sgla.quant.e2m1_files import Mx4, Nvfp4
from sgla.quant.formats import FORMATS
from sgla.quant.fp8 import Fp8, Mx8, check_compressed
from sgla.quant.gptq import SCALES, Grouped
from sgla.quant.gptq import Scheme as Layout
from sgla.quant.method import Expressions, Held, Method, of_text
from sgla.quant.methods import unsupported
from sgla.quant.schemes import Scheme, check_types, schemes

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor


# What actorder may say: whether channels of a group lie together.
_IN_ORDER, _REORDERED = (False, "weight", "static"), (True, "group", "dynamic")
LINEAR = "Linear"  # a target: the class of all layers that are multiplied by
_TABLE, _TABLES = "Embedding", ("embed_tokens", "wte", "word_embeddings")  # and of what is looked up in
_ROUNDED = "the checkpoint was made for activations of {} bits, which are not rounded here"


def compressed(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    groups = schemes(config)
    check_compressed(config, groups)
    if not groups:
        return _part(config, None)
    parts, tables = [], Reader("quantization_config", config).table("config_groups")
    for (name, table), (group, *_) in zip(tables.items(), groups):
        said = group.values.get("format") or config.get("format")
        alone = {**config, "format": said, "config_groups": {name: table}}
        parts.append(_part(alone, schemes(alone)[0]))
    targets = [_targets(group) for group, *_ in groups]
    return parts[0] if targets == [[LINEAR]] else Mixed(config, list(zip(targets, parts)))


def _part(config: Mapping[str, Any], scheme: Scheme | None) -> Method:
    """Of a file whose layers are alike."""
    kind = config.get("format")
    if kind == "float-quantized":
        return Fp8(config)
    if kind not in ("pack-quantized", "int-quantized", "naive-quantized", *_FOURS, "mxfp8-quantized"):
        raise unsupported("compressed-tensors", config)
    if scheme is None:
        raise Reader("compressed-tensors", config).error("config_groups", "a group, whose targets are Linear")
    if kind == "mxfp8-quantized":
        return Mx8(config)
    if kind in _FOURS:
        return _FOURS[kind](config)
    if kind == "pack-quantized":
        return Packed(config, scheme)
    if kind == "naive-quantized" and scheme.weights.values.get("type") == "float":
        return Fp8(config)
    return Whole(config, scheme)


_FOURS = {"nvfp4-pack-quantized": Nvfp4, "mxfp4-pack-quantized": Mx4}


def _targets(group: Reader) -> list[str]:
    found = group.values.get("targets", [LINEAR])
    if isinstance(found, list) and found and all(isinstance(name, str) for name in found):
        return found
    raise group.error("targets", "a list of layers, or of Linear")


class Mixed(Method):
    """Layers of several kinds, each as the first of ``parts`` has it that names it: by its name or that of
    what it is a part of, by an expression (``re:``), or as one of all (``Linear``, ``Embedding``)."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any], parts: list[tuple[list[str], Method]]) -> None:
        super().__init__(config)
        self._names = {of_text(name): part for names, part in reversed(parts) for name in names}
        pairs = [(name, part) for names, part in parts for name in names if name.startswith("re:")]
        self._expressions = Expressions([name[3:] for name, _ in pairs])
        self._expressed = [part for _, part in pairs]
        self._parts = [part for _, part in parts]
        kinds = {part.storage for part in self._parts}
        self.devices = tuple(sorted({device for part in self._parts for device in part.devices}))
        self.notes = tuple(dict.fromkeys(note for part in self._parts for note in part.notes))
        self.scatters = any(part.scatters for part in self._parts)
        if kinds & {"fp8", "fp8g128"}:
            self.name = "fp8"  # what this needs of a GPU
        self.storage = self.stored()

    def _part(self, module: str) -> Method | None:
        name = module
        while name:
            if name in self._names:
                return self._names[name]
            name = name.rpartition(".")[0]
        first = self._expressions.first(module)
        if first is not None:
            return self._expressed[first]
        return self._names.get(_TABLE if module.endswith(_TABLES) else LINEAR)

    def _of(self, module: str) -> Method:
        found = self._part(module)
        return Method({}) if found is None else found

    def covers(self, module: str) -> bool:
        return super().covers(module) and self._part(module) is not None

    def stored(self, device: str = "cpu") -> str:
        kinds = {part.stored(device) for part in self._parts}
        if device in self.devices:  # which makes floats of what it has no storage for
            kinds = {kind if kind and device in FORMATS[kind].devices else "" for kind in kinds}
        return "" if "" in kinds else max(kinds, key=lambda kind: FORMATS[kind].bytes)

    def kept(self, module: str, device: str = "cpu") -> str:
        return self._of(module).kept(module, device)

    def scattered(self, module: str) -> bool:
        return self._of(module).scattered(module)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return self._of(module).tensors(module, n, k)

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        return self._of(module).take(module, stored, n, k)

    def stacked(self, name: str) -> dict[str, str]:
        return self._of(name).stacked(name)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return any(part.unused(name, tensor) for part in self._parts)


class Integers(Grouped):
    """What the two kinds have in common: their settings."""

    name = "compressed-tensors"
    bits: tuple[int, ...]
    strategies: tuple[str, ...]

    def __init__(self, config: Mapping[str, Any], scheme: Scheme) -> None:
        super().__init__(config)
        group, weights, inputs, _ = scheme
        check_types(weights)
        bits = weights.integer("num_bits", 8, 1)
        if weights.values.get("type") != "int" or bits not in self.bits:
            raise group.error("weights", f"int of {self.bits[0]} to 8 bits")
        strategy = weights.values.get("strategy")
        if strategy not in self.strategies:
            raise weights.error("strategy", " or ".join(self.strategies))
        size = weights.integer("group_size", 1 << 17) if strategy == "group" else 0
        if strategy != "group" and weights.values.get("group_size", -1) != -1:
            raise weights.error("group_size", f"null, where strategy is {strategy}")
        if weights.given("block_structure"):
            raise weights.error("block_structure", "null, where strategy is no block")
        order = weights.values.get("actorder")
        if order not in (None, *_IN_ORDER, *_REORDERED):
            raise weights.error("actorder", "group, weight or null")
        symmetric = weights.flag("symmetric") or not weights.given("symmetric")
        self.scheme = Layout(bits, size, symmetric, order in _REORDERED)
        self.keep()
        if inputs.values:
            self.notes += (_ROUNDED.format(inputs.values.get("num_bits", 8)),)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return Fp8.scales.match(name) is not None


class Packed(Integers):
    """Beside ``X.weight_packed`` there are ``X.weight_scale``, ``X.weight_zero_point`` if they are not
    symmetric, and ``X.weight_g_idx`` where the channels of a group do not lie together."""

    bits, strategies = (2, 3, 4, 5, 6, 7, 8), ("group", "channel")

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        bits, group, symmetric, reordered = self.scheme
        groups, name = -(-k // (group or k)), f"{module}.weight"
        return {
            f"{name}_packed": Held((n, -(-k * bits // 32)), ("I32",)),
            f"{name}_scale": Held((n, groups), SCALES),
            f"{name}_shape": Held((2,), optional=True),
            f"{name}_zero_point": Held((-(-n * bits // 32), groups), ("I32",), optional=symmetric),
            f"{name}_g_idx": Held((k,), ("I32",), optional=not reordered),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        bits, group, symmetric, reordered = self.scheme
        zeros = None if symmetric else stored[f"{module}.weight_zero_point"]
        g_idx, group = stored.get(f"{module}.weight_g_idx"), group or k
        order = None if g_idx is None else quants.group_order(f"{module}.weight_g_idx", g_idx, k, group)
        if order is not None and not reordered:
            raise WeightError(f"{module}.weight_g_idx is not in order, though actorder is not group")
        packed, scale = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
        return quants.Packed(packed, zeros, scale, (n, k), bits, group, order)


class Whole(Integers):
    """``X.weight`` has a byte for each number; beside it there are ``X.weight_scale``, and
    ``X.weight_zero_point`` if they are not symmetric."""

    bits, strategies = (2, 3, 4, 5, 6, 7, 8), ("channel", "tensor", "group")

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        name = f"{module}.weight"
        return {
            name: Held((n, k), ("I8",)),
            f"{name}_scale": Held(None, SCALES),
            f"{name}_zero_point": Held(None, ("I8",), optional=self.scheme.symmetric),
            f"{name}_g_idx": Held((k,), optional=True),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        name, group = f"{module}.weight", self.scheme.group or k
        zeros = None if self.scheme.symmetric else stored[f"{name}_zero_point"]
        for constants in (stored[f"{name}_scale"], *([] if zeros is None else [zeros])):
            fits = (n, -(-k // group)), *(((n,), (1,), ()) if group == k else ())
            if tuple(constants.shape) not in fits:
                raise WeightError(
                    f"{name}_scale or _zero_point has shape {list(constants.shape)}, expected {list(fits[0])}"
                )
        if f"{name}_g_idx" in stored:
            raise WeightError(f"{name}_g_idx is there; act-order is supported for packed integers alone")
        return quants.Bytes(stored[name], zeros, stored[f"{name}_scale"], (n, k), self.scheme.bits, group)
