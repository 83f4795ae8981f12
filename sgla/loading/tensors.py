"""Tensors that another process hands over: as a safetensors file, or as SGLang's clients pickle them. Of a
pickle only tensors are made: what else it asks for, code among it, is an error."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.multiprocessing import reductions

from sgla.errors import WeightError

PICKLED = b"\x80"  # begins a pickle; a safetensors file has its JSON behind eight bytes
DEVICE = 6  # the argument of ``rebuild_cuda_tensor`` that says where the tensor is
SHARED = Path("/dev/shm")  # where POSIX keeps shared memory that has a name


def received(
    path: str, rank: int = 0, names: Sequence[str] = (), places: Sequence[str] = ()
) -> dict[str, Tensor]:
    """What the file has, by name; ``rank``: whose, where it has some for each. Tensors of a GPU, and those in
    shared memory, lie in the memory of whom sent them. ``names``: of a file that has handles alone, and
    ``places``: names of this rank's device, by one of which it is told. Raises WeightError."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if names:
                return of_handles(Unpickler(io.BytesIO(data[:])).load(), names, places)
            if data[:1] == PICKLED and data[8:9] != b"{":
                return _named(Unpickler(io.BytesIO(data[:])).load(), rank)
            return load(data[:])
    except WeightError:
        raise
    except Exception as error:  # whatever a damaged file or a pickle raises
        raise WeightError(
            f"the tensors cannot be read: {type(error).__name__}: {str(error)[:200]}; send a safetensors "
            "file, or pickle a list of names and tensors of this GPU"
        ) from error


def packed(named: Iterable[tuple[str, Tensor]]) -> bytes:
    """For ``received``. Tensors of a GPU stay where they are, so they must not go before they have been
    received."""
    tensors = dict(named)
    if any(tensor.is_cuda for tensor in tensors.values()):
        made = io.BytesIO()
        ForkingPickler(made, pickle.HIGHEST_PROTOCOL).dump(list(tensors.items()))
        return made.getvalue()
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


class Unpickler(pickle.Unpickler):
    """Makes tensors, and what SGLang wraps them in."""

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None and module.partition(".")[0] == "sglang":
            found = WRAPPED.get(name)
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no tensor")
        return found


def of_handles(found: Any, names: Sequence[str], places: Sequence[str]) -> dict[str, Tensor]:
    """vLLM's list, which has of each tensor a handle for each device. Raises WeightError."""
    if not isinstance(found, list) or len(found) != len(names):
        raise WeightError(f"there must be a handle for each of {len(names)} names")
    return {name: of_handle(own(handles, places)) for name, handles in zip(names, found)}


def own(told: Mapping[str, Any], places: Sequence[str]) -> Any:
    """What is told to this rank, whose device has the names ``places``. Raises WeightError."""
    for place in places:
        if place in told:
            return told[place]
    raise WeightError(f"nothing is told to {places[0]}, but to {', '.join(told)[:200]}")


def of_handle(found: Any) -> Tensor:
    """A tensor, or how to have one of this GPU: a function and its arguments, or these alone. Raises
    WeightError."""
    function, args = found if isinstance(found, tuple) and len(found) == 2 else (_on_this_gpu, found)
    if isinstance(found, tuple) and function in (_on_this_gpu, _of_storage):
        given = list(args)
        if function is _on_this_gpu:
            given[DEVICE] = ""  # the sender may count GPUs otherwise
        try:
            found = function(*given)
        except (RuntimeError, TypeError, IndexError) as error:
            raise WeightError(f"a handle of a tensor is of no use: {str(error)[:200]}") from error
    if not isinstance(found, Tensor):
        raise WeightError(f"{type(found).__name__} is no handle of a tensor")
    return found.detach()


def _on_this_gpu(*args: Any) -> Tensor:
    """``rebuild_cuda_tensor``; SGLang names a GPU by its UUID."""
    given = list(args)
    if isinstance(given[DEVICE], str):
        given[DEVICE] = torch.cuda.current_device()
    made: Tensor = reductions.rebuild_cuda_tensor(*given)
    return made


def _of_storage(_: Any, storage: Any, metadata: Any) -> Tensor:
    """``rebuild_tensor``, of a CPU's."""
    made: Tensor = torch._utils._rebuild_tensor(storage, *metadata[:3])
    return made


def _in_shared_memory(name: str | bytes, size: int) -> Tensor:
    """uint8[size] that another process has under this name. Raises OSError and ValueError."""
    told = name.decode() if isinstance(name, bytes) else name
    if not re.fullmatch(r"/?\w[\w.-]*", told):
        raise ValueError(f"{told[:99]!r} is no name of shared memory")
    fd = os.open(SHARED / told.removeprefix("/"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(fd)


def _named_storage(_: Any, manager: bytes, name: bytes, size: int, dtype: torch.dtype | None = None) -> Any:
    """``rebuild_storage_filename``, as which tensors are pickled with the sharing strategy file_system."""
    found = _in_shared_memory(name, size * (dtype.itemsize if dtype else 1)).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=found, dtype=dtype or torch.uint8, _internal=True)


def _named_bytes(name: str, _: bool, size: int) -> Tensor:
    """``multiprocessing.shared_memory.SharedMemory``."""
    return _in_shared_memory(name, size)


def _of_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _as_it_is(value: Any, *_: Any) -> Any:
    return value


KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _as_it_is,
    ("torch.storage", "_load_from_bytes"): _of_bytes,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch", "Tensor"): Tensor,
    ("torch._tensor", "Tensor"): Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.nn.parameter", "Parameter"): Tensor,
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _on_this_gpu,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _of_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _named_storage,
    ("multiprocessing.shared_memory", "SharedMemory"): _named_bytes,
    ("collections", "OrderedDict"): OrderedDict,
}
WRAPPED: dict[str, Any] = {
    "LocalSerializedTensor": SimpleNamespace,  # ``values``: a pickle for each rank
    "FlattenedTensorMetadata": SimpleNamespace,  # where a tensor lies in one of bytes
    "_rebuild_cuda_tensor_modified": _on_this_gpu,
}


def _named(found: Any, rank: int) -> dict[str, Tensor]:
    """Raises WeightError, and what else comes of objects of other kinds."""
    if isinstance(found, dict) and "flattened_tensor" in found:
        whole = found["flattened_tensor"].view(torch.uint8)
        found = [
            (part.name, whole[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape))
            for part in found["metadata"]
        ]
    pairs = [(name, _tensor(value, rank)) for name, value in found]
    made = dict(pairs)
    if len(made) < len(pairs) or not all(isinstance(name, str) for name in made):
        raise WeightError("the tensors have no names of their own")
    return made


def _tensor(value: Any, rank: int) -> Tensor:
    values: Sequence[bytes] | None = getattr(value, "values", None) if not isinstance(value, Tensor) else None
    if values is not None:
        value = Unpickler(io.BytesIO(values[rank])).load()
    if not isinstance(value, Tensor):
        raise WeightError(f"{type(value).__name__} is no tensor")
    return value.detach()
