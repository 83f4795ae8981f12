"""What it takes to sleep and wake, and to have a long prefix back from a tier: one JSON line a measurement.

    python bench/tiers.py --model bench/models/qwen3-8b --parts sleep,prefix [--tokens 32768] [--repeat 3]
        [--disk FOLDER]

``sleep``: seconds of each level, and of the wakes behind them, with the GiB that the GPU has free meanwhile;
the tokens of a request are the same before and after. ``prefix``: seconds to the first token of a prompt of
so many tokens and 16 more that is computed, that the KV cache has, at once, while it is copied to the tier,
and when it has been (``cached_later_s``), and that lies in the host's memory because others have pushed it
out (or in files: ``plain read`` has what threads alone read of them), and of the latter two with 2,048 more
(``*_more_s``), whose step may begin beside the copy; the bytes a second (``host_gb_s``) of the tokens that
``came``, in the time that it takes longer than ``cached_later_s``; and those of a plain copy from pinned
memory. ``update``: seconds that all weights take as tensors of this GPU, while eight requests are paused, and
whether these come to their end. Weights are random. ``regions``: where the seconds of a wake go, without a
server: so many bytes of weights and of KV are mapped as at a start, given back, and come back three times,
with the driver's calls told apart, with the KV in pieces of several sizes, and ``-alone``: the driver is
asked for the next piece when one has been mapped, not meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lines

GIB = 1 << 30
MORE = 2048  # tokens behind a prefix
PAGE = 16  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bench/models/qwen3-8b")
    parser.add_argument("--parts", default="sleep,prefix")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--disk", help="a folder: measure prefixes that lie there, not in the host's memory")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--weights-gib", type=float, default=15.3, help="of regions")
    parser.add_argument("--pieces", default="4G,4G-alone,1G,whole", help="of the KV, of regions")
    parser.add_argument("--extra", default="{}", help="more settings, as JSON")
    args = parser.parse_args()
    for part in args.parts.split(","):
        {"sleep": sleep, "prefix": prefix, "update": update, "regions": regions}[part](args)


def engine_of(args: argparse.Namespace, **settings: Any) -> Any:
    from sgla.engine import Engine

    fixed = {"load_format": "dummy", "device": "cuda"}
    return Engine(args.model, **fixed | settings | json.loads(args.extra))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    made = work()
    return round(time.perf_counter() - begun, 4), made


def first_token(engine: Any, prompt: list[int]) -> tuple[float, Any]:
    from sgla.messages import SamplingParams

    return timed(
        lambda: engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    )


def free() -> float:
    """GiB of the GPU."""
    import torch

    return round(torch.cuda.mem_get_info()[0] / GIB, 2)


def sleep(args: argparse.Namespace) -> None:
    from sgla.messages import SamplingParams

    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompt = [random.Random(0).randrange(10000) for _ in range(300)]
    with engine_of(args) as engine:
        before = engine.generate(prompt, params).tokens
        for repeat in range(args.repeat):
            for level in (1, 1, 2):
                had = free()
                away, slept = timed(partial(engine.sleep, level))
                assert slept
                given = free()
                back, _ = timed(engine.wake_up)
                again, output = timed(lambda: engine.generate(prompt, params))
                fields: dict[str, Any] = {
                    "level": level,
                    "sleep_s": away,
                    "wake_s": back,
                    "then_s": again,
                    "rep": repeat,
                }
                fields |= {"free_gib": [had, given, free()], "same": output.tokens == before}
                lines.emit({"part": "sleep", "model": args.model} | fields)


def prefix(args: argparse.Namespace) -> None:
    spec = json.load(open(f"{args.model}/config.json"))  # noqa: SIM115
    token = 4 * spec["num_hidden_layers"] * spec["num_key_value_heads"] * spec["head_dim"]
    draw = random.Random(1)
    room = args.tokens + 2 * MORE
    context = room - 2 * PAGE  # one page is nobody's
    settings = {"kv_cache_bytes": room * token, "context_length": context, "page_size": PAGE}
    if args.disk is None:
        settings["kv_host_bytes"] = 4 * room * token
    else:
        settings["kv_disk"] = f"{args.disk}:{4 * room * token}"
    with engine_of(args, **settings) as engine:
        first_token(engine, [draw.randrange(10000) for _ in range(args.tokens)])
        for repeat in range(args.repeat):
            # The other one leaves no page of the prefix on the GPU.
            lengths = args.tokens, context - PAGE
            prompts = [[draw.randrange(10000) for _ in range(length)] for length in lengths]
            cold, _ = first_token(engine, prompts[0] + [1] * 16)
            tree, in_tree = first_token(engine, prompts[0] + [2] * 16)
            wait(engine)
            tree_again, _ = first_token(engine, prompts[0] + [4] * 16)
            other, _ = first_token(engine, prompts[1])
            wait(engine)
            before = loaded(engine)
            host, in_host = first_token(engine, prompts[0] + [3] * 16)
            came = loaded(engine) - before
            first_token(engine, prompts[1])
            wait(engine)
            more = [[draw.randrange(10000) for _ in range(MORE)] for _ in range(2)]
            host_more, _ = first_token(engine, prompts[0] + more[0])
            tree_more, _ = first_token(engine, prompts[0] + more[1])
            cached = [output.usage.cached_tokens for output in (in_tree, in_host)]
            fields: dict[str, Any] = {
                "cold_s": cold,
                "cached_s": tree,
                "cached_later_s": tree_again,
                "other_s": other,
                "host_s": host,
                "cached_more_s": tree_more,
                "host_more_s": host_more,
                "cached": cached,
                "came": came,
            }
            fields["host_gb_s"] = round(came * token / (host - tree_again) / 1e9, 1)
            lines.emit({"part": "prefix", "model": args.model, "tokens": args.tokens, "rep": repeat} | fields)
        stats = [(tier.name, tier.loaded, tier.saved) for tier in engine.stats().tiers]
        plain = plain_copy(args.tokens * token)
        for piece in () if args.disk is None else (16 * token, 16 << 20):
            told = {
                threads: plain_read(args.disk, piece, threads, args.tokens * token)
                for threads in (1, 4, 8, 16)
            }
            lines.emit({"part": "plain read", "piece": piece, "gb_s": told})
        lines.emit({"part": "copy", "tiers": stats, "bytes": args.tokens * token, "plain_gb_s": plain})


def loaded(engine: Any) -> int:
    """Tokens that have come from tiers."""
    return PAGE * sum(tier.loaded for tier in engine.stats().tiers)


def update(args: argparse.Namespace) -> None:
    import torch

    from sgla.messages import SamplingParams

    tensors = weights_of(json.load(open(f"{args.model}/config.json")))  # noqa: SIM115
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    prompts = [[random.Random(i).randrange(10000) for _ in range(300)] for i in range(8)]
    with engine_of(args, kv_cache_bytes=8 << 30) as engine, ThreadPoolExecutor() as threads:
        for repeat in range(args.repeat):
            running = threads.submit(engine.generate, prompts, params)
            time.sleep(1)
            engine.pause_generation()
            torch.cuda.synchronize()
            seconds, taken = timed(partial(engine.update_weights_from_tensor, tensors.items()))
            engine.continue_generation()
            whole = [len(output.tokens) for output in running.result()]
            fields = {"part": "update", "model": args.model, "rep": repeat, "bytes": nbytes, "s": seconds}
            lines.emit(fields | {"taken": taken, "whole": whole == [1000] * 8})


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    """Random ones of Qwen3, on the GPU, by their names in files."""
    import torch

    wide, inner, dims = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sides = {"q": (heads * dims, wide), "k": (kv_heads * dims, wide), "v": (kv_heads * dims, wide)}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": sizes for name, sizes in sides.items()}
    shapes |= {"self_attn.o_proj": (wide, heads * dims), "mlp.down_proj": (wide, inner)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, wide))
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (wide,))
    shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (dims,))
    named = {
        f"model.layers.{i}.{n}": s for i in range(config["num_hidden_layers"]) for n, s in shapes.items()
    }
    named |= {"model.embed_tokens": (config["vocab_size"], wide), "model.norm": (wide,)}
    if not config["tie_word_embeddings"]:
        named["lm_head"] = (config["vocab_size"], wide)

    def made(size: tuple[int, ...]) -> Any:
        ones = torch.ones(size, dtype=torch.bfloat16, device="cuda")
        return ones.normal_(std=size[-1] ** -0.5) if len(size) > 1 else ones

    return {f"{name}.weight": made(size) for name, size in named.items()}


def regions(args: argparse.Namespace) -> None:
    import torch

    from sgla.worker import region
    from sgla.worker.pinned import Pinned

    torch.zeros(1, device="cuda")  # so that there is a context
    spent: dict[str, float] = {}
    driver = region.driver()

    class Timed:
        def __getattr__(self, name: str) -> Any:
            call = getattr(driver, name)

            def timed_call(*given: Any) -> Any:
                begun = time.perf_counter()
                code = call(*given)
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun
                return code

            return timed_call

    def told(phase: str, work: Callable[[], Any], **fields: Any) -> None:
        spent.clear()
        seconds, _ = timed(work)
        done, _ = timed(torch.cuda.synchronize)
        calls = {name: round(s, 4) for name, s in spent.items()}
        lines.emit({"part": "regions", "phase": phase, "s": seconds, "gpu_s": done, "calls": calls} | fields)

    region.driver = lambda: Timed()  # type: ignore[assignment, return-value]
    memory = region.CudaMemory(0)
    size = int(args.weights_gib * GIB) >> 21 << 21
    host = Pinned(size)
    for name in args.pieces.split(","):
        left = (torch.cuda.mem_get_info()[0] - size - 6 * GIB) >> 21 << 21
        bytes_, _, alone = name.partition("-")
        piece = {"256M": 256 << 20, "1G": GIB, "4G": 4 * GIB, "whole": left}[bytes_]
        ahead = region.created
        if alone:
            region.created = lambda memory, sizes: (memory.create(each) for each in sizes)
        wake_often(
            told, host.bytes, region.Region(memory, size), region.Region(memory, 2 * left, piece), name
        )
        region.created = ahead
        region.let_go()


def wake_often(told: Callable[..., None], host: Any, weights: Any, kv: Any, name: str) -> None:
    """The first and third wake is that of a server: copies of weights still run while the KV is mapped. The
    second one does one after the other."""
    import torch

    from sgla.worker.pinned import pieces

    def away() -> None:
        weights.unmap()
        kv.unmap()

    def weights_again() -> None:
        for start, stop in weights.map():
            weights.part(start, stop).copy_(host[start:stop], non_blocking=True)

    def kv_again() -> None:
        for start, stop in kv.map():
            kv.part(start, stop).zero_()

    def both_again() -> None:
        weights_again()
        kv_again()

    left = (torch.cuda.mem_get_info()[0] - len(host) - 6 * GIB) >> 21 << 21
    told("start weights", partial(weights.empty, (len(host),), torch.uint8), piece=name)
    told("start kv", lambda: kv.empty((left,), torch.uint8).zero_(), piece=name)
    for wakes in ((both_again,), (weights_again, kv_again), (both_again,)):
        for start, stop in pieces(len(host)):
            host[start:stop].copy_(weights.part(start, stop), non_blocking=True)
        torch.cuda.synchronize()
        told("sleep", away, piece=name)
        for wake in wakes:
            told(wake.__name__, wake, piece=name)


def wait(engine: Any) -> None:
    """Until nothing is copied any more, nor has been for a while."""
    quiet = 0
    while quiet < 10:
        time.sleep(0.05)
        quiet = quiet + 1 if engine._system._core.idle else 0


def plain_read(folder: str, piece: int, threads: int, most: int) -> float:
    """GB a second of threads that read the largest file of a folder into pinned memory."""
    import torch

    path = max(Path(folder).rglob("*.data"), key=lambda path: path.stat().st_size)
    end = min(most, path.stat().st_blocks * 512)
    file = os.open(path, os.O_RDONLY)
    rooms = [torch.empty(piece, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(threads)]

    def read(number: int) -> int:
        starts = range(number * piece, end - piece, threads * piece)
        return sum(os.preadv(file, [rooms[number].data], at) for at in starts)

    with ThreadPoolExecutor(threads) as pool:
        seconds, counts = timed(lambda: list(pool.map(read, range(threads))))
    os.close(file)
    return round(sum(counts) / seconds / 1e9, 1)


def plain_copy(nbytes: int) -> float:
    """GB a second of one copy out of pinned memory."""
    import torch

    host = torch.empty(min(nbytes, GIB), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    there.copy_(host)
    torch.cuda.synchronize()

    def copy() -> None:
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return round(len(host) / timed(copy)[0] / 1e9, 1)


if __name__ == "__main__":
    main()
