"""Numbers by which a record multiplies sums over the ranks. What goes into the sum is multiplied instead:
there rules join that with a product, and the sum with the norm that follows."""

from __future__ import annotations

from collections import Counter

import torch

from sgla.kernels import ops
from sgla.kernels.gpu.few import factor_of
from sgla.kernels.gpu.record import Node, Record, Ref


def settle(record: Record) -> None:
    uses = Counter(number for node in record.nodes for number in node.reads)
    uses.update(record.outputs)
    for at in range(1, len(record.nodes)):
        total, scaled = record.nodes[at - 1 : at + 1]
        if _scales(scaled, total) and uses[total.results[0]] == 1:
            record.nodes[at - 1] = scaled.but({"_0": total.given["x"]}, total.results)
            record.nodes[at] = total.but({"x": Ref(total.results[0])}, scaled.results)


def _scales(node: Node, total: Node) -> bool:
    """Whether it multiplies a sum over the ranks by a number."""
    if total.op is not ops.all_reduce or node.op is not torch.Tensor.mul:
        return False
    return node.reads == total.results and factor_of(node) is not None
