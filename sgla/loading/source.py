"""A model on this disk, of any family, as ``hub/source.py`` describes it. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError, UnsupportedValue
from sgla.hub import source
from sgla.hub.fetch import REMOTE
from sgla.model.drafting import is_medusa
from sgla.model.generic_spec import FACTS, settled
from sgla.model.read import read_spec
from sgla.model.registry import EAGLE, layouts

PROJECTION = b"fc.weight"
BEGINNING = 1 << 16  # bytes of a file, which have the names of a head's tensors


def open_source(
    path: str | Path,
    load_format: str = "auto",
    impl: str = "auto",
    trusted: bool = False,
    overrides: Mapping[str, Any] | None = None,
    ranks: int = 1,
) -> source.ModelSource:
    """See ``hub/source.py``; GGUF files may have the architectures of all families. ``impl``, ``trusted``,
    ``ranks``: see ``generic_spec.settled``; ``overrides``: keys of config.json that are others than in the
    file. Raises ConfigError."""
    found = as_eagle(source.open_source(path, load_format, layouts()))
    if overrides:
        found = replace(found, config=overridden(found.config, overrides))
    if impl == "native" and is_medusa(found.config):  # no model, so without an architecture
        return found
    return settled(found, impl, trusted, ranks, lacking(found.config))


def as_eagle(found: source.ModelSource) -> source.ModelSource:
    """A head of EAGLE or EAGLE-2 by a name of its own. Its authors call it a Llama of one layer; it has a
    projection, which its file names at the beginning."""
    match found.config, found.files:
        case {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM" | "Qwen2ForCausalLM"]}, (path,):
            with path.open("rb") as file:
                if PROJECTION in file.read(BEGINNING):
                    return replace(found, config=found.config | {"architectures": [EAGLE[0]]})
    return found


def lacking(config: Mapping[str, Any]) -> UnsupportedValue | None:
    """Why the code here does not compute what ``config`` describes, though it knows the architecture. What
    else is wrong shows where the configuration is read."""
    try:
        read_spec({key: value for key, value in config.items() if key != FACTS})
    except UnsupportedValue as error:
        return error
    except ConfigError:
        return None
    return None


def configured_source(path: str | Path, config: Config) -> source.ModelSource:
    """``open_source`` as the settings say. ``path``: of the copy, if the model is remote."""
    load_format = "auto" if config.load_format in REMOTE else config.load_format
    how = load_format, config.model_impl, config.trust_remote_code, config.hf_overrides, config.tp
    return open_source(path, *how)


def drafting(config: Config) -> Config:
    """``config`` as it would be if the model that guesses were served."""
    assert config.speculative_model is not None
    return msgspec.structs.replace(
        config, model=config.speculative_model, hf_overrides={}, revision=None, model_impl="native"
    )


def overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with other values. Raises ConfigError for a key that only ``text_config`` has, where the
    reader would not look at the other one."""
    text = config.get("text_config")
    if isinstance(text, dict):
        for key in overrides:
            if key in text and key not in config:
                raise ConfigError(
                    f"--hf-overrides: {key} stands in text_config here; give "
                    f'\'{{"text_config": {{"{key}": ...}}}}\'',
                    param="hf_overrides",
                )
    return source.merged(config, overrides)
