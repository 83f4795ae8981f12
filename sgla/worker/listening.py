"""What requests in slots hear, where layers attend to it: the encoder runs when a request takes its slot."""

from __future__ import annotations

import torch

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.loading.tower import load_tower
from sgla.messages import NewRow
from sgla.model.base import CausalLM
from sgla.model.spec import ModelSpec
from sgla.model.vision.served import settings_of, vision_of
from sgla.model.whisper_spec import read_speech
from sgla.worker.features import FeatureCache, threads
from sgla.worker.pictures import CACHED
from sgla.worker.seeing import Seeing


class Listening:
    """``dtype``: of the tables."""

    def __init__(self, cache: FeatureCache, places: int, dtype: torch.dtype, count: int) -> None:
        self._cache, self._places, self._count = cache, places, count
        self.dtype = dtype

    @property
    def computed(self) -> int:
        """Windows of sounds that the encoder has heard."""
        return self._cache.computed

    def admit(self, new: NewRow, model: CausalLM) -> None:
        """The slot has another request, which hears one window."""
        for placed in new.pictures:
            with threads(self._count):
                model.hear(new.slot, self._cache.of(placed.picture, self._places).values.float())


def open_listening(
    config: Config, source: ModelSource, spec: ModelSpec, dtype: str, slots: int, ranks: int, count: int
) -> tuple[Listening, Seeing]:
    """``count``: threads. Raises ConfigError and WeightError."""
    vision, _ = vision_of(config, source)
    assert vision is not None
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    tower = load_tower(source, vision, plain, torch.device("cpu"), config.random_seed or 0)
    own = sum(-(-layer.heads // ranks) * layer.head_dim for layer in spec.attention)
    tables = 2 * slots * spec.heard * own * plain.itemsize
    ledger = {"tower": tower.nbytes, "sounds": CACHED, "cross": tables}
    speech = read_speech(source, dict(settings_of(source.folder).sounds))
    listening = Listening(FeatureCache(tower, spec.hidden, CACHED), spec.heard, plain, count)
    return listening, Seeing(CACHED + tables, ledger, {"audio": vision.media}, "", speech)
