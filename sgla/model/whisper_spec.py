"""What Whisper's files say: the shape of its decoder, and how it is told what to write. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.hub.source import ModelSource
from sgla.layers.spec import AttentionSpec
from sgla.messages import Speech, Transcript
from sgla.model.gpt2_spec import opt
from sgla.model.limits import POSITIONS
from sgla.model.spec import ModelSpec

FILE = "generation_config.json"
HOP = 160  # samples of a frame, where preprocessor_config.json does not say


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``: heads of OPT's kind."""
    return opt(c, layers, positions)


def with_encoder(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``. HF's class reads ``scale_embedding`` and does nothing with it."""
    return replace(spec, heard=c.integer("max_source_positions", POSITIONS))


def read_speech(source: ModelSource, settings: Mapping[str, Any]) -> Speech:
    """``settings``: of its feature extractor. Raises ConfigError for what generation_config.json lacks."""
    given = source.config | source.generation_config
    untimed = _token(given, "no_timestamps_token_id")
    end = given.get("eos_token_id")
    languages, tasks = (_ids(given, key) for key in ("lang_to_id", "task_to_id"))
    transcript = Transcript(
        suppressed=_tokens(given, "suppress_tokens"),
        first_suppressed=_tokens(given, "begin_suppress_tokens"),
        untimed=untimed,
        end=end[0] if isinstance(end, list) and end else _token(given, "eos_token_id"),
        latest=_latest(given),
    )
    return Speech(
        begin=_token(given, "decoder_start_token_id"),
        languages={name.strip("<|>"): token for name, token in languages.items()},
        tasks=tasks,
        previous=given.get("prev_sot_token_id"),
        transcript=transcript,
        frames=2 * Reader("Whisper", given).integer("max_source_positions", POSITIONS),
        hop=settings.get("hop_length", HOP),
        aligned=_aligned(given),
    )


def _aligned(given: Mapping[str, Any]) -> list[list[int]]:
    """Raises ConfigError for heads that there are not."""
    found = given.get("alignment_heads") or []
    most = given.get("decoder_layers", 0), given.get("decoder_attention_heads", 0)
    pairs = isinstance(found, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in found)
    if not pairs or not all(type(n) is int and 0 <= n < end for pair in found for n, end in zip(pair, most)):
        raise ConfigError(f"{FILE}: alignment_heads must be pairs of a layer and a head", param="model")
    return found


def _latest(given: Mapping[str, Any]) -> int:
    found = given.get("max_initial_timestamp_index")
    return -1 if found is None else _token(given, "max_initial_timestamp_index")


def _token(given: Mapping[str, Any], key: str) -> int:
    found = given.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(f"{FILE}: {key} must be a number of at least 0", param="model")
    return found


def _tokens(given: Mapping[str, Any], key: str) -> list[int]:
    found = given.get(key) or []
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise ConfigError(f"{FILE}: {key} must be a list of tokens", param="model")
    return [token for token in found if token >= 0]


def _ids(given: Mapping[str, Any], key: str) -> dict[str, int]:
    found = given.get(key) or {}
    if not isinstance(found, dict) or not all(type(token) is int for token in found.values()):
        raise ConfigError(f"{FILE}: {key} must be an object of tokens", param="model")
    return dict(found)
