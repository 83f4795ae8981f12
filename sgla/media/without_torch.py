"""Imported first in a process for media: transformers then takes torch, which pictures do not need, for
missing. It would take 300 MB and seconds."""

import sys

if "torch" not in sys.modules:
    sys.modules["torch"] = None  # type: ignore[assignment]
