"""The state of a program: what has been appended, done in the background in the order in which it came."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from sgla.errors import InvalidField, UnsupportedField
from sgla.lang import choices
from sgla.lang.backends.base import Backend, Conversation, Prompt
from sgla.lang.parts import (
    Begin,
    End,
    Gen,
    Medium,
    Part,
    ScopeBegin,
    ScopeEnd,
    Select,
    Several,
    Text,
    as_part,
    flat,
)
from sgla.lang.sampling import Sampling


class Written:
    """What a program has written so far. A text, or a conversation: messages with roles, of which the last
    one may be open."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str | None, str]] = []  # a variable and a text that is part of it
        self.messages: list[dict[str, Any]] = []
        self.role: str | None = None
        self.content = ""  # of the open message, behind its last picture
        self.parts: list[dict[str, Any]] = []  # what is before that
        self.frames: int | None = None  # of videos that are seen, where the program says it
        self.scopes: dict[str, int] = {}  # open ones, and where in the text they began

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def chat(self) -> bool:
        return self.role is not None or bool(self.messages)

    def add(self, text: str, name: str | None = None) -> None:
        """Raises InvalidField for a text between messages."""
        if self.role is None and self.messages and text:
            raise InvalidField(f"{text[:100]!r} stands between messages; append it inside of a role")
        self.content += text if self.role is not None else ""
        self.pieces.append((name, text))

    def show(self, medium: Medium) -> None:
        """Raises InvalidField where no picture can stand, and for videos of several numbers of frames."""
        if self.role is None or self.role == "assistant":
            raise InvalidField(f"{medium.kind}() stands inside of user() or system()")
        if medium.frames is not None:
            if self.frames not in (None, medium.frames):
                raise InvalidField("all videos of a program have the same num_frames", param="num_frames")
            self.frames = medium.frames
        text = [{"type": "text", "text": self.content}] if self.content else []
        self.parts += [*text, medium.part]
        self.content = ""
        self.pieces.append((None, f"<{medium.kind}>"))

    def begin(self, role: str) -> None:
        if self.role is not None:
            raise InvalidField(f"{role}() begins before {self.role}() has ended")
        if not self.chat and self.text:
            raise InvalidField(f"{role}() follows a text without a role; begin the program with a role")
        self.role = role
        self.pieces.append((None, f"{role}: "))

    def end(self, role: str) -> None:
        if self.role != role:
            raise InvalidField(f"{role}() ends, but has not begun")
        content: Any = self.content
        if self.parts:
            content = [*self.parts, {"type": "text", "text": content}] if content else self.parts
        self.messages.append({"role": role, "content": content})
        self.role, self.content, self.parts = None, "", []
        self.pieces.append((None, "\n"))

    def prompt(self) -> Prompt:
        """Of what the model writes next. Raises InvalidField where it cannot write."""
        if not self.chat:
            return self.text
        if self.role != "assistant":
            raise InvalidField("in a conversation gen() and select() stand inside of assistant()")
        return Conversation(list(self.messages), True, self.content, self.frames)

    def copy(self) -> Written:
        return copy.deepcopy(self)

    def behind(self, earlier: Written) -> str:
        """What has come to the text, or to the open message, since it was ``earlier``. Raises InvalidField
        where a message has ended since, or shows something more."""
        if len(self.messages) > len(earlier.messages):
            raise InvalidField(
                "branches that end a message cannot be appended; leave out the mode, and their variables "
                "come back as lists",
                param="mode",
            )
        if len(self.parts) > len(earlier.parts):
            raise InvalidField(
                "branches that show something cannot be appended; show it before the fork, or leave out the "
                "mode",
                param="mode",
            )
        return self.content[len(earlier.content) :] if self.chat else self.text[len(earlier.text) :]


class State:
    """What ``function`` gives a program as its first argument. Texts are appended at once; what the model
    writes comes while the program goes on, until that reads it: a variable, ``text``, ``fork``, ``sync``.

    The first error ends it: what is appended later, or read in vain, raises it. ``watched``: others read it
    while the program runs. ``threads``: False does everything when it is appended.
    """

    def __init__(
        self,
        backend: Backend,
        defaults: Sampling,
        *,
        stream: bool = False,
        watched: bool = False,
        threads: bool = True,
    ) -> None:
        self._backend = backend
        self._defaults = defaults
        self._stream = stream
        self._threads = threads
        self._changed = threading.Condition()
        self._waiting: deque[Part] = deque()
        self._running = False
        self._open = watched  # the program may append more
        self._writer = 0  # the thread of a program that is watched
        self._error: BaseException | None = None
        self._heard = False  # somebody was told of the error
        self._branches: list[State] = []
        self._written = Written()
        self._variables: dict[str, Any] = {}
        self._due: Counter[str | None] = Counter()  # variables that what waits will write
        self._meta: dict[str, Any] = {}
        self.ret_value: Any = None  # what the program's function returns

    # appending

    def __iadd__(self, value: Any) -> Self:
        self.append(as_part(value))
        return self

    def append(self, part: Part) -> None:
        """Raises what the state has ended with."""
        with self._changed:
            self._check()
            parts = list(flat(part))
            self._waiting.extend(parts)
            self._due.update(one.name for one in parts if isinstance(one, (Gen, Select, ScopeEnd)))
            if self._running:
                return
            self._running = True
        self._work(not self._threads)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            self._heard = True
            raise self._error

    def system(self, part: Any = None) -> Any:
        return self._role("system", part)

    def user(self, part: Any = None) -> Any:
        return self._role("user", part)

    def assistant(self, part: Any = None) -> Any:
        return self._role("assistant", part)

    def _role(self, role: str, part: Any) -> AbstractContextManager[None] | None:
        if part is None:
            return self._between(Begin(role), End(role))
        self.append(Several((Begin(role), as_part(part), End(role))))
        return None

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """What is appended inside is the variable ``name``."""
        return self._between(ScopeBegin(name), ScopeEnd(name))

    @contextmanager
    def _between(self, before: Part, after: Part) -> Iterator[None]:
        self.append(before)
        yield
        self.append(after)

    # doing

    def _work(self, thorough: bool) -> None:
        """Do what waits; unless ``thorough``, only what takes no time, and the rest in a thread."""
        while True:
            with self._changed:
                if self._error is not None or not self._waiting:
                    self._waiting.clear()
                    self._running = False
                    self._changed.notify_all()
                    return
                if not thorough and isinstance(self._waiting[0], (Gen, Select)):
                    threading.Thread(target=self._work, args=(True,), daemon=True).start()
                    return
                part = self._waiting.popleft()
            try:
                self._do(part)
                if isinstance(part, (Gen, Select, ScopeEnd)):
                    self._written_out(part.name)
            except Exception as error:
                self.fail(error)

    def _do(self, part: Part) -> None:
        match part:
            case Text(text):
                self._add(text)
            case Medium():
                self._written.show(part)
            case Begin(role):
                self._written.begin(role)
            case End(role):
                self._written.end(role)
            case ScopeBegin(name):
                self._written.scopes[name] = len(self._written.text)
            case ScopeEnd(name):
                self.set_var(name, self._written.text[self._written.scopes.pop(name) :])
            case Gen():
                self._generate(part)
            case Select():
                self._select(part)
            case _:
                raise InvalidField(f"{type(part).__name__} has a meaning in traced programs alone")

    def _add(self, text: str, name: str | None = None) -> None:
        with self._changed:
            self._written.add(text, name)
            self._changed.notify_all()

    def _generate(self, part: Gen) -> None:
        sampling = part.sampling.over(self._defaults)
        prompt, name = self._written.prompt(), part.name
        if self._stream and (sampling.n or 1) == 1:
            text, meta = "", dict[str, Any]()
            for piece, meta in self._backend.stream(prompt, sampling):
                text += piece
                self._tell(name, meta)
                self._add(piece, name)
            self._set(name, text, meta)
            return
        found = self._backend.generate(prompt, sampling)
        self._add(found[0][0], name)
        if (sampling.n or 1) > 1:  # the program goes on with the first
            self._set(name, [text for text, _ in found], [meta for _, meta in found])
        else:
            self._set(name, *found[0])

    def _select(self, part: Select) -> None:
        scored = self._backend.score(self._written.prompt(), part.choices, part.method.alone)
        chosen, told = part.method.pick(scored)
        self._add(part.choices[chosen], part.name)
        self._set(part.name, part.choices[chosen], choices.meta(scored, told))

    def _set(self, name: str | None, value: Any, meta: Any) -> None:
        if name is not None:
            self._tell(name, meta)
            self.set_var(name, value)

    def _tell(self, name: str | None, meta: Any) -> None:
        if name is not None:
            self._meta[name] = meta

    def _written_out(self, name: str | None) -> None:
        with self._changed:
            self._due[name] -= 1
            self._changed.notify_all()

    def _has(self, name: str | None) -> bool:
        """The variable is there, and nothing that waits will write it again."""
        return name in self._variables and not self._due[name]

    def fail(self, error: BaseException) -> None:
        """End it with ``error``, if it has not ended with another one."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def end_branches(self) -> None:
        """Wait for all branches. One that has failed, of which the program has not heard, ends this state."""
        for branch in self._branches:
            branch.end_branches()
            heard = branch._heard
            error = branch.error()
            if error is not None and not heard:
                self.fail(error)

    def own(self) -> None:
        """This thread runs the program."""
        self._writer = threading.get_ident()

    def close(self) -> None:
        """The program has appended all."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    # reading

    def sync(self) -> None:
        """Wait for all that has been appended. Raises what the state has ended with."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle)
        self._check()

    @property
    def _idle(self) -> bool:
        """Nothing more comes, as far as this thread can wait for it."""
        ended = not self._open or self._error is not None or self._writer == threading.get_ident()
        return ended and not self._running

    def get_var(self, name: str) -> Any:
        """Wait for the variable, where the name stands more than once, for its latest value. Raises KeyError
        if there is none, or what the state has ended with."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(name) or self._idle)
            if not self._has(name):
                self._check()
            return self._variables[name]

    def set_var(self, name: str, value: Any) -> None:
        with self._changed:
            self._variables[name] = value
            self._changed.notify_all()

    def get_meta_info(self, name: str) -> Any:
        """What the backend tells of the request that the variable comes from."""
        self.get_var(name)
        return self._meta[name]

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def text(self) -> str:
        """All texts; of a conversation with the role in front of each message."""
        self.sync()
        return self._written.text

    def messages(self) -> list[dict[str, Any]]:
        """Those of a conversation that have ended."""
        self.sync()
        return list(self._written.messages)

    def error(self) -> BaseException | None:
        """What it has ended with, once all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle)
        self._heard = True
        return self._error

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The texts as they come, or those of a variable. Raises what the state ends with."""
        for text, _ in self._texts(var_name):
            yield text

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """``text_iter`` for asyncio code; ``return_meta_data``: pairs of a text and its ``get_meta_info``."""
        texts = self._texts(var_name)
        while (found := await asyncio.to_thread(next, texts, None)) is not None:
            yield found if return_meta_data else found[0]

    def _texts(self, name: str | None) -> Iterator[tuple[str, Any]]:
        read, shown = 0, False
        while True:
            with self._changed:
                pieces, ended = self._new(name, read)
            read += len(pieces)
            for variable, text in pieces:
                if text and name in (None, variable):
                    shown = True
                    yield text, self._meta.get(variable or "")
            if ended and not pieces:
                break
        if name is not None and not shown:
            yield str(self.get_var(name)), self._meta.get(name)
        elif not self._has(name):
            self._check()

    def _new(self, name: str | None, read: int) -> tuple[list[tuple[str | None, str]], bool]:
        """The pieces behind the first ``read``, once there are some or no more will come, which the second
        value tells."""

        def ended() -> bool:
            return self._idle or self._has(name)

        self._changed.wait_for(lambda: len(self._written.pieces) > read or ended())
        return self._written.pieces[read:], ended()

    # branches

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> Forks:
        """``size`` states that go on from here, side by side. A server computes what they share once."""
        if position_ids_offset is not None:
            raise UnsupportedField("position_ids_offset is not supported", param="position_ids_offset")
        if size < 1:
            raise InvalidField(f"fork() makes at least one branch, got {size}", param="size")
        self.sync()
        return Forks(self, [self._branch() for _ in range(size)])

    def _branch(self) -> State:
        branch = State(self._backend, self._defaults, stream=self._stream, threads=self._threads)
        branch._written = self._written.copy()
        branch._variables, branch._meta = dict(self._variables), dict(self._meta)
        self._branches.append(branch)
        return branch

    @contextmanager
    def copy(self) -> Iterator[State]:
        """A branch of its own, whose variables come back as those of a fork do."""
        forks = self.fork(1)
        yield forks[0]
        forks.join()


class Forks:
    """Branches of a state. ``forks += part`` appends to all; a list or a function of the index brings each
    its own."""

    def __init__(self, source: State, states: list[State]) -> None:
        self._source = source
        self._states = states
        self._begun = source._written.copy(), set(source._variables)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __getitem__(self, index: int) -> State:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """For ``forks[i] += part``."""
        assert self._states[index] is state

    def __iadd__(self, value: Part | str | list[Any] | tuple[Any, ...] | Callable[[int], Any]) -> Self:
        if isinstance(value, (Part, str)):
            values: list[Any] = [value] * len(self)
        elif callable(value):
            values = [value(index) for index in range(len(self))]
        else:
            values = list(value)
        if len(values) != len(self):
            raise InvalidField(f"{len(self)} branches, but {len(values)} parts")
        for state, part in zip(self._states, values):
            state.append(as_part(part))
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all branches; raises the first error among them. ``gather_variable``: their new variables
        become the source's, as lists; ``concate_and_append``: their texts are appended to it in order."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise InvalidField(
                f"mode must be gather_variable or concate_and_append, got {mode!r}", param="mode"
            )
        errors = [state.error() for state in self._states]
        for error in filter(None, errors):
            raise error
        written, names = self._begun
        if mode == "concate_and_append":
            for state in self._states:
                self._source.append(Text(state._written.behind(written)))
            return
        found: dict[str, list[Any]] = {}
        for state in self._states:
            for name in state._variables.keys() - names:
                found.setdefault(name, []).append(state._variables[name])
        for name, values in found.items():
            self._source.set_var(name, values)
