"""How a runner gets what makes features of pictures, if the model takes any."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.loading.tower import Elsewhere, Tower, load_tower
from sgla.loading.tower_attention import use_packed
from sgla.loading.tower_grid import Grids
from sgla.media.picture import Picture
from sgla.media.prepare import carried
from sgla.messages import Dictation, Speech
from sgla.model.spec import ModelSpec
from sgla.model.vision.served import settings_of, untaken, vision_of
from sgla.model.vision.spec import Vision
from sgla.version import __version__
from sgla.worker.peering import model_digest
from sgla.worker.pictures import Pictures, kept_on

# Sides in pixels of pictures that a start on a GPU looks at: to compare, with enough patches for all kernels,
# and to see what memory it takes.
MIDDLE, LARGE = 1008, 2016
NEAR = 0.05  # of bfloat16
ABREAST = 80 << 20  # bytes of pictures at a time, fewer than those of a LARGE one


class Seeing(NamedTuple):
    """``taken``: bytes that it is going to take; ``media``, ``speech`` and ``dictation``: of ``Facts``."""

    taken: int
    ledger: dict[str, int]
    media: dict[str, str]
    note: str
    speech: Speech | None = None
    dictation: Dictation | None = None
    untaken: dict[str, str] | None = None  # of ``Facts``
    identity: dict[str, str] | None = None  # for a server that makes the features


def open_pictures(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    device: torch.device,
    dtype: str,
) -> tuple[Pictures | None, Seeing]:
    """Raises ConfigError and WeightError."""
    vision, note = vision_of(config, source)
    if vision is None:
        return None, Seeing(0, {}, {}, note, untaken=untaken(source, note))
    plain = plain_of(dtype)
    tower: Tower | Elsewhere = Elsewhere(device, plain)
    if config.encode_url is None:
        tower, note = open_tower(config, source, vision, device, dtype)
    merged = vision.merged(source.config) if vision.merged is not None else 0
    axes = axes_of(*vision.sections(source.config)) if merged else None
    tokens = vision.tokens_of(source.config)
    kept = kept_on(device)
    alone = device.type == "cpu" or not merged or config.deterministic or config.encode_url is not None
    abreast = 0 if alone else ABREAST
    pictures = Pictures(
        tower, tokens, spec.hidden, vision.ahead, merged, axes, kept, abreast, vision.windowed
    )
    ledger = {"tower": tower.nbytes, "pictures": kept}
    if device.type == "cuda" and vision.kind == "image" and config.encode_url is None:
        pictures.example = example_of(source, vision, LARGE)
    identity = {} if config.encode_url is None else encode_identity(config, source, plain)
    media = {kind: taker.media for kind, taker in vision.takers.items()}
    return pictures, Seeing(kept, ledger, media, note, dictation=vision.dictation, identity=identity)


def plain_of(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "float32" else torch.bfloat16


def open_tower(
    config: Config, source: ModelSource, vision: Vision, device: torch.device, dtype: str
) -> tuple[Tower, str]:
    """And a note on its kernels. Raises ConfigError and WeightError."""
    plain = plain_of(dtype)
    load = partial(load_tower, source, vision, plain, device, config.random_seed or 0)
    if device.type == "cuda" and vision.kind == "image" and plain != torch.float32:
        return quick(load(), load, vision, example_of(source, vision, MIDDLE))
    return load(), ""


def encode_identity(config: Config, source: ModelSource, plain: torch.dtype) -> dict[str, str]:
    """What features depend on beside the picture."""
    return {"version": __version__, "model": model_digest(config, source), "tower": str(plain)}


def example_of(source: ModelSource, vision: Vision, side: int) -> dict[str, Tensor]:
    """What a processor makes of a picture of noise."""
    settings = settings_of(source.folder)
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    picture, extra = Picture.of(side, side, noise.tobytes()), vision.prepares(source.config, settings)
    made = carried(picture, vision.processor_of(settings), json.dumps(settings.images), extra)
    return {name: torch.tensor(values) for name, values in made.items()}


@torch.inference_mode()
def quick(
    tower: Tower, load: Callable[[], Tower], vision: Vision, example: dict[str, Tensor]
) -> tuple[Tower, str]:
    """The ``tower`` with our kernels, or another one as transformers has it, and a note, if these do not give
    what that gives."""
    from sgla.worker.tower_kernels import hasten

    expected = tower(example)
    try:
        if vision.merged is not None:
            use_packed(tower.module)
            if Grids.fit(tower.module):
                tower.grids = Grids(tower.module, tower.device)
        hasten(tower.module)
        found = tower(example)
        pairs = zip([found.values, *found.deep], [expected.values, *expected.deep], strict=True)
        error = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
        if error < NEAR:
            return tower, ""
        why = f"their results differ by {error:.1%}"
    except Exception as failed:
        why = f"{type(failed).__name__}: {failed}"[:200]
    return load(), f"the tower of pictures has transformers' kernels, which are slower: {why}"


def axes_of(sections: list[int], woven: bool) -> Tensor:
    """int64[rot / 2]: whether a frequency is turned by time (0), row (1) or column (2). ``sections``: how
    many by each; ``woven``: in turns, as far as rows and columns have any, and the rest by time."""
    if not woven:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
