"""Tensors as checkpoints have them, out of what layers have stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sgla.layers.build import Build, Crossed, Reordered, Values
from sgla.quant.weight import SourceTensor

Mended = Callable[[SourceTensor], SourceTensor]


def shape_of(build: Build, name: str, mended: Mended) -> tuple[int, ...] | None:
    """Of the tensor, or stack, ``name``. None: it is not here, or cannot be told. ``mended``: what layers
    want of it."""
    parts = [part.name for part in build.stacks[name][1]] if name in build.stacks else [name]
    if not all(part in build.table and build.table[part].give is not None for part in parts):
        return None
    shape = _shape(build, name)
    return shape[::-1] if isinstance(_mended(shape, mended), Crossed) else shape


def rows_of(build: Build, name: str, mended: Mended, rows: range) -> Tensor:
    """Of one that has a shape: float32 on the CPU, NaN where other ranks have them."""
    shape = _shape(build, name)
    wanted = _mended(shape, mended)
    if isinstance(wanted, Crossed):
        return _rows(build, name, range(shape[0])).t()[rows.start : rows.stop]
    if isinstance(wanted, Reordered):
        return _rows(build, name, range(shape[0]))[wanted.order.argsort()[rows.start : rows.stop]]
    return _rows(build, name, rows)


def _shape(build: Build, name: str) -> tuple[int, ...]:
    return build.stacks[name][0] if name in build.stacks else build.table[name].shape


def _mended(shape: tuple[int, ...], mended: Mended) -> SourceTensor:
    return mended(Values(torch.empty(shape, device="meta")))


def _rows(build: Build, name: str, rows: range) -> Tensor:
    if name not in build.stacks:
        return _given(build, name, rows)
    shape, parts = build.stacks[name]
    found = torch.full((len(rows), *shape[1:]), torch.nan, device="cpu")
    for part in parts:
        first, last = max(rows.start, part.rows.start), min(rows.stop, part.rows.stop)
        if part.expert is not None and part.expert in rows:
            given = _given(build, part.name, range(len(part.rows)))
            found[part.expert - rows.start, part.rows.start : part.rows.stop] = given
        elif part.expert is None and first < last:
            inside = range(first - part.rows.start, last - part.rows.start)
            found[first - rows.start : last - rows.start] = _given(build, part.name, inside)
    return found


def _given(build: Build, name: str, rows: range) -> Tensor:
    give = build.table[name].give
    assert give is not None
    return give(rows)
