"""The process for work on texts that nothing else bounds:
chat templates, which are programs, and the parsing of long outputs.

``python -m sgla.text.sandbox`` reads records from stdin (uint32 length, a pickled task) and answers each on
stdout (the same, msgpack ``Answer``). It ends with its stdin, and by itself where a task takes too long and
nobody is left to end it.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from functools import lru_cache
from typing import Any

import msgspec

from sgla.errors import BadRequest, SglaError
from sgla.memory import give_back, return_memory_early
from sgla.processes import leave_to_parent, limit_memory
from sgla.text.process import BUSY, LENGTH, MEMORY, MOST, SECONDS, Answer, Parse, Render
from sgla.text.template import ChatTemplate
from sgla.text.tools.parser import parser_of

LARGE = 64 << 10  # bytes of a task or an answer behind which memory is given back


def main() -> None:
    leave_to_parent()
    limit_memory(MEMORY)
    return_memory_early()
    gc.freeze()
    asks, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(head := asks.read(LENGTH.size)) == LENGTH.size:
        data = asks.read(size := LENGTH.unpack(head)[0])
        signal.setitimer(signal.ITIMER_REAL, 2 * BUSY * SECONDS)
        data = answer(data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            answers.write(LENGTH.pack(len(data)) + data)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody waits for it any more
        if max(size, len(data)) > LARGE:
            del data
            gc.collect()  # errors that a template ran into hold the task that they came in
            give_back()


def answer(data: bytes) -> bytes:
    try:
        found = msgspec.msgpack.encode(do(pickle.loads(data)))
        if len(found) > MOST:
            raise BadRequest(f"the text that comes out has more than {MOST} bytes")
        return found
    except SglaError as error:
        failed = Answer(kind=type(error).__name__, text=error.message, param=error.param)
    except MemoryError:
        failed = Answer(kind="BadRequest", text=f"it takes more than {MEMORY >> 20} MiB of memory")
    except RecursionError:
        failed = Answer(kind="BadRequest", text="the request is nested too deeply")
    except UnicodeEncodeError:
        failed = Answer(kind="BadRequest", text="the text is not valid Unicode: it has unpaired surrogates")
    except Exception as error:  # whatever operation does not fit a value of the request
        text = f"the request has a value that does not fit: {type(error).__name__}: {error}"
        failed = Answer(kind="BadRequest", text=text)
    failed.text = failed.text.encode(errors="backslashreplace").decode()
    return msgspec.msgpack.encode(failed)


def do(task: Render | Parse) -> Answer:
    if isinstance(task, Render):
        template = compiled(task.source, tuple(task.special_tokens.items()))
        return Answer(text="" if task.messages is None else template.render(task.messages, **task.options))
    parser = parser_of(task)
    return Answer(pieces=[(kind, text, name) for kind, text, name in parser.feed(task.text) + parser.close()])


@lru_cache(maxsize=4)
def compiled(
    source: tuple[tuple[str, str], ...], special_tokens: tuple[tuple[str, Any], ...]
) -> ChatTemplate:
    return ChatTemplate(dict(source), dict(special_tokens))


if __name__ == "__main__":
    main()
