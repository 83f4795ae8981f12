"""A model's forward pass on a GPU: recorded once, rewritten for each kind of step, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sgla.kernels import lora, ops
from sgla.kernels.cuda import batch_gemm, integer_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.cuda.router import MAX_ROWS as ROUTED
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import adapters, e4m3, factors, integers, invariant, mixture, regions, whole_step
from sgla.kernels.gpu.aside import Aside, Turns, added_aside, by_turns
from sgla.kernels.gpu.ops import LOWERINGS, Attend, GpuOps
from sgla.kernels.gpu.record import Node, Record, Recorder, Ref, resolved
from sgla.kernels.gpu.rewrite import Asked, Work
from sgla.kernels.gpu.rules import apply
from sgla.kernels.gpu.tiles import SENT, SENT_ROUNDS
from sgla.kernels.gpu.tuning import Algorithm, Product, algorithm_for
from sgla.kernels.ops import Layer, SharedRows, kept_by
from sgla.kernels.rehearsal import under_way
from sgla.kernels.trace import STAND_INS, NotRecorded

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch
    from sgla.model.base import CausalLM

KEPT = 512  # programs
# Tokens up to which the scheduler makes steps of any number beside streams, and up to which of halves of it.
FEW, MANY = 512, 2048


class Output(NamedTuple):
    """Logits, and whether the layer that computes them has drawn from them."""

    logits: Tensor
    drawn: bool


# Called before what reads or writes what layers keep, with that; with nothing, for all of it.
Awaits = Callable[[list[Tensor]], None]


class Call(NamedTuple):
    """``fn(**fixed, **values)``. ``dead``: values that nobody reads later; ``kept``: what it reads or writes
    of what layers keep; ``sums``: the ranks that add up aside."""

    fn: Callable[..., Any]
    fixed: dict[str, Any]
    values: list[tuple[str, int]]
    results: list[int]
    dead: list[int]
    kept: list[Tensor]
    sums: Aside | None


class Program:
    """The steps of one record for one kind of step. ``lasts``: it has tables on the GPU, which a graph may
    read."""

    def __init__(self, gpu: GpuOps, work: Work) -> None:
        self.work, self.outputs = work, work.record.outputs
        self._inputs = work.record.inputs
        self._count = work.values
        self._steps = _steps(gpu, work)
        self.lasts = any(node.op == whole_step.NAME for node in work.nodes.values())

    def __call__(self, given: dict[str, Any], awaits: Awaits | None = None) -> list[Any]:
        return by_turns([self.turns(given, awaits)])[0]

    def turns(self, given: dict[str, Any], awaits: Awaits | None = None) -> Turns:
        """Yields while the ranks add up aside."""
        values: list[Any] = [given.get(name) for name in self._inputs]
        values += [None] * (self._count - len(values))
        for fn, fixed, reads, results, dead, kept, sums in self._steps:
            if awaits is not None and kept:
                awaits(kept)
            made = fn(**fixed, **{name: values[number] for name, number in reads})
            if len(results) == 1:
                values[results[0]] = made
            else:
                for number, value in zip(results, made):
                    values[number] = value
            if sums is not None:
                launched = sums.launched()
                yield
                torch.cuda.current_stream().wait_event(launched)
            for number in dead:
                values[number] = None
        return [values[number] for number in self.outputs]


def _steps(gpu: GpuOps, work: Work) -> list[Call]:
    nodes = list(work.nodes.values())
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for number in (*node.reads, *node.results):
            last[number] = at
    ends: list[list[int]] = [[] for _ in nodes]
    for number, at in last.items():
        if number not in work.record.outputs:
            ends[at].append(number)
    steps = []
    for node, dead in zip(nodes, ends):
        fixed = {k: resolved(v, work.asked.sizes) for k, v in node.given.items() if not isinstance(v, Ref)}
        reads = [(k, v.number) for k, v in node.given.items() if isinstance(v, Ref)]
        ranks = fixed.get("ranks")
        sums = ranks if isinstance(ranks, Aside) else None
        steps.append(Call(node.fn or _plain(gpu, node), fixed, reads, node.results, dead, _kept(node), sums))
    return steps


def _kept(node: Node) -> list[Tensor]:
    """By whatever argument it comes: tensors of weights are among them, which nobody awaits."""
    leaves = tree_leaves(list(node.given.values()), is_leaf=lambda x: isinstance(x, Layer))
    layers = [x for x in leaves if isinstance(x, Layer)]
    return [x for layer in layers for x in kept_by(layer)] + [x for x in leaves if isinstance(x, Tensor)]


def _plain(gpu: GpuOps, node: Node) -> Callable[..., Any]:
    """What computes a node that no rule gave a kernel."""
    if node.op == "heads":
        return gpu.heads
    return partial(LOWERINGS[node.op], gpu) if node.op in LOWERINGS else node.op.body  # type: ignore[no-any-return]


# What a record computes: ``hidden`` the final hidden states of a batch, ``step`` a rank's part of its logits;
# ``part`` and ``logits`` such a part of, or all, the logits of hidden states that are there.
Computes = Literal["hidden", "step", "part", "logits"]


class Half(NamedTuple):
    """A batch of a step that is two, of which ``rows`` are wanted (None: all), its attention, and its
    adapters, if rows of the step have any."""

    batch: ForwardBatch
    rows: Tensor | None
    attend: Attend
    placed: lora.Placed | None = None


class RecordedForward:
    """The forward pass of ``model`` with the pages ``kv``. What cannot be recorded runs op by op, and so do
    steps that read pictures. The final hidden states of all tokens of a batch go to ``final``, too."""

    def __init__(
        self,
        model: CausalLM,
        kv: list[Layer],
        gpu: GpuOps,
        adapters: lora.Rows | None = None,
        final: Tensor | None = None,
    ) -> None:
        self._model, self._kv, self._gpu, self._adapters = model, kv, gpu, adapters
        self._final, self._lockstep, self._rows = final, model.shard.lockstep, model.shard.rows
        self._counted = ("tokens", "sampled") if self._lockstep is None else ("tokens", "sampled", "gathered")
        self.awaits: Awaits | None = None  # of the step that runs
        self.watched = False  # somebody looks into the steps that run: op by op
        self._records: dict[tuple[Computes, bool, bool, bool], Record | None] = {}
        self._parted: dict[int, Record | None] = {}  # of a record, by identity: with rows shared out
        self._aside: dict[int, Record] = {}  # the same: with sums beside other kernels
        self._programs: dict[Any, Program] = {}
        self.notes: list[str] = []

    def hidden(self, batch: ForwardBatch, rows: Tensor | None = None, decode: Any = None) -> Tensor:
        """The final hidden states ``[S, d]`` of the tokens ``rows`` int32[S], or ``[T, d]`` of all.
        ``decode``: see ``step``."""
        return self._run("hidden", batch, rows, decode=decode)[0]

    def halves(self, halves: Sequence[Half]) -> list[Tensor]:
        """``hidden`` of each, whose layers take turns, so that ranks add up beside the products of others.
        What cannot be recorded is computed one after the other. A row of one may go on in the next."""
        record = None if self.watched else self._record("hidden", halves[0].rows is not None)
        if record is None:
            return [self._alone(half) for half in halves]
        if id(record) not in self._aside:
            self._aside[id(record)] = added_aside(record)
        ready = [self._ready(self._aside[id(record)], half.batch, half.rows) for half in halves]
        turns = [self._turns(half, *each) for half, each in zip(halves, ready)]
        return [values[0] for values in by_turns(turns)]

    def _alone(self, half: Half) -> Tensor:
        with self._taking(half):
            return self.hidden(half.batch, half.rows)

    def _turns(self, half: Half, program: Program, given: dict[str, Any]) -> Turns:
        turns = program.turns(given, self.awaits)
        while True:
            with self._taking(half):
                try:
                    next(turns)
                except StopIteration as end:
                    return end.value
            yield

    def _taking(self, half: Half) -> AbstractContextManager[None]:
        """Meanwhile its attention and adapters are the step's."""
        if half.placed is not None:
            assert self._adapters is not None
            self._adapters.place(half.placed)
        return self._gpu.attending(half.attend)

    def step(
        self,
        batch: ForwardBatch,
        rows: Tensor | None,
        out: Tensor,
        draw: batch_gemm.DrawInputs | None = None,
        decode: Any = None,
    ) -> Output:
        """The logits of this rank's part of the vocabulary, float32, if possible in ``out``. ``draw``: also
        draw, if the kernel can. ``decode``: all rows are decode rows, and this kernel takes q, k and v from
        the projection."""
        return Output(*self._run("step", batch, rows, out, draw, decode))

    def rewritten(self, what: Computes, rows: bool, asked: Asked) -> Work | None:
        """What the rules make of a ``step`` or of ``hidden`` states; None if it cannot be recorded."""
        record = self._record(what, rows)
        return None if record is None else apply(record, asked)

    def prepare(self, decode: Any) -> None:
        """Rewrite the ``step`` of one decode row. A kernel that computes the whole of it makes tables on the
        GPU, which cannot happen while a graph is captured."""
        record = self._record("step", False) if self._model.shard.samples else None
        if record is not None:
            sizes = {"tokens": 1, "rows": 1, "sampled": 0, "gathered": self._gathered(1)}
            self._program(record, Asked(sizes, decode, self.draws, self._gpu.deterministic))

    @property
    def draws(self) -> bool:
        """Whether the layer that computes the logits may draw from them."""
        return self._model.lm_head.plain

    def logits(self, hidden: Tensor, whole: bool = False) -> Tensor:
        """Float32 logits of ``hidden``: this rank's part of the vocabulary, or the whole."""
        batch: Any = None
        return self._run("logits" if whole else "part", batch, hidden)[0]

    def sizes(self, most: int) -> list[int]:
        """Numbers of tokens up to ``most`` with which mixtures take every kernel that they take, and linear
        layers every one that they take with more than ``batch_gemm.MAX_ROWS``. Those come and go with how
        well tiles fill the GPU."""
        record = self._record("hidden", True)
        if record is None:
            return []
        ranks = 1 if self._lockstep is None else self._lockstep.size
        return sorted({*self._linear_sizes(record, most), *mixture.sizes(record.mixtures, most, ranks)})

    def sample_sizes(self, most: int) -> list[int]:
        """Numbers of hidden states up to ``most`` whose logits take every kernel that they take."""
        record = self._record("part", True)
        sizes = [] if record is None else self._linear_sizes(record, most)
        few = range(1, min(skinny_gemm.MAX_ROWS, most) + 1)
        return sorted({*few, *(rows for rows in batch_gemm.ROWS if rows < most), *sizes, most})

    def _linear_sizes(self, record: Record, most: int) -> list[int]:
        if self._gpu.deterministic:
            return invariant.sizes(record.products, most)
        first: dict[Any, int] = {}
        shapes = _tiled(record)
        for m in range(batch_gemm.MAX_ROWS + 1, most + 1):
            for shape in shapes:
                first.setdefault((shape, *_algorithms(m, *shape)), m)
        packed = integers.sizes(record.weights, most), e4m3.sizes(record.weights, most)
        return [*first.values(), *packed[0], *packed[1]]

    def load_library(self, most: int) -> None:
        """Multiply up to ``most`` tokens by weights of each shape, where torch's library does that. It has a
        kernel for each few numbers of tokens, and loads one when it takes it for the first time, which takes
        as long as a step."""
        record = self._record("hidden", True)
        sizes = [m for m in (*range(16, FEW, 16), *range(FEW, MANY + 1, FEW // 2)) if m <= most]
        if record is None or self._gpu.deterministic or not sizes:
            return
        weights = {(w.n, w.k): w.data for w in record.weights if w.kind == "bf16"}
        for (n, k), weight in weights.items():
            x = weight.new_zeros(sizes[-1], k)
            for m in sizes:
                found = (algorithm_for(m, Product(n, k, gated)) for gated in (False, True))
                if any(algorithm.kernel == "library" for algorithm in found):
                    torch.nn.functional.linear(x[:m], weight)

    def _run(
        self,
        what: Computes,
        batch: ForwardBatch,
        rows: Tensor | None,
        out: Tensor | None = None,
        draw: batch_gemm.DrawInputs | None = None,
        decode: Any = None,
    ) -> tuple[Any, bool]:
        """``rows``: int32[S], those of the batch that are wanted (None: all); or hidden states, without a
        batch. Returns also whether it has drawn."""
        eager = batch is not None and (self.watched or not (batch.media is None and batch.canvas is None))
        record = None if eager else self._record(what, rows is not None)
        if record is None:
            if self.awaits is not None:
                self.awaits([])
            return self._call(what, batch, rows, self._gpu), False
        program, given = self._ready(record, batch, rows, out, draw, decode)
        return program(given, self.awaits)[0], program.work.drawn

    def _ready(
        self,
        record: Record,
        batch: ForwardBatch,
        rows: Tensor | None,
        out: Tensor | None = None,
        draw: batch_gemm.DrawInputs | None = None,
        decode: Any = None,
    ) -> tuple[Program, dict[str, Any]]:
        """The program of such a step, and what it is given; as ``_run``."""
        sampled = 0 if rows is None else rows.shape[0]
        sizes = {"tokens": sampled, "rows": 0, "sampled": sampled, "gathered": 0}
        if batch is not None:
            sizes |= {"tokens": batch.tokens, "rows": batch.rows, "gathered": self._gathered(batch.tokens)}
            if self._rows is not None and batch.tokens >= regions.LEAST:
                record = self._parted_of(record, self._rows) or record
                sizes["own"] = self._rows.share_out(batch.tokens)
        program = self._program(record, Asked(sizes, decode, draw is not None, self._gpu.deterministic))
        given: dict[str, Any] = {
            "batch": batch,
            "hidden": rows,
            "sample_rows": rows,
            "out": out,
            "draw": draw,
            "live": None if batch is None else batch.live,
        }
        for name in record.parts:
            if name not in given:
                given[name] = getattr(batch, name)
        return program, given

    def _program(self, record: Record, asked: Asked) -> Program:
        alike = tuple(self._kind(record, m) for m in map(asked.sizes.__getitem__, self._counted))
        exact = tuple(asked.sizes.values()) if record.sized else ()
        guessed = under_way() and bool(record.grouped)  # see ``e4m3.by_blocks``
        key = id(record), alike, exact, id(asked.decode), asked.draws, guessed
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) == KEPT:
                del self._programs[next(key for key, one in self._programs.items() if not one.lasts)]
            program = self._programs[key] = Program(self._gpu, apply(record, asked))
        return program

    def _gathered(self, tokens: int) -> int:
        """Tokens of all ranks that compute together, of which this one has ``tokens``."""
        return 0 if self._lockstep is None else sum(self._lockstep.of_all(tokens))

    def _kind(self, record: Record, m: int) -> Any:
        """What all steps with ``m`` rows have in common that take the same kernels, one after another."""
        if self._gpu.deterministic:
            return None
        if m <= skinny_gemm.MAX_ROWS:
            return m
        bounds = integer_gemm.MAX_ROWS, mixture.OURS, ROUTED, integers.LONG - 1
        limits = *(m <= bound for bound in bounds), batch_gemm.draw_config(m) is None
        reduced: tuple[bool, ...] = ()
        if record.ranks is not None:
            hidden = self._model.spec.hidden
            like = torch.empty(m, hidden, dtype=self._dtype, device="meta")
            reduced = record.ranks.norms(like), m <= SENT, prompt_gemm.rounds(m, hidden) >= SENT_ROUNDS
        kernels = [algorithm.kernel for shape in _tiled(record) for algorithm in _algorithms(m, *shape)]
        blocks = [e4m3.blocks_faster(m, *shape, gated) for shape in record.grouped for gated in (False, True)]
        return tuple(kernels), tuple(blocks), limits, reduced

    def _record(self, what: Computes, rows: bool) -> Record | None:
        sends = self._lockstep is not None and self._lockstep.sends
        key = what, rows, self._adapters is not None and self._adapters.active, sends
        if key not in self._records:
            try:
                self._records[key] = self._recorded(what, rows)
            except NotRecorded as error:
                self._records[key] = None
                self.notes.append(
                    f"GPU kernels one op at a time (slow): this model cannot be recorded ({error})"
                )
        return self._records[key]

    def _parted_of(self, record: Record, ranks: SharedRows) -> Record | None:
        if id(record) not in self._parted:
            self._parted[id(record)] = regions.parted(record, ranks)
        return self._parted[id(record)]

    def _recorded(self, what: Computes, rows: bool) -> Record:
        if self._model.unrecorded:
            raise NotRecorded(self._model.unrecorded)
        recorder = Recorder()
        batch: Any = None
        given: Tensor | None = None
        if what in ("part", "logits"):
            given = recorder.input("hidden", (STAND_INS["sampled"], self._model.spec.hidden), self._dtype)
        else:
            batch = recorder.batch()
            given = batch.sample_rows if rows else None
        made = self._call(what, batch, given, recorder)
        recorder.record.outputs.append(recorder.number(made))
        adapters.settle(recorder.record)
        factors.settle(recorder.record)
        return recorder.record

    def _call(
        self, what: Computes, batch: ForwardBatch, rows: Tensor | None, dispatcher: GpuOps | Recorder
    ) -> Tensor:
        model = self._model
        with using(dispatcher):
            if what in ("hidden", "step") and (self._final is not None or self._lockstep is not None):
                hidden = model.forward(batch, self._kv)
                hidden = hidden if self._final is None else ops.copied(hidden, self._final)
                hidden = hidden if rows is None else ops.gather(hidden, rows)
            elif what in ("hidden", "step"):
                hidden = model.forward(batch, self._kv, rows)
            else:
                assert rows is not None
                hidden = rows
            if what == "hidden":
                return hidden
            return model.logits(hidden) if what == "logits" else model.logits_part(hidden)

    @property
    def _dtype(self) -> torch.dtype:
        return self._model.embed.dtype


def _tiled(record: Record) -> list[tuple[int, int, str]]:
    """Sides and kinds of the weights that our kernels of tiles multiply."""
    return [(n, k, kind) for n, k, kind in record.products if batch_gemm.refuses(n, k, kind == "fp8") is None]


def _algorithms(m: int, n: int, k: int, kind: str) -> tuple[Algorithm, Algorithm]:
    """What multiplies ``m`` rows by a weight ``[n, k]``, alone and with a gate behind."""
    alone, gated = (algorithm_for(m, Product(n, k, gated, kind)) for gated in (False, True))
    return alone, gated
