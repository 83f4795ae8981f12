"""Streams of others while one client sends what is no picture: one JSON line.

    python bench/hostile_media.py [--streams 8] [--abreast 16] [--rounds 2]

A server on this machine's CPUs has a tiny model with random weights that takes pictures. Another process
reads ``--streams`` streams and tells how much later their tokens come than they do half of the time when
nothing else happens (``lag_ms``: p50, p99 and the longest; ``quiet``: before the attack). Meanwhile one
client sends the files and sources of ``media_attacks.py``, so many ``--abreast``, slow servers, and 10,000
pictures at once.

A machine with few cores adds a lag of its own, so the server tells what its loop does, too (``loop_ms``):
``own`` is the CPU time of its thread between two calls of a timer, which is as long as it lets nothing else
run, and ``core`` how long it waited for a core (Linux). The exit code is 1 if a request is answered with
anything but a 4xx, if memory or descriptors are left, if the p99 of the lag is above 20 ms, or the longest of
``own``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import lines
import media_attacks
import pictures
from attack import BACK, memory, settled
from hostile import CHAT, KEY, OTHER, TEXT, Target, exchange, request
from process import Server, free_port

from sgla.bench.report import percentile

MODEL = Path(__file__).parent / "models" / "qwen2.5-vl-7b"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1024}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MOST = 20.0  # milliseconds
QUIET = 6.0  # seconds
LENGTH = 30_000  # tokens of a stream
TICK = 0.002  # seconds
LARGE = 8 << 20  # bytes of a file, of which none may have so many
PROMPT = "w5 <|vision_start|> <|image_pad|> <|vision_end|> w6"


def write_model(folder: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    ids = ("bos", "eos", "vision_start", "vision_end", "vision", "image", "video")
    config |= SMALL | {f"{name}_token_id": 1000 + i for i, name in enumerate(ids)}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config["vision_config"] |= TOWER | {"fullatt_block_indexes": [0]}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "preprocessor_config.json", folder)
    pictures.write_tokenizer(folder, folder)
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": shown}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Turns:
    """Beside the server's own watch of its loop: when the timer called, the milliseconds that its thread had
    computed since then, and waited for a core."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []
        self._own = self._core = 0.0
        self._loop = asyncio.get_running_loop()
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._tick()

    def _tick(self) -> None:
        own, core = (int(each) / 1e6 for each in self._file.read_text().split()[:2])
        self.seen.append((time.monotonic(), own - self._own, core - self._core))
        self._own, self._core = own, core
        self._loop.call_later(TICK, self._tick)


def serve(file: Path, arguments: list[str]) -> int:
    """A server that fetches from the one of the attack, and writes its ``Turns`` to a file at its end."""
    from sgla.cli import main
    from sgla.http import serve as server

    class Watch(server.LoopWatch):
        def __init__(self, report: Any) -> None:
            super().__init__(report)
            self.turns = Turns()

        def close(self) -> None:
            super().close()
            file.write_text(json.dumps(self.turns.seen))

    vars(server)["LoopWatch"] = Watch
    media_attacks.let_through(setattr)
    return main(arguments)


def watch(port: int, count: int, over: Event, told: Connection) -> None:
    """Read so many streams; when each token came, by stream, once it is ``over``."""

    async def stream(times: list[float]) -> None:
        body = {"prompt": "w5 w6", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        data = request(TEXT, body, OTHER)
        while not over.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            while (line := await reader.readline()) and b"[DONE]" not in line and not over.is_set():
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
            writer.close()
            times.append(0.0)  # what follows is another stream

    async def all_of() -> list[list[float]]:
        came: list[list[float]] = [[] for _ in range(count)]
        await asyncio.gather(*(stream(times) for times in came))
        return came

    told.send(asyncio.run(all_of()))


def gaps(came: list[list[float]], begin: float, end: float) -> list[float]:
    """Milliseconds between tokens that came in this time."""
    pairs = ((a, b) for times in came for a, b in pairwise(times) if a and b)
    return [1e3 * (b - a) for a, b in pairs if begin <= a and b <= end]


def lag(found: list[float], usual: float) -> dict[str, float]:
    late = [max(0.0, gap - usual) for gap in found]
    return {
        "p50": round(percentile(late, 0.5), 2),
        "p99": round(percentile(late, 0.99), 2),
        "max": round(max(late), 2),
    }


def loop_lag(seen: list[tuple[float, float, float]], begin: float, end: float) -> dict[str, Any]:
    """Of ``Turns`` in this time."""
    within = [(own, core) for at, own, core in seen if begin <= at <= end]
    own, core = ([ms for ms, _ in within], [ms for _, ms in within])
    return {"own": lag(own, 0.0), "core": lag(core, 0.0)}


def hostile(address: str) -> list[bytes]:
    """Requests, each with one thing that is no picture."""
    texts = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for _, data in media_attacks.files()]
    texts += [text for _, text in media_attacks.texts(address)]
    texts.append(base64.b64encode(bytes(LARGE)).decode())
    texts += [f"{address}/{path}" for path in ("slow", "drip") for _ in range(4)]
    asked = [request("/generate", {"text": PROMPT, "image_data": [text]}) for text in texts]
    small = {"url": f"data:image/png;base64,{base64.b64encode(media_attacks.RED).decode()}"}
    many = [{"type": "image_url", "image_url": small}] * 10_000
    return [*asked, request(CHAT, {"messages": [{"role": "user", "content": many}]})]


async def attacked(target: Target, asked: list[bytes], abreast: int) -> Counter[int]:
    turns = asyncio.Semaphore(abreast)

    async def one(data: bytes) -> int:
        async with turns:
            return (await exchange(target, data))[0]

    return Counter(await asyncio.gather(*(one(data) for data in asked)))


async def whole(
    target: Target, args: argparse.Namespace, spans: dict[str, tuple[float, float]]
) -> dict[str, Any]:
    async with media_attacks.sources() as address:
        asked = hostile(address)
        await attacked(target, asked, args.abreast)  # what starts with the first ones
        await asyncio.sleep(2)
        kept = await asyncio.to_thread(memory, target.pid), descriptors(target.pid)
        begun = time.monotonic()
        await asyncio.sleep(QUIET)
        spans["quiet"] = begun, time.monotonic()
        statuses: Counter[int] = Counter()
        for _ in range(args.rounds):
            statuses += await attacked(target, asked, args.abreast)
        spans["attacked"] = spans["quiet"][1], time.monotonic()
    return {
        "requests": len(asked) * args.rounds,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "kept": kept,
    }


def descriptors(pid: int) -> int:
    """Of the server's main process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--abreast", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server-args", default="")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return serve(Path(sys.argv[2]), ["serve", *sys.argv[3:]])
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        write_model(folder)
        command = [
            sys.executable,
            __file__,
            "serve",
            str(folder / "turns.json"),
            "--model",
            name,
            "--load-format",
            "dummy",
            "--device",
            "cpu",
        ]
        command += ["--port", str(port), "--threads", "1", "--api-key", KEY, "--api-key", OTHER]
        inside = media_attacks.write_folder(folder / "media")
        command += ["--allowed-media-path", str(inside), "--media-timeout", "2", "--max-media-bytes", "65536"]
        command += ["--max-image-pixels", "1048576", *args.server_args.split()]
        with Server(command, f"http://127.0.0.1:{port}", "/health/ready", folder / "server.log") as server:
            result, spans = measure(Target(port, pid=server.process.pid), args)
        seen = json.loads((folder / "turns.json").read_text())
    result["loop_ms"] = {name: loop_lag(seen, *span) for name, span in spans.items()}
    if result["loop_ms"]["attacked"]["own"]["max"] > MOST:
        result["faults"].append("loop")
    print(lines.line(result), flush=True)
    return int(bool(result["faults"]))


def measure(
    target: Target, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """What was seen from outside, and when what began and ended."""
    own, other = multiprocessing.Pipe()
    over = multiprocessing.Event()
    watcher = multiprocessing.Process(target=watch, args=(target.port, args.streams, over, other))
    watcher.start()
    spans: dict[str, tuple[float, float]] = {}
    found = asyncio.run(whole(target, args, spans))
    over.set()
    came = own.recv()
    watcher.join()
    before, files_before = found.pop("kept")
    left = settled(target.pid, BACK * before)
    files_left = descriptors(target.pid)
    by = {name: gaps(came, *span) for name, span in spans.items()}
    usual = percentile(by["quiet"], 0.5)
    lags = {name: lag(values, usual) for name, values in by.items()}
    faults = {
        "no 4xx": any(not status.startswith("4") for status in found["statuses"]),
        "memory": left > BACK * before,
        "descriptors": files_left > files_before,
        "slow": lags["attacked"]["p99"] > MOST,
    }
    result = {
        **found,
        "seconds": round(spans["attacked"][1] - spans["attacked"][0], 1),
        "streams": args.streams,
        "gap_ms": round(usual, 2),
        "lag_ms": lags,
        "rss_mb": [before >> 20, left >> 20],
        "descriptors": [files_before, files_left],
        "faults": [name for name, so in faults.items() if so],
    }
    return result, spans


if __name__ == "__main__":
    sys.exit(main())
