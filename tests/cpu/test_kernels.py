"""Every native op against its torch body, through one-op programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from levels import EACH, LEVELS, STORAGES, WIDTHS
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import DRAW
from sgla.kernels.cpu.panels import FIXED_LEVELS, PAIR_LEVELS, Panels
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.kernels.ops import KVLayer
from sgla.quant.groups import Int4
from sgla.quant.weight import Weight, pack, storage

pytestmark = pytest.mark.native

VOCAB = 300


def ints(values: list[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def random_batch(rows: list[tuple[int, int]], page_size: int = 16, seed: int = 0) -> ForwardBatch:
    """Rows of (tokens in this step, history before it), on random pages, slots in reverse order."""
    g = torch.Generator().manual_seed(seed)
    lens = [new + old for new, old in rows]
    width = max(-(-n // page_size) for n in lens)
    pages = torch.randperm(len(rows) * width, generator=g).to(torch.int32).view(len(rows), width) + 1
    slots = range(len(rows) - 1, -1, -1)
    positions = [p for new, old in rows for p in range(old, old + new)]
    owner = [slot for slot, (new, _) in zip(slots, rows, strict=True) for _ in range(new)]
    starts = [sum(new for new, _ in rows[:r]) for r in range(len(rows) + 1)]
    places = [
        int(pages[s, p // page_size]) * page_size + p % page_size
        for s, p in zip(owner, positions, strict=True)
    ]
    return ForwardBatch(
        rows=len(rows),
        tokens=starts[-1],
        ids=torch.randint(0, VOCAB, (starts[-1],), generator=g).to(torch.int32),
        positions=ints(positions),
        slots=ints(slots),
        q_start=ints(starts),
        kv_len=ints(lens),
        out_loc=ints(places),
        page_table=pages,
        page_size=page_size,
        sample_rows=ints([s - 1 for s in starts[1:]]),
    )


def random_kv(batch: ForwardBatch, heads: int, dim: int, dtype: torch.dtype) -> KVLayer:
    shape = (int(batch.page_table.max()) + 1, batch.page_size, heads, dim)
    k, v = torch.randn(shape), torch.randn(shape)
    if dtype != torch.int8:
        return KVLayer(k.to(dtype), v.to(dtype))
    (k, k_scales), (v, v_scales) = ops.to_int8(k), ops.to_int8(v)
    scales = [x.transpose(1, 2).contiguous() for x in (k_scales, v_scales)]
    return KVLayer(k, v, k_scales=scales[0], v_scales=scales[1])


def copy_of(kv: KVLayer) -> KVLayer:
    scales = [None if x is None else x.clone() for x in (kv.k_scales, kv.v_scales)]
    return KVLayer(kv.k.clone(), kv.v.clone(), k_scales=scales[0], v_scales=scales[1])


def all_pages(kv: KVLayer) -> tuple[Tensor, Tensor]:
    """k and v as they are meant, float32."""
    every = torch.arange(len(kv.k))
    return kv.keys(every), kv.values(every)


def run(
    fn: Callable[[ForwardBatch, Tensor], Tensor],
    batch: ForwardBatch,
    x: Tensor,
    threads: int = 2,
    isa: str | None = None,
) -> Tensor:
    """``fn(batch, x)`` through a program: x [T, d] comes in as an embedding of arange."""
    ids = batch.ids
    batch.ids = ints(range(batch.tokens))
    limits = ProgramLimits(batch.tokens, batch.sample_rows.numel())
    program = Program.record(lambda b: fn(b, ops.embedding(b.ids, x)), limits, threads, isa)
    result = program.run(batch).clone()
    batch.ids = ids
    return result


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tolerance, atol=tolerance)


def tolerance(isa: str, kind: str) -> float:
    """Of a linear: some levels round x, to bfloat16 or to 14 bits in a group of 64; what nf4 means has 14
    bits on all."""
    if kind == "nf4":
        return 1e-3
    if kind == "f32" or isa == "generic" or (kind, isa) in (("bf16", "avx512"), ("bf16", "dotprod")):
        return 2e-5
    return 2e-2 if kind == "bf16" and isa in PAIR_LEVELS else 1e-3


def tokens(count: int) -> ForwardBatch:
    return random_batch([(count, 0)])


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (33, 50), (7, 1001), (200, 576)])
def test_linear(isa: str, kind: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    w, bias, x = pack(torch.randn(n, k) / k**0.5, kind), torch.randn(n), torch.randn(300, k)
    for count, threads in [(1, 1), (2, 2), (3, 1), (4, 2), (13, 2), (24, 1), (25, 2), (300, 2)]:
        got = run(lambda b, x: ops.linear(x, w, bias), tokens(count), x[:count], threads, isa)
        close(got, ops.linear(x[:count], w, bias), tolerance(isa, kind))


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("kind", ["f32", "bf16", "int4"])
def test_an_addend_comes_before_what_is_fused_behind(isa: str, kind: str) -> None:
    torch.manual_seed(0)
    w, x = pack(torch.randn(128, 64) / 8, kind), torch.randn(5, 64)
    low, high = torch.randn(3, 64), torch.randn(128, 3)

    def gated(b: ForwardBatch, x: Tensor) -> Tensor:
        return ops.act_mul(ops.linear(x, w, torch.ones(128), (x @ low.T) @ high.T), "silu")

    def residual(b: ForwardBatch, x: Tensor) -> Tensor:
        y = ops.linear(x, w, None, (x @ low.T) @ high.T)
        return ops.add(y, ops.linear(x, w))

    for fn in (gated, residual):
        close(run(fn, tokens(5), x, 1, isa), fn(tokens(5), x), 10 * tolerance(isa, kind))


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("kind", STORAGES)
def test_a_row_of_linear_does_not_depend_on_the_others(isa: str, kind: str) -> None:
    torch.manual_seed(0)
    w, x = pack(torch.randn(70, 600), kind), torch.randn(230, 600)

    def fn(b: ForwardBatch, x: Tensor) -> Tensor:
        return ops.linear(x, w)

    alone = run(fn, tokens(1), x[:1], 1, isa)
    for count in (2, 3, 4, 5, 12, 13, 24, 25, 48, 200, 230):
        assert torch.equal(run(fn, tokens(count), x[:count], 2, isa)[:1], alone)


@pytest.mark.parametrize("kind", STORAGES)
def test_panels_keep_the_weight(kind: str) -> None:
    torch.manual_seed(0)
    for n, k in ((1, 1), (33, 50), (64, 96)):
        w = pack(torch.randn(n, k), kind)
        before, nbytes = w.dequant(), w.nbytes
        w.to_panels()
        rounding = before.float().abs().max() * 2**-12 if w.panels and w.panels.kind == "fixed" else 0.0
        assert (w.dequant() - before).abs().max() <= rounding
        assert w.nbytes >= nbytes or kind in ("nf4", "fp4", "nvfp4")  # which have blocks of 128 channels
        assert torch.equal(w.rows(0, n).take(ints([n - 1])), w.dequant()[n - 1 :].float())


class Rows(NamedTuple):
    """A matrix as a checkpoint has it."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, rows: range | None = None) -> Tensor:
        return self.values if rows is None else self.values[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("kind", STORAGES)
def test_what_is_put_into_a_weight_that_has_moved_is_computed_with(isa: str, kind: str) -> None:
    """Rows that begin and end inside of panels; the others keep their bits, and parts and views follow."""
    torch.manual_seed(0)
    n, k = 120, 70
    old, new = pack(torch.randn(n, k), kind), Rows(torch.randn(50, k))
    parts, view = pack(old.dequant(), kind), old.rows(20, 90)
    x = torch.randn(3, k)

    def run_all() -> list[Tensor]:
        moved = [old, view, *parts.split(3)]
        return [run(lambda b, x, w=w: ops.linear(x, w), tokens(3), x, 1, isa) for w in moved]

    before = run_all()
    for weight in (old, parts):
        weight.put(range(5, 45), None, new, at=37)
    after = run_all()
    expected = storage(kind).read(new, range(5, 45), None)
    wanted = run(lambda b, x: ops.linear(x, expected), tokens(3), x, 1, isa)
    for found, was, first in zip(after, before, (0, 20, 0, 40, 80)):
        rows = torch.arange(first, first + found.shape[1])
        inside = (rows >= 37) & (rows < 77)
        assert torch.equal(found[:, inside], wanted[:, rows[inside] - 37])
        assert torch.equal(found[:, ~inside], was[:, ~inside])


@pytest.mark.skipif(not set(FIXED_LEVELS) & set(LEVELS), reason="needs AVX2")
def test_fixed_panels_round_only_the_small() -> None:
    torch.manual_seed(0)
    plain = (torch.randn(70, 200) * torch.logspace(-30, 30, 70)[:, None]).bfloat16()
    plain[3], plain[4, :64] = 0, 1e-37
    got = Panels.of("bf16", 200, plain, isa=FIXED_LEVELS[-1]).plain()[0].float()
    groups = torch.nn.functional.pad(plain.float(), (0, 56)).view(70, 4, 64)
    top = groups.abs().amax(2, keepdim=True).expand_as(groups).reshape(70, -1)[:, :200]
    large = plain.float().abs() >= top / 16
    tiny = top < 2.0**-114
    assert torch.equal(got[large & ~tiny], plain.float()[large & ~tiny])
    assert bool(((got - plain.float()).abs() <= top * 2**-12).logical_or(tiny).all())
    assert not got[tiny].any()


@pytest.mark.parametrize("isa", [each for each in EACH if each.values[0] in FIXED_LEVELS])
@pytest.mark.parametrize("kind", ["bf16", *STORAGES[2:]])
def test_integer_products_at_their_largest(kind: str, isa: str) -> None:
    """Sums of 64 largest products fit; what is not finite stays in its row."""
    w = pack(torch.full((32, 192), 255.0), kind)
    x = torch.full((5, 192), -3.0e3)
    x[2, 7], x[3, 7], x[4] = torch.inf, torch.nan, 0.0
    got = run(lambda b, x: ops.linear(x, w), tokens(5), x, 1, isa)
    for count in (1, 2, 3, 4):
        few = run(lambda b, x: ops.linear(x, w), tokens(count), x[:count], 1, isa)
        torch.testing.assert_close(few, got[:count], rtol=0, atol=0, equal_nan=True)
    close(got[:2], ops.linear(x[:2], w), 1e-3)
    assert got[2:4].isnan().all()
    assert not got[4].any()


@pytest.mark.parametrize("kind", STORAGES)
def test_embedding(kind: str) -> None:
    torch.manual_seed(0)
    w = pack(torch.randn(VOCAB, 100), kind)
    batch = tokens(50)
    program = Program.record(lambda b: ops.embedding(b.ids, w, 3.5), ProgramLimits(50, 1))
    close(program.run(batch), w.dequant()[batch.ids.long()] * 3.5, 5e-4 if kind == "nf4" else 2e-5)


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize("d", [64, 100, 577])
def test_rows_ops(isa: str, d: int) -> None:
    torch.manual_seed(d)
    x, weight = torch.randn(40, d) * 3, torch.randn(d)
    batch = random_batch([(5, 0), (1, 0), (34, 0)])
    cases: list[Callable[[ForwardBatch, Tensor], Tensor]] = [
        lambda b, x: ops.rms_norm(x, weight, 1e-5),
        lambda b, x: ops.add_rms_norm(x, ops.rms_norm(x, weight, 1e-5), weight, 1e-5)[0],
        lambda b, x: ops.add_rms_norm(x, ops.rms_norm(x, weight, 1e-5), weight, 1e-5)[1],
        lambda b, x: ops.add(x, ops.rms_norm(x, weight, 1e-5)),
        lambda b, x: ops.beside(x, ops.rms_norm(x, weight, 1e-5)),
        lambda b, x: ops.gather(x, b.sample_rows),
    ]
    for fn in cases:
        close(run(fn, batch, x, isa=isa), fn(batch, x))


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("f", [5, 64, 100])
def test_act_mul(isa: str, kind: ops.Activation, f: int) -> None:
    torch.manual_seed(f)
    x = torch.randn(30, 2 * f) * 10
    x[0, :3] = torch.tensor([-200.0, 100.0, 0.0])
    close(run(lambda b, x: ops.act_mul(x, kind), tokens(30), x, isa=isa), ops.act_mul(x, kind))


def best(x: Tensor, isa: str | None = None) -> list[int]:
    """What a program draws at temperature 0 of the logits x ``[S, V]``."""
    batch = tokens(len(x))
    batch.sample_rows = ints(range(len(x)))
    batch.draws = np.zeros(len(x), DRAW)
    batch.draws["row"], batch.draws["token"] = range(len(x)), -1
    run(lambda b, x: ops.gather(x, b.sample_rows), batch, x, isa=isa)
    return list(batch.draws["token"])


def test_the_best_token_is_the_first_of_equals() -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 50, (20, 333)).float()
    assert best(x) == [row.index(max(row)) for row in x.tolist()]


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize("width", [7, 1024, 3000])
def test_rows_without_a_largest_number_have_no_best_token(width: int, isa: str) -> None:
    x = torch.randn(8, width)
    for row, place in enumerate((0, width // 2, width - 1)):
        x[row, place], x[row + 3, place] = torch.nan, torch.inf
    x[6] = -torch.inf
    assert best(x, isa) == [-1] * 7 + [int(x[7].argmax())]


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot"), [(9, 3, 64, 64), (4, 1, 80, 40), (2, 2, 18, 18)]
)
@pytest.mark.parametrize("norm", [False, True])
def test_qk_norm_rope_store(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rot: int, norm: bool
) -> None:
    torch.manual_seed(dim)
    batch = random_batch([(3, 5), (1, 20), (17, 0)], page_size=4)
    angles = torch.rand(64, rot // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    x = torch.randn(batch.tokens, (heads + 2 * kv_heads) * dim)
    kv = random_kv(batch, kv_heads, dim, dtype)
    other = copy_of(kv)

    def fn(layer: KVLayer) -> Callable[[ForwardBatch, Tensor], Tensor]:
        return lambda b, x: ops.qk_norm_rope_store(
            x, b.positions, cos_sin, q_norm, k_norm, 1e-6, layer, b.out_loc
        )

    close(run(fn(kv), batch, x, isa=isa), fn(other)(batch, x))
    keys, values = zip(all_pages(kv), all_pages(other))
    close(*keys, {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.int8: 0.1}[dtype])
    assert torch.equal(*values)


@pytest.mark.parametrize("isa", WIDTHS)
def test_int8_pages_keep_a_head_within_half_a_step_of_its_scale(isa: str) -> None:
    """Whatever its size, keys as they are turned; zeros stay zeros, and what is no number is none
    afterwards."""
    torch.manual_seed(0)
    batch, still = random_batch([(12, 0)]), torch.cat([torch.ones(12, 10), torch.zeros(12, 10)], 1)
    x = torch.randn(12, 3, 20) * torch.logspace(-12, 12, 12)[:, None, None]
    x[3], x[4, 1:, :2], x[5, 1:, 7], x[6, 1:, 19], x[7] = 0, 1e30, torch.nan, -torch.inf, 3e-45

    def stored(native: bool) -> Tensor:
        kv = random_kv(batch, 1, 20, torch.int8)

        def fn(b: ForwardBatch, x: Tensor) -> Tensor:
            return ops.qk_norm_rope_store(x, b.positions, still, None, None, 0.0, kv, b.out_loc)

        run(fn, batch, x.flatten(1), isa=isa) if native else fn(batch, x.flatten(1))
        return torch.stack([part.flatten(0, 1)[batch.out_loc.long(), 0] for part in all_pages(kv)], 1)

    read, expected = stored(True), stored(False)
    wanted, found = (torch.stack([ops.turned(y[:, 0]) / 4, y[:, 1]], 1) for y in (x[:, 1:], read))
    step = wanted.abs().amax(-1, keepdim=True) / 127
    fine = step.isfinite().all(1).all(1)
    assert fine.sum() == 10
    assert ((found - wanted).abs() <= step * 0.501)[fine & (torch.arange(12) != 7)].all()
    assert not read[3].any()
    assert not read[~fine].isfinite().any()
    assert torch.equal(read[fine], expected[fine])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 300])
def test_rows_with_common_pages_attend_as_if_alone(window: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = random_batch([(1, 700), (1, 520), (5, 600), (1, 900), (1, 255), (1, 600), (1, 30), (1, 800)])
    table, slots = batch.page_table, batch.slots.tolist()
    for row in (1, 3, 4, 5):  # 32 pages in common; row 7 has none, and row 2 is a chunk of a prompt
        table[slots[row], :32] = table[slots[0], :32]
    table[slots[5], 20] = table[slots[7], 20]  # half of a segment fewer
    kv = random_kv(batch, 3, 64, dtype)
    q = torch.randn(batch.tokens, 9 * 64)

    def fn(b: ForwardBatch, x: Tensor) -> Tensor:
        return ops.attention(x, kv, b, 0.2, window)

    got = run(fn, batch, q)
    close(got, fn(batch, q), 1e-4)
    starts = batch.q_start.tolist()
    for row in range(batch.rows):
        tokens = slice(starts[row], starts[row + 1])
        alone = ForwardBatch(
            rows=1,
            tokens=tokens.stop - tokens.start,
            ids=batch.ids[tokens],
            positions=batch.positions[tokens],
            slots=batch.slots[row : row + 1],
            q_start=ints([0, tokens.stop - tokens.start]),
            kv_len=batch.kv_len[row : row + 1],
            out_loc=batch.out_loc[tokens],
            page_table=table,
            page_size=16,
            sample_rows=ints([0]),
        )
        assert torch.equal(run(fn, alone, q[tokens]), got[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_attention_sees_no_numbers_beyond_the_history(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = random_batch([(1, 20), (7, 3), (1, 0)])
    kv = random_kv(batch, 2, 32, dtype)
    dirty = copy_of(kv)
    for part in dirty.tensors[-2:]:
        part.fill_(torch.nan)
    for slot, length in zip(batch.slots.tolist(), batch.kv_len.tolist(), strict=True):
        for p in range(length):
            page, offset = batch.page_table[slot, p // 16], p % 16
            if dtype == torch.int8:
                for part, whole in zip(dirty.tensors[2:], kv.tensors[2:]):
                    part[page, :, offset] = whole[page, :, offset]
            else:
                dirty.k[page, offset], dirty.v[page, offset] = kv.k[page, offset], kv.v[page, offset]
    q = torch.randn(batch.tokens, 4 * 32)
    for softcap in (0.0, 5.0):

        def fn(layer: KVLayer, b: ForwardBatch, x: Tensor, softcap: float = softcap) -> Tensor:
            return ops.attention(x, layer, b, 0.2, softcap=softcap)

        want = fn(kv, batch, q)
        assert torch.equal(fn(dirty, batch, q), want)
        close(run(lambda b, x, fn=fn: fn(dirty, b, x), batch, q), want)  # type: ignore[misc]


ROWS = [(1, 0), (1, 70), (5, 3), (64, 200), (1, 300), (130, 0), (1, 15)]


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "dtype", "window", "softcap"),
    [
        (9, 3, 64, 16, torch.float32, 0, 0.0),
        (9, 3, 64, 16, torch.bfloat16, 0, 0.0),
        (4, 1, 256, 32, torch.bfloat16, 40, 0.0),
        (4, 4, 80, 1, torch.float32, 0, 20.0),
        (8, 2, 128, 16, torch.float32, 7, 5.0),
        (2, 1, 20, 3, torch.bfloat16, 129, 0.0),
        (9, 3, 64, 16, torch.int8, 0, 0.0),
        (6, 1, 80, 3, torch.int8, 129, 20.0),
        (1, 1, 20, 16, torch.int8, 7, 0.0),
    ],
)
def test_attention(
    isa: str,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int,
    softcap: float,
) -> None:
    torch.manual_seed(dim)
    for rows in (ROWS, [(1, 600)], [(40, 500)]):
        batch = random_batch(rows, page_size)
        kv = random_kv(batch, kv_heads, dim, dtype)
        x = torch.randn(batch.tokens, heads * dim)

        def fn(b: ForwardBatch, x: Tensor, kv: KVLayer = kv) -> Tensor:
            return ops.attention(x, kv, b, dim**-0.5, window, softcap)

        for threads in (1, 2):
            close(run(fn, batch, x, threads, isa), fn(batch, x))


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 80), (16, 96), (3, 100), (1, 112), (12, 192), (16, 256), (2, 512)]
)
def test_heads_of_every_size_and_sinks(isa: str, group: int, dim: int) -> None:
    """In the program's own kernel, for a long history in parts, and for pages that several rows share."""
    torch.manual_seed(dim)
    attends_so(isa, group, dim, sinks=torch.randn(2 * group) + 4)


@pytest.mark.parametrize("isa", WIDTHS)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (5, 80)])
def test_scores_that_rise_with_places(isa: str, group: int, dim: int) -> None:
    """As above: also a prompt behind a history."""
    torch.manual_seed(dim)
    attends_so(isa, group, dim, slopes=torch.rand(2 * group) / 8)


def attends_so(isa: str, group: int, dim: int, **more: Any) -> None:
    """What ``more`` gives attention is in the kernel, and changes the result."""
    for rows, common in (([(1, 0), (5, 70)], 0), ([(1, 600)], 0), ([(1, 300)] * 3, 17)):
        batch = random_batch(rows)
        batch.page_table[:, :common] = batch.page_table[0, :common]
        kv = random_kv(batch, 2, dim, torch.bfloat16)
        x = torch.randn(batch.tokens, 2 * group * dim)

        def fn(b: ForwardBatch, x: Tensor, kv: KVLayer = kv) -> Tensor:
            return ops.attention(x, kv, b, dim**-0.5, **more)

        expected = fn(batch, x)
        close(run(fn, batch, x, 2, isa), expected)
        assert (expected - ops.attention(x, kv, batch, dim**-0.5)).abs().max() > 1e-3


def test_v_of_another_width() -> None:
    """What no kernel takes is one call of the program: also k and v that go to the pages, and a latent."""
    torch.manual_seed(0)
    batch = random_batch([(1, 20), (5, 3)])
    kv = random_kv(batch, 2, 12, torch.float32)
    kv.v = torch.randn(*kv.v.shape[:3], 8)
    other = KVLayer(kv.k.clone(), kv.v.clone())
    cos_sin, x = torch.randn(64, 12), torch.randn(batch.tokens, 4 * 12 + 2 * 20)

    def fn(layer: KVLayer, b: ForwardBatch, x: Tensor) -> Tensor:
        q = ops.qk_norm_rope_store(x, b.positions, cos_sin, None, None, 1e-6, layer, b.out_loc)
        seen = ops.attention(q, layer, b, 0.2)
        return torch.cat([seen, ops.attention(q, layer.latent(6), b, 0.2)], 1)

    want = fn(other, batch, x)
    assert want.shape == (batch.tokens, 4 * 8 + 4 * 6)
    close(run(lambda b, x: fn(kv, b, x), batch, x), want)
    close(kv.v, other.v)
    close(kv.k, other.k)


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (100, False), (150, True)])
def test_attention_does_not_depend_on_batch_chunks_or_threads(isa: str, window: int, chunked: bool) -> None:
    """One prompt at once = in chunks = token by token beside other rows, bit for bit."""
    torch.manual_seed(0)
    whole = random_batch([(700, 0)])
    kv = random_kv(whole, 1, 64, torch.bfloat16)
    x = torch.randn(700, 3 * 64)

    def fn(b: ForwardBatch, x: Tensor) -> Tensor:
        return ops.attention(x, kv, b, 0.125, window, 0.0, chunked=chunked)

    want = run(fn, whole, x, 2, isa)
    close(want, fn(whole, x), 2e-2 if isa == "amx" else 1e-4)
    for start, stop, threads in ((0, 33, 1), (33, 620, 2), (620, 621, 2), (699, 700, 1), (699, 700, 2)):
        part = random_batch([(1, 3), (stop - start, start), (1, 9)])
        slot = int(part.slots[1])
        part.page_table = torch.nn.functional.pad(part.page_table, (0, 44 - part.page_table.shape[1])).fill_(
            1
        )
        part.page_table[slot] = whole.page_table[0]
        q = torch.cat([x[:1], x[start:stop], x[:1]])
        assert torch.equal(run(fn, part, q, threads, isa)[1:-1], want[start:stop])


def test_threads_that_fill_a_panel_together_leave_each_others_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As q, k and v of a layer whose heads end within a panel, when weights are updated in place."""

    def slowly(self: Panels) -> Any:
        found = plain(self)
        time.sleep(0.05)
        return found

    plain = Panels.plain
    monkeypatch.setattr(Panels, "plain", slowly)
    panels, wanted = Panels.of("f32", 20, torch.zeros(80, 20)), torch.randn(80, 20)
    parts = [(0, 48), (48, 64), (64, 80)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: panels.put(part[0], "f32", wanted[slice(*part)]), parts))
    assert torch.equal(plain(panels)[0], wanted)


def test_panels_refuse_nothing_they_can_hold() -> None:
    scale, low = torch.rand(3, 1).half(), torch.rand(3, 1).half()
    q = torch.randint(0, 16, (3, 20))
    w = Int4.of(4, q, scale, low)
    plain = Panels.of("int4", 20, *w.tensors).plain()
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain, (w.data, scale, low), strict=True)
        if a is not None and b is not None
    )
