"""Whether a model's pictures, or sounds, can be served, and why not. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from sgla.config import Config
from sgla.errors import BadRequest, ConfigError
from sgla.hub.source import ModelSource, is_quantized, read_object
from sgla.media.sound import RATE
from sgla.model.hearing import HEARINGS
from sgla.model.registry import architecture_of
from sgla.model.vision.sizes import PARAM, checked_sizes
from sgla.model.vision.spec import Settings, Vision
from sgla.model.vision.table import vision_for

QUANTIZED = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2")  # types of safetensors
NEEDED = {"image": "PIL", "audio": "av"}  # packages
IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
VIDEOS = "video_preprocessor_config.json"


def settings_of(folder: Path) -> Settings:
    """Raises ConfigError for files that are no JSON objects."""
    names = IMAGES, PROCESSOR, VIDEOS
    found = {name: read_object(folder / name) for name in names if (folder / name).is_file()}
    processor = found.get(PROCESSOR, {})
    nested = {name: value for name, value in processor.items() if isinstance(value, dict)}
    plain = found.get(IMAGES, {})
    images, sounds = nested.get("image_processor", plain), nested.get("feature_extractor", plain)
    return Settings(images, processor, nested.get("video_processor", found.get(VIDEOS, images)), sounds)


def tower_bytes(source: ModelSource, vision: Vision) -> int:
    """Of the weights in safetensors files that are not of the language model. Raises ConfigError."""
    return sum(size for _, size in _tensors(source, vision))


def tower_is_quantized(source: ModelSource, vision: Vision) -> bool:
    """Raises ConfigError."""
    return is_quantized(source.config) and any(kind in QUANTIZED for kind, _ in _tensors(source, vision))


def _tensors(source: ModelSource, vision: Vision) -> list[tuple[str, int]]:
    """Types and bytes of those that are not of the language model. Raises ConfigError."""
    names = vision.names_of_parts
    found = []
    for path in source.files:
        try:
            with path.open("rb") as file:
                tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            entries = [entry for name, entry in tensors.items() if name.startswith(names)]
            sizes = [end - begin for begin, end in (entry["data_offsets"] for entry in entries)]
            found += [(str(entry["dtype"]), size) for entry, size in zip(entries, sizes)]
        except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}"[:300], param="model") from error
    return found


def told(config: Config, source: ModelSource) -> list[str]:
    """What to say of pictures before the model is loaded."""
    vision, why = vision_of(config, source)
    if vision is None:
        return [why] if why else []
    size, kept = tower_bytes(source, vision) / 2**20, config.media_kept / 2**20
    return [
        f"{vision.things} are taken; their tower has {size:,.1f} MiB in the files, on each rank, beside the "
        "weights",
        f"what is made of earlier requests' media may take {kept:,.0f} MiB of the host (--media-cache-bytes)",
    ]


def untaken(source: ModelSource, why: str) -> dict[str, str]:
    """``why`` of ``vision_of``, for each kind of media that the model's family takes."""
    if not why:
        return {}
    architecture = architecture_of(source.config)
    vision = vision_for(architecture, source.config) or HEARINGS[architecture]
    return dict.fromkeys(vision.takers, why)


@contextmanager
def faults_of_settings() -> Iterator[None]:
    """What is wrong in a request is here in a setting."""
    try:
        yield
    except BadRequest as error:
        raise ConfigError(f"--mm-processor-kwargs: {error.message}", param=PARAM) from error


def vision_of(config: Config, source: ModelSource) -> tuple[Vision | None, str]:
    """How the model takes pictures or sounds, or None; then also why not, if its family does. Raises
    ConfigError for --mm-processor-kwargs that cannot be honoured, and why sounds cannot be served by a model
    that is for nothing else."""
    try:
        architecture = architecture_of(source.config)
        vision = vision_for(architecture, source.config) or HEARINGS.get(architecture)
    except ConfigError:
        return None, ""
    if vision is None:
        if config.mm_processor_kwargs:
            raise ConfigError(
                "--mm-processor-kwargs is for models that take pictures; leave it out",
                param="mm_processor_kwargs",
            )
        return None, ""
    if vision.crossed and (config.encode_url or config.role == "encode"):
        raise ConfigError(
            "the encoder of such a model runs where its decoder does; leave out "
            f"{'--encode-url' if config.encode_url else '--role encode'}",
            param="encode_url",
        )
    with faults_of_settings():
        checked_sizes(vision, config.mm_processor_kwargs)
    settings = settings_of(source.folder)
    known = settings.images if vision.kind == "image" else settings.sounds
    rate = settings.sounds.get("sampling_rate", RATE)
    reasons = {
        f"{vision.things} need the extra 'mm': pip install 'sgla[mm]'": find_spec(NEEDED[vision.kind])
        is None,
        f"the model has no {IMAGES}": not known,
        f"towers are not read from files of the kind {source.kind}": source.kind
        not in ("safetensors", "dummy"),
        f"{'they' if vision.kind == 'audio' else 'sounds'} are sampled at {rate} Hz": (
            vision.hearing is not None and rate != RATE
        ),
        "the weights of their towers are quantized; take a checkpoint whose towers are not": (
            source.kind == "safetensors" and tower_is_quantized(source, vision)
        ),
        "--enable-lora": config.enable_lora,
        f"--speculative-algorithm {config.speculative_algorithm}": bool(config.speculative_algorithm),
        f"--device {config.device}": vision.crossed and config.device not in ("cpu", "cuda"),
        "--enable-torch-compile": config.enable_torch_compile,
        "--nnodes": vision.crossed and config.nnodes > 1,
        "--pp": config.pp > 1,
        "--dp-attention": config.dp_attention,
        "--cp": config.cp > 1,
        "--dcp": config.dcp > 1,
        f"--role {config.role}": config.role in ("prefill", "decode"),
        "--deterministic, whose attention does not let the tokens of a picture see each other": (
            vision.ahead and config.deterministic and config.device != "cpu"
        ),
        f"--device {config.device}, where tokens of a picture see each other in all layers or in none": (
            vision.windowed and config.device != "cpu"
        ),
    }
    for reason, holds in reasons.items():
        if holds and vision.crossed:
            raise ConfigError(f"{architecture} hears sounds and does nothing else: {reason}", param="model")
        if holds:
            return None, f"no {vision.things} are taken: {reason}"
    return vision, ""
