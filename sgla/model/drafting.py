"""What guesses the next tokens of a model: which algorithm, and what it adds to weights and cache. Loads no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.generic_spec import GenericSpec
from sgla.model.read import read_spec
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import LayerState, state_of

NAMES = {"NGRAM": "ngram", "STANDALONE": "draft_model"}  # as SGLang has them
FLAG = "--speculative-algorithm"


def by_our_names(config: Config) -> Config:
    """``config`` with the algorithm's name here, which follows from a model that guesses."""
    name = config.speculative_algorithm
    if name is None and config.speculative_model is not None:
        name = "draft_model"
    return replace(config, speculative_algorithm=NAMES.get(name or "", name))


def check_settings(config: Config, device: str) -> None:
    """Raise ConfigError for settings of guesses that are nothing without others, or cannot be honoured on
    this ``device``."""
    name, plain = config.speculative_algorithm, Config()
    if name is None:
        if config.speculative_num_draft_tokens:
            raise _refused("speculative_num_draft_tokens", f"needs {FLAG}")
        return
    if name == "draft_model" and config.speculative_model is None:
        raise ConfigError(
            f"{FLAG} {name} needs --speculative-model, the one that guesses", param="speculative_model"
        )
    for field in ("speculative_model", "speculative_quantization"):
        if name != "draft_model" and getattr(config, field) != getattr(plain, field):
            raise _refused(field, f"is for {FLAG} draft_model; leave one of them out")
    obstacle = None
    if config.executor == "fake":
        return
    if config.tp > 1:
        obstacle = "by several ranks yet"
    elif name != "ngram" and device != "cpu":
        obstacle = f"with --device {device} yet; ngram can"
    if obstacle:
        raise ConfigError(
            f"{FLAG} {name} cannot be honoured {obstacle}; leave it out", param="speculative_algorithm"
        )


def _refused(field: str, why: str) -> ConfigError:
    return ConfigError(f"--{field.replace('_', '-')} {why}", param=field)


def read_draft(draft: Mapping[str, Any] | None, target: ModelSpec) -> ModelSpec | None:
    """The shape of the model that guesses for ``target``, from its config.json. Raises ConfigError for one
    that cannot."""
    if draft is None:
        return None
    spec = read_spec(draft)
    if not isinstance(spec, ModelSpec) or isinstance(spec, GenericSpec):
        raise _unfit(f"{draft['architectures'][0]} makes no text, or runs through transformers' module")
    if spec.recurrent:
        raise _unfit("its layers keep a state of all tokens, which cannot go back behind a wrong guess")
    if spec.vocab != target.vocab:
        raise _unfit(f"it has {spec.vocab} tokens and the model {target.vocab}: another vocabulary")
    return spec


def check_context(draft: ModelSpec, context_len: int) -> None:
    """Raise ConfigError where the model that guesses has fewer positions than a text may have tokens."""
    if draft.context_len < context_len:
        raise ConfigError(
            f"--speculative-model has a context of {draft.context_len} tokens; give --context-length "
            f"{draft.context_len} or less, or another one that guesses",
            param="context_length",
        )


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"--speculative-model cannot guess for this model: {why}", param="speculative_model")


def draft_bytes(config: Config, draft: ModelSpec | None, dtype: str) -> int:
    """Of the weights of the model that guesses."""
    return 0 if draft is None else weight_bytes(draft, dtype, config.speculative_quantization, 1)


def draft_state(draft: ModelSpec | None) -> list[LayerState]:
    """What its layers keep."""
    return [] if draft is None else state_of(draft, 1)
