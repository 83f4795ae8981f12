"""Offline workloads through the Python Engine: one JSON line a measurement.

    python bench/offline.py --model bench/models/qwen3-0.6b --workloads W1,W2,W3,W4,W5 [--engine sgla|vllm] [--repeat 2]

W1: 256 requests, random.seed(0), 100-1024 tokens in and out, temperature 0.6. W2: one request, 128 in, 512
out, greedy. W3: 32 prompts of 4096, 1 out. W4: 256 requests, 2048 shared + 64 own in, 64 out. W5: batches of
512 in, 256 out. W6: batches of 8192 in, 1024 out (--lengths; --max-model-len 9217 at least). Weights are random
(``load_format=dummy``), prompts are token ids, no request stops early. ``limit_``: what an H200 needs at least
(``limits.py``).
Llama wants a tokenizer all the same: ``--extra '{"tokenizer": "FOLDER"}'``.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import lines


class Peer(Protocol):
    version: str

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[int]:
        """Number of tokens of each request; EOS is ignored."""

    def reset_cache(self) -> None: ...
    def close(self) -> None: ...


class Sgla:
    def __init__(self, model: str, max_model_len: int, extra: dict[str, Any]) -> None:
        import sgla
        from sgla.engine import Engine

        self.version = sgla.__version__
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "context_length": max_model_len,
            "device": "cuda",
        } | extra
        self.engine = Engine(model, **settings)
        ingress = self.engine._ready().ingress
        self.facts = ingress.facts

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[int]:
        from sgla.messages import SamplingParams

        params = [SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True) for n in max_tokens]
        return [len(output.tokens) for output in self.engine.generate(prompts, params)]

    def reset_cache(self) -> None:
        deadline = time.perf_counter() + 5
        while not self.engine.flush_cache() and time.perf_counter() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self.engine.shutdown()


class Vllm:
    def __init__(self, model: str, max_model_len: int, extra: dict[str, Any]) -> None:
        import vllm

        self.version = vllm.__version__
        settings = {"gpu_memory_utilization": 0.85, "dtype": "bfloat16", "seed": 0} | extra
        self.llm = vllm.LLM(
            model, load_format="dummy", skip_tokenizer_init=True, max_model_len=max_model_len, **settings
        )

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[int]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in max_tokens
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def reset_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        pass


ENGINES: dict[str, Any] = {"sgla": Sgla, "vllm": Vllm}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        begun = time.perf_counter()
        self.engine: Any = ENGINES[args.engine](args.model, args.max_model_len, json.loads(args.extra))
        self.base = {
            "engine": args.engine,
            "version": self.engine.version,
            "machine": machine(),
            "model": args.name or Path(args.model).name,
        }
        if args.tag:
            self.base["tag"] = args.tag
        self.longest = args.max_model_len
        self.random, self.vocab = random.Random(1234), args.vocab
        self.batches = list(map(int, args.batches.split(",")))
        self.lengths = [int(n) for n in args.lengths.split(",")]
        self.limits = None
        if args.engine == "sgla":  # a peer's interpreter has no sgla
            from limits import Limits

            self.limits = Limits.of(args.model, json.loads(args.extra))
        facts = getattr(self.engine, "facts", None)
        more = (
            {
                "timings": {k: round(v, 2) for k, v in facts.timings.items()},
                "ledger": facts.ledger,
                "notes": facts.notes,
            }
            if facts
            else {}
        )
        self.emit(w="startup", s=round(time.perf_counter() - begun, 2), extra=args.extra, **more)

    def emit(self, **fields: Any) -> None:
        lines.emit(self.base | fields)

    def prompt(self, n: int) -> list[int]:
        return [self.random.randint(0, self.vocab - 1) for _ in range(n)]

    def timed(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> float:
        begun = time.perf_counter()
        got = self.engine.generate(prompts, max_tokens, temperature)
        seconds = time.perf_counter() - begun
        assert got == max_tokens, (got[:5], max_tokens[:5])
        return seconds

    def warm_up(self) -> None:
        begun, draw = time.perf_counter(), self.random.randint
        self.timed([self.prompt(16)], [4], 0.0)
        self.timed([self.prompt(draw(100, 1024)) for _ in range(256)], [draw(4, 24) for _ in range(256)], 0.6)
        self.timed([self.prompt(min(4096, self.longest - 4)) for _ in range(4)], [4] * 4, 0.0)
        self.timed([self.prompt(128)], [64], 0.0)
        self.emit(w="warmup", s=round(time.perf_counter() - begun, 2))

    def w1(self, repeat: int) -> None:
        random.seed(0)
        prompts = [
            [random.randint(0, 10000) + repeat for _ in range(random.randint(100, 1024))] for _ in range(256)
        ]
        outputs = [random.randint(100, 1024) for _ in range(256)]
        s = self.timed(prompts, outputs, 0.6)
        self.emit(
            w="W1",
            rep=repeat,
            s=round(s, 3),
            in_tok=sum(map(len, prompts)),
            out_tok=sum(outputs),
            out_tok_s=round(sum(outputs) / s, 1),
            limit_tok_s=self.limits
            and round(sum(outputs) / self.limits.crowd([*map(len, prompts)], outputs), 1),
        )

    def w2(self, repeat: int) -> None:
        first = sorted(self.timed([self.prompt(128)], [1], 0.0) for _ in range(5))[2]
        s = self.timed([self.prompt(128)], [512], 0.0)
        self.emit(
            w="W2",
            rep=repeat,
            ttft_ms=round(first * 1e3, 2),
            ms_per_tok=round((s - first) / 511 * 1e3, 3),
            limit_ms_per_tok=self.limits and round(self.limits.step([128 + 256]) * 1e3, 3),
            out_tok_s=round(512 / s, 1),
            s=round(s, 4),
        )

    def w3(self, repeat: int) -> None:
        prompts = [self.prompt(4096) for _ in range(32)]
        s = self.timed(prompts, [1] * 32, 0.0)
        self.emit(w="W3", rep=repeat, s=round(s, 4), in_tok_s=round(32 * 4096 / s, 1))

    def w4(self, repeat: int) -> None:
        shared = self.prompt(2048)
        s = self.timed([shared + self.prompt(64) for _ in range(256)], [64] * 256, 0.0)
        self.emit(w="W4", rep=repeat, s=round(s, 3), out_tok_s=round(256 * 64 / s, 1))

    def w5(self, repeat: int) -> None:
        self.in_batches("W5", repeat, 512, 256)

    def w6(self, repeat: int) -> None:
        self.in_batches("W6", repeat, *self.lengths)

    def in_batches(self, name: str, repeat: int, tokens: int, outputs: int) -> None:
        for size in self.batches:
            first = self.timed([self.prompt(tokens) for _ in range(size)], [1] * size, 0.0)
            self.engine.reset_cache()
            s = self.timed([self.prompt(tokens) for _ in range(size)], [outputs] * size, 0.0)
            self.emit(
                w=name,
                rep=repeat,
                bs=size,
                lengths=[tokens, outputs],
                s=round(s, 3),
                prefill_s=round(first, 3),
                ms_per_step=round((s - first) / (outputs - 1) * 1e3, 3),
                limit_ms_per_step=self.limits
                and round(self.limits.step([tokens + outputs // 2] * size) * 1e3, 3),
                out_tok_s=round(outputs * size / s, 1),
            )


def machine() -> str:
    import torch

    return f"{lines.gpus()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="sgla")
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", help="shown in the lines; default: the folder's name")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--batches", default="1,16,64,256", help="of W5")
    parser.add_argument("--lengths", default="8192,1024", help="of W6: tokens in, tokens out")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=100000)
    parser.add_argument("--extra", default="{}", help="more settings of the engine, as JSON")
    parser.add_argument("--tag", default="")
    args = parser.parse_args()
    bench = Bench(args)
    bench.warm_up()
    for name in args.workloads.split(","):
        try:
            for repeat in range(args.repeat):
                bench.engine.reset_cache()
                getattr(bench, name.lower())(repeat)
        except Exception:
            bench.emit(w=name, error=traceback.format_exc()[-800:])
    bench.engine.close()


if __name__ == "__main__":
    main()
