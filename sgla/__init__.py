"""sgla: an inference server for open-weight language models.
Importing it loads neither torch nor transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sgla.version import __version__

__all__ = [
    "LLM",
    "BeamSearchParams",
    "Engine",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from sgla.engine import BeamSearchParams, Engine, SamplingParams, StructuredOutputsParams
    from sgla.llm import LLM, LoRARequest

HOMES = {
    "BeamSearchParams": "sgla.engine",
    "Engine": "sgla.engine",
    "LLM": "sgla.llm",
    "LoRARequest": "sgla.llm",
    "SamplingParams": "sgla.engine",
    "StructuredOutputsParams": "sgla.engine",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'sgla' has no attribute {name!r}")
