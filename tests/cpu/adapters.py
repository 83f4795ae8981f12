"""Tiny random adapters in PEFT's format, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.hub.adapter import CONFIG
from sgla.loading.adapter import WEIGHTS, Piece
from sgla.messages import Copy, int32
from sgla.worker.cpu import CpuRunner

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    base: Path,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    drop: Sequence[str] = (),
    **config: Any,
) -> dict[str, Tensor]:
    """Write a random adapter for the base's matrices whose last names are in ``modules``. Returns what it
    adds to each, by the name of the base's tensor. ``drop``: matrices that it leaves alone."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    ranks = ranks or {}
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(modules),
        "bias": "none",
    }
    values |= {"task_type": "CAUSAL_LM", "peft_version": "0.21.2", "lora_dropout": 0.0} | config
    if ranks:
        values["rank_pattern"] = ranks
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if last not in modules or weight.dim() != 2 or module in drop:
            continue
        r = ranks.get(last, rank)
        a = torch.randn(r, weight.shape[1], generator=generator) * 0.3
        b = torch.randn(weight.shape[0], r, generator=generator) * 0.3
        alpha = values.get("alpha_pattern", {}).get(last, values["lora_alpha"])
        scale = alpha / (math.sqrt(r) if values.get("use_rslora") else r)
        if last == "embed_tokens":  # weights [ids, width]
            a, b = (torch.randn(r, n, generator=generator) * 0.3 for n in weight.shape)
            tensors[f"base_model.model.{module}.lora_embedding_A"] = a
            tensors[f"base_model.model.{module}.lora_embedding_B"] = b.t().contiguous()
            added[name] = scale * a.t() @ b
            continue
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        added[name] = scale * b @ a
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(values))
    return added


def save_merged(folder: Path, base: Path, added: dict[str, Tensor]) -> Path:
    """The base with what an adapter adds in its weights."""
    folder.mkdir()
    tensors = load_file(base / "model.safetensors")
    for name, more in added.items():
        tensors[name] = tensors[name] + more
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def invent(runner: Any, number: int, rank: int) -> None:
    """A random adapter of all layers in host memory, without files; of a stage what others do not have."""
    pieces = []
    for name, targets in runner.adapters.adapters.table.items():
        generator = torch.Generator().manual_seed(crc32(f"{name} {number}".encode()))
        a = torch.randn(rank, targets[0].k, generator=generator, device="cpu") * 0.2
        b = torch.randn(targets[0].n, rank, generator=generator, device="cpu") * 0.2
        for target in targets:
            own = [x.contiguous().to(runner.adapters.adapters.dtype) for x in target.own(a, b)]
            pieces.append(Piece(target, *own))
    runner.adapters.keep(number, pieces)


def load(runner: CpuRunner, number: int, folder: Path) -> None:
    """Into host memory."""
    assert runner.adapters is not None
    runner.adapters._load(number, folder)


def put(runner: CpuRunner, number: int, place: int) -> None:
    """An adapter that is loaded to a place, without a scheduler."""
    assert runner.adapters is not None
    assert (
        runner.adapters.bring(Copy(1, "adapters", "places", [int32([number])], [int32([place])])) is not None
    )
