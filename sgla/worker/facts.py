"""The fields of ``Facts`` that runners of all devices have alike: what steps answer with, and how many rows
that leaves room for."""

from __future__ import annotations

from math import prod
from typing import Any

from sgla.config import Config
from sgla.messages import VERIFIED, Pooling
from sgla.model.encoder import EncoderSpec
from sgla.model.spec import ModelSpec

# Bytes that hidden states may take in a step with a token of each request, and vectors in any step:
# several steps fit in the ring of results.
STATE_BYTES, VECTOR_BYTES = 3 << 18, 1 << 20


def number_of(name: str) -> int:
    """That of a layer, of the name of a part of it."""
    return int(name.partition(".layers.")[2].partition(".")[0])


def experts_of(config: Config, spec: ModelSpec | EncoderSpec) -> list[int]:
    """``Facts.experts``"""
    if not (config.enable_return_routed_experts and isinstance(spec, ModelSpec) and spec.moe):
        return []
    return [spec.layers, spec.moe.routing.top_k]


def most_rows(config: Config, spec: ModelSpec | EncoderSpec, pooling: Pooling | None, rows: int) -> int:
    """Rows that may be resident: ``rows`` if nobody says otherwise, and as many as results have room for.
    ``spec``: of the model."""
    rows = config.max_running_requests or rows
    if pooling is not None:
        return min(rows, max(1, VECTOR_BYTES // (4 * pooling.size)))
    widest = prod(experts_of(config, spec) or [0])
    if config.enable_return_hidden_states:
        widest = max(widest, spec.hidden)
    return min(rows, max(1, STATE_BYTES // (4 * widest))) if widest else rows


def drafts_of(config: Config) -> int:
    """Most tokens that a row may guess in a step that follow each other."""
    return (config.speculative_num_draft_tokens or 0) if config.speculative_algorithm else 0


def guesses_of(config: Config) -> int:
    """Most that a row may guess, second guesses of these places among them."""
    return min(drafts_of(config) * config.speculative_eagle_topk, VERIFIED - 1)


def answer_facts(
    config: Config,
    spec: ModelSpec | EncoderSpec,
    pooling: Pooling | None,
    processors: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """The fields of ``Facts`` that say what steps answer with. ``processors``: as in
    ``Facts``."""
    if pooling is not None:
        return {"pooling": pooling}
    if isinstance(spec, ModelSpec) and spec.canvas:
        return {"canvas": spec.canvas}
    return {
        "grammars": True,
        "scores": True,
        "processors": processors or {},
        "hidden": spec.hidden if config.enable_return_hidden_states else 0,
        "experts": experts_of(config, spec),
        "drafts": guesses_of(config),
        "leaves": guesses_of(config) - drafts_of(config),
    }
