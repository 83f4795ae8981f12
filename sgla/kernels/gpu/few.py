"""Linear layers of few rows: the kernel of ``skinny_gemm``, with a norm or a gate before, and with what
follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.gpu.tuning import Product, algorithm_for
from sgla.kernels.ops import AddedNorm
from sgla.kernels.triton import delta, elementwise

NAME, SCALED = "few rows", "few rows, scaled"  # of nodes that other rules look for
E4M3 = "fp8", "fp8g128", "mxfp8"  # storages
WIDE = 8 << 20  # elements of a weight that is wide for few rows
GATES = {"silu": skinny_gemm.SILU, "gelu_tanh": skinny_gemm.GELU}


def refuses(work: Work, *chain: Node) -> str | None:
    linear = chain[-1]
    w, x = linear.given["w"], linear.given["x"]
    e4m3, rows = w.kind in E4M3, work.rows(linear)
    if not work.wgmma:
        return "the GPU has no wgmma"
    if rows > skinny_gemm.MAX_ROWS:
        return f"it takes at most {skinny_gemm.MAX_ROWS} rows"
    if w.kind not in ("bf16", *E4M3) or work.record.dtypes[x.number] != torch.bfloat16:
        return f"it multiplies bfloat16 with bfloat16 or e4m3, not {w.kind}"
    if w.k % (step := 128 if e4m3 else 64) or w.n < 64:
        return f"it needs an input width that is a multiple of {step}, and an output width from 64 on"
    maker = chain[0] if len(chain) == 2 else work.maker(x)
    behind_norm = maker is not None and maker.op == ops.rms_norm
    if w.kind == "mxfp8":  # which cuBLAS does not multiply
        behind_norm = len(chain) == 2
    if rows > 8 and w.data.numel() > WIDE and behind_norm:
        return "with more than 8 rows and a wide weight a norm apart and cuBLAS are faster"
    return None


def make(work: Work, *chain: Node) -> list[Node]:
    linear = chain[-1]
    w, bias = linear.given["w"], linear.given["bias"]
    made = {
        "x": linear.given["x"],
        "weight": w.data,
        "scales": w.scales,
        "norm": None,
        "eps": 0.0,
        "bias": bias,
    }
    if len(chain) == 2:
        norm = chain[0].given
        made |= {"x": norm["x"], "norm": norm["weight"], "eps": norm["eps"]}
    made |= {"epilogue": skinny_gemm.STORE, "out": None}
    return [Node(NAME, _run, made, linear.results, linear.rows)]


def _run(
    x: Tensor, weight: Tensor, epilogue: int, scales: Callable[[], Tensor | None], **given: Any
) -> Tensor:
    scale = scales()
    storage = "bf16" if scale is None else "fp8"
    n, k = weight.shape
    chosen = algorithm_for(x.shape[0], Product(n, k, epilogue in GATES.values(), storage)).config
    config = chosen if isinstance(chosen, skinny_gemm.Config) else None
    return skinny_gemm.linear(x, weight, epilogue=epilogue, scale=scale, config=config, **given)


def gate_refuses(work: Work, linear: Node, act: Node) -> str | None:
    return "the layer has a bias" if linear.given["bias"] is not None else None


def gate(work: Work, linear: Node, act: Node) -> list[Node]:
    epilogue = GATES[act.given["kind"]]
    return [linear.but({"epilogue": epilogue}, act.results)]


def add_refuses(work: Work, linear: Node, add: Node) -> str | None:
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def add(work: Work, linear: Node, add: Node) -> list[Node]:
    residual, (normed, total) = add.given["residual"], add.results
    given = linear.given | {"epilogue": skinny_gemm.ADD, "out": residual}
    return [
        Node("few rows, added", linear.fn, given, [total], add.rows, residual.number, linear.rule),
        norm_apart(normed, total, add),
    ]


def send_refuses(work: Work, linear: Node, total: Node, add: Node) -> str | None:
    columns = linear.given["weight"].shape[0]
    if linear.given["epilogue"] != skinny_gemm.STORE or columns % 8:
        return "something is done to what it makes, or its columns are no multiple of 8"
    if total.given["ranks"].sending(work.rows(linear), columns) is None:
        return "the ranks exchange fewer bytes at once"
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def send(work: Work, linear: Node, total: Node, add: Node) -> list[Node]:
    residual, ranks = add.given["residual"], total.given["ranks"]
    added = {"residual": residual, "norm_weight": add.given["weight"], "norm_eps": add.given["eps"]}
    added |= {"norm_bias": add.given.get("bias")}
    given = linear.given | added | {"ranks": ranks, "run": linear.fn}
    return [Node("few rows, sent", _run_sent, given, add.results, add.rows, residual.number, linear.rule)]


def _run_sent(
    run: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    norm_bias: Tensor | None,
    ranks: ops.Ranks,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    y = run(x=x, weight=weight, send=ranks.sending(x.shape[0], weight.shape[0]), **given)
    return ranks.all_reduce_norm(y, AddedNorm(residual, norm_weight, norm_eps, norm_bias), "all"), residual


def norm_apart(normed: int, total: int, add: Node) -> Node:
    """The norm of ``add_rms_norm``, where the sum is there."""
    given = {"x": Ref(total), "weight": add.given["weight"], "eps": add.given["eps"]}
    return Node(ops.rms_norm, None, given, [normed], add.rows)


def scale_refuses(work: Work, linear: Node, scaled: Node) -> str | None:
    factor = factor_of(scaled)
    return OTHER if factor is None or linear.given["epilogue"] != skinny_gemm.STORE else None


def scale(work: Work, linear: Node, scaled: Node) -> list[Node]:
    given = linear.given | {"factor": factor_of(scaled)}
    return [Node(SCALED, linear.fn, given, scaled.results, linear.rows, rule=linear.rule)]


def factor_of(scaled: Node) -> float | None:
    """The number that ``torch.Tensor.mul`` multiplies by, if it is one."""
    factor = scaled.given.get("_1")
    return factor if isinstance(factor, float) and len(scaled.given) == 2 else None


def by_refuses(work: Work, *chain: Node) -> str | None:
    gates, linear = chain[0], chain[-1]
    given, w = gates.given, linear.given["w"]
    if (why := refuses(work, linear)) is not None:
        return why
    if work.record.dtypes[given["gate"].number] != torch.bfloat16:
        return "the gate is not in bfloat16"
    return skinny_gemm.gate_refuses(work.rows(linear), w.k, given.get("weight"))


def by(work: Work, *chain: Node) -> list[Node]:
    """With what a gate lets through: ``sigmoid_mul``, or ``gated_rms_norm`` and its heads side by side."""
    gates, linear = chain[0].given, chain[-1]
    [node] = make(work, linear)
    more = {"x": gates["x"], "by": gates["gate"], "heads": gates.get("weight"), "eps": gates.get("eps", 0.0)}
    more["silu"] = gates.get("activation") == "silu"
    del node.given["norm"]
    return [Node(NAME, _run_gated, node.given | more, linear.results, linear.rows)]


def _run_gated(x: Tensor, by: Tensor, heads: Tensor | None, eps: float, silu: bool, **given: Any) -> Tensor:
    beside = x.flatten(1), by.flatten(1)
    if all(map(skinny_gemm.aligned, beside)):
        return _run(beside[0], gate=skinny_gemm.Gate(beside[1], heads, eps, silu), norm=None, **given)
    if heads is None:
        return _run(elementwise.sigmoid_mul(*beside), norm=None, **given)
    return _run(delta.gated_rms_norm(x, by, heads, eps, silu).flatten(1), norm=None, **given)


def logits(work: Work, *chain: Node) -> list[Node]:
    [node] = make(work, *chain)
    return [node.but({"epilogue": skinny_gemm.FLOAT32, "out": work.input("out")})]
