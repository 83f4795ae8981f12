"""Beam search over the likeliest next tokens of each beam.
Pure: who runs it gets these from one-token requests.

The rules are those of ``_beam_search`` in transformers 5 (``generation/utils.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from sgla.messages import SamplingParams, TokenLogprob

MAX_WIDTH = 10
MAX_CANDIDATES = 2 * MAX_WIDTH  # logprobs of a token

Stopping = bool | Literal["never"]


class Beam(NamedTuple):
    """``tokens`` behind the prompt; ``score``: the sum of their logprobs;
    ``entries``: these with some alternatives, if they are kept."""

    tokens: list[int]
    score: float
    entries: list[TokenLogprob]


class Finished(NamedTuple):
    """``score``: that of the beam divided by its length to the power of the penalty. ``matched``: the token
    that ended it; None: it is as long as it may be."""

    score: float
    beam: Beam
    matched: int | None


class BeamSearch:
    """``running``: the beams whose next tokens ``take`` wants, until ``done``;
    ``finished``: the best, the best first, ``width`` at most.

    ``ends``: tokens that end a beam. ``longest``: tokens of a beam. ``length_penalty`` above 0 favours long
    beams. ``early_stopping``: True ends the search with ``width`` finished beams; False, when the best
    running one would not be among them if it ended now; "never", if it could not be among them at any length.
    ``keep``: alternatives of each token to keep; None: no logprobs.
    """

    def __init__(
        self,
        width: int,
        ends: Iterable[int],
        longest: int,
        length_penalty: float = 1.0,
        early_stopping: Stopping = False,
        keep: int | None = None,
    ) -> None:
        self.running = [Beam([], 0.0, [])]
        self.finished: list[Finished] = []
        self.done = False
        self._width = width
        self._ends = frozenset(ends)
        self._longest = longest
        self._penalty = length_penalty
        self._early = early_stopping
        self._keep = keep

    def take(self, entries: Sequence[TokenLogprob]) -> None:
        """``entries[i].top``: the likeliest tokens behind ``running[i]``, the likeliest first."""
        beams = self.running
        length = len(beams[0].tokens) + 1
        found = [
            (beam.score + value, beam, entry, rank)
            for beam, entry in zip(beams, entries, strict=True)
            for rank, (_, value) in enumerate(entry.top)
        ]
        found.sort(key=lambda candidate: -candidate[0])
        self.running = []
        for place, (score, beam, entry, rank) in enumerate(found):
            token = entry.top[rank][0]
            ended = token in self._ends
            if (ended or length == self._longest) and place < self._width:
                longer = self._extended(beam, score, entry, rank)
                self.finished.append(
                    Finished(score / length**self._penalty, longer, token if ended else None)
                )
            elif not ended and length < self._longest and len(self.running) < self._width:
                self.running.append(self._extended(beam, score, entry, rank))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._width :]
        self.done = not self.running or (len(self.finished) == self._width and not self._improves(length))

    def _extended(self, beam: Beam, score: float, entry: TokenLogprob, rank: int) -> Beam:
        token, value = entry.top[rank]
        if self._keep is None:
            return Beam([*beam.tokens, token], score, [])
        chosen = TokenLogprob(token, value, rank + 1, entry.top[: self._keep])
        return Beam([*beam.tokens, token], score, [*beam.entries, chosen])

    def _improves(self, length: int) -> bool:
        """Whether a running beam may take the place of a finished one."""
        if self._early is True:
            return False
        if self._early == "never" and self._penalty > 0:
            length = self._longest
        return self.running[0].score / length**self._penalty > self.finished[-1].score


def one_token(width: int, ends: int) -> SamplingParams:
    """What to ask for behind each beam."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=candidates(width, ends),
    )


def candidates(width: int, ends: int) -> int:
    """How many of the likeliest tokens to ask for:
    enough to go on, even if all that can end a beam are among them."""
    return min(MAX_CANDIDATES, max(2, 1 + ends) * width)
