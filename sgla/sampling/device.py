"""Sampling on the GPU. A row that only needs a temperature is drawn by kernels inside the step's graph; this
module holds the tables they read, and everything more: thresholds, logprobs, and the rules that
``device_rules.py`` has for all rows at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.dist import Shard
from sgla.kernels.cuda import thresholds as fast
from sgla.kernels.cuda.batch_gemm import DrawInputs
from sgla.kernels.rehearsal import under_way
from sgla.kernels.triton import sampling
from sgla.kernels.triton.fetch import are_few, fetch
from sgla.kernels.triton.invariant import log_sum_exp
from sgla.kernels.triton.tokens import TokenTable
from sgla.messages import LogprobBlock, NewRow, RowSampling
from sgla.sampling.constraints import Masks
from sgla.sampling.device_rules import DeviceRules, send
from sgla.sampling.logprobs import Scores
from sgla.sampling.sampler import COLD

Int32s = NDArray[np.int32]
THRESHOLD, SCORED, RULED, GRAMMAR = (1 << i for i in range(4))  # what a row wants


class Scored(NamedTuple):
    """Logprobs of n tokens on their way to the host: see ``Scores``.
    ``named``: ids and values that come behind the top."""

    row: int
    prompt: bool
    start: int
    asked: int
    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    named: tuple[Tensor, Tensor] | None = None

    def block(self) -> LogprobBlock | None:
        """The message; None where logits were no numbers. The step must be done."""
        tops = [self.top_ids, self.top_values]
        if self.named is not None:
            tops = [torch.cat(pair, 1) for pair in zip(tops, self.named)]
        scores = Scores(*(part.numpy() for part in (self.values, self.ranks, *tops)))
        return scores.block(self.row, self.prompt, self.start, self.asked) if scores.sound else None


class Named(NamedTuple):
    """Tokens whose logprobs a request asks for: int32[1, n] on the host, int64[n] on the GPU."""

    here: Tensor
    there: Tensor


class Pending(NamedTuple):
    """Rows of a step that get a token. ``logits`` float32[S, this rank's part of V], ``slots`` and
    ``positions`` int32[S] are on the GPU, as are their places, the first of ``out`` int32[at least S];
    ``on_host``: slots and positions again; ``rows``: the numbers that logprobs carry."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    out: Tensor
    rows: Int32s
    on_host: tuple[Int32s, Int32s]


class DeviceSampler:
    """``tokens``: those of all slots. The last slot is the padding rows'.

    Ranks cannot disagree: each draws from its part of the vocabulary, or one alone from all of it, and all
    take the best of the candidates that every rank has seen."""

    def __init__(self, tokens: TokenTable, vocab_size: int, shard: Shard | None = None) -> None:
        slots, device = tokens.slots, tokens.device
        self._tokens, self._vocab, self._shard = tokens, vocab_size, shard or Shard()
        several = self._shard.size > 1 or self._shard.context is not None
        self._best_of_ranks = self._shard.max if several else None
        self.temperatures = torch.zeros(slots, device=device)
        self.top_ps = torch.ones(slots, device=device)
        self.min_ps = torch.zeros(slots, device=device)
        self.top_ks = torch.zeros(slots, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rows: list[RowSampling] = [RowSampling()] * slots
        self._wants = np.zeros(slots, np.uint8)  # more than a draw by temperature
        self._rules = DeviceRules(tokens, vocab_size)
        self._named: dict[int, Named] = {}

    def admit(self, new: NewRow) -> None:
        """The host's part, and the rules;
        the other tables on the GPU are filled by ``kernels/triton/step.py: admit``."""
        s = new.sampling
        ruled = self._rules.admit(new.slot, new.prompt_len, s)
        wants = {
            THRESHOLD: s.temperature >= COLD and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0),
            SCORED: s.logprobs >= 0,
            RULED: ruled,
            GRAMMAR: s.grammar,
        }
        self._wants[new.slot] = sum(flag for flag, wanted in wants.items() if wanted)
        self._rows[new.slot] = s
        self._named.pop(new.slot, None)
        if s.logprob_ids:
            here = torch.tensor([s.logprob_ids], dtype=torch.int32)
            self._named[new.slot] = Named(here, self._send(s.logprob_ids))

    def logprob_ids(self, slot: int) -> Tensor | None:
        """Tokens whose logprobs the request in ``slot`` asks for."""
        named = self._named.get(slot)
        return named.there if named else None

    def plain(self, slots: Int32s) -> bool:
        """True if ``draw`` alone serves these slots."""
        return not self._wants[slots].any()

    def ruled(self, slot: int) -> bool:
        """The request in ``slot`` has rules or a grammar."""
        return bool(self._wants[slot] & (RULED | GRAMMAR))

    def _wanting(self, want: int, slots: Int32s) -> list[int]:
        """Numbers of the rows that want ``want``."""
        return np.flatnonzero(self._wants[slots] & want).tolist()

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        landing: sampling.Landing | None = None,
    ) -> None:
        """Tokens of rows ``logits``, float32[S, this rank's part of V],
        into ``out`` and the token table. Capturable."""
        self._draw(logits, slots, positions, out, self._shard.range(self._vocab).start, landing=landing)

    def guess(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        first: int,
        exact: sampling.Exact | None = None,
        beside: Tensor | None = None,
    ) -> None:
        """``draw`` by temperature, top-k, top-p and min-p, from the whole vocabulary; with several ranks by
        temperature alone, each from its part, which begins at ``first``. ``exact``: what the logits are
        rounded of; they are changed. ``beside``: where second guesses go (``sampling.sample``).
        Capturable."""
        thresholds = None
        if self._shard.size == 1:
            thresholds = fast.find_thresholds(
                logits, slots, self.temperatures, self.top_ks, self.top_ps, self.min_ps
            )
        if exact is not None:
            sampling.sharpen(
                logits, slots, positions, self.seeds, self.temperatures, exact, thresholds, first
            )
        self._draw(logits, slots, positions, out, first, thresholds, beside=beside)

    def fused_draw(self, slots: Tensor, positions: Tensor, keys: Tensor, plain: Tensor) -> DrawInputs:
        """What the output layer needs to draw instead of ``draw``; then ``land`` does the rest."""
        first = self._shard.range(self._vocab).start
        return DrawInputs(slots, positions, self.seeds, self.temperatures, keys, plain, first)

    def land(self, draw: DrawInputs, out: Tensor, landing: sampling.Landing) -> None:
        sampling.follow(
            draw.keys, draw.slots, draw.positions, self._tokens, out, self._best_of_ranks, landing
        )

    def _draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        first: int,
        thresholds: Tensor | None = None,
        landing: sampling.Landing | None = None,
        beside: Tensor | None = None,
    ) -> None:
        sampling.sample(
            logits, slots, positions, self.seeds, self.temperatures, self._tokens, out, thresholds, first,
            self._best_of_ranks, landing, beside,
        )  # fmt: skip

    def _send(self, values: Any) -> Tensor:
        return send(np.array(values, np.int64), self._tokens.device)

    def _gather(self, part: Tensor) -> Tensor:
        full = part.new_empty(part.shape[0], self._vocab)
        self._shard.all_gather(part, full)
        return full

    def _follow(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Take the tokens that another rank draws."""
        keys = torch.full(slots.shape, sampling.WORST, dtype=torch.int64, device=slots.device)
        sampling.follow(keys, slots, positions, self._tokens, out, self._shard.max)

    def sample(self, pending: Pending, masks: Masks | None = None) -> list[Scored]:
        """``draw`` with everything requests may ask for; ``masks`` are those of grammars.
        The logits are changed."""
        logits, slots, positions, out, rows, (host_slots, host_positions) = pending
        if self._shard.size > 1:
            logits = self._gather(logits)
        if not self._shard.draws:
            self._follow(slots, positions, out)
            return []
        wanted = self._wanting(SCORED, host_slots)
        which = self._send(wanted) if wanted else None
        raw = logits[which] if wanted else None
        if self._wanting(RULED, host_slots):
            self._rules.apply(logits, slots, positions, pending.on_host)
        if masks is not None:
            sampling.mask(logits, *masks)
        thresholds = None
        if self._wanting(THRESHOLD, host_slots):
            thresholds = fast.find_thresholds(
                logits, slots, self.temperatures, self.top_ks, self.top_ps, self.min_ps
            )
        self._draw(logits, slots, positions, out, 0, thresholds)
        if raw is None:
            return []
        return self._score(
            raw,
            out[which].clamp(min=0),
            [(int(rows[i]), int(host_slots[i]), int(host_positions[i])) for i in wanted],
        )

    def _score(self, raw: Tensor, chosen: Tensor, wanted: list[tuple[int, int, int]]) -> list[Scored]:
        """Logprobs of the tokens ``chosen`` int32[n] by logits ``raw`` float32[n, V];
        ``wanted``: row, slot and position of each."""
        asked = [self._rows[slot] for _, slot, _ in wanted]
        top = score(raw, chosen, max(s.logprobs for s in asked))
        values, ranks, top_ids, top_values = map(to_host, top)
        named = [self._named.get(slot) for _, slot, _ in wanted]
        counts = [len(s.logprob_ids) for s in asked]
        if any(counts):
            at = self._send(np.repeat(np.arange(len(counts)), counts))
            ids = torch.cat([names.there for names in named if names])
            norm = raw.gather(1, chosen[:, None].long())[:, 0] - top[0]
            named_values = to_host(raw[at, ids] - norm[at])[None].split(counts, 1)
        scored = []
        for j, (row, _, position) in enumerate(wanted):
            own, names = asked[j].logprobs, named[j]
            scored.append(
                Scored(
                    row, False, position, counts[j],
                    values[j : j + 1], ranks[j : j + 1],
                    top_ids[j : j + 1, :own], top_values[j : j + 1, :own],
                    (names.here, named_values[j]) if names else None,
                )
            )  # fmt: skip
        return scored


def score(
    logits: Tensor, targets: Tensor, k: int, asked: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(values, ranks, top_ids, top_values)`` as in ``Scores``: logits float32[n, V], targets int[n];
    ``asked`` int64[*]: other ids."""
    norm = log_sum_exp(logits)
    own = logits.gather(1, targets.long()[:, None])
    ranks = 1 + (logits > own).sum(-1, dtype=torch.int32)
    top_values, top_ids = logits.topk(k)
    if asked is not None:
        others = asked.expand(len(logits), -1)
        top_ids, top_values = (
            torch.cat([top_ids, others], 1),
            torch.cat([top_values, logits.gather(1, others)], 1),
        )
    return (own - norm)[:, 0], ranks, top_ids.int(), top_values - norm


def to_host(x: Tensor) -> Tensor:
    """A pinned copy that is complete when the stream has got there; who asks keeps it until then."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    if x.is_cuda and are_few(x):
        fetch(x.view(-1).view(torch.int32), out.view(-1).view(torch.int32))
        if not under_way():
            return out
    return out.copy_(x, non_blocking=True)
