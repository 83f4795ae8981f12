"""What a mixture with latent attention would reach on many GPUs, by arithmetic: attention by data, whole
experts on each GPU. Prints a table in Markdown, and JSON lines with --json.

    python bench/capacity.py bench/models/deepseek-v3

``limit`` is what the chip and the links allow; ``estimate`` has the shares of that which our kernels reach
where they were measured (docs/capacity.md says where). Nothing here was run on more than two GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BACK, KV = 2, 2  # bytes of a value: of activations that come back from experts, and of the cache
FP8 = 1  # of weights


@dataclass(frozen=True)
class Chip:
    """``read``: bytes a second; ``bf16``, ``fp8``: operations a second; ``memory``: bytes that weights and
    cache may take. ``near``, ``far``: bytes a second that a GPU sends within its host of 8, and beyond."""

    name: str
    read: float
    bf16: float
    fp8: float
    memory: float
    near: float
    far: float


@dataclass(frozen=True)
class Shares:
    """Of the chip's limits. ``imbalance``: tokens of the busiest GPU's experts against the mean."""

    products: float
    reads: float
    experts: float
    attention: float
    links: float
    meeting: float  # seconds of a small all-reduce within a host
    imbalance: float
    overlap: bool  # experts' traffic beside the other half batch's products
    there: int  # bytes of a value on its way to experts


H200 = Chip("H200", 4.34e12, 795e12, 1455e12, 128e9, 160e9, 50e9)
H100 = Chip("H100", 3.0e12, 795e12, 1455e12, 70e9, 160e9, 50e9)
LIMIT = Shares(1, 1, 1, 1, 1, 0, 1, overlap=True, there=1)
OURS = Shares(0.84, 0.92, 0.86, 0.42, 0.85, 8e-6, 1.15, overlap=False, there=2)
OVERLAPPED = Shares(0.84, 0.92, 0.86, 0.57, 0.85, 8e-6, 1.15, overlap=True, there=1)


class Shape:
    """Of config.json: values of matrices by kind, for a layer or all."""

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        rank, q_rank, rope = config["kv_lora_rank"], config["q_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        self.hidden, self.layers = hidden, config["num_hidden_layers"]
        self.sparse = self.layers - config["first_k_dense_replace"]
        self.experts, self.top_k = config["n_routed_experts"], config["num_experts_per_tok"]
        self.hosts = config["topk_group"]  # a token's experts lie in so many groups
        self.attention = (
            hidden * (q_rank + rank + rope)
            + q_rank * heads * (nope + rope)
            + rank * heads * (nope + value)
            + heads * value * hidden
        )
        self.expert = 3 * hidden * config["moe_intermediate_size"]
        router = hidden * config["n_routed_experts"]
        self.shared = self.expert * config["n_shared_experts"] + router  # what all GPUs have of a layer
        self.dense = 3 * hidden * config["intermediate_size"] * (self.layers - self.sparse)
        self.table = hidden * config["vocab_size"]
        self.latent = rank + rope  # values of a token in a layer's cache
        self.pair = 2 * heads * (2 * rank + rope)  # operations for a token and one before it, absorbed
        self.plain_pair = 2 * heads * (nope + rope + value)  # as prompts compute it

    @property
    def total(self) -> int:
        """Values of all matrices, the embedding among them."""
        mlps = self.sparse * (self.experts * self.expert + self.shared) + self.dense
        return self.layers * self.attention + mlps + 2 * self.table

    @property
    def active(self) -> int:
        """Values that a token needs, without the embedding."""
        mlps = self.sparse * (self.top_k * self.expert + self.shared) + self.dense
        return self.layers * self.attention + mlps + self.table

    @property
    def replicated(self) -> int:
        """Bytes on each GPU: attention, shared experts and dense layers in fp8, tables in bf16."""
        return FP8 * (self.layers * self.attention + self.sparse * self.shared + self.dense) + 4 * self.table

    def weights(self, gpus: int) -> float:
        """Bytes on each GPU."""
        return self.replicated + FP8 * self.sparse * self.expert * self.experts / gpus

    def exchange(self, chip: Chip, gpus: int, tokens: int, whole: bool, shares: Shares) -> float:
        """Seconds in which a GPU sends its ``tokens`` to experts and has them back, in one layer: once to
        each GPU that has some of a token's. ``whole``: all copies beyond the host cross the far link
        (decode), else one for each host (prompts)."""
        each = tokens * self.hidden * (shares.there + BACK)
        hosts, reached = max(1, gpus // 8), gpus * (1 - (1 - 1 / gpus) ** self.top_k)
        beyond = (hosts - 1) / hosts
        copies = reached if whole else min(self.hosts, hosts, reached)
        near, far = each * reached * (gpus - 1) / gpus / chip.near, each * copies * beyond / chip.far
        return max(near, far) / shares.links


def decode(shape: Shape, chip: Chip, gpus: int, rows: int, context: int, shares: Shares) -> float:
    """Seconds of a step with ``rows`` on each GPU."""
    per_layer = max(
        FP8 * shape.attention / (chip.read * shares.reads),
        2 * shape.attention * rows / (chip.fp8 * shares.products),
    ) + max(
        KV * shape.latent * rows * context / (chip.read * shares.attention),
        shape.pair * rows * context / (chip.bf16 * shares.attention),
    )
    held = shape.experts / gpus
    hit = held * (1 - (1 - shape.top_k / shape.experts) ** (rows * gpus))
    mlp = max(
        FP8 * (hit * shape.expert + shape.shared) / (chip.read * shares.experts),
        2
        * rows
        * (shape.top_k * shape.expert * shares.imbalance + shape.shared)
        / (chip.fp8 * shares.products),
    )
    traffic = shape.exchange(chip, gpus, rows, True, shares)
    computed = shape.layers * per_layer + shape.sparse * mlp
    sent = shape.sparse * traffic
    rest = (2 * shape.table + shape.dense * FP8) / (chip.read * shares.reads)
    return rest + (max(computed, sent) if shares.overlap else computed + sent)


def alone(shape: Shape, chip: Chip, gpus: int, shares: Shares) -> float:
    """Seconds of a step of one request whose matrices all GPUs of a host share (tensor parallel)."""
    return FP8 * shape.active / gpus / (chip.read * shares.reads) + 2 * shape.layers * shares.meeting


def prompt(shape: Shape, chip: Chip, gpus: int, tokens: int, length: int, shares: Shares) -> float:
    """Seconds for ``tokens`` on each GPU, of prompts of ``length``."""
    experts = shape.top_k * shape.expert * shares.imbalance + shape.shared
    products = shape.layers * shape.attention + shape.sparse * experts + shape.dense
    pairs = shape.layers * shape.plain_pair * length / 2
    computed = tokens * (2 * products / (chip.fp8 * shares.products) + pairs / (chip.bf16 * shares.products))
    sent = shape.sparse * shape.exchange(chip, gpus, tokens, False, shares)
    return max(computed, sent) if shares.overlap else computed + sent


@dataclass(frozen=True)
class Deployment:
    name: str
    chip: Chip
    gpus: int
    reads: int  # tokens of a prompt; 0: prompts are read elsewhere
    rows: int  # on each GPU, that decode; 0: elsewhere
    context: int  # behind a row, on average
    published: str


DEPLOYMENTS = [
    Deployment("8 GPUs, one request", H200, 8, 0, 1, 1024, "158 tok/s with an MTP of 3"),
    Deployment("8 GPUs, 1k in, 1k out", H200, 8, 1024, 128, 1536, "1,627 out"),
    Deployment("16 GPUs, 1k in, 1k out", H200, 16, 1024, 256, 1536, ""),
    Deployment("32 of 96 GPUs read prompts of 2k", H100, 32, 2048, 0, 0, "6,540 in (52.3k a host)"),
    Deployment("72 of 96 GPUs decode behind 2k", H100, 72, 0, 256, 2048, "2,790 out (22.3k a host)"),
]


def lines(shape: Shape) -> Iterator[dict[str, Any]]:
    for each in DEPLOYMENTS:
        room = each.chip.memory - shape.weights(each.gpus)
        tokens = room / (KV * shape.latent * shape.layers)
        found: dict[str, Any] = {"deployment": each.name, "chip": each.chip.name, "gpus": each.gpus}
        found |= {"weights_gb": round(shape.weights(each.gpus) / 1e9, 1), "kv_tokens": int(tokens)}
        rows = min(each.rows, int(tokens // max(1, each.context + each.reads // 2)))
        for name, shares in (("limit", LIMIT), ("estimate", OURS), ("overlapped", OVERLAPPED)):
            per_gpu: dict[str, float] = {}
            read = prompt(shape, each.chip, each.gpus, 8192, each.reads, shares) / 8192 if each.reads else 0
            if rows:
                if each.rows == 1:
                    step = alone(shape, each.chip, each.gpus, shares)
                else:
                    step = decode(shape, each.chip, each.gpus, rows, each.context, shares)
                    # A token that is made brings one that is read, where inputs are as long as outputs.
                    per_gpu["out_tok_s"] = round(1 / (step / rows + read))
                per_gpu["step_ms"] = round(1e3 * step, 2)
            elif read:
                per_gpu["in_tok_s"] = round(1 / read)
            found[name] = per_gpu
        yield found | {"rows": rows, "published": each.published, "of": asdict(OURS)}


def cell(found: dict[str, float]) -> str:
    texts = {"step_ms": "{:.1f} ms", "out_tok_s": "{:,} out", "in_tok_s": "{:,} in"}
    return ", ".join(texts[name].format(value) for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="folder of a config.json")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = Shape(json.loads((Path(args.model) / "config.json").read_text()))
    if not args.json:
        print("| deployment | weights, GB a GPU | tokens of KV | rows | limit | estimate | + | published |")
        print("|---|---|---|---|---|---|---|---|")
    for found in lines(shape):
        if args.json:
            print(json.dumps(found))
            continue
        columns = [cell(found[name]) for name in ("limit", "estimate", "overlapped")]
        head = [found["deployment"], found["weights_gb"], f"{found['kv_tokens']:,}", found["rows"]]
        print("|", " | ".join(map(str, [*head, *columns, found["published"]])), "|")


if __name__ == "__main__":
    main()
