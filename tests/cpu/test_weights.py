"""Loading: strictness, sharding, splits over ranks, and what errors say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import SMALL, Eager, decided, random_prompts, save_checkpoint
from forked import CONTEXT
from parity import LATENT, ROUTED, native
from safetensors.torch import load_file, save_file

from sgla.dist import Shard, join
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource, open_source
from sgla.layers.linear import split_heads
from sgla.loading.load import load_model
from sgla.loading.upload import places, read
from sgla.messages import Progress
from sgla.model.read import read_decoder
from sgla.model.registry import check_architecture
from sgla.model.sizes import weight_bytes, wide_matrices

LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def dummy(**changes: Any) -> ModelSource:
    return ModelSource("dummy", Path("dummy"), (), LLAMA | changes, {})


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_errors_name_the_tensors(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.surprise"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(7)

    edit(tmp_path, change)
    with pytest.raises(WeightError) as caught:
        load_model(open_source(tmp_path))
    message = caught.value.message
    assert "1 missing: model.layers.1.self_attn.k_proj.weight;" in message
    assert "1 unexpected: model.layers.0.surprise;" in message
    assert "1 misshapen: model.norm.weight has shape [7], expected [48]" in message


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "n_group": 2, "topk_group": 1}


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1}, "3 heads .1 of them KV heads."),
        ("llama", {"intermediate_size": 1}, "the 1 channels inside of model.layers.0.mlp.down_proj"),
        (
            "mixtral",
            {"num_local_experts": 2, "intermediate_size": 1},
            "the 1 channels inside of model.layers.0.mlp.experts.0.down_proj",
        ),
        ("deepseek_v3", LATENT | ROUTED | ONE_HEAD, "1 heads"),
        (
            "kimi_linear",
            LATENT | {"q_lora_rank": None, "linear_num_heads": 3, "num_local_experts": 8},
            "3 heads .linear_num_heads.",
        ),
    ],
)
def test_what_has_not_a_part_for_each_rank_is_refused(
    model_type: str, changes: dict[str, Any], words: str
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **SMALL | changes).to_dict()
    config["architectures"] = [name for name, kind in native().items() if kind == model_type]
    source = ModelSource("dummy", Path("dummy"), (), config, {})
    with pytest.raises(ConfigError, match=f"^{words} cannot be split over 2 ranks"):
        load_model(source, shard=Shard(1, 2))


@pytest.mark.parametrize("shape", [(), (0,), (145,), (145, 48)])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt_neox", {}), ("codegen", {"hidden_size": 64, "num_attention_heads": 4, "rotary_dim": 8})],
)
def test_joined_rows_of_no_parts_are_misshapen(
    name: str, changes: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Before they are put in order."""
    save_checkpoint(tmp_path, name, intermediate_size=..., num_key_value_heads=..., **changes)
    suffix = ("query_key_value.weight", "qkv_proj.weight")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(key for key in tensors if key.endswith(suffix))] = torch.zeros(shape)

    edit(tmp_path, change)
    with pytest.raises(WeightError, match=re.escape(f"qkv_proj.weight has shape {list(shape)}")):
        load_model(open_source(tmp_path))


def test_a_tensor_of_integers_is_refused_by_name(tmp_path: Path) -> None:
    """Before any tensor is read."""
    save_checkpoint(tmp_path, "llama")
    name, seen = "model.layers.2.mlp.up_proj.weight", []
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(96, 48, dtype=torch.int8)}))
    with pytest.raises(WeightError, match=rf"{name} cannot be read: it holds I8 "):
        load_model(open_source(tmp_path), on_progress=seen.append)
    assert not [progress for progress in seen if progress.done]


def test_known_buffers_and_a_tied_head_may_be_present(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    plain = load_model(open_source(tmp_path))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, change)
    loaded = load_model(open_source(tmp_path))
    assert loaded.spec.tied
    prompts = random_prompts([9])
    assert torch.equal(Eager(plain).prompt_logprobs(prompts), Eager(loaded).prompt_logprobs(prompts))
    edit(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    alone = load_model(open_source(tmp_path))
    assert torch.equal(Eager(plain).prompt_logprobs(prompts), Eager(alone).prompt_logprobs(prompts))


@pytest.mark.parametrize(
    ("model_type", "embedding", "changes"),
    [
        ("llama", "model.embed_tokens", {}),
        ("gpt2", "transformer.wte", {"intermediate_size": ..., "num_key_value_heads": ...}),
        ("falcon", "transformer.word_embeddings", {"intermediate_size": ..., "num_key_value_heads": ...}),
    ],
)
def test_a_head_that_is_not_the_embedding_counts_for_more_than_the_configuration(
    model_type: str, embedding: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As in transformers, whatever files call the embedding."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path, model_type, tie_word_embeddings=True, **changes)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t[f"{embedding}.weight"].flip(0).clone()}))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = random_prompts([9])
    with torch.no_grad():
        expected = hf(torch.tensor(prompts)).logits[0].log_softmax(-1)
    model = load_model(open_source(tmp_path))
    torch.testing.assert_close(Eager(model).prompt_logprobs(prompts), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_tables_that_are_no_matrices_are_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    tables = {name: torch.zeros(shape) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    edit(tmp_path, lambda tensors: tensors.update(tables))
    with pytest.raises(WeightError, match=r"model.embed_tokens.weight has shape"):
        load_model(open_source(tmp_path))


@pytest.mark.parametrize("shape", [(8,), (2, 4, 8)])
def test_an_e4m3_tensor_that_is_no_matrix_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    numbers = {name: torch.zeros(shape).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    edit(tmp_path, lambda tensors: tensors.update(numbers))
    with pytest.raises(WeightError, match=rf"{name} has shape .* expected \[96, 48\]"):
        load_model(open_source(tmp_path))


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", shard_size="60KB")
    files = open_source(tmp_path).files
    first, second = load_file(files[0]), load_file(files[1])
    name = min(first)
    save_file(second | {name: first[name] + 1}, files[1], {"format": "pt"})
    with pytest.raises(WeightError, match=rf"{name} is in two of the files"):
        load_model(open_source(tmp_path))


def test_several_files_equal_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", "qwen3", head_dim=16)
    save_checkpoint(tmp_path / "many", "qwen3", shard_size="60KB", head_dim=16)
    many = open_source(tmp_path / "many")
    assert len(many.files) > 3
    prompts = random_prompts([20])
    expected = Eager(load_model(open_source(tmp_path / "one"))).prompt_logprobs(prompts)
    assert torch.equal(Eager(load_model(many)).prompt_logprobs(prompts), expected)
    many.files[0].unlink()
    with pytest.raises(ConfigError, match=many.files[0].name):
        open_source(tmp_path / "many")


def test_places_in_a_file_are_those_of_its_tensors(tmp_path: Path) -> None:
    """What a GPU worker reads by offset."""
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 3, 4).half()}
    tensors |= {"ids": torch.arange(3)}
    save_file(tensors, path, {"format": "pt"})
    found = places(path, lambda file, at, dtype, shape: (os.pread(file, 8, at), dtype, shape))  # type: ignore[arg-type]
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        for first in (0, 1):
            data, dtype, _ = found[name].rows(first, (1, *tensor.shape[1:]))
            expected = tensor[first:].contiguous().view(torch.uint8).numpy().tobytes()[:8]
            assert data[: len(expected)] == expected
            assert dtype == tensor.dtype
    buffer = bytearray(12)
    with path.open("rb") as file, pytest.raises(ValueError, match="ends too early"):
        read(file.fileno(), path.stat().st_size - 8, memoryview(buffer))


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightError, match="not a complete safetensors file"):
        load_model(open_source(tmp_path))


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma3_text", head_dim=16, tie_word_embeddings=True)
    prompts = random_prompts([12])
    expected = Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts)
    tensors = {
        f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["vision_tower.encoder.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts), expected)


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    prompts = random_prompts([10])
    first, again, other = (
        Eager(load_model(dummy(), seed=seed)).prompt_logprobs(prompts) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.exp().max() < 0.9


def test_dummy_weights_of_a_layer_may_be_single_numbers() -> None:
    changes = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
    logprobs = Eager(load_model(dummy(**changes))).prompt_logprobs(random_prompts([10]))
    assert torch.isfinite(logprobs).all()


def test_int4_keeps_in_int8_what_rounding_harms_most_for_its_bytes() -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_attention_heads": 4}
    source = dummy(**sizes, num_hidden_layers=16, vocab_size=3300)
    model = load_model(source, "float32", "int4")
    kinds = {
        name: [getattr(getattr(block, module), name).weight.kind for block in model.blocks]
        for module, name in (("attention", "qkv"), ("attention", "out"), ("mlp", "down"), ("mlp", "gate_up"))
    }
    assert kinds["qkv"] == ["int8"] * 16
    assert [i for i, kind in enumerate(kinds["down"]) if kind == "int8"] == [0, 1, 14, 15]
    assert kinds["out"] == kinds["gate_up"] == ["int4"] * 16
    layers = [
        x.weight for b in model.blocks for x in (b.attention.qkv, b.attention.out, b.mlp.down, b.mlp.gate_up)
    ]
    held = sum(weight.nbytes for weight in [*layers, model.embed.weight, model.lm_head.weight])
    assert held == weight_bytes(model.spec, "float32", "int4", 1)
    every = sum(weight.n * weight.k * 5 // 8 for weight in layers) + 2 * model.embed.weight.nbytes
    assert 1.08 < held / every <= 1.1


def test_int4_spends_nothing_on_matrices_that_have_four_bits() -> None:
    spec = read_decoder(LLAMA | {"num_hidden_layers": 8})
    assert wide_matrices(spec, lambda name: True) == (frozenset(), 0.0)
    some = wide_matrices(spec, lambda name: "self_attn" in name).names
    assert some
    assert all("mlp.down_proj" in name for name in some)


def test_progress_counts_every_value() -> None:
    seen: list[Progress] = []
    load_model(dummy(), on_progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLLM"]}, "Did you mean LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 4}, "6 attention heads"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs 'factor'"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_architecture(read_decoder(LLAMA | changes).architecture)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 2), (8, 8), (6, 1), (12, 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_heads_split_without_loss(heads: int, kv_heads: int, size: int) -> None:
    """Each query head is on one rank, together with the KV head it reads; uneven parts are allowed."""
    try:
        parts = [split_heads(heads, kv_heads, Shard(rank, size)) for rank in range(size)]
    except ConfigError:
        assert size > kv_heads
        assert heads % size or size % kv_heads
        return
    assert [head for own, _ in parts for head in own] == list(range(heads))
    group = heads // kv_heads
    for own, kv in parts:
        assert len(own)
        assert sorted({head // group for head in own}) == list(kv)


CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "kv heads divide": ({}, None),
    "kv heads uneven": ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}, None),
    "kv head replicated": ({"num_key_value_heads": 1, "tie_word_embeddings": True}, None),
    "biases": ({"attention_bias": True, "mlp_bias": True, "intermediate_size": 70}, None),
    "mixture": (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 3},
        None,
    ),
    "mixture with odd parts": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
        None,
    ),
    "mixture in fp8": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        "fp8",
    ),
    "fp8": ({}, "fp8"),
    # Heads of 32, so that ranks have whole groups.
    "int8": ({"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32}, "int8"),
    "int4": ({"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32}, "int4"),
}


def generate(shard: Shard) -> dict[str, list[list[int]]]:
    prompts = random_prompts([5, 30])
    models = {name: load_model(dummy(**changes), "float32", q, shard) for name, (changes, q) in CASES.items()}
    return {name: decided(Eager(model, 16).generate(prompts, 12)) for name, model in models.items()}


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with join(rank, 2, f"{folder}/store", timeout=60) as shard:
        result = generate(shard)
        x = torch.tensor([rank + 1], dtype=torch.int32)
        shard.broadcast(x, source=1)
        assert x.item() == 2
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


def test_two_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.start_processes(rank_main, (str(tmp_path),), nprocs=2, start_method=CONTEXT.get_start_method())
    expected = generate(Shard())
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def test_ranks_hold_only_their_part() -> None:
    whole, half = load_model(dummy()), load_model(dummy(), shard=Shard(1, 2))
    assert half.blocks[0].attention.qkv.weight.n * 2 == whole.blocks[0].attention.qkv.weight.n
    assert half.blocks[0].mlp.down.weight.k == 64  # 96 in units of 32: one and two
    assert {tensor.shape[0] for layer in half.state() for tensor in layer.tensors} == {1}
    assert torch.equal(half.lm_head.weight.data, whole.lm_head.weight.data[155:])


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        (
            "qwen3_moe",
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        ),
        ("mixtral", {"num_local_experts": 3}),
    ],
)
def test_stacked_experts_equal_single_ones(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path / "single", model_type, **changes)
    hf.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked/model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    prompts = random_prompts([20])
    single, stacked = (load_model(open_source(tmp_path / kind)) for kind in ("single", "stacked"))
    assert torch.equal(Eager(single).prompt_logprobs(prompts), Eager(stacked).prompt_logprobs(prompts))
    names["model.layers.1.mlp.experts.down_proj"] = torch.zeros(2, 48, 5)
    save_file(names, tmp_path / "stacked/model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"layers.1.mlp.experts.down_proj has shape \[2, 48, 5\]"):
        load_model(open_source(tmp_path / "stacked"))
