"""Weights that come while a runner is there, under the addresses that graphs have."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save, save_file
from test_gpu_moe import TINY as MIXTURE
from test_gpu_runner import TINY, generate, make, prompt
from test_gpu_sleep import sleep, wake
from torch import Tensor
from trainer_process import tensors_of as tensors_sent

from sgla.actors.resting import in_memory
from sgla.errors import InvalidField
from sgla.loading.source import open_source
from sgla.messages import Control

PROMPTS = {slot: prompt(slot, 20 + 13 * slot) for slot in range(8)}


def tensors_of(runner: Any, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(slot.shape, generator=random) * slot.shape[-1] ** -0.5).bfloat16()
        if len(slot.shape) > 1
        else torch.ones(slot.shape)
        for name, slot in runner.steps.model.declared.build.table.items()
    }


def folder_of(path: Path, model: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model))
    save_file(tensors, path / "model.safetensors")
    return path


def bring(runner: Any, data: bytes) -> None:
    with in_memory(data) as path:
        runner.control(Control(verb="weights_receive", args={"paths": [path]}))
    runner.control(Control(verb="weights_take", args={"keep": True}))


@pytest.mark.parametrize(
    ("model", "settings"),
    [(TINY, {}), (TINY, {"quantization": "int4"}), (TINY, {"quantization": "fp8"}), (MIXTURE, {})],
)
def test_weights_that_come_are_those_of_a_new_runner(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    runner = make(model, **settings)
    one, two = (tensors_of(runner, seed) for seed in (1, 2))
    first = folder_of(tmp_path / "one", model, one)
    second = folder_of(tmp_path / "two", model, two)
    bring(runner, save(one))
    expected = generate(runner, PROMPTS, 12, True)
    runner.source = open_source(first)
    runner.config = msgspec.structs.replace(runner.config, load_format="auto")
    runner.control(Control(verb="weights_update", args={"path": str(second)}))
    other = generate(runner, PROMPTS, 12, True)
    assert other != expected
    names = list(one)
    for part in (names[::2], names[1::2]):
        bring(runner, save({name: one[name] for name in part}))
    assert generate(runner, PROMPTS, 12, True) == expected
    for name, tensor in one.items() if not settings else ():
        told = runner.control(Control(verb="weights_show", args={"name": name, "rows": 3}))
        assert torch.equal(torch.tensor(told["values"]), tensor[:3].float()), name
    runner.control(sleep(weights="files"))
    runner.control(wake())
    assert generate(runner, PROMPTS, 12, True) == expected, "what is in no file stays"
    for wrong in (
        {names[0]: one[names[0]][:1]},
        {"model.x": one[names[0]]},
        {names[0]: one[names[0]] * float("nan")},
    ):
        with pytest.raises(InvalidField):
            bring(runner, save({name: tensor.contiguous() for name, tensor in (two | wrong).items()}))
        assert generate(runner, PROMPTS, 12, True) == expected


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize("kind", ["pickle", "nccl"])
def test_another_process_sends_tensors_of_a_gpu(tmp_path: Path, kind: str) -> None:
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants two GPUs")
    runner = make()
    shapes = {name: list(slot.shape) for name, slot in runner.steps.model.declared.build.table.items()}
    where = str(tmp_path / "tensors") if kind == "pickle" else str(free_port())
    script = str(Path(__file__).parent / "trainer_process.py")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process: Any = subprocess.Popen([sys.executable, script, kind, where], **pipes)
    with process as trainer:
        trainer.stdin.write(json.dumps(shapes) + "\n")
        trainer.stdin.flush()
        if kind == "pickle":
            assert trainer.stdout.readline() == "sent\n"
            runner.control(Control(verb="weights_receive", args={"paths": [where]}))
        else:
            place = {"master_address": "127.0.0.1", "master_port": int(where), "rank_offset": 1}
            more = {"world_size": 2, "group": "g", "backend": "nccl"}
            runner.control(Control(verb="trainer_join", args=place | more)).result(60)
            told = [(name, shape, "bfloat16") for name, shape in shapes.items()]
            args = {"group": "g", "tensors": told}
            runner.control(Control(verb="weights_receive", args=args)).result(60)
        runner.control(Control(verb="weights_take", args={"keep": True}))
        if kind == "nccl":
            runner.control(Control(verb="trainer_leave", args={"group": "g"}))
        trainer.stdin.write("end\n")
    found = generate(runner, PROMPTS, 12, True)
    bring(runner, save({name: tensor.cpu() for name, tensor in tensors_sent(shapes).items()}))
    assert generate(runner, PROMPTS, 12, True) == found
