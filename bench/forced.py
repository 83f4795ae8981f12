"""A worker on a GPU of whose guesses a given share is right, whatever the model draws, so that what they cost
and save can be measured with random weights. The text is none.

``bench/drafts.py --accept SHARE`` starts it in the place of the server's own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from sgla.worker.start_gpu import cuda_runner
from sgla.worker.verify import Verify

SHARE = "SGLA_BENCH_ACCEPT"  # the environment's variable


def runner(*args: Any) -> Any:
    share, noise = float(os.environ[SHARE]), torch.Generator("cuda")
    noise.manual_seed(0)
    accept = Verify.accept

    def forced(self: Any, out: Tensor) -> None:
        """Each guess is right with the probability ``share``, if those before it are."""
        if self.guesses:
            force(self, out, share, noise)
        accept(self, out)

    Verify.accept = forced  # type: ignore[method-assign]
    return cuda_runner(*args)


def force(verify: Any, out: Tensor, share: float, noise: torch.Generator) -> None:
    """Make ``out`` int32[*] what the guesses behind are, or something else."""
    ids, ends, slots = (column[: verify._leading] for column in (verify._ids, verify._ends, verify._where))
    guess, drawn = ids[1:], out[: verify._leading - 1]
    follows = (ends[1:] == ends[:-1] + 1) & (slots[1:] == slots[:-1]) & (ends[1:] > 0)
    right = torch.rand(len(guess), generator=noise, device="cuda") < share
    wrong = torch.where(drawn == guess, guess ^ 1, drawn)
    drawn.copy_(torch.where(follows, torch.where(right, guess, wrong), drawn))
    verify._state.tokens[slots[:-1].long(), ends[:-1].long()] = drawn
