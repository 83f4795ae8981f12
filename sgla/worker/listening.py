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
from sgla.worker.place import Cpu, Place
from sgla.worker.seeing import Seeing


class Listening:
    """``dtype``: of the tables; ``activations``: of what layers read; ``count``: threads."""

    def __init__(
        self, cache: FeatureCache, places: int, dtype: torch.dtype, activations: torch.dtype, count: int
    ) -> None:
        self._cache, self._places, self._count = cache, places, count
        self.dtype, self._activations = dtype, activations

    @property
    def computed(self) -> int:
        """Windows of sounds that the encoder has heard."""
        return self._cache.computed

    def admit(self, new: NewRow, model: CausalLM) -> None:
        """The slot has another request, which hears one window."""
        for placed in new.pictures:
            with threads(self._count):
                heard = self._cache.of(placed.picture, self._places).values
                model.hear(new.slot, heard.to(self._activations))


def open_listening(
    config: Config, source: ModelSource, spec: ModelSpec, dtype: str, slots: int, ranks: int, place: Place
) -> tuple[Listening, Seeing]:
    """Raises ConfigError and WeightError."""
    vision, _ = vision_of(config, source)
    assert vision is not None
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    tower = load_tower(source, vision, plain, place.torch, config.random_seed or 0)
    own = sum(-(-layer.heads // ranks) * layer.head_dim for layer in spec.attention)
    tables = 2 * slots * spec.heard * own * plain.itemsize
    ledger = {"tower": tower.nbytes, "sounds": CACHED, "cross": tables}
    speech = read_speech(source, dict(settings_of(source.folder).sounds))
    activations, count = plain, torch.get_num_threads()
    if isinstance(place, Cpu):
        activations, count = torch.float32, place.threads
    if ranks > 1:
        speech.aligned = []  # each has some of the heads
    cache = FeatureCache(tower, spec.hidden, CACHED)
    listening = Listening(cache, spec.heard, plain, activations, count)
    return listening, Seeing(CACHED + tables, ledger, {"audio": vision.media}, "", speech)
