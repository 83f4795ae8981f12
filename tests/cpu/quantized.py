"""Checkpoints whose linear layers are quantized, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.hub.source import ModelSource, open_source
from sgla.loading.pickles import TYPES
from sgla.quant.formats import FORMATS
from sgla.quant.method import Method

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]


class Stored:
    """A tensor as a checkpoint has it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.type = TYPES[tensor.dtype]

    def dense(self, rows: range | None = None) -> Tensor:
        return self.values(rows)

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        part = self.tensor if rows is None else self.tensor[rows.start : rows.stop]
        return part if columns is None else part[:, columns.start : columns.stop]


def check(
    method: Method, parts: dict[str, Tensor], dense: Tensor, rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    """Whether a layer ``x`` of these tensors means ``dense``, also in the storage that keeps it."""
    n, k = dense.shape
    stored: dict[str, Any] = {f"x.{part}": Stored(value) for part, value in parts.items()}
    held = method.tensors("x", n, k)
    for name, tensor in stored.items():
        assert held[name].shape in (None, tensor.shape)
        assert not held[name].types or tensor.type in held[name].types
    assert all(each.optional for name, each in held.items() if name not in stored)
    source = method.take("x", stored, n, k)
    torch.testing.assert_close(source.dense(), dense, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(source.dense(range(7, 70)), dense[7:70], rtol=rtol, atol=1e-6)
    for device in ("cpu", "cuda"):
        kind = method.kept("x", device) or "f32"
        first = FORMATS[kind].group
        if device in FORMATS[kind].devices:
            found = source.weight(kind, range(7, 70), range(first, k)).dequant()
            torch.testing.assert_close(found, dense[7:70, first:], rtol=rtol, atol=atol)


def pair(
    folder: Path,
    config: Mapping[str, Any],
    quantize: Quantize,
    model_type: str = "llama",
    more: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> tuple[ModelSource, ModelSource]:
    """A quantized checkpoint, and one with the same numbers in float32. ``quantize``: from the name of a
    linear layer's matrix and the matrix to the tensors by suffix and the matrix that they mean; None: it
    stays as it is. ``more``: tensors that the file has beside them."""
    for name in ("packed", "plain"):
        save_checkpoint(folder / name, model_type, **changes)
    torch.manual_seed(1)
    plain, packed = load_file(folder / "plain/model.safetensors"), dict(more or {})
    for name, tensor in list(plain.items()):
        linear = "_proj." in name or ".experts." in name
        made = quantize(name, tensor) if linear else None
        if made is None:
            packed[name] = tensor
            continue
        parts, plain[name] = made
        packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    save_file(packed, folder / "packed/model.safetensors", {"format": "pt"})
    save_file(plain, folder / "plain/model.safetensors", {"format": "pt"})
    path = folder / "packed/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return open_source(folder / "packed"), open_source(folder / "plain")
