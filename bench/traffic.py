"""What users send: the workloads W7 to W10 as numbers drawn from a seed, the same for each engine.

A peer's interpreter reads this file too, so it needs nothing but Python.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

DOCUMENTS = 32_768, 65_536, 131_072  # tokens of W8
DOCUMENT_OUT = 256
SYSTEM, QUESTION, ANSWER = 2000, 300, 64  # tokens of an agent: with its tools; of its task; of a call
# ShareGPT's lengths, roughly: medians and spreads of a lognormal distribution, cut at these ends.
CHAT_IN, CHAT_OUT = (70, 1.4, 4, 2048), (150, 0.9, 4, 1024)
BATCH = 256  # rows, where batches are counted
TTFT_MS, ITL_MS = 500.0, 25.0  # what W9 asks for

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "seed": 1},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 1.0, "logprobs": 5},
    {"temperature": 0.0, "frequency_penalty": 0.2, "logprobs": 1},
]


class Task(NamedTuple):
    """An agent's: tokens that each turn adds to the prompt, and the seconds before it."""

    added: list[int]
    gaps: list[float]


def sizes(draw: random.Random, count: int, whole: int) -> list[int]:
    """Tokens of so many outputs, most of which are short, ``whole`` together."""
    drawn = [draw.lognormvariate(0, 1) for _ in range(count)]
    return [round(whole * x / sum(drawn)) for x in drawn]


def agents(seed: int, count: int, turns: int, most: int, gap: float) -> list[Task]:
    """W7: behind the same system prompt each agent has a task, and in each turn a call that is written
    beforehand and what its tool says. They end at 40 to 100 % of ``most`` tokens."""
    tasks = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        beside = SYSTEM + QUESTION + turns * ANSWER
        told = sizes(draw, turns - 1, max(turns, round(most * draw.uniform(0.4, 1)) - beside))
        gaps = [draw.expovariate(1 / gap) if gap else 0.0 for _ in range(turns)]
        tasks.append(Task([SYSTEM + QUESTION, *(ANSWER + max(1, size) for size in told)], gaps))
    return tasks


def documents(context: int, lengths: Sequence[int] = DOCUMENTS) -> list[int]:
    """W8: prompts of these lengths, cut to the context; those that it is much too short for are left out.
    Raises ValueError if that leaves none."""
    most = context - DOCUMENT_OUT
    found = list(dict.fromkeys(min(length, most) for length in lengths if length <= context * 1.05))
    if not found:
        raise ValueError(f"a context of {context} tokens is too short for documents of {min(lengths)}")
    return found


def chats(seed: int, count: int) -> list[tuple[int, int]]:
    """W9: tokens in and out of each."""
    draw = random.Random(f"chats {seed}")
    return [(_length(draw, *CHAT_IN), _length(draw, *CHAT_OUT)) for _ in range(count)]


def _length(draw: random.Random, median: float, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(median * draw.lognormvariate(0, spread))))


def fewer_steps(outputs: Sequence[int]) -> float:
    """By how much steps are fewer where a row that ends makes room for another, than where a batch ends with
    its longest output."""
    batches = [outputs[i : i + BATCH] for i in range(0, len(outputs), BATCH)]
    return round(sum(map(max, batches)) / (sum(outputs) / BATCH), 2)


def settings(count: int) -> list[dict[str, Any]]:
    """W10: one after the other."""
    return [SAMPLING[i % len(SAMPLING)] for i in range(count)]


def schema(number: int) -> dict[str, Any]:
    """W10: one that no other request has, and whose outputs are longer than any here."""
    fields = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["river", "lake", "sea"]},
        "length": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "deep": {"type": "boolean"},
    }
    record = {
        "type": "object", "properties": fields, "required": [*fields], "additionalProperties": False,
    }  # fmt: skip
    return {"type": "array", "items": record, "minItems": 100}


def good(ttft_ms: Sequence[float], itl_ms: Sequence[float]) -> int:
    """How many requests keep both bounds. ``itl_ms``: of each the mean of its gaps."""
    return sum(first <= TTFT_MS and gap <= ITL_MS for first, gap in zip(ttft_ms, itl_ms, strict=True))
