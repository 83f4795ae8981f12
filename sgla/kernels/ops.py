"""The ops a model is made of, beside plain torch operations. Each body here is the oracle in torch, on any
device and dtype; what else may compute an op is in ``kernels/cpu/instructions.py`` (CPU programs) and
``kernels/gpu``.

Shapes: T tokens, S sampled rows, d width, Hq/Hkv heads of width hd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import recurrent
from sgla.kernels.batch import out_loc_of
from sgla.kernels.dispatch import op
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.kept import int4_dims
from sgla.kernels.routing import Activation, Clamped, Gating, Routing

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch
    from sgla.quant.weight import Weight


Place = TypeVar("Place", int, Tensor)


class Part(NamedTuple):
    """Every ``ranks``-th token of a history, from ``rank`` on, is what pages have where ranks share tokens
    out. ``told`` ``[T, Hq, 2]``, of q's type: where attention over them leaves the logarithms to base 2 of
    the sums of weights, as two numbers that add up to one."""

    ranks: int
    rank: int
    told: Tensor


@dataclass(slots=True)
class KVLayer:
    """KV pages of one layer, float32 or bfloat16, finite from the start. Any strides will do if ``hd`` is
    contiguous. ``vd`` may be another width than ``hd``: 0 where a layer keeps no v. Pages of float8_e4m3fn,
    on GPUs alone, are meant to be multiplied by the scales; those of int8 by a scale of each token and
    head, and keys in them are turned (``turned``). v may be uint8, two numbers of 4 bits a byte, where k is
    int8: see ``to_int4``. ``group``: whose pages of a row they are."""

    k: Tensor  # [pages, page_size, Hkv, hd]
    v: Tensor  # [pages, page_size, Hkv, vd], uint8 [pages, page_size, Hkv, vd / 2]
    k_scale: float = 1.0
    v_scale: float = 1.0
    group: int = 0
    k_scales: Tensor | None = None  # float32[pages, Hkv, page_size]
    v_scales: Tensor | None = None  # the same, of uint8 bfloat16[pages, Hkv, vd / int4_dims * page_size * 2]
    shared: bool = False  # v is the beginning of k
    part: Part | None = None  # what this rank has of it, while attention sees that alone

    def latent(self, width: int) -> KVLayer:
        """The same pages where v is the first ``width`` values of k (multi-head latent attention)."""
        return replace(self, v=self.k[..., :width], v_scale=self.k_scale, shared=True)

    def behind(self, tokens: int) -> KVLayer:
        """For q without the first ``tokens``."""
        if self.part is None:
            return self
        return replace(self, part=self.part._replace(told=self.part.told[tokens:]))

    @property
    def v_dim(self) -> int:
        """vd."""
        return self.v.shape[3] * (2 if self.v.dtype == torch.uint8 else 1)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Of k and v, in pages of integers."""
        return None if self.k_scales is None or self.v_scales is None else (self.k_scales, self.v_scales)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has of a page."""
        return [x for x in (self.k, self.v, self.k_scales, self.v_scales) if x is not None]

    def put_keys(self, x: Tensor, where: tuple[Tensor, Tensor]) -> None:
        """Store x ``[T, Hkv, hd]`` in ``places``."""
        if self.k_scales is not None:
            x = turned(x.float()) / turned_dims(x.shape[-1])
        _store(self.k, x, where, self.k_scale, self.k_scales)

    def put_values(self, x: Tensor, where: tuple[Tensor, Tensor]) -> None:
        """As ``put_keys``."""
        if self.v.dtype == torch.uint8:
            assert self.v_scales is not None
            self.v[where], constants = to_int4(x)
            _by_group(self.v_scales, self.v)[where[0], :, :, where[1]] = constants
        else:
            _store(self.v, x, where, self.v_scale, self.v_scales)

    def keys(self, pages: Tensor) -> Tensor:
        """float32 ``[*, page_size, Hkv, hd]`` of pages int64 ``[*]``."""
        found = _load(self.k, pages, self.k_scale, self.k_scales)
        return found if self.k_scales is None else turned(found)

    def values(self, pages: Tensor) -> Tensor:
        """As ``keys``."""
        if self.shared:
            return self.keys(pages)[..., : self.v.shape[3]]
        if self.v.dtype == torch.uint8:
            assert self.v_scales is not None
            constants = _by_group(self.v_scales, self.v)[pages].movedim(-2, -4)
            return from_int4(self.v[pages], constants)
        return _load(self.v, pages, self.v_scale, self.v_scales)


@dataclass(slots=True)
class StateLayer:
    """Units of a layer that keeps a state of all tokens so far, in place of tokens. Either tensor may have
    no values. What a unit holds before a row writes to it does not matter."""

    conv: Tensor  # [units, C, K - 1], the last inputs of its short convolution
    memory: Tensor  # float32[units, H, dk, dv], of Mamba [units, H, P, N]


class BothLayer(NamedTuple):
    """What a layer has that keeps tokens and a state."""

    tokens: KVLayer
    state: StateLayer


Layer = KVLayer | StateLayer | BothLayer


def kept_by(layer: Layer) -> list[Tensor]:
    """All that a layer has of pages and units."""
    if isinstance(layer, KVLayer):
        return layer.tensors
    if isinstance(layer, StateLayer):
        return [layer.conv, layer.memory]
    return [*kept_by(layer.tokens), *kept_by(layer.state)]


class TimeSteps(NamedTuple):
    """How a state space model makes its time steps of what the input gives it:
    ``softplus(dt + bias)``, bias float32[H], not below ``least`` nor above ``most``."""

    bias: Tensor
    least: float = 0.0
    most: float = math.inf

    def of(self, dt: Tensor) -> Tensor:
        """float32[T, H], of dt [T, H]."""
        return F.softplus(dt.float() + self.bias.float()).clamp(self.least, self.most)


class AddedNorm(NamedTuple):
    """What ``add_rms_norm`` does with an x: h = residual + x, whose RMSNorm with ``weight`` float32[d] is
    wanted; or, without ``residual``, ``rms_norm``; or, with ``bias`` float32[d], ``add_layer_norm``."""

    residual: Tensor | None
    weight: Tensor
    eps: float
    bias: Tensor | None = None


Sent = Literal["", "others", "all"]  # ranks that have been told one's part of a sum before it begins


class Ranks(Protocol):
    """What operations need of ``dist.Shard``."""

    @property
    def size(self) -> int: ...
    def all_reduce(self, x: Tensor) -> None: ...
    def norms(self, x: Tensor) -> bool: ...
    def sending(self, rows: int, d: int) -> Any: ...
    def for_steps(self, shape: Any) -> Any: ...
    def all_reduce_norm(self, x: Tensor, norm: AddedNorm, sent: Sent = "") -> Tensor: ...
    def beside(self) -> Ranks: ...


class Together(Protocol):
    """What operations need of ``dist.PlannedLockstep``."""

    @property
    def exchanges(self) -> bool:
        """Whether they may exchange rows by themselves, and not through a library."""

    def norms(self, y: Tensor, x: Tensor) -> bool:
        """Whether ``reduce_scatter_norm`` takes these. The same on every rank."""

    def gather(self, x: Tensor) -> Tensor: ...
    def reduce_scatter(self, y: Tensor, x: Tensor) -> Tensor: ...
    def reduce_scatter_norm(self, y: Tensor, x: Tensor, norm: AddedNorm) -> Tensor: ...


class SharedRows(Together, Protocol):
    """What operations need of ``dist.SharedRows``."""

    @property
    def own(self) -> slice:
        """This rank's rows of the step's tokens."""

    def share_out(self, tokens: int) -> int:
        """Begin a step of so many tokens; how many of them are this rank's."""


@op
def embedding(ids: Tensor, weight: Tensor | Weight, scale: float = 1.0) -> Tensor:
    """``weight[ids] * scale``: ids int32[T], weight [V, d] -> [T, d];
    float32 if the weight is a ``Weight``."""
    x = weight[ids.long()] if isinstance(weight, Tensor) else weight.take(ids)
    return x if scale == 1.0 else x * scale


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dim; statistics in float32."""
    f = x.float()
    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    return (f * weight.float()).to(x.dtype)


@op
def rms_norm_beside(x: Tensor, first: Tensor, second: Tensor, eps: float) -> Tensor:
    """``x [T, n]`` with ``rms_norm`` of its first columns by the weights ``first``, and of those behind them
    by ``second``; the others stay as they are."""
    rest = x.shape[1] - len(first) - len(second)
    a, b, c = x.split([len(first), len(second), rest], dim=1)
    return torch.cat([rms_norm(a, first, eps), rms_norm(b, second, eps), c], dim=1)


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``(rms_norm(h), h)`` with ``h = residual + x``."""
    h = residual + x
    return rms_norm(h, weight, eps), h


@op
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@op
def scaled_add(x: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
    """``(residual + x) * scale``: scale float32[1] or ``[T, 1]``."""
    return ((residual + x) * scale).to(x.dtype)


@op
def gated_add(x: Tensor, y: Tensor, by: Tensor, gate: Tensor) -> Tensor:
    """``x + y * sigmoid(by @ gate.T)``: x and y [T, d], by [T, k], gate float32[1, k] -> [T, d]."""
    return x + y * F.linear(by.float(), gate).sigmoid().to(y.dtype)


@op
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``: both [T, d]."""
    return x * gate.sigmoid()


@op
def linear(x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias + addend``: x [T, k], w [n, k], bias [n], addend [T, n] -> [T, n]. The addend is what
    an adapter adds, before any activation that follows.

    Native kernels may round x, for weights that are not float32: to bfloat16 if the weight is, or to 14 bits
    under a scale for each row and 64 channels (csrc/cpu/fixed.h).
    """
    y = F.linear(x, w.dequant(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if addend is None else y + addend.to(y.dtype)


@op
def logits(x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """``linear`` of an output layer, in float32."""
    return linear(x.float(), w, bias, addend)


def _queries(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: KVLayer,
    out_loc: Tensor,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - kv.k.shape[2] * (kv.k.shape[3] + kv.v_dim))


@op(like=_queries)
def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: KVLayer,
    out_loc: Tensor,
) -> Tensor:
    """Prepare q, k, v for attention: qkv [T, (Hq + Hkv) * hd + Hkv * vd] -> q [T, Hq * hd]; k and v go to the
    pages.

    ``q_norm``/``k_norm`` [hd] are optional per-head RMSNorm weights. The first ``rot`` dims of each head are
    rotated the NeoX way (first half with second half) by ``cos_sin`` float32 [P, rot] (cos | sin).
    ``out_loc`` int32[G, T], or of one group.
    """
    kv_heads, dim = kv.k.shape[2:]
    tail = [kv_heads * dim, kv_heads * kv.v_dim]
    q, k, v = qkv.split([qkv.shape[1] - sum(tail), *tail], dim=1)
    q, k, v = q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), v.unflatten(1, (kv_heads, -1))
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    q, k = rotate(q, positions, cos_sin), rotate(k, positions, cos_sin)
    where = places(kv, out_loc)
    kv.put_keys(k, where)
    kv.put_values(v, where)
    return q.reshape(qkv.shape[0], -1)


@op
def scale_queries(q: Tensor, by: Tensor, also: Tensor | None = None) -> Tensor:
    """q ``[T, Hq * hd]`` of ``qk_norm_rope_store`` times ``by``: float32[hd] of each head, or [T, 1]; and
    ``also``, of the same shape. A body may write it where q is, as attention of whole prompts may read k and
    v beside it. Nobody reads q then."""
    scaled = heads_of(q, by) * by
    return (scaled if also is None else scaled * also).to(q.dtype).view(q.shape)


def heads_of(q: Tensor, by: Tensor) -> Tensor:
    """q as ``by`` multiplies it, in the same memory."""
    return q if by.dim() == 2 else q.unflatten(1, (-1, len(by)))


def _joined_queries(
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
    width = kv.k.shape[2] * (kv.k.shape[3] + (0 if joined else kv.v_dim))
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - width)


@op(like=_joined_queries)
def qkv_norm_rope_store(
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
    """``qk_norm_rope_store``, where each head of v has an RMSNorm without weights. ``joined``: there is no v
    in qkv: it is what k was before its norm."""
    qkv = norm_values(qkv, kv, eps, joined)
    return qk_norm_rope_store(qkv, positions, cos_sin, q_norm, k_norm, eps, kv, out_loc)


def norm_values(qkv: Tensor, kv: KVLayer, eps: float, joined: bool) -> Tensor:
    """What ``qk_norm_rope_store`` reads in the place of what ``qkv_norm_rope_store`` does."""
    width = kv.k.shape[2] * kv.v_dim
    v = qkv[:, -width:].unflatten(1, (-1, kv.v_dim)).float()
    v = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)).to(qkv.dtype)
    return torch.cat([qkv if joined else qkv[:, :-width], v.flatten(1)], 1)


def _absorbed(q: Tensor, latent: Tensor, k_up: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], k_up.shape[0] * latent.shape[1])


@op(like=_absorbed)
def latent_queries(
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
    """Prepare latent attention: q ``[T, Hq * (nope + rot)]``, latent ``[T, vd + rot]`` -> ``[T, Hq * (vd +
    rot)]``. Of each head of q the first values are multiplied by its k_up ``[nope, vd]``; of the latent they
    have an RMSNorm with ``norm`` float32[vd]. The last ``rot`` of each are rotated as by
    ``qk_norm_rope_store``; the latent goes to the pages."""
    content = k_up.shape[2]
    heads = q.unflatten(1, (k_up.shape[0], -1))
    absorbed = torch.einsum("thn,hnr->thr", heads[..., : k_up.shape[1]], k_up.to(q.dtype))
    normed = rms_norm(latent[:, :content].contiguous(), norm, eps)
    still = torch.cat([absorbed, normed[:, None]], 1)
    turned = torch.cat([heads[..., k_up.shape[1] :], latent[:, None, content:]], 1)
    heads = torch.cat([still, rotate(turned, positions, cos_sin)], 2)
    kv.put_keys(heads[:, -1:], places(kv, out_loc))
    return heads[:, :-1].flatten(1)


@op
def latent_values(seen: Tensor, v_up: Tensor) -> Tensor:
    """What each head of latent attention makes of what it has seen: seen ``[T, Hq * vd]``, v_up ``[Hq, value,
    vd]`` -> ``[T, Hq * value]``."""
    heads = seen.unflatten(1, (-1, v_up.shape[2]))
    return torch.einsum("thr,hvr->thv", heads, v_up.to(seen.dtype)).flatten(1)


def places(kv: KVLayer, out_loc: Tensor) -> tuple[Tensor, Tensor]:
    """Pages int64[T] and places in them, where the tokens of a step go."""
    out_loc = out_loc_of(out_loc, kv.group).long()
    return out_loc // kv.k.shape[1], out_loc % kv.k.shape[1]


def _store(
    pages: Tensor, x: Tensor, where: tuple[Tensor, Tensor], scale: float, scales: Tensor | None
) -> None:
    if scales is not None:
        x, of_heads = to_int8(x)
        scales[where[0], :, where[1]] = of_heads
    if pages.dtype == torch.float8_e4m3fn:
        x, pages = (
            (x.float() / scale).clamp(-448, 448).to(pages.dtype).view(torch.uint8),
            pages.view(torch.uint8),
        )
    pages[where] = x.to(pages.dtype)


def turned(x: Tensor) -> Tensor:
    """x ``[*, d]`` times a Hadamard matrix in blocks of ``turned_dims``: its own inverse but for that factor.
    Keys have dims that are much larger than others; turned, none takes more than its part of the
    range of 8 bits, and products with queries that are turned too are what they were. (QuaRot, arXiv
    2404.00456.)"""
    half, size = 1, turned_dims(x.shape[-1])
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack([a + b, a - b], -2).flatten(-3), half * 2
    return x


def turned_dims(d: int) -> int:
    """The largest power of two that divides d."""
    return d & -d


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[*, d]`` as int8 ``[*, d]`` and the scales float32 ``[*]`` that it is to be multiplied by, which
    are not finite where x is not."""
    x = x.float()
    scale = x.abs().amax(-1) / 127
    q = (x / scale.masked_fill(scale == 0, 1.0)[..., None]).round().clamp(-127, 127)
    return q.nan_to_num(0.0).to(torch.int8), scale


def to_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[*, d]`` as uint8 ``[*, d / 2]``, the first of two dims in the low bits, and the constants bfloat16
    ``[*, d / int4_dims, 2]``, a scale and what it is added to: n stands for ``(1 + n / 16) * scale + low``,
    which a kernel makes of bfloat16's bits in one operation. Both are NaN where x is not finite."""
    groups = x.float().unflatten(-1, (-1, int4_dims(x.shape[-1])))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) * (16 / 15)).bfloat16()
    low = (least - scale.float()).bfloat16()
    n = ((groups - low.float()) / scale.float().masked_fill(scale == 0, 1.0) - 1) * 16
    n = n.round().clamp(0, 15).nan_to_num(0.0).flatten(-2).to(torch.uint8)
    constants = torch.cat([scale, low], -1)
    odd = ~constants.isfinite().all(-1, keepdim=True)
    return n[..., 0::2] | n[..., 1::2] << 4, constants.masked_fill(odd, torch.nan)


def from_int4(packed: Tensor, constants: Tensor) -> Tensor:
    """float32 ``[*, d]`` of what ``to_int4`` gives."""
    n = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float()
    scale, low = constants.float().split(1, -1)
    return ((1 + n.unflatten(-1, (scale.shape[-2], -1)) / 16) * scale + low).flatten(-2)


def _by_group(scales: Tensor, v: Tensor) -> Tensor:
    """``[pages, Hkv, groups, page_size, 2]``: those of v in 4 bits."""
    return scales.unflatten(-1, (-1, v.shape[1], 2))


def _load(pages: Tensor, which: Tensor, scale: float, scales: Tensor | None) -> Tensor:
    if scales is not None:
        return pages[which] * scales[which].transpose(-1, -2)[..., None]
    if pages.dtype == torch.float8_e4m3fn:
        return pages.view(torch.uint8)[which].view(pages.dtype).float() * scale
    return pages[which].float()


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x ``[T, H, hd]`` with the first ``rot`` values of each head rotated: see ``qk_norm_rope_store``."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    a, b = a.float(), b.float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)


def outcome(q: Tensor, kv: KVLayer, *_: Any, **__: Any) -> Tensor:
    """Room for what attention makes of q."""
    return q.new_empty(q.shape[0], q.shape[1] // kv.k.shape[3] * kv.v_dim)


class Scoring(NamedTuple):
    """What becomes of a layer's scores: see ``attention``."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunked: bool = False
    slopes: Tensor | None = None

    def begin(self, position: Place) -> Place:
        """The first place that a token sees in a layer with windows, which may be one before all."""
        return position // self.window * self.window if self.chunked else position - self.window + 1


@op(like=outcome)
def attention(
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
    """Causal attention over the pages: q [T, Hq * hd] -> [T, Hq * vd].

    ``window > 0``: a token sees itself and the ``window - 1`` tokens before it; ``chunked``: those before it
    in its own chunk of ``window`` tokens. ``softcap > 0``: scores become ``softcap * tanh(score /
    softcap)``. ``sinks`` float32[Hq]: a score of each head that takes its share of the softmax and has no
    value (arXiv 2309.17453, as gpt-oss learns it). ``slopes`` float32[Hq]: so much each head's scores rise
    from one place to the next, so that near tokens count for more (ALiBi, arXiv 2108.12409).

    Prefill and decode rows apart, so that padding stays bounded by rows of like kind.
    """
    out, scoring = outcome(q, kv), Scoring(scale, window, softcap, sinks, chunked, slopes)
    starts = batch.q_start[: batch.rows].long()
    q_lens = batch.q_start[1 : batch.rows + 1].long() - starts
    for rows in ((q_lens == 1).nonzero()[:, 0], (q_lens > 1).nonzero()[:, 0]):
        if rows.numel():
            _attend(q, out, rows, starts[rows], q_lens[rows], kv, batch, scoring)
    return out


def _attend(
    q: Tensor,
    out: Tensor,
    rows: Tensor,
    starts: Tensor,
    q_lens: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    scoring: Scoring,
) -> None:
    """Attention of some rows, padded to the longest query and the longest history among them."""
    scale, window, softcap, sinks, _, slopes = scoring
    page_size, _, dim = kv.k.shape[1:]
    kv_lens = batch.kv_len[rows].long()
    index = torch.arange(int(q_lens.max()), device=q.device)
    valid = index < q_lens[:, None]  # [rows, L]
    tokens = torch.where(valid, starts[:, None] + index, starts[:, None])
    position = torch.where(valid, (kv_lens - q_lens)[:, None] + index, 0)
    pages = batch.pages(kv.group)[batch.slots[rows].long(), : -(-int(kv_lens.max()) // page_size)].long()
    queries = q[tokens].view(len(rows), index.numel(), -1, dim).transpose(1, 2).float()
    keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (kv.keys(pages), kv.values(pages)))
    place = torch.arange(keys.shape[2], device=q.device)
    unread = place >= kv_lens[:, None]
    if window:
        unread |= place < scoring.begin(kv_lens - q_lens)[:, None]
    for x in (keys, values):  # what is not the row's may be no number, and 0 times that is none either
        x.masked_fill_(unread[:, None, :, None], 0.0)
    seen = place <= position[:, :, None]
    if batch.media is not None and batch.media.until is not None and (window or not batch.media.windowed):
        seen = place < batch.media.until[tokens][:, :, None]
    if batch.canvas is not None:
        seen = place < batch.canvas.until[tokens][:, :, None]
        position = batch.canvas.origin[tokens]
    if window:
        seen = seen & (place >= scoring.begin(position)[:, :, None])
    odd = _clear(keys, values) if index.numel() > 1 else None
    if softcap or sinks is not None or slopes is not None:
        rising = None if slopes is None else slopes[:, None, None] * place
        result = _weighed(queries, keys, values, seen[:, None], scale, softcap, sinks, rising)
    else:
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=True
        )
    if odd is not None:
        hit = (odd[:, :, None] & seen[:, None]).any(-1, keepdim=True)
        result.masked_fill_(hit.repeat_interleave(queries.shape[1] // odd.shape[1], 1), torch.nan)
    result = result.transpose(1, 2).reshape(len(rows), index.numel(), -1).to(q.dtype)
    out[tokens[valid]] = result[valid]


def _clear(keys: Tensor, values: Tensor) -> Tensor | None:
    """Zeros for what is no number in keys and values ``[R, Hkv, N, *]``, as that of a wrong guess may be: 0
    times that is none either, so those before it would have it. Returns where that was, bool ``[R, Hkv, N]``;
    None: nowhere."""
    odd = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))
    if not bool(odd.any()):
        return None
    for x in (keys, values):
        x.masked_fill_(odd[..., None], 0.0)
    return odd


def _weighed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    rising: Tensor | None,
) -> Tensor:
    """What torch's own attention does not know: q ``[R, Hq, L, hd]``, k and v ``[R, Hkv, N, *]``, ``seen``
    bool ``[R, 1, L, N]``, ``rising`` float32 ``[Hq, 1, N]`` is added to scores."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if rising is not None:
        scores = scores + rising
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(group, 1)


@op(like="x")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: StateLayer,
    batch: ForwardBatch,
    activation: str = "silu",
) -> Tensor:
    """A convolution of each channel over the last K tokens of its row: x [T, C], weight [C, K], bias [C] ->
    [T, C]. ``y_t = act(bias + sum over k of weight[:, k] * x_(t - K + 1 + k))``; what came before the step is
    ``state.conv``. ``activation``: silu, or none."""
    y = recurrent.convolve(x, weight, bias, state.conv, batch)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


@op(like="v")
def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: StateLayer, batch: ForwardBatch
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464): q, k [T, Hk, dk], v [T, Hv, dv] -> [T, Hv, dv].

    q and k are brought to length 1, q is scaled by ``dk ** -0.5``; Hv / Hk heads of v in a row have those of
    one head. Each token changes the S of a head, which is ``state.memory``:
    ``S = exp(decay) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q``. decay float32[T, Hv], or [T, Hv,
    dk] with a value for each row of S, is a logarithm and not above 0; beta float32[T, Hv].
    """
    return recurrent.gated_delta(q, k, v, decay, beta, state.memory, batch).to(v.dtype)


@op
def decay_rates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and beta of ``gated_delta``, float32[T, H]: ``-exp(a_log) * softplus(a + dt_bias)`` and
    ``sigmoid(b)``; a, b [T, H], a_log, dt_bias [H]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


@op
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    """``rms_norm(x, weight) * act(gate)`` over the last dim: x, gate [T, H, d], weight [d] or [H, d];
    ``activation``: silu, or sigmoid."""
    f, z = x.float(), gate.float()
    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (f * (F.silu(z) if activation == "silu" else z.sigmoid())).to(x.dtype)


@op(like="x")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: StateLayer,
    batch: ForwardBatch,
    steps: TimeSteps | None = None,
) -> Tensor:
    """The state space model of Mamba 2 (arXiv 2405.21060): x [T, H, P] -> [T, H, P].

    dt [T, H], positive, or what ``steps`` makes time steps of; a float32[H], negative; b, c [T, G, N], each
    for H / G heads in a row; d float32[H]. Each token changes the S of a head, which is ``state.memory``:
    ``S = exp(dt * a) * S + dt * x b^T;  y = S c + d * x``. Mamba 1 has P = 1, G = 1 and a float32[H, N].
    """
    dt = dt.float() if steps is None else steps.of(dt)
    y = recurrent.selective_scan(x, dt, a, b, c, state.memory, batch)
    return (y if d is None else y + d.float()[:, None] * x.float()).to(x.dtype)


@op
def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int) -> Tensor:
    """``rms_norm(x * silu(gate))`` of each of ``groups`` parts of the last dim: x, gate [T, d], weight [d]
    -> [T, d]. Without a weight there is no norm."""
    f = x.float() * F.silu(gate.float())
    if weight is None:
        return f.to(x.dtype)
    parts = f.unflatten(1, (groups, -1))
    f = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(1)
    return (f * weight.float()).to(x.dtype)


@op
def act_mul(x: Tensor, kind: Activation) -> Tensor:
    """``act(gate) * up``: x [T, 2f] (gate | up) -> [T, f]; ``gelu_tanh`` is the tanh approximation."""
    return gated(x, kind)


def gated(x: Tensor, kind: Gating) -> Tensor:
    """``act_mul`` in torch, with what only experts have; relu2 has no gate."""
    if kind == "relu2":
        return activation(x, kind)
    gate, up = x.chunk(2, dim=-1)
    if isinstance(kind, Clamped):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(gate * kind.alpha) * (up + kind.more)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up


class Biases(NamedTuple):
    """What a mixture adds, float32, for E experts: to the ``logits`` of the router [E]; to the scores
    [E] while experts are chosen (``correction``), not to their weights (arXiv 2408.15664); to the products
    ``gate_up`` [E, 2f] and ``down`` [E, d]. ``factor`` [E]: by what their weights are multiplied.
    ``places`` int32 [E]: of whole experts on a GPU, where each is (``placement.Part.table``)."""

    logits: Tensor | None = None
    correction: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    factor: Tensor | None = None
    places: Tensor | None = None


NO_BIASES = Biases()


def route(
    logits: Tensor, routing: Routing, biases: Biases = NO_BIASES, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token: logits [T, E] -> weights float32 [T, top_k] and ids int64 [T, top_k], with
    more columns for a shared expert. ``fixed``: int64 [T, top_k], where something else chooses them. Runs
    without a look at values on the host."""
    if routing.shared:
        parts = routing.common
        count, others = routing.experts(logits.shape[1]) - parts, replace(routing, shared="", parts=1)
        weights, ids = route(logits[:, :count], others, biases, fixed)
        own = (
            logits[:, count:].float().sigmoid()
            if routing.shared == "gated"
            else weights.new_ones(len(ids), 1)
        )
        last = torch.arange(count, count + parts, device=ids.device).expand(len(ids), -1)
        return torch.cat([weights, own.expand(-1, parts)], 1), torch.cat([ids, last], 1)
    logits, correction = logits.float(), biases.correction
    if biases.logits is not None:
        logits = logits + biases.logits
    if routing.score == "sparsemixer":
        return _sparsemixer(logits, routing)
    if routing.score == "sqrtsoftplus":
        scores = F.softplus(logits).sqrt()
    else:
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
    if fixed is not None:
        return _weights(scores.gather(-1, fixed), fixed, routing, biases), fixed
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = ranked.unflatten(-1, (routing.groups, -1))
        best = groups.topk(2, -1).values.sum(-1) if routing.two else groups.amax(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(routing.kept, -1).indices, 1.0) > 0
        ranked = groups.masked_fill(~kept[..., None], 0.0 if routing.zeros else float("-inf")).flatten(-2)
    best, ids = ranked.topk(routing.top_k, -1)
    return _weights(best if ranked is scores else scores.gather(-1, ids), ids, routing, biases), ids


def _weights(scores: Tensor, ids: Tensor, routing: Routing, biases: Biases) -> Tensor:
    """Of chosen experts with these scores."""
    if routing.normalize:
        total = scores.sum(-1, keepdim=True)
        scores = scores / (total.clamp(min=routing.least) if routing.least else total)
    if biases.factor is not None:
        scores = scores * biases.factor[ids]
    return scores if routing.scale == 1.0 else scores * routing.scale


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``route`` by that score."""
    weights, ids, left = [], [], logits
    for _ in range(routing.top_k):
        best, chosen = left.max(-1, keepdim=True)
        below = (best - logits) / logits.abs().clamp(min=best)
        shares = left.masked_fill(below > 2 * routing.jitter, float("-inf")).softmax(-1)
        weights.append(shares.gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1)


@op(like="x")
def moe(
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
    """``sum of p_e * down_e(act(gate_e(x)) * up_e(x))`` over each token's experts e: x [T, d] -> [T, d].

    router [E, d], gate_up [E * 2 f, d], down [E * d, f]: the experts' matrices one below the other, gate_up
    without a gate [E * f, d]; a shared one is the last, with a row of the router if it is gated. ``routed``
    [T, as wide as the router]: what the router sees, if that is not x. ``counts``: is told who is chosen.
    ``fixed``: see ``route``.
    """
    count = len(routing.here(router.n))

    def run(place: int, x: Tensor, _: Tensor) -> Tensor:
        return expert(x, place, count, gate_up, down, activation, biases)

    return mix(x, router, run, routing, biases, routed, counts, fixed)


def expert(
    x: Tensor, place: int, count: int, gate_up: Weight, down: Weight, activation: Gating, biases: Biases
) -> Tensor:
    """What one of ``count`` experts makes of x: [n, d] -> [n, d]."""
    inner, outer = (None if b is None else b[place] for b in (biases.gate_up, biases.down))
    x = gated(linear(x, gate_up.part(place, count), inner), activation)
    return linear(x, down.part(place, count), outer)


def mix(
    x: Tensor,
    router: Weight,
    run: Callable[[int, Tensor, Tensor], Tensor],
    routing: Routing,
    biases: Biases,
    routed: Tensor | None = None,
    counts: ExpertCounts | None = None,
    fixed: Tensor | None = None,
) -> Tensor:
    """``moe`` with ``run(expert, x[n, d], token[n]) -> [n, d]``, for each expert here that has tokens, by its
    place among those that are here."""
    logits = linear((x if routed is None else routed).float(), router)
    weights, ids = route(logits, routing, biases, fixed)
    if counts is not None:
        counts.add(ids)
    out = x.new_zeros(x.shape, dtype=torch.float32)
    here = {expert: i for i, expert in enumerate(routing.here(router.n))}
    for expert in ids.unique().tolist():
        if (at := here.get(expert)) is None:
            continue
        token, place = (ids == expert).nonzero(as_tuple=True)
        count, which = routing.copies[at] if routing.copies else (1, 0)
        if count > 1:
            own = token % count == which
            token, place = token[own], place[own]
        if not len(token):
            continue
        made = run(at, x[token], token).float()
        out.index_add_(0, token, made * weights[token, place, None])
    return out.to(x.dtype)


def _seen(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


@op(like=_seen)
def self_attention(qkv: Tensor, batch: ForwardBatch, heads: int, scale: float, window: int = 0) -> Tensor:
    """Attention in both directions; every row is a whole sequence:
    qkv [T, 3 * heads * hd] -> [T, heads * hd]. ``window > 0``: a token sees itself and so many tokens on
    either side.

    Rows of equal length that lie together need neither padding nor a mask.
    """
    out = _seen(qkv)
    starts = batch.q_start.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    at = 0
    for length, group in groupby(lengths):
        rows = len(list(group))
        part = slice(at, at + rows * length)
        q, k, v = qkv[part].view(rows, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        near = None
        if window and window < length - 1:
            place = torch.arange(length, device=qkv.device)
            near = (place[:, None] - place).abs() <= window
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scale)
        out[part] = found.transpose(1, 2).reshape(rows * length, -1)
        at = part.stop
    return out


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean) / deviation * weight + bias`` over the last dim."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@op
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns ``(layer_norm(h), h)`` with ``h = residual + x``."""
    h = add(residual, x)
    return layer_norm(h, weight, bias, eps), h


@op
def activate(x: Tensor, kind: str) -> Tensor:
    """``kind``: gelu | gelu_tanh | silu | relu | relu2, which is relu squared (arXiv 2109.08668)."""
    return activation(x, kind)


def activation(x: Tensor, kind: str) -> Tensor:
    """``activate`` in torch."""
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind == "relu2":
        return F.relu(x).square()
    return F.silu(x) if kind == "silu" else F.relu(x)


@op
def beside(x: Tensor, y: Tensor) -> Tensor:
    """x [T, n] and y [T, m] side by side: [T, n + m]."""
    return torch.cat([x, y], 1)


@op
def gather(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``: x [T, d], rows int32[S] -> [S, d]."""
    return x[rows.long()]


@op
def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of x over the ranks, which may take the place of x."""
    ranks.all_reduce(x)
    return x


@op
def gathered(x: Tensor, ranks: Together) -> Tensor:
    """The tokens of all ranks, which compute together: x [T, d] of this one -> [A, d]."""
    return ranks.gather(x)


@op
def reduce_scatter(y: Tensor, x: Tensor, ranks: Together) -> Tensor:
    """The sum of y [A, d] over the ranks, this one's rows alone: as many as x [T, d] has."""
    return ranks.reduce_scatter(y, x)


@op
def inplace(fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
    """Call ``fn(x)``, which changes x in place, and return x:
    the way out of a program (an all-reduce over gloo)."""
    fn(x)
    return x


@op
def tap(fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
    """Show x to ``fn``, which leaves it as it is, and return x. A program does so at its end."""
    fn(x)
    return x


@op
def copied(x: Tensor, to: Tensor) -> Tensor:
    """Copy x ``[T, d]`` to the first rows of ``to``, and return x."""
    to[: len(x)].copy_(x)
    return x


@op
def arriving(receive: Callable[[Tensor], None], ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Hidden states ``[T, width]`` of the tokens ids int32[T], which ``receive`` fills in."""
    x = torch.empty(ids.shape[0], width, dtype=dtype, device=ids.device)
    receive(x)
    return x


@op
def call(fn: Callable[[Tensor, Tensor], None], x: Tensor, width: int) -> Tensor:
    """Call ``fn(x, out)``, which fills a new ``out`` [T, width], and return it:
    ``inplace`` for an all-gather of columns."""
    out = x.new_empty(x.shape[0], width)
    fn(x, out)
    return out
