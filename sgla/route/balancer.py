"""The one owner of what the router knows: it places requests on workers, and hears how they ended."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from sgla import clock
from sgla.errors import ModelNotFound, NotFound, NotReady, Overloaded, SglaError
from sgla.observe.histogram import LATENCY, Histogram
from sgla.route import policies
from sgla.route.asked import Asked
from sgla.route.config import RouteConfig, check_url
from sgla.route.limits import Bucket, Turns
from sgla.route.places import PART
from sgla.route.workers import TOKEN, Look, Worker

REMEMBERED = 65536  # sessions, and ids of what workers keep, those used last
RETRY_AFTER = 1.0  # seconds, for clients of a router without workers


class Ticket:
    """A request of a client that is placed, or waits for its turn. ``done`` is called once: with None when
    ``worker`` is there, or with the error that refuses it. ``unread``: bytes of its prompt that count as the
    worker's."""

    def __init__(self, asked: Asked, key: str, done: Callable[[SglaError | None], None]) -> None:
        self.asked, self.key, self.done = asked, key, done
        self.worker: Worker | None = None
        self.unread = 0
        self.since = clock.now()
        self.timer: asyncio.TimerHandle | None = None  # while it waits


class Recent(OrderedDict[str, str]):
    """Which worker a name belongs to."""

    def set(self, name: str, url: str) -> None:
        self[name] = url
        self.move_to_end(name)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


class Balancer:
    """``on_down`` is told of workers that went down, and whether they are lost; ``on_change`` that there are
    others."""

    def __init__(self, config: RouteConfig, seed: int | None = None) -> None:
        self.config = config
        self.workers: dict[str, Worker] = {}
        self.on_down: list[Callable[[str, bool], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.look_now: Callable[[str], None] = lambda url: None
        self.statuses: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.retries = 0
        self.first_byte = Histogram(LATENCY)
        self._rng = random.Random(seed)
        self._sent = 0
        self._sessions, self._stored = Recent(), Recent()
        self._requests = Bucket(config.rpm_limit) if config.rpm_limit else None
        self._tokens = Bucket(config.tpm_limit) if config.tpm_limit else None
        self._waiting: dict[str, Turns[Ticket]] = {}  # by model
        self._held: Counter[str] = Counter()  # requests that workers have, by key
        self.draining = False
        self.replicas = 0  # that its workers are when all are up; their metrics are a part of its own page

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    # workers

    def add(self, url: str, name: str = "") -> None:
        """From now on it is looked at. One that drains comes back. ``name``: in metrics, if not the URL."""
        url = check_url(url, ("http", "https"))
        if url in self.workers:
            self.workers[url].draining = False
        else:
            self.workers[url] = Worker(url, self.config, name)
            self._changed()

    def remove(self, url: str) -> None:
        """It gets no more requests, and is forgotten when those that it has are done. Raises NotFound."""
        worker = self.workers.get(url.rstrip("/"))
        if worker is None:
            raise NotFound(f"there is no worker {url[:200]}; /workers lists them")
        worker.draining = True
        self._forget_drained(worker)

    def saw(self, url: str, look: Look) -> None:
        """A look at a worker found this."""
        worker = self.workers.get(url)
        if worker is None:
            return
        if worker.saw(look, clock.now()):
            for tell in self.on_down:
                tell(url, False)
        self._serve_waiting()

    def leave_out(self) -> None:
        """One of the replicas does not come back."""
        self.replicas -= 1

    def lose(self, url: str, why: str) -> None:
        """A worker is gone for good: its answers end, and it is forgotten."""
        worker = self.workers.get(url)
        if worker is not None:
            worker.saw(Look(why), clock.now())
            worker.draining = True
            for tell in self.on_down:
                tell(url, True)
            self._forget_drained(worker)

    def _forget_drained(self, worker: Worker) -> None:
        if worker.draining and not worker.running and self.workers.get(worker.url) is worker:
            del self.workers[worker.url]
            self._changed()

    def _changed(self) -> None:
        for tell in self.on_change:
            tell()

    # requests

    def place(
        self, asked: Asked, key: str, tried: Sequence[str], done: Callable[[SglaError | None], None]
    ) -> Ticket:
        """Place a request on a worker that is not among ``tried``; a ``Ticket``, whose ``done`` may have been
        called. Whoever has it calls ``close``. Raises ModelNotFound, NotReady, Overloaded."""
        try:
            if not tried:
                self._check_rates(asked, key)
            usable = self._usable(asked, tried)
            ticket = Ticket(asked, key, done)
            room = usable if tried else self._with_room(usable, key)
            if room:
                self._send(ticket, room)
            else:
                self._wait(ticket)
        except SglaError as error:
            self.refused[error.code] += 1
            raise
        if tried:
            self.retries += 1
        elif self._requests or self._tokens:
            self._take_rates(asked, key)
        return ticket

    def began(self, ticket: Ticket) -> None:
        """The first byte of the answer came: the prompt has been read."""
        if ticket.worker is not None:
            self.first_byte.observe(clock.now() - ticket.since)
            ticket.worker.breaker.answered()
            ticket.worker.unread -= ticket.unread
            ticket.unread = 0

    def close(self, ticket: Ticket, status: int, fault: bool) -> None:
        """It ended: with this status of the worker, 0 if there was none; ``fault``: by a fault of the worker
        or of the way to it."""
        worker = ticket.worker
        if worker is None:
            self._leave(ticket)
            return
        ticket.worker = None
        self._held[ticket.key] -= 1
        if not self._held[ticket.key]:
            del self._held[ticket.key]
        worker.running -= 1
        worker.unread -= ticket.unread
        worker.outcomes["fault" if fault else str(status) if status else "gone"] += 1
        self.statuses[status] += 1
        if ticket.asked.everywhere:
            self.look_now(worker.url)  # it may rest, or be awake
            if ticket.asked.lasting:
                worker.names = None  # it may have an adapter more, which the look will tell
        if fault:
            worker.breaker.failure(clock.now())
            self.look_now(worker.url)
        elif status:
            worker.breaker.success()
        else:
            worker.breaker.neither()
        if ticket.asked.stored and 0 < status < 400:
            self._stored.set(ticket.asked.stored, worker.url)
        self._forget_drained(worker)
        self._serve_waiting()

    def _usable(self, asked: Asked, tried: Sequence[str]) -> list[Worker]:
        if self.draining:
            raise NotReady("the router is shutting down", retry_after=RETRY_AFTER)
        able = [worker for worker in self.workers.values() if worker.takes(asked.model)]
        if not able and self.workers:
            names = sorted({name for worker in self.workers.values() for name in worker.names or ()})
            raise ModelNotFound(
                f"model {asked.model[:200]!r} does not exist; the workers have {', '.join(names[:20])}",
                param="model",
            )
        now = clock.now()
        left = [worker for worker in able if worker.url not in tried]
        usable = [worker for worker in left if worker.usable(now)]
        if asked.everywhere or not usable:  # those that rest say themselves why they take no requests
            usable = [worker for worker in left if worker.reachable(now)]
        if not usable:
            what = "no other worker is left to try" if tried else "no worker is up"
            raise NotReady(f"{what}; retry later", retry_after=RETRY_AFTER)
        if asked.lasting and not tried and len(usable) < self.replicas:
            raise NotReady(
                f"{len(usable)} of {self.replicas} replicas are up, and what is to last is for all of them; "
                "retry later",
                retry_after=RETRY_AFTER,
            )
        return usable

    def _with_room(self, workers: list[Worker], key: str) -> list[Worker]:
        """Those that take one more request of ``key``. The last eighth of all places is for keys that have no
        more than so many: one that has many long answers leaves others room."""
        most = self.config.worker_max_requests
        if most is None:
            return workers
        places = most * len(workers)
        spare = max(1, places // PART) if places > 1 else 0
        left = places - sum(min(most, worker.running) for worker in workers)
        if left <= spare and self._held[key] >= max(1, spare):
            return []
        return [worker for worker in workers if worker.running < most]

    def _send(self, ticket: Ticket, workers: list[Worker]) -> None:
        asked = ticket.asked
        worker = self._choose(asked, workers)
        matched = worker.tree.match(asked.path)
        worker.tree.insert(asked.path)
        worker.prompt_bytes += asked.size
        worker.matched_bytes += matched
        ticket.worker, ticket.unread = worker, max(0, asked.size - matched)
        self._sent += 1
        worker.last = self._sent
        worker.running += 1
        self._held[ticket.key] += 1
        worker.unread += ticket.unread
        worker.breaker.began()
        ticket.done(None)

    def _choose(self, asked: Asked, workers: list[Worker]) -> Worker:
        keeper = self._stored.get(asked.stored) if asked.stored else None
        for worker in workers:
            if worker.url == keeper:
                return worker
        return workers[0] if len(workers) == 1 else workers[self._by_policy(asked, workers)]

    def _by_policy(self, asked: Asked, workers: list[Worker]) -> int:
        policy = self.config.policy
        if policy == "cache_aware":
            matches = [worker.view(worker.tree.match(asked.path)) for worker in workers]
            return policies.cache_aware(matches, asked.size, self.config.load_weight)
        views = [worker.view() for worker in workers]
        if policy == "round_robin":
            return policies.round_robin(views)
        if policy == "power_of_two":
            return policies.power_of_two(views, self._rng.getrandbits(30), self._rng.getrandbits(30))
        if policy == "consistent_hashing" and asked.session:
            return policies.consistent_hashing(views, asked.session)
        if policy == "session" and asked.session:
            urls = [worker.url for worker in workers]
            known = self._sessions.get(asked.session)
            chosen = urls.index(known) if known in urls else policies.least_load(views)
            self._sessions.set(asked.session, urls[chosen])
            return chosen
        return policies.least_load(views)

    def _next(self, queue: Turns[Ticket], usable: list[Worker]) -> tuple[str, list[Worker]]:
        """The first key whose turn it is and that has room, and the workers with that; none if there is
        none."""
        for key in queue.keys():  # noqa: SIM118 - it is no dict
            if room := self._with_room(usable, key):
                return key, room
        return "", []

    # limits

    def _check_rates(self, asked: Asked, key: str) -> None:
        now = clock.now()
        for bucket, amount, what, flag in (
            (self._requests, 1, "requests", "rpm-limit"),
            (self._tokens, asked.size // TOKEN, "tokens of prompts", "tpm-limit"),
        ):
            if bucket is not None and (seconds := bucket.wait(key, amount, now)) > 0:
                raise Overloaded(
                    f"you may send {bucket.size:.0f} {what} a minute; retry later, or raise --{flag}",
                    retry_after=seconds,
                )

    def _take_rates(self, asked: Asked, key: str) -> None:
        now = clock.now()
        if self._requests is not None:
            self._requests.take(key, 1, now)
        if self._tokens is not None:
            self._tokens.take(key, asked.size // TOKEN, now)

    def _wait(self, ticket: Ticket) -> None:
        if self.waiting >= self.config.queue_size:
            self._make_room(ticket.key)
        self._waiting.setdefault(ticket.asked.model, Turns()).push(ticket.key, ticket)
        loop = asyncio.get_running_loop()
        ticket.timer = loop.call_later(self.config.queue_timeout_secs, self._waited_long, ticket)

    def _make_room(self, key: str) -> None:
        """The queue is full: of who has most in it, the newest gives way if ``key`` has fewer then. Raises
        Overloaded."""
        full = Overloaded(
            f"{self.waiting} requests wait for a worker, which is the limit; retry later, or raise "
            "--queue-size or --worker-max-requests",
            retry_after=RETRY_AFTER,
        )
        counts: Counter[str] = Counter()
        for queue in self._waiting.values():
            counts.update(queue.sizes())
        most = max(counts, key=counts.__getitem__, default=key)
        if counts[most] <= counts[key] + 1:
            raise full
        newest = [last for queue in self._waiting.values() if (last := queue.last(most)) is not None]
        self._send_away(max(newest, key=lambda ticket: ticket.since), full)

    def _waited_long(self, ticket: Ticket) -> None:
        seconds = self.config.queue_timeout_secs
        late = Overloaded(f"no worker had room for {seconds:.0f} s; retry later", retry_after=RETRY_AFTER)
        self._send_away(ticket, late)

    def _send_away(self, ticket: Ticket, error: SglaError) -> None:
        self._leave(ticket)
        self.refused[error.code] += 1
        ticket.done(error)

    def _leave(self, ticket: Ticket) -> None:
        """It waits no longer; no effect if it does not."""
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
            model = ticket.asked.model
            self._waiting[model].remove(ticket.key, ticket)
            if not self._waiting[model]:
                del self._waiting[model]

    def _serve_waiting(self) -> None:
        """Send as many of those who wait as there is room for. Nobody waits for workers that are down."""
        for model, queue in list(self._waiting.items()):
            while queue:
                error: SglaError | None = None
                room: list[Worker] = []
                try:
                    usable = self._usable(Asked(model=model), ())
                except SglaError as refused:
                    error, key = refused, queue.first()
                else:
                    key, room = self._next(queue, usable)
                if not room and error is None:
                    break
                ticket = queue.pop(key)
                assert ticket.timer is not None
                ticket.timer.cancel()
                ticket.timer = None
                if error is None:
                    self._send(ticket, room)
                else:
                    self.refused[error.code] += 1
                    ticket.done(error)
            if not queue:
                self._waiting.pop(model, None)
