"""The KV cache in int8 and int4: kernels against the oracle that reads the same pages, and the runner against
bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_gpu_kernels import BF16, LENGTHS, ask_for_decode, backend, paged, relative
from test_gpu_runner import generate, make, new_row, plan, prompt

from sgla.kernels import ops
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import turning
from sgla.layers.spec import StateTensor
from sgla.messages import PROMPT_LOGPROBS, SAMPLE
from sgla.model.state import LayerState, kv_groups
from sgla.worker.kv import Arena, allocate_kv

NATIVE = [(32, 8, 128, 0, 0.0), (9, 3, 64, 0, 0.0), (8, 4, 256, 33, 20.0), (26, 2, 128, 100, 0.0)]
SHAPES = [*NATIVE[:3], (4, 2, 80, 0, 0.0)]


@pytest.fixture(scope="module", params=["int8", "int4"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def empty(wide: KVLayer, kind: str) -> KVLayer:
    """Pages as many as these."""
    pages, size, heads, dim = wide.k.shape
    state = [LayerState(0, (StateTensor("k", (heads, dim)), StateTensor("v", (heads, dim))))]
    groups = kv_groups(state, 0, kind)
    arena = Arena(groups[0].page_bytes(size) * pages, 4)
    [found] = allocate_kv(state, groups, [pages], size, kind, arena.zeros)
    assert isinstance(found, KVLayer)
    return found


def quantized(wide: KVLayer, kind: str) -> KVLayer:
    """What ``turning.store`` makes of all places; those that nobody has written stay as they are."""
    found = empty(wide, kind)
    pages, size, heads, dim = wide.k.shape
    known = wide.k.flatten(0, 1).isfinite().flatten(1).all(1).nonzero()[:, 0]
    both = (x.flatten(0, 1)[known].flatten(1) for x in (wide.k, wide.v))
    turning.store(torch.cat([*both], 1), found, known.int())
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), SHAPES)
def test_stored_as_the_body_stores(
    heads: int, kv_heads: int, dim: int, window: int, softcap: float, kind: str
) -> None:
    _, wide, _ = paged([1, 1], [40, 300], heads, kv_heads, dim)
    ours, theirs = quantized(wide, kind), empty(wide, kind)
    places = torch.arange(wide.k[..., 0, 0].numel(), device="cuda")
    where = places // wide.k.shape[1], places % wide.k.shape[1]
    theirs.put_keys(wide.k.flatten(0, 1).nan_to_num(), where)
    theirs.put_values(wide.v.flatten(0, 1).nan_to_num(), where)
    known = wide.k.isfinite().all(-1)
    for a, b in zip((ours.k, ours.v), (theirs.k, theirs.v)):
        assert same_steps(a[known], b[known])


def same_steps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether hardly any number is another one, and none by more than a step."""
    if a.dtype == torch.uint8:
        a, b = (torch.stack([x & 15, x >> 4]) for x in (a, b))
    steps = (a.float() - b.float()).abs()
    return bool(steps.max() <= 1 and (steps > 0).float().mean() < 0.05)


@pytest.fixture(scope="module")
def compiled(kind: str) -> None:
    ask_for_decode(lambda wide: empty(wide, kind), NATIVE)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "dim", "window", "softcap"),
    [(name, *shape) for name, shapes in (("auto", NATIVE), ("triton", SHAPES)) for shape in shapes],
)
def test_decode(
    name: str, lengths: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float, kind: str
) -> None:
    kv_lens = LENGTHS[lengths]
    q, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv = quantized(wide, kind)
    attend = backend(name, batch, wide, heads, (window,), softcap, dim**-0.5)
    out = attend(q, kv, batch, Scoring(dim**-0.5, window, softcap))
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), NATIVE)
def test_decode_from_the_projection(
    lengths: str, norm: bool, heads: int, kv_heads: int, dim: int, window: int, softcap: float, kind: str
) -> None:
    """As the body that stores the token, and the attention."""
    kv_lens = LENGTHS[lengths]
    _, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv, expected = quantized(wide, kind), quantized(wide, kind)
    attend = backend("auto", batch, wide, heads, (window,), softcap, dim**-0.5)
    qkv = torch.randn(batch.rows, (heads + 2 * kv_heads) * dim, dtype=BF16, device="cuda")
    cos_sin = torch.randn(max(kv_lens), dim, device="cuda")
    weights = [torch.rand(dim, device="cuda") + 0.5 if norm else None for _ in range(2)]
    positions = batch.kv_len - 1
    places = batch.page_table[batch.slots.long(), positions.long() // 16] * 16 + positions % 16
    q = ops.qk_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, expected, places)
    projection = Projection(cos_sin, *weights, 1e-6)
    out = attend.decode.forward(qkv, kv, batch, Scoring(dim**-0.5, window, softcap), projection=projection)
    page, offset = places.long() // 16, places.long() % 16
    for a, b in ((kv.k, expected.k), (kv.v, expected.v)):
        assert same_steps(a[page, offset], b[page, offset])
    for x, y in zip(kv.scales or (), expected.scales or ()):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2 if kind == "int4" else 0)
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), SHAPES)
def test_prompts(heads: int, kv_heads: int, dim: int, window: int, softcap: float, kind: str) -> None:
    q, wide, batch = paged([1, 30, 130, 5], [70, 30, 200, 400], heads, kv_heads, dim, (window,))
    kv = quantized(wide, kind)
    attend = backend("triton", batch, wide, heads, (window,), softcap, dim**-0.5)
    attend.plan(batch)
    out = attend(q.to(BF16), kv, batch, Scoring(dim**-0.5, window, softcap))
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


def test_the_runner_is_close_to_bfloat16_and_its_batches_alike(kind: str) -> None:
    """Logprobs of a prompt in two chunks, and nearly twice the pages."""
    values, pages = [], []
    try:
        for dtype in ("auto", kind):
            runner = make(kv_cache_dtype=dtype)
            pages.append(runner.facts.groups[0].pages)
            new = [new_row(2, prompt(2, 300), prompt_logprobs=0)]
            chunk = runner.execute(plan(0, [(2, 0, 130, PROMPT_LOGPROBS)], new)).logprobs
            chunk += runner.execute(plan(1, [(2, 130, 170, SAMPLE | PROMPT_LOGPROBS)])).logprobs
            values.append(np.concatenate([np.frombuffer(block.values, "f4") for block in chunk]))
        error = np.abs(values[0] - values[1])
        print(f"{kind} KV: logprobs differ by {error.mean():.4f} on average, {error.max():.4f} at most")
        assert error.mean() < (0.02 if kind == "int8" else 0.1)
        assert pages[1] >= (1.8 if kind == "int8" else 2.3) * pages[0]
        prompts = {slot: prompt(slot, 20 + 60 * slot) for slot in range(3)}
        assert all(len(tokens) == 8 for tokens in generate(runner, prompts, 8, together=True).values())
    finally:
        torch.cuda.empty_cache()
