"""sgla quantize: what it writes is loaded here and by transformers, and calibration lowers the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.cli import main
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.loading.calibrate import calibration, gptq
from sgla.loading.load import load_model
from sgla.loading.quantize import nearest, plan, write
from sgla.loading.source import open_source
from sgla.quant.encode import Recipe

PROMPTS = random_prompts([9, 2, 30])
SHAPE = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def written(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "format", "kind", "changes"),
    [
        ("llama", "w4a16", "q4_0", SHAPE),
        ("qwen3", "int8", "q8_0", SHAPE),
        ("llama", "fp8", "fp8", SHAPE),
        (
            "qwen3_moe",
            "w4a16",
            "q4_0",
            {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        ),
    ],
)
def test_what_is_written_is_near_what_was_read(
    model_type: str, format: str, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", model_type, **SHAPE | changes, num_hidden_layers=2)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--format", format]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    quantization = "fp8" if format == "fp8" else "checkpoint"
    model = load_model(open_source(tmp_path / "out"), quantization=quantization)
    block, plain = model.blocks[1], load_model(open_source(tmp_path / "model")).blocks[1]
    for found, wanted in ((block.attention.qkv, plain.attention.qkv), (block.mlp.gate_up, plain.mlp.gate_up)):
        weight, expected = (getattr(each, "weight", each) for each in (found, wanted))
        assert weight.kind == kind
        error = (weight.dequant() - expected.dequant()).norm() / expected.dequant().norm()
        assert error < {"w4a16": 0.1, "int8": 0.01, "fp8": 0.04}[format]
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--format", format]) == 2
    with pytest.raises(ConfigError, match="quantized already"):
        plan(open_source(tmp_path / "out"), "int8")


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_moe"])
def test_stacks_of_experts_are_rounded_one_by_one(model_type: str, tmp_path: Path) -> None:
    """Of inputs first, as Llama 4's, and of outputs first, as transformers 5 has them."""
    path = tmp_path / "model/model.safetensors"
    if model_type == "llama4_text":
        sizes = {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        save_checkpoint(tmp_path / "model", model_type, **SHAPE | sizes, moe_layers=[0, 1, 2])
    else:
        save_checkpoint(tmp_path / "model", model_type, **SHAPE | MIXTURE)
        tensors = load_file(path)
        for layer in range(3):
            experts = f"model.layers.{layer}.mlp.experts"
            parts = [
                [tensors.pop(f"{experts}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")]
                for e in range(3)
            ]
            tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(each[:2]) for each in parts])
            tensors[f"{experts}.down_proj"] = torch.stack([each[2] for each in parts])
        save_file(tensors, path, {"format": "pt"})
    write(plan(open_source(tmp_path / "model"), "int8"), tmp_path / "out", nearest, lambda _: None)
    model = load_model(open_source(tmp_path / "out"), quantization="checkpoint")
    assert {block.mlp.gate_up.kind for block in model.blocks} == {"q8_0"}
    expected = Eager(load_model(open_source(tmp_path / "model"))).prompt_logprobs(PROMPTS)
    assert (Eager(model).prompt_logprobs(PROMPTS) - expected).abs().mean() < 0.05


def test_what_fails_leaves_an_empty_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama", **SHAPE)
    path = tmp_path / "model/model.safetensors"
    whole = load_file(path)
    save_file({name: w for name, w in whole.items() if "1.mlp.up" not in name}, path, {"format": "pt"})
    job = plan(open_source(tmp_path / "model"), "w4a16")
    with pytest.raises(ConfigError, match="leave --calibrate out"):
        write(job, tmp_path / "out", calibration(random_prompts([32]), "gptq"), lambda _: None)
    write(job, tmp_path / "out", nearest, lambda _: None)


@torch.no_grad()
@pytest.mark.parametrize("format", ["w4a16", "int8", "fp8"])
def test_transformers_reads_it_alike(format: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path / "model", "llama", **SHAPE, num_hidden_layers=2)
    write(plan(open_source(tmp_path / "model"), format), tmp_path / "out", nearest, lambda _: None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_model(open_source(tmp_path / "out"))
    logits = theirs(torch.tensor([PROMPTS[0]])).logits[0].float().log_softmax(-1)
    expected = Eager(ours).prompt_logprobs([PROMPTS[0]])
    # transformers rounds activations to 8 bits, as the file says
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 if format == "w4a16" else 0.5)


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    ["gptq llama", "awq qwen3", "awq gemma3_text", "gptq gemma3_text", "gptq qwen3_moe", "awq qwen3_moe"],
)
def test_calibration_lowers_the_error_on_its_text(case: str, tmp_path: Path) -> None:
    method, model_type = case.split()
    more = MIXTURE if model_type == "qwen3_moe" else {}
    save_checkpoint(tmp_path / "model", model_type, **SHAPE | more, num_hidden_layers=2)
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():  # some channels have large inputs, as trained models have them
        if name.endswith("layernorm.weight"):
            tensor[:4] *= 8
    save_file(tensors, path, {"format": "pt"})
    job, rows = plan(open_source(tmp_path / "model"), "w4a16"), random_prompts([32] * 8)
    write(job, tmp_path / "nearest", nearest, lambda _: None)
    write(job, tmp_path / "solved", calibration(rows, method), lambda _: None)
    first, second = written(tmp_path / "nearest"), written(tmp_path / "solved")
    assert first.keys() == second.keys()
    assert {name for name in first if not torch.equal(first[name], second[name])} >= {
        f"model.layers.1.self_attn.{which}_proj.weight_packed" for which in "qkv"
    }
    assert all(torch.equal(w, second[name]) for name, w in first.items() if ".experts." in name)
    expected, near, solved = (
        Eager(load_model(open_source(tmp_path / name))).prompt_logprobs(rows)
        for name in ("model", "nearest", "solved")
    )
    # Norms of Gemma are near 1 in this model, so that none of its channels is large.
    most = 1.05 if case == "awq gemma3_text" else 1.1 if more else 0.9  # experts are rounded to nearest
    assert (solved - expected).abs().mean() < most * (near - expected).abs().mean()


def test_gptq_spreads_errors_to_channels_that_come_later() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(32, 128), torch.randn(400, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(400, 128)
    recipe = Recipe("w4a16", 32, torch.float16)
    scales = recipe.scales(w)
    near = recipe.round(w, recipe.wide(scales, 128)).float() * recipe.wide(scales, 128)
    numbers, found = gptq(w, x.T @ x, recipe)
    solved = numbers.float() * recipe.wide(found, 128)
    assert ((solved - w) @ x.T).norm() < 0.6 * ((near - w) @ x.T).norm()


def test_flags_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    given = ["quantize", str(tmp_path / "model"), str(tmp_path / "out")]
    for flags, words in (
        (["--format", "w4a16", "--method", "gptq"], "go together"),
        (["--format", "fp8", "--method", "gptq", "--calibrate", "x"], "--method rounds integers"),
        (
            ["--format", "int8", "--method", "gptq", "--calibrate", str(tmp_path / "no")],
            f"--calibrate {tmp_path / 'no'} cannot be read: No such file or directory\n",
        ),
    ):
        assert main([*given, *flags]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert json.loads((tmp_path / "model/config.json").read_text())


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config |= {"vocab_size": 9, "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-5}
    source = ModelSource(
        "dummy", tmp_path, (), {"architectures": ["BertModel"], "hidden_act": "gelu", **config}, {}
    )
    with pytest.raises(ConfigError, match="only decoders are quantized"):
        plan(source, "fp8")
