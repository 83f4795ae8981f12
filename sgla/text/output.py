"""From the token ids of one child to the text, tokens and logprobs that its client may see."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sgla.messages import SamplingParams, TokenLogprob
from sgla.text.detokenize import continues, make_detokenizer
from sgla.text.stops import make_stops

if TYPE_CHECKING:
    from sgla.text.tokenizer import Tokenizer


class Piece(msgspec.Struct):
    """What one ``feed`` brought. ``logprobs`` has one entry a token, or is None if none were fed.

    ``consumed``: how many of the fed tokens count as output; the rest came after a stop string.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    matched_stop: str | None = None
    consumed: int = 0


class OutputStream:
    """Text state of one child: bytes, stops, and the tokens whose text is held back.

    A token comes out with the piece that has the end of its text, so the pieces' tokens and logprobs fit
    their text. As in vLLM: tokens that make up a stop string come out although their text is cut; the token
    id that ended the output has no text unless stops are included; stop strings are looked for after
    ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt: Sequence[int] = ()) -> None:
        """``prompt``: the token ids before the output; a text that continues one keeps its first space."""
        self._detokenizer = make_detokenizer(
            tokenizer, sampling.skip_special_tokens, continues(tokenizer, prompt)
        )
        self._include = sampling.include_stop_str_in_output
        self._stops = make_stops(sampling)
        self._unchecked = sampling.min_tokens  # tokens that may still come without a look for stop strings
        self._made = 0  # characters detokenized
        # (end of its text, token, logprob) of tokens whose text is not out yet
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._ended = False

    def feed(
        self,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None = None,
        finish: str | None = None,
        matched: int | None = None,
    ) -> Piece:
        """Take the next tokens. ``finish`` not None: they are the last ones, everything held back comes out.

        ``matched``: the last token is a stop token id that ended the output.
        """
        if self._ended:
            return Piece("", [], None if logprobs is None else [])
        if finish is None and len(tokens) == 1 and not self._waiting:
            return self._one(tokens, logprobs)
        plain = finish is None and logprobs is None and self._stops is None and not self._waiting
        if plain and (whole := self._detokenizer.whole(tokens)) is not None:
            self._made += len(whole)
            return Piece(whole, tokens, None, None, len(tokens))
        silent = len(tokens) - 1 if matched is not None and not self._include else -1
        text = ""
        for index, token in enumerate(tokens):
            new = "" if index == silent else self._detokenizer.feed((token,))
            self._made += len(new)
            end = self._made + self._detokenizer.held(True)
            self._waiting.append((end, token, logprobs[index] if logprobs is not None else None))
            shown, stop = self._past_stops(new)
            text += shown
            if stop is not None:
                return self._end(text, logprobs is not None, stop, index + 1)
        if finish is not None:
            shown, stop = self._past_stops(self._detokenizer.flush(), counted=False)
            text += shown
            if stop is None and self._stops is not None:
                shown, stop = self._stops.flush()
                text += shown
            return self._end(text, logprobs is not None, stop, len(tokens))
        held = self._stops.held if self._stops is not None else 0
        taken, values = self._take(self._made - held)
        return Piece(text, taken, None if logprobs is None else values, None, len(tokens))

    def _one(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> Piece:
        """``feed`` for the usual step: one token, nothing held back before it."""
        text = self._detokenizer.feed(tokens)
        self._made += len(text)
        shown, stop = self._past_stops(text)
        held = self._detokenizer.held(True)
        if stop is None and not held and len(shown) == len(text):
            return Piece(shown, tokens, logprobs, None, 1)
        self._waiting.append((self._made + held, tokens[0], logprobs[0] if logprobs is not None else None))
        if stop is not None:
            return self._end(shown, logprobs is not None, stop, 1)
        return Piece(shown, [], None if logprobs is None else [], None, 1)

    def _past_stops(self, text: str, counted: bool = True) -> tuple[str, str | None]:
        """What of ``text`` may be shown, and the stop string it completes.
        ``counted``: it came with a token."""
        if self._stops is None:
            return text, None
        if self._unchecked > 0:
            self._unchecked -= counted
            return text, None
        return self._stops.feed(text)

    def _take(self, released: float) -> tuple[list[int], list[TokenLogprob]]:
        """The waiting tokens whose text ends within the first ``released`` characters."""
        tokens, logprobs = [], []
        waiting = self._waiting
        while waiting and waiting[0][0] <= released:
            _, token, logprob = waiting.popleft()
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
        return tokens, logprobs

    def _end(self, text: str, with_logprobs: bool, stop: str | None, consumed: int) -> Piece:
        self._ended = True
        tokens, logprobs = self._take(float("inf"))
        return Piece(text, tokens, logprobs if with_logprobs or logprobs else None, stop, consumed)
