"""Token ids -> text -> the request's sink. Stop strings end a request from here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgla import clock
from sgla.actors.base import Actor
from sgla.messages import Cancel, Delta, Deltas, Event, Grammar, Opened, Rejected, Usage

if TYPE_CHECKING:
    from sgla.observe.metrics import Metrics
    from sgla.text.output import OutputStream


SLICE = 32  # deltas that a turn of the loop takes at least: about a millisecond
TOGETHER = 16  # tokens of an event that has waited, about
# Deltas that may wait before no more steps are planned: of each child, and besides.
AHEAD, SPARE = 4, 256
TURN = 0.005  # seconds after which it takes no more, as where stop expressions are slow


class _Child:
    """Text state of one child, from its ``Opened`` to its final Delta."""

    __slots__ = (
        "cached",
        "completion",
        "ended",
        "grammar",
        "guesses",
        "hidden",
        "index",
        "last",
        "output",
        "parent",
        "prompt",
        "texts",
    )

    def __init__(self, opened: Opened, output: OutputStream) -> None:
        self.parent = opened.submit.parent
        self.index = opened.submit.index
        self.prompt = opened.submit.tokens
        self.output = output
        self.completion = 0
        self.cached = 0
        self.guesses = 0, 0, 0  # see Delta
        self.last: float | None = None  # when its latest tokens came
        self.grammar = opened.sampling.grammar
        self.hidden: list[bytes] | None = None  # hidden states that no Event had yet
        self.texts: list[str] = []  # the output so far, if it has a grammar
        self.ended = False  # a stop string matched; what still comes from the scheduler is not shown


class Detokenize(Actor[Deltas]):
    """Turns a step's Deltas into Events and pushes each straight into its sink."""

    def __init__(
        self,
        make_output: Callable[[Opened], OutputStream],
        deliver: Callable[[Event], None],
        reject: Callable[[Rejected], None],
        cancel: Callable[[Cancel], None],
        metrics: Metrics,
        on_crash: Callable[[str, BaseException], None],
        check: Callable[[Grammar, str], None] | None = None,
    ) -> None:
        """``cancel``: ends a child at the scheduler.
        ``check`` is given each output that its grammar has brought to an end."""
        super().__init__(on_crash)
        self._check = check
        self.caught_up: Callable[[], None] = lambda: None  # called when ``behind`` has come to its end
        self._metrics = metrics
        self._make_output = make_output
        self._deliver = deliver
        self._reject = reject
        self._cancel = cancel
        self._children: dict[str, _Child] = {}
        self._backlog: deque[Delta] = deque()
        self._last: dict[str, Delta] = {}  # of each child, the last one in the backlog

    @property
    def behind(self) -> bool:
        """Whether tokens come so much faster than they can be sent that the next ones had better wait."""
        return len(self._backlog) > AHEAD * len(self._children) + SPARE

    def open(self, opened: Opened) -> None:
        """Begin a child's text. Called, not posted: it must exist before the scheduler's first Delta."""
        self._metrics.opened(opened)
        self._children[opened.submit.rid] = _Child(opened, self._make_output(opened))

    def handle(self, messages: deque[Deltas]) -> None:
        """A part of what there is to do, so that hundreds of streams do not hold up the loop; an eighth at
        least, so that steps which come too fast do. Tokens of a child join those that are still in the
        backlog: where steps come faster than events can be sent, an event has several tokens."""
        backlog, last = self._backlog, self._last
        for deltas in messages:
            for delta in deltas.items:
                before = last.get(delta.rid)
                if before is not None and len(before.tokens) < TOGETHER and delta.bare:
                    before.merge(delta)
                    continue
                last[delta.rid] = delta
                backlog.append(delta)
        now, behind = clock.now(), self.behind
        for _ in range(min(len(backlog), max(SLICE, len(backlog) // 8))):
            delta = backlog.popleft()
            if last.get(delta.rid) is delta:
                del last[delta.rid]
            self._one(delta, now)
            if clock.now() - now > TURN:
                break
        if backlog:
            self.wake()
        if behind and not self.behind:
            self.caught_up()

    def _one(self, delta: Delta, now: float) -> None:
        child = self._children.get(delta.rid)
        if child is None:
            return
        if delta.finish is not None:
            del self._children[delta.rid]
        if child.ended:
            return
        if delta.error is not None:
            delta.error.rid = child.parent
            self._reject(delta.error)
            return
        if delta.vector is not None:
            self._answer(child, delta)
            return
        if delta.tokens and child.last is not None:
            self._metrics.inter_token(now - child.last, len(delta.tokens))
        self._emit(child, delta, first=child.last is None)
        child.last = now

    def _answer(self, child: _Child, delta: Delta) -> None:
        """The vector of a request that asked for one."""
        self._deliver(
            Event(
                rid=child.parent,
                index=child.index,
                prompt_tokens=child.prompt,
                finish=delta.finish,
                usage=Usage(len(child.prompt), 0, delta.cached_tokens),
                vector=delta.vector,
            )
        )

    def _emit(self, child: _Child, delta: Delta, first: bool) -> None:
        piece = child.output.feed(delta.tokens, delta.logprobs, delta.finish, delta.matched)
        child.completion += piece.consumed
        child.cached = max(child.cached, delta.cached_tokens)
        child.guesses = max(child.guesses, delta.guesses)
        if delta.hidden is not None:
            child.hidden = (child.hidden or []) + delta.hidden
        finish = delta.finish
        if child.grammar is not None and self._check is not None:
            child.texts.append(piece.text)
            if finish == "stop" and piece.matched_stop is None:
                self._check(child.grammar, "".join(child.texts))
        matched: str | int | None = delta.matched
        if piece.matched_stop is not None:
            finish, matched = "stop", piece.matched_stop
            child.ended = True
            if delta.finish is None:
                self._cancel(Cancel(delta.rid, "stop"))
        if not (piece.text or piece.tokens or finish or first):
            return
        hidden, child.hidden = child.hidden, None
        self._deliver(
            Event(
                rid=child.parent,
                index=child.index,
                text=piece.text,
                tokens=piece.tokens,
                logprobs=piece.logprobs,
                prompt_tokens=child.prompt if first else None,
                prompt_logprobs=delta.prompt_logprobs,
                finish=finish,
                matched=matched,
                usage=Usage(len(child.prompt), child.completion, child.cached, *child.guesses),
                hidden=hidden,
            )
        )
