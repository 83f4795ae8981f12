"""Streams of a GPU that is none, on which copies of tiers run late: when somebody looks whether they have
ended, one at a time, or when a step waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from sgla.worker import crossing, gpu_tiers


class Stream:
    """What is queued runs in order. ``speed``: how often some of it has, when somebody looks."""

    cuda_stream = 0
    speed = 1.0

    def __init__(self) -> None:
        self.work: deque[Callable[[], Any]] = deque()
        self.queued = self.done = 0
        self.draw = Random(0)

    def add(self, work: Callable[[], Any]) -> None:
        self.work.append(work)
        self.queued += 1

    def until(self, count: int) -> None:
        while self.done < count:
            self.work.popleft()()
            self.done += 1

    def wait_event(self, event: Event) -> None:
        """Steps run at once; that of a copy's is the order in which they are queued."""
        if self is STEPS:
            event.synchronize()


STEPS = Stream()
CURRENT = [STEPS]


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream, self.at = STEPS, 0

    def record(self, *_: Any) -> None:
        self.stream, self.at = CURRENT[-1], CURRENT[-1].queued

    def query(self) -> bool:
        done = self.stream.done >= self.at
        if not done and self.stream.draw.random() < self.stream.speed:
            self.stream.until(self.stream.done + 1)
        return done

    def synchronize(self) -> None:
        self.stream.until(self.at)

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    CURRENT.append(stream)
    yield
    CURRENT.pop()


class Waits:
    """``count``: layers that steps have found not to be there yet."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def late() -> Iterator[Waits]:
    """Lanes that are made meanwhile copy late."""
    made, wait, waits = crossing.Lane.__init__, gpu_tiers.HostTier.wait, Waits()

    def make(self: crossing.Lane, staging: torch.Tensor, route: crossing.Route, toll: crossing.Toll) -> None:
        def both(*piece: Any) -> None:
            route.begin(*piece)
            route.end(*piece)

        made(
            self,
            staging,
            route._replace(
                begin=lambda *_: None,
                end=lambda *piece: CURRENT[-1].add(partial(both, *piece)),
                rows=route.rows and (lambda chunk: CURRENT[-1].add(partial(route.rows, chunk))),
            ),
            toll,
        )

    def counted(self: gpu_tiers.HostTier, crossings: Any, kept: Any = ()) -> None:
        waits.count += bool(kept) and any(c.done < c.total for c in crossings)
        wait(self, crossings, kept)

    cuda = {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda *_: CURRENT[-1]}
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(crossing.Lane, "__init__", make),
        patch.object(gpu_tiers.HostTier, "wait", counted),
    ):
        yield waits
