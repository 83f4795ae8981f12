"""Requests with a picture each, and the tower by itself: one JSON line a measurement.

    python bench/pictures.py [--model bench/models/qwen2.5-vl-7b] [--device cuda] [--only tower new ...]

Weights are random, and so is the tokenizer's vocabulary; nothing is downloaded. ``tower``: the FLOP/s at which it
makes features of a picture, and ``towers`` of groups of them one behind the other, as a server has them read,
beside ``--peak``, the limit of the chip. Over HTTP, ``--requests`` at once
and as many as ``--alone`` one after the other, ``--output-len`` tokens out: ``new`` pictures, the same ones behind
another text (``features``: the tower does not see them again), and the same requests again (``cached``: their
tokens, too), and ``text``: as many tokens without a picture, new and cached. Times to the first token in seconds.
``host``: the way of pictures to the worker without a server, new ones and the same again, by stage. ``trace``:
what a GPU does between those that the tower looks at, of ``--traced`` new pictures at once.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import lines
import numpy as np
from PIL import Image
from process import Server, free_port

WORDS = {"<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id"}
KINDS = "tower", "host", "new", "features", "cached", "text", "trace"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "qwen2.5-vl-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--side", type=int, default=1008, help="pixels of a picture's side")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--alone", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--traced", type=int, default=16, help="pictures, with eight tokens out each")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the chip in bfloat16")
    parser.add_argument("--server-args", default="--context-length 4096")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "pictures.log")
    parser.add_argument("--plain", action="store_true", help="the tower with transformers' kernels")
    parser.add_argument("--ours-from", nargs="+", type=int, help="tokens of what our kernel attends over")
    parser.add_argument("--abreast", nargs="+", type=int, help="bytes of pictures at a time")
    parser.add_argument("--profile", action="store_true", help="also print the tower's kernels")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if "tower" in args.only:
        if args.only == ["tower"]:
            tower(args)
        else:  # in a process of its own, whose memory is free then
            subprocess.run([sys.executable, *sys.argv, "--only", "tower"], check=True)
    if "host" in args.only:
        asyncio.run(host(args))
    if set(args.only) - {"tower", "host"}:
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(args.model, Path(folder))
            port = free_port()
            command = [sys.executable, "-m", "sgla", "serve", "--model", str(args.model), "--port", str(port)]
            command += ["--load-format", "dummy", "--tokenizer", folder, "--device", args.device]
            command += ["--profile-folder", folder]
            url = f"http://127.0.0.1:{port}"
            server = Server([*command, *args.server_args.split()], url, "/health/ready", args.log)
            with server:
                asyncio.run(measure(args, url, server.ready_s))


def picture(side: int, seed: int) -> bytes:
    """A JPEG with some structure."""
    small = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_tokenizer(model: Path, folder: Path) -> None:
    """A word for each id, and the model's own texts for pictures."""
    config = json.loads((model / "config.json").read_text())
    special = {config[key]: word for word, key in WORDS.items()} | {config["image_token_id"]: "<|image_pad|>"}
    vocab = {special.get(i, f"w{i}"): i for i in range(config["vocab_size"])}
    added = [
        {"id": i, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, word in sorted(special.items())
    ]
    made = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def flops(config: dict[str, Any], patches: int) -> dict[str, float]:
    """Of Qwen2.5-VL's tower for a picture of so many patches, two for each multiplication, by what they are
    spent on."""
    vision = config["vision_config"]
    d, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    whole, window = len(vision["fullatt_block_indexes"]), (vision["window_size"] // vision["patch_size"]) ** 2
    merged = vision["spatial_merge_size"] ** 2
    pixels = vision["in_chans"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return {
        "patches": 2.0 * patches * pixels * d,
        "products": 2.0 * patches * depth * (4 * d * d + 3 * d * inner),
        "whole attention": 4.0 * patches * patches * d * whole,
        "windows": 4.0 * patches * window * d * (depth - whole),
        "merger": 2.0 * patches / merged * (merged * d) * (merged * d + vision["out_hidden_size"]),
    }


def tower(args: argparse.Namespace) -> None:
    import torch

    from sgla.hub.source import ModelSource
    from sgla.loading.tower import load_tower
    from sgla.media.arrays import size_as_patches
    from sgla.media.picture import Picture
    from sgla.media.prepare import carried
    from sgla.model.vision.table import VISIONS
    from sgla.worker import seeing, tower_kernels

    config = json.loads((args.model / "config.json").read_text())
    settings = (args.model / "preprocessor_config.json").read_text()
    vision, device = VISIONS[config["architectures"][0]], torch.device(args.device)
    with torch.inference_mode():
        source = ModelSource("dummy", args.model, (), config, {})
        load = partial(load_tower, source, vision, torch.bfloat16, device)
        made, note = load(), "transformers' kernels"
        if device.type == "cuda" and not args.plain:
            made, note = seeing.quick(made, load, vision, seeing.example_of(source, vision, seeing.MIDDLE))
        shown = Image.open(io.BytesIO(picture(args.side, 0))).tobytes()
        begun = time.perf_counter()
        arrays = carried(Picture.of(args.side, args.side, shown), vision.processors[0], settings, {})
        prepared = time.perf_counter() - begun
        pinned = device.type == "cuda"
        given = {name: torch.tensor(values) for name, values in arrays.items()}
        if pinned:
            given = {name: values.pin_memory() for name, values in given.items()}
        patches = int(arrays["image_grid_thw"].prod())
        tokens = int(patches // config["vision_config"]["spatial_merge_size"] ** 2)
        parts = flops(config, patches)
        total = sum(parts.values())
        size = sum(size_as_patches(name, x.shape, str(x.dtype)) for name, x in arrays.items())

        def alone() -> None:
            made(given)

        def abreast(group: int) -> None:
            for _ in range(4):
                made.several([given] * group, [tokens] * group)

        for ours in args.ours_from or [tower_kernels.OURS_FROM]:
            tower_kernels.OURS_FROM = ours
            groups = [max(1, most // size) if pinned else 1 for most in args.abreast or [seeing.ABREAST]]
            kinds: list[tuple[str, int, Callable[[], None], int]] = [("tower", 1, alone, 1)]
            kinds += [("towers", n, partial(abreast, n), 4 * n) for n in groups]
            for kind, group, once, count in kinds:
                took = seconds_of(once, device) / count
                emit(
                    args, kind, note=note, seconds=took, abreast=group, ours_from=ours, patches=patches,
                    flops=total, flops_by_part=parts, flops_per_second=total / took,
                    limit_s=total / args.peak, share_of_limit=total / args.peak / took,
                    processor_s=prepared,
                    arithmetic=f"{total / 1e12:.2f} TFLOP / {took * 1e3:.2f} ms = {total / took / 1e12:.0f} "
                    f"TFLOP/s of {args.peak / 1e12:.0f}",
                )  # fmt: skip
            if args.profile:
                with torch.profiler.profile() as found:
                    once()
                    synchronize(device)
                by = f"self_{device.type}_time_total"
                print(found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=80))


def urls_of(args: argparse.Namespace, count: int) -> list[str]:
    files = [picture(args.side, seed) for seed in range(count)]
    return ["data:image/jpeg;base64," + base64.b64encode(data).decode() for data in files]


async def host(args: argparse.Namespace) -> None:
    from picture_stages import Host

    from sgla.model.vision.table import VISIONS

    config = json.loads((args.model / "config.json").read_text())
    urls = urls_of(args, args.requests + args.alone + 1)
    way = Host(args.model, VISIONS[config["architectures"][0]], config, args.device == "cuda")
    try:
        await way.bring(urls.pop())  # processes start with the first
        for kind in ("host", "host again"):
            emit(args, kind, **await way.measure(urls[: args.requests], urls[args.requests :]))
    finally:
        await way.close()


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(once: Callable[[], None], device: Any) -> float:
    """Median, behind two that do not count."""
    seconds: list[float] = []
    for _ in range(12 if device.type == "cuda" else 4):
        begun = time.perf_counter()
        once()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


async def measure(args: argparse.Namespace, url: str, ready: float) -> None:
    urls = urls_of(args, args.requests + args.alone + args.traced)
    urls, traced = urls[: -args.traced], urls[-args.traced :]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, timeout=timeout, connector=connector, read_bufsize=1 << 20
    ) as session:
        await one(session, urls[0], "first", 2)  # what starts with the first picture
        kinds = ("new", "w5 w6"), ("features", "w7 w8"), ("cached", "w7 w8")
        for kind, text in kinds:
            if kind in args.only:
                tasks = [(shown, text) for shown in urls]
                emit(args, kind, ready_s=ready, **await both(args, session, tasks))
        if "text" in args.only:
            tokens = (args.side // 28) ** 2
            texts = [
                " ".join(f"w{10 + (i * 977 + j) % 9000}" for j in range(tokens)) for i in range(len(urls))
            ]
            for kind in ("text", "text cached"):
                emit(args, kind, **await both(args, session, [("", text) for text in texts]))
        if "trace" in args.only:
            emit(args, "trace", pictures=len(traced), **await trace(session, traced))


async def both(
    args: argparse.Namespace, session: aiohttp.ClientSession, tasks: list[tuple[str, str]]
) -> dict[str, Any]:
    """The last ones one behind the other, then the others at once. ``tasks``: picture and text."""
    alone = [await one(session, *task, args.output_len) for task in tasks[args.requests :]]
    begun = time.perf_counter()
    found = await asyncio.gather(*(one(session, *task, args.output_len) for task in tasks[: args.requests]))
    seconds = time.perf_counter() - begun
    firsts = sorted(first for first, _ in found)
    return {
        "seconds": seconds,
        "requests": args.requests,
        "output_len": args.output_len,
        "output_per_second": args.requests * args.output_len / seconds,
        "pictures_per_second": args.requests / seconds,
        "ttft_p50": statistics.median(firsts),
        "ttft_max": firsts[-1],
        "alone_ttft": statistics.median(first for first, _ in alone),
        "alone_s": statistics.median(whole for _, whole in alone),
    }


async def trace(session: aiohttp.ClientSession, urls: list[str]) -> dict[str, Any]:
    from picture_stages import gaps

    async with session.post("/start_profile", json={}) as answer:
        answer.raise_for_status()
    await asyncio.gather(*(one(session, shown, "w11 w12", 8) for shown in urls))
    async with session.post("/stop_profile") as answer:
        answer.raise_for_status()
        file = (await answer.json())["ranks"][0]["file"]
    return gaps(json.loads(Path(file).read_text())["traceEvents"])


async def one(session: aiohttp.ClientSession, shown: str, text: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    begun, first = time.perf_counter(), 0.0
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    prompt = f"{text} <|vision_start|><|image_pad|><|vision_end|> w9" if shown else text
    body = {"text": prompt, "image_data": shown or None, "sampling_params": sampling, "stream": True}
    async with session.post("/generate", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {await answer.text()}")
        async for line in answer.content:
            if line.startswith(b"data:"):
                first = first or time.perf_counter() - begun
    return first, time.perf_counter() - begun


def emit(args: argparse.Namespace, kind: str, **fields: Any) -> None:
    rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}
    known = {"what": kind, "model": args.model.name, "device": args.device, "side": args.side}
    print(lines.line(known | rounded), flush=True)


if __name__ == "__main__":
    main()
