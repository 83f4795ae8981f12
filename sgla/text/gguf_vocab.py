"""A ``tokenizers`` tokenizer from the vocabulary in a GGUF file, converted once and then loaded from a cache.

Byte-level BPE (``model: gpt2``) comes with merges; the split of a text before merging is known by name
(``pre``), as in llama.cpp (``llama-vocab.cpp``). SentencePiece (``model: llama``) comes with scores; the
merges are recovered from the vocabulary: a pair may merge if its concatenation is a token, better tokens
first, as transformers converts it. WordPiece (``model: bert``) has words with a space in front and parts of
words without, where BERT's own files have ``##`` in front of these. SentencePiece's Unigram (``model: t5``)
comes with scores, and bytes that say how characters are replaced first.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sgla.errors import ConfigError
from sgla.text.conversion import (
    GPT2,
    GPT4O,
    KIMI,
    LLAMA3,
    QWEN2,
    QWEN35,
    TEKKEN,
    VERSION,
    add_marks,
    cached,
    merges_of,
    readable,
)
from sgla.text.decoding import CHAR_OF, SPACE

_NAME = re.compile(r"\[[^\[\]]+\]")  # of a token of BERT's that is no word
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

# ``pre`` -> regular expressions, each of which splits what the one before it left whole.
_GROUPS: dict[tuple[str, ...], list[str]] = {
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4"): [GPT2],
    ("modern-bert",): [GPT2],
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): [r"\p{N}", GPT2],
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): [LLAMA3],
    ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"): [LLAMA3],
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "solar-open", "grok-2"): [QWEN2],
    ("qwen35",): [QWEN35],
    ("tekken",): [TEKKEN],
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): [GPT4O],
    ("kimi-k2",): [KIMI],
    ("seed-coder",): [_SEED],
    ("exaone-moe",): [_EXAONE],
    ("bailingmoe", "bailingmoe2", "llada-moe"): [_BAILING],
    ("falcon",): [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
    ("bloom", "gpt3-finnish"): [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    ("deepseek-v3", "hunyuan-dense"): [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3],
    ("default",): [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
# Of vocabularies that mark texts: what begins and ends one, and the kind of the second of two.
_MARKS = {"bert": ("[CLS]", "[SEP]", 1), "t5": ("<s>", "</s>", 0), "modern-bert": ("[CLS]", "[SEP]", 1)}
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
    with readable("the GGUF file's vocabulary cannot be read"):
        return cached(_digest(raw), cache, lambda: _build(raw))


def _digest(raw: dict[str, Any]) -> str:
    """A name for what the conversion depends on."""
    plain = {key: value for key, value in raw.items() if not isinstance(value, list)}
    hasher = hashlib.blake2b(json.dumps([VERSION, plain], sort_keys=True).encode(), digest_size=12)
    for key in ("tokens", "merges"):
        hasher.update("\0".join(raw.get(key) or []).encode() + b"\0\0")
    for key in ("token_type", "scores", "charsmap"):
        hasher.update(array("d", raw.get(key) or []).tobytes())
    return hasher.hexdigest()


def _build(raw: dict[str, Any]) -> Tokenizer:
    kind = raw.get("model")
    if len(set(raw["tokens"])) < len(raw["tokens"]):
        raise ConfigError("the GGUF file's vocabulary has a token twice", param="tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(raw)
    elif kind == "gemma4":
        tokenizer = _gemma(raw)
    elif kind == "bert":
        tokenizer = _wordpiece(raw)
    elif kind == "t5":
        tokenizer = _unigram(raw)
    elif kind == "llama":
        tokenizer = _gemma(raw) if "<start_of_turn>" in raw["tokens"] else _sentencepiece(raw)
    else:
        raise ConfigError(
            f"the GGUF file's tokenizer is of kind {kind!r}, which is not supported (gpt2, llama, bert, "
            "t5, gemma4 are); name the original model's folder with --tokenizer",
            param="tokenizer",
        )
    _add_tokens(tokenizer, raw)
    if marks := _MARKS.get(str(raw.get("pre") if kind == "gpt2" else kind)):
        _add_pair_marks(tokenizer, raw, *marks)
    else:
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
    if pre == "modern-bert" or SPLITS[pre] in ([QWEN2], [QWEN35]):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(raw: dict[str, Any]) -> Tokenizer:
    tokens = raw["tokens"]
    scores = dict(zip(tokens, raw.get("scores") or range(0, -len(tokens), -1), strict=True))
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


def _wordpiece(raw: dict[str, Any]) -> Tokenizer:
    """Files do not say whether a vocabulary is of lower-case words: it is if it has next to no capitals."""
    pieces = [_piece(token, kind) for token, kind in zip(raw["tokens"], _types(raw))]
    capitals = sum(piece != piece.lower() for piece in pieces if not _NAME.fullmatch(piece))
    unknown = pieces[_marked(raw, "unk", "[UNK]")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=capitals * 100 < len(pieces))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    return tokenizer


def _piece(token: str, kind: int) -> str:
    """A token as BERT's own files have it."""
    if kind == CONTROL or _NAME.fullmatch(token):
        return token
    return token[1:] if token.startswith(SPACE) and token != SPACE else f"##{token}"


def _marked(raw: dict[str, Any], name: str, token: str) -> int:
    """The id of a token that texts need; older files do not name it. Raises ConfigError."""
    found = raw.get(f"{name}_token_id")
    if found is None and token not in raw["tokens"]:
        raise ConfigError(f"the GGUF file's vocabulary lacks {token}", param="tokenizer")
    return raw["tokens"].index(token) if found is None else int(found)


def _add_pair_marks(tokenizer: Tokenizer, raw: dict[str, Any], begin: str, end: str, kind: int) -> None:
    """Round a text, and between two, of which the second is of another ``kind``, or behind two marks."""
    ids = [_marked(raw, "cls", begin), _marked(raw, "sep", end)]
    first, last = (tokenizer.id_to_token(index) for index in ids)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *[last] * (2 - kind), f"$B:{kind}", f"{last}:{kind}"],
        special_tokens=list(zip((first, last), ids)),
    )


def _unigram(raw: dict[str, Any]) -> Tokenizer:
    """XLM-RoBERTa's, as transformers converts it."""
    if not raw.get("scores"):
        raise ConfigError("the GGUF file's tokens have no scores, which t5's need", param="tokenizer")
    pieces = list(zip(raw["tokens"], raw["scores"]))
    tokenizer = Tokenizer(models.Unigram(pieces, _marked(raw, "unk", "<unk>"), byte_fallback=False))
    charsmap = bytes(byte & 255 for byte in raw.get("charsmap") or [])
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    squeezed = raw.get("squeezed") is not False
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    cuts: list[Any] = [pre_tokenizers.WhitespaceSplit()] if squeezed else []
    scheme = "never" if raw.get("add_space_prefix") is False else "always"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.Metaspace(SPACE, scheme)])
    tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
    return tokenizer


def _fallback_bpe(raw: dict[str, Any], tokens: list[str], scores: dict[str, float]) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in raw.get("merges") or []] or merges_of(scores)
    unknown = raw.get("unk_token_id")
    return models.BPE(
        vocab,
        merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )


def _types(raw: dict[str, Any]) -> list[int]:
    types = raw.get("token_type") or [NORMAL] * len(raw["tokens"])
    if not 0 <= min(types) <= max(types) <= BYTE:
        raise ConfigError("tokenizer.ggml.token_type has a value that is not known", param="tokenizer")
    return types


def _add_tokens(tokenizer: Tokenizer, raw: dict[str, Any]) -> None:
    """Control tokens and the named ones are special; user-defined tokens are matched whole but shown."""
    names = ("bos", "eos", "eot", "unk", "pad", "cls", "sep", "mask")
    named = {raw.get(f"{name}_token_id") for name in names}
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
    begin, end = (raw.get(f"{name}_token_id") if wanted else None for name, wanted in adds.items())
    add_marks(tokenizer, begin, end)
