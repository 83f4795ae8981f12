"""``sgla serve``: one loop, one port, one engine; signals, drain and exit codes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sgla import clock
from sgla.actors.base import in_thread
from sgla.actors.system import System
from sgla.actors.systems import Systems
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import ConfigError, NotDownloaded, SglaError
from sgla.http.accepting import Site
from sgla.http.app import make_app
from sgla.http.connections import Runner, backlog, connection_limit, raise_file_limit
from sgla.http.tls import tls_context
from sgla.leaving import LastResort
from sgla.memory import return_memory_early
from sgla.messages import Facts, Progress
from sgla.nodes import at
from sgla.observe.loop import LoopWatch
from sgla.observe.memory import MemoryWatch
from sgla.observe.throughput import Throughput

if TYPE_CHECKING:
    from sgla.observe.tracing import Tracing

log = logging.getLogger(__name__)

OnReady = Callable[[Config, Facts, Defaults, str, float], None]


class Listener(Protocol):
    """What serves the application beside HTTP."""

    @property
    def url(self) -> str: ...

    async def close(self) -> None: ...


Open = Callable[[web.Application], Awaitable[Listener]]

EXIT_OK, EXIT_DIED, EXIT_CONFIG = 0, 1, 2
LINGER = 1.0  # seconds that clients get to read their 503 after a worker has died
LEAVE = 1.2  # seconds from the last answer to the end of the process
REST = 10.0  # the same where the process may serve another model


def run(
    config: Config,
    on_progress: Callable[[Progress], None] | None = None,
    on_ready: OnReady | None = None,
    models: Sequence[Config] = (),
    on_demand: bool = False,
    beside: Sequence[Open] = (),
) -> int:
    """Serve until a signal or a failure; returns the process's exit code.
    What then does not end in time ends with the process.
    Raises NotDownloaded where a hub does not give the model; ``run`` may be called again then.

    ``on_ready(settings, facts, defaults of sampling, url, seconds)`` is called for each model once it accepts
    requests. ``models``: several, each with all its settings, instead of the one of ``config``;
    ``on_demand``: they are loaded when somebody asks for them. ``beside``: each opens something that serves
    the application, too.
    """
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:  # not on every platform
        runner = asyncio.Runner()
    serving = _serve(config, on_progress, on_ready, models or (config,), on_demand, beside)
    return runner.run(serving)  # not closed: that waits for the loop's threads


async def _serve(
    config: Config,
    on_progress: Callable[[Progress], None] | None,
    on_ready: OnReady | None,
    models: Sequence[Config],
    on_demand: bool,
    beside: Sequence[Open],
) -> int:
    started = clock.now()
    return_memory_early()
    systems = Systems(models, on_progress, on_demand, config.sleep_idle)
    last_resort = LastResort(systems.abandon)
    signals = Signals(systems, config.drain_timeout, last_resort)
    for system in systems.all:
        system.metrics.tracing = start_tracing(config, system.ingress.model_names[0])
    logging.getLogger("aiohttp.server").addFilter(shorten_parse_error)
    metrics = systems.first.metrics
    loop, memory = LoopWatch(metrics.loop_lag.observe), MemoryWatch()
    throughput = [Throughput(system.ingress.stats, config.log_interval) for system in systems.all]
    files = raise_file_limit()
    first, *others = [(system.ingress, system.config, system.metrics) for system in systems.all]
    runner = Runner(
        make_app(*first, others),
        connection_limit(files, config.max_connections),
        shutdown_timeout=1.0,
    )
    await runner.setup()
    code, leave = EXIT_DIED, LEAVE
    listeners: list[Listener] = []
    try:
        url = await _listen(runner, config, backlog(files))
        for start in beside:
            listeners.append(await start(runner.app))
        urls = " and ".join([url, *(each.url for each in listeners)])
        print(f"listening on {urls} (503 until the model is loaded)", flush=True)

        def ready(system: System, facts: Facts) -> None:
            if on_ready is not None:
                defaults = system.ingress.default_sampling
                on_ready(system.config, facts, defaults, url, clock.now() - started)

        code = await _supervise(systems, signals, ready)
    except NotDownloaded:
        leave = REST
        raise
    except ConfigError as error:
        print(f"sgla: {error.message}", file=sys.stderr)
        code = EXIT_CONFIG
    finally:
        last_resort.within(leave, code)
        closing = [each.close() for each in listeners]
        await asyncio.gather(systems.close(), runner.cleanup(), _write_rest(systems.all), *closing)
        loop.close()
        memory.close()
        for each in throughput:
            each.close()
        last_resort.stand_down()
    return code


async def _write_rest(systems: Sequence[System]) -> None:
    """What is on its way to a collector or a file gets ``LINGER`` seconds."""
    writing = []
    for metrics in (system.metrics for system in systems):
        if metrics.tracing is not None:
            writing.append(in_thread(metrics.tracing.close))
        if metrics.dump is not None:
            writing.append(in_thread(metrics.dump.flush, LINGER))
    if writing:
        await asyncio.wait(writing, timeout=LINGER)


class Signals:
    """SIGTERM and SIGINT. The first asks for a drain (``stop``), the second for an end at once (``hurry``); a
    server that hangs is ended by ``last_resort``. Handlers are Python's, not the loop's, which may be what
    hangs."""

    def __init__(self, systems: Systems, drain_timeout: float, last_resort: LastResort) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._systems = systems
        self.drain_timeout = drain_timeout
        self.last_resort = last_resort
        self._count = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            signal.signal(number, self._handle)
        last_resort.guard(numbers, drain_timeout + LEAVE)

    def _handle(self, number: int, frame: object) -> None:
        self._count += 1
        if self._count > 2 or self._systems.died.done():
            return
        drains = self._count == 1 and self._systems.running
        self.last_resort.within((self.drain_timeout if drains else 0.0) + LEAVE, EXIT_OK)
        self._loop.call_soon_threadsafe((self.stop if self._count == 1 else self.hurry).set)


def start_tracing(config: Config, model: str) -> Tracing | None:
    """Raises ConfigError without the packages for it."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from sgla.observe.tracing import Tracing, otlp_processor

        return Tracing(otlp_processor(config.otlp_traces_endpoint), model)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); "
            "install it with: pip install 'sgla[otel]'",
            param="otlp_traces_endpoint",
        ) from error


def shorten_parse_error(record: logging.LogRecord) -> bool:
    """A log filter that passes every record: that of a request which is no HTTP becomes one line, without the
    headers, which may hold a key."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {type(error).__name__}", None
    return True


async def _listen(runner: web.AppRunner, config: Config, waiting: int) -> str:
    tls = tls_context(config)
    try:
        await Site(runner, config.host, config.port, tls, waiting).start()
    except OSError as error:
        known = error.errno in (errno.EADDRINUSE, errno.EACCES)
        why, flag = (os.strerror(error.errno or 0), "port") if known else (error.strerror, "host")
        raise ConfigError(
            f"cannot listen on {at(config.host, config.port)}: {why}; choose another --{flag}"
        ) from error
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    return f"{'https' if tls else 'http'}://{at(host, runner.addresses[0][1])}"


async def _supervise(systems: Systems, signals: Signals, ready: Callable[[System, Facts], object]) -> int:
    """Start, serve until a signal or death, drain. A second signal during the drain ends it at once."""
    starting = asyncio.ensure_future(systems.start(ready))
    stopping = asyncio.ensure_future(signals.stop.wait())
    await first(starting, stopping, systems.died)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return _exit_code(systems)
    try:
        starting.result()
    except SglaError as error:
        stopping.cancel()
        if isinstance(error, ConfigError):
            raise
        systems.fail(error)
        log.error("start failed: %s", error.message)
        return EXIT_DIED
    await first(stopping, systems.died)
    stopping.cancel()
    if not systems.died.done():
        hurrying = asyncio.ensure_future(signals.hurry.wait())
        draining = asyncio.ensure_future(systems.drain(signals.drain_timeout))
        await first(draining, hurrying, systems.died)
        hurrying.cancel()
        draining.cancel()
        systems.end_requests()
    return await _linger(systems, signals.last_resort)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _linger(systems: Systems, last_resort: LastResort) -> int:
    code = _exit_code(systems)
    if code != EXIT_OK:
        last_resort.within(LINGER + LEAVE, code)
        await asyncio.sleep(LINGER)
    return code


def _exit_code(systems: Systems) -> int:
    if not systems.died.done():
        return EXIT_OK
    log.error("stopping: %s", systems.died.result().message)
    return EXIT_DIED
