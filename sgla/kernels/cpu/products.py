"""Products of steps that run op by op: weights stay in the kernels' own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.fuse import Buffer, Node
from sgla.kernels.cpu.instructions import linear_node
from sgla.kernels.cpu.native import Instr, Step
from sgla.kernels.cpu.program import Program, encode
from sgla.kernels.dispatch import Op, using

if TYPE_CHECKING:
    from sgla.quant.weight import Weight

R = TypeVar("R")


class Products:
    """A dispatcher that runs ``ops.linear`` by the threads of a ``program``, one instruction at a time, and
    the bodies of all other ops."""

    def __init__(self, program: Program) -> None:
        self._program, self._step = program, Step()

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if op is ops.linear:
            made: Any = self._linear(*args, **kwargs)
            return made  # type: ignore[no-any-return]
        return op.body(*args, **kwargs)

    def _linear(
        self, x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        if w.panels is None or x.dtype != torch.float32 or addend is not None:
            return ops.linear.body(x, w, bias, addend)
        x, made = x.contiguous(), torch.empty(len(x), w.n)
        if not len(x):
            return made  # type: ignore[no-any-return]
        source, out = Buffer(w.k, False, offset=x.data_ptr()), Buffer(w.n, False, offset=made.data_ptr())
        node: Node = linear_node(w.panels, bias, [source, None], out)
        self._step.tokens = len(x)
        self._program.execute((Instr * 1)(encode(node)), self._step, 0)
        return made


def op_by_op(
    forward: Callable[[ForwardBatch], Tensor], plain: Callable[[ForwardBatch], Tensor]
) -> Callable[[ForwardBatch], Tensor]:
    """``forward`` with products by the kernels of ``plain``, if that is a program's."""
    program = getattr(plain, "__self__", None)
    if not isinstance(program, Program):
        return forward
    products = Products(program)

    def run(batch: ForwardBatch) -> Tensor:
        with using(products):
            return forward(batch)

    return run
