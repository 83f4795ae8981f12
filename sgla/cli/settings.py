"""``Config`` from a YAML file and flags, flags first; every mistake is a ConfigError that names the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgla.config import ALIASES, Config
from sgla.errors import ConfigError

LISTS = {field.name for field in msgspec.structs.fields(Config) if field.default_factory is list}
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_bytes(text: str) -> int:
    """``"512M"``, ``"2GiB"``, ``"1.5g"``, ``"4096"`` -> bytes; a unit is a power of 1024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ValueError(f"'{text}' is no size; write 512M, 2G or a number of bytes")
    return int(float(match[1]) * (1 << UNITS[match[2]]))


def nearest(name: str) -> str:
    """``"; did you mean 'x'?"`` for the setting closest to ``name``, or nothing."""
    known = {field: field for field in Config.__struct_fields__}
    known |= {alias.replace("-", "_"): field for alias, field in ALIASES.items()}
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean '{known[close[0]]}'?" if close else ""


def read_file(path: str) -> dict[str, Any]:
    """Keys and values of a ``--config`` file, sizes parsed, keys known."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected lines of 'key: value'")
    for name, value in values.items():
        if name not in Config.__struct_fields__:
            raise ConfigError(f"--config {path}: unknown key '{name}'{nearest(str(name))}", param=str(name))
        if isinstance(value, str) and name in LISTS:
            values[name] = [value]
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                values[name] = parse_bytes(value)
            except ValueError as error:
                raise ConfigError(f"--config {path}: {name}: {error}", param=name) from error
    return values


def load_config(flags: Mapping[str, Any], path: str | None = None) -> Config:
    """The settings of the file ``path``, overridden by ``flags`` (field names to values)."""
    values = (read_file(path) if path else {}) | dict(flags)
    try:
        return msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        where = where.rstrip("`")
        source = f"--config {path}: " if path and where.split("[")[0] not in flags else ""
        raise ConfigError(f"{source}{where or 'settings'}: {message[:1].lower()}{message[1:]}") from error
