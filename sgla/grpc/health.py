"""gRPC's own health service, by what ``/health`` says."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from sgla.errors import NotFound, Overloaded
from sgla.grpc.calls import Call
from sgla.grpc.proto import make

PACKAGE = "grpc.health.v1"
LOOK = 1.0  # seconds between looks of who watches
MOST_WATCHERS = 64
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # of HealthCheckResponse.ServingStatus


class Health:
    """``services``: the names that may be asked for; "" is the server as a whole."""

    def __init__(self, services: frozenset[str]) -> None:
        self._services = services | {""}
        self._watchers = 0

    async def check(self, call: Call, request: Any) -> Message:
        if request.service not in self._services:
            raise NotFound(f"there is no service {request.service[:200]!r}")
        return self._state(call, request.service)

    async def all(self, call: Call, request: Any) -> Message:
        states = {service: self._state(call, service) for service in self._services}
        return make(PACKAGE, "HealthListResponse", statuses=states)

    async def watch(self, call: Call, request: Any) -> None:
        """The state, and each later one, until the client leaves. One that is unknown may come later, as the
        protocol has it."""
        if self._watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} calls watch the server's health, which is the limit")
        self._watchers += 1
        try:
            told: Message | None = None
            while True:
                state = self._state(call, request.service)
                if state != told:
                    told = state
                    await call.send(state)
                await asyncio.sleep(LOOK)
        finally:
            self._watchers -= 1

    def _state(self, call: Call, service: str) -> Message:
        status = SERVING if call.server.ingress.ready else NOT_SERVING
        if service not in self._services:
            status = SERVICE_UNKNOWN
        return make(PACKAGE, "HealthCheckResponse", status=status)
