"""A tokenizer for models with random weights: bytes, the load generator's words, and a made-up word for each
further id, so that every token makes text.

    python bench/words.py MODEL FOLDER   # for --dummy of serve.py, or a "tokenizer" in --extra of offline.py

Its chat template shows messages and the number of tools.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate, pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sgla.bench.workloads import WORDS

SPACE = "\u0120"  # as byte-level tokenizers write it
SPECIAL = "<|im_start|>", "<|im_end|>"


def write_tokenizer(model: Path, folder: Path) -> None:
    """``model``: a folder with config.json."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    chains = [[*accumulate(SPACE + word)] for word in WORDS]
    merges = dict.fromkeys((a, b[len(a) :]) for chain in chains for a, b in pairwise(chain))
    known = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {token: i for i, token in enumerate([*known, *(f"w{i}" for i in range(len(known), size))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1]}
    settings["chat_template"] = Path(__file__).with_name("tools.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write_tokenizer(*map(Path, sys.argv[1:3]))
