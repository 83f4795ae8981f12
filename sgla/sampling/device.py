"""Sampling on the GPU. A row that only needs a temperature is drawn by kernels inside the step's graph; this module holds
the tables they read, and everything more: cuts, penalties, biases, logprobs. The rules are those of ``rules.py``, over all
rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.dist import Shard
from sgla.kernels.cuda import cuts as fast
from sgla.kernels.triton import sampling
from sgla.kernels.triton.invariant import log_sum_exp
from sgla.messages import LogprobBlock, NewRow, RowSampling, ThinkLimit
from sgla.sampling.constraints import Masks
from sgla.sampling.logprobs import Scores
from sgla.sampling.sampler import COLD

Int32s = NDArray[np.int32]


class Scored(NamedTuple):
    """Logprobs of n tokens on their way to the host: see ``Scores``."""

    row: int
    prompt: bool
    start: int
    asked: int
    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor

    def block(self) -> LogprobBlock:
        """The message; the step must be done."""
        parts = (self.values, self.ranks, self.top_ids, self.top_values)
        scores = Scores(*(part.numpy() for part in parts))
        return scores.block(self.row, self.prompt, self.start, self.asked)


class Undrawn(NamedTuple):
    """Rows of a step that get a token. ``logits`` float32[S, this rank's part of V], ``slots`` and ``positions`` int32[S] are on
    the GPU, as are their places, the first of ``out`` int32[at least S]; ``on_host``: slots and positions again; ``rows``: the
    numbers that logprobs carry."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    out: Tensor
    rows: Int32s
    on_host: tuple[Int32s, Int32s]


class DeviceSampler:
    """``tokens`` int32[slots + 1, context + 1] is the token table on the GPU. The last slot is the padding rows'.

    Ranks cannot disagree: each draws from its part of the vocabulary, or rank 0 alone from all of it, and all take the
    best of the candidates that every rank has seen."""

    def __init__(self, tokens: Tensor, vocab_size: int, shard: Shard | None = None) -> None:
        slots, device = tokens.shape[0], tokens.device
        self._tokens, self._vocab, self._shard = tokens, vocab_size, shard or Shard()
        self._best_of_ranks = self._shard.max if self._shard.size > 1 else None
        self.temperatures = torch.zeros(slots, device=device)
        self.top_ps = torch.ones(slots, device=device)
        self.min_ps = torch.zeros(slots, device=device)
        self.top_ks = torch.zeros(slots, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rows: list[RowSampling] = [RowSampling()] * slots
        self._prompt_len = np.zeros(slots, np.int32)
        self._plain = np.ones(slots, bool)  # a draw by temperature is all
        self._cut = np.zeros(slots, bool)
        self._allowed: dict[int, Tensor] = {}  # slot -> the only tokens it may have

    def admit(self, new: NewRow) -> None:
        """The host's part; the tables on the GPU are filled by ``kernels/triton/step.py: admit``."""
        s = new.sampling
        cut = s.temperature >= COLD and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        rules = (
            s.repetition != 1 or s.frequency or s.presence or s.logit_bias or (s.min_tokens and s.stop_ids)
        )
        narrow = s.bad_words or s.allowed or s.thinking is not None
        self._allowed.pop(new.slot, None)
        if s.allowed:
            ids = [token for token in s.allowed if 0 <= token < self._vocab]
            self._allowed[new.slot] = torch.tensor(ids, device=self._tokens.device)
        self._rows[new.slot] = s
        self._prompt_len[new.slot] = new.prompt_len
        self._cut[new.slot] = cut
        self._plain[new.slot] = not (cut or rules or narrow or s.grammar or s.logprobs >= 0)

    def logprob_ids(self, slot: int) -> list[int]:
        """Tokens whose logprobs the request in ``slot`` asks for."""
        return self._rows[slot].logprob_ids

    def plain(self, slots: Int32s) -> bool:
        """True if ``draw`` alone serves these slots."""
        return bool(self._plain[slots].all())

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Tokens of rows ``logits``, float32[S, this rank's part of V], into ``out`` and the token table. Capturable."""
        self._race(logits, slots, positions, out, self._shard.range(self._vocab).start)

    def _race(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        first: int,
        cuts: Tensor | None = None,
    ) -> None:
        sampling.sample(
            logits, slots, positions, self.seeds, self.temperatures, self._tokens, out, cuts, first, self._best_of_ranks
        )  # fmt: skip

    def _gather(self, part: Tensor) -> Tensor:
        full = part.new_empty(part.shape[0], self._vocab)
        self._shard.all_gather(part, full)
        return full

    def _follow(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Take the tokens that rank 0 draws."""
        keys = torch.full(slots.shape, sampling.WORST, dtype=torch.int64, device=slots.device)
        sampling.follow(keys, slots, positions, self._tokens, out, self._shard.max)

    def sample(self, undrawn: Undrawn, masks: Masks | None = None) -> list[Scored]:
        """``draw`` with everything requests may ask for; ``masks`` are those of grammars. The logits are changed."""
        logits, slots, positions, out, rows, (host_slots, host_positions) = undrawn
        if self._shard.size > 1:
            logits = self._gather(logits)
        if self._shard.rank > 0:
            self._follow(slots, positions, out)
            return []
        wanted = [i for i, slot in enumerate(host_slots.tolist()) if self._rows[slot].logprobs >= 0]
        raw = logits[wanted] if wanted else None
        self._penalize(logits, host_slots, host_positions)
        self._bias(logits, host_slots, host_positions)
        self._narrow(logits, host_slots, host_positions)
        if masks is not None:
            sampling.mask(logits, *masks)
        cuts = None
        if self._cut[host_slots].any():
            cuts = fast.find_cuts(logits, slots, self.temperatures, self.top_ks, self.top_ps, self.min_ps)
        self._race(logits, slots, positions, out, 0, cuts)
        if raw is None:
            return []
        chosen = out[: len(host_slots)][wanted]
        k = max(self._rows[host_slots[i]].logprobs for i in wanted)
        values, ranks, top_ids, top_values = score(raw, chosen, k)
        scored = []
        for j, i in enumerate(wanted):
            own, asked = self._rows[host_slots[i]].logprobs, self._rows[host_slots[i]].logprob_ids
            parts = (
                values[j : j + 1],
                ranks[j : j + 1],
                top_ids[j : j + 1, :own],
                top_values[j : j + 1, :own],
            )
            if asked:
                parts = score(raw[j : j + 1], chosen[j : j + 1], own, asked)
            scored.append(
                Scored(int(rows[i]), False, int(host_positions[i]), len(asked), *map(to_host, parts))
            )
        return scored

    def _penalize(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        chosen = [
            i
            for i, slot in enumerate(slots.tolist())
            if (s := self._rows[slot]).repetition != 1 or s.frequency or s.presence
        ]
        if not chosen:
            return
        device, rows = logits.device, [self._rows[slots[i]] for i in chosen]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        ends = column(positions[chosen].tolist())
        prompts = column(self._prompt_len[slots[chosen]].tolist())
        place = torch.arange(int(positions[chosen].max()), device=device)
        history = self._tokens[slots[chosen].tolist(), : len(place)].long()
        known, output = place < ends, (place >= prompts) & (place < ends)
        x = logits[chosen]
        seen = x.new_zeros(len(chosen), self._vocab + 1)
        seen.scatter_(1, history.where(known, self._vocab), 1.0)
        repetition = column([s.repetition for s in rows])
        x = torch.where(seen[:, :-1] > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        counts = seen.zero_().scatter_add_(1, history.where(output, self._vocab), output.float())[:, :-1]
        x -= column([s.frequency for s in rows]) * counts + column([s.presence for s in rows]) * (counts > 0)
        logits[chosen] = x

    def _bias(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        biased: list[tuple[int, int, float]] = []
        banned: list[tuple[int, int]] = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            s = self._rows[slot]
            biased += [
                (row, token, value) for token, value in dict(s.logit_bias).items() if 0 <= token < self._vocab
            ]
            if position < self._prompt_len[slot] + s.min_tokens:
                banned += [(row, token) for token in s.stop_ids if 0 <= token < self._vocab]
        if biased:
            rows, tokens, values = (list(c) for c in zip(*biased))
            logits[rows, tokens] += torch.tensor(values, device=logits.device)
        if banned:
            rows, tokens = (list(c) for c in zip(*banned))
            logits[rows, tokens] = float("-inf")

    def _narrow(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        """Bad words, allowed tokens, limits of reasoning, in this order."""
        self._forbid_words(logits, slots, positions)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            ids = self._allowed.get(slot)
            if ids is not None:
                kept = logits[row, ids]
                logits[row] = float("-inf")
                logits[row, ids] = torch.where(kept.max() > float("-inf"), kept, 0.0)
            limit = self._rows[slot].thinking
            if limit is not None:
                output = self._tokens[slot, int(self._prompt_len[slot]) : position]
                only = torch.full_like(logits[row], float("-inf"))
                only[limit.close] = 0
                logits[row] = torch.where(thought_enough(output, limit), only, logits[row])

    def _forbid_words(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        words = [
            (row, slot, position, word)
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist()))
            for word in self._rows[slot].bad_words
            if max(word) < self._vocab and position - self._prompt_len[slot] >= len(word) - 1
        ]
        if not words:
            return
        longest = max(len(word) for *_, word in words) - 1
        before = [[-1] * (longest + 1 - len(word)) + word[:-1] for *_, word in words]
        columns = [[row, slot, position, word[-1]] for row, slot, position, word in words]
        rows, where, ends, last = torch.tensor(columns, device=logits.device).T
        wanted = torch.tensor(before, dtype=torch.int32, device=logits.device).view(len(words), longest)
        places = ends[:, None] + torch.arange(-longest, 0, device=logits.device)
        found = self._tokens[where[:, None], places.clamp(min=0)]
        complete = ((found == wanted) | (wanted < 0)).all(1)
        change = torch.zeros(len(words), device=logits.device).masked_fill_(complete, float("-inf"))
        logits.index_put_((rows, last), change, accumulate=True)


def thought_enough(output: Tensor, limit: ThinkLimit) -> Tensor:
    """Whether reasoning must end now, bool[]; ``output`` int32[n]. See ``rules.py: ThinkingBudget``."""
    turns = torch.where(output == limit.open, 1, torch.where(output == limit.close, -1, 0))
    begin = turns.new_full((1,), 1 if limit.opened else -1)
    turns = torch.cat([begin, turns])
    place = torch.arange(len(turns), device=output.device)
    inside = turns[torch.where(turns != 0, place, 0).cummax(0).values] > 0
    return inside[-1] & ((inside[:-1] & (turns[1:] >= 0)).sum() >= limit.tokens)


def score(
    logits: Tensor, targets: Tensor, k: int, asked: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(values, ranks, top_ids, top_values)`` as in ``Scores``: logits float32[n, V], targets int[n]."""
    norm = log_sum_exp(logits)
    own = logits.gather(1, targets.long()[:, None])
    ranks = 1 + (logits > own).sum(-1, dtype=torch.int32)
    top_values, top_ids = logits.topk(k)
    if asked:
        others = torch.tensor(asked, device=logits.device).expand(len(logits), -1)
        top_ids, top_values = (
            torch.cat([top_ids, others], 1),
            torch.cat([top_values, logits.gather(1, others)], 1),
        )
    return (own - norm)[:, 0], ranks, top_ids.int(), top_values - norm


def to_host(x: Tensor) -> Tensor:
    """A pinned copy that is complete when the stream has got there."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)
