"""Checkpoints of compressed-tensors: e4m3 numbers, or integers in groups that lie packed in int32. Loads no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.errors import WeightError
from sgla.hub.reader import Reader
from sgla.quant.fp8 import Fp8, check_compressed
from sgla.quant.gptq import SCALES, Grouped, Scheme
from sgla.quant.method import Held, Method
from sgla.quant.schemes import schemes

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor


# What actorder may say: whether channels of a group lie together.
_IN_ORDER, _REORDERED = (False, "weight", "static"), (True, "group", "dynamic")


def compressed(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is neither."""
    return Packed(config) if config.get("format") == "pack-quantized" else Fp8(config)


class Packed(Grouped):
    """Weights of 4 or 8 bits, without quantized activations. Beside ``X.weight_packed`` there are
    ``X.weight_scale``, ``X.weight_zero_point`` if they are not symmetric, and ``X.weight_g_idx`` where the
    channels of a group do not lie together."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        found = schemes(config)
        check_compressed(config, found)
        if len(found) != 1 or found[0].group.values.get("targets") != ["Linear"]:
            raise Reader(self.name, config).error("config_groups", "one group, whose targets are Linear")
        if config.get("kv_cache_scheme"):
            raise Reader(self.name, config).error(
                "kv_cache_scheme", "null: scales of the KV cache are not read"
            )
        group, weights, inputs, _ = found[0]
        if inputs.values:
            raise group.error("input_activations", "null: only weights may be integers")
        bits = weights.integer("num_bits", 8, 4)
        if weights.values.get("type") != "int" or bits not in (4, 8):
            raise group.error("weights", "int of 4 or 8 bits")
        if weights.values.get("strategy") not in ("group", "channel"):
            raise weights.error("strategy", "group or channel")
        grouped = weights.values["strategy"] == "group"
        size = weights.integer("group_size", 1 << 17) if grouped else 0
        if not grouped and weights.values.get("group_size", -1) != -1:
            raise weights.error("group_size", "null, where strategy is channel")
        if weights.given("block_structure"):
            raise weights.error("block_structure", "null, where strategy is no block")
        order = weights.values.get("actorder")
        if order not in (None, *_IN_ORDER, *_REORDERED):
            raise weights.error("actorder", "group, weight or null")
        symmetric = weights.flag("symmetric") or not weights.given("symmetric")
        self.scheme = Scheme(bits, size, symmetric, order in _REORDERED)
        self.keep()

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        bits, group, symmetric, reordered = self.scheme
        each, groups = 32 // bits, -(-k // (group or k))
        name = f"{module}.weight"
        return {
            f"{name}_packed": Held((n, -(-k // each)), ("I32",)),
            f"{name}_scale": Held((n, groups), SCALES),
            f"{name}_shape": Held((2,), optional=True),
            f"{name}_zero_point": Held((-(-n // each), groups), ("I32",), optional=symmetric),
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
