"""Words of a transcription, and when they were said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sgla.messages import Transcript

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages in which each sign is a word
BEFORE, BEHIND = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"  # belong to the next word, and to the last one
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


class Word(msgspec.Struct):
    """``start`` and ``end`` in seconds."""

    text: str
    start: float
    end: float


def words_of(
    tokens: Sequence[int],
    begins: Sequence[float],
    transcript: Transcript,
    decode: Callable[[list[int]], str],
    language: str | None,
) -> list[Word]:
    """``begins``: when each of the ``tokens``, and maybe of more behind them, was said. A word ends where the
    token behind it begins."""
    pieces: list[Word] = []
    part: list[int] = []
    for i, token in enumerate(tokens):
        if token >= transcript.end:
            part = []
            continue
        part.append(token)
        text = decode(part)
        if text.endswith("\ufffd") and i + 1 < len(tokens) and tokens[i + 1] < transcript.end:
            continue
        first = i + 1 - len(part)
        end = begins[min(i + 1, len(begins) - 1)]
        starts = not pieces or text.startswith(" ") or text.strip() in PUNCTUATION
        behind_time = first > 0 and tokens[first - 1] >= transcript.end
        if starts or behind_time or language in WITHOUT_SPACES:
            pieces.append(Word(text, begins[first], end))
        else:
            pieces[-1].text += text
            pieces[-1].end = end
        part = []
    return [Word(word.text.strip(), word.start, word.end) for word in merged(pieces) if word.text.strip()]


def merged(words: list[Word]) -> list[Word]:
    """Marks join the words that they belong to."""
    found: list[Word] = []
    for word in words:
        if found and word.text in BEHIND and not found[-1].text.endswith(" "):
            found[-1].text += word.text
            found[-1].end = word.end
        elif found and found[-1].text.startswith(" ") and found[-1].text.strip() in BEFORE:
            found[-1] = Word(found[-1].text + word.text, found[-1].start, word.end)
        else:
            found.append(word)
    return found
