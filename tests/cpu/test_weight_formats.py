"""Formats of checkpoints: one that a package brings, in two files with its registration (``toy_weights.py``
and this)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_weights
from checkpoints import Eager, Row, random_prompts, save_checkpoint
from config_cases import llama
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.config import Config
from sgla.device import H200
from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource, open_source
from sgla.kernels import ops
from sgla.loading.load import load_model
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import Machine, detect
from sgla.quant import formats, method, methods
from sgla.quant.method import PLAIN, Method
from sgla.resolve import resolve

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

IGNORED = ("model.layers.0", "model.layers.1.self_attn.k_proj")
PROMPTS = random_prompts([9, 2, 17])


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, name in ((formats.FORMATS, "ternary"), (methods._METHODS, "toy-ternary")):
        monkeypatch.setitem(registry, name, None)  # type: ignore[arg-type]  # so that it is taken out again
    toy_weights.register()


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ternary(folder: Path, model_type: str = "llama", **changes: Any) -> tuple[ModelSource, ModelSource]:
    """A checkpoint in the toy's format, all but ``IGNORED``, and one with the same numbers in float32."""
    for name in ("toy", "plain"):
        save_checkpoint(folder / name, model_type, **changes)
    plain, stored = load_file(folder / "plain/model.safetensors"), {}
    for name, tensor in list(plain.items()):
        module = name.removesuffix(".weight")
        if ("_proj" in name or ".experts." in name) and not module.startswith(IGNORED):
            made = toy_weights.Ternary.pack(tensor)
            plain[name] = made.dequant()
            stored |= {f"{module}.digits": made.data, f"{module}.scale": made.tensors[1]}
        else:
            stored[name] = tensor
    save_file(stored, folder / "toy/model.safetensors", {"format": "pt"})
    save_file(plain, folder / "plain/model.safetensors", {"format": "pt"})
    configure(
        folder / "toy",
        quantization_config={"quant_method": "toy-ternary", "modules_to_not_convert": list(IGNORED)},
    )
    return open_source(folder / "toy"), open_source(folder / "plain")


class Oracle:
    """``ops.attention`` by its body."""

    in_place = False

    def __call__(self, q: Tensor, kv: Any, batch: Any, scoring: ops.Scoring) -> Tensor:
        return ops.attention.body(q, kv, batch, *scoring)


@torch.no_grad()
def test_a_format_from_outside_runs_everywhere(tmp_path: Path) -> None:
    toy, plain = ternary(tmp_path)
    model = load_model(toy, quantization="checkpoint")
    kinds = [
        [layer.weight.kind for layer in (b.attention.qkv, b.attention.out, b.mlp.gate_up, b.mlp.down)]
        for b in model.blocks
    ]
    assert kinds == [
        ["f32"] * 4,
        ["f32", *["ternary"] * 3],
        ["ternary"] * 4,
    ]  # k is ignored: q, k and v are one
    expected = Eager(load_model(plain)).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected)
    pytest.importorskip("triton")
    from sgla.kernels import gpu

    if not torch.cuda.is_available():
        driver = Eager(model)
        driver._allocate(1, 2)
        forward = gpu.RecordedForward(model, driver.kv, gpu.GpuOps(Oracle()))
        hidden = forward.hidden(driver.batch([Row(PROMPTS[1])], [(0, 0, 2)]))
        found = forward.logits(hidden, whole=True).log_softmax(-1)
        torch.testing.assert_close(found, expected[9:11], rtol=0, atol=1e-3)
        assert not forward.notes
    tokens = [row.tokens for row in Eager(load_model(plain), budget=40, native=True).generate(PROMPTS, 8)]
    native = Eager(model, budget=40, native=True)
    assert [row.tokens for row in native.generate(PROMPTS, 8)] == tokens


def test_kernels_are_explained_of_it_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are made and asked on a device that is not the CPU."""
    pytest.importorskip("triton")
    from sgla.kernels import device
    from sgla.worker import report

    monkeypatch.setattr(device, "_this", [])
    lines = "\n".join(report.report(Config(quantization="checkpoint"), ternary(tmp_path)[0]))
    assert "it multiplies bfloat16 weights, not ternary" in lines


def test_other_storages_take_its_numbers(tmp_path: Path) -> None:
    toy, plain = ternary(tmp_path)
    for quantization in (None, "int8"):
        found, expected = (load_model(source, quantization=quantization) for source in (toy, plain))
        assert torch.equal(Eager(found).prompt_logprobs(PROMPTS), Eager(expected).prompt_logprobs(PROMPTS))


@torch.no_grad()
def test_fused_layers_and_experts_have_it_too(tmp_path: Path) -> None:
    for model_type, changes in (("phi3", {}), ("mixtral", {"num_local_experts": 3})):
        toy, plain = ternary(tmp_path / model_type, model_type, **changes)
        model, expected = load_model(toy, quantization="checkpoint"), load_model(plain)
        assert model.blocks[2].attention.qkv.weight.kind == "ternary"
        assert model_type == "phi3" or model.blocks[2].mlp.gate_up.kind == "ternary"
        found, wanted = (Eager(each).prompt_logprobs(PROMPTS) for each in (model, expected))
        torch.testing.assert_close(found, wanted)
        rows, native = (
            Eager(each, budget=40, native=each is model).generate(PROMPTS, 4) for each in (expected, model)
        )
        assert [row.tokens for row in native] == [row.tokens for row in rows]


def test_ranks_take_their_part(tmp_path: Path) -> None:
    toy, plain = ternary(tmp_path)
    found, expected = (
        load_model(source, quantization=quantization, shard=Shard(1, 2))
        for source, quantization in ((toy, "checkpoint"), (plain, None))
    )
    for name in ("gate_up", "down"):
        a, b = (getattr(model.blocks[2].mlp, name).weight.dequant() for model in (found, expected))
        torch.testing.assert_close(a, b)


def test_what_is_put_into_it_later_counts(tmp_path: Path) -> None:
    """In a recorded program, which must not keep what it held before."""
    toy, _ = ternary(tmp_path)
    model = load_model(toy, quantization="checkpoint")
    runner = Eager(model, budget=40, native=True)
    batch = runner.batch(runner.generate(PROMPTS, 1), [(0, 0, 9)])
    before = runner.forward(batch).clone()
    for block in model.blocks:
        for weight in (block.mlp.gate_up.weight, block.mlp.down.weight):
            new = toy_weights.Ternary.pack(-weight.dequant().flip(0))
            source = toy_weights.Digits(Whole(new.data), Whole(new.tensors[1]), (new.n, new.k))
            weight.put(range(new.n), None, source)
    expected = runner.model.logits(runner.model.forward(batch, runner.kv, batch.sample_rows))
    torch.testing.assert_close(runner.forward(batch), expected, rtol=0, atol=1e-3)
    assert (expected - before).abs().max() > 0.1


class Whole:
    """A tensor as a checkpoint has it."""

    type = "any"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def dense(self, rows: range | None = None) -> Tensor:
        return self.values(rows)

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        return self.tensor if rows is None else self.tensor[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Any:
        raise NotImplementedError


def test_settings_and_sizes_follow_the_checkpoint(tmp_path: Path) -> None:
    toy, plain = ternary(tmp_path, tie_word_embeddings=True)
    machine = detect()
    assert resolve(Config(device="cpu"), machine, toy.config).config.quantization == "checkpoint"
    assert resolve(Config(device="cpu", quantization="none"), machine, toy.config).config.quantization is None
    for wrong in ("gguf", "checkpoint"):
        with pytest.raises(ConfigError, match=f"--quantization {wrong} is for"):
            resolve(Config(device="cpu", quantization=wrong), machine, plain.config)  # type: ignore[arg-type]
    spec = load_model(toy, quantization="checkpoint").spec
    table = spec.vocab * spec.hidden * 4
    layers = weight_bytes(spec, "float32", None, 1) - table
    assert weight_bytes(spec, "float32", "checkpoint", 1) - table == layers / 16


def test_files_of_mlx_are_refused_by_name() -> None:
    """Which say bits and groups, and no method."""
    with pytest.raises(ConfigError, match="the method 'mlx' is not supported"):
        resolve(Config(device="cpu"), detect(), llama(quantization_config={"group_size": 64, "bits": 4}))


def test_numbers_that_a_device_does_not_keep_are_told() -> None:
    """Groups of 16 are no group of any storage; with ``none`` it was asked for."""
    said = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    config = llama(quantization_config=said)
    for given, notes in ((None, 1), ("none", 0)):
        found = resolve(Config(device="cpu", quantization=given), detect(), config).notes
        assert sum("no storage for some or all quantized layers" in note for note in found) == notes
    said["group_size"] = 32
    assert not any("no storage" in note for note in resolve(Config(device="cpu"), detect(), config).notes)


@pytest.mark.parametrize(
    ("name", "said", "method"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["x"]}}, "fp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq"),
        ("quant_config.json", {"quantization": "q4f16_1"}, None),
    ],
)
def test_files_of_older_tools_say_it(
    name: str, said: dict[str, Any], method: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(said))
    (tmp_path / "config.json").write_text("{}")
    found = methods.method_of(open_source(tmp_path, "dummy").config)
    assert (found and found.name) == method
    own = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert open_source(tmp_path, "dummy").config == own


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    toy, _ = ternary(tmp_path)
    path = tmp_path / "toy/model.safetensors"
    whole, name = load_file(path), "model.layers.2.mlp.up_proj"
    for change, words in (
        ({f"{name}.scale": None}, f"{name}.scale is missing beside {name}.digits"),
        ({f"{name}.digits": torch.zeros(96, 1, dtype=torch.uint8)}, r"digits has shape \[96, 1\], expected"),
        ({f"{name}.digits": torch.zeros(96, 12)}, "digits holds F32, expected U8"),
    ):
        made = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(made, path, {"format": "pt"})
        with pytest.raises(WeightError, match=words):
            load_model(toy, quantization="checkpoint")


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.1", ["model.layers.1.mlp.down_proj"]),
        ("mlp.gate", ["model.layers.3.mlp.gate"]),
        ("re:.*self_attn.*", ["model.layers.1.self_attn.q_proj"]),
        ("model.layers.*.mlp.down_proj", ["model.layers.1.mlp.down_proj", "model.layers.12.mlp.down_proj"]),
        ("model.language_model.layers.1.mlp", ["model.layers.1.mlp.down_proj"]),  # of a file with towers
        (r"re:model\.language_model\.layers\.\d+\.mlp\.down", ["model.layers.12.mlp.down_proj"]),
        ("language_model.model.layers.1*.self_attn*", ["model.layers.1.self_attn.q_proj"]),
        ("re:visual.*|.*language_model.*vision", []),
    ],
)
def test_ignore_lists_of_all_dialects(entry: str, named: list[str]) -> None:
    modules = [
        "lm_head",
        "model.layers.1.mlp.down_proj",
        "model.layers.12.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.gate_proj",
    ]
    for key in ("modules_to_not_convert", "ignore"):
        method = Method({key: [entry]})
        found = [module for module in modules if not method.covers(module)]
        assert set(named) <= set(found)
        assert "model.layers.3.mlp.gate_proj" not in found
        assert entry != "model.layers.1" or "model.layers.12.mlp.down_proj" not in found
    assert all(map(PLAIN.covers, modules))


def test_experts_without_gpu_kernels_are_refused_before_a_worker_starts() -> None:
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
        **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_experts"), 4),
        "vocab_size": 300,
        "max_position_embeddings": 128,
    }
    gpu = Machine(gpus=(H200,), torch_cuda="13.0")
    stored = mixture | {"quantization_config": {"quant_method": "toy-ternary"}}
    with pytest.raises(ConfigError, match="experts in ternary have no GPU kernels.*--device cpu") as caught:
        resolve(Config(), gpu, stored)
    assert caught.value.param == "model"
    assert resolve(Config(device="cpu"), gpu, stored).config.device == "cpu"
    assert resolve(Config(), gpu, mixture).config.device == "cuda"


def test_ignore_lists_that_are_none_or_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, words in (
        ("lm_head", "ignore must be a list"),
        ([["lm_head"]], "ignore must be a list"),
        (["re:["], "is no regular expression"),
        (["re:" + "(" * 999], "is no regular expression"),
        (["re:" + "a" * 1025], "4096 expressions of 1024 characters"),
        (["a*"] * 4097, "4096 expressions of 1024 characters"),
    ):
        with pytest.raises(ConfigError, match=words):
            Method({"ignore": wrong})
    with pytest.raises(ConfigError, match="is no regular expression"):
        methods.method_of(
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "group_size": 32,
                    "dynamic": {"-:[": {}},
                }
            }
        )
    monkeypatch.setattr(method, "SECONDS", 0.01)
    slow = Method({"ignore": ["re:(a|a)*$"]})
    with pytest.raises(ConfigError, match="takes more than"):
        slow.covers("a" * 60 + "b")
    many = Method({"ignore": [f"model.layers.{i}.mlp" for i in range(100_000)]})
    assert not many.covers("model.layers.99999.mlp.up_proj")
    assert many.covers("model.layers.100000.mlp.up_proj")
