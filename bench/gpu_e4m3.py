"""Time products with e4m3 weights of Qwen3-8B, and how they may be cut: one JSON line a measurement.

    python bench/gpu_e4m3.py [few] [tiles] [blocks] [--rows 1,64] [--table FILE]

Up to 16 rows: the kernel with the norm before or the add behind. From 9 on: the product of a rounded x by our
tiles, with the gate where one follows, and by the library; ``chain``: a layer's four products with what
rounds between them. ``blocks``: the tiles with scales of groups, by cut, beside the library's product with a
scale a channel. Times are medians of graph replays over weights larger than the L2 cache. ``--table`` takes
lines for ``sgla/kernels/gpu/tuned``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lines
import msgspec
import torch
from gpu_kernels import BF16, time_us
from tune import cuts

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm, skinny_gemm
from sgla.kernels.cuda.build import processors
from sgla.kernels.gpu.tuning import LIBRARY, Algorithm, Line, Product, estimated
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import fp8

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FEW = [  # tiles, half, stages, blocks a multiprocessor
    (1, False, 5, 2), (1, True, 5, 2), (1, False, 4, 2), (1, False, 6, 1), (1, True, 6, 1), (1, False, 8, 1),
    (1, True, 8, 1), (1, False, 10, 1), (2, False, 3, 2), (2, False, 3, 1), (2, False, 4, 1),
    (2, False, 6, 1), (4, False, 3, 1),
]  # fmt: skip
Body = Callable[[Any], Any]
FEW_ROWS = 64  # up to which there are other tiles
ERRORS: dict[tuple[int, str], dict[Any, Callable[[Any], float]]] = {}  # of products in blocks, relative


def weights_of(n: int, k: int, size: int = 500 << 20) -> list[torch.Tensor]:
    """Of more bytes than the L2 cache holds; the numbers do not matter to their speed, but the power does."""
    copies = max(3, min(24, size // (n * k)))
    one = torch.randn(n, k, dtype=BF16, device="cuda").to(torch.float8_e4m3fn)
    return [one.view(torch.uint8).roll(i, 0).view(one.dtype) for i in range(copies)]


def few(m: int, role: str) -> dict[Any, Body]:
    """By cut; the estimate first."""
    n, k = SHAPES[role]
    x, scale, norm = (
        torch.randn(m, k, dtype=BF16, device="cuda"),
        *(torch.ones(size, device="cuda") for size in (n, k)),
    )
    gated, adds = role == "gate_up", role in ("o", "down")
    epilogue = skinny_gemm.SILU if gated else skinny_gemm.ADD if adds else skinny_gemm.STORE
    out = torch.zeros(m, n, dtype=BF16, device="cuda") if adds else None
    given: dict[str, Any] = {"scale": scale, "epilogue": epilogue, "out": out}
    given |= {} if adds else {"norm": norm, "eps": 1e-6}
    columns = n // 2 if gated else n
    configs = [skinny_gemm.default_config(m, columns, k, gated, True)]
    configs += [c for c in (skinny_gemm.Config(*cut) for cut in FEW) if runs(c, m, gated)]

    def body(config: skinny_gemm.Config) -> Body:
        return lambda w: skinny_gemm.linear(x, w, config=config, **given)

    return {config: body(config) for config in dict.fromkeys(configs)}


def runs(config: skinny_gemm.Config, m: int, gated: bool) -> bool:
    """Whether the cut makes sense, and fits into shared memory with the sums."""
    sums = 4 * 2 * 8 * (2 if m <= 2 else 8 * -(-m // 8)) * (16 * config.tiles + 1)
    return not (gated and config.half) and config.ring() + sums + 512 <= (227, 113)[config.per_sm - 1] << 10


def tiles(m: int, role: str, most: int) -> dict[Any, Body]:
    """By algorithm; the estimate first."""
    n, k = SHAPES[role]
    gated = role == "gate_up"
    product = Product(n, k, gated, "fp8")
    rounded = fp8.quantize(torch.randn(m, k, dtype=BF16, device="cuda"))
    scale = torch.ones(n, device="cuda")
    epilogue = batch_gemm.SILU if gated else batch_gemm.STORE
    found = [estimated(max(m, skinny_gemm.MAX_ROWS + 1), product), LIBRARY]
    found += [Algorithm("tiles", config) for config in cuts(m, product, "gate" if gated else "")[:most]]

    def body(algorithm: Algorithm) -> Body:
        config: Any = algorithm.config
        if algorithm == LIBRARY and gated:
            return lambda w: fp8.act_mul_quantize(fp8.linear(rounded, w, scale), "silu")
        if algorithm == LIBRARY:
            return lambda w: fp8.linear(rounded, w, scale)
        scales = batch_gemm.Scales(rounded.scale, scale)

        def ours(w: torch.Tensor) -> Any:
            y = batch_gemm.linear(rounded.numbers, w, config, epilogue=epilogue, scales=scales)
            return fp8.quantize(y) if gated else y

        return ours

    return {algorithm: body(algorithm) for algorithm in dict.fromkeys(found)}


def block_cuts(m: int, n: int, k: int, gated: bool) -> list[batch_gemm.Config]:
    """What serves first."""
    cut, found = batch_gemm.Config, [batch_gemm.grouped_config(m, n, k, gated)]
    if m > FEW_ROWS:
        found += [cut(tile, 1, 1, rows=rows) for tile in (128, 192) for rows in (96, 128)]
    if FEW_ROWS < m <= batch_gemm.MAX_ROWS and n <= 8192:
        found += [
            cut(tile, split, 1, rows=rows) for tile in (128, 192) for split in (2, 4) for rows in (96, 128)
        ]
        found += [cut(64, split, 1, rows=128) for split in (1, 2)]
        blocks = 4 * -(-n // 128) * -(-m // 128)
        found += [cut(128, 4, 1, True, rows=128)] if blocks <= processors() else []
    if m > batch_gemm.MAX_ROWS:
        found.append(cut(128, 1, 1, rows=256))
    return list(dict.fromkeys(found))


def blocks(m: int, role: str) -> dict[Any, Body]:
    """By cut of the tiles, what serves first. "blocks": the library's product with the same scales; LIBRARY,
    and "channels" by our tiles: with a scale a channel."""
    n, k = SHAPES[role]
    gated = role == "gate_up"
    rounded = fp8.quantize(torch.randn(m, k, dtype=BF16, device="cuda"))
    whole, scale = torch.ones(n, device="cuda"), torch.rand(n // 128, k // 128, device="cuda") + 0.5
    scales = batch_gemm.Scales(rounded.scale, scale)
    epilogue = batch_gemm.SILU if gated else batch_gemm.STORE

    def ours(w: torch.Tensor, config: batch_gemm.Config) -> torch.Tensor:
        return batch_gemm.linear(rounded.numbers, w, config, epilogue=epilogue, scales=scales)

    def then(body: Body, w: torch.Tensor) -> Any:
        y = body(w)
        if not gated:
            return y
        return fp8.act_mul_quantize(y, "silu") if y.shape[1] == n else fp8.quantize(y)

    def error(body: Body, w: torch.Tensor) -> float:
        of_w = (w.float().view(n, -1, 128) * scale.repeat_interleave(128, 0)[:, :, None]).view(n, k)
        y, expected = body(w).float(), (rounded.numbers.float() * rounded.scale[:, None]) @ of_w.T
        expected = ops.act_mul(expected, "silu") if gated else expected
        y = ops.act_mul(y, "silu") if gated and y.shape[1] == n else y
        return float((y - expected).norm() / expected.norm())

    made: dict[Any, Body] = {c: functools.partial(ours, config=c) for c in block_cuts(m, n, k, gated)}
    made["blocks"] = lambda w: fp8.blocks(rounded, w, scale)
    ERRORS[m, role] = {name: functools.partial(error, body) for name, body in made.items()}
    made[LIBRARY] = lambda w: fp8.linear(rounded, w, whole)
    config: Any = estimated(m, Product(n, k, gated, "fp8")).config
    if isinstance(config, batch_gemm.Config):
        each: dict[str, Any] = {"config": config, "epilogue": epilogue}
        each |= {"scales": batch_gemm.Scales(rounded.scale, whole)}
        made["channels"] = lambda w: batch_gemm.linear(rounded.numbers, w, **each)
    return {name: functools.partial(then, body) for name, body in made.items()}


def layer(m: int, ours: bool) -> Callable[[Any], None]:
    """The products of a layer with what rounds between them; q, k and v stand for what attention returns."""
    ones = {size: torch.ones(size, device="cuda") for size in (4096, 6144, 24576)}
    x, residual = (torch.randn(m, 4096, dtype=BF16, device="cuda") for _ in range(2))

    def linear(rounded: fp8.Rounded, w: torch.Tensor, gated: bool = False) -> torch.Tensor:
        n, k = w.shape
        config: Any = estimated(m, Product(n, k, gated, "fp8")).config
        scale = ones[n]
        if not ours or config is None:
            return fp8.linear(rounded, w, scale)
        epilogue = batch_gemm.SILU if gated else batch_gemm.STORE
        scales = batch_gemm.Scales(rounded.scale, scale)
        return batch_gemm.linear(rounded.numbers, w, config, epilogue=epilogue, scales=scales)

    def run(ws: dict[str, torch.Tensor]) -> None:
        *_, rounded = fp8.add_norm_quantize(x, residual, ones[4096], 1e-6)
        y = linear(rounded, ws["qkv"])[:, :4096].contiguous()
        y = linear(fp8.quantize(y), ws["o"])
        *_, rounded = fp8.add_norm_quantize(y, residual, ones[4096], 1e-6)
        y = linear(rounded, ws["gate_up"], True)
        linear(fp8.quantize(y) if ours else fp8.act_mul_quantize(y, "silu"), ws["down"])

    return run


def timed(cases: dict[Any, Body], weights: list[Any], repeats: int) -> dict[Any, float]:
    def us(body: Body) -> float:
        return round(time_us(lambda: [body(w) for w in weights], len(weights), repeats), 2)

    return {key: us(body) for key, body in cases.items()}


def emit(m: int, role: str, times: dict[Any, float], least: float) -> None:
    (first, us), best = next(iter(times.items())), sorted(times, key=lambda key: times[key])[:4]
    found: dict[str, Any] = {"bench": "e4m3", "role": role, "m": m, "floor_us": round(least, 2)}
    found |= {"chosen": str(first), "us": us, "library_us": times.get(LIBRARY)}
    found["best"] = [(times[key], tuple(getattr(key, "config", key) or ("library",))) for key in best]
    lines.emit(found)


def emit_blocks(m: int, role: str, times: dict[Any, float], w: torch.Tensor) -> None:
    """Every cut, whose error is told if it is not that of the result's rounding."""
    found: dict[str, Any] = {"bench": "e4m3 blocks", "role": role, "m": m, "library_us": times[LIBRARY]}

    def name(key: Any) -> str:
        return key if isinstance(key, str) else " ".join(map(str, map(int, key)))

    found["us"] = {name(key): us for key, us in times.items() if key != LIBRARY}
    errors = {name(key): error(w) for key, error in ERRORS[m, role].items() if key in times}
    found["wrong"] = {key: round(error, 4) for key, error in errors.items() if not error < 6e-3}
    lines.emit(found)


def cases_of(kinds: list[str], rows: list[int], most: int) -> Iterator[tuple[int, str, dict[Any, Body]]]:
    for role in SHAPES:
        for m in rows:
            if m <= skinny_gemm.MAX_ROWS and "few" in kinds:
                yield m, role, few(m, role)
            if m >= batch_gemm.MIN_ROWS and "tiles" in kinds:
                yield m, role, tiles(m, role, most)
            if m >= batch_gemm.MIN_GROUPED and "blocks" in kinds:
                yield m, role, blocks(m, role)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=["few", "tiles", "chain"])
    parser.add_argument("--rows", default="1,4,16,32,64,128,256")
    parser.add_argument("--most", type=int, default=10, help="cuts of tiles that are tried")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    rows = list(map(int, args.rows.split(",")))
    cases = list(cases_of(args.kinds, rows, args.most))
    blank = {
        role: torch.zeros(*shape, dtype=torch.float8_e4m3fn, device="cuda") for role, shape in SHAPES.items()
    }
    with rehearsing():  # all compile side by side
        for _, role, bodies in cases:
            for body in bodies.values():
                body(blank[role])
    found: list[Line] = []
    weights: list[Any] = []
    of = ""
    for m, role, bodies in cases:
        n, k = SHAPES[role]
        if of != role:
            weights, of = [], role
            weights = weights_of(n, k)
        times = timed(bodies, weights, args.repeats)
        if bodies.keys() & ERRORS.get((m, role), {}).keys():
            emit_blocks(m, role, times, weights[0])
            continue
        emit(m, role, times, max(n * k / 4.34e6, 2 * m * n * k / 1.4e9))
        found.append(line_of(m, role, times))
    if args.table is not None:
        args.table.write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in found))
    weights = []
    if "chain" in args.kinds:
        layers = [{role: weights_of(*shape, 0)[0] for role, shape in SHAPES.items()} for _ in range(4)]
        for m in (m for m in rows if m > skinny_gemm.MAX_ROWS):
            us = timed({ours: layer(m, ours) for ours in (True, False)}, layers, args.repeats)
            lines.emit({"bench": "e4m3", "role": "layer", "m": m, "us": us[True], "library_us": us[False]})


def line_of(m: int, role: str, times: dict[Any, float]) -> Line:
    best: Any = min(times, key=lambda key: times[key])
    kernel, config = best if isinstance(best, Algorithm) else Algorithm("few rows", best)
    cut = config._asdict() if config is not None else {}
    us = {str(kernel): times[best]}
    if LIBRARY in times:
        us["library"] = times[LIBRARY]
    return Line(*SHAPES[role], role == "gate_up", "fp8", m, m, kernel, cut, us)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
