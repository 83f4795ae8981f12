"""Matrices whose numbers lie in one row, as bitsandbytes and HQQ store them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.quant.coded import GROUP, Coded
from sgla.quant.quants import Grouped, Quants
from sgla.quant.weight import StoredTensor, Weight, storage

_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # of what bitsandbytes calls a file's storage


@dataclass(frozen=True)
class Table:
    """bitsandbytes' numbers of four bits, each a place in ``table`` [16] times the largest number of its
    block of the row. ``packed`` uint8 ``[n * k / 2, 1]``, the first of two in the upper bits, or the same
    bytes in another type of ``_BYTES``; ``largest`` float32 ``[blocks]``."""

    packed: StoredTensor
    table: Tensor
    largest: Tensor
    shape: tuple[int, ...]
    block: int

    def dense(self, rows: range | None = None) -> Tensor:
        rows, k = rows or range(self.shape[0]), self.shape[1]
        codes = self._codes(rows)
        blocks = torch.arange(rows.start * k, rows.stop * k, device=codes.device) // self.block
        table, largest = self.table.to(codes.device), self.largest.to(codes.device)
        return (table[codes.long()] * largest[blocks]).view(len(rows), k)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """As it is, in a storage with the same table."""
        made, k = storage(kind), self.shape[1]
        if not issubclass(made, Coded):
            return made.read(self, rows, columns)
        table = made.values(self.table.device)
        if k % GROUP or self.block % GROUP or not torch.allclose(self.table, table, atol=1e-3):
            raise WeightError(
                f"{kind} weights are kept with their table, in blocks of a multiple of {GROUP} in rows; "
                f"these have {k} channels in blocks of {self.block}, or another table: --quantization none "
                "computes them in --dtype"
            )
        codes, starts = self._codes(rows), torch.arange(rows.start * k, rows.stop * k, GROUP)
        scale = self.largest[(starts // self.block).to(self.largest.device)].to(codes.device)
        return made.of(codes.view(len(rows), k), scale.view(len(rows), -1)).cut(columns)

    def _codes(self, rows: range) -> Tensor:
        """uint8, one behind the other."""
        first, last = rows.start * self.shape[1], rows.stop * self.shape[1]
        each = 2 * _BYTES[self.packed.type]  # numbers in one of ``packed``
        found = self.packed.values(range(first // each, -(-last // each)))
        pairs = found.flatten().view(torch.uint8)
        return torch.stack([pairs >> 4, pairs & 15], -1).flatten()[first % each :][: last - first]


def table_of(module: str, stored: dict[str, StoredTensor], n: int, k: int) -> Table:
    """Of bitsandbytes' tensors of a layer, without its name. Raises WeightError."""
    state = _state(module, stored)
    block, shape, lengths = state.get("blocksize"), state.get("shape"), stored["absmax"].shape
    if shape != [n, k] or type(block) is not int or block < 1:
        raise WeightError(f"{module}.weight.quant_state has shape {shape} and blocks of {block}")
    if max(lengths, default=1) != prod(lengths):
        raise WeightError(
            f"{module}.weight.absmax has shape {list(lengths)}, the order of a CPU's kernel: save the model "
            "before it has run"
        )
    nested = [stored[part] for part in ("nested_absmax", "nested_quant_map") if part in stored]
    if len(nested) != 2 * (stored["absmax"].type == "U8"):
        raise WeightError(
            f"{module}.weight.absmax holds {stored['absmax'].type}; it is U8 beside nested_absmax and "
            "nested_quant_map, and alone floating point"
        )
    largest = stored["absmax"].values().flatten()
    if nested:
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or size < 1 or not isinstance(offset, int | float):
            raise WeightError(f"{module}.weight.quant_state has nested blocks of {size} behind {offset}")
        outer, inner = (tensor.values().flatten().float() for tensor in nested)
        outer = outer.repeat_interleave(size)[: len(largest)]
        if len(outer) != len(largest) or len(inner) != 256:
            raise WeightError(f"{module}.weight.nested_absmax does not fit {len(largest)} blocks")
        largest = inner[largest.long()] * outer + offset
    table = stored["quant_map"].values().flatten().float()
    wanted = {"absmax": -(-n * k // block), "quant_map": 16}
    found = {"absmax": len(largest), "quant_map": len(table)}
    for part, size in wanted.items():
        if found[part] != size:
            raise WeightError(f"{module}.weight.{part} has {found[part]} values, expected {size}")
    shape, size = tuple(stored["weight"].shape), -(-n * k // 2 // _BYTES[stored["weight"].type])
    if shape not in ((size, 1), (size,)):
        raise WeightError(f"{module}.weight has shape {list(shape)}, expected {[size, 1]}")
    return Table(stored["weight"], table, largest.float(), (n, k), block)


def _state(module: str, stored: dict[str, StoredTensor]) -> dict[str, Any]:
    """What a layer's JSON says."""
    for kind in ("nf4", "fp4"):
        if (found := stored.get(f"quant_state.bitsandbytes__{kind}")) is not None:
            try:
                state = json.loads(bytes(found.values().flatten().tolist()))
            except (ValueError, TypeError) as error:
                raise WeightError(f"{module}.weight.quant_state is no JSON: {error}") from error
            if isinstance(state, dict):
                return state
    raise WeightError(f"{module}.weight.quant_state is missing or no object")


class Planes(Grouped):
    """HQQ's numbers ``[R, C]`` of ``bits`` bits, groups in rows (axis 1) or columns (axis 0), which lie in
    ``packed`` ``[R / per word, C]``: the first rows in the uppermost bits. Zeros and scales, one for each
    group, are floating-point numbers."""

    axis = 1

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        q = self._places(rows)[1]
        zero, scale = (t.values().flatten().float() for t in (self.zeros, self.scales))
        per_row = self.shape[1] // self.group
        groups = slice(rows.start * per_row, rows.stop * per_row)
        return Quants(q.view(len(rows), -1), zero[groups].view(-1, per_row), scale[groups].view(-1, per_row))

    def _places(self, rows: range) -> tuple[Tensor, Tensor]:
        """Where the numbers of rows are in ``[R, C]``, int64, and what they are, uint8."""
        k = self.shape[1]
        packed = self.packed.values()
        flat = torch.arange(rows.start * k, rows.stop * k, device=packed.device)
        width = packed.shape[1]
        row, column = flat // width, flat % width
        top = 27 if self.bits == 3 else 8 - self.bits
        words = packed[row % len(packed), column].int()
        q = words >> (top - self.bits * (row // len(packed))).int() & (1 << self.bits) - 1
        return flat, q.to(torch.uint8)


class PlanesAcross(Planes):
    axis = 0

    def dense(self, rows: range | None = None) -> Tensor:
        assert self.zeros is not None
        rows = rows or range(self.shape[0])
        flat, q = self._places(rows)
        zero, scale = (t.values().flatten().float() for t in (self.zeros, self.scales))
        group = flat % self.packed.shape[1]
        return ((q - zero[group]) * scale[group]).view(len(rows), -1)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)
