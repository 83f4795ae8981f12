"""What the HTTP layer needs of the rest:
the shapes of ``actors.ingress.Ingress`` and of the text services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sgla.actors.lanes import Lanes
from sgla.defaults import Defaults
from sgla.messages import Control, Event, Facts, Job, Rejected


class Sink(Protocol):
    """Where the output of a request goes. ``push`` never blocks and never raises."""

    def push(self, message: Event | Rejected) -> None: ...


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Template(Protocol):
    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


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
    def facts(self) -> Facts | None: ...

    @property
    def lanes(self) -> Lanes:
        """For work on texts."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def template(self) -> Any: ...

    @property
    def architecture(self) -> str:
        """The name of the model's class."""

    @property
    def default_sampling(self) -> Defaults: ...

    def require_ready(self) -> None:
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

    def stats(self) -> Any: ...

    async def flush_cache(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    def pause(self, paused: bool) -> None:
        """Stop generating, or go on."""

    async def control(self, command: Control) -> Any: ...

    @property
    def step_log(self) -> Callable[[str], bytes] | None:
        """Writes the scheduler's last steps; None if they are not kept."""
