"""Which GGUF file of a repository a name such as ``Q4_K_M`` means, as llama.cpp and Ollama choose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from sgla.errors import ConfigError

PREFERRED = "Q4_K_M"  # where a repository has several and none is named
HOSTS = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
QUANTIZATION = re.compile(
    r"(?:^|[._-])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|F32|FP16|(?:MX|NV)FP4\w*))$", re.IGNORECASE
)
PART = re.compile(r"-(\d{5})-of-(\d{5})$")
MOST_PARTS = 1024


def split_name(model: str) -> tuple[str, str | None]:
    """``hf.co/a/b:Q8_0`` -> (``a/b``, ``Q8_0``)."""
    for host in HOSTS:
        model = model.removeprefix(host)
    repo, _, wanted = model.partition(":")
    return repo, wanted or None


def quantization(path: str) -> str:
    """Of a GGUF file by its name; the name without its end if it tells none."""
    stem = PART.sub("", PurePosixPath(path).name.removesuffix(".gguf"))
    found = QUANTIZATION.search(stem)
    return found[1].upper() if found else stem


def pick_file(repo: str, files: Iterable[str], wanted: str | None) -> str:
    """The path of the file that ``wanted`` names, a quantization or a file: the first part of one that is
    split. Raises ConfigError that lists what there is."""
    # mmproj: of images.
    paths = sorted(path for path in files if path.endswith(".gguf") and "mmproj" not in path.lower())
    if wanted in paths:
        return _whole(repo, [wanted], paths)
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(quantization(path), []).append(path)
    if wanted is None and len(by_name) > 1 and PREFERRED not in by_name:
        raise ConfigError(
            f"{repo} has several GGUF files: name one, as {repo}:{_listed(by_name)}", param="model"
        )
    name = wanted.upper() if wanted else next(iter(by_name), "") if len(by_name) == 1 else PREFERRED
    if name not in by_name:
        there = f"it has {_listed(by_name)}" if by_name else "it has none"
        raise ConfigError(f"{repo} has no GGUF file {name}; {there}".replace("  ", " "), param="model")
    return _whole(repo, by_name[name], paths)


def _whole(repo: str, found: list[str], paths: list[str]) -> str:
    """The one file, or the first part of the one that is split."""
    names = part_names(found[0])
    if missing := [name for name in names if name not in paths]:
        raise ConfigError(f"{repo} lacks {', '.join(missing[:8])}", param="model")
    if set(found) <= set(names):
        return names[0]
    if len(found) > 1:
        raise ConfigError(
            f"{repo} has several such files: name one, as {repo}:{' or '.join(found[:8])}", param="model"
        )
    return found[0]


def part_names(name: str) -> list[str]:
    """The names of all parts of a file, of which ``name`` is one; or itself. Raises ConfigError."""
    stem = name.removesuffix(".gguf")
    part = PART.search(stem)
    if part is None:
        return [name]
    count = int(part[2])
    if not 1 <= int(part[1]) <= count <= MOST_PARTS:
        raise ConfigError(f"{name} is no part of a file that has at most {MOST_PARTS}", param="model")
    return [f"{stem[: part.start()]}-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]


def parts_of(path: Path) -> list[Path]:
    """All parts of the GGUF file that begins with ``path``. Raises ConfigError if some are not there."""
    paths = [path.with_name(name) for name in part_names(path.name)]
    if paths[0] != path:
        raise ConfigError(f"{path} is a later part of a file; name the first one, {paths[0].name}")
    if missing := [one.name for one in paths if not one.is_file()]:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ConfigError(f"{path} lacks its parts {', '.join(missing[:8])}{more}", param="model")
    return paths


def beginnings(folder: Path) -> list[Path]:
    """The GGUF files in a folder, of one that is split the first part."""
    return [path for path in sorted(folder.glob("*.gguf")) if part_names(path.name)[0] == path.name]


def _listed(by_name: dict[str, list[str]]) -> str:
    names = list(by_name)
    return ", ".join(names[:24]) + (f" and {len(names) - 24} more" if len(names) > 24 else "")
