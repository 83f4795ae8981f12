"""One monotonic clock for everything that measures or expires; tests pass their own numbers instead."""

from __future__ import annotations

import time

now = time.monotonic
spent = time.process_time  # by this process's threads, not while it waits for a core
wall = time.time  # seconds since 1970: for what outlives the process
