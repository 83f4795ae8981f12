"""``ops.moe`` on an NVIDIA GPU: which kernels a number of tokens takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sgla.kernels.cuda import experts, grouped_gemm
from sgla.kernels.cuda import router as router_cuda
from sgla.kernels.device import this_device
from sgla.kernels.ops import Activation
from sgla.kernels.triton import elementwise, fp8, moe, moe_tiles

if TYPE_CHECKING:
    from sgla.quant.weight import Weight

ROUTED = 16  # tokens up to which norm and router are one kernel
MANY = 96  # pairs of an expert, on average, from which on CUDA kernels multiply what is in bfloat16
OURS = 64  # tokens up to which the linear layer before the router is our kernel
FEW = 2  # tokens whose experts are read for each token alone: they seldom share one


class Outputs(Protocol):
    """What the chosen experts made of each token, not summed up yet."""

    def sum(self) -> Tensor: ...

    def add_to(self, residual: Tensor) -> None:
        """Add the sum to ``residual`` in place."""

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum to ``residual`` in place and return its RMSNorm."""


@dataclass(slots=True, eq=False)
class Few:
    """The inner activations of few tokens, times their probabilities."""

    inner: Tensor
    ids: Tensor
    down: Weight
    width: int

    def sum(self) -> Tensor:
        return self._down(None)

    def add_to(self, residual: Tensor) -> None:
        self._down(residual)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(self._down(residual), weight, eps)

    def _down(self, out: Tensor | None) -> Tensor:
        return moe.few_down(self.inner, self.down.data, self.down.scale, self.ids, self.width, out)


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


def run(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    top_k: int,
    normalize: bool,
    activation: Activation,
    rounded: fp8.Rounded | None = None,
    residual: Tensor | None = None,
) -> Outputs:
    """``ops.moe`` of ``x``, or of its RMSNorm with ``norm`` (weight, eps); weights plain or e4m3.
    ``rounded``: x in e4m3, if it is there. ``residual``: x is added into it in place, before the norm."""
    assert gate_up.kind == down.kind in ("f32", "bf16", "fp8"), gate_up.kind
    tokens, d = x.shape
    pairs = tokens * top_k
    native = _native(x, router) and down.kind == "bf16" and tokens > FEW
    native = native and experts.refuses(pairs, down.k, d, router.n) is None
    choice = _route(x, norm, residual, router, top_k, normalize, experts.places(router.n) if native else 0)
    x, probabilities, chosen, *_ = choice
    if tokens <= FEW:
        inner = moe.few_gate_up(x, probabilities, chosen, gate_up.data, gate_up.scale, down.k, activation)
        return Few(inner, chosen, down, d)
    if native:
        return Grouped(experts.forward(choice, gate_up.data, down.data, activation), probabilities)
    hopper = this_device().wgmma
    if (
        pairs >= MANY * router.n
        and down.kind == "bf16"
        and hopper
        and grouped_gemm.refuses(down.k, d) is None
    ):
        groups = moe.group(chosen, router.n, grouped_gemm.ROWS)
        inner = grouped_gemm.product(x, gate_up.data, down.k, groups, activation)
        return Grouped(grouped_gemm.product(inner, down.data, d, groups), probabilities)
    tiles = moe_tiles.choose(tokens, router.n, top_k, down.k, d, down.data.element_size(), hopper)
    groups = moe.group(chosen, router.n, tiles.rows)
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


def _route(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    router: Weight,
    top_k: int,
    normalize: bool,
    places: int,
) -> router_cuda.Choice:
    weight, eps = norm or (None, 0.0)
    if _native(x, router) and x.shape[0] > ROUTED:
        return router_cuda.choose(
            x, router.data, top_k, normalize, residual=residual, norm=weight, eps=eps, places=places
        )
    if residual is not None:
        assert weight is not None
        x, weight = elementwise.add_rms_norm(x, residual, weight, eps, in_place=True)[0], None
    if x.shape[0] <= ROUTED:
        x, logits = moe.norm_router(x, weight, eps, router.data)
    else:
        x = x if weight is None else elementwise.rms_norm(x, weight, eps)
        logits = _logits(x, router.data)
    done = torch.empty(places, dtype=torch.int32, device=x.device) if places else None
    return router_cuda.Choice(x, *moe.route(logits, top_k, normalize, done), done)


def _native(x: Tensor, router: Weight) -> bool:
    """Whether the CUDA kernels have these shapes."""
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
