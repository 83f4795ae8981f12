"""Logprobs as the APIs show them: token strings, raw bytes, character offsets.
Pure functions of the tokenizer.

For the HTTP layer:

- ``chat_logprobs(tokenizer, entries, as_ids=False) -> [{token, logprob, bytes, top_logprobs}]``:
  the ``content`` list.
- ``completion_logprobs(tokenizer, entries, offsets, as_ids=False) -> {text_offset, token_logprobs, tokens,
  top_logprobs}``; entry ``None`` (a prompt's first token) needs its id, so entries come beside ``tokens``.
- ``prompt_logprobs(tokenizer, tokens, entries, k)``: vLLM's list for a prompt; ``WholeVocabulary(tokenizer,
  size)`` for one whose tokens have all alternatives that there are, ``parts(entry)`` of each.
- ``TextOffsets(tokenizer, skip_special_tokens, start, prompt)``:
  one a text, ``feed(tokens)`` gives the offsets of its next tokens.
- ``token_text``, ``token_name``, ``finite`` for other shapes.

``entries`` are ``TokenLogprob`` as they come in ``Event.logprobs`` or ``Event.prompt_logprobs``. Every entry
of ``entry.top`` and, for outputs, of ``entry.asked`` is shown, so ask the engine for no more than the client
did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgla.messages import Pairs, TokenLogprob
from sgla.text.detokenize import continues, make_detokenizer

if TYPE_CHECKING:
    from sgla.text.tokenizer import Tokenizer

PART = 4096  # alternatives of one token that are encoded in one go
encode = msgspec.json.Encoder().encode
NO_PROBABILITY = -9999.0  # JSON has no -inf; vLLM and SGLang send this number, clients know it


def finite(logprob: float) -> float:
    """``logprob`` as JSON can carry it: -inf and NaN become -9999.0."""
    return logprob if logprob > NO_PROBABILITY else NO_PROBABILITY


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token's own text. Bytes that are no complete UTF-8 are shown as ``\\xNN``, as OpenAI's API does."""
    return tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


def token_name(tokenizer: Tokenizer, token: int, as_ids: bool = False) -> str:
    """The token in the legacy completions shape:
    partial UTF-8 as ``bytes:\\xNN``; ``token_id:N`` if ``as_ids``."""
    if as_ids:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + raw.decode("utf-8", "backslashreplace")


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], as_ids: bool = False
) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``: one object a token;
    ``bytes`` are the raw ones, so their concatenation is the text."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token}" if as_ids else token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token))}

    return [
        one(entry.token, entry.logprob)
        | {"top_logprobs": [one(token, value) for token, value in dict([*entry.top, *entry.asked]).items()]}
        for entry in entries
    ]


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    as_ids: bool = False,
) -> dict[str, list[Any]]:
    """``choices[].logprobs`` of ``/v1/completions`` for ``tokens``; all lists have their length.

    An entry ``None`` (the first token of an echoed prompt) has a null logprob and null alternatives. The
    chosen token is always among the alternatives, in addition to the asked number if it is not one of them.
    """
    assert len(tokens) == len(entries) == len(offsets)
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "tokens": [token_name(tokenizer, token, as_ids) for token in tokens],
        "top_logprobs": [
            None if entry is None else _alternatives(tokenizer, entry, as_ids) for entry in entries
        ],
    }


def _alternatives(tokenizer: Tokenizer, entry: TokenLogprob, as_ids: bool) -> dict[str, float]:
    shown: dict[str, float] = {}
    for token, value in [*entry.top, *entry.asked, (entry.token, entry.logprob)]:
        shown.setdefault(token_name(tokenizer, token, as_ids), finite(value))
    return shown


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], k: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each of the prompt's ``tokens`` its ``k`` likeliest alternatives and
    itself, by id."""

    def one(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    def all_of(entry: TokenLogprob) -> dict[str, Any]:
        top = {str(token): one(token, value, i) for i, (token, value) in enumerate(entry.top[:k], 1)}
        return {str(entry.token): one(entry.token, entry.logprob, entry.rank)} | top

    assert len(tokens) == len(entries)
    return [None if entry is None else all_of(entry) for entry in entries]


class WholeVocabulary:
    """What ``prompt_logprobs`` shows of a token with all ``size`` alternatives, as JSON. What is the same for
    every token is written once, and the rest in bulk, which takes a thirtieth of the time."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        self._heads: list[bytes] = []  # by id, up to the number that is the logprob
        self._tails: list[bytes] = []  # behind it, by rank

    def parts(self, entry: TokenLogprob) -> Iterator[bytes]:
        """The members of one object, ``PART`` at a time, since other threads wait for each call of the
        encoder."""
        if not self._heads:
            self._write()
        assert isinstance(entry.top, Pairs), "alternatives that are not from a step"
        ids, values = entry.top.arrays()
        for at in range(0, len(ids), PART):
            part = slice(at, min(at + PART, len(ids)))
            columns = [b""] * (3 * (part.stop - at))
            columns[0::3] = [self._heads[token] for token in ids[part]]
            columns[1::3] = encode([finite(value) for value in values[part]])[1:-1].split(b",")
            columns[2::3] = self._tails[part]
            yield b"".join(columns)[:-1]

    def _write(self) -> None:
        texts = (encode(token_text(self._tokenizer, token)) for token in range(self._size))
        self._heads = [b'"%d":{"decoded_token":%b,"logprob":' % pair for pair in enumerate(texts)]
        self._tails = [b',"rank":%d},' % rank for rank in range(1, self._size + 1)]


class TextOffsets:
    """Character offsets of the tokens of a text, as they come.

    ``start``: characters before the first token (the echoed prompt's length). ``prompt``: the tokens that it
    continues. Tokens that share a character (partial UTF-8) share its offset.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0, prompt: Sequence[int] = ()
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens, continues(tokenizer, prompt))
        self._at = start

    def feed(self, tokens: Sequence[int]) -> list[int]:
        """The offsets at which ``tokens`` begin; one for each."""
        offsets = []
        for token in tokens:
            offsets.append(self._at + self._detokenizer.held(False))
            self._at += len(self._detokenizer.feed((token,)))
        return offsets
