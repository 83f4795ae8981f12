"""Scales of an fp8 KV cache from a file beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import run_script

from sgla.config import Config
from sgla.device import nvidia
from sgla.errors import ConfigError
from sgla.model.cache_scales import read_scales
from sgla.model.read import read_decoder
from sgla.observe.machine import Machine
from sgla.resolve import resolve

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
H200 = Machine(
    gpus=(nvidia("NVIDIA H200", (9, 0), 132, 140 << 30),) * 2, torch_cuda="13.0", memory_available=512 << 30
)
LAYERS = {"0": 0.5, "1": 0.25, "2": 1}


def written(
    path: Path, ranks: dict[str, Any], dtype: str = "float8_e4m3fn", kind: str | None = "llama"
) -> str:
    cache = {"dtype": dtype, "scaling_factor": ranks}
    path.write_text(json.dumps({"kv_cache": cache} | ({"model_type": kind} if kind else {})))
    return str(path)


def config_of(path: str, **settings: Any) -> Config:
    return Config(quantization_param_path=path, **({"kv_cache_dtype": "fp8", "device": "cuda"} | settings))


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    later = {key: value / 8 for key, value in LAYERS.items()}
    path = written(tmp_path / "scales.json", {"0": LAYERS, "1": later}, kind=None)
    config, spec = config_of(path, tp=2), read_decoder(MODEL)
    resolve(config, H200, MODEL)
    assert read_scales(config, spec, 0, MODEL) == [(0.5, 0.5), (0.25, 0.25), (1.0, 1.0)]
    assert read_scales(config, spec, 1, MODEL) == [(0.0625, 0.0625), (0.03125, 0.03125), (0.125, 0.125)]
    assert read_scales(Config(), spec, 0, MODEL) is None


def test_a_model_of_no_type_has_those_of_any(tmp_path: Path) -> None:
    untyped = {key: value for key, value in MODEL.items() if key != "model_type"}
    resolve(config_of(written(tmp_path / "scales.json", {"0": LAYERS})), H200, untyped)


def test_the_cache_has_them(tmp_path: Path) -> None:
    path = written(tmp_path / "scales.json", {"0": LAYERS})
    few = {"step_tokens": 64, "max_running_requests": 8, "kv_cache_dtype": "fp8"}
    case = {"model": MODEL, "config": few | {"quantization_param_path": path}}
    (found,) = map(json.loads, run_script("fake_gpu.py", json.dumps([case])))
    assert found["scales"] == [[0.5, 0.5], [0.25, 0.25], [1.0, 1.0]]
    assert any(note.endswith(f"each layer, of {path}") for note in found["notes"])


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ({"ranks": {"0": LAYERS}}, {"kv_cache_dtype": "auto"}, "is for --kv-cache-dtype fp8"),
        ({"ranks": {"0": LAYERS}}, {"tp": 2}, "scales of 1 ranks, and --tp is 2"),
        ({"ranks": {"0": LAYERS}}, {"cp": 2}, "--cp cannot be honoured"),
        ({"ranks": {"1": LAYERS}}, {}, "scales of 1 ranks, and --tp is 1"),
        ({"ranks": {"0": {"0": 1}}}, {}, "scales of 1 layers, and the model has 3"),
        ({"ranks": {"0": LAYERS | {"1": 0}}}, {}, "finite and above 0"),
        ({"ranks": {"0": LAYERS | {"1": "x"}}}, {}, "Expected `float`, got `str`"),
        ({"ranks": {"0": LAYERS}, "dtype": "float8_e5m2"}, {}, "scales are for float8_e5m2"),
        ({"ranks": {"0": LAYERS}, "kind": "qwen3"}, {}, "for models of type qwen3"),
        ({"ranks": []}, {}, "Expected `object`, got `array`"),
        (None, {}, "json: No such file or directory; give"),
    ],
)
def test_what_is_not_for_this_model_is_refused(
    content: dict[str, Any] | None, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "scales.json"
    if content is not None:
        written(path, **content)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(config_of(str(path), **settings), H200, MODEL)
    assert "\n" not in str(caught.value)
