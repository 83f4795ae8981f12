"""fp8 weights: checkpoints in each of the usual layouts, what errors say, and the error of the numbers."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import BLOCK, E4M3, Eager, random_prompts, save_checkpoint, store_as_fp8
from safetensors.torch import load_file, save_file
from tiny import tiny_source
from torch import Tensor

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import open_source
from sgla.kernels import ops
from sgla.kernels.ops import Activation
from sgla.layers.build import CHUNK, Share, fill
from sgla.loading.load import load_model
from sgla.observe.machine import detect
from sgla.quant.channels import E4M3Groups
from sgla.quant.weight import SourceTensor, Weight, pack
from sgla.resolve import resolve

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def quantize_checkpoint(folder: Path, layout: str, **config: Any) -> dict[str, torch.Tensor]:
    """``store_as_fp8``, and say so in the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return store_as_fp8(folder, layout)


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"head_dim": 16}),
        ("phi3", {}),  # fused layers
        (
            "qwen3_moe",
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        ),
    ],
)
def test_checkpoints_hold_their_numbers(
    layout: str, model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "fp8", model_type, **changes)
    save_checkpoint(tmp_path / "plain", model_type, **changes)
    blocks = {"weight_block_size": [BLOCK, BLOCK]} if layout == "block" else {}
    plain = quantize_checkpoint(tmp_path / "fp8", layout, quant_method="fp8", **blocks)
    save_file(plain, tmp_path / "plain/model.safetensors", {"format": "pt"})
    prompts = random_prompts([30, 9])
    expected = Eager(load_model(open_source(tmp_path / "plain"))).prompt_logprobs(prompts)
    wide = Eager(load_model(open_source(tmp_path / "fp8"))).prompt_logprobs(prompts)
    torch.testing.assert_close(wide, expected)
    model = load_model(open_source(tmp_path / "fp8"), quantization="fp8")
    kept = model.blocks[0].attention.qkv.weight.data.dtype
    assert kept == (torch.float32 if layout == "block" else E4M3)  # blocks of 32 are rounded on GPUs alone
    torch.testing.assert_close(Eager(model).prompt_logprobs(prompts), expected)
    rows, native = (Eager(model, native=each).generate([[1, 2, 3]], 4) for each in (False, True))
    assert native[0].tokens == rows[0].tokens


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"head_dim": 64, "num_attention_heads": 4}),
        (
            "qwen3_moe",
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 144},
        ),
    ],
)
def test_blocks_of_128_stay_as_they_are(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where layers that are multiplied as one begin in the middle of a block, and on ranks."""
    sizes = {"hidden_size": 272, "intermediate_size": 512, "num_hidden_layers": 2}
    save_checkpoint(tmp_path / "fp8", model_type, **(sizes | changes))
    save_checkpoint(tmp_path / "plain", model_type, **(sizes | changes))
    plain = quantize_checkpoint(
        tmp_path / "fp8", "block of 128", quant_method="fp8", weight_block_size=[128, 128]
    )
    save_file(plain, tmp_path / "plain/model.safetensors", {"format": "pt"})
    prompts = random_prompts([30, 9])
    expected = Eager(load_model(open_source(tmp_path / "plain"))).prompt_logprobs(prompts)
    model = load_model(open_source(tmp_path / "fp8"), quantization="fp8")
    assert model.blocks[0].attention.qkv.weight.kind == "fp8g128"
    torch.testing.assert_close(Eager(model).prompt_logprobs(prompts), expected)
    if model_type == "qwen3":
        half = load_model(open_source(tmp_path / "fp8"), quantization="fp8", shard=Shard(1, 2))
        whole, part = (m.blocks[1].mlp.down.weight.dequant() for m in (model, half))
        assert torch.equal(part, whole[:, 256:])
        with pytest.raises(ConfigError, match="split over ranks in groups of 128"):
            load_model(open_source(tmp_path / "fp8"), quantization="fp8", shard=Shard(1, 4))


def stacked(tensors: dict[str, torch.Tensor], turned: bool) -> dict[str, torch.Tensor]:
    """With the matrices of all experts in one tensor, gate before up, and their scales in another."""
    found, stacks = {}, dict[str, list[torch.Tensor]]()
    for name in sorted(tensors, key=lambda name: (name.partition(".experts.")[0], "up_proj" in name, name)):
        layer, _, rest = name.partition(".experts.")
        if ".weight" not in rest:
            found |= {} if rest else {name: tensors[name]}
            continue
        expert, which, suffix = rest.split(".")
        stack = "down_proj" if which == "down_proj" else "gate_up_proj"
        suffix = suffix.removeprefix("weight")
        stacks.setdefault(f"{layer}.experts.{stack}{suffix}|{int(expert):03d}", []).append(tensors[name])
    wide = dict[str, list[torch.Tensor]]()
    for key in sorted(stacks):
        parts = stacks[key]
        matrix = torch.cat(parts) if parts[0].dim() else parts[0].view(1, 1)
        wide.setdefault(key.partition("|")[0], []).append(matrix.t() if turned else matrix)
    return found | {name: torch.stack(parts).contiguous() for name, parts in wide.items()}


@pytest.mark.parametrize("turned", [False, True], ids=["outputs first", "inputs first"])
@pytest.mark.parametrize("layout", ["tensor", "channel", "block of 128"])
def test_experts_may_be_stacks(layout: str, turned: bool, tmp_path: Path) -> None:
    """As Qwen3-VL's and Mistral Small 4's files have them."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 16}
    save_checkpoint(tmp_path / "each", "qwen3_moe", **sizes)
    blocks = {"weight_block_size": [128, 128]} if layout == "block of 128" else {}
    quantize_checkpoint(tmp_path / "each", layout, quant_method="fp8", **blocks)
    path = tmp_path / "each/model.safetensors"
    tensors = load_file(path)
    if layout == "tensor":  # gate and up have one in common
        for name in tensors:
            if name.endswith("up_proj.weight_scale"):
                tensors[name] = tensors[name.replace("up_proj", "gate_proj")]
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})
    (tmp_path / "stacks").mkdir()
    config = json.loads((tmp_path / "each/config.json").read_text())
    save_file(stacked(tensors, turned), tmp_path / "stacks/model.safetensors", {"format": "pt"})
    (tmp_path / "stacks/config.json").write_text(json.dumps(config))
    each, stacks = (
        load_model(open_source(tmp_path / name), quantization="checkpoint") for name in ("each", "stacks")
    )
    for one, other in zip(each.blocks, stacks.blocks):
        assert one.mlp.gate_up.kind == other.mlp.gate_up.kind
        assert torch.equal(one.mlp.gate_up.dequant(), other.mlp.gate_up.dequant())
        assert torch.equal(one.mlp.down.dequant(), other.mlp.down.dequant())


def test_stacks_of_floats_and_of_e4m3_may_lie_alike(tmp_path: Path) -> None:
    """Input by input, as Llama 4's."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "head_dim": 8}
    for name in ("plain", "fp8"):
        save_checkpoint(tmp_path / name, "llama4_text", **sizes, moe_layers=[0, 1, 2])
    plain, stored = load_file(tmp_path / "plain/model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if ".experts." not in name:
            stored[name] = tensor
            continue
        scale = tensor.abs().amax((1, 2), keepdim=True) / 448
        stored |= {name: (tensor / scale).to(E4M3), f"{name}_scale_inv": scale}
        stored[f"{name}_activation_scale"] = torch.ones(3, 1, 1)
        plain[name] = stored[name].float() * scale
    save_file(plain, tmp_path / "plain/model.safetensors", {"format": "pt"})
    save_file(stored, tmp_path / "fp8/model.safetensors", {"format": "pt"})
    path = tmp_path / "fp8/config.json"
    said = {"quant_method": "fp8", "activation_scheme": "static"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    prompts = random_prompts([30, 9])
    expected = Eager(load_model(open_source(tmp_path / "plain"))).prompt_logprobs(prompts)
    model = load_model(open_source(tmp_path / "fp8"), quantization="checkpoint")
    assert model.blocks[0].mlp.gate_up.kind == "fp8"
    torch.testing.assert_close(Eager(model).prompt_logprobs(prompts), expected)
    for wrong, words in (
        (torch.ones(3, 1, 5), "5 constants for 192 rows"),
        (torch.ones(2, 1, 1), "expected those of 3 experts"),
    ):
        name = "model.layers.0.feed_forward.experts.gate_up_proj_scale_inv"
        save_file(stored | {name: wrong}, tmp_path / "fp8/model.safetensors", {"format": "pt"})
        with pytest.raises(WeightError, match=words):
            load_model(open_source(tmp_path / "fp8"), quantization="checkpoint")


def test_ranks_have_whole_blocks(tmp_path: Path) -> None:
    """Five blocks of an MLP and three of experts are not cut by two ranks; fewer blocks than ranks are."""
    changes = {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "mlp_only_layers": [0]}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 384}
    save_checkpoint(tmp_path, "qwen3_moe", hidden_size=256, intermediate_size=640, **(changes | experts))
    quantize_checkpoint(tmp_path, "block of 128", quant_method="fp8", weight_block_size=[128, 128])
    shards = (Shard(), Shard(0, 2), Shard(1, 2))
    whole, *parts = (load_model(open_source(tmp_path), quantization="fp8", shard=shard) for shard in shards)
    for layer, widths in ((0, [256, 384]), (1, [128, 256])):
        found = [
            part.blocks[layer].mlp.down.weight if layer == 0 else part.blocks[layer].mlp.down
            for part in parts
        ]
        assert [each.k for each in found] == widths
        down = whole.blocks[layer].mlp.down
        held = (down.weight if layer == 0 else down).dequant()
        assert torch.equal(torch.cat([each.dequant() for each in found], 1), held)
    with pytest.raises(ConfigError, match="split over ranks in groups of 128"):
        load_model(open_source(tmp_path), quantization="fp8", shard=Shard(1, 4))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [("checkpoint", "fp8 blocks split over ranks in groups of 128"), ("int4", "int4 weights split over")],
)
def test_ranks_that_would_cut_groups_are_refused_before_weights_are_read(
    quantization: str, words: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "qwen3", head_dim=24, num_attention_heads=6)
    quantize_checkpoint(tmp_path, "block of 128", quant_method="fp8", weight_block_size=[128, 128])
    made: list[Any] = []
    with pytest.raises(ConfigError, match=words):
        load_model(open_source(tmp_path), quantization=quantization, shard=Shard(0, 2), on_model=made.append)
    assert not made


def test_ranks_hold_their_part_with_the_scales_of_whole_rows(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3", head_dim=16)
    whole, half = (
        load_model(open_source(tmp_path), quantization="fp8", shard=shard) for shard in (Shard(), Shard(1, 2))
    )
    part, everything = (model.blocks[0].attention.out.weight.dequant() for model in (half, whole))
    assert torch.equal(part, everything[:, 48:])


@pytest.mark.parametrize("name", ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale"])
def test_scales_of_the_kv_cache_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3", head_dim=16, num_hidden_layers=2)
    quantize_checkpoint(tmp_path, "tensor", quant_method="fp8")
    file = tmp_path / "model.safetensors"
    tensors = {key: x for key, x in load_file(file).items() if not key.endswith(("k_scale", "v_scale"))}
    given = {(i, part): 0.25 * i + (0.5 if part == "k" else 0.125) for i in range(2) for part in "kv"}
    for (i, part), scale in given.items():
        tensors[f"model.layers.{i}.{name.format(part, part)}"] = torch.tensor([scale])
    save_file(tensors, file, {"format": "pt"})
    model = load_model(open_source(tmp_path), quantization="fp8")
    assert model.cache_scales == [(0.5, 0.125), (0.75, 0.375)]
    last = f"model.layers.1.{name.format('v', 'v')}"
    heads = torch.tensor([0.25, 0.375]).view(2, 1, 1)  # llm-compressor's attn_head
    save_file(tensors | {last: heads}, file, {"format": "pt"})
    assert load_model(open_source(tmp_path), quantization="fp8").cache_scales == [(0.5, 0.125), (0.75, 0.375)]
    integers, nothing = torch.ones(1, dtype=torch.int8), torch.ones(0)
    for wrong in (None, torch.tensor([0.0]), torch.tensor([float("nan"), 1.0]), integers, nothing):
        changed = {key: tensor for key, tensor in tensors.items() if key != last}
        save_file(changed if wrong is None else changed | {last: wrong}, file, {"format": "pt"})
        assert load_model(open_source(tmp_path), quantization="fp8").cache_scales is None


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3", head_dim=16)
    quantize_checkpoint(tmp_path, "block", quant_method="fp8")  # blocks of 128, says the file
    with pytest.raises(WeightError, match=r"weight_scale_inv has shape .* blocks of 128 x 128"):
        load_model(open_source(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"quant_method"', f'"weight_block_size": [{BLOCK}, {BLOCK}], "quant_method"')
    )
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"without a scale \(model.layers.1.mlp.up_proj.weight_scale"):
        load_model(open_source(tmp_path))


@pytest.mark.native
def test_a_cpu_makes_e4m3_at_load() -> None:
    """Its program multiplies them as torch does."""
    assert resolve(Config(quantization="fp8", device="cpu"), detect()).config.quantization == "fp8"
    model = load_model(tiny_source(num_hidden_layers=1), "bfloat16", "fp8")
    assert model.blocks[0].mlp.down.weight.kind == "fp8"
    assert model.lm_head.weight.kind == "bf16"
    rows, native = (Eager(model, native=each).generate([[1, 2, 3]], 4) for each in (False, True))
    assert native[0].tokens == rows[0].tokens
    assert model.blocks[0].mlp.down.weight.panels.kind == "e4m3"


def test_online_quantization_stays_close(tmp_path: Path) -> None:
    """In nats of KL divergence a token; float32 is the reference. Vocabulary and router are not quantized."""
    changes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    save_checkpoint(tmp_path, "qwen3_moe", hidden_size=96, num_hidden_layers=2, **changes)
    prompts = random_prompts([50, 60])
    exact = Eager(load_model(open_source(tmp_path))).prompt_logprobs(prompts)
    model = load_model(open_source(tmp_path), quantization="fp8")
    assert model.blocks[0].mlp.router.kind == model.lm_head.weight.kind == "f32"
    divergence = (exact.exp() * (exact - Eager(model).prompt_logprobs(prompts))).sum(-1).mean().item()
    assert 0 < divergence < 0.05


def test_fused_rounding_equals_rounding() -> None:
    pytest.importorskip("triton")
    from sgla.kernels.triton import fp8

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, h, w = (
        torch.randn(5, 96, device=device),
        torch.randn(5, 96, device=device),
        torch.rand(96, device=device),
    )
    norm, total, small = fp8.add_norm_quantize(x, h, w, 1e-5)
    for out, expected in zip((norm, total), ops.add_rms_norm(x, h, w, 1e-5)):
        torch.testing.assert_close(out, expected)
    gate: list[Activation] = ["silu", "gelu_tanh"]
    pairs = [(small, norm)] + [(fp8.act_mul_quantize(x, kind), ops.act_mul(x, kind)) for kind in gate]
    for (numbers, scale), plain in pairs:
        torch.testing.assert_close(scale, plain.abs().amax(1) / 448)
        assert (numbers.float() * scale[:, None] - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(small.numbers.float(), fp8.quantize(norm).numbers.float())


def test_products_by_blocks_know_rows_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is given what it asks for: rows in fours, and scales of the first numbers outermost."""
    pytest.importorskip("triton")
    from sgla.kernels.triton import fp8

    def scaled_mm(
        a: Tensor, b: Tensor, of_a: Tensor, each: Any, of_b: Tensor, block: Any, bias: Tensor
    ) -> Tensor:
        rows, k = a.shape
        assert rows % 4 == 0
        assert (of_a.shape, of_a.stride()) == ((rows, k // 128), (1, rows))
        assert (of_b.shape, of_b.stride()) == ((k // 128, b.shape[1] // 128), (1, k // 128))
        of_b = of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a.float() * of_a.repeat_interleave(128, 1)) @ (b.float() * of_b) + bias

    monkeypatch.setattr(fp8, "scaled_mm", scaled_mm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate = torch.randn(5, 512, device=device), torch.randn(6, 1024, device=device)
    w, norm = E4M3Groups.pack(torch.randn(256, 512, device=device)), torch.rand(512, device=device)
    blocks = w.blocks()
    assert blocks is not None
    bias = torch.randn(256, device=device)
    found = [fp8.quantize(x), fp8.norm_quantize(x, norm, 1e-6), fp8.act_mul_quantize(gate, "silu")]
    found.append(fp8.add_norm_quantize(x, x, norm, 1e-6)[2])
    for rounded in found:
        y = (rounded.numbers.float() * rounded.scale[:, None]) @ w.dequant().T + bias.bfloat16()
        torch.testing.assert_close(fp8.blocks(rounded, w.data, blocks, bias), y)


def test_rows_that_share_scales_go_on_to() -> None:
    """A part with scales for each row is rounded once more, in tensors that kernels know."""
    w, at = E4M3Groups.pack(torch.randn(256, 512)), 64
    blocks, dense = w.blocks(), torch.randn(128, 512) * torch.logspace(-1, 1, 128)[:, None]
    assert blocks is not None
    assert torch.equal(blocks.repeat_interleave(128, 0), w.tensors[1])
    scale = dense.view(128, 4, 128).abs().amax(-1) / 448
    numbers = (dense / scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    part = E4M3Groups(128, 512, numbers, scale)
    assert part.blocks() is None
    assert part.scales() is scale
    w._write(at, part)
    assert w.blocks() is w.scales() is blocks
    assert torch.equal(blocks.repeat_interleave(128, 0), w.tensors[1])
    error = (w.dequant()[at : at + 128] - dense).abs()
    assert (error <= 33 * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[at : at + 128]).all()
    one = E4M3Groups.pack(torch.randn(128, 1024)).columns(512, 1024).blocks()
    assert one is not None
    assert one.stride() == (4, 1)
    assert E4M3Groups.pack(torch.randn(100, 512)).blocks() is None  # no whole block


def test_threads_that_load_write_blocks_that_a_step_has_found() -> None:
    """They are not in its inference mode."""
    w, part = (E4M3Groups.pack(torch.randn(128, 512)) for _ in range(2))
    with torch.inference_mode():
        blocks = w.blocks()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(w._write, 0, part).result()
    assert blocks is not None
    assert torch.equal(blocks, part.tensors[1][:1])


def test_blocks_with_scales_of_zero_go_on_to() -> None:
    w = E4M3Groups.pack(torch.randn(128, 256))
    assert w.blocks() is not None
    part = E4M3Groups.pack(torch.randn(128, 256))
    numbers, scale = part.tensors
    numbers.view(torch.uint8)[:, :128] = 0
    scale[:, 0], scale[64:, 1] = 0.0, 2 * scale[64:, 1]
    w._write(0, part)
    assert not w.dequant()[:, :128].any()
    assert torch.allclose(w.dequant(), part.dequant(), atol=float(scale.max()), rtol=2**-4)


def test_wide_rows_come_in_whole_blocks() -> None:
    """What lies in the others' place, as after memory was given back, is no part of their scales."""
    k = CHUNK // 128 + 512
    source = E4M3Groups.pack(torch.randn(256, k))

    class Source:
        shape = 256, k

        def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
            return source.pick(torch.tensor(rows))

    w = E4M3Groups.empty(256, k)
    share = Share(cast(SourceTensor, Source()), 0, 1)
    fill(w, 0, share, range(256))
    assert w.blocks() is not None
    w.tensors[0].view(torch.uint8).fill_(255)
    w.tensors[1].fill_(torch.nan)
    fill(w, 0, share, range(256))
    assert torch.equal(w.dequant(), source.dequant())


def test_activations_keep_three_bits_of_mantissa() -> None:
    pytest.importorskip("triton")
    from sgla.kernels.triton import fp8

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(5, 96, device=device) * torch.logspace(-6, 6, 5, device=device)[:, None]
    x[2] = 0.0
    q, scale = fp8.quantize(x)
    error = (q.float() * scale[:, None] - x).abs()
    # half of the last of three bits, and of the smallest number
    fits = error <= 1.001 * (x.abs() * 2**-4 + scale[:, None] * 2**-10)
    if device == "cpu":  # Triton's interpreter loses the carry where rounding reaches a power of two
        fits |= (x / scale[:, None]).frexp().mantissa.abs() > 31 / 32
    assert bool(fits.all())
    assert torch.equal(q[2].float(), torch.zeros(96, device=device))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lm_head.weight", "F8_E5M2"),
        ("model.embed_tokens.weight", "F8_E5M2"),
        ("model.layers.0.self_attn.q_proj.weight", "F8_E5M2"),
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3FNUZ"),
        ("model.layers.1.self_attn.k_norm.weight", "F8_E8M0"),
        ("model.norm.weight", "F8_E4M3"),
    ],
)
def test_numbers_without_a_scale_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    """transformers reads them as they stand, which is hardly what they mean."""
    save_checkpoint(tmp_path, "qwen3", head_dim=16)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    types = {
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3": torch.float8_e4m3fn,
    }
    tensors[name] = torch.ones_like(tensors[name]).to(types[kind])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightError, match=rf"{name} cannot be read: it holds {kind} .*, expected one of"):
        load_model(open_source(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on the device")
@pytest.mark.parametrize(("m", "splits"), [(5, 1), (40, 2)])
def test_products_with_scales_of_groups_equal_the_oracle(m: int, splits: int) -> None:
    """Channels of k that are no whole group, rows and outputs that are no whole tile."""
    pytest.importorskip("triton")
    from sgla.kernels.triton import fp8

    w, bias = pack(torch.randn(72, 336), "fp8g128"), torch.randn(72)
    x = fp8.quantize(torch.randn(m, 336))
    assert w.scale is not None
    found = fp8.grouped(x, w.data, w.scale, bias, fp8.Tile(32, 16, 4, 2, splits))
    expected = x.numbers.float() * x.scale[:, None] @ w.dequant().T + bias
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
