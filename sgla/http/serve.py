"""``sgla serve``: one loop, one port, one engine; signals, drain and exit codes."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sgla import clock
from sgla.actors.base import in_thread
from sgla.actors.system import System
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.http.app import make_app
from sgla.messages import Facts, Progress
from sgla.observe.loop import LoopWatch

if TYPE_CHECKING:
    from sgla.observe.tracing import Tracing

log = logging.getLogger(__name__)

EXIT_OK, EXIT_DIED, EXIT_CONFIG = 0, 1, 2
LINGER = 1.0  # seconds that clients get to read their 503 after a worker has died


def run(
    config: Config,
    on_progress: Callable[[Progress], None] | None = None,
    on_ready: Callable[[Facts, str, float], None] | None = None,
) -> int:
    """Serve until a signal or a failure; returns the process's exit code.

    ``on_ready(facts, url, seconds)`` is called once requests are accepted.
    """
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:  # not on every platform
        runner = asyncio.Runner()
    with runner:
        return runner.run(_serve(config, on_progress, on_ready))


async def _serve(
    config: Config,
    on_progress: Callable[[Progress], None] | None,
    on_ready: Callable[[Facts, str, float], None] | None,
) -> int:
    started = clock.now()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    system = System(config, on_progress)
    tracing = system.metrics.tracing = start_tracing(config, system.ingress.model_names[0])
    logging.getLogger("aiohttp.server").addFilter(unreadable)
    watch = LoopWatch(system.metrics.loop_lag.observe)
    runner = web.AppRunner(
        make_app(system.ingress, config, system.metrics),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        url = await _listen(runner, config)
        print(f"listening on {url} (503 until the model is loaded)", flush=True)
        code = await _supervise(
            system, stop, lambda facts: on_ready and on_ready(facts, url, clock.now() - started)
        )
    except ConfigError as error:
        print(f"sgla: {error.message}", file=sys.stderr)
        code = EXIT_CONFIG
    finally:
        await system.close()
        await runner.cleanup()
        watch.close()
        if tracing is not None:
            await asyncio.wait([in_thread(tracing.close)], timeout=LINGER)
        if system.metrics.dump is not None:
            system.metrics.dump.flush(LINGER)
    return code


def start_tracing(config: Config, model: str) -> Tracing | None:
    """Raises ConfigError without the packages for it."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from sgla.observe.tracing import Tracing, otlp_processor

        return Tracing(otlp_processor(config.otlp_traces_endpoint), model)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with: pip install 'sgla[otel]'",
            param="otlp_traces_endpoint",
        ) from error


def unreadable(record: logging.LogRecord) -> bool:
    """A log filter: what is no HTTP is told in one line, without the headers that may hold a key."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {type(error).__name__}", None
    return True


async def _listen(runner: web.AppRunner, config: Config) -> str:
    tls = tls_context(config)
    site = web.TCPSite(runner, config.host, config.port, backlog=1024, reuse_address=True, ssl_context=tls)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
        ) from error
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    return f"{'https' if tls else 'http'}://{host}:{runner.addresses[0][1]}"


def tls_context(config: Config) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        raise ConfigError(f"the TLS files cannot be used ({files}): {error}", param="ssl_certfile") from error
    return context


async def _supervise(system: System, stop: asyncio.Event, ready: Callable[[Facts], object]) -> int:
    """Start, serve until ``stop`` or death, drain. A second signal during the drain ends it at once."""
    starting = asyncio.ensure_future(system.start())
    stopping = asyncio.ensure_future(stop.wait())
    await first(starting, stopping, system.died)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return _exit_code(system)
    try:
        facts = starting.result()
    except SglaError as error:
        if isinstance(error, ConfigError):
            raise
        system.ingress.fail(error)
        log.error("start failed: %s", error.message)
        return EXIT_DIED
    ready(facts)
    await first(stopping, system.died)
    stopping.cancel()
    if not system.died.done():
        stop.clear()
        again = asyncio.ensure_future(stop.wait())
        draining = asyncio.ensure_future(system.drain(system.config.drain_timeout))
        await first(draining, again, system.died)
        again.cancel()
        draining.cancel()
    return await _linger(system)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _linger(system: System) -> int:
    code = _exit_code(system)
    if code != EXIT_OK:
        await asyncio.sleep(LINGER)
    return code


def _exit_code(system: System) -> int:
    if not system.died.done():
        return EXIT_OK
    log.error("stopping: %s", system.died.result().message)
    return EXIT_DIED
