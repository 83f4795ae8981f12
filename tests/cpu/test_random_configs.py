"""Random configurations of all families: each equals transformers, or is refused by name."""

from __future__ import annotations

import itertools
from copy import deepcopy
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import bailing
import deepseek
import exaone
import mimo
import pytest
import torch
from checkpoints import SMALL, Eager, check_against_hf, random_prompts, save_checkpoint
from parity import layouts, native
from transformers import AutoConfig, PreTrainedModel

from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.loading.load import load_model

for reference in (bailing, deepseek, exaone, mimo):
    reference.register()
NEW = 16  # tokens
ACTS = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2"]
# Keys that say nothing of mathematics, and the number of an indexer's heads: of few all scores may be 0.
LEFT = {"use_cache", "dtype", "architectures", "model_type", "is_causal", "is_decoder", "index_n_heads"}
LEFT |= {"max_position_embeddings", "vocab_size", "hidden_size", "initializer_range", "rope_parameters"}
PICKS = {"index_topk": 512}  # all, or rounding decides which


def rope(random: Random, dim: int) -> dict[str, Any]:
    """A table for heads with ``dim`` values; no kind depends on the length of a text up to 2,048 tokens."""
    kind = random.choice(["default", "linear", "yarn", "llama3", "longrope", "proportional"])
    table: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice([500.0, 1e4, 1e6])}
    if kind != "default":
        table["factor"] = random.choice([1.5, 8.0])
    if kind in ("yarn", "llama3"):
        table["original_max_position_embeddings"] = random.choice([16, 64])
    if kind == "yarn":
        more = {
            "beta_fast": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "attention_factor": 1.3,
            "truncate": False,
        }
        table |= {key: value for key, value in more.items() if random.random() < 0.25}
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        for which in ("short", "long"):
            table[f"{which}_factor"] = [1 + random.random() for _ in range(dim // 2)]
        table["original_max_position_embeddings"] = 2048
    if random.random() < 0.3:
        table["partial_rotary_factor"] = random.choice([0.25, 0.5, 1.0])
    return table


def another(random: Random, key: str, value: Any) -> Any:
    """A value that a configuration may have in place of ``value``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return random.choice(ACTS) if "act" in key else value
    if isinstance(value, int):
        return random.choice([1, 2, 3, max(1, value // 2), max(1, value - 1), value + 1, 2 * value])
    if isinstance(value, float):
        return random.choice([value / 2, 1.7 * value, 1.0])
    if isinstance(value, list):
        return random.choices(value, k=len(value)) if value else value
    if value is None:
        sizes = {"window": [1, 2, 5, 9], "softcap": [3.0, 8.0], "dim": [8, 12, 24], "rank": [8, 20]}
        return random.choice(next((x for word, x in sizes.items() if word in key), [None]))
    return value


def drawn(random: Random) -> tuple[str, dict[str, Any]]:
    """A family, and what its configuration has in place of ``SMALL``."""
    model_type = random.choice(sorted(native().values()))
    _, changes = random.choice(list(layouts(model_type)))
    found = {key: value for key, value in deepcopy(SMALL | changes).items() if value is not ...}
    full = AutoConfig.for_model(model_type, **deepcopy(found)).to_dict()
    changes = changes | {key: value for key, value in PICKS.items() if key in full}
    if random.random() < 0.4:
        groups, kv_heads, dim = (
            random.choice([1, 2, 3]),
            random.choice([1, 2, 3]),
            random.choice([4, 8, 16, 20]),
        )
        own = {"num_attention_heads": groups * kv_heads, "num_key_value_heads": kv_heads, "head_dim": dim}
        own = {key: value for key, value in own.items() if key in full}
        changes |= own if "head_dim" in full else own | {"hidden_size": dim * groups * kv_heads}
    if random.random() < 0.3 and isinstance(table := full.get("rope_parameters"), dict):
        head = (full | changes).get("head_dim") or 8
        by_kind = table and all(isinstance(part, dict) for part in table.values())
        part = random.choice(list(table)) if by_kind else ""
        changes["rope_parameters"] = table | {part: rope(random, head)} if part else rope(random, head)
    keys = sorted(key for key in full.keys() - LEFT if not key.endswith(("_token_id", "dropout", "_coef")))
    for key in random.sample(keys, random.choice([0, 1, 2, 4])):
        changes.setdefault(key, another(random, key, full[key]))
    return model_type, changes


@torch.no_grad()
def saved(folder: Path, model_type: str, changes: dict[str, Any]) -> PreTrainedModel | None:
    """Its model in ``folder``; None where transformers makes or runs none, or its logits are no numbers."""
    try:
        hf = save_checkpoint(folder, model_type, **deepcopy(changes))
        return (
            hf
            if hf(torch.tensor(random_prompts([40], hf.config.vocab_size))).logits.isfinite().all()
            else None
        )
    except Exception:  # of many kinds
        return None


def compare(folder: Path, seeds: itertools.count[int], count: int) -> tuple[int, int]:
    """Draw until ``count`` are equal; how many were drawn that transformers runs, and how many refused."""
    equal = refused = 0
    while equal < count:
        seed = next(seeds)
        model_type, changes = drawn(Random(seed))
        own = folder / str(seed)
        if (hf := saved(own, model_type, changes)) is None:
            continue
        prompts = random_prompts([3, 40], hf.config.vocab_size, seed)
        try:
            model = load_model(open_source(own))
        except ConfigError:
            refused += 1
            continue
        try:
            check_against_hf(
                Eager(model, budget=24, page_size=16, native=True).generate(prompts, NEW), NEW, hf
            )
        except Exception as error:
            raise AssertionError(f"{seed}: {model_type} with {changes}") from error
        equal += 1
    return equal + refused, refused


def test_some_random_configurations_equal_transformers(tmp_path: Path) -> None:
    """Others each day."""
    compare(tmp_path, itertools.count(1000 * date.today().toordinal()), 2)


@pytest.mark.slow
def test_random_configurations_equal_transformers(tmp_path: Path) -> None:
    """Most of what transformers runs is computed here."""
    runs, refused = compare(tmp_path, itertools.count(10**9 + 1000 * date.today().toordinal()), 200)
    assert refused < runs / 2
