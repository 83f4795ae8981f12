"""Looks at workers: whether they are ready, which models they have, and whether they make steps.

A port that answers shows that a process lives, not that anything comes out of it: of servers whose metrics
show steps, these are watched. SGLang's do so now and then alone, so it is taken at the word of its
``/health``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re

import aiohttp

from sgla import clock
from sgla.route.balancer import Balancer
from sgla.route.workers import Cards, Look

log = logging.getLogger(__name__)

MOST = 8 << 20  # bytes of an answer that are read
RESTS = "sleeping", "updating"  # phases of a server of ours that somebody has told it
UP = "up", ""
TOLD = {  # of a worker's state, and of what troubles it
    "up": (logging.INFO, "worker %s is up"),
    "rests": (logging.INFO, "worker %s rests: %s"),
    "late": (logging.WARNING, "worker %s is late: %s"),
    "down": (logging.WARNING, "worker %s is down: %s"),
}
MODELS_SECONDS = 10.0  # between two times that a worker is asked for its models


def samples(*names: str) -> re.Pattern[str]:
    """What finds the values of these metrics."""
    return re.compile(rf"^(?:{'|'.join(names)})(?:\{{[^}}]*\}})? (\S+)$", re.M)


# Of each engine what changes with its steps, and the requests that need some; the first that is there counts.
PROGRESS = (
    (samples("sgla:steps_total"), samples("sgla:num_running_reqs")),
    (samples("llamacpp:n_decode_total"), samples("llamacpp:requests_processing")),
    (
        samples(
            "vllm:iteration_tokens_total_count",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:kv_cache_usage_perc",
        ),
        samples("vllm:num_requests_running"),
    ),
)
TOKENS = samples("sgla:max_total_num_tokens"), samples("sglang:max_total_num_tokens")
BLOCKS = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.M)


class Watch:
    """A task for each worker, as long as the balancer has it."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._config = balancer.config
        headers = {}
        if self._config.worker_api_key:
            headers["Authorization"] = f"Bearer {self._config.worker_api_key}"
        timeout = aiohttp.ClientTimeout(total=self._config.health_check_timeout_secs)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hurry: dict[str, asyncio.Event] = {}
        balancer.on_change.append(self._follow)
        balancer.look_now = self._look_now
        self._follow()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._session.close()

    def _follow(self) -> None:
        for url in self._tasks.keys() - self._balancer.workers.keys():
            self._tasks.pop(url).cancel()
            del self._hurry[url]
        for url in self._balancer.workers.keys() - self._tasks.keys():
            self._hurry[url] = asyncio.Event()
            self._tasks[url] = asyncio.ensure_future(self._keep_looking(url, self._hurry[url]))

    def _look_now(self, url: str) -> None:
        if url in self._hurry:
            self._hurry[url].set()

    async def _keep_looking(self, url: str, hurry: asyncio.Event) -> None:
        before: tuple[str, str] | None = None
        cards, listed = None, -MODELS_SECONDS
        while True:
            fresh = before != UP or clock.now() >= listed + MODELS_SECONDS
            hurry.clear()
            named = self._named(url)
            look = await self.look(url, None if fresh else cards)
            if fresh:
                cards, listed = look.cards, clock.now()
            if named and not self._named(url):  # it got an adapter meanwhile
                look = look._replace(cards=None)
            self._balancer.saw(url, look)
            worker = self._balancer.workers.get(url)
            if worker is not None and (worker.state, worker.trouble) != before:
                before = worker.state, worker.trouble
                level, text = TOLD[worker.state]
                log.log(level, text, url, *filter(None, [worker.trouble]))
            try:
                await asyncio.wait_for(hurry.wait(), self._config.health_check_interval_secs)
                listed = -MODELS_SECONDS
            except TimeoutError:
                pass

    def _named(self, url: str) -> bool:
        worker = self._balancer.workers.get(url)
        return worker is not None and worker.names is not None

    async def look(self, url: str, cards: Cards | None = None) -> Look:
        """One look; what fails is ``trouble``. ``cards``: its models, if they need not be asked."""
        try:
            status, text = await self._get(f"{url}/health")
            if status != 200:
                return Look(trouble=f"/health says {status} {text[:200].strip()}", rests=rests(text))
            if cards is None:
                status, text = await self._get(f"{url}/v1/models")
                cards = cards_of(text) if status == 200 else None
            status, text = await self._get(f"{url}/metrics")
        except TimeoutError:
            seconds = self._config.health_check_timeout_secs
            return Look(trouble=f"it has not answered for {seconds:g} s", silent=True)
        except Exception as error:  # whatever a server may answer with
            return Look(trouble=f"{type(error).__name__}: {error}"[:300])
        page = text if status == 200 else ""
        kept = page if self._balancer.replicas else ""
        return read_metrics(page)._replace(cards=cards, page=kept)

    async def _get(self, url: str) -> tuple[int, str]:
        async with self._session.get(url, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MOST:
                    raise aiohttp.ClientPayloadError(f"{url} answers with more than {MOST} bytes")
            return response.status, body.decode(errors="replace")


def rests(text: str) -> bool:
    """Whether it is by somebody's word that a server of ours is not ready."""
    try:
        return json.loads(text)["phase"] in RESTS
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def cards_of(text: str) -> Cards | None:
    """Models in OpenAI's list; None if it is none."""
    try:
        data = json.loads(text)["data"]
        return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def read_metrics(text: str) -> Look:
    """Steps and the size of the KV cache, where Prometheus' text has them."""
    tokens = next((size for each in TOKENS if (size := number(each, text)) is not None), None)
    steps = running = None
    for made, needing in PROGRESS:
        if (steps := number(made, text)) is not None:
            running = number(needing, text)
            break
    if tokens is None and (found := BLOCKS.search(text)):
        labels = dict(re.findall(r'(\w+)="(\d{1,9})"', found[1]))
        tokens = float(labels.get("block_size", 0)) * float(labels.get("num_gpu_blocks", 0))
    return Look(steps=steps, busy=bool(running), tokens=int(tokens or 0))


def number(pattern: re.Pattern[str], text: str) -> float | None:
    """The sum of what the pattern's group is; None if it is not there, or not finite."""
    found = pattern.findall(text)
    try:
        value = sum(map(float, found)) if found else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e18 else None
