"""Stacks of experts that a file has quantized, as the tensors of each expert, by which methods know them."""

from __future__ import annotations

from math import prod

from torch import Tensor

from sgla.errors import WeightError
from sgla.layers.build import Build
from sgla.loading.checkpoint import FileTensor, Slice, canonical
from sgla.quant.method import FLOATS


def take_apart(stored: dict[str, FileTensor], build: Build) -> None:
    """In place. A stack is ``[experts, output, input]``, or ``[experts, input, output]``, as its shape tells.
    Raises WeightError."""
    raws = {canonical(raw): raw for raw in stored}
    shapes = {name: shape for name, (shape, _) in build.stacks.items() if len(shape) == 3 and name in raws}
    stacks = {name: stored[raws[name]] for name in shapes}
    stacks = {name: tensor for name, tensor in stacks.items() if tensor.type not in FLOATS}
    turned = any(
        tensor.shape != shapes[name] and tensor.shape == _turned(shapes[name])
        for name, tensor in stacks.items()
    )
    for name, numbers in stacks.items():
        held = build.checkpoint.stacked(name)
        if not held:
            continue
        experts, n, k = shapes[name]
        if numbers.shape != (_turned(shapes[name]) if turned else shapes[name]):
            raise WeightError(f"{name} has shape {list(numbers.shape)}, expected {[experts, n, k]}")
        found = {part: stored.pop(raws[part]) for part in held if part in raws}
        constants = {part: _matrices(part, found[part], experts, turned) for part in found if part != name}
        for part in build.stacks[name][1]:
            assert part.expert is not None
            at = numbers.place, part.expert * n + part.rows.start, numbers.device, part.expert
            own = Slice(numbers.view, (len(part.rows), k), numbers.type, *at, part.rows.start, turned)
            module = part.name.removesuffix("weight")
            stored[module + held[name]] = own
            for other, values in constants.items():
                cut = _of_rows(other, values[part.expert], part.rows, n)
                stored[module + held[other]] = FileTensor(cut, tuple(cut.shape), found[other].type, None)


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
