"""Adapters in a record. What one adds to a linear layer is a value of its own there, the layer's ``addend``;
here it is added in place, before or behind the layer, so that rules take the layer as if it had none."""

from __future__ import annotations

from collections import Counter

from sgla.kernels import ops
from sgla.kernels.gpu.record import Node, Record, Ref
from sgla.kernels.lora import lora
from sgla.kernels.triton.lora import expand, shrink

SHRINK, EXPAND = "shrink", "expand"  # of nodes


def settle(record: Record) -> None:
    """Replace each ``lora`` by a ``shrink`` before the layer, and an ``expand``: onto the residual stream
    that the layer's output joins, where nobody else reads that, so that layer, add and norm may be one
    kernel; else onto the output."""
    makers = {number: node for node in record.nodes for number in node.results}
    joined = _joined(record, makers)  # numbers of residuals, by the number of what a lora makes
    nodes: list[Node] = []
    renamed: dict[int, Ref] = {}  # of residuals: what stands for them behind an expand
    for node in record.nodes:
        stale = {name: renamed[x.number] for name, x in _refs(node) if x.number in renamed}
        node = node.but(stale) if stale else node
        addend = _addend(node)
        if addend is not None and addend in joined:
            nodes.append(node.but({"addend": None}))
        elif addend is not None:
            made = _value(record, node.results[0])
            nodes.append(node.but({"addend": None}, [made]))
            nodes.append(_expand(made, makers[addend], node.results[0]))
        elif node.op is not lora:
            nodes.append(node)
        else:
            nodes.append(Node(SHRINK, shrink, node.given, node.results, node.rows))
            if (residual := joined.get(node.results[0])) is not None:
                made = _value(record, residual)
                nodes.append(_expand(residual, node, made))
                renamed[residual] = Ref(made)
    record.nodes = nodes


def _expand(y: int, added: Node, result: int) -> Node:
    """What an adapter adds, onto y."""
    given = {"y": Ref(y), "inner": Ref(added.results[0])}
    given |= {name: added.given[name] for name in ("stack", "rows", "sampled")}
    return Node(EXPAND, expand, given, [result], added.rows, overwrites=y)


def _joined(record: Record, makers: dict[int, Node]) -> dict[int, int]:
    """Of what is added to a layer whose output alone joins a residual that is there before, and that nobody
    else reads: the number of that residual."""
    uses = Counter(number for node in record.nodes for number in node.reads)
    uses.update(record.outputs)
    order = {id(node): place for place, node in enumerate(record.nodes)}
    readers = {number: node for node in record.nodes for number in node.reads}
    found: dict[int, int] = {}
    for layer in record.nodes:
        addend, reader = _addend(layer), readers.get(layer.results[0]) if layer.results else None
        if addend is None or reader is None or reader.op is not ops.add_rms_norm:
            continue
        output, residual = reader.reads[:2]
        maker = makers.get(residual)
        if output != layer.results[0] or maker is None or residual in record.views:
            continue
        alone = uses[residual] == uses[output] == 1
        if alone and order[id(maker)] < order[id(makers[addend])]:
            found[addend] = residual
    return found


def _addend(node: Node) -> int | None:
    """The value that an adapter adds to a layer."""
    x = node.given.get("addend") if node.op in (ops.linear, ops.logits) else None
    return x.number if isinstance(x, Ref) else None


def _refs(node: Node) -> list[tuple[str, Ref]]:
    return [(name, x) for name, x in node.given.items() if isinstance(x, Ref)]


def _value(record: Record, like: int) -> int:
    record.dtypes.append(record.dtypes[like])
    return len(record.dtypes) - 1
