"""The operations of ``kernels/ops.py`` on an NVIDIA GPU: Triton, cuBLAS, and CUDA C++ for small batches.

``GpuOps`` is the dispatcher of one model. With at most ``skinny_gemm.MAX_ROWS`` tokens (set by
``fused``), norms and linear layers are held back until their consumer is known, so that

    add into the residual -> RMSNorm -> linear -> gate activation

become the prologues and epilogues of two kernels instead of four. The held-back values are ``Lazy`` objects
that only these operations look into; the residual stream is then updated in place. With more rows a linear
layer does the activation behind it, or adds into the residual and leaves an RMSNorm to the next one, all but
its scale (``LazyScale``); for long prompts that of q, k and v prepares the heads and stores to the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import mixture, ops
from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.cuda.router import MAX_ROWS
from sgla.kernels.device import this_device
from sgla.kernels.dispatch import Lowerings, Op, using
from sgla.kernels.lazy import Lazy, force
from sgla.kernels.ops import Activation, KVLayer, Norm, Ranks
from sgla.kernels.triton import elementwise, fp8, invariant

if TYPE_CHECKING:
    from sgla.layers.batch import ForwardBatch
    from sgla.quant.weight import Weight


R = TypeVar("R")
WIDE = 8 << 20  # elements of a weight


class Attend(Protocol):
    """Attention over the pages: ``ops.attention``."""

    def __call__(
        self, q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float, window: int, softcap: float
    ) -> Tensor: ...


class FusedDecode(Protocol):
    """A decode kernel that does the work of ``ops.qk_norm_rope_store`` too."""

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: Any,
        scale: float,
        window: int,
        softcap: float,
        projection: Projection | None = None,
    ) -> Tensor: ...


@dataclass(slots=True)
class Output:
    """Where logits go, and who draws from them: ``drawn``, if that was the layer which computes them."""

    out: Tensor | None
    draw: batch_gemm.Draw | None
    drawn: bool = False


@dataclass(slots=True, eq=False)
class LazyNorm(Lazy):
    """RMSNorm of ``x`` that the next linear computes on the way."""

    x: Tensor
    weight: Tensor
    eps: float

    def compute(self) -> Tensor:
        return elementwise.rms_norm(self.x, self.weight, self.eps)


@dataclass(slots=True, eq=False)
class LazyLinear(Lazy):
    """A linear layer whose epilogue is not known yet."""

    x: Tensor | LazyNorm
    weight: Tensor
    scale: Tensor | None  # of an e4m3 weight's rows
    bias: Tensor | None

    @property
    def fusable(self) -> bool:
        """Whether our kernel beats a separate norm and cuBLAS:
        beyond 8 rows only where the weight is small."""
        rows = self.x.x.shape[0] if isinstance(self.x, LazyNorm) else self.x.shape[0]
        return rows <= 8 or not isinstance(self.x, LazyNorm) or self.weight.numel() <= WIDE

    def run(self, epilogue: int = skinny_gemm.STORE, out: Tensor | None = None) -> Tensor:
        x = self.x
        if isinstance(x, LazyNorm):
            return skinny_gemm.linear(
                x.x, self.weight, scale=self.scale, norm=x.weight, eps=x.eps, bias=self.bias, epilogue=epilogue, out=out
            )  # fmt: skip
        return skinny_gemm.linear(
            x, self.weight, scale=self.scale, bias=self.bias, epilogue=epilogue, out=out
        )

    def compute(self) -> Tensor:
        if self.fusable:
            return self.run()
        if self.scale is not None:
            return fp8.linear(rounded(self.x), self.weight, self.scale, self.bias)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(force(self.x), self.weight, bias)


@dataclass(slots=True, eq=False)
class LazyScale(Lazy):
    """An RMSNorm of which the next linear layer does the rest."""

    rows: batch_gemm.Unscaled
    norm: Norm

    def compute(self) -> Tensor:
        return elementwise.rms_norm(*self.norm)


@dataclass(slots=True, eq=False)
class LazyBatch(Lazy):
    """A linear layer of more rows, whose epilogue is not known yet."""

    x: Tensor | LazyScale
    weight: Tensor
    bias: Tensor | None

    def run(self, epilogue: int, out: Tensor | None = None) -> Tensor | None:
        """None: the kernel does not gain."""
        gated = epilogue in (batch_gemm.SILU, batch_gemm.GELU)
        if epilogue != batch_gemm.FLOAT32 and self._long(gated):
            return prompt_gemm.linear(force(self.x), self.weight, bias=self.bias, epilogue=epilogue)
        config = self._choose(gated)
        if config is None:
            return None
        return batch_gemm.linear(self._rows, self.weight, config, bias=self.bias, epilogue=epilogue, out=out)

    def logits(self, output: Output) -> Tensor | None:
        """As ``run``, with the draw if there is one."""
        x, draw = force(self.x), output.draw
        config = None if draw is None else batch_gemm.choose_draw(x.shape[0])
        if config is None:
            return self.run(batch_gemm.FLOAT32, output.out)
        output.drawn = True
        return batch_gemm.linear(
            x, self.weight, config, bias=self.bias, epilogue=batch_gemm.DRAW, out=output.out, draw=draw
        )

    def add_norm(self, norm: Norm) -> LazyScale | None:
        """The norm, whose residual is added to in place. None: the kernel does not gain."""
        config = self._choose()
        if config is None:
            return None
        return LazyScale(batch_gemm.linear_add(self._rows, self.weight, config, norm, self.bias), norm)

    def heads(
        self, positions: Tensor, projection: Projection, kv: KVLayer, out_loc: Tensor, in_place: bool
    ) -> Tensor | None:
        """See ``ops.qk_norm_rope_store``. None: no kernel does it on the way."""
        if not (self._long() and prompt_gemm.holds_heads(projection, kv)):
            return None
        return prompt_gemm.linear_heads(
            force(self.x), self.weight, positions, projection, kv, out_loc, in_place, self.bias
        )

    @property
    def _rows(self) -> Tensor | batch_gemm.Unscaled:
        return self.x.rows if isinstance(self.x, LazyScale) else self.x

    @property
    def _shape(self) -> tuple[int, int, int]:
        x = self.x.rows.x if isinstance(self.x, LazyScale) else self.x
        return x.shape[0], *self.weight.shape

    def _long(self, gated: bool = False) -> bool:
        return prompt_gemm.refuses(*self._shape, gated) is None

    def _choose(self, gated: bool = False) -> batch_gemm.Config | None:
        return batch_gemm.choose(*self._shape, gated)

    def compute(self) -> Tensor:
        y = self.run(batch_gemm.STORE)
        return self.plain() if y is None else y

    def plain(self) -> Tensor:
        """By the library."""
        x = force(self.x)
        return F.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))


@dataclass(slots=True, eq=False)
class LazyQuery(Lazy):
    """The projection's output, which an attention kernel that can makes q, k and v of."""

    qkv: Tensor
    positions: Tensor
    projection: Projection
    kv: KVLayer
    out_loc: Tensor
    in_place: bool

    def compute(self) -> Tensor:
        p = self.projection
        return elementwise.qk_norm_rope_store(
            self.qkv, self.positions, p.cos_sin, p.q_norm, p.k_norm, p.eps,
            self.kv.k, self.kv.v, self.out_loc, self.in_place, (self.kv.k_scale, self.kv.v_scale),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class LazySum(Lazy):
    """A sum over the ranks that an add and a norm may follow."""

    x: Tensor
    ranks: Ranks

    def compute(self) -> Tensor:
        self.ranks.all_reduce(self.x)
        return self.x


@dataclass(slots=True, eq=False)
class LazyActivation(Lazy):
    """A gated activation whose result may be wanted in e4m3."""

    x: Tensor
    kind: Activation

    def compute(self) -> Tensor:
        return elementwise.act_mul(self.x, self.kind)


@dataclass(slots=True, eq=False)
class Both(Lazy):
    """A tensor, and its values in e4m3."""

    x: Tensor
    rounded: fp8.Rounded

    def compute(self) -> Tensor:
        return self.x


def rounded(x: Any) -> fp8.Rounded:
    """What is behind a held-back value, in e4m3."""
    if isinstance(x, Both):
        return x.rounded
    if isinstance(x, LazyActivation):
        return fp8.act_mul_quantize(x.x, x.kind)
    return fp8.quantize(force(x))


LOWERINGS = Lowerings()


class GpuOps:
    """The ops of one model, computing at once (or, fused, a little later).
    An op without a function here runs its body.

    ``deterministic``: nothing is fused, and a token's results do not depend on the others. ``e4m3``: linear
    layers have such weights; ``mixtures``: layers have mixtures of experts."""

    def __init__(
        self, attend: Attend, deterministic: bool = False, e4m3: bool = False, mixtures: bool = False
    ) -> None:
        self.attend, self._deterministic, self._e4m3, self._mixtures = attend, deterministic, e4m3, mixtures
        self._tokens: int | None = None  # fused: what the rest of the forward pass is for
        self._decode: FusedDecode | None = None
        self._output: Output | None = None  # the next linear is the output layer
        self._shapes: set[tuple[int, int]] = set()  # n and k of the others that were ``LazyBatch``

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        made = LOWERINGS.run(self, op, args, kwargs)
        return op.body(*args, **kwargs) if made is NotImplemented else made

    def sizes(self, most: int) -> list[int]:
        """Numbers of tokens up to ``most`` with which the linear layers that were called take every kernel
        that they take with more than ``batch_gemm.MAX_ROWS``. Those come and go with how well tiles fill the
        GPU."""
        first: dict[tuple[Any, ...], int] = {}
        for m in range(batch_gemm.MAX_ROWS + 1, most + 1):
            for n, k in self._shapes:
                ways = [
                    prompt_gemm.refuses(m, n, k, g) is None or batch_gemm.choose(m, n, k, g)
                    for g in (False, True)
                ]
                first.setdefault((n, k, *ways), m)
        return sorted(set(first.values()))

    @contextmanager
    def fused(self, tokens: int, decode: FusedDecode | None = None) -> Iterator[None]:
        """Fuse if a forward pass of ``tokens`` tokens gains from it. ``decode``: all rows are decode rows,
        and this kernel takes q, k and v from the projection."""
        able = this_device().wgmma and not self._deterministic
        self._tokens, self._decode = tokens if able else None, decode
        try:
            with using(self):
                yield
        finally:
            self._tokens, self._decode = None, None

    @property
    def _fuse(self) -> bool:
        return self._tokens is not None and self._tokens <= skinny_gemm.MAX_ROWS

    @property
    def _batched(self) -> bool:
        return self._tokens is not None and self._tokens >= batch_gemm.MIN_ROWS

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Use another attention for a while."""
        kept, self.attend = self.attend, attend
        try:
            yield
        finally:
            self.attend = kept

    @contextmanager
    def float32_output(
        self, out: Tensor | None = None, draw: batch_gemm.Draw | None = None
    ) -> Iterator[Output]:
        """Linear layers give float32, as logits should be, if possible in ``out``.
        If possible they do ``draw`` too."""
        self._output = Output(out, draw)
        try:
            with using(self):
                yield self._output
        finally:
            self._output = None

    @LOWERINGS.of(ops.embedding)
    def embedding(self, ids: Tensor, weight: Tensor | Weight, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Tensor):
            return elementwise.take_rows(weight, ids, scale)
        if weight.kind in ("f32", "bf16"):
            return elementwise.take_rows(weight.data, ids, scale)
        return (weight.take(ids) * scale).to(torch.bfloat16)

    @LOWERINGS.of(ops.rms_norm)
    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        x = force(x)
        return LazyNorm(x, weight, eps) if self._fuse else elementwise.rms_norm(x.contiguous(), weight, eps)

    @LOWERINGS.of(ops.add_rms_norm)
    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> tuple[Any, Tensor]:
        residual = force(residual)
        if self._fuse and isinstance(x, LazyLinear):
            x.run(skinny_gemm.ADD, out=residual)
            return LazyNorm(residual, weight, eps), residual
        if isinstance(x, mixture.Few | mixture.Grouped):
            if not self._fuse:
                return x.add_norm(residual, weight, eps), residual
            x.add_to(residual)
            return LazyNorm(residual, weight, eps), residual
        if isinstance(x, LazyBatch) and not self._e4m3 and not self._mixtures:
            lazy = x.add_norm(Norm(residual, weight, eps))
            if lazy is not None:
                return lazy, residual
        if isinstance(x, LazySum):
            y = x.ranks.all_reduce_norm(x.x, Norm(residual, weight, eps))
            if y is not None:
                return y, residual
        if self._mixtures and not self._e4m3 and residual.shape[0] <= MAX_ROWS:
            # With more rows our kernel's exchange of sums would wait behind the experts' first weights.
            plain = isinstance(x, LazyBatch) and residual.shape[0] > mixture.OURS
            return mixture.AddNorm(x.plain() if plain else force(x), Norm(residual, weight, eps)), residual
        if self._e4m3 and not self._fuse:
            norm, total, small = fp8.add_norm_quantize(force(x), residual, weight, eps)
            return Both(norm, small), total
        return elementwise.add_rms_norm(force(x), residual, weight, eps)

    @LOWERINGS.of(ops.linear)
    def linear(self, x: Any, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None) -> Any:
        if addend is not None:  # which the fused kernels do not know
            return self._product(x, w, bias).add_(force(addend))
        dense, e4m3 = w.kind == "bf16", w.kind == "fp8"
        x = force(x) if isinstance(x, LazySum) else x
        output = self._output
        if self._batched and dense and batch_gemm.refuses(w.n, w.k) is None:
            if output is None:
                self._shapes.add((w.n, w.k))
            later = isinstance(x, LazyScale) and output is None
            batch = LazyBatch(x if later else force(x).contiguous(), w.data, bias)
            y = batch if output is None else batch.logits(output)
            if y is not None:
                return y
        if self._fuse and (dense or e4m3) and w.k % (128 if e4m3 else 64) == 0 and w.n >= 64:
            x = x if isinstance(x, LazyNorm) else force(x)
            if isinstance(x, LazyNorm) or x.dtype == torch.bfloat16:
                lazy = LazyLinear(x, w.data, w.scale, bias)
                if output is None:
                    return lazy
                if lazy.fusable:
                    return lazy.run(skinny_gemm.FLOAT32, output.out)
        return self._product(x, w, bias)

    def _product(self, x: Any, w: Weight, bias: Tensor | None) -> Tensor:
        """A linear layer by itself."""
        dense, e4m3, output = w.kind == "bf16", w.kind == "fp8", self._output
        aligned = w.n % 16 == w.k % 16 == 0 and output is None
        if e4m3 and w.scale is not None and aligned and not self._deterministic:
            return fp8.linear(rounded(x), w.data, w.scale, bias)
        x = force(x)
        weight = w.data if dense or w.kind == "f32" else w.dequant(x.dtype)
        if self._deterministic:
            out = None if output is None else output.out
            if output is not None and out is None:
                out = x.new_empty(x.shape[0], w.n, dtype=torch.float32)
            return invariant.linear(x, weight, bias, out)
        if output is not None and weight.dtype == torch.bfloat16:
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=output.out)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @LOWERINGS.of(ops.qk_norm_rope_store)
    def qk_norm_rope_store(
        self,
        qkv: Any,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Any:
        in_place = getattr(self.attend, "in_place", False)
        projection = Projection(cos_sin, q_norm, k_norm, eps)
        if isinstance(qkv, LazyBatch) and self._decode is None:
            q = qkv.heads(positions, projection, kv, out_loc, in_place)
            if q is not None:
                return q
        lazy = LazyQuery(force(qkv), positions, projection, kv, out_loc, in_place)
        return lazy if self._decode is not None and cos_sin.shape[1] == kv.k.shape[-1] else lazy.force()

    @LOWERINGS.of(ops.attention)
    def attention(
        self, q: Any, kv: KVLayer, batch: ForwardBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        if isinstance(q, LazyQuery):
            assert self._decode is not None
            return self._decode.forward(q.qkv, kv, batch, scale, window, softcap, q.projection)
        return self.attend(q, kv, batch, scale, window, softcap)

    @LOWERINGS.of(ops.act_mul)
    def act_mul(self, x: Any, kind: Activation) -> Any:
        if isinstance(x, LazyLinear) and x.bias is None and x.fusable:
            return x.run(skinny_gemm.SILU if kind == "silu" else skinny_gemm.GELU)
        if isinstance(x, LazyBatch) and x.bias is None and x.weight.shape[0] % 16 == 0:
            y = x.run(batch_gemm.SILU if kind == "silu" else batch_gemm.GELU)
            if y is not None:
                return y
        return LazyActivation(force(x), kind)

    @LOWERINGS.of(ops.layer_norm)
    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = force(x)
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)

    @LOWERINGS.of(ops.activate)
    def activate(self, x: Any, kind: str) -> Tensor:
        return ops.activation(force(x), kind)

    @LOWERINGS.of(ops.moe)
    def moe(
        self,
        x: Any,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        normalize: bool,
        activation: Activation,
    ) -> mixture.Few | mixture.Grouped:
        norm: tuple[Tensor, float] | None = None
        residual: Tensor | None = None
        if isinstance(x, LazyNorm):
            x, norm = x.x, (x.weight, x.eps)
        elif isinstance(x, mixture.AddNorm):
            x, residual, norm = x.x, x.norm.residual, (x.norm.weight, x.norm.eps)
        small = x.rounded if isinstance(x, Both) else None
        return mixture.run(
            force(x), norm, router, gate_up, down, top_k, normalize, activation, small, residual
        )

    @LOWERINGS.of(ops.gather)
    def gather(self, x: Any, rows: Tensor) -> Tensor:
        if self._tokens is not None:
            self._tokens = len(rows)
        return elementwise.take_rows(force(x), rows)

    @LOWERINGS.of(ops.all_reduce)
    def all_reduce(self, x: Any, ranks: Ranks) -> Any:
        return LazySum(force(x), ranks)

    @LOWERINGS.of(ops.inplace)
    def inplace(self, fn: Callable[[Tensor], None], x: Any) -> Tensor:
        x = force(x)
        fn(x)
        return x

    @LOWERINGS.of(ops.call)
    def call(self, fn: Callable[[Tensor, Tensor], None], x: Any, width: int) -> Tensor:
        x = force(x)
        out = x.new_empty(x.shape[0], width)
        fn(x, out)
        return out
