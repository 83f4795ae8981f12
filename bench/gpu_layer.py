"""A layer of Qwen3-8B for few rows, its four products and attention to 640 tokens in turn, by ways to fetch
weights: microseconds, each way twice, and how far results are from the first way's.

    python bench/gpu_layer.py [--cases int4g128:1,int4g128:16,fp8:1]

``engine``: the copy engine fetches weights (1) and constants (2), ``early`` stages before the wait for the
kernel before; ``ahead``: MiB of gate and up that o brings to the L2 cache while attention runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_integers as gi
import lines
import torch
from gpu_kernels import SCORING, decode_batch, shape_of, time_us
from torch import Tensor

from sgla import attention
from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.cuda import skinny_gemm as sk
from sgla.kernels.cuda import stationary_gemm as sg
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.rehearsal import compilers, rehearsing

EPS = 1e-6
Way = dict[str, Any]  # changes of cuts, those of ``o``, and ``ahead``
INTEGERS: dict[str, Way] = {
    "as it is": {"engine": 0},
    "engine 1, early 8": {"engine": 1, "early": 8},
    "engine 1, early 1": {"engine": 1, "early": 1},
    "engine 2, early 8": {"engine": 2, "early": 8},
    "engine 2, early 1": {"engine": 2, "early": 1},
    "engine 2, early 1, of o 8": {"engine": 2, "early": 1, "o": {"early": 8}},
    "of o early 8": {"engine": 0, "o": {"early": 8}},
    "ahead 6": {"engine": 0, "ahead": 6},
    "ahead 16": {"engine": 0, "ahead": 16},
    "engine 2, early 8, ahead 12": {"engine": 2, "early": 8, "ahead": 12},
}
SOME: dict[str, Way] = {name: INTEGERS[name] for name in list(INTEGERS)[:3]}
TILES: dict[str, Way] = {"engine 1, one tile": {"engine": 1, "tiles": 1}}
FLOATS: dict[str, Way] = {
    "as it is": {"engine": 0},
    "engine": {"engine": 1},
    "ahead 6": {"engine": 0, "ahead": 6},
    "ahead 16": {"engine": 0, "ahead": 16},
    "engine, ahead 16": {"engine": 1, "ahead": 16},
}


def floats(layer: gi.Layer, kind: str) -> list[tuple[Tensor, Tensor | None]]:
    size = layer.n * layer.k * (1 if kind == "fp8" else 2)
    made = []
    for _ in range(max(3, gi.OTHERS // size)):
        w = torch.randn(layer.n, layer.k, dtype=torch.bfloat16, device="cuda") / layer.k**0.5
        scale = torch.rand(layer.n, device="cuda") if kind == "fp8" else None
        made.append((w.to(torch.float8_e4m3fn) if kind == "fp8" else w, scale))
    return made


def product(rows: int, kind: str, way: Way) -> Callable[..., Tensor]:
    """Of x, a layer, a weight, where it is added, and the next layer and weight."""
    megabytes = way.get("ahead", 0)
    changes = {name: value for name, value in way.items() if name not in ("o", "ahead")}
    norm = torch.linspace(0.5, 1.5, 4096, device="cuda")

    def integers(x: Tensor, layer: gi.Layer, w: Any, out: Any, then: tuple[gi.Layer, Any]) -> Tensor:
        module: Any = sg if rows >= sg.FEWEST else ig
        of_layer = changes | way.get("o", {}) if layer.name == "o" else changes
        config = module.default_config(gi.shape_of(layer, rows, kind))._replace(**of_layer)
        more: dict[str, Any] = {}
        if megabytes and layer.name == "o":
            more["ahead"] = ig.first_of(rows, then[1], then[0].norm, then[0].epilogue)
        given = {"norm": norm if layer.norm else None, "eps": EPS, "epilogue": layer.epilogue, "out": out}
        return module.linear(x, w, config=config, **given, **more)

    def few(x: Tensor, layer: gi.Layer, w: Any, out: Any, then: tuple[gi.Layer, Any]) -> Tensor:
        ahead, (weight, scale) = None, w
        gated = layer.epilogue == sk.SILU
        config = sk.default_config(rows, layer.n // (1 + gated), layer.k, gated, scale is not None)
        config = config._replace(**changes)
        if megabytes and layer.name == "o":
            behind = sk.default_config(rows, then[0].n // 2, then[0].k, True, scale is not None)
            ahead = sk.first_of(rows, then[1][0], behind, True)
        given: dict[str, Any] = {"norm": norm if layer.norm else None, "eps": EPS, "out": out}
        given |= {"epilogue": layer.epilogue, "config": config, "ahead": ahead}
        return sk.linear(x, weight, scale=scale, **given)

    def run(*args: Any) -> Tensor:
        sk.AHEAD = megabytes << 20
        return (few if kind in ("fp8", "bf16") else integers)(*args)

    return run


def measure(rows: int, kind: str, weights: dict[str, list[Any]], ways: dict[str, Way]) -> None:
    attend: Any = attention.choose_backend("auto", [shape_of(32, 8, rows)])[0].decode
    _, pages, batch = decode_batch(rows, 640, 32, 8, 128)
    heads_norm = torch.rand(128, device="cuda")
    projection = Projection(torch.rand(1024, 128, device="cuda"), heads_norm, heads_norm, EPS)
    hidden = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    qkv, o, inner, down = gi.LAYERS
    count = min(map(len, weights.values()))

    def body(run: Callable[..., Tensor]) -> None:
        for at in range(count):
            w = {name: of[at] for name, of in weights.items()}
            then = inner, w["gate+up"]
            heads = run(hidden, qkv, w["qkv"], None, then)
            seen = attend.forward(heads, pages[at % len(pages)], batch, SCORING, projection)
            run(seen, o, w["o"], hidden, then)
            gated = run(hidden, inner, w["gate+up"], None, then)
            run(gated, down, w["down"], hidden, then)

    def us(way: Way) -> float:
        return round(time_us(partial(body, product(rows, kind, way)), count, 15), 2)

    with rehearsing():
        for way in ways.values():
            body(product(rows, kind, way))
    before, first = hidden.clone(), hidden
    errors = {}
    for name, way in ways.items():
        hidden.copy_(before)
        body(product(rows, kind, way))
        first = hidden.clone() if first is hidden else first
        errors[name] = round(float((hidden - first).float().norm() / first.float().norm()), 4)
    fields: dict[str, Any] = {"bench": "layer", "rows": rows, "kind": kind, "layers": count}
    fields["differs"] = errors
    for turn in ("us", "again"):
        fields[turn] = {name: us(way) for name, way in ways.items()}
    lines.emit(fields)


def ways_of(rows: int, kind: str) -> dict[str, Way]:
    if kind in ("fp8", "bf16"):
        return FLOATS
    return INTEGERS if rows == 1 else SOME | (TILES if rows >= sg.FEWEST else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "int4g128:1,int4g128:16,fp8:1,int4g128:8,bf16:1,fp8:4,int4g128:4"
    parser.add_argument("--cases", default=default)
    weights: dict[str, dict[str, list[Any]]] = {}
    for case in parser.parse_args().cases.split(","):
        kind, rows = case.split(":")
        if kind not in weights:
            make = floats if kind in ("fp8", "bf16") else gi.weights_of
            weights[kind] = {layer.name: make(layer, kind) for layer in gi.LAYERS}
        measure(int(rows), kind, weights[kind], ways_of(int(rows), kind))
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
