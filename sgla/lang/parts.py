"""What a program appends to its state: texts, roles, and what the model is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from sgla.errors import InvalidField
from sgla.lang.choices import ChoicesMethod
from sgla.lang.sampling import Sampling

ROLES = ("system", "user", "assistant")


class Part:
    """``part + part``, and a text on either side, is a part again."""

    def __add__(self, other: Any) -> Part:
        return Several((self, as_part(other)))

    def __radd__(self, other: Any) -> Part:
        return Several((as_part(other), self))


@dataclass(frozen=True)
class Several(Part):
    """One behind the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Text(Part):
    text: str


@dataclass(frozen=True)
class Medium(Part):
    """A picture or a video (``kind``), as an address: a URL, or a data URL with what is in a file.
    ``frames``: of a video, how many are seen; None: as the model's files say."""

    kind: Literal["image", "video"]
    url: str
    frames: int | None = None

    @property
    def part(self) -> dict[str, Any]:
        """Of a message, as OpenAI's API has it."""
        name = f"{self.kind}_url"
        return {"type": name, name: {"url": self.url}}


@dataclass(frozen=True)
class Begin(Part):
    """A message of this role."""

    role: str


@dataclass(frozen=True)
class End(Part):
    role: str


@dataclass(frozen=True)
class ScopeBegin(Part):
    """What is appended up to its end is the variable of this name."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Part):
    name: str


@dataclass(frozen=True)
class Gen(Part):
    """Text by the model."""

    name: str | None
    sampling: Sampling


@dataclass(frozen=True)
class Select(Part):
    """That one of ``choices`` which the model finds most probable, by ``method``."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


class Unknown(Exception):
    """A traced program looks at what only a run has."""


class Argument(Part):
    """What stands for an argument of a traced program: it can be appended, and ends the trace where the
    program wants its value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _look(self, *_: Any, **__: Any) -> NoReturn:
        raise Unknown(self.name)

    __str__ = __repr__ = __format__ = __len__ = __iter__ = __bool__ = __getitem__ = __contains__ = _look
    __int__ = __float__ = __index__ = __call__ = __eq__ = __ne__ = __lt__ = __gt__ = __getattr__ = _look  # type: ignore[assignment]
    __hash__ = _look  # type: ignore[assignment]


def as_part(value: Any) -> Part:
    """Raises InvalidField for what is neither a text nor a part."""
    if isinstance(value, Part):
        return value
    if isinstance(value, str):
        return Text(value)
    raise InvalidField(
        f"a program appends texts and parts such as gen(), not a value of type {type(value).__name__}; "
        "make it a text with str()"
    )


def flat(part: Part) -> Iterator[Part]:
    """Its parts in order, none of which is Several."""
    if isinstance(part, Several):
        for one in part.parts:
            yield from flat(one)
    else:
        yield part
