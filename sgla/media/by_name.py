"""What prepares pictures and sounds, by the name that files have for it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


@lru_cache(4)
def processor_of(name: str, settings: str) -> Any:
    """Ours or transformers'; neither is imported before. ``settings``: JSON."""
    from sgla.media.processors import OWN

    if name in OWN:
        return OWN[name](json.loads(settings))
    import transformers

    found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return found.from_dict(json.loads(settings))
