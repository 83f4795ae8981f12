"""Second guesses on a GPU: rows that verify them bring the text of rows that do not guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gpu_runner import TINY, make
from test_gpu_verify import BY_HEAD, BY_MODEL, requests
from test_gpu_windows import run
from tiny import make_core, submit

from sgla.kernels.cuda.decode_attention import TILE, DecodeAttention
from sgla.kernels.triton import attention
from sgla.kernels.triton.tokens import put_tokens
from sgla.sampling.device import DeviceSampler

SECOND = {"dtype": "float32", "speculative_eagle_topk": 2}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Any, Any]]:
    """One without guesses, and one that guesses for itself, and so is right where no rule is in the way; but
    of two in four places in a row the guesses have changed places."""
    guess = DeviceSampler.guess

    def exchanged(self: Any, logits: Any, slots: Any, positions: Any, *more: Any) -> None:
        guess(self, logits, slots, positions, *more)
        if (beside := more[3]) is None:
            return
        tokens, none = self._tokens, torch.full_like(positions, -1)
        changed = (beside > 0) & (positions % 4 % 3 > 0)
        first, second = (tokens.read(slots.long(), at.long()[:, None])[:, 0] for at in (positions, beside))
        put_tokens(slots, torch.where(changed, positions, none), second, tokens)
        put_tokens(slots, torch.where(changed, beside, none), first, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSampler, "guess", exchanged)
        yield make(TINY, dtype="float32"), make(TINY, **BY_MODEL | {"draft": TINY} | SECOND)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("limits", [{"depth": 1}, {"depth": 3}, {"drafts": 5}, {"step_tokens": 60}])
def test_text_is_the_same(both: tuple[Any, Any], limits: dict[str, Any]) -> None:
    plain, guessing = both
    assert guessing.facts.drafts == 16
    for few in (requests()[:3], requests()):
        expected = run(plain, few, make_core(plain.facts, depth=1))
        core = make_core(guessing.facts, **{"drafts": 16} | limits)
        for _ in range(2):
            assert run(guessing, few, core) == expected
        stats = core.stats()
        assert stats.draft_tokens > sum(stats.right_at) > 20


def test_second_guesses_count(both: tuple[Any, Any]) -> None:
    """Four tokens come in a step; without second guesses it would be one and three in turn. What comes behind
    that, whose pages are used again, is the same, too."""
    plain, guessing = both
    request = submit("one", [5, 9, 2], 80)
    core, expected = make_core(guessing.facts, drafts=16), run(plain, [request], make_core(plain.facts))
    assert run(guessing, [request], core) == expected
    stats = core.stats()
    assert stats.verified_tokens > 3 * stats.verifies
    behind = submit("behind", [5, 9, 2, *expected["one"][:70]], 30)
    assert run(guessing, [behind], core) == run(plain, [behind], make_core(plain.facts))


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}])
def test_a_head_of_which_none_is_right(settings: dict[str, Any]) -> None:
    guessing = make(TINY, **BY_HEAD | SECOND | settings)
    plain = make(TINY, **{"dtype": "float32"} | settings)
    few = requests()[:3]
    found = run(guessing, few, make_core(guessing.facts, drafts=16))
    expected = run(plain, few, make_core(plain.facts))
    assert found.keys() == expected.keys()
    assert settings or found == expected


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("group", [4, 2])
def test_leaves_see_what_stands_before_their_positions(group: int, native: bool) -> None:
    torch.manual_seed(0)
    kv_heads, dim, page = 8, 128, 16
    slots = [1] * 11 + [2] * 7  # five guesses and the ones beside them, and three
    lengths = [*range(1500, 1511), *range(60, 67)]
    ends = [*range(1500, 1506), *range(1501, 1506), *range(60, 64), *range(61, 64)]
    pages = -(-max(lengths) // page)
    table = (1 + torch.randperm(3 * pages)).view(3, pages).int().cuda()
    pool = torch.randn(2, 3 * pages + 1, kv_heads, page, dim, device="cuda").bfloat16()
    k, v = pool.transpose(2, 3)
    q = torch.randn(len(slots), group * kv_heads * dim, device="cuda").bfloat16()
    slot, length, end = (torch.tensor(numbers).int().cuda() for numbers in (slots, lengths, ends))
    cum = torch.tensor([0, *(-(-n // TILE) for n in lengths)]).cumsum(0).int().cuda()
    if native:
        kernel = DecodeAttention(len(slots), kv_heads, group, dim)
        out = kernel(q, k, v, table, slot, length, cum, dim**-0.5, ends=end)
    else:
        out = attention.decode(q, k, v, table, slot, length, dim**-0.5, splits=4, ends=end)
    for r, s in enumerate(slots):
        at = torch.tensor([*range(ends[r] - 1), lengths[r] - 1]).cuda()
        keys, values = (x[table[s, at // page].long(), at % page].float() for x in (k, v))
        heads = q[r].view(kv_heads, group, dim).float()
        shares = torch.einsum("hgd,nhd->hgn", heads, keys).mul(dim**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", shares, values).flatten()
        torch.testing.assert_close(out[r].float(), expected, atol=2e-2, rtol=2e-2)
