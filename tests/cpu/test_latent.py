"""Multi-head latent attention: tiny random checkpoints against HF transformers, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy_latent_spec
from checkpoints import SMALL, Eager, random_prompts, save_checkpoint
from safetensors.torch import save_file
from tiny import make_core, over_two_ranks, run, submit, tiny_config

from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.loading.load import load_model
from sgla.model import registry
from sgla.model.families import FAMILIES
from sgla.model.family import Family
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.model.state import state_of
from sgla.worker.cpu import CpuRunner

PROMPTS = random_prompts([1, 7, 33, 90])
SIZES = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SHORT = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
SHORT |= {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [3.0] * 4}
MODELS: dict[str, dict[str, Any]] = {
    "minicpm3": {"q_lora_rank": 20, "tie_word_embeddings": True, "rope_parameters": SHORT},
    "youtu": {"q_lora_rank": 20},
    "deepseek_v2": {"q_lora_rank": None, "first_k_dense_replace": 9},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "first_k_dense_replace": 9,
        "rope_parameters": YARN | {"mscale_all_dim": 1.0},
    },
}
# A family as a package outside might bring it: its keys, and that dims are rotated as neighbours.
_KNOWN = FAMILIES["MiniCPM3ForCausalLM"]
_DEFAULTS = {key: _KNOWN.defaults[key] for key in _KNOWN.defaults if not key.startswith(("scale_", "dim_"))}
DEEPSEEK = Family(
    ("deepseek_v2", "deepseek_v3"), _DEFAULTS, _KNOWN.fixed, model=_KNOWN.model, attention=_KNOWN.attention,
    interleaved=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    for name in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        registry.register(name, DEEPSEEK)


def save(folder: Path, model_type: str) -> tuple[Any, Any]:
    """HF's model, and its checkpoint; DeepSeek's without the keys of mixtures, of which there are none."""
    hf = save_checkpoint(folder, model_type, **SIZES | MODELS[model_type])
    source = open_source(folder)
    if model_type == "minicpm3":
        return hf, source
    family = registry.family_of(source.config["architectures"][0])
    known = {*family.defaults, *family.fixed, "architectures", "model_type", "dtype", "vocab_size"}
    for key in source.config.keys() - known:
        del source.config[key]
    return hf, source


@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """In torch, and in a CPU program in other chunks (GPUs: test_gpu_ops.py)."""
    hf, source = save(tmp_path, model_type)
    model = load_model(source)
    [layer] = set(model.state())
    assert [(kept.name, kept.shape) for kept in layer.tensors] == [("k", (1, 40))]
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for p in hf.parameters() if p.dim() > 1)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    rows = Eager(model, budget=150).generate(PROMPTS, 12)
    native = Eager(model, budget=40, native=True).generate(PROMPTS, 12)
    assert [row.tokens for row in native] == [row.tokens for row in rows]


@torch.no_grad()
def test_a_package_brings_latent_attention(tmp_path: Path) -> None:
    """In two files (GPUs: test_gpu_runner.py). It equals transformers' SmolLM3 without rotation, with one KV
    head whose keys are its values."""
    registry.register("ToyLatentForCausalLM", toy_latent_spec.FAMILY)
    hf = save_checkpoint(tmp_path, "smollm3", num_key_value_heads=1, no_rope_layers=[0, 0, 0])
    for layer in hf.model.layers:
        layer.self_attn.v_proj.weight.copy_(layer.self_attn.k_proj.weight)
    kept = {name: tensor for name, tensor in hf.state_dict().items() if "v_proj" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.config.update(architectures=["ToyLatentForCausalLM"], model_type="toy_latent")
    model = load_model(source)
    [layer] = set(model.state())
    assert [(kept.name, kept.shape) for kept in layer.tensors] == [("k", (1, 8))]
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    for native in (False, True):
        found = Eager(model, native=native).prompt_logprobs(PROMPTS)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    rows = Eager(model, budget=150).generate(PROMPTS, 12)
    chunked = Eager(model, budget=40, native=True).generate(PROMPTS, 12)
    assert [row.tokens for row in chunked] == [row.tokens for row in rows]


def test_warm_equals_cold_and_chunks_the_whole(tmp_path: Path) -> None:
    _, source = save(tmp_path, "minicpm3")
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    whole = CpuRunner(tiny_config(step_tokens=256), source, 0, 1, "", lambda progress: None)
    expected = run(whole, requests).tokens()
    parts = CpuRunner(tiny_config(step_tokens=16), source, 0, 1, "", lambda progress: None)
    core = make_core(parts.facts)
    assert run(parts, requests, core).tokens() == expected
    again = run(parts, requests, core)
    assert again.tokens() == expected
    assert max(delta.cached_tokens for delta in again["3"]) >= 80


async def test_two_ranks_split_the_heads_of_one_latent(tmp_path: Path) -> None:
    _, source = save(tmp_path, "minicpm3")
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    one = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    both = await over_two_ranks(source, requests)
    assert both.tokens() == run(one, requests).tokens()
    assert state_of(one.model.spec, 2, 0) == state_of(one.model.spec, 1)  # each has the whole latent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"rope_scaling": SHORT | {"long_factor": [1.0]}}, "long_factor"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    config = SMALL | SIZES | {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3"}
    read_decoder(config)
    with pytest.raises(ConfigError, match=message):
        read_decoder(config | change)
