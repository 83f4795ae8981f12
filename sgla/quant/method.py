"""Formats of linear weights in checkpoints. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sgla.quant.formats import FORMATS

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

FLOATS = ("F16", "BF16", "F32", "F64")  # types, as safetensors calls them
_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


class Held(NamedTuple):
    """A tensor that a checkpoint has. ``shape`` None: ``take`` looks at it. ``types``: as safetensors calls
    them, any if there are none."""

    shape: tuple[int, ...] | None = None
    types: tuple[str, ...] = ()
    optional: bool = False


class Method:
    """A format in which a checkpoint has its linear layers; this one: a floating-point matrix each.

    Made of the file's ``quantization_config``; raises ConfigError for what it cannot honour. ``storage``: in
    what ``devices`` keep such layers; all others keep floating-point numbers. ``notes``: what to say of a
    file that is served.
    """

    name: ClassVar[str] = "none"
    storage: str = ""
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        lists = [config.get(key) for key in _LISTS]
        self.ignored = [str(name) for names in lists if isinstance(names, list) for name in names]

    def covers(self, module: str) -> bool:
        """Whether the file has this layer so: no ignore list names it, or what it is a part of."""
        return not any(_names(entry, module) for entry in self.ignored)

    def bytes(self, plain: str) -> float:
        """Of one weight, as ``storage`` keeps it; ``plain`` is that of the others."""
        return FORMATS[self.storage or plain].bytes

    def vocab_bytes(self, plain: str) -> float:
        """The same of embedding and output layer."""
        return FORMATS[plain].bytes

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        """What the checkpoint has of the linear layer ``module``, by name."""
        return {f"{module}.weight": Held((n, k))}

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        """Its matrix ``[n, k]``, of those of ``tensors`` that are there. Raises WeightError."""
        return stored[f"{module}.weight"]

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        """Whether the file may have this tensor and nobody needs it."""
        return False


PLAIN = Method({})


def _names(entry: str, module: str) -> bool:
    """Whether an entry of an ignore list means ``module``: as transformers, compressed-tensors (``re:``) and
    ModelOpt (``*``) write them, a name, the end of one, or what it is a part of."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry:
        return fnmatchcase(module, entry)
    return f".{entry}." in f".{module}."
