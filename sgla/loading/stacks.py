"""Stacks of experts as the tensors of each expert, by which methods know them, and biases the other way."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.layers.build import Build, StackPart
from sgla.loading.checkpoint import FileTensor, Slice, canonical
from sgla.quant.method import FLOATS


def take_apart(stored: dict[str, FileTensor], build: Build) -> None:
    """Those that the file has quantized, in place. Raises WeightError."""
    raws = {canonical(raw): raw for raw in stored}
    stacks = {name: stored[raws[name]] for name in of_experts(build) if name in raws}
    quantized = {name: tensor for name, tensor in stacks.items() if tensor.type not in FLOATS}
    turned = lie_turned(quantized, build)
    for name, numbers in quantized.items():
        held, (experts, n, _) = build.checkpoint.stacked(name), build.stacks[name][0]
        if not held:
            continue
        found = {part: stored.pop(raws[part]) for part in held if part in raws}
        constants = {part: _matrices(part, found[part], experts, turned) for part in found if part != name}
        for part, matrix in matrices(name, numbers, build, turned):
            module = part.name.removesuffix("weight")
            stored[module + held[name]] = matrix
            for other, values in constants.items():
                cut = _of_rows(other, values[matrix.expert], part.rows, n)
                made = FileTensor(cut, tuple(cut.shape), found[other].type, None, device=cut.device)
                stored[module + held[other]] = made


def put_together(stored: dict[str, FileTensor], build: Build) -> None:
    """The biases of experts, which layers declare as stacks, where the file has each expert's, in place: as
    llm-compressor writes gpt-oss."""
    raws = {canonical(raw): raw for raw in stored}
    for name, slot in build.table.items():
        module, _, part = name.removesuffix("_bias").rpartition(".")
        if not (module.endswith(".experts") and name.endswith("_proj_bias")) or name in raws:
            continue
        each = [raws.get(f"{module}.{expert}.{part}.bias", "") for expert in range(slot.shape[0])]
        if all(one in stored and stored[one].shape == slot.shape[1:] for one in each):
            found = [stored.pop(one) for one in each]
            values = torch.stack([tensor.values() for tensor in found])
            stored[name] = FileTensor(values, slot.shape, found[0].type, None, device=values.device)


def of_experts(build: Build) -> set[str]:
    """The names of stacks of experts' matrices."""
    return {
        name
        for name, (shape, parts) in build.stacks.items()
        if len(shape) == 3 and all(part.expert is not None for part in parts)
    }


def lie_turned(stacks: dict[str, FileTensor], build: Build) -> bool:
    """Whether they are ``[experts, input, output]``, as their shapes tell, and not ``[experts, output,
    input]``."""
    shapes = {name: build.stacks[name][0] for name in stacks}
    return any(
        tensor.shape != shapes[name] and tensor.shape == _turned(shapes[name])
        for name, tensor in stacks.items()
    )


def matrices(name: str, stack: FileTensor, build: Build, turned: bool) -> Iterator[tuple[StackPart, Slice]]:
    """Those of each expert. Raises WeightError for a stack of another shape."""
    shape, parts = build.stacks[name]
    if stack.shape != (_turned(shape) if turned else shape):
        raise WeightError(f"{name} has shape {list(stack.shape)}, expected {list(shape)}")
    for part in parts:
        assert part.expert is not None
        at = stack.place, part.expert * shape[1] + part.rows.start, stack.device, part.expert
        size = len(part.rows), shape[2]
        yield part, Slice(stack.view, size, stack.type, *at, part.rows.start, turned)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def _matrices(name: str, tensor: FileTensor, experts: int, turned: bool) -> Tensor:
    """Constants of experts, ``[experts, rows, columns]``. Raises WeightError."""
    if not 1 <= len(tensor.shape) <= 3 or tensor.shape[0] != experts or not prod(tensor.shape):
        raise WeightError(f"{name} has shape {list(tensor.shape)}, expected those of {experts} experts")
    values = tensor.values()
    values = values.view(*values.shape, *[1] * (3 - values.dim()))
    return values.transpose(1, 2).contiguous() if turned else values


def _of_rows(name: str, values: Tensor, rows: range, n: int) -> Tensor:
    """The constants of some of ``n`` rows; one is for all. Raises WeightError where they are cut."""
    each = len(values)
    if each == 1:
        return values
    if rows.start * each % n or rows.stop * each % n:
        raise WeightError(f"{name} has {each} constants for {n} rows: gate and up share one")
    return values[rows.start * each // n : rows.stop * each // n]
