"""Logprob shapes: token strings, raw bytes, offsets."""

from __future__ import annotations

import json
import math
from array import array

import msgspec

from sgla.messages import Pairs, TokenLogprob
from sgla.text.logprobs import (
    PART,
    TextOffsets,
    WholeVocabulary,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_name,
)
from sgla.text.tokenizer import Tokenizer


def test_bytes_of_chat_logprobs_spell_the_text(byte_level: Tokenizer) -> None:
    text = "dog 🪐 今"
    entries = [TokenLogprob(token, -0.5, 1, [(token, -0.5)]) for token in byte_level.encode(text, False)]
    shown = chat_logprobs(byte_level, entries)
    assert bytes(byte for one in shown for byte in one["bytes"]) == text.encode()
    assert all(
        one["top_logprobs"] == [{key: one[key] for key in ("token", "logprob", "bytes")}] for one in shown
    )
    assert any("\\xf0" in one["token"] for one in shown)  # part of the planet
    json.dumps(shown, allow_nan=False)


def test_pairs_are_what_tuples_are() -> None:
    tuples = [(5, -0.5), (70_000, -2.0), (6, -math.inf)]
    columns = [array("i", [token for token, _ in tuples]), array("f", [value for _, value in tuples])]
    pairs = Pairs(columns[0].tobytes() + columns[1].tobytes())
    assert pairs == tuples == list(pairs)
    assert pairs != tuples[:2]
    assert (len(pairs), pairs[1], pairs[:2], repr(pairs)) == (3, tuples[1], tuples[:2], repr(tuples))
    assert not Pairs(b"")


def test_partial_characters_and_ids_as_names(byte_level: Tokenizer) -> None:
    first = byte_level.encode("🪐", False)[0]
    assert token_name(byte_level, first).startswith("bytes:\\xf0")
    assert token_name(byte_level, first, as_ids=True) == f"token_id:{first}"
    assert (
        chat_logprobs(byte_level, [TokenLogprob(first, -1.0, 1)], as_ids=True)[0]["token"]
        == f"token_id:{first}"
    )


def test_impossible_tokens_have_a_finite_logprob(byte_level: Tokenizer) -> None:
    entries = [TokenLogprob(5, -math.inf, 9, [(6, math.nan), (7, -1.5)])]
    (one,) = chat_logprobs(byte_level, entries)
    assert one["logprob"] == -9999.0
    assert [top["logprob"] for top in one["top_logprobs"]] == [-9999.0, -1.5]


def test_completion_logprobs_have_one_entry_a_token(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("the dog", False)
    best = next(i for i in range(byte_level.vocab_size) if i not in tokens)
    entries = [None, *(TokenLogprob(token, -2.0, 2, [(best, -0.1)]) for token in tokens[1:])]
    shown = completion_logprobs(byte_level, tokens, entries, list(range(len(tokens))))
    assert {len(column) for column in shown.values()} == {len(tokens)}
    assert shown["token_logprobs"] == [None] + [-2.0] * (len(tokens) - 1)
    assert "".join(shown["tokens"]) == "the dog"
    assert shown["top_logprobs"][0] is None
    assert set(shown["top_logprobs"][1]) == {token_name(byte_level, best), shown["tokens"][1]}


def test_offsets_point_at_each_token_in_the_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("dog 🪐 sleeps, 今天", add_special_tokens=True)
    text = tokenizer.decode(tokens)
    offsets = TextOffsets(tokenizer, True, start=7)
    found = [offset - 7 for part in (tokens[:3], tokens[3:]) for offset in offsets.feed(part)]
    assert found == sorted(found)
    for token, offset in zip(tokens, found):
        shown = (
            "" if token in tokenizer.special_ids else tokenizer.token_bytes(token).decode("utf-8", "ignore")
        )
        assert text[offset:].startswith(shown) or (offset == 0 and text.startswith(shown.lstrip(" ")))


def test_a_whole_vocabulary_is_shown_like_a_few_tokens(byte_level: Tokenizer) -> None:
    size = 3 * PART + 5
    ids, values = array("i", reversed(range(size))), array("f", [-token / 7 for token in range(size)])
    values[-1] = -math.inf
    top = Pairs(ids.tobytes() + values.tobytes())
    whole = WholeVocabulary(byte_level, size)
    for token in (3, size - 1):
        entry = TokenLogprob(token, values[-1 - token], size - token, top)
        written = b"{" + b",".join(whole.parts(entry)) + b"}"
        assert [msgspec.json.decode(written)] == prompt_logprobs(byte_level, [token], [entry], size)
