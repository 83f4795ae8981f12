"""Formats of linear weights in checkpoints. Loads no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from fnmatch import translate
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sgla.errors import ConfigError
from sgla.quant.formats import FORMATS

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

FLOATS = ("F16", "BF16", "F32", "F64")  # types, as safetensors calls them
LISTS = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "llm_int8_skip_modules",
)  # of layers left as they are
EXPRESSIONS, LENGTH = 4096, 1024  # in such a list of a file, and characters of each
_LONGER = re.compile(r"language_model\\?\.(?=[\w(\[\\])")  # of a name in an expression
SECONDS = 5.0  # that all layers' names may be compared with them


class Held(NamedTuple):
    """A tensor that a checkpoint has. ``shape`` None: ``take`` looks at it. ``types``: as safetensors calls
    them, any if there are none."""

    shape: tuple[int, ...] | None = None
    types: tuple[str, ...] = ()
    optional: bool = False


class Method:
    """A format in which a checkpoint has its linear layers; this one: a floating-point matrix each.

    Made of the file's ``quantization_config``; raises ConfigError for what it cannot honour. ``storage``: in
    what ``devices`` keep such layers (``stored``, ``kept``); all others keep floating-point numbers.
    ``notes``: what to say of a file that is served.
    """

    name: str = "none"
    storage: str = ""
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    experts_alone: ClassVar[bool] = False  # it has no linear layers, but stacks of experts (``stack``)
    scatters: bool = False  # there are ``scattered`` layers

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ignored = Ignored([name for key in LISTS for name in _names(config, key)])

    def covers(self, module: str) -> bool:
        """Whether the file has this layer so: no ignore list names it, or what it is a part of. Raises
        ConfigError where comparing takes too long."""
        return module not in self.ignored

    def stored(self, device: str = "cpu") -> str:
        """The storage on a kind of device; empty: floating-point numbers."""
        return self.storage

    def kept(self, module: str, device: str = "cpu") -> str:
        """The same of this layer."""
        return self.storage

    def expands(self, device: str) -> bool:
        """Whether such a device makes floating-point numbers of quantized layers at load."""
        return device not in self.devices or not self.stored(device)

    def scattered(self, module: str) -> bool:
        """Whether the input channels with constants in common do not lie together: then they are sorted for
        a layer that gathers what it multiplies (``layers/gather.py``)."""
        return False

    def bytes(self, plain: str, device: str = "cpu") -> float:
        """Of one weight, as a device stores it; ``plain`` is that of the others."""
        return FORMATS[self.stored(device) or plain].bytes

    def vocab_bytes(self, plain: str, device: str = "cpu") -> float:
        """The same of embedding and output layer."""
        return FORMATS[plain].bytes

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        """What the checkpoint has of the linear layer ``module``, by name."""
        return {f"{module}.weight": Held((n, k))}

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        """Its matrix ``[n, k]``, of those of ``tensors`` that are there. Raises WeightError."""
        return stored[f"{module}.weight"]

    def stacked(self, name: str) -> dict[str, str]:
        """Of a stack of matrices of experts, what the checkpoint has, by the names that it has of one: as
        ``weight``; empty: it has none."""
        return {}

    def stack(self, name: str, shape: tuple[int, ...]) -> dict[str, Held]:
        """What the checkpoint has of the stack of experts ``name``, by name; empty: it has it as it is."""
        return {}

    def take_stack(
        self, name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
    ) -> SourceTensor:
        """Its numbers, of those of ``stack`` that are there."""
        return stored[name]

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        """Whether the file may have this tensor and nobody needs it."""
        return False


class Ignored:
    """The layers that ignore lists mean: as transformers, compressed-tensors (``re:``) and ModelOpt (``*``)
    write them, a name, the end of one, or what it is a part of. Raises ConfigError for an expression that is
    wrong, and for too many of them."""

    def __init__(self, entries: Iterable[str]) -> None:
        names, expressions = set(), []
        for entry in entries:
            if entry.startswith("re:"):
                expressions.append(entry[3:])
            elif "*" in entry:
                expressions.append(translate(entry))
            else:
                names |= {entry, of_text(entry)}
        self._names = names
        self._expressions = Expressions(expressions)

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        spans = (".".join(parts[i:j]) for i, j in combinations(range(len(parts) + 1), 2))
        return not self._names.isdisjoint(spans) or self._expressions.first(module) is not None


def of_text(name: str) -> str:
    """A layer's name in a file without towers, from that in one with them."""
    return name.replace("language_model.", "", 1)


class Expressions:
    """Regular expressions of a file, which match names of layers from their beginning on; in those of files
    with towers names may be longer (``of_text``). Raises ConfigError for one that is wrong, for too many, and
    where comparing takes too long."""

    def __init__(self, texts: list[str]) -> None:
        self._compiled = _compiled(texts) if texts else []
        self._left = SECONDS

    def first(self, module: str) -> int | None:
        """The number of the first one that matches."""
        began = time.monotonic()
        try:
            limit = max(self._left, 1e-3)
            found = (i for i, each in enumerate(self._compiled) if each.match(module, timeout=limit))
            return next(found, None)
        except TimeoutError as error:
            raise ConfigError(
                "config.json: quantization_config: comparing layers with its expressions takes more than "
                f"{SECONDS:g} s; write simpler ones, or the names of the layers",
                param="model",
            ) from error
        finally:
            self._left -= time.monotonic() - began


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    """An ignore list. Raises ConfigError."""
    found = config.get(key) or []
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return found
    raise ConfigError(
        f"config.json: quantization_config: {key} must be a list of names of layers", param="model"
    )


def _compiled(expressions: list[str]) -> list[Any]:
    """In a library whose matching can be given a time, as Python's own cannot. Raises ConfigError."""
    import regex

    if len(expressions) > EXPRESSIONS or max(map(len, expressions)) > LENGTH:
        raise ConfigError(
            f"config.json: quantization_config: its lists of layers may have {EXPRESSIONS} expressions of "
            f"{LENGTH} characters",
            param="model",
        )
    found = []
    for text in expressions:
        try:
            found.append(regex.compile(_LONGER.sub(r"(?:\g<0>)?", text)))
        except (regex.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"config.json: quantization_config: {text[:60]!r} in a list of layers is no regular "
                f"expression: {str(error)[:100]}",
                param="model",
            ) from error
    return found


PLAIN = Method({})
