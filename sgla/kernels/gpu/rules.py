"""Rewrite rules: which kernel does the work of several ops, where, and why not elsewhere.

A rule has a *pattern*, a chain of ops of which each alone reads the first result of the one before; a
condition, ``refuses``, that says why the kernel cannot be used or would not pay at this number of rows, after
measurements on an H200; and ``make``, which puts other nodes in the place of the chain. The first rule of an
op that is not refused wins, so the cheapest stands first. What no rule takes runs as ``ops.py`` has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda.decode_attention import Projection, rotates
from sgla.kernels.gpu import (
    convolution,
    delta,
    e4m3,
    experts,
    few,
    integers,
    invariant,
    norms,
    tiles,
    whole_step,
)
from sgla.kernels.gpu.adapters import EXPAND, SHRINK
from sgla.kernels.gpu.record import Node, Record
from sgla.kernels.gpu.rewrite import Asked, Rule, Work, rewrite
from sgla.kernels.ops import AddedNorm, Ranks, Scoring, Together


def query_refuses(work: Work, heads: Node, *behind: Node) -> str | None:
    if work.asked.decode is None:
        return "it takes decode rows alone, and native decode attention"
    if not work.asked.decode.fuses(heads.given["kv"]):
        return "native decode attention does not take these heads"
    if heads.given.get("joined"):
        return "v is what k was before its norm"
    rotated, dim = heads.given["cos_sin"].shape[1], heads.given["kv"].k.shape[-1]
    if not rotates(rotated, dim) or (rotated < dim and heads.given["kv"].scales is not None):
        return f"{rotated} of the {dim} dims of heads are rotated"
    return None


def scaled_query(work: Work, heads: Node, scaled: Node, attention: Node) -> list[Node]:
    [node] = query(work, heads, attention)
    factors = {name: scaled.given[name] for name in ("by", "also")}
    return [Node(node.op, _scaled_query, node.given | factors | {"decode": node.fn}, node.results, node.rows)]


def _scaled_query(
    decode: Any, projection: Projection, by: Tensor, also: Tensor | None, **given: Any
) -> Tensor:
    made: Tensor = decode(projection=projection._replace(by=by, also=also), **given)
    return made


def query(work: Work, heads: Node, attention: Node) -> list[Node]:
    scoring = Scoring(*(attention.given[name] for name in Scoring._fields))
    given = {name: attention.given[name] for name in ("kv", "batch")}
    projection = tiles.projection(heads.given)._replace(v_norm=heads.op is ops.qkv_norm_rope_store)
    given |= {"q": heads.given["qkv"], "scoring": scoring, "projection": projection}
    return [Node("decode", work.asked.decode.forward, given, attention.results, attention.rows)]


def reduced_refuses(work: Work, total: Node, add: Node) -> str | None:
    x = torch.empty(work.rows(add), len(add.given["weight"]), dtype=_made(work, add), device="meta")
    if not total.given["ranks"].norms(x):
        return "the ranks exchange fewer bytes at once"
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def reduced(work: Work, total: Node, add: Node) -> list[Node]:
    given = add.given | {"x": total.given["x"], "ranks": total.given["ranks"]}
    return [Node("reduced norm", _reduced, given, add.results, add.rows, add.given["residual"].number)]


def _reduced(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ranks: Ranks, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return ranks.all_reduce_norm(x, AddedNorm(residual, weight, eps, bias)), residual


def scattered_refuses(work: Work, total: Node, add: Node) -> str | None:
    if not total.given["ranks"].exchanges:
        return "the ranks exchange fewer bytes at once"
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def scattered(work: Work, total: Node, add: Node) -> list[Node]:
    given = add.given | total.given
    return [Node("scattered norm", _scattered, given, add.results, add.rows, given["residual"].number)]


def _scattered(
    y: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ranks: Together,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return experts.scatter_norm(y, x, AddedNorm(residual, weight, eps, bias), ranks), residual


def summed_refuses(work: Work, total: Node, norm: Node) -> str | None:
    like = torch.empty(work.rows(norm), len(norm.given["weight"]), dtype=_made(work, norm), device="meta")
    return None if total.given["ranks"].norms(like) else "the ranks exchange fewer bytes at once"


def summed(work: Work, total: Node, norm: Node) -> list[Node]:
    given = norm.given | {"x": total.given["x"], "ranks": total.given["ranks"]}
    return [Node("summed norm", _summed, given, norm.results, norm.rows)]


def _summed(x: Tensor, weight: Tensor, eps: float, ranks: Ranks) -> Tensor:
    return ranks.all_reduce_norm(x, AddedNorm(None, weight, eps))


def expanded_gate_refuses(work: Work, expand: Node, act: Node) -> str | None:
    if why := tiles.expanded_gate_refuses(work, expand, act):
        return why
    first, *others = [node for node in work.record.nodes if act.results[0] in node.reads] or [act]
    if others or first.op is not ops.linear or few.refuses(work, first) is None or e4m3.refuses(work, first):
        return None
    return "the product behind it does the gate where it rounds"


def _made(work: Work, node: Node) -> torch.dtype:
    return work.record.dtypes[node.results[0]]


def _always(work: Work, *chain: Node) -> None:
    return None


GATED_HEADS = (ops.gated_rms_norm, torch.Tensor.flatten, ops.linear)
SCALED_HEADS = (ops.qk_norm_rope_store, ops.scale_queries, ops.attention)
BOTH = (ops.add, ops.rms_norm, ops.scaled_add)
RULES: dict[Any, tuple[Rule, ...]] = {
    ops.linear: (
        Rule("tiles", (ops.linear,), tiles.refuses, tiles.make),
        Rule("norm + few rows", (ops.rms_norm, ops.linear), few.refuses, few.make),
        Rule("gated + few rows", (ops.sigmoid_mul, ops.linear), few.by_refuses, few.by),
        Rule("gated + few rows", GATED_HEADS, few.by_refuses, few.by),
        Rule("few rows", (ops.linear,), few.refuses, few.make),
        Rule("norm + few integers", (ops.rms_norm, ops.linear), integers.few_refuses, integers.few),
        Rule("few integers", (ops.linear,), integers.few_refuses, integers.few),
        Rule("integers", (ops.linear,), integers.many_refuses, integers.many),
        Rule("integers, unpacked for cuBLAS", (ops.linear,), integers.long_refuses, integers.unpacked),
        Rule("gate and e4m3", (ops.act_mul, ops.linear), e4m3.refuses, e4m3.gate),
        Rule("norm + e4m3", (ops.rms_norm, ops.linear), e4m3.refuses, e4m3.norm),
        Rule("e4m3", (ops.linear,), e4m3.behind_norm_refuses, e4m3.behind_norm),
        Rule("e4m3 tiles", (ops.linear,), e4m3.tiles_refuses, e4m3.tiles),
    ),
    ops.logits: (
        Rule(whole_step.NAME, (ops.logits,), whole_step.refuses, whole_step.make),
        Rule("tiles + drawn", (ops.logits,), tiles.draw_refuses, tiles.draw),
        Rule("tiles + logits", (ops.logits,), tiles.logits_refuses, tiles.logits),
        Rule("norm + few rows + logits", (ops.rms_norm, ops.logits), few.refuses, few.logits),
        Rule("few rows + logits", (ops.logits,), few.refuses, few.logits),
        Rule("few integers + logits", (ops.logits,), integers.few_refuses, integers.few_logits),
    ),
    ops.gathered: (Rule("rounded rows", (ops.gathered,), e4m3.gathered_refuses, e4m3.gathered),),
    torch.Tensor.mul: (
        Rule("scaled", (few.NAME, torch.Tensor.mul), few.scale_refuses, few.scale),
        Rule("experts scaled", (experts.NAME, torch.Tensor.mul), experts.scale_refuses, experts.scale),
    ),
    EXPAND: (Rule("beside", (tiles.NAME, EXPAND), tiles.beside_refuses, tiles.beside),),
    ops.act_mul: (
        Rule("gate", (few.NAME, ops.act_mul), few.gate_refuses, few.gate),
        Rule("gate", (integers.NAME, ops.act_mul), few.gate_refuses, few.gate),
        Rule("gate", (tiles.NAME, ops.act_mul), tiles.gate_refuses, tiles.gate),
        Rule("gate", (EXPAND, ops.act_mul), expanded_gate_refuses, tiles.expanded_gate),
        Rule("gate", (e4m3.PRODUCT, ops.act_mul), e4m3.gated_refuses, e4m3.gated),
        Rule("invariant gate", (ops.linear, ops.act_mul), invariant.gate_refuses, invariant.gate, True),
    ),
    ops.add_rms_norm: (
        Rule("added", (few.NAME, ops.add_rms_norm), few.add_refuses, few.add),
        Rule("added", (few.SCALED, ops.add_rms_norm), few.add_refuses, few.add),
        Rule("added", (integers.NAME, ops.add_rms_norm), few.add_refuses, few.add),
        Rule("experts added", (experts.NAME, ops.add_rms_norm), experts.sum_refuses, experts.sum_add),
        Rule("added", (tiles.NAME, ops.add_rms_norm), tiles.add_refuses, tiles.add),
        Rule("sent", (few.NAME, ops.all_reduce, ops.add_rms_norm), few.send_refuses, few.send),
        Rule("sent", (tiles.NAME, ops.all_reduce, ops.add_rms_norm), tiles.send_refuses, tiles.send),
        Rule("norm behind the ranks' sum", (ops.all_reduce, ops.add_rms_norm), reduced_refuses, reduced),
        Rule(
            "norm behind the ranks' sum", (ops.reduce_scatter, ops.add_rms_norm), scattered_refuses, scattered
        ),
        Rule("shared added", (ops.gated_add, ops.add_rms_norm), experts.shared_refuses, experts.shared_add),
        Rule("norm and e4m3", (ops.add_rms_norm,), e4m3.add_refuses, e4m3.add),
        Rule("norm, added", (ops.rms_norm, ops.add_rms_norm), norms.add_refuses, norms.add),
    ),
    ops.scaled_add: (
        Rule("norm, added", BOTH, norms.both_refuses, norms.both),
        Rule("norm, added", (ops.rms_norm, ops.scaled_add), norms.scaled_refuses, norms.scaled),
    ),
    ops.rms_norm: (
        Rule("norm behind the ranks' sum", (ops.all_reduce, ops.rms_norm), summed_refuses, summed),
        Rule("norm beside", (ops.rms_norm,), norms.beside_refuses, norms.beside),
    ),
    ops.add_layer_norm: (
        Rule("sent", (few.NAME, ops.all_reduce, ops.add_layer_norm), few.send_refuses, few.send),
        Rule("sent", (tiles.NAME, ops.all_reduce, ops.add_layer_norm), tiles.send_refuses, tiles.send),
        Rule("norm behind the ranks' sum", (ops.all_reduce, ops.add_layer_norm), reduced_refuses, reduced),
        Rule(
            "norm behind the ranks' sum",
            (ops.reduce_scatter, ops.add_layer_norm),
            scattered_refuses,
            scattered,
        ),
    ),
    ops.qk_norm_rope_store: (
        Rule("heads", (tiles.NAME, ops.qk_norm_rope_store), tiles.heads_refuses, tiles.heads),
    ),
    ops.attention: (
        Rule("heads + decode", (ops.qk_norm_rope_store, ops.attention), query_refuses, query),
        Rule("heads, scaled + decode", SCALED_HEADS, query_refuses, scaled_query),
        Rule("heads + decode", (ops.qkv_norm_rope_store, ops.attention), query_refuses, query),
    ),
    ops.causal_conv: (Rule("convolved", convolution.CHAIN, convolution.refuses, convolution.make),),
    ops.gated_delta: (Rule("gates and delta", (ops.gated_delta,), delta.refuses, delta.make),),
    ops.moe: (
        Rule("add + experts", (tiles.NAME, ops.add_rms_norm, ops.moe), experts.add_refuses, experts.add),
        Rule("add + experts", (ops.add_rms_norm, ops.moe), experts.add_refuses, experts.add),
        Rule("norm + experts", (ops.rms_norm, ops.moe), experts.norm_refuses, experts.norm),
        Rule("experts", (ops.moe,), _always, experts.alone),
    ),
}


def apply(record: Record, asked: Asked) -> Work:
    """The nodes of ``record`` with the rules applied, for a step as it is ``asked`` for."""
    work = rewrite(record, asked, RULES)
    for node in work.named(tiles.NAME):
        tiles.settle(work, node)
    for node in work.named(SHRINK):
        tiles.take_unscaled(work, node)
    for node in work.named(tiles.UNSCALED):
        if not work.uses.get(node.results[0]):
            work.drop(node)
    delta.settle(work)
    return work
