"""What the result of a step means for its requests: their new tokens, and which of them end with these."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from sgla.errors import BadRequest, InvalidLogits
from sgla.messages import Delta, StepResult
from sgla.sched.logprobs import attach, collect_prompt
from sgla.sched.repeats import after
from sgla.sched.request import Request
from sgla.sched.step import Step


class Outcome(NamedTuple):
    """``ended``: requests whose ``finish`` was set. ``outputs``: output tokens; ``forced``: those that a
    grammar forced. ``faults``: requests that ended by a fault of the model. ``verified``: of each row that
    may guess and brought tokens, how many it guessed and how many it brought."""

    deltas: list[Delta]
    ended: list[Request]
    outputs: int
    forced: int
    faults: int
    verified: list[tuple[int, int]]


def commit(step: Step, result: StepResult, now: float) -> Outcome:
    """Append what was sampled to the requests of the step. Tokens of requests that have ended are dropped."""
    if result.logprobs:
        collect_prompt(step.rows, result.logprobs)
    if result.hidden:
        _collect_hidden(step, result.hidden)
    for request in step.counted:
        request.ahead -= 1
    deltas: list[Delta] = []
    ended: list[Request] = []
    broken, faults = _fail(step, result, ended) if result.failed else ([], 0)
    forced = 0
    verified: list[tuple[int, int]] = []
    if step.canvases:
        _commit_blocks(step, result, deltas, ended, now)
        outputs = sum(len(delta.tokens) for delta in deltas)
    elif result.counts or step.drafts:
        forced, verified = _commit_runs(step, result, deltas, ended, now)
        outputs = sum(len(delta.tokens) for delta in deltas)
    else:
        _commit_singles(step, result, deltas, ended, now)
        outputs = len(deltas)
    if result.logprobs:
        attach(step.rows, result.logprobs, deltas)
    deltas += broken
    vectors = iter(result.vectors)
    for request in step.ends:
        vector = next(vectors) if request.pools else None
        if request.finish is None:
            request.finish = "length" if vector is None else "stop"
            delta = Delta(rid=request.rid, finish=request.finish, vector=vector)
            _first(request, delta, now)
            deltas.append(delta)
            ended.append(request)
    if result.hidden:
        _attach_hidden(step, deltas)
    return Outcome(deltas, ended, outputs, forced, faults, verified)


def _commit_singles(
    step: Step, result: StepResult, deltas: list[Delta], ended: list[Request], now: float
) -> None:
    tokens = array("I", result.tokens)
    assert len(tokens) == len(step.samples), "one token for each SAMPLE row"
    for request, token in zip(step.samples, tokens):
        if request.finish is not None:
            continue
        delta = Delta(request.rid, [token])
        deltas.append(delta)
        if request.first_token is None:
            _first(request, delta, now)
        request.tokens.append(token)
        # Most tokens are not the last: asking that here takes a seventh off the time of this loop. The row of
        # the last possible one has been planned when ``planned`` is at the goal.
        if (
            token in request.stop_ids or request.planned >= request.goal or request.loop is not None
        ) and request.ends(token, delta):
            ended.append(request)


def _commit_blocks(
    step: Step, result: StepResult, deltas: list[Delta], ended: list[Request], now: float
) -> None:
    """The blocks that have come out of noise, up to where their requests end. They are to be read, then."""
    tokens, counts = array("I", result.tokens), array("i", result.counts)
    assert len(counts) == len(step.samples), "a count for each block"
    assert sum(counts) == len(tokens), "counts and tokens disagree"
    at = 0
    for request, count in zip(step.samples, counts):
        run, at = tokens[at : at + count], at + count
        request.loose -= 1
        if not run or request.finish is not None:
            continue
        delta = Delta(rid=request.rid)
        deltas.append(delta)
        if request.first_token is None:
            _first(request, delta, now)
        if _take(run, request, delta):
            ended.append(request)
        request.known = len(request.tokens)


def _take(run: array[int], request: Request, delta: Delta) -> bool:
    """Append tokens to the request up to its last one; whether that was among them."""
    for token in run:
        delta.tokens.append(token)
        request.tokens.append(token)
        if request.ends(token, delta):
            return True
    return False


def _commit_runs(
    step: Step, result: StepResult, deltas: list[Delta], ended: list[Request], now: float
) -> tuple[int, list[tuple[int, int]]]:
    """For each row the tokens that it brought; returns how many of them a grammar forced, and
    ``Outcome.verified``. Forced ones are planned like a prompt's next part. Of rows with drafts it is known
    now how far they have got."""
    tokens = array("I", result.tokens)
    counts = array("i", result.counts) if result.counts else array("i", [1]) * len(tokens)
    assert len(counts) == len(step.samples), "a count for each SAMPLE row"
    assert sum(counts) == len(tokens), "counts and tokens disagree"
    guessed = array("i", result.guessed) if result.guessed else array("i", bytes(4 * len(counts)))
    verified: list[tuple[int, int]] = []
    for request, data in zip(step.samples, result.proposed):
        request.proposed = array("i", data)
    at = forced = 0
    for i, (request, count) in enumerate(zip(step.samples, counts)):
        run, at = tokens[at : at + count], at + count
        drafts = step.drafts[i] if i < len(step.drafts) else -1
        if run and request.finish is None:
            delta = Delta(rid=request.rid)
            deltas.append(delta)
            if request.first_token is None:
                _first(request, delta, now)
            if _take(run, request, delta):
                ended.append(request)
            if drafts < 0:
                forced += len(delta.tokens) - 1
            else:
                verifies, drafted, right = request.guesses
                right += min(guessed[i], count - 1)
                request.guesses = delta.guesses = verifies + 1, drafted + guessed[i], right
                verified.append((guessed[i], count))
                if drafts:
                    request.credit = after(request.credit, count - 1)
        if drafts < 0:
            request.known = max(request.known, len(request.tokens))
        else:
            request.landed(1 + drafts)
    return forced, verified


def _collect_hidden(step: Step, hidden: list[bytes]) -> None:
    """Hidden states go to the requests of their rows, which keep them until their next Delta."""
    rows = [request.hidden for request in step.rows if request.hidden is not None]
    assert len(rows) == len(hidden), "hidden states for each row that wants some"
    for kept, data in zip(rows, hidden):
        kept.add(data)


def _attach_hidden(step: Step, deltas: list[Delta]) -> None:
    by_rid = {delta.rid: delta for delta in deltas}
    for request in step.rows:
        if request.hidden is not None and (delta := by_rid.get(request.rid)) is not None:
            delta.hidden = request.hidden.take()


def _fail(step: Step, result: StepResult, ended: list[Request]) -> tuple[list[Delta], int]:
    """End the requests that the worker could not go on with.
    Returns also how many the model is to blame for."""
    deltas: list[Delta] = []
    faults = 0
    for failed in result.failed:
        request = step.rows[failed.row]
        if request.finish is None:
            request.finish = "error"
            error = InvalidLogits(failed.why) if failed.fault else BadRequest(failed.why)
            faults += failed.fault
            request.spoiled = failed.fault
            deltas.append(Delta(rid=request.rid, finish="error", error=error.rejected(request.submit.parent)))
            ended.append(request)
    return deltas, faults


def _first(request: Request, delta: Delta, now: float) -> None:
    request.first_token = now
    delta.cached_tokens = request.cached
    delta.prompt_logprobs = request.prompt_logprobs
    request.prompt_logprobs = None
