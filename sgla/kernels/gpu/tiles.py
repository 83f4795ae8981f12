"""Linear layers of more rows: the kernels of ``batch_gemm`` and ``prompt_gemm``, with what follows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgla.kernels.cuda import batch_gemm, prompt_gemm
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.gpu.adapters import EXPAND, SHRINK
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.rewrite import Work
from sgla.kernels.gpu.tuning import Algorithm, Product, algorithm_for
from sgla.kernels.lora import Rows, Stack
from sgla.kernels.ops import AddedNorm, Ranks
from sgla.kernels.triton import elementwise, lora

NAME, UNSCALED = "tiles", "unscaled norm"  # of nodes that other rules look for
GATES = {"silu": batch_gemm.SILU, "gelu_tanh": batch_gemm.GELU}
SLOWER = "cuBLAS is faster for this shape"
BESIDE = True  # what adapters do stands behind the layer (before it costs 3 to 8 % more: bench/gpu_lora.py)
# Rows up to which tiles of batches send what they make to other ranks, and rounds of tiles from which those
# of prompts do: one is sent while the next is multiplied (bench/allreduce.py --layers).
SENT, SENT_ROUNDS = 64, 6


def refuses(work: Work, linear: Node) -> str | None:
    w = linear.given["w"]
    if not work.wgmma:
        return "the GPU has no wgmma"
    if work.rows(linear) < batch_gemm.MIN_ROWS:
        return f"it pays from {batch_gemm.MIN_ROWS} rows on"
    if w.kind != "bf16":
        return f"it multiplies bfloat16 weights, not {w.kind}"
    return batch_gemm.refuses(w.n, w.k)


def make(work: Work, linear: Node) -> list[Node]:
    given = linear.given
    made = {"x": given["x"], "weight": given["w"].data, "bias": given["bias"], "epilogue": batch_gemm.STORE}
    return [Node(NAME, None, made, linear.results, linear.rows)]


def _algorithm(work: Work, node: Node, gated: bool = False) -> Algorithm:
    n, k = node.given["weight"].shape
    return algorithm_for(work.rows(node), Product(n, k, gated))


def _config(m: int, weight: Tensor, gated: bool = False) -> batch_gemm.Config:
    n, k = weight.shape
    config = algorithm_for(m, Product(n, k, gated)).config
    assert isinstance(config, batch_gemm.Config)
    return config


def settle(work: Work, node: Node) -> None:
    """Choose the kernel, now that what stands around the layer is known. The rule takes every layer, for what
    may join it; where nothing has made the tiles faster than cuBLAS, it is a plain layer again."""
    kernel, _ = _algorithm(work, node, node.given["epilogue"] in GATES.values())
    if kernel == "prompt tiles":
        node.fn, node.rule = _run_prompt, node.rule.replace("tiles", "prompt tiles")
    elif kernel == "library":
        node.op, node.fn, node.rule = "linear", library, ""
    else:
        node.fn = _run
        take_unscaled(work, node)


def take_unscaled(work: Work, node: Node) -> None:
    """Have ``node`` read what the norm that its x is was to divide by the rms, if there is such a thing."""
    maker = work.maker(node.given["x"])
    if maker is not None and maker.op == UNSCALED:
        work.uses[node.given["x"].number] -= 1
        node.given, node.reads = node.given | {"x": maker.given["rows"]}, [maker.given["rows"].number]


def _run(x: Tensor | batch_gemm.Unscaled, weight: Tensor, bias: Tensor | None, epilogue: int) -> Tensor:
    rows = x.contiguous() if isinstance(x, Tensor) else x
    m = rows.shape[0] if isinstance(rows, Tensor) else rows.x.shape[0]
    config = _config(m, weight, epilogue in GATES.values())
    return batch_gemm.linear(rows, weight, config, bias=bias, epilogue=epilogue)


def _run_prompt(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: int) -> Tensor:
    return prompt_gemm.linear(x.contiguous(), weight, bias=bias, epilogue=epilogue)


def by_library(node: Node) -> Node:
    return Node("library", library, node.given, node.results, node.rows)


def library(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: int) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def beside_refuses(work: Work, linear: Node, expand: Node) -> str | None:
    shrink = work.maker(expand.given["inner"])
    if not BESIDE:
        return "it stands before the layer"
    if shrink is None or shrink.op != SHRINK or shrink.given["x"] != linear.given["x"]:
        return "the layer reads something else than its adapters"
    return None if _algorithm(work, linear).kernel == "tiles" else SLOWER


def beside(work: Work, linear: Node, expand: Node) -> list[Node]:
    """What adapters shrink stands behind the layer, whose kernel lets its successor start when x is there."""
    shrink = work.maker(expand.given["inner"])
    assert shrink is not None
    work.drop(shrink)
    shrink.fn = lora.shrink_beside
    return [linear.but({}), shrink, expand]


def expanded_gate_refuses(work: Work, expand: Node, act: Node) -> str | None:
    sizes = expand.given["stack"].sizes
    if len(sizes) != 2 or sizes[0] != sizes[1] or sizes[0] % 16:
        return "its parts are not gate and up"
    return None if act.given["kind"] in GATES else "no kernel has this activation"


def expanded_gate(work: Work, expand: Node, act: Node) -> list[Node]:
    """What adapters add to gate and up, and their activation."""
    given = expand.given | {"kind": act.given["kind"]}
    return [Node("expanded, gated", lora.expand_gated, given, act.results, act.rows)]


def gate_refuses(work: Work, linear: Node, act: Node) -> str | None:
    if linear.given["bias"] is not None:
        return "the layer has a bias"
    if linear.given["weight"].shape[0] % 16:
        return "its output width is no multiple of 16"
    return SLOWER if _algorithm(work, linear, gated=True).kernel == "library" else None


def gate(work: Work, linear: Node, act: Node) -> list[Node]:
    epilogue = GATES[act.given["kind"]]
    return [linear.but({"epilogue": epilogue}, act.results)]


def add_refuses(work: Work, linear: Node, add: Node) -> str | None:
    if work.mixtures or work.e4m3:
        return "the next layer begins with a kernel that does the norm"
    if _algorithm(work, linear).kernel != "tiles":
        return SLOWER
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def add(work: Work, linear: Node, add: Node) -> list[Node]:
    residual, (normed, total) = add.given["residual"], add.results
    unscaled, weight, eps = work.value(), add.given["weight"], add.given["eps"]
    rest = {"x": Ref(total), "weight": weight, "eps": eps, "rows": Ref(unscaled)}
    scaled = Node(UNSCALED, _scaled, rest, [normed], add.rows)
    made, norm = [unscaled, total], {"norm": weight, "eps": eps}
    if (found := _behind(work, linear, residual)) is not None:
        return [*_expanded(work, linear, norm, made, *found), scaled]
    given = {name: linear.given[name] for name in ("x", "weight", "bias")}
    given |= norm | {"residual": residual}
    return [Node("tiles, added", _added, given, made, add.rows, residual.number, linear.rule), scaled]


def _behind(work: Work, linear: Node, residual: Ref) -> tuple[Node, Node] | None:
    """What shrinks and expands onto the residual before the layer, if both may stand behind it."""
    expand = work.maker(residual) if BESIDE else None
    if expand is None or expand.op != EXPAND:
        return None
    shrink = work.maker(expand.given["inner"])
    if shrink is None or shrink.op != SHRINK or shrink.given["x"] != linear.given["x"]:
        return None
    return (shrink, expand) if len(shrink.given["stack"].sizes) == 1 else None


def _expanded(
    work: Work, linear: Node, norm: dict[str, Any], results: list[int], shrink: Node, expand: Node
) -> list[Node]:
    """The layer, what is shrunk beside it, and one kernel that expands that and adds it to the residual."""
    work.drop(expand)
    work.drop(shrink)
    shrink.fn, made = lora.shrink_beside, work.value()
    given = {"y": Ref(made), "inner": Ref(shrink.results[0]), "residual": expand.given["y"]}
    given |= norm | {name: shrink.given[name] for name in ("stack", "rows", "sampled")}
    last = Node("expanded, added", _expand_added, given, results, linear.rows, expand.given["y"].number)
    return [linear.but({}, [made]), shrink, last]


def _expand_added(
    y: Tensor,
    inner: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    stack: Stack,
    rows: Rows,
    sampled: bool,
) -> tuple[batch_gemm.Unscaled, Tensor]:
    return lora.expand_added(y, inner, AddedNorm(residual, norm, eps), stack, rows, sampled), residual


def _added(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
) -> tuple[batch_gemm.Unscaled, Tensor]:
    config = _config(x.shape[0], weight)
    made = batch_gemm.linear_add(x.contiguous(), weight, config, AddedNorm(residual, norm, eps), bias)
    return made, residual


def _scaled(x: Tensor, weight: Tensor, eps: float, rows: batch_gemm.Unscaled) -> Tensor:
    """The norm for whoever wants its result. ``rows``: what tiles read in its place, see ``settle``; a norm
    that nobody else reads is dropped."""
    return elementwise.rms_norm(x, weight, eps)


def send_refuses(work: Work, linear: Node, total: Node, add: Node) -> str | None:
    given, ranks = linear.given, total.given["ranks"]
    kernel = _algorithm(work, linear).kernel
    if kernel == "tiles" and work.rows(linear) > SENT:
        return f"the sum sends more than {SENT} rows of a batch as fast"
    columns = given["weight"].shape[0]
    if kernel == "prompt tiles" and prompt_gemm.rounds(work.rows(linear), columns) < SENT_ROUNDS:
        return f"the sum sends less than {SENT_ROUNDS} rounds of tiles as fast"
    if given["epilogue"] != batch_gemm.STORE:
        return "something is done to what it makes"
    if kernel not in ("tiles", "prompt tiles"):
        return SLOWER
    if ranks.sending(work.rows(linear), columns) is None:
        return "the ranks exchange fewer bytes at once"
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def send(work: Work, linear: Node, total: Node, add: Node) -> list[Node]:
    residual = add.given["residual"]
    given = {name: linear.given[name] for name in ("x", "weight", "bias")}
    given |= {"residual": residual, "norm": add.given["weight"], "eps": add.given["eps"]}
    given |= {"norm_bias": add.given.get("bias")}
    prompts = _algorithm(work, linear).kernel == "prompt tiles"
    given |= {"ranks": total.given["ranks"], "prompts": prompts}
    rule = linear.rule.replace("tiles", "prompt tiles") if prompts else linear.rule
    return [Node("tiles, sent", _run_sent, given, add.results, add.rows, residual.number, rule)]


def _run_sent(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    norm_bias: Tensor | None,
    ranks: Ranks,
    prompts: bool,
) -> tuple[Tensor, Tensor]:
    send, added = ranks.sending(x.shape[0], weight.shape[0]), AddedNorm(residual, norm, eps, norm_bias)
    if prompts:
        y = prompt_gemm.linear(x.contiguous(), weight, bias=bias, send=send)
        return ranks.all_reduce_norm(y, added, "others"), residual
    config = _config(x.shape[0], weight)
    sends = batch_gemm.sends(config, x.shape[0])
    y = batch_gemm.linear(x.contiguous(), weight, config, bias=bias, send=send if sends else None)
    return ranks.all_reduce_norm(y, added, "all" if sends else ""), residual


def heads_refuses(work: Work, linear: Node, heads: Node) -> str | None:
    if work.asked.decode is not None:
        return "the decode kernel does it"
    given = heads.given
    if not prompt_gemm.holds_heads(projection(given), given["kv"]):
        return "it rotates whole heads of 64 or 128 dimensions of bfloat16"
    if _algorithm(work, linear).kernel == "prompt tiles":
        return None
    return prompt_gemm.refuses(work.rows(linear), *linear.given["weight"].shape) or SLOWER


def heads(work: Work, linear: Node, heads: Node) -> list[Node]:
    given = {name: linear.given[name] for name in ("x", "weight", "bias")}
    given |= {name: heads.given[name] for name in ("positions", "kv", "out_loc")}
    given |= {"projection": projection(heads.given)}
    return [Node("heads", None, given, heads.results, heads.rows)]


def projection(given: dict[str, Any]) -> Projection:
    return Projection(given["cos_sin"], given["q_norm"], given["k_norm"], given["eps"])


def draw_refuses(work: Work, linear: Node) -> str | None:
    if not work.asked.draws:
        return "tokens are not drawn here"
    why = refuses(work, linear)
    return why or (
        None if batch_gemm.draw_config(work.rows(linear)) else "the products would wait for the draw"
    )


def draw(work: Work, linear: Node) -> list[Node]:
    work.drawn = True
    return _logits(work, linear, batch_gemm.DRAW)


def logits_refuses(work: Work, linear: Node) -> str | None:
    w = linear.given["w"]
    if why := refuses(work, linear):
        return why
    return None if algorithm_for(work.rows(linear), Product(w.n, w.k)).kernel == "tiles" else SLOWER


def logits(work: Work, linear: Node) -> list[Node]:
    return _logits(work, linear, batch_gemm.FLOAT32)


def _logits(work: Work, linear: Node, epilogue: int) -> list[Node]:
    given = {"x": linear.given["x"], "weight": linear.given["w"].data, "bias": linear.given["bias"]}
    given |= {"epilogue": epilogue, "out": work.input("out")}
    given |= {"draw": work.input("draw")} if epilogue == batch_gemm.DRAW else {}
    return [Node("logits", _logits_run, given, linear.results, linear.rows)]


def _logits_run(x: Tensor, weight: Tensor, epilogue: int, **given: Any) -> Tensor:
    m = x.shape[0]
    draws = epilogue == batch_gemm.DRAW
    config = batch_gemm.draw_config(m) if draws else _config(m, weight)
    assert config is not None
    return batch_gemm.linear(x.contiguous(), weight, config, epilogue=epilogue, **given)
