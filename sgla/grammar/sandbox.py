"""The compiler's processes: what users send is compiled here first, where it may crash, swell or never end.

``python -m sgla.grammar.sandbox VOCABULARY CONTROL PARENT`` loads the vocabulary and then forks at each
message on the socket with the descriptor CONTROL. A message brings one end of a stream for the child; one
with a child's pid in digits asks for that child's end. A child sends its pid (uint32), reads records (uint32
length, msgpack ``Ask``) and answers each (the same, ``Answer``). All end with the process PARENT.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from sgla.grammar.errors import GrammarError
from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import LENGTH, Answer, Ask, Vocabulary
from sgla.grammar.source import explain, parse, source_of
from sgla.grammar.tags import grammars_of
from sgla.memory import give_back, resident, return_memory_early
from sgla.messages import Grammar
from sgla.processes import die_with, leave_to_parent, limit_memory

STACK = 2 << 20  # a grammar that compiles on this stack does so in a worker, whose threads have more
MEMORY = 512 << 20  # bytes that compiling may need
GROWN = 8 << 20  # bytes
SECONDS = 3.0  # of CPU time for a grammar
STEP_SECONDS = 0.1  # of CPU time for one token of it
WALK = 32  # tokens tried
UNFIT = "no output fits the grammar"
CLOSED = ("json_schema", "structural_tag")  # kinds that have objects with declared properties


def main() -> None:
    path, control, parent = sys.argv[1:]
    die_with(int(parent))
    leave_to_parent()
    vocabulary = Vocabulary.read(Path(path))
    tokenizer, special = load_tokenizer(vocabulary), vocabulary.named()
    limit_memory(STACK + MEMORY)
    threading.stack_size(STACK)
    return_memory_early()
    gc.freeze()  # children share these objects as long as nobody writes to them
    with socket.socket(fileno=int(control)) as messages:
        breed(messages, lambda stream: serve(tokenizer, special, stream))


def breed(messages: socket.socket, work: Callable[[BinaryIO], None]) -> None:
    """Fork and end children as ``messages`` ask, until its other end is closed."""
    children: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(messages, 64, 1)
        if files:
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                messages.close()
                run_child(parent, files[0], work)
            children.add(pid)
            os.close(files[0])
        elif not message:
            return
        elif (pid := int(message)) in children:
            children.remove(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_child(parent: int, file: int, work: Callable[[BinaryIO], None]) -> NoReturn:
    die_with(parent)

    def run(stream: BinaryIO) -> None:
        with suppress(ConnectionError):  # nobody waits any more
            work(stream)

    with socket.socket(fileno=file) as connection, connection.makefile("rwb") as stream:
        with suppress(ConnectionError):
            stream.write(LENGTH.pack(os.getpid()))
            stream.flush()
            worker = threading.Thread(target=run, args=(stream,))
            worker.start()
            worker.join()
        os._exit(0)


def serve(tokenizer: LLTokenizer, special: dict[str, int], stream: BinaryIO) -> None:
    """Until the other end is closed, or this process keeps more than ``GROWN`` of what a grammar has taken:
    another is made in ms."""
    decode, encode = msgspec.msgpack.Decoder(Ask).decode, msgspec.msgpack.encode
    small = resident()
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        ask = decode(stream.read(LENGTH.unpack(head)[0]))
        if ask.output is None:
            answer = compile_grammar(tokenizer, special, ask.grammar)
        else:
            answer = Answer(fits=fits(ask.grammar, ask.output))
        data = encode(answer)
        stream.write(LENGTH.pack(len(data)) + data)
        stream.flush()
        compiled = ask.output is None
        del ask, answer, data
        give_back()
        if compiled and resident() > small + GROWN:
            return


def compile_grammar(tokenizer: LLTokenizer, special: dict[str, int], grammar: Grammar) -> Answer:
    """What no document fits, or cannot be compiled, once objects are closed is compiled with open ones."""
    answer = compile_as_it_is(tokenizer, special, grammar)
    if answer.error is None or grammar.additional or grammar.kind not in CLOSED:
        return answer
    opened = msgspec.structs.replace(grammar, additional=True)
    with suppress(GrammarError):
        if source_of(opened, special) == source_of(grammar, special):
            return answer
    return compile_as_it_is(tokenizer, special, opened)


def compile_as_it_is(tokenizer: LLTokenizer, special: dict[str, int], grammar: Grammar) -> Answer:
    try:
        try:
            source = source_of(grammar, special)
        except GrammarError as error:
            raise blame(tokenizer, grammar) or error from None
        begun = time.thread_time()
        matcher = make_matcher(tokenizer, source)
        if matcher.is_error():
            raise blame(tokenizer, grammar) or explain(grammar, first_lines(matcher.get_error()))
        mask = matcher.compute_bitmask()
        seconds = time.thread_time() - begun
        if matcher.is_error():
            raise stuck(matcher)
        if seconds > SECONDS:
            raise GrammarError(f"the grammar is too complex: it takes {seconds:.1f} s to compile")
        if not any(mask):
            raise GrammarError(UNFIT)
        walk(matcher)
    except GrammarError as error:
        return Answer(error=str(error), unsupported=error.unsupported)
    except (ValueError, MemoryError) as error:
        return Answer(error=str(error) or "the grammar is too large")
    return Answer(source=source, seconds=seconds)


def blame(tokenizer: LLTokenizer, grammar: Grammar) -> GrammarError | None:
    """The error of the part of a structural tag that does not compile alone, with its name."""
    found = grammars_of(parse(grammar.text)) if grammar.kind == "structural_tag" else ()
    for name, kind, text in found:
        alone = msgspec.structs.replace(grammar, kind=kind, text=text)
        try:
            matcher = make_matcher(tokenizer, source_of(alone, {}))
            if matcher.is_error():
                raise explain(alone, first_lines(matcher.get_error()))
        except GrammarError as error:
            return GrammarError(f"{name}: {error}" if name else str(error), error.unsupported)
    return None


def walk(matcher: LLMatcher) -> None:
    """Generate a little at random. Raises GrammarError where a mask takes too long or cannot be had."""
    rng = random.Random(0)
    for _ in range(WALK):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        seconds = time.thread_time() - begun
        if matcher.is_error():
            raise stuck(matcher)
        if seconds > STEP_SECONDS:
            raise GrammarError(f"the grammar is too complex: a token of it takes {seconds * 1000:.0f} ms")
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(allowed[rng.randrange(len(allowed))]))


def stuck(matcher: LLMatcher) -> GrammarError:
    """Why a matcher has no mask."""
    error = matcher.get_error()
    if "NoExtension" in error:
        return GrammarError(UNFIT)
    if "Too many items" in error:
        return GrammarError(
            "the grammar is too complex: its outputs have no end, or can be read in too many ways"
        )
    return GrammarError(f"the grammar is too complex: {first_lines(error)}")


def first_lines(error: str) -> str:
    return " ".join(re.split("<state>|<non-verbose/>", error)[0].split())[:300]


def fits(grammar: Grammar, output: str) -> bool | None:
    """By an implementation that has nothing to do with the matcher."""
    import jsonschema_rs

    try:
        document = msgspec.json.decode(output)
    except msgspec.DecodeError:
        return False
    if grammar.kind == "json_object":
        return isinstance(document, dict)
    try:
        validator = jsonschema_rs.validator_for(
            msgspec.json.decode(grammar.text),
            pattern_options=jsonschema_rs.RegexOptions(),  # the engine without backtracking
            retriever=refuse,
        )
    except ValueError:  # a pattern or reference that it does not know
        return None
    return bool(validator.is_valid(document))


def refuse(uri: str) -> None:
    raise ValueError(f"{uri} is not part of the schema")


if __name__ == "__main__":
    main()
