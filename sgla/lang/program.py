"""``function``: programs and their runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from sgla.errors import InvalidField
from sgla.lang.backends.base import Backend, Conversation
from sgla.lang.default import backend_of
from sgla.lang.sampling import Sampling
from sgla.lang.state import State
from sgla.lang.tracing import Trace, trace

THREADS = 96  # programs of a batch that run side by side


@dataclass
class Run:
    """What runs of a program have in common."""

    backend: Backend
    sampling: Sampling
    stream: bool = False
    threads: bool = True

    def state(self) -> State:
        return State(
            self.backend, self.sampling, stream=self.stream, watched=self.stream, threads=self.threads
        )


class Function:
    """A program: a Python function whose first argument is a State. ``bound``: arguments that are given."""

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters:
            raise InvalidField(f"{func.__name__} needs a first argument, which is the program's state")
        self.func = func
        self.bound = dict(bound or {})
        self.__doc__, self.__name__ = func.__doc__, func.__name__
        self._any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = [
            one.name for one in parameters[1:] if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]
        given = {one.name for one in parameters if one.default is not one.empty}
        self._needed = [name for name in self._names if name not in given]

    def bind(self, **arguments: Any) -> Function:
        """The program with these arguments given."""
        for name in arguments.keys() - set(self._names):
            raise InvalidField(f"{self.__name__} has no argument {name}", param=name)
        return Function(self.func, self.bound | arguments)

    def __call__(self, *args: Any, **named: Any) -> State:
        return self.run(*args, **named)

    def run(
        self,
        *args: Any,
        backend: Any = None,
        stream: bool = False,
        use_thread: bool = True,
        **named: Any,
    ) -> State:
        """Run it; ``named``: its arguments, and sampling for all its gens that do not say otherwise
        (``max_new_tokens``, ``temperature``, ...).

        Raises what the program or its backend raises. With ``stream`` it returns at once, and the state's
        iterators raise. ``backend``: see ``set_default_backend``.
        """
        arguments, sampling = self._parted(named)
        run = Run(backend_of(backend), Sampling.of_run(sampling), stream, use_thread)
        state = run.state()
        if stream:
            threading.Thread(target=self._play, args=(state, args, arguments), daemon=True).start()
            return state
        self._play(state, args, arguments)
        state.sync()
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> Any:
        """Run it with each of many arguments; the states in order. A program that fails ends alone: its state
        has the error, and raises it where somebody reads what is not there. ``generator_style``: yield the
        states as they come."""
        run = Run(backend_of(backend), Sampling.of_run(sampling))
        count = THREADS if num_threads == "auto" else int(num_threads)
        states = self._states(run, list(batch_kwargs), max(1, min(count, len(batch_kwargs))), progress_bar)
        return states if generator_style else list(states)

    def trace(self, **arguments: Any) -> Trace:
        """What it appends with stand-ins for the other arguments; see ``tracing``."""
        given = self.bound | arguments
        return trace(self.func, [name for name in self._needed if name not in given], given)

    def cache(self, backend: Any = None) -> None:
        """Have what all its runs begin with computed and kept, before a batch."""
        prefix = self.trace().prefix()
        if prefix.messages if isinstance(prefix, Conversation) else prefix:
            backend_of(backend).cache_prefix(prefix)

    # inside

    def _parted(self, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program's own arguments, and the rest. A name that both have is the program's."""
        known = set(self._names)
        if self._any:
            known |= named.keys() - {*Sampling.__dataclass_fields__, "max_new_tokens", "min_new_tokens"}
        own = {name: value for name, value in named.items() if name in known}
        return own, {name: value for name, value in named.items() if name not in known}

    def _play(self, state: State, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Its end, and its error, are the state's."""
        state.own()
        try:
            state.ret_value = self.func(state, *args, **self.bound | dict(arguments))
            state.end_branches()
        except Exception as error:
            state.fail(error)
        finally:
            state.close()

    def _states(self, run: Run, batch: list[Any], threads: int, progress: bool) -> Iterator[State]:
        def one(arguments: Any) -> State:
            state = run.state()
            if isinstance(arguments, Mapping):
                self._play(state, (), arguments)
            else:
                self._play(state, arguments, {})
            state.error()
            return state

        pool = ThreadPoolExecutor(threads, thread_name_prefix="sgla-lang")
        bar = tqdm(total=len(batch), unit="program", desc="sgla", disable=not progress, dynamic_ncols=True)
        try:
            for state in pool.map(one, batch):
                bar.update()
                yield state
        finally:
            bar.close()
            pool.shutdown(cancel_futures=True)
