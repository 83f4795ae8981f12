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


def expanded(path: str | Path) -> Path:
    """With ``~`` and ``~user`` as shells have them. Raises ConfigError."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no such user, or none with a home folder") from error


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
        return temporary()


def made_anew(*parts: str) -> Path:
    """The place in the cache of a file that can be made again: where the cache cannot be written to, as in a
    container whose files are read alone, that in the temporary folder. Raises ConfigError and OSError."""
    base = cache_home()
    path = base.joinpath(*parts)
    # ``Path.exists`` raises where a folder above may not be read, as another user's home that HOME names.
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    return path if there == path or os.access(there, os.W_OK | os.X_OK) else temporary().joinpath(*parts)


def temporary() -> Path:
    """The user's own. Raises ConfigError and OSError."""
    folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # whose files would be served, and run
        raise ConfigError(f"{folder} belongs to another user; set HOME or XDG_CACHE_HOME")
    return folder
