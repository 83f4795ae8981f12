"""``sgla bench``: run a workload against a server and print one JSON object a run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import aiohttp
import msgspec

from sgla.bench import load, workloads
from sgla.bench.report import summarize
from sgla.cli.chat import error_text
from sgla.cli.settings import reason
from sgla.engine.progress import Bar
from sgla.errors import ConfigError
from sgla.observe.machine import detect


def run(args: argparse.Namespace) -> int:
    if min(args.requests, args.input_len, args.output_len, args.concurrency, args.repeat, args.turns) < 1:
        raise ConfigError("counts and lengths must be at least 1")
    wish = {"num_steps": args.profile_num_steps, "output_dir": args.profile_output_dir}
    wish = {name: value for name, value in wish.items() if value is not None}
    if wish and not args.profile:
        raise ConfigError("--profile-output-dir and --profile-num-steps go with --profile")
    facts = asyncio.run(describe(args.url, args.api_key))
    target = load.Target(
        url=args.url, model=args.model or facts["model"], api=args.api, key=args.api_key, extra=extra_of(args)
    )
    head = {
        "engine": facts["engine"],
        "version": facts["version"],
        "machine": detect().label(),
        "model": target.model,
        "w": args.name or name_of(args),
        "concurrency": args.concurrency,
    }
    failed = False
    with profiled(target, wish) if args.profile else contextlib.nullcontext():
        for repeat in range(args.repeat):
            sessions = sessions_of(args, random.Random(args.seed + repeat))
            with contextlib.closing(Bar(sum(map(len, sessions)), "req", None)) as bar:
                ended = partial(ended_on, bar)
                work = load.run(target, sessions, args.concurrency, args.rate, args.seed, ended)
                records, seconds = asyncio.run(work)
            numbers = summarize(records, seconds)
            failed |= numbers["errors"] > 0
            print(json.dumps(head | ({"rate": args.rate} if args.rate else {}) | numbers), flush=True)
    if failed:
        print("sgla bench: some requests failed; first_error says how", file=sys.stderr)
    return int(failed)


def ended_on(bar: Bar, record: load.Record) -> None:
    bar.add([record])


@contextlib.contextmanager
def profiled(target: load.Target, wish: dict[str, Any]) -> Iterator[None]:
    """The server records what its workers do, as ``wish`` says; tells where the traces are.
    Raises ConfigError."""
    asyncio.run(ask(target, "/start_profile", wish))
    try:
        yield
    finally:
        stopped = asyncio.run(ask(target, "/stop_profile", {}))
        try:
            files = [rank["file"] for rank in json.loads(stopped)["ranks"]]
        except (ValueError, LookupError, TypeError):  # another kind of server
            files = [stopped.decode(errors="replace").strip()]
        for file in files:
            print(f"sgla bench: profile: {file} (https://ui.perfetto.dev shows it)", file=sys.stderr)


async def ask(target: load.Target, path: str, body: dict[str, Any]) -> bytes:
    """What the server answers to a POST. Raises ConfigError for a refusal."""
    async with aiohttp.ClientSession(headers=target.headers) as client:
        try:
            async with client.post(target.url + path, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(f"{target.url}{path}: {error}") from error
    if response.status != 200:
        raise ConfigError(f"{target.url}{path}: {error_text(answer)}")
    return answer


def extra_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of every body."""
    extra: dict[str, Any] = {"temperature": args.temperature, "stream_options": {"include_usage": True}}
    return extra if args.stop_at_eos else extra | {"ignore_eos": True}


def name_of(args: argparse.Namespace) -> str:
    lengths = f"{args.input_len}x{args.output_len}"
    kinds = {
        "random": f"random-{lengths}",
        "shared-prefix": f"shared-{args.prefix_len}+{lengths}",
        "multi-turn": f"turns-{args.turns}x{lengths}",
    }
    return f"{kinds[args.workload]}-n{args.requests}-c{args.concurrency}"


def sessions_of(args: argparse.Namespace, rng: random.Random) -> list[workloads.Session]:
    """The requests that the flags describe. Chat messages and conversations are text, the rest token ids."""
    text = args.text or args.api == "chat"
    count, sizes = args.requests, (args.input_len, args.output_len)
    if args.workload == "shared-prefix":
        return workloads.shared_prefix_sessions(rng, count, args.prefix_len, *sizes, text=text)
    if args.workload == "multi-turn":
        return workloads.multi_turn_sessions(rng, count, args.turns, *sizes, spread=args.spread)
    return workloads.random_sessions(rng, count, *sizes, spread=args.spread, text=text)


class Model(msgspec.Struct):
    id: str
    owned_by: Any = None
    max_model_len: Any = None


class Models(msgspec.Struct):
    """What is read of a server's list of models."""

    data: list[msgspec.Raw]


class Version(msgspec.Struct):
    version: str = "unknown"


async def describe(url: str, key: str | None = None) -> dict[str, Any]:
    """Engine, version, first model of a server and its context, as far as it tells."""
    headers = load.Target(url=url, key=key).headers
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10), headers=headers) as client:
        try:
            async with client.get(f"{url}/v1/models") as response:
                listed = await response.read()
            async with client.get(f"{url}/version") as response:
                told = await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(f"no server at {url}: {reason(error)}; start one with 'sgla serve'") from error
    try:
        model = msgspec.json.decode(msgspec.json.decode(listed, type=Models).data[0], type=Model)
    except (msgspec.DecodeError, IndexError) as error:
        text = error_text(listed)[:200]
        raise ConfigError(f"{url} is no OpenAI-style server; its /v1/models says: {text}") from error
    version = Version()
    with contextlib.suppress(msgspec.DecodeError):
        version = msgspec.json.decode(told, type=Version)
    return {
        "engine": model.owned_by or "unknown",
        "version": version.version,
        "model": model.id,
        "context": model.max_model_len if isinstance(model.max_model_len, int) else None,
    }
