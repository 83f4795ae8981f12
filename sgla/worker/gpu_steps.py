"""Steps on a GPU, kernel by kernel: what every kind of step needs, and those that are no graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla import attention
from sgla.attention import Attention, DeviceBatch, ExtendRows
from sgla.attention.base import DevicePrefixes
from sgla.attention.cascade import Cascade, Prefixes, pack, unpack
from sgla.kernels.batch import Media
from sgla.kernels.expert_counts import chosen, keep_chosen
from sgla.kernels.gpu import GpuOps, RecordedForward
from sgla.kernels.gpu.program import Awaits
from sgla.kernels.gpu.states import DeviceStates, device_states
from sgla.kernels.ops import Layer
from sgla.layers.adapters import Adapters
from sgla.messages import StepPlan
from sgla.model.base import CausalLM
from sgla.model.sharing import Slab
from sgla.model.state import LayerState, kv_groups, shared_out, with_draft
from sgla.model.whisper import Whisper
from sgla.quant.weight import Make
from sgla.sampling.device import DeviceSampler, Pending, Scored, score, to_host
from sgla.worker.aligning import Aligner
from sgla.worker.batch import Columns, PromptSpan, StateColumns, Wanted, eager_order, read
from sgla.worker.device_state import DeviceTables, aligned, upload, upload_columns
from sgla.worker.facts import number_of
from sgla.worker.flights import Extras, Vector
from sgla.worker.gpu_adapters import AdaptedRows
from sgla.worker.gpu_context import Divides
from sgla.worker.gpu_halves import Halves
from sgla.worker.gpu_shared_cache import Shares
from sgla.worker.kv import allocate_on_gpu, tokens_of
from sgla.worker.listening import Listening
from sgla.worker.pictures import Pictures
from sgla.worker.pooler import Pooler, label_logprobs
from sgla.worker.state import Int32s
from sgla.worker.target_hidden import TargetHidden
from sgla.worker.verify import DeviceDrafts, Verify

LOGIT_ROWS = 256  # rows of logits that exist at a time for prompt logprobs
EAGER = 3000.0  # microseconds that an eager step takes longer to launch


class Kernels(NamedTuple):
    """What computes the ops of a model. ``cascade``: None where prefixes are not read once for all rows.
    ``kv_dtype``: of the pages; ``second``: attention of the second batch, where long steps are two."""

    attention: Attention
    ops: GpuOps
    cascade: Cascade | None
    dtype: torch.dtype
    kv_dtype: str
    deterministic: bool
    second: Attention | None = None


class Sizes(NamedTuple):
    """Requests, and tokens of a step and of a request, that there may be; tokens of a page. ``rows``: samples
    that a step may have, more than one of a request that guesses."""

    slots: int
    step_tokens: int
    context_len: int
    page_size: int
    rows: int


class Launched(NamedTuple):
    """What the launch of a step leaves, eager or as a graph: its tokens are the first ``rows`` of ``out`` on
    the GPU, unless they are still ``pending``."""

    out: Tensor
    rows: int
    scored: list[Scored]
    pending: Pending | None
    extras: Extras | None


def sizes_up_to(limit: int, guesses: bool = False) -> list[int]:
    """Batch sizes that get a graph: a batch runs in the next larger one. Where rows guess, few rows are those
    of one request."""
    few = [1, 2, 3, 4, 5, 6, 8] if guesses else [1, 2, 4, 8]
    sizes = [*few, 12, 16, *range(24, 256, 8), *range(256, limit, 32)]
    return [size for size in sizes if size < limit] + [limit]


class GpuSteps:
    """A model with its tables, sampler and pages on the GPU. ``kv`` is set when its size is known, and again
    whenever that changes; ``logits`` float32[rows, this rank's part of V] are those of graphs;
    ``scales``: of k and v of each layer; ``drafts`` (with ``leaves``): None where no row guesses;
    ``adapted``: None where none has an adapter. ``tables``: those of another model, for which this one
    guesses; ``beside``: what the layers of a model keep that guesses for this one, whose pages are behind its
    own in ``kv``; ``hidden``: what that reads of this one; ``pictures``: None where rows show none."""

    pooler: Pooler | None = None  # of a model that answers with vectors
    listening: Listening | None = None  # of one whose layers attend to sounds
    aligner: Aligner | None = None  # of one that tells when its words were said

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        sizes: Sizes,
        adapters: Adapters | None = None,
        tables: DeviceTables | None = None,
        beside: Sequence[LayerState] = (),
        hidden: TargetHidden | None = None,
        pictures: Pictures | None = None,
        leaves: bool = False,
    ) -> None:
        self.model, self.shard, self.hidden, self.pictures = model, model.shard, hidden, pictures
        self.attention, self.ops, self.cascade, self.dtype, self.kv_dtype, self.deterministic, second = (
            kernels
        )
        self.slots, self.step_tokens, self.context_len, page_size, self.rows = sizes
        self.windows = sorted(set(model.spec.windows))
        picks = any(0 < layer.whole_until < self.context_len for layer in model.spec.attention)
        # Those of a graph would hear what was heard when it was captured.
        other = self.attention.prompts is None
        self.reads_in_graphs = not (other or picks or model.spec.heard or model.spec.canvas)
        # Stages have other layers, and ranks that share MLPs other rows; yet all must choose the same graphs.
        self.apart = self.shard.lockstep is not None or self.shard.pipe is not None
        guesses = tables is None and self.rows > self.slots
        self.sizes = sizes_up_to(self.rows, guesses)  # rows of a step that sample
        self.scales = [(1.0, 1.0)] * len(model.spec.held)
        attend = self.ops.attend
        part = (attend.ranks.rank, attend.ranks.size) if isinstance(attend, Shares) else (0, 1)
        kept = shared_out(model.state(), part[1])
        self.own, self.state = len(kept), with_draft(kept, beside)
        self.groups = kv_groups(self.state, self.context_len, self.kv_dtype)
        windows = [group.window for group in self.groups if not group.unit_bytes]
        if windows and set(self.windows) <= set(windows[1:]):  # what is kept beside windows has pages, too
            self.windows = [0, *self.windows]
        states = len(windows) < len(self.groups)
        adapted, turned = adapters is not None, pictures is not None and pictures.turns
        self.tables = tables or DeviceTables(
            self.slots, self.context_len, page_size, windows, states, adapted, turned, part
        )
        self.adapted: AdaptedRows | None = None
        if adapters is not None:
            self.adapted = AdaptedRows(adapters.rows, self.tables, self.rows, adapters.places)
        self.divides: Divides | Halves | None = None
        if self.shard.context is not None:
            self.divides = Divides(self.tables, self.shard.context, self.ops, guesses, hidden)
        self.halved = second is not None
        if second is not None:
            self.divides = Halves((self.attention, second), self.adapted)
        self.drafts = DeviceDrafts(self.tables, not beside, hidden, leaves) if guesses else None
        self.spare = self.rows - self.slots if guesses and states and self.shard.pipe is None else 0  # units
        own = len(model.lm_head.own) if self.shard.samples else 0
        self.logits = torch.empty(self.rows, own, device="cuda")
        self.forget_rows()

    @property
    def kv(self) -> list[Layer]:
        """The pages of each layer, and of those of what guesses. Steps read and write those that were set
        last."""
        return self._kv

    @kv.setter
    def kv(self, kv: list[Layer]) -> None:
        rows = None if self.adapted is None else self.adapted.rows
        final = None if self.hidden is None else self.hidden.final
        self._kv, self.forward = kv, RecordedForward(self.model, kv[: self.own], self.ops, rows, final)
        if self.drafts is not None:
            self.drafts.take(kv, self.own, self.spare)

    def admit(self, plan: StepPlan) -> None:
        """Take in what its new rows and its pages are."""
        self.tables.apply(plan, self.sampler)
        if self.listening is not None:
            for new in plan.new:
                self.listening.admit(new, self.model)
                if self.aligner is not None:
                    self.aligner.admit(new.slot)
        if self.pictures is not None and plan.new:
            for new in plan.new:
                self.pictures.admit(new)
            self.tables.turn([(new.slot, self.pictures.delta(new.slot)) for new in plan.new])

    def forget_rows(self) -> None:
        """What rows have asked of the sampler."""
        self.sampler = DeviceSampler(self.tables.tokens, self.model.spec.vocab, self.shard)

    def allocate(
        self,
        pages: Sequence[int],
        page_size: int,
        dtype: str,
        make: Make | None = None,
        slab: Slab | None = None,
    ) -> list[Layer]:
        """``pages`` of each cache group; see ``worker/kv.py``."""
        groups = kv_groups(self.state, self.context_len, dtype)
        layers = allocate_on_gpu(self.state, groups, pages, page_size, dtype, make, slab)
        for layer, scales in zip(layers, self.scales if dtype == "fp8" else []):
            if (kept := tokens_of(layer)) is not None:
                kept.k_scale, kept.v_scale = scales
        return layers

    @contextmanager
    def awaiting(self, awaits: Awaits | None) -> Iterator[None]:
        """Steps that run meanwhile wait for what layers keep."""
        self.forward.awaits = awaits
        try:
            yield
        finally:
            self.forward.awaits = None

    def run_eagerly(
        self,
        plan: StepPlan,
        verify: Verify | None = None,
        media: Media | None = None,
        whole: bool = False,
    ) -> Launched:
        """Decode rows go first, then what has a history (see ``ExtendRows``); what is divided stays in the
        plan's order, where no row may guess. The result shows nothing of this: ``wanted`` counts rows and
        tokens in the plan's order, ``order`` has the plan's rows in the batch's, ``shift`` takes tokens from
        one to the other. ``media``: in place of the pictures'; ``whole``: the last layer has all tokens."""
        columns, wanted = read(plan, self.tables.host)
        divides = None if media or (verify and self.halved) else self._divided(columns)
        order = eager_order(columns.starts, columns.q_lens)
        if divides is not None and (self.halved or self.drafts is None):
            order = np.arange(len(order))
        slots, starts, q_lens = (column[order] for column in columns[:3])
        first = q_lens.cumsum() - q_lens
        shift = np.empty_like(first)  # how far the tokens of each row of the plan move
        shift[order] = first - (columns.q_lens.cumsum() - columns.q_lens)[order]
        tails = [row.token + shift[row.row] for row in wanted.pooled]
        count = len(wanted.rows)
        # As many as a graph has, so that no kernel is new; a row that is not wanted is the first token's.
        size = next(size for size in self.sizes if size >= count + len(tails))
        host = np.zeros((3, size), np.int32)
        host[0, count : count + len(tails)] = tails
        host[:, :count] = wanted.tokens + shift[wanted.rows], wanted.slots, wanted.positions
        at, where, positions = upload(host)
        if self.adapted is not None:
            self.adapted.begin(slots, q_lens, host[0])
        units = None if columns.states is None else columns.states.ordered(order)
        extend = partial(self.extend_batch, verify=verify, samples=(where, positions))
        if divides is None:
            batch = extend(slots, starts, q_lens, units)
            if self.pictures is not None:
                batch.media = media or self.pictures.media(slots, starts, q_lens)
        own = Columns(slots, starts, q_lens, host[0], units)
        if not self.shard.samples:
            if divides is None:
                self.forward.hidden(batch)
            else:
                divides.hand_on(self.forward, own, extend)
            return Launched(at, 0, [], None, None)
        whole = whole or bool(wanted.prompt_spans or wanted.brought)
        whole = whole or (self.pooler is not None and self.pooler.whole)
        routed = any(span.experts for span in wanted.brought)
        if routed:
            keep_chosen(self.model.counts)
        if divides is None:
            with self._watched(slots, q_lens):
                hidden = self.forward.hidden(batch, None if whole else at)
            if self.hidden is not None:
                self.hidden.keep(batch.slots[: batch.decode_rows], batch.positions[: batch.decode_rows])
        else:
            hidden = divides.hidden(self.forward, own, None if whole else host[0], extend)
        experts = _chosen(self.model, len(hidden)) if routed else None
        picked = hidden[at[: count + len(tails)]] if whole else hidden
        scored = [one for span in wanted.prompt_spans for one in self._score_prompt(span, hidden, shift)]
        vectors = self._vectors(wanted, columns, picked[count : count + len(tails)], hidden, shift)
        spans = []
        for row in wanted.brought:
            of = experts if row.experts and experts is not None else hidden.float()
            spans.append(to_host(of[row.first + shift[row.row] : row.end + shift[row.row]]))
        extras = Extras(vectors, spans) if vectors or spans else None
        if not count:
            return Launched(at, 0, scored, None, extras)
        host, where, positions = host[:, :count], where[:count], positions[:count]
        logits = self.logits_of(picked[:count])
        out = torch.empty(count, dtype=torch.int32, device="cuda")
        if self.sampler.plain(host[1]):
            self.sampler.draw(logits, where, positions, out)
            return Launched(out, count, scored, None, extras)
        pending = Pending(logits, where, positions, out, wanted.rows, (host[1], host[2]))
        return Launched(out, count, scored, pending, extras)

    def _divided(self, columns: Columns) -> Divides | Halves | None:
        """What computes a step that is shared out, or cut in two; none is that reads pictures."""
        divides, pictures = self.divides, self.pictures
        if pictures is not None and pictures.reads(columns.slots.tolist(), columns.starts.tolist()):
            return None
        return divides if divides is not None and divides.takes(columns.q_lens) else None

    @contextmanager
    def _watched(self, slots: Int32s, q_lens: Int32s) -> Iterator[None]:
        """Times of what some of the rows read are wanted."""
        if self.aligner is None or not self.aligner.begin(slots, q_lens):
            yield
            return
        assert isinstance(self.model, Whisper)
        self.forward.watched = True
        self.model.watch(self.aligner.take)
        try:
            yield
        finally:
            self.model.watch(None)
            self.forward.watched = False

    def take_part(self) -> None:
        """Compute a token of nobody, with which this rank goes through its layers beside others."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        self.forward.hidden(self.extend_batch(np.full(1, self.slots, np.int32), zero, one))

    def _vectors(
        self, wanted: Wanted, columns: Columns, tails: Tensor, hidden: Tensor, shift: Any
    ) -> list[tuple[int, Vector]]:
        """Of the rows whose prompts are complete, whose last hidden states are ``tails``: row and values."""
        rows = [row.row for row in wanted.pooled]
        if self.aligner is not None:
            found = [(row.row, self.aligner.said(row.slot)) for row in wanted.pooled]
            return [(row, said._replace(matrix=to_host(said.matrix))) for row, said in found]
        if self.pooler is not None:
            first = columns.q_lens.cumsum() - columns.q_lens + shift
            lengths = self.tables.host.prompt_len[columns.slots[rows]]
            vectors = self.pooler(columns, first, rows, lengths, hidden if self.pooler.whole else tails)
            return list(zip(rows, to_host(vectors))) if rows else []
        if not rows:
            return []
        labels = [upload(self.tables.host.labels[row.slot]) for row in wanted.pooled]
        logits = self.forward.logits(tails, whole=True)
        return [(row, to_host(label_logprobs(own, ids))) for row, own, ids in zip(rows, logits, labels)]

    def extend_batch(
        self,
        slots: Any,
        starts: Any,
        q_lens: Any,
        states: StateColumns | None = None,
        verify: Verify | None = None,
        samples: tuple[Tensor, Tensor] | None = None,
        shift: int = 0,
        attention: Attention | None = None,
    ) -> DeviceBatch:
        """Rows with any number of tokens; those with one come first. ``states``: None if they begin without
        any and leave none. ``verify`` corrects those that guess, and slots and positions of their
        ``samples``. ``shift``: the ids are those of so many tokens further on. ``attention``: which one plans
        it, if not that of all batches."""
        rows, tokens, decodes = len(slots), int(q_lens.sum()), int((q_lens == 1).sum())
        q_start = np.zeros(rows + 1, np.int32)
        np.cumsum(q_lens, out=q_start[1:])
        kv_lens = starts + q_lens
        prefixes, skip = self._shared_prefixes(slots[:decodes], starts[:decodes])
        cums = [_tiles(kv_lens[:decodes], window, skip) for window in self.windows]
        packed = upload_columns([slots, starts, q_start, kv_lens, *cums])
        d_slots, d_starts, d_q_start, d_kv_len = packed[:4]
        cum = dict(zip(self.windows, packed[4:]))
        paged = len(self.tables.windows)
        columns = aligned(2 + paged, tokens)
        ids, positions, out_loc = columns[0], columns[1], columns[2:] if paged > 1 else columns[2]
        if verify is not None and samples is not None:
            verify.guess(ids, d_slots, d_starts, *samples)
        longest = int(q_lens.max())
        self.tables.prepare_extend(d_slots, d_starts, d_q_start, longest, ids, positions, out_loc, shift)
        if verify is not None and verify.guesses:
            n = decodes
            self.tables.prepare_decode(
                d_slots[:n], d_starts[:n], ids[:n], positions[:n], d_kv_len[:n], out_loc[..., :n], cum
            )
        extend = None
        if decodes < rows:
            extend = ExtendRows(
                slots[decodes:], q_lens[decodes:], kv_lens[decodes:], self.tables.host.page_table[0]
            )
        batch = self.tables.batch(
            d_slots,
            ids,
            positions=positions,
            q_start=d_q_start,
            kv_len=d_kv_len,
            out_loc=out_loc,
            sample_rows=d_q_start,  # not used: the runner gathers by itself
            decode_rows=decodes,
            cum=cum,
            extend=extend,
            prefixes=prefixes,
            states=self._states(states, q_start, decodes),
        )
        if verify is not None and isinstance(batch.states, DeviceStates):
            verify.link(batch.states)
        (attention or self.attention).plan(batch)
        return batch

    def _states(self, states: StateColumns | None, q_start: Any, decodes: int) -> DeviceStates | None:
        if not self.tables.states:
            return None
        unit = np.zeros(len(q_start) - 1, np.int32)
        columns = states or StateColumns(unit, unit, np.zeros((0, 3), np.int32))
        runs = None if self.drafts is None else np.ones(decodes, np.int32)
        return device_states(*columns, q_start, decodes, upload_columns, runs)

    def _shared_prefixes(self, slots: Any, starts: Any) -> tuple[DevicePrefixes | None, Any]:
        """What these decode rows share, and ``skip``."""
        rows, plan = len(slots), self._plan_prefixes(slots, starts)
        if plan is None:
            return None, np.zeros(rows, np.int32)
        return unpack(upload(pack(plan, rows)), rows), plan.skip

    def _plan_prefixes(self, slots: Any, starts: Any) -> Prefixes | None:
        if self.cascade is None or not len(slots):
            return None
        return self.cascade.plan(
            slots, starts, self.tables.host.page_table[0], self.tables.admissions, len(slots)
        )

    def share_much(self, slots: Any, starts: Any) -> bool:
        """Whether an eager step, which reads what rows share once,
        beats a graph of a mixed step, which does not."""
        plan = self._plan_prefixes(slots, starts)
        return plan is not None and plan.gain * len(self.kv) > EAGER

    def logits_of(self, hidden: Any) -> Tensor:
        """Of this rank's part of the vocabulary."""
        return self.forward.logits(hidden)

    def _score_prompt(self, span: PromptSpan, hidden: Tensor, shift: Any) -> Iterator[Scored]:
        """Logprobs of the prompt tokens that a row owes, a few rows of logits at a time."""
        count, first, slot = span.end - span.first, span.first + int(shift[span.row]), span.slot
        k, asked = max(0, int(self.tables.host.prompt_logprobs[slot])), self.sampler.logprob_ids(slot)
        parts = []
        for at in range(0, count, LOGIT_ROWS):
            size = min(LOGIT_ROWS, count - at)
            logits = self.forward.logits(hidden[first + at : first + at + size], whole=True)
            targets = upload(self.tables.host.tokens[slot, span.start + at : span.start + at + size])
            parts.append(score(logits, targets, k, asked))
        if parts:
            values, ranks, ids, tops = (to_host(torch.cat(column)) for column in zip(*parts))
            others = 0 if asked is None else len(asked)
            yield Scored(span.row, True, span.start, others, values, ranks, ids, tops)


def _tiles(kv_lens: Any, window: int, skip: Any) -> Any:
    """``DeviceBatch.cum`` on the host."""
    tile = attention.TILE
    tiles = -(-kv_lens // tile)
    if window:
        tiles = tiles - np.where(kv_lens > window, (kv_lens - window) // tile, 0)
    else:
        tiles = tiles - skip // tile
    return np.concatenate([[0], np.cumsum(tiles)]).astype(np.int32)


def _chosen(model: CausalLM, tokens: int) -> Tensor:
    """Experts of all tokens of the step that has been launched: see ``chosen``."""
    assert model.spec.moe is not None
    counts = {number_of(name): each for name, each in model.counts.items()}
    rows = torch.arange(tokens, device="cuda")
    return chosen(counts, model.spec.layers, model.spec.moe.routing.top_k, rows)
