"""The recorded form of a program, and the passes over it: fusion, input types, places in the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgla.kernels.cpu.native import Opcode
from sgla.kernels.cpu.panels import FORMATS, PAIR_LEVELS, WIDTH

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}

# Places in Node.a that linear, act_mul, rms_norm and attention give to flags (csrc/cpu).
A_KIND, A_ACT, A_X_BF16 = 0, 1, 2
A_Y_BF16 = {Opcode.LINEAR: 3, Opcode.RMS_NORM: 0, Opcode.ADD_RMS_NORM: 0, Opcode.ATTENTION: 8}


@dataclass(slots=True, eq=False)
class Buffer:
    """Rows of activations: T of them, or S if ``sampled``."""

    width: int
    sampled: bool
    dtype: torch.dtype = torch.float32
    offset: int = -1

    @property
    def stride(self) -> int:
        """Elements from row to row: bfloat16 rows have an even length."""
        return self.width + self.width % 2 if self.dtype == torch.bfloat16 else self.width


@dataclass(slots=True, eq=False)
class Node:
    """One instruction, or a Python call. Field meanings: see each op in csrc/cpu."""

    op: Opcode
    sampled: bool
    inputs: list[Buffer | None]  # always two
    outputs: list[Buffer]
    tensors: list[Tensor | None] = field(default_factory=list)
    n: int = 0
    k: int = 0
    a: list[int] = field(default_factory=list)
    f: list[float] = field(default_factory=list)
    fn: Callable[..., None] | None = None  # gets views of the distinct buffers, and a Routine for each body
    keep: object = None  # what must outlive the program, beside the tensors
    bodies: list[Body] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Body:
    """Instructions that a Python call runs by itself, on rows of its choice."""

    nodes: list[Node]
    given: Buffer
    made: Buffer


def fuse(nodes: list[Node], outputs: list[Buffer], isa: str) -> list[Node]:
    """Fewer passes over memory, the same numbers. Changes the nodes it is given."""
    nodes = _fuse_activation(nodes, outputs)
    nodes = _fuse_residual(nodes, outputs)
    return _use_bf16(nodes, outputs) if isa in PAIR_LEVELS else nodes


def _uses(nodes: list[Node], outputs: list[Buffer]) -> dict[Buffer, int]:
    counts: dict[Buffer, int] = {}
    for b in [*outputs, *(b for node in nodes for b in node.inputs)]:
        if b is not None:
            counts[b] = counts.get(b, 0) + 1
    return counts


def _producers(nodes: list[Node]) -> dict[Buffer, Node]:
    return {b: node for node in nodes if node.fn is None for b in node.outputs}


def _fuse_activation(nodes: list[Node], outputs: list[Buffer]) -> list[Node]:
    """linear, act_mul -> linear with a gated epilogue (gate and up panels side by side)."""
    uses, made, kept = _uses(nodes, outputs), _producers(nodes), []
    for node in nodes:
        x = node.inputs[0]
        source = made.get(x) if x is not None else None
        if (
            node.op == Opcode.ACT_MUL
            and source is not None
            and source.op == Opcode.LINEAR
            and source.inputs[1] is None
            and uses[source.outputs[0]] == 1
            and node.n % WIDTH == 0
        ):
            source.a[A_ACT] = node.a[A_ACT]
            source.outputs = node.outputs
        else:
            kept.append(node)
    return kept


def _fuse_residual(nodes: list[Node], outputs: list[Buffer]) -> list[Node]:
    """linear, add -> linear that adds; linear, add_rms_norm -> linear that adds, rms_norm."""
    uses, made, kept = _uses(nodes, outputs), _producers(nodes), []
    order = {b: index for index, node in enumerate(nodes) for b in node.outputs}
    for node in nodes:
        source, other = _addend(node, uses, made, order)
        if source is None:
            kept.append(node)
            continue
        source.inputs[1] = other
        source.outputs = [node.outputs[-1]]
        if node.op == Opcode.ADD_RMS_NORM:
            node.op, node.inputs, node.outputs = Opcode.RMS_NORM, [source.outputs[0], None], node.outputs[:1]
            kept.append(node)
    return kept


def _addend(
    node: Node, uses: dict[Buffer, int], made: dict[Buffer, Node], order: dict[Buffer, int]
) -> tuple[Node | None, Buffer | None]:
    """The linear whose output ``node`` adds to something that exists before that linear,
    and that something."""
    if node.op not in (Opcode.ADD, Opcode.ADD_RMS_NORM):
        return None, None
    first, second = node.inputs
    for x, other in ((first, second), (second, first)):
        assert x is not None
        assert other is not None
        source = made.get(x)
        fits = source is not None and source.op == Opcode.LINEAR and uses[x] == 1
        if (
            fits
            and source is not None
            and source.inputs[1] is None
            and not source.a[A_ACT]
            and order[other] < order[x]
        ):
            return source, other
    return None, None


def _use_bf16(nodes: list[Node], outputs: list[Buffer]) -> list[Node]:
    """Give bfloat16 linears bfloat16 inputs, for the CPU's bfloat16 dot product.

    The producer writes them if nobody else wants float32; otherwise a conversion is inserted.
    """
    uses, made = _uses(nodes, outputs), _producers(nodes)
    linears = [n for n in nodes if n.op == Opcode.LINEAR and FORMATS[n.a[A_KIND]] == "bf16"]
    wanted: dict[Buffer, int] = {}
    for node in linears:
        assert node.inputs[0] is not None
        wanted[node.inputs[0]] = wanted.get(node.inputs[0], 0) + 1
    converted: dict[Buffer, Buffer] = {}
    result = []
    for node in nodes:
        x = node.inputs[0]
        if node.fn is not None and x is not None:
            converted.pop(x, None)  # it may change in place
        if node in linears and x is not None:
            node.a[A_X_BF16] = 1
            source = made.get(x)
            if (
                source is not None
                and source.op in A_Y_BF16
                and source.outputs[0] is x
                and wanted[x] == uses[x]
            ):
                source.a[A_Y_BF16[source.op]] = 1
                x.dtype = torch.bfloat16
            elif x in converted:
                node.inputs[0] = converted[x]
            else:
                narrow = converted[x] = Buffer(x.width, x.sampled, torch.bfloat16)
                result.append(Node(Opcode.TO_BF16, x.sampled, [x, None], [narrow], k=x.width))
                node.inputs[0] = narrow
        result.append(node)
    return result


def place(nodes: list[Node], outputs: list[Buffer], rows: dict[bool, int]) -> int:
    """Give every buffer its offset, large ones first into the lowest gap;
    returns the arena's size in bytes."""
    born: dict[Buffer, int] = {}
    dies: dict[Buffer, int] = {}
    for time, node in enumerate(nodes):
        for b in (*node.outputs, *node.inputs):
            if b is not None:
                born.setdefault(b, time)
                dies[b] = time
    for b in outputs:
        dies[b] = len(nodes)
    size = {b: -(-rows[b.sampled] * b.stride * b.dtype.itemsize // 64) * 64 for b in born}
    placed: list[Buffer] = []
    for b in sorted(born, key=lambda b: (-size[b], born[b])):
        b.offset = 0
        for other in sorted(placed, key=lambda o: o.offset):
            alive_together = born[b] <= dies[other] and born[other] <= dies[b]
            if alive_together and other.offset < b.offset + size[b] and b.offset < other.offset + size[other]:
                b.offset = other.offset + size[other]
        placed.append(b)
    return max((b.offset + size[b] for b in placed), default=0)
