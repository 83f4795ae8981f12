"""An application for Ray Serve, each replica of which has a server of its own:
``serve run sgla.ray_serve:app model=Qwen/Qwen3-8B``. Requests and answers pass through unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.errors import ConfigError, WorkerDied
from sgla.processes import python_path, tied
from sgla.resolve import check
from sgla.route.errors import error_reply, event_of

MOST = 1024  # requests at a time that a replica is given; it has a queue of its own
LISTENING = b"listening on "
HOPS = {"connection", "keep-alive", "transfer-encoding", "upgrade", "host"}  # headers of one connection
OURS = HOPS | {"date", "server", "x-request-id"}  # Ray Serve sends its own; the id is the same
LOOK = 1.0  # seconds between two looks whether the server runs; the third in vain makes another replica
GONE = WorkerDied("the server of this replica has ended; another replica takes its place, retry later")
SERVES = ("host", "port", "nnodes", "node_rank", "dp", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


class Server:
    """The deployment: a server's process, and what passes requests on to it."""

    async def __init__(self, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Returns when the model is loaded. Raises RuntimeError if it cannot be."""
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(dict(settings), file)  # which is YAML, too
        try:
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "sgla", "serve", "--config", file.name, "--port", "0"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": python_path()},
            )
            loop = asyncio.get_running_loop()
            listening: asyncio.Future[str] = loop.create_future()
            threading.Thread(target=self._copy, args=(loop, listening), daemon=True).start()
            self._url = await listening
        finally:
            os.unlink(file.name)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=timeout)
        while not await self._answers("/health/ready"):
            self.check_health()
            await asyncio.sleep(0.2)

    def _copy(self, loop: asyncio.AbstractEventLoop, listening: asyncio.Future[str]) -> None:
        """Pass on what the server prints; where it listens is among it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line.decode(), end="", flush=True)
            if line.startswith(LISTENING):
                loop.call_soon_threadsafe(listening.set_result, line.decode().split()[2])
        if not listening.done():
            loop.call_soon_threadsafe(listening.set_exception, self._ended())

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the server has ended with code {self._process.wait()}; its log says why")

    async def _answers(self, path: str) -> bool:
        try:
            async with self._session.get(self._url + path) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def __call__(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOPS}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = request.stream() if {"content-length", "transfer-encoding"} & set(request.headers) else None
        try:
            answer = await self._session.request(request.method, self._url + path, headers=headers, data=body)
        except aiohttp.ClientError:
            reply = error_reply(GONE, path)
            return Response(reply.body, reply.status, {"Retry-After": str(reply.retry_after)}, reply.kind)
        streams = answer.content_type == "text/event-stream"

        async def chunks() -> AsyncIterator[bytes]:
            last = b""
            try:
                async with answer:
                    async for last in answer.content.iter_any():
                        yield last
            except aiohttp.ClientError:
                if not (streams and last.endswith(b"\n\n")):  # between two events
                    raise
                yield event_of(GONE, path)

        passed = {name: value for name, value in answer.headers.items() if name.lower() not in OURS}
        return StreamingResponse(chunks(), answer.status, passed)

    def check_health(self) -> None:
        """Ray Serve asks this, and makes another replica where it raises."""
        if self._process.poll() is not None:
            raise self._ended()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.terminate()


def app(settings: Mapping[str, Any]) -> Application:
    """``settings``: those of a file for ``--config``; of Ray Serve's own a configuration names the deployment
    ``sgla``. Raises ConfigError."""
    for name in SERVES:
        if name in settings:
            raise ConfigError(f"{name} is not for a replica of Ray Serve; leave it out", param=name)
    config = _checked(settings)
    options = {"num_cpus": 1, "num_gpus": config.ranks if config.device == "cuda" else 0}
    deployment = serve.deployment(
        Server,
        name="sgla",
        ray_actor_options=options,
        max_ongoing_requests=MOST,
        health_check_period_s=LOOK,
    )
    return deployment.bind(dict(settings))


def _checked(settings: Mapping[str, Any]) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dict(settings), file)
        file.flush()
        config = load_config({}, file.name)
    if config.executor == "ray":
        raise ConfigError(
            "executor ray is not for a replica of Ray Serve, which is on one host; start 'sgla serve' on a "
            "host of the cluster",
            param="executor",
        )
    check(config)
    return config
