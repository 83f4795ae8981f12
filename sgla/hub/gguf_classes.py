"""What the keys of a GGUF file say of an encoder (``Layout.encoder``): types of tokens, and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

TYPES, CLASSES = "token_types.weight", "cls.output.weight"
LABELS = "classifier.output_labels"
MAX_CLASSES = 1 << 16


def of_encoder(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """In words of HF's. ``sizes``: by the letters of ``HFTensor.dims``. Raises ConfigError."""
    found: dict[str, Any] = {"type_vocab_size": sizes["Y"]}
    if CLASSES not in layout.top:
        return found
    count = sizes["C"]
    names = keys.get(LABELS) or [f"LABEL_{i}" for i in range(count)]
    if count > MAX_CLASSES or len(names) != count:
        raise ConfigError(
            f"{layout.name}.{LABELS} has {len(names)} names, and there are {count} classes; at most "
            f"{MAX_CLASSES} are supported"
        )
    return found | {"num_labels": count, "id2label": {str(i): name for i, name in enumerate(names)}}
