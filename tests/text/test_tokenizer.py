"""Folders in HF layout: the same ids, texts and special tokens as transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
import tokenizers

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.text.process import BoundedTemplate
from sgla.text.tokenizer import Tokenizer, check_tools, load_tokenizer, read_template

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True},
    "eos_token": "</s>",
    "pad_token": "<|im_end|>",
    "clean_up_tokenization_spaces": True,
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "extra_special_tokens": {"image_token": "<image>"},
}


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_ids_and_text_equal_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny.save_folder(tiny.KINDS[kind](), tmp_path, tokenizer_config=json.dumps(CONFIG))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in tiny.corpus(150):
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == expected
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert set(theirs.all_special_ids) <= ours.special_ids


MORE = ["<extra>", {"__type": "AddedToken", "content": "<more>", "special": True}]


@pytest.mark.parametrize(
    ("settings", "mapped"),
    [
        ({"extra_special_tokens": MORE}, {}),
        ({"additional_special_tokens": MORE}, {}),
        ({"additional_special_tokens": MORE, "extra_special_tokens": ["<other>"]}, {}),
        ({"additional_special_tokens": MORE, "extra_special_tokens": {"image_token": "<image>"}}, {}),
        ({}, {"additional_special_tokens": ["<extra>"]}),
        ({"added_tokens_decoder": {}}, {"additional_special_tokens": ["<extra>"]}),
        ({"split_special_tokens": True}, {}),
        ({"split_special_tokens": False}, {}),
    ],
)
def test_special_tokens_without_a_name_are_those_of_transformers(
    settings: dict[str, object], mapped: dict[str, object], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    config = {key: value for key, value in CONFIG.items() if key != "extra_special_tokens"} | settings
    files = {"tokenizer_config": json.dumps(config), "special_tokens_map": json.dumps(mapped)}
    folder = tiny.save_folder(tiny.byte_level(), tmp_path, **files)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode("a<extra><more>b<image><s> <other>")
    assert ours.encode("a<extra><more>b<image><s> <other>") == ids
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_bytes_of_tokens_spell_the_text(tokenizer: Tokenizer) -> None:
    for text in tiny.corpus(60):
        ids = tokenizer.encode(text, add_special_tokens=False)
        raw = b"".join(map(tokenizer.token_bytes, ids))
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in decoded:
            assert raw.decode().lstrip(" ") == decoded.lstrip(" ")


def test_ids_outside_the_vocabulary_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_adds_bos(byte_level: Tokenizer, llama2_like: Tokenizer) -> None:
    assert not byte_level.adds_bos
    assert llama2_like.adds_bos


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    tokenizer = load_tokenizer(tiny.save_folder(backend, tmp_path))
    assert len(tokenizer.encode("the dog " * 10)) == len(tiny.byte_level().encode("the dog " * 10).ids)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [3, 7]}, "config": {"eos_token_id": 9}}, {1, 3, 7}),
        ({"generation_config": {"eos_token_id": 3}}, {1, 3}),
        ({"config": {"eos_token_id": 9}}, {1, 9}),
        ({}, {1}),
    ],
)
def test_ids_that_end_a_generation(files: dict[str, object], expected: set[int], tmp_path: Path) -> None:
    written = {name: json.dumps(content) for name, content in files.items()}
    folder = tiny.save_folder(tiny.byte_level(), tmp_path, tokenizer_config=json.dumps(CONFIG), **written)
    assert load_tokenizer(folder).eos_ids == expected
    assert load_tokenizer(folder, eos_ids=[11]).eos_ids == expected | {11}


def test_the_config_names_pieces_that_the_vocabulary_has_for_later(tmp_path: Path) -> None:
    parts = json.loads(tiny.byte_level().to_str())
    number = max(parts["model"]["vocab"].values(), default=0) + 1
    parts["model"]["vocab"]["[UNUSED_TOKEN_1]"] = number
    listed = {str(number): {"content": "<|plugin|>", "special": True}}
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    settings = json.dumps({"added_tokens_decoder": listed})
    tokenizer = load_tokenizer(tiny.save_folder(backend, tmp_path, tokenizer_config=settings))
    assert tokenizer.encode("the dog<|plugin|>")[-1] == number
    assert tokenizer.encode("the dog<|plugin|>")[:-1] == backend.encode("the dog").ids


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    folder = tiny.save_folder(
        tiny.byte_level(), tmp_path, special_tokens_map=json.dumps({"bos_token": {"content": "<s>"}})
    )
    assert load_tokenizer(folder).special_tokens == {"bos_token": "<s>"}


def test_template_files_come_before_the_config(tmp_path: Path) -> None:
    config = CONFIG | {
        "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    }
    folder = tiny.save_folder(tiny.byte_level(), tmp_path, tokenizer_config=json.dumps(config))
    assert load_tokenizer(folder).chat_template == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert load_tokenizer(folder).chat_template == "C"
    (folder / "chat_template.jinja").write_text("D")
    assert load_tokenizer(folder).chat_template == "D"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("E")
    assert load_tokenizer(folder).chat_template == {"default": "D", "tool_use": "E"}


def test_a_parser_of_calls_that_nobody_tells_the_model_to_write() -> None:
    silent, showing = BoundedTemplate("{{ messages }}"), BoundedTemplate("{{ messages }}{{ tools }}")
    with pytest.raises(ConfigError, match="--tool-call-parser mistral: .* shows no tools"):
        check_tools(silent, Config(model="x", tool_call_parser="mistral"))
    check_tools(showing, Config(model="x", tool_call_parser="mistral"))
    for parser in ("qwen25", "none", None):
        check_tools(silent, Config(model="x", tool_call_parser=parser))


def test_template_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("A")
    (tmp_path / "b.json").write_text('{"chat_template": "B"}')
    (tmp_path / "c.json").write_text("{}")
    assert read_template(tmp_path / "a.jinja") == "A"
    assert read_template(tmp_path / "b.json") == "B"
    for name in ("c.json", "missing.jinja"):
        with pytest.raises(ConfigError, match="--chat-template"):
            read_template(tmp_path / name)


def test_folder_with_the_old_files_goes_through_transformers(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    vocab = {token: i for i, token in enumerate(tiny.tokens_in_order(backend))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, tiny.merges(backend))))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | named))
    text = "The quick brown fox, and the dog's 今"
    assert load_tokenizer(tmp_path).encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}'])
def test_damaged_tokenizer_file_is_a_config_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_folder_without_any_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    tiny.save_folder(tiny.byte_level(), tmp_path, tokenizer_config=json.dumps(CONFIG))
    code = (
        "import sys; from pathlib import Path; from sgla.text.tokenizer import load_tokenizer;"
        "from sgla.text import output, prepare, template, logprobs;"
        f"load_tokenizer(Path({str(tmp_path)!r})).encode('a');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
