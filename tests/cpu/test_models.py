"""Our models against HF transformers, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, Row, check_against_hf, decided, random_prompts, save_checkpoint
from torch import Tensor

from sgla.hub.source import open_source
from sgla.loading.load import load_model
from sgla.model.read import read_decoder

NEW = 24
LENGTHS = [1, 2, 7, 16, 33, 64, 111, 200]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama gqa 3": ("llama", {}),
    "llama mha tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama mqa wide heads bias": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 narrow heads": ("qwen3", {"head_dim": 6, "num_key_value_heads": 3}),
    "qwen3 mixture": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 mixture unnormalized": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral sliding": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 20}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 10,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3 softcaps": (
        "gemma3_text",
        {
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 30,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_transformers(layout: str, tmp_path: Path) -> None:
    model_type, changes = LAYOUTS[layout]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    rows = Eager(model, budget=150).generate(random_prompts(LENGTHS), NEW)
    check_against_hf(rows, NEW, hf)
    native = Eager(model, budget=150, native=True).generate(random_prompts(LENGTHS), NEW)
    check_against_hf(native, NEW, hf)
    assert len({tuple(row.tokens[-NEW:]) for row in rows}) == len(rows)
    assert sum(len(set(row.tokens[-NEW:])) for row in rows) > 6 * len(rows)  # no parrot would pass


@pytest.mark.parametrize("layout", ["llama3 rope", "qwen3", "qwen3 mixture", "gemma3"])
def test_chunked_equals_whole_equals_alone(layout: str, tmp_path: Path) -> None:
    model_type, changes = LAYOUTS[layout]
    save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    prompts = random_prompts([3, 40, 90])
    whole = decided(Eager(model).generate(prompts, 16))
    for budget in (5, 32):
        chunked = Eager(model, budget, page_size=16).generate(prompts, 16)
        assert [row.tokens for row in chunked] == whole
    alone = [Eager(model).generate([prompt], 16)[0] for prompt in prompts]
    assert [row.tokens for row in alone] == whole


@pytest.mark.parametrize("layout", ["qwen3", "qwen3 mixture", "gemma3"])
def test_rows_equal_those_of_all_tokens(layout: str, tmp_path: Path) -> None:
    model_type, changes = LAYOUTS[layout]
    save_checkpoint(tmp_path, model_type, **changes)
    driver = Eager(load_model(open_source(tmp_path)))
    prompts = random_prompts([30, 1, 7])
    driver.prompt_logprobs(prompts)  # makes the pages
    batch = driver.batch([Row(prompt) for prompt in prompts], [(i, 0, len(p)) for i, p in enumerate(prompts)])
    hidden, kv = driver.model.forward(batch, driver.kv), [layer.k.clone() for layer in driver.kv]
    for rows in ([29, 30, 37], [5], []):
        for layer in driver.kv:
            layer.k.zero_(), layer.v.zero_()
        found = driver.model.forward(batch, driver.kv, torch.tensor(rows, dtype=torch.int32))
        torch.testing.assert_close(found, hidden[rows], rtol=0, atol=1e-5)
        torch.testing.assert_close([layer.k for layer in driver.kv], kv, rtol=0, atol=0)


def test_old_and_new_style_configs_agree(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta, rope_scaling and torch_dtype; 5 writes rope_parameters and dtype."""
    save_checkpoint(tmp_path, "gemma3_text", **LAYOUTS["gemma3"][1])
    new = open_source(tmp_path).config
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    old |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "torch_dtype": "float32",
        "sliding_window_pattern": 6,
    }
    a, b = read_decoder(new), read_decoder(old)
    assert (a.attention, a.dtype) == (b.attention, b.dtype)
    assert [layer.rope.theta for layer in a.attention if layer.rope] == [1e4] * 5 + [1e6, 1e4]
    assert a.windows == (10,) * 5 + (0, 10)


def test_bfloat16_and_quantized_weights_stay_close(tmp_path: Path) -> None:
    """A bound on the damage, in nats of KL divergence a token; float32 is the reference."""
    save_checkpoint(tmp_path, "llama", hidden_size=96, num_hidden_layers=2)
    prompts = random_prompts([50, 60])

    def logprobs(dtype: str, quantization: str | None) -> Tensor:
        runner = Eager(load_model(open_source(tmp_path), dtype, quantization))
        return runner.prompt_logprobs(prompts)

    exact = logprobs("float32", None)
    bounds = {("bfloat16", None): 1e-3, ("float32", "int8"): 5e-3, ("float32", "int4"): 0.2}
    for (dtype, quantization), bound in bounds.items():
        divergence = (exact.exp() * (exact - logprobs(dtype, quantization))).sum(-1).mean().item()
        assert 0 < divergence < bound, (dtype, quantization)
