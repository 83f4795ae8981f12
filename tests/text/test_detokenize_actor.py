"""The detokenizer actor: tokens that wait for their turn go out together."""

from __future__ import annotations

import asyncio
from typing import Any

from sgla.actors.detokenize import AHEAD, SLICE, SPARE, TOGETHER, Detokenize
from sgla.errors import SglaError
from sgla.messages import (
    Delta,
    Deltas,
    Event,
    Opened,
    Rejected,
    RowSampling,
    SamplingParams,
    Submit,
    TokenLogprob,
)
from sgla.observe.metrics import Metrics
from sgla.text.output import Piece

MANY = 2 * SLICE  # children: a turn takes half of a step


class Digits:
    """Writes each token as its number."""

    def feed(
        self, tokens: list[int], logprobs: list[TokenLogprob] | None, finish: str | None, matched: int | None
    ) -> Piece:
        return Piece("".join(map(str, tokens)), tokens, logprobs, None, len(tokens))


class Site:
    """An actor with ``MANY`` children, and what it delivers of each."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {f"r{i}": [] for i in range(MANY)}
        self.rejected: list[Rejected] = []
        self.actor = Detokenize(
            lambda opened: Digits(),  # type: ignore[arg-type,return-value]
            lambda event: self.events[event.rid].append(event),
            self.rejected.append,
            lambda cancel: None,
            Metrics("test"),
            self.crash,
        )
        for rid in self.events:
            submit = Submit(
                rid=f"{rid}-0",
                parent=rid,
                index=0,
                tokens=[7],
                max_new=99,
                stop_ids=frozenset(),
                sampling=RowSampling(),
            )
            self.actor.open(Opened(submit, SamplingParams()))

    def crash(self, name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} crashed") from error

    def step(self, token: int, finish: str | None = None, **fields: Any) -> None:
        self.actor.post(
            Deltas([Delta(rid=f"{rid}-0", tokens=[token], finish=finish, **fields) for rid in self.events])
        )

    async def rest(self) -> None:
        for _ in range(80):
            await asyncio.sleep(0)
        assert not self.actor._backlog
        assert not self.actor._last

    def texts(self, rid: str) -> list[str]:
        return [event.text for event in self.events[rid]]


async def test_each_step_is_an_event_where_events_are_sent_in_time() -> None:
    site = Site()
    for token in (1, 2, 3):
        site.step(token)
        await site.rest()
    assert site.texts("r0") == site.texts(f"r{MANY - 1}") == ["1", "2", "3"]


async def test_tokens_that_wait_go_out_in_one_event() -> None:
    site = Site()
    site.step(1)
    await asyncio.sleep(0)
    site.step(2)
    site.step(3, finish="length")
    await site.rest()
    assert site.texts("r0") == ["1", "23"]  # its first token was sent at once
    assert site.texts(f"r{MANY - 1}") == ["123"]
    for events in site.events.values():
        assert [token for event in events for token in event.tokens] == [1, 2, 3]
        assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish == "length"
        assert events[-1].usage.completion_tokens == 3
        assert events[0].prompt_tokens == [7]


async def test_it_says_when_so_much_waits_and_when_no_longer() -> None:
    """Tokens with logprobs, which do not go out together."""
    site, told = Site(), []
    site.actor.caught_up = lambda: told.append(len(site.actor._backlog))
    steps = AHEAD + SPARE // MANY + 2
    for _ in range(steps):
        site.step(1, logprobs=[TokenLogprob(1, -1.0, 1, [])])
    assert not site.actor.behind
    await asyncio.sleep(0)
    assert site.actor.behind
    while site.actor.behind:
        assert not told
        await asyncio.sleep(0)
    assert told == [len(site.actor._backlog)]
    for _ in range(steps):
        await site.rest()
    assert len(told) == 1
    assert all(len(events) == steps for events in site.events.values())


async def test_an_event_has_so_many_tokens_at_most() -> None:
    site = Site()
    for _ in range(TOGETHER + 3):
        site.step(1)
    await site.rest()
    assert [len(event.tokens) for event in site.events["r0"]] == [TOGETHER, 3]


async def test_logprobs_and_errors_keep_their_own_event() -> None:
    site = Site()
    site.step(1, logprobs=[TokenLogprob(1, -0.5, 1)])
    site.step(2, logprobs=[TokenLogprob(2, -0.25, 1)])
    await site.rest()
    assert [event.logprobs for event in site.events["r0"]] == [
        [TokenLogprob(1, -0.5, 1)],
        [TokenLogprob(2, -0.25, 1)],
    ]
    site.step(3)
    site.actor.post(
        Deltas([Delta(rid="r0-0", finish="error", error=SglaError("it has ended").rejected("r0-0"))])
    )
    await site.rest()
    assert site.texts("r0") == ["1", "2", "3"]
    assert [rejected.rid for rejected in site.rejected] == ["r0"]
