"""A model on this disk: its configuration and where its weights are.
Loads no torch; can be sent to a worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, NamedTuple

from sgla.errors import ConfigError
from sgla.hub.gguf import GGUFFile, Layouts, read_gguf
from sgla.hub.gguf_layout import Layout
from sgla.hub.quantized import PART, QUANTIZATION, beginnings

MAX_JSON = 16 << 20  # bytes of a configuration
MAX_INDEX = 64 << 20  # bytes of an index of tensors
THINKERS = {  # by model_type
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
BODY = "Gemma3TextModel"
SAID = ("quantization_config", "compression_config")  # where a configuration says how weights are quantized
# Files in which older tools say it: the method of each, and a key that it has then.
SAID_BESIDE = {
    "hf_quant_config.json": ("modelopt", "quant_algo"),
    "quantize_config.json": ("gptq", "bits"),
    "quant_config.json": ("awq", "w_bit"),
}
MAX_ENDS = 1024  # ids that end a generation


@dataclass(frozen=True)
class ModelSource:
    """``config`` and ``generation_config`` are the contents of HF's files
    of these names (GGUF: made from metadata).

    ``files`` hold the weights: ``.safetensors`` files, pickled ones of PyTorch (``pt``), one ``.gguf`` file
    (or the first part of it), or none for ``dummy`` (random
    weights). ``folder`` is where tokenizer files are (none for GGUF, which carries its vocabulary: see
    ``gguf``). ``layout``: what a GGUF file of its architecture holds. ``notes``: what a user may want to know
    of it. ``draft``: the model that guesses its next tokens.
    """

    kind: Literal["safetensors", "pt", "gguf", "dummy"]
    folder: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    layout: Layout | None = None
    notes: tuple[str, ...] = ()
    draft: ModelSource | None = None

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file that carries config and vocabulary, with dummy weights too."""
        return next((path for path in self.files if path.suffix == ".gguf"), None)

    def gguf(self) -> GGUFFile:
        """Parse the GGUF file (a tenth of a second)."""
        assert self.gguf_path is not None
        return read_gguf(self.gguf_path, {self.layout.name: (self.layout,)} if self.layout else {})

    @property
    def quantization(self) -> str:
        """As ``Q4_1``, by the name of a GGUF file; empty if it tells none."""
        found = self.gguf_path and QUANTIZATION.search(PART.sub("", self.gguf_path.stem))
        return found[1].upper() if found else ""

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model has logits for; None if the files leave it to HF's defaults."""
        text = self.config.get("text_config")
        size = (text if isinstance(text, dict) else {}).get("vocab_size", self.config.get("vocab_size"))
        return size if isinstance(size, int) else None

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation; empty if the files name none."""
        text = self.config.get("text_config")
        for holder in (self.generation_config, self.config, text if isinstance(text, dict) else {}):
            ids = holder.get("eos_token_id")
            if ids is None:
                continue
            found = ids if isinstance(ids, list) else [ids]
            if len(found) > MAX_ENDS or not all(
                type(token) is int and 0 <= token < 1 << 31 for token in found
            ):
                raise ConfigError(
                    f"eos_token_id in generation_config.json or config.json is {str(found[:4])[:60]}; it "
                    f"must be a token id or a list of at most {MAX_ENDS}",
                    param="model",
                )
            return found
        return []


def open_source(path: str | Path, load_format: str = "auto", layouts: Layouts | None = None) -> ModelSource:
    """Describe the model in a local folder or ``.gguf`` file. ``load_format`` as in the settings;
    ``layouts``: the architectures that GGUF files may have (``loading/source.py`` has those of all families).

    Raises ConfigError when there is no such path, configuration or weight file.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path, load_format, layouts)
    if not path.is_dir():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file", param="model")
    if not (path / "config.json").is_file():
        found = beginnings(path)
        if len(found) == 1:
            return _open_gguf(found[0], load_format, layouts)
        raise ConfigError(
            f"{path} has no config.json" + (", and several .gguf files: name one" if found else "")
        )
    config, generation = plain(read_object(path / "config.json")), path / "generation_config.json"
    config = told(config, path)
    generation_config = read_object(generation) if generation.is_file() else {}
    if load_format == "dummy":
        return ModelSource("dummy", path, (), config, generation_config)
    kind, files = weight_files(path, load_format)
    return ModelSource(kind, path, files, config, generation_config)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says so."""
    tables = config, config.get("text_config")
    return any(table.get(key) for table in tables if isinstance(table, Mapping) for key in SAID)


def told(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With what a file beside it says of quantization, if it says nothing of that itself."""
    if is_quantized(config):
        return config
    for name, (method, key) in SAID_BESIDE.items():
        if (folder / name).is_file():
            found = read_object(folder / name)
            inner = found.get("quantization")
            found = inner if isinstance(inner, dict) else found
            if found.get(key) is not None:
                return {**config, SAID[0]: {"quant_method": method, **found}}
    return config


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model that speaks, what thinks. The class of a Gemma 3 that makes vectors, and whose tokens do not
    see those behind them, is called as those of other decoders are."""
    if config.get("architectures") == [BODY] and config.get("use_bidirectional_attention") in (None, False):
        return {**config, "architectures": ["Gemma3Model"]}
    return thinking(config)


def thinking(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model that thinks and speaks, what thinks: the configuration that it has where it stands alone."""
    inner = config.get("thinker_config")
    if not isinstance(inner, dict) or inner.get("model_type") not in THINKERS:
        return config
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    return {**dtype, **inner, "architectures": [THINKERS[inner["model_type"]]]}


def _open_gguf(path: Path, load_format: str, layouts: Layouts | None) -> ModelSource:
    file = read_gguf(path, layouts)
    kind: Literal["gguf", "dummy"] = "dummy" if load_format == "dummy" else "gguf"
    made = file.config, file.generation_config, file.layout, file.notes
    return ModelSource(kind, path.parent, (path,), *made)


class Kind(NamedTuple):
    """A format of weights in several files: the one that has all, the index, and what the others may be."""

    whole: str
    table: str
    suffixes: tuple[str, ...]


KINDS = {
    "safetensors": Kind("model.safetensors", "model.safetensors.index.json", (".safetensors",)),
    "pt": Kind("pytorch_model.bin", "pytorch_model.bin.index.json", (".bin", ".pt", ".pth")),
}
EVERY = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
# Files of pickled tensors that are no weights.
TRAINING = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "scaler*")


def weight_files(folder: Path, load_format: str) -> tuple[Literal["safetensors", "pt"], tuple[Path, ...]]:
    """The format of a folder's weights and their files: one that has all, else those that the index names,
    else all of the format; safetensors, where there are both. Raises ConfigError."""
    kinds: list[Literal["safetensors", "pt"]] = ["safetensors", "pt"]
    asked = [kind for kind in kinds if load_format in (kind, "auto")]
    for kind in asked:
        if files := _files(folder, KINDS[kind]):
            return kind, files
    suffixes = [suffix for kind in asked for suffix in KINDS[kind].suffixes]
    other = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in EVERY))
    found = f" (found {other})" if other else ""
    raise ConfigError(f"{folder} lacks weights: it has no {' or '.join(suffixes)} file{found}", param="model")


def _files(folder: Path, kind: Kind) -> tuple[Path, ...]:
    index = folder / kind.table
    if (folder / kind.whole).is_file():
        return (folder / kind.whole,)
    if index.is_file():
        return tuple(folder / name for name in _indexed(index, kind.suffixes))
    for suffix in kind.suffixes:
        found = sorted(path for path in folder.glob(f"*{suffix}") if path.is_file())
        if files := tuple(path for path in found if not any(fnmatch(path.name, name) for name in TRAINING)):
            return files
    return ()


def _indexed(index: Path, suffixes: tuple[str, ...]) -> list[str]:
    """The files that an index names. Raises ConfigError unless they lie beside it."""
    table = read_object(index, MAX_INDEX).get("weight_map")
    names = list(table.values()) if isinstance(table, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{index} has no weight_map from tensors to files")
    names = sorted(set(names))
    for name in names:
        if Path(name).name != name or Path(name).suffix not in suffixes:
            raise ConfigError(f"{index} names {name[:99]!r}, which is no {suffixes[0]} file beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ConfigError(f"{index} names files that are not there: {', '.join(missing[:8])}{more}")
    return names


def merged(known: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``known`` with the values of ``new``; where both have an object, these are merged."""
    result = dict(known)
    for name, value in new.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """The content of a JSON file of at most ``most`` bytes. Raises ConfigError, also for a device or a pipe,
    which may never end."""
    try:
        found = path.stat()
        if found.st_size > most:
            raise ConfigError(f"{path} has {found.st_size} bytes; at most {most} are read", param="model")
        if not S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no file", param="model")
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", param="model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param="model") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from error


def read_object(path: Path, most: int = MAX_JSON) -> dict[str, Any]:
    value = read_json(path, most)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model")
    return value
