"""A ``tokenizers`` tokenizer from a tiktoken file, with the library's ids: a line for each token, in base64,
with its rank. How texts are cut before they are merged stands in no file, only in each model's code."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from sgla.errors import ConfigError
from sgla.text.conversion import GPT4O, KIMI, LLAMA3, QWEN2, merges_of
from sgla.text.decoding import CHAR_OF

MOST_TOKENS = 1 << 21
RESERVED = "<|reserved_token_{}|>"  # ids between those that are named

# By ``tokenizer_class`` of tokenizer_config.json, or ``model_type`` of config.json.
PATTERNS = {
    "QWenTokenizer": QWEN2,
    "qwen": QWEN2,
    "TikTokenTokenizer": KIMI,
    "ChatGLM4Tokenizer": LLAMA3,
    "TiktokenTokenizer": LLAMA3,
    "llama": LLAMA3,
    "dbrx": LLAMA3,
    "gpt_oss": GPT4O,
}
# What stands behind the ranks where tokenizer_config.json does not list it.
SPECIAL = {
    QWEN2: ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))],
    LLAMA3: [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    ],
}


def read_tiktoken(data: bytes) -> dict[bytes, int]:
    """Token -> rank, which is its id. Raises ValueError for a file that is none."""
    ranks: dict[bytes, int] = {}
    for line in data.splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    complete(ranks, len(ranks))
    return ranks


def complete(ranks: Mapping[bytes, int], count: int) -> None:
    """Raise ValueError if these are not ``count`` tokens with the ranks from 0 on, all bytes among them."""
    if count > MOST_TOKENS or sorted(ranks.values()) != list(range(count)):
        raise ValueError("its ranks are not the numbers from 0 on, each once")
    if lacking := 256 - sum(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"it lacks {lacking} of the 256 bytes")


def pattern_of(names: list[Any]) -> str:
    """Of a model with one of these ``names`` of classes and types. Raises ConfigError."""
    for name in names:
        if isinstance(name, str) and name in PATTERNS:
            return PATTERNS[name]
    raise ConfigError(
        f"a tiktoken file does not say how texts are cut, and that is not known of "
        f"{' and '.join(repr(name) for name in names if name) or 'a model without a name'} (known: "
        f"{', '.join(PATTERNS)}); name a folder with tokenizer.json by --tokenizer",
        param="tokenizer",
    )


def backend_of(ranks: Mapping[bytes, int], pattern: str, before: Sequence[str] = ()) -> Tokenizer:
    """``before``: tokens with the first ids."""
    vocab = {"".join(CHAR_OF[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = merges_of({token: -float(rank) for token, rank in vocab.items()})
    ids = {token: id for id, token in enumerate(before)}
    ids |= {token: rank + len(before) for token, rank in vocab.items()}
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special_of(size: int, pattern: str, listed: Mapping[int, str]) -> list[str]:
    """The texts of the tokens with the ids from ``size`` on. ``listed``: by tokenizer_config.json."""
    if not listed:
        return SPECIAL.get(pattern, [])
    last = max(listed)
    if last >= size + MOST_TOKENS:
        raise ConfigError(f"tokenizer_config.json has a token with the id {last}", param="tokenizer")
    return [listed.get(token, RESERVED.format(token)) for token in range(size, last + 1)]
