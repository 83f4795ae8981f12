"""GGUF: what a converter writes, read back; block formats against the ``gguf`` package; real models against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Eager, check_against_hf, random_prompts, save_checkpoint
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from sgla.errors import ConfigError, WeightError
from sgla.hub import demo
from sgla.hub.gguf import LazyTensor, read_gguf
from sgla.hub.source import open_source
from sgla.model.load import load_model
from sgla.model.spec import ModelSpec

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
TOKENS = [f"<token {i} é>" for i in range(311)]


def convert(hf: Any, path: Path, rope_factors: list[float] | None = None, **metadata: float | str) -> Path:
    """Write an HF model as llama.cpp's converter does: its names, interleaved q and k for Llama, 1 + w norms for Gemma."""
    c, arch = hf.config, ARCHITECTURES[hf.config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base((c.rope_parameters.get("full_attention") or c.rope_parameters)["rope_theta"])
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{writer.arch}.{key.replace('__', '.')}", value)
    if getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*TOKENS[:-1], "<|im_end|>"])
    writer.add_token_types([1] * len(TOKENS))
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for projection, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if c.model_type == "llama" and projection in name:
                values = values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if c.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values)
        )
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 10, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_gguf_equals_safetensors(model_type: str, tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, model_type, **LAYOUTS[model_type])
    path = convert(hf, tmp_path / "model.gguf")
    prompts = random_prompts([5, 30])
    expected = Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts)
    actual = Eager(load_model(open_source(path))).prompt_logprobs(prompts)
    assert (actual - expected).abs().max() < 1e-4


def test_rope_tables_and_scaling_come_along(tmp_path: Path) -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    hf = save_checkpoint(tmp_path, "llama")
    table = ModelSpec.from_config(read_gguf(convert(hf, tmp_path / "a.gguf", factors)).config).rope
    assert (table.kind, table.scaling["factors"]) == ("factors", factors)
    path = convert(hf, tmp_path / "b.gguf", rope__scaling__type="linear", rope__scaling__factor=4.0)
    linear = ModelSpec.from_config(read_gguf(path).config).rope
    assert (linear.kind, linear.scaling["factor"]) == ("linear", 4.0)


def test_vocabulary_and_ends_of_turn(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    source = open_source(convert(hf, tmp_path / "model.gguf"))
    raw = source.gguf().tokenizer_raw
    assert raw["tokens"][:-1] == TOKENS[:-1]
    assert (raw["model"], raw["eos_token_id"], raw["merges"]) == ("gpt2", 2, None)
    assert source.eos_token_ids == [2, 310]


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
)
def test_blocks_decode_as_the_package_decodes_them(kind: Type) -> None:
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    check_blocks(quantize(values, kind).view(np.uint8), kind)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_super_blocks_decode_as_the_package_decodes_them(kind: Type) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(
        0, 60, (6, 2 * size), dtype=np.uint8
    )  # bytes < 60: finite constants
    check_blocks(blocks, kind)


def check_blocks(blocks: np.ndarray, kind: Type) -> None:
    expected = dequantize(blocks, kind)
    tensor = LazyTensor("w", kind.name, expected.shape, blocks)
    np.testing.assert_array_equal(tensor.numpy(), expected)
    np.testing.assert_array_equal(tensor.numpy(range(2, 5)), expected[2:5])


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_int4_holds_four_bit_blocks_without_loss(kind: Type) -> None:
    from sgla.model.load import _Packed

    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    blocks = quantize(values, kind)
    source = _Packed(LazyTensor("w", kind.name, (6, 96), blocks))
    assert torch.equal(
        source.weight("int4", range(1, 6)).dequant(), torch.from_numpy(dequantize(blocks, kind)[1:])
    )


def test_bad_files_are_refused(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    path = convert(hf, tmp_path / "model.gguf")
    content = path.read_bytes()
    for name, broken in {"empty": b"", "other": b"PK" + content, "header": content[:3000]}.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(broken)
        with pytest.raises(ConfigError, match="not a complete GGUF file"):
            open_source(bad)
    path.write_bytes(content[:-5000])
    with pytest.raises(WeightError, match="is the download complete"):
        load_model(open_source(path))
    path.write_bytes(content.replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match="'mamba' is not supported"):
        open_source(path)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "gemma3-270m"])
def test_real_models_equal_transformers(name: str) -> None:
    """Weights and configuration as transformers reads them, on prompts that pass Gemma's window of 512."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = demo.cached(name)
    if path is None:
        pytest.skip(f"{demo.MODELS[name].file} is not in the cache ('sgla serve --model {name}' fetches it)")
    source = open_source(path, "gguf")
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32).eval()
    truth = load_gguf_checkpoint(path, return_tensors=True, model_to_load=hf)
    differing = {k for k, v in truth["config"].items() if k in source.config and source.config[k] != v}
    assert differing <= {"eos_token_id", "rope_scaling"}
    tensors = truth["tensors"]
    state = {key: torch.as_tensor(value) for key, value in tensors.items()}
    absent = hf.load_state_dict(state, strict=False)
    assert (absent.missing_keys, absent.unexpected_keys) == (["lm_head.weight"], [])
    hf.tie_weights()
    model = load_model(source, context_len=1024)
    prompts = random_prompts([1, 5, 17, 40, 64, 100, 200, 600], vocab=40000)
    check_against_hf(Eager(model, page_size=16, native=True).generate(prompts, 64), 64, hf)
