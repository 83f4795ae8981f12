"""Small tokenizers of each kind that the server meets, trained on a few sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps. 12 345 don't won't I'll",
    "def main(args):\n    return {'key': [1, 2, 3]}\n\n\tfor x in range(10):  print(x)",
    "今天天气很好，我们去公园吧。東京タワーに行きます。안녕하세요 세계",
    "Größe naïve café Привет мир مرحبا שלום ½ ⅔ ２３",
    "👩‍👩‍👧 🎉🎉 👍🏽 🇩🇪 e\u0301",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SHOWN = ["<think>", "</think>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """GPT-2's kind; ``pre`` splits the text (default: GPT-2's own pattern)."""
    tokenizer = Tokenizer(models.BPE())
    use_regex = not pre
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*pre, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SHOWN])
    return tokenizer


def llama3_like() -> Tokenizer:
    """Byte-level with another split, and BOS before every text."""
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer = byte_level(split)
    add_bos(tokenizer)
    return tokenizer


def sentencepiece(prefix: bool = True) -> Tokenizer:
    """Llama 2's kind (with ``prefix``) or Gemma's: ▁ for spaces, byte fallback."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), replace] if prefix else [replace]
    trained.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *SPECIAL, *BYTE_TOKENS],
        limit_alphabet=70,
        max_token_length=8,
        show_progress=False,
    )
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+"), "isolated")
    trained.train_from_iterator(TEXTS, trainer)
    vocab = trained.get_vocab()
    tokenizer = Tokenizer(
        models.BPE(vocab, merges(trained), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = trained.normalizer
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ["<unk>", *SPECIAL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SHOWN])
    add_bos(tokenizer)
    return tokenizer


def metaspace() -> Tokenizer:
    """A Unigram tokenizer with the plain Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_pieces() -> Tokenizer:
    """A decoder that is not taken apart."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def add_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama3_like": llama3_like,
    "llama2_like": sentencepiece,
    "gemma_like": lambda: sentencepiece(prefix=False),
    "metaspace": metaspace,
}


def merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def tokens_in_order(tokenizer: Tokenizer) -> list[str]:
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def corpus(count: int, seed: int = 0) -> list[str]:
    """Texts of words, specials, whitespace runs and characters from everywhere in Unicode."""
    chance = random.Random(seed)
    words = [*" ".join(TEXTS[:5]).split(" "), *SPECIAL, *SHOWN, "<0x0A>", "▁", "Ġ", "123456"]
    spaces = [" ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000"]
    ranges = [
        (0x20, 0x7F),
        (0xA0, 0x2AF),
        (0x300, 0x36F),
        (0x4E00, 0x4EFF),
        (0x1F300, 0x1F6FF),
        (0x20, 0xD7FF),
    ]
    texts = ["", " ", "\n", " a", "a ", "</s>"]
    while len(texts) < count:
        parts = []
        for _ in range(chance.randint(1, 20)):
            kind = chance.random()
            if kind < 0.6:
                parts.append(chance.choice(words) + " " * (chance.random() < 0.7))
            elif kind < 0.75:
                parts.append(chance.choice(spaces))
            else:
                low, high = chance.choice(ranges)
                parts.append("".join(chr(chance.randint(low, high)) for _ in range(4)))
        texts.append("".join(parts))
    return texts


def save_folder(tokenizer: Tokenizer, folder: Path, **files: str) -> Path:
    """An HF folder: tokenizer.json and the given files (``tokenizer_config=...`` becomes
    tokenizer_config.json)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder
