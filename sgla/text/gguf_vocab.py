"""A ``tokenizers`` tokenizer from the vocabulary in a GGUF file, converted once and then loaded from a cache.

Byte-level BPE (``model: gpt2``) comes with merges; the split of a text before merging is known by name
(``pre``), as in llama.cpp (``llama-vocab.cpp``). SentencePiece (``model: llama``) comes with scores; the
merges are recovered from the vocabulary: a pair may merge if its concatenation is a token, better tokens
first, as transformers converts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sgla.errors import ConfigError, SglaError
from sgla.text.decoding import CHAR_OF, SPACE

log = logging.getLogger(__name__)

# Characters looked at to find the merges of SentencePiece; Gemma's vocabulary takes 2 * 10^7.
MOST_WORK = 10**9
VERSION = 2  # of the conversion; part of the cache key
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
_TEKKEN = _WORD.replace("{end}", "") + r"|\p{N}|" + _SLASH_TAIL
_GPT4O = _WORD.replace("{end}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _SLASH_TAIL
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ``pre`` -> regular expressions, each of which splits what the one before it left whole.
_GROUPS: dict[tuple[str, ...], list[str]] = {
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4"): [_GPT2],
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): [r"\p{N}", _GPT2],
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): [_LLAMA3],
    ("smaug-bpe", "dbrx"): [_LLAMA3],
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo"): [_QWEN2],
    ("tekken",): [_TEKKEN],
    ("gpt-4o", "llama4", "kanana2"): [_GPT4O],
    ("deepseek-v3", "hunyuan-dense"): [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3],
    ("default",): [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
SPLITS = {name: patterns for names, patterns in _GROUPS.items() for name in names}
_WHOLE_TOKENS_FIRST = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
)


def backend_from_gguf(raw: dict[str, Any], cache: Path | None = None) -> Tokenizer:
    """``raw``: ``GGUFFile.tokenizer_raw``. ``cache``: folder for the result.
    Raises ConfigError for an unknown kind."""
    if not raw.get("tokens"):
        raise ConfigError(
            "the GGUF file has no vocabulary; name a tokenizer folder with --tokenizer", param="tokenizer"
        )
    file = cache / f"{_digest(raw)}.json" if cache is not None else None
    if file is not None and file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception; a damaged file is made anew
            log.warning("ignoring the cached tokenizer %s: %s", file, error)
    with readable("the GGUF file's vocabulary cannot be read"):
        tokenizer = _build(raw)
    if file is not None:
        _save(tokenizer, file)
    return tokenizer


@contextmanager
def readable(complaint: str) -> Iterator[None]:
    """Turns whatever the ``tokenizers`` library raises,
    plain Exceptions and panics of Rust, into ConfigError."""
    try:
        yield
    except (SglaError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ConfigError(f"{complaint}: {error}", param="tokenizer") from error


def _digest(raw: dict[str, Any]) -> str:
    """A name for what the conversion depends on."""
    plain = {key: value for key, value in raw.items() if not isinstance(value, list)}
    hasher = hashlib.blake2b(json.dumps([VERSION, plain], sort_keys=True).encode(), digest_size=12)
    for key in ("tokens", "merges"):
        hasher.update("\0".join(raw.get(key) or []).encode() + b"\0\0")
    for key in ("token_type", "scores"):
        hasher.update(array("d", raw.get(key) or []).tobytes())
    return hasher.hexdigest()


def _save(tokenizer: Tokenizer, file: Path) -> None:
    partial = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(partial), pretty=False)
        partial.replace(file)
    except (
        Exception
    ) as error:  # plain Exception of the library, OSError: a read-only or full disk costs time, no more
        log.warning("the converted tokenizer is not cached: %s", error)


def _build(raw: dict[str, Any]) -> Tokenizer:
    kind = raw.get("model")
    if len(set(raw["tokens"])) < len(raw["tokens"]):
        raise ConfigError("the GGUF file's vocabulary has a token twice", param="tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(raw)
    elif kind == "llama":
        tokenizer = _gemma(raw) if "<start_of_turn>" in raw["tokens"] else _sentencepiece(raw)
    else:
        raise ConfigError(
            f"the GGUF file's tokenizer is of kind {kind!r}, which is not supported (gpt2 and llama are); "
            "name the original model's folder with --tokenizer",
            param="tokenizer",
        )
    _add_tokens(tokenizer, raw)
    _add_bos(tokenizer, raw)
    return tokenizer


def _byte_level(raw: dict[str, Any]) -> Tokenizer:
    pre = raw.get("pre") or "default"
    if pre not in SPLITS:
        raise ConfigError(
            f"the GGUF file's pre-tokenizer {pre!r} is not known; name the "
            "original model's folder with --tokenizer",
            param="tokenizer",
        )
    alphabet = set(CHAR_OF.values())
    vocab = {}
    for index, (token, kind) in enumerate(zip(raw["tokens"], _types(raw))):
        if kind == NORMAL and not alphabet.issuperset(token):  # spelled as text by mistake
            token = "".join(CHAR_OF[byte] for byte in token.encode())
        vocab[token] = index
    merges = [tuple(merge.split(" ")) for merge in raw.get("merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_TOKENS_FIRST))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if SPLITS[pre] == [_QWEN2]:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(raw: dict[str, Any]) -> Tokenizer:
    tokens = raw["tokens"]
    scores = dict(zip(tokens, raw.get("scores") or range(0, -len(tokens), -1)))
    tokenizer = Tokenizer(_fallback_bpe(raw, tokens, scores))
    normalizer: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if raw.get("add_space_prefix") is not False:
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _gemma(raw: dict[str, Any]) -> Tokenizer:
    """Gemma's files write runs of spaces as spaces,
    and the order of tokens, not their scores, is the order of merges.

    Runs of one character are user-defined tokens; SentencePiece gives these the best score of all.
    """
    tokens = [SPACE * len(t) if len(t) > 1 and not t.strip(" ") else t for t in raw["tokens"]]
    runs = {token for token, kind in zip(tokens, _types(raw)) if kind == USER_DEFINED}
    scores = {token: 0.0 if token in runs else -1.0 - index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_fallback_bpe(raw, tokens, scores))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _fallback_bpe(raw: dict[str, Any], tokens: list[str], scores: dict[str, float]) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in raw.get("merges") or []] or _merges(vocab, scores)
    unknown = raw.get("unk_token_id")
    return models.BPE(
        vocab,
        merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )


def _merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens whose concatenation is a token: best result first, then the longest parts."""
    merges = []
    if sum(len(token) ** 2 for token in vocab) > MOST_WORK:
        raise ConfigError("the GGUF file's tokens are too long to find their merges", param="tokenizer")
    for token in vocab:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token], -cut, -len(right), left, right))
    merges.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in merges]


def _types(raw: dict[str, Any]) -> list[int]:
    types = raw.get("token_type") or [NORMAL] * len(raw["tokens"])
    if not 0 <= min(types) <= max(types) <= BYTE:
        raise ConfigError("tokenizer.ggml.token_type has a value that is not known", param="tokenizer")
    return types


def _add_tokens(tokenizer: Tokenizer, raw: dict[str, Any]) -> None:
    """Control tokens and the named ones are special; user-defined tokens are matched whole but shown."""
    named = {raw.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "unk", "pad")}
    special, shown = [], []
    for index, kind in enumerate(_types(raw)):
        if kind == CONTROL or index in named:
            special.append(AddedToken(tokenizer.id_to_token(index), normalized=False, special=True))
        elif kind == USER_DEFINED:
            shown.append(AddedToken(tokenizer.id_to_token(index), normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(shown)


def _add_bos(tokenizer: Tokenizer, raw: dict[str, Any]) -> None:
    adds = {"bos": raw.get("add_bos"), "eos": raw.get("add_eos")}
    if adds["bos"] is None:  # files from before the flag
        adds["bos"] = raw["model"] == "llama" or raw.get("pre") in _WHOLE_TOKENS_FIRST
    ids = {name: raw.get(f"{name}_token_id") for name, wanted in adds.items() if wanted}
    marks = {name: tokenizer.id_to_token(index) for name, index in ids.items() if index is not None}
    if marks:
        single = [mark for mark in (marks.get("bos"), "$A", marks.get("eos")) if mark]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(text, ids[name]) for name, text in marks.items()]
        )
