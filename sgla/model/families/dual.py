"""Pairs of encoders, of texts and of pictures."""

from __future__ import annotations

from typing import Any, NamedTuple

_TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
_TOWER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32}


class Dual(NamedTuple):
    """``text`` and ``tower``: sizes where config.json has none; ``filled``: texts have padding up to the
    context's end, which they were trained with."""

    text: dict[str, Any]
    tower: dict[str, Any]
    filled: bool


DUALS: dict[str, Dual] = {
    "CLIPModel": Dual(
        {**_TEXT, "vocab_size": 49408, "max_position_embeddings": 77, "projection_dim": 512}, _TOWER, False
    ),
    "SiglipModel": Dual(
        {
            **_TEXT,
            **{"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072},
            **{"num_attention_heads": 12, "max_position_embeddings": 64},
        },
        {**_TOWER, "patch_size": 16},
        True,
    ),
}
