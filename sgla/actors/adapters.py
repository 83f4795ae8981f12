"""The adapters that requests may name, and how they come and go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from os.path import realpath
from pathlib import Path
from typing import Any

import msgspec

from sgla.actors.works import Works
from sgla.cache.spaces import ADAPTED
from sgla.config import Config
from sgla.errors import (
    ConfigError,
    InvalidAdapter,
    InvalidField,
    ModelNotFound,
    SglaError,
    UnsupportedField,
)
from sgla.hub.adapter import CONFIG, read_config
from sgla.messages import Control, Keep

MOST_NAME, MOST_PATH = 256, 4096  # characters
NONE = "0"  # in the place of an adapter, of a request without one whose space begins so, too
Tell = Callable[[Control], Awaitable[dict[str, Any]]]  # the workers


class Adapter(msgspec.Struct, kw_only=True, eq=False):
    """``number``: of this load, by which scheduler and workers know it. ``content``: a hash of its weights,
    by which its prefixes are known. ``users``: open requests that have it; ``idle`` is set when there are
    none."""

    name: str
    folder: str
    number: int
    content: str = ""
    pinned: bool = False
    users: int = 0
    idle: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


def check_folders(config: Config) -> None:
    """Raise ConfigError for adapters that are none, or that say of themselves what is refused, for which
    nobody should have to load a model. Hosts that Ray chooses look for themselves."""
    for name, _, folder in (entry.partition("=") for entry in config.lora_modules):
        if config.executor == "ray":
            continue
        if not os.path.isfile(os.path.join(folder, CONFIG)):
            raise ConfigError(f"--lora-modules {name}: {folder} has no {CONFIG}", param="lora_modules")
        try:
            read_config(Path(folder), config.max_lora_rank)
        except InvalidAdapter as error:
            raise ConfigError(f"--lora-modules {name}: {error.message}", param="lora_modules") from error


class AdapterTable:
    """``loaded``: by name. A name that is loaded anew is another adapter, with another number."""

    def __init__(self, config: Config) -> None:
        self.loaded: dict[str, Adapter] = {}
        self._config = config
        self._by_number: dict[int, Adapter] = {}  # those that are leaving, too
        self._coming: dict[str, bool] = {}  # names that are being loaded, and whether they will be pinned
        self._works = Works()
        self._last = 0
        self._tell: Tell | None = None
        self._keep: Callable[[Keep], None] = lambda told: None

    def connect(self, tell: Tell, keep: Callable[[Keep], None]) -> None:
        """``tell`` the workers; ``keep``: the scheduler's."""
        self._tell, self._keep = tell, keep

    def find(self, asked: str, names: list[str]) -> Adapter | None:
        """By its name, alone or behind one of the base's ``names`` and a colon."""
        behind = (asked[len(base) + 1 :] for base in names if asked.startswith(f"{base}:"))
        return next((self.loaded[name] for name in (asked, *behind) if name in self.loaded), None)

    def named(self, name: str, param: str = "lora_path") -> Adapter:
        """Raises UnsupportedField, ModelNotFound."""
        self._require()
        if name not in self.loaded:
            there = ", ".join(list(self.loaded)[:20]) or "none"
            raise ModelNotFound(f"adapter {name[:200]!r} is not loaded; there are {there}", param=param)
        return self.loaded[name]

    def check(self, number: int) -> None:
        """Raises ModelNotFound if it is gone since somebody found it."""
        if number:
            found = self._by_number.get(number)
            if found is None or self.loaded.get(found.name) is not found:
                raise ModelNotFound("the adapter has been unloaded", param="model")

    def namespace(self, space: str, number: int) -> str:
        """The part of the prefix cache that a request has with its adapter, in the ``space`` that it may use.
        No space of a request without adapter begins like that of one with it."""
        if not number and not space.startswith(ADAPTED):
            return space
        found = self._by_number.get(number)
        return f"{ADAPTED}{found.content if found else number or NONE}{ADAPTED}{space}"

    def of(self, namespace: str) -> int:
        """The number of the adapter that a namespace of another server has, by its weights; 0: none. Raises
        ModelNotFound if it is not loaded here."""
        content = namespace.split(ADAPTED, 2)[1] if namespace.startswith(ADAPTED) else NONE
        if content == NONE:
            return 0
        for adapter in self.loaded.values():
            if adapter.content == content:
                return adapter.number
        raise ModelNotFound("an adapter is not loaded here; both servers need it", param="lora_path")

    def use(self, number: int) -> None:
        """A request with it is opened."""
        if number:
            self._by_number[number].users += 1
            self._by_number[number].idle.clear()

    def leave(self, number: int) -> None:
        """The request has ended."""
        if number:
            found = self._by_number[number]
            found.users -= 1
            if not found.users:
                found.idle.set()

    async def begin(self, tell: Tell) -> None:
        """Load those of the settings. Raises ConfigError."""
        self._tell = tell
        for entry in self._config.lora_modules:
            name, _, folder = entry.partition("=")
            try:
                await self._load(name, Path(folder), pinned=False)
            except SglaError as error:
                raise ConfigError(f"--lora-modules {name}: {error.message}", param="lora_modules") from error

    async def load(self, name: str, folder: str, pinned: bool = False, trusted: bool = False) -> Adapter:
        """``trusted``: who asks may read any folder. Raises InvalidAdapter and other BadRequest kinds."""
        self._require()
        own = self._config.lora_folders
        try:
            path = Path(folder) if trusted else inside(folder, own, "lora_path", "--lora-folders")
        except InvalidField as error:
            raise InvalidAdapter(error.message, param="lora_path") from None
        return await self._works.whole(self._load(name, path, pinned))

    async def unload(self, name: str) -> None:
        """No new request may have it; it is gone when those that are open are done."""
        adapter = self.named(name, "lora_name")
        del self.loaded[name]
        await self._works.whole(self._drop(adapter))

    async def _drop(self, adapter: Adapter) -> None:
        assert self._tell is not None
        if adapter.users:
            await adapter.idle.wait()
        del self._by_number[adapter.number]
        self._keep(Keep(adapter.number, pinned=False))
        await self._tell(Control(verb="adapter_drop", args={"number": adapter.number}))

    async def _load(self, name: str, folder: Path, pinned: bool) -> Adapter:
        assert self._tell is not None
        self._check(name, pinned)
        self._last += 1
        adapter = Adapter(name=name, folder=str(folder), number=self._last, pinned=pinned)
        args = {"number": adapter.number, "path": str(folder)}
        self._coming[name] = pinned
        try:
            told = await self._tell(Control(verb="adapter_load", args=args))
        except SglaError:
            await self._tell(Control(verb="adapter_drop", args=args))  # other ranks may have it
            raise
        finally:
            del self._coming[name]
        first = told["ranks"][0] if "ranks" in told else told
        adapter.content = first.get("content", f"#{adapter.number}")
        self.loaded[name] = self._by_number[adapter.number] = adapter
        if pinned:
            self._keep(Keep(adapter.number, pinned=True))
        return adapter

    def _require(self) -> None:
        if not (self._config.enable_lora or self._config.lora_modules):
            raise UnsupportedField(
                "this server has no adapters; start it with --enable-lora", param="lora_path"
            )

    def _check(self, name: str, pinned: bool) -> None:
        """Raises InvalidField for a name that cannot be loaded."""
        config, limit = self._config, self._config.max_cpu_loras
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            text = f"lora_name must have 1 to {MOST_NAME} characters that can be printed"
            raise InvalidField(text, param="lora_name")
        if name in (config.served_model_name or [config.model]):
            raise InvalidField(f"{name!r} is the model's name", param="lora_name")
        if name in self.loaded or name in self._coming:
            raise InvalidField(f"adapter {name!r} is loaded already; unload it first", param="lora_name")
        if limit is not None and len(self._by_number) + len(self._coming) >= limit:
            raise InvalidField(
                f"{limit} adapters are loaded, which is the limit; unload one, or start the server with a "
                "larger --max-cpu-loras",
                param="lora_name",
            )
        pins = sum(adapter.pinned for adapter in self._by_number.values()) + sum(self._coming.values())
        if pinned and pins >= config.max_loras - 1:
            raise InvalidField(
                f"{pins} adapters are pinned, and one of the {config.max_loras} places (--max-loras) must "
                "stay for others",
                param="pinned",
            )


def inside(folder: str, folders: list[str], param: str, flag: str) -> Path:
    """Raises InvalidField for what is not inside of one of the ``folders``, or no folder. Each part of a path
    is looked at."""
    if len(folder) > MOST_PATH:
        raise InvalidField(
            f"{param} has {len(folder)} characters; at most {MOST_PATH} are taken", param=param
        )
    try:
        path = Path(realpath(folder))
        below = any(path.is_relative_to(realpath(own)) for own in folders)
    except ValueError as error:
        raise InvalidField(f"{param} is no folder: {error}", param=param) from None
    if not below:
        raise InvalidField(
            f"{param} must be a folder inside of what {flag} says, with which the server was started",
            param=param,
        )
    return path
