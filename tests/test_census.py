"""Counting what a JSON text consists of: exactly, in any pieces, and up to named limits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sgla.census import LIMITS, MAX_NUMBER, SLICE, Census, TooComplex, counting, loads


def expected(value: Any, counts: dict[str, int], depth: int = 1) -> int:
    """Add what ``value`` consists of to ``counts``; returns how deep it is nested."""
    if isinstance(value, str):
        counts["strings"] += 1
    if not isinstance(value, (list, dict)):
        return depth - 1
    counts["lists and objects"] += 1
    counts["values"] += max(1, len(value))
    if isinstance(value, dict):
        counts["members of objects"] += len(value)
        counts["strings"] += len(value)
    inner = value.values() if isinstance(value, dict) else value
    return max([depth, *(expected(item, counts, depth + 1) for item in inner)])


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random() + (depth == 5) * 0.5
    if kind < 0.3:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.5:
        return {f"{some_text(rng)}{i}": some_value(rng, depth + 1) for i in range(rng.randrange(4))}
    return some_text(rng) if kind < 0.8 else rng.choice([1, -2.5e10, True, None, 123456])


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice('a"\\\\\\,[]{}: \u00e9\n') for _ in range(rng.randrange(9)))


def counted(text: bytes, rng: random.Random, longest: int) -> Census:
    census, at = Census(), 0
    while at < len(text):
        size = rng.randrange(1, longest)
        census.feed(text[at : at + size])
        at += size
    return census


@pytest.mark.parametrize("seed", range(100))
def test_counts_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    value = some_value(rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
    counts = dict.fromkeys(LIMITS, 0)
    deepest = expected(value, counts)
    counts["backslashes"] = text.count(b"\\")
    census = counted(text, rng, longest=9)
    assert (census.counts, census.deepest) == (counts, deepest), text


@pytest.mark.parametrize("length", [1, MAX_NUMBER - 1, MAX_NUMBER, MAX_NUMBER + 1, 2 * MAX_NUMBER, 1000])
def test_numbers_are_measured_wherever_the_pieces_end(length: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        others = [rng.choice(['"' + "9" * 99 + '"', "1", "1234567890.123456", " "]) for _ in range(20)]
        text = f"[{','.join(others)},{'7' * length} , 1]".encode()
        if length <= MAX_NUMBER:
            counted(text, rng, longest=rng.choice([3, 50, 100, 1000]))
            continue
        with pytest.raises(TooComplex, match="64 characters"):
            counted(text, rng, longest=rng.choice([3, 50, 100, 1000]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" + b"1," * 600_000 + b"1]", "524288 values"),
        (b"[" + b'"",' * 300_000 + b"1]", "262144 strings"),
        (b"{" + b'"a":1,' * 70_000 + b'"a":1}', "65536 members of objects"),
        (b'["' + b"\\\\" * 1_100_000 + b'"]', "2097152 backslashes"),
        (b"[" + b"[]," * 70_000 + b"1]", "65536 lists and objects"),
        (b"[" * 200 + b"]" * 200, "128 deep"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "128 deep"),
        (b"[" + b"9" * 70_000 + b"]", "64 characters"),
    ],
)
def test_limits(text: bytes, words: str) -> None:
    with pytest.raises(TooComplex, match=words):
        for _ in counting(text, Census()):
            pass
    inside = b'{"text":"%b"}' % text.translate(None, b'"\\')
    for _ in counting(inside, Census()):
        pass


def test_a_full_context_of_ids_is_no_attack() -> None:
    text = json.dumps({"input_ids": list(range(100_000, 100_000 + (1 << 20)))}).encode()
    census = Census(context=1 << 20)
    pauses = sum(1 for _ in counting(text, census))
    assert pauses == len(text) // SLICE + 1
    assert census.memory(text) > 32 * (1 << 20)


def test_texts_inside_of_requests() -> None:
    assert loads('{"a": [1, "\\u00e9"]}') == {"a": [1, "\u00e9"]}
    with pytest.raises(ValueError, match="Expecting property name"):
        loads("{")
    with pytest.raises(TooComplex):
        loads("[" * 100_000)
