"""Requests that yield, as lines of a batch do: beside the whole engine, with the fake executor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from local_server import local_server

from sgla.errors import InvalidField, Overloaded
from sgla.http.answer.collect import Collector
from sgla.messages import Event, Job, Rejected, SamplingParams


class Ends(Collector):
    """Tells the order in which requests end."""

    def __init__(self, rid: str, order: list[str]) -> None:
        super().__init__(1)
        self._rid = rid
        self._order = order

    def push(self, message: Event | Rejected) -> None:
        super().push(message)
        if self.done.done():
            self._order.append(self._rid)


def asked(rid: str, yields: bool, **sampling: Any) -> Job:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | sampling))
    return Job(rid=rid, sampling=params, token_ids=[5, 6, 7], yields=yields)


async def test_those_that_yield_have_places_of_their_own_and_go_last(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model), max_running_requests=2, max_queued_requests=1) as local:
        ingress = local.system.ingress
        order: list[str] = []
        sinks = {}

        def ask(rid: str, yields: bool, **sampling: Any) -> None:
            sinks[rid] = Ends(rid, order)
            ingress.open(asked(rid, yields, **sampling), sinks[rid])

        ingress.pause(True)
        for i in range(2):
            ask(f"batch{i}", True)
        with pytest.raises(Overloaded, match="batches"):
            ask("batch2", True)
        for i in range(3):
            ask(f"user{i}", False)
        with pytest.raises(Overloaded, match="--max-queued-requests"):
            ask("user3", False)
        ingress.pause(False)
        await asyncio.gather(*(sinks[rid].done for rid in ("batch0", "batch1", "user0", "user1", "user2")))
        assert sorted(order[:3]) == ["user0", "user1", "user2"]
        assert sorted(order[3:]) == ["batch0", "batch1"]
        with pytest.raises(InvalidField, match="may have 2 choices"):
            ingress.open(asked("never", True, n=3), Collector(3))
        ask("last", True)
        ingress.open(asked("many", True, n=2), sink := Collector(2))  # while there is a place
        await asyncio.gather(sinks["last"].done, sink.done)
        assert ingress.open_requests == ingress._yielding == 0


async def test_a_server_that_ends_does_not_wait_for_those_that_yield(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        ingress = local.system.ingress
        sinks = [Collector(1) for _ in range(2)]
        ingress.pause(True)
        for sink, yields in zip(sinks, (True, False)):
            ingress.open(asked(f"r{yields}", yields), sink)
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(local.system.drain(20.0))
        rejected = await sinks[0].done
        assert rejected is not None
        assert rejected.code == "draining"
        assert not sinks[1].done.done()
        assert await sinks[1].done is None
        await draining
