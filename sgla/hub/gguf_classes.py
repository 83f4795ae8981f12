"""What the keys of a GGUF file say of an encoder (``Layout.encoder``): types of tokens, classes, and whether
tokens see those behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout

TYPES, CLASSES = "token_types.weight", "cls.output.weight"
DENSE = "dense_2.weight", "dense_3.weight"  # behind the pooling
BOTH_WAYS = "use_bidirectional_attention"
LABELS = "classifier.output_labels"
MAX_CLASSES = 1 << 16


def of_encoder(layout: Layout, keys: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """In words of HF's. ``sizes``: by the letters of ``HFTensor.dims``. Raises ConfigError."""
    found: dict[str, Any] = {"type_vocab_size": sizes["Y"]} if "type_vocab_size" in layout.known else {}
    if BOTH_WAYS in layout.known:
        found[BOTH_WAYS] = True
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
