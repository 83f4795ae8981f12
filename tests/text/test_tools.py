"""Properties of the parsers: whatever the family, the text and its cuts."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_writers import BARE_WRITERS, NAMES, TOOLS, WRITERS, Calls

from sgla.text.reasoning.harmony import TAGS as HARMONY_TAGS
from sgla.text.tools.cursor import AGAIN, HEAD, SPACES, Piece
from sgla.text.tools.families import BY_NAME, FAMILIES, Dialect
from sgla.text.tools.parser import OutputParser

CALLING = [family.name for family in FAMILIES if family.tools or family.harmony]
GREEK = "αβγδε"


def dialect_of(name: str) -> Dialect:
    family = BY_NAME[name]
    return Dialect(family, family)


def parse(name: str, chunks: list[str], **options: Any) -> list[Piece]:
    """The pieces of an output, neighbours of one kind joined."""
    parser = OutputParser(dialect_of(name), **({"tools": TOOLS} | options))
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.close()
    joined: list[Piece] = []
    for piece in pieces:
        assert piece.text
        if joined and joined[-1].kind == piece.kind != "call":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def text_of(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """(name, arguments) of each call."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


def check_cuts(name: str, text: str, **options: Any) -> list[Piece]:
    """The pieces of ``text``, which all its cuts give."""
    whole = parse(name, [text], **options)
    assert parse(name, list(text), **options) == whole
    for at in range(1, len(text)):
        assert parse(name, [text[:at], text[at:]], **options) == whole, (text[:at], text[at:])
    return whole


# texts that models mean as calls

CHARS = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")
# An element's text says nothing of its type where the schema does not, so strings there must not look like
# JSON.
WORDS = st.text(CHARS, max_size=8).map(lambda text: "é " + text + "!")
TRICKY = st.sampled_from(
    ["</tool_call", '"', "'", "\\", "{", "}]", "\n\n", "中文 😀", "\\u0041", "<|", "[ARGS"]
)
# What ends a string in notations without escapes; hypothesis takes such words out of the sources.
ENDS = re.compile(r'<\|"\|>|<escape>|</parameter>|</arg_value>|</｜DSML｜parameter>')
STRINGS = (
    st.lists(WORDS | TRICKY, min_size=1, max_size=3)
    .map(lambda parts: "x" + "".join(parts) + "y")
    .filter(lambda text: not ENDS.search(text))
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"text": STRINGS, "any": VALUES, "n": st.integers() | st.none(), "söme_key": STRINGS}
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(25), deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "Let me see:\n", "a < b [1] {x} "]), data=st.data())
def test_calls_survive_any_cut(name: str, calls: Calls, before: str, data: st.DataObject) -> None:
    text = before + WRITERS[name](calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    pieces = parse(name, [text])
    assert [(called, json.loads(arguments)) for called, arguments in calls_of(pieces)] == calls
    assert text_of(pieces, "content") == before.rstrip()
    assert text_of(pieces, "reasoning") == ""
    assert parse(name, list(text)) == pieces
    assert parse(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == pieces


@pytest.mark.parametrize("name", BARE_WRITERS)
@settings(max_examples=examples(25), deadline=None)
@given(calls=CALLS)
def test_bare_calls(name: str, calls: Calls) -> None:
    text = BARE_WRITERS[name](calls)
    pieces = parse(name, list(text))
    assert [(called, json.loads(arguments)) for called, arguments in calls_of(pieces)] == calls
    assert text_of(pieces, "content") == ""
    others = [{"function": {"name": "unknown"}}]
    assert parse(name, list(text), tools=others) == [Piece("content", text)]
    assert calls_of(parse(name, ["So: " + text])) == []


EXAMPLE: Calls = [
    ("find", {"text": 'he said "hi"\n\n', "any": {"k": [1, None, "é"]}, "n": 3}),
    ("get.it", {}),
    ("mcp__put-1", {"text": "😀 </tool>"}),
]


@pytest.mark.parametrize("name", WRITERS)
def test_every_cut_of_an_example(name: str) -> None:
    text = "Well: " + WRITERS[name](EXAMPLE)
    pieces = check_cuts(name, text)
    assert [(called, json.loads(arguments)) for called, arguments in calls_of(pieces)] == EXAMPLE
    assert pieces[0] == Piece("content", "Well:")


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_stream(name: str) -> None:
    """A long string argument comes out while it is written."""
    text = WRITERS[name]([("find", {"text": "word " * 50})])
    parser = OutputParser(dialect_of(name), TOOLS)
    sizes = [sum(len(p.text) for p in parser.feed(char) if p.kind == "arguments") for char in text]
    assert max(sizes) < 16
    assert sum(size > 0 for size in sizes) > 200


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("end", ["find", "αβγ", "ηθι"])
def test_output_that_ends_within_a_call(name: str, end: str) -> None:
    """What has been emitted does not pass for complete arguments; the rest is content, if it is anything."""
    text = WRITERS[name]([("find", {"text": "αβγ δεζ ηθι"})])
    text = text[: text.index(end) + len(end)]
    pieces = check_cuts(name, text)
    assert set(re.findall("[α-ω]", text)) <= set("".join(piece.text for piece in pieces))
    for _, arguments in calls_of(pieces):
        assert arguments.startswith('{"text": "')
        with pytest.raises(ValueError, match="column"):
            json.loads(arguments)


# any text


def example(name: str) -> str:
    write = WRITERS.get(name, lambda calls: "")
    return write([("find", {"text": "αβ", "n": 1, "γ": "δ"}), ("get.it", {"any": ["ε"]})])


def fragments(name: str) -> list[str]:
    family = BY_NAME[name]
    tags = list(HARMONY_TAGS) if family.harmony else [*family.tools.tags]
    if family.think is not None:
        tags += family.think.tags
    pieces = re.split(r"(\W)", example(name))
    syntax = [
        '"name"',
        '"arguments"',
        '"f"',
        "find",
        "f(",
        "x=",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        ">",
        "\n",
    ]
    return sorted(
        {*tags, *(tag[: len(tag) // 2] for tag in tags), *filter(None, pieces), *syntax, " ", "'", "\\"}
    )


def beginning(data: st.DataObject, name: str) -> str:
    whole = example(name)
    return whole[: data.draw(st.integers(0, len(whole)))]


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_text(name: str, data: st.DataObject) -> None:
    """No exception, and no difference between cuts."""
    parts = data.draw(st.lists(st.sampled_from(fragments(name)) | st.text(CHARS, max_size=3), max_size=14))
    parts.insert(0, beginning(data, name))
    opened, separate = data.draw(st.booleans()), data.draw(st.booleans())
    text = "".join(parts)
    whole = parse(name, [text], opened=opened, separate=separate)
    assert parse(name, parts, opened=opened, separate=separate) == whole
    assert parse(name, list(text), opened=opened, separate=separate) == whole
    if not separate:
        assert text_of(whole, "reasoning") == ""


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_nothing_vanishes(name: str, data: st.DataObject) -> None:
    """Every letter that is no syntax comes out somewhere."""
    syntax = [text for text in fragments(name) if text not in '"\\']
    tail = data.draw(st.lists(st.sampled_from(syntax) | st.sampled_from(list(GREEK)), max_size=12))
    text = beginning(data, name) + "".join(tail)
    pieces = parse(name, list(text))
    shown = "".join(piece.text + (piece.id or "") for piece in pieces)
    missing = Counter(re.findall(f"[{GREEK}]", text)) - Counter(re.findall(f"[{GREEK}]", shown))
    assert not missing


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=examples(20), deadline=None)
@given(words=st.lists(st.text("abc xyz.,!?", min_size=1, max_size=6), max_size=8))
def test_prose_is_content_at_once(name: str, words: list[str]) -> None:
    """Only the whitespace at its end is held back."""
    parser, text, shown = OutputParser(dialect_of(name), TOOLS), "", ""
    for word in words:
        text += word
        shown += text_of(parser.feed(word), "content")
        assert shown == text.rstrip() or name == "gpt-oss"
    shown += text_of(parser.close(), "content")
    assert shown == text


def test_only_a_tag_in_the_making_is_held_back() -> None:
    parser = OutputParser(dialect_of("hermes"), TOOLS)
    assert parser.feed("so a <tool") == [Piece("content", "so a")]
    assert parser.feed("box> and <") == [Piece("content", " <toolbox> and")]
    assert parser.close() == [Piece("content", " <")]


# what calls look like


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nI would call find.\n</tool_call>",
        '<tool_call>{"name": "find"',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "find", "arguments": "no object"}</tool_call>',
        '<tool_call>{"arguments": {"x": 1}}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>" + "{" * 500,
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    assert check_cuts("hermes", text) == [Piece("content", text)]


def test_what_does_not_belong_to_a_call_is_content() -> None:
    call = '<tool_call>{"id": "1", "name": "find", "arguments": {"x": 1}, "more": [2]'
    pieces = [Piece("call", "find"), Piece("arguments", '{"x": 1}')]
    assert check_cuts("hermes", call + ", 'half") == [*pieces, Piece("content", " 'half")]
    assert check_cuts("hermes", call + ', "k": α}') == [*pieces, Piece("content", ' "k": α}')]
    assert check_cuts("hermes", call + "}</tool_call>") == pieces


def test_a_call_without_a_name_is_content() -> None:
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}"
    assert check_cuts("kimi_k2", text) == [Piece("content", text)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"x": 1}, "name": "find"}', '{"x": 1}'),
        ('{"id": "7", "type": "function", "name": "find", "arguments": {}, "extra": [{}]}', "{}"),
        ('{"name": "find"}', "{}"),
        ('{"name": "find", "arguments": null}', "{}"),
        ('{"name": "find", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}', '{"x": "é"}'),
        ('{"name": "find", "parameters": {"x": 1}}', '{"x": 1}'),
        ("{'name': 'find', 'arguments': {'x': 'say \"hi\"', 'y': True}}", '{"x": "say \\"hi\\"", "y": true}'),
        ('{"name": "find", "arguments": {"x": "two\nlines\t"}}', '{"x": "two\\nlines\\t"}'),
        ('{"name": "find", "arguments": {"x": "\\d+ \\\' \\x41"}}', '{"x": "\\\\d+ \' A"}'),
        ('{"name": "find", "arguments": {"x": [1, 2, ], }, }', '{"x": [1, 2]}'),
        ('{"name": "find", "arguments": {"x": 1}', '{"x": 1}'),
        ('{"name": "find", "arguments": {"x": 1}}}', '{"x": 1}'),
        ('{"name":"find","arguments":{"x":-1.5e-7,"y":[],"z":{}}}', '{"x": -1.5e-7, "y": [], "z": {}}'),
    ],
)
def test_what_models_make_of_json(text: str, arguments: str) -> None:
    pieces = check_cuts("hermes", f"<tool_call>\n{text}\n</tool_call>")
    assert pieces == [Piece("call", "find"), Piece("arguments", arguments)]
    json.loads(arguments)


def test_arguments_that_break_off_end_there() -> None:
    pieces = check_cuts("hermes", '<tool_call>{"name": "find", "arguments": {"x": <b>}}</tool_call> so')
    assert pieces == [
        Piece("call", "find"),
        Piece("arguments", '{"x": '),
        Piece("content", "<b>}}</tool_call> so"),
    ]


def test_deep_nesting_is_no_call() -> None:
    text = '<tool_call>{"name": "find", "arguments": ' + '{"a":' * 2000
    assert "".join(piece.text for piece in parse("hermes", [text])).count("a") >= 2000


def test_content_around_calls() -> None:
    text = 'One\n\n<tool_call>{"name": "find", "arguments": {}}</tool_call>\nTwo <tool_call>\n'
    assert check_cuts("hermes", text) == [
        Piece("content", "One"),
        Piece("call", "find"),
        Piece("arguments", "{}"),
        Piece("content", "\nTwo <tool_call>"),
    ]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "\nline\n", '"\\nline\\n"'),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "array"}, "['a', 1]", '["a", 1]'),
        ({}, "null", "null"),
        ({}, "some text", '"some text"'),
        ({"$ref": "#/x"}, '{"a":1}', '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_types_of_elements(name: str, schema: dict[str, Any], text: str, expected: str) -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}]
    pieces = check_cuts(name, WRITERS[name]([("f", {"x": text})]), tools=tools)
    assert calls_of(pieces) == [("f", f'{{"x": {expected}}}')]


def test_forgotten_ends_of_elements() -> None:
    text = "<function=f>\n<parameter=x>\n1\n<parameter=y>\ntwo\n</function>"
    assert calls_of(check_cuts("qwen3_coder", text)) == [("f", '{"x": 1, "y": "two"}')]


def test_ids_that_models_write() -> None:
    kimi = WRITERS["kimi_k2"]([("find", {}), ("find", {})])
    assert [p.id for p in parse("kimi_k2", [kimi]) if p.kind == "call"] == [
        "functions.find:0",
        "functions.find:1",
    ]
    mistral = "[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{}"
    assert check_cuts("mistral", mistral)[0] == Piece("call", "find", "a1b2c3d4e")


def test_harmony_without_headers_and_with_odd_ones() -> None:
    assert check_cuts("gpt-oss", "just text <|oops") == [Piece("content", "just text <|oops")]
    odd = " to=functions.find<|channel|>commentary json<|message|>{}<|call|>"
    assert calls_of(check_cuts("gpt-oss", odd)) == [("find", "{}")]
    broken = "<|channel|>nonsense<|message|>hi"
    assert check_cuts("gpt-oss", broken) == [Piece("content", broken)]
    code = "<|channel|>commentary to=python<|message|>print(1)"
    assert check_cuts("gpt-oss", code) == [Piece("content", code)]
    calm = "<|channel|>final<|message|>hi<|start|>assistant<|channel|>final<|message|> you<|return|>"
    assert check_cuts("gpt-oss", calm) == [Piece("content", "hi you")]


def test_long_output_is_read_in_linear_time() -> None:
    """A tag that is none at each step must not make the reader start over."""
    text = '<tool_call>{"name": "find", "extra": "' * 3000
    parser = OutputParser(dialect_of("hermes"), TOOLS)
    shown = "".join(piece.text for piece in parser.feed(text) + parser.close())
    assert shown == text


def hostile(name: str, size: int) -> dict[str, str]:
    """Texts of ``size`` characters, each the beginning of many calls, or of one that goes on for ever."""
    family = BY_NAME[name]
    opens = family.tools.opens if family.tools else ("<|start|>", "<|channel|>commentary to=f<|message|>")
    open_tag, head = opens[-1], '{"name": "find", "arguments": {"a": '
    units = {
        "openers": ("", "".join(opens)),
        "last openers": ("", open_tag),
        "half tags": ("", open_tag[:-1]),
        "openers with braces": ("", open_tag + "{"),
        "openers in strings": ("", open_tag + "{',':':\","),
        "heads": ("", open_tag + head),
        "brackets": (open_tag, "["),
        "brackets in arguments": (open_tag + head, "["),
        "keys before the name": (open_tag + "{", '"k": 1, '),
        "a long key": (open_tag + head[:-5] + '"', "k"),
        "an unclosed string": (open_tag + head + '"', "\\x4"),
        "space": (open_tag, " \n"),
        "nothing but space": ("", " "),
        "space before a tag": ("x", " "),
        "a long name": (open_tag, "f"),
    }
    return {kind: (begin + unit * (size // len(unit)))[:size] for kind, (begin, unit) in units.items()}


@pytest.mark.parametrize("name", CALLING)
def test_no_text_is_read_in_more_than_linear_time(name: str) -> None:
    """Where the reader starts over at each opener, 40 KB take half a minute."""
    for kind, text in hostile(name, 40_000).items():
        if kind in ("openers", "last openers"):
            pieces = parse(name, [text])
            assert text_of(pieces, "call") or text_of(pieces, "content").strip() == text.strip()


@pytest.mark.parametrize("name", CALLING)
def test_what_is_held_back_is_short(name: str) -> None:
    """Each feed costs as much as what is held back, so that has a limit."""
    for kind, text in hostile(name, HEAD + 6000).items():
        if "openers" in kind:
            continue
        parser = OutputParser(dialect_of(name), TOOLS)
        longest = 0
        for at in range(0, len(text), 1000):
            parser.feed(text[at : at + 1000])
            longest = max(longest, len(parser._cur.text))
        assert longest <= HEAD + SPACES + 1024, kind


@pytest.mark.parametrize("name", CALLING)
def test_hostile_texts_give_the_same_whatever_their_cuts(name: str) -> None:
    for kind, text in hostile(name, 1500).items():
        whole = parse(name, [text])
        for size in (1, 30):
            assert parse(name, [text[at : at + size] for at in range(0, len(text), size)]) == whole, kind


def test_a_call_after_beginnings_of_calls_is_found() -> None:
    call = '<tool_call>{"name": "find", "arguments": {"q": 1}}</tool_call>'
    for count in (1, AGAIN, 3 * AGAIN):
        pieces = check_cuts("hermes", "<tool_call>{" * count + call)
        assert calls_of(pieces) == [("find", '{"q": 1}')]
        assert text_of(pieces, "content") == "<tool_call>{" * count


def test_types_of_arguments_are_looked_up_once() -> None:
    """A large schema and many calls must not multiply."""
    schema = {"anyOf": [{"type": "string"}] * 5_000}
    tools = [{"function": {"name": "find", "parameters": {"properties": {"q": schema}}}}]
    call = "<tool_call>\n<function=find>\n" + "<parameter=q>\n1\n</parameter>\n" * 5_000
    parser = OutputParser(dialect_of("qwen3_coder"), tools)
    assert text_of(parser.feed(call), "arguments").count('"1"') == 5_000
