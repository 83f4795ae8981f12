"""Tokenizers that are damaged, or belong to another model: told by a typed error that names the file, before
a request can meet them; what an encoder cannot do with one text ends that request alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tokenizers as tiny

from sgla import clock
from sgla.actors import system
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import BadRequest, ConfigError, UnsupportedField
from sgla.hub.source import ModelSource
from sgla.text.tokenizer import load_text, load_tokenizer, probe, vocabulary

SIZE = 600
Content = dict[str, Any]


def split(pattern: str) -> Content:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def model(**changes: Any) -> Callable[[Content], Content]:
    return lambda content: {**content, "model": {**content["model"], **changes}}


def part(**changes: Any) -> Callable[[Content], Content]:
    return lambda content: {**content, **changes}


UNKNOWN = {"unk_token": "[UNK]", "vocab": {"a": 0}}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
# Changes of tokenizer.json, and what is said of them.
BROKEN: dict[str, tuple[Callable[[Content], Content], str]] = {
    "no vocabulary": (model(vocab=None), "tokenizer.json cannot be read"),
    "empty vocabulary": (lambda c: {**model(vocab={}, merges=[])(c), "added_tokens": []}, "has no tokens"),
    "ids as text": (model(vocab={"a": "0"}), "tokenizer.json cannot be read"),
    "a text of a million letters": (part(added_tokens="a" * 10**6), "tokenizer.json cannot be read"),
    "merges of unknown tokens": (model(merges=[["zz", "qq"]]), "tokenizer.json cannot be read"),
    "a regular expression without its end": (
        part(pre_tokenizer=split("([")),
        "tokenizer.json cannot be read",
    ),
    "a regular expression without an end": (
        part(pre_tokenizer=split("(a+)+$")),
        "cannot encode ordinary text",
    ),
    "a normalizer that panics at once": (
        part(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json cannot be read",
    ),
    "a normalizer that panics later": (
        part(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}),
        "cannot encode ordinary text",
    ),
    "a decoder that panics": (
        part(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}),
        "cannot encode ordinary text",
    ),
    "a template without its token": (
        part(post_processor={**TEMPLATE, "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}]}),
        "cannot encode ordinary text",
    ),
    "no token for unknown words": (
        part(model={"type": "WordLevel", **UNKNOWN}),
        "cannot encode ordinary text",
    ),
}


def source_of(folder: Path, size: int = SIZE, **config: Any) -> ModelSource:
    return ModelSource("dummy", folder, (), {"vocab_size": size, **config}, {})


def refused(source: ModelSource) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(Config(model=str(source.folder)), source)
    assert str(source.folder) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_told_with_its_file(name: str, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    tiny.save_folder(tiny.byte_level(), tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    message = refused(source_of(tmp_path))
    assert said in message
    assert len(message) < 1000


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does transformers ask in a terminal whether it may be."""
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    (tmp_path / "own.py").write_text("raise SystemExit")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert "no tokenizer.json, code of its own is never run," in refused(source_of(tmp_path))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2"])
def test_a_folder_without_a_tokenizer_is_told(kind: str, tmp_path: Path) -> None:
    """transformers makes one of no files, which has special tokens alone. For weights that are drawn it may
    do, but not for grammars."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 0}))
    source = source_of(tmp_path)
    assert "has no tokens for text" in refused(replace(source, kind="safetensors"))
    tokenizer, _ = load_text(Config(model="x"), source)
    with pytest.raises(UnsupportedField, match="no tokens for text"):
        vocabulary(tokenizer, SIZE)


def test_what_transformers_cannot_make_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    said = refused(source_of(tmp_path))
    assert "transformers cannot make one: Couldn't instantiate the backend tokenizer" in said
    assert "\n" not in said


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "[" * 100_000])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_are_no_json_objects_are_named(file: str, content: str, tmp_path: Path) -> None:
    tiny.save_folder(tiny.byte_level(), tmp_path)
    (tmp_path / file).write_text(content)
    assert file in refused(source_of(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "x"}}},
        {"added_tokens_decoder": {"1000": {}}},
        {"bos_token": {"text": "<s>"}},
        {"bos_token": 7},
        {"chat_template": 7},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 7}},
    ],
)
def test_settings_of_wrong_types_are_told(settings: Content, tmp_path: Path) -> None:
    tiny.save_folder(tiny.byte_level(), tmp_path, tokenizer_config=json.dumps(settings))
    refused(source_of(tmp_path))


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    tiny.save_folder(tokenizer, tmp_path)
    own = tokenizer.get_vocab_size(with_added_tokens=False)
    load_text(Config(model="x"), source_of(tmp_path, own))  # added tokens may lie beyond, as Gemma's do
    assert f"has {own} tokens and the model {own - 1}" in refused(source_of(tmp_path, own - 1))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [SIZE, -1, [2, SIZE], "2", 1.5, [None], True])
def test_ends_that_the_model_has_not_are_told(key: str, value: Any, tmp_path: Path) -> None:
    tiny.save_folder(tiny.byte_level(), tmp_path)
    assert f"{key} is {value!r}" in refused(source_of(tmp_path, **{key: value}))
    load_text(Config(model="x"), source_of(tmp_path, **{key: 2}))


@pytest.mark.parametrize("busy", [True, False])
def test_a_text_may_wait_for_a_core_and_not_take_it(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(clock, "now", lambda: 3.0 * next(seconds))
    monkeypatch.setattr(clock, "spent", (lambda: 3.0 * next(seconds)) if busy else lambda: 7.0)
    found = SimpleNamespace(
        backend=SimpleNamespace(encode_batch_fast=lambda texts: [SimpleNamespace(ids=[0])]),
        decode=lambda ids: "",
    )
    with pytest.raises(ConfigError, match="takes") if busy else nullcontext():
        probe(found)  # type: ignore[arg-type]


def test_what_the_library_cannot_encode_ends_the_request_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.save_folder(tiny.byte_level(), tmp_path))
    content = json.loads(tokenizer.backend.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "pre_tokenizer": split("(a+)+$")}))
    hostile = load_tokenizer(tmp_path)
    with pytest.raises(BadRequest, match="cannot encode the text"):
        hostile.encode("a" * 40 + "!")
    with pytest.raises(BadRequest, match="cannot encode the text"):
        hostile.encode_pair("a" * 40 + "!", "b")
    assert hostile.encode("b")


async def test_a_broken_tokenizer_ends_the_load_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Loading:
        """An executor whose weights never come."""

        async def start(self, on_progress: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        def on_death(self, callback: Any) -> None: ...

        async def close(self) -> None: ...

    tiny.save_folder(tiny.byte_level(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    config = Config(model=str(tmp_path), executor="inline", device="cpu")
    monkeypatch.setattr(
        system, "find_model", lambda config, report: (config, source_of(tmp_path), Defaults())
    )
    monkeypatch.setattr(system, "make_local", lambda config, source: Loading())
    starting = system.System(config)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        await asyncio.wait_for(starting.start(), 60)
    assert ended == [True]
    await starting.close()
