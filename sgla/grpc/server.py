"""The gRPC server beside the HTTP server: on the same loop, with the same keys, limits and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from aiohttp import web
from google.protobuf.message import Message

from sgla import clock
from sgla.config import Config
from sgla.errors import BadRequest, ConfigError, Overloaded, SglaError
from sgla.grpc import reflecting, sglang, telling, vllm
from sgla.grpc.calls import (
    Call,
    Open,
    Places,
    address_of,
    deadline_of,
    decoded,
    end_with,
    headers_of,
    next_message,
)
from sgla.grpc.exchange import Exchange
from sgla.grpc.health import PACKAGE as HEALTH
from sgla.grpc.health import Health
from sgla.grpc.proto import OWN, SGLANG, VLLM, make
from sgla.grpc.shape import MOST
from sgla.http.access import LINES
from sgla.http.bodies import Share
from sgla.http.clients import Client
from sgla.http.middleware import CLIENT_GONE, GATE
from sgla.http.server import SERVER, Server
from sgla.nodes import at

log = logging.getLogger(__name__)

MOST_CALLS = 4096  # at a time, half of them of one client
MOST_STREAMS = 1024  # calls of one connection
MOST_EXCHANGES = 64
MOST_WAITING = 4 * MOST_CALLS  # that this loop has not seen yet; those beyond MOST_CALLS it refuses by name
END = 0.5  # seconds for the last messages

Run = Callable[[Call, Any], Awaitable[Message | None]]


class Method(NamedTuple):
    """``asks``: the full name of the message it takes; "": it reads several by itself, and ``open`` says how
    many such calls there may be. ``route``: that of HTTP which needs the same key. ``work``: the engine has
    to be there for it."""

    asks: str
    run: Run
    route: str
    work: bool = False
    open: Open | None = None


async def flush(package: str, call: Call, request: Any) -> Message:
    answer: Message = make("smg.grpc.common", "FlushCacheResponse", **await telling.flush(call))
    return answer


def methods(health: Health) -> dict[str, Method]:
    """By path."""
    found: dict[str, Method] = {
        f"/{HEALTH}.Health/Check": Method(f"{HEALTH}.HealthCheckRequest", health.check, "/health"),
        f"/{HEALTH}.Health/List": Method(f"{HEALTH}.HealthListRequest", health.all, "/health"),
        f"/{HEALTH}.Health/Watch": Method(f"{HEALTH}.HealthCheckRequest", health.watch, "/health"),
    }
    for protocol, service in ((sglang, f"{SGLANG}.SglangScheduler"), (vllm, f"{VLLM}.VllmEngine")):
        package = service.rpartition(".")[0]
        table: dict[str, tuple[Run, str, bool]] = {
            "Generate": (protocol.generate, "/generate", True),
            "Embed": (protocol.embed, "/v1/embeddings", True),
            "HealthCheck": (protocol.health_check, "/health_generate", False),
            "Abort": (protocol.abort, "/abort_request", False),
            "GetModelInfo": (protocol.model_info, "/model_info", False),
            "GetServerInfo": (protocol.server_info, "/server_info", False),
            "GetLoads": (protocol.loads, "/get_load", False),
        }
        for name, (run, route, work) in table.items():
            found[f"/{service}/{name}"] = Method(f"{package}.{name}Request", run, route, work)
        flushing = Method("smg.grpc.common.FlushCacheRequest", partial(flush, package), "/flush_cache")
        found[f"/{service}/FlushCache"] = flushing
    return found


SERVICES = (
    f"{SGLANG}.SglangScheduler",
    f"{VLLM}.VllmEngine",
    f"{OWN}.Scheduler",
    f"{HEALTH}.Health",
    *reflecting.NAMES,
)
EXCHANGE = f"/{OWN}.Scheduler/Exchange"


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every method takes and gives streams of bytes, whatever its protocol says, which looks the same to
    clients: so keys are checked, and places taken, before a message is received."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._server: Server = app[SERVER]
        config = self._server.config
        most = max(2, config.request_memory_bytes // largest(config) // 4)  # messages that arrive at a time
        self._places = Places(most)
        self._methods = methods(Health(frozenset(SERVICES)))
        exchanges = Open("Exchange", min(MOST_EXCHANGES, most))
        self._methods[EXCHANGE] = Method("", self._exchange, "/generate", True, exchanges)
        tells, asking = reflecting.Reflection(SERVICES), Open("reflection", reflecting.MOST)
        for name in reflecting.NAMES:
            self._methods[f"/{name}/ServerReflectionInfo"] = Method("", tells.run, "/health", open=asking)
        self._calls: Counter[str] = Counter()  # by client

    def service(self, details: Any) -> Any:
        method = self._methods.get(details.method)
        if method is None:
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, details.method, method))

    async def _serve(self, path: str, method: Method, messages: Any, context: Any) -> None:
        """Count and log the call, and end it with a status whatever happens."""
        server, began = self._server, clock.now()
        server.metrics.http_started("gRPC", path)
        status, ended = CLIENT_GONE, Ended()
        try:
            error = await self._run(path, method, context, ended)
            status = 200 if error is None else error.status
            if error is not None:
                await end_with(context, error)
        finally:
            server.metrics.http_finished("gRPC", path, status)
            if server.config.log_requests and method.work:
                counts = {} if ended.call is None or not ended.call.tally else ended.call.tally.fields(began)
                rid = "" if ended.call is None else ended.call.rid
                millis = round(1000 * (clock.now() - began), 1)
                self._app[LINES].add((address_of(context), "gRPC", path, status, millis, rid), counts)

    async def _run(self, path: str, method: Method, context: Any, ended: Ended) -> SglaError | None:
        """The error that ends the call."""
        client: Client | None = None
        try:
            client = self._admit(method, context)
            self._calls[client.name] += 1
            await self._server.door.enter(client.name)
            await self._call(method, context, client, ended)
        except SglaError as error:
            return error
        except Exception:
            log.exception("the call %s failed", path)
            return SglaError("internal error; the server's log has the details")
        finally:
            if client is not None:
                self._calls[client.name] -= 1
                if not self._calls[client.name]:
                    del self._calls[client.name]
        return None

    def _admit(self, method: Method, context: Any) -> Client:
        """Who calls. Raises Unauthorized, Forbidden, Overloaded."""
        headers = headers_of(context)
        forwarded = ",".join(headers.getall("X-Forwarded-For", ()))
        address = self._server.proxies.address(address_of(context), forwarded)
        client: Client = self._app[GATE].check(headers, address, method.route)
        if self._calls[client.name] >= MOST_CALLS // 2:
            raise Overloaded(f"you have {MOST_CALLS // 2} calls open, which is the limit", retry_after=1.0)
        return client

    async def _call(self, method: Method, context: Any, client: Client, ended: Ended) -> None:
        server = self._server
        share = Share(server.memory, client.name)

        async def send(message: Message) -> None:
            await context.write(message.SerializeToString())

        call = ended.call = Call(server, client, share, send, deadline_of(context))
        server.ingress.enter()
        try:
            if method.work:
                await server.ingress.awake()
                server.ingress.require_ready()
            if method.open is not None:
                with method.open.one(client):
                    await method.run(call, partial(next_message, context))
                return
            if (data := await self._places.read(context, client)) is None:
                raise BadRequest("the call has no message")
            share.take(len(data))
            share.body = len(data)
            answer = await method.run(call, decoded(method.asks, data))
            if answer is not None:
                await send(answer)
        finally:
            server.ingress.leave()
            share.close()

    async def _exchange(self, call: Call, read: Any) -> None:
        await Exchange(call, read).run()


class Ended:
    """What is known of a call when it has ended."""

    call: Call | None = None


class Running:
    """``port``: the one that was asked for, or that was found for 0."""

    def __init__(self, server: Any, host: str, port: int) -> None:
        self._server, self.port = server, port
        self.url = f"grpc://{at(host, port)}"

    async def close(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._server.stop(END)


async def start(app: web.Application) -> Running:
    """Listen on ``--grpc-port``. Raises ConfigError."""
    config: Config = app[SERVER].config
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", largest(config)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", MOST_STREAMS),
            # Beyond the first of these numbers calls that wait to be taken are cancelled at random.
            ("grpc.server.max_pending_requests", MOST_WAITING),
            ("grpc.server.max_pending_requests_hard_limit", MOST_WAITING),
            ("grpc.so_reuseport", 0),
            # A call that is open while nothing is said ends when its client's host is gone.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ],
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    server.add_generic_rpc_handlers((Handlers(app),))
    address = f"[{config.host}]" if ":" in config.host else config.host
    port = listen(server, f"{address}:{config.grpc_port}", config)
    await server.start()
    return Running(server, address, port)


def largest(config: Config) -> int:
    """Bytes of a message."""
    return min(config.max_body_bytes, MOST)


def listen(server: Any, address: str, config: Config) -> int:
    """The port. Raises ConfigError."""
    credentials = tls(config)
    try:
        if credentials is None:
            port = int(server.add_insecure_port(address))
        else:
            port = int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address} for gRPC; choose another --grpc-port", param="grpc_port"
        ) from error
    return port


def tls(config: Config) -> Any:
    """None: plain HTTP/2. The files have been tried by HTTP's server, which starts first."""
    if config.ssl_certfile is None:
        return None
    chain = Path(config.ssl_certfile).read_bytes()
    key = chain if config.ssl_keyfile is None else Path(config.ssl_keyfile).read_bytes()
    signers = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)], signers, signers is not None)
