"""GGUF files that answer with vectors: tiny random checkpoints, converted as llama.cpp's
``convert_hf_to_gguf.py`` does, against HF transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Eager, random_prompts
from gguf import MODEL_ARCH as Arch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from test_pooling import BERT, BOTH_WAYS, DECODER, EURO, LENGTHS, ROBERTA, ROTARY, answers, hidden, save_model
from test_pooling import MODERN as MODERN_BERT

from sgla.config import Config
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.model.pooling import read_pooling
from sgla.model.read import read_spec
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import Machine
from sgla.resolve import resolve

KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "norm_eps": "attention.layer_norm_epsilon",
    "local_attention": "attention.sliding_window",
}
MEAN, CLS, LAST, RANK = 1, 2, 3, 4
GEMMA = {key: value for key, value in BOTH_WAYS.items() if key != "sliding_window_pattern"} | {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
}
MODERN = MODERN_BERT | {"num_hidden_layers": 5, "local_attention": 12, "global_attn_every_n_layers": 3}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32
# Architecture of the file, HF's kind, its sizes, how the file pools, and that in words.
MODELS: dict[str, tuple[Arch, str, dict[str, Any], int, str]] = {
    "bert": (Arch.BERT, "bert", BERT, MEAN, "mean"),
    "bert, the first token": (Arch.BERT, "bert", BERT, CLS, "cls"),
    "xlm-roberta": (Arch.BERT, "xlm-roberta", ROBERTA, CLS, "cls"),
    "nomic": (Arch.NOMIC_BERT, "nomic_bert", ROTARY, MEAN, "mean"),
    "modernbert": (Arch.MODERN_BERT, "modernbert", MODERN, CLS, "cls"),
    "eurobert": (Arch.EUROBERT, "eurobert", EURO | {"num_key_value_heads": 2}, LAST, "last"),
    "embeddinggemma": (Arch.GEMMA_EMBEDDING, "gemma3_text", GEMMA, MEAN, "mean"),
    "qwen3": (Arch.QWEN3, "qwen3", DECODER | {"tie_word_embeddings": True}, LAST, "last"),
}
POOLS = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}


def write(
    folder: Path,
    hf: Any,
    name: str,
    quantized: Type | None = None,
    drop: str = "-",
    keys: Mapping[str, Any] = {},
    more: Mapping[str, torch.Tensor] = {},
) -> Path:
    """``quantized``: the type of matrices of layers; ``drop``: a tensor that is left out; ``keys``: of the
    metadata, others than in files, None for none; ``more``: tensors, by their names in the file."""
    arch, model_type, _, pooling, _ = MODELS[name]
    config = hf.config.to_dict()
    classes = "SequenceClassification" in hf.config.architectures[0]
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    found = {theirs: config[ours] for ours, theirs in KEYS.items() if config.get(ours) is not None}
    found |= {"pooling_type": RANK if classes else pooling}
    if arch in (Arch.BERT, Arch.NOMIC_BERT, Arch.EUROBERT):
        found["attention.causal"] = False
    if arch in (Arch.BERT, Arch.NOMIC_BERT):
        writer.add_token_type_count(config["type_vocab_size"])
    if arch == Arch.MODERN_BERT:
        found["attention.sliding_window_pattern"] = 3
        found["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if rope := config.get("rope_parameters"):
        found["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    offset = config["pad_token_id"] + 1 if model_type == "xlm-roberta" else 0
    found["context_length"] -= offset
    for key, value in (found | dict(keys)).items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            item = GGUFValueType.STRING if isinstance(value, list) else None
            writer.add_key_value(f"{writer.arch}.{key}", value, kind, item)
    writer.add_tokenizer_model("bert")
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        hf_name = hf_name.removeprefix("bert.").removeprefix("roberta.")
        if hf_name.startswith("pooler."):
            continue
        theirs = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert theirs, hf_name
        values = tensor.numpy()[offset if theirs == "position_embd.weight" else 0 :]
        if arch == Arch.GEMMA_EMBEDDING and hf_name.endswith("norm.weight"):
            values = values + 1
        if theirs.startswith(drop):
            continue
        if quantized is not None and theirs.startswith("blk.") and values.ndim == 2:
            writer.add_tensor(theirs, quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values))
    for theirs, tensor in more.items():
        writer.add_tensor(theirs, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_transformers(name: str, tmp_path: Path) -> None:
    """Pooled as the file says, whatever lies beside it."""
    _, model_type, sizes, _, kind = MODELS[name]
    hf = save_model(tmp_path, model_type, "AutoModel", **sizes)
    (tmp_path / "modules.json").write_text("[1]")
    path = write(tmp_path, hf, name)
    pooling = read_pooling(open_source(path))
    assert pooling is not None
    assert (pooling.kind, pooling.normalize, pooling.encoder) == (kind, True, name != "qwen3")
    prompts = [[3 + token % 300 for token in prompt] for prompt in random_prompts(LENGTHS)]  # none is padding
    for native in (False, True):
        found = answers(path, prompts, native_kernels=native)
        for prompt, vector in zip(prompts, found):
            np.testing.assert_allclose(vector, POOLS[kind](hidden(hf, prompt)).numpy(), atol=1e-4)


def test_layers_behind_the_pooling_are_in_the_file(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "gemma3_text", "AutoModel", **GEMMA)
    first, second = torch.randn(20, 48) / 48, torch.randn(12, 20) / 20
    sizes = {"dense_2_feat_in": 48, "dense_2_feat_out": 20, "dense_3_feat_in": 20, "dense_3_feat_out": 12}
    tensors = {"dense_2.weight": first, "dense_3.weight": second}
    path = write(tmp_path, hf, "embeddinggemma", keys=sizes, more=tensors)
    pooling = read_pooling(open_source(path))
    assert pooling is not None
    assert pooling.size == 12
    prompts = random_prompts([3, 29])
    for prompt, vector in zip(prompts, answers(path, prompts)):
        expected = second @ (first @ hidden(hf, prompt).mean(0))
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert not open_source(path).notes
    (note,) = open_source(write(tmp_path, hf, "embeddinggemma")).notes
    assert "lacks the layers behind the pooling" in note
    tensors["dense_3.weight"] = torch.randn(12, 21)
    with pytest.raises(WeightError, match=r"dense_3.weight has shape \[12, 21\], expected \[12, 20\]"):
        open_source(write(tmp_path, hf, "embeddinggemma", more=tensors))
    del tensors["dense_3.weight"]
    with pytest.raises(WeightError, match="1 missing: dense_3.weight"):
        open_source(write(tmp_path, hf, "embeddinggemma", more=tensors))


@pytest.mark.parametrize("names", [None, ["bad"], ["bad", "good", "best"]])
@torch.no_grad()
def test_scores_equal_transformers(names: list[str] | None, tmp_path: Path) -> None:
    """Of rerankers, and of others with names for their classes."""
    count = len(names or "1")
    auto, sizes = "AutoModelForSequenceClassification", ROBERTA | {"num_labels": count}
    hf = save_model(tmp_path, "xlm-roberta", auto, **sizes)
    path = write(tmp_path, hf, "xlm-roberta", keys={"classifier.output_labels": names})
    pooling = read_pooling(open_source(path))
    assert pooling is not None
    assert (pooling.task, pooling.size) == ("classify", count)
    assert pooling.labels == (names or ["LABEL_0"])
    assert pooling.activation == ("sigmoid" if count == 1 else "softmax")
    prompts = [[3 + token % 300 for token in prompt] for prompt in random_prompts(LENGTHS)]
    for prompt, vector in zip(prompts, answers(path, prompts)):
        np.testing.assert_allclose(vector, hf(torch.tensor([prompt])).logits[0].numpy(), atol=1e-4)
    with pytest.raises(ConfigError, match="has 2 names, and there are"):
        open_source(write(tmp_path, hf, "xlm-roberta", keys={"classifier.output_labels": ["a", "b"]}))
    with pytest.raises(WeightError, match="1 missing: cls.weight"):
        open_source(write(tmp_path, hf, "xlm-roberta", drop="cls.weight"))


@pytest.mark.parametrize("quantization", [None, "gguf"])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_matrices_are_kept_as_the_file_is_or_become_floats(
    kind: Type, quantization: str | None, tmp_path: Path
) -> None:
    """On a CPU they are kept, where nothing else is asked for."""
    hf = save_model(tmp_path, "nomic_bert", "AutoModel", **ROTARY | WIDE)
    path = write(tmp_path, hf, "nomic", kind)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.dim() == 2 and "embeddings" not in name:
                values = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
    prompts, source = random_prompts([5, 17]), open_source(path)
    packed, asked = kind != Type.F16, quantization if kind != Type.F16 else None
    for prompt, vector in zip(prompts, answers(path, prompts, quantization=asked)):
        expected = hidden(hf, prompt).mean(0).numpy()
        np.testing.assert_allclose(vector, expected, atol=5e-3 if asked else 1e-4)
    spec = read_spec(source.config)
    whole, kept = (weight_bytes(spec, "float32", how, 1) for how in (None, asked))
    assert kept < 0.8 * whole if asked else kept == whole
    for machine, settled in (
        (Machine(memory_available=1 << 30), None),
        (Machine(compiler="c++"), "gguf"),
    ):
        found = resolve(Config(device="cpu"), machine, source.config).config.quantization
        assert found == (settled if packed else None)


@pytest.mark.parametrize(
    ("name", "keys", "drop", "message"),
    [
        ("nomic", {"pooling_type": 4}, "-", "nomic-bert.pooling_type is 4, .* must be 0 or 1 or 2 or 3"),
        ("bert", {"pooling_type": 4}, "-", "4 missing: cls.weight"),
        ("bert", {"attention.causal": True}, "-", "bert.attention.causal is True"),
        ("bert", {"attention.layer_norm_epsilon": None}, "-", "lacks bert.attention.layer_norm_epsilon"),
        ("bert", {"attention.max_alibi_bias": 8.0}, "-", "max_alibi_bias is 8.0"),
        ("bert", {"context_length": 32}, "-", "position_embd.weight has shape"),
        ("bert", {}, "token_types", "1 missing: token_types.weight"),
        ("bert", {}, "blk.1.attn_q.bias", "1 missing: blk.1.attn_q.bias"),
        ("nomic", {"attention.head_count": 5}, "-", "heads|divide"),
        ("nomic", {"rope.dimension_count": 6}, "-", "rope.dimension_count is 6"),
        ("qwen3", {"pooling_type": 5}, "-", "pooling_type is 5, .* must be 0 or 1 or 2 or 3 or 4"),
    ],
)
def test_what_a_file_says_otherwise_is_refused(
    name: str, keys: dict[str, Any], drop: str, message: str, tmp_path: Path
) -> None:
    _, model_type, sizes, _, _ = MODELS[name]
    hf = save_model(tmp_path, model_type, "AutoModel", **sizes)
    with pytest.raises((ConfigError, WeightError), match=message):
        read_spec(open_source(write(tmp_path, hf, name, drop=drop, keys=keys)).config)


def test_a_reranker_that_makes_text_says_so(tmp_path: Path) -> None:
    """Qwen3-Reranker's files have the rows of yes and no beside the output layer."""
    hf = save_model(tmp_path, "qwen3", "AutoModelForCausalLM", **MODELS["qwen3"][2])
    keys = {"pooling_type": RANK, "classifier.output_labels": ["yes", "no"]}
    rows = {"cls.output.weight": torch.randn(2, 48)}
    source = open_source(write(tmp_path, hf, "qwen3", keys=keys, more=rows))
    assert read_pooling(source, "rerank") is read_pooling(source, "generate") is None
    for task in ("auto", "embed"):
        with pytest.raises(ConfigError, match="a reranker that makes text; add --task rerank"):
            read_pooling(source, task)
    prompt = random_prompts([9])[0]
    found = Eager(load_model(source)).prompt_logprobs([prompt])
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    with pytest.raises(WeightError, match="1 unexpected: cls.output.weight"):
        open_source(write(tmp_path, hf, "qwen3", more=rows))


def test_a_decoder_that_says_nothing_of_vectors_makes_text(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "qwen3", "AutoModel", **MODELS["qwen3"][2])
    source: ModelSource = open_source(write(tmp_path, hf, "qwen3", keys={"pooling_type": None}))
    assert read_pooling(source) is None
    pooling = read_pooling(source, "embed")
    assert pooling is not None
    assert pooling.kind == "last"
    with pytest.raises(ConfigError, match="makes no text"):
        read_pooling(
            open_source(write(tmp_path, save_model(tmp_path, "bert", "AutoModel", **BERT), "bert")),
            "generate",
        )
