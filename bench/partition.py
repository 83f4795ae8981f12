"""Decode steps and steps of prompts on one GPU at the same time, each by kernels for some of its
multiprocessors, beside steps that have both: one JSON line a case.

    python bench/partition.py --model bench/models/qwen3-8b [--rows 64] [--context 640] [--parts 40,64]

``parts``: multiprocessors of the decode rows, whose graph and that of 1,024 tokens of prompts are captured
anew as if the GPU had so many, and replayed on two streams. Kernels that stay on a multiprocessor then leave
each other alone; what has more blocks takes what is free. ``green``: the same in two green contexts, which
keep all blocks apart; the driver rounds parts up to a multiple of 8. ``itl_ms``: of a decode step,
``prompt_tok_s``: of prompts meanwhile; the same two of steps with both. Weights are random, and what is
computed together is not looked at.
"""

from __future__ import annotations

import argparse
import ctypes
from functools import partial

import lines
import numpy as np
import torch
from step import DRAWN, admit, ints, pages_of

from sgla.config import Config
from sgla.kernels.cuda import build, prompt_gemm
from sgla.kernels.device import this_device, use
from sgla.loading.source import open_source
from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan
from sgla.worker.cuda import CudaRunner
from sgla.worker.graphs import Capture, seconds_of
from sgla.worker.prompt_graphs import Which

PROMPT, STEPS = 1024, 60  # tokens of a step of prompts alone; decode steps of a measurement
MIXED = 256, 512, 768, 1024  # tokens of steps with both
Graph = torch.cuda.CUDAGraph
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


class Processors(ctypes.Structure):
    """CUdevResource: multiprocessors of a GPU, whole or a part."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("reserved", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        ("more", ctypes.c_ubyte * 44),
    )


def apart(first: int) -> tuple[Streams, tuple[int, int]]:
    """A stream in a green context of ``first`` multiprocessors, or somewhat more, and one in a context of the
    others; how many both have."""

    def call(name: str, *arguments: object) -> None:
        build.check(getattr(build.driver(), name)(*arguments), name)

    whole, part, rest = Processors(), Processors(), Processors()
    call("cuDeviceGetDevResource", 0, ctypes.byref(whole), 1)
    groups = ctypes.c_uint(1)
    call(
        "cuDevSmResourceSplitByCount",
        *map(ctypes.byref, (part, groups, whole, rest)), ctypes.c_uint(0), ctypes.c_uint(first),
    )  # fmt: skip
    streams = []
    for each in (part, rest):
        described, context, stream = (ctypes.c_void_p() for _ in range(3))
        call("cuDevResourceGenerateDesc", ctypes.byref(described), ctypes.byref(each), ctypes.c_uint(1))
        call("cuGreenCtxCreate", ctypes.byref(context), described, 0, ctypes.c_uint(1))
        call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(1), 0)
        streams.append(torch.cuda.ExternalStream(stream.value))
    return (streams[0], streams[1]), (part.count, rest.count)


def read(runner: CudaRunner, rows: int, context: int, tokens: int) -> Graph:
    """Run a step with ``rows`` decode rows and a prompt, of so many tokens together; its graph, which repeats
    it."""
    count = tokens - rows
    pages = pages_of(runner, (rows + 1) * 120, -(-count // 16))
    row = NewRow(
        slot=rows or 200, tokens=ints(np.arange(count)), prompt_len=count, pages=pages, sampling=RowSampling()
    )
    step = StepPlan(
        step=0,
        slots=ints([*range(rows), row.slot]),
        starts=ints([context] * rows + [0]),
        q_lens=ints([1] * rows + [count]),
        flags=bytes([SAMPLE]) * (rows + 1),
        new=[row],
    )
    runner.execute(step)
    sizes = runner.prompts._pair(rows, tokens)
    return runner.prompts._graphs[Which(*sizes, split=False, adapted=False)]


def together(decode: Graph, prompts: Graph, streams: Streams) -> tuple[float, float]:
    """Seconds of a decode step, and steps of prompts a second, while each runs on its stream."""
    first, second = streams
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    most = int(6 * STEPS * seconds_of(decode) / seconds_of(prompts)) + 8
    torch.cuda.synchronize()
    done = []
    with torch.cuda.stream(second):
        for _ in range(most):
            prompts.replay()
            done.append(torch.cuda.Event())
            done[-1].record()
    done[1].synchronize()
    with torch.cuda.stream(first):
        begun = sum(event.query() for event in done)
        begin.record()
        for _ in range(STEPS):
            decode.replay()
        end.record()
    end.synchronize()
    steps = sum(event.query() for event in done) - begun
    assert begun + steps < most, "prompts ended first"
    torch.cuda.synchronize()
    seconds = begin.elapsed_time(end) / 1e3
    return seconds / STEPS, steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench/models/qwen3-8b", help="folder with config.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--parts", default="40,64", help="multiprocessors of the decode rows")
    args = parser.parse_args()
    config = Config(
        model=args.model, device="cuda", load_format="dummy", context_length=8192, max_running_requests=256
    )
    runner = CudaRunner(config, open_source(args.model, "dummy"), 0, 1, "", lambda progress: None)
    whole, fills = this_device(), prompt_gemm.fills

    def emit(kind: str, itl: float, rate: float, **more: float) -> None:
        head = {"bench": "partition", "model": args.model, "rows": args.rows, "context": args.context}
        lines.emit(head | {"kind": kind, "itl_ms": round(1e3 * itl, 3), "prompt_tok_s": round(rate), **more})

    with torch.inference_mode():
        admit(runner, args.rows, args.context, DRAWN)
        for tokens in MIXED:
            seconds = seconds_of(read(runner, args.rows, args.context, tokens))
            emit("mixed", seconds, (tokens - args.rows) / seconds, tokens=tokens)
        prompts, decode = read(runner, 0, 0, PROMPT), runner.graphs._graphs[args.rows]
        emit("alone", seconds_of(decode), PROMPT / seconds_of(prompts))
        two = torch.cuda.Stream(), torch.cuda.Stream()
        seconds, rate = together(decode, prompts, two)
        emit("together", seconds, PROMPT * rate, decode=whole.multiprocessors, prompts=whole.multiprocessors)
        prompt_gemm.fills = lambda m, n: True  # or what takes all multiprocessors would be chosen
        for part in map(int, args.parts.split(",")):
            for kind, streams, counts in (
                ("parts", two, (part, whole.multiprocessors - part)),
                ("green", *apart(part)),
            ):
                use(whole._replace(multiprocessors=counts[0]))
                decode = Capture(streams[0])(partial(runner.graphs._forward, args.rows))
                use(whole._replace(multiprocessors=counts[1]))
                prompts = Capture(streams[1])(partial(runner.prompts._forward, 0, PROMPT))
                use(whole)
                alone = round(1e3 * seconds_of(decode), 3), round(PROMPT / seconds_of(prompts))
                seconds, rate = together(decode, prompts, streams)
                more = {"decode": counts[0], "prompts": counts[1]}
                emit(kind, seconds, PROMPT * rate, **more, alone_itl_ms=alone[0], alone_prompt_tok_s=alone[1])
        prompt_gemm.fills = fills


if __name__ == "__main__":
    main()
