"""Conversations whose turns are known have the tokens that the tokenizer gives them as a whole."""

from __future__ import annotations

import random
from array import array
from functools import partial

import pytest
import tiny_tokenizers as tiny
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from sgla.text.tokenizer import Tokenizer
from sgla.text.turns import ENTRY, Turns, turns_of


def encode(backend: tokenizers.Tokenizer, texts: list[str]) -> list[tokenizers.Encoding]:
    encoded: list[tokenizers.Encoding] = backend.encode_batch_fast(texts, add_special_tokens=False)
    return encoded


def conversation(chance: random.Random, turns: int) -> list[str]:
    """It grows by parts, most of which are long enough to be kept."""
    texts, text = [], ""
    for _ in range(turns):
        role = chance.choice(["user", "assistant", " "])
        content = "".join(tiny.corpus(chance.randint(7, 20), chance.randrange(1 << 30)))
        text += f"<|im_start|>{role}\n{content}<|im_end|>{chance.choice(['', ' ', chr(10)])}"
        texts.append(text)
    return texts


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_tokens_are_those_of_the_whole_text(kind: str) -> None:
    backend = tiny.KINDS[kind]()
    found = turns_of(backend, partial(encode, backend))
    assert found is not None
    chance = random.Random(0)
    for _ in range(3):
        for text in [*conversation(chance, 8), *tiny.corpus(100)]:
            for _ in range(2):
                assert found.encode(text).tolist() == encode(backend, [text])[0].ids, text


def test_a_long_text_is_known_in_parts_and_a_short_one_is_encoded() -> None:
    tokenizer = Tokenizer(tiny.byte_level())
    for text in ("Hello <|im_start|>", "<|im_start|>user\n" + "The quick brown fox. " * 400):
        found = tokenizer.conversation(text)
        assert isinstance(found, array) == (len(text) > 1000)
        assert list(found if isinstance(found, array) else found.ids) == tokenizer.encode(text, False)


def test_only_what_is_new_is_encoded() -> None:
    backend, asked = tiny.byte_level(), list[str]()

    def noted(texts: list[str]) -> list[tokenizers.Encoding]:
        asked.extend(texts)
        return encode(backend, texts)

    found = turns_of(backend, noted)
    assert found is not None
    first, second = "a" * 500, "b" * 500
    for space in ("", "", "salted"):
        found.encode(f"<|im_start|>{first}<|im_end|>{second}", space)
        found.encode(f"<|im_start|>{first}<|im_end|>", space)
    assert asked == [first, second] * 2, "each once in each space"


def test_what_was_used_longest_ago_is_forgotten() -> None:
    backend, asked = tiny.byte_level(), list[str]()

    def noted(texts: list[str]) -> list[tokenizers.Encoding]:
        asked.extend(texts)
        return encode(backend, texts)

    parts = [letter * 300 for letter in "abc"]
    size = max(ENTRY + 4 * len(encode(backend, [part])[0].ids) for part in parts)
    found = Turns({"<s>": 0}, noted, room=2 * size)
    for part in (*parts, parts[2], parts[1], parts[0], parts[1]):
        found.encode(part)
    assert asked == [*parts, parts[0]]


def metaspace_first() -> tokenizers.Tokenizer:
    backend = tiny.metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def stripping() -> tokenizers.Tokenizer:
    backend = tiny.byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    return backend


def splitting() -> tokenizers.Tokenizer:
    backend = tiny.byte_level()
    backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize("make", [metaspace_first, stripping, splitting])
def test_tokenizers_that_read_parts_in_another_way_are_left_alone(make: object) -> None:
    assert callable(make)
    backend = make()
    assert turns_of(backend, partial(encode, backend)) is None


def test_tokens_that_others_hide_are_no_place_to_cut() -> None:
    backend = tiny.byte_level()
    backend.normalizer = normalizers.NFC()
    more = ["x<|im", "<|im_end|>>", "e\u0301<s>"]
    backend.add_tokens([AddedToken(text, normalized=False) for text in more])
    found = turns_of(backend, partial(encode, backend))
    assert found is not None
    chance = random.Random(1)
    pieces = [*more, *tiny.SPECIAL, "x", "<", "<|im", ">", "e", "\u0301", "word " * 40]
    for _ in range(300):
        text = "".join(chance.choices(pieces, k=12))
        assert found.encode(text).tolist() == encode(backend, [text])[0].ids, text
