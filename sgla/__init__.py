"""sgla: an inference server for open-weight language models. Importing it loads neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from sgla.engine import Engine
    from sgla.messages import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sgla.engine import Engine

        return Engine
    if name == "SamplingParams":
        from sgla.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'sgla' has no attribute {name!r}")
