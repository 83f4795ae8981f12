"""Models on this disk that came from a hub or the package index:
what there is, which revision a path is of, removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sgla.errors import ConfigError
from sgla.homes import cache_home
from sgla.hub import packaged
from sgla.hub.quantized import PART, quantization


@dataclass(frozen=True)
class Cached:
    """``name`` is what ``sgla serve`` takes. ``size`` in bytes; ``format``: safetensors, a GGUF quantization,
    or none without weights. ``files`` are its own: links into the hub's store count as what they point to."""

    name: str
    revision: str
    size: int
    format: str
    source: str
    path: Path
    files: tuple[Path, ...]


def origin(path: Path) -> tuple[str, str] | None:
    """Hub id and revision of a path inside a snapshot of a hub's cache: ``models--A--B/snapshots/REVISION``
    of Hugging Face, ``models/A--B/snapshots/REVISION`` of ModelScope."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots":
            repo = folder.parents[1]
            if repo.name.startswith("models--"):
                return repo.name.removeprefix("models--").replace("--", "/"), folder.name
            if repo.parent.name == "models":
                return repo.name.replace("--", "/", 1), folder.name
    return None


def cached_models(download_dir: str | None = None) -> list[Cached]:
    """All of the caches that ``sgla serve`` looks into, by name."""
    found = list(_packaged(download_dir))
    for source, pattern, folders in (
        ("huggingface", "models--*/snapshots/*", _hub_folders(download_dir)),
        ("modelscope", "models/*/snapshots/*", _modelscope_folders(download_dir)),
    ):
        for snapshot in sorted(path for folder in folders for path in folder.glob(pattern)):
            found += _snapshot(snapshot, source)
    return sorted(found, key=lambda one: (one.name.lower(), one.revision))


def remove(name: str, download_dir: str | None = None) -> list[Cached]:
    """Delete what ``cached_models`` lists under ``name``, or all files of a hub id.
    Raises ConfigError that lists what there is."""
    models = cached_models(download_dir)
    gone = [one for one in models if name in (one.name, one.name.partition(":")[0])]
    if not gone:
        names = ", ".join(dict.fromkeys(one.name for one in models)) or "nothing"
        raise ConfigError(f"{name} is not cached; there is {names}", param="model")
    for one in gone:
        _delete(one, [other for other in models if other not in gone])
    return gone


def _packaged(download_dir: str | None) -> Iterator[Cached]:
    for name, model in packaged.MODELS.items():
        if path := packaged.cached(name, download_dir):
            files = (path,) if path.is_file() else tuple(_files(path))
            kind = quantization(path.name) if path.suffix == ".gguf" else "safetensors"
            yield Cached(name, model.sha256[:12], _size(files), kind, "package index", path, (path,))


def _hub_folders(download_dir: str | None) -> list[Path]:
    from huggingface_hub import constants

    own = [packaged.cache_folder(download_dir) / "hub"] if download_dir else []
    return [*own, Path(constants.HF_HUB_CACHE)]


def _modelscope_folders(download_dir: str | None) -> list[Path]:
    own = [packaged.cache_folder(download_dir) / "modelscope"] if download_dir else []
    return [*own, Path(os.environ.get("MODELSCOPE_CACHE") or cache_home() / "modelscope")]


def _snapshot(folder: Path, source: str) -> Iterator[Cached]:
    """One entry for each GGUF file, as it would be named, and one for safetensors or what else there is."""
    told = origin(folder)
    assert told is not None
    repo, revision = told
    files = list(_files(folder))
    ggufs = [path for path in files if path.suffix == ".gguf"]
    for path in ggufs:
        kind = quantization(path.name)
        part = PART.search(path.stem)
        yield Cached(
            f"{repo}:{kind}", revision, _size([path]), kind + (part[0] if part else ""), source, path, (path,)
        )
    others = [path for path in files if path not in ggufs]
    if others and not ggufs:
        weights = any(path.suffix == ".safetensors" for path in others)
        yield Cached(
            repo, revision, _size(others), "safetensors" if weights else "none", source, folder, tuple(others)
        )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _delete(one: Cached, kept: list[Cached]) -> None:
    """Its files, what they link to unless another model needs it too,
    and the folder of a model that has none left."""
    needed = {path.resolve() for other in kept for path in other.files}
    for path in one.files:
        if path.is_dir():
            shutil.rmtree(path)
            continue
        target = path.resolve()
        path.unlink()
        if target not in needed:
            target.unlink(missing_ok=True)
    if origin(one.path):
        repo = next(folder for folder in one.path.parents if folder.name == "snapshots").parent
        if not any(_files(repo / "snapshots")):
            shutil.rmtree(repo)
