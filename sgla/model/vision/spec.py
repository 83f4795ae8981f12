"""What an entry of the tables of families that take pictures, or sounds, may say. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from sgla.messages import Dictation, Prepared

Config = Mapping[str, Any]
WHERE = ("", "model.", "thinker.")  # modules are in checkpoints


class Settings(NamedTuple):
    """The contents of the model's ``preprocessor_config.json``, of ``processor_config.json``, and of
    ``video_preprocessor_config.json``; ``sounds``: where they have those of its feature extractor."""

    images: dict[str, Any]
    processor: dict[str, Any]
    videos: Mapping[str, Any] = MappingProxyType({})
    sounds: Mapping[str, Any] = MappingProxyType({})


class Spelled(NamedTuple):
    """What stands in a prompt in place of a picture: ``text``, where the token that stands for a part of it
    comes once wherever it comes several times, and how many times each."""

    text: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Film:
    """How a family takes videos beside pictures, which the same tower sees; see ``Vision``. ``processor``: a
    key of ``media/film.py``'s settings, or of ``media/frames.py``'s functions. ``paced``: how many positions
    a second has, if they go by time; ``apart``: the tower is shown its steps in time as pictures."""

    processor: str
    token: tuple[str, int]
    written: str
    media: str
    spelled: Callable[[Config, Settings, Prepared], Spelled]
    paced: Callable[[Config], float] | None = None
    apart: bool = False
    things: str = "videos"

    def token_of(self, config: Config) -> int:
        return _token(config, self.token)


@dataclass(frozen=True)
class Vision:
    """``kind``: what is taken, "image" or "audio"; below, a sound is meant wherever it says picture.
    ``processors``: classes of transformers that prepare pictures, as files name them; the first where they
    name none. ``token``: the key of config.json with the id of the token that stands for a part of a
    picture, and what it is where the file lacks it. ``written``: what a chat template writes for a
    picture, and ``media`` with what belongs around it. ``spelled``: what becomes of that, by
    configuration, settings and arrays; ``joined``: of the whole text, then, where pictures change what is
    around them. ``parts``: modules of the checkpoint beside the language model; ``unread``: those that
    nothing is made with. ``together``: tokens of a
    picture see each other; ``windowed``: in layers with windows alone. ``prepares``: settings of the
    processor that its class in transformers adds; ``sizes``: those that users may give other values.
    ``alone``: the only picture of a prompt is prepared otherwise than one of several. ``prefix``: all
    tokens of a prompt see each other, and ``framed`` is what becomes of a plain text with placeholders.
    ``merged``: positions go by three axes, and this many patches a side are one token; ``sections``: how
    many frequencies go by each axis, and whether they take turns. ``film``: how videos are taken, and
    ``sounds``: how sounds are, if they are taken beside pictures. ``apart``: a picture is a prompt by itself,
    of which a vector is made. ``crossed``: layers attend to the features, which stand in place of no tokens,
    and the model does nothing else. ``dictation``: how a model for chats is asked to transcribe. ``heard``:
    whether a sound is heard at once, which bounds its length, filled up to that ("once"), without what it is
    filled up with ("trimmed") or by an extractor of its own ("masked"); in windows of equal length; or as it
    is, in chunks."""

    processors: tuple[str, ...]
    token: tuple[str, int]
    written: str
    media: str
    spelled: Callable[[Config, Settings, Prepared], Spelled]
    joined: Callable[[str], str] | None = None
    parts: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    unread: tuple[str, ...] = ()
    together: bool = False
    windowed: bool = False
    prepares: Callable[[Config, Settings], dict[str, Any]] = lambda config, settings: {}
    sizes: tuple[str, ...] = ()
    alone: bool = False
    prefix: bool = False
    framed: Callable[[str], str] | None = None
    merged: Callable[[Config], int] | None = None
    sections: Callable[[Config], tuple[list[int], bool]] = lambda config: ([], False)
    kind: str = "image"
    film: Film | None = None
    sounds: Vision | None = None
    apart: bool = False
    crossed: bool = False
    dictation: Dictation | None = None
    heard: Literal["once", "trimmed", "masked", "windows", "chunks"] = "once"

    @property
    def things(self) -> str:
        """In messages."""
        return "pictures" if self.kind == "image" else "sounds"

    @property
    def names_of_parts(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that features are made with."""
        parts = (*self.parts, *(() if self.sounds is None else self.sounds.parts))
        return tuple(f"{where}{part}" for where in WHERE for part in parts)

    @property
    def hearing(self) -> Vision | None:
        """How sounds are taken."""
        return self if self.kind == "audio" else self.sounds

    @property
    def takers(self) -> dict[str, Vision | Film]:
        """How each kind of media is taken."""
        found = {self.kind: self, "video": self.film, "audio": self.hearing}
        return {kind: taker for kind, taker in found.items() if taker is not None}

    @property
    def ahead(self) -> bool:
        """Some tokens see others that come behind them."""
        return self.together or self.prefix

    def processor_of(self, settings: Settings) -> str:
        """The class of transformers that prepares them."""
        known, key = settings.images, "image_processor_type"
        if self.kind == "audio":
            known, key = dict(settings.sounds), "feature_extractor_type"
        asked = known.get(key, "").removesuffix("Fast").removesuffix("Pil")
        return asked if asked in self.processors else self.processors[0]

    def token_of(self, config: Config) -> int:
        return _token(config, self.token)

    def tokens_of(self, config: Config) -> tuple[int, ...]:
        """Of all kinds of media."""
        return tuple(taker.token_of(config) for taker in self.takers.values())


def _token(config: Config, token: tuple[str, int]) -> int:
    key, default = token
    found: int = config.get(key, default)
    return found


def array(picture: Prepared, name: str) -> list[int]:
    """The shape of one of its arrays."""
    return next(found.shape for found in picture.arrays if found.name == name)


def values(picture: Prepared, name: str) -> list[int]:
    """Those of a small array of whole numbers."""
    return next((found.values for found in picture.arrays if found.name == name), [])


def vision_config(config: Config) -> Config:
    found: Config = config.get("vision_config") or {}
    return found
