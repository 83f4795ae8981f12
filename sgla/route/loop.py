"""The loop of a router's process."""

from __future__ import annotations

import asyncio


def runner() -> asyncio.Runner:
    """With uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
