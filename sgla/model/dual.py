"""Pairs of encoders that make vectors of texts and of pictures which can be compared: CLIP (arXiv 2103.00020)
and SigLIP (2303.15343). transformers' modules compute them. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.messages import Pooling
from sgla.model.encoder import EncoderSpec
from sgla.model.families.dual import DUALS
from sgla.model.limits import HEADS, INNER, LAYERS, VOCAB, WIDTH

MOST_PATCH = 1 << 10  # pixels of a side


def read_dual(name: str, config: Mapping[str, Any]) -> EncoderSpec:
    """Sizes, of which those of the tower count in ``beside`` alone. Raises ConfigError."""
    if config.get("quantization_config") is not None:
        raise ConfigError(f"config.json: quantization_config is not supported for {name}", param="model")
    text, tower = _part(name, config, "text_config"), _part(name, config, "vision_config")
    hidden, wide = text.integer("hidden_size", WIDTH), tower.integer("hidden_size", WIDTH)
    layer = 4 * wide**2 + 2 * wide * tower.integer("intermediate_size", INNER)
    patches = 3 * tower.integer("patch_size", MOST_PATCH) ** 2 * wide
    return EncoderSpec(
        architecture=name,
        family=name,
        layers=text.integer("num_hidden_layers", LAYERS),
        hidden=hidden,
        intermediate=text.integer("intermediate_size", INNER),
        heads=text.integer("num_attention_heads", HEADS),
        vocab=text.integer("vocab_size", VOCAB),
        positions=text.integer("max_position_embeddings", 1 << 16),
        offset=0,
        types=0,
        eps=1e-5,
        activation="gelu",
        beside=tower.integer("num_hidden_layers", LAYERS) * layer + patches,
    )


def dual_pooling(name: str, config: Mapping[str, Any]) -> Pooling:
    """Raises ConfigError."""
    text = _part(name, config, "text_config")
    if DUALS[name].filled:
        given = text.given("projection_size")
        size = text.integer("projection_size" if given else "hidden_size", WIDTH)
    else:
        size = Reader(name, {"projection_dim": 512, **config}).integer("projection_dim", WIDTH)
    return Pooling(task="embed", kind="last", size=size, normalize=True, encoder=True)


def _part(name: str, config: Mapping[str, Any], key: str) -> Reader:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} must be an object", param="model")
    usual = DUALS[name].text if key == "text_config" else DUALS[name].tower
    return Reader(name, {**usual, **found})


def filler_of(folder: Path, config: Mapping[str, Any]) -> int:
    """The token that fills a text up: the tokenizer's padding, else what config.json says."""
    try:
        known = json.loads((folder / "tokenizer_config.json").read_text())
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        word = known["pad_token"]
        word = word["content"] if isinstance(word, dict) else word
        return int(next(token["id"] for token in added if token["content"] == word))
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return int((config.get("text_config") or {}).get("pad_token_id", 1))
