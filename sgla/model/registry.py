"""Which class runs which architecture."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from sgla.errors import ConfigError

if TYPE_CHECKING:
    from sgla.model.base import CausalLM

# Name in config.json -> module and class; the modules need torch, so they are imported when asked for.
_CLASSES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "Qwen2ForCausalLM": ("qwen", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen", "Qwen3"),
    "Qwen3MoeForCausalLM": ("qwen_moe", "Qwen3MoE"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3"),
}


def supported() -> list[str]:
    """The architecture names that ``config.json`` may have."""
    return sorted(_CLASSES)


def check_architecture(name: str) -> None:
    """Raises ConfigError for an architecture that is not supported. Loads no torch."""
    if name in _CLASSES:
        return
    near = difflib.get_close_matches(name, _CLASSES, n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"architecture {name!r} is not supported.{hint} Supported: {', '.join(supported())}", param="model"
    )


def model_class(name: str) -> type[CausalLM]:
    """The class of architecture ``name``. Raises ConfigError if there is none."""
    check_architecture(name)
    module, attribute = _CLASSES[name]
    found: type[CausalLM] = getattr(import_module(f"sgla.model.{module}"), attribute)
    return found
