"""The tensors of safetensors files under the names that layers declare: those of a linear layer joined by its
method, fused and stacked ones taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.hub.source import ModelSource
from sgla.layers.build import Build, RowSlice
from sgla.loading.pickles import TYPES, unpickled
from sgla.loading.upload import Stored, Upload, places
from sgla.quant.method import FLOATS, PLAIN, Held
from sgla.quant.weight import SourceTensor, Weight, storage

# Where multimodal checkpoints keep their language model.
PREFIXES = (
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Scales of a KV cache in 8 bits, as compressed-tensors and ModelOpt name them.
_CACHE_SCALE = re.compile(r"\blayers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale$")

HOST = torch.device("cpu")
HEADS = 4096  # that a layer may have


def canonical(name: str) -> str:
    for prefix, replacement in PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def renamed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A checkpoint's name by ``Family.renamed``: with other parts, those with ^ at its beginning alone, those
    with $ at its end."""
    for theirs, ours in pairs:
        if theirs.startswith("^"):
            name = ours + name[len(theirs) - 1 :] if name.startswith(theirs[1:]) else name
        elif theirs.endswith("$"):
            name = name[: 1 - len(theirs)] + ours if name.endswith(theirs[:-1]) else name
        else:
            name = name.replace(theirs, ours)
    return name


def joined(stored: dict[str, FileTensor], build: Build) -> Iterator[tuple[str, SourceTensor]]:
    """The matrix of each linear layer, of the tensors that the file has of it; then all other tensors."""
    raws = {canonical(raw): raw for raw in stored}
    method = build.checkpoint
    shapes = {name: slot.shape for name, slot in build.table.items()}
    for name, shape in (shapes | {name: shape for name, (shape, _) in build.stacks.items()}).items():
        module = name.removesuffix(".weight")
        matrix = module != name and len(shape) == 2
        if method is PLAIN or not (matrix or len(shape) == 3):
            continue
        held = method.tensors(module, *shape) if matrix else method.stack(name, shape)
        found = {part: stored[raws[part]] for part in held if part in raws}
        if not found or (found.keys() == {name} and found[name].type in FLOATS):
            continue
        _check_held(held, found)
        yield name, method.take(module, found, *shape) if matrix else method.take_stack(name, found, shape)
        for part in found:
            del stored[raws[part]]
    for raw, tensor in stored.items():
        if (name := canonical(raw)) in build.table or not method.unused(name, tensor):
            yield raw, tensor
        elif (scale := _CACHE_SCALE.search(name)) and _is_scale(tensor):
            build.cache_scales[int(scale[1]), scale[2]] = float(tensor.dense().max())


def _is_scale(tensor: FileTensor) -> bool:
    """Whether it may have a layer's number, or one of each head, of which the largest serves all."""
    return tensor.type in FLOATS and 0 < prod(tensor.shape) <= HEADS


def cache_scales(build: Build, layers: int) -> list[tuple[float, float]] | None:
    """Those of k and v of all layers, if the file has them all and they are finite and above 0."""
    found = [build.cache_scales.get((i, part), 0.0) for i in range(layers) for part in "kv"]
    usable = all(0 < scale < inf for scale in found)
    return list(zip(found[::2], found[1::2])) if usable else None


def _check_held(held: Mapping[str, Held], found: Mapping[str, FileTensor]) -> None:
    """Whether a layer has all that its method wants. Raises WeightError."""
    missing = [name for name, wanted in held.items() if name not in found and not wanted.optional]
    if missing:
        raise WeightError(f"{missing[0]} is missing beside {next(iter(found))}")
    for name, tensor in found.items():
        wanted = held[name]
        if wanted.shape is not None and tensor.shape != wanted.shape:
            raise WeightError(f"{name} has shape {list(tensor.shape)}, expected {list(wanted.shape)}")
        if wanted.types and tensor.type not in wanted.types:
            raise WeightError(f"{name} holds {tensor.type}, expected {' or '.join(wanted.types)}")


def unstacked(
    tensors: Iterator[tuple[str, SourceTensor]], build: Build
) -> Iterator[tuple[str, SourceTensor]]:
    """Stacked experts become the tensors of each expert."""
    for name, tensor in tensors:
        shape, parts = build.stacks.get(canonical(name), ((), ()))
        if not parts:
            yield name, tensor
            continue
        if tensor.shape != shape:
            raise WeightError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        for part in parts:
            if part.expert is None:
                yield part.name, RowSlice(tensor, part.rows)
            else:
                assert isinstance(tensor, FileTensor)
                size, at = (len(part.rows), *shape[2:]), part.rows.start
                row = part.expert * shape[1] + at
                place = tensor.place, row, tensor.device
                yield part.name, Slice(tensor.view, size, tensor.type, *place, part.expert, at)


def stored_tensors(source: ModelSource) -> Iterator[tuple[str, FileTensor]]:
    """Files are memory-mapped; nothing is read before a slot asks for it. Raises WeightError."""
    return pickled(source) if source.kind == "pt" else safetensors(source)


def pickled(source: ModelSource) -> Iterator[tuple[str, FileTensor]]:
    """No code in a file is run."""
    device = torch.empty(0).device
    for path in source.files:
        with torch.device("cpu"):
            tensors = unpickled(path)
        for name, tensor in tensors.items():
            yield name, FileTensor(tensor, tuple(tensor.shape), TYPES[tensor.dtype], None, device=device)


def safetensors(source: ModelSource) -> Iterator[tuple[str, FileTensor]]:
    from safetensors import SafetensorError, safe_open

    upload = Upload() if torch.empty(0).device.type == "cuda" else None
    for path in source.files:
        try:
            file = safe_open(path, framework="pt")
            stored = places(path, upload) if upload is not None else {}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                view = file.get_slice(name)
                yield name, FileTensor(view, tuple(view.get_shape()), view.get_dtype(), stored.get(name))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} is not a complete safetensors file: {error}") from error


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: ``view`` maps it, ``place`` is for those of safetensors that go to a GPU, others go
    to ``device``."""

    view: Any
    shape: tuple[int, ...]
    type: str
    place: Stored | None
    first_row: int = 0  # of what ``place`` has
    device: torch.device = HOST

    def check_floats(self) -> None:
        if self.type not in FLOATS:
            raise ValueError(
                f"it holds {self.type} (a quantized checkpoint?), expected one of {', '.join(FLOATS)}"
            )

    def dense(self, rows: range | None = None) -> Tensor:
        self.check_floats()
        return self.values(rows)

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        if not self.shape:
            return torch.as_tensor(self.view[...]).view(1).to(self.device)
        rows = range(self.shape[0]) if rows is None else rows
        if columns is not None:
            part: Tensor = self.view[rows.start : rows.stop, columns.start : columns.stop]
            return part.to(self.device) if self.place is None else part.to("cuda")
        if self.place is not None:
            return self.place.rows(self.first_row + rows.start, (len(rows), *self.shape[1:]))
        return self.read(rows).to(self.device)

    def read(self, rows: range) -> Tensor:
        values: Tensor = self.view[rows.start : rows.stop]
        return values

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class Numbers:
    """A FileTensor of whole numbers, which are no quantized weights. A trainer may keep them as floats."""

    source: FileTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def dense(self, rows: range | None = None) -> Tensor:
        """Raises ValueError for floats that are no whole numbers, or too large for their type to have all."""
        values = self.source.values(rows)
        if not values.is_floating_point():
            return values
        found, most = values.float(), 2 / torch.finfo(values.dtype).eps
        if not bool(((found == found.trunc()) & (found.abs() <= most)).all()):
            raise ValueError(f"it holds {self.source.type} that are no whole numbers")
        return found.long()

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class Slice(FileTensor):
    """``view[expert, first:]``, as many rows as ``shape`` says; ``turned``: its columns instead."""

    expert: int = 0
    first: int = 0
    turned: bool = False

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        if columns is not None:
            return self.values(rows)[:, columns.start : columns.stop]
        if not self.turned:
            return super().values(rows)
        found = self.read(range(self.shape[0]) if rows is None else rows)
        return found.to(self.device) if self.place is None else found.to("cuda")

    def read(self, rows: range) -> Tensor:
        start, stop = self.first + rows.start, self.first + rows.stop
        own = slice(self.expert, self.expert + 1)
        values: Tensor = self.view[own, :, start:stop] if self.turned else self.view[own, start:stop]
        return values[0].t().contiguous() if self.turned else values[0]
