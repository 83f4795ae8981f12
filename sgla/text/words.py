"""Bad words: texts -> the token sequences to forbid."""

from __future__ import annotations

from sgla.errors import InvalidField
from sgla.messages import MAX_WORD_TOKENS
from sgla.text.tokenizer import Tokenizer


def word_tokens(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Of each word as it is and behind a space (as vLLM, but also where the two differ in length). Other ways
    to write a word in tokens stay open. Raises InvalidField for a word without tokens and for too many."""
    sequences: list[list[int]] = []
    for word in words:
        bare = word.strip() and word.lstrip()
        found = (
            [tokenizer.encode(text, add_special_tokens=False) for text in (bare, " " + bare)] if bare else []
        )
        if not all(found) or not found:
            raise InvalidField(f"bad_words: {word[:32]!r} has no tokens", param="bad_words")
        sequences += [ids for ids in found if ids not in sequences]
        if sum(map(len, sequences)) > MAX_WORD_TOKENS:
            raise InvalidField(f"bad_words may have {MAX_WORD_TOKENS} tokens in all", param="bad_words")
    return sequences
