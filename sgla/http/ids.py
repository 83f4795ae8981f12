"""Ids that nobody can guess."""

from __future__ import annotations

import os

BYTES = 16
AT_ONCE = 256

_made: list[str] = []


def random_id() -> str:
    """32 hexadecimal digits.

    Many are made at once: asking the system lets go of Python's lock, which comes back late under load.
    """
    if not _made:
        digits = os.urandom(BYTES * AT_ONCE).hex()
        _made.extend(digits[at : at + 2 * BYTES] for at in range(0, len(digits), 2 * BYTES))
    return _made.pop()
