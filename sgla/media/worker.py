"""A process for media, as ``pool.py`` starts it:
``python -m sgla.media.worker ASKS ANSWERS MEMORY SECONDS MODULE...``

It reads records from stdin (uint32 length, a Record of a function's name and its arguments) and answers each
on stdout (the same, of an ``Answer``); what is large lies in the files ASKS and ANSWERS. It ends with its
stdin, and by itself where a task takes too long and nobody is left to end it.
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
from sgla.media.crossing import BYTES, Buffer, Memory, Record, packed, unpacked
from sgla.media.pool import KINDS, LENGTH, Answer
from sgla.memory import give_back, return_memory_early
from sgla.processes import leave_to_parent, limit_memory

NICE = 5  # behind whatever computes tokens


def main() -> None:
    asks, answers = (Memory(int(each)) for each in sys.argv[1:3])
    memory, seconds, modules = int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]
    leave_to_parent()
    os.nice(NICE)
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for module in modules:
        import_module(module)
    limit_memory(memory)
    return_memory_early()
    gc.freeze()
    data = b""  # tells that the imports are done
    while True:
        stdout.write(LENGTH.pack(len(data)) + data)
        stdout.flush()
        gc.collect()
        give_back()
        if len(head := stdin.read(LENGTH.size)) < LENGTH.size:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)
        data, parts = answer(stdin.read(LENGTH.unpack(head)[0]), asks, memory)
        answers.write(parts)
        signal.setitimer(signal.ITIMER_REAL, 0)
        del parts


def answer(task: bytes, asks: Memory, memory: int) -> tuple[bytes, list[Buffer]]:
    try:
        record = msgspec.msgpack.decode(task, type=Record)
        name, args = unpacked(record, asks.read(record.sizes), tuple[str, list[Any]])
        return packed(Answer(value=done(name, args)))
    except BadRequest as error:
        kind = type(error).__name__
        return packed(Answer(kind if kind in KINDS else "BadRequest", error.message, error.param))
    except MemoryError:
        return packed(Answer("BadRequest", f"it takes more than {memory >> 20} MiB of memory"))


def done(name: str, args: list[Any]) -> Any:
    function, taken = found(name)
    return function(*msgspec.convert(args, taken, builtin_types=BYTES))


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
