"""Output streams: text, tokens and logprobs of the pieces belong together, whatever is held back."""

from __future__ import annotations

import random

import pytest

from sgla.messages import SamplingParams, TokenLogprob
from sgla.text.output import OutputStream, Piece
from sgla.text.tokenizer import Tokenizer


def entries(tokens: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -float(i), 1) for i, token in enumerate(tokens)]


def run(
    tokenizer: Tokenizer,
    tokens: list[int],
    sampling: SamplingParams,
    cuts: list[int],
    finish: str = "length",
    matched: int | None = None,
) -> list[Piece]:
    """Feed ``tokens`` cut at ``cuts``, the last part with the finish; stops at a stop string as the caller
    would."""
    stream, logprobs, pieces = OutputStream(tokenizer, sampling), entries(tokens), []
    for a, b in zip([0, *cuts], [*cuts, len(tokens)]):
        last = b == len(tokens)
        pieces.append(
            stream.feed(tokens[a:b], logprobs[a:b], finish if last else None, matched if last else None)
        )
        if pieces[-1].matched_stop is not None:
            break
    return pieces


def every_token(tokens: list[int]) -> list[int]:
    return list(range(1, len(tokens)))


def joined(pieces: list[Piece]) -> tuple[str, list[int], str | None]:
    text = "".join(piece.text for piece in pieces)
    return text, [t for piece in pieces for t in piece.tokens], pieces[-1].matched_stop


def test_tokens_that_come_together_are_read_as_one_by_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a character ends in a later part, so that tokens wait for it."""
    chance = random.Random(6)
    partial = [i for i in range(tokenizer.vocab_size) if any(b > 127 for b in tokenizer.token_bytes(i))]
    for _ in range(300):
        ids = partial if partial and chance.random() < 0.5 else range(tokenizer.vocab_size)
        tokens = [chance.choice(ids) for _ in range(chance.randint(1, 30))]
        cuts = sorted(chance.randint(0, len(tokens)) for _ in range(chance.randint(0, 8)))
        parts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)])]
        fast, slow = (OutputStream(tokenizer, SamplingParams()) for _ in range(2))
        monkeypatch.setattr(type(slow._detokenizer), "whole", lambda self, ids: None)
        expected = [slow.feed(part) for part in parts]
        monkeypatch.undo()
        assert [fast.feed(part) for part in parts] == expected
        assert fast.feed([], finish="length") == slow.feed([], finish="length")


def test_pieces_do_not_depend_on_how_tokens_arrive(tokenizer: Tokenizer) -> None:
    chance = random.Random(5)
    for _ in range(300):
        tokens = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randint(1, 30))]
        text = tokenizer.decode(tokens)
        start = chance.randint(0, max(0, len(text) - 1))
        stop = text[start : start + chance.randint(1, 4)] or "x"
        sampling = SamplingParams(stop=[stop, "never there"], logprobs=0)
        cuts = sorted(chance.randint(0, len(tokens)) for _ in range(chance.randint(0, 5)))
        one_by_one = run(tokenizer, tokens, sampling, every_token(tokens))
        assert joined(run(tokenizer, tokens, sampling, cuts)) == joined(one_by_one)
        shown, kept, matched = joined(one_by_one)
        assert shown == (text[: text.index(stop)] if stop in text else text)
        assert (matched is not None) == (stop in text)
        assert kept == tokens[: len(kept)]
        assert sum(piece.consumed for piece in one_by_one) == len(kept)


def test_logprobs_come_with_their_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("dog 今 🎉 sleeps.", add_special_tokens=False)
    pieces = run(tokenizer, tokens, SamplingParams(logprobs=0, stop=["lee"]), every_token(tokens))
    for piece in pieces:
        assert piece.logprobs is not None
        assert [entry.token for entry in piece.logprobs] == piece.tokens


def test_tokens_of_a_piece_spell_its_text(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("ab 🎉 dog </think> 公 stoppable 'stop", add_special_tokens=False)
    pieces = run(byte_level, tokens, SamplingParams(logprobs=0, stop=["stop!"]), every_token(tokens))
    written = owed = b""
    for piece in pieces:
        written += piece.text.encode()
        owed += b"".join(map(byte_level.token_bytes, piece.tokens))
        assert written.startswith(owed)  # never a token whose text is still held back
    assert written == owed == b"".join(map(byte_level.token_bytes, tokens))


def test_partial_character_keeps_its_tokens_for_the_piece_that_shows_it(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("🪐", add_special_tokens=False)
    assert len(tokens) > 1
    pieces = run(byte_level, tokens, SamplingParams(logprobs=0), every_token(tokens), finish="stop")
    assert [(piece.text, piece.tokens) for piece in pieces[:-1]] == [("", [])] * (len(tokens) - 1)
    assert (pieces[-1].text, pieces[-1].tokens) == ("🪐", tokens)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(byte_level: Tokenizer, include: bool) -> None:
    tokens = byte_level.encode("the fox jumps over", add_special_tokens=False)
    sampling = SamplingParams(stop=["x ju"], include_stop_str_in_output=include)
    pieces = run(byte_level, tokens, sampling, every_token(tokens))
    text, kept, matched = joined(pieces)
    assert (text, matched) == ("the fox ju" if include else "the fo", "x ju")
    assert (
        byte_level.decode(kept[:-1]).count("x ju") == 0
    )  # the last token is the one that completed the stop
    assert len(kept) < len(tokens)


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "fox"), (False, False, "fox"), (True, True, "fox"), (True, False, "fox</s>")],
)
def test_text_of_the_stop_token(byte_level: Tokenizer, include: bool, skip: bool, text: str) -> None:
    eos = byte_level.eos_id
    assert eos is not None
    tokens = [*byte_level.encode("fox", add_special_tokens=False), eos]
    sampling = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    pieces = run(byte_level, tokens, sampling, every_token(tokens), finish="stop", matched=eos)
    assert joined(pieces) == (text, tokens, None)


def test_ordinary_stop_token_id_is_cut_too(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("the fox", add_special_tokens=False)
    pieces = run(byte_level, tokens, SamplingParams(), [], finish="stop", matched=tokens[-1])
    assert joined(pieces)[:2] == (byte_level.decode(tokens[:-1]), tokens)


def test_finish_brings_out_what_was_held(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("the st", add_special_tokens=False) + byte_level.encode("🪐", False)[:1]
    pieces = run(byte_level, tokens, SamplingParams(stop=["stop"]), every_token(tokens))
    assert "".join(piece.text for piece in pieces[:-1]) == "the "
    assert joined(pieces)[:2] == ("the st\ufffd", tokens)


def test_stop_strings_count_after_min_tokens(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("a,a,a,a", add_special_tokens=False)
    assert len(tokens) == 7
    pieces = run(byte_level, tokens, SamplingParams(stop=[","], min_tokens=4), every_token(tokens))
    assert joined(pieces)[0] == "a,a,a"


def test_nothing_comes_after_the_end(byte_level: Tokenizer) -> None:
    stream = OutputStream(byte_level, SamplingParams(stop=["x"]))
    assert stream.feed(byte_level.encode("fox", False)).matched_stop == "x"
    assert stream.feed([5], None, "abort") == Piece("", [])


def test_output_that_continues_a_prompt_keeps_its_space(llama2_like: Tokenizer) -> None:
    tokens = llama2_like.encode("dog", add_special_tokens=False)
    prompt = llama2_like.encode("The")
    assert OutputStream(llama2_like, SamplingParams(), prompt).feed(tokens).text == " dog"
    assert OutputStream(llama2_like, SamplingParams(), prompt[:1]).feed(tokens).text == "dog"
