"""The Hugging Face hub, by its own client: what is cached, what a model has, downloads that resume."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgla.errors import NotDownloaded
from sgla.hub.packaged import OnProgress, cache_folder
from sgla.messages import Progress

PROBE_SECONDS = 2.0
_silent = threading.Event()  # the hub has not answered this process


class HuggingFace:
    """``repo``: ``organisation/name``; ``revision`` None: the newest.
    ``download_dir`` None: the client's own cache."""

    def __init__(self, download_dir: str | None = None) -> None:
        self.cache = str(cache_folder(download_dir) / "hub") if download_dir else None

    def cached(self, repo: str, revision: str | None, patterns: list[str], ignored: list[str]) -> Path | None:
        """The folder of a snapshot that is on this disk,
        if it lacks none of the files that fit ``patterns`` but not ``ignored``."""
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                repo, revision=revision, cache_dir=self.cache, local_files_only=True,
                allow_patterns=patterns, ignore_patterns=ignored,
            )  # fmt: skip
        except (OSError, ValueError):  # absent, cut off, or a name no hub would have
            return None
        return Path(folder)

    def files(self, repo: str, revision: str | None = None) -> list[str]:
        """Paths of the model's files. Raises NotDownloaded."""
        from huggingface_hub import HfApi

        with _explained(repo, revision):
            return [one.rfilename for one in HfApi().model_info(repo, revision=revision).siblings or []]

    def download(
        self, repo: str, revision: str | None, patterns: list[str], ignored: list[str], report: OnProgress
    ) -> Path:
        """The snapshot's folder, with the files that fit ``patterns`` but not ``ignored``.
        Raises NotDownloaded."""
        from huggingface_hub import snapshot_download

        with _explained(repo, revision):
            folder = snapshot_download(
                repo,
                revision=revision,
                cache_dir=self.cache,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                tqdm_class=_relay(repo, report),
            )
        return Path(folder)


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub as NotDownloaded that says what to change."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise NotDownloaded(
            f"{repo}: the model is gated; accept its terms on the hub and run 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotDownloaded(
            f"{repo}: no such model on the hub (a private one needs 'hf auth login')"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotDownloaded(f"{repo}: no revision '{revision}'", param="revision") from error
    except Exception as error:  # no network, no space, a hub error, and whatever its HTTP library raises
        raise NotDownloaded(
            f"{repo} cannot be downloaded: {(str(error).strip() or type(error).__name__).splitlines()[-1]}. "
            "Check the network (HF_ENDPOINT names a mirror, --model-source modelscope another hub), or "
            "give --model a local folder or .gguf file; 'demo' comes from the package index"
        ) from error


def _relay(repo: str, report: OnProgress) -> Any:
    """A tqdm class that draws nothing and tells ``report`` the bytes."""
    from tqdm.auto import tqdm

    class Relay(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "disable": False}))

        def display(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B":
                report(Progress(phase="download", message=repo, done=int(self.n), total=int(self.total or 0)))
            return shown

    return Relay


def hub_answers(repo: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the hub tells about ``repo`` within ``seconds``. A name lookup that hangs counts as no.
    A hub that has not answered is not asked again by this process."""
    if _silent.is_set() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    answers: list[bool] = []

    def ask() -> None:
        try:
            HfApi().model_info(repo, timeout=seconds)
        except HfHubHTTPError:  # there is no such model, or it is not for us
            answers.append(False)
        except Exception:  # whatever went wrong, the package index is asked next
            return
        else:
            answers.append(True)

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        _silent.set()
    return answers == [True]
