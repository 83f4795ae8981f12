"""Streamed text adds up to the tokenizer's own decode, and never shows half a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_tokenizers as tiny

from sgla.hub import packaged
from sgla.text.detokenize import make_detokenizer
from sgla.text.tables import Bytes, Pieces
from sgla.text.tokenizer import Tokenizer, load_path

IDS_PER_KIND = 8_000


def stream(tokenizer: Tokenizer, ids: list[int], chance: random.Random, skip: bool) -> list[str]:
    """The pieces of ``ids`` fed one to three at a time, flushed at the end."""
    detokenizer = make_detokenizer(tokenizer, skip)
    pieces, at = [], 0
    while at < len(ids):
        step = chance.randint(1, 3)
        pieces.append(detokenizer.feed(ids[at : at + step]))
        at += step
    return [*pieces, detokenizer.flush()]


def random_ids(tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Any ids; half of the lists are mostly raw bytes, so that valid and broken characters are both
    common."""
    ids = range(min(1000, tokenizer.vocab_size))
    partial = [i for i in ids if any(byte > 127 for byte in tokenizer.token_bytes(i))]
    weight = chance.choice((0.1, 0.8))
    return [
        chance.choice(partial) if chance.random() < weight else chance.randrange(tokenizer.vocab_size + 20)
        for _ in range(chance.randint(0, 40))
    ]


@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_full_decode_for_random_ids(tokenizer: Tokenizer, skip: bool) -> None:
    chance = random.Random(1)
    fed = 0
    while fed < IDS_PER_KIND:
        ids = random_ids(tokenizer, chance)
        fed += len(ids)
        assert "".join(stream(tokenizer, ids, chance, skip)) == tokenizer.decode(ids, skip), ids


def test_what_is_whole_is_read_at_once_or_not_at_all(byte_level: Tokenizer) -> None:
    detokenizer = make_detokenizer(byte_level)
    first, second = byte_level.backend.token_to_id("Ã"), byte_level.backend.token_to_id("©")  # of "é"
    assert detokenizer.whole([first]) is None
    assert detokenizer.whole([first, second, first, second]) == "éé"
    assert detokenizer.feed([first]) == ""
    assert detokenizer.whole([second]) is None
    assert detokenizer.feed([second]) == "é"
    assert detokenizer.whole([]) == ""


def test_valid_text_never_shows_a_replacement_character(tokenizer: Tokenizer) -> None:
    chance = random.Random(2)
    for text in tiny.corpus(150):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = stream(tokenizer, ids, chance, skip=False)
        if "\ufffd" not in tokenizer.decode(ids, skip_special_tokens=False):
            assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_are_held_only_while_a_character_may_still_become_valid(byte_level: Tokenizer) -> None:
    of_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    detokenizer = make_detokenizer(byte_level)
    shown = []
    for byte in "é😀".encode() + b"\xf0\x9f(\xe4\xb8":
        shown.append((detokenizer.feed([of_byte[bytes([byte])]]), detokenizer.held(True)))
    assert shown[:6] == [("", 1), ("é", 0), ("", 1), ("", 1), ("", 1), ("😀", 0)]
    assert shown[6:] == [("", 1), ("", 1), ("\ufffd(", 0), ("", 1), ("", 1)]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.held(True) == 0


def test_continued_text_keeps_its_first_space(llama2_like: Tokenizer) -> None:
    ids = llama2_like.encode("dog", add_special_tokens=False)
    assert make_detokenizer(llama2_like).feed(ids) == "dog"
    assert make_detokenizer(llama2_like, continues=True).feed(ids) == " dog"


def test_unknown_decoders_are_streamed_through_windows() -> None:
    tokenizer = Tokenizer(tiny.word_pieces())
    assert tokenizer.decoding.kind == "other"
    for text in ("the quick brown fox", "sleepsjumps over lazy dogs"):
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids, random.Random(3), True)) == tokenizer.decode(ids)


@pytest.mark.real
def test_stream_of_the_demo_model_equals_its_full_decode(tmp_path: Path) -> None:
    file = packaged.cached()
    if file is None:
        pytest.skip("the demo model is not in the cache")
    tokenizer, chance = load_path(file, str(tmp_path)), random.Random(4)
    for _ in range(1000):
        ids = random_ids(tokenizer, chance)
        assert "".join(stream(tokenizer, ids, chance, skip=True)) == tokenizer.decode(ids)


def test_tables_are_equal_to_pieces_for_every_id() -> None:
    """Where they are packed, beyond, and for ids that are none."""
    pieces: list[str | bytes | None] = [
        f"é{i}" if i % 3 else b"\xff%d" % i if i % 2 else None for i in range(700)
    ]
    asked: list[int] = []

    def make(token: int) -> str | bytes | None:
        asked.append(token)
        return pieces[token] if 0 <= token < len(pieces) else None

    texts, data = Pieces(make, 600), Bytes(make, 600)
    for _ in range(2):
        for token in (-1, *range(600, 700), 700, 2**40, *range(600)):
            piece = make(token)
            assert texts[token] == piece
            assert data[token] == (piece.encode() if isinstance(piece, str) else piece or b"")
    asked.clear()
    assert texts[599], data[599]
    assert not asked
