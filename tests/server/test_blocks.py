"""A model that writes blocks out of noise, as the Python API and servers have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgla import Engine, SamplingParams
from sgla.config import Config
from sgla.errors import ConfigError, SglaError, UnsupportedField
from sgla.messages import Grammar
from sgla.resolve import resolve

BLOCK = 8
TEXT = {
    "model_type": "diffusion_gemma_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "num_experts": 2,
    "top_k_experts": 1,
    "moe_intermediate_size": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONFIG: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": BLOCK,
    "text_config": TEXT,
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny-diffusion")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tiny_model / name).read_text())
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    config = CONFIG | {"text_config": TEXT | {"vocab_size": vocab}}
    (folder / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "executor": "inline"}
    how = {"max_denoising_steps": 3}
    with Engine(str(folder), device="cpu", threads=1, diffusion_config=how, **settings) as engine:
        yield engine


def test_streams_bring_blocks(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    events = [event for event in engine.stream("Hello", params) if event.tokens]
    assert len(events) == 3  # of 8, 8 and 4 tokens, but for the bytes of a character that is not complete
    assert sum(len(event.tokens) for event in events) == 20
    whole = engine.generate("Hello", params)
    assert whole.tokens == [token for event in events for token in event.tokens]
    several = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, n=2)
    first, second = engine.generate("Hello", several)
    assert first.tokens == whole.tokens != second.tokens


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"hidden_states": True}, "return_hidden_states"),
        ({"grammar": Grammar(kind="regex", text="a+", param="regex")}, "regex"),
    ],
)
def test_what_is_about_single_tokens_is_refused(engine: Engine, sampling: Any, param: str) -> None:
    with pytest.raises(UnsupportedField, match=f"{param} is not supported by this model") as caught:
        engine.generate("Hello", SamplingParams(**sampling))
    assert caught.value.param == param


def test_it_makes_no_vectors(engine: Engine) -> None:
    with pytest.raises(SglaError):
        engine.embed("Hello")


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_lora": True},
        {"speculative_algorithm": "ngram"},
        {"enable_return_hidden_states": True},
        {"tp": 2},
        {"cp": 2},
        {"step_tokens": 15},
        {"diffusion_config": {"noise": 1}},
    ],
)
def test_settings_that_it_cannot_have(settings: dict[str, Any]) -> None:
    config = Config(model="m", device="cpu", **settings)
    with pytest.raises(ConfigError, match=next(iter(settings)).replace("_", "-")):
        resolve(config, model=CONFIG | {"text_config": TEXT | {"vocab_size": 259}})


def test_other_models_make_no_blocks() -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match="--diffusion-config is for models that write blocks"):
        resolve(Config(model="m", device="cpu", diffusion_config={"t_min": 0.1}), model=llama)
