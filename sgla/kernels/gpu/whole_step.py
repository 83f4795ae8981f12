"""The largest rule: a whole decode step of one row as one kernel (``cuda/decode_step.py``,
``mixture_step.py``), for a record that has nothing but what the kernel computes up to its logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda.decode_step import HEAD_DIM, DecodeStep, DenseShape, LayerWeights
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
from sgla.kernels.gpu import mixture
from sgla.kernels.gpu.record import Node, Record, Ref
from sgla.kernels.gpu.rewrite import Work
from sgla.kernels.ops import KVLayer

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch


class Refused(Exception):
    """Why a record is not what the kernel computes."""


class Layer(NamedTuple):
    """A layer of the record. ``common``: what must be the same in all layers."""

    weights: LayerWeights | MixtureWeights
    kv: KVLayer
    common: tuple[Any, ...]
    norm: Tensor  # of what follows the layer


class Found(NamedTuple):
    """What ``DecodeStep`` is made of."""

    shape: DenseShape | MixtureShape
    layers: list[LayerWeights | MixtureWeights]
    kv: list[KVLayer]
    embedding: Tensor
    head: Tensor
    norm: Tensor
    cos_sin: Tensor
    eps: float
    scale: float


def refuses(work: Work, logits: Node) -> str | None:
    if work.asked.decode is None:
        return "it takes decode rows alone, and native decode attention"
    if any(work.asked.sizes[of] > 1 for of in ("tokens", "rows")):
        return "it computes one row"
    try:
        found = _found(work.record)
    except Refused as error:
        return str(error)
    pays = found.shape.pays(len(found.layers), found.head.shape[0])
    return None if pays else "its blocks or bytes do not fit this model or GPU"


def make(work: Work, logits: Node) -> list[Node]:
    for node in list(work.nodes.values()):
        work.drop(node)
    found = _found(work.record)
    given = {"step": DecodeStep(*found), "group": found.kv[0].group}
    given |= {"batch": work.input("batch"), "out": work.input("out")}
    return [Node("whole step", _run, given, logits.results, logits.rows)]


def _run(step: DecodeStep, group: int, batch: ForwardBatch, out: Tensor) -> Tensor:
    step(batch.ids, batch.positions, batch.slots, batch.kv_len, batch.pages(group), out)
    return out


def _found(record: Record) -> Found:
    """Raises Refused."""
    nodes = iter(record.nodes)
    embed = _next(nodes, ops.embedding)
    h = Ref(embed.results[0])
    first = _next(nodes, ops.rms_norm, h)
    x, norm, eps, layers = Ref(first.results[0]), first.given["weight"], first.given["eps"], list[Layer]()
    node = next(nodes)
    while node.op is not ops.logits:
        layer, x, h = _layer(node, nodes, x, h, norm, eps)
        layers.append(layer)
        norm, node = layer.norm, next(nodes)
    if x not in node.given.values() or next(nodes, None) is not None:
        raise Refused("something follows the last norm but the output layer")
    words, head = embed.given["weight"], _plain(node)
    if not layers or len({layer.common for layer in layers}) > 1 or embed.given["scale"] != 1.0:
        raise Refused("layers differ, or embeddings are scaled")
    if words.kind != "bf16":
        raise Refused(f"embeddings are {words.kind}")
    shape, cos_sin, _, scale = layers[0].common
    weights, kv = [layer.weights for layer in layers], [layer.kv for layer in layers]
    return Found(shape, weights, kv, words.data, head, norm, cos_sin, eps, scale)


def _layer(
    node: Node, nodes: Iterator[Node], x: Ref, h: Ref, norm: Tensor, eps: float
) -> tuple[Layer, Ref, Ref]:
    """The layer that begins with ``node``, which reads x, and what goes on behind it."""
    qkv = _linear(node, x)
    heads = _next(nodes, ops.qk_norm_rope_store, Ref(node.results[0]))
    attention = _next(nodes, ops.attention, Ref(heads.results[0]))
    out = _next(nodes, ops.linear, Ref(attention.results[0]))
    added = _next(nodes, ops.add_rms_norm, Ref(out.results[0]))
    kv, q_norm, k_norm = (heads.given[name] for name in ("kv", "q_norm", "k_norm"))
    whole = kv.k.shape[3] == kv.v.shape[3] == heads.given["cos_sin"].shape[1] == HEAD_DIM
    if not whole or kv.k.dtype != torch.bfloat16:
        raise Refused(f"heads are not of {HEAD_DIM} dimensions in bfloat16, all of which are rotated")
    given = attention.given
    if given["window"] or given["softcap"] or given["sinks"] is not None or given["slopes"] is not None:
        raise Refused("attention has a window, a soft cap, sinks or slopes")
    norms = norm, added.given["weight"], q_norm, k_norm
    hidden, width, kv_heads, page_size = qkv.shape[1], out.given["w"].k, kv.k.shape[2], kv.k.shape[1]
    counts = hidden, width // HEAD_DIM, kv_heads
    node = next(nodes)
    weights: LayerWeights | MixtureWeights
    if node.op is ops.moe and node.given["x"] == Ref(added.results[0]) and node.given["activation"] == "silu":
        routing, biases = node.given["routing"], node.given["biases"]
        if (why := mixture.refuses(routing, "silu", biases)) is not None:
            raise Refused(why)
        router, gate_up, down = (_bf16(node.given[name]) for name in ("router", "gate_up", "down"))
        weights = MixtureWeights(qkv, _plain(out), router, gate_up, down, *norms)
        numbers = node.given["down"].k, node.given["router"].n, routing.top_k, routing.normalize
        shape: Any = MixtureShape(*counts, *numbers, q_norm is not None, page_size)
    else:
        gate_up = _linear(node, Ref(added.results[0]))
        act = _next(nodes, ops.act_mul, Ref(node.results[0]))
        node = _next(nodes, ops.linear, Ref(act.results[0]))
        if act.given["kind"] != "silu":
            raise Refused("gates are not SiLU")
        weights = LayerWeights(qkv, _plain(out), gate_up, _plain(node), *norms)
        shape = DenseShape(*counts, node.given["w"].k, q_norm is not None, page_size)
    after = _next(nodes, ops.add_rms_norm, Ref(node.results[0]))
    if added.given["residual"] != h or after.given["residual"] != Ref(added.results[1]):
        raise Refused("the residual stream takes another way")
    if {added.given["eps"], after.given["eps"], heads.given["eps"]} != {eps}:
        raise Refused("norms have different epsilons")
    common = shape, heads.given["cos_sin"], eps, attention.given["scale"]
    return Layer(weights, kv, common, after.given["weight"]), Ref(after.results[0]), Ref(after.results[1])


def _next(nodes: Iterator[Node], op: Any, x: Ref | None = None) -> Node:
    """The next node, which must be this op, of x if one is given."""
    node = next(nodes, None)
    if node is None or node.op is not op or (x is not None and node.reads[0] != x.number):
        raise Refused(f"{op.name} does not come where it is expected")
    return node


def _linear(node: Node, x: Ref) -> Tensor:
    if node.op is not ops.linear or node.given["x"] != x:
        raise Refused("a layer does not begin with a linear one")
    return _plain(node)


def _plain(node: Node) -> Tensor:
    """The weight of a linear layer that has nothing else."""
    if node.given["bias"] is not None or node.given.get("addend") is not None:
        raise Refused("linear layers have biases or addends")
    return _bf16(node.given["w"])


def _bf16(weight: Any) -> Tensor:
    if weight.kind != "bf16":
        raise Refused(f"weights are {weight.kind}")
    data: Tensor = weight.data
    return data
