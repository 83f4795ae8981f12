"""A kernel for each op on an NVIDIA GPU: Triton, cuBLAS and CUDA C++, for every shape and number of tokens.

Kernels that do several ops at once are put in their place by the rules of ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import compressed, crossing, hyper, ops, picking
from sgla.kernels.batch import out_loc_of
from sgla.kernels.cuda import act_mul, batch_gemm, prompt_gemm
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.dispatch import Lowerings, Op
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.gpu import compressed as entries
from sgla.kernels.gpu import e4m3, integers, invariant, mixture, states
from sgla.kernels.gpu import picked as picks
from sgla.kernels.integers import are_integers
from sgla.kernels.lora import Rows, Stack, lora, lora_embedding
from sgla.kernels.lora_moe import Adapted, lora_moe
from sgla.kernels.ops import NO_BIASES, Biases, KVLayer, Scoring, StateLayer, TimeSteps
from sgla.kernels.rehearsal import under_way
from sgla.kernels.routing import Activation, Gating, Routing
from sgla.kernels.sent_moe import sent_moe
from sgla.kernels.triton import delta, e2m1, elementwise, fp8, ssd, turning
from sgla.kernels.triton import hyper as streams_triton
from sgla.kernels.triton import latent as latents
from sgla.kernels.triton import lora as adapters

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch
    from sgla.quant.weight import Weight

R = TypeVar("R")
LOWERINGS = Lowerings()


class Attend(Protocol):
    """Attention over the pages: ``ops.attention``. ``in_place``: it wants q, k and v side by side in this
    step."""

    @property
    def in_place(self) -> bool: ...

    def __call__(self, q: Tensor, kv: KVLayer, batch: Any, scoring: Scoring) -> Tensor: ...


class FusedDecode(Protocol):
    """A decode kernel that does the work of ``ops.qk_norm_rope_store`` too, where it ``fuses``."""

    def fuses(self, kv: KVLayer) -> bool: ...

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: Any,
        scoring: Scoring,
        projection: Projection | None = None,
    ) -> Tensor: ...


def _rows(x: Tensor) -> Tensor:
    """x in memory as kernels read it: rows of two dims may lie apart."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()


class GpuOps:
    """The ops of one model. An op without a function here runs its body.

    ``deterministic``: a token's results do not depend on the others.
    """

    def __init__(self, attend: Attend, deterministic: bool = False) -> None:
        self.attend, self.deterministic = attend, deterministic

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        made = LOWERINGS.run(self, op, args, kwargs)
        return op.body(*args, **kwargs) if made is NotImplemented else made

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Use another attention for a while."""
        kept, self.attend = self.attend, attend
        try:
            yield
        finally:
            self.attend = kept

    @LOWERINGS.of(ops.embedding)
    def embedding(self, ids: Tensor, weight: Tensor | Weight, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Tensor):
            return elementwise.take_rows(weight, ids, scale)
        if weight.kind in ("f32", "bf16"):
            return elementwise.take_rows(weight.data, ids, scale)
        return (weight.take(ids) * scale).to(torch.bfloat16)

    @LOWERINGS.of(ops.rms_norm)
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(_rows(x), weight, eps)

    @LOWERINGS.of(ops.copied)
    def copied(self, x: Tensor, to: Tensor) -> Tensor:
        return elementwise.copy_rows(_rows(x), to)

    @LOWERINGS.of(ops.rms_norm_beside)
    def rms_norm_beside(self, x: Tensor, first: Tensor, second: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm_beside(_rows(x), first, second, eps)

    @LOWERINGS.of(ops.add_rms_norm)
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    @LOWERINGS.of(ops.linear)
    def linear(
        self, x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        y = self._product(x, w, bias)
        return y if addend is None else y.add_(addend)

    @LOWERINGS.of(ops.logits)
    def logits(
        self,
        x: Tensor,
        w: Weight,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """If possible in ``out``."""
        y = self._float32(x, w, bias, out)
        return y if addend is None else y.add_(addend)

    def _product(self, x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
        if w.kind == "fp8" and w.scale is not None and w.n % 16 == w.k % 16 == 0 and not self.deterministic:
            return fp8.linear(fp8.quantize(x), w.data, w.scale, bias)
        if are_integers(w):
            return integers.product(x, w, bias, deterministic=self.deterministic)
        if e4m3.in_groups(len(x), w) and w.scale is not None and not self.deterministic:
            return e4m3.multiply(fp8.quantize(x), w, bias, batch_gemm.STORE)
        if w.kind in e2m1.OTHERS and w.k % 16 == 0:
            return e2m1.linear(x.contiguous(), w, bias, self.deterministic)
        weight = self._plain(x, w)
        if self.deterministic:
            return invariant.linear(x, weight, bias)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def _float32(self, x: Tensor, w: Weight, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is None and (self.deterministic or are_integers(w)):
            out = x.new_empty(x.shape[0], w.n, dtype=torch.float32)
        if are_integers(w):
            return integers.product(x, w, bias, out, self.deterministic)
        weight = self._plain(x, w)
        if self.deterministic:
            return invariant.linear(x, weight, bias, out)
        if weight.dtype == torch.bfloat16 and bias is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def _plain(self, x: Tensor, w: Weight) -> Tensor:
        return w.data if w.kind in ("f32", "bf16") else w.dequant(x.dtype)

    @LOWERINGS.of(lora)
    def lora(self, x: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
        return adapters.add(x.new_zeros(x.shape[0], stack.n), x, stack, rows, sampled)

    @LOWERINGS.of(lora_moe)
    def lora_moe(self, adapted: Adapted, x: Tensor, *more: Any, **how: Any) -> Tensor:
        return mixture.run_adapted(adapted, x, *more, **how).sum().to(x.dtype)

    @LOWERINGS.of(lora_embedding)
    def lora_embedding(self, ids: Tensor, stack: Stack, rows: Rows) -> Tensor:
        return adapters.embedding(ids, stack, rows)

    @LOWERINGS.of(ops.qk_norm_rope_store)
    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Tensor:
        if kv.k.shape[3] != kv.v_dim:  # the body, to which nobody gives places in a rehearsal
            more = kv.k.shape[2] * (kv.k.shape[3] + kv.v_dim)
            return qkv[:, : qkv.shape[1] - more] if under_way() else NotImplemented
        where = out_loc_of(out_loc, kv.group)
        in_place = self.attend.in_place or kv.scales is not None
        q = elementwise.qk_norm_rope_store(
            qkv, positions, cos_sin, q_norm, k_norm, eps, kv.k, kv.v, where, in_place,
            (kv.k_scale, kv.v_scale), kv.scales is None,
        )  # fmt: skip
        if kv.scales is not None:
            turning.store(qkv, kv, where)
        return q if self.attend.in_place else q.contiguous()

    @LOWERINGS.of(ops.scale_queries)
    def scale_queries(self, q: Tensor, by: Tensor, also: Tensor | None = None) -> Tensor:
        ops.heads_of(q, by).mul_(by if also is None else by * also)
        return q

    @LOWERINGS.of(ops.qkv_norm_rope_store)
    def qkv_norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: KVLayer,
        out_loc: Tensor,
        joined: bool = False,
    ) -> Tensor:
        given = positions, cos_sin, q_norm, k_norm, eps
        if self.attend.in_place or kv.scales is not None:
            return self.qk_norm_rope_store(ops.norm_values(qkv, kv, eps, joined), *given, kv, out_loc)
        return elementwise.qk_norm_rope_store(
            qkv, *given, kv.k, kv.v, out_loc_of(out_loc, kv.group), scales=(kv.k_scale, kv.v_scale),
            v_norm=True, joined=joined,
        )  # fmt: skip

    @LOWERINGS.of(ops.latent_queries)
    def latent_queries(
        self,
        q: Tensor,
        latent: Tensor,
        k_up: Tensor,
        norm: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Tensor:
        where = out_loc_of(out_loc, kv.group)
        return latents.queries(q, latent, k_up, norm, eps, positions, cos_sin, kv.k, where, kv.k_scale)

    @LOWERINGS.of(ops.latent_values)
    def latent_values(self, seen: Tensor, v_up: Tensor) -> Tensor:
        return latents.values(seen, v_up)

    def heads(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        projection: Projection,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Tensor:
        """``linear`` and ``qk_norm_rope_store`` of long prompts."""
        given = x.contiguous(), weight, positions, projection, kv, out_loc_of(out_loc, kv.group)
        return prompt_gemm.linear_heads(*given, self.attend.in_place, bias)

    @LOWERINGS.of(ops.attention)
    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: ForwardBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunked: bool = False,
        slopes: Tensor | None = None,
    ) -> Tensor:
        return self.attend(q, kv, batch, Scoring(scale, window, softcap, sinks, chunked, slopes))

    @LOWERINGS.of(crossing.cross_attention)
    def cross_attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Any, scale: float) -> Tensor:
        return crossing.on_gpu(q, keys, values, batch, scale)

    @LOWERINGS.of(picking.pick)
    def pick(self, q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: Any, most: int) -> Tensor:
        return picks.pick(q, key, weights, kv, batch, most)

    @LOWERINGS.of(picking.picked_attention)
    def picked_attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: Any,
        scale: float,
        picked: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return picks.attend(q, kv, batch, scale, picked, sinks)

    @LOWERINGS.of(compressed.compress)
    def compress(self, *args: Any, **how: Any) -> Tensor:
        return entries.compress(*args, **how)

    @LOWERINGS.of(compressed.pick_entries)
    def pick_entries(self, *args: Any, **how: Any) -> Tensor:
        return entries.pick(*args, **how)

    @LOWERINGS.of(compressed.compressed_attention)
    def compressed_attention(self, *args: Any, **how: Any) -> Tensor:
        return entries.attend(*args, **how)

    @LOWERINGS.of(hyper.stream_weights)
    def stream_weights(
        self, x: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
    ) -> Tensor:
        if streams & (streams - 1):
            return NotImplemented
        return streams_triton.weights(x, scale, base, streams, iterations, eps)

    @LOWERINGS.of(ops.causal_conv)
    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: StateLayer,
        batch: Any,
        activation: str = "silu",
    ) -> Tensor:
        return states.convolve(x, weight, bias, state, batch, activation == "silu")

    @LOWERINGS.of(ops.gated_delta)
    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: StateLayer, batch: Any
    ) -> Tensor:
        return states.gated_delta(q, k, v, decay, beta, state, batch)

    @LOWERINGS.of(ops.decay_rates)
    def decay_rates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return delta.decay_rates(a, b, a_log, dt_bias)

    @LOWERINGS.of(ops.gated_rms_norm)
    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
    ) -> Tensor:
        if weight.dim() > 1:
            return ops.gated_rms_norm.body(x, gate, weight, eps, activation)
        return delta.gated_rms_norm(x, gate, weight, eps, activation == "silu")

    @LOWERINGS.of(ops.selective_scan)
    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: StateLayer,
        batch: Any,
        steps: TimeSteps | None = None,
    ) -> Tensor:
        return states.selective_scan(x, dt, a, b, c, d, state, batch, steps)

    @LOWERINGS.of(ops.gated_group_norm)
    def gated_group_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int
    ) -> Tensor:
        return ssd.gated_group_norm(x, gate, weight, eps, groups)

    @LOWERINGS.of(ops.act_mul)
    def act_mul(self, x: Tensor, kind: Activation) -> Tensor:
        if self.deterministic and invariant.activates(x, kind):
            return act_mul.act_mul(x, kind)
        return elementwise.act_mul(x, kind)

    @LOWERINGS.of(ops.gated_add)
    def gated_add(self, x: Tensor, y: Tensor, by: Tensor, gate: Tensor) -> Tensor:
        return elementwise.gated_add(x, y, by, gate)

    @LOWERINGS.of(ops.sigmoid_mul)
    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return elementwise.sigmoid_mul(x, gate)

    @LOWERINGS.of(ops.layer_norm)
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return elementwise.layer_norm(_rows(x), weight, bias, eps)

    @LOWERINGS.of(ops.add_layer_norm)
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return elementwise.add_layer_norm(x.contiguous(), residual.contiguous(), weight, bias, eps)

    @LOWERINGS.of(ops.activate)
    def activate(self, x: Tensor, kind: str) -> Tensor:
        return elementwise.activate(x.contiguous(), kind)

    @LOWERINGS.of(ops.moe)
    def moe(
        self,
        x: Tensor,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
        activation: Gating,
        biases: Biases = NO_BIASES,
        routed: Tensor | None = None,
        counts: ExpertCounts | None = None,
        fixed: Tensor | None = None,
    ) -> Tensor:
        outputs = mixture.run(
            x, None, router, gate_up, down, routing, activation, biases,
            routed=routed, counts=counts, fixed=fixed,
        )  # fmt: skip
        return outputs.sum().to(x.dtype)

    @LOWERINGS.of(ops.gather)
    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        return elementwise.take_rows(x, rows)


@LOWERINGS.of(sent_moe)
def _sent_moe(_: GpuOps, *args: Any, **more: Any) -> Tensor:
    return mixture.run_sent(*args, **more)
