"""Whole models through the GPU's ops and the rules that join them, in Triton's interpreter: what comes out
must be as the oracle says."""

from __future__ import annotations

import gc
import os
import weakref
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import toy_family
from checkpoints import SMALL, Eager, Row, random_prompts
from torch import Tensor
from torch.utils._pytree import tree_leaves

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from pathlib import Path

from sgla.device import nvidia
from sgla.dist import Shard
from sgla.hub.source import ModelSource
from sgla.kernels import gpu, ops
from sgla.kernels.cuda import batch_gemm, integer_gemm, prompt_gemm, skinny_gemm, stationary_gemm
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import norms, program, rewrite, rules, tiles, tuning, whole_step
from sgla.kernels.gpu.ops import LOWERINGS
from sgla.kernels.gpu.record import RESULTS
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import elementwise, fp8
from sgla.loading.load import _Dummy, load_model
from sgla.model import registry
from sgla.quant.weight import pack
from sgla.worker.hooked import Hooked

MODELS: dict[str, dict[str, Any]] = {
    "ToyForCausalLM": {"model_type": "toy"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "sliding_window": 10, "query_pre_attn_scalar": 16},
    "Gemma4ForCausalLM": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "Cohere2ForCausalLM": {
        "model_type": "cohere2",
        "sliding_window": 10,
        "head_dim": None,
        "logit_scale": 0.5,
    },
    "Command R+": {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "use_qk_norm": True,
        "head_dim": None,
    },
    "StableLM 2 12B": {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "head_dim": None,
    },
    "MiniCPM3ForCausalLM": {
        "model_type": "minicpm3",
        "head_dim": None,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        "head_dim": None,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 0,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
    },
    "HunYuanDenseV1ForCausalLM": {"model_type": "hunyuan_v1_dense"},
    "ApertusForCausalLM": {"model_type": "apertus", "hidden_act": "xielu"},
    "Olmo2ForCausalLM": {"model_type": "olmo2", "head_dim": None},
    "HyperCLOVAXForCausalLM": {
        "model_type": "hyperclovax",
        "residual_multiplier": 0.4,
        "logits_scaling": 0.3,
    },
    "Starcoder2ForCausalLM": {"model_type": "starcoder2"},
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "head_dim": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
SHAPE = SMALL | {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 1}


def shape(architecture: str, **more: Any) -> dict[str, Any]:
    """A configuration; None leaves a key of ``SHAPE`` out."""
    config = SHAPE | {"architectures": [architecture]} | MODELS[architecture] | more
    return {key: value for key, value in config.items() if value is not None}


class Oracle:
    """``ops.attention`` by its body."""

    in_place = False

    def __call__(self, q: Tensor, kv: Any, batch: Any, scoring: ops.Scoring) -> Tensor:
        return ops.attention.body(q, kv, batch, *scoring)


attend = Oracle()


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose op has no kernel."""
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    registry.register("ToyForCausalLM", toy_family.FAMILY)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 products in float32."""

    def scaled_mm(a: Tensor, b: Tensor, by_row: Tensor, by_column: Tensor, bias: Any, **_: Any) -> Tensor:
        return (a.float() * by_row) @ (b.float() * by_column) + (0 if bias is None else bias)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, biases and scales of dummy weights at random, so that none can be left out or be another's."""
    kept = _Dummy.dense

    def dense(self: _Dummy, rows: range | None = None) -> Tensor:
        if len(self.shape) != 1:
            return kept(self, rows)
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        values = torch.rand(self.shape, generator=generator) + 0.5
        return values if rows is None else values[rows.start : rows.stop]

    monkeypatch.setattr(_Dummy, "dense", dense)


def prepare(architecture: str, quantization: str | None) -> tuple[Eager, list[list[list[int]]]]:
    config = shape(architecture)
    source = ModelSource("dummy", Path("dummy"), (), config, {})
    few, many = random_prompts([2]), random_prompts([1, 3])
    return Eager(load_model(source, quantization=quantization)), [few, many]


def recorded(driver: Eager, prompts: list[list[int]]) -> Tensor:
    """``driver.prompt_logprobs`` by a recorded forward."""
    driver._allocate(len(prompts), max(map(len, prompts)))
    spans = [(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]
    batch = driver.batch([Row(prompt) for prompt in prompts], spans)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    logits = forward.logits(forward.hidden(batch), whole=True)
    assert not forward.notes
    return logits.log_softmax(-1)


needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu has the same on the device"
)


@needs_interpreter
@pytest.mark.parametrize("architecture", MODELS)
def test_models_equal_the_oracle(architecture: str, exact: None, drawn: None) -> None:
    driver, batches = prepare(architecture, None)
    expected = [driver.prompt_logprobs(prompts) for prompts in batches]
    with using(gpu.GpuOps(attend)):
        apart = [driver.prompt_logprobs(prompts) for prompts in batches]
    torch.testing.assert_close(apart, expected, rtol=0, atol=1e-3)
    together = [recorded(driver, prompts) for prompts in batches]
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-3)


STATES: dict[str, dict[str, Any]] = {
    "KimiLinearForCausalLM": {
        "model_type": "kimi_linear",
        "head_dim": None,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
    },
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", "num_hidden_layers": 2},
    "FalconH1ForCausalLM": {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "JambaForCausalLM": {"model_type": "jamba", "num_experts": 4},
}


def tensors_of(node: Any) -> list[Tensor]:
    return [x for x in tree_leaves(list(node.given.values())) if isinstance(x, Tensor)]


def computed(source: ModelSource) -> list[Any]:
    """What reads tensors that were made while a model was recorded."""
    driver = Eager(load_model(source))
    driver._allocate(2, 8)
    known = {x.untyped_storage().data_ptr() for x in gc.get_objects() if type(x) is Tensor}
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    record = forward._record("step", True)
    assert record is not None, forward.notes
    there = ((node, x) for node in record.nodes for x in tensors_of(node) if x.device.type != "meta")
    return [node.op for node, x in there if x.untyped_storage().data_ptr() not in known]


@pytest.mark.parametrize("architecture", [*MODELS, *STATES])
def test_nothing_is_computed_while_a_model_is_recorded(architecture: str) -> None:
    """A record may be made while a graph is captured: what is computed then has no value yet, and would stay
    as it is when weights are exchanged."""
    config = SHAPE | {"architectures": [architecture]} | (MODELS | STATES)[architecture]
    config = {key: value for key, value in config.items() if value is not None}
    assert not computed(ModelSource("dummy", Path("dummy"), (), config, {}))


@needs_interpreter
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_rounding_on_the_way_equals_rounding_apart(architecture: str, exact: None) -> None:
    driver, batches = prepare(architecture, "fp8")
    plain = [driver.prompt_logprobs(prompts) for prompts in batches]
    with using(gpu.GpuOps(attend)):
        apart = [driver.prompt_logprobs(prompts) for prompts in batches]
    together = [recorded(driver, prompts) for prompts in batches]
    for found, wanted, exactly in zip(together, apart, plain):
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)  # apart, sums of experts are bfloat16
        assert 1e-3 < (found - exactly).abs().max() < 1.5  # it was rounded


@needs_interpreter
def test_rounding_on_the_way_equals_rounding_apart_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than those whose weights become bfloat16; products in float32."""
    driver, _ = prepare("Qwen3ForCausalLM", None)
    for block in driver.model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            layer.weight = pack(layer.weight.dequant(), "fp8g128")
    prompts, kept = random_prompts([20, 3]), fp8.grouped
    monkeypatch.setattr(fp8, "grouped", lambda *given: kept(*given).float())
    exactly = driver.prompt_logprobs(prompts)
    with using(gpu.GpuOps(attend)):
        apart = driver.prompt_logprobs(prompts)
    together = recorded(driver, prompts)
    torch.testing.assert_close(together, apart, rtol=0, atol=5e-2)  # results are bfloat16 on their way
    assert 1e-3 < (together - exactly).abs().max() < 1.5  # it was rounded


def gated_rows(x: Tensor, gate: skinny_gemm.Gate) -> Tensor:
    assert skinny_gemm.gate_refuses(*x.shape, gate.norm) is None
    if gate.norm is None:
        return ops.sigmoid_mul(x, gate.by.float())
    x, by = (y.unflatten(1, (-1, len(gate.norm))) for y in (x, gate.by))
    return ops.gated_rms_norm(x, by, gate.norm, gate.eps, "silu" if gate.silu else "sigmoid").flatten(1)


def skinny_linear(
    x: Tensor,
    w: Tensor,
    *,
    scale: None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: skinny_gemm.Gate | None = None,
    bias: Tensor | None = None,
    epilogue: int = skinny_gemm.STORE,
    out: Tensor | None = None,
    config: Any = None,
    factor: float = 1.0,
) -> Tensor:
    """``skinny_gemm.linear`` in torch's operations."""
    with using(None):
        rows = x.float() if norm is None else ops.rms_norm(x.float(), norm, eps)
        if gate is not None:
            rows = gated_rows(rows, gate)
        y = (rows @ w.float().t() + (0 if bias is None else bias)) * factor
        if epilogue == skinny_gemm.ADD:
            assert out is not None
            return out.add_(y)
        if epilogue in (skinny_gemm.SILU, skinny_gemm.GELU):
            y = ops.act_mul(y, "silu" if epilogue == skinny_gemm.SILU else "gelu_tanh")
    return y if epilogue == skinny_gemm.FLOAT32 else y.to(x.dtype)


def store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    *_: Any,
) -> Tensor:
    """``elementwise.qk_norm_rope_store`` in torch's operations, since the interpreter takes a second."""
    with using(None):
        return ops.qk_norm_rope_store(qkv, positions, cos_sin, q_norm, k_norm, eps, KVLayer(k, v), places)


@needs_interpreter
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "Cohere2ForCausalLM",
        "Olmo2ForCausalLM",
        "Starcoder2ForCausalLM",
        "ToyForCausalLM",
    ],
)
def test_the_last_layer_goes_on_with_the_rows_that_are_wanted(
    architecture: str, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer begins as for many tokens, and ends as for the few that are left: fused, or in batches."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    skinny = Mock(wraps=skinny_linear)
    monkeypatch.setattr(skinny_gemm, "linear", skinny)
    monkeypatch.setattr(elementwise, "qk_norm_rope_store", store)
    monkeypatch.setattr(batch_gemm, "default_config", lambda *shape: None)
    monkeypatch.setattr(prompt_gemm, "refuses", lambda *shape: "not here")
    config = shape(architecture)
    driver = Eager(load_model(ModelSource("dummy", Path("dummy"), (), config, {}), "bfloat16"))
    prompts = random_prompts([30, 1, 7])
    driver.prompt_logprobs(prompts)
    batch = driver.batch([Row(tokens) for tokens in prompts], [(i, 0, len(p)) for i, p in enumerate(prompts)])
    expected = driver.model.forward(batch, driver.kv)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    assert batch.tokens > skinny_gemm.MAX_ROWS
    for rows in ([5], [29, 30, 37], list(range(11, 31))):
        found = forward.hidden(batch, torch.tensor(rows, dtype=torch.int32))
        assert skinny.called is (len(rows) <= skinny_gemm.MAX_ROWS)
        skinny.reset_mock()
        errors = (found.float() - expected[rows]).norm(dim=1) / expected[rows].norm(dim=1)
        assert (errors < 0.03).all()


@needs_interpreter
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("kind", ["f32", "bf16", "fp8", "int4"])
def test_an_addend_comes_before_what_is_fused_behind(
    kind: str, rows: int, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that do the activation or the norm behind a linear layer do not know it, and are passed
    over."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(skinny_gemm, "linear", skinny := Mock())
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out_dtype, out: out.copy_(a.to(out_dtype) @ b.to(out_dtype))
    )
    torch.manual_seed(0)
    w, dtype = pack(torch.randn(128, 128) / 12, kind), torch.float32 if kind == "f32" else torch.bfloat16
    table, addend = pack(torch.randn(rows, 128), "f32" if kind == "f32" else "bf16"), torch.randn(rows, 128)
    residual, norm = torch.randn(rows, 128).to(dtype), torch.rand(128)

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed, what = SimpleNamespace(hidden=128), SimpleNamespace(weight=table), "gated"

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            y = ops.linear(ops.embedding(batch.ids, table), w, None, addend.to(dtype))
            if self.what == "gated":
                return ops.act_mul(y, "silu")
            return ops.add_rms_norm(y, residual.clone(), norm, 1e-5)[0]

        def logits_part(self, hidden: Tensor) -> Tensor:
            return ops.logits(hidden, w, None, addend)

    batch: Any = SimpleNamespace(
        ids=torch.arange(rows, dtype=torch.int32), tokens=rows, rows=rows, media=None, canvas=None, live=None
    )
    layer = Layer()
    for layer.what in ("gated", "normed"):
        expected = layer.forward(batch, [], None).float()
        found = gpu.RecordedForward(layer, [], gpu.GpuOps(attend)).hidden(batch)  # type: ignore[arg-type]
        assert (found - expected).norm() < 0.1 * expected.norm()
    logits, drawn = gpu.RecordedForward(layer, [], gpu.GpuOps(attend)).step(  # type: ignore[arg-type]
        batch, None, out := torch.empty(rows, 128)
    )
    wanted = layer.logits_part(expected)
    assert (logits - wanted).norm() < 0.1 * wanted.norm()
    assert not drawn
    assert kind != "bf16" or logits is out
    assert not skinny.called


@needs_interpreter
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_steps_of_a_kind_take_the_same_kernels(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was made for one number of rows serves all of its kind."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    for part in (batch_gemm, prompt_gemm):
        monkeypatch.setattr(part, "processors", lambda: 132)
    wide = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 2048, "num_hidden_layers": 2}
    config = shape(architecture, **wide)
    model = load_model(ModelSource("dummy", Path("dummy"), (), config, {}), "bfloat16")
    driver = Eager(model)
    driver.prompt_logprobs([[1]])
    forward = gpu.RecordedForward(model, driver.kv, gpu.GpuOps(attend))
    record = forward._record("step", True)
    assert record is not None
    seen: dict[Any, list[tuple[Any, str]]] = {}
    for m in [*range(1, 600), *range(600, 9000, 7)]:
        for draws in (False, True):
            asked = rewrite.Asked({"tokens": m, "sampled": m, "rows": 1}, None, draws)
            taken = [(node.op, node.rule) for node in rules.apply(record, asked).nodes.values()]
            assert seen.setdefault((forward._kind(record, m), draws), taken) == taken, m
    assert len(seen) < 120


@needs_interpreter
@pytest.mark.parametrize(("rows", "kernel"), [(1, integer_gemm), (4, integer_gemm), (12, stationary_gemm)])
def test_few_rows_of_an_output_layer_of_4_bits(
    rows: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels make float32 logits, where they are wanted."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    for each in (integer_gemm, stationary_gemm):
        monkeypatch.setattr(each, "processors", lambda: 132)
        monkeypatch.setattr(each, "linear", Mock())
    kernel.linear.side_effect = lambda x, w, out, **given: out.copy_(x.float() @ w.dequant().t())
    w = pack(torch.randn(256, 2048) / 12, "int4g64")
    hidden = torch.randn(rows, 2048, dtype=torch.bfloat16)

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=2048), SimpleNamespace(weight=pack(hidden, "bf16"))

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            return ops.embedding(batch.ids, self.embed.weight)

        def logits_part(self, hidden: Tensor) -> Tensor:
            return ops.logits(hidden, w)

    batch: Any = SimpleNamespace(
        ids=torch.arange(rows, dtype=torch.int32), tokens=rows, rows=rows, media=None, canvas=None, live=None
    )
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    found, drawn = forward.step(batch, None, out := torch.empty(rows, 256))
    assert found is out
    assert not drawn
    torch.testing.assert_close(found, hidden.float() @ w.dequant().t(), rtol=1e-3, atol=1e-3)
    (call,) = kernel.linear.mock_calls
    assert call.kwargs["epilogue"] == integer_gemm.FLOAT32


ONE_ROW = rewrite.Asked({"tokens": 1, "sampled": 0, "rows": 1}, Mock())


def small_model(architecture: str, shard: Shard | None = None, **more: Any) -> Eager:
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = SMALL | {"architectures": [architecture]} | MODELS.get(architecture, {}) | sizes | more
    source = ModelSource("dummy", Path("dummy"), (), config, {})
    driver = Eager(load_model(source, "bfloat16", shard=shard))
    driver.dtype = torch.bfloat16
    driver._allocate(1, 1)
    return driver


def test_a_layer_whose_input_is_copied_has_the_kernels_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum and its norm are the layer's before; the copy is behind them, of the sum."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    asked, found = rewrite.Asked({"tokens": 64, "sampled": 64, "rows": 64}), []
    for copies in (False, True):
        driver = small_model("Qwen3ForCausalLM", hidden_size=1024, intermediate_size=1024)
        if copies:
            columns = torch.zeros(64, 1024, dtype=torch.bfloat16)
            driver.model.blocks[1] = Hooked(driver.model.blocks[1], partial(ops.copied, to=columns))
        forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
        work = forward.rewritten("step", False, asked)
        assert work is not None
        found.append(list(work.nodes.values()))
    others, nodes = found
    [at] = [i for i, node in enumerate(nodes) if node.op is ops.copied]
    assert nodes[at - 1].op == "tiles, added"
    assert nodes[at].reads == nodes[at - 1].results[1:]
    assert [node.op for node in nodes[:at] + nodes[at + 1 :]] == [node.op for node in others]


@pytest.mark.parametrize("copied", [None, [], [0, 1], [1]])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_whole_step_is_found_in_what_was_recorded(
    architecture: str, copied: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``copied``: the inputs of these layers, [] what the last norm makes."""
    driver, made = small_model(architecture), Mock()
    monkeypatch.setattr(whole_step, "DecodeStep", made)
    monkeypatch.setattr(whole_step.DenseShape, "pays", lambda *_: True)
    monkeypatch.setattr(whole_step.MixtureShape, "pays", lambda *_: True)
    latest = torch.zeros(3, 512, dtype=torch.bfloat16)
    final = latest[:, 256:] if copied == [] else None
    for layer in copied or ():
        columns = latest[:, 256 * layer : 256 * layer + 256]
        driver.model.blocks[layer] = Hooked(driver.model.blocks[layer], partial(ops.copied, to=columns))
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend), final=final)
    work = forward.rewritten("step", False, ONE_ROW)
    assert work is not None
    [node] = work.nodes.values()
    assert node.given["step"] is made.return_value
    assert node.rule == "whole step"
    batch: Any = SimpleNamespace(ids=1, positions=5, slots=2, kv_len=3, pages=lambda group: 4 + group)
    assert node.fn is not None
    assert node.fn(node.given["step"], 0, batch, "out") == "out"
    made.return_value.assert_called_once_with(1, 5, 2, 3, 4, "out")
    shape, layers, kv, embedding, head, norm, *_, copies = made.call_args.args
    model: Any = driver.model
    assert shape.copied == (copies is not None) == (copied is not None)
    if copied is not None:
        found = [*copies.inputs, copies.last]
        there = [0 in copied, 1 in copied, copied == []]
        rows = [latest[0, :256], latest[0, 256:], latest[0, 256:]]
        assert [x is not None for x in found] == there
        for x, row in zip(found, rows, strict=True):
            assert x is None or (x.data_ptr(), x.shape) == (row.data_ptr(), row.shape)
    blocks = [getattr(block, "_block", block) for block in model.blocks]
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.inner) == (256, 4, 2, shape.inner)
    assert [id(layer.k) for layer in kv] == [id(layer.k) for layer in driver.kv]
    assert embedding is model.embed.weight.data
    assert head is model.lm_head.weight.data
    assert norm is model.norm.weight
    for block, layer in zip(blocks, layers, strict=True):
        assert layer.qkv is block.attention.qkv.weight.data
        assert layer.out is block.attention.out.weight.data
        assert layer.input_norm is block.input_norm.weight
        assert layer.mlp_norm is block.mlp_norm.weight
        assert layer.q_norm is block.attention.q_norm


def test_tables_of_a_whole_step_stay_for_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other steps come."""
    made = []

    class Step:
        def __init__(self, *_: Any) -> None:
            made.append(weakref.ref(self))

    driver = small_model("Qwen3ForCausalLM")
    monkeypatch.setattr(whole_step, "DecodeStep", Step)
    monkeypatch.setattr(whole_step.DenseShape, "pays", lambda *_: True)
    monkeypatch.setattr(program, "KEPT", 2)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    forward.prepare(ONE_ROW.decode)
    record = forward._record("step", False)
    assert record is not None
    for rows in (5, 6, 7):
        forward._program(record, rewrite.Asked({"tokens": rows, "sampled": 0, "rows": rows}, None))
    assert len(forward._programs) == 2
    (step,) = made
    assert step() is not None


@pytest.mark.parametrize(
    ("architecture", "room", "vocab", "why"),
    [
        ("Qwen3MoeForCausalLM", True, 96, ""),
        ("Qwen3MoeForCausalLM", False, 96, "the ranks cannot store"),
        ("Qwen3MoeForCausalLM", True, 97, "ranks have more or less"),
        ("Qwen3ForCausalLM", True, 96, "several ranks are slower"),
    ],
)
def test_a_whole_step_of_ranks_exchanges_what_each_adds(
    architecture: str, room: bool, vocab: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Mock(sum=lambda x, *norm, **more: x, for_steps=Mock(return_value="inbox" if room else None))
    monkeypatch.setattr(whole_step, "DecodeStep", made := Mock())
    monkeypatch.setattr(whole_step.MixtureShape, "pays", lambda *_: True)
    driver = small_model(architecture, Shard(0, 2, exchange), vocab_size=vocab)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", False, ONE_ROW)
    assert work is not None
    if why:
        [said] = [reason for rule, reason in work.refused if rule == "whole step"]
        assert said.startswith(why)
        return
    [node] = work.nodes.values()
    assert node.rule == "whole step"
    shape, *_, inbox, _ = made.call_args.args
    assert inbox == "inbox"
    exchange.for_steps.assert_called_with(shape)
    assert (shape.ranks, shape.hidden, shape.heads, shape.kv_heads) == (2, 256, 2, 1)


@pytest.mark.parametrize(
    ("architecture", "sums"),
    [
        ("Qwen3ForCausalLM", 4),
        ("Qwen2MoeForCausalLM", 4),
        ("Gemma3ForCausalLM", 4),
        ("Starcoder2ForCausalLM", 4),
        ("HyperCLOVAXForCausalLM", 4),
        ("Cohere2ForCausalLM", 2),
        ("Command R+", 2),
        ("StableLM 2 12B", 2),
    ],
)
@pytest.mark.parametrize("rows", [1, 300])
def test_every_sum_over_ranks_comes_with_its_norm(architecture: str, sums: int, rows: int) -> None:
    """RMSNorm and LayerNorm, of what is multiplied, too. What stands side by side is one sum."""
    driver = small_model(architecture, Shard(0, 2, Mock(sending=Mock(return_value=None))))
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("hidden", False, rewrite.Asked({"tokens": rows, "sampled": 0, "rows": rows}))
    assert work is not None
    assert work.taken["norm behind the ranks' sum"] == sums
    assert not work.named(ops.all_reduce)


@pytest.mark.parametrize(
    ("architecture", "each"), [("Gemma3ForCausalLM", [1, 1, 1, 1]), ("Gemma4ForCausalLM", [3, 1, 3, 1])]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_norms_around_the_stream_are_one_kernel(
    architecture: str, each: list[int], deterministic: bool
) -> None:
    """What joins the stream, and its norms; those of a mixture are three. Not where bits count: it adds up a
    row otherwise than the kernels of steps that go op by op."""
    driver = small_model(architecture)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend, deterministic))
    asked = rewrite.Asked({"tokens": 5, "sampled": 5, "rows": 5}, deterministic=deterministic)
    work = forward.rewritten("step", True, asked)
    assert work is not None
    assert work.taken["norm, added"] == (0 if deterministic else len(each))
    assert [len(node.given["norms"]) for node in work.named(norms.NAME)] == ([] if deterministic else each)
    assert any(rule == "norm, added" for rule, _ in work.refused) is deterministic


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_come_with_their_layer_norms(deterministic: bool) -> None:
    """All but the first, which is of no sum."""
    driver = small_model("Starcoder2ForCausalLM")
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend, deterministic))
    asked = rewrite.Asked({"tokens": 5, "sampled": 5, "rows": 5}, deterministic=deterministic)
    work = forward.rewritten("step", True, asked)
    assert work is not None
    assert len(work.named(ops.add_layer_norm)) == 4
    assert len(work.named(ops.layer_norm)) == 1


@needs_interpreter
@pytest.mark.parametrize(("computed", "joined"), [(None, [2, 1]), (0, []), (1, [0]), (2, [1, 1])])
def test_norms_whose_weights_are_computed_are_not_joined(computed: int | None, joined: list[int]) -> None:
    torch.manual_seed(0)
    table, weight, scale = pack(torch.randn(9, 128), "f32"), torch.rand(3, 128) + 0.5, torch.tensor([0.5])

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=128), SimpleNamespace(weight=table)

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            h = ops.embedding(batch.ids, table)
            first, second, third = (w * (h[0] * 0 + 2) if i == computed else w for i, w in enumerate(weight))
            x, h = ops.add_rms_norm(ops.rms_norm(h, first, 1e-5), h, second, 1e-5)
            x = x + ops.rms_norm(h, third, 1e-5)
            h = ops.scaled_add(ops.rms_norm(x, first, 1e-5), h, scale)
            return ops.rms_norm(h, second, 1e-5) + h

    batch: Any = SimpleNamespace(
        ids=torch.arange(5, dtype=torch.int32), tokens=5, rows=5, media=None, canvas=None, live=None
    )
    expected = Layer().forward(batch, [], None)
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    torch.testing.assert_close(forward.hidden(batch), expected)
    assert not forward.notes
    [program] = forward._programs.values()
    assert [len(node.given["norms"]) for node in program.work.named(norms.NAME)] == joined


GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
SIGMOIDS = {
    "model_type": "glm4_moe",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "first_k_dense_replace": 0,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("model", "more", "taken"),
    [
        (
            "GraniteForCausalLM",
            {"model_type": "granite", "intermediate_size": 128},
            {"few rows + scaled + added": 4},
        ),
        (
            "GraniteMoeForCausalLM",
            {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
            {"few rows + scaled + added": 2, "experts added": 2},
        ),
    ],
)
def test_what_joins_the_stream_is_scaled_on_the_way(
    model: str, more: dict[str, Any], taken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts by their weights, which are computed as before with more rows."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    driver = small_model(model, **more | {"residual_multiplier": 0.5})
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", True, rewrite.Asked({"tokens": 5, "sampled": 5, "rows": 5}))
    assert work is not None
    assert {name: work.taken[name] for name in taken} == taken
    assert not work.named(torch.Tensor.mul)
    factors = [node.given["factor"] for node in work.nodes.values() if "factor" in node.given]
    assert factors == [0.5] * taken["few rows + scaled + added"]
    scales = [node.given["routing"].scale for node in work.named("mixture")]
    assert scales == [0.5] * taken.get("experts added", 0)
    many = forward.rewritten("step", True, rewrite.Asked({"tokens": 50, "sampled": 50, "rows": 50}))
    assert many is not None
    assert [node.given["routing"].scale for node in many.named("mixture")] == [1.0] * len(scales)
    assert len(many.named(torch.Tensor.mul)) == 4


def test_routers_of_any_rule_are_joined_with_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    driver = small_model("GptOssForCausalLM", num_local_experts=32)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", True, rewrite.Asked({"tokens": 5, "sampled": 5, "rows": 5}))
    assert work is not None
    assert work.taken["norm + experts"] + work.taken["add + experts"] == 2  # layers
    live = [node.given.get("live") for node in work.named("mixture")]
    assert live == [work.input("live"), None]  # the second has other rows


def test_what_all_tokens_go_through_joins_the_add_behind_a_mixture() -> None:
    driver = small_model("Qwen2MoeForCausalLM")
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", True, rewrite.Asked({"tokens": 5, "sampled": 5, "rows": 5}))
    assert work is not None
    assert work.taken["shared added"] == 2  # layers


@pytest.mark.parametrize(
    ("architecture", "more", "why"),
    [
        ("Qwen3ForCausalLM", {"head_dim": 64}, "heads are not of 128 dimensions"),
        ("Qwen2ForCausalLM", {"model_type": "qwen2"}, "biases"),
        ("Gemma2ForCausalLM", {"model_type": "gemma2"}, "does not come where it is expected"),
        ("GraniteForCausalLM", {"model_type": "granite", "residual_multiplier": 0.5}, "is expected"),
        ("LlamaForCausalLM", {"model_type": "llama"}, "do not fit this model or GPU"),
        ("Glm4MoeForCausalLM", SIGMOIDS, "otherwise than by a softmax"),
    ],
)
def test_why_there_is_no_whole_step(architecture: str, more: dict[str, Any], why: str) -> None:
    driver = small_model(architecture, **more)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", False, ONE_ROW)
    assert work is not None
    assert "whole step" not in work.taken
    [said] = [reason for rule, reason in work.refused if rule == "whole step"]
    assert why in said


@pytest.mark.parametrize(
    ("look", "why"),
    [
        ([partial(ops.copied, to=torch.zeros(3, 256))], "not kept in bfloat16"),
        ([partial(ops.copied, to=torch.zeros(3, 256, dtype=torch.bfloat16))] * 2, "rms_norm does not come"),
        ([partial(ops.inplace, print)], "rms_norm does not come"),
    ],
)
def test_a_whole_step_copies_to_one_place_in_its_own_type(
    look: list[Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_step.DenseShape, "pays", lambda *_: True)
    driver = small_model("Qwen3ForCausalLM")
    for each in look:
        driver.model.blocks[1] = Hooked(driver.model.blocks[1], each)
    work = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend)).rewritten("step", False, ONE_ROW)
    assert work is not None
    [said] = [reason for rule, reason in work.refused if rule == "whole step"]
    assert why in said


@pytest.mark.parametrize(("factor", "why"), [(1.0, ""), (0.5, ""), (0.25, "16 of the 64 dims")])
def test_decode_attention_takes_heads_that_are_rotated_in_part(factor: float, why: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    driver = small_model("Glm4MoeForCausalLM", **SIGMOIDS | {"head_dim": 64, "rope_parameters": rope})
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", False, ONE_ROW)
    assert work is not None
    assert ("heads + decode" in work.taken) is not bool(why)
    assert any(why in reason for rule, reason in work.refused if rule == "heads + decode") is bool(why)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("HunYuanDenseV1ForCausalLM", {}),
        ("Ministral3ForCausalLM", {"model_type": "ministral3", "rope_parameters": GROWING}),
    ],
)
def test_decode_attention_scales_queries(architecture: str, more: dict[str, Any]) -> None:
    """By two norms' weights, and by a factor of each token."""
    driver = small_model(architecture, **more)
    decode = Mock(fuses=lambda kv: True, forward=lambda q, projection, **given: projection)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", False, ONE_ROW._replace(decode=decode))
    assert work is not None
    assert work.taken["heads, scaled + decode"] == 2  # layers
    assert not work.named(ops.scale_queries)
    node = work.named("decode")[0]
    factors = {name: node.given[name] for name in ("by", "also")}
    assert node.fn is not None
    made = node.fn(**node.given | {"q": None})
    assert {name: getattr(made, name) for name in factors} == factors
    assert (factors["also"] is None) is ("rope_parameters" in more)


@pytest.mark.parametrize(
    ("widths", "joined", "whys"),
    [
        ({128}, False, {"native decode attention does not take these heads": 1}),
        ({128, 256}, False, {}),
        ({128, 256}, True, {"v is what k was before its norm": 1}),
        (set(), False, {"native decode attention does not take these heads": 2}),
    ],
)
def test_decode_attention_takes_the_layers_whose_heads_it_takes(
    widths: set[int], joined: bool, whys: dict[str, int]
) -> None:
    """With the norm of their values."""
    driver = small_model("Gemma4ForCausalLM", global_head_dim=256, attention_k_eq_v=joined)
    decode = Mock(fuses=lambda kv: kv.k.shape[-1] in widths)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", False, ONE_ROW._replace(decode=decode))
    assert work is not None
    found = work.named("decode")
    expected = driver.kv[: 2 - sum(whys.values())]
    assert [id(node.given["kv"]) for node in found] == [id(kv) for kv in expected]
    assert all(node.given["projection"].v_norm for node in found)
    refused = {why: n for (rule, why), n in work.refused.items() if rule == "heads + decode"}
    assert refused == whys
    plain = small_model("Qwen3ForCausalLM")
    work = gpu.RecordedForward(plain.model, plain.kv, gpu.GpuOps(attend)).rewritten("step", False, ONE_ROW)
    assert work is not None
    assert [node.given["projection"].v_norm for node in work.named("decode")] == [False, False]


@pytest.mark.parametrize("normed", [False, True])
def test_products_whose_heads_are_normed_each_are_not_joined_with_what_rotates(
    normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that rotate know one vector of weights, of RMSNorm: these norms stand before them."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    for part in (batch_gemm, prompt_gemm):
        monkeypatch.setattr(part, "processors", lambda: 132)
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    driver = small_model("Command R+", **sizes, intermediate_size=3072, use_qk_norm=normed)
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    work = forward.rewritten("step", True, rewrite.Asked({"tokens": 2048, "sampled": 1, "rows": 1}))
    assert work is not None
    assert work.taken["heads"] == (0 if normed else 2)  # layers
    stored = [node for node in work.nodes.values() if node.op is ops.qk_norm_rope_store]
    assert [node.given["q_norm"] for node in stored] == [None, None] * normed


@needs_interpreter
@pytest.mark.parametrize("reads", ["the stream", "a view of it", "nothing"])
def test_an_add_takes_the_streams_memory_only_if_nobody_reads_it_later(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(skinny_gemm, "linear", Mock(wraps=skinny_linear))
    torch.manual_seed(0)
    table, w = pack(torch.randn(9, 128), "bf16"), pack(torch.randn(128, 128) / 12, "bf16")
    norm = torch.rand(128)

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=128), SimpleNamespace(weight=table)

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            h = ops.embedding(batch.ids, table)
            old = {"the stream": h, "a view of it": h.view(-1, 2, 64)[:, 1], "nothing": None}[reads]
            x, h = ops.add_rms_norm(ops.linear(h, w), h, norm, 1e-5)
            x = ops.linear(x, w) + h
            return x if old is None else torch.cat([x, old], 1)

    batch: Any = SimpleNamespace(
        ids=torch.arange(5, dtype=torch.int32), tokens=5, rows=5, media=None, canvas=None, live=None
    )
    expected = Layer().forward(batch, [], None).float()
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    found = forward.hidden(batch).float()
    assert not forward.notes
    assert (found - expected).norm() < 0.02 * expected.norm()
    [program] = forward._programs.values()
    assert ("few rows + added" in program.work.taken) is (reads == "nothing")


class Doubling:
    """Two ranks that have the same, as ``ops.Ranks``."""

    def __init__(self, norms: bool, sends: bool = False) -> None:
        self._norms, self._sends = norms, sends

    def all_reduce(self, x: Tensor) -> None:
        x.mul_(2)

    def norms(self, x: Tensor) -> bool:
        return self._norms

    def sending(self, rows: int, d: int) -> Any:
        return (rows, d) if self._sends else None

    def all_reduce_norm(self, x: Tensor, norm: ops.AddedNorm, sent: ops.Sent = "") -> Tensor:
        assert not sent or (self._sends and norm.residual is not None)
        h = 2 * x
        if norm.residual is not None:
            h = norm.residual.add_(h)
        return normed(h, norm)


def normed(h: Tensor, norm: ops.AddedNorm) -> Tensor:
    if norm.bias is None:
        return ops.rms_norm.body(h, norm.weight, norm.eps)
    return ops.layer_norm.body(h.float(), norm.weight, norm.bias, norm.eps).to(h.dtype)


def added(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """An add and its norm, a LayerNorm if that has a bias."""
    if bias is None:
        return ops.add_rms_norm(x, h, weight, 1e-5)
    return ops.add_layer_norm(x, h, weight, bias, 1e-5)


@needs_interpreter
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("rows", [5, 20, 70, 500])
@pytest.mark.parametrize(
    ("norms", "sends", "rounds"),
    [(True, False, True), (False, False, True), (True, True, True), (True, True, False)],
)
def test_norms_behind_a_sum_over_ranks_are_its_own(
    norms: bool, sends: bool, rounds: bool, rows: int, layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an add comes before, whose product may send what it makes, and one that comes before an add;
    and one that an add comes before of what is multiplied."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    monkeypatch.setattr(prompt_gemm, "processors", lambda: 8)  # which 500 rows fill once
    monkeypatch.setattr(tiles, "SENT_ROUNDS", 1 if rounds else 2)
    given: list[Any] = []

    def product(x: Tensor, w: Tensor, *config: Any, send: Any = None, **more: Any) -> Tensor:
        given.append(send)
        return skinny_linear(x, w, **more | {"scale": None})

    monkeypatch.setattr(skinny_gemm, "linear", product)
    monkeypatch.setattr(batch_gemm, "linear", product)
    monkeypatch.setattr(prompt_gemm, "linear", product)
    torch.manual_seed(0)
    table, w = pack(torch.randn(80, 512), "bf16"), pack(torch.randn(512, 512) / 24, "bf16")
    first, second, ranks = torch.rand(512), torch.rand(512), Doubling(norms, sends)
    bias = torch.rand(512) if layer else None

    class Layer:
        unrecorded, shard = "", Shard()
        spec = SimpleNamespace(hidden=512)
        embed = SimpleNamespace(weight=table, dtype=torch.bfloat16)

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            h = ops.embedding(batch.ids, table)
            x = ops.rms_norm(ops.all_reduce(ops.linear(h, w), ranks), first, 1e-5)
            x, h = ops.add_rms_norm(x, h, second, 1e-5)
            x, h = added(ops.all_reduce(ops.linear(x, w), ranks) * 0.5, h, first, bias)
            return added(ops.all_reduce(ops.linear(x, w), ranks), h, first, bias)[0]

    batch: Any = SimpleNamespace(
        ids=torch.arange(rows, dtype=torch.int32) % 80,
        tokens=rows,
        rows=rows,
        media=None,
        canvas=None,
        live=None,
    )
    expected = Layer().forward(batch, [], None).float()
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    found = forward.hidden(batch).float()
    assert (found - expected).norm() < 0.02 * expected.norm()
    [program] = forward._programs.values()
    sent = sends and (rows <= tiles.SENT or (rounds and rows > batch_gemm.MAX_ROWS))
    assert program.work.taken["norm behind the ranks' sum"] == 3 * norms - sent
    assert len(program.work.named(ops.all_reduce)) == (0 if norms else 3)
    assert given == [None, None, (rows, 512) if sent else None]


class Twins:
    """Two ranks with the same rows, as ``ops.Together``."""

    def __init__(self, exchanges: bool, takes: bool) -> None:
        self.exchanges, self._takes, self.normed = exchanges, takes, 0

    def norms(self, y: Tensor, x: Tensor) -> bool:
        return self._takes

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Tensor:
        return 2 * y[len(x) :]

    def reduce_scatter_norm(self, y: Tensor, x: Tensor, norm: ops.AddedNorm) -> Tensor:
        assert norm.residual is not None
        self.normed += 1
        return normed(norm.residual.add_(self.reduce_scatter(y, x)), norm)


@pytest.mark.parametrize("each", ["token", "head"])
def test_scaled_queries_stay_beside_keys_and_values(each: str) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 4 * 16 + 2 * 32).bfloat16()
    q, beside = qkv.split([64, 64], dim=1)
    by, also = torch.rand(2, 5, 1) if each == "token" else torch.rand(2, 16)
    for factors in ((by,), (by, also)):
        expected, kept = ops.scale_queries.body(q, *factors), beside.clone()
        found = gpu.GpuOps(attend).scale_queries(q, *factors)
        assert torch.equal(found, expected) or len(factors) > 1
        torch.testing.assert_close(found, expected)
    assert found.data_ptr() == qkv.data_ptr()
    assert found.stride() == q.stride()
    assert torch.equal(beside, kept)


@needs_interpreter
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("exchanges", "takes"), [(True, True), (True, False), (False, False)])
def test_norms_behind_scattered_sums_are_theirs(
    exchanges: bool, takes: bool, layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one program that also has steps which the ranks cannot exchange so."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(skinny_gemm, "linear", skinny_linear)
    torch.manual_seed(0)
    table, w = pack(torch.randn(9, 128), "bf16"), pack(torch.randn(128, 128) / 12, "bf16")
    weight, ranks = torch.rand(128), Twins(exchanges, takes)
    bias = torch.rand(128) if layer else None

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=128), SimpleNamespace(weight=table)

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            h = ops.embedding(batch.ids, table)
            x = ops.rms_norm(h, weight, 1e-5)
            y = ops.linear(ops.gathered(x, ranks), w)
            return added(ops.reduce_scatter(y, x, ranks), h, weight, bias)[0]

    batch: Any = SimpleNamespace(
        ids=torch.arange(5, dtype=torch.int32), tokens=5, rows=5, media=None, canvas=None, live=None
    )
    expected = Layer().forward(batch, [], None).float()
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    found = forward.hidden(batch).float()
    assert not forward.notes
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert ranks.normed == takes
    [program] = forward._programs.values()
    assert program.work.taken["norm behind the ranks' sum"] == exchanges


@needs_interpreter
@pytest.mark.parametrize("apart", [0, 4])
@pytest.mark.parametrize("activation", ["sigmoid_mul", "silu", "sigmoid"])
def test_the_product_behind_a_gate_takes_both(
    activation: str, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows of the gate do not lie at multiples of 16 bytes, and with more rows, each is by itself."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    skinny = Mock(wraps=skinny_linear)
    monkeypatch.setattr(skinny_gemm, "linear", skinny)
    torch.manual_seed(0)
    table = pack(torch.randn(9, 256 + apart), "bf16")
    w, norm = pack(torch.randn(64, 128) / 12, "bf16"), torch.rand(64) + 0.5

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=64), SimpleNamespace(weight=table)

        def forward(self, batch: Any, kv: Any, rows: Any) -> Tensor:
            x = ops.embedding(batch.ids, table)
            x, gate = x[:, :128], x[:, 128 + apart :]
            if activation == "sigmoid_mul":
                return ops.linear(ops.sigmoid_mul(x, gate), w)
            x, gate = (y.unflatten(1, (-1, 64)) for y in (x, gate))
            return ops.linear(ops.gated_rms_norm(x, gate, norm, 1e-5, activation).flatten(1), w)

    for rows in (1, 2, 3):
        batch: Any = SimpleNamespace(
            ids=torch.arange(rows, dtype=torch.int32),
            tokens=rows,
            rows=rows,
            media=None,
            canvas=None,
            live=None,
        )
        expected = Layer().forward(batch, [], None).float()
        forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
        skinny.reset_mock()
        found = forward.hidden(batch).float()
        assert not forward.notes
        assert (found - expected).norm() < 0.02 * expected.norm()
        [program] = forward._programs.values()
        assert program.work.taken["gated + few rows"] == (rows < 3)
        [call] = skinny.call_args_list
        assert (call.kwargs.get("gate") is not None) == (rows < 3 and not apart)


def test_what_has_a_kernel_is_recorded_as_itself() -> None:
    """Or its body would be."""
    assert set(LOWERINGS) <= set(RESULTS)


def test_the_library_loads_its_kernels_for_every_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a product of each shape of weights, where it multiplies them."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    monkeypatch.setattr(tuning, "measured", lambda *asked: None)
    monkeypatch.setattr(batch_gemm, "default_config", lambda *shape: None)
    monkeypatch.setattr(prompt_gemm, "refuses", lambda *shape: "not here")
    driver = small_model("LlamaForCausalLM")
    forward = gpu.RecordedForward(driver.model, driver.kv, gpu.GpuOps(attend))
    seen = Mock()
    monkeypatch.setattr(torch.nn.functional, "linear", seen)
    forward.load_library(100)
    asked = {(x.shape[0], *weight.shape) for x, weight in (call.args for call in seen.call_args_list)}
    record = forward._record("hidden", True)
    assert record is not None
    assert asked == {(m, w.n, w.k) for m in (16, 32, 48, 64, 80, 96) for w in record.weights}
    seen.reset_mock()
    forward.load_library(8)
    seen.assert_not_called()
