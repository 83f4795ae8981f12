"""A tiny model with random weights whose tokenizer has tokens that span several JSON tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sgla import Engine

SPECIAL = ["<|end|>", "<|pad|>", "<think>", "</think>", "<tool>"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
CORPUS = [
    json.dumps({"name": "anna", "items": [1, 2, {"id": 7, "ok": True}], "none": None}),
    json.dumps({"value": -1.5e3, "a": {"b": [False, "x", "日本"]}, "kind": "circle"}, indent=2),
    'yes no red amber green 2024-01-01T10:00:00Z {"a": {"b": "c"}} ["a", "b"] </f> <f>',
]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    # More logits than tokens, as many models have.
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size() + 13}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="session")
def start(folder: Path) -> Iterator[Callable[..., Engine]]:
    """An engine with some settings changed; the same settings give the same engine."""
    engines: dict[str, Engine] = {}

    def make(**changes: Any) -> Engine:
        key = json.dumps(changes, sort_keys=True)
        if key not in engines:
            settings: dict[str, Any] = {
                "device": "cpu",
                "load_format": "dummy",
                "dtype": "float32",
                "executor": "inline",
                "kv_cache_bytes": 4 << 20,
                "max_running_requests": 32,
                "threads": 1,
                "random_seed": 3,
            }
            engines[key] = Engine(str(folder), **settings | changes)
        return engines[key]

    yield make
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture
def engine(start: Callable[..., Engine]) -> Engine:
    return start()
