"""``sgla serve``: settings in, progress and a ready line out; the server itself is ``sgla.http.serve``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgla.cli.health import ANY
from sgla.cli.parallel import settled
from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import complain, load_config
from sgla.cli.several import is_on_demand, models_of
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.executor.procs import spawn_early
from sgla.grpc import require
from sgla.hub.cache import origin
from sgla.hub.demo import about, with_demo
from sgla.hub.fetch import find_local
from sgla.messages import Facts
from sgla.nodes import at
from sgla.observe.log import setup_logging
from sgla.resolve import check, resolve
from sgla.strategy import shared_by

if TYPE_CHECKING:
    from sgla.http.serve import Open


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    check(config)
    if config.models:
        return _serve(config, models_of(config))
    return with_demo(config, complain, _serve)


def _serve(config: Config, models: Sequence[Config] = ()) -> int:
    """``models``: several, instead of the one of ``config``."""
    setup_logging(config.log_level, config.log_format)
    config = settled(config, complain)
    if config.node_rank > 0:
        from sgla.cli.agent import run as agent

        return agent(config)
    if config.dp > 1:
        return serve_replicas(config)
    if config.grpc_port is not None:
        require()
    if config.executor == "procs" and not models:
        # The workers import torch while this process imports the HTTP layer.
        spawn_early(msgspec.structs.replace(config, device=resolve(config).config.device))
    from sgla.http.serve import run as serve

    progress = ProgressPrinter()

    def ready(config: Config, facts: Facts, defaults: Defaults, url: str, seconds: float) -> None:
        progress.close()
        print(ready_text(config, facts, defaults, url, seconds, find_local(config)), flush=True)

    try:
        return serve(config, progress, ready, models, is_on_demand(config), others(config))
    finally:
        progress.close()


def serve_replicas(config: Config) -> int:
    """Several servers and a router in front of them. Raises ConfigError."""
    from sgla.observe.machine import detect
    from sgla.route.balancer import Balancer
    from sgla.route.nodes import Nodes
    from sgla.route.replicas import Group, Replicas, of_replica, of_router, shares
    from sgla.route.serve import run as route

    machine = detect()
    device = resolve(of_replica(config), machine).config.device
    parts = shares(config, device, machine)

    def group(balancer: Balancer, url: str) -> Group:
        local = Replicas(balancer, url, of_replica(config), parts)
        return local if config.nnodes == 1 else Nodes(balancer, local, config, machine.torch or "")

    return route(of_router(config), group)


def others(config: Config) -> list[Open]:
    """What listens beside HTTP."""
    if config.grpc_port is None:
        return []
    from sgla.grpc.server import start

    return [start]


def model_text(path: Path | None) -> str:
    """The file or folder that is served; of one from the hub its name and revision, too."""
    if path is None:  # removed since
        return ""
    found = origin(path)
    return f"model: {found[0]}, revision {found[1]}, in {path}\n" if found else f"model: {path}\n"


def ready_text(
    config: Config, facts: Facts, defaults: Defaults, url: str, seconds: float, path: Path | None = None
) -> str:
    """What is served, and a ``curl`` line that works as it stands, or once the API key is filled in."""
    name = (config.served_model_name or [config.model])[0]
    begun = f"ready in {seconds:.1f} s: {name} on {facts.device}, {facts.dtype}"
    notes = "".join(f"note: {note}\n" for note in filter(None, (*facts.notes, about(config.model))))
    if facts.encodes:
        where = at("HOST" if config.host in ANY else config.host, facts.peer_ports[0])
        told = ", where HOST is this machine" if config.host in ANY else ""
        return (
            f"{begun}\n{model_text(path)}{notes}"
            f"pictures are read for servers with --encode-url tcp://{where}{told}"
        )
    cached = (facts.groups[0].pages - 1) * facts.page_size  # without the dummy page
    ranks = f", ranks by {shared}" if (shared := shared_by(config)) else ""
    return (
        f"{begun}, context {facts.context_len} tokens"
        + (f", KV cache {cached} tokens\n" if cached > 0 else "\n")
        + f"steps: {facts.step_tokens} tokens of {facts.slots} requests at most{ranks}\n"
        + model_text(path)
        + (f"sampling: {defaults}\n" if facts.pooling is None else "")
        + notes
        + _line_to_try(config, facts, name, url)
    )


def _line_to_try(config: Config, facts: Facts, name: str, url: str) -> str:
    route, fields = example(facts)
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.api_key else ""
    text = json.dumps({"model": name, **fields}).replace("'", "'\\''")
    sent = "-F file=@speech.wav" if facts.speech else f"-H 'Content-Type: application/json' -d '{text}'"
    return f"try: curl {url}{route} {key}{sent}"


def example(facts: Facts) -> tuple[str, dict[str, Any]]:
    """A route that the model answers, and the fields of a body for it."""
    if facts.speech is not None:
        return "/v1/audio/transcriptions", {}
    if facts.pooling is None:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    if facts.pooling.task == "embed":
        return "/v1/embeddings", {"input": "Hello!"}
    if facts.pooling.size == 1:
        return "/v1/score", {"text_1": "Hello!", "text_2": "Good morning!"}
    return "/v1/classify", {"input": "Hello!"}
