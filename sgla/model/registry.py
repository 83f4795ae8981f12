"""Which architectures there are, and which class runs each, as the table of families says. Loads no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_layout import Layout
from sgla.model.families import FAMILIES
from sgla.model.families.dual import DUALS
from sgla.model.families.heard import HEARD
from sgla.model.families.pictured import PICTURED
from sgla.model.family import Family
from sgla.model.gguf_layouts import layout_of
from sgla.packages import brought

# Heads that guess, and are no models.
EAGLE3 = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3ForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),  # of the library speculators
)
EAGLE = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
DFLASH = "DFlashDraftModel"
HEADS = (*EAGLE3, *EAGLE, DFLASH)
_ENCODER_SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification")
_DECODER_SUFFIXES = ("Model", "ForCausalLM", "ForSequenceClassification")
# Names in config.json:
# of what makes text, of families of encoders, and of decoders that have other heads too.
_GENERATING: dict[str, Family] = {}
_ENCODERS = tuple(name for name, family in FAMILIES.items() if not family.model)
_POOLED_DECODERS = tuple(name for name, family in FAMILIES.items() if family.pooled)


def register(architecture: str, family: Family) -> None:
    """Add a family that makes text. Its ``model`` may be a class of any module."""
    for name in (architecture, *family.also):
        _GENERATING[name] = family


for _name, _family in (FAMILIES | PICTURED | HEARD).items():
    if _family.model:
        register(_name, _family)


def supported() -> list[str]:
    """The architecture names that ``config.json`` may have."""
    encoders = [family + suffix for family in _ENCODERS for suffix in _ENCODER_SUFFIXES]
    decoders = [family + suffix for family in _pooled() for suffix in _DECODER_SUFFIXES]
    return sorted({*_GENERATING, *encoders, *decoders, *DUALS})


def _pooled() -> list[str]:
    return [name.removesuffix("ForCausalLM") for name in _POOLED_DECODERS]


def _listed() -> str:
    """The names that are supported, for an error."""
    causal, known = "ForCausalLM", [name for name in supported() if not is_encoder(name)]
    heads = [name.removesuffix(causal) for name in known if name.endswith(causal)]
    others = [name for name in known if name in _GENERATING and not name.endswith(causal)]
    return "; ".join(
        [
            f"{', '.join(heads)}, each with {causal}",
            ", ".join([*others, *DUALS]),
            f"{', '.join(_pooled())}, each with {', '.join(_DECODER_SUFFIXES)}",
            f"{', '.join(_ENCODERS)}, each with {', '.join(_ENCODER_SUFFIXES)}",
        ]
    )


def layouts() -> dict[str, tuple[Layout, ...]]:
    """What the GGUF files of each architecture hold, by the architecture's name in the file."""
    found: dict[str, tuple[Layout, ...]] = {}
    encoders = {name: FAMILIES[name] for name in _ENCODERS}
    for architecture, family in (_GENERATING | encoders).items():
        if architecture in family.also:
            continue
        for gguf in family.gguf:
            found[gguf.name] = (*found.get(gguf.name, ()), layout_of(architecture, family, gguf))
    return found


def is_dual(config: Mapping[str, Any]) -> bool:
    """Whether it is of a pair of encoders, of texts and of pictures."""
    return architecture_of(config) in DUALS


def is_encoder(name: str) -> bool:
    """Whether the architecture is a bidirectional encoder, which makes no text."""
    return name in DUALS or any(
        name == family + suffix for family in _ENCODERS for suffix in _ENCODER_SUFFIXES
    )


def body_of(name: str) -> str | None:
    """What makes the hidden states of an architecture that pools them: an encoder's family, or the decoder's
    own architecture; None if there is nothing."""
    if name in DUALS:
        return name
    if is_encoder(name):
        return next(family for family in _ENCODERS if name.removeprefix(family) in _ENCODER_SUFFIXES)
    if name in PICTURED and PICTURED[name].pooled:
        return name
    for suffix in _DECODER_SUFFIXES:
        decoder = name.removesuffix(suffix) + "ForCausalLM"
        if name.endswith(suffix) and decoder in _POOLED_DECODERS:
            return decoder
    return None


def family_of(architecture: str) -> Family:
    """The family of a supported architecture, of its language model where there are several models."""
    return _GENERATING.get(architecture) or FAMILIES[body_of(architecture) or ""]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name of the model's class in a config.json. Raises ConfigError if there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            "config.json has no 'architectures' list, so the model's class is unknown", param="model"
        )
    return names[0]


def is_known(name: str) -> bool:
    """Whether there is a family of this name; a package may bring one that makes text, as an entry point of
    the group ``sgla.models`` whose name is the architecture and whose object is its Family. Raises
    ConfigError for a broken one."""
    if name in supported():
        return True
    asked = f"architecture {name[:99]!r}"
    family = brought("sgla.models", name, Family, asked, "mend or remove it", "model")
    if family is not None:
        register(name, family)
    return family is not None


def check_architecture(name: str) -> None:
    """Raises ConfigError for an architecture that is not supported. Loads no torch."""
    if is_known(name):
        return
    if name in HEADS:
        raise ConfigError(
            f"{name} is a head that guesses for another model; give it as --speculative-model", param="model"
        )
    # Another number is another architecture.
    alike = [known for known in supported() if re.findall(r"\d", known) == re.findall(r"\d", name)]
    folded = {known.lower(): known for known in alike}
    near = [folded[found] for found in difflib.get_close_matches(name[:99].lower(), folded, 1, 0.93)]
    others = f"{f' Did you mean {near[0]}?' if near else ''} Supported: {_listed()}"
    if name in ("NewModel", "NewForMaskedLM", "NewForSequenceClassification"):  # GTE's own code
        others = f" A conversion for transformers is, {name.replace('New', 'Gte', 1)}."
    raise ConfigError(f"architecture {name[:99]!r} is not supported.{others}", param="model")


def class_path(name: str) -> str:
    """The import path (``module:name``) of the class of an architecture that generates. Raises ConfigError if
    there is none."""
    check_architecture(name)
    if name not in _GENERATING:
        raise ConfigError(f"{name} makes no text", param="model")
    return _GENERATING[name].model
