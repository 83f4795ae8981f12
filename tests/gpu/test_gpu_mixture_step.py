"""The kernel of a whole decode step of a mixture of experts against torch in float32, and within the
runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gpu_decode_step import (
    LENGTHS,
    VOCAB,
    Decoder,
    compare,
    compare_in_runner,
    norm,
    weight,
)
from test_gpu_moe import TINY
from test_gpu_runner import make
from torch import Tensor

pytest.importorskip("triton")
CLEAR = 0.03  # the last chosen logit before the first that is not, in standard deviations


class Mixture(Decoder):
    gap = 0.0  # the smallest one of the last oracle

    def layer(self) -> Any:
        from sgla.kernels.cuda.mixture_step import MixtureWeights

        shape, hidden = self.shape, self.shape.hidden
        heads = (norm(128), norm(128)) if shape.qk_norm else (None, None)
        return MixtureWeights(
            weight((shape.heads + 2 * shape.kv_heads) * 128, hidden), weight(hidden, shape.heads * 128),
            weight(shape.experts, hidden), weight(shape.experts * 2 * shape.inner, hidden),
            weight(shape.experts * hidden, shape.inner), norm(hidden), norm(hidden), *heads,
        )  # fmt: skip

    def mlp(self, w: Any, x: Tensor) -> Tensor:
        logits = w.router.float() @ x
        best = logits.sort(descending=True)
        self.gap = min(self.gap, float((best.values[7] - best.values[8]) / logits.std()))
        chosen = best.indices[:8]
        p = best.values[:8].softmax(0) if self.shape.normalize else logits.softmax(0)[chosen]
        gate_up = w.gate_up.view(self.shape.experts, -1, self.shape.hidden)[chosen].float()
        down = w.down.view(self.shape.experts, self.shape.hidden, -1)[chosen].float()
        gate, up = (gate_up @ x).chunk(2, -1)
        return torch.einsum("e,edf,ef->d", p, down, F.silu(gate) * up)

    def oracle(self, token: int, length: int) -> tuple[Tensor, Tensor]:
        self.gap = float("inf")
        return super().oracle(token, length)

    def clear(self, token: int, length: int) -> bool:
        """Whether rounding cannot change what is chosen."""
        self.oracle(token, length)
        return self.gap > CLEAR


@pytest.mark.parametrize(
    ("inner", "normalize", "qk_norm", "copied"),
    [(768, True, True, False), (768, True, True, True), (512, False, False, False)],
)
def test_step_equals_torch(inner: int, normalize: bool, qk_norm: bool, copied: bool) -> None:
    from sgla.kernels.cuda.mixture_step import MixtureShape

    torch.manual_seed(0)
    decoder = Mixture(MixtureShape(2048, 32, 4, inner, 128, 8, normalize, qk_norm, 16, copied=copied), 4200)
    for length in LENGTHS:
        token = next(token for token in range(VOCAB) if decoder.clear(token, length))
        compare(decoder, token, length)


def test_runner_decodes_one_row_as_it_does_many() -> None:
    compare_in_runner(make(TINY))
    torch.cuda.empty_cache()
