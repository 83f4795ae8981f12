"""Models behind an address that fsspec reads: object stores (``s3://``, ``gs://``) and HTTP servers that list
a folder; and Redis. Their files are copied to the cache, and again when they change."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sgla.errors import ConfigError, NotDownloaded
from sgla.hub.disk import bytes_text, free_bytes
from sgla.hub.packaged import OnProgress, cache_folder
from sgla.hub.quantized import parts_of
from sgla.hub.redis_files import RedisFiles
from sgla.hub.source import TRAINING, ModelSource
from sgla.messages import Progress

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
MOST_FILES = 10_000
PAGE_BYTES = 16 << 20  # of an HTTP server's list of a folder
SILENT = 60.0  # seconds that a server may say nothing
SPARE_BYTES = 256 << 20  # of the disk, that a copy leaves free
RECORD = ".files.json"  # name -> what told the copy from others
STAMPS = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified", "created")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
IN_EXTRA = "s3fs", "gcsfs"  # those of sgla[remote]

KEY = "SGLA_REMOTE_KEY"  # variable with the administrator's key of the server that weights are copied from

Patterns = Callable[[list[str]], list[str]]  # of the files that are wanted of these


def folder_of(url: str, download_dir: str | None) -> Path:
    """Where the copy is, or will be."""
    name = re.sub(r"\W+", "-", shown(url))[-60:].strip("-")
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return cache_folder(download_dir) / "remote" / f"{name}-{digest}"


def shown(url: str) -> str:
    """Without the name and password that it may have."""
    return re.sub(r"//[^/@]*@", "//", url)


def download(url: str, download_dir: str | None, patterns: Patterns, report: OnProgress) -> Path:
    """The folder with the files that fit ``patterns``. Raises NotDownloaded, and ConfigError for an address
    that cannot be one."""
    folder = folder_of(url, download_dir)
    report(Progress(phase="download", message=f"looking at {shown(url)}"))
    try:
        fs, root = _opened(url)
        found = _listed(fs, root)
        wanted = patterns(list(found))
        names = [name for name in found if _fits(name, wanted) and not _fits(name, TRAINING)]
        if names:
            _copy(fs, folder, {name: found[name] for name in names}, report, shown(url))
    except ConfigError:
        raise
    except Exception as error:  # of the network, of a store's client, of a disk
        raise NotDownloaded(f"{shown(url)} cannot be read: {_why(error)}") from error
    if not names:
        raise NotDownloaded(f"{shown(url)} lists no files of a model")
    return folder


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if getattr(error, "status", None) in (401, 403):
        said += f"; {KEY} must have a key that it takes, of a running server one of its --admin-api-key"
    return said


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _opened(url: str) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss"):
        try:
            files = RedisFiles(url)
        except ImportError as error:
            raise ConfigError(
                f"--load-format remote: {scheme}:// needs redis: pip install 'sgla[redis]'", param="model"
            ) from error
        return files, files.root
    try:
        options = {"client_kwargs": _client()} if scheme in ("http", "https") else {}
        fs, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(scheme)
        what = "'sgla[remote]'" if package in IN_EXTRA else package
        hint = f"needs {package}: pip install {what}" if package else "is no kind that fsspec knows"
        raise ConfigError(f"--load-format remote: {scheme}:// {hint}", param="model") from error
    return fs, root.rstrip("/")


def _client() -> dict[str, Any]:
    """How files are asked for over HTTP: however long one takes while bytes of it come."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            """The page of a folder; files are read in pieces."""
            if self._body is None:
                page = bytearray()
                async for data in self.content.iter_any():
                    page += data
                    if len(page) > PAGE_BYTES:
                        self.close()
                        raise ValueError(f"its page of files has more than {PAGE_BYTES} bytes")
                self._body = bytes(page)
            return self._body

    key = os.environ.get(KEY)
    return {
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=SILENT, sock_read=SILENT),
        "response_class": Bounded,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
    }


def _listed(fs: Any, root: str) -> dict[str, str]:
    """Name -> path of the files in a folder. What leads out of it is left out."""
    found = {}
    for path in fs.ls(f"{root}/", detail=False):
        name = path.rstrip("/").removeprefix(f"{root.rstrip('/')}/").removeprefix("/")
        if name and not path.endswith("/") and "/" not in name and name[0] not in ".?#" and "\0" not in name:
            found[name] = path
    if len(found) > MOST_FILES:
        raise ValueError(f"it has more than {MOST_FILES} files")
    return found


def files_of(source: ModelSource) -> dict[str, Path]:
    """What another server needs of a model to run it too, by name."""
    whole = [part for path in source.files for part in (parts_of(path) if path.suffix == ".gguf" else [path])]
    beside = [] if source.gguf_path else [path for path in source.folder.glob("*") if path.is_file()]
    wanted = (path for path in beside if _fits(path.name, TOKENIZER_FILES))
    return {path.name: path for path in (*wanted, *whole)}


def _copy(fs: Any, folder: Path, paths: dict[str, str], report: OnProgress, message: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    infos = {name: fs.info(path) for name, path in paths.items()}
    total = sum(info.get("size") or 0 for info in infos.values())
    done = 0
    for name, info in infos.items():
        stamp = " ".join(f"{key}={info[key]}" for key in STAMPS if info.get(key) is not None)
        if known.get(name) != stamp or not stamp or not (folder / name).is_file():
            part = folder / f".{name}.part"
            try:
                fs.get_file(paths[name], str(part), callback=_bounded(info.get("size"), folder))
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)
            known[name] = stamp
            record.write_text(json.dumps(known))
        done += info.get("size") or 0
        report(Progress(phase="download", message=message, done=done, total=max(total, done)))
    for path in folder.iterdir():
        if path.name not in (*infos, RECORD):
            path.unlink()


def _bounded(size: int | None, folder: Path) -> Any:
    """What watches a file come: it ends a copy that is larger than was said, or than the disk has room for.
    Raises OSError where it cannot fit."""
    from fsspec import Callback

    room = max(0, free_bytes(folder) - SPARE_BYTES)
    if size is not None and size > room:
        raise OSError(f"a file of {bytes_text(size)} does not fit the disk (room for {bytes_text(room)})")
    most = room if size is None else size

    class Watch(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > most:
                raise OSError(f"a file has more than the {most} bytes that it may have")

    return Watch()
