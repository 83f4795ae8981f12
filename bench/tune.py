"""Find which kernel multiplies by each weight of a model, and how it is best cut: the tables of
``sgla/kernels/gpu/tuned``.

    python bench/tune.py --out DIR [--seconds 110] [--models bench/models/qwen3-8b,...] [--tp 1] [--gain 0.03]

Each product is timed with what its kernels do behind it (the gate, the add with its norm, the heads of
prompts), by medians of graph replays over weights larger than the L2 cache. What is estimated is kept, unless
another algorithm is faster by more than ``--gain``. DIR gets the table of the card, to be put beside the
others, and ``tune.jsonl``: all times. Numbers of rows that people meet most come first for all models, so
that little time gives a table, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lines
import msgspec
import torch
from gpu_kernels import time_us

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.device import this_device
from sgla.kernels.gpu.tuning import LIBRARY, PROMPT, Algorithm, Line, Product, estimated, file_of
from sgla.kernels.ops import AddedNorm
from sgla.kernels.triton import elementwise
from sgla.loading.source import open_source
from sgla.worker.report import forward_of

BF16 = torch.bfloat16
ROWS = 64, 256, 16, 128, 1, 32, 192, 8, 2048, 96, 160, 224, 8192, 4, 1024, 2, 512, 4096
MOST = 10  # choices of tiles that are tried; each is compiled, for 15 s of CPU
EPILOGUES = {"gate": batch_gemm.SILU, "add": batch_gemm.ADD, "logits": batch_gemm.FLOAT32}
CLUSTERS = {4: 30, 8: 14}  # of so many blocks each that an H200 has room for
FEW = [skinny_gemm.Config(1, half, 5, per_sm) for half in (False, True) for per_sm in (1, 2)] + [
    skinny_gemm.Config(2, False, stages, per_sm) for stages, per_sm in ((3, 1), (3, 2), (4, 1))
]


class Layer(NamedTuple):
    """``behind``: the op that reads what comes out; "logits" if it is the output layer, "" if another."""

    product: Product
    behind: str


def layers_of(source: ModelSource, ranks: int = 1) -> list[Layer]:
    """The linear layers of one rank of a model in bfloat16, each once."""
    record = forward_of(Config(dtype="bfloat16", tp=ranks), source)._record("step", False)
    assert record is not None, "the model cannot be recorded"
    readers = {number: node.op for node in record.nodes for number in node.reads}
    names = {ops.act_mul: "gate", ops.add_rms_norm: "add", ops.qk_norm_rope_store: "heads"}
    found = []
    for node in record.nodes:
        if node.op in (ops.linear, ops.logits) and (w := node.given["w"]).kind == "bf16":
            behind = "logits" if node.op is ops.logits else names.get(readers.get(node.results[0]), "")
            found.append(Layer(Product(w.n, w.k, behind == "gate"), behind))
    return list(dict.fromkeys(found))


def candidates(m: int, product: Product, behind: str, most: int = MOST) -> list[Algorithm]:
    """What can serve ``m`` rows, the estimate first."""
    n, k, gated, _ = product
    found = [estimated(m, product)]
    if found[0].kernel == "few rows":
        return list(dict.fromkeys(found + [Algorithm("few rows", c) for c in FEW if not (gated and c.half)]))
    found.append(LIBRARY)
    if prompt_gemm.refuses(m, n, k, gated) is None:
        found.append(PROMPT)
    if batch_gemm.refuses(n, k) is None and not (gated and n % 16):
        found += [Algorithm("tiles", config) for config in cuts(m, product, behind)[:most]]
    return list(dict.fromkeys(found))


def cuts(m: int, product: Product, behind: str) -> list[batch_gemm.Config]:
    """Those that keep most of the GPU busy, first those that read and exchange least."""
    n, k, gated, _ = product
    if m > batch_gemm.MAX_ROWS:
        rows = -(-m // (32 * -(-m // batch_gemm.MAX_ROWS))) * 32
        return [batch_gemm.Config(t, 1, 1, rows=rows, passes=1 + (t == 224)) for t in (192, 224) if gated]
    splits = (1, False), (2, False), (4, False), (8, False), (4, True), (8, True)
    tiles = (64, 128, 192, 256) + ((224, 160, 96) if gated else ())
    found = [
        batch_gemm.Config(tile, split, per_sm, apart, rows, 1 + (tile == 224 and min(m, rows) > 128))
        for tile, (split, apart), per_sm in itertools.product(tiles, splits, (1, 2))
        for rows in ((batch_gemm.MAX_ROWS, 128) if m > 128 else (batch_gemm.MAX_ROWS,))
        if not (apart and per_sm > 1)
    ]

    def worth(c: batch_gemm.Config) -> tuple[float, float]:
        blocks, places = shares(c, m, n)
        moved = k * (n * -(-m // batch_gemm.rows_of(c, m)) + m * batch_gemm._tiles(n, c.tile))
        busy = blocks / (-(-blocks // places) * places)
        return -min(busy, 0.7), moved + 4 * m * n * (c.split - 1)

    return sorted((c for c in found if fits(c, m, n, behind)), key=worth)


def shares(config: batch_gemm.Config, m: int, n: int) -> tuple[int, int]:
    """Blocks of a product, and how many multiprocessors have room for."""
    blocks = batch_gemm._tiles(n, config.tile) * -(-m // batch_gemm.rows_of(config, m)) * config.split
    return blocks, processors() * config.per_sm


def fits(config: batch_gemm.Config, m: int, n: int, behind: str) -> bool:
    """Whether the blocks of ``batch_gemm`` with these cuts can run, and keep a third of the GPU busy."""
    blocks, places = shares(config, m, n)
    rows = batch_gemm.rows_of(config, m)
    if config.tile % 64 and config.split > 1:  # two such tiles share 64 rows of the weight
        return False
    if not config.apart:
        places = min(places, CLUSTERS.get(config.split, places) * config.split * config.per_sm)
    room = (config.tile + rows) * config.per_sm <= 448 and (rows <= 128 or config.tile < 256)
    room = room and batch_gemm.fits(config, m, EPILOGUES.get(behind, batch_gemm.STORE))
    return room and blocks > places / 3 and (blocks <= places if config.split > 1 else blocks <= 4 * places)


def fastest(times: Mapping[Algorithm, float], gain: float) -> Algorithm:
    """The first, which is the estimate, or what is faster by more than ``gain``."""
    first, best = next(iter(times)), min(times, key=lambda algorithm: times[algorithm])
    return best if times[best] < times[first] * (1 - gain) else first


def first_row(m: int, product: Product) -> int:
    """From how many rows on what is measured with ``m`` speaks: behind the next smaller number that is tried,
    as long as the estimate stays, and no more than a tile, with which another kernel may fill the GPU
    better."""
    above = max((other for other in ROWS if other < m), default=0)
    first, there, least = m, estimated(m, product), max(above, m - batch_gemm.MAX_ROWS) + 1
    while first > least and estimated(first - 1, product) == there:
        first -= 1
    return first


def table(times: Mapping[tuple[Product, int], Mapping[Algorithm, float]], gain: float) -> list[Line]:
    """Times by product and rows, as lines of a table."""
    found = []
    for (product, m), timed in sorted(times.items(), key=lambda item: item[0]):
        kernel, config = fastest(timed, gain)
        us: dict[str, float] = {}
        for algorithm, value in timed.items():
            us[algorithm.kernel] = round(min(value, us.get(algorithm.kernel, value)), 2)
        cut = config._asdict() if config is not None else {}
        first = first_row(m, product)
        found.append(Line(**product._asdict(), first=first, last=m, kernel=kernel, config=cut, us=us))
    return found


class Gpu:
    """Times one layer after the other."""

    def __init__(self) -> None:
        self._layer: Layer | None = None
        self._weights: list[torch.Tensor] = []

    def __call__(self, layer: Layer, m: int, algorithm: Algorithm) -> float:
        """Microseconds."""
        n, k = layer.product[:2]
        if self._layer != layer:
            self._weights = []
            copies = max(2, min(12, (300 << 20) // (2 * n * k)))
            self._weights = [torch.randn(n, k, dtype=BF16, device="cuda") * 0.02 for _ in range(copies)]
            self._layer = layer
        weights = self._weights[: 3 if m > 1024 else None]
        one = body(layer, m, algorithm)
        return time_us(lambda: [one(w) for w in weights], len(weights), 5)


def body(layer: Layer, m: int, algorithm: Algorithm) -> Callable[[torch.Tensor], Any]:
    """The layer with what is behind it, of any weight."""
    (n, k, _, _), behind = layer
    x = torch.randn(m, k, dtype=BF16, device="cuda")
    residual, scale = torch.randn(m, n, dtype=BF16, device="cuda"), torch.ones(n, device="cuda")
    config: Any = algorithm.config
    if algorithm.kernel == "few rows":
        epilogue = {"gate": skinny_gemm.SILU, "logits": skinny_gemm.FLOAT32}.get(behind, skinny_gemm.STORE)
        return lambda w: skinny_gemm.linear(x, w, epilogue=epilogue, config=config)
    if behind == "heads" and m > batch_gemm.MAX_ROWS:
        return heads(x, n, algorithm)
    ours = batch_gemm if algorithm.kernel == "tiles" else prompt_gemm
    more: Any = {"config": config} if algorithm.kernel == "tiles" else {}
    if behind == "gate":
        if algorithm == LIBRARY:
            return lambda w: elementwise.act_mul(torch.nn.functional.linear(x, w), "silu")
        return lambda w: ours.linear(x, w, epilogue=batch_gemm.SILU, **more)
    if behind == "add" and algorithm.kernel == "tiles":
        norm = AddedNorm(residual, scale, 1e-6)
        return lambda w: batch_gemm.linear_add(x, w, config, norm)
    if behind == "logits":
        out = torch.empty(m, n, device="cuda")
        if algorithm == LIBRARY:
            return lambda w: torch.mm(x, w.t(), out_dtype=torch.float32, out=out)
        return lambda w: ours.linear(x, w, epilogue=batch_gemm.FLOAT32, out=out, **more)
    plain: Callable[[torch.Tensor], torch.Tensor] = lambda w: torch.nn.functional.linear(x, w)  # noqa: E731
    if algorithm != LIBRARY:
        plain = lambda w: ours.linear(x, w, **more)  # noqa: E731
    if behind == "add":
        return lambda w: elementwise.add_rms_norm(plain(w), residual, scale, 1e-6)
    return plain


def heads(x: torch.Tensor, n: int, algorithm: Algorithm) -> Callable[[torch.Tensor], Any]:
    """Projections to q, k and v in heads of 128 (half of them q), rotated and stored."""
    m, kv_heads = len(x), max(1, n // 512)
    pool = torch.zeros(2, m // 16 + 1, kv_heads, 16, 128, dtype=BF16, device="cuda").transpose(2, 3)
    cos_sin, ones = torch.randn(m, 128, device="cuda"), torch.ones(128, device="cuda")
    places = torch.arange(m, dtype=torch.int32, device="cuda")
    if algorithm.kernel == "prompt tiles":
        kv = ops.KVLayer(pool[0], pool[1])
        projection = Projection(cos_sin, ones, ones, 1e-6)
        return lambda w: prompt_gemm.linear_heads(x, w, places, projection, kv, places, False)
    product: Callable[[Any, Any], torch.Tensor] = torch.nn.functional.linear
    if algorithm.kernel == "tiles":
        config: Any = algorithm.config
        product = lambda x, w: batch_gemm.linear(x, w, config)  # noqa: E731
    return lambda w: elementwise.qk_norm_rope_store(
        product(x, w), places, cos_sin, ones, ones, 1e-6, pool[0], pool[1], places
    )


def jobs(layers: Sequence[Layer], rows: Iterable[int]) -> Iterator[tuple[int, Layer]]:
    """In their order; the output layer never has so many rows as prompts."""
    for m, layer in itertools.product(rows, layers):
        if layer.behind != "logits" or m <= batch_gemm.MAX_ROWS:
            yield m, layer


Timer = Callable[[Layer, int, Algorithm], float]
Ready = Callable[[Layer, int, Algorithm], bool]


def measure(
    layers: Sequence[Layer], rows: Iterable[int], timer: Timer, ready: Ready, most: int = MOST
) -> Iterator[tuple[Layer, int, dict[Algorithm, float]]]:
    """Times of every candidate that is ``ready``, for one layer and number of rows after the other."""
    for m, layer in jobs(layers, rows):
        times: dict[Algorithm, float] = {}
        for algorithm in candidates(m, *layer, most):
            try:
                if ready(layer, m, algorithm):
                    times[algorithm] = timer(layer, m, algorithm)
            except Exception as error:
                print(f"{layer}, {m} rows: {algorithm} failed: {str(error)[:200]}", flush=True)
        if len(times) > 1 and estimated(m, layer.product) in times:
            yield layer, m, times


def kernel_of(layer: Layer, m: int, algorithm: Algorithm) -> Kernel | None:
    """What has to be compiled for it, which begins at once."""
    if not isinstance(algorithm.config, batch_gemm.Config):
        return None
    return batch_gemm.ask(algorithm.config, m, EPILOGUES.get(layer.behind, batch_gemm.STORE))


def compile_ahead(layers: Sequence[Layer], rows: Iterable[int], most: int) -> None:
    """Begin to compile what ``measure`` will want, in its order, on other threads."""
    for m, layer in jobs(layers, rows):
        for algorithm in candidates(m, *layer, most):
            kernel_of(layer, m, algorithm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="bench/models/qwen3-8b,bench/models/qwen3-0.6b")
    parser.add_argument("--tp", type=int, default=1, help="layers are those of one rank of so many")
    parser.add_argument("--without", default="", help="what is behind layers that are left out: logits, say")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="in the order of their weight")
    parser.add_argument("--most", type=int, default=MOST, help="choices of tiles that are tried")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--gain", type=float, default=0.03)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    sources = [open_source(Path(model), "dummy") for model in args.models.split(",")]
    every = dict.fromkeys(layer for source in sources for layer in layers_of(source, args.tp))
    layers = [layer for layer in every if layer.behind not in args.without.split(",") or not layer.behind]
    rows = [int(m) for m in args.rows.split(",")]
    compile_ahead(layers, rows, args.most)

    def ready(layer: Layer, m: int, algorithm: Algorithm) -> bool:
        """There is time, and what has to be compiled is, or will be in time."""
        left = end - time.monotonic()
        kernel = kernel_of(layer, m, algorithm)
        return left > 0 and (kernel is None or kernel.compiled(left))

    times: dict[tuple[Product, int], dict[Algorithm, float]] = {}
    path = args.out / file_of(this_device().name).name
    with torch.inference_mode(), (args.out / "tune.jsonl").open("w") as log:
        for layer, m, found in measure(layers, rows, Gpu(), ready, args.most):
            times.setdefault((layer.product, m), found)
            path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in table(times, args.gain)))
            fields = {
                "behind": layer.behind,
                "m": m,
                "us": [[*algorithm, us] for algorithm, us in found.items()],
            }
            print(json.dumps(layer.product._asdict() | fields), file=log, flush=True)
    lines.emit({"bench": "tune", "measured": len(times), "of": len(list(jobs(layers, rows)))})
    sys.stdout.flush()
    os._exit(0)  # without what is still being compiled


if __name__ == "__main__":
    main()
