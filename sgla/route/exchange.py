"""One request of a client on its way to a worker, and the answer back.

As long as the client has got nothing, what fails on one worker is tried on another. An answer that has begun
is the client's: if its worker dies, the client is told, and the connection ends.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol

from sgla.errors import NotReady, SglaError, UnsupportedField
from sgla.http.ids import random_id
from sgla.route import asked
from sgla.route.config import RouteConfig
from sgla.route.errors import ENDS, event_of
from sgla.route.merged import added_up
from sgla.route.owner import Owner, Placed
from sgla.route.reply import Reply
from sgla.route.upstream import Pool, Sink, Upstream, WorkerLost
from sgla.route.wire import CHUNKED, HEAD_END, UNTIL_CLOSE, Answer, Request

RETRIED = frozenset((429, 502, 503, 504))  # another worker may answer better
MOST_LOST = 2  # workers that may end while they have a request: it may be what ends them
COLLECTED = 4 << 20  # bytes of an answer that is compared with others
SAFE_ID = re.compile(rb"[\x21-\x7e]{1,200}")
# What runs twice if it is sent twice.
ONCE = re.compile(r"/v1/(?:files|batches)(?:/|$)")
# What a server is by it until it is told otherwise, and a replica that comes later is not.
LASTING = frozenset(
    (
        "/load_lora_adapter",
        "/pause",
        "/pause_generation",
        "/post_process_weights",
        "/release_memory_occupation",
        "/sleep",
        "/start_expert_distribution_record",
        "/start_profile",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/v1/load_lora_adapter",
    )
)
COUNTS = "/dump_expert_distribution_record"
# What changes a server is for all of them; the worst answer is passed on.
EVERYWHERE = LASTING | {
    COUNTS,
    "/abort_request",
    "/clear_hicache_storage_backend",
    "/configure_logging",
    "/continue_generation",
    "/flush_cache",
    "/freeze_gc",
    "/rebalance_experts",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/slow_down",
    "/stop_expert_distribution_record",
    "/stop_profile",
    "/unload_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
}
ONE_BY_ONE = frozenset(
    (
        "/collective_rpc",
        "/destroy_weights_update_group",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/init_weights_update_group",
        "/scale_elastic_ep",
        "/start_weight_update",
        "/update_weights",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/weights_checker",
    )
)


class Client(Sink, Protocol):
    """The connection of a client. ``started``: bytes of the answer have been sent to it."""

    started: bool
    address: str

    def attach(self, upstream: Upstream, tunnel: bool) -> None:
        """The answer comes from there from now on."""
        ...

    def break_off(self, event: bytes) -> None:
        """The answer ends here; a stream of events with this one, if it is between two."""
        ...


class Collected:
    """A sink that keeps an answer."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > COLLECTED:
            raise SglaError("a worker's answer is too long to compare it with the others'")
        self.parts.append(data)


class Exchange:
    """``key``: whose request it is."""

    def __init__(
        self,
        config: RouteConfig,
        owner: Owner,
        pool: Pool,
        client: Client,
        request: Request,
        body: bytes | bytearray,
        key: str,
    ) -> None:
        self._config, self._owner, self._pool = config, owner, pool
        self._client, self._request, self._key = client, request, key
        given = request.get(b"x-request-id")
        self.rid = given if SAFE_ID.fullmatch(given) else random_id().encode()
        hops = b", ".join([*request.all(b"x-forwarded-for"), client.address.encode()])
        more = [b"X-Request-Id: " + self.rid, b"X-Forwarded-For: " + hops]
        self._head, self._body = request.forwarded(len(body), more), body
        session = request.text(config.session_header.lower().encode())[:200]
        self._asked = asked.read(
            request.target, request.text(b"content-type"), body, session, config.policy == "cache_aware"
        )._replace(everywhere=request.path in EVERYWHERE, lasting=request.path in LASTING)
        self._once = request.method != "GET" and bool(ONCE.match(request.path))
        self._lost = 0
        self._streams = False
        self._refusal: tuple[Upstream, Answer] | None = None

    async def run(self) -> Reply | None:
        """An answer of the router's own, if the client is to have one. Raises SglaError if the client has got
        nothing, and is to be told this."""
        path = self._request.path
        if path in ONE_BY_ONE:
            raise UnsupportedField(
                f"{path} is not passed on, since each worker needs its own; ask them one by one"
            )
        try:
            if path in EVERYWHERE:
                return await self._ask_all()
            await self._ask_one()
            return None
        except asyncio.CancelledError:
            if self._client.started:
                self._client.break_off(self._event(ENDS))
            raise
        finally:
            self._drop_refusal()

    async def _ask_one(self) -> None:
        tried: list[str] = []
        while True:
            try:
                if len(tried) > self._config.retry_max_retries:
                    raise NotReady("no worker has answered; retry later", retry_after=1.0)
                placed = await self._owner.place(self._asked, self._key, tried)
            except NotReady:
                if self._refusal is None:
                    raise
                await self._pass_refusal(*self._refusal)
                return
            tried.append(placed.url)
            if await self._try(placed):
                return

    async def _pass_refusal(self, upstream: Upstream, answer: Answer) -> None:
        try:
            await self._deliver(upstream, answer)
        except WorkerLost as error:
            self._failed(upstream.url, error)

    async def _try(self, placed: Placed) -> bool:
        """Whether the client has its answer; else another worker may be asked."""
        status, fault, upstream = 0, False, None
        try:
            upstream, answer = await self._ask(placed.url)
            self._owner.began(placed)
            status = answer.status
            if status in RETRIED or (status == 404 and self._asked.stored):
                self._drop_refusal()
                self._refusal, upstream = (upstream, answer), None
                return False
            self._drop_refusal()
            await self._deliver(upstream, answer)
            return True
        except (WorkerLost, OSError) as error:
            fault = True
            self._failed(placed.url, error)
            return self._client.started
        finally:
            self._owner.close(placed, status, fault)
            if upstream is not None:
                upstream.release()

    def _failed(self, url: str, error: Exception) -> None:
        """Raises NotReady if nothing else may be tried."""
        why = NotReady(f"the worker {url} was lost: {error}; retry later", retry_after=1.0)
        why.code = "worker_died"
        if self._client.started:
            self._client.break_off(self._event(why))
            return
        if isinstance(error, WorkerLost):
            self._lost += 1
            if self._once or self._lost >= MOST_LOST:
                raise why

    def _event(self, error: SglaError) -> bytes:
        """``event_of``; b"" where the answer is no stream."""
        return event_of(error, self._request.path) if self._streams else b""

    async def _ask(self, url: str) -> tuple[Upstream, Answer]:
        """Raises WorkerLost, OSError."""
        fresh = self._once or self._request.upgrades
        while True:
            upstream = await self._pool.take(url, fresh)
            try:
                return upstream, await upstream.ask(self._request.method, self._head, self._body)
            except BaseException as error:
                upstream.release()
                if not isinstance(error, WorkerLost) or not upstream.used or not error.stale:
                    raise
                fresh = True  # the worker had closed a connection that was idle

    async def _deliver(self, upstream: Upstream, answer: Answer) -> None:
        more = []
        if not answer.get(b"x-request-id"):
            more.append(b"x-request-id: " + self.rid)
        if answer.status != 101 and (self._request.closes or answer.size == UNTIL_CLOSE):
            more.append(b"Connection: close")
        self._streams = answer.size == CHUNKED and answer.get(b"content-type").startswith(
            b"text/event-stream"
        )
        self._client.attach(upstream, answer.status == 101)
        await upstream.deliver(answer.forwarded(more), self._client)

    def _drop_refusal(self) -> None:
        if self._refusal is not None:
            self._refusal[0].release()
            self._refusal = None

    async def _ask_all(self) -> Reply | None:
        """Ask every worker that is up or rests, one after the other."""
        tried: list[str] = []
        found: list[tuple[int, bytes]] = []
        while True:
            try:
                placed = await self._owner.place(self._asked, self._key, tried)
            except NotReady:
                if not tried:
                    raise
                break
            tried.append(placed.url)
            found.append(await self._collect(placed))
        status, worst = max(found, key=lambda each: each[0])
        if self._request.path == COUNTS and status == 200:
            bodies = [answer.partition(HEAD_END)[2] for _, answer in found]
            if (counts := added_up(bodies)) is not None:
                return Reply(status, "application/json", counts)
        self._client.started = True
        self._client.write(worst)
        return None

    async def _collect(self, placed: Placed) -> tuple[int, bytes]:
        """Status and bytes of a worker's answer. Raises NotReady if it has none."""
        status, fault, upstream, kept = 0, False, None, Collected()
        try:
            upstream, answer = await self._ask(placed.url)
            status = answer.status
            more = [b"Connection: close"] if self._request.closes or answer.size == UNTIL_CLOSE else []
            await upstream.deliver(answer.forwarded(more), kept)
            return status, b"".join(kept.parts)
        except (WorkerLost, OSError) as error:
            fault = True
            raise NotReady(
                f"{placed.url} did not answer: {error}; others may have done what was asked", retry_after=1.0
            ) from error
        finally:
            self._owner.close(placed, status, fault)
            if upstream is not None:
                upstream.release()


def key_of(request: Request) -> bytes:
    """The API key that came with a request, a bearer token or Anthropic's x-api-key; b"" if there is none."""
    scheme, _, given = request.get(b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else request.get(b"x-api-key")
