"""An answer of the router's own."""

from __future__ import annotations

from typing import NamedTuple


class Reply(NamedTuple):
    """``retry_after``: seconds; 0: no such header."""

    status: int
    kind: str
    body: bytes
    retry_after: int = 0
