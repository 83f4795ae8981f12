"""How many examples hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # of hypothesis


def examples(count: int) -> int:
    """``count``; of a profile with more or fewer than usual as many times more or fewer
    (``--hypothesis-profile=full``: ten times)."""
    return count * settings.default.max_examples // USUAL
