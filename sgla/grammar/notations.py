"""Other notations in the matcher's: its regular expressions, and its Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from sgla.grammar.errors import GrammarError

MAX_CHOICES = 10_000
# Escapes that mean another thing in Python. Digits are the ASCII ones alone, which is what everybody wants.
ESCAPES = {
    "d": "[0-9]",
    "s": r"[\s\x1c-\x1f]",
    "S": r"[^\s\x1c-\x1f]",
    "w": r"[\p{L}\p{N}_]",
    "W": r"[^\p{L}\p{N}_]",
    "Z": r"\z",
}


def as_in_python(pattern: str) -> str:
    """A regular expression with Python's meaning, in the matcher's dialect.
    All that it matches, ``re`` matches."""
    opened = ""  # with what a class has begun

    def meant(found: re.Match[str]) -> str:
        nonlocal opened
        sign = found[0]
        if found[1]:
            return sign if found[1] == "d" and opened.startswith("[^") else ESCAPES.get(found[1], sign)
        if opened:
            opened = "" if sign.endswith("]") else opened
            return sign if sign in ("]", "-") else re.sub(r"([\[&~-])", r"\\\1", sign)
        opened = sign if sign[0] == "[" else ""
        return sign.replace("]", r"\]") if opened else sign

    return re.sub(r"\\(.)|\[\^?\]?|\]|&|~|-+", meant, pattern, flags=re.DOTALL)


def choice_lark(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError("a choice is a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"a choice may list at most {MAX_CHOICES} strings, got {len(choices)}")
    # One terminal: as alternatives of a rule they would be parsed side by side, which has a limit.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)


def ebnf_lark(text: str) -> str:
    """GBNF is translated; Lark stays as it is."""
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the translator raises plain Exception, too
        raise GrammarError(f"the EBNF cannot be read: {error}") from error
