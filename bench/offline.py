"""Offline workloads through the Python Engine: one JSON line a measurement.

    python bench/offline.py --model bench/models/qwen3-0.6b --workloads W1,W2,W3,W4,W5 [--engine sgla|vllm] [--repeat 2]

    python bench/offline.py --model bench/models/qwen3-8b --workloads W1,W8 --beside "--engine vllm --python peer/bin/python"

W1: 256 requests, random.seed(0), 100-1024 tokens in and out, temperature 0.6. W2: one request, 128 in, 512
out, greedy. W3: 32 prompts of 4096, 1 out. W4: 256 requests, 2048 shared + 64 own in, 64 out. W5: batches of
512 in, 256 out. W6: batches of 8192 in, 1024 out (--lengths; --max-model-len 9217 at least).

W7: --agents agents of --agent-turns turns, whose prompts grow to --agent-tokens; all take a turn, then all the next
(with gaps between turns: serve.py). W8: documents of 32k, 64k and 128k tokens as far as --max-model-len goes,
256 out, in batches of --documents: computed, then again from the prefix cache. W9: 256 requests with the lengths
of chats, at once (as they arrive: serve.py). W10: 256 requests of 512 in, 128 out, each with other sampling
settings; with --schemas every fourth has a JSON schema of its own, and the model needs a tokenizer.

Weights are random (``load_format=dummy``), prompts are token ids, no request stops early. ``limit_``: what an
H200 needs at least (``limits.py``). ``--beside``: two engines by turns (``turns.py``).
Llama wants a tokenizer all the same: ``--extra '{"tokenizer": "FOLDER"}'``, which ``words.py`` makes.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lines
import traffic
import turns

Sampling = dict[str, Any]


class Got(NamedTuple):
    """Tokens of a request: out, and of its prompt those that were cached."""

    tokens: int
    cached: int


class Peer(Protocol):
    version: str

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], sampling: list[Sampling]
    ) -> list[Got]:
        """EOS is ignored. ``sampling``: fields that all engines call alike, and ``schema``."""

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

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], sampling: list[Sampling]
    ) -> list[Got]:
        from sgla.messages import Grammar, SamplingParams

        def params(tokens: int, schema: Any = None, **fields: Any) -> Any:
            grammar = Grammar(kind="json_schema", text=json.dumps(schema)) if schema else None
            return SamplingParams(max_tokens=tokens, ignore_eos=True, grammar=grammar, **fields)

        asked = [params(n, **fields) for n, fields in zip(max_tokens, sampling, strict=True)]
        outputs = self.engine.generate(prompts, asked)
        return [Got(len(output.tokens), output.usage.cached_tokens) for output in outputs]

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
        settings.setdefault("skip_tokenizer_init", "tokenizer" not in settings)
        self.llm = vllm.LLM(model, load_format="dummy", max_model_len=max_model_len, **settings)

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], sampling: list[Sampling]
    ) -> list[Got]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        def params(tokens: int, schema: Any = None, **fields: Any) -> Any:
            structured = StructuredOutputsParams(json=schema) if schema else None
            return SamplingParams(
                max_tokens=tokens, ignore_eos=True, detokenize=False, structured_outputs=structured, **fields
            )

        asked = [params(n, **fields) for n, fields in zip(max_tokens, sampling, strict=True)]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
        return [Got(len(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]

    def reset_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        pass


ENGINES: dict[str, Any] = {"sgla": Sgla, "vllm": Vllm}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        begun = time.perf_counter()
        self.engine: Peer = ENGINES[args.engine](args.model, args.max_model_len, json.loads(args.extra))
        ready = time.perf_counter() - begun
        self.args = args
        self.base = {
            "engine": args.engine,
            "version": self.engine.version,
            "machine": machine(),
            "model": args.name or Path(args.model).name,
        }
        if args.tag:
            self.base["tag"] = args.tag
        self.longest = args.max_model_len
        self.random, self.vocab = random.Random(1234), min(args.vocab, vocabulary(args.model))
        self.batches, self.lengths, self.documents, self.document_tokens = (
            [int(n) for n in text.split(",")]
            for text in (args.batches, args.lengths, args.documents, args.document_tokens)
        )
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
        self.emit(w="startup", s=round(ready, 2), extra=args.extra, **more)

    def emit(self, **fields: Any) -> None:
        lines.emit(self.base | fields)

    def prompt(self, n: int) -> list[int]:
        return [self.random.randint(0, self.vocab - 1) for _ in range(n)]

    def timed(
        self, prompts: list[list[int]], max_tokens: list[int], temperature: float | list[Sampling]
    ) -> float:
        return self.run(prompts, max_tokens, temperature)[0]

    def run(
        self, prompts: list[list[int]], max_tokens: list[int], sampling: float | list[Sampling]
    ) -> tuple[float, int]:
        """Seconds, and tokens of the prompts that were cached. ``sampling``: a temperature, or each one's."""
        each = sampling if isinstance(sampling, list) else [{"temperature": sampling}] * len(prompts)
        begun = time.perf_counter()
        got = self.engine.generate(prompts, max_tokens, each)
        seconds = time.perf_counter() - begun
        assert [one.tokens for one in got] == max_tokens, (got[:5], max_tokens[:5])
        return seconds, sum(one.cached for one in got)

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
        self.crowd("W1", repeat, s, [*map(len, prompts)], outputs)

    def w2(self, repeat: int) -> None:
        firsts = sorted(self.timed([self.prompt(128)], [1], 0.0) for _ in range(21))
        first = firsts[len(firsts) // 2]
        s = self.timed([self.prompt(128)], [512], 0.0)
        self.emit(
            w="W2",
            rep=repeat,
            ttft_ms=round(first * 1e3, 2),
            ttft_p99_ms=round(firsts[-1] * 1e3, 2),
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
            steps: dict[str, Any] = {}
            if outputs > 1:  # else there is no step but the prompts'
                steps["ms_per_step"] = round((s - first) / (outputs - 1) * 1e3, 3)
            if outputs > 1 and self.limits:
                limit = self.limits.step([tokens + outputs // 2] * size)
                steps["limit_ms_per_step"] = round(limit * 1e3, 3)
            self.emit(
                w=name,
                rep=repeat,
                bs=size,
                lengths=[tokens, outputs],
                s=round(s, 3),
                prefill_s=round(first, 3),
                **steps,
                out_tok_s=round(outputs * size / s, 1),
            )

    def w7(self, repeat: int) -> None:
        args = self.args
        most = min(args.agent_tokens, self.longest - traffic.ANSWER)
        tasks = traffic.agents(repeat, args.agents, args.agent_turns, most, 0.0)
        system = self.prompt(traffic.SYSTEM)
        prompts = [[*system] for _ in tasks]
        s, cached, asked, before, limit = 0.0, 0, 0, [traffic.SYSTEM] * len(tasks), 0.0
        for turn in range(args.agent_turns):
            for task, prompt in zip(tasks, prompts):
                added = task.added[turn] - (0 if turn else len(system))
                prompt += self.prompt(min(added, most - len(prompt)))
            outputs = [traffic.ANSWER] * len(prompts)
            seconds, had = self.run(prompts, outputs, 0.0)
            s, cached, asked = s + seconds, cached + had, asked + sum(map(len, prompts))
            if self.limits:
                limit += sum(map(self.limits.document, map(len, prompts), before))
                limit += self.limits.steps([*map(len, prompts)], outputs)
            before = [*map(len, prompts)]
        taken = args.agents * args.agent_turns
        self.emit(
            w="W7",
            rep=repeat,
            s=round(s, 3),
            longest=max(before),
            hit_rate=round(cached / asked, 4),
            turns_s=round(taken / s, 2),
            out_tok_s=round(taken * traffic.ANSWER / s, 1),
            limit_turns_s=self.limits and round(taken / limit, 2),
        )

    def w8(self, repeat: int) -> None:
        for tokens in traffic.documents(self.longest, self.document_tokens):
            for size in self.documents:
                self.engine.reset_cache()
                prompts = [self.prompt(tokens) for _ in range(size)]
                prefill = self.timed(prompts, [1] * size, 0.0)
                again, cached = self.run(prompts, [1] * size, 0.0)
                s = self.timed(prompts, [traffic.DOCUMENT_OUT] * size, 0.0)
                self.emit(
                    w="W8",
                    rep=repeat,
                    bs=size,
                    tokens=tokens,
                    prefill_s=round(prefill, 4),
                    in_tok_s=round(size * tokens / prefill, 1),
                    cached_ttft_ms=round(again * 1e3, 2),
                    hit_rate=round(cached / (size * tokens), 4),
                    ms_per_step=round((s - again) / (traffic.DOCUMENT_OUT - 1) * 1e3, 3),
                    limit_in_tok_s=self.limits and round(tokens / self.limits.document(tokens), 1),
                    limit_ms_per_step=self.limits
                    and round(self.limits.step([tokens + traffic.DOCUMENT_OUT // 2] * size) * 1e3, 3),
                )

    def w9(self, repeat: int) -> None:
        inputs, outputs = map(list, zip(*traffic.chats(repeat, 256)))
        s = self.timed([self.prompt(n) for n in inputs], outputs, 0.6)
        self.crowd("W9", repeat, s, inputs, outputs)

    def w10(self, repeat: int) -> None:
        sampling = traffic.settings(256)
        if self.args.schemas:
            given = [{"schema": traffic.schema(256 * repeat + i)} if i % 4 == 0 else {} for i in range(256)]
            sampling = [fields | more for fields, more in zip(sampling, given)]
        inputs, outputs = [512] * 256, [128] * 256
        s = self.timed([self.prompt(n) for n in inputs], outputs, sampling)
        self.crowd("W10", repeat, s, inputs, outputs)

    def crowd(self, name: str, repeat: int, s: float, inputs: list[int], outputs: list[int]) -> None:
        self.emit(
            w=name,
            rep=repeat,
            s=round(s, 3),
            in_tok=sum(inputs),
            out_tok=sum(outputs),
            out_tok_s=round(sum(outputs) / s, 1),
            limit_tok_s=self.limits and round(sum(outputs) / self.limits.crowd(inputs, outputs), 1),
        )


def vocabulary(model: str) -> int:
    config = json.loads((Path(model) / "config.json").read_text())
    size: int = config.get("text_config", config)["vocab_size"]
    return size


def machine() -> str:
    import torch

    where = lines.gpus() if torch.cuda.is_available() else lines.machine()
    return f"{where}, torch {torch.__version__}"


def main() -> None:
    args = parse(sys.argv[1:])
    if args.beside:
        turns.measure(args, lambda side: [*shlex.split(parse(side).python), __file__, *side])
        return
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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="sgla")
    parser.add_argument("--python", default=sys.executable, help="with --beside: a side's interpreter")
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", help="shown in the lines; default: the folder's name")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--batches", default="1,16,64,256", help="of W5 and W6")
    parser.add_argument("--lengths", default="8192,1024", help="of W6: tokens in, tokens out")
    parser.add_argument("--agents", type=int, default=16, help="of W7")
    parser.add_argument("--agent-turns", type=int, default=30, help="of W7")
    parser.add_argument("--agent-tokens", type=int, default=60_000, help="of W7: the longest prompt")
    parser.add_argument("--documents", default="1,8", help="of W8: so many at once")
    parser.add_argument(
        "--document-tokens", default=",".join(map(str, traffic.DOCUMENTS)), help="of W8: their lengths"
    )
    parser.add_argument("--schemas", action="store_true", help="W10: every fourth request has one")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=100000, help="ids of prompts are less, and the model's")
    parser.add_argument("--extra", default="{}", help="more settings of the engine, as JSON")
    parser.add_argument("--tag", default="")
    turns.add_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
