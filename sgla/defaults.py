"""What a request's sampling fields are if it leaves them out:
one source for the server, ``Engine``, ``sgla chat`` and the page.

In order, later ones win: the card of a packaged model, the model's files (generation_config.json,
``general.sampling`` of a GGUF file) or those that ``--sampling-defaults`` names instead,
``--preferred-sampling-params``. Pure but for reading that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.homes import expanded
from sgla.hub.packaged import MODELS
from sgla.hub.source import ModelSource, read_object
from sgla.messages import MAX_NGRAM, Repetition
from sgla.sched.repetition import check_repetition
from sgla.validation import Range

TOKENS = Range(1, 2**31 - 1)
# The sampling fields that may have a default, by their names in SamplingParams.
SAMPLING: dict[str, Range] = {
    "temperature": Range(0),
    "top_p": Range(0, 1, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 2),  # far smaller ones make logits infinite
    "no_repeat_ngram_size": Range(0, MAX_NGRAM),
    "max_tokens": TOKENS,
}
INTEGERS = {"top_k", "no_repeat_ngram_size", "max_tokens"}
REPETITION = "repetition_detection"  # may have a default, too, which only the user gives
ALIASES = {"max_new_tokens": "max_tokens"}
# What generation_config.json and general.sampling may ask for besides, with the values that ask for nothing.
LEFT_ASIDE: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "forced_eos_token_id": (),
    "force_words_ids": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "dola_layers": (),
    "watermarking_config": ({},),
    "max_time": (),
    "top_h": (),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "sequence": ("",),
}
# Of a conversation: a table may repeat itself a little, a story may not for so long.
TALK_REPETITION = Repetition(min_pattern_size=24, max_pattern_size=256, min_count=4)
TALK_TOKENS = 4096
GIVEN = "--preferred-sampling-params"


class Defaults(msgspec.Struct, frozen=True):
    """``values``: by names of ``SAMPLING``. ``sources``: where each comes from. ``talks``: what the card has
    besides for chats that answer in words. ``notes``: what the files say that is not honoured, and why."""

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    talks: dict[str, Any] = {}
    notes: list[str] = []

    @property
    def given(self) -> dict[str, Any]:
        """Those that the user has chosen."""
        return {name: value for name, value in self.values.items() if self.sources[name] == GIVEN}

    def in_words(self) -> Defaults:
        """Those of a chat that answers in words: no grammar holds, and there are no tools to call."""
        return msgspec.structs.replace(self, values={**self.values, **self.talks})

    def fields(self, usual: int | None = None) -> dict[str, Any]:
        """Of a request that says none; ``usual`` as in ``max_tokens``."""
        return {**self.values, "max_tokens": self.max_tokens(usual)}

    def max_tokens(self, usual: int | None = None) -> int | None:
        """Of a request that leaves it out, where ``usual`` tokens are made then (None: as many as there is
        room for). A number gives way to what the user has chosen, not to the model's files."""
        return self.values.get("max_tokens") if usual is None else self.given.get("max_tokens", usual)

    def talk(self, context_len: int) -> dict[str, Any]:
        """What the page and ``sgla chat`` ask for besides, where nobody says otherwise:
        an end to every answer."""
        ends = {"max_tokens": min(TALK_TOKENS, max(1, context_len // 4)), REPETITION: TALK_REPETITION}
        asked = ends | {name: self.values[name] for name in ends if name in self.values} | self.talks
        return asked | {name: value for name, value in self.given.items() if name in asked}

    def __str__(self) -> str:
        """``temperature 0.2, top_p 0.9 (the model's card)``."""
        if not self.values:
            return "temperature 1, top_p 1 (OpenAI's)"
        more = ", ".join(f"{name} {value:g}" for name, value in self.talks.items())
        return self._by_source() + (f"; chats without tools and formats: {more}" if more else "")

    def _by_source(self) -> str:
        by_source: dict[str, list[str]] = {}
        for name, value in self.values.items():
            shown = "on" if isinstance(value, Repetition) else "off" if value is None else f"{value:g}"
            by_source.setdefault(self.sources[name], []).append(f"{name} {shown}")
        return ", ".join(f"{', '.join(values)} ({source})" for source, values in by_source.items())


def find_defaults(config: Config, source: ModelSource | None) -> Defaults:
    """``source``: the model's files, if they are there. Raises ConfigError for what the user has given;
    nonsense in the model's files is a note."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    talks: Mapping[str, Any] = {}
    notes: list[str] = []
    if config.sampling_defaults in ("model", "auto"):
        packaged = MODELS.get(config.model)
        if packaged is not None:
            layers.append(
                ("chosen for the demo" if config.model == "demo" else "the model's card", packaged.sampling)
            )
            talks = packaged.talk
        if source is not None:
            file = "general.sampling" if source.gguf_path else "generation_config.json"
            layers.append((file, read_file(source.generation_config, file, notes)))
    elif config.sampling_defaults not in ("openai", "vllm"):
        path = expanded(config.sampling_defaults)
        path = path / "generation_config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                "--sampling-defaults takes model, openai, or a folder or file of a "
                f"generation_config.json; there is no {path}",
                param="sampling_defaults",
            )
        layers.append((str(path), read_file(read_object(path), str(path), notes)))
    layers.append((GIVEN, read_given(config)))
    values = {name: value for _, layer in layers for name, value in layer.items()}
    sources = {name: where for where, layer in layers for name in layer}
    later = {name for _, layer in layers[1:] for name in layer}
    return Defaults(
        values, sources, {name: value for name, value in talks.items() if name not in later}, notes
    )


def read_file(file: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """The defaults that a model's file states.
    What it says beside, and what means nothing, goes to ``notes``."""
    values = {}
    for name, value in file.items():
        field = ALIASES.get(name, name)
        if value is None:
            continue
        if field in SAMPLING:
            try:
                values[field] = number(field, value)
            except ValueError as error:
                notes.append(f"{where}: {name} {error}; it is left aside")
        elif name in LEFT_ASIDE and value not in LEFT_ASIDE[name]:
            notes.append(f"{where}: {name} {str(value)[:60]} is not supported and left aside")
    return values


def read_given(config: Config) -> dict[str, Any]:
    """Raises ConfigError for what cannot be a default."""
    values: dict[str, Any] = {}
    for name, value in config.preferred_sampling_params.items():
        field = ALIASES.get(name, name)
        try:
            if field == REPETITION:
                values[field] = check_repetition(msgspec.convert(value, Repetition | None))
            elif field in SAMPLING:
                values[field] = number(field, value)
            else:
                raise ValueError(f"is none of {', '.join((*SAMPLING, REPETITION))}")
        except (ValueError, SglaError) as error:
            message = f"{GIVEN}: {name[:60]} {error}"
            raise ConfigError(message, param="preferred_sampling_params") from None
    return values


def number(field: str, value: Any) -> float:
    """``value``, if the field may have it. Raises ValueError."""
    fits = type(value) in (int, float) and abs(value) < 1e30
    if not fits or value not in SAMPLING[field] or (field in INTEGERS and value != int(value)):
        kind = "an integer" if field in INTEGERS else "a number"
        raise ValueError(f"must be {kind} {SAMPLING[field]}, not {str(value)[:60]!r}")
    return int(value) if field in INTEGERS else value
