"""A worker as the router knows it: whether it takes requests, what it has of them, what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgla.route.config import RouteConfig
from sgla.route.policies import View
from sgla.route.prefix import PrefixTree

Cards = Sequence[dict[str, Any]]
TOKEN = 4  # bytes of a prompt that are a token, about


class Breaker:
    """A circuit breaker: after ``threshold`` failures in a row nothing is sent for ``timeout`` seconds, then
    one request. That it is answered closes the breaker; one more failure in that row opens it again."""

    def __init__(self, threshold: int, timeout: float) -> None:
        self._threshold, self._timeout = threshold, timeout
        self._failures = 0
        self._opened: float | None = None
        self._trying = False

    @property
    def open(self) -> bool:
        return self._opened is not None

    def allows(self, now: float) -> bool:
        return self._opened is None or (not self._trying and now >= self._opened + self._timeout)

    def began(self) -> None:
        """A request was sent that ``allows`` let through."""
        self._trying = self.open

    def answered(self) -> None:
        """An answer has begun, which may take long: others need not wait for its end."""
        self._opened, self._trying = None, False

    def success(self) -> None:
        self._failures, self._opened, self._trying = 0, None, False

    def failure(self, now: float) -> None:
        self._failures += 1
        if self.open or self._failures >= self._threshold:
            self._opened, self._trying = now, False

    def neither(self) -> None:
        """A request ended before it showed anything."""
        self._trying = False


class Look(NamedTuple):
    """What a look at a worker found. ``trouble``: why it takes no requests, or ""; ``rests``: because
    somebody has told it so: it sleeps, or its weights become others. ``cards``: its models as it lists them;
    None: it does not tell. ``steps``: how many it has made, ``busy``: whether it has requests to make steps
    for; None and False where it does not tell. ``tokens`` of its KV cache; 0: it does not tell. ``page``: its
    metrics, where somebody shows them. ``silent``: there was no answer in time.
    """

    trouble: str = ""
    cards: Cards | None = None
    steps: float | None = None
    busy: bool = False
    tokens: int = 0
    page: str = ""
    rests: bool = False
    silent: bool = False


class Worker:
    """``cards``: None if it takes any model's name. ``running``, ``unread`` and ``last``: as ``View`` has
    them."""

    def __init__(self, url: str, config: RouteConfig, name: str = "") -> None:
        self.url = url
        self.name = name or url
        self.page = ""  # of its metrics
        self.trouble = "it has not been looked at yet"
        self.rests = False
        self.late = False  # with one answer to a look: it goes on with what it has
        self.draining = False
        self.cards: Cards | None = None
        self.names: frozenset[str] | None = None
        self.running = 0
        self.unread = 0
        self.last = 0
        self.tree = PrefixTree(config.max_tree_size)
        self.breaker = Breaker(config.cb_failure_threshold, config.cb_timeout_duration_secs)
        self.outcomes: Counter[str] = Counter()
        self.prompt_bytes = self.matched_bytes = 0
        self._stuck_secs = config.stuck_secs
        self._steps: float | None = None
        self._stepped = 0.0  # when that number was new, or there was nothing to do

    @property
    def state(self) -> str:
        return "rests" if self.rests else "late" if self.late else "down" if self.trouble else "up"

    def usable(self, now: float) -> bool:
        return not self.trouble and self.reachable(now)

    def reachable(self, now: float) -> bool:
        """Whether it answers, be it that it rests, or is late."""
        return (
            (not self.trouble or self.rests or self.late) and not self.draining and self.breaker.allows(now)
        )

    def takes(self, model: str) -> bool:
        """Ollama's clients add ``:latest``; an adapter may stand behind its base, ``base:adapter``."""
        if self.names is None or not model:
            return True
        if model in self.names or model.removesuffix(":latest") in self.names:
            return True
        bases = (f"{name}:" for name in self.names)
        return any(model.startswith(base) and model.removeprefix(base) in self.names for base in bases)

    def view(self, matched: int = 0) -> View:
        return View(self.url, self.running, self.unread, matched, self.tree.size, self.last)

    def saw(self, look: Look, now: float) -> bool:
        """Take in what a look found; whether the worker is down since. One that rests goes on with what it
        has, and so does one that is late for the first time: its process may have much to do."""
        trouble = look.trouble or self._stuck(look, now)
        rests = bool(trouble) and look.rests
        late = look.silent and not self.trouble
        down = bool(trouble) and not rests and not late and (self.rests or self.late or not self.trouble)
        if trouble and not late and (down or self.tree.size):
            self.tree.clear()  # it may come back as another process
        self.trouble, self.rests, self.late = trouble, rests, late
        if not trouble:
            self.page = look.page
            self.cards = look.cards
            names = None if look.cards is None else frozenset(str(card.get("id")) for card in look.cards)
            self.names = names or None
            if look.tokens:
                self.tree.capacity = look.tokens * TOKEN
        return down

    def _stuck(self, look: Look, now: float) -> str:
        """A worker that makes no steps for its requests is down, whatever its port says."""
        if look.steps != self._steps or not look.busy:
            self._steps, self._stepped = look.steps, now
        seconds = now - self._stepped
        if look.steps is None or seconds < self._stuck_secs:
            return ""
        return f"it has requests, and has made no step for {seconds:.0f} s"

    def describe(self, now: float) -> dict[str, Any]:
        """For ``/workers``."""
        return {
            "url": self.url,
            "state": "draining" if self.draining else self.state,
            "is_healthy": self.usable(now),
            "trouble": self.trouble or ("the circuit breaker is open" if self.breaker.open else None),
            "models": None if self.names is None else sorted(self.names),
            "load": self.running,
            "unread_bytes": self.unread,
            "tree_bytes": self.tree.size,
        }
