"""The compiler's process against grammars that crash it, swell, or never end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgla.errors import InvalidField, Overloaded, SglaError, UnsupportedField
from sgla.grammar import compiler as module
from sgla.grammar import processes, sandbox
from sgla.grammar.compiler import Compiler
from sgla.grammar.protocol import Vocabulary
from sgla.messages import Control, Grammar

VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256])


class Workers:
    """Ready with a grammar when they are asked for the third time."""

    def __init__(self) -> None:
        self.told: list[Control] = []

    async def tell(self, command: Control) -> dict[str, Any]:
        self.told.append(command)
        return {"ready": len(self.told) > 3}


async def ready(command: Control) -> dict[str, Any]:
    return {"ready": True}


class Waiting:
    """A compiler on a loop of its own, for those who wait."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.compiler = self.runner.run(self._made())

    async def _made(self) -> Compiler:
        return Compiler(lambda: VOCABULARY, ready)

    def __call__(self, grammar: Grammar) -> str:
        return self.runner.run(self.compiler.compile(grammar))

    def knows(self, grammar: Grammar) -> bool:
        try:
            return self.compiler.find(grammar) is not None
        except SglaError:
            return True

    def close(self) -> None:
        self.compiler.close()
        self.runner.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Waiting]:
    compiler = Waiting()
    yield compiler
    compiler.close()


@pytest.fixture
async def shared() -> AsyncIterator[Compiler]:
    """On the test's loop."""
    compiler = Compiler(lambda: VOCABULARY, ready)
    yield compiler
    compiler.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 1.5)
    monkeypatch.setattr(processes, "BUSY", 100)  # tests run side by side


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value), **more)


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {}}}


HOSTILE = {
    "stack overflow in references": schema(chain(6000)),
    "stack overflow in rules": Grammar(
        kind="ebnf", text="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"\n'
    ),
    "no end": schema({"type": "integer", "multipleOf": 99999989}),
    "deep nesting": Grammar(kind="json_schema", text='{"items":' * 5000 + "{}" + "}" * 5000),
    "deep groups": Grammar(kind="regex", text="(" * 5000 + "a" + ")" * 5000),
    "deep rules": Grammar(kind="ebnf", text="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "too long": schema({"enum": [f"value {i}" for i in range(50_000)]}),
    "states without end": Grammar(kind="regex", text="(a?){500}a{500}"),
    "product of choices": schema(
        {
            "allOf": [
                {"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"], "maxProperties": i + 1}]}
                for i in range(20)
            ]
        }
    ),
    "itself": schema({"$ref": "#"}),
    "number": schema({"type": "number", "multipleOf": 1e-300}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_and_the_next_one_compiles(compiler: Waiting, name: str) -> None:
    with pytest.raises((InvalidField, UnsupportedField)) as caught:
        compiler(HOSTILE[name])
    assert caught.value.status == 400
    assert len(caught.value.message) < 500
    assert compiler(schema({"enum": [name]}))


@pytest.mark.parametrize(
    ("wide", "place"),
    [
        ({"const": 2**64}, "/const"),
        ({"enum": [1, -(2**63) - 1]}, "/enum/1"),
        ({"type": "object", "properties": {"a": {"const": 10**30}}}, "/properties/a/const"),
    ],
)
def test_integers_that_are_too_wide_have_their_place_told(
    compiler: Waiting, wide: dict[str, Any], place: str
) -> None:
    with pytest.raises(
        UnsupportedField, match=f"an integer of more than 64 bits \\(at {place}\\) is not supported"
    ):
        compiler(schema(wide))


@pytest.mark.parametrize("far", [2**32, 2**53 - 1, 2**64, 10**30, 1e30])
def test_counts_that_no_answer_reaches_forbid_nothing(compiler: Waiting, far: float) -> None:
    text = {"type": "string", "maxLength": far}
    items = {"type": "array", "items": text, "maxItems": far, "contains": text, "maxContains": far}
    assert compiler(schema({"type": "object", "properties": {"a": items}, "maxProperties": far}))
    assert compiler(schema({"type": "string", "minLength": far}))


def test_a_refusal_is_remembered(compiler: Waiting) -> None:
    again = schema(chain(6000), param="json_schema")
    with pytest.raises(InvalidField):
        compiler(HOSTILE["stack overflow in references"])
    assert compiler.knows(again)
    before = compiler.compiler.counts["cached"]
    with pytest.raises(InvalidField, match="^json_schema: ") as caught:
        compiler(again)
    assert caught.value.param == "json_schema"
    assert compiler.compiler.counts["cached"] == before + 1


async def test_each_grammar_is_compiled_once(shared: Compiler) -> None:
    grammars = [schema({"const": f"{i % 3}"}) for i in range(24)]
    results = await asyncio.gather(*(shared.compile(g, f"{i % 2}") for i, g in enumerate(grammars)))
    assert len(set(results)) == 3
    assert shared.counts["compiled"] == 3
    assert shared.numbers["waiting"] == 0
    assert not shared._clients


async def test_its_processes_may_be_killed_at_any_time(shared: Compiler) -> None:
    await shared.compile(schema({"const": "before"}))
    assert shared._sandbox is not None
    shared._sandbox._popen.kill()
    assert await shared.compile(schema({"const": "after"}))


async def test_the_cache_is_bounded(shared: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 5)
    grammars = [schema({"const": i}) for i in range(12)]
    for grammar in grammars:
        await shared.compile(grammar)
    assert [shared.find(grammar) is not None for grammar in grammars] == [False] * 7 + [True] * 5
    monkeypatch.setattr(module, "ENTRY_BYTES", 0)
    await shared.compile(schema({"const": "last"}))
    assert not shared._cache
    assert shared._cache_bytes == 0


async def test_workers_are_warned_of_slow_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    compiler = Compiler(lambda: VOCABULARY, workers.tell)
    monkeypatch.setattr(module, "SLOW", 0.0)
    try:
        await compiler.compile(schema({"const": 1}))
        assert [command.verb for command in workers.told] == ["vocabulary", "grammar", "grammar", "grammar"]
        await compiler.compile(schema({"const": 1}))
        assert len(workers.told) == 4
    finally:
        compiler.close()
    with pytest.raises(SglaError, match="stopping"):
        await compiler.compile(schema({"const": 2}))


async def test_nobody_waits_for_workers_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(command: Control) -> dict[str, Any]:
        if command.verb == "grammar":
            compiler.close()
        return {"ready": False}

    compiler = Compiler(lambda: Vocabulary([b"a", b"</s>"], [1], [1]), tell)
    monkeypatch.setattr(module, "SLOW", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await compiler.compile(Grammar(kind="regex", text="a"))


async def test_modules_of_the_current_folder_are_not_taken_for_the_library(
    shared: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the library is where this process has it from
    assert await shared.compile(schema({"const": 1}))


async def test_workers_that_could_not_read_the_vocabulary_are_told_again() -> None:
    told: list[str] = []

    async def tell(command: Control) -> dict[str, Any]:
        told.append(command.verb)
        if len(told) == 1:
            raise SglaError("no memory")
        return {"ready": True}

    compiler = Compiler(lambda: VOCABULARY, tell)
    try:
        with pytest.raises(SglaError, match="no memory"):
            await compiler.compile(schema({"const": 1}))
        await compiler.compile(schema({"const": 1}))
        assert told == ["vocabulary"] * 2
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("grammar", "output", "counted"),
    [
        (schema({"type": "integer"}), "12", "valid"),
        (schema({"type": "integer"}), "1.5", "invalid"),
        (schema({"type": "integer"}), "{", "invalid"),
        (schema({"type": "integer"}, after=("</t>",)), "x</t>\n 3", "valid"),
        (schema({"type": "integer"}, after=("</t>",), opener="<t>"), "3", "valid"),
        (schema({"type": "integer"}, after=("</t>",)), "3", "unchecked"),
        (schema({"type": "string", "pattern": "(a+)+$"}), '"' + "a" * 40 + 'b"', "invalid"),
        (schema({"$ref": "http://localhost:1/"}), "1", "unchecked"),
        (Grammar(kind="json_object"), "{}", "valid"),
        (Grammar(kind="json_object"), "[]", "invalid"),
    ],
)
def test_finished_outputs_are_checked(compiler: Waiting, grammar: Grammar, output: str, counted: str) -> None:
    async def check() -> None:
        compiler.compiler.check(grammar, output)
        while compiler.compiler.numbers["checking"]:
            await asyncio.sleep(0.001)

    before = compiler.compiler.counts.copy()
    compiler.runner.run(check())
    assert compiler.compiler.counts - before == {counted: 1}


# whose turn it is


def endless(i: int) -> Grammar:
    """It takes minutes."""
    return schema({"type": "integer", "multipleOf": 99999989 + i})


async def test_others_do_not_wait_for_who_sends_endless_grammars(
    shared: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 60.0)  # longer than the test
    await shared.compile(schema({"const": "begin"}))
    busy = [asyncio.ensure_future(shared.compile(endless(i), "bad")) for i in range(10)]
    for i in range(5):
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(shared.compile(schema({"const": i}), "good"), 10)
    assert await asyncio.wait_for(shared.compile(schema({"const": "mine"}), "bad"), 20)
    assert not any(task.done() for task in busy)
    assert len(shared._clients["bad"].makings) == 10
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
    assert (shared._clients, shared._longer, shared.numbers["waiting"]) == ({}, 0, 0)
    assert await asyncio.wait_for(shared.compile(schema({"const": "end"}), "bad"), 10)


async def test_what_takes_long_is_compiled_too(shared: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without another one before it."""
    monkeypatch.setattr(module, "FIRST", 0.0)
    assert len(set(await asyncio.gather(*(shared.compile(schema({"const": i})) for i in range(3))))) == 3
    assert shared.counts["compiled"] == 3


async def test_what_takes_too_long_is_remembered(shared: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside any number of grammars that are fine."""
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    monkeypatch.setattr(module, "FIRST", 0.1)
    monkeypatch.setattr(module, "ENTRIES", 0)
    for _ in range(2):
        with pytest.raises(InvalidField, match="more than 0 s to compile"):
            await shared.compile(endless(0))
        monkeypatch.setattr(module, "FIRST", 10.0)
        await shared.compile(schema({"const": 1}))
    assert shared.counts["late"] == 1


async def test_a_client_may_wait_for_some_grammars(shared: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    waiting = [asyncio.ensure_future(shared.compile(endless(i), "bad")) for i in range(3)]
    same = asyncio.ensure_future(shared.compile(endless(0), "bad"))
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="3 grammars of yours wait") as full:
        await shared.compile(endless(3), "bad")
    assert full.value.retry_after
    assert await shared.compile(schema({"const": 1}), "good")
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not same.done()  # the other request for it still waits
    for task in (*waiting, same):
        task.cancel()
    await asyncio.wait([*waiting, same])


async def test_a_grammar_has_a_limit(shared: Compiler) -> None:
    with pytest.raises(InvalidField, match="the limit is 262144"):
        await shared.compile(Grammar(kind="regex", text="a" * (1 + (1 << 20))))


def test_its_processes_and_files_end_with_the_server(tmp_path: Path) -> None:
    """Even if that is killed while they compile."""
    script = (
        "import asyncio\n"
        "from sgla.grammar.compiler import Compiler\n"
        "from sgla.grammar.protocol import Vocabulary\n"
        "from sgla.messages import Grammar\n"
        "async def tell(command): return {'ready': True}\n"
        "async def main():\n"
        "    compiler = Compiler(lambda: Vocabulary([bytes([i]) for i in range(256)] + [b'</s>'], [256], "
        "[256]), tell)\n"
        "    await compiler.compile(Grammar(kind='json_object'))\n"
        """    text = '{"type": "integer", "multipleOf": 99999989}'\n"""
        "    asyncio.ensure_future(compiler.compile(Grammar(kind='json_schema', text=text)))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print('compiling', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    assert server.stdout.readline() == b"compiling\n"
    children = psutil.Process(server.pid).children(recursive=True)
    assert len(children) == 2
    server.kill()
    server.wait()
    server.stdout.close()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(tmp_path.iterdir())


def test_who_asked_may_leave_at_any_time(capfd: pytest.CaptureFixture[str]) -> None:
    """A socket that is closed with something unread in it resets the other end."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        threading.excepthook = threading.__excepthook__  # pytest's keeps what it gets
        sandbox.run_child(os.getppid(), theirs.detach(), lambda stream: print(stream.read(1)))
    theirs.close()
    ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert capfd.readouterr() == ("", "")
