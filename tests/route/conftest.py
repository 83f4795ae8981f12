"""Fixtures: a router in front of fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from route_fakes import FakeWorker, Route, Router


@pytest.fixture
async def route() -> AsyncIterator[Route]:
    """``await route(workers=2, remote=False, **settings)``; all is closed at the end."""
    made: list[Any] = []

    async def start(workers: int = 2, remote: bool = False, **settings: Any) -> Router:
        fakes = [FakeWorker() for _ in range(workers)]
        for fake in fakes:
            await fake.start()
        router = Router(fakes, remote, **settings)
        await router.start()
        made.extend((router, *fakes))
        return router

    yield start
    for each in made:
        await each.stop()
