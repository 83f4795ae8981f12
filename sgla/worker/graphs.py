"""Steps as graph replays: from the plan's columns to sampled tokens without a host decision in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.attention.base import DevicePrefixes
from sgla.attention.cascade import Prefixes, most_items, pack, unpack
from sgla.kernels.gpu.states import DeviceStates, marks_of
from sgla.kernels.triton.fetch import fetch
from sgla.kernels.triton.sampling import WORST, Landing
from sgla.kernels.triton.tokens import put_tokens
from sgla.messages import VERIFIED
from sgla.sampling.device import Pending
from sgla.worker.batch import StateColumns
from sgla.worker.device_state import stages, upload_columns
from sgla.worker.gpu_adapters import AdaptedRows, apart_of
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.verify import Verify

REPLAYS = 4  # of a graph that is timed
NOBODY = np.zeros(0, np.int32)


def fewer_sizes(sizes: list[int]) -> list[int]:
    """Those that get a graph for rows that share prefixes, and one for rows of many adapters:
    fewer, since such batches are large or rare."""
    return [
        size
        for size in sizes
        if size in (8, 16) or size % (32 if size <= 256 else 64) == 0 or size == sizes[-1]
    ]


class Capture:
    """Captures graphs into one memory pool on one stream (``stream``, or one of its own):
    memory that one of them has freed serves the next."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), stream or torch.cuda.Stream()

    def __call__(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``body`` once, so that libraries allocate, then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            body()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                body()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def unrun(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture ``body``, all of whose kernels are known, while the GPU works on other things."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="relaxed")
            try:
                body()
            finally:
                graph.capture_end()
        return graph


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay on an idle GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPLAYS


class TriedCapture(Capture):
    """For steps that another library computes: each runs once before, with everything an error that would be
    one in a graph, where it would spoil the stream. Raises RuntimeError."""

    def __call__(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return super().__call__(body)

    def unrun(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return self(body)


def numbers_again() -> None:
    """A capture that has failed leaves torch's generator as if it were still going on, and whoever draws
    numbers later gets an error."""
    fresh = torch.Generator("cuda").graphsafe_get_state()
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)


class DecodeColumns(NamedTuple):
    """What a decode graph reads of the plan: int32[size] each: slots, positions of the input token (-1:
    padding), positions of the sampled one (0: padding); and int32[1] each: where the tokens land, and whether
    a draw by temperature serves all rows. ``states``: reads and writes int32[size], marks int32[size, 3] and
    runs int32[size] of ``DeviceStates``, without values where no layer keeps a state."""

    slots: Any
    starts: Any
    ends: Any
    stage: Any
    plain: Any
    states: tuple[Any, Any, Any, Any]

    @staticmethod
    def of(flat: Any, size: int, states: bool) -> DecodeColumns:
        """``flat`` int32[``length(size, states)``, at least]: each column begins at a multiple of 16
        bytes."""
        each = -(-size // 4) * 4
        slots, starts, ends = (flat[i * each : i * each + size] for i in range(3))
        stage, plain = (flat[3 * each + i : 3 * each + i + 1] for i in range(2))
        units, own = flat[3 * each + 4 :], size if states else 0
        marks, runs = units[2 * each : 2 * each + 3 * own].reshape(own, 3), units[5 * each : 5 * each + own]
        kept = units[:own], units[each : each + own], marks, runs
        return DecodeColumns(slots, starts, ends, stage, plain, kept)

    @staticmethod
    def length(size: int, states: bool) -> int:
        return -(-size // 4) * (36 if states else 12) + 4


class DecodeGraphs:
    """One graph for each size, all in one memory pool. Each reads the beginning of ``_on_gpu`` as
    ``DecodeColumns`` of its size, and leaves its tokens in pinned memory, where the host finds them without a
    copy. Few bytes go to the GPU, which fetches them without one, too (``kernels/triton/fetch.py``).

    Rows that share prefixes run in graphs of their own, which read what is shared from a buffer that is
    written when the set of rows changes."""

    def __init__(self, steps: GpuSteps) -> None:
        self.limit = steps.rows
        self.sizes = steps.sizes
        self._steps = steps
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._cascade_sizes = fewer_sizes(self.sizes) if steps.cascade is not None else []
        self._cascades: dict[int, torch.cuda.CUDAGraph] = {}
        self._adapted: dict[int, torch.cuda.CUDAGraph] = {}  # of rows with adapters
        places = steps.adapted.count if steps.adapted is not None else 0
        self._apart_sizes = apart_of(fewer_sizes(self.sizes), places)
        self._apart: dict[int, torch.cuda.CUDAGraph] = {}  # of which these have many
        # Where so many rows run that none may guess, all are of different slots.
        many = [size for size in self.sizes if VERIFIED // 2 < size <= steps.slots]
        self._alone_sizes = many if steps.drafts is not None and steps.attention.decode.fused else []
        self._alone: dict[int, torch.cuda.CUDAGraph] = {}
        self._shared_plan: Prefixes | None = None  # what the buffer holds
        self._stages = stages(steps.shard.pipe)
        flat = torch.from_numpy(pack(None, self.limit, most_items(self.limit)))
        self._shared = flat.cuda()
        self._pinned_shared = [flat.clone().pin_memory() for _ in range(self._stages)]
        self._states = steps.tables.states
        length = DecodeColumns.length(self.limit, self._states)
        self._on_gpu = torch.zeros(length, dtype=torch.int32, device="cuda")
        self._pinned = [
            torch.zeros_like(self._on_gpu, device="cpu").pin_memory() for _ in range(self._stages)
        ]
        self._landed = torch.zeros(self._stages, self.limit, dtype=torch.int32, pin_memory=True)
        self._stage = 0
        self._ids, self._positions, self._kv_len = torch.zeros(
            3, self.limit, dtype=torch.int32, device="cuda"
        )
        self._out_loc = steps.tables.places(self.limit)
        self._cum = {w: torch.zeros(self.limit + 1, dtype=torch.int32, device="cuda") for w in steps.windows}
        self._pipe = steps.shard.pipe
        if self._pipe is not None:
            room = self.limit, steps.model.spec.hidden, steps.model.embed.dtype
            self._arrived, self._leaving = self._pipe.messages(*room)
        self.out = torch.zeros(self.limit, dtype=torch.int32, device="cuda")
        self._keys = torch.full((self.limit,), WORST, dtype=torch.int64, device="cuda")
        self._q_start = torch.arange(self.limit + 1, dtype=torch.int32, device="cuda")

    @property
    def count(self) -> int:
        """Graphs to be captured."""
        sets = 1 + (self._steps.adapted is not None)
        few = len(self._cascade_sizes) + len(self._alone_sizes) + len(self._apart_sizes)
        return sets * len(self.sizes) + few

    def rehearse(self) -> None:
        """Every step there is, to ask for its kernels: first those that take longest to compile."""
        self._steps.forward.prepare(self._steps.attention.decode.fused)
        for size in reversed(self._cascade_sizes):
            self._forward(size, True)
        for size in reversed(self._alone_sizes):
            self._forward(size, alone=True)
        for size in reversed(self.sizes):
            self._forward(size)
            if self._steps.adapted is not None:
                self._forward_adapted(self._steps.adapted, size)
        if self._steps.adapted is not None:
            for size in reversed(self._apart_sizes):
                self._forward_adapted(self._steps.adapted, size, apart=True)

    def capture(self, capture: Capture) -> None:
        """Large to small, so that the small ones fit into the memory of the large. The KV pool is there."""
        self._steps.forward.prepare(self._steps.attention.decode.fused)
        first, more = (partial(self._captured, how) for how in (capture, capture.unrun))
        self._graphs[self.limit] = first(self._forward, self.limit)
        for size in reversed(self.sizes[:-1]):
            self._graphs[size] = more(self._forward, size)
        for size in reversed(self._cascade_sizes):
            self._cascades[size] = more(partial(self._forward, cascade=True), size)
        for size in reversed(self._alone_sizes):
            self._alone[size] = more(partial(self._forward, alone=True), size)
        if self._steps.adapted is not None:
            forward = partial(self._forward_adapted, self._steps.adapted)
            self._adapted[self.limit] = first(forward, self.limit)
            for size in reversed(self.sizes[:-1]):
                self._adapted[size] = more(forward, size)
            for size in reversed(self._apart_sizes):
                self._apart[size] = more(partial(forward, apart=True), size)

    def _captured(
        self,
        capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph],
        forward: Callable[[int], None],
        size: int,
    ) -> torch.cuda.CUDAGraph:
        """Who captures may run it before, for which its columns must be there: out of those of another size
        it would read anything as the place where its tokens land."""
        self._send(NOBODY, NOBODY, size)
        return capture(partial(forward, size))

    def times(self, most: int) -> tuple[list[int], list[float]]:
        """Sizes up to the first that ``most`` rows fit in, and the seconds of their graphs. All slots are
        free; rows have different tokens, since a mixture reads no experts for padding."""
        end = next((i for i, size in enumerate(self.sizes) if size >= most), len(self.sizes) - 1)
        sizes, seconds = self.sizes[: end + 1], []
        ids = np.arange(sizes[-1], dtype=np.int32)
        starts, slots = np.divmod(ids, np.int32(self._steps.slots))
        where, positions, values = upload_columns([slots, starts, ids])
        put_tokens(where, positions, values, self._steps.tables.tokens)
        for size in sizes:
            units = np.zeros(size, np.int32)
            states = StateColumns(units, units, np.zeros((0, 3), np.int32))
            self._send(slots[:size], starts[:size], size, states if self._states else None)
            seconds.append(seconds_of(self._graphs[size]))
        return sizes, seconds

    def _forward_adapted(self, adapted: AdaptedRows, size: int, apart: bool = False) -> None:
        """``_forward`` of rows that may have adapters; ``apart``: of ``Rows``."""
        with adapted.graph(self._columns(size).slots, apart):
            self._forward(size)

    def _forward(self, size: int, cascade: bool = False, alone: bool = False) -> None:
        """The step of ``size`` rows whose columns are on the GPU; ``cascade``: with the prefixes in the
        buffer; ``alone``: they are of different slots."""
        if self._pipe is None:
            self._compute(size, cascade, alone)
            return
        with self._pipe.holding(self._arrived, self._leaving):
            self._compute(size, cascade, alone)

    def _compute(self, size: int, cascade: bool, alone: bool) -> None:
        steps, tables = self._steps, self._steps.tables
        slots, starts, ends, stage, plain, units = self._columns(size)
        landing = Landing(self._landed, stage)
        kv_len, cum = self._kv_len[:size], {w: c[: size + 1] for w, c in self._cum.items()}
        prefixes = self._prefixes(size) if cascade else None
        ids, positions, out_loc = self._ids[:size], self._positions[:size], self._out_loc[..., :size]
        skip = prefixes.skip if prefixes is not None else None
        leaves = steps.drafts is not None and steps.drafts.leaves
        behind = ends if leaves and not alone else None
        tables.prepare_decode(slots, starts, ids, positions, kv_len, out_loc, cum, skip, ends=behind)
        batch = tables.batch(
            slots,
            ids,
            positions=positions,
            q_start=self._q_start[: size + 1],
            kv_len=kv_len,
            out_loc=out_loc,
            sample_rows=self._q_start[:size],
            decode_rows=size,
            cum=cum,
            prefixes=prefixes,
            states=self._device_states(units),
            ends=behind,
            live=ends,  # 0 for a guess that is none, too
        )
        decode = steps.attention.decode
        # The prefixes' kernel wants q before the decode kernel would make it, and rows that guess read what
        # others of the same slot store.
        alone = alone or steps.drafts is None or size == 1
        fused = decode.fused if alone and not cascade else None
        if not steps.shard.samples:
            steps.forward.hidden(batch, None, fused)
            return
        draw = steps.sampler.fused_draw(slots, ends, self._keys[:size], plain)
        drawing = draw if steps.forward.draws else None
        logits, drawn = steps.forward.step(batch, None, steps.logits[:size], drawing, fused)
        if steps.hidden is not None:
            steps.hidden.keep(slots, positions if behind is None else starts)
        if drawn:
            steps.sampler.land(draw, self.out[:size], landing)
            return
        if logits.data_ptr() != steps.logits.data_ptr():  # a soft cap or an all-gather made another tensor
            steps.logits[:size].copy_(logits)
        steps.sampler.draw(steps.logits[:size], slots, ends, self.out[:size], landing)

    def _prefixes(self, size: int) -> DevicePrefixes:
        valid, items, order, skip, first = unpack(self._shared, self.limit)
        return DevicePrefixes(valid, items, order[:size], skip[:size], first[: size + 1])

    def _plan_prefixes(self, slots: Any, starts: Any) -> Prefixes | None:
        cascade = self._steps.cascade
        if cascade is None:
            return None
        size = next(size for size in self._cascade_sizes if size >= len(slots))
        tables = self._steps.tables
        return cascade.plan(slots, starts, tables.host.page_table[0], tables.admissions, size)

    def _columns(self, size: int) -> DecodeColumns:
        return DecodeColumns.of(self._on_gpu, size, self._states)

    def _send(
        self,
        slots: Any,
        starts: Any,
        size: int,
        states: StateColumns | None = None,
        verify: Verify | None = None,
    ) -> int:
        """Send the step's columns to the graph of this size. Returns the place where its tokens land."""
        stage, rows = self._stage, len(slots)
        self._stage = (stage + 1) % self._stages
        pinned = self._pinned[stage][: DecodeColumns.length(size, self._states)]
        host = DecodeColumns.of(pinned.numpy(), size, self._states)
        host.slots[:rows], host.starts[:rows] = slots, starts
        host.slots[rows:], host.starts[rows:], host.ends[rows:] = self._steps.slots, -1, 0
        np.add(starts, 1, out=host.ends[:rows])
        host.stage[0], host.plain[0] = stage, self._steps.sampler.plain(slots)
        *units, runs = host.states
        runs[:] = 1
        for column in units:  # what was here belonged to a step of another size
            column[rows:] = 0
        for column, values in zip(units, states or ()):
            column[:rows] = values if column.ndim == 1 else marks_of(values, rows)
        fetch(pinned, self._on_gpu)
        if verify is not None:
            columns = self._columns(size)
            verify.guess(self._ids, columns.slots, columns.starts, columns.slots, columns.ends)
            if (linked := self._device_states(columns.states)) is not None:
                verify.link(linked)
        return stage

    def _device_states(self, columns: tuple[Any, Any, Any, Any]) -> DeviceStates | None:
        if not self._states:
            return None
        reads, writes, marks, runs = columns
        return DeviceStates(reads, writes, marks, None, None if self._steps.drafts is None else runs)

    def run(
        self,
        slots: Any,
        starts: Any,
        states: StateColumns | None = None,
        verify: Verify | None = None,
        least: int = 0,
    ) -> tuple[Tensor, Tensor | None, Pending | None]:
        """Decode one token of each row: int32[rows, at least] on the GPU, and int32[rows] in pinned memory,
        to be read before ``stages`` further steps. ``Pending`` instead of the latter if a draw by temperature
        is not all that rows need. ``least``: rows that the graph has at least."""
        rows = max(len(slots), least)
        adapted = self._steps.adapted
        if adapted is not None and not adapted.any(slots):
            adapted = None
        plan = self._plan_prefixes(slots, starts) if adapted is None else None
        sizes, graphs = (self.sizes, self._graphs) if plan is None else (self._cascade_sizes, self._cascades)
        if adapted is not None:
            differ = adapted.differ(slots)
            sizes, graphs = (self._apart_sizes, self._apart) if differ else (self.sizes, self._adapted)
        size = next(size for size in sizes if size >= rows)
        if graphs is self._graphs and verify is None and size in self._alone:
            graphs = self._alone
        if plan is not None and plan is not self._shared_plan:
            shared, self._shared_plan = self._pinned_shared[self._stage], plan
            shared.numpy()[:] = pack(plan, self.limit, most_items(self.limit))
            fetch(shared, self._shared)
        stage = self._send(slots, starts, size, states, verify)
        if self._pipe is not None and not self._pipe.first:
            self._pipe.take(self._arrived[: len(slots)])
        graphs[size].replay()
        if self._pipe is not None and not self._pipe.last:
            self._pipe.give(self._leaving[: len(slots)])
            return self.out, self._landed[stage, :0], None
        if self._steps.sampler.plain(slots):
            return self.out, self._landed[stage, : len(slots)], None
        columns, rows = self._columns(size), len(slots)
        numbers = np.arange(rows, dtype=np.int32)
        return (
            self.out,
            None,
            Pending(
                self._steps.logits[:rows],
                columns.slots[:rows],
                columns.ends[:rows],
                self.out,
                numbers,
                (slots, starts + 1),
            ),
        )
