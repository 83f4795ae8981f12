"""Adapters of a mixture's experts: the same numbers as a base with merged weights, float32."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import load, save_adapter
from checkpoints import save_checkpoint
from forked import ForkedExecutor
from safetensors.torch import save_file
from test_lora import adapted, check_equal, logprobs, numbers, runner_of, wanted
from tiny import Transcript, run_executor, tiny_config

from sgla.errors import InvalidAdapter
from sgla.hub.adapter import CONFIG
from sgla.hub.source import open_source
from sgla.loading.adapter import WEIGHTS
from sgla.messages import Control

RANK, ALPHA, TARGETS = 3, 6, ["q_proj", "o_proj", "experts"]
SIZES = {"head_dim": 8, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", SIZES),
    "gpt-oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "shared": ("qwen2_moe", SIZES | {"shared_expert_intermediate_size": 40}),
}
Deltas = dict[str, torch.Tensor]  # what is added to a tensor of all experts [E, n, k]


def save_experts(folder: Path, base: Any, seed: int, form: str, tensors: tuple[str, ...]) -> Deltas:
    """A random adapter of the experts of all layers, as PEFT writes it. ``form``: ``tensors``,
    of all experts; ``older``, the same with inputs and outputs in each other's place; ``modules``, one for
    each matrix."""
    generator, deltas, file = torch.Generator().manual_seed(seed), Deltas(), {}
    crossed = base.config.model_type == "gpt_oss"
    for name, stored in base.named_parameters():
        experts, _, which = name.rpartition(".")
        if not experts.endswith(".experts") or which not in tensors:
            continue
        weight = stored.transpose(1, 2) if crossed else stored
        count, n, k = weight.shape
        a, b = (
            torch.randn(count, RANK, k, generator=generator),
            torch.randn(count, n, RANK, generator=generator),
        )
        deltas[name] = ALPHA / RANK * 0.04 * b @ a
        a, b = 0.2 * a, 0.2 * b
        prefix = f"base_model.model.{experts}"
        if form == "modules":
            parts = (
                {"gate_proj": b[:, : n // 2], "up_proj": b[:, n // 2 :]} if "gate" in which else {which: b}
            )
            for part, rows in parts.items():
                for e in range(count):
                    file[f"{prefix}.{e}.{part}.lora_A.weight"] = a[e].clone()
                    file[f"{prefix}.{e}.{part}.lora_B.weight"] = rows[e]
            continue
        inside = ".base_layer" if which == tensors[0] and len(tensors) > 1 else ""
        if form == "older":
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        file[f"{prefix}{inside}.lora_A.weight"] = a.flatten(0, 1)
        file[f"{prefix}{inside}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, folder / WEIGHTS)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS[:2]}
    if form != "modules":
        values["target_parameters"] = [f"experts.{name}" for name in tensors]
    (folder / CONFIG).write_text(json.dumps(values))
    return deltas


def save_merged(folder: Path, base: Any, deltas: Deltas) -> Path:
    parameters = dict(base.named_parameters())
    crossed = base.config.model_type == "gpt_oss"
    with torch.no_grad():
        for sign in (1, -1):
            for name, delta in deltas.items():
                parameters[name].add_(delta.transpose(1, 2) if crossed else delta, alpha=sign)
            if sign == 1:
                base.save_pretrained(folder)
    return folder


BOTH = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_as_merged(tmp_path: Path, family: str) -> None:
    """Of both products, of one of them, and expert by expert, together in a batch with the base."""
    kind, changes = FAMILIES[family]
    base = save_checkpoint(tmp_path / "base", kind, **changes)
    forms = [("tensors", BOTH), ("tensors", BOTH[:1]), ("tensors", BOTH[1:])]
    forms.append(("tensors", BOTH[:1]) if family == "gpt-oss" else ("modules", BOTH))
    if family == "qwen3":
        forms.append(("older", BOTH))
    native = {"native_kernels": family in ("qwen3", "gpt-oss")}
    runner = adapted(tmp_path / "base", lora_target_modules=TARGETS, max_loras=3, **native)
    expected = {"base": logprobs(runner_of(tmp_path / "base", **native), [wanted("base", 0)])["base"]}
    for number, (form, tensors) in enumerate(forms, 1):
        deltas = save_experts(tmp_path / str(number), base, number, form, tensors)
        load(runner, number, tmp_path / str(number))
        merged = runner_of(save_merged(tmp_path / f"{number}-merged", base, deltas), **native)
        expected[str(number)] = logprobs(merged, [wanted("x", 0)])["x"]
        check_equal(logprobs(runner, [wanted("x", number)])["x"], expected[str(number)])
    submits = [wanted(str(number), number) for number in range(1, len(forms) + 1)] + [wanted("base", 0)]
    for rid, found in logprobs(runner, submits).items():
        check_equal(found, expected[rid])
    assert min((expected["base"] - expected[rid]).abs().max() for rid in expected if rid != "base") > 0.05


@pytest.mark.parametrize("ways", [{"tp": 2}, {"tp": 2, "ep": 2}, {"pp": 2}], ids=["tp", "ep", "pp"])
def test_two_ranks_are_as_one(tmp_path: Path, ways: dict[str, int]) -> None:
    base = save_checkpoint(tmp_path / "base", "qwen3_moe", **SIZES)
    runner = adapted(tmp_path / "base", lora_target_modules=TARGETS)
    for number, form in ((1, "tensors"), (2, "modules")):
        save_experts(tmp_path / str(number), base, number, form, BOTH)
        load(runner, number, tmp_path / str(number))
    submits = [wanted(f"a{number}", number) for number in range(3)]
    alone = logprobs(runner, submits)

    async def ranks() -> Transcript:
        config = tiny_config(**ways, enable_lora=True, max_lora_rank=8, lora_target_modules=TARGETS)
        executor = ForkedExecutor(config, open_source(tmp_path / "base"))
        try:
            facts = await executor.start(lambda progress: None)
            for number in (1, 2):
                args = {"number": number, "path": str(tmp_path / str(number))}
                await executor.control(Control(verb="adapter_load", args=args))
            stages = ways.get("pp", 1)
            limits = {"stages": stages, "depth": stages + 1, "adapters": facts.adapters}
            return await run_executor(executor, facts, submits, **limits)
        finally:
            await executor.close()

    for rid, found in numbers(asyncio.run(ranks())).items():
        check_equal(found, alone[rid])


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "qwen3_moe", **SIZES)
    runner = adapted(tmp_path / "base", lora_target_modules=TARGETS)
    plain = adapted(tmp_path / "base")

    def spoil(name: str, **config: Any) -> Path:
        save_experts(tmp_path / name, base, 1, "tensors", BOTH)
        values = json.loads((tmp_path / name / CONFIG).read_text()) | config
        (tmp_path / name / CONFIG).write_text(json.dumps(values))
        return tmp_path / name

    with pytest.raises(InvalidAdapter, match="start the server with experts in --lora-target-modules"):
        load(plain, 1, spoil("good"))
    for name, config, why in (
        ("unsaid", {"target_parameters": []}, "does not say which tensor of the experts this changes"),
        ("half said", {"target_parameters": ["down_proj"]}, "does not say which tensor"),
        ("rank", {"r": 2}, r"down_proj: lora_A and lora_B have shapes \[12, 128\] and \[48, 12\]"),
        (
            "router",
            {"target_parameters": ["mlp.gate.weight"]},
            "gate.weight' in target_parameters is not",
        ),
        ("no list", {"target_parameters": "x"}, "is 'x', not a list of names"),
    ):
        with pytest.raises(InvalidAdapter, match=why):
            load(runner, 1, spoil(name, **config))
    save_adapter(tmp_path / "others", tmp_path / "base", ["q_proj"])
    load(runner, 1, tmp_path / "others")
