"""A process for media, as ``pool.py`` starts it: ``python -m sgla.media.worker MEMORY SECONDS MODULE...``

It reads records from stdin (uint32 length, msgpack of a function's name and its arguments) and answers each
on stdout (the same, ``Answer``). It ends with its stdin, and by itself where a task takes too long and nobody
is left to end it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import types
from functools import cache
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from sgla.errors import BadRequest
from sgla.media.pool import KINDS, LENGTH, Answer
from sgla.memory import give_back, return_memory_early
from sgla.processes import limit_memory


def main() -> None:
    memory, seconds, modules = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    # The terminal and service managers signal the whole group; this process ends with its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for module in modules:
        import_module(module)
    limit_memory(memory)
    return_memory_early()
    gc.freeze()
    data = b""  # tells that the imports are done
    while True:
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()
        del data
        gc.collect()
        give_back()
        if len(head := asks.read(LENGTH.size)) < LENGTH.size:
            return
        task = asks.read(LENGTH.unpack(head)[0])
        signal.setitimer(signal.ITIMER_REAL, seconds)
        data = answer(task, memory)
        signal.setitimer(signal.ITIMER_REAL, 0)
        del task


def answer(task: bytes, memory: int) -> bytes:
    try:
        name, args = msgspec.msgpack.decode(task, type=tuple[str, msgspec.Raw])
        function, taken = found(name)
        value = function(*msgspec.msgpack.decode(args, type=taken))
        return msgspec.msgpack.encode(Answer(value=msgspec.Raw(msgspec.msgpack.encode(value))))
    except BadRequest as error:
        kind = type(error).__name__
        failed = Answer(kind if kind in KINDS else "BadRequest", error.message, error.param)
    except MemoryError:
        failed = Answer("BadRequest", f"it takes more than {memory >> 20} MiB of memory")
    return msgspec.msgpack.encode(failed)


@cache
def found(name: str) -> tuple[Any, Any]:
    """A function by "module:name", and the type of its arguments together."""
    module, _, attribute = name.partition(":")
    function = getattr(import_module(module), attribute)
    hints = get_type_hints(function)
    hints.pop("return", None)
    return function, types.GenericAlias(tuple, tuple(hints.values()))


if __name__ == "__main__":
    main()
