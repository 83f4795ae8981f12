"""Logit processors of the operator's own:
classes that ``--logits-processors`` names, which requests ask for by name.

A class is called with the arguments that the request gives, then for each token of the output with ``(output,
logits)``: int32[*], the tokens so far, which it must not change, and float32[V], the next token's logits,
which it changes in place. An object serves one request, and may be made again while the request goes on, so
it keeps nothing that it cannot find out from ``output``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError
from sgla.messages import Processor
from sgla.sampling.draw import Floats

Factory = Callable[..., Callable[[NDArray[np.int32], Floats], object]]


class ProcessorFailed(Exception):
    """What a processor raised, or made of the logits."""


def load(paths: Iterable[str]) -> dict[str, Factory]:
    """The classes by name. Raises ConfigError for a path that is none."""
    found: dict[str, Factory] = {}
    for path in paths:
        module, _, name = path.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--logits-processors {path}: give MODULE:CLASS with a module on PYTHONPATH: {error}",
                param="logits_processors",
            ) from error
        if not callable(kind) or name in found:
            why = "is no class" if not callable(kind) else "has the name of another one"
            raise ConfigError(f"--logits-processors {path} {why}", param="logits_processors")
        found[name] = kind
    return found


def declared(kinds: Mapping[str, Factory]) -> dict[str, list[str]]:
    """The names of the arguments that each takes, as far as it tells."""
    return {name: list(_parameters(kind)) for name, kind in kinds.items()}


def _parameters(kind: Factory) -> Iterable[str]:
    try:
        found = inspect.signature(kind).parameters.values()
    except ValueError:
        return []
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


class Custom:
    """The rule of a request with such a processor.
    ``tokens`` int32[context] is its row of the token table."""

    def __init__(self, kind: Factory, asked: Processor, tokens: NDArray[np.int32], prompt_len: int) -> None:
        self._kind = kind
        self._asked = asked
        self._tokens = tokens.view()
        self._tokens.flags.writeable = False
        self._prompt_len = prompt_len
        self._process: Callable[[NDArray[np.int32], Floats], Any] | None = None

    def apply(self, logits: Floats, position: int) -> None:
        """Raises ProcessorFailed."""
        name = self._asked.name
        try:
            if self._process is None:
                self._process = self._kind(**self._asked.arguments)
            self._process(self._tokens[self._prompt_len : position], logits)
        except (Exception, SystemExit) as error:
            raise ProcessorFailed(f"logit processor {name}: {type(error).__name__}: {error}") from error
        if np.isnan(logits).any() or logits.max() == np.inf:
            raise ProcessorFailed(f"logit processor {name} has made logits that are no numbers")
