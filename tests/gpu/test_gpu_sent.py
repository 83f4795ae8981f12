"""Tokens that are sent to their experts: kernels of a rank that has some of each token's, and one rank that
is its own peer, by NCCL and by DeepEP where that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gpu_moe import BF16, relative

from sgla.dist.all_to_all import AllToAll
from sgla.dist.deepep import DeepEP
from sgla.kernels import ops
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.gpu import mixture
from sgla.kernels.ops import NO_BIASES
from sgla.kernels.routing import Clamped, Routing
from sgla.kernels.sent_moe import Sent, Slots, Traffic
from sgla.quant.weight import pack

pytest.importorskip("triton")
D, F, EXPERTS = 2048, 768, 32
TOKENS = (1, 2, 3, 16, 17, 100, 700, 2000)
PLAIN = Routing(4, normalize=True)


class Half:
    """To one of two ranks, from the tokens of both: what it makes of them is half of a sum."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def open(self, *_: int) -> None: ...

    def dispatch(self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, width: int) -> Sent:
        here = slots // width == self._rank
        tokens = here.any(1).nonzero()[:, 0]
        places = torch.where(here, slots % width, -1)[tokens]
        return Sent(x[tokens], places, weights[tokens], (tokens, len(x)))

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        tokens, rows = sent.back
        total = y.new_zeros(rows, y.shape[1])
        total[tokens] = y
        return total


class Ranks:
    """The first of ``size``."""

    rank = 0

    def __init__(self, size: int, traffic: Traffic) -> None:
        self.size, self.traffic = size, traffic

    def own_tokens(self, rows: int) -> int:
        return rows


@pytest.fixture(scope="module")
def experts() -> list[torch.Tensor]:
    shapes = [(EXPERTS, D), (EXPERTS * 2 * F, D), (EXPERTS * D, F)]
    return [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for n, k in shapes]


@pytest.fixture
def unwritten() -> Iterator[None]:
    """What no kernel has written is no number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4g128", "mxfp4", "clamped"])
def test_halves_of_the_experts_add_up(experts: list[torch.Tensor], kind: Any, unwritten: None) -> None:
    """One of them has a copy that takes turns, and each choice is counted once."""
    clamped = kind == "clamped"
    kind = "bf16" if clamped else kind
    activation: Any = Clamped(1.702, 1.0) if clamped else "silu"
    homes = [[*range(16), 16], [*range(16, EXPERTS), 0]]
    slots = Slots(homes, 17)
    whole = pack(experts[0], "bf16"), pack(experts[1], kind), pack(experts[2], kind)
    parts: list[Any] = [
        [pack(w.view(EXPERTS, -1, w.shape[1])[held].flatten(0, 1), kind) for w in experts[1:]]
        for held in homes
    ]
    for tokens in TOKENS:
        x = torch.randn(tokens, D, dtype=BF16, device="cuda")
        expected = ops.moe.body(x.float(), *whole, PLAIN, activation)
        made, counts = torch.zeros_like(expected), [ExpertCounts(EXPERTS) for _ in homes]
        for rank, held in enumerate(homes):
            counts[rank].active = True
            routing = Routing(4, normalize=True, held=tuple(held))
            given: Any = whole[0], *parts[rank], routing, activation, NO_BIASES, None, counts[rank]
            made += mixture.run_sent(Ranks(2, Half(rank)), slots, x, *given).float()
        assert relative(made, expected) < (0.15 if kind == "fp8" else 0.02)
        assert sum(counts[0].taken()) == 4 * tokens


@pytest.mark.parametrize("by", ["NCCL", "DeepEP"])
def test_a_rank_that_is_its_own_peer(experts: list[torch.Tensor], by: str, tmp_path: Path) -> None:
    """As without any."""
    if by == "DeepEP":
        pytest.importorskip("deep_ep")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        traffic: Traffic = DeepEP(1) if by == "DeepEP" else AllToAll(0, 1)
        with device:
            traffic.open(D, 4, max(TOKENS))
        weights = pack(experts[0], "bf16"), pack(experts[1], "bf16"), pack(experts[2], "bf16")
        slots = Slots([list(range(EXPERTS))], EXPERTS)
        for tokens in TOKENS:
            x = torch.randn(tokens, D, dtype=BF16, device="cuda")
            expected = ops.moe.body(x.float(), *weights, PLAIN, "silu")
            given: Any = *weights, PLAIN, "silu", NO_BIASES, None, None
            assert relative(mixture.run_sent(Ranks(1, traffic), slots, x, *given), expected) < 0.02
    finally:
        dist.destroy_process_group()
