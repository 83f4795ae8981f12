"""The KV cache in int8: kernels against the oracle that reads the same pages, and the runner against
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
from sgla.messages import PROMPT_LOGPROBS, SAMPLE

NATIVE = [(32, 8, 128, 0, 0.0), (9, 3, 64, 0, 0.0), (8, 4, 256, 33, 20.0), (26, 2, 128, 100, 0.0)]
SHAPES = [*NATIVE[:3], (4, 2, 80, 0, 0.0)]


def empty(wide: KVLayer) -> KVLayer:
    """Pages as many as these, as ``Arena`` lays them out."""
    pages, size, heads, dim = wide.k.shape
    k, v = torch.zeros(2, pages, heads, size, dim, dtype=torch.int8, device="cuda").transpose(2, 3)
    scales = torch.zeros(2, pages, heads, size, device="cuda")
    return KVLayer(k, v, k_scales=scales[0], v_scales=scales[1])


def quantized(wide: KVLayer) -> KVLayer:
    """What ``turning.store`` makes of all places; those that nobody has written stay as they are."""
    found = empty(wide)
    pages, size, heads, dim = wide.k.shape
    known = wide.k.flatten(0, 1).isfinite().flatten(1).all(1).nonzero()[:, 0]
    both = (x.flatten(0, 1)[known].flatten(1) for x in (wide.k, wide.v))
    turning.store(torch.cat([*both], 1), found, known.int())
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), SHAPES)
def test_stored_as_the_body_stores(heads: int, kv_heads: int, dim: int, window: int, softcap: float) -> None:
    _, wide, _ = paged([1, 1], [40, 300], heads, kv_heads, dim)
    ours, theirs = quantized(wide), empty(wide)
    places = torch.arange(wide.k[..., 0, 0].numel(), device="cuda")
    where = places // wide.k.shape[1], places % wide.k.shape[1]
    theirs.put_keys(wide.k.flatten(0, 1).nan_to_num(), where)
    theirs.put_values(wide.v.flatten(0, 1).nan_to_num(), where)
    known = wide.k.isfinite().all(-1)
    for a, b in zip((ours.k, ours.v), (theirs.k, theirs.v)):
        steps = (a.float() - b.float())[known].abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 0.02


@pytest.fixture(scope="module")
def compiled() -> None:
    ask_for_decode(empty, NATIVE)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "dim", "window", "softcap"),
    [(name, *shape) for name, shapes in (("auto", NATIVE), ("triton", SHAPES)) for shape in shapes],
)
def test_decode(
    name: str, lengths: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    kv_lens = LENGTHS[lengths]
    q, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv = quantized(wide)
    attend = backend(name, batch, wide, heads, (window,), softcap, dim**-0.5)
    out = attend(q, kv, batch, Scoring(dim**-0.5, window, softcap))
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), NATIVE)
def test_decode_from_the_projection(
    lengths: str, norm: bool, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    """As the body that stores the token, and the attention."""
    kv_lens = LENGTHS[lengths]
    _, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv, expected = quantized(wide), quantized(wide)
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
        steps = (a[page, offset].float() - b[page, offset].float()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 0.05
    for x, y in zip(kv.scales or (), expected.scales or ()):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=0)
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), SHAPES)
def test_prompts(heads: int, kv_heads: int, dim: int, window: int, softcap: float) -> None:
    q, wide, batch = paged([1, 30, 130, 5], [70, 30, 200, 400], heads, kv_heads, dim, (window,))
    kv = quantized(wide)
    attend = backend("triton", batch, wide, heads, (window,), softcap, dim**-0.5)
    attend.plan(batch)
    out = attend(q.to(BF16), kv, batch, Scoring(dim**-0.5, window, softcap))
    assert relative(out, ops.attention(q.float(), kv, batch, dim**-0.5, window, softcap)) < 1.5e-2


def test_the_runner_is_close_to_bfloat16_and_its_batches_alike() -> None:
    """Logprobs of a prompt in two chunks, and nearly twice the pages."""
    values, pages = [], []
    try:
        for dtype in ("auto", "int8"):
            runner = make(kv_cache_dtype=dtype)
            pages.append(runner.facts.groups[0].pages)
            new = [new_row(2, prompt(2, 300), prompt_logprobs=0)]
            chunk = runner.execute(plan(0, [(2, 0, 130, PROMPT_LOGPROBS)], new)).logprobs
            chunk += runner.execute(plan(1, [(2, 130, 170, SAMPLE | PROMPT_LOGPROBS)])).logprobs
            values.append(np.concatenate([np.frombuffer(block.values, "f4") for block in chunk]))
        error = np.abs(values[0] - values[1])
        print(f"int8 KV: logprobs differ by {error.mean():.4f} on average, {error.max():.4f} at most")
        assert error.mean() < 0.02
        assert pages[1] >= 1.8 * pages[0]
        prompts = {slot: prompt(slot, 20 + 60 * slot) for slot in range(3)}
        assert all(len(tokens) == 8 for tokens in generate(runner, prompts, 8, together=True).values())
    finally:
        torch.cuda.empty_cache()
