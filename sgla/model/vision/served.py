"""Whether a model's pictures can be served, and why not. Loads no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource, read_object
from sgla.model.registry import architecture_of
from sgla.model.vision import VISIONS
from sgla.model.vision.spec import Settings, Vision

IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"


def settings_of(folder: Path) -> Settings:
    """Raises ConfigError for files that are no JSON objects."""
    found = {name: read_object(folder / name) for name in (IMAGES, PROCESSOR) if (folder / name).is_file()}
    processor = found.get(PROCESSOR, {})
    nested = processor.get("image_processor")
    return Settings(nested if isinstance(nested, dict) else found.get(IMAGES, {}), processor)


def vision_of(config: Config, source: ModelSource, pools: bool = False) -> tuple[Vision | None, str]:
    """How the model takes pictures, or None; then also why not, if its family does. ``pools``: it answers
    with vectors."""
    try:
        vision = VISIONS.get(architecture_of(source.config))
    except ConfigError:
        return None, ""
    if vision is None or pools:
        return None, ""
    reasons = {
        "pictures need the extra 'mm': pip install 'sgla[mm]'": find_spec("PIL") is None,
        f"the model has no {IMAGES}": not settings_of(source.folder).images,
        f"towers are not read from files of the kind {source.kind}": source.kind
        not in ("safetensors", "dummy"),
        "--enable-lora": config.enable_lora,
        f"--speculative-algorithm {config.speculative_algorithm}": bool(config.speculative_algorithm),
        "--enable-torch-compile": config.enable_torch_compile,
        "--pp": config.pp > 1,
        f"--role {config.role}": config.role != "both",
    }
    for reason, holds in reasons.items():
        if holds:
            return None, f"no pictures are taken: {reason}"
    return vision, ""
