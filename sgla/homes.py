"""The user's folders, also of a user that the system does not know: an id without a name, and no HOME."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sgla.errors import ConfigError


def home() -> Path:
    """Raises ConfigError where there is none."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(f"user {os.getuid()} has no home folder; set HOME") from error


def below_home(variable: str, *parts: str) -> Path:
    """The folder that an XDG variable names, if that is absolute, else ``parts`` below the home.
    Raises ConfigError."""
    base = os.environ.get(variable)
    return Path(base) if base and os.path.isabs(base) else home().joinpath(*parts)


def cache_home() -> Path:
    """``$XDG_CACHE_HOME``, ``~/.cache``,
    or for a user without a home a temporary folder of that user's own. Raises ConfigError."""
    try:
        return below_home("XDG_CACHE_HOME", ".cache")
    except ConfigError:
        folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # whose files would be served, and run
        raise ConfigError(f"{folder} belongs to another user; set HOME or XDG_CACHE_HOME")
    return folder
