"""llguidance's objects, made in the same way by the compiler's process and the workers."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sgla.grammar.protocol import Vocabulary

# ``step_lexer_fuel`` and ``step_max_items`` bound the work for one mask to about 10 ms each,
# ``initial_lexer_fuel`` the compilation to about a second.
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
SILENT = 0
# Tokens are sorted by how many of a JSON string's characters they have. Where a string may go on for at least
# as many, all of a kind are allowed without a look at each: near the end of strings with a maxLength these
# kinds save most of the time. None has line breaks, which a dot in a pattern does not take.
CHARACTER = r'[^"\\\x00-\x1F\x7F\u2028\u2029]'
SLICES = [f"{CHARACTER}{{1,{count}}}" for count in (1, 2, 3, 4, 6, 9, 14, 30)] + [f"{CHARACTER}+"]


class Wrapper:
    """What llguidance wants to be given as a tokenizer. Any encoding will do: only its bytes count."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        special = frozenset(vocabulary.special)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Greedy, the longest token first. Bytes that no token begins with are left out."""
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            end = min(len(data), at + self._longest)
            while end > at and data[at:end] not in self._ids:
                end -= 1
            if end > at:
                ids.append(self._ids[data[at:end]])
            at = max(end, at + 1)
        return ids


def load_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The token tries: 90 MB and 0.7 s for 150,000 tokens, with the GIL held."""
    size = len(vocabulary.tokens)
    wrapped: Any = Wrapper(vocabulary)  # their type is a class of theirs
    tokenizer = LLTokenizer(wrapped, n_vocab=size, eos_token=vocabulary.ends, slices=SLICES)
    make_matcher(tokenizer, LLMatcher.grammar_from_regex("a")).compute_bitmask()  # what it makes on first use
    return tokenizer


def make_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile. Without the GIL; errors are in the result (``is_error``)."""
    return LLMatcher(tokenizer, source, log_level=SILENT, limits=LIMITS)
