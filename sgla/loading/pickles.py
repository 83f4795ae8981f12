"""Files that PyTorch pickled (``.bin``, ``.pt``, ``.pth``). Of a pickle only tensors are made: what else it
asks for, code among it, ends the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgla.errors import WeightError

# As safetensors calls them.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INSIDE = ("state_dict", "model", "module")  # keys under which training keeps the weights


def unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped where PyTorch 1.6 or later wrote it. Raises WeightError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # of a pickle, of its archive, or whatever the objects in it raise
        raise WeightError(f"{path} is no file of PyTorch's with tensors alone: {_told(error)}") from error
    for key in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise WeightError(f"{path} holds {type(found).__name__}, and not tensors by their names")
    for name, tensor in found.items():
        _check(path, name, tensor)
    return {name: tensor.detach() for name, tensor in found.items()}


def _check(path: Path, name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise WeightError(f"{path} holds {type(tensor).__name__} under {str(name)[:99]!r}, and no tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in TYPES:
        raise WeightError(f"{path}: {name[:99]} is a tensor of {tensor.dtype} that is not read")
    if tensor.device.type != "cpu" or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise WeightError(
            f"{path}: {name[:99]} has shape {list(tensor.shape)}, for which the file has no bytes"
        )


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _told(error: Exception) -> str:
    """In a line, what a pickle asks for, or what the library says."""
    text = " ".join(str(error).split())
    if asked := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it asks for {asked[1][:99]}, which is not run"
    return text.split(". ")[0][:200] or type(error).__name__
