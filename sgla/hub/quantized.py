"""Which GGUF file of a repository a name such as ``Q4_K_M`` means, as llama.cpp and Ollama choose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from sgla.errors import ConfigError

PREFERRED = "Q4_K_M"  # where a repository has several and none is named
HOSTS = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
QUANTIZATION = re.compile(
    r"(?:^|[._-])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|F32|FP16|MXFP4\w*))$", re.IGNORECASE
)
PART = re.compile(r"-\d{5}-of-(\d{5})$")


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
    """The path of the file that ``wanted`` names: a quantization or a file.
    Raises ConfigError that lists what there is."""
    paths = sorted(
        path for path in files if path.endswith(".gguf") and "mmproj" not in path.lower()
    )  # mmproj: of images
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
    part = PART.search(found[0].removesuffix(".gguf"))
    if part:
        whole = sorted({quantization(path) for path in paths if not PART.search(path.removesuffix(".gguf"))})
        raise ConfigError(
            f"{repo}: {found[0]} is one of {int(part[1])} parts, and split GGUF files are not read; "
            + (f"choose one of {', '.join(whole)}, or join" if whole else "join")
            + " the parts with llama-gguf-split --merge and give the file",
            param="model",
        )
    if len(found) > 1:
        raise ConfigError(
            f"{repo} has several such files: name one, as {repo}:{' or '.join(found[:8])}", param="model"
        )
    return found[0]


def _listed(by_name: dict[str, list[str]]) -> str:
    names = list(by_name)
    return ", ".join(names[:24]) + (f" and {len(names) - 24} more" if len(names) > 24 else "")
