"""The compiler's process against grammars that crash it, swell, or never end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgla.errors import InvalidField, SglaError, UnsupportedField
from sgla.grammar import compiler as module
from sgla.grammar.compiler import Compiler
from sgla.grammar.protocol import Vocabulary
from sgla.messages import Control, Grammar


class Workers:
    """Ready with a grammar when they are asked for the third time."""

    def __init__(self) -> None:
        self.told: list[Control] = []

    def tell(self, command: Control) -> dict[str, Any]:
        self.told.append(command)
        return {"ready": len(self.told) > 3}


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(
        lambda: Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256]),
        lambda command: {"ready": True},
    )
    yield compiler
    compiler.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 1.5)


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
def test_hostile_grammars_are_refused_and_the_next_one_compiles(compiler: Compiler, name: str) -> None:
    with pytest.raises((InvalidField, UnsupportedField)) as caught:
        compiler(HOSTILE[name])
    assert caught.value.status == 400
    assert len(caught.value.message) < 500
    assert compiler(schema({"enum": [name]}))


def test_a_refusal_is_remembered(compiler: Compiler) -> None:
    again = schema(chain(6000), param="json_schema")
    with pytest.raises(InvalidField):
        compiler(HOSTILE["stack overflow in references"])
    assert compiler.knows(again)
    before = compiler.counts["cached"]
    with pytest.raises(InvalidField, match="^json_schema: ") as caught:
        compiler(again)
    assert caught.value.param == "json_schema"
    assert compiler.counts["cached"] == before + 1


def test_many_threads_compile_each_grammar_once(compiler: Compiler) -> None:
    grammars = [schema({"const": f"thread {i % 3}"}) for i in range(24)]
    before, results = compiler.counts["compiled"], []
    threads = [threading.Thread(target=lambda g=g: results.append(compiler(g))) for g in grammars]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 24
    assert len(set(results)) == 3
    assert compiler.counts["compiled"] == before + 3
    assert compiler.numbers["waiting"] == 0


def test_the_process_may_be_killed_at_any_time(compiler: Compiler) -> None:
    compiler(schema({"const": "before"}))
    assert compiler._process is not None
    compiler._process._popen.kill()
    assert compiler(schema({"const": "after"}))


def test_the_cache_is_bounded(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 5)
    grammars = [schema({"const": i}) for i in range(12)]
    for grammar in grammars:
        compiler(grammar)
    assert [compiler.knows(grammar) for grammar in grammars] == [False] * 7 + [True] * 5
    monkeypatch.setattr(module, "ENTRY_BYTES", 0)
    compiler(schema({"const": "last"}))
    assert not compiler._cache
    assert compiler._cache_bytes == 0


def test_workers_are_warned_of_slow_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256])
    compiler = Compiler(lambda: vocabulary, workers.tell)
    monkeypatch.setattr(module, "SLOW", 0.0)
    try:
        compiler(schema({"const": 1}))
        assert [command.verb for command in workers.told] == ["vocabulary", "grammar", "grammar", "grammar"]
        compiler(schema({"const": 1}))
        assert len(workers.told) == 4
    finally:
        compiler.close()
    with pytest.raises(SglaError, match="stopping"):
        compiler(schema({"const": 2}))


def test_nobody_waits_for_workers_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def tell(command: Control) -> dict[str, Any]:
        nonlocal asked
        asked += command.verb == "grammar"
        if asked:
            compiler.close()
        return {"ready": False}

    compiler = Compiler(lambda: Vocabulary([b"a", b"</s>"], [1], [1]), tell)
    monkeypatch.setattr(module, "SLOW", 0.0)
    with pytest.raises(SglaError, match="stopping"):
        compiler(Grammar(kind="regex", text="a"))
    assert asked == 1


def test_modules_of_the_current_folder_are_not_taken_for_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the library is where this process has it from
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256])
    compiler = Compiler(lambda: vocabulary, lambda command: {"ready": True})
    try:
        assert compiler(schema({"const": 1}))
    finally:
        compiler.close()


def test_workers_that_could_not_read_the_vocabulary_are_told_again() -> None:
    told: list[str] = []

    def tell(command: Control) -> dict[str, Any]:
        told.append(command.verb)
        if len(told) == 1:
            raise SglaError("no memory")
        return {"ready": True}

    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256])
    compiler = Compiler(lambda: vocabulary, tell)
    try:
        with pytest.raises(SglaError, match="no memory"):
            compiler(schema({"const": 1}))
        compiler(schema({"const": 1}))
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
def test_finished_outputs_are_checked(
    compiler: Compiler, grammar: Grammar, output: str, counted: str
) -> None:
    before = compiler.counts.copy()
    compiler.check(grammar, output)
    compiler._checks.submit(lambda: None).result()
    assert compiler.counts - before == {counted: 1}
