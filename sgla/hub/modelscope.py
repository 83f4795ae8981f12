"""ModelScope, by its own client (``sgla[modelscope]``), which resumes downloads and tries again."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sgla.errors import ConfigError, NotDownloaded
from sgla.hub.packaged import OnProgress, cache_folder
from sgla.messages import Progress


class ModelScope:
    """As ``HuggingFace``.
    ``MODELSCOPE_ENDPOINT`` names another server, ``MODELSCOPE_API_TOKEN`` the token for private models."""

    def __init__(self, download_dir: str | None = None) -> None:
        self.cache = cache_folder(download_dir) / "modelscope" if download_dir else None

    def cached(self, repo: str, revision: str | None, patterns: list[str], ignored: list[str]) -> Path | None:
        """The folder of a snapshot that is on this disk. Of files that fit ``patterns`` but not ``ignored``
        there must be those of a tokenizer: nothing tells which ones the model has."""
        api, errors = _client()
        try:
            folder = Path(
                api.download_repo(
                    repo, "model", revision=revision, cache_dir=self.cache, local_files_only=True
                )
            )
        except errors.HubError:
            return None
        names = [path.name for path in folder.iterdir()]
        told = any(fnmatchcase(name, kind) for name in names for kind in ("tokenizer*", "vocab*"))
        return folder if told or not patterns else None

    def files(self, repo: str, revision: str | None = None) -> list[str]:
        """Paths of the model's files. Raises NotDownloaded."""
        with _explained(repo, revision):
            return [one.path for one in self._listed(repo, revision)]

    def download(
        self, repo: str, revision: str | None, patterns: list[str], ignored: list[str], report: OnProgress
    ) -> Path:
        """The snapshot's folder, with the files that fit ``patterns`` but not ``ignored``.
        Raises NotDownloaded."""
        with _explained(repo, revision), _quiet():
            wanted = sum(
                one.size
                for one in self._listed(repo, revision)
                if _fits(one.path, patterns) and not _fits(one.path, ignored)
            )
            folder = _client()[0].download_repo(
                repo,
                "model",
                revision=revision,
                cache_dir=self.cache,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                progress_callbacks=[_relay(repo, wanted, report)],
            )
        return Path(folder)

    def _listed(self, repo: str, revision: str | None) -> list[Any]:
        return _client()[0].list_repo_files(repo, "model", revision=revision)


def _client() -> tuple[Any, Any]:
    """The client, and the module of its errors."""
    try:
        from modelscope_hub import errors
        from modelscope_hub.api import HubApi
        from modelscope_hub.config import HubConfig
    except ImportError as error:
        raise ConfigError(
            "--model-source modelscope needs its client; install it with: pip install 'sgla[modelscope]'",
            param="model_source",
        ) from error
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # what fails is told by exceptions
    return HubApi(HubConfig()), errors  # which reads the environment now


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub as NotDownloaded that says what to change."""
    _, errors = _client()
    try:
        yield
    except errors.NotExistError as error:
        at = f" with a revision '{revision}'" if revision else ""
        raise NotDownloaded(f"{repo}: no such model{at} on ModelScope", param="model") from error
    except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
        raise NotDownloaded(
            f"{repo}: ModelScope does not let you read the model; set MODELSCOPE_API_TOKEN", param="model"
        ) from error
    except Exception as error:  # no network, no space, and whatever its HTTP library raises
        raise NotDownloaded(
            f"{repo} cannot be downloaded from ModelScope: "
            f"{(str(error).strip() or type(error).__name__).splitlines()[-1]}. Check the network "
            "(MODELSCOPE_ENDPOINT names another server), or give --model a local folder or .gguf file",
            param="model",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Its client draws a bar of files on stderr, whatever it is told;
    ours shows bytes, on the stream that it has from before."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _fits(path: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _relay(repo: str, total: int, report: OnProgress) -> Any:
    """A class of callbacks, one a file, that tell ``report`` the bytes of all files."""
    from modelscope_hub._download import ProgressCallback

    lock, done = threading.Lock(), 0

    class Relay(ProgressCallback):
        def update(self, size: int) -> None:
            nonlocal done
            with lock:
                done = max(0, min(total, done + size))
                report(Progress(phase="download", message=repo, done=done, total=total))

    return Relay
