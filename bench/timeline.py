"""What a step consists of: each operation's kernels, their time, and the time that the chip needs at least.

Kernels of a step overlap: each starts while the one before ends. So an operation's time is that from the end
of all kernels before it to its own end, and these times add up to the step's.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from limits import PRODUCTS, READ

from sgla.model.spec import ModelSpec

LINK = 373e9  # bytes a second that one GPU sends another by NVLink, measured
FLIGHT = 2.0  # microseconds that they take

KINDS = {  # by the kernel's name, the first that fits
    "all layers and the output layer": r"^(decode|mixture)_step",
    "attention of decode rows": r"^(decode|latent)_attention|^_decode|^_attend|^_tokens|^_merge",
    "attention of prompts": r"^prompt_attention|^_extend|flash|Prefill|Ragged|Paged",
    "sum over ranks": r"^(all_reduce|reduce_scatter|all_gather|all_max)|nccl",
    "experts": r"^((packed|token|integer)_)?experts|^grouped_gemm|^_experts|^_few",
    "router, sort and sum of the experts": r"^router|^_norm_router|^_route|^_count|^_group|^_weight|^_combine",  # noqa: E501
    "part of a product": r"splitKreduce",
    "linear": r"gemm|nvjet|cutlass|cublas|^_linear",
    "add and norm": r"rms_norm|^_norms_of_sum|^_layer_norm",
    "activation": r"^_act_mul|^_activated",
    "norm of heads, rotation, store": r"^_qk_norm_rope_store",
    "draw": r"^_bound_scores|^_finish",
    "end of the draw in the output layer": r"^_make_keys|^_use_keys",
}


class Launch(NamedTuple):
    """A kernel or a copy, in microseconds."""

    name: str
    begin: float
    end: float


class Load(NamedTuple):
    """A step: decode rows with so many tokens of context, prompts of so many tokens in all, one prompt at
    most."""

    rows: int
    context: int
    prompt: int

    @property
    def tokens(self) -> int:
        return self.rows + self.prompt

    @property
    def sampled(self) -> int:
        return self.rows + (self.prompt > 0)


def record(body: Callable[[], object], trace: Path | None = None) -> list[Launch]:
    """What one call of ``body`` launches, in order of time. ``trace``: a file to keep Chrome's format in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text()))


def launches(trace: dict[str, Any]) -> list[Launch]:
    on_gpu = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = [Launch(e["name"], e["ts"], e["ts"] + e["dur"]) for e in on_gpu]
    return sorted(found, key=lambda launch: launch.begin)


def kind_of(name: str) -> str:
    bare = re.sub(r"^void |\(.*", "", name)
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, bare)), "other")


def operations(steps: list[Launch], spec: ModelSpec) -> list[str]:
    """What each launch belongs to. Linear layers have no names of their own: their place between two
    attentions tells."""
    kinds, group = [kind_of(launch.name) for launch in steps], list[int]()
    layer, before = 0, ""
    for i, kind in enumerate([*kinds, "attention"]):
        if kind.startswith("attention") and not before.startswith("attention"):
            named = _linear_names(len(group), layer, spec)
            for at, name in zip(group, named):
                kinds[at] = name
            group, layer = [], layer + 1
        if kind == "linear":
            group.append(i)
        before = kind
    for i, launch in enumerate(steps):
        if "splitKreduce" in launch.name:
            kinds[i] = kinds[i - 1]
    return kinds


def _linear_names(count: int, layer: int, spec: ModelSpec) -> list[str]:
    """Of the products behind attention of the ``layer``-th layer, or before the first one's (0)."""
    last = "output layer" if layer == spec.layers else "q, k, v"
    between = ["router, sort and sum of the experts"] * (count - 2) if spec.moe else ["gate and up", "down"]
    return ["o", *between, last] if layer else [last]


def floors(spec: ModelSpec, load: Load, ranks: int = 1) -> dict[str, float]:
    """Microseconds a step that each operation takes at least: bytes that must be read, written or sent, or
    FLOPs; of one of the ``ranks`` that share layers out (``--tp``)."""

    def least(size: float, flops: float = 0.0) -> float:
        return max(size / READ, flops / PRODUCTS) * 1e6

    def linear(n: int, k: float, tokens: int) -> float:
        return least(2 * n * k, 2 * tokens * n * k)

    attention = spec.attention[0]  # as all the others
    layers, hidden, heads = spec.layers, spec.hidden, attention.heads * attention.head_dim
    per_token = 2 * attention.kv_heads * attention.head_dim

    def behind(cost: Callable[[int], float]) -> float:
        """Of what follows attention: in the last layer only rows that sample go on."""
        return (layers - 1) * cost(load.tokens) + cost(load.sampled)

    found = {
        "q, k, v": layers * linear(heads + per_token, hidden, load.tokens),
        "o": behind(lambda tokens: linear(hidden, heads, tokens)),
        "attention of decode rows": layers * least(2 * load.rows * load.context * per_token),
        "attention of prompts": layers * least(2 * load.prompt * per_token, 2 * load.prompt**2 * heads),
        "add and norm": least(8 * load.tokens * hidden),  # of one kernel, of which there may be few
        "norm of heads, rotation, store": layers * least(4 * load.tokens * (heads + per_token)),
        "output layer": linear(spec.vocab, hidden, load.sampled),
        "draw": least(4 * load.sampled * spec.vocab),
    }
    moe = spec.moe
    if moe is None:
        found["gate and up"] = behind(lambda tokens: linear(2 * spec.intermediate, hidden, tokens))
        found["down"] = behind(lambda tokens: linear(hidden, spec.intermediate, tokens))
        found["activation"] = behind(lambda tokens: least(6 * tokens * spec.intermediate))
    else:
        size = 3 * hidden * moe.intermediate

        def experts(tokens: int) -> float:
            needed = moe.experts * (1 - (1 - moe.routing.top_k / moe.experts) ** tokens)
            return least(2 * size * needed, 2 * size * tokens * moe.routing.top_k)

        found["experts"] = behind(experts)
        found["router, sort and sum of the experts"] = behind(
            lambda tokens: linear(moe.experts, hidden, tokens)
        )
    if ranks > 1:
        alike = ("add and norm", "router, sort and sum of the experts")
        found = {name: us if name in alike else us / ranks for name, us in found.items()}
        shares = 2 * (ranks - 1) / ranks  # of a sum's bytes that a rank sends, if not each to all
        found["sum over ranks"] = 2 * behind(
            lambda tokens: FLIGHT + shares * 2 * tokens * hidden / LINK * 1e6
        )
    whole = ("q, k, v", "o", "attention of decode rows", "gate and up", "down", "experts", "output layer")
    found["all layers and the output layer"] = sum(found.get(name, 0.0) for name in whole)
    return found


def table(steps: list[Launch], spec: ModelSpec, load: Load, ranks: int = 1) -> dict[str, Any]:
    """``us``: of a step, and of each operation in it; ``idle_us``: no kernel ran; ``floor_us``: of each
    operation that has one."""
    lowest, done, idle = floors(spec, load, ranks), steps[0].begin, 0.0
    rows: dict[str, dict[str, Any]] = {}
    for launch, what in zip(steps, operations(steps, spec)):
        row = rows.setdefault(what, {"calls": 0, "us": 0.0, "kernels": []})
        idle += max(0.0, launch.begin - done)
        row["us"] += max(0.0, launch.end - max(done, launch.begin))
        row["calls"] += 1
        name = re.sub(r"^void |[<(].*", "", launch.name)[:48]
        row["kernels"] += [] if name in row["kernels"] else [name]
        done = max(done, launch.end)
    for what, row in rows.items():
        row["us"] = round(row["us"], 1)
        if what in lowest:
            calls = row["calls"] if what == "add and norm" else 1
            row["floor_us"] = round(calls * lowest[what], 1)
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["us"]))
    return {"us": round(done - steps[0].begin, 1), "idle_us": round(idle, 1), "operations": ordered}
