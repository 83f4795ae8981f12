"""The largest rule: a whole decode step of one row as one kernel (``cuda/decode_step.py``,
``mixture_step.py``), for a record that has nothing but what the kernel computes up to its logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda.decode_step import HEAD_DIM, Copies, DecodeStep, DenseShape, LayerWeights, StepInbox
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
from sgla.kernels.gpu import mixture
from sgla.kernels.gpu.record import Node, Record, Ref
from sgla.kernels.gpu.rewrite import Work
from sgla.kernels.ops import KVLayer, Ranks

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch


NAME = "whole step"


class Refused(Exception):
    """Why a record is not what the kernel computes."""


class Stream(NamedTuple):
    """What goes on between halves of layers: numbers that a norm has made, and the residual stream before
    it. ``copy``: where the stream is copied to."""

    x: Ref
    h: Ref
    norm: Tensor
    eps: float
    copy: Tensor | None
    ranks: Ranks | None = None  # over which what was added is summed


class Layer(NamedTuple):
    """A layer of the record. ``common``: what must be the same in all layers."""

    weights: LayerWeights | MixtureWeights
    kv: KVLayer
    common: tuple[Any, ...]
    ranks: Ranks | None  # over which o and down are summed


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
    inbox: StepInbox | None
    copies: Copies | None


def refuses(work: Work, logits: Node) -> str | None:
    if work.asked.decode is None:
        return "it takes decode rows alone, and native decode attention"
    if any(work.asked.sizes[of] > 1 for of in ("tokens", "rows")):
        return "it computes one row"
    try:
        _found(work.record)
    except Refused as error:
        return str(error)
    return None


def make(work: Work, logits: Node) -> list[Node]:
    for node in list(work.nodes.values()):
        work.drop(node)
    found = _found(work.record)
    given = {"step": DecodeStep(*found), "group": found.kv[0].group}
    given |= {"batch": work.input("batch"), "out": work.input("out")}
    return [Node(NAME, _run, given, logits.results, logits.rows)]


def _run(step: DecodeStep, group: int, batch: ForwardBatch, out: Tensor) -> Tensor:
    step(batch.ids, batch.positions, batch.slots, batch.kv_len, batch.pages(group), out)
    return out


def _found(record: Record) -> Found:
    """Raises Refused."""
    nodes = iter(record.nodes)
    embed = _next(nodes, ops.embedding)
    stream = _normed(next(nodes, None), nodes, Ref(embed.results[0]))
    layers, inputs = list[Layer](), list[Tensor | None]()
    node = next(nodes)
    while node.op not in (ops.logits, ops.copied):
        inputs.append(stream.copy)
        layer, stream = _layer(node, nodes, stream)
        layers.append(layer)
        node = next(nodes)
    last, x = None, stream.x
    if node.op is ops.copied and node.given["x"] == x:
        last, x, node = _row(node), Ref(node.results[0]), next(nodes)
    if node.op is not ops.logits or x not in node.given.values() or next(nodes, None) is not None:
        raise Refused("something follows the last norm but the output layer")
    words, head = embed.given["weight"], _plain(node)
    alike = layers and len({(layer.common, id(layer.ranks)) for layer in layers}) == 1
    if not alike or embed.given["scale"] != 1.0:
        raise Refused("layers differ, or embeddings are scaled")
    if words.kind != "bf16":
        raise Refused(f"embeddings are {words.kind}")
    shape, cos_sin, eps, scale = layers[0].common
    copied = last is not None or any(x is not None for x in inputs)
    shape = shape._replace(copied=copied)
    if not shape.pays(len(layers), head.shape[0]):
        raise Refused("its blocks or bytes do not fit this model or GPU")
    ranks, inbox = layers[0].ranks, None
    if ranks is not None and len(words.data) != len(head) * ranks.size:
        raise Refused("ranks have more or less of the output layer than others, and must all do alike")
    if ranks is not None and (inbox := ranks.for_steps(shape)) is None:
        raise Refused("the ranks cannot store into each other's memory")
    weights, kv = [layer.weights for layer in layers], [layer.kv for layer in layers]
    tables, copies = (words.data, head, stream.norm, cos_sin), Copies(inputs, last) if copied else None
    return Found(shape, weights, kv, *tables, eps, scale, inbox, copies)


def _layer(node: Node, nodes: Iterator[Node], stream: Stream) -> tuple[Layer, Stream]:
    """The layer that begins with ``node``, which reads the stream, and what goes on behind it."""
    qkv = _linear(node, stream.x)
    heads = _next(nodes, ops.qk_norm_rope_store, Ref(node.results[0]))
    attention = _next(nodes, ops.attention, Ref(heads.results[0]))
    out = _next(nodes, ops.linear, Ref(attention.results[0]))
    middle = _added(nodes, out, stream.h)
    ranks = middle.ranks
    kv, q_norm, k_norm = (heads.given[name] for name in ("kv", "q_norm", "k_norm"))
    whole = kv.k.shape[3] == kv.v.shape[3] == heads.given["cos_sin"].shape[1] == HEAD_DIM
    if not whole or kv.k.dtype != torch.bfloat16:
        raise Refused(f"heads are not of {HEAD_DIM} dimensions in bfloat16, all of which are rotated")
    given = attention.given
    if given["window"] or given["softcap"] or given["sinks"] is not None or given["slopes"] is not None:
        raise Refused("attention has a window, a soft cap, sinks or slopes")
    norms = stream.norm, middle.norm, q_norm, k_norm
    hidden, width, kv_heads, page_size = qkv.shape[1], out.given["w"].k, kv.k.shape[2], kv.k.shape[1]
    counts = hidden, width // HEAD_DIM, kv_heads
    node = next(nodes)
    weights: LayerWeights | MixtureWeights
    if node.op is ops.moe and node.given["x"] == middle.x and node.given["activation"] == "silu":
        routing, biases = node.given["routing"], node.given["biases"]
        if (why := mixture.refuses(routing, "silu", biases)) is not None:
            raise Refused(why)
        router, gate_up, down = (_bf16(node.given[name]) for name in ("router", "gate_up", "down"))
        weights = MixtureWeights(qkv, _plain(out), router, gate_up, down, *norms)
        numbers = node.given["down"].k, node.given["router"].n, routing.top_k, routing.normalize
        size = 1 if ranks is None else ranks.size
        shape: Any = MixtureShape(*counts, *numbers, q_norm is not None, page_size, size)
    elif ranks is not None:
        raise Refused("several ranks are slower with it, but for mixtures")
    else:
        gate_up = _linear(node, middle.x)
        act = _next(nodes, ops.act_mul, Ref(node.results[0]))
        node = _next(nodes, ops.linear, Ref(act.results[0]))
        if act.given["kind"] != "silu":
            raise Refused("gates are not SiLU")
        weights = LayerWeights(qkv, _plain(out), gate_up, _plain(node), *norms)
        shape = DenseShape(*counts, node.given["w"].k, q_norm is not None, page_size)
    after = _added(nodes, node, middle.h)
    if after.ranks is not ranks:
        raise Refused("not both halves of a layer are summed over the ranks")
    if middle.copy is not None:
        raise Refused("the residual stream is copied within a layer")
    if {stream.eps, middle.eps, after.eps} != {heads.given["eps"]}:
        raise Refused("norms have different epsilons")
    common = shape, heads.given["cos_sin"], stream.eps, attention.given["scale"]
    return Layer(weights, kv, common, ranks), after


def _added(nodes: Iterator[Node], made: Node, h: Ref) -> Stream:
    """Behind the add and norm of the stream ``h`` and what ``made`` makes, or its sum over the ranks."""
    node, x, ranks = next(nodes, None), Ref(made.results[0]), None
    if node is not None and node.op is ops.all_reduce:
        total = _expect(node, ops.all_reduce, x)
        node, x, ranks = next(nodes, None), Ref(total.results[0]), total.given["ranks"]
    if node is not None and node.op is ops.add:  # who copies the sum wants it apart
        if [node.given["x"], node.given["y"]] != [h, x]:
            raise Refused("the residual stream takes another way")
        return _normed(next(nodes, None), nodes, Ref(node.results[0]))._replace(ranks=ranks)
    node = _expect(node, ops.add_rms_norm, x)
    if node.given["residual"] != h:
        raise Refused("the residual stream takes another way")
    x, h = (Ref(number) for number in node.results)
    return Stream(x, h, node.given["weight"], node.given["eps"], None, ranks)


def _normed(node: Node | None, nodes: Iterator[Node], h: Ref) -> Stream:
    """Behind the norm of ``h``, which is ``node``, or comes behind a copy."""
    copy = None
    if node is not None and node.op is ops.copied:
        copy, h, node = _row(_expect(node, ops.copied, h)), Ref(node.results[0]), next(nodes, None)
    norm = _expect(node, ops.rms_norm, h)
    return Stream(Ref(norm.results[0]), h, norm.given["weight"], norm.given["eps"], copy)


def _row(node: Node) -> Tensor:
    """Where the one row of a copy goes."""
    to: Tensor = node.given["to"]
    if to.dtype != torch.bfloat16:
        raise Refused("hidden states are not kept in bfloat16")
    return to[0]


def _next(nodes: Iterator[Node], op: Any, x: Ref | None = None) -> Node:
    """The next node, which must be this op, of x if one is given."""
    return _expect(next(nodes, None), op, x)


def _expect(node: Node | None, op: Any, x: Ref | None) -> Node:
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
