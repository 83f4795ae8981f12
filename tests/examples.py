"""How many examples hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # of hypothesis


def examples(count: int) -> int:
    """``count``; as many times more or fewer as the profile has more or fewer than hypothesis
    (``--hypothesis-profile=full``: ten times)."""
    return count * settings.default.max_examples // USUAL
