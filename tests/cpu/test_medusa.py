"""Medusa's heads from their files, as the authors write them and as vLLM does. That texts are those without:
``test_draft_heads.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny import LLAMA, VOCAB, run, submit, tiny_config, tiny_source
from torch import Tensor

from sgla.config import Config
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.ledger import ledger
from sgla.loading.source import configured_source, drafting
from sgla.model.drafting import check_settings, read_medusa
from sgla.model.read import read_decoder
from sgla.worker.batch import Columns, build
from sgla.worker.cpu import CpuRunner
from sgla.worker.medusa import MedusaDrafts
from sgla.worker.ngrams import Both

HEADS, LAYERS, WIDTH = 2, 2, LLAMA["hidden_size"]
AUTHORS = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "x"}
THEIRS = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": LAYERS, "hidden_size": WIDTH}


def heads() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            made[f"{head}.{layer}.linear.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.1
            made[f"{head}.{layer}.linear.bias"] = torch.randn(WIDTH, generator=generator)
        made[f"{head}.{LAYERS}.weight"] = torch.randn(VOCAB, WIDTH, generator=generator)
    return made


def save(folder: Path, form: str, tensors: dict[str, Tensor]) -> ModelSource:
    folder.mkdir()
    config = THEIRS | {"medusa_fc_bias": True} if form == "vllm" else AUTHORS
    (folder / "config.json").write_text(json.dumps(config))
    if form == "pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
        return opened(folder)
    if form == "vllm":
        parts = {name: name.split(".") for name in tensors}
        tensors = {
            f"blocks.{p[0]}.layers.{p[1]}.{p[3]}" if len(p) == 4 else f"lm_heads.{p[0]}.{p[2]}": tensors[name]
            for name, p in parts.items()
        }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return opened(folder)


def opened(folder: Path) -> ModelSource:
    return configured_source(folder, drafting(Config(speculative_model=str(folder))))


def runner_of(source: ModelSource) -> CpuRunner:
    settings = {"speculative_algorithm": "medusa", "speculative_num_draft_tokens": 4}
    config = tiny_config(**settings, speculative_adaptive=False)
    return CpuRunner(config, replace(tiny_source(), config=LLAMA, draft=source), 0, 1, "", lambda p: None)


@pytest.mark.parametrize("form", ["pt", "safetensors", "vllm"])
def test_heads_guess_from_the_last_hidden_state(tmp_path: Path, form: str) -> None:
    tensors = heads()
    runner = runner_of(save(tmp_path / form, form, tensors))
    transcript = run(runner, [submit("a", [5, 6, 7, 8], 12)], drafts=4)
    assert len(transcript.tokens()["a"]) == 12
    drafter = runner._drafter
    assert isinstance(drafter, MedusaDrafts)
    hidden, zeros = torch.randn(1, WIDTH), np.zeros(1, np.int32)
    batch = build(Columns(zeros, zeros, zeros + 1, zeros), runner.tables)
    for head in range(HEADS):
        x = hidden
        for layer in range(LAYERS):
            name = f"{head}.{layer}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        expected = F.linear(x, tensors[f"{head}.{LAYERS}.weight"])
        torch.testing.assert_close(drafter._forward(head, hidden, batch), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("kind", "each"), [(None, 4), ("int8", 1.125)])
def test_its_memory_is_counted(tmp_path: Path, kind: str | None, each: float) -> None:
    source = save(tmp_path / "heads", "pt", heads())
    nbytes = int(each * HEADS * WIDTH * (LAYERS * WIDTH + VOCAB))
    asked = {"speculative_algorithm": "medusa", "speculative_num_draft_tokens": 4}
    found = []
    for settings, draft in (({}, None), (asked | {"speculative_quantization": kind}, source)):
        config = tiny_config(**settings, kv_cache_bytes=1 << 20)
        files = replace(tiny_source(), config=LLAMA, draft=draft)
        runner = CpuRunner(config, files, 0, 1, "", lambda p: None)
        rows = ledger(config, LLAMA, None if draft is None else draft.config)
        found.append((runner.facts.ledger["weights"], rows["weights"]))
    assert [more - less for less, more in zip(*found)] == [nbytes, nbytes]
    drafter = runner._drafter
    assert isinstance(drafter, Both)
    medusa = drafter._model._forward._medusa  # type: ignore[attr-defined]
    weights = [linear.weight for head in medusa.heads for linear in (*head.steps, head.out)]
    assert sum(weight.nbytes for weight in weights) == nbytes


def test_what_cannot_guess_is_refused(tmp_path: Path) -> None:
    target = read_decoder(LLAMA)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hidden_size": WIDTH}, "no medusa_num_heads"),
        (THEIRS | {"hidden_size": 7}, f"hidden_size is 7, and the model's {WIDTH}"),
        (THEIRS | {"truncated_vocab_size": 9}, "guesses some tokens alone"),
        (AUTHORS | {"vocab_size": 9}, f"vocab_size is 9, and the model's {VOCAB}"),
    ]
    for draft, why in cases:
        with pytest.raises(ConfigError, match=why):
            read_medusa(draft, target)
    tensors = heads()
    del tensors["1.0.linear.bias"]
    with pytest.raises(WeightError, match=r"1\.0\.linear\.bias"):
        runner_of(save(tmp_path / "cut", "pt", tensors))
    asked = {"speculative_algorithm": "medusa", "speculative_num_draft_tokens": 2}
    with pytest.raises(ConfigError, match="medusa needs --speculative-model"):
        check_settings(Config(**asked), "cpu")
