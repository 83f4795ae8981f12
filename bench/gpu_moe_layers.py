"""Whole layers of a mixture of experts as a decode step has them, one after another in a graph: one JSON line
a batch size.

    python bench/gpu_moe_layers.py [--model bench/models/qwen3-30b-a3b] [--batches 16,64,128,256]

``us``: of a layer, median of replays. ``floor_us``: its weights (of the experts that some row wants, on
average) and the KV of the rows, which have 100 to 1472 tokens, at 4.34 TB/s.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lines
import torch
from gpu_kernels import decode_rows, time_us

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels import gpu, ops
from sgla.kernels.ops import KVLayer
from sgla.model.read import read_decoder
from sgla.model.spec import ModelSpec
from sgla.quant.weight import Weight, pack

BF16 = torch.bfloat16
LAYERS, SHORTEST, LONGEST, PAGE, MOST = 6, 100, 1472, 16, 256  # MOST rows


def weight(n: int, k: int) -> Weight:
    return pack(torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5), "bf16")


class Layer:
    """Random weights and keys of one layer."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.moe is not None
        part = spec.attention[0]  # as all the others
        d, f, hd, experts = spec.hidden, spec.moe.intermediate, part.head_dim, spec.moe.experts
        self.qkv, self.o = weight((part.heads + 2 * part.kv_heads) * hd, d), weight(d, part.heads * hd)
        self.router, self.gate_up = weight(experts, d), weight(experts * 2 * f, d)
        self.down = weight(experts * d, f)
        self.norm, self.head_norm = torch.ones(d, device="cuda"), torch.ones(hd, device="cuda")
        pages = MOST * LONGEST // PAGE + 1
        pool = torch.zeros(2, pages, part.kv_heads, PAGE, hd, dtype=BF16, device="cuda").transpose(2, 3)
        self.kv = KVLayer(pool[0], pool[1])


class Chain:
    """The layers, one behind the other, as a model."""

    unrecorded = ""

    def __init__(self, spec: ModelSpec, layers: list[Layer]) -> None:
        self.spec, self._layers = spec, layers
        self.embed = SimpleNamespace(weight=weight(1000, spec.hidden))
        self._cos_sin = torch.randn(LONGEST, spec.attention[0].head_dim, device="cuda")

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> torch.Tensor:
        spec = self.spec
        assert spec.moe is not None
        h = ops.embedding(batch.ids, self.embed.weight)
        x = ops.rms_norm(h, self._layers[0].norm, 1e-6)
        for layer in self._layers:
            norms = layer.head_norm, layer.head_norm
            qkv = ops.linear(x, layer.qkv)
            q = ops.qk_norm_rope_store(
                qkv, batch.positions, self._cos_sin, *norms, 1e-6, layer.kv, batch.out_loc
            )
            y = ops.linear(ops.attention(q, layer.kv, batch, spec.attention[0].scale), layer.o)
            x, h = ops.add_rms_norm(y, h, layer.norm, 1e-6)
            experts = layer.router, layer.gate_up, layer.down
            y = ops.moe(x, *experts, spec.moe.routing, "silu")
            x, h = ops.add_rms_norm(y, h, layer.norm, 1e-6)
        return x


def mixed(rows: int) -> DeviceBatch:
    """Decode rows of lengths from SHORTEST to LONGEST."""
    return decode_rows(torch.linspace(SHORTEST, LONGEST, rows).int()[torch.randperm(rows)])


def floor_us(spec: ModelSpec, layer: Layer, batch: DeviceBatch) -> float:
    assert spec.moe is not None
    wanted = 1 - (1 - spec.moe.routing.top_k / spec.moe.experts) ** batch.rows
    experts = wanted * (layer.gate_up.data.nbytes + layer.down.data.nbytes)
    part = spec.attention[0]
    kv = int(batch.kv_len.sum()) * 4 * part.kv_heads * part.head_dim
    return (layer.qkv.data.nbytes + layer.o.data.nbytes + experts + kv) / 4.34e6


def measure(spec: ModelSpec, layers: list[Layer], rows: int) -> None:
    assert spec.moe is not None
    part = spec.attention[0]
    shape = attention.AttentionShape(
        part.heads, part.kv_heads, part.head_dim, PAGE, BF16, frozenset({0}), 0.0, MOST, scale=part.scale
    )
    attend = attention.choose_backend("auto", [shape])[0]
    forward = gpu.RecordedForward(Chain(spec, layers), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    batch = mixed(rows)

    def body() -> None:
        forward.hidden(batch, decode=attend.decode)

    us, floor = time_us(body, len(layers)), floor_us(spec, layers[0], batch)
    lines.emit({"bench": "moe_layers", "rows": rows, "us": round(us, 1), "floor_us": round(floor, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench/models/qwen3-30b-a3b")
    parser.add_argument("--batches", default="16,32,64,96,128,160,208,256")
    args = parser.parse_args()
    spec = read_decoder(json.loads((Path(args.model) / "config.json").read_text()))
    with torch.inference_mode():
        layers = [Layer(spec) for _ in range(LAYERS)]
        for rows in map(int, args.batches.split(",")):
            measure(spec, layers, rows)


if __name__ == "__main__":
    main()
