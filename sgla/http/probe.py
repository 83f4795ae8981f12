"""Whether anything comes out of the engine, found out once for all who ask.

``/health_generate`` is open without a key, so that load balancers can use it. So whoever calls it as often as
he likes costs one token a second at most, and no user a place.
"""

from __future__ import annotations

import asyncio
import itertools

from sgla import clock
from sgla.errors import NotReady, SglaError
from sgla.http.answer.collect import Collector
from sgla.http.ports import Ingress
from sgla.messages import Job, SamplingParams, Window

PATIENCE = 20.0  # seconds until the engine counts as broken
KEPT = 1.0  # seconds for which an answer holds
LOOK = 0.05  # seconds between looks at steps that run for others


class Probe:
    """One look at the engine at a time.
    A busy engine is healthy as soon as one of its steps ends; an idle one makes a token."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._task: asyncio.Task[SglaError | None] | None = None
        self._holds = 0.0  # until then
        self._counter = itertools.count()

    async def check(self) -> None:
        """Raise the SglaError that says why nothing comes. A model that waits for somebody stays as it is."""
        if self._ingress.dozing or self._ingress.phase == "unloaded":
            return
        self._ingress.require_ready()
        if self._task is None or (self._task.done() and clock.now() > self._holds):
            self._task = asyncio.ensure_future(self._look())
        error = await asyncio.shield(self._task)
        if error is not None:
            raise error

    async def _look(self) -> SglaError | None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._sign()
        except TimeoutError:
            return NotReady(f"nothing came out of the engine within {PATIENCE:.0f} s")
        except SglaError as error:
            return error
        finally:
            self._holds = clock.now() + KEPT
        return None

    async def _sign(self) -> None:
        """Return when a step has ended."""
        busy, before = self._steps()
        while busy:
            await asyncio.sleep(LOOK)
            busy, ended = self._steps()
            if ended > before:
                return
        sink = Collector(1)
        facts = self._ingress.facts
        pools = facts is not None and facts.pooling is not None
        job = Job(
            rid=f"health-{next(self._counter)}",
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            token_ids=[0],
            pool=[] if pools else None,
            window=Window(0, 0),  # for a model that hears
        )
        self._ingress.open_all([(job, sink)], extra=True)
        try:
            rejected = await sink.done
        finally:
            self._ingress.cancel(job.rid, "client")
        if rejected is not None:
            raise SglaError.from_rejected(rejected)

    def _steps(self) -> tuple[bool, int]:
        """Whether there is something to do, and how many steps have ended.
        Raises what the ingress refuses requests with."""
        self._ingress.require_ready()
        stats = self._ingress.stats()
        busy = stats.running + stats.waiting + stats.draining + stats.in_flight > 0
        return busy, stats.steps - stats.in_flight
