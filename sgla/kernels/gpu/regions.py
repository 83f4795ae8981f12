"""Records of steps of many tokens on ranks that have parts of each layer (``--sequence-parallel``). What all
ranks would compute alike between two products, each computes of its own rows alone: a sum gives a rank its
rows, what follows row by row goes on with these, and who reads the rows of all gets them gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.gpu.record import Node, Record, Ref
from sgla.kernels.ops import SharedRows
from sgla.kernels.trace import Size

LEAST = 1024  # tokens of a step from which on its rows are shared out
TOKENS, OWN = Size("tokens", 1), Size("own", 1)
SPLIT, PICKED = "own rows", "picked rows"  # of nodes
NORMS = {ops.add_rms_norm, ops.rms_norm, ops.add_layer_norm, ops.layer_norm}
BY_ROWS = {*NORMS, ops.add, ops.scaled_add, torch.Tensor.mul}
# What makes a row of each token, of which a rank may take its own.
MAKERS = {*BY_ROWS, ops.embedding, ops.linear, ops.arriving, ops.all_reduce}


def parted(record: Record, ranks: SharedRows) -> Record | None:
    """``record`` with such regions. None: there are none, or more rows would be gathered than summed."""
    parting = _Parting(record, ranks)
    for node in record.nodes:
        parting.take(node)
    return parting.finish()


class _Parting:
    def __init__(self, record: Record, ranks: SharedRows) -> None:
        self._before, self._ranks = record, ranks
        self._after = replace(record, nodes=[], dtypes=[*record.dtypes], views={**record.views})
        self._makers = {number: node for node in record.nodes for number in node.results}
        self._parted = set[int]()  # values of which each rank has its own rows
        self._own: dict[int, int] = {}  # of another value: that with a rank's own rows
        self._whole: dict[int, int] = {}  # of a value in parts: that with the rows of all
        self._sums = 0

    def take(self, node: Node) -> None:
        parted = [number for number in node.reads if number in self._parted]
        if node.op is ops.all_reduce and self._begins(node):
            self._sums += 1
            given = {"y": node.given["x"], "x": node.given["x"], "ranks": self._ranks}
            self._put(Node(ops.reduce_scatter, None, given, node.results, OWN))
        elif not parted:
            self._after.nodes.append(node)
        elif node.op is ops.gather and parted == [node.given["x"].number]:
            self._pick(node)
        elif node.op in BY_ROWS and all(self._splits(number) for number in node.reads):
            self._put(self._reading(node, self._split, OWN))
        else:
            self._after.nodes.append(self._reading(node, self._join, node.rows))

    def finish(self) -> Record | None:
        self._after.outputs = [self._join(number) for number in self._before.outputs]
        return self._after if self._sums and len(self._whole) <= self._sums + 1 else None

    def _begins(self, node: Node) -> bool:
        """Whether a sum over the ranks begins a region."""
        first = next((each for each in self._before.nodes if node.results[0] in each.reads), node)
        return node.rows == TOKENS and first.op in BY_ROWS and all(map(self._splits, first.reads))

    def _splits(self, number: int) -> bool:
        maker = self._makers.get(number)
        return number in self._parted or (maker is not None and maker.op in MAKERS and maker.rows == TOKENS)

    def _put(self, node: Node) -> None:
        self._parted.update(node.results)
        self._after.nodes.append(node)

    def _reading(self, node: Node, found: Callable[[int], int], rows: int | Size) -> Node:
        made = node.but({name: Ref(found(x.number)) for name, x in node.given.items() if isinstance(x, Ref)})
        made.rows = rows
        return made

    def _pick(self, node: Node) -> None:
        """Few rows of all: each rank gives those that it has."""
        picked = self._value(node.results[0])
        given = node.given | {"ranks": self._ranks}
        self._after.nodes.append(Node(PICKED, _picked, given, [picked], node.rows))
        given = {"x": Ref(picked), "ranks": self._before.ranks}
        self._after.nodes.append(Node(ops.all_reduce, None, given, node.results, node.rows))

    def _split(self, number: int) -> int:
        """The value with a rank's own rows of that one."""
        if number in self._parted:
            return number
        if number not in self._own:
            self._own[number] = made = self._value(number)
            self._after.views[made] = number
            self._put(Node(SPLIT, _split, {"x": Ref(number), "ranks": self._ranks}, [made], OWN))
        return self._own[number]

    def _join(self, number: int) -> int:
        """The value with the rows of all of that one."""
        if number not in self._parted:
            return number
        if number not in self._whole:
            self._whole[number] = made = self._value(number)
            given = {"x": Ref(number), "ranks": self._ranks}
            self._after.nodes.append(Node(ops.gathered, None, given, [made], OWN))
        return self._whole[number]

    def _value(self, like: int) -> int:
        self._after.dtypes.append(self._before.dtypes[like])
        return len(self._after.dtypes) - 1


def _split(x: Tensor, ranks: SharedRows) -> Tensor:
    return x[ranks.own]


def _picked(x: Tensor, rows: Tensor, ranks: SharedRows) -> Tensor:
    """x[rows] where rows are a rank's own, else zeros."""
    at = rows - ranks.own.start
    return torch.where(((at >= 0) & (at < len(x)))[:, None], x[at.clamp(0, len(x) - 1).long()], 0)
