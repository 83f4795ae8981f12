"""Files that PyTorch pickled (``.bin``, ``.pt``, ``.pth``). Of a pickle only tensors are made: what else it
asks for, code among it, ends the start."""

from __future__ import annotations

import io
import mmap
import re
import zipfile
from collections import Counter
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
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Of a pickle without its tensors: some 150 bytes and 50 reads for each.
PICKLE_BYTES, MOST_READS = 16 << 20, 4 << 20
INSIDE = ("state_dict", "model", "module")  # keys under which training keeps the weights


def unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped where PyTorch 1.6 or later wrote it. Raises WeightError."""
    try:
        found, records = _opened(path)
    except WeightError:
        raise
    except Exception as error:  # of a pickle, of its archive, or whatever the objects in it raise
        raise WeightError(f"{path} is no file of PyTorch's with tensors alone: {_told(error)}") from error
    for key in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise WeightError(f"{path} holds {type(found).__name__}, and not tensors by their names")
    for name, tensor in found.items():
        _check(path, name, tensor)
    if records is not None:
        storages = {x.data_ptr(): x.nbytes() for x in (t.untyped_storage() for t in found.values())}
        if Counter(filter(None, storages.values())) - records:
            raise WeightError(f"{path} is damaged: it holds fewer bytes of a tensor than its shape takes")
    return {name: tensor.detach() for name, tensor in found.items()}


class Pickled(io.BufferedReader):
    """The old format, whose pickle has no length: what it asks to be read is counted."""

    left = MOST_READS

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its pickle has more than {MOST_READS} parts")
        return super().read(size)


def _opened(path: Path) -> tuple[Any, Counter[int] | None]:
    """What a file holds, and how many bytes each of its records has."""
    if not _is_zip(path):
        with path.open("rb", buffering=0) as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_bytes(path, data)
            return torch.load(Pickled(raw), map_location="cpu", weights_only=True), None
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise WeightError(f"{path}: {entry.filename[:99]} is compressed, which PyTorch does not do")
            if entry.filename.endswith("/data.pkl"):
                if entry.file_size > PICKLE_BYTES:
                    raise WeightError(
                        f"{path} has a pickle of {entry.file_size} bytes; at most {PICKLE_BYTES}"
                    )
                _check_bytes(path, archive.read(entry))
    sizes = Counter(entry.file_size for entry in entries if "/data/" in entry.filename)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True), sizes


def _check_bytes(path: Path, pickled: bytes | mmap.mmap) -> None:
    """Raise WeightError for what PyTorch would make of any size that a pickle names."""
    if re.search(rb"(builtins|__builtin__)\nbytearray\n", pickled):
        raise WeightError(f"{path} is no file of PyTorch's with tensors alone: it asks for bytearray")


def _check(path: Path, name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise WeightError(f"{path} holds {type(tensor).__name__} under {str(name)[:99]!r}, and no tensor")
    if type(tensor) not in (Tensor, torch.nn.Parameter):  # torchao's, where that is imported
        kind = type(tensor).__name__
        raise WeightError(f"{path}: {name[:99]} is a {kind}, which is read from safetensors alone")
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
