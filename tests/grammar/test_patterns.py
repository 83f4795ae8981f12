"""Regular expressions of ECMA-262: what each stands for, by Python and by the matcher."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher
from test_rewriting import TOKENIZER, accepted

from sgla.grammar.errors import GrammarError
from sgla.grammar.llg import make_matcher
from sgla.grammar.notations import as_in_python
from sgla.grammar.patterns import PatternError, portable, selecting, texts
from sgla.grammar.source import json_schema


def found(pattern: str, text: str) -> bool:
    return re.search(portable(pattern), text, re.ASCII) is not None


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"^\s$", "\t\v\f\r \u00a0\u1680\u2003\u2028\u202f\u205f\u3000\ufeff", "\u0085\u200b\u180ea"),
        (r"^\S$", "\u0085\u200ba", "\u00a0\ufeff\u2028\t"),
        (r"^[^\s]$", "\u0085a", "\ufeff\u2029"),
        (r"^\d$", "09", "\u0663a"),
        (r"^[\D]$", "\u0663a", "0"),
        (r"^\w$", "aZ_9", "é\u0663-"),
        (r"^[^\W_]$", "a9", "_é"),
        (r"^.$", "a\u0085", "\r\u2028\u2029"),
        (r"^[\s\S]$", "a\u2028", ""),
        (r"^[^]$", "a\u2028", ""),
        (r"^[[a]$", "[a", "]"),
        (r"^[a&&b]$", "a&b", "-"),
        (r"^[\w-.]$", "a-.", ","),
        (r"^[+--]$", "+,-", "."),
        (r"^[\b]$", "\b", "b"),
        (r"^\<$", "<", ">"),
        (r"^(\x41|\cI|\u0042)$", "AB\t", "C"),
        (r"^[\uD83D\uDE00-\u{1F602}]$", "\U0001f600\U0001f601", "\U0001f603"),
        (r"(?i)^k$", "kK", "\u212a"),
        (r"^{$", "{", "}"),
    ],
)
def test_characters(pattern: str, yes: str, no: str) -> None:
    for text, fits in (*((text, True) for text in yes), *((text, False) for text in no)):
        assert found(pattern, text) is fits, text
        if text != "\u212a":  # which the matcher takes for a k
            output = json.dumps(text, ensure_ascii=ord(text) < 32)
            assert accepted({"type": "string", "pattern": pattern}, output) is fits, text


@pytest.mark.parametrize("pattern", [r"^[^\\]*$", r'^[^"]*$', r'^[^"\\]{1,3}$', "^[^\\\\:x]+$", r"^[\0-!]*$"])
def test_escapes_stand_for_their_characters_alone(pattern: str) -> None:
    for text in ("a", '"', "\\", 'a"', "a\\", "!"):
        schema = {"type": "string", "pattern": pattern}
        assert accepted(schema, json.dumps(text)) is found(pattern, text), text


@pytest.mark.parametrize(
    "pattern",
    [
        *("^a|b$", "(^|b)a($|c)", "^(a($|b))*$", "^$|^a$", "(a|b$)(a|$)c?", "^(a|^b)+", "a(b$)?", "(^a)+b"),
        *("^(a|b|)$", "(?i)^aB$", "a{2}|^c{0,1}$", "^(a$|b)", "(?:^a|b)c"),
    ],
)
def test_anchors_anywhere(pattern: str) -> None:
    """Python knows them, too."""
    for size in range(4):
        for chars in itertools.product("abcB" if "i" in pattern else "abc", repeat=size):
            text = "".join(chars)
            assert found(pattern, text) == (re.search(pattern, text) is not None), text
    assert accepted({"type": "string", "pattern": pattern}, '"cccc"') == found(pattern, "cccc")


@pytest.mark.parametrize(
    ("pattern", "all_of_them"),
    [
        ("^[a-d]$", ["a", "b", "c", "d"]),
        ("^(foo|ba{0,2})?$", ["", "foo", "b", "ba", "baa"]),
        ("^(a|a)(|b)$", ["a", "ab"]),
        ("^a$|^b$", ["a", "b"]),
        ("^((){99}){99}$", [""]),
        ("^[]$", []),
        ("a", None),
        ("^a*$", None),
        ("^[a-z]{2}$", None),
        ("^(((a{64}){64}){64}){64}$", None),
        ("(a|b|c$)" * 40, None),
        ("^[^a]$", None),
    ],
)
def test_texts_that_can_be_listed(pattern: str, all_of_them: list[str] | None) -> None:
    listed = texts(pattern)
    assert listed == all_of_them


ALPHABET = "abm@-=\n"
SHORT = ["".join(chars) for size in range(5) for chars in itertools.product(ALPHABET, repeat=size)]


@pytest.mark.parametrize(
    ("pattern", "output", "wrong"),
    [
        (r"^(?!mam)[a-z]*$", "ma", "mama"),
        (r"^(?!(ab|ba|mm)$)[abm]+$", "aba", "ab"),
        (r"^(?=[^]*a)(?=[^]*b)[^]{2,3}$", "mba", "aa"),
        (r"^(?!a|b$)", "ba", "b"),
        (r"^(?=[^=]+$)(?!\s+$)(a|\n)+$", "\na", "\n"),
        (r"((?:[^a]*a)*)(?=m(b|@))", "am@", "am"),
        (r"^(?!.*--)[a-z-]+$", "a-b", "a--b"),
    ],
)
def test_looking_ahead_at_the_beginning(pattern: str, output: str, wrong: str) -> None:
    """Python knows it, too, and other line breaks are left out here."""
    theirs = pattern.replace("[^]", r"[\s\S]")
    assert [found(pattern, text) for text in SHORT if not text.endswith("\n")] == [
        re.search(theirs, text) is not None for text in SHORT if not text.endswith("\n")
    ]
    schema = {"type": "string", "pattern": pattern}
    assert accepted(schema, json.dumps(output))
    assert not accepted(schema, json.dumps(wrong))


@pytest.mark.parametrize(
    ("every", "none"),
    [
        ((), ("a",)),
        ((), ("mam",)),
        (("a", "b"), ("@",)),
        ((), ("^(ab|ba)$",)),
        (("^[a-z]+$",), ("^(a|mm|abm)$",)),
        ((), (r"^\s*$",)),
        (("a", "^..$"), ()),
        ((), ("^[am]{0,3}$", "@")),
        (("^a$",), ("^a",)),
        ((), ("^(?!a)",)),
    ],
)
def test_selected_texts(every: tuple[str, ...], none: tuple[str, ...]) -> None:
    pattern = selecting(every, none)
    assert pattern is not None
    for text in SHORT:
        if not text.endswith("\n"):
            fits = all(found(each, text) for each in every) and not any(found(each, text) for each in none)
            assert found(pattern, text) is fits, text


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){9}", "^a{9999}$", r"\p{L}", "(?i)a", r"\b", "^[ab]{0,70}$"]
)
def test_what_is_not_selected(pattern: str) -> None:
    assert selecting((), (pattern,)) is None


@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"not": {"pattern": "ab"}}, '"ba"', '"mab"'),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, '"am"', '"ab"'),
        (
            {
                "patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}},
                "additionalProperties": False,
            },
            '{"a": 1, "ab": 3, "b": "x"}',
            '{"ab": 1}',
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b$": {"type": "integer"}}},
            '{"ab": 1, "am": "x"}',
            '{"m": 1}',
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b$": {"type": "integer"}}},
            '{"a": "x"}',
            '{"ab": "x"}',
        ),
        ({"propertyNames": {"enum": ["a", "b"], "description": "few"}}, '{"b": 1}', '{"m": 1}'),
    ],
)
def test_schemas_that_select_texts(schema: Any, fits: str, wrong: str) -> None:
    schema = {"type": "string" if fits[0] == '"' else "object"} | schema
    assert accepted(schema, fits, additional=True)
    assert not accepted(schema, wrong, additional=True)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"a\bc", "word boundaries"),
        (r"(a)\1", "backreferences"),
        ("a{,3}", "brace"),
        ("[[:alpha:]]", "POSIX"),
        ("a{2}{3}", "behind a quantifier"),
        ("a{3,2}", "wrong order"),
        ("[b-a]", "wrong order"),
        ("(a", "not closed"),
        ("a)", "closes nothing"),
        ("*a", "nothing to repeat"),
        ("a(?!b)", "looking ahead"),
        ("^((?!a).)*$", "looking ahead"),
        ("(?<!a)b", "looking behind"),
        (r"\h", "no escape"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("^(^a$){2}$", "anchors"),
        ("(a|b|c$)" * 40, "too long"),
        (r"\u{110000}", "no character"),
    ],
)
def test_others_are_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        portable(pattern)
    for schema, keyword in (
        ({"pattern": pattern}, "pattern"),
        ({"patternProperties": {pattern: {}}}, "patternP"),
    ):
        with pytest.raises(GrammarError, match=f"'{keyword}.*/properties/x.*{why}"):
            json_schema({"properties": {"x": schema}}, additional=True)


CHARACTERS = "aZ09_-&~[]^+,. \t\n\x1c\x1f\x85\xa0é\u0663\u2028\ufeffß²"


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\s", r"\S", r"\w", r"\W", r"\d", r"\D", r"[^\s]", r"[^\S]", r"[^\d]", r"[^\D\d]", r"[^\w]", "."),
        *("[[]", "[^]a]", "[]a]", "[a[]", "[a&&9]", "[+~~a]", "[+--]", r"[a\]]", "[a-z]", r"[^a[\d]"),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_what_the_matcher_takes_python_takes(pattern: str) -> None:
    matcher = make_matcher(TOKENIZER, LLMatcher.grammar_from_regex(as_in_python(pattern)))
    assert not matcher.is_error(), matcher.get_error()
    for char in CHARACTERS:
        if matcher.validate_tokens(list(char.encode())) == len(char.encode()):
            assert re.fullmatch(pattern, char), char
