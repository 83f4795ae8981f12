"""Logprobs as the APIs show them: token strings, raw bytes, character offsets.
Pure functions of the tokenizer.

For the HTTP layer:

- ``chat_logprobs(tokenizer, entries, as_ids=False) -> [{token, logprob, bytes, top_logprobs}]``:
  the ``content`` list.
- ``completion_logprobs(tokenizer, entries, offsets, as_ids=False) -> {text_offset, token_logprobs, tokens,
  top_logprobs}``; entry ``None`` (a prompt's first token) needs its id, so entries come beside ``tokens``.
- ``prompt_logprobs(tokenizer, tokens, entries, k)``: vLLM's list for a prompt.
- ``TextOffsets(tokenizer, skip_special_tokens, start, prompt)``:
  one a text, ``feed(tokens)`` gives the offsets of its next tokens.
- ``token_text``, ``token_name``, ``finite`` for other shapes.

``entries`` are ``TokenLogprob`` as they come in ``Event.logprobs`` or ``Event.prompt_logprobs``. Every entry
of ``entry.top`` and, for outputs, of ``entry.asked`` is shown, so ask the engine for no more than the client
did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgla.messages import TokenLogprob
from sgla.text.detokenize import continues, make_detokenizer

if TYPE_CHECKING:
    from sgla.text.tokenizer import Tokenizer

PART = 4096  # alternatives of one token that are encoded in one go; so many are the whole vocabulary
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
) -> list[Any]:
    """vLLM's ``prompt_logprobs``: for each of the prompt's ``tokens`` its ``k`` likeliest alternatives and
    itself, by id. Where that is the whole vocabulary it is JSON already, since other threads wait for each
    call of the encoder."""

    def one(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    def some(pairs: Iterable[tuple[int, float]], before: int) -> dict[str, Any]:
        return {str(token): one(token, value, before + i) for i, (token, value) in enumerate(pairs, 1)}

    def all_of(entry: TokenLogprob) -> Any:
        if k > PART:
            whole = list(entry.top)
            parts = [encode(some(whole[at : at + PART], at)) for at in range(0, len(whole), PART)]
            return msgspec.Raw(b"{%b}" % b",".join(part[1:-1] for part in parts))
        top = some(entry.top[:k], 0)
        return {str(entry.token): one(entry.token, entry.logprob, entry.rank)} | top

    assert len(tokens) == len(entries)
    return [None if entry is None else all_of(entry) for entry in entries]


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
