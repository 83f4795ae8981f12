"""``ops.moe`` on an NVIDIA GPU: which kernels a number of tokens takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import experts, grouped_gemm, integer_experts, token_experts
from sgla.kernels.cuda import router as router_cuda
from sgla.kernels.cuda.router import RoutedExperts
from sgla.kernels.device import this_device
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.integers import KINDS, are_integers
from sgla.kernels.lora_moe import Adapted
from sgla.kernels.ops import NO_BIASES, Biases
from sgla.kernels.placement import reached
from sgla.kernels.routing import Clamped, Gating, Routing
from sgla.kernels.sent_moe import Sender, Sent, Slots, through
from sgla.kernels.triton import e2m1, elementwise, fp8, lora, moe, moe_tiles

if TYPE_CHECKING:
    from sgla.quant.weight import Weight

ROUTED = 16  # tokens up to which norm and router are one kernel
PACKED = (*e2m1.OTHERS, *KINDS)  # storages whose numbers are unpacked on the way
_GATED = ("silu", "gelu_tanh")  # activations that kernels have between both products
MANY = 96  # pairs of an expert, on average, from which on CUDA kernels multiply what is in bfloat16
OURS = 64  # tokens up to which the linear layer before the router is our kernel
FEW = 2  # tokens whose experts are read for each token alone: they seldom share one
FEW_INTEGERS = 4  # the same of integers


class Count(NamedTuple):
    """Of experts: on this rank, and on all that have whole ones. The second says how many pairs each has."""

    here: int
    every: int


class Outputs(Protocol):
    """What the chosen experts made of each token, not summed up yet."""

    def sum(self) -> Tensor: ...

    def add_to(self, residual: Tensor) -> None:
        """Add the sum to ``residual`` in place."""

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum to ``residual`` in place and return its RMSNorm."""


@dataclass(slots=True, eq=False)
class Few:
    """The inner activations of few tokens, times their probabilities. ``pairs``: for a kernel of CUDA."""

    inner: Tensor
    pairs: Tensor | token_experts.Chosen
    down: Weight
    width: int

    def sum(self) -> Tensor:
        return self._down(None)

    def add_to(self, residual: Tensor) -> None:
        self._down(residual)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(self._down(residual), weight, eps)

    def _down(self, out: Tensor | None) -> Tensor:
        if isinstance(self.pairs, Tensor):
            return moe.few_down(self.inner, self.down.data, self.down.scale, self.pairs, self.width, out)
        if are_integers(self.down):
            return integer_experts.down(self.inner, self.pairs, self.down, self.width, out)
        return token_experts.down(self.inner, self.pairs, self.down.data, self.width, out, self.down.scale)


@dataclass(slots=True, eq=False)
class Grouped:
    """The outputs of each pair of token and expert."""

    y: Tensor
    probabilities: Tensor

    def sum(self) -> Tensor:
        return moe.combine(self.y, self.probabilities)

    def add_to(self, residual: Tensor) -> None:
        moe.combine(self.y, self.probabilities, residual)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return moe.combine_norm(self.y, self.probabilities, residual, weight, eps)


def refuses(routing: Routing, activation: Gating, biases: Biases) -> str | None:
    """Why the kernels of CUDA that are made for softmax routers do not serve such a mixture, or None."""
    if not routing.plain:
        return "experts are chosen otherwise than by a softmax over all"
    if any(bias is not None for bias in biases):
        return "the router or the experts have biases"
    return None if activation in _GATED else "the experts' activation is another one"


def run(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases = NO_BIASES,
    rounded: fp8.Rounded | None = None,
    residual: Tensor | None = None,
    routed: Tensor | None = None,
    counts: ExpertCounts | None = None,
    fixed: Tensor | None = None,
    live: Tensor | None = None,
) -> Outputs:
    """``ops.moe`` of ``x``, or of its RMSNorm with ``norm`` (weight, eps); weights plain, e4m3 or packed.
    ``rounded``: x in e4m3, if it is there. ``residual``: x is added into it in place, before the norm.
    ``counts``: is told who is chosen. ``live`` int32[T]: tokens with 0 are padding, for which no expert is
    read but by the kernels that read each token's."""
    assert gate_up.kind == down.kind in ("f32", "bf16", "fp8", *PACKED), gate_up.kind
    count, tokens = Count(len(routing.here(router.n)), routing.experts(router.n)), len(x)
    pairs = tokens * (routing.top_k + routing.common)
    apart = _are_apart(activation, biases)
    one_kernel = not apart and _one_kernel(x, down, pairs, count.here)
    places = experts.places(count.here) if one_kernel else 0
    placed = biases.places is not None
    common = 0 if placed else routing.common if routing.held is None else None
    alone = not apart and common is not None and _alone(x, routing.top_k + routing.common, down)
    integers = not apart and not placed and common is not None
    integers = integers and _few_integers(x, routing.top_k + routing.common, down)
    early = not (alone or integers)
    live = live if early else None
    softmax = routed is None and fixed is None and refuses(routing, activation, biases) is None
    if softmax and tokens > ROUTED and _native(x, router):
        weight, eps = norm or (None, 0.0)
        sent = router_cuda.route(
            x, router.data, routing.top_k, routing.normalize,
            residual=residual, norm=weight, eps=eps, places=places, live=live,
        )  # fmt: skip
    else:
        sent = _route(x, norm, residual, routed, router, routing, biases, places, early, fixed, live)
    if counts is not None:
        counts.add(sent.ids)
    if integers:
        assert are_integers(gate_up)
        chosen = token_experts.Chosen(sent.probabilities, sent.ids, 0)
        inner = integer_experts.gate_up(sent.x, chosen, gate_up, down.k, str(activation))
        return Few(inner, chosen, down, x.shape[1])
    if one_kernel:
        assert activation == "silu" or activation == "gelu_tanh"
        return Grouped(experts.forward(sent, gate_up.data, down.data, activation), sent.probabilities)
    if alone:
        assert activation == "silu" or activation == "gelu_tanh"
        assert common is not None
        chosen = token_experts.Chosen(sent.probabilities, sent.ids, common, placed)
        inner = token_experts.gate_up(sent.x, chosen, gate_up.data, down.k, activation, gate_up.scale)
        return Few(inner, chosen, down, x.shape[1])
    return _computed(sent, count, common or 0, gate_up, down, activation, biases, rounded)


def run_sent(
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
    """``sent_moe``."""
    here = len(routing.here(router.n))
    # Of the tokens that come more pairs are of experts here than of all tokens: as if there were so many.
    count = Count(here, round(here * reached(ranks.size, routing.top_k)))
    everywhere = biases._replace(places=None)

    def choose(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        own = None if routed is None else seen
        found = _route(x, None, None, own, router, routing, everywhere, 0, True)
        if counts is not None:
            counts.add(found.ids)
        return found.probabilities, found.ids

    def compute(sent: Sent) -> Tensor:
        found = RoutedExperts(sent.x, sent.weights, sent.places.int())
        return _computed(found, count, 0, gate_up, down, activation, biases).sum().to(x.dtype)

    return through(ranks, slots, x, routed, routing.top_k, choose, compute)


def _computed(
    sent: RoutedExperts,
    count: Count,
    common: int,
    gate_up: Weight,
    down: Weight,
    activation: Gating,
    biases: Biases,
    rounded: fp8.Rounded | None = None,
) -> Outputs:
    """What the chosen experts make, by kernels that serve any number of rows."""
    apart, x = _are_apart(activation, biases), sent.x
    if gate_up.kind in PACKED:
        rows = None if apart else _unpacked_rows(sent.ids.numel(), count, down, x.shape[1], x.dtype)
        if rows is not None:
            return _unpacked(sent, count, rows, gate_up, down, activation)
        return _packed(sent, count, gate_up, down, activation, biases)
    if apart:
        return _apart(sent, count, gate_up, down, activation, biases)
    assert activation == "silu" or activation == "gelu_tanh"
    return _products(sent, count, common, gate_up, down, activation, rounded)


def _products(
    routed: RoutedExperts,
    count: Count,
    common: int,
    gate_up: Weight,
    down: Weight,
    activation: Literal["silu", "gelu_tanh"],
    rounded: fp8.Rounded | None,
) -> Outputs:
    """The experts' two products. ``common``: so many experts every token has, all on this rank."""
    x, probabilities, ids, _ = routed
    tokens, d = x.shape
    if tokens <= FEW:
        inner = moe.few_gate_up(
            x, probabilities, ids, gate_up.data, gate_up.scale, down.k, activation, common
        )
        return Few(inner, ids, down, d)
    if _by_cuda(ids.numel(), count, down, d):
        groups = moe.group(ids, count.here, grouped_gemm.ROWS)
        inner = grouped_gemm.product(x, gate_up.data, down.k, groups, activation)
        return Grouped(grouped_gemm.product(inner, down.data, d, groups), probabilities)
    tiles = _tiles(len(ids), ids.shape[1], count, down, d)
    groups = moe.group(ids, count.here, tiles.rows)
    inner = moe.experts(
        *(rounded or _input(x, gate_up)),
        gate_up.data,
        gate_up.scale,
        down.k,
        groups,
        tiles.gate_up,
        activation,
    )
    y = moe.experts(*_input(inner, down), down.data, down.scale, d, groups, tiles.down)
    return Grouped(y, probabilities)


def _unpacked(
    routed: RoutedExperts, count: Count, rows: int, gate_up: Weight, down: Weight, activation: Gating
) -> Outputs:
    """Both products of integers by a kernel of CUDA, in blocks of so many pairs."""
    assert are_integers(gate_up)
    assert are_integers(down)
    groups = moe.group(routed.ids, count.here, rows)
    inner = grouped_gemm.product(routed.x, gate_up, down.k, groups, str(activation))
    y = grouped_gemm.product(inner, down, routed.x.shape[1], groups)
    return Grouped(y, routed.probabilities)


def _packed(
    routed: RoutedExperts, count: Count, gate_up: Weight, down: Weight, activation: Gating, biases: Biases
) -> Outputs:
    """Both products of packed experts, each with its biases."""
    x, probabilities, ids, _ = routed
    tiles = _packed_tiles(ids.numel(), count, down, x.itemsize)
    groups = None if tiles.rows is None else moe.group(ids, count.here, tiles.rows)
    if activation in _GATED or isinstance(activation, Clamped):
        inner = e2m1.product(x, gate_up, biases.gate_up, down.k, ids, groups, tiles.gate_up, activation)
    else:
        order = torch.arange(ids.numel(), device=x.device) if groups is None else _order(groups)
        n, rows = gate_up.n // count.here, x[order // ids.shape[1]]
        inner = e2m1.product(rows, gate_up, biases.gate_up, n, ids, groups, tiles.down)
        inner = ops.gated(inner.float(), activation).to(x.dtype)[order]
    y = e2m1.product(inner, down, biases.down, x.shape[1], ids, groups, tiles.down)
    return Grouped(y, probabilities)


def _apart(
    routed: RoutedExperts, count: Count, gate_up: Weight, down: Weight, activation: Gating, biases: Biases
) -> Outputs:
    """Both products grouped, and between and behind them what their kernels do not do."""
    x, probabilities, ids, _ = routed
    d, each = x.shape[1], ids.flatten().long()
    tiles = _tiles(len(ids), ids.shape[1], count, down, d)
    groups = moe.group(ids, count.here, tiles.rows)
    order = _order(groups)
    rows = _input(x[order // groups.top_k], gate_up)
    n = gate_up.n // count.here
    inner = moe.experts(*rows, gate_up.data, gate_up.scale, n, groups, tiles.down).float()
    if biases.gate_up is not None:
        inner = inner + biases.gate_up[each]
    inner = ops.gated(inner, activation).to(x.dtype)[order]
    y = moe.experts(*_input(inner, down), down.data, down.scale, d, groups, tiles.down)
    return Grouped(y if biases.down is None else y + biases.down[each].to(y.dtype), probabilities)


def run_adapted(
    adapted: Adapted,
    x: Tensor,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases,
    routed: Tensor | None,
    counts: ExpertCounts | None,
    fixed: Tensor | None = None,
) -> Outputs:
    """``lora_moe``: both products grouped, and what adapters add to each pair of token and expert."""
    (first, second), rows, sampled = adapted
    count, d = Count(len(routing.here(router.n)), routing.experts(router.n)), x.shape[1]
    x, probabilities, ids, _ = _route(x, None, None, routed, router, routing, biases, 0, True, fixed)
    if counts is not None:
        counts.add(ids)
    pairs, top_k, each = lora.pairs(ids, rows, sampled, second), ids.shape[1], ids.flatten().long()
    if gate_up.kind in PACKED:
        packed = _packed_tiles(ids.numel(), count, down, x.itemsize)
        groups = None if packed.rows is None else moe.group(ids, count.here, packed.rows)
    else:
        tiles = _tiles(len(ids), ids.shape[1], count, down, d)
        groups = moe.group(ids, count.here, tiles.rows)
    order = torch.arange(ids.numel(), device=x.device) if groups is None else _order(groups)

    def product(x: Tensor, w: Weight, bias: Tensor | None, n: int) -> Tensor:
        if w.kind in PACKED:
            return e2m1.product(x, w, bias, n, ids, groups, packed.down)
        assert groups is not None
        y = moe.experts(*_input(x, w), w.data, w.scale, n, groups, tiles.down)
        return y if bias is None else y + bias[each].to(y.dtype)

    parts, own = len(first.sizes) // len(second.sizes), x.repeat_interleave(top_k, 0)
    inner = product(x[order // top_k], gate_up, biases.gate_up, gate_up.n // count.here)
    inner = ops.gated(lora.add_experts(inner, own, first, pairs, parts).float(), activation).to(x.dtype)
    y = product(inner[order], down, biases.down, d)
    return Grouped(lora.add_experts(y, inner, second, pairs, 1), probabilities)


def sizes(mixtures: list[tuple[dict[str, Any], torch.dtype]], most: int, ranks: int) -> list[int]:
    """Numbers of tokens up to ``most`` with which mixtures, each with what it is given and the numbers that
    it sees, take every kernel that they take. They see the tokens of so many ``ranks``."""
    first: dict[Any, int] = {}
    for at, (given, dtype) in enumerate(mixtures):
        for tokens in range(1, most + 1):
            first.setdefault((at, _kind(ranks * tokens, dtype, **given)), tokens)
    return sorted(set(first.values()))


def _kind(
    tokens: int,
    dtype: torch.dtype,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases,
    adapted: Adapted | None = None,
    **_: Any,
) -> Any:
    """What ``run`` and ``run_adapted`` choose by the number of tokens."""
    count, d = Count(len(routing.here(router.n)), routing.experts(router.n)), gate_up.k
    top_k, x = routing.top_k + routing.common, torch.empty(tokens, gate_up.k, dtype=dtype, device="meta")
    pairs, limits = tokens * top_k, [tokens <= n for n in (1, FEW, ROUTED, router_cuda.MAX_ROWS)]
    plain = adapted is None and not _are_apart(activation, biases)
    if plain and _few_integers(x, top_k, down):
        return tokens
    rows: int | None = None
    cuts: list[Any] = []
    unpacked = _unpacked_rows(pairs, count, down, d, dtype) if plain else None
    if unpacked is not None:
        rows = unpacked
    elif gate_up.kind in PACKED:
        rows, *cuts = _packed_tiles(pairs, count, down, dtype.itemsize)
    elif plain and _one_kernel(x, down, pairs, count.here):
        pass
    elif plain and _by_cuda(pairs, count, down, d):
        rows = grouped_gemm.ROWS
    else:
        rows, *cuts = _tiles(tokens, top_k, count, down, d)[1:]
    sorting = None if rows is None else moe.sorting(pairs, count.here, rows)
    return *limits, rows, *cuts, sorting


def _order(groups: moe.Groups) -> Tensor:
    """int64, within bounds even where pairs are another rank's."""
    return groups.order.long().clamp_(0, groups.order.numel() - 1)


def _tiles(tokens: int, top_k: int, count: Count, down: Weight, d: int) -> moe.Tiles:
    size, hopper = down.data.element_size(), this_device().wgmma
    return moe_tiles.tiles_for(tokens, count.every, top_k, down.k, d, size, hopper)


def _by_cuda(pairs: int, count: Count, down: Weight, d: int) -> bool:
    """Whether kernels of CUDA multiply grouped pairs."""
    if pairs < MANY * count.every or down.kind != "bf16" or not this_device().wgmma:
        return False
    return grouped_gemm.refuses(down.k, d) is None


def _packed_tiles(pairs: int, count: Count, down: Weight, itemsize: int) -> e2m1.Tiles:
    timed = are_integers(down) and grouped_gemm.refuses_integers(down.bits, down.group) is None
    return e2m1.tiles_for(pairs, count.every, itemsize, this_device().wgmma, timed)


def _unpacked_rows(pairs: int, count: Count, down: Weight, d: int, dtype: torch.dtype) -> int | None:
    """Of the blocks of pairs that a kernel of CUDA multiplies with integers, or None."""
    if dtype != torch.bfloat16 or not are_integers(down) or not this_device().wgmma:
        return None
    if grouped_gemm.refuses(down.k, d) or grouped_gemm.refuses_integers(down.bits, down.group):
        return None
    return grouped_gemm.rows_for(pairs / count.every)


def _are_apart(activation: Gating, biases: Biases) -> bool:
    """Whether something is done between both products, or behind them, that their kernels do not do."""
    return activation not in _GATED or biases.gate_up is not None or biases.down is not None


def _route(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    routed: Tensor | None,
    router: Weight,
    routing: Routing,
    biases: Biases,
    places: int,
    early: bool,
    fixed: Tensor | None = None,
    live: Tensor | None = None,
) -> RoutedExperts:
    """The experts of each row, by any rule. ``early`` and ``live``: as ``moe.route`` has them."""
    weight, eps = norm or (None, 0.0)
    if residual is not None:
        assert weight is not None
        x, weight = elementwise.add_rms_norm(x, residual, weight, eps, in_place=True)[0], None
    if routed is not None and x.shape[0] <= ROUTED:
        assert weight is None
        _, logits = moe.norm_router(routed.contiguous(), None, eps, router.data, early)
    elif routed is not None:
        assert weight is None
        logits = _logits(routed, router.data)
    elif x.shape[0] <= ROUTED:
        x, logits = moe.norm_router(x, weight, eps, router.data, early)
    else:
        x = x if weight is None else elementwise.rms_norm(x, weight, eps)
        logits = _logits(x, router.data)
    done = torch.empty(places, dtype=torch.int32, device=x.device) if places else None
    if fixed is not None or moe.route_refuses(routing) is not None:
        probabilities, ids = ops.route(logits, routing, biases, fixed)
        if biases.places is not None:
            probabilities, ids = _here(probabilities, ids, biases.places)
        if live is not None:
            padding = (live == 0)[:, None]
            probabilities, ids = probabilities.masked_fill(padding, 0), ids.masked_fill(padding, -1)
        return RoutedExperts(x, probabilities, ids.int(), done if done is None else done.zero_())
    return RoutedExperts(x, *moe.route(logits, routing, biases, done, early, live), done)


def _here(probabilities: Tensor, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernel has them: places on this rank in the place of experts, or -1."""
    home, token = places[ids], torch.arange(len(ids), device=ids.device)[:, None]
    here = ((home & 0xFFFF) > 0) & (token % (home >> 16 & 0xFF) == home >> 24)
    return probabilities * here, ((home & 0xFFFF) - 1).masked_fill(~here, -1)


def _one_kernel(x: Tensor, down: Weight, pairs: int, count: int) -> bool:
    """Whether one CUDA kernel computes both products."""
    if down.kind != "bf16" or x.dtype != torch.bfloat16 or not this_device().wgmma or len(x) <= FEW:
        return False
    return experts.refuses(pairs, down.k, x.shape[1], count) is None


def _alone(x: Tensor, top_k: int, down: Weight) -> bool:
    """Whether kernels of CUDA read each token's experts."""
    if down.kind not in ("bf16", "fp8") or x.dtype != torch.bfloat16 or len(x) > FEW:
        return False
    shape = len(x), top_k, x.shape[1], down.k, down.data.itemsize
    return this_device().wgmma and token_experts.refuses(*shape) is None


def _few_integers(x: Tensor, top_k: int, down: Weight) -> bool:
    """The same for integers."""
    if len(x) > FEW_INTEGERS or not are_integers(down) or x.dtype != torch.bfloat16:
        return False
    shape = len(x), top_k, x.shape[1], down.k, down.bits, down.group
    return this_device().wgmma and integer_experts.refuses(*shape) is None


def _native(x: Tensor, router: Weight) -> bool:
    """Whether the CUDA router has these shapes."""
    few = x.shape[0] <= router_cuda.MAX_ROWS and x.dtype == torch.bfloat16
    return few and this_device().wgmma and router_cuda.refuses(router.n, x.shape[1]) is None


def _input(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """x in the numbers that meet ``weight``, and their scales."""
    return fp8.quantize(x) if weight.kind == "fp8" else (x, None)


def _logits(x: Tensor, router: Tensor) -> Tensor:
    """float32 ``[T, E]``: rounded to bfloat16, near experts would tie."""
    if x.dtype == torch.float32:
        return x @ router.t()
    return torch.mm(x, router.t(), out_dtype=torch.float32)
