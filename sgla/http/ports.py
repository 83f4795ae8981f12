"""What handlers need of the engine: the part of ``actors.ingress.Ingress`` that they call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sgla.actors.adapters import AdapterTable
from sgla.actors.ingress import Sink
from sgla.actors.lanes import Lanes
from sgla.actors.resting import Clear
from sgla.defaults import Defaults
from sgla.media.pool import Pool
from sgla.messages import Control, Facts, Job
from sgla.model.sizes import Outline


class Progress(Protocol):
    message: str
    done: int
    total: int


class Ingress(Protocol):
    """The engine as handlers see it.
    ``tokenizer``, ``template`` and ``facts`` are None until the model is loaded."""

    @property
    def phase(self) -> str: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def ready(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """Why it is not ready, for people."""

    @property
    def model_names(self) -> list[str]: ...

    @property
    def adapters(self) -> AdapterTable: ...

    @property
    def facts(self) -> Facts | None: ...

    @property
    def lanes(self) -> Lanes:
        """For work on texts."""

    @property
    def media(self) -> Pool:
        """The processes in which pictures are decoded."""

    @property
    def pictures(self) -> Any:
        """``actors.pictures.PictureRoom``; None for a model that takes none, as the next one."""

    @property
    def speller(self) -> Any:
        """``text.pictures.Speller``"""

    @property
    def tokenizer(self) -> Any:
        """``text.tokenizer.Tokenizer``"""

    @property
    def template(self) -> Any:
        """``text.process.BoundedTemplate``; None also for a model without one."""

    @property
    def model(self) -> Outline | None:
        """None until it is loaded."""

    @property
    def default_sampling(self) -> Defaults: ...

    def require_ready(self, resting: bool = False) -> None:
        """Raise the typed 503 that says why requests are not accepted now."""

    def open_all(self, jobs: Sequence[tuple[Job, Sink]], extra: bool = False) -> None:
        """Admit requests, all or none, or raise the SglaError that refuses them; never waits. ``extra``:
        beyond the capacity, and without taking room from others."""

    async def room(self, job: Job) -> None:
        """Wait until ``open_all`` would refuse the job no longer for want of room."""

    def cancel(self, rid: str, reason: str) -> bool:
        """Forget the request and free what it holds; nothing more reaches its sink.
        False if it is not open."""

    def preparing(self, rid: str) -> bool:
        """Whether the request may yet be refused."""

    def stats(self) -> Any:
        """``sched.stats.Stats``, None until the model is loaded."""

    async def flush_cache(self) -> bool: ...

    @property
    def dozing(self) -> bool:
        """Whether it sleeps until somebody comes."""

    def enter(self) -> None:
        """Somebody comes, who leaves by ``leave``; meanwhile the model does not begin to doze."""

    def leave(self) -> None: ...

    async def awake(self) -> None:
        """Return when a model that dozes, or is not loaded before somebody comes, can do something."""

    @property
    def paused(self) -> bool: ...

    def pause(self, paused: bool) -> None:
        """Stop generating, or go on."""

    async def sleep(self, kv: bool, weights: str, clear: Clear | None = None) -> bool:
        """Give memory back; False: requests are open. ``clear``, here and below: what ends those that run,
        called once it is known that nothing else is in the way."""
        ...

    async def wake(self, parts: Collection[str] = ...) -> None: ...

    async def update_weights(
        self, folder: str, version: str | None, trusted: bool = False, clear: Clear | None = None
    ) -> bool:
        """False: requests are open."""
        ...

    async def take_tensors(
        self,
        payloads: Sequence[bytes],
        version: str | None,
        names: Sequence[str] = (),
        clear: Clear | None = None,
    ) -> bool: ...

    async def check_weights(self, action: str) -> list[dict[str, Any]]: ...
    async def show_weights(self, name: str, rows: int) -> list[Any]: ...
    async def scramble_weights(self) -> bool: ...
    async def take_from_servers(
        self, servers: Mapping[str, str], version: str | None, clear: Clear | None = None
    ) -> bool: ...

    async def join_trainer(self, group: str, **where: Any) -> None: ...

    async def leave_trainer(self, group: str) -> None: ...

    async def take_from_trainer(
        self,
        group: str,
        tensors: Sequence[tuple[str, Sequence[int], str]],
        version: str | None,
        clear: Clear | None = None,
    ) -> bool: ...

    @property
    def weight_version(self) -> str: ...

    def name_weights(self, version: str) -> None: ...

    async def place_experts(self) -> list[dict[str, Any]]: ...
    async def count_experts(self, verb: str, every: int = 0) -> Any: ...
    async def control(self, command: Control) -> Any: ...

    @property
    def files(self) -> Mapping[str, Path]:
        """Those of the model, by name; none until it is loaded."""

    @property
    def step_log(self) -> Callable[[str], bytes] | None:
        """Writes the scheduler's last steps; None if they are not kept."""
