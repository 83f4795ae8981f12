"""A mixture of experts whose ranks have tokens of their own: each token is sent to the ranks that have its
experts, and what these make of it is sent back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.dispatch import op
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.ops import Biases
from sgla.kernels.placement import Homes
from sgla.kernels.rehearsal import under_way
from sgla.kernels.routing import Gating, Routing

if TYPE_CHECKING:
    from sgla.quant.weight import Weight


class Sent(NamedTuple):
    """R tokens that have come to a rank: x ``[R, d]``; the ``places`` int64 ``[R, k]`` of their experts among
    those here, -1 for one that is elsewhere; ``weights`` float32 ``[R, k]``. ``back``: what ``combine``
    wants to know of them."""

    x: Tensor
    places: Tensor
    weights: Tensor
    back: Any


class Traffic(Protocol):
    """Between tokens and the ranks of their experts. All ranks call the same, one after the other."""

    def open(self, hidden: int, top_k: int, tokens: int) -> None:
        """Take the memory that it needs for so many tokens of a rank, before anybody else does on a GPU.
        Raises ConfigError."""

    def dispatch(self, x: Tensor, slots: Tensor, weights: Tensor, width: int) -> Sent:
        """Send each token of x ``[T, d]`` once to every rank that has one of its experts: ``slots`` int64
        ``[T, k]``, of which each rank has ``width`` (see ``Slots``), ``weights`` float32 ``[T, k]``."""

    def combine(self, y: Tensor, sent: Sent) -> Tensor:
        """Send back y ``[R, d]``, what this rank made of ``sent``: ``[T, d]``, for each token the sum over
        the ranks, in their order."""


class Sender(Protocol):
    """What the op needs of ``dist.Lockstep``."""

    rank: int
    size: int

    @property
    def traffic(self) -> Traffic | None: ...
    def own_tokens(self, rows: int) -> int:
        """How many of so many rows of a step are this rank's tokens; those behind are nobody's."""


class Slots:
    """Where all copies of a mixture's experts are. A slot is a number: the rank times ``width``, and the
    place among the experts there, of which each rank has ``width`` at most."""

    def __init__(self, homes: Homes, width: int) -> None:
        self.width = width
        self.move(homes)

    def move(self, homes: Homes) -> None:
        """``homes``: of each rank its experts, by their places."""
        self._found: list[list[int]] = [[] for _ in range(1 + max(map(max, homes)))]
        for rank, held in enumerate(homes):
            for place, expert in enumerate(held):
                self._found[expert].append(rank * self.width + place)
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, ids: Tensor, first: int) -> Tensor:
        """Slots int64 of experts ids ``[T, k]``. Copies take turns between tokens; ``first``: whose turn it
        is, which ranks begin with by their numbers."""
        if under_way():  # the ids are not there
            return torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
        if self._tables is None or self._tables[0].device != ids.device:
            most = max(map(len, self._found))
            rows = [[found[i % len(found)] for i in range(most)] for found in self._found]
            counts = [len(found) for found in self._found]
            self._tables = torch.tensor(rows, device=ids.device), torch.tensor(counts, device=ids.device)
        (slots, copies), ids = self._tables, ids.long()
        turn = torch.arange(first, first + len(ids), device=ids.device)[:, None] % copies[ids]
        return slots[ids, turn]


def through(
    ranks: Sender,
    slots: Slots,
    x: Tensor,
    routed: Tensor | None,
    top_k: int,
    choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    compute: Callable[[Sent], Tensor],
) -> Tensor:
    """``sent_moe`` where ``choose`` gives weights and experts of x by what the router sees, and ``compute``
    sums what the experts here make of tokens."""
    own, traffic = ranks.own_tokens(len(x)), ranks.traffic
    assert traffic is not None
    if own:
        weights, ids = choose(x[:own], (x if routed is None else routed)[:own])
    else:
        weights, ids = x.new_zeros(0, top_k, dtype=torch.float32), x.new_zeros(0, top_k, dtype=torch.int64)
    sent = traffic.dispatch(x[:own], slots.of(ids, ranks.rank), weights, slots.width)
    # Kernels read nothing of a pair whose weight is 0, and what is elsewhere is not computed.
    sent = sent._replace(weights=sent.weights.masked_fill(sent.places < 0, 0.0))
    y = traffic.combine(compute(sent) if len(sent.x) else sent.x, sent)
    return y if own == len(x) else torch.cat([y, y.new_zeros(len(x) - own, y.shape[1])])


def _like(_: Sender, __: Slots, x: Tensor, *more: Any) -> Tensor:
    return x.new_empty(x.shape)


@op(like=_like)
def sent_moe(
    ranks: Sender,
    slots: Slots,
    x: Tensor,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases,
    routed: Tensor | None,
    counts: ExpertCounts | None,
) -> Tensor:
    """``ops.moe`` of this rank's tokens, whose experts are on any rank: x [T, d] -> [T, d]. ``gate_up`` and
    ``down`` are of those here, the router of all. ``counts``: is told whom this rank's tokens have chosen."""

    def choose(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = ops.route(ops.linear(seen.float(), router), routing, biases)
        if counts is not None:
            counts.add(ids)
        return weights, ids

    def compute(sent: Sent) -> Tensor:
        out, here = sent.x.new_zeros(sent.x.shape, dtype=torch.float32), len(routing.here(router.n))
        for place in sent.places.unique().tolist():
            if place >= 0:
                token, which = (sent.places == place).nonzero(as_tuple=True)
                made = ops.expert(sent.x[token], place, here, gate_up, down, activation, biases)
                out.index_add_(0, token, made.float() * sent.weights[token, which, None])
        return out.to(sent.x.dtype)

    return through(ranks, slots, x, routed, routing.top_k, choose, compute)
