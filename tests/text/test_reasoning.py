"""Reasoning in outputs: told apart, or left where it is; whatever the cuts."""

from __future__ import annotations

from typing import Any

import pytest
from test_tools import TOOLS, check_cuts, parse, text_of

from sgla.text.reasoning.think import Think
from sgla.text.tools.cursor import Piece
from sgla.text.tools.families import BY_NAME, FAMILIES, Dialect
from sgla.text.tools.parser import OutputParser

THINKING = [family.name for family in FAMILIES if family.think]
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'


def tags(name: str) -> Think:
    think = BY_NAME[name].think
    assert think is not None
    return think


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_then_answer(name: str) -> None:
    open_tag, close = tags(name).open, tags(name).close
    expected = [Piece("reasoning", "Hm, é <b> 😀\n\nso"), Piece("content", "It is\n42.\n")]
    text = f"{open_tag}\nHm, é <b> 😀\n\nso\n{close}\n\nIt is\n42.\n"
    assert check_cuts(name, text, tools=None) == expected
    assert check_cuts(name, "\n" + text, tools=None) == expected
    assert check_cuts(name, text.removeprefix(open_tag), tools=None, opened=True) == expected
    assert check_cuts(name, text, tools=None, opened=True) == expected
    assert text_of(check_cuts(name, text, tools=None, separate=False), "content") == text


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("options", [{"tools": None}, {"tools": TOOLS}])
def test_output_without_reasoning(name: str, options: dict[str, Any]) -> None:
    open_tag, close = tags(name).open, tags(name).close
    for text in ("", "\n", "Just this.", f"It is {open_tag}quoted{close} here", open_tag[:-1]):
        assert text_of(check_cuts(name, text, **options), "content") == text


@pytest.mark.parametrize("name", THINKING)
def test_unclosed_reasoning(name: str) -> None:
    open_tag, close = tags(name).open, tags(name).close
    expected = [Piece("reasoning", "on and on" + close[:-1])]
    assert check_cuts(name, open_tag + "on and on" + close[:-1]) == expected
    assert check_cuts(name, "on and on" + close[:-1], opened=True) == expected


@pytest.mark.parametrize("name", THINKING)
def test_empty_reasoning(name: str) -> None:
    open_tag, close = tags(name).open, tags(name).close
    assert check_cuts(name, f"{open_tag}\n\n{close}\n\nyes") == [Piece("content", "yes")]


@pytest.mark.parametrize("separate", [True, False])
def test_calls_in_reasoning_are_none(separate: bool) -> None:
    text = f"<think>\nmaybe {CALL}\n</think>\n\n{CALL}"
    pieces = check_cuts("hermes", text, separate=separate)
    assert pieces[-2:] == [Piece("call", "find"), Piece("arguments", "{}")]
    thoughts = f"maybe {CALL}"
    assert pieces[0] == (
        Piece("reasoning", thoughts) if separate else Piece("content", f"<think>\n{thoughts}\n</think>")
    )


def test_a_call_ends_reasoning_where_its_tag_is_a_token() -> None:
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}"
    assert check_cuts("kimi_k2", "<think>so" + section)[:2] == [
        Piece("reasoning", "so"),
        Piece("call", "find", "functions.find:0"),
    ]


def test_kimi_has_marks_of_its_own() -> None:
    assert check_cuts("kimi", "◁think▷hm◁/think▷yes") == [Piece("reasoning", "hm"), Piece("content", "yes")]


def test_tags_around_the_answer_are_dropped() -> None:
    text = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>"
    assert check_cuts("command", text) == [Piece("reasoning", "hm"), Piece("content", "yes")]
    assert check_cuts("granite", "<think>hm</think><response>yes</response>") == [
        Piece("reasoning", "hm"),
        Piece("content", "yes"),
    ]
    assert parse("granite", ["<response>yes"], separate=False) == [Piece("content", "<response>yes")]


def test_harmony_reasoning() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42"
    assert check_cuts("gpt-oss", text) == [Piece("reasoning", "Hm."), Piece("content", "42")]
    assert check_cuts("gpt-oss", text[:-30], tools=None)[0] == Piece("reasoning", "Hm.")
    assert check_cuts("gpt-oss", text, separate=False) == [Piece("content", "Hm.42")]


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    [
        ("hermes", "<think>ab</think>cd", "<think>ab</think>"),
        ("hermes", "no thoughts", ""),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>ab<|end|><|start|>assist",
            "<|channel|>analysis<|message|>ab<|end|>",
        ),
    ],
)
def test_where_reasoning_ends(name: str, text: str, ends: str) -> None:
    family = BY_NAME[name]
    parser = OutputParser(Dialect(family, family))
    for char in text:
        parser.feed(char)
    assert (parser.thought, parser.thinking) == (len(ends), False)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think> and so on", False),
        ("", False),
    ],
)
def test_prompts_that_open_reasoning(prompt: str, opened: bool) -> None:
    assert tags("hermes").opened_by(prompt) is opened
