"""Tensors that another process hands over: as a safetensors file, or as SGLang's clients pickle them. Of a
pickle only tensors are made: what else it asks for, code among it, is an error."""

from __future__ import annotations

import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.multiprocessing import reductions

from sgla.errors import WeightError

PICKLED = b"\x80"  # begins a pickle; a safetensors file has its JSON behind eight bytes
DEVICE = 6  # the argument of ``rebuild_cuda_tensor`` that says where the tensor is


def received(path: str, rank: int = 0) -> dict[str, Tensor]:
    """What the file has, by name; ``rank``: whose, where it has some for each. Tensors of a GPU lie in the
    memory of whom sent them. Raises WeightError."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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


def _on_this_gpu(*args: Any) -> Tensor:
    """``rebuild_cuda_tensor``; SGLang names a GPU by its UUID."""
    given = list(args)
    if isinstance(given[DEVICE], str):
        given[DEVICE] = torch.cuda.current_device()
    made: Tensor = reductions.rebuild_cuda_tensor(*given)
    return made


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
