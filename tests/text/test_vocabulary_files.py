"""Folders with ``tokenizer.model`` or tiktoken files alone: ids equal those of the libraries that made the
files."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tiny_tokenizers as tiny
from tiktoken._educational import bpe_train

from sgla.errors import ConfigError
from sgla.text.conversion import GPT4O, KIMI, LLAMA3, QWEN2
from sgla.text.tokenizer import load_tokenizer

LETTERS = "".join(tiny.TEXTS[:5]) + " \n\t  ▁x<|>"
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
BYTES = {"byte_fallback": True, "vocab_size": 420}
OWN = ["<think>", "▁▁", "▁▁▁", "qu", "[x|y]"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", **PLAIN, **BYTES},
    "gemma": {"model_type": "bpe", **PLAIN, **BYTES, "add_dummy_prefix": False, "user_defined_symbols": OWN},
    "baichuan": {"model_type": "bpe", **PLAIN, **BYTES, "user_defined_symbols": OWN},
    "bpe without bytes": {"model_type": "bpe", "vocab_size": 190},
    "unigram": {"model_type": "unigram", "vocab_size": 190},
    "lines": {"model_type": "bpe", **BYTES, "normalization_rule_name": "nfkc"},
    "unigram of spaces": {"model_type": "unigram", **PLAIN, **BYTES, "user_defined_symbols": ["▁▁", "qu"]},
    "unigram of bytes": {"model_type": "unigram", **BYTES, "user_defined_symbols": ["<think>", "qu"]},
}


@functools.cache
def trained(name: str) -> bytes:
    out, lines = io.BytesIO(), [line for text in tiny.TEXTS for line in text.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=2,
        **MODELS[name],
    )
    return out.getvalue()


def texts(count: int = 200) -> list[str]:
    """Random characters, and parts of sentences; with the user's symbols."""
    chance = random.Random(5)
    found = ["", " ", "  ", "\n", " a", "a  b", "a ▁", "a   b", *tiny.TEXTS[:5]]
    for _ in range(count):
        text = "".join(chance.choice(LETTERS) for _ in range(chance.randrange(40)))
        sentence = chance.choice(tiny.TEXTS)
        at = chance.randrange(len(sentence))
        found += [text, sentence[at : at + 50], text + chance.choice(OWN).replace("▁", " ") + sentence[at:]]
    # The library of tokenizers normalizes a character and a mark behind it as one, SentencePiece apart.
    return [text for text in found if "\u0301" not in text]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"lines"}))
def test_sentencepiece_files_give_its_ids_and_texts(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(name))
    theirs, cache = sentencepiece.SentencePieceProcessor(model_proto=trained(name)), tmp_path / "cache"
    for _ in ("made", "cached"):
        ours = load_tokenizer(tmp_path, cache=cache)
        assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        for text in texts():
            ids = ours.encode(text, add_special_tokens=False)
            assert ids == theirs.encode(text), text
            if ours.unk_id not in ids:
                assert ours.decode(ids) == theirs.decode(ids)
        assert ours.encode("a") == [theirs.bos_id(), *theirs.encode("a")]
    assert len(list(cache.iterdir())) == 1


def test_spaces_are_squeezed_in_lines_and_cut_off_at_the_ends_of_a_text_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained("lines"))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained("lines"))
    ours = load_tokenizer(tmp_path)
    for text in ("a \nb", "a\n b", "  a  \n\n  b  ", " \n ", "\n"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text


def test_settings_say_what_marks_a_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained("llama"))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained("llama"))
    settings = {"add_bos_token": False, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("The dog") == [*theirs.encode("The dog"), theirs.eos_id()]
    assert ours.encode("<s>The</s>", False) == [theirs.bos_id(), *theirs.encode("The"), theirs.eos_id()]


def test_only_a_text_that_begins_has_a_space_before_it_unless_it_is_legacy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained("llama"))
    behind = {}
    for legacy in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        ours = load_tokenizer(tmp_path)
        behind[legacy] = [ours.token_string(token) for token in ours.encode("a</s>a", False)]
    assert behind == {True: ["▁", "a", "</s>", "▁", "a"], False: ["▁", "a", "</s>", "a"]}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_symbol_that_normalization_changes_is_refused(kind: str, tmp_path: Path) -> None:
    """The library keeps it as it is."""
    MODELS["tab"] = {"model_type": kind, **BYTES, "user_defined_symbols": ["<think>", "\t"]}
    trained.cache_clear()
    (tmp_path / "tokenizer.model").write_bytes(trained("tab"))
    with pytest.raises(ConfigError, match=r"'\\t'.*which its normalization changes"):
        load_tokenizer(tmp_path)


@functools.cache
def ranks() -> dict[bytes, int]:
    return bpe_train("\n".join(tiny.TEXTS), 400, LLAMA3, visualise=None)


def as_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


@pytest.mark.parametrize(
    ("file", "name", "pattern"),
    [
        ("qwen.tiktoken", {"tokenizer_class": "QWenTokenizer"}, QWEN2),
        ("tiktoken.model", {"tokenizer_class": "TikTokenTokenizer"}, KIMI),
        ("tokenizer.model", {"tokenizer_class": "ChatGLM4Tokenizer"}, LLAMA3),
        ("o200k.tiktoken", {"model_type": "gpt_oss"}, GPT4O),
    ],
)
def test_tiktoken_files_give_its_ids_and_texts(
    file: str, name: dict[str, str], pattern: str, tmp_path: Path
) -> None:
    base = len(ranks())
    special = {"[BOS]": base, "[EOS]": base + 3, f"<|reserved_token_{base + 1}|>": base + 1}
    listed = {str(base): {"content": "[BOS]", "special": True}, str(base + 3): {"content": "[EOS]"}}
    (tmp_path / file).write_bytes(as_file(ranks()))
    (tmp_path / "config.json").write_text(json.dumps(name))
    settings = {"added_tokens_decoder": listed, "eos_token": "[EOS]", **name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path)
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=special)
    for text in [*texts(), "[BOS]今天 a12345[EOS]", f"<|reserved_token_{base + 1}|>x"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, allowed_special="all"), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert (ours.eos_id, ours.vocab_size) == (base + 3, base + 4)


def tekken(**changes: Any) -> bytes:
    """With tokens behind those that count, as published files have them."""
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks().items()
    ]
    config = {"pattern": LLAMA3, "default_vocab_size": len(tokens) + 20, "default_num_special_tokens": 30}
    return json.dumps({"config": config, "vocab": tokens} | changes).encode()


@pytest.mark.parametrize("listed", [False, True])
def test_tekken_files_give_its_ids_and_texts(listed: bool, tmp_path: Path) -> None:
    """As ``mistral_common.tokens.tokenizers.tekken.Tekkenizer`` has them."""
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[X]"])]
    (tmp_path / "tekken.json").write_bytes(tekken(**{"special_tokens": special} if listed else {}))
    kept = dict(list(ranks().items())[: len(ranks()) - 10])
    theirs = tiktoken.Encoding("t", pat_str=LLAMA3, mergeable_ranks=kept, special_tokens={})
    ours = load_tokenizer(tmp_path)
    for text in texts():
        ids = [token + 30 for token in theirs.encode(text)]
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text
    assert ours.encode("[X]<SPECIAL_29>" if listed else "[INST]<SPECIAL_29>") == [1, 3, 29]
    assert (ours.special_tokens["bos_token"], ours.eos_id, ours.vocab_size) == ("<s>", 2, len(kept) + 30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"config": {}}', "cannot be read"),
        (tekken(vocab=[]), "do not fit each other"),
        (tekken(special_tokens=[{"rank": 30, "token_str": "<s>"}]), "twice, or has an id of another"),
        (tekken(special_tokens=[{"rank": i, "token_str": "<s>"} for i in (1, 2)]), "twice, or has an id"),
    ],
)
def test_tekken_files_that_are_none_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(tmp_path)


def test_a_tiktoken_file_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(as_file(ranks()))
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    with pytest.raises(ConfigError, match="not known of 'mystery' .known: QWenTokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n", "cannot be read"),
        (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "more than 64 bits"),
        (b"\n\x7fabc", "cut off"),
        (b"\n\x05\n\x03<s>" * 2, "no pieces, or one twice"),
        (b"\n\x05\n\x03<s>\x12\x02\x18\x03", "into words or characters"),
        (b"IQ== 0\nIg== 5\n", "ranks are not the numbers"),
        (b"IQ== 0\nIg== 1\n", "lacks 254 of the 256 bytes"),
        (b"IQ== 0 1\n", "cannot be read"),
        (b"!!! 0\n", "cannot be read"),
        (b"", "lacks 256"),
        (b"IQ== " + b"9" * 10_000, "cannot be read"),
    ],
)
def test_files_that_are_none_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(tmp_path)


def test_a_token_with_another_id_than_its_file_says_is_refused(tmp_path: Path) -> None:
    tiny.save_folder(tiny.byte_level(), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(settings | {"added_tokens_decoder": {"9999": {"content": "<new>"}}}))
    with pytest.raises(ConfigError, match="gives '<new>' the id 9999, and it has"):
        load_tokenizer(tmp_path)
