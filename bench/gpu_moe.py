# ruff: noqa: B023
"""Find how the grouped products of a mixture of experts are best cut: the data of
``sgla/kernels/triton/moe_tiles.py``.

    python bench/gpu_moe.py tune --model bench/models/qwen3-30b-a3b,bench/models/glm-4.7-flash [--fp8]  # tables to paste
    python bench/gpu_moe.py few                                                  # the kernels for very few tokens
    python bench/gpu_moe.py layers --model bench/models/qwen3.6-35b-a3b          # layers of one and two tokens, in a chain
    python bench/gpu_moe.py decode                                               # those for decode batches
    python bench/gpu_moe.py prompts                                              # those for prompts
    python bench/gpu_moe.py packed --model bench/models/gpt-oss-120b             # cuts of those of experts in MXFP4
    python bench/gpu_moe.py packed --model bench/models/minimax-m2 --kind int4g128   # of those in another storage

Times are medians of graph replays over random routings; each layer's experts are far larger than the L2
cache.
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lines
import torch

from sgla.kernels import ops
from sgla.kernels.cuda import experts, grouped_gemm, integer_experts, router, skinny_gemm, token_experts
from sgla.kernels.gpu import mixture
from sgla.kernels.integers import KINDS
from sgla.kernels.routing import Clamped, Routing
from sgla.kernels.triton import e2m1, moe, moe_tiles
from sgla.kernels.triton.moe import Cut, Few, Tile, Tiles
from sgla.model.read import read_decoder
from sgla.model.spec import ModelSpec
from sgla.quant.weight import pack

BF16 = torch.bfloat16
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SHARED = 224 << 10  # bytes of shared memory of a program, at most


def emit(**fields: Any) -> None:
    lines.emit(fields)


def time_us(bodies: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Median microseconds of one of the bodies."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bodies[0]()
        with torch.cuda.graph(graph, stream=stream):
            for body in bodies:
                body()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(bodies))
    return sorted(times[1:])[repeats // 2]


class Layer:
    """Random experts of one layer, and some routings of a number of tokens. ``few``: two experts, which are
    enough to compile with. Every token's are among them."""

    def __init__(self, spec: ModelSpec, fp8: bool, few: bool = False) -> None:
        assert spec.moe is not None
        self.f, self.d = spec.moe.intermediate, spec.hidden
        self.common = spec.moe.shared // self.f
        self.experts = 2 if few else spec.moe.experts + self.common
        self.top_k = 2 if few else spec.moe.routing.top_k + self.common
        self.fp8, self.size = fp8, 1 if fp8 else 2
        self.gate_up = self._weight(self.experts * 2 * self.f, self.d)
        self.down = self._weight(self.experts * self.d, self.f)

    def _weight(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        w = torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5)
        return (w.to(torch.float8_e4m3fn), torch.ones(n, device="cuda")) if self.fp8 else (w, None)

    def _input(self, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.randn(rows, k, dtype=BF16, device="cuda")
        return (x.to(torch.float8_e4m3fn), torch.ones(rows, device="cuda")) if self.fp8 else (x, None)

    def routings(self, tokens: int) -> list[torch.Tensor]:
        count, own = 6 if tokens <= 64 else 2, self.experts - self.common
        shared = torch.arange(own, self.experts, device="cuda").expand(tokens, -1)
        chosen = (
            torch.rand(tokens, own, device="cuda").topk(self.top_k - self.common).indices
            for _ in range(count)
        )
        return [torch.cat([ids, shared], 1).int() for ids in chosen]

    def time(self, tokens: int, rows: int, tile: Tile, gated: bool, ids: list[torch.Tensor]) -> float:
        return time_us(self.bodies(tokens, rows, tile, gated, ids))

    def bodies(
        self, tokens: int, rows: int, tile: Tile, gated: bool, ids: list[torch.Tensor]
    ) -> list[Callable[[], Any]]:
        grouped = [moe.group(i, self.experts, rows) for i in ids]
        x = self._input(tokens if gated else tokens * self.top_k, self.d if gated else self.f)
        w, n = (self.gate_up, self.f) if gated else (self.down, self.d)
        act = "silu" if gated else None
        return [lambda g=g: moe.experts(*x, *w, n, g, tile, act) for g in grouped]  # type: ignore[misc]


def candidates(rows: int, gated: bool, size: int) -> list[Tile]:
    """Cuts that have won somewhere, and their neighbours; those that registers or shared memory do not hold
    are left out. ``k`` in bytes, since a row of a tile is at most 256."""
    swap = rows <= 32
    if swap:
        tried = itertools.product((64, 128), (128, 256), (4,), (2, 3, 4))
    else:
        tried = itertools.product((64, 128, 256), (128, 256), (4, 8), (3, 4))
    both, limit = 2 if gated else 1, 256 if swap else 128 * 128 * 2
    return [
        Tile(n, k // size, warps, stages, swap, True)
        for n, k, warps, stages in tried
        if stages * k * (both * n + rows) <= SHARED
        and both * n * (1 if swap else rows) <= limit * (warps // 4)
        and (warps == 4 or n * rows >= 128 * 64)
    ]


def compile_one(job: tuple[str, bool, int, bool, Tile]) -> None:
    model, fp8, rows, gated, tile = job
    layer = Layer(read_spec(model), fp8, few=True)
    try:
        for body in layer.bodies(16, rows, tile, gated, layer.routings(16)[:1]):
            body()
    except Exception as error:  # a cut the compiler refuses is no candidate
        print("refused", tile, str(error)[:100], flush=True)


def read_spec(model: str) -> ModelSpec:
    return read_decoder(json.loads((Path(model) / "config.json").read_text()))


def tokens_of(layer: Layer) -> list[int]:
    """Of ``TOKENS`` those that Triton's kernels multiply, and the last number before CUDA's take over."""
    few = mixture.FEW + 1
    if layer.fp8:
        return [tokens for tokens in TOKENS if tokens >= few]
    refused = experts.refuses(layer.top_k, layer.f, layer.d, layer.experts) is not None
    first = few if refused else min(experts.MAX_PAIRS, experts.SHARED * layer.experts) // layer.top_k + 1
    last = mixture.MANY * layer.experts // layer.top_k
    return [*(tokens for tokens in TOKENS if first <= tokens < last), last]


def tune(models: list[str], kinds: list[bool]) -> None:
    """Kernels depend on the model by whether k is whole tiles alone: those of all are compiled together."""
    jobs: dict[Any, tuple[str, bool, int, bool, Tile]] = {}
    for model, fp8, gated in itertools.product(models, kinds, (True, False)):
        spec = read_spec(model)
        assert spec.moe is not None
        k = spec.hidden if gated else spec.moe.intermediate
        for rows in (16, 32, 64, 128) if fp8 else (32, 64, 128):
            for tile in candidates(rows, gated, 1 if fp8 else 2):
                jobs.setdefault((fp8, rows, gated, tile, k % tile.k == 0), (model, fp8, rows, gated, tile))
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        pool.map(compile_one, list(jobs.values()), chunksize=2)
    emit(bench="moe_compiled", jobs=len(jobs), s=round(time.perf_counter() - begun, 1))
    for model, fp8 in itertools.product(models, kinds):
        begun = time.perf_counter()
        tune_one(model, fp8)
        emit(bench="moe_tuned", model=model, fp8=fp8, s=round(time.perf_counter() - begun, 1))


def tune_one(model: str, fp8: bool) -> None:
    """Of each number of tokens the best cuts, and what those of ``moe_tiles`` take beside them."""
    layer, table = Layer(read_spec(model), fp8), list[Tiles]()
    kept: dict[tuple[int, bool], list[Tile]] = {}
    middle = 256 if fp8 else 1024
    for tokens in sorted(
        tokens_of(layer), key=lambda t: (t != middle, t)
    ):  # this one chooses what others try
        ids = layer.routings(tokens)
        timed: dict[tuple[int, bool], list[tuple[float, Tile]]] = {}
        mean = tokens * layer.top_k / layer.experts
        blocks = [rows for rows in (16, 32, 64, 128) if suits(rows, mean)]
        for rows, gated in itertools.product(blocks, (True, False)):
            tried = kept.get((rows, gated), candidates(rows, gated, layer.size))
            timed[rows, gated] = sorted(measured(layer, tokens, rows, tile, gated, ids) for tile in tried)
            kept.setdefault((rows, gated), [tile for _, tile in timed[rows, gated][:8]])
        now = moe_tiles.tiles_for(tokens, layer.experts, layer.top_k, layer.f, layer.d, layer.size, True)
        before = [
            measured(layer, tokens, now.rows, tile, gated, ids)[0]
            for gated, tile in ((True, now.gate_up), (False, now.down))
        ]
        totals = {rows: timed[rows, True][0][0] + timed[rows, False][0][0] for rows, _ in timed}
        rows = min(totals, key=lambda rows: totals[rows])
        (up_us, gate_up), (down_us, down) = timed[rows, True][0], timed[rows, False][0]
        active = sum(int(i.unique().numel()) for i in ids) / len(ids)
        emit(
            bench="moe",
            model=Path(model).name,
            fp8=fp8,
            tokens=tokens,
            us=[round(up_us, 1), round(down_us, 1)],
            now_us=[round(us, 1) for us in before],
            read_floor_us=round(active * 3 * layer.f * layer.d * layer.size / 4.34e6, 1),
            rows={rows: round(us, 1) for rows, us in totals.items()},
        )
        table.append(Tiles(tokens, rows, gate_up, down))
    print(f"    # {Path(model).name}\n    ({layer.experts}, {layer.f}, {layer.d}, {layer.size}): [")
    for tiles in sorted(table):
        cuts = (f"Tile{tuple(tile)}" for tile in tiles[2:])
        print(f"        Tiles({tiles.tokens}, {tiles.rows}, {', '.join(cuts)}),")
    print("    ],", flush=True)


def suits(rows: int, mean: float) -> bool:
    """Whether blocks of so many pairs are tried where an expert has ``mean`` of them."""
    return rows / 4 <= mean <= 4 * rows or (rows == 16 and mean < 16) or (rows == 128 and mean > 128)


def measured(
    layer: Layer, tokens: int, rows: int, tile: Tile, gated: bool, ids: list[torch.Tensor]
) -> tuple[float, Tile]:
    try:
        return layer.time(tokens, rows, tile, gated, ids), tile
    except Exception as error:
        print("failed", tile, str(error)[:100], flush=True)
        return float("inf"), tile


def few(model: str, fp8: bool) -> None:
    spec = read_spec(model)
    layer = Layer(spec, fp8)
    router, norm = (
        torch.randn(layer.experts, layer.d, dtype=BF16, device="cuda"),
        torch.ones(layer.d, device="cuda"),
    )
    for tokens in (1, 2, 4, 8):
        xs = [torch.randn(tokens, layer.d, dtype=BF16, device="cuda") for _ in range(6)]
        p = torch.ones(tokens, layer.top_k, device="cuda")
        calls = list(zip(xs, layer.routings(tokens)))
        for n, k, warps in itertools.product((2, 4, 8), (1024, 2048), (2, 4, 8)):
            cuts = Few(gate_up=Cut(n, k, warps))
            moe.few_cuts = lambda *_, cuts=cuts: cuts
            us = time_us(
                [
                    lambda c=c, p=p: moe.few_gate_up(c[0], p, c[1], *layer.gate_up, layer.f, "silu")
                    for c in calls
                ]
            )  # type: ignore[misc]
            emit(bench="few_gate_up", fp8=fp8, tokens=tokens, cut=[n, k, warps], us=round(us, 2))
        inner = [(torch.randn(tokens * layer.top_k, layer.f, dtype=BF16, device="cuda"), c[1]) for c in calls]
        for n, k, warps in itertools.product((1, 2, 4), (2048, 8192), (1, 2, 4, 8)):
            cuts = Few(down=Cut(n, k, warps))
            moe.few_cuts = lambda *_, cuts=cuts: cuts
            us = time_us(
                [lambda i=i: moe.few_down(i[0], *layer.down, i[1], layer.d) for i in inner]  # type: ignore[misc]
            )
            emit(bench="few_down", fp8=fp8, tokens=tokens, cut=[n, k, warps], us=round(us, 2))
        us = time_us([lambda x=x: moe.norm_router(x, norm, 1e-6, router) for x in xs])  # type: ignore[misc]
        emit(bench="norm_router", tokens=tokens, us=round(us, 2))
        logits = torch.randn(tokens, layer.experts, device="cuda")
        us = time_us([lambda y=logits: moe.route(y, Routing(layer.top_k, normalize=True))] * 6)  # type: ignore[misc]
        emit(bench="route", tokens=tokens, us=round(us, 2))


LAYERS = 5  # of a chain, whose experts are all in memory
VARIANTS: dict[str, tuple[int, Few | None, str | None]] = {  # EARLY, a cut, what CUDA kernels refuse with
    "as it is": (moe.EARLY, None, None),
    "by Triton": (2, None, "no"),
    "by Triton, late": (0, None, "no"),
    "by Triton, one tile": (2, Few(), "no"),
    "by Triton, few rows": (2, Few(Cut(2, 4096, 4), Cut(1, 4096, 2), True), "no"),
}


def layers(model: str, fp8: bool) -> None:
    """From what attention left to the sum of the experts: o with the add, norm, router, choice, both
    products, the add. ``floor_us``: the bytes of weights at 4.34 TB/s, as if no two tokens shared an
    expert."""
    spec, kind = read_spec(model), "fp8" if fp8 else "bf16"
    moe_spec, d = spec.moe, spec.hidden
    assert moe_spec is not None
    f, parts = moe_spec.intermediate, moe_spec.shared // moe_spec.intermediate
    shared: Any = ("gated" if moe_spec.shared_gate else "always") if parts else ""
    routing = replace(moe_spec.routing, shared=shared, parts=max(parts, 1))
    count, heads = moe_spec.experts + parts, 4096

    def matrix(n: int, k: int, kind: Any = "bf16") -> Any:
        w = torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5)
        return w if kind is None else pack(w, kind)

    chain = [
        (
            matrix(d, heads, None),
            matrix(moe_spec.experts + (shared == "gated"), d),
            matrix(count * 2 * f, d, kind),
            matrix(count * d, f, kind),
        )
        for _ in range(LAYERS)
    ]
    norm = torch.ones(d, device="cuda")
    correction = torch.zeros(moe_spec.experts, device="cuda") if routing.score == "sigmoid" else None
    biases = ops.Biases(correction=correction)
    kept = moe.EARLY, moe.few_cuts, token_experts.refuses
    for tokens in (1, 2):
        seen = torch.randn(tokens, heads, dtype=BF16, device="cuda")
        stream = torch.randn(tokens, d, dtype=BF16, device="cuda")

        def body(layer: tuple[Any, ...]) -> None:
            o, router, gate_up, down = layer
            skinny_gemm.linear(seen, o, epilogue=skinny_gemm.ADD, out=stream)
            made = mixture.run(stream, (norm, 1e-6), router, gate_up, down, routing, "silu", biases)
            made.add_to(stream)

        size = 1 if fp8 else 2
        read = tokens * (routing.top_k + parts) * 3 * f * d * size + 2 * d * (heads + count)
        for name, (early, cut, why) in VARIANTS.items():
            token_experts.refuses = kept[2] if why is None else lambda *_, why=why: why
            moe.EARLY, moe.few_cuts = early, kept[1] if cut is None else lambda *_, cut=cut: cut
            stream.normal_()
            us = time_us([lambda each=each: body(each) for each in chain * 3], repeats=15)  # type: ignore[misc]
            emit(
                bench="moe_layers",
                model=model,
                fp8=fp8,
                tokens=tokens,
                variant=name,
                us=round(us, 2),
                floor_us=round(read / 4.34e6, 2),
            )
    moe.EARLY, moe.few_cuts, token_experts.refuses = kept


def decode(model: str) -> None:
    """From the attention's output to the outputs of all pairs: by CUDA kernels, and by Triton's behind the
    same router."""
    layers = [Layer(read_spec(model), False) for _ in range(4)]
    count, f, d, top_k = layers[0].experts, layers[0].f, layers[0].d, layers[0].top_k
    routers = [torch.randn(count, d, dtype=BF16, device="cuda") * d**-0.5 for _ in layers]
    norm, pairs = torch.ones(d, device="cuda"), list(zip(layers, routers))
    for tokens in (4, 16, 64, 128, 256):
        x, residual = (torch.randn(tokens, d, dtype=BF16, device="cuda") for _ in range(2))
        tiles = moe_tiles.tiles_for(tokens, count, top_k, f, d, 2, True)

        def choose(w: torch.Tensor) -> router.RoutedExperts:
            return router.route(
                x, w, top_k, True, residual=residual, norm=norm, eps=1e-6, places=experts.places(count)
            )

        def native(layer: Layer, w: torch.Tensor) -> None:
            experts.forward(choose(w), layer.gate_up[0], layer.down[0], "silu")

        def portable(layer: Layer, w: torch.Tensor) -> None:
            choice = choose(w)
            groups = moe.group(choice.ids, count, tiles.rows)
            inner = moe.experts(choice.x, None, *layer.gate_up, f, groups, tiles.gate_up, "silu")
            moe.experts(inner, None, *layer.down, d, groups, tiles.down)

        bodies: dict[str, list[Callable[[], Any]]] = {
            "router": [lambda w=w: choose(w) for w in routers],  # type: ignore[misc]
            "triton": [lambda pair=pair: portable(*pair) for pair in pairs],  # type: ignore[misc]
            "native": [lambda pair=pair: native(*pair) for pair in pairs],  # type: ignore[misc]
        }
        emit(bench="moe_decode", tokens=tokens, us={name: round(time_us(b), 1) for name, b in bodies.items()})


def prompts(model: str) -> None:
    """Both products by the CUDA kernel and by Triton's, and the sort before them."""
    layer = Layer(read_spec(model), False)
    count, f, d, gate_up, down = layer.experts, layer.f, layer.d, layer.gate_up[0], layer.down[0]
    for tokens in (1024, 2048, 4096, 8192):
        ids = layer.routings(tokens)
        tiles = moe_tiles.tiles_for(tokens, count, layer.top_k, f, d, 2, True)
        x = torch.randn(tokens, d, dtype=BF16, device="cuda")
        wide = [moe.group(i, count, grouped_gemm.ROWS) for i in ids]
        narrow = [moe.group(i, count, tiles.rows) for i in ids]
        inner = grouped_gemm.product(x, gate_up, f, wide[0], "silu")

        def native(groups: moe.Groups) -> None:
            grouped_gemm.product(grouped_gemm.product(x, gate_up, f, groups, "silu"), down, d, groups)

        def portable(groups: moe.Groups) -> None:
            y = moe.experts(x, None, gate_up, None, f, groups, tiles.gate_up, "silu")
            moe.experts(y, None, down, None, d, groups, tiles.down)

        bodies: dict[str, list[Callable[[], Any]]] = {
            "sort": [lambda i=i: moe.group(i, count, grouped_gemm.ROWS) for i in ids],  # type: ignore[misc]
            "gate_up": [lambda g=g: grouped_gemm.product(x, gate_up, f, g, "silu") for g in wide],  # type: ignore[misc]
            "down": [lambda g=g: grouped_gemm.product(inner, down, d, g) for g in wide],  # type: ignore[misc]
            "native": [lambda g=g: native(g) for g in wide],  # type: ignore[misc]
            "triton": [lambda g=g: portable(g) for g in narrow],  # type: ignore[misc]
        }
        emit(
            bench="moe_prompts", tokens=tokens, us={name: round(time_us(b), 1) for name, b in bodies.items()}
        )


PACKED: dict[int | None, list[tuple[int, int, int, int]]] = {  # cuts to try, by pairs in a block
    None: [(16, 1, 4, 4), (32, 2, 4, 1), (32, 2, 4, 2), (32, 2, 4, 4), (32, 2, 4, 8), (64, 4, 4, 4)],
    16: [
        (32, 2, 4, 1),
        (32, 4, 4, 1),
        (64, 2, 4, 1),
        (64, 4, 3, 1),
        (64, 4, 5, 1),
        (128, 4, 3, 1),
        (128, 8, 3, 1),
    ],
    32: [(32, 4, 4, 1), (64, 4, 3, 1), (64, 4, 4, 1), (128, 4, 3, 1), (128, 8, 3, 1)],
    64: [(32, 4, 3, 1), (64, 4, 2, 1), (64, 4, 3, 1), (64, 8, 3, 1), (128, 8, 3, 1)],
    128: [(32, 4, 3, 1), (64, 4, 3, 1), (64, 8, 3, 1), (128, 4, 3, 1), (128, 8, 2, 1), (128, 8, 3, 1)],
}
PACKED_TOKENS = (1, 2, 3, 4, 8, 16, 64, 128, 256, 512, 1024, 4096)


class PackedLayer:
    """Random experts in a storage. ``few``: two of them, to compile with. Every token's are among them."""

    def __init__(self, model: str, kind: str, few: bool = False) -> None:
        spec = read_spec(model)
        assert spec.moe is not None
        self.f, self.d, self.kind = spec.moe.intermediate, spec.hidden, kind
        common = spec.moe.shared // self.f
        self.experts = 2 if few else spec.moe.experts + common
        self.top_k = spec.moe.routing.top_k + common
        self.gate_up, self.down = self._weight(2 * self.f, self.d), self._weight(self.d, self.f)

    def _weight(self, n: int, k: int) -> tuple[Any, ...]:
        one, bias = pack(torch.randn(n, k, device="cuda") * k**-0.5, self.kind), None
        if self.kind == "mxfp4":
            bias = torch.randn(n * self.experts, device="cuda")
        every = (t.repeat(self.experts, 1) for t in one.tensors)
        return type(one)(n * self.experts, k, *every), bias

    def body(
        self, ids: torch.Tensor, rows: int | None, tile: e2m1.Tile | None, gated: bool
    ) -> Callable[[], torch.Tensor]:
        """``tile``: of Triton's kernel; None: that of CUDA."""
        groups = None if rows is None else moe.group(ids, self.experts, rows)
        count, k, n = (ids.shape[0], self.d, self.f) if gated else (ids.numel(), self.f, self.d)
        w, bias = self.gate_up if gated else self.down
        x = torch.randn(count, k, dtype=BF16, device="cuda")
        act: Any = (Clamped(1.702, 7.0) if bias is not None else "silu") if gated else None
        if tile is None:
            assert groups is not None
            return lambda: grouped_gemm.product(x, w, n, groups, act)
        return lambda: e2m1.product(x, w, bias, n, ids, groups, tile, act)

    def few(self, ids: torch.Tensor, gated: bool) -> Callable[[], torch.Tensor]:
        """By the kernel of CUDA that reads each token's experts."""
        pairs = token_experts.Chosen(torch.ones(ids.shape, device="cuda"), ids, 0)
        count, k = (ids.shape[0], self.d) if gated else (ids.numel(), self.f)
        w, x = (self.gate_up if gated else self.down)[0], torch.randn(count, k, dtype=BF16, device="cuda")
        if gated:
            return lambda: integer_experts.gate_up(x, pairs, w, self.f, "silu")
        return lambda: integer_experts.down(x, pairs, w, self.d)

    def error(self, ids: torch.Tensor, rows: int, gated: bool) -> float:
        """Of the kernel of CUDA, against Triton's."""
        torch.manual_seed(0)
        found = self.body(ids, rows, None, gated)().float()
        torch.manual_seed(0)
        expected = self.body(ids, 64, e2m1.Tile(64, 4, 3), gated)().float()
        return float((found - expected).norm() / expected.norm())


def compile_packed(job: tuple[str, str, int | None, bool, e2m1.Tile]) -> None:
    model, kind, rows, gated, tile = job
    layer = PackedLayer(model, kind, few=True)
    try:
        layer.body(torch.zeros(8, 2, dtype=torch.int32, device="cuda"), rows, tile, gated)()
    except Exception as error:  # a cut the compiler refuses is no candidate
        print("refused", tile, str(error)[:100], flush=True)


def packed(model: str, kind: str, wanted: list[int]) -> None:
    """The best cuts of both products of experts in a storage, and what reading their weights takes."""
    layer, rows_of_all = PackedLayer(model, kind), dict[int, list[int | None]]()
    for tokens in wanted or PACKED_TOKENS:
        pairs = tokens * layer.top_k
        rows_of_all[tokens] = [rows for rows in (16, 32, 64, 128) if suits(rows, pairs / layer.experts)]
        if pairs <= 2 * e2m1.FEW:
            rows_of_all[tokens].append(None)
    tried = {rows for some in rows_of_all.values() for rows in some}
    tiles = {rows: [e2m1.Tile(*cut) for cut in cuts] for rows, cuts in PACKED.items() if rows in tried}
    jobs = [
        (model, kind, rows, gated, tile) for gated in (True, False) for rows in tiles for tile in tiles[rows]
    ]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        pool.map(compile_packed, jobs, chunksize=1)
    for tokens, rows_of in rows_of_all.items():
        ids = [
            torch.rand(tokens, layer.experts, device="cuda").topk(layer.top_k).indices.int()
            for _ in range(4 if tokens <= 256 else 1)
        ]
        active = sum(int(i.unique().numel()) for i in ids) / len(ids)
        for gated, w in ((True, layer.gate_up), (False, layer.down)):
            timed = []
            for rows, tile in [(each, tile) for each in rows_of for tile in tiles[each]]:
                try:
                    us = time_us([layer.body(i, rows, tile, gated) for i in ids])
                    timed.append((round(us, 1), rows, list(tile)))
                except Exception as error:
                    print("failed", tile, str(error)[:100], flush=True)
            timed.sort(key=lambda t: t[0])
            native = {}
            for rows in (64, 128, 256) if kind.startswith("int4") and tokens > 16 else ():
                us = time_us([layer.body(i, rows, None, gated) for i in ids])
                native[rows] = round(us, 1), round(layer.error(ids[0], rows, gated), 5)
            few = None
            if kind in KINDS and ids[0].numel() <= token_experts.MOST:
                few = round(time_us([layer.few(i, gated) for i in ids]), 1)
            emit(
                bench="moe_packed",
                kind=kind,
                few=few,
                native=native,
                tokens=tokens,
                gated=gated,
                read_floor_us=round(active / layer.experts * w[0].nbytes / 4.34e6, 1),
                tflops=round(2 * ids[0].numel() * layer.f * layer.d * (1 + gated) / timed[0][0] / 1e6, 1),
                best=timed[:6],
                rows=[next(t for t in timed if t[1] == rows) for rows in rows_of],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tune", "few", "layers", "decode", "prompts", "packed"])
    parser.add_argument("--model", default="bench/models/qwen3-30b-a3b")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--kind", default="mxfp4", help="with packed: a storage")
    parser.add_argument("--tokens", default="", help="with packed: some of its numbers")
    args = parser.parse_args()
    with torch.inference_mode():
        apart = {"decode": decode, "prompts": prompts}
        if args.what == "packed":
            packed(args.model, args.kind, [int(n) for n in args.tokens.split(",") if n])
        elif args.what == "tune":
            tune(args.model.split(","), [True] if args.fp8 else [False, True])
        elif args.what in apart:
            apart[args.what](args.model)
        else:
            {"few": few, "layers": layers}[args.what](args.model, args.fp8)


if __name__ == "__main__":
    main()
