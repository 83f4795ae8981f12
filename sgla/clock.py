"""One monotonic clock for everything that measures or expires; tests pass their own numbers instead."""

from __future__ import annotations

import time

now = time.monotonic
wall = time.time  # seconds since 1970: for what outlives the process
