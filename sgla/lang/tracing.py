"""What a program appends before it knows anything: without a model, with a stand-in for each argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sgla.lang.backends.base import Conversation, Prompt
from sgla.lang.parts import Argument, Begin, End, Medium, Part, Text, Unknown, flat
from sgla.lang.sampling import Sampling
from sgla.lang.state import State, Written


@dataclass
class Trace:
    """``parts`` in order, up to where the program looks at what only a run has; ``complete``: it never
    does."""

    parts: list[Part] = field(default_factory=list)
    complete: bool = False

    def prefix(self) -> Prompt:
        """What every run begins with: a text, or whole messages. Empty if there is none."""
        written, ended = Written(), 0
        for part in self.parts:
            match part:
                case Text(text):
                    written.add(text)
                case Medium():
                    written.show(part)
                case Begin(role):
                    written.begin(role)
                case End(role):
                    written.end(role)
                    ended = len(written.messages)
                case _:
                    break
        if not written.chat:
            return written.text
        return Conversation(written.messages[:ended], False, frames=written.frames)


class Tracer(State):
    def __init__(self, trace: Trace) -> None:
        super().__init__(backend=None, defaults=Sampling())  # type: ignore[arg-type]
        self._trace = trace

    def append(self, part: Part) -> None:
        self._trace.parts += flat(part)

    def _look(self, *_: Any, **__: Any) -> NoReturn:
        raise Unknown("a run's state")

    sync = error = text = messages = get_var = get_meta_info = fork = __contains__ = _look


def trace(program: Callable[..., Any], names: list[str], bound: dict[str, Any]) -> Trace:
    """Of ``program(state, **arguments)``. An error of the program ends the trace: its arguments are not what
    it expects."""
    found = Trace()
    arguments = {name: Argument(name) for name in names} | bound
    try:
        program(Tracer(found), **arguments)
        found.complete = True
    except Exception:
        pass
    return found
