# ruff: noqa: B023
"""Time the GPU kernels against the limits of the chip: one JSON line a measurement.

    python bench/gpu_kernels.py [decode] [cascade] [skinny] [batch] [integers] [small] [prefill] [sampling]
        [tower]

Times are medians of graph replays (CUDA events), each over a set of buffers larger than the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import lines
import torch

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels.ops import KVLayer, Scoring

BF16 = torch.bfloat16
SCORING = Scoring(0.088)


def emit(**fields: Any) -> None:
    lines.emit(fields)


def capture(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
    torch.cuda.synchronize()
    return graph


def time_us(body: Callable[[], Any], calls: int, repeats: int = 20) -> float:
    """Median microseconds of one of ``calls`` launches made by ``body``, replayed from a graph."""
    graph, times = capture(body), []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def decode_rows(lens: torch.Tensor) -> DeviceBatch:
    """Decode rows of these lengths, int[R] on the CPU, over shuffled pages of 16 tokens. Page 0 is
    nobody's."""
    size, rows = 16, len(lens)
    counts, last, slots = -(-lens // size), lens.long() - 1, torch.arange(rows)
    table = torch.zeros(rows, int(counts.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = 1 + torch.randperm(int(counts.sum())).int()
    tiles = -(-lens // attention.TILE)
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")
    return DeviceBatch(
        rows=rows,
        tokens=rows,
        ids=empty,
        positions=last.int().cuda(),
        slots=slots.int().cuda(),
        q_start=empty,
        kv_len=lens.int().cuda(),
        out_loc=(table[slots, last // size] * size + last % size).int().cuda(),
        page_table=table.cuda(),
        page_size=size,
        sample_rows=empty,
        decode_rows=rows,
        cum={0: torch.cat([torch.zeros(1), tiles.cumsum(0)]).int().cuda()},
    )


def shape_of(heads: int, kv_heads: int, rows: int) -> attention.AttentionShape:
    """Layers with heads of 128 that see all tokens."""
    return attention.AttentionShape(
        heads, kv_heads, 128, 16, BF16, frozenset({0}), 0.0, rows, scale=SCORING.scale
    )


def random_pages(pages: int, size: int, kv_heads: int, dim: int, kind: torch.dtype) -> KVLayer:
    pool = torch.randn(2, pages, kv_heads, size, dim, dtype=BF16, device="cuda").transpose(2, 3)
    if kind != torch.int8:
        k, v = pool.to(kind)
        return KVLayer(k, v)
    scales = torch.rand(2, pages, kv_heads, size, device="cuda") / 100
    k, v = (pool * 40).clamp(-127, 127).to(kind)
    return KVLayer(k, v, k_scales=scales[0], v_scales=scales[1])


def decode_batch(
    rows: int, length: int, heads: int, kv_heads: int, dim: int, kind: torch.dtype = BF16
) -> tuple[Any, list[KVLayer], DeviceBatch]:
    """Rows of equal length, and enough copies of the KV to leave the L2."""
    batch = decode_rows(torch.full((rows,), length))
    size, pages = batch.page_size, batch.page_table.numel() + 1
    copies = max(1, min(16, (400 << 20) // (2 * pages * size * kv_heads * dim * 2)))
    layers = []
    for _ in range(copies):
        layers.append(random_pages(pages, size, kv_heads, dim, kind))
    return torch.randn(rows, heads * dim, dtype=BF16, device="cuda"), layers, batch


def bench_decode() -> None:
    from sgla.kernels.cuda import decode_attention

    cases = [(*heads, BF16) for heads in ((16, 8), (32, 8), (32, 4))]
    for heads, kv_heads, kind in [*cases, (32, 8, torch.float8_e4m3fn), (32, 8, torch.int8)]:
        long = (1, 32768), (8, 32768), (16, 8192), (256, 1024)
        for rows, length in ((1, 640), (1, 4096), (16, 640), (64, 640), (64, 4096), (256, 640), *long):
            q, layers, batch = decode_batch(rows, length, heads, kv_heads, 128, kind)
            bytes_ = 2 * rows * length * kv_heads * 128 * kind.itemsize
            shape = shape_of(heads, kv_heads, rows)
            if kind != BF16:
                shape = shape._replace(kv_dtype="int8" if kind == torch.int8 else "fp8")
            names = ["auto", "triton"] if (heads, kv_heads) == (32, 8) else ["auto"]
            for name in names:
                attend: Any = attention.choose_backend(name, [shape])[0].decode
                variants: list[tuple[str, Any]] = [(attend.name, None)]
                if name == "auto":
                    variants = [
                        (f"{cut.warps} warps x {cut.per_sm}", cut)
                        for cut in (decode_attention.FEW, decode_attention.MANY)
                    ]
                for label, cut in variants:
                    if name == "auto":
                        attend._kernel.cut = cut

                    def body() -> None:
                        for kv in layers:
                            attend.forward(q, kv, batch, SCORING)

                    us = time_us(body, len(layers))
                    emit(
                        bench="decode",
                        kernel=attend.name,
                        config=label,
                        kv=str(kind).removeprefix("torch."),
                        heads=heads,
                        kv_heads=kv_heads,
                        rows=rows,
                        length=length,
                        us=round(us, 2),
                        tb_s=round(bytes_ / us / 1e6, 3),
                    )


SHAPES = {  # n, k of qkv, o, gate_up, down, head
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "qwen3-8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
}


CONFIGS = [  # tiles, half, stages, blocks a multiprocessor
    (1, False, 5, 1),
    (1, False, 5, 2),
    (1, True, 5, 1),
    (1, True, 5, 2),
    (2, False, 3, 1),
    (2, False, 3, 2),
    (2, False, 4, 1),
]


def bench_cascade() -> None:
    """Rows that share a prefix, read for each of them and read once."""
    import numpy as np

    from sgla.attention.cascade import Cascade, pack, unpack

    def upload(x: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x, np.int32)).cuda()

    for rows, shared, own, heads in (
        (256, 2048, 96, 32),
        (32, 8192, 200, 32),
        (8, 4096, 200, 32),
        (256, 512, 300, 16),
    ):
        q, layers, batch = decode_batch(rows, shared + own, heads, 8, 128)
        table = batch.page_table.cpu().numpy()
        table[:, : shared // 16] = table[0, : shared // 16]
        batch.page_table = upload(table)
        shape = shape_of(heads, 8, rows)
        attend = attention.choose_backend("auto", [shape])[0]
        planner = Cascade.of([shape], attend)
        assert planner is not None
        starts = np.full(rows, shared + own - 1, np.int32)
        plan = planner.plan(np.arange(rows, dtype=np.int32), starts, table, 0, rows)
        plain = time_us(lambda: [attend(q, kv, batch, SCORING) for kv in layers], len(layers))
        us = None
        if plan is not None:
            tiles = -(-(starts + 1) // 16) - plan.skip // 16
            batch.cum = {0: upload(np.concatenate([[0], np.cumsum(tiles)]))}
            batch.prefixes = unpack(upload(pack(plan, rows)), rows)
            us = round(time_us(lambda: [attend(q, kv, batch, SCORING) for kv in layers], len(layers)), 1)
        emit(
            bench="cascade",
            rows=rows,
            shared=shared,
            own=own,
            heads=heads,
            kv_heads=8,
            us=us,
            plain_us=round(plain, 1),
        )


def bench_skinny() -> None:
    from sgla.kernels.cuda import skinny_gemm as sk

    for name, shapes in SHAPES.items():
        for i, (n, k) in enumerate(shapes):
            copies = max(1, min(12, (600 << 20) // (n * k * 2)))
            weights = [torch.randn(n, k, dtype=BF16, device="cuda") * 0.02 for _ in range(copies)]
            norm = torch.ones(k, device="cuda")
            for m in (1, 4, 8, 16):
                x = torch.randn(m, k, dtype=BF16, device="cuda")
                role = ("qkv", "o", "gate_up", "down", "head")[i]
                epilogue = (sk.STORE, sk.ADD, sk.SILU, sk.ADD, sk.FLOAT32)[i]
                out = torch.zeros(m, n, dtype=BF16, device="cuda") if epilogue == sk.ADD else None
                results = []
                configs = CONFIGS
                if epilogue == sk.SILU:
                    configs = [c for c in configs if not c[1]]
                for config in (sk.Config(*c) for c in configs):

                    def body(config: Any = config) -> None:
                        for w in weights:
                            sk.linear(
                                x,
                                w,
                                norm=norm if i in (0, 2, 4) else None,
                                eps=1e-6,
                                epilogue=epilogue,
                                out=out,
                                config=config,
                            )

                    results.append((time_us(body, copies, 7), str(config)))

                def cublas() -> None:
                    for w in weights:
                        torch.nn.functional.linear(x, w)

                results.append((time_us(cublas, copies, 7), "cublas"))
                results.sort()
                base = next(us for us, c in results if c == "cublas")
                emit(
                    bench="skinny",
                    model=name,
                    role=role,
                    n=n,
                    k=k,
                    m=m,
                    floor_us=round(n * k * 2 / 4.34e6, 2),
                    cublas_us=round(base, 2),
                    best=[(round(us, 2), c) for us, c in results[:4]],
                )
            weights = []


def bench_batch() -> None:
    from sgla.kernels.cuda import batch_gemm as bg

    for name, shapes in SHAPES.items():
        for role, (n, k) in zip(("qkv", "o", "gate_up", "down", "head"), shapes):
            copies = max(1, min(12, (600 << 20) // (n * k * 2)))
            weights = [torch.randn(n, k, dtype=BF16, device="cuda") * 0.02 for _ in range(copies)]
            epilogue = {"gate_up": bg.SILU, "head": bg.FLOAT32}.get(role, bg.STORE)
            for m in (16, 32, 64, 96, 128, 192, 256):
                x = torch.randn(m, k, dtype=BF16, device="cuda")
                chosen = bg.default_config(m, n, k, role == "gate_up")
                splits = ((1, False), (2, False), (4, False), (8, False), (4, True))
                configs = [
                    bg.Config(t, s, b, a) for t in (64, 128, 192, 256) for s, a in splits for b in (1, 2)
                ]
                results = []
                for config in filter(lambda c: fits(c, m, n), configs):

                    def body(config: Any = config) -> None:
                        for w in weights:
                            bg.linear(x, w, config, epilogue=epilogue)

                    results.append((round(time_us(body, copies, 7), 2), config))
                cublas = time_us(lambda: [torch.nn.functional.linear(x, w) for w in weights], copies, 7)
                emit(
                    bench="batch",
                    model=name,
                    role=role,
                    n=n,
                    k=k,
                    m=m,
                    floor_us=round(max(n * k * 2 / 4.34e6, 2 * m * n * k / 795e6), 2),
                    cublas_us=round(cublas, 2),
                    chosen=chosen,
                    us=next((us for us, c in results if c == chosen), None),
                    best=sorted(results)[:4],
                )
            weights = []


def fits(config: Any, m: int, n: int) -> bool:
    """Whether the blocks of batch_gemm with these cuts can run, and keep a third of the GPU busy."""
    blocks, slots = -(-n // config.tile) * config.split, 132 * config.per_sm
    room = (config.tile + max(m, 32)) * config.per_sm <= 448 and (m <= 128 or config.tile < 256)
    return room and blocks > slots / 3 and (blocks <= slots if config.split > 1 else blocks <= 4 * slots)


def random_integers(kind: str, n: int, k: int) -> Any:
    from sgla.quant.weight import storage

    with torch.device("cuda"):
        made = storage(kind).empty(n, k)
    words, constants = made.tensors
    torch.randint(-(1 << 31), (1 << 31) - 1, words.shape, dtype=torch.int32, device="cuda", out=words)
    zero = 0x43080000 if kind.startswith("int4") else 0  # 136, or 0, in bfloat16; and a scale in float16
    constants.fill_(zero | 0x1419)
    return made


def integer_cases(m: int, n: int, k: int, kind: str, role: str) -> dict[str, Callable[[Any], Any]]:
    """What may multiply ``m`` rows, of a weight; the first is what serves them."""
    from sgla.kernels.cuda import integer_gemm as ig
    from sgla.kernels.gpu import integers
    from sgla.kernels.triton import integers as tiles

    x, norm = torch.randn(m, k, dtype=BF16, device="cuda"), torch.ones(k, device="cuda")
    if m <= ig.MAX_ROWS:
        epilogue = {"gate_up": ig.SILU, "o": ig.ADD, "down": ig.ADD}.get(role, ig.STORE)
        out = torch.zeros(m, n, dtype=BF16, device="cuda") if epilogue == ig.ADD else None
        given: dict[str, Any] = {"norm": norm, "eps": 1e-6} if role in ("qkv", "gate_up") else {}
        given |= {"epilogue": epilogue, "out": out}
        return {"cuda": lambda w: ig.linear(x, w, **given)}
    tile = tiles.tile_for(m, n, k, 2)
    others = [tile, tile._replace(splits=max(1, tile.splits // 2))]
    others += [tile._replace(n=64, warps=4)] if m <= 64 else [tiles.Tile(64, 128, 4, 3, tile.splits)]
    found: dict[str, Callable[[Any], Any]] = {
        f"triton {tuple(each)}": lambda w, each=each: tiles.linear(x, w, tile=each)
        for each in dict.fromkeys(others)
    }
    unpacked = {"unpacked": lambda w: integers._unpacked(x, w, None)} if m > 64 else {}
    return unpacked | found if integers.is_long(m, BF16) else found | unpacked


def bench_integers() -> None:
    """Weights of 4 and 8 bits in groups of 128, beside cuBLAS in bfloat16."""
    from sgla.kernels.rehearsal import rehearsing

    shapes = dict(zip(("qkv", "o", "gate_up", "down"), SHAPES["qwen3-8b"]))
    for kind in ("int4g128", "int8g128", "int4g64"):
        rows = (1, 4, 16, 64, 256, 4096) if kind == "int4g128" else (1, 16, 64)
        cases = [
            (role, n, k, m, integer_cases(m, n, k, kind, role))
            for role, (n, k) in shapes.items()
            for m in rows
        ]
        blank = {shape: random_integers(kind, *shape) for shape in shapes.values()}
        with rehearsing():
            for _, n, k, _, calls in cases:
                for call in calls.values():
                    call(blank[n, k])
        for role, n, k, m, calls in cases:
            size = sum(t.nbytes for t in blank[n, k].tensors)
            weights = [random_integers(kind, n, k) for _ in range(max(2, min(12, (200 << 20) // size)))]
            times = {}
            for label, call in calls.items():
                times[label] = round(time_us(lambda: [call(w) for w in weights], len(weights), 7), 2)
            best = min(times.values())
            dense = [torch.randn(n, k, dtype=BF16, device="cuda") for _ in range(2 if n * k > 5e7 else 4)]
            x = torch.randn(m, k, dtype=BF16, device="cuda")
            library = time_us(lambda: [torch.nn.functional.linear(x, w) for w in dense], len(dense), 7)
            us = next(iter(times.values()))
            emit(
                bench="integers",
                kind=kind,
                role=role,
                n=n,
                k=k,
                m=m,
                us=us,
                best=best,
                floor_us=round(max(size / 4.34e6, 2 * m * n * k / 795e6), 2),
                tb_s=round(size / us / 1e6, 2),
                tflops=round(2 * m * n * k / us / 1e6),
                bf16_us=round(library, 2),
                times=times,
            )


def bench_small() -> None:
    from sgla.kernels.triton import elementwise as ew

    for tokens in (1, 64, 256, 8192):
        for heads, kv_heads, hidden, inner in ((16, 8, 1024, 3072), (32, 8, 4096, 12288)):
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * 128, dtype=BF16, device="cuda")
            pool = torch.zeros(2, 1024, kv_heads, 16, 128, dtype=BF16, device="cuda").transpose(2, 3)
            w = torch.ones(128, device="cuda")
            positions = torch.arange(tokens, device="cuda").int()
            table = torch.randn(8192, 128, device="cuda")
            x = torch.randn(tokens, hidden, dtype=BF16, device="cuda")
            wide = torch.randn(tokens, 2 * inner, dtype=BF16, device="cuda")
            norm = torch.ones(hidden, device="cuda")
            cases = {
                "qk_norm_rope_store": (
                    lambda: ew.qk_norm_rope_store(
                        qkv, positions, table, w, w, 1e-6, pool[0], pool[1], positions
                    ),
                    2 * qkv.nbytes,
                ),
                "add_rms_norm": (lambda: ew.add_rms_norm(x, x, norm, 1e-6), 4 * x.nbytes),
                "act_mul": (lambda: ew.act_mul(wide, "silu"), 1.5 * wide.nbytes),
            }
            for name, (call, bytes_) in cases.items():
                us = time_us(lambda call=call: [call() for _ in range(10)], 10)
                emit(
                    bench="small",
                    op=name,
                    tokens=tokens,
                    heads=heads,
                    us=round(us, 2),
                    floor_us=round(bytes_ / 4.3e6, 2),
                )


def bench_prefill() -> None:
    """Whole prompts, with k and v beside q."""
    import numpy as np

    from sgla.attention import ExtendRows

    for heads, kv_heads in ((16, 8), (32, 8), (32, 4)):
        for rows, length in ((1, 128), (1, 1024), (1, 4096), (2, 4096), (1, 8192), (16, 512)):
            _, layers, batch = decode_batch(rows, length, heads, kv_heads, 128)
            tokens = rows * length
            q = torch.randn(tokens, (heads + 2 * kv_heads) * 128, dtype=BF16, device="cuda")[:, : heads * 128]
            lens = np.full(rows, length, np.int32)
            batch.extend = ExtendRows(
                np.arange(rows, dtype=np.int32), lens, lens, batch.page_table.cpu().numpy()
            )
            batch.q_start = torch.arange(rows + 1, device="cuda").int() * length
            batch.decode_rows, batch.tokens = 0, tokens
            flops = 4 * heads * 128 * length * length / 2 * rows
            for name in ("auto", "flashinfer"):
                attend = attention.choose_backend(name, [shape_of(heads, kv_heads, rows)])[0]
                attend.plan(batch)

                def body(attend: Any = attend) -> None:
                    for _ in range(4):
                        attend(q, layers[0], batch, SCORING)

                us = time_us(body, 4)
                emit(
                    bench="prefill",
                    kernel=attend.extend.name,
                    heads=heads,
                    kv_heads=kv_heads,
                    rows=rows,
                    length=length,
                    us=round(us, 1),
                    tflop_s=round(flops / us / 1e6, 1),
                )


def bench_prompts() -> None:
    """Prompt rows in graphs: pairs of tokens in the pages before, and of tokens."""
    import numpy as np

    from sgla.attention.base import cut

    for heads, kv_heads in ((32, 8), (16, 8)):
        for rows in (
            [(0, 256)],
            [(0, 700)],
            [(0, 1024)],
            [(700, 324), (0, 380)],
            [(0, 70)] * 10,
            [(4096, 700)],
        ):
            starts, lens = np.array(rows, np.int32).T
            q, layers, batch = decode_batch(len(rows), int((starts + lens).max()), heads, kv_heads, 128)
            q = torch.randn(int(lens.sum()), heads * 128, dtype=BF16, device="cuda")
            out, flops = torch.empty_like(q), 4 * heads * 128 * float((lens * (starts + lens / 2.0)).sum())
            shape = shape_of(heads, kv_heads, len(rows))
            for name in ("auto", "triton"):
                prompts = attention.choose_backend(name, [shape])[0].prompts
                assert prompts is not None
                slots = np.arange(len(rows), dtype=np.int32)
                tiles = torch.from_numpy(cut(slots, starts, lens, 0, prompts.tile)).cuda()

                def body(prompts: Any = prompts, tiles: Any = tiles) -> None:
                    for kv in layers:
                        prompts.forward(q, kv, batch.page_table, tiles, SCORING, out)

                us = time_us(body, len(layers))
                emit(
                    bench="prompts",
                    kernel=name,
                    heads=heads,
                    kv_heads=kv_heads,
                    rows=rows,
                    us=round(us, 1),
                    tflop_s=round(flops / us / 1e6),
                )


def bench_behind() -> None:
    """Prompts behind histories in the pages, of bf16 and of 8 bits; Triton reads the latter, too."""
    import numpy as np

    from sgla.attention import ExtendRows

    for tokens, history in ((256, 24_576), (300, 50_000), (200, 95_000), (1024, 8192), (8192, 24_576)):
        flops = 4 * 32 * 128 * tokens * (history + tokens / 2)
        for kind, dtype, names in (("", BF16, ["auto"]), ("fp8", torch.float8_e4m3fn, ["auto", "triton"])):
            _, layers, batch = decode_batch(1, history + tokens, 32, 8, 128, dtype)
            q = torch.randn(tokens, 32 * 128, dtype=BF16, device="cuda")
            lens, zero = np.full(1, tokens, np.int32), np.zeros(1, np.int32)
            batch.extend = ExtendRows(zero, lens, lens + history, batch.page_table.cpu().numpy())
            batch.q_start = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
            batch.decode_rows, batch.tokens = 0, tokens
            for name in names:
                attend = attention.choose_backend(name, [shape_of(32, 8, 1)._replace(kv_dtype=kind)])[0]
                attend.plan(batch)

                def body(attend: Any = attend, kv: KVLayer = layers[0]) -> None:
                    for _ in range(2):
                        attend(q, kv, batch, SCORING)

                us, found = time_us(body, 2), {"kernel": attend.extend.name, "kv": kind or "bf16"}
                rate = {"us": round(us, 1), "tflop_s": round(flops / us / 1e6)}
                emit(bench="behind", **found, tokens=tokens, history=history, **rate)


def bench_orders() -> None:
    """Prompts behind histories: heads of a tile side by side, and some heads after the other."""
    import numpy as np

    from sgla.attention.base import cut
    from sgla.kernels.cuda import prompt_attention
    from sgla.kernels.cuda.build import processors

    scale, zero = SCORING.scale, np.zeros(1, np.int32)
    for tokens, history in ((8192, 24_576), (7424, 25_344), (8448, 0), (8448, 122_368)):
        flops = 4 * 32 * 128 * tokens * (history + tokens / 2)
        _, layers, batch = decode_batch(1, history + tokens, 32, 8, 128)
        q = torch.randn(tokens, 32 * 128, dtype=BF16, device="cuda")
        out, pages = torch.empty_like(q), prompt_attention.Pages(layers[0].k, layers[0].v, batch.page_table)
        tiles = cut(zero, zero + history, zero + tokens, 0, prompt_attention.tile_tokens(4))
        blocks = -(-(tiles[:, 2] + tiles[:, 3]) // prompt_attention.KEYS)
        orders: dict[str, Any] = {"all": None, "chosen": prompt_attention.order_of(tiles, 8, processors())}
        for heads in (1, 2, 8):
            orders[f"{heads}, dealt"] = prompt_attention._dealt(blocks, 8, heads, processors())[0]
        sent, wanted = torch.from_numpy(tiles).cuda(), None
        for name, made in orders.items():
            order = None if made is None else torch.from_numpy(made).cuda()

            def body(order: Any = order) -> None:
                for _ in range(2):
                    prompt_attention.attend(q, pages, None, sent, scale, out, order=order)

            us = time_us(body, 2, repeats=6)
            wanted = out.clone() if wanted is None else wanted
            rate = {"us": round(us, 1), "tflop_s": round(flops / us / 1e6), "same": torch.equal(out, wanted)}
            emit(bench="orders", order=name, tokens=tokens, history=history, **rate)


def bench_sampling() -> None:
    from sgla.kernels.cuda.thresholds import find_thresholds
    from sgla.kernels.triton import sampling
    from sgla.kernels.triton.tokens import TokenTable

    for rows in (1, 64, 256):
        logits = torch.randn(rows, 151936, device="cuda")
        slots = torch.arange(rows, device="cuda").int()
        f = torch.full((rows,), 0.8, device="cuda")
        pages, out = torch.zeros(rows, 1, device="cuda").int(), torch.zeros(rows, device="cuda").int()
        table = TokenTable(pages, torch.zeros_like(out), 16)
        seeds = torch.arange(rows, device="cuda")
        top_ks = torch.full((rows,), 50, device="cuda").int()
        for name, call in {
            "draw": lambda: sampling.sample(logits, slots, slots, seeds, f, table, out),
            "greedy": lambda: sampling.sample(logits, slots, slots, seeds, f * 0, table, out),
            "thresholds": lambda: find_thresholds(logits, slots, f, top_ks, f, f * 0),
        }.items():
            emit(
                bench="sampling",
                op=name,
                rows=rows,
                us=round(time_us(call, 1), 1),
                floor_us=round(logits.nbytes / 4.3e6, 1),
            )


def bench_tower() -> None:
    """Parts of a layer of Qwen2.5-VL's tower, for one picture of 1008 x 1008 pixels and for two."""
    import torch.nn.functional as F

    from sgla.kernels.cuda import prompt_attention, prompt_gemm
    from sgla.kernels.triton import elementwise
    from sgla.kernels.triton.tower import shifted_norm, turn
    from sgla.loading.tower_attention import attend

    d, heads, inner, side, window, copies = 1280, 16, 3456, 5184, 64, 4
    dim, scale = d // heads, (d // heads) ** -0.5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device="cuda")

    qkv, both = (random(copies, n, d) * d**-0.5 for n in (3 * d, 2 * inner))
    o, down = (random(copies, d, k) * k**-0.5 for k in (d, inner))
    bias, one = torch.zeros(2 * inner, device="cuda"), torch.ones(d, device="cuda")
    plain = bias[: 3 * d].to(BF16)
    for m in (side, 2 * side):
        x, wide, stream, angles = random(m, d), random(m, inner), random(m, d), torch.rand(m, dim).cuda()
        q, k, v = random(m, 3, heads, dim).unbind(1)

        def measure(name: str, flops: float, weights: torch.Tensor, body: Callable[[Any], Any]) -> None:
            us = time_us(lambda: [body(w) for w in weights], copies)
            emit(bench="tower", name=name, rows=m, us=round(us, 1), tflops=round(flops / us / 1e6, 1))

        flops = 6.0 * m * d * d
        measure("q, k, v", flops, qkv, lambda w: F.linear(x, w, plain))
        measure("q, k, v, then turned", flops, qkv, lambda w: turn(F.linear(x, w, plain), angles, heads))
        in_it = lambda w: prompt_gemm.linear_turned(x, w, bias[: 3 * d], angles, 2 * d)  # noqa: E731
        measure("q, k, v, turned in it", flops, qkv, in_it)
        flops = 4.0 * m * d * inner
        measure("gate and up", flops, both, lambda w: F.linear(x, w))
        then = lambda w: elementwise.act_mul(F.linear(x, w), "silu")  # noqa: E731
        measure("gate and up, then activated", flops, both, then)
        in_it = lambda w: prompt_gemm.linear(x, w, bias=bias, epilogue=prompt_gemm.SILU)  # noqa: E731
        measure("gate and up, activated in it", flops, both, in_it)
        measure("o", 2.0 * m * d * d, o, lambda w: stream.addmm_(x, w.t()))
        measure("down", 2.0 * m * d * inner, down, lambda w: stream.addmm_(wide, w.t()))
        measure("norm", 0.0, o, lambda w: shifted_norm(x, one, one, 1e-6))
        for name, step in (("whole", side), ("windows", window)):
            ends, flops = torch.arange(0, m + 1, step, device="cuda").int(), 4.0 * m * step * d
            tiles = prompt_attention.tiles_of(ends, m)
            measure(f"{name}, torch's", flops, o, lambda w: attend(q, k, v, ends, step, scale))
            ours = lambda w: prompt_attention.attend_whole(q, k, v, tiles, scale)  # noqa: E731
            measure(f"{name}, ours", flops, o, ours)


def main() -> None:
    benches = {name[6:]: bench for name, bench in globals().items() if name.startswith("bench_")}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(benches)}; all, if there is none"
    )
    names = parser.parse_args().names
    if unknown := set(names) - set(benches):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    for name in names or benches:
        benches[name]()


if __name__ == "__main__":
    main()
