"""Checkpoints whose linear weights are e4m3 numbers with scales beside them. Loads no torch.

``X.weight_scale``: one for the tensor, or one for each output channel (compressed-tensors, FBGEMM, ModelOpt;
the latter also one for each block, with a length of 1 behind each).
``X.weight_scale_inv``: one for each block of 128 x 128, by which the numbers are multiplied in spite of its
name (DeepSeek-V3, arXiv 2412.19437; Qwen3-FP8). Experts may be stacks ``X``, with ``X_scale_inv`` or
``X_scale`` (Qwen3-VL, Mistral Small 4). Scales of activations are not used: they are made for each token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.errors import ConfigError, WeightError
from sgla.hub.reader import Reader, shown
from sgla.quant.method import Held, Method
from sgla.quant.methods import unsupported
from sgla.quant.schemes import Scheme, check_floats, schemes, unrounded

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

_UNUSED = re.compile(r".*\.((input|output|activation|q|k|v|kv)_(scale|zero_point)|input_global_scale)$")
_WIDEST = 1 << 17  # rows or columns of a block


class Fp8(Method):
    name, storage, devices = "fp8", "fp8", ("cpu", "cuda")
    scales = _UNUSED

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        groups = schemes(config)
        found = _scale_block(config, groups)
        self.in_blocks, self.block = found is not None, found or (128, 128)
        kind = config.get("quant_method", "fp8")
        e4m3 = {
            "fp8": config.get("fmt") in ("e4m3", "float8_e4m3fn", None),
            "fbgemm_fp8": True,
            "compressed-tensors": config.get("format") in ("float-quantized", "naive-quantized"),
            "modelopt": True,
        }
        if not e4m3[kind]:
            raise unsupported(kind, config)
        if self.in_blocks and self.block[1] % 128 == 0:
            self.storage = "fp8g128"
        check_compressed(config, groups)
        for group in groups:
            check_floats(group)
        if _static_scales(config, groups):
            self.notes = (
                "the checkpoint's scales of activations are not used: on a GPU each token gets its own, on a "
                "CPU activations are not rounded",
            )

    def stored(self, device: str = "cpu") -> str:
        """A GPU rounds blocks of other sizes once more."""
        return "" if device == "cpu" and self.in_blocks and self.block[1] % 128 else self.storage

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.stored(device)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        scales = (f"{module}.weight_scale", f"{module}.weight_scale_inv")
        return {f"{module}.weight": Held((n, k), ("F8_E4M3",))} | dict.fromkeys(scales, Held(optional=True))

    def stacked(self, name: str) -> dict[str, str]:
        of_inputs = dict.fromkeys((f"{name}_activation_scale", f"{name}_input_scale"), "input_scale")
        return {
            name: "weight",
            **{f"{name}_{scale}": f"weight_{scale}" for scale in ("scale", "scale_inv")},
            **of_inputs,
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.scaled import Powers, Scaled

        weight = f"{module}.weight"
        for name in (f"{weight}_scale_inv", f"{weight}_scale"):
            if (scale := stored.get(name)) is not None:
                block = covered(name, tuple(scale.shape), (n, k), self.block)
                return Scaled(stored[weight], Powers(scale) if scale.type == "F8_E8M0" else scale, block)
        raise WeightError(f"{weight} has e4m3 numbers without a scale ({weight}_scale or _scale_inv)")

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return _UNUSED.match(name) is not None


class Mx8(Method):
    """MXFP8 (OCP Microscaling Formats 1.0): ``X.weight`` with ``X.weight_scale``, an exponent for every 32
    channels, which files whose ``quant_method`` is mxfp8 call ``X.weight_scale_inv``."""

    name, storage, devices = "mxfp8", "mxfp8", ("cpu", "cuda")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        own = config.get("quant_method") == "mxfp8"
        if own and config.get("weight_block_size", [1, 32]) != [1, 32]:
            raise Reader("mxfp8", config).error("weight_block_size", "[1, 32]")
        self.scale = "weight_scale_inv" if own else "weight_scale"
        self.notes = unrounded(config)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.weight": Held((n, k), ("F8_E4M3",)),
            f"{module}.{self.scale}": Held((n, -(-k // 32)), ("U8", "F8_E8M0")),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.scaled import Powers, Scaled

        return Scaled(stored[f"{module}.weight"], Powers(stored[f"{module}.{self.scale}"]), (1, 32))

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        return _UNUSED.match(name) is not None


def _static_scales(config: Mapping[str, Any], groups: list[Scheme]) -> bool:
    """Whether the file has a scale for the activations of each linear layer."""
    if config.get("activation_scheme") == "static" or config.get("quant_algo") == "FP8":
        return True
    return any(group.inputs.values and not group.inputs.flag("dynamic") for group in groups)


def check_compressed(config: Mapping[str, Any], groups: list[Scheme]) -> None:
    """compressed-tensors has more than its formats of numbers say. Raises ConfigError."""
    q = Reader("compressed-tensors", config)
    if q.table("transform_config"):
        raise q.error("transform_config", "empty: rotated weights are not supported")
    sparsity = Reader("compressed-tensors", q.table("sparsity_config"))
    if sparsity.values.get("format", "dense") != "dense":
        raise sparsity.error("format", "dense in sparsity_config")
    for group, _, _, outputs in groups:
        if outputs.values:
            raise group.error("output_activations", "null: the results of layers are not rounded")
        formats = q.values.get("format"), group.values.get("format")
        if group.given("format") and formats[0] not in (formats[1], "mixed-precision"):
            raise group.error("format", f"that of the file, {shown(q.values.get('format'))}")


def _scale_block(config: Mapping[str, Any], groups: list[Scheme]) -> tuple[int, int] | None:
    """Rows and columns of the weights that share a ``weight_scale_inv``, if the file says. Raises
    ConfigError."""
    found = config.get("weight_block_size")
    for group in groups:
        if group.weights.given("block_structure"):
            said = group.weights.values["block_structure"]
            if found not in (None, said):
                raise group.weights.error("block_structure", f"that of the others, {shown(found)}")
            found = said
    if found is None:
        return None
    if not (
        isinstance(found, list)
        and len(found) == 2
        and all(type(size) is int and 0 < size <= _WIDEST for size in found)
    ):
        raise ConfigError(
            f"config.json: weight_block_size or block_structure is {shown(found)}; it must be two whole "
            "numbers",
            param="model",
        )
    return found[0], found[1]


def covered(
    name: str, scale: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int]
) -> tuple[int, int]:
    """Rows and columns for which one number of ``scale`` stands. Raises WeightError."""
    n, k = shape
    if scale in ((), (1,), (1, 1)):
        return n, k
    if scale in ((n,), (n, 1)):
        return 1, k
    rows, columns = -(-n // block[0]), -(-k // block[1])
    if scale in ((rows, columns), (rows, 1, columns, 1)):
        return block
    raise WeightError(
        f"{name} has shape {list(scale)}, which fits neither the {n} rows of its weight nor blocks of "
        f"{block[0]} x {block[1]} in {list(shape)}"
    )
