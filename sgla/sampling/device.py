"""Sampling on the GPU. A row that only needs a temperature is drawn by kernels inside the step's graph; this module holds
the tables they read, and everything more: cuts, penalties, biases, logprobs. The rules are those of ``rules.py``, over all
rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.dist import Shard
from sgla.grammar.matcher import set_bits
from sgla.kernels.cuda import cuts as fast
from sgla.kernels.cuda.batch_gemm import Race
from sgla.kernels.triton import sampling
from sgla.kernels.triton.invariant import log_sum_exp
from sgla.messages import LogprobBlock, NewRow, RowSampling
from sgla.sampling.constraints import Masks
from sgla.sampling.logprobs import Scores
from sgla.sampling.sampler import COLD

Int32s = NDArray[np.int32]
CELLS = 1 << 24  # tokens of rows' histories that are looked at at a time
CUT, SCORED, PENALIZED, BIASED, WORDS, ALLOWED, THINKING, GRAMMAR = (
    1 << i for i in range(8)
)  # what a row wants


class Scored(NamedTuple):
    """Logprobs of n tokens on their way to the host: see ``Scores``. ``named``: ids and values that come behind the top."""

    row: int
    prompt: bool
    start: int
    asked: int
    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    named: tuple[Tensor, Tensor] | None = None

    def block(self) -> LogprobBlock:
        """The message; the step must be done."""
        tops = [self.top_ids, self.top_values]
        if self.named is not None:
            tops = [torch.cat(pair, 1) for pair in zip(tops, self.named)]
        scores = Scores(*(part.numpy() for part in (self.values, self.ranks, *tops)))
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
        self._wants = np.zeros(slots, np.uint8)  # more than a draw by temperature
        self._allowed: dict[
            int, Tensor
        ] = {}  # slot -> int32[ceil(V / 32)]: bits of the only tokens it may have

    def admit(self, new: NewRow) -> None:
        """The host's part; the tables on the GPU are filled by ``kernels/triton/step.py: admit``."""
        s = new.sampling
        wants = {
            CUT: s.temperature >= COLD and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0),
            SCORED: s.logprobs >= 0,
            PENALIZED: s.repetition != 1 or s.frequency or s.presence,
            BIASED: s.logit_bias or (s.min_tokens and s.stop_ids),
            WORDS: s.bad_words,
            ALLOWED: s.allowed,
            THINKING: s.thinking is not None,
            GRAMMAR: s.grammar,
        }
        self._wants[new.slot] = sum(flag for flag, wanted in wants.items() if wanted)
        self._allowed.pop(new.slot, None)
        if s.allowed:
            words = np.zeros(-(-self._vocab // 32), np.uint32)
            set_bits(words, np.array([token for token in s.allowed if 0 <= token < self._vocab], np.intp))
            self._allowed[new.slot] = self._send(words.view(np.int32), np.int32)
        self._rows[new.slot] = s
        self._prompt_len[new.slot] = new.prompt_len

    def logprob_ids(self, slot: int) -> Tensor | None:
        """Tokens whose logprobs the request in ``slot`` asks for."""
        asked = self._rows[slot].logprob_ids
        return self._send(asked) if asked else None

    def plain(self, slots: Int32s) -> bool:
        """True if ``draw`` alone serves these slots."""
        return not self._wants[slots].any()

    def _that(self, want: int, slots: Int32s) -> list[int]:
        """The rows that want this."""
        return np.flatnonzero(self._wants[slots] & want).tolist()

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        landing: sampling.Landing | None = None,
    ) -> None:
        """Tokens of rows ``logits``, float32[S, this rank's part of V], into ``out`` and the token table. Capturable."""
        self._race(logits, slots, positions, out, self._shard.range(self._vocab).start, landing=landing)

    def race(self, slots: Tensor, positions: Tensor, keys: Tensor, plain: Tensor) -> Race:
        """What the output layer needs to draw instead of ``draw``; then ``land`` does the rest."""
        first = self._shard.range(self._vocab).start
        return Race(slots, positions, self.seeds, self.temperatures, keys, plain, first)

    def land(self, race: Race, out: Tensor, landing: sampling.Landing) -> None:
        sampling.follow(
            race.keys, race.slots, race.positions, self._tokens, out, self._best_of_ranks, landing
        )

    def _race(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
        first: int,
        cuts: Tensor | None = None,
        landing: sampling.Landing | None = None,
    ) -> None:
        sampling.sample(
            logits, slots, positions, self.seeds, self.temperatures, self._tokens, out, cuts, first, self._best_of_ranks, landing
        )  # fmt: skip

    def _send(self, values: Any, dtype: Any = np.int64) -> Tensor:
        """A copy on the device. Waits for nothing: a step is launched while the one before runs."""
        host = torch.from_numpy(np.array(values, dtype))
        device = self._tokens.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

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
        wanted = self._that(SCORED, host_slots)
        which = self._send(wanted) if wanted else None
        raw = logits[which] if wanted else None
        self._change(logits, host_slots, host_positions)
        if masks is not None:
            sampling.mask(logits, *masks)
        cuts = None
        if self._that(CUT, host_slots):
            cuts = fast.find_cuts(logits, slots, self.temperatures, self.top_ks, self.top_ps, self.min_ps)
        self._race(logits, slots, positions, out, 0, cuts)
        if raw is None:
            return []
        return self._score(
            raw, out[which], [(int(rows[i]), int(host_slots[i]), int(host_positions[i])) for i in wanted]
        )

    def _score(self, raw: Tensor, chosen: Tensor, wanted: list[tuple[int, int, int]]) -> list[Scored]:
        """Logprobs of the tokens ``chosen`` int32[n] by logits ``raw`` float32[n, V]; ``wanted``: row, slot and position of each."""
        asked = [self._rows[slot] for _, slot, _ in wanted]
        top = score(raw, chosen, max(s.logprobs for s in asked))
        values, ranks, top_ids, top_values = map(to_host, top)
        names = [(j, token) for j, s in enumerate(asked) for token in s.logprob_ids]
        if names:
            at, ids = self._send(names).T
            norm = raw.gather(1, chosen[:, None].long())[:, 0] - top[0]
            named_values = to_host(raw[at, ids] - norm[at])
        scored, end = [], 0
        for j, (row, _, position) in enumerate(wanted):
            own, ids = asked[j].logprobs, asked[j].logprob_ids
            begin, end = end, end + len(ids)
            scored.append(
                Scored(
                    row, False, position, len(ids),
                    values[j : j + 1], ranks[j : j + 1], top_ids[j : j + 1, :own], top_values[j : j + 1, :own],
                    (torch.tensor([ids], dtype=torch.int32), named_values[None, begin:end]) if ids else None,
                )
            )  # fmt: skip
        return scored

    def _parts(self, want: int, slots: Int32s, positions: Int32s) -> Iterator[list[int]]:
        """The rows that want this, as many at a time as there is memory for."""
        chosen = self._that(want, slots)
        if chosen:
            size = max(1, CELLS // int(positions[chosen].max()))
            yield from (chosen[i : i + size] for i in range(0, len(chosen), size))

    def _penalize(self, logits: Tensor, slots: Int32s, positions: Int32s, chosen: list[int]) -> None:
        rows = [self._rows[slots[i]] for i in chosen]
        at, slot, ends, prompts = self._send(
            [chosen, slots[chosen], positions[chosen], self._prompt_len[slots[chosen]]]
        )
        repetition, frequency, presence = self._send(
            [[s.repetition for s in rows], [s.frequency for s in rows], [s.presence for s in rows]],
            np.float32,
        )[..., None]
        place = torch.arange(int(positions[chosen].max()), device=logits.device)
        history = self._tokens[slot, : len(place)].long()
        known, output = place < ends[:, None], (place >= prompts[:, None]) & (place < ends[:, None])
        x = logits[at]
        seen = x.new_zeros(len(chosen), self._vocab + 1)
        seen.scatter_(1, history.where(known, self._vocab), 1.0)
        x = torch.where(seen[:, :-1] > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        counts = seen.zero_().scatter_add_(1, history.where(output, self._vocab), output.float())[:, :-1]
        logits[at] = x - (frequency * counts + presence * (counts > 0))

    def _bias(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        biased: list[tuple[int, int, float]] = []
        banned: list[tuple[int, int]] = []
        for row in self._that(BIASED, slots):
            slot, position = slots[row], positions[row]
            s = self._rows[slot]
            biased += [
                (row, token, value) for token, value in dict(s.logit_bias).items() if 0 <= token < self._vocab
            ]
            if position < self._prompt_len[slot] + s.min_tokens:
                banned += [(row, token) for token in s.stop_ids if 0 <= token < self._vocab]
        if biased:
            rows, tokens, values = zip(*biased)
            at = tuple(self._send([rows, tokens]))
            logits[at] = logits[at] + self._send(values, np.float32)
        if banned:
            rows, tokens = self._send(banned).T
            logits[rows, tokens] = float("-inf")

    def _change(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        """The rules in their order: penalties, biases, bad words, allowed tokens, limits of reasoning."""
        for part in self._parts(PENALIZED, slots, positions):
            self._penalize(logits, slots, positions, part)
        self._bias(logits, slots, positions)
        self._forbid_words(logits, slots, positions)
        kept = self._that(ALLOWED, slots)
        if kept:
            words = torch.stack([self._allowed[slot] for slot in slots[kept].tolist()])
            sampling.mask(logits, self._send(kept, np.int32), words)
        for part in self._parts(THINKING, slots, positions):
            self._end_thinking(logits, slots, positions, part)

    def _end_thinking(self, logits: Tensor, slots: Int32s, positions: Int32s, chosen: list[int]) -> None:
        """Leave the end of reasoning alone in rows that have reasoned enough. See ``rules.py: ThinkingBudget``."""
        limits = [(i, limit) for i in chosen if (limit := self._rows[slots[i]].thinking)]
        columns = self._send(
            [
                (i, slots[i], self._prompt_len[slots[i]], positions[i], limit.open, limit.close, limit.tokens, limit.opened)
                for i, limit in limits
            ]
        )  # fmt: skip
        at, slot, begin, end, opens, closes, most, opened = columns.T[..., None]
        place = torch.arange(int(positions[chosen].max()), device=logits.device)
        tokens = self._tokens[slot[:, 0], : len(place)]
        output = (place >= begin) & (place < end)
        turns = torch.where(tokens == opens, 1, torch.where(tokens == closes, -1, 0)).where(output, 0)
        turns = torch.cat([2 * opened - 1, turns], 1)
        last = torch.where(turns != 0, torch.arange(turns.shape[1], device=logits.device), 0).cummax(1).values
        inside = turns.gather(1, last) > 0
        used = (inside[:, :-1] & (turns[:, 1:] >= 0) & output).sum(1, keepdim=True)
        enough = inside[:, -1:] & (used >= most)
        x = logits[at[:, 0]]
        only = torch.full_like(x, float("-inf")).scatter_(1, closes, 0.0)
        logits[at[:, 0]] = torch.where(enough, only, x)

    def _forbid_words(self, logits: Tensor, slots: Int32s, positions: Int32s) -> None:
        words = [
            (row, slot, position, word)
            for row in self._that(WORDS, slots)
            for slot, position in [(int(slots[row]), int(positions[row]))]
            for word in self._rows[slot].bad_words
            if max(word) < self._vocab and position - self._prompt_len[slot] >= len(word) - 1
        ]
        if not words:
            return
        longest = max(len(word) for *_, word in words) - 1
        before = [[-1] * (longest + 1 - len(word)) + word[:-1] for *_, word in words]
        columns = [[row, slot, position, word[-1]] for row, slot, position, word in words]
        rows, where, ends, last = self._send(columns).T
        wanted = self._send(before, np.int32).view(len(words), longest)
        places = ends[:, None] + torch.arange(-longest, 0, device=logits.device)
        found = self._tokens[where[:, None], places.clamp(min=0)]
        complete = ((found == wanted) | (wanted < 0)).all(1)
        change = torch.zeros(len(words), device=logits.device).masked_fill_(complete, float("-inf"))
        logits.index_put_((rows, last), change, accumulate=True)


def score(
    logits: Tensor, targets: Tensor, k: int, asked: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(values, ranks, top_ids, top_values)`` as in ``Scores``: logits float32[n, V], targets int[n]; ``asked`` int64[*]: other
    ids."""
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
    """A pinned copy that is complete when the stream has got there."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)
