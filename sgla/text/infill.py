"""Fill in the middle:
prompts made of what comes before and after a gap, for models whose tokenizer has the marks.

M. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022. Sources of the
orders: the models' published prompt formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sgla.errors import UnsupportedField

if TYPE_CHECKING:
    from sgla.text.tokenizer import Tokenizer


class Marks(NamedTuple):
    """Tokens around the two texts: the prompt is ``first`` prefix ``second`` suffix ``third``. With
    ``suffix_first`` it is ``first`` suffix ``second`` prefix."""

    first: str
    second: str
    third: str = ""
    suffix_first: bool = False


FAMILIES = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    Marks("[SUFFIX]", "[PREFIX]", suffix_first=True),  # Codestral
)
# Such a model ends the middle with one of these, which not every tokenizer lists as an end of text.
ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "▁<EOT>",
)


class Infill:
    """The marks of one tokenizer as ids. ``ends``: tokens that end an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks = next(
            (marks for marks in FAMILIES if all(map(self._known, filter(None, marks[:3])))), None
        )
        texts = [text for text in (*ENDS, *(self._marks[:3] if self._marks else ())) if self._known(text)]
        self.ends = frozenset(token for text in texts for token in self._ids(text))

    def tokens(self, before: list[int], after: list[int]) -> list[int]:
        """The prompt for what stands between the ids ``before`` and ``after``. A BOS stays in front of all.

        Raises UnsupportedField for a model that cannot do that."""
        marks = self._marks
        if marks is None:
            raise UnsupportedField(
                "suffix is not supported by this model: its tokenizer has no tokens for filling in the "
                "middle; leave it out",
                param="suffix",
            )
        bos = before[:1] if before[:1] == [self._tokenizer.bos_id] else []
        parts = before[len(bos) :], after
        if marks.suffix_first:
            parts = parts[1], parts[0]
        first, second, third = map(self._ids, marks[:3])
        return [*bos, *first, *parts[0], *second, *parts[1], *third]

    def _known(self, text: str) -> bool:
        return self._tokenizer.backend.token_to_id(text) is not None

    def _ids(self, text: str) -> list[int]:
        token = self._tokenizer.backend.token_to_id(text)
        return [] if token is None else [token]
