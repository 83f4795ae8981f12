"""Record a forward pass once, run it every step with one native call.

    program = Program.record(lambda batch: model.logits(model.forward(batch, kv, batch.sample_rows)),
                             ProgramLimits(step_tokens, max_rows), threads)
    logits = program.run(batch)         # view of the program's memory, [S, V], valid until the next run

While ``record`` calls the function, the ops of ``kernels/ops.py`` compute nothing: each appends an
instruction and returns a symbolic tensor on the meta device whose row count stands for T (tokens) or S
(sampled rows). Torch operations on such tensors are noted too. Neighbouring instructions are then fused,
buffers get places in one arena by their live ranges, and torch operations, ``ops.inplace`` and ``ops.call``
split the program into native segments with a Python call between them.

``record`` moves the weights it meets into the kernels' own order (``Weight.to_panels``). Raises BuildError
where there are no native kernels, and NotRecorded where the function does what no program can: then run the
model eagerly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.fuse import Body, Buffer, Node, fuse, place
from sgla.kernels.cpu.instructions import LOWERINGS
from sgla.kernels.cpu.native import DRAW, Instr, Library, Opcode, Step, Team, library, memory
from sgla.kernels.cpu.record import INPUTS, Recorder
from sgla.kernels.cpu.states import StateCalls
from sgla.kernels.dispatch import using
from sgla.kernels.trace import Running


class ProgramLimits(NamedTuple):
    tokens: int  # T at most
    sampled: int  # S at most


@dataclass(slots=True)
class _Native:
    """A run of instructions between two Python calls."""

    code: ctypes.Array[Instr]


@dataclass(slots=True)
class _Call:
    fn: Callable[..., None]
    views: list[tuple[Tensor, bool]]  # and whether its rows are the sampled ones
    bodies: tuple[list[Routine], ...]  # further arguments of ``fn``: none, or the routines


class Routine:
    """A body, ready to run:
    float32 rows ``[n, k]`` -> a view of ``[n, m]``, valid until the next routine runs."""

    def __init__(self, program: Program, body: Body, rows: dict[bool, int]) -> None:
        self._program, self._body = program, body
        body.nodes = fuse(body.nodes, [body.made], program.isa)
        self.nbytes = place(body.nodes, [body.made], rows)
        self._code = (Instr * len(body.nodes))(*map(encode, body.nodes))
        self._step = Step()

    def __call__(self, x: Tensor) -> Tensor:
        count, program = len(x), self._program
        rows = {False: count}
        _view(program.scratch, self._body.given, rows).copy_(x)
        self._step.tokens = count
        program.execute(self._code, self._step, program.scratch.data_ptr())
        return _view(program.scratch, self._body.made, rows)


class Program:
    """A recorded function of a ForwardBatch, with threads of its own; one step at a time. ``taps``: what is
    shown the other outputs than the first."""

    taps: Sequence[Callable[[Tensor], None]] = ()

    def __init__(
        self,
        nodes: list[Node],
        outputs: list[Buffer],
        limits: ProgramLimits,
        lib: Library,
        team: Team,
        step: Step,
        running: Running,
    ) -> None:
        self.limits = limits
        self.nodes = nodes
        self.isa = lib.isa
        self._running = running
        self._lib = lib
        self._team, self._step = team, step
        rows = {False: limits.tokens, True: limits.sampled}
        self.arena = memory.take(place(nodes, outputs, rows))
        self._base = self.arena.data_ptr()
        self._outputs = [(_view(self.arena, b, rows), b.sampled) for b in outputs]
        self._draw: Instr | None = None
        self._segments = self._assemble(rows, outputs[0])
        calls = [segment for segment in self._segments if isinstance(segment, _Call)]
        needed = [routine.nbytes for call in calls for bodies in call.bodies for routine in bodies]
        self.scratch = memory.take(max(needed, default=0))

    @classmethod
    def record(
        cls,
        fn: Callable[[ForwardBatch], Tensor],
        limits: ProgramLimits,
        threads: int = 1,
        isa: str | None = None,
    ) -> Program:
        """Record ``fn(batch) -> tensor``, the output of an op.
        ``isa`` forces an instruction-set level (tests)."""
        lib = library(isa)
        team, step = Team(lib, threads), Step()
        recorder = Recorder(LOWERINGS, lib.isa, StateCalls(lib, team, step).bodies)
        batch = recorder.batch()
        with using(recorder):
            made = recorder.buffer(fn(batch))
        outputs = [made, *(buffer for _, buffer in recorder.taps)]
        nodes = fuse(recorder.finish(), outputs, lib.isa)
        program = cls(nodes, outputs, limits, lib, team, step, recorder.running)
        program.taps = [fn for fn, _ in recorder.taps]
        return program

    def run(self, batch: ForwardBatch) -> Tensor:
        """Compute the step; batch tensors are contiguous int32 on the CPU. KV pages are written as recorded,
        and so are the tokens of ``batch.draws`` where the output is rows of logits."""
        step = self._fill(batch)
        self._running.batch = batch
        if self._draw is not None:
            draws = np.empty(0, DRAW) if batch.draws is None else batch.draws
            assert draws.dtype == DRAW
            self._draw.a[0], self._draw.p[0] = len(draws), draws.ctypes.data
        for segment in self._segments:
            if isinstance(segment, _Native):
                self.execute(segment.code, step, self._base)
            else:
                counts = (step.tokens, step.sampled)
                segment.fn([view[: counts[b]] for view, b in segment.views], *segment.bodies)
        for fn, (view, sampled) in zip(self.taps, self._outputs[1:]):
            fn(view[: step.sampled if sampled else step.tokens])
        view, sampled = self._outputs[0]
        return view[: step.sampled if sampled else step.tokens]

    def _fill(self, batch: ForwardBatch) -> Step:
        step = self._step
        step.tokens, step.rows, step.sampled = batch.tokens, batch.rows, batch.sample_rows.numel()
        assert step.tokens <= self.limits.tokens
        assert step.sampled <= self.limits.sampled
        step.page_size, (slots, step.max_pages) = batch.page_size, batch.page_table.shape[-2:]
        step.table_size = slots * step.max_pages
        for name in INPUTS:
            tensor = getattr(batch, name)
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            setattr(step, name, tensor.data_ptr())
        return step

    def execute(self, code: ctypes.Array[Instr], step: Step, base: int) -> None:
        """Run instructions with this program's threads; addresses are relative to ``base``."""
        self._lib.dll.sgla_run(self._team.handle, code, len(code), step, base)

    def _assemble(self, rows: dict[bool, int], output: Buffer) -> list[_Native | _Call]:
        segments: list[_Native | _Call] = []
        pending: list[Instr] = []

        def flush() -> None:
            if pending:
                segments.append(_Native((Instr * len(pending))(*pending)))
                pending.clear()

        for node in self.nodes:
            if node.fn is None:
                pending.append(encode(node))
                continue
            flush()
            buffers = dict.fromkeys(b for b in (*node.inputs, *node.outputs) if b is not None)
            views = [(_view(self.arena, b, rows), b.sampled) for b in buffers]
            routines = [Routine(self, body, rows) for body in node.bodies]
            segments.append(_Call(node.fn, views, (routines,) if routines else ()))
        if output.sampled and output.dtype == torch.float32:
            pending.append(encode(Node(Opcode.DRAW, True, [output, None], [], k=output.stride)))
        flush()
        last = segments[-1]
        if isinstance(last, _Native) and last.code[-1].op == Opcode.DRAW:
            self._draw = last.code[-1]
        return segments


def _view(arena: Tensor, b: Buffer, rows: dict[bool, int]) -> Tensor:
    nbytes = rows[b.sampled] * b.stride * b.dtype.itemsize
    return arena[b.offset : b.offset + nbytes].view(b.dtype).view(rows[b.sampled], b.stride)


def encode(node: Node) -> Instr:
    instr = Instr(op=node.op, sampled=node.sampled, n=node.n, k=node.k)
    for slot in range(2):
        given, made = node.inputs[slot], node.outputs[slot] if slot < len(node.outputs) else None
        instr.input[slot] = -1 if given is None else given.offset
        instr.output[slot] = -1 if made is None else made.offset
    for slot, tensor in enumerate(node.tensors):
        instr.p[slot] = None if tensor is None else tensor.data_ptr()
    for slot, value in enumerate(node.a):
        instr.a[slot] = value
    for slot, number in enumerate(node.f):
        instr.f[slot] = number
    return instr
