"""The 8-bit KV cache: kernels against the oracle that reads the same pages, and the runner against
bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_cascade import tree
from test_gpu_kernels import BF16, CASES, LENGTHS, ask_for_decode, backend, paged, relative
from test_gpu_runner import make, new_row, plan, prompt

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.attention.cascade import Cascade, pack, unpack
from sgla.kernels import ops
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import elementwise
from sgla.messages import PROMPT_LOGPROBS, SAMPLE

SCALES = (0.02, 0.011)


def quantize(kv: KVLayer) -> KVLayer:
    """Pages as they lie in memory, in e4m3."""
    memory = torch.stack([x.transpose(1, 2).float() / scale for x, scale in zip((kv.k, kv.v), SCALES)])
    k, v = memory.nan_to_num().clamp(-448, 448).to(torch.float8_e4m3fn).transpose(2, 3)
    return KVLayer(k, v, *SCALES)


def oracle(
    q: torch.Tensor, kv: KVLayer, batch: Any, scale: float, window: int, softcap: float
) -> torch.Tensor:
    return ops.attention(q.float(), kv, batch, scale, window, softcap)


def same_rounding(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether these can be e4m3 of numbers that differ by roundings to bfloat16 (2^-7 of the largest): such a
    number now and then comes to the next step, and steps are 1/8 of a value at most."""
    steps = torch.maximum(a.abs(), b.abs()) / 8 + b.abs().max() / 128
    return bool(((a - b).abs() <= steps).all()) and float((a != b).float().mean()) < 1 / 4


@pytest.fixture(scope="module")
def compiled() -> None:
    ask_for_decode(quantize)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
@pytest.mark.usefixtures("compiled")
def test_decode(
    name: str, lengths: str, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    kv_lens = LENGTHS[lengths]
    q, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv = quantize(wide)
    attend = backend(name, batch, wide, heads, (window,), softcap, dim**-0.5)
    out = attend(q, kv, batch, Scoring(dim**-0.5, window, softcap))
    assert relative(out, oracle(q, kv, batch, dim**-0.5, window, softcap)) < 1e-2


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
@pytest.mark.usefixtures("compiled")
def test_decode_from_the_projection(
    lengths: str, norm: bool, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    """As the two kernels that it stands for: the stored token, then the attention."""
    kv_lens = LENGTHS[lengths]
    _, wide, batch = paged([1] * len(kv_lens), kv_lens, heads, kv_heads, dim, (window,))
    kv = quantize(wide)
    attend = backend("auto", batch, wide, heads, (window,), softcap, dim**-0.5)
    qkv = torch.randn(batch.rows, (heads + 2 * kv_heads) * dim, dtype=BF16, device="cuda")
    cos_sin = torch.randn(max(kv_lens), dim, device="cuda")
    weights = [torch.rand(dim, device="cuda") + 0.5 if norm else None for _ in range(2)]
    positions = batch.kv_len - 1
    places = batch.page_table[batch.slots.long(), positions.long() // 16] * 16 + positions % 16
    stored = KVLayer(kv.k.clone(), kv.v.clone(), *SCALES)
    elementwise.qk_norm_rope_store(
        qkv, positions, cos_sin, *weights, 1e-6, stored.k, stored.v, places, False, SCALES
    )
    expected = KVLayer(kv.k.clone(), kv.v.clone(), *SCALES)
    q = ops.qk_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, expected, places)
    projection = Projection(cos_sin, *weights, 1e-6)
    out = attend.decode.forward(qkv, kv, batch, Scoring(dim**-0.5, window, softcap), projection=projection)
    page, offset = places.long() // 16, places.long() % 16
    for a, b in ((kv.k, expected.k), (kv.v, expected.v), (stored.k, expected.k), (stored.v, expected.v)):
        a, b = a.float(), b.float()
        assert same_rounding(a[page, offset], b[page, offset])
        a[page, offset] = b[page, offset]
        assert torch.equal(a, b)
    assert relative(out, oracle(q, kv, batch, dim**-0.5, window, softcap)) < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap"), CASES)
def test_prefill(heads: int, kv_heads: int, dim: int, window: int, softcap: float) -> None:
    q_lens, kv_lens = [1, 1, 2, 300, 128, 5], [40, 1000, 2, 300, 500, 1500]
    q, wide, batch = paged(q_lens, kv_lens, heads, kv_heads, dim, (window,))
    kv = quantize(wide)
    expected = oracle(q, kv, batch, dim**-0.5, window, softcap)
    shape = attention.AttentionShape(
        heads, kv_heads, dim, 16, BF16, frozenset({window}), softcap, 300, kv_dtype="fp8"
    )
    attend = attention.choose_backend("auto", [shape])[0]
    attend.plan(batch)
    assert relative(attend(q, kv, batch, Scoring(dim**-0.5, window, softcap)), expected) < 1e-2
    same = attention.choose_backend("auto", [shape._replace(deterministic=True, context_len=1600)])[0]
    same.plan(batch)
    assert relative(same(q, kv, batch, Scoring(dim**-0.5, window, softcap)), expected) < 1e-2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "softcap"), [(32, 8, 128, 0.0), (9, 3, 64, 0.0), (8, 4, 256, 20.0)]
)
def test_shared_prefixes(
    heads: int, kv_heads: int, dim: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgla.attention.cascade.FIXED", 0.0)
    rows = 60
    table, lengths = tree(np.random.default_rng(rows), rows)
    shape = attention.AttentionShape(
        heads, kv_heads, dim, 16, BF16, frozenset({0}), softcap, 256, kv_dtype="fp8"
    )
    attend = attention.choose_backend("auto", [shape])[0]
    planner = Cascade.of([shape], attend)
    assert planner is not None
    monkeypatch.setattr(planner, "_gain", lambda rows, tokens, tiles: float(tokens * (rows - 1)))
    prefixes = planner.plan(np.arange(rows, dtype=np.int32), lengths - 1, table, 0, rows)
    assert prefixes is not None
    pool = torch.randn(2, table.max() + 1, kv_heads, 16, dim, dtype=BF16, device="cuda").transpose(2, 3)
    kv = quantize(KVLayer(pool[0], pool[1]))

    def upload(x: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x, np.int32)).cuda()

    empty, tiles = upload([]), -(-lengths // 16) - prefixes.skip // 16
    batch = DeviceBatch(
        rows=rows,
        tokens=rows,
        ids=empty,
        positions=empty,
        slots=upload(np.arange(rows)),
        q_start=upload(np.arange(rows + 1)),
        kv_len=upload(lengths),
        out_loc=empty,
        page_table=upload(table),
        page_size=16,
        sample_rows=empty,
        decode_rows=rows,
        cum={0: upload(np.concatenate([[0], np.cumsum(tiles)]))},
        prefixes=unpack(upload(pack(prefixes, rows)), rows),
    )
    q = torch.randn(rows, heads * dim, dtype=BF16, device="cuda")
    out = attend(q, kv, batch, Scoring(dim**-0.5, softcap=softcap))
    assert relative(out, oracle(q, kv, batch, dim**-0.5, 0, softcap)) < 1e-2


@pytest.mark.parametrize("scales", ["measured", "of a file"])
def test_the_runner_is_close_to_bfloat16(scales: str, tmp_path: Path) -> None:
    """Logprobs of a prompt in two chunks and of what follows, and twice the pages."""
    values, pages = [], []
    given: dict[str, Any] = {}
    try:
        for dtype in ("auto", "fp8"):
            if dtype == "fp8" and scales == "of a file":
                found = [max(pair) for pair in make(kv_cache_dtype=dtype).steps.scales]
                layers = {"0": {str(layer): scale for layer, scale in enumerate(found)}}
                cache = {"dtype": "float8_e4m3fn", "scaling_factor": layers}
                path = tmp_path / "scales.json"
                path.write_text(json.dumps({"kv_cache": cache}))
                given = {"quantization_param_path": str(path)}
            runner = make(kv_cache_dtype=dtype, **given)
            if given:
                assert runner.steps.scales == [(scale, scale) for scale in found]
            pages.append(runner.facts.groups[0].pages)
            tokens = prompt(2, 300)
            new = [new_row(2, tokens, prompt_logprobs=0, logprobs=0)]
            chunk = runner.execute(plan(0, [(2, 0, 130, PROMPT_LOGPROBS)], new)).logprobs
            chunk += runner.execute(plan(1, [(2, 130, 170, SAMPLE | PROMPT_LOGPROBS)])).logprobs[:1]
            values.append(np.concatenate([np.frombuffer(block.values, "f4") for block in chunk]))
            decoded = [runner.execute(plan(2 + i, [(2, 300 + i, 1, SAMPLE)])) for i in range(4)]
            assert all(np.isfinite(np.frombuffer(r.logprobs[0].values, "f4")).all() for r in decoded)
            assert runner.execute(
                plan(9, [(2, 304, 1, SAMPLE), (3, 0, 40, SAMPLE)], [new_row(3, prompt(3, 40))])
            ).tokens
        error = np.abs(values[0] - values[1])
        print(f"8-bit KV: logprobs differ by {error.mean():.4f} on average, {error.max():.4f} at most")
        # The rounding alone, in torch and float32, gives 0.044 and 0.159 with logits of unit spread.
        assert error.mean() < 0.06
        assert error.max() < 0.3
        assert pages[1] >= 1.9 * pages[0]
    finally:
        torch.cuda.empty_cache()
