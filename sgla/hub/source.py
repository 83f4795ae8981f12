"""A model on this disk: its configuration and where its weights are. Loads no torch; can be sent to a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgla.errors import ConfigError
from sgla.hub.gguf import GGUFFile, read_gguf


@dataclass(frozen=True)
class ModelSource:
    """``config`` and ``generation_config`` are the contents of HF's files of these names (GGUF: made from metadata).

    ``files`` hold the weights: ``.safetensors`` files, one ``.gguf`` file, or none for ``dummy`` (random weights).
    ``folder`` is where tokenizer files are (none for GGUF, which carries its vocabulary: see ``gguf``).
    """

    kind: Literal["safetensors", "gguf", "dummy"]
    folder: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file that carries config and vocabulary, with dummy weights too."""
        return next((path for path in self.files if path.suffix == ".gguf"), None)

    def gguf(self) -> GGUFFile:
        """Parse the GGUF file (a tenth of a second)."""
        assert self.gguf_path is not None
        return read_gguf(self.gguf_path)

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model has logits for; None if the files leave it to HF's defaults."""
        text = self.config.get("text_config")
        size = (text if isinstance(text, dict) else {}).get("vocab_size", self.config.get("vocab_size"))
        return size if isinstance(size, int) else None

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation; empty if the files name none."""
        ids = self.generation_config.get("eos_token_id")
        if ids is None:
            ids = self.config.get("eos_token_id", self.config.get("text_config", {}).get("eos_token_id"))
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def open_source(path: str | Path, load_format: str = "auto") -> ModelSource:
    """Describe the model in a local folder or ``.gguf`` file. ``load_format`` as in the settings.

    Raises ConfigError when there is no such path, configuration or weight file.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path, load_format)
    if not path.is_dir():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file", param="model")
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _open_gguf(found[0], load_format)
        raise ConfigError(
            f"{path} has no config.json" + (", and several .gguf files: name one" if found else "")
        )
    config, generation = _read_json(path / "config.json"), path / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else {}
    if load_format == "dummy":
        return ModelSource("dummy", path, (), config, generation_config)
    return ModelSource("safetensors", path, _safetensors(path), config, generation_config)


def _open_gguf(path: Path, load_format: str) -> ModelSource:
    file = read_gguf(path)
    kind: Literal["gguf", "dummy"] = "dummy" if load_format == "dummy" else "gguf"
    return ModelSource(kind, path.parent, (path,), file.config, file.generation_config)


def _safetensors(folder: Path) -> tuple[Path, ...]:
    """The files that the index names, else every ``.safetensors`` file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ConfigError(
                f"{index} names files that are not there: {', '.join(missing) or 'none at all'}"
            )
        return tuple(folder / name for name in names)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        other = ", ".join(
            sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        )
        raise ConfigError(f"{folder} has no .safetensors file" + (f" (found {other})" if other else ""))
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value
