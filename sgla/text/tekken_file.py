"""A ``tokenizers`` tokenizer from Mistral's ``tekken.json``: tiktoken's ranks, and the pattern that cuts
texts. Special tokens have the first ids, so the id of a rank is the rank and their number."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sgla.text.conversion import add_marks
from sgla.text.tiktoken_file import MOST_TOKENS, backend_of, complete

# Of files that name none (mistral-common, ``Tekkenizer.DEPRECATED_SPECIAL_TOKENS``).
OLD = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
NAMED = {"<unk>": "unk_token", "<s>": "bos_token", "</s>": "eos_token", "<pad>": "pad_token"}
FILLER = "<SPECIAL_{}>"  # of ids without a name


@dataclass(frozen=True)
class Tekken:
    """``special``: texts of the first ids; ``ranks``: of all others, in order from 0."""

    pattern: str
    special: list[str]
    ranks: dict[bytes, int]

    def named(self) -> dict[str, str]:
        """Name -> text of the special tokens that there are."""
        return {NAMED[text]: text for text in self.special if text in NAMED}


def read_tekken(data: bytes) -> Tekken:
    """Raises ValueError, KeyError or TypeError for a file that is none."""
    file: dict[str, Any] = json.loads(data)
    config = file["config"]
    count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    if not 0 <= count <= size <= MOST_TOKENS or size - count > len(file["vocab"]):
        raise ValueError("its numbers of tokens do not fit each other")
    listed = file.get("special_tokens") or [{"rank": i, "token_str": text} for i, text in enumerate(OLD)]
    names = {int(token["rank"]): str(token["token_str"]) for token in listed}
    special = [names.get(token) or FILLER.format(token) for token in range(count)]
    if max(names, default=0) >= count or len(set(special)) < count:
        raise ValueError("a special token is there twice, or has an id of another")
    tokens = file["vocab"][: size - count]
    ranks = {base64.b64decode(token["token_bytes"], validate=True): int(token["rank"]) for token in tokens}
    complete(ranks, len(tokens))
    return Tekken(str(config["pattern"]), special, ranks)


def backend_from(found: Tekken) -> Tokenizer:
    tokenizer = backend_of(found.ranks, found.pattern, found.special)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in found.special])
    if "<s>" in found.special:
        add_marks(tokenizer, found.special.index("<s>"), None)
    return tokenizer
