"""What speedups that descriptions of inference servers name are here, where nothing else measures them.

    python bench/claims.py [--parts arithmetic,attention,experts,graphs] [--model FOLDER ...] [--rows 1,8,64]

``arithmetic``, without a GPU: how many times fewer steps requests take if each makes room for the next, than
in batches of 256 that end with their longest, by the outputs of chats (W9) and of W1; and the tokens of pages
of 16 that a chat takes, beside room for the longest one.
``graphs``: milliseconds of a decode step at 640 tokens of context as a graph, and launched kernel by kernel.
``attention``: microseconds of 4,096 tokens with 32 heads of 128, by plain products and a softmax, and by the
kernel that serves. ``experts``: of 128 experts of 768 x 2048, of which a token takes 8, one after the other,
and by the kernels that serve. One JSON line each; random weights.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import lines
import step
import torch
import traffic
from gpu_kernels import BF16, time_us

from sgla.attention.base import cut
from sgla.config import Config
from sgla.kernels import ops
from sgla.kernels.cuda import prompt_attention
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import GpuOps
from sgla.kernels.routing import Routing
from sgla.loading.source import open_source
from sgla.quant.plain import BF16 as WEIGHTS
from sgla.worker.cuda import CudaRunner

CONTEXT, STEPS = 640, 50
PAGE, MANY = 16, 4096  # tokens, requests


def arithmetic() -> None:
    chats = traffic.chats(0, MANY)
    mixed = random.Random(0)
    found = {
        "fewer_steps_chats": traffic.fewer_steps([out for _, out in chats]),
        "fewer_steps_w1": traffic.fewer_steps([mixed.randint(100, 1024) for _ in range(MANY)]),
        "page_tokens": round(sum(-(-sum(chat) // PAGE) * PAGE for chat in chats) / MANY, 1),
        "longest_tokens": traffic.CHAT_IN[-1] + traffic.CHAT_OUT[-1],
    }
    lines.emit({"bench": "claims", "what": "arithmetic"} | found)


def graphs(model: str, rows: list[int]) -> None:
    config = Config(
        model=model, device="cuda", load_format="dummy", context_length=2048, kv_cache_bytes=16 << 30
    )
    runner = CudaRunner(config, open_source(model, "dummy"), 0, 1, "", lambda progress: None)
    for count in rows:
        step.admit(runner, count, CONTEXT, step.DRAWN)
        found = {}
        for name, captures in (("graph_ms", True), ("eager_ms", False)):
            runner._captures = captures
            runner.execute(step.plan(0, count, CONTEXT + 1))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for i in range(STEPS):
                runner.execute(step.plan(i + 1, count, CONTEXT + 2 + i))
            found[name] = round((time.perf_counter() - begun) / STEPS * 1e3, 3)
        lines.emit({"bench": "claims", "what": "graphs", "model": Path(model).name, "rows": count} | found)
    torch.cuda.empty_cache()


def attention(tokens: int = 4096, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> None:
    import numpy as np

    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=BF16)
    q = qkv[:, : heads * dim]
    k, v = qkv[:, heads * dim :].view(tokens, 2, kv_heads, dim).unbind(1)
    where = np.zeros(1, np.int32)
    tile = prompt_attention.tile_tokens(heads // kv_heads)
    tiles = torch.from_numpy(cut(where - 1, where, np.full(1, tokens, np.int32), 0, tile)).cuda()
    out, unseen = torch.empty(tokens, heads * dim, device="cuda", dtype=BF16), float("-inf")
    mask = torch.full((tokens, tokens), unseen, device="cuda", dtype=BF16).triu(1)

    def ours() -> None:
        prompt_attention.attend(q, None, prompt_attention.Beside(k, v), tiles, dim**-0.5, out)

    def plain() -> None:
        keys, values = (x.transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = q.view(tokens, heads, dim).transpose(0, 1) @ keys.transpose(1, 2) * dim**-0.5 + mask
        torch.matmul(scores.softmax(-1), values)

    found = {"ours_us": round(time_us(ours, 1), 1), "plain_us": round(time_us(plain, 1), 1)}
    lines.emit({"bench": "claims", "what": "attention", "tokens": tokens} | found)


def experts(tokens: int, count: int = 128, top_k: int = 8, inner: int = 768, wide: int = 2048) -> None:
    x = torch.randn(tokens, wide, device="cuda", dtype=BF16)
    router, gate_up, down = (
        torch.randn(*shape, device="cuda", dtype=BF16) * shape[-1] ** -0.5
        for shape in ((count, wide), (count, 2 * inner, wide), (count, wide, inner))
    )
    first, second, third = (WEIGHTS.pack(x.flatten(0, -2)) for x in (router, gate_up, down))
    routing = Routing(top_k, normalize=True)

    def ours() -> Any:
        with using(GpuOps(None)):  # type: ignore[arg-type]
            return ops.moe(x, first, second, third, routing, "silu")

    def loop() -> Any:
        """As transformers' modules do it: one expert after the other, each for its tokens."""
        chosen, ids = (x @ router.t()).float().softmax(-1).topk(top_k)
        chosen, out = (chosen / chosen.sum(-1, keepdim=True)).to(BF16), torch.zeros_like(x)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[row] @ gate_up[expert].t()).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
            out.index_add_(0, row, y * chosen[row, place, None])
        return out

    def seconds(body: Any) -> float:
        body()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(5):
            body()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 5

    found = {"loop_us": round(seconds(loop) * 1e6), "ours_us": round(seconds(ours) * 1e6)}
    lines.emit({"bench": "claims", "what": "experts", "tokens": tokens} | found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    models = ["bench/models/qwen3-8b", "bench/models/qwen3-0.6b"]
    parser.add_argument("--model", nargs="*", default=models)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--parts", default="arithmetic,attention,experts,graphs")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if "arithmetic" in parts:
        arithmetic()
    with torch.inference_mode():
        if "attention" in parts:
            attention()
        for tokens in (64, 4096) if "experts" in parts else ():
            experts(tokens)
    for model in args.model if "graphs" in parts else ():
        graphs(model, [int(count) for count in args.rows.split(",")])


if __name__ == "__main__":
    main()
