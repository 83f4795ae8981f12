"""How much prefill a step may carry beside decode rows.

The time of a step is modelled as ``a + b * tokens + c * work`` where ``work`` counts the (query, key) pairs
of attention. The coefficients are fitted to measured steps by least squares on relative errors, nonnegative.
Samples fade, but only as new ones of similar size come in: a long decode phase must not make the model forget
what prefill costs. No such model is exact: a few tokens behind a long history cost more each than many. So
beside decode rows prompts get what is left of the target when the model is off by as much as in the latest
such steps, and a little more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgla.sched.request import Request

DECAY = 0.9
TOKENS_UNIT = 256.0
WORK_UNIT = 65536.0
PRIOR_WEIGHT = 0.05
YIELDING_SHARE = 0.25  # by this part of its time a step may get longer for rows that yield
DECODE_SHARE = 0.1  # prefill may always take this part of the decode time, or it would never end
# Of steps with prompts beside decode rows: how fast errors of the model are learned; by how many mean errors
# more a step may take longer than it should, fewer than one of a hundred; and the largest error that counts.
LEARNED, MARGIN, LARGEST = 0.1, 4.0, 0.05

Coefficients = tuple[float, float, float]


def pairs(start: int, count: int) -> int:
    """(query, key) pairs of ``count`` tokens from position ``start``."""
    return count * start + count * (count + 1) // 2


class CostModel:
    """Predicts the duration of a step. ``target``: the inter-token target in seconds, or ``None``; then
    steps are measured only where others ask for what is predicted (``asked``).

    Before anything is measured, a step of ``step_tokens`` is taken to last four times the target.
    """

    def __init__(self, target: float | None, step_tokens: int, asked: bool = False) -> None:
        self.target, self._observes = target, asked or target is not None
        self._bins: dict[int, list[float]] = {}  # log2(tokens) -> moments of (1, tokens, work) / seconds
        self._fit: Coefficients | None = None
        self._ratio, self._error = 1.0, 0.0  # of times to what was predicted; the mean error around that
        if target is not None:
            self._add(step_tokens, pairs(0, step_tokens), 4 * target, PRIOR_WEIGHT)

    def observe(self, tokens: int, work: int, seconds: float, mixed: bool = False) -> None:
        """A step of ``tokens`` tokens and ``work`` pairs took ``seconds``. ``mixed``: it had prompts beside
        decode rows."""
        if self._observes and seconds > 0 and tokens > 0:
            if mixed and (predicted := self.predict(tokens, work)):
                ratio = seconds / predicted
                self._ratio += LEARNED * (min(max(ratio, 0.5), 2.0) - self._ratio)
                error = min(abs(ratio / self._ratio - 1), LARGEST)
                self._error += LEARNED * (error - self._error)
            self._add(tokens, work, seconds, 1.0)

    def _add(self, tokens: int, work: int, seconds: float, weight: float) -> None:
        x = (1 / seconds, tokens / TOKENS_UNIT / seconds, work / WORK_UNIT / seconds)
        new = [x[0] * x[0], x[0] * x[1], x[0] * x[2], x[1] * x[1], x[1] * x[2], x[2] * x[2], *x]
        old = self._bins.get(tokens.bit_length(), [0.0] * 9)
        self._bins[tokens.bit_length()] = [DECAY * o + weight * n for o, n in zip(old, new)]
        self._fit = None

    @property
    def coefficients(self) -> Coefficients:
        """Seconds per step, per token and per pair."""
        if self._fit is None:
            moments = [math.fsum(column) for column in zip(*self._bins.values())]
            a, b, c = _fit(moments) if moments else (0.0, 0.0, 0.0)
            self._fit = (a, b / TOKENS_UNIT, c / WORK_UNIT)
        return self._fit

    def predict(self, tokens: int, work: int) -> float:
        """Seconds."""
        a, b, c = self.coefficients
        return a + b * tokens + c * work

    def prefill_seconds(self, decodes: int, work: int) -> float:
        """Time left for prefill in a step with ``decodes`` decode rows, whose attention is ``work`` pairs."""
        if self.target is None or not decodes:
            return math.inf
        base = self.predict(decodes, work)
        target = self.target / (max(self._ratio, 1.0) * (1 + MARGIN * self._error))
        return max(target - base, DECODE_SHARE * base)

    def beside(self, decodes: int, seconds: float) -> float:
        """What to plan a step for that is to take so long: beside decode rows some take longer than that."""
        return seconds / max(self._ratio, 1.0) if decodes else seconds

    def yielding_seconds(self, decodes: int, work: int, beside: bool, depth: int) -> float:
        """Time for prompts of requests that yield: ``beside`` others they make the step little longer, else
        ``depth`` steps last no longer than the target, since who comes waits for them."""
        if self.target is None:
            return math.inf
        base = self.predict(decodes, work)
        little = YIELDING_SHARE * base
        return little if beside else max(self.target / depth - base, little)

    def more_rows(self, rows: Sequence[int], more: Sequence[int]) -> int:
        """How many of ``more`` decode rows, which yield, make a step of ``rows`` little longer;
        both are told by their lengths."""
        if self.target is None:
            return len(more)
        left = YIELDING_SHARE * self.predict(len(rows), sum(rows))
        _, each, work = self.coefficients
        for i, length in enumerate(more):
            left -= each + work * length
            if left < 0:
                return i
        return len(more)


def _fit(m: list[float]) -> Coefficients:
    """Nonnegative least squares in three unknowns: the best of the seven supports. Exact sums, which all
    versions of Python round alike: a step log plans the same steps again."""
    gram = ((m[0], m[1], m[2]), (m[1], m[3], m[4]), (m[2], m[4], m[5]))
    best, best_gain = (0.0, 0.0, 0.0), 0.0
    for size in (1, 2, 3):
        for support in combinations((1, 0, 2), size):
            solution = _solve([[gram[i][j] for j in support] for i in support], [m[6 + i] for i in support])
            if solution is None or min(solution) < 0:
                continue
            gain = math.fsum(value * m[6 + i] for i, value in zip(support, solution))
            if gain > best_gain * (1 + 1e-9):
                full = [0.0, 0.0, 0.0]
                for i, value in zip(support, solution):
                    full[i] = value
                best, best_gain = (full[0], full[1], full[2]), gain
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric positive system by Cholesky-like elimination; ``None`` if it is singular."""
    n = len(right)
    for k in range(n):
        original = matrix[k][k]
        for i in range(k):
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [x - factor * y for x, y in zip(matrix[k], matrix[i])]
            right[k] -= factor * right[i]
        if matrix[k][k] <= 1e-9 * original:
            return None
    solution = [0.0] * n
    for k in reversed(range(n)):
        rest = math.fsum(matrix[k][j] * solution[j] for j in range(k + 1, n))
        solution[k] = (right[k] - rest) / matrix[k][k]
    return solution


def can_wait(running: Iterable[Request], waiting: Iterable[Request], longest: int) -> bool:
    """Whether all prompts that are not read yet are of requests that will end before one which is being
    decoded, whatever tokens come. Then nothing is lost by reading them little by little in its steps, whose
    weights are read anyway.

    Not with shared prefixes: steps that read these once for all their rows pay for being many. Nor with
    prompts whose logprobs are wanted or that have more than ``longest`` tokens: small steps read these no
    faster. (Stop strings are not known here. A row that one of them ends makes prompts wait that should not
    have.) Source: A. Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked
    Prefills", 2023.
    """
    last, unread = 0, list(waiting)  # outputs that the longest of the decoded ones still has
    for request in running:
        if request.borrowed:
            return False
        if request.planned < request.prompt_len:
            unread.append(request)
        elif not request.stop_ids and request.loop is None:
            last = max(last, request.limit - request.known)
    return last > 0 and all(
        request.limit - request.known < last and request.prompt_logprobs is None and request.known <= longest
        for request in unread
    )


class Budget:
    """What is left of one step for prefill: tokens, and seconds at ``b`` a token and ``c`` a pair."""

    __slots__ = (
        "_b",
        "_c",
        "_decodes",
        "_floor",
        "_kept",
        "_rows",
        "_tile",
        "_used",
        "halved",
        "seconds",
        "tokens",
        "wide",
    )

    def __init__(
        self,
        tokens: int,
        seconds: float,
        coefficients: Coefficients,
        floor: int,
        decodes: int = 0,
        tile: int = 1,
        rows: float = math.inf,
    ) -> None:
        """``floor``: tokens that may always be taken once, however slow the machine is; ``decodes``: tokens
        of the step that are no prefill; ``tile``: see ``StepCost``; ``rows``: that may take tokens."""
        self.tokens = tokens
        self.seconds = seconds
        self._used = self._decodes = decodes
        self._tile = tile
        self._floor = floor
        self._rows = rows
        self._kept = 0
        self.halved = False  # a row has left half of what there was to others
        self.wide = False  # a row with many logprobs of its prompt has its part
        _, self._b, self._c = coefficients

    def grant(self, start: int, want: int, share: float = 1.0) -> int:
        """Tokens, at most ``want``, that a row at ``start`` may compute in ``share`` of what is left."""
        most = min(want, math.ceil(self.tokens * share))
        if self.seconds == math.inf or most <= 0:
            return most
        return max(min(most, self._affordable(start, self.seconds * share)), min(most, self._floor))

    def whole_tiles(self, start: int, count: int, others: bool) -> int:
        """Of ``count`` tokens of a row at ``start`` those with which the step ends in a whole tile. All of
        them if there is room for ``others`` to fill the last tile, or if the step would have less than a tile
        of prefill."""
        rest = (self._used + count) % self._tile
        if others and self.grant(start, self.tokens) - count >= self._tile - rest:
            return count
        enough = self._used - self._decodes + count - rest >= self._tile
        return count - rest if enough and rest <= count else count

    def _affordable(self, start: int, seconds: float) -> int:
        """Largest q with ``b q + c (q start + q (q + 1) / 2) <= seconds``."""
        seconds = max(seconds, 0.0)  # less where more than all is kept for others
        linear, square = self._b + self._c * (start + 0.5), self._c / 2
        if linear <= 0:
            return self.tokens
        # The root in the form that does not cancel when the square term is small.
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))
        return int(min(root, self.tokens))

    def spend(self, start: int, count: int) -> None:
        """A row took ``count`` tokens from ``start``."""
        self.tokens -= count
        self._used += count
        self.seconds -= self._b * count + self._c * pairs(start, count)
        self._floor = max(self._floor - count, 0)
        self._rows -= 1
        if not self._rows or (self.seconds <= 0 and not self._floor):
            self.tokens = 0

    def keep(self, tokens: int) -> None:
        """So many are for others than those that take theirs next, and are in the step's last tile."""
        self._kept = min(tokens, self.tokens)
        self.tokens -= self._kept
        self._used += self._kept
        self.seconds -= self._b * self._kept

    def give_back(self, floor: int) -> None:
        """The others may have theirs now, ``floor`` tokens of them however long that takes."""
        self.tokens += self._kept
        self._used -= self._kept
        self.seconds += self._b * self._kept
        self._floor = max(self._floor, min(self._kept, floor))
        self._kept = 0

    def close(self) -> None:
        """Nothing more this step."""
        self.tokens = 0
