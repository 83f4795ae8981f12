"""Checkpoints of bitsandbytes (arXiv 2208.07339, 2305.14314). Loads no torch.

8 bits: ``X.weight`` int8, and ``X.SCB``, the largest number of each row; a CPU keeps them in ``q8_0``, a GPU
in ``int8g128``, whose scales are float16. 4 bits: ``X.weight`` has places in the table ``X.weight.quant_map``
(nf4 or fp4), and ``X.weight.absmax`` the largest number of each block, which may itself be quantized. The
places are kept (``quant/coded.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.hub.reader import Reader
from sgla.quant.formats import of_groups
from sgla.quant.method import FLOATS, Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STORAGES = {"uint8": "U8", "int8": "I8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


def bitsandbytes(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError."""
    c = Reader("bitsandbytes", config)
    four, eight = (c.flag(key) or c.flag(f"_{key}") for key in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise c.error("load_in_4bit", "true, or load_in_8bit is")
    if c.values.get("bnb_4bit_quant_storage", "uint8") not in tuple(_STORAGES):
        raise c.error("bnb_4bit_quant_storage", " or ".join(_STORAGES))
    return Bnb4(config) if four else Bnb8(config)


class Bnb4(Method):
    name, devices = "bitsandbytes", ("cpu", "cuda")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.storage = config.get("bnb_4bit_quant_type") or "fp4"
        if self.storage not in ("nf4", "fp4"):
            raise Reader("bitsandbytes", config).error("bnb_4bit_quant_type", "nf4 or fp4")
        self.packed = _STORAGES[config.get("bnb_4bit_quant_storage", "uint8")]

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        parts = {f"{module}.weight.{part}": Held(None, FLOATS, part[0] == "n") for part in _PARTS}
        parts[f"{module}.weight.absmax"] = Held(None, (*FLOATS, "U8"))
        states = {f"{module}.weight.{part}": Held(types=("U8",), optional=True) for part in _STATES}
        return {f"{module}.weight": Held(types=(self.packed,)), **parts, **states}

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.flat import table_of

        parts = {
            name.removeprefix(f"{module}.weight.").removeprefix(f"{module}."): tensor
            for name, tensor in stored.items()
        }
        return table_of(module, parts, n, k)


class Bnb8(Method):
    name, storage, devices = "bitsandbytes", "q8_0", ("cpu", "cuda")
    notes = ("the checkpoint's int8 weights are used as they are, and activations are not rounded",)

    def stored(self, device: str = "cpu") -> str:
        return self.storage if device == "cpu" else of_groups(8, 0)

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.stored(device)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.weight": Held((n, k), ("I8",)),
            f"{module}.SCB": Held((n,), ("F32", "F16", "BF16")),
            f"{module}.weight_format": Held(optional=True),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.quants import Bytes, Parts127

        return Bytes(stored[f"{module}.weight"], None, Parts127(stored[f"{module}.SCB"]), (n, k), 8, k)
