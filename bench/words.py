"""A tokenizer for models with random weights: a word for each id, the load generator's words among them."""

from __future__ import annotations

import json
from pathlib import Path

from sgla.bench.workloads import WORDS

FIRST = 100  # id of the first of them


def write_tokenizer(model: Path, folder: Path) -> None:
    """``model``: a folder with config.json."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {word: FIRST + i for i, word in enumerate(dict.fromkeys(WORDS))}
    known = set(words.values())
    vocab = words | {f"w{i}": i for i in range(size) if i not in known}
    made = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
