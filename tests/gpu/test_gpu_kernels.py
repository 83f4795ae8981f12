"""The GPU's kernels against the torch oracle in float32, on random pages, lengths and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sgla import attention
from sgla.attention import DeviceBatch, ExtendRows
from sgla.attention.base import cut
from sgla.attention.flashinfer_ops import FlashInferExtend
from sgla.kernels import ops
from sgla.kernels.device import this_device
from sgla.kernels.ops import KVLayer, Part, Scoring
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import elementwise, latent
from sgla.model import alibi_spec

pytest.importorskip("triton")
BF16 = torch.bfloat16


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    out, expected = out.double(), expected.double()
    return float((out - expected).norm() / expected.norm())


def paged(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    windows: tuple[int, ...] = (0,),
    page_size: int = 16,
):
    """Rows with one query token come first. Pages hold garbage (NaN) where no token was written."""
    rows, device = len(q_lens), "cuda"
    counts = [-(-n // page_size) for n in kv_lens]
    table = torch.zeros(rows + 3, max(*counts, 1), dtype=torch.int32)
    order = 1 + torch.randperm(sum(counts))
    slots = torch.randperm(rows + 2)[:rows]
    at = 0
    for slot, count in zip(slots.tolist(), counts):
        table[slot, :count] = order[at : at + count].int()
        at += count
    pool = torch.randn(2, sum(counts) + 1, kv_heads, page_size, dim, dtype=BF16, device=device).transpose(
        2, 3
    )
    for slot, n in zip(slots.tolist(), kv_lens):
        if n % page_size:
            pool[:, table[slot, n // page_size].item(), n % page_size :] = float("nan")
    decodes = sum(n == 1 for n in q_lens)
    kv = torch.tensor(kv_lens, dtype=torch.int32)
    cum = {}
    for w in windows:
        tiles = -(-kv[:decodes] // attention.TILE)
        if w:
            tiles -= torch.where(kv[:decodes] > w, (kv[:decodes] - w) // attention.TILE, 0)
        cum[w] = torch.cat([torch.zeros(1), tiles.cumsum(0)]).int().to(device)
    q_start = torch.tensor([0, *q_lens]).cumsum(0).int()
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    extend = None
    if decodes < rows:
        columns = (slots[decodes:].int(), torch.tensor(q_lens[decodes:]).int(), kv[decodes:], table)
        extend = ExtendRows(*(c.numpy() for c in columns))
    batch = DeviceBatch(
        rows=rows,
        tokens=int(q_start[-1]),
        ids=empty,
        positions=empty,
        slots=slots.int().to(device),
        q_start=q_start.to(device),
        kv_len=kv.to(device),
        out_loc=empty,
        page_table=table.to(device),
        page_size=page_size,
        sample_rows=empty,
        decode_rows=decodes,
        cum=cum,
        extend=extend,
    )
    q = torch.randn(batch.tokens, heads * dim, dtype=BF16, device=device)
    return q, KVLayer(pool[0], pool[1]), batch


def oracle(
    q: torch.Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
) -> torch.Tensor:
    clean = KVLayer(kv.k.float().nan_to_num(), kv.v.float().nan_to_num())
    return ops.attention(q.float(), clean, batch, scale, window, softcap)


def backend(
    name: str,
    batch: DeviceBatch,
    kv: KVLayer,
    heads: int,
    windows: tuple[int, ...],
    softcap: float,
    scale: float,
):
    _, page_size, kv_heads, dim = kv.k.shape
    shape = attention.AttentionShape(heads, kv_heads, dim, page_size, BF16, frozenset(windows), softcap, 300)
    if name == "flashinfer":
        why = FlashInferExtend.refuses(shape, this_device())
        if why is not None:
            pytest.skip(why)
    return attention.choose_backend(name, [shape._replace(scale=scale)])[0]


CASES = [  # heads, kv_heads, dim, window, softcap
    (16, 8, 128, 0, 0.0),
    (32, 8, 128, 0, 0.0),
    (9, 3, 64, 0, 0.0),
    (4, 1, 256, 0, 0.0),
    (16, 2, 256, 0, 0.0),
    (8, 1, 128, 0, 0.0),
    (5, 5, 64, 100, 0.0),
    (8, 4, 256, 33, 20.0),
    (14, 2, 64, 0, 0.0),
    (32, 2, 128, 0, 0.0),
    (24, 2, 64, 100, 0.0),
    (15, 1, 256, 0, 0.0),
    (11, 1, 128, 0, 0.0),
    (26, 2, 64, 100, 0.0),
    (13, 1, 256, 33, 20.0),
]
LENGTHS = {
    "one": [1],
    "few": [1, 16, 17, 700],
    "long": [9000, 3, 33, 128],
    "alone": [9000],
    "many": [(37 * i) % 900 + 1 for i in range(200)],
}


Case = tuple[int, int, int, int, float]


def ask_for_decode(stored: Callable[[KVLayer], KVLayer], cases: Sequence[Case] = CASES) -> None:
    """Compile the kernels of all ``cases`` side by side. ``stored``: the cache as they read it."""
    from sgla.kernels.cuda.decode_attention import Projection

    with rehearsing():
        for heads, kv_heads, dim, window, softcap in cases:
            for kv_lens in LENGTHS.values():
                rows = len(kv_lens)
                q, wide, batch = paged([1] * rows, kv_lens, heads, kv_heads, dim, (window,))
                kv, rest = stored(wide), (batch, Scoring(1.0, window, softcap))
                for name in ("auto", "triton"):
                    backend(name, batch, wide, heads, (window,), softcap, 1.0)(q, kv, *rest)
                qkv = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=BF16, device="cuda")
                projection = Projection(torch.empty(1, dim, device="cuda"), None, None, 1e-6)
                native = backend("auto", batch, wide, heads, (window,), softcap, 1.0).decode
                native.forward(qkv, kv, *rest, projection=projection)


@pytest.fixture(scope="module")
def compiled() -> None:
    ask_for_decode(lambda kv: kv)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
@pytest.mark.usefixtures("compiled")
def test_decode(
    name: str, lengths: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    kv_lens = LENGTHS[lengths]
    q, kv, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    attend = backend(name, batch, kv, heads, (window,), softcap, dim**-0.5)
    expected = oracle(q, kv, batch, dim**-0.5, window, softcap)
    for _ in range(3):  # the workspace must be clean again after each
        out = attend(q, kv, batch, Scoring(dim**-0.5, window, softcap))
        assert relative(out, expected) < 1e-2


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(("heads", "content"), [(3, 512), (16, 512), (20, 512), (40, 256)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_decode_over_latents(lengths: str, heads: int, content: int, name: str) -> None:
    """Of rows without a history nothing is seen."""
    kv_lens = [*LENGTHS[lengths], 0]
    width, scale = content + 64, 0.06
    q, kv, batch = paged([1] * len(kv_lens), kv_lens, heads, 1, width)
    kv = kv.latent(content)
    shape = attention.AttentionShape(heads, 1, width, 16, BF16, frozenset({0}), 0.0, 300)
    shape = shape._replace(scale=scale, v_dim=content, latent=True)
    attend, _ = attention.choose_backend(name, [shape])
    assert attend.decode.name == ("native" if name == "auto" else "triton")
    out = attend(q, kv, batch, Scoring(scale))
    assert not out[-1].any()
    batch.rows = batch.decode_rows = batch.tokens = len(kv_lens) - 1
    clean = KVLayer(kv.k.float().nan_to_num(), kv.v.float().nan_to_num())
    assert relative(out[:-1], ops.attention(q[:-1].float(), clean, batch, scale)) < 0.01


@pytest.mark.parametrize("name", ["native", "triton"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lengths", ["one", "few", "alone", "many"])
def test_parts_of_latents_add_up(lengths: str, ranks: int, name: str) -> None:
    """Of ranks that share the tokens of a page out."""
    kv_lens, heads, content, scale = LENGTHS[lengths], 16, 512, 0.06
    q, kv, batch = paged([1] * len(kv_lens), kv_lens, heads, 1, content + 64, page_size=16 * ranks)
    kv = kv.latent(content)
    shape = attention.AttentionShape(heads, 1, content + 64, 16, BF16, frozenset({0}), 0.0, 300)
    shape = shape._replace(scale=scale, v_dim=content, latent=True, parts=True)
    attend, _ = attention.choose_backend("auto", [shape], decode=name)
    told = [q.new_empty(len(q), heads, 2) for _ in range(ranks)]
    seen = []
    for rank in range(ranks):
        own = KVLayer(kv.k[:, rank::ranks].contiguous(), kv.v, part=Part(ranks, rank, told[rank]))
        seen.append(attend(q, own.latent(content), batch, Scoring(scale)))
    sums = torch.cat([each.flatten(1) for each in told])
    shares = [latent.share(each, sums, ranks, rank).float() for rank, each in enumerate(seen)]
    found = torch.stack(shares).sum(0).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)
    clean = KVLayer(kv.k.float().nan_to_num(), kv.v.float().nan_to_num())
    assert relative(found, ops.attention(q.float(), clean, batch, scale)) < 0.01


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
@pytest.mark.usefixtures("compiled")
def test_decode_from_the_projection(
    lengths: str, norm: bool, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    check_projection(lengths, norm, heads, kv_heads, dim, dim, window, softcap)


@pytest.mark.parametrize("lengths", ["one", "few", "many"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(16, 2, 256, 64), (16, 4, 256, 192), (96, 8, 128, 64), (8, 2, 128, 96), (8, 8, 64, 32)],
)
def test_decode_from_the_projection_rotates_heads_in_part(
    lengths: str, norm: bool, heads: int, kv_heads: int, dim: int, rotated: int
) -> None:
    """As Qwen3.6, GLM-4.5 and others have it; in rows that lie apart, where a gate is beside the heads."""
    check_projection(lengths, norm, heads, kv_heads, dim, rotated, beside=heads * dim)


@pytest.mark.parametrize("lengths", ["one", "few", "many"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(28, 4, 128), (16, 8, 128), (8, 2, 64), (16, 2, 256)])
def test_decode_from_the_projection_turns_by_other_positions(
    lengths: str, heads: int, kv_heads: int, dim: int
) -> None:
    """As behind pictures, whose tokens share positions."""
    check_projection(lengths, True, heads, kv_heads, dim, dim, turned=True)


@pytest.mark.parametrize("lengths", ["one", "few", "many"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(16, 8, 256, 100), (16, 8, 128, 0), (8, 1, 256, 0), (8, 2, 64, 0)],
)
def test_decode_from_the_projection_with_norms_of_values(
    lengths: str, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    """As Gemma 4 has it."""
    check_projection(lengths, True, heads, kv_heads, dim, dim, window, v_norm=True)


def check_projection(
    lengths: str,
    norm: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    window: int = 0,
    softcap: float = 0.0,
    beside: int = 0,
    turned: bool = False,
    v_norm: bool = False,
) -> None:
    from sgla.kernels.cuda.decode_attention import Projection

    kv_lens = LENGTHS[lengths]
    _, kv, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    attend = backend("auto", batch, kv, heads, (window,), softcap, dim**-0.5)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(batch.rows, width + beside, dtype=BF16, device="cuda")[:, :width]
    cos_sin = torch.randn(max(kv_lens), rotated, device="cuda")
    weights = [torch.rand(dim, device="cuda") + 0.5 if norm else None for _ in range(2)]
    positions = batch.kv_len - 1
    pages = batch.page_table[batch.slots.long(), positions.long() // 16]
    places = pages * 16 + positions % 16
    expected_kv = KVLayer(kv.k.clone(), kv.v.clone())
    if turned:
        batch.turned, positions = True, positions // 3
        batch.positions = positions
    store = ops.qkv_norm_rope_store if v_norm else ops.qk_norm_rope_store
    q = store(qkv, positions, cos_sin, *weights, 1e-6, expected_kv, places)
    expected = oracle(q, expected_kv, batch, dim**-0.5, window, softcap)
    projection = Projection(cos_sin, *weights, 1e-6, v_norm)
    out = attend.decode.forward(qkv, kv, batch, Scoring(dim**-0.5, window, softcap), projection=projection)
    assert relative(out, expected) < 1e-2
    page, offset = places.long() // 16, places.long() % 16
    assert relative(kv.k[page, offset], expected_kv.k[page, offset]) < 5e-3
    stored, wanted = kv.v[page, offset], expected_kv.v[page, offset]
    assert relative(stored, wanted) < 5e-3 if v_norm else torch.equal(stored, wanted)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "joined"), [(16, 2, 512, True), (16, 8, 256, False), (3, 1, 96, True)]
)
def test_values_are_normed_on_the_way_to_the_pages(
    heads: int, kv_heads: int, dim: int, joined: bool, tokens: int
) -> None:
    qkv = torch.randn(tokens, (heads + kv_heads * (1 if joined else 2)) * dim, dtype=BF16, device="cuda")
    cos_sin, weights = torch.randn(40, dim, device="cuda"), torch.rand(2, dim, device="cuda") + 0.5
    positions, loc = (torch.randperm(320)[:tokens].int().cuda() for _ in range(2))
    shape = 2, 20, kv_heads, 16, dim
    ours, theirs = (KVLayer(*torch.zeros(shape, dtype=BF16, device="cuda").transpose(2, 3)) for _ in range(2))
    given = qkv, positions % 40, cos_sin, *weights, 1e-6
    expected = ops.qkv_norm_rope_store(*given, theirs, loc, joined)
    out = elementwise.qk_norm_rope_store(*given, ours.k, ours.v, loc, v_norm=True, joined=joined)
    for found, wanted in ((out, expected), (ours.k, theirs.k), (ours.v, theirs.v)):
        assert relative(found, wanted) < 5e-3


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize(
    ("width", "two", "scaled", "norms"),
    [(2816, True, True, 1), (2816, False, False, 3), (640, False, True, 4), (5376, True, False, 0)],
)
def test_norms_of_what_joins_the_stream_through_norms(
    tokens: int, width: int, two: bool, scaled: bool, norms: int
) -> None:
    x, y, h = torch.randn(3, tokens, width, dtype=BF16, device="cuda")
    norm, y_norm, both, *weights = torch.rand(3 + norms, width, device="cuda") + 0.5
    scale = torch.tensor([0.75], device="cuda") if scaled else None
    added = ops.rms_norm(x, norm, 1e-6)
    if two:
        added = ops.rms_norm(ops.add(added, ops.rms_norm(y, y_norm, 1e-6)), both, 1e-6)
    total = ops.add(h, added) if scale is None else ops.scaled_add(added, h, scale)
    expected = [total, *(ops.rms_norm(total, weight, 1e-6) for weight in weights)]
    second = elementwise.Second(y, y_norm, both) if two else None
    made = elementwise.norms_of_sum(x, norm, h, weights, 1e-6, scale, second)
    for found, wanted in zip(made, expected, strict=True):
        assert relative(found, wanted) < 5e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(64, 8, 64, 128), (32, 2, 128, 0), (22, 2, 128, 0)]
)
def test_sinks(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """As gpt-oss has them: of decode rows in several blocks, of prompts in Triton, and in any order of
    steps."""
    sinks, scale = torch.randn(heads, device="cuda") + 4, dim**-0.5
    for q_lens, kv_lens in (([1] * 5, [1, 16, 700, 9000, 130]), ([1, 1, 5, 300], [40, 1000, 500, 300])):
        q, kv, batch = paged(q_lens, kv_lens, heads, kv_heads, dim, (window,))
        clean = KVLayer(kv.k.float().nan_to_num(), kv.v.float().nan_to_num())
        expected = ops.attention(q.float(), clean, batch, scale, window, 0.0, sinks)
        shape = attention.AttentionShape(
            heads, kv_heads, dim, 16, BF16, frozenset({window}), 0.0, 300, sinks=True
        )
        for name, decode in (("auto", "native"), ("triton", "triton"), ("torch", "torch")):
            attend, _ = attention.choose_backend(name, [shape])
            assert attend.decode.name == decode
            attend.plan(batch)
            assert relative(attend(q, kv, batch, Scoring(scale, window, 0.0, sinks)), expected) < 1e-2
        assert relative(expected, oracle(q, kv, batch, scale, window, 0.0)) > 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 32, 64), (112, 112, 128), (71, 1, 64)])
def test_scores_that_rise_with_places(heads: int, kv_heads: int, dim: int) -> None:
    """BLOOM's heads, and as many as Falcon has."""
    slopes, scale = torch.tensor(alibi_spec.slopes(heads), device="cuda"), dim**-0.5
    for q_lens, kv_lens in (([1] * 5, [1, 16, 700, 2000, 130]), ([1, 1, 5, 300], [40, 1000, 500, 300])):
        q, kv, batch = paged(q_lens, kv_lens, heads, kv_heads, dim, (0,))
        clean = KVLayer(kv.k.float().nan_to_num(), kv.v.float().nan_to_num())
        expected = ops.attention(q.float(), clean, batch, scale, slopes=slopes)
        shape = attention.AttentionShape(
            heads, kv_heads, dim, 16, BF16, frozenset({0}), 0.0, 300, rising=True
        )
        for name in ("auto", "torch"):
            attend, _ = attention.choose_backend(name, [shape])
            assert attend.decode.name == ("triton" if name == "auto" else "torch")
            attend.plan(batch)
            assert relative(attend(q, kv, batch, Scoring(scale, slopes=slopes)), expected) < 1e-2
        assert relative(expected, oracle(q, kv, batch, scale, 0, 0.0)) > 1e-2


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_heads_of_256(lengths: str, heads: int) -> None:
    test_decode("auto", lengths, heads, max(1, heads // 8), 256, 0, 0.0)


@pytest.mark.parametrize("dim", [80, 96, 100, 112, 192, 512])
def test_heads_of_other_sizes(dim: int) -> None:
    """Triton's kernels pad them; in groups of 16 query heads."""
    q_lens, kv_lens = [1, 1, 5, 300], [40, 1000, 500, 300]
    q, kv, batch = paged(q_lens, kv_lens, 32, 2, dim)
    attend = backend("auto", batch, kv, 32, (0,), 0.0, dim**-0.5)
    assert attend.decode.name == attend.extend.name == "triton"
    attend.plan(batch)
    assert relative(attend(q, kv, batch, Scoring(dim**-0.5)), oracle(q, kv, batch, dim**-0.5, 0, 0.0)) < 1e-2


@pytest.mark.parametrize("page_size", [32, 64])
def test_decode_with_larger_pages(page_size: int) -> None:
    kv_lens = [(37 * i) % 900 + 1 for i in range(30)]
    q, kv, batch = paged([1] * len(kv_lens), kv_lens, 8, 2, 128, page_size=page_size)
    attend = backend("auto", batch, kv, 8, (0,), 0.0, 0.1)
    assert relative(attend(q, kv, batch, Scoring(0.1)), oracle(q, kv, batch, 0.1, 0, 0.0)) < 1e-2


def test_a_graph_replays_other_lengths() -> None:
    """One launch serves every batch: few and many tiles, rows that are padding, shares taken in turn."""
    rows, heads, kv_heads, dim, most = 250, 8, 4, 128, 1200
    q, kv, batch = paged([1] * rows, [most] * rows, heads, kv_heads, dim)
    attend = backend("auto", batch, kv, heads, (0,), 0.0, 0.1)
    attend(q, kv, batch, Scoring(0.1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, kv, batch, Scoring(0.1))
    generator = torch.Generator().manual_seed(1)
    for live in (rows, 1, 0, 3, 40, 131, rows, rows):
        lens = torch.randint(1, most + 1 if live != 40 else 20, (rows,), generator=generator).int()
        lens[torch.randperm(rows, generator=generator)[live:]] = 0
        batch.kv_len.copy_(lens)
        batch.cum[0][1:] = (-(-lens // attention.TILE)).cumsum(0).int()
        graph.replay()
        there = lens.cuda() > 0
        if live:
            expected = oracle(q, kv, batch, 0.1, 0, 0.0)
            assert relative(out[there], expected[there]) < 1e-2
    kernel = attend.decode._kernel  # type: ignore[attr-defined]
    assert not kernel._count.any()


def beside(
    q: torch.Tensor, kv: KVLayer, batch: DeviceBatch, q_lens: list[int], heads: int, kv_heads: int, dim: int
) -> torch.Tensor:
    """q with k and v of whole prompts beside it, as ``Attention.in_place`` wants it."""
    qkv = torch.full((batch.tokens, (heads + 2 * kv_heads) * dim), float("nan"), dtype=BF16, device="cuda")
    qkv[:, : heads * dim] = q
    for row in (torch.tensor(q_lens) == batch.kv_len.cpu()).nonzero()[:, 0].tolist():
        first, n = sum(q_lens[:row]), q_lens[row]
        pages = batch.page_table[int(batch.slots[row])].long()[: -(-n // kv.k.shape[1])]
        for tensor, head in ((kv.k, heads), (kv.v, heads + kv_heads)):
            tokens = tensor[pages].flatten(0, 1)[:n].flatten(1)
            qkv[first : first + n, head * dim : (head + kv_heads) * dim] = tokens
    return qkv[:, : heads * dim]


@pytest.mark.parametrize("name", ["auto", "triton", "flashinfer"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
def test_mixed(name: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float) -> None:
    """Decode rows, prompts with a history and whole ones in any order; whole ones last, with k and v beside
    q."""
    for q_lens, kv_lens in (
        ([1, 1, 2, 300, 128, 5], [40, 1000, 2, 300, 500, 1500]),
        ([1, 1, 128, 5, 2, 300], [40, 1000, 500, 1500, 2, 300]),
    ):
        q, kv, batch = paged(q_lens, kv_lens, heads, kv_heads, dim, (window,))
        expected = oracle(q, kv, batch, dim**-0.5, window, softcap)
        attend = backend(name, batch, kv, heads, (window,), softcap, dim**-0.5)
        attend.plan(batch)
        if attend.in_place:
            q = beside(q, kv, batch, q_lens, heads, kv_heads, dim)
        out = attend(q, kv, batch, Scoring(dim**-0.5, window, softcap))
        assert relative(out, expected) < 1e-2
        assert name in ("auto", attend.extend.name)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_long_prompts(group: int, dim: int) -> None:
    """More tiles than a GPU has blocks, keys in many stages; tiles over two blocks of keys; ends that fill no
    tile."""
    kv_heads = 8 if group < 4 else 2
    for q_lens, kv_lens in (
        ([2500, 129, 1023, 64], [2500, 130, 1023, 64]),
        ([999, 300], [3333, 512]),
        ([2048], [2048]),
    ):
        q, kv, batch = paged(q_lens, kv_lens, kv_heads * group, kv_heads, dim)
        expected = oracle(q, kv, batch, dim**-0.5, 0, 0.0)
        attend = backend("auto", batch, kv, kv_heads * group, (0,), 0.0, dim**-0.5)
        attend.plan(batch)
        if attend.in_place:
            q = beside(q, kv, batch, q_lens, kv_heads * group, kv_heads, dim)
        for _ in range(2):
            out = attend(q, kv, batch, Scoring(dim**-0.5))
            assert relative(out, expected) < 5e-3
            first = 0
            for n in q_lens:  # no row is wrong that the others hide
                assert relative(out[first : first + n], expected[first : first + n]) < 5e-3
                first += n


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
def test_prompts(name: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float) -> None:
    """As graphs have them: tokens of decode rows before, padding behind, tiles that are not used."""
    q, kv, batch = paged([2, 300, 128, 5, 65], [2, 300, 500, 1500, 65], heads, kv_heads, dim, (window,))
    prompts = backend(name, batch, kv, heads, (window,), softcap, dim**-0.5).prompts
    expected, rows = oracle(q, kv, batch, dim**-0.5, window, softcap), batch.extend
    assert rows is not None
    before, tokens = 7, q.shape[0]
    tiles = cut(rows.slots, rows.kv_lens - rows.q_lens, rows.q_lens, before, prompts.tile)
    tiles = np.concatenate([tiles, np.zeros((3, 4), np.int32)])
    padded = torch.full((before + tokens + 9, q.shape[1]), float("nan"), dtype=BF16, device="cuda")
    padded[before : before + tokens] = q
    for _ in range(2):
        out = torch.zeros_like(padded)
        scoring = Scoring(dim**-0.5, window, softcap)
        prompts.forward(padded, kv, batch.page_table, torch.from_numpy(tiles).cuda(), scoring, out)
        assert relative(out[before : before + tokens], expected) < 1e-2
        assert not out[:before].any()
        assert not out[before + tokens :].any()


SKINNY_ROWS = [1, 3, 8, 9, 16]
SKINNY = [(4096, 1024), (1024, 2048), (1000, 3072), (151936, 1024), (12288, 4096)]


@pytest.fixture(scope="module")
def compiled_skinny() -> None:
    from sgla.kernels.cuda import skinny_gemm as gemm

    with rehearsing():
        for n, k in SKINNY:
            w = torch.empty(n, k, dtype=BF16, device="cuda")
            for x in (w.new_empty(m, k) for m in SKINNY_ROWS):
                for norm in (None, torch.empty(k, device="cuda")):
                    for epilogue in (gemm.STORE, gemm.FLOAT32, gemm.SILU, gemm.GELU):
                        gemm.linear(x, w, norm=norm, epilogue=epilogue)
                    gemm.linear(x, w, norm=norm, epilogue=gemm.ADD, out=x.new_empty(x.shape[0], n))


@pytest.mark.parametrize("m", SKINNY_ROWS)
@pytest.mark.parametrize(("n", "k"), SKINNY)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.usefixtures("compiled_skinny")
def test_skinny_gemm(m: int, n: int, k: int, norm: bool) -> None:
    from sgla.kernels.cuda import skinny_gemm

    x = torch.randn(m, k, dtype=BF16, device="cuda")
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    weight = torch.rand(k, device="cuda") + 0.5 if norm else None
    normed = ops.rms_norm(x.float(), weight, 1e-6) if weight is not None else x.float()
    y = normed.double() @ w.double().t()
    options = {"norm": weight, "eps": 1e-6}
    assert relative(skinny_gemm.linear(x, w, **options), y) < 5e-3
    assert relative(skinny_gemm.linear(x, w, epilogue=skinny_gemm.FLOAT32, **options), y) < (
        5e-3 if norm else 1e-5
    )
    bias = torch.randn(n, device="cuda")
    assert relative(skinny_gemm.linear(x, w, bias=bias, **options), y + bias) < 5e-3
    h = torch.randn(m, n, dtype=BF16, device="cuda")
    expected = h.double() + y
    skinny_gemm.linear(x, w, epilogue=skinny_gemm.ADD, out=h, **options)
    assert relative(h, expected) < 5e-3
    expected = h.double() + 0.22 * y
    skinny_gemm.linear(x, w, epilogue=skinny_gemm.ADD, out=h, factor=0.22, **options)
    assert relative(h, expected) < 5e-3
    for epilogue, kind in ((skinny_gemm.SILU, "silu"), (skinny_gemm.GELU, "gelu_tanh")):
        assert relative(skinny_gemm.linear(x, w, epilogue=epilogue, **options), ops.act_mul(y, kind)) < 1e-2


@pytest.mark.parametrize("head", [0, 64, 128, 256])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 512), (1, 4096), (2, 4096), (1, 8192)])
def test_skinny_gemm_of_what_a_gate_lets_through(m: int, k: int, silu: bool, head: int) -> None:
    from sgla.kernels.cuda import skinny_gemm

    both = torch.randn(m, 2 * k + 64, dtype=BF16, device="cuda") * 2
    x, by = both[:, :k], both[:, k + 64 :]
    norm = torch.rand(head, device="cuda") + 0.5 if head else None
    gate = skinny_gemm.Gate(by, norm, 1e-6, silu)
    if norm is None:
        gated = ops.sigmoid_mul.body(x.float(), by.float())
    else:
        heads = (y.float().unflatten(1, (-1, head)) for y in (x, by))
        gated = ops.gated_rms_norm.body(*heads, norm, 1e-6, "silu" if silu else "sigmoid").flatten(1)
    for n in (2048, 4096):
        w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
        y = gated.to(BF16).double() @ w.double().t()
        h = torch.randn(m, n, dtype=BF16, device="cuda")
        total = h.double() + y
        assert relative(skinny_gemm.linear(x, w, gate=gate), y) < 5e-3
        skinny_gemm.linear(x, w, gate=gate, epilogue=skinny_gemm.ADD, out=h)
        assert relative(h, total) < 5e-3


CUTS = {  # of batch_gemm: its Config, and rows
    (64, 1, 2, False): (1, 16, 33, 64),
    (64, 2, 2, False): (16, 17, 64),
    (64, 8, 2, False): (9, 64),
    (128, 4, 1, True): (16, 40, 64, 96, 205),
    (128, 8, 1, True): (100, 128),
    (64, 1, 1, False): (100, 128, 200, 256),
    (64, 2, 1, False): (80, 150, 192, 240),
    (128, 2, 1, False): (90, 128),
    (64, 4, 1, False): (65, 128, 160),
    (256, 1, 1, False): (64, 128),
    (192, 1, 1, False): (16, 64, 96, 100, 137, 160, 192, 201, 250, 600),
    (128, 1, 1, False): (60, 129, 256),
    (64, 1, 1, False, 64): (100, 128),
    (128, 1, 1, False, 64): (136, 250),
    (64, 4, 1, True, 64): (65, 128),
    (64, 4, 2, True, 64): (200, 256),
    (64, 4, 2, False, 64): (129, 160, 192),
    (96, 1, 1): (9, 33, 64, 90, 128, 150, 201, 250),
    (160, 1, 1): (16, 40, 64, 96, 128, 150, 192, 201, 220, 240, 256),
    (224, 1, 1): (9, 33, 64, 90, 128),
    (224, 1, 1, False, 256, 2): (129, 150, 176, 180, 200, 210, 240, 256, 510),
    (224, 1, 1, False, 192, 2): (380,),
    (192, 1, 1, False, 160): (320,),
}


@pytest.fixture(scope="module")
def compiled_cuts() -> None:
    """All of their kernels, side by side."""
    from sgla.kernels.cuda import batch_gemm

    w = torch.zeros(1024, 512, dtype=BF16, device="cuda")
    with rehearsing():
        for cut, rows in CUTS.items():
            for m in rows:
                for epilogue in (batch_gemm.STORE, batch_gemm.FLOAT32, batch_gemm.SILU, batch_gemm.GELU):
                    batch_gemm.linear(w[:m], w, batch_gemm.Config(*cut), epilogue=epilogue)


@pytest.mark.parametrize(
    ("cut", "n", "k"),
    [(cut, *shape) for cut in CUTS for shape in ((4096, 1024), (1024, 2048), (1000, 3072), (6144, 4096))]
    + [(cut, 65536, 512) for cut in CUTS if cut[0] % 64],  # several tiles a block
)
@pytest.mark.usefixtures("compiled_cuts")
def test_batch_gemm(cut: tuple[Any, ...], n: int, k: int) -> None:
    from sgla.kernels.cuda import batch_gemm

    config = batch_gemm.Config(*cut)  # with fewer blocks, where those that are apart are too many
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    bias = torch.randn(n, device="cuda")
    for m in CUTS[cut]:
        x = torch.randn(m, k, dtype=BF16, device="cuda")
        y = x.double() @ w.double().t()
        for _ in range(3):  # blocks that are apart count on from launch to launch
            assert relative(batch_gemm.linear(x, w, config), y) < 5e-3
        assert relative(batch_gemm.linear(x, w, config, bias=bias), y + bias) < 5e-3
        if n % 16 == 0:
            out = batch_gemm.linear(x, w, config, epilogue=batch_gemm.SILU)
            assert relative(out, ops.act_mul(y, "silu")) < 5e-3
    assert relative(batch_gemm.linear(x, w, config, epilogue=batch_gemm.FLOAT32), y) < 1e-5
    if n % 16 == 0:
        out = batch_gemm.linear(x, w, config, epilogue=batch_gemm.GELU)
        assert relative(out, ops.act_mul(y, "gelu_tanh")) < 5e-3


WIDTHS = [(1024, 3072), (1088, 3072), (2048, 4096), (4096, 3072)]
PAIRS = [(200, 1024, 2048), (256, 1024, 3072), (200, 4096, 4096), (224, 4096, 12288)]
PAIRS += [(m, *widths) for m in (9, 16, 40, 64, 96, 128, 150, 192) for widths in WIDTHS]


def layers_of(width: int, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights of a layer and of two that may follow it, uninitialized."""
    down = torch.empty(width, inner, dtype=BF16, device="cuda")
    return down, down.new_empty(4096 if width == 1024 else 6144, width), down.new_empty(28672, width)


def chosen(m: int, down: torch.Tensor, after: torch.Tensor, wide: torch.Tensor) -> list[Any]:
    """How they are computed, the second with an activation or without."""
    from sgla.kernels.cuda import batch_gemm

    layers = (down, False), (after, False), (after, True), (wide, True)
    configs = [batch_gemm.default_config(m, *w.shape, gated) for w, gated in layers]
    assert all(configs)
    return configs


@pytest.fixture(scope="module")
def compiled_pairs() -> None:
    from sgla.kernels.cuda import batch_gemm

    with rehearsing():
        for m, width, inner in PAIRS:
            down, after, wide = layers_of(width, inner)
            first, second, gated, balanced = chosen(m, down, after, wide)
            norm = ops.AddedNorm(down.new_empty(m, width), torch.empty(width, device="cuda"), 1e-6)
            rows = batch_gemm.linear_add(down.new_empty(m, inner), down, first, norm)
            batch_gemm.linear(rows, after, second)
            batch_gemm.linear(rows, after, gated, epilogue=batch_gemm.SILU)
            batch_gemm.linear(rows, wide, balanced, epilogue=batch_gemm.SILU)


@pytest.mark.parametrize(("m", "width", "inner"), PAIRS)
@pytest.mark.usefixtures("compiled_pairs")
def test_norm_of_two_linear_layers(m: int, width: int, inner: int) -> None:
    """The first adds to the residual and leaves squares, the second divides by the rms."""
    from sgla.kernels.cuda import batch_gemm

    down, after, wide = (w.normal_(std=w.shape[1] ** -0.5) for w in layers_of(width, inner))
    weight, bias = torch.rand(width, device="cuda") + 0.5, torch.randn(width, device="cuda")
    x, start = (torch.randn(m, size, dtype=BF16, device="cuda") for size in (inner, width))
    expected = start.double() + x.double() @ down.double().t() + bias.double()
    normed = ops.rms_norm(expected.float(), weight, 1e-6).double()
    first, second, gated, balanced = chosen(m, down, after, wide)
    results = []
    for _ in range(3):
        h = start.clone()
        rows = batch_gemm.linear_add(x, down, first, ops.AddedNorm(h, weight, 1e-6), bias)
        y = batch_gemm.linear(rows, after, second)
        z = batch_gemm.linear(rows, after, gated, epilogue=batch_gemm.SILU)
        last = batch_gemm.linear(rows, wide, balanced, epilogue=batch_gemm.SILU)
        results.append((h, rows.x, y, z, last))
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1]))
    y_expected = normed @ after.double().t()
    assert relative(h, expected) < 5e-3
    assert relative(y, y_expected) < 5e-3
    assert relative(z, ops.act_mul(y_expected, "silu")) < 1e-2
    assert relative(last, ops.act_mul(normed @ wide.double().t(), "silu")) < 1e-2


@pytest.mark.parametrize("m", [16, 64, 128, 192, 256])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048)])
def test_rows_that_batch_gemm_does_not_have(m: int, n: int, k: int) -> None:
    """What lies behind the last row of x changes nothing, and nothing is written behind the last row of the
    result."""
    from sgla.kernels.cuda import batch_gemm

    config = batch_gemm.default_config(m, n, k)
    if config is None:
        return
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    x = torch.full((m, k), torch.nan, dtype=BF16, device="cuda")
    out = torch.zeros(m, n, dtype=BF16, device="cuda")
    x[: m - 3] = torch.randn(m - 3, k, dtype=BF16, device="cuda")
    batch_gemm.linear(x[: m - 3], w, config, out=out[: m - 3])
    assert relative(out[: m - 3], x[: m - 3].double() @ w.double().t()) < 5e-3
    assert not out[m - 3 :].any()
