# mypy: allow-untyped-defs
"""A worker on a GPU of whose guesses a given share is right, whatever the model draws, so that what they cost
and save can be measured with random weights. The text is none.

``bench/drafts.py --accept SHARE`` starts it in the place of the server's own; with ``--always`` n-grams guess
as much as they may in every step, as if a grammar forced all that comes; with ``--second`` the second guess
is right in so many other cases. ``--values`` are set there.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from msgspec.structs import replace
from torch import Tensor

from sgla.kernels.triton.tokens import _token
from sgla.messages import VERIFIED
from sgla.worker.start_gpu import cuda_runner
from sgla.worker.verify import Verify

# Variables of the environment.
SHARE, ALWAYS, VALUES = "SGLA_BENCH_ACCEPT", "SGLA_BENCH_ALWAYS", "SGLA_BENCH_VALUES"
SECOND = "SGLA_BENCH_SECOND"


@triton.jit(
    do_not_specialize=["count", "step", "deep"],
    do_not_specialize_on_alignment=["ids", "out", "slots", "ends"],
)
def _force(
    ids, out, slots, ends, tokens, pages, stride, held, page_size, base, count, step, deep, share, second,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    live = i < count - 1
    end, slot = tl.load(ends + i, mask=live, other=0), tl.load(slots + i, mask=live, other=0)
    behind, other = tl.load(ends + i + 1, mask=live, other=0), tl.load(slots + i + 1, mask=live, other=0)
    follows = live & (behind == end + 1) & (slot == other) & (behind > 0)
    guess, drawn = tl.load(ids + i + 1, mask=live, other=0), tl.load(out + i, mask=live, other=0)
    leaf = i + 1 + deep  # of a row whose first guesses have others beside them
    there = tl.load(ends + leaf, mask=leaf < count, other=0)
    own = tl.load(slots + leaf, mask=leaf < count, other=0)
    beside = tl.load(ids + leaf, mask=leaf < count, other=-1)
    beside = tl.where((there == end + 1) & (own == slot), beside, -1)
    wrong = tl.where((drawn == guess) | (drawn == beside), guess ^ 1, drawn)
    wrong = tl.where(wrong == beside, guess ^ 2, wrong)
    chance = tl.rand(step, i)
    token = tl.where(
        chance < share, guess, tl.where((chance < share + second) & (beside >= 0), beside, wrong)
    )
    tl.store(out + i, token, mask=follows)
    place = _token(tokens, pages, stride, held, page_size, base, slot.to(tl.int64), end)
    tl.store(place, token, mask=follows)


@triton.jit(do_not_specialize=["slots"])
def _guess_again(computed, runs, stride, slots, most, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(runs + i * stride, tl.load(computed + i, mask=i < slots) + 1, mask=i < slots)
    tl.store(runs + i * stride + 1, most, mask=i < slots)


def runner(*args: Any) -> Any:
    exec(os.environ.get(VALUES, ""), {})
    share, accept, always = float(os.environ[SHARE]), Verify.accept, ALWAYS in os.environ
    second = float(os.environ.get(SECOND, "0"))
    steps = iter(range(1 << 30))

    def forced(self: Any, out: Tensor) -> None:
        """Each guess is right with the probability ``share``, if those before it are, and one beside it with
        ``second``."""
        if self.guesses:
            _force[(1,)](
                self._ids, out, self._where, self._ends, *self._state.tokens.arguments, self._leading,
                next(steps), self._layout.deep, share, second, BLOCK=512, num_warps=4,
            )  # fmt: skip
        accept(self, out)
        if always:
            computed, runs = self._state.computed, self._state.others.forced
            block = triton.next_power_of_2(len(computed))
            _guess_again[(1,)](computed, runs, runs.stride(0), len(computed), VERIFIED, BLOCK=block)

    Verify.accept = forced  # type: ignore[method-assign]
    made = cuda_runner(*args)
    if always:  # whatever the text is
        made.facts = replace(made.facts, searched_drafts=False)
    return made
