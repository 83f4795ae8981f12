"""Of every family: a prompt in chunks, behind a warm cache and over two ranks gives the same tokens as alone.
Some of this holds for each commit (``test_families.py`` and others), all of it each night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_families
import test_hybrids
import test_mamba
import test_mixtures
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from parity import LAYOUTS
from test_gpu_ops import computed
from tiny import make_core, over_two_ranks, run, submit, tiny_config

from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.kernels.gpu.record import Recorder
from sgla.layers.build import together
from sgla.loading.checkpoint import stored_tensors
from sgla.loading.load import load_model
from sgla.worker.cpu import CpuRunner

PROMPTS = random_prompts([1, 7, 33, 90])
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{module.__name__.removeprefix('test_')}: {name}": family
    for module in (test_families, test_mixtures, test_hybrids, test_mamba)
    for name, family in module.FAMILIES.items()
}
OTHERS = sorted(LAYOUTS.keys() - {model_type for model_type, _ in FAMILIES.values()})
FAMILIES |= {f"layouts: {name}": (name, LAYOUTS[name].shared) for name in OTHERS}

UNSPLIT = {"hybrids: qwen3-next, one head for each, mixed"}  # three heads of keys


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_chunks_caches_and_ranks_change_nothing(name: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    source = open_source(tmp_path)
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    runner = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    expected = run(runner, requests).tokens()
    core = make_core(runner.facts, step_tokens=24)
    assert run(runner, requests, core).tokens() == expected
    warm = run(runner, requests, core)
    assert warm.tokens() == expected
    assert any(delta.cached_tokens for deltas in warm.values() for delta in deltas)
    if name in UNSPLIT:
        with pytest.raises(ConfigError, match="cannot be split over 2 ranks"):
            await over_two_ranks(source, requests)
        return
    assert (await over_two_ranks(source, requests)).tokens() == expected


BRIEF = ["families: gpt2", "families: falcon", "mixtures: qwen2", "mixtures: deepseek-v3", "hybrids: qwen3.5"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BRIEF else pytest.mark.slow) for name in FAMILIES]
)
def test_layers_tell_the_tensors_that_they_have_taken(name: str, tmp_path: Path) -> None:
    """Also parts of two ranks together, whatever layers have made of them."""
    save_checkpoint(tmp_path, FAMILIES[name][0], **FAMILIES[name][1])
    source = open_source(tmp_path)
    for count in (1, 2) if name not in UNSPLIT else (1,):
        ranks = [load_model(source, shard=Shard(rank, count)).declared for rank in range(count)]
        untold = []
        for raw, tensor in stored_tensors(source):
            shapes = {rank.shape(raw) for rank in ranks if rank is not None}
            if None in shapes:
                untold.append(raw)
                continue
            assert shapes == {tensor.shape}
            rows = range(tensor.shape[0] // 2, tensor.shape[0])
            told = together(rank.show(raw, rows) for rank in ranks if rank is not None)
            torch.testing.assert_close(told, tensor.values(rows).float(), rtol=0, atol=1e-6)
        assert not untold or name not in BRIEF


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_computed_while_it_is_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of ``test_gpu_ops.py``, where some have it for each commit."""
    monkeypatch.setattr(Recorder, "device", torch.device("cpu"))  # where indices are already
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    assert not computed(open_source(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(LAYOUTS.keys() - {"deepseek"}))  # whose reference has one
@torch.no_grad()
def test_other_activations_are_computed_or_refused(model_type: str, tmp_path: Path) -> None:
    """Whatever parts of a layer have them: MLPs, experts, convolutions, gates."""
    config = save_checkpoint(tmp_path / "plain", model_type, **LAYOUTS[model_type].shared).config
    for key in (key for key, value in config.to_dict().items() if "act" in key and isinstance(value, str)):
        for act in {"silu", "gelu_pytorch_tanh", "gelu", "relu"} - {getattr(config, key)}:
            folder = tmp_path / key / act
            hf = save_checkpoint(folder, model_type, **LAYOUTS[model_type].shared | {key: act})
            try:
                found = Eager(load_model(open_source(folder)), page_size=16).prompt_logprobs(PROMPTS[2:3])
            except ConfigError:
                continue
            expected = hf(torch.tensor(PROMPTS[2:3])).logits[0].log_softmax(-1)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
