"""Checkpoints whose linear layers are e2m1 numbers, two in each byte, in groups with a scale. Loads no torch.

NVFP4: 16 numbers have a scale in e4m3, and a tensor has one for these scales. It divides them in files of
compressed-tensors (``X.weight_global_scale``), and multiplies them in ModelOpt's (``X.weight_scale_2``). They
are kept as they are (``nvfp4``). MXFP4: 32 numbers have a power of two, ``X.weight_scale``. A CPU keeps them
as they are, with scales in float16, a GPU in ``mxfp4``. The numbers are ``X.weight_packed``, in ModelOpt's
files ``X.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from sgla.errors import WeightError
from sgla.hub.reader import shown
from sgla.quant.method import Held, Method
from sgla.quant.schemes import schemes, unrounded

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor


class Nvfp4(Method):
    name, storage, devices = "nvfp4", "nvfp4", ("cpu", "cuda")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for scheme in schemes(config):
            _check(scheme.weights, 16)
        self.modelopt = config.get("quant_method") == "modelopt"
        self.notes = unrounded(config)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        weight, factor = self._names(module)
        return {
            weight: Held((n, k // 2), ("U8",)),
            f"{module}.weight_scale": Held((n, k // 16), ("F8_E4M3",)),
            factor: Held(None, ("F32",)),
            f"{module}.input_global_scale": Held(optional=True),
            f"{module}.input_scale": Held(optional=True),
        }

    def _names(self, module: str) -> tuple[str, str]:
        if self.modelopt:
            return f"{module}.weight", f"{module}.weight_scale_2"
        return f"{module}.weight_packed", f"{module}.weight_global_scale"

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.nibbles import Nibbles

        weight, factor = self._names(module)
        scale, values = stored[f"{module}.weight_scale"], stored[factor].values().flatten().tolist()
        if len(values) != 1 or not 0 < values[0] < inf:
            raise WeightError(f"{factor} is {shown(values)}; it must be one number above 0")
        return Nibbles(stored[weight], scale, (n, k), 16, stored[factor], not self.modelopt)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".input_scale", ".input_global_scale"))


class Mx4(Method):
    name, storage, devices = "mxfp4", "e2m1", ("cpu", "cuda")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for scheme in schemes(config):
            _check(scheme.weights, 32)
        self.weight = "weight" if config.get("quant_method") == "modelopt" else "weight_packed"
        self.notes = unrounded(config)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.{self.weight}": Held((n, k // 2), ("U8",)),
            f"{module}.weight_scale": Held((n, -(-k // 32)), ("U8",)),
        }

    def stored(self, device: str = "cpu") -> str:
        return self.storage if device == "cpu" else "mxfp4"

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.stored(device)

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.nibbles import Nibbles

        return Nibbles(stored[f"{module}.{self.weight}"], stored[f"{module}.weight_scale"], (n, k), 32)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".input_scale"))


def _check(weights: Any, group: int) -> None:
    """Raises ConfigError for numbers of another kind."""
    wanted = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    for key, value in wanted.items():
        if weights.values.get(key, value) != value:
            raise weights.error(key, str(value))
