"""The native operations of encoders against their bodies in torch, at every instruction-set level of this
CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from levels import EACH, LEVELS
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.quant.weight import pack
from sgla.worker.encoder import make_batch

pytestmark = pytest.mark.native
VOCAB = 97


def check(
    forward: Callable[[ForwardBatch], Tensor], lengths: list[int], isa: str, tolerance: float = 2e-5
) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCAB, length, dtype=np.int32) for length in lengths]
    batch, _ = make_batch(prompts, [0] * len(prompts))
    expected = forward(batch)
    for threads in (1, 3):
        program = Program.record(forward, ProgramLimits(sum(lengths), 1), threads, isa)
        for _ in range(2):
            torch.testing.assert_close(program.run(batch), expected, atol=tolerance, rtol=1e-5)


def embedding(width: int, scale: float = 1.0) -> Callable[[ForwardBatch], Tensor]:
    table = pack(torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(1)) * scale, "f32")
    return lambda batch: ops.embedding(batch.ids, table)


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize(
    ("heads", "dim", "lengths"),
    [
        (4, 32, [1, 1, 2, 17, 40, 40]),
        (3, 12, [5, 97, 300]),
        (2, 64, [33, 256, 257]),
        (1, 7, [600]),
        (2, 80, [3, 9]),
    ],
)
def test_self_attention(heads: int, dim: int, lengths: list[int], isa: str) -> None:
    source = embedding(3 * heads * dim)
    check(lambda batch: ops.self_attention(source(batch), batch, heads, dim**-0.5), lengths, isa)


def test_scores_far_apart_do_not_overflow() -> None:
    source = embedding(3 * 16, scale=30.0)
    check(lambda batch: ops.self_attention(source(batch), batch, 1, 1.0), [400], LEVELS[0], tolerance=1e-3)


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("width", [1, 31, 384])
def test_layer_norm(width: int, isa: str) -> None:
    source = embedding(width, scale=3.0)
    weight, bias = torch.randn(width), torch.randn(width)
    check(
        lambda batch: ops.layer_norm(source(batch), weight, bias, 1e-12 if width > 1 else 1.0), [3, 30], isa
    )


@pytest.mark.parametrize("isa", EACH)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations(kind: str, isa: str) -> None:
    source = embedding(37, scale=4.0)
    check(lambda batch: ops.activate(source(batch), kind), [50], isa, tolerance=2e-6)
