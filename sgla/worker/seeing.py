"""How a runner gets what makes features of pictures, if the model takes any."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.loading.tower import load_tower
from sgla.messages import Pooling
from sgla.model.spec import ModelSpec
from sgla.model.vision.served import vision_of
from sgla.worker.pictures import CACHED, ON_GPUS, Pictures


class Seeing(NamedTuple):
    """``taken``: bytes that it is going to take; ``media``: of ``Facts``."""

    taken: int
    ledger: dict[str, int]
    media: dict[str, str]
    note: str


def open_pictures(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    device: torch.device,
    dtype: str,
    pooling: Pooling | None,
) -> tuple[Pictures | None, Seeing]:
    """Raises ConfigError and WeightError."""
    vision, note = vision_of(config, source, pooling is not None)
    if vision is None:
        return None, Seeing(0, {}, {}, note)
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    tower = load_tower(source, vision, plain, device, config.random_seed or 0)
    merged = vision.merged(source.config) if vision.merged is not None else 0
    axes = axes_of(*vision.sections(source.config)) if merged else None
    token = vision.token_of(source.config)
    kept = CACHED if device.type == "cpu" else ON_GPUS
    pictures = Pictures(tower, token, spec.hidden, vision.together, merged, axes, kept)
    ledger = {"tower": tower.nbytes, "pictures": kept}
    return pictures, Seeing(kept, ledger, {"image": vision.media}, "")


def axes_of(sections: list[int], woven: bool) -> Tensor:
    """int64[rot / 2]: whether a frequency is turned by time (0), row (1) or column (2). ``sections``: how
    many by each; ``woven``: in turns, as far as rows and columns have any, and the rest by time."""
    if not woven:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
