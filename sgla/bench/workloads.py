"""Prompts of the workloads. Everything follows from the seed, so two servers get the same requests."""

from __future__ import annotations

import random
from typing import Any

import msgspec

Prompt = str | list[int]

# Ids that are ordinary tokens in every vocabulary of 32k or more; special tokens lie at the ends.
LOW_ID, HIGH_ID = 1000, 28000

# Words that are one token each, with the space before, in common BPE vocabularies.
WORDS = """the of and to in is was for that it with as his on be at by had not are but from or have an
they which one you were all her she there would their we him been has when who will no more if out so up
said what its about than into them can only other time new some could these two may first then do any like
my now over such our man me even most made after also did many off before must well back through years
much where your way down should because long each just state those people too mr how little good world
make very year still see own work men day get here old between both life being under three never know same
last another while us might great go come since against right came take used himself few house during
without again place around however home small found thought went say part once general high upon school
every don does got united left number course war until always away something fact though water less public
put think almost hand enough far took head yet government system set better told nothing night end why
called didn eyes find going look asked later knew point next city business give group toward young days
let room word""".split()  # noqa: SIM905


class Turn(msgspec.Struct):
    """``extra``: more fields of its body."""

    prompt: Prompt
    max_tokens: int
    extra: dict[str, Any] = {}


Session = list[Turn]  # one after another, each turn's prompt after the earlier turns and their answers


def words(rng: random.Random, count: int) -> str:
    return " " + " ".join(rng.choices(WORDS, k=count)) if count else ""


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(count)]


def around(rng: random.Random, length: int, spread: float) -> int:
    """Uniform in ``length * (1 +- spread)``, at least 1."""
    return max(1, round(length * (1 + rng.uniform(-spread, spread))))


def random_sessions(
    rng: random.Random, count: int, input_len: int, output_len: int, spread: float = 0.0, text: bool = False
) -> list[Session]:
    """``count`` unrelated prompts."""
    make = words if text else tokens
    return [
        [Turn(make(rng, around(rng, input_len, spread)), around(rng, output_len, spread))]
        for _ in range(count)
    ]


def shared_prefix_sessions(
    rng: random.Random, count: int, prefix_len: int, input_len: int, output_len: int, text: bool = False
) -> list[Session]:
    """``count`` prompts that begin with the same ``prefix_len`` tokens."""
    if text:
        prefix = words(rng, prefix_len)
        return [[Turn(prefix + words(rng, input_len), output_len)] for _ in range(count)]
    ids = tokens(rng, prefix_len)
    return [[Turn(ids + tokens(rng, input_len), output_len)] for _ in range(count)]


def multi_turn_sessions(
    rng: random.Random, count: int, turns: int, input_len: int, output_len: int, spread: float = 0.0
) -> list[Session]:
    """``count`` conversations; text only, since a turn's prompt contains the answers before it."""
    return [
        [
            Turn(words(rng, around(rng, input_len, spread)), around(rng, output_len, spread))
            for _ in range(turns)
        ]
        for _ in range(count)
    ]
