"""The runner of a model that generates, with everything on the host: tables, forward pass, sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgla import clock
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.expert_counts import chosen, keep_chosen
from sgla.messages import DENOISE, SAMPLE, NewRow, RowSampling, StepPlan, StepResult
from sgla.sampling import Samples, faults
from sgla.sampling.logprobs import Scores, score
from sgla.sampling.logprobs import join as join_scores
from sgla.sampling.runs import ragged
from sgla.worker.batch import Columns, Wanted, build, cut, read
from sgla.worker.cpu_weights import CpuWeights
from sgla.worker.drafts import propose, verify
from sgla.worker.facts import number_of
from sgla.worker.features import threads
from sgla.worker.kv import zero_pages
from sgla.worker.pooler import add_vectors, label_logprobs
from sgla.worker.state import Int32s, column


class CpuRunner(CpuWeights):
    """Computes a step when it is told to. Also of devices that have torch bodies alone."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if self._together is None:
            return self._compute(plan)
        own = plan.parts[self.shard.of_mlps.rank] if plan.parts else plan
        result = StepResult(step=plan.step, tokens=b"") if own is None else self._compute(own)
        self._together.end()
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        """All ranks of the last stage return the same tokens; logprobs come from the first of them."""
        self._apply(plan)
        if not plan.slots:
            return StepResult(step=plan.step, tokens=b"")
        for new in plan.new:
            self.sampler.admit(new.slot, new.prompt_len, new.sampling, guesses=new.limit > 0)
            self._drafter.admit(new)
            if self._pictures is not None:
                self._pictures.admit(new)
            if self._listening is not None:
                self._listening.admit(new, self.model)
            if self._aligner is not None:
                self._aligner.admit(new.slot)
            if self._canvases is not None:
                self._canvases.admit(new)
        told = self.shard.pipe is not None  # of guesses, as of tokens
        columns, wanted = read(plan, self.tables, None if told else self._drafter.guess(plan))
        if not self.shard.samples:
            return self._hand_on(plan.step, columns)
        if self._pooler is not None:
            return self._pool(plan.step, columns, wanted)
        if self._canvases is not None:
            return self._denoise(plan, columns)
        if self._rewind is not None:
            columns = self._rewind.mark(columns, wanted)
        parts = cut(columns, self._most_logits)
        extras = StepResult(step=plan.step, tokens=b"")
        if len(parts) == 1 and wanted.plain:
            batch = self._batch(columns)
            if self.shard.draws:
                batch.draws = self.sampler.draws(wanted.slots, wanted.positions)
            begun = clock.now()
            logits = self._forward(batch)
            self._drafter.took(batch.tokens, clock.now() - begun)
            samples, counts = self._sample(logits, wanted, batch.draws)
        else:
            samples, counts = self._score_and_sample(parts, wanted, extras)
        if self._rewind is not None:
            self._rewind.go_back(columns, wanted, counts)
        self._drafter.learn(wanted.slots[wanted.first], wanted.runs - 1, counts - 1)
        self._drafter.follow(columns, wanted, counts)
        proposed = propose(self._drafter, plan, self.tables) if told else []
        self.profiler.step()
        tokens, brought = ragged(samples, wanted.first, counts)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            counts=brought,
            logprobs=samples.logprobs,
            failed=extras.failed + samples.failed,
            vectors=extras.vectors,
            hidden=extras.hidden,
            guessed=(wanted.runs - 1).tobytes() if wanted.runs.sum() > len(wanted.runs) else b"",
            proposed=proposed,
        )

    def _hand_on(self, step: int, columns: Columns) -> StepResult:
        """A step of a stage that is not the last, in the parts that the last one computes it in."""
        for part in cut(columns, self._most_logits):
            self._forward(self._batch(part))
        self.profiler.step()
        return StepResult(step=step, tokens=b"")

    def _pool(self, step: int, columns: Columns, wanted: Wanted) -> StepResult:
        """A step of a model that answers with vectors."""
        assert self._pooler is not None
        rows = [row.row for row in wanted.pooled]
        first = np.cumsum(columns.q_lens) - columns.q_lens
        lengths = self.tables.prompt_len[columns.slots[rows]]
        hidden = self._forward(self._batch(columns))
        result = StepResult(step=step, tokens=b"")
        add_vectors(result, zip(rows, self._pooler(columns, first, rows, lengths, hidden).numpy()))
        self.profiler.step()
        return result

    def _denoise(self, plan: StepPlan, columns: Columns) -> StepResult:
        """A step of a model that writes blocks; one of prompts alone brings nothing."""
        assert self._canvases is not None
        if any(flags & DENOISE for flags in plan.flags):
            with threads(self.place.threads):
                result = self._canvases.step(plan, columns, self.model, self._own)
        else:
            self._forward(build(columns, self.tables))
            result = StepResult(step=plan.step, tokens=b"")
        self.profiler.step()
        return result

    def _batch(self, columns: Columns) -> ForwardBatch:
        if self._divided is not None:
            return self._divided.batch(columns)
        batch = build(columns, self.tables)
        if self._pictures is not None:
            self._pictures.show(batch, columns)
        return batch

    def _apply(self, plan: StepPlan) -> None:
        """Bring tables and pages to where the plan's rows begin."""
        self.tables.apply(plan)
        if plan.zeroed:
            zero_pages(self.kv, [places(p) for p in plan.zeroed])
        self.copies.begin(plan.copies)
        self.copies.drop(plan.dropped)

    def _sample(
        self, logits: torch.Tensor, wanted: Wanted, draws: NDArray[Any] | None = None
    ) -> tuple[Samples, Int32s]:
        """The next token of each sampled row, in the token table of every rank; of a row with drafts as many
        as come. Returns also how many each row has."""
        tables, counts = self.tables, np.ones_like(wanted.runs)
        samples = Samples(np.empty(len(wanted.rows), np.int32), [], [], {}, set())
        if not len(samples.tokens):
            return samples, counts
        if len(wanted.rows) > len(wanted.runs):
            drafts = tables.tokens[wanted.slots, wanted.positions]
            if self.shard.draws:
                samples, counts = verify(self.sampler, logits.numpy(), wanted, drafts, draws)
            self.shard.agree(samples.tokens, counts)
            behind = np.arange(len(drafts)) - np.repeat(wanted.first, wanted.runs)
            came = behind < np.repeat(counts, wanted.runs)
            tables.tokens[wanted.slots[came], wanted.positions[came]] = samples.tokens[came]
        else:
            if self.shard.draws:
                columns = wanted.rows, wanted.slots, wanted.positions
                samples = self.sampler.sample(logits.numpy(), *columns, draws)
            self.shard.agree(samples.tokens)
            tables.tokens[wanted.slots, wanted.positions] = samples.tokens
        slots, limits = wanted.slots[wanted.first], tables.limit[wanted.slots[wanted.first]]
        ended = (limits > 0) & (wanted.positions[wanted.first] >= limits)  # the host did not know yet
        reached = wanted.positions[wanted.first + counts - 1]
        tables.computed[slots] = np.where(ended, limits - 1, reached)
        return samples, np.where(ended, 0, counts).astype(np.int32)

    def _score_and_sample(
        self, parts: list[Columns], wanted: Wanted, extras: StepResult
    ) -> tuple[Samples, Int32s]:
        """A step with prompt logprobs, or with scores of labels or states of tokens, which go to ``extras``;
        in parts, so that few rows of logits exist at a time."""
        scores: list[list[Scores]] = [[] for _ in wanted.prompt_spans]
        states: list[list[bytes]] = [[] for _ in wanted.brought]
        routed = any(span.experts for span in wanted.brought)
        rows: list[torch.Tensor] = []
        at = 0
        for part in parts:
            if routed:
                keep_chosen(self.model.counts)
            logits, tokens = self._forward(self._batch(part)), part.logits + at
            experts = self._chosen(part) if routed else None
            at += int(part.q_lens.sum())
            if not self.shard.draws:
                continue
            rows.append(logits[torch.from_numpy(np.isin(tokens, wanted.tokens))])
            for row in wanted.pooled:
                if self._aligner is not None:
                    if (tokens == row.token).any():
                        add_vectors(extras, [(row.row, self._aligner.said(row.slot).numpy())])
                    continue
                labels = torch.from_numpy(self.tables.labels[row.slot])
                for index in np.flatnonzero(tokens == row.token):
                    values = label_logprobs(logits[index], labels).numpy()
                    add_vectors(extras, [(row.row, values)], labels=True)
            for span, found in zip(wanted.prompt_spans, scores):
                inside = np.flatnonzero((tokens >= span.first) & (tokens < span.end))
                if len(inside):
                    start = span.start + int(tokens[inside[0]]) - span.first
                    targets = self.tables.tokens[span.slot, start : start + len(inside)]
                    k = int(self.tables.prompt_logprobs[span.slot])
                    part_logits = logits.numpy()[inside[0] : inside[-1] + 1]
                    found.append(score(part_logits, targets, k, self.sampler.logprob_ids(span.slot)))
            for wants, pieces in zip(wanted.brought, states):
                own = (tokens >= wants.first) & (tokens < wants.end)
                kept = experts if self._kept is None or wants.experts else self._kept.hidden
                assert kept is not None
                pieces.append(kept.numpy()[own].tobytes())
        extras.hidden += map(b"".join, states)
        samples, counts = self._sample(torch.cat(rows) if rows else torch.empty(0), wanted)
        prompts = []
        for span, found in zip(wanted.prompt_spans, scores):
            if not found:
                continue
            whole = join_scores(found)
            if whole.sound:
                asked = len(self.sampler.logprob_ids(span.slot))
                prompts.append(whole.block(span.row, True, span.start, asked))
            else:
                extras.failed.append(faults.no_logprobs(span.row))
        return samples._replace(logprobs=prompts + samples.logprobs), counts

    def _chosen(self, part: Columns) -> torch.Tensor:
        """Experts of the tokens that have logits, of the step that has been computed: see ``chosen``."""
        layers, top_k = self.facts.experts
        counts = {number_of(name): each for name, each in self.model.counts.items()}
        return chosen(counts, layers, top_k, torch.from_numpy(part.logits).long())

    def _warm_up(self) -> None:
        """One token through everything, on the dummy page; slot 0 forgets it when a request takes it."""
        one, zero = np.ones(1, np.int32).tobytes(), np.zeros(1, np.int32).tobytes()
        new = NewRow(slot=0, tokens=zero, prompt_len=1, pages=[], sampling=RowSampling())
        self.execute(StepPlan(step=0, slots=zero, starts=zero, q_lens=one, flags=bytes([SAMPLE]), new=[new]))


def places(pages: bytes) -> torch.Tensor:
    """int64[n]"""
    return torch.from_numpy(column(pages).astype(np.int64))
