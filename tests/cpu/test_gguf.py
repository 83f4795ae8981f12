"""GGUF: what a converter writes, read back; block formats against the ``gguf`` package; real models against
transformers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Eager, check_against_hf, random_prompts, save_checkpoint
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from gguf.quants import dequantize, quantize

from sgla.config import Config
from sgla.defaults import find_defaults
from sgla.errors import ConfigError, WeightError
from sgla.hub import packaged
from sgla.hub.gguf import read_gguf
from sgla.hub.gguf_blocks import LazyTensor
from sgla.hub.gguf_header import decodable
from sgla.loading import load
from sgla.loading.checkpoint import stored_tensors
from sgla.loading.gguf_tensors import Blocks
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.quant.formats import FORMATS
from sgla.quant.gguf import kept_on
from sgla.resolve import resolve

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
TOKENS = [f"<token {i} é>" for i in range(311)]


def convert(
    hf: Any,
    path: Path,
    rope_factors: list[float] | None = None,
    quantized: Type | None = None,
    **metadata: Any,
) -> Path:
    """Write an HF model as llama.cpp's converter does: its names, interleaved q and k for Llama, 1 + w norms
    for Gemma.

    ``metadata``: more keys of the architecture, with ``__`` for dots; ``None`` leaves a key out.
    ``quantized``: the type of matrices.
    """
    c, arch = hf.config, ARCHITECTURES[hf.config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters.get("full_attention") or c.rope_parameters
    keys = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.sliding_window": getattr(c, "sliding_window", None),
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in keys.items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            item = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(
                key if key.startswith("general.") else f"{writer.arch}.{key}", value, kind, item
            )
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
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantized is not None and values.ndim > 1:
            writer.add_tensor(name, blocks_like(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_like(values: np.ndarray, kind: Type) -> np.ndarray:
    """Blocks of a matrix of the shape of ``values``: quantized ones, or random bytes where the package cannot
    quantize. Bytes below 60 make finite constants."""
    try:
        return quantize(values, kind).view(np.uint8)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(values.size)
        return generator.integers(0, 60, (len(values), values.shape[1] // block * size), dtype=np.uint8)


LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": 10,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_gguf_equals_safetensors(model_type: str, tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, model_type, **LAYOUTS[model_type])
    path = convert(hf, tmp_path / "model.gguf")
    prompts = random_prompts([5, 30])
    expected = Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts)
    model = load_model(open_source(path))
    actual = Eager(model).prompt_logprobs(prompts)
    assert (actual - expected).abs().max() < 1e-4
    assert model.declared is not None
    for name, tensor in stored_tensors(open_source(tmp_path)):  # which it tells by their names there
        told = model.declared.show(name, range(min(9, tensor.shape[0])))
        torch.testing.assert_close(told, tensor.values(range(len(told))).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ],
)
def test_biases_come_along(model_type: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Llama's q and k are interleaved with their biases."""
    hf = save_checkpoint(tmp_path, model_type, **layout)
    path = convert(hf, tmp_path / "model.gguf")
    prompts = random_prompts([5, 30])
    expected = Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts)
    assert (Eager(load_model(open_source(path))).prompt_logprobs(prompts) - expected).abs().max() < 1e-4


TYPES = [kind for kind in Type if kind.name not in ("F32", "F16", "BF16")]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_gives_the_logits_of_its_decoded_weights(kind: Type, tmp_path: Path) -> None:
    """Equal to HF with the weights that the package decodes; a type that it does not decode is refused by
    name."""
    hf = save_checkpoint(
        tmp_path,
        "qwen2",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    path = convert(hf, tmp_path / "model.gguf", quantized=kind)
    if int(kind) not in decodable():
        with pytest.raises(WeightError, match=f"token_embd.weight has type {kind.name},"):
            open_source(path)
        return
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.from_numpy(dequantize(blocks_like(parameter.numpy(), kind), kind)))
        (prompt,) = random_prompts([20])
        expected = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
    actual = Eager(load_model(open_source(path))).prompt_logprobs([prompt])
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_rope_tables_and_scaling_come_along(tmp_path: Path) -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    hf = save_checkpoint(tmp_path, "llama")
    table = read_decoder(open_source(convert(hf, tmp_path / "a.gguf", factors)).config).attention[0].rope
    assert (table.kind, table.scaling["factors"]) == ("factors", factors)
    path = convert(hf, tmp_path / "b.gguf", rope__scaling__type="linear", rope__scaling__factor=4.0)
    linear = read_decoder(open_source(path).config).attention[0].rope
    assert (linear.kind, linear.scaling["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("qwen2", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("qwen2", {"rope.scaling.factor": 4.0}),
        ("qwen2", {"rope.scale_linear": 4.0}),
        (
            "qwen2",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
        ),
        (
            "llama",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.attn_factor": 0.8,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
        ("gemma3_text", {"attention.scale": 0.125}),
        ("gemma3_text", {"attention.sliding_window": None}),
        ("gemma3_text", {"attention.sliding_window_pattern": 2}),
        ("gemma3_text", {"final_logit_softcapping": 3.0}),
        ("gemma3_text", {"rope.freq_base_swa": 500.0}),
    ],
)
def test_honoured_keys_give_what_hf_gives(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """HF with the configuration in its own words; the numbers differ without the key."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = save_checkpoint(tmp_path, model_type, **LAYOUTS[model_type])
    config = hf.config.to_dict()
    theta = 10000.0 if model_type != "gemma3_text" else 1e6
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if keys.get("rope.scaling.type") == "yarn":
        names = {
            "rope.scaling.original_context_length": "original_max_position_embeddings",
            "rope.scaling.yarn_beta_fast": "beta_fast",
            "rope.scaling.yarn_beta_slow": "beta_slow",
        }
        rope |= {"rope_type": "yarn", "factor": factor} | {
            names[key]: keys[key] for key in keys if key in names
        }
        if attention := keys.get("rope.scaling.attn_factor"):
            rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    elif factor:
        rope |= {"rope_type": "linear", "factor": factor}
    if model_type == "gemma3_text":
        pattern = keys.get("attention.sliding_window_pattern", 6)
        local = "attention.sliding_window" not in keys
        config["layer_types"] = [
            "sliding_attention" if local and (i + 1) % pattern else "full_attention"
            for i in range(config["num_hidden_layers"])
        ]
        sliding = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10000.0)}
        rope = {"full_attention": rope, "sliding_attention": sliding}
        config["query_pre_attn_scalar"] = round(keys.get("attention.scale", 0.25) ** -2)
        config["final_logit_softcapping"] = keys.get("final_logit_softcapping")
    config["rope_parameters"] = rope
    changed = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    changed.load_state_dict(hf.state_dict())
    (prompt,) = random_prompts([200])
    with torch.no_grad():
        expected = changed(torch.tensor([prompt])).logits[0].log_softmax(-1)
        plain = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
    path = convert(hf, tmp_path / "model.gguf", **keys)
    actual = Eager(load_model(open_source(path))).prompt_logprobs([prompt])
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen2", "rope.dimension_count", 4),
        ("llama", "attention.value_length", 16),
        ("llama", "attention.scale", 0.5),
        ("qwen2", "attention.causal", False),
        ("llama", "attention.sliding_window", 128),
        ("llama", "attention.clamp_kqv", 8.0),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "logit_scale", 0.25),
        ("llama", "residual_scale", 0.22),
        ("llama", "embedding_scale", 12.0),
        ("qwen2", "expert_count", 8),
        ("qwen3", "expert_weights_scale", 2.5),
        ("qwen3", "expert_gating_func", 2),
        ("qwen3", "pooling_type", 5),
        ("gemma3_text", "pooling_type", 1),
        ("llama", "use_parallel_residual", True),
        ("llama", "tensor_data_layout", "reference"),
        ("llama", "attention.head_count_kv", [2, 2, 3]),
        ("llama", "feed_forward_length", [96, 96]),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.attn_factor", 1.2),
        ("llama", "rope.scaling.yarn_attn_factor", 1.0),
        ("llama", "rope.scaling.yarn_ext_factor", 0.0),
        ("llama", "rope.scaling.factor", float("nan")),
        ("llama", "attention.layer_norm_rms_epsilon", None),
        ("llama", "context_length", "512"),
        ("llama", "block_count", True),
        ("llama", "rope.freq_base", 0.0),
        ("llama", "something.new", 1),
        ("llama", "general.type", "adapter"),
        ("llama", "general.quantization_version", 1),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused_by_name(
    model_type: str, key: str, value: Any, tmp_path: Path
) -> None:
    hf = save_checkpoint(tmp_path, model_type, **LAYOUTS[model_type])
    path = convert(hf, tmp_path / "model.gguf", **{key: value})
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        open_source(path)
    assert str(path) in caught.value.message


def split(path: Path, count: int, **changes: Any) -> list[Path]:
    """The file at ``path`` in so many parts, as llama-gguf-split writes them; ``changes``: keys of the
    last."""
    whole = gguf.GGUFReader(path)
    made = []
    for part in range(count):
        made.append(path.with_name(f"part-{part + 1:05d}-of-{count:05d}.gguf"))
        writer = gguf.GGUFWriter(made[-1], "llama")
        writer.kv_data[0].clear()
        for name, given in whole.fields.items() if part == 0 else ():
            if not name.startswith("GGUF."):
                kind, inner = given.types[0], given.types[1] if len(given.types) > 1 else None
                writer.add_key_value(name, given.contents(), kind, inner)
        keys = {"split.no": part, "split.count": count, "split.tensors.count": len(whole.tensors)}
        for name, value in (keys | (changes if part == count - 1 else {})).items():
            writer.add_uint32(name, value)
        for tensor in whole.tensors[part::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer, made[-1])
    return made


def test_parts_equal_the_whole(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama", **LAYOUTS["llama"])
    path, prompts = convert(hf, tmp_path / "model.gguf"), random_prompts([20])
    expected = Eager(load_model(open_source(path))).prompt_logprobs(prompts)
    parts = split(path, 3)
    found = open_source(parts[0])
    assert found.config == open_source(path).config
    assert torch.equal(Eager(load_model(found)).prompt_logprobs(prompts), expected)
    with pytest.raises(ConfigError, match=r"a later part of a file; name the first one, part-00001-of-00003"):
        open_source(parts[1])
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"lacks its parts part-00002-of-00003.gguf$"):
        open_source(parts[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split.no": 0}, "does not say that it is part 2 of 2"),
        ({"split.count": 3}, "does not say that it is part 2 of 2"),
        ({"llama.block_count": 9}, "has another 'llama.block_count' than the first part"),
    ],
)
def test_parts_of_different_files_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama", **LAYOUTS["llama"])
    parts = split(convert(hf, tmp_path / "model.gguf"), 2, **changes)
    with pytest.raises(ConfigError, match=words):
        open_source(parts[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama", **LAYOUTS["llama"])
    parts = split(convert(hf, tmp_path / "model.gguf"), 2)
    first, second = (gguf.GGUFReader(part) for part in parts)
    writer = gguf.GGUFWriter(tmp_path / "copy.gguf", "llama")
    writer.kv_data[0].clear()
    writer.add_uint32("split.no", 1)
    writer.add_uint32("split.count", 2)
    for tensor in (*second.tensors, first.tensors[0]):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer, tmp_path / "copy.gguf").replace(parts[1])
    with pytest.raises(ConfigError, match="in two of its parts|tensors together"):
        open_source(parts[0])


@pytest.mark.parametrize("key", ["split.count", "adapter.type"])
def test_parts_and_adapters_are_refused_by_name(key: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32(key, 3)
    with pytest.raises(ConfigError, match=re.escape(key)):
        open_source(finish(writer, tmp_path / "model.gguf"))


def test_recommended_sampling_and_named_templates_come_along(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    advice = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 1}
    source = open_source(convert(hf, tmp_path / "a.gguf", **advice))
    assert source.generation_config["temperature"] == pytest.approx(0.6)
    assert source.generation_config["top_k"] == 20
    (note,) = find_defaults(Config(model="a.gguf"), source).notes
    assert note == "general.sampling: mirostat 1 is not supported and left aside"
    with pytest.raises(ConfigError, match="general.sampling.temp is 'hot'"):
        open_source(convert(hf, tmp_path / "b.gguf", **{"general.sampling.temp": "hot"}))
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    writer.add_chat_template([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    raw = read_gguf(finish(writer, tmp_path / "c.gguf")).tokenizer_raw
    assert raw["chat_template"] == {"default": "D", "tool_use": "T"}


def test_keys_that_change_nothing_are_no_obstacle(tmp_path: Path) -> None:
    """Lists that repeat one number, features that are off, and what other tools write for themselves."""
    hf = save_checkpoint(tmp_path, "llama")
    plain = open_source(convert(hf, tmp_path / "a.gguf")).config
    gemma = save_checkpoint(tmp_path, "gemma3_text", **LAYOUTS["gemma3_text"])
    open_source(convert(gemma, tmp_path / "c.gguf", mm__tokens_per_image=256, vision__block_count=27))
    off = {
        "expert_count": 0,
        "attention.causal": True,
        "rope.scaling.type": "none",
        "rope.dimension_count": 8,
    }
    listed = {"attention.head_count": [6, 6, 6], "feed_forward_length": [96] * 3, "vocab_size": 311}
    more = {
        "tensor_data_layout": "Meta AI original pth",
        "rope.scaling.finetuned": True,
        "general.author": "me",
    }
    scale = {"attention.scale": 8**-0.5, "attention.value_length": 8}
    assert open_source(convert(hf, tmp_path / "b.gguf", **off, **listed, **more, **scale)).config == plain


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            b"blk.1.ffn_up.weight",
            b"blk.1.ffn_xx.weight",
            "missing: blk.1.ffn_up.weight; 1 unexpected: blk.1.ffn_xx.weight",
        ),
        (
            b"blk.2.ffn_up.weight",
            b"blk.7.ffn_up.weight",
            "block_count is 3, and there are tensors of 4 layers",
        ),
        (b"output_norm.weight", b"rope_freqs_.weight", "missing: output_norm.weight"),
        (b"token_embd.weight", b"token_embe.weight", "token_embd.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(old: bytes, new: bytes, said: str, tmp_path: Path) -> None:
    path = convert(save_checkpoint(tmp_path, "llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(WeightError, match=re.escape(said)):
        open_source(path)


def test_sizes_that_the_tensors_have_not_are_refused(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    said = {
        "block_count": "tensors of 3 layers",
        "feed_forward_length": "blk.0.ffn_gate.weight has shape",
        "embedding_length": "token_embd.weight has shape",
        "attention.head_count": "blk.0.attn_q.weight has shape",
    }
    for key, words in said.items():
        file = convert(hf, tmp_path / "model.gguf", **{key: 1024 if key == "block_count" else 2**31 - 1})
        with pytest.raises(WeightError, match=re.escape(words)):
            open_source(file)


def test_vocabulary_and_ends_of_turn(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    source = open_source(convert(hf, tmp_path / "model.gguf"))
    raw = source.gguf().tokenizer_raw
    assert raw["tokens"][:-1] == TOKENS[:-1]
    assert (raw["model"], raw["eos_token_id"], raw["merges"]) == ("gpt2", 2, None)
    assert source.eos_token_ids == [2, 310]


REFUSED = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}


@pytest.mark.parametrize("kind", list(Type), ids=lambda kind: kind.name)
def test_blocks_decode_as_the_package_decodes_them(kind: Type) -> None:
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    assert (int(kind) in decodable()) == (kind.name not in REFUSED)
    if kind.name not in REFUSED:
        check_blocks(blocks_like(values, kind), kind)


def check_blocks(blocks: np.ndarray, kind: Type) -> None:
    expected = dequantize(blocks, kind)
    tensor = LazyTensor("w", kind.name, expected.shape, blocks)
    np.testing.assert_array_equal(tensor.numpy(), expected)
    np.testing.assert_array_equal(tensor.numpy(range(2, 5)), expected[2:5])


SIMPLE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]


SAME = [
    ("q4_0", Type.Q4_0),
    ("q5_0", Type.Q4_0),
    ("q5_0", Type.Q5_0),
    ("q5_0", Type.MXFP4),
    ("e2m1", Type.MXFP4),
    ("int5", Type.Q5_1),
    ("int5", Type.MXFP4),
    ("q8_0", Type.Q5_0),
    ("q8_0", Type.Q8_0),
    ("q8_0", Type.IQ4_NL),
    ("iq4_nl", Type.IQ4_NL),
]


@pytest.mark.parametrize(
    ("ours", "kind"), [("int4", kind) for kind in SIMPLE[:2]] + [("int8", kind) for kind in SIMPLE] + SAME
)
def test_quants_of_simple_blocks_are_kept_without_loss(ours: Any, kind: Type) -> None:
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    blocks = blocks_like(values, kind)
    source = Blocks(LazyTensor("w", kind.name, (6, 96), blocks))
    assert torch.equal(
        source.weight(ours, range(1, 6)).dequant(), torch.from_numpy(dequantize(blocks, kind)[1:])
    )


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        ("int4", Type.Q4_K),
        ("int8", Type.Q4_K),
        ("int5", Type.Q5_K),
        ("int8", Type.Q5_K),
        ("iq4_nl", Type.IQ4_XS),
    ],
)
def test_quants_of_nested_blocks_are_kept(ours: Any, kind: Type) -> None:
    """Of their values no more is lost than the last of float16's bits in the constants."""
    blocks = blocks_like(np.zeros((6, 512), np.float32), kind)
    want = torch.from_numpy(dequantize(blocks, kind)[1:])
    weight = Blocks(LazyTensor("w", kind.name, (6, 512), blocks)).weight(ours, range(1, 6))
    _, scale, *minimum = weight.tensors
    largest = 128 * scale.abs() if ours == "iq4_nl" else 32 * scale + minimum[0].abs()
    assert bool(((weight.dequant() - want).abs() <= largest.float().repeat_interleave(32, 1) * 2**-11).all())


@pytest.mark.parametrize(
    ("kind", "linear", "table"),
    [
        (Type.Q4_0, "q4_0", "q4_0"),
        (Type.Q4_1, "int4", "int4"),
        (Type.Q5_0, "q5_0", "q5_0"),
        (Type.Q5_1, "int5", "int5"),
        (Type.IQ4_NL, "iq4_nl", "iq4_nl"),
        (Type.Q8_0, "q8_0", "q8_0"),
        (Type.NVFP4, "nvfp4", "nvfp4"),
        (Type.F16, "bf16", "bf16"),
    ],
)
def test_a_file_is_run_as_it_is(kind: Type, linear: str, table: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 6}
    hf = save_checkpoint(tmp_path, "llama", **sizes)
    source = open_source(convert(hf, tmp_path / "model.gguf", quantized=kind))
    resolved = resolve(Config(device="cpu"), model=source.config).config
    assert resolved.quantization == (None if kind == Type.F16 else "gguf")
    model = load_model(source, "bfloat16", resolved.quantization)
    found = (model.blocks[0].attention.qkv.weight.kind, model.embed.weight.kind)
    assert found == (linear, table)
    rows, native = (Eager(model, native=each).generate(random_prompts([5]), 3) for each in (False, True))
    assert [row.tokens for row in native] == [row.tokens for row in rows]
    given = resolve(Config(device="cpu", quantization="none"), model=source.config).config
    assert given.quantization is None


# What GPUs lose of a file's values, in the largest number of a group of 32.
ON_GPUS = {Type.Q4_0: 0.0, Type.Q5_0: 0.0, Type.Q8_0: 0.0, Type.IQ4_NL: 0.0, Type.MXFP4: 0.0}
ON_GPUS |= dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.IQ4_XS), 2**-10)
ON_GPUS |= dict.fromkeys((Type.Q6_K, Type.Q3_K, Type.TQ1_0), 2**-7)


@pytest.mark.parametrize("kind", ON_GPUS, ids=lambda kind: kind.name)
def test_gpus_keep_blocks_packed(kind: Type) -> None:
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    values[2, :32] = -0.75  # a group of one number
    values[3, 32:64] = 0.0
    blocks = blocks_like(values, kind)
    want = torch.from_numpy(dequantize(blocks, kind)[1:])
    tensor = LazyTensor("w", kind.name, (6, 512), blocks)
    kept = kept_on(tensor.kept or "", "cuda")
    assert FORMATS[kept].bytes < 0.63 or kind.name[:2] not in ("Q4",)
    weight = Blocks(tensor).weight(kept, range(1, 6))
    largest = want.view(5, -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert bool(((weight.dequant() - want).abs() <= largest * ON_GPUS[kind]).all())


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_1])
def test_a_gpu_runs_a_file_as_it_is(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save_checkpoint(tmp_path, "llama", hidden_size=96, head_dim=32, num_attention_heads=6)
    source = open_source(convert(hf, tmp_path / "model.gguf", quantized=kind))
    spec = read_decoder(source.config)
    assert spec.quantized(None, "cuda") == "gguf"
    expanded = load_model(source, "float32", None)
    monkeypatch.setattr(load, "_device_kind", lambda: "cuda")
    model = load_model(source, "float32", "gguf")
    found = {layer.weight.kind for block in model.blocks for layer in (block.attention.qkv, block.mlp.down)}
    assert found == {kept_on({"Q4_0": "q4_0", "Q4_1": "int4", "Q5_1": "int5"}[kind.name], "cuda")}
    assert model.embed.weight.kind == "f32"
    assert weight_bytes(spec, "float32", "gguf", 1, "cuda") < weight_bytes(spec, "float32", None, 1, "cuda")
    prompts = random_prompts((5, 12), spec.vocab)
    ours, whole = (Eager(each).prompt_logprobs(prompts) for each in (model, expanded))
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-5 if kind == Type.Q4_0 else 0.05)


def test_matrices_in_one_have_the_smallest_format_that_holds_all(tmp_path: Path) -> None:
    from sgla.quant.formats import HOLDS

    held = [
        next(kind for kind, has in HOLDS.items() if found <= has)
        for found in (
            {"q5_0", "q8_0"},
            {"q4_0", "q5_0"},
            {"int4", "q4_0"},
            {"int4", "q5_0"},
            {"iq4_nl", "q5_0"},
            {"int4", "q8_0"},
            {"int4", "int8"},
            {"int4m32", "int4g32"},
            {"int4m32", "int8g32"},
        )
    ]
    assert held == ["q8_0", "q5_0", "int4", "int5", "q8_0", "int8", "int8", "int4m32", "int8m32"]


def test_gguf_weights_are_for_such_files_alone(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    plain = open_source(convert(hf, tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match="--quantization gguf is for a quantized GGUF file on a CPU"):
        resolve(Config(device="cpu", quantization="gguf"), model=plain.config)
    with pytest.raises(ConfigError, match="--quantization gguf is for checkpoints that are stored so"):
        load_model(open_source(tmp_path), "bfloat16", "gguf")


@pytest.mark.parametrize(("kind", "wide"), [(Type.Q4_1, False), (Type.Q5_0, True)])
def test_int4_is_wide_only_where_the_file_is(kind: Type, wide: bool, tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama", hidden_size=96, head_dim=32, num_attention_heads=6)
    model = load_model(open_source(convert(hf, tmp_path / "model.gguf", quantized=kind)), quantization="int4")
    assert model.blocks[0].attention.qkv.weight.kind == ("int8" if wide else "int4")


def test_bad_files_are_refused(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path, "llama")
    path = convert(hf, tmp_path / "model.gguf")
    content = path.read_bytes()
    for name, broken in {"empty": b"", "other": b"PK" + content, "header": content[:3000]}.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(broken)
        with pytest.raises(ConfigError, match="not a valid GGUF file"):
            open_source(bad)
    path.write_bytes(content[:-5000])
    with pytest.raises(WeightError, match="is the download complete"):
        load_model(open_source(path))
    path.write_bytes(content.replace(b"llama", b"rwkv6"))
    with pytest.raises(ConfigError, match="'rwkv6' is not supported"):
        open_source(path)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "gemma3-270m"])
def test_real_models_equal_transformers(name: str) -> None:
    """Weights and configuration as transformers reads them, on prompts that pass Gemma's window of 512."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = packaged.cached(name)
    if path is None:
        pytest.skip(
            f"{packaged.MODELS[name].file} is not in the cache ('sgla serve --model {name}' fetches it)"
        )
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
