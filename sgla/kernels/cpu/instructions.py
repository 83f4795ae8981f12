"""Ops as instructions of the native kernels: see ``Recorder``, which they are given to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.fuse import ACTIVATIONS, Buffer, Node
from sgla.kernels.cpu.native import Opcode
from sgla.kernels.cpu.panels import FORMATS, Kind, Panels
from sgla.kernels.cpu.record import Recorder
from sgla.kernels.dispatch import Lowerings
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.lora import Rows, Stack, lora, lora_embedding
from sgla.kernels.lora_moe import Adapted, lora_expert, lora_moe
from sgla.kernels.ops import NO_BIASES, Biases
from sgla.kernels.routing import Activation, Clamped, Gating, Routing

if TYPE_CHECKING:
    from sgla.kernels.ops import KVLayer, Ranks
    from sgla.quant.weight import Weight

MAX_HEAD_DIM = 512  # the kernels' scratch is made for this
CACHED = (torch.float32, torch.bfloat16, torch.int8)  # the order of ``Cached`` in program.h
LOWERINGS = Lowerings()


@LOWERINGS.of(ops.embedding)
def embedding(recorder: Recorder, ids: Tensor, weight: Tensor | Weight, scale: float = 1.0) -> Tensor:
    if recorder.part(ids) != "ids":
        return NotImplemented
    if isinstance(weight, Tensor):
        kind: Kind = "bf16" if weight.dtype == torch.bfloat16 else "f32"
        panels = Panels.of(kind, weight.shape[1], weight, isa=recorder.isa)
    else:
        moved = weight.to_panels(recorder.isa)
        if moved is None:
            taken = torch.empty(ids.shape[0], weight.k, device="meta")
            found: Tensor = recorder.note(ops.embedding.body, (ids, weight, scale), {}, taken)
            return found
        panels = moved
    out, y = recorder.make(panels.k, False)
    recorder.nodes.append(
        Node(
            Opcode.EMBEDDING, False, [None, None], [y], [panels.data], panels.n, panels.k,
            a=[FORMATS.index(panels.kind)], f=[scale],
        )
    )  # fmt: skip
    return out


@LOWERINGS.of(ops.rms_norm)
def rms_norm(recorder: Recorder, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    source = recorder.buffer(x)
    out, y = recorder.make(source.width, source.sampled)
    node = Node(
        Opcode.RMS_NORM,
        source.sampled,
        [source, None],
        [y],
        [_floats(weight)],
        k=source.width,
        a=[0],
        f=[eps],
    )
    recorder.nodes.append(node)
    return out


@LOWERINGS.of(ops.add_rms_norm)
def add_rms_norm(
    recorder: Recorder, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    a, b = recorder.buffer(x), recorder.buffer(residual)
    assert a.sampled == b.sampled
    out, y = recorder.make(a.width, a.sampled)
    total, h = recorder.make(a.width, a.sampled)
    node = Node(Opcode.ADD_RMS_NORM, a.sampled, [a, b], [y, h], [_floats(weight)], k=a.width, a=[0], f=[eps])
    recorder.nodes.append(node)
    return out, total


@LOWERINGS.of(ops.add)
def add(recorder: Recorder, x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        return NotImplemented
    a, b = recorder.buffer(x), recorder.buffer(y)
    out, total = recorder.make(a.width, a.sampled)
    recorder.nodes.append(Node(Opcode.ADD, a.sampled, [a, b], [total], k=a.width))
    return out


@LOWERINGS.of(ops.linear)
@LOWERINGS.of(ops.logits)
def linear(
    recorder: Recorder, x: Tensor, w: Weight, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    panels = w.to_panels(recorder.isa)
    if panels is None:  # a call, or the program would keep what the storage holds now, in float32
        like = torch.empty(x.shape[0], w.n, device="meta")
        made: Tensor = recorder.note(ops.linear.body, (x, w, bias, addend), {}, like)
        return made
    source = recorder.buffer(x)
    assert source.width == w.k
    out, y = recorder.make(w.n, source.sampled)
    added = None if addend is None else recorder.buffer(addend)
    recorder.nodes.append(linear_node(panels, bias, [source, added], y))
    return out


def linear_node(panels: Panels, bias: Tensor | None, given: list[Buffer | None], made: Buffer) -> Node:
    """``given``: x, and what is added or None."""
    tensors = [panels.data, None if bias is None else _floats(bias)]
    a = [FORMATS.index(panels.kind), ACTIVATIONS["none"], 0, 0]
    return Node(Opcode.LINEAR, made.sampled, given, [made], tensors, panels.n, panels.k, a)


@LOWERINGS.of(lora)
def adapters(recorder: Recorder, x: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """A call: which rows have which adapter is known when a step runs."""
    like = torch.empty(x.shape[0], stack.n, device="meta")
    made: Tensor = recorder.note(lora.body, (x, stack, rows, sampled), {}, like)
    return made


@LOWERINGS.of(lora_embedding)
def adapted_embedding(recorder: Recorder, ids: Tensor, stack: Stack, rows: Rows) -> Tensor:
    like = torch.empty(ids.shape[0], stack.n, device="meta")
    made: Tensor = recorder.note(lora_embedding.body, (ids, stack, rows), {}, like)
    return made


@LOWERINGS.of(ops.qk_norm_rope_store)
def qk_norm_rope_store(
    recorder: Recorder,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: KVLayer,
    out_loc: Tensor,
) -> Tensor:
    known = recorder.part(positions) == "positions" and recorder.part(out_loc) == "out_loc"
    if not (known and _native(kv)):
        return NotImplemented
    source, dim, kv_heads = recorder.buffer(qkv), kv.k.shape[3], kv.k.shape[2]
    heads = source.width // dim - 2 * kv_heads
    out, q = recorder.make(heads * dim, source.sampled)
    norms = [None if w is None else _floats(w) for w in (q_norm, k_norm)]
    a = [kv_heads, cos_sin.shape[1], *_layout(kv), 0, kv.group]
    tensors = [_floats(cos_sin), *norms, kv.k_scales, kv.v_scales]
    recorder.nodes.append(
        Node(Opcode.ROPE_STORE, source.sampled, [source, None], [q], tensors, heads, dim, a, [eps], keep=kv)
    )
    return out


@LOWERINGS.of(ops.attention)
def attention(
    recorder: Recorder,
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
    if not recorder.has(batch) or not _native(kv):
        return NotImplemented
    source, dim, kv_heads = recorder.buffer(q), kv.k.shape[3], kv.k.shape[2]
    out, y = recorder.make(source.width, source.sampled)
    a = [kv_heads, -window if chunked else window, *_layout(kv), 0, kv.group]
    heads = source.width // dim
    recorder.nodes.append(
        Node(
            Opcode.ATTENTION,
            source.sampled,
            [source, None],
            [y],
            [*(None if x is None else _floats(x) for x in (sinks, slopes)), None, kv.k_scales, kv.v_scales],
            heads,
            dim,
            a,
            [scale, softcap],
            keep=kv,
        )
    )
    return out


@LOWERINGS.of(ops.act_mul)
def act_mul(recorder: Recorder, x: Tensor, kind: Activation) -> Tensor:
    source = recorder.buffer(x)
    out, y = recorder.make(source.width // 2, source.sampled)
    recorder.nodes.append(
        Node(Opcode.ACT_MUL, source.sampled, [source, None], [y], n=y.width, a=[0, ACTIVATIONS[kind]])
    )
    return out


@LOWERINGS.of(ops.moe)
def moe(
    recorder: Recorder,
    x: Tensor,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases = NO_BIASES,
    routed: Tensor | None = None,
    counts: ExpertCounts | None = None,
    adapted: Adapted | None = None,
) -> Tensor:
    """Routing with torch, between native segments; each expert is a body, or two with an activation
    between them that is torch's. ``adapted``: what adapters add to both."""
    if not (gate_up.native and down.native):
        return NotImplemented
    count = len(routing.here(router.n))
    widths = x.shape[1], down.k
    first = [(w, _row(biases.gate_up, e)) for e, w in enumerate(gate_up.split(count))]
    second = [(w, _row(biases.down, e)) for e, w in enumerate(down.split(count))]
    if isinstance(activation, Clamped) or activation == "relu2" or adapted is not None:
        layers = [recorder.body(width, partial(ops.linear, w=w, bias=bias))
                  for width, part in zip(widths, (first, second)) for w, bias in part]  # fmt: skip
    else:
        kind = activation

        def mlp(x: Tensor, expert: int) -> Tensor:
            return ops.linear(ops.act_mul(ops.linear(x, *first[expert]), kind), *second[expert])

        layers = [recorder.body(widths[0], partial(mlp, expert=e)) for e in range(count)]

    def run(views: list[Tensor], parts: list[Callable[[Tensor], Tensor]]) -> None:
        x, *more, y = views

        def expert(index: int, rows: Tensor, token: Tensor) -> Tensor:
            products = parts[index], parts[(count + index) % len(parts)]
            if adapted is not None:
                return lora_expert(adapted, index, *products, rows, token, activation)
            made = products[0](rows)
            return made if len(parts) == count else products[1](ops.gated(made, activation))

        y.copy_(ops.mix(x, router, expert, routing, biases, more[0] if more else None, counts))

    source = recorder.buffer(x)
    seen = None if routed is None else recorder.buffer(routed)
    out, y = recorder.make(source.width, source.sampled)
    recorder.nodes.append(Node(Opcode.PYTHON, source.sampled, [source, seen], [y], fn=run, bodies=layers))
    return out


@LOWERINGS.of(lora_moe)
def adapted_moe(recorder: Recorder, adapted: Adapted, x: Tensor, *how: Any) -> Tensor:
    lower: Callable[..., Tensor] = moe
    made = lower(recorder, x, *how, adapted=adapted)
    if made is NotImplemented:
        like = torch.empty(x.shape, dtype=x.dtype, device="meta")
        made = recorder.note(lora_moe.body, (adapted, x, *how), {}, like)
    return made


@LOWERINGS.of(ops.self_attention)
def self_attention(
    recorder: Recorder, qkv: Tensor, batch: ForwardBatch, heads: int, scale: float, window: int = 0
) -> Tensor:
    source = recorder.buffer(qkv)
    dim = source.width // (3 * heads)
    if not recorder.has(batch) or dim > MAX_HEAD_DIM or window:
        return NotImplemented
    out, y = recorder.make(heads * dim, source.sampled)
    recorder.nodes.append(
        Node(Opcode.SELF_ATTENTION, source.sampled, [source, None], [y], n=heads, k=dim, f=[scale])
    )
    return out


@LOWERINGS.of(ops.layer_norm)
def layer_norm(recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    source = recorder.buffer(x)
    out, y = recorder.make(source.width, source.sampled)
    tensors: list[Tensor | None] = [_floats(weight), _floats(bias)]
    recorder.nodes.append(
        Node(Opcode.LAYER_NORM, source.sampled, [source, None], [y], tensors, k=source.width, f=[eps])
    )
    return out


@LOWERINGS.of(ops.activate)
def activate(recorder: Recorder, x: Tensor, kind: str) -> Tensor:
    if kind not in ACTIVATIONS:
        return NotImplemented
    source = recorder.buffer(x)
    out, y = recorder.make(source.width, source.sampled)
    recorder.nodes.append(
        Node(Opcode.ACTIVATE, source.sampled, [source, None], [y], k=source.width, a=[ACTIVATIONS[kind]])
    )
    return out


@LOWERINGS.of(ops.beside)
def beside(recorder: Recorder, x: Tensor, y: Tensor) -> Tensor:
    left, right = recorder.buffer(x), recorder.buffer(y)
    out, made = recorder.make(left.width + right.width, left.sampled)

    def join(views: list[Tensor]) -> None:
        views[2][:, : left.width] = views[0]
        views[2][:, left.width :] = views[1]

    recorder.nodes.append(Node(Opcode.PYTHON, left.sampled, [left, right], [made], fn=join))
    return out


@LOWERINGS.of(ops.gather)
def gather(recorder: Recorder, x: Tensor, rows: Tensor) -> Tensor:
    if recorder.part(rows) != "sample_rows":
        return NotImplemented
    source = recorder.buffer(x)
    out, y = recorder.make(source.width, True)
    recorder.nodes.append(Node(Opcode.GATHER, True, [source, None], [y], k=source.width))
    return out


@LOWERINGS.of(ops.all_reduce)
def all_reduce(recorder: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    return inplace(recorder, ranks.all_reduce, x)


@LOWERINGS.of(ops.arriving)
def arriving(
    recorder: Recorder, receive: Callable[[Tensor], None], ids: Tensor, width: int, dtype: torch.dtype
) -> Tensor:
    out, y = recorder.make(width, False)
    recorder.nodes.append(Node(Opcode.PYTHON, False, [None, None], [y], fn=lambda views: receive(views[0])))
    return out


@LOWERINGS.of(ops.inplace)
def inplace(recorder: Recorder, fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
    buffer = recorder.buffer(x)
    recorder.nodes.append(
        Node(Opcode.PYTHON, buffer.sampled, [buffer, None], [buffer], fn=lambda views: fn(views[0]))
    )
    return x


@LOWERINGS.of(ops.tap)
def tap(recorder: Recorder, fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
    recorder.taps.append((fn, recorder.buffer(x)))
    return x


@LOWERINGS.of(ops.call)
def call(recorder: Recorder, fn: Callable[[Tensor, Tensor], None], x: Tensor, width: int) -> Tensor:
    source = recorder.buffer(x)
    out, y = recorder.make(width, source.sampled)
    recorder.nodes.append(
        Node(Opcode.PYTHON, source.sampled, [source, None], [y], fn=lambda views: fn(*views))
    )
    return out


def _floats(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def _row(table: Tensor | None, index: int) -> Tensor | None:
    return None if table is None else table[index]


def _native(kv: KVLayer) -> bool:
    """Whether the kernels read and write such pages."""
    k, v = kv.k, kv.v
    types = k.dtype == v.dtype and k.dtype in CACHED
    alike = k.shape == v.shape and k.stride() == v.stride() and k.stride(3) == 1
    scales = all(x is None or x.is_contiguous() for x in (kv.k_scales, kv.v_scales))
    return types and alike and scales and k.shape[3] <= MAX_HEAD_DIM


def _layout(kv: KVLayer) -> list[int]:
    """Places 2 to 7 of ``a`` in rope_store and attention: type, strides in elements, addresses."""
    page, token, head, _ = kv.k.stride()
    return [CACHED.index(kv.k.dtype), page, token, head, kv.k.data_ptr(), kv.v.data_ptr()]
