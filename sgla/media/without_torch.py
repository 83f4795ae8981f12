"""Imported first in a process for media: transformers then takes torch, which pictures do not need, for
missing. It would take 300 MB and seconds."""

import os
import sys

os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing
if "torch" not in sys.modules:
    sys.modules["torch"] = None  # type: ignore[assignment]
