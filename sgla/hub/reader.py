"""Typed values of a model's JSON files. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import ConfigError

_SHOWN = 60  # characters of a value in an error


class Reader:
    """Typed values of a configuration over the defaults of its family.
    Every error names the key and what it may be."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        self.architecture, self.values = architecture, values

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, most: int, least: int = 1) -> int:
        value = self._value(key)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise self.error(key, f"a whole number from {least} to {most}")

    def number(self, key: str, most: float = 1e12) -> float:
        """Above 0."""
        value = self._value(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
            return float(value)
        raise self.error(key, f"a number above 0 and at most {most:g}")

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error(key, "true or false")

    def table(self, key: str, *, nulls: bool = False) -> dict[str, Any]:
        """An object, without its nulls unless they say something; empty if there is none."""
        value = self.values.get(key)
        if value is None or isinstance(value, dict):
            return {name: entry for name, entry in (value or {}).items() if nulls or entry is not None}
        raise self.error(key, "an object")

    def integers(self, key: str, most: int) -> list[int]:
        """A list of whole numbers from 0 on; empty if there is none."""
        value = self.values.get(key)
        if value is None:
            return []
        if isinstance(value, list) and len(value) <= most and all(type(x) is int and x >= 0 for x in value):
            return value
        raise self.error(key, f"a list of at most {most} whole numbers")

    def agrees(self, key: str, found: object, others: str) -> None:
        """Raises ConfigError for a key that says otherwise than ``others``, which transformers reads."""
        if self.given(key) and self.values[key] != found:
            raise self.error(key, f"left out, or what {others} says, which transformers reads")

    def error(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"config.json of {self.architecture}: {key} is "
            f"{shown(self.values.get(key))}; it must be {wanted}",
            param="model",
        )

    def _value(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise ConfigError(f"config.json of {self.architecture} lacks {key!r}", param="model")
        return value


def shown(value: Any) -> str:
    """A value for an error."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    except (RecursionError, ValueError):
        return "a value"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
