"""``deterministic``: the logits of a request are the same bits whatever the batch, the chunks and the cache
are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_runner import PAGES, ints, make, new_row, plan, prompt

from sgla import attention
from sgla.attention import chunked
from sgla.kernels.gpu import invariant as products
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, NewRow, RowSampling

pytest.importorskip("triton")
BF16 = torch.bfloat16


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1000, 3072), (5000, 4096), (24576, 4096)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_linear_is_invariant(n: int, k: int, dtype: torch.dtype) -> None:
    from sgla.kernels.triton import invariant

    x = torch.randn(1000, k, dtype=BF16, device="cuda")
    w = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5

    def linear(x: torch.Tensor) -> torch.Tensor:
        return invariant.linear(x, w, out=torch.empty(x.shape[0], n, dtype=dtype, device="cuda"))

    whole = linear(x)
    expected = x.double() @ w.double().t()
    assert float((whole.double() - expected).norm() / expected.norm()) < 5e-3
    for begin, end in ((0, 1), (7, 8), (3, 19), (0, 64), (100, 165), (999, 1000), (1, 1000)):
        assert torch.equal(linear(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [(32, 8, 128, 0, 0.0), (9, 3, 64, 0, 0.0), (16, 8, 128, 700, 0.0), (8, 4, 256, 0, 20.0)],
)
def test_attention_is_invariant(
    heads: int, kv_heads: int, dim: int, window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of a history: in one prompt, in chunks, and as a decode row among others."""
    from sgla.kernels.triton import invariant

    monkeypatch.setattr(chunked, "refuses", lambda *shape: "others are tested")
    length, page_size = 1500, 16
    table = (1 + torch.randperm(3 * 100)).view(3, 100).int().cuda()
    pool = torch.randn(2, 301, kv_heads, page_size, dim, dtype=BF16, device="cuda").transpose(2, 3)
    q = torch.randn(length, heads * dim, dtype=BF16, device="cuda")
    shape = attention.AttentionShape(
        heads,
        kv_heads,
        dim,
        page_size,
        BF16,
        frozenset({window}),
        softcap,
        64,
        deterministic=True,
        context_len=1600,
    )
    parts = attention.choose_backend("auto", [shape])[0].decode._parts  # type: ignore[attr-defined]

    def attend(q: torch.Tensor, q_lens: list[int], kv_lens: list[int], slots: list[int], split: bool) -> Any:
        def upload(x: list[int]) -> torch.Tensor:
            return torch.tensor(x, dtype=torch.int32, device="cuda")

        tiles = invariant.tiles_of(q_lens, shape.group, "cuda")
        q_start = upload([0, *np.cumsum(q_lens).tolist()])
        return invariant.attend(
            q, *pool, table, upload(slots), q_start, upload(kv_lens), tiles, dim**-0.5, window, softcap, 512,
            parts if split else None,
        )  # fmt: skip

    whole = attend(q, [length], [length], [1], False)
    for cut in (1, 63, 511, 512, 700):
        rest = length - cut
        chunks = attend(q.roll(-cut, 0), [rest, cut], [length, cut], [1, 1], False)
        assert torch.equal(chunks, whole.roll(-cut, 0))
    at = torch.randperm(length)[:60]
    rows = attend(q[at.cuda()], [1] * 60, (at + 1).tolist(), [1] * 60, True)
    assert torch.equal(rows, whole[at.cuda()])


@pytest.fixture(scope="module", params=["triton", "cuda"])
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    """With Triton's kernels, and with those of the prompts of other servers."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "triton":
            for module in (chunked, products):
                patch.setattr(module, "refuses", lambda *shape: "others are tested")
        patch.setattr(chunked, "CHUNK", 256)
        made = make(deterministic=True)
        assert made.steps.reads_in_graphs == (request.param == "cuda")
        yield made
    torch.cuda.empty_cache()


def answer(
    runner: Any, slot: int, tokens: list[int], others: list[int], chunks: list[int], steps: int
) -> Any:
    """Tokens and bytes of the logprobs of ``steps`` outputs, with the prompt in ``chunks`` beside rows of
    ``others``."""
    new = [new_row(slot, tokens, seed=5, temperature=0.8, top_k=50, logprobs=3)]
    new += [new_row(s, prompt(s, 30 + 17 * s), seed=s, temperature=0.5) for s in others]
    starts = {s: 30 + 17 * s for s in others}
    out = []
    begin, late = 0, list(new)
    for i, length in enumerate([*chunks, len(tokens) - sum(chunks), *[1] * steps]):
        flag = SAMPLE if begin + length >= len(tokens) else 0
        rows = [(slot, begin, length, flag)]
        if i == 0:
            rows += [(s, 0, n, SAMPLE) for s, n in starts.items()]
        else:
            rows += [(s, n + i - 1, 1, SAMPLE) for s, n in starts.items()]
        order = np.random.default_rng(i).permutation(len(rows))
        result = runner.execute(plan(i, [rows[j] for j in order], late))
        late, begin = [], begin + length
        if flag:
            (block,) = result.logprobs
            out.append((block.values, block.ranks, block.top_ids, block.top_values))
    return out


def test_the_runner_is_invariant(runner: Any) -> None:
    tokens = prompt(2, 300)
    alone = answer(runner, 2, tokens, [], [], 6)
    assert answer(runner, 2, tokens, [0, 1, 3, 4, 5], [], 6) == alone
    assert answer(runner, 2, tokens, [], [7, 64, 130], 6) == alone
    assert answer(runner, 2, tokens, list(range(3, 20)), [100], 6) == alone
    assert answer(runner, 7, tokens, [0, 1], [16], 6) == alone


def test_a_cached_prefix_and_prompt_logprobs(runner: Any) -> None:
    tokens = prompt(3, 200)
    sampling = RowSampling(prompt_logprobs=2)
    pages = ints(*range(1 + 3 * PAGES, 1 + 4 * PAGES))
    new = [NewRow(slot=3, tokens=ints(*tokens), prompt_len=200, pages=[pages], sampling=sampling)]
    whole = runner.execute(plan(0, [(3, 0, 200, SAMPLE | PROMPT_LOGPROBS)], new)).logprobs[0]
    reader = [
        NewRow(slot=8, tokens=ints(*tokens), prompt_len=200, pages=[pages], sampling=sampling),
        new_row(9, prompt(9, 90)),
    ]
    rows = [(9, 0, 90, SAMPLE), (8, 96, 104, SAMPLE | PROMPT_LOGPROBS)]
    cached = runner.execute(plan(1, rows, reader)).logprobs[0]
    assert cached.start == 97
    assert np.array_equal(np.frombuffer(cached.values, "i4"), np.frombuffer(whole.values, "i4")[96:])


def test_graphs_equal_eager(runner: Any) -> None:
    tokens = prompt(4, 50)
    captured = answer(runner, 4, tokens, [1, 2], [], 5)
    runner._captures = False
    try:
        assert answer(runner, 4, tokens, [1, 2], [], 5) == captured
    finally:
        runner._captures = True
