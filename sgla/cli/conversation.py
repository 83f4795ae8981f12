"""A conversation and the commands that change it; what is typed and shown is the business of others."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sgla.defaults import number
from sgla.errors import SglaError
from sgla.homes import expanded

Messages = list[dict[str, Any]]
HELP = """/system [TEXT]     what the model is told before all else; without TEXT: nothing
/image PATH        a picture, or its URL, that goes with the next message
/set [NAME VALUE]  temperature, max_tokens, seed, ...; without VALUE: the default again; alone: what is set
/save FILE         write the conversation to a file
/load FILE         go on with one
/clear             forget the conversation
/exit, Ctrl-D      leave; Ctrl-C stops an answer"""
COMMANDS = ("/system", "/image", "/set", "/save", "/load", "/clear", "/help", "/exit")
SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size"),
)


class Backend(Protocol):
    """Where answers come from. Closing the generator before its end cancels the request."""

    name: str
    about: str  # of the model, for whoever begins to talk to it; "" if there is nothing to say
    options: dict[str, Any]  # sampling fields that every request has
    finish: str | None  # how the latest answer has ended

    def stream(self, messages: Messages) -> Generator[str, None, None]: ...


class Saved(msgspec.Struct):
    """The content of a file."""

    messages: list[dict[str, Any]]
    options: dict[str, int | float] = {}


class Leave(Exception):
    """The user has had enough."""


class Conversation:
    def __init__(self, backend: Backend, system: str | None = None) -> None:
        self.backend = backend
        self.messages: Messages = []
        self.pictures: list[str] = []  # URLs of those that go with the next message
        self.system(system or "")

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; returns what to tell the user. Raises Leave."""
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/system": self.system,
            "/image": self.image,
            "/set": self.set,
            "/save": self.save,
            "/load": self.load,
            "/clear": self.clear,
            "/reset": self.clear,
        }
        if name in ("/exit", "/quit", "/bye"):
            raise Leave
        try:
            if name not in (*commands, "/help"):
                return f"there is no {name}\n{HELP}"
            return commands[name](rest.strip()) if name in commands else HELP
        except OSError as error:
            return f"{name}: {error.filename or rest.strip()}: {error.strerror}"
        except (ValueError, SglaError) as error:
            return f"{name}: {error}"

    def system(self, text: str) -> str:
        told = self.messages and self.messages[0]["role"] == "system"
        self.messages[: 1 if told else 0] = [{"role": "system", "content": text}] if text else []
        return "system message set" if text else "no system message"

    def image(self, file: str) -> str:
        self.pictures.append(file if file.startswith(("http://", "https://")) else data_url(named(file)))
        return f"{len(self.pictures)} to go with the next message"

    def say(self, text: str) -> None:
        """Add what the user says, with the pictures that go with it."""
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        self.pictures = []

    def set(self, text: str) -> str:
        options, (name, _, value) = self.backend.options, text.partition(" ")
        if name and name not in SETTINGS:
            return f"/set knows {', '.join(SETTINGS)}"
        if name and not value:
            options.pop(name, None)
        elif name:
            options[name] = checked(name, value_of(value))
        return ", ".join(f"{name} {options[name]}" for name in SETTINGS if name in options) or "all defaults"

    def save(self, file: str) -> str:
        path = named(file)
        if path.exists():
            read(path)  # nothing but a conversation is overwritten
        options = {name: value for name, value in self.backend.options.items() if name in SETTINGS}
        saved = {"messages": self.messages, "options": options}
        path.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
        return f"{len(self.messages)} messages written to {path}"

    def load(self, file: str) -> str:
        path = named(file)
        saved = read(path)
        options = {name: checked(name, value) for name, value in saved.options.items() if name in SETTINGS}
        self.messages = saved.messages
        self.backend.options |= options
        return f"{len(self.messages)} messages read from {path}"

    def clear(self, text: str = "") -> str:
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.pictures = []
        return "the conversation is forgotten"


def checked(name: str, value: float) -> float:
    """Raises ValueError for what the setting cannot be."""
    if name != "seed":
        try:
            return number(name, value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"seed must be an integer of at least 0, not {value}")
    return value


def named(file: str) -> Path:
    if not file:
        raise ValueError("name a file")
    return expanded(file)


def data_url(path: Path) -> str:
    """Of a picture. Raises ValueError for a file of another kind, by its name."""
    kind = mimetypes.guess_type(path.name, strict=False)[0] or ""
    if not kind.startswith("image/"):
        raise ValueError(f"{path} has no name of a picture, such as .png or .jpg")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def value_of(text: str) -> int | float:
    """Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=int | float)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{text!r} is no number") from error


def read(path: Path) -> Saved:
    """Raises ValueError for a file that holds no conversation."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no conversation: {error}") from error
    for message in saved.messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise ValueError(f"{path} holds no conversation: a message needs a role and a content")
    return saved
