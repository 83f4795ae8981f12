"""Several hosts that serve one model: who holds which ranks, where they meet, and what they must have in
common."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from sgla.config import AdapterSettings, Config
from sgla.errors import ConfigError

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource

PORT = 29501  # of --dist-init-addr, if it names none
TIMEOUT = 300.0  # seconds; --dist-timeout
# Settings that each host has of its own: where files are, what memory and cores there are, who it is.
OWN = (
    {"model", "demo", "tokenizer", "chat_template", "served_model_name", "model_source", "revision"}
    | {"download_dir", "load_format", "threads", "kv_cache_bytes", "kv_disk", "node_rank", "executor"}
    | {"dist_init_addr", "dist_secret", "dist_secret_file"}
    | {name for name in Config.__struct_fields__ if name not in AdapterSettings.__struct_fields__}
)
NO_NODES = {
    "models": "several models in one server are on one host",
    "role": "a pair of servers shares out what it computes by itself",
}


def ranks_of(config: Config, node: int | None = None) -> range:
    """Those of a node, which lie side by side: whole sets, or a part of one."""
    if config.nnodes == 1:
        return range(config.ranks)
    each = config.local_ranks
    first = (config.node_rank if node is None else node) * each
    return range(first, first + each)


def answering(config: Config) -> range:
    """The ranks that steps have their results from: the first of the last stage, or its first set."""
    first = (config.pp - 1) * config.tp * config.cp
    return range(first, first + (config.tp if config.dp_attention else 1))


def answering_nodes(config: Config) -> list[int]:
    """Those that have some of these."""
    every = answering(config)
    return [n for n in range(config.nnodes) if any(rank in every for rank in ranks_of(config, n))]


def address(config: Config) -> tuple[str, int]:
    """Host and port where node 0 waits for the others. Raises ConfigError."""
    given = config.dist_init_addr or ""
    try:
        parts = urlsplit(given if "://" in given else f"tcp://{given}")
        if parts.scheme == "tcp" and parts.hostname and parts.port != 0:
            return parts.hostname, parts.port or PORT
    except ValueError:
        pass
    raise ConfigError(
        f"--nnodes {config.nnodes} needs --dist-init-addr HOST:PORT, an address of node 0 that the others "
        f"reach, got {given!r}",
        param="dist_init_addr",
    )


def not_there(host: str, port: int, error: OSError) -> ConfigError:
    """Why node 0 cannot wait there."""
    why = f"--dist-init-addr {host}:{port} must be an address of this host, node 0: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        why = f"--dist-init-addr {host}:{port}: the port is taken; give another one, the same on all nodes"
    return ConfigError(why, param="dist_init_addr")


def secret_of(config: Config) -> str:
    """What the nodes know in common. Raises ConfigError."""
    if config.dist_secret:
        return config.dist_secret
    if config.dist_secret_file is None:
        raise ConfigError(
            f"--nnodes {config.nnodes} needs a secret that the nodes share: set SGLA_DIST_SECRET, or name a "
            "file by --dist-secret-file",
            param="dist_secret",
        )
    try:
        found = Path(config.dist_secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"--dist-secret-file {config.dist_secret_file}: {why}", param="dist_secret_file"
        ) from error
    if not found:
        raise ConfigError(f"--dist-secret-file {config.dist_secret_file} is empty", param="dist_secret_file")
    return found


def check_nodes(config: Config) -> None:
    """Raise ConfigError for hosts that cannot share the ranks out, or lack what they need for it."""
    if config.node_rank >= config.nnodes:
        raise ConfigError(
            f"--node-rank {config.node_rank} must be below --nnodes {config.nnodes}", param="node_rank"
        )
    if config.executor == "ray":
        _check_ray(config)
        config = msgspec.structs.replace(config, nnodes=count_of(config), dp=1)  # of each replica
    if config.nnodes == 1:
        return
    if config.dist_secret and config.dist_secret_file:
        raise ConfigError(
            "--dist-secret and --dist-secret-file are two secrets; leave one out", param="dist_secret_file"
        )
    for name, why in NO_NODES.items():
        if getattr(config, name) != getattr(Config(), name):
            raise _refused(config, f"with --{name}: {why}", name)
    if config.executor == "fake" and not config.fake_step_ms:
        raise _refused(config, "with --executor fake without --fake-step-ms, which runs no ranks", "executor")
    if config.executor == "inline":
        raise _refused(config, "with --executor inline, which runs one rank", "executor")
    _check_split(config)
    if config.executor != "ray" or config.dist_init_addr:
        address(config)
    if config.executor != "ray" or config.dist_secret_file:
        secret_of(config)


def count_of(config: Config) -> int:
    """Of nodes; those of Ray are the stages, if nobody says otherwise."""
    return config.pp if config.executor == "ray" and config.nnodes == 1 else config.nnodes


def _check_ray(config: Config) -> None:
    why = None
    if config.node_rank:
        why = f"with --node-rank {config.node_rank}: Ray starts the other nodes; leave it out"
    elif config.dp > 1 and config.nnodes > 1:
        why = f"with --dp {config.dp} and --nnodes {config.nnodes}: each stage is a node; leave --nnodes out"
    elif count_of(config) == 1:
        why = (
            f"with --tp {config.tp} --pp {config.pp}: a stage stays on one host; give --pp, or --cp, --ep or "
            "--dp-attention with --nnodes, or leave it out"
        )
    if why is not None:
        raise ConfigError(f"--executor ray cannot be honoured {why}", param="executor")


def _check_split(config: Config) -> None:
    nodes = config.nnodes
    if config.dp > 1:
        if config.dp % nodes:
            raise _refused(config, f"with --dp {config.dp}: each host has as many of the servers", "dp")
        return
    if config.pp * config.cp % nodes == 0:
        return
    if config.ep == 1 and not config.dp_attention:
        raise _refused(
            config,
            f"with --tp {config.tp} --pp {config.pp} --cp {config.cp}: a layer's ranks stay on one host, so "
            "--pp, or --pp times --cp, must be a multiple of it; or --dp, for servers that each fit on one; "
            "or give --ep or --dp-attention, which go over several hosts",
            "nnodes",
        )
    each, rest = divmod(config.ranks, nodes)
    if rest or config.tp % each:
        why = f"with --tp {config.tp} --pp {config.pp} --cp {config.cp}, which do not divide evenly"
        raise _refused(config, why, "nnodes")


def _refused(config: Config, why: str, param: str) -> ConfigError:
    return ConfigError(f"--nnodes {config.nnodes} cannot be honoured {why}", param=param)


def common(config: Config, torch: str, source: ModelSource | None) -> dict[str, str]:
    """What all nodes must have alike, by names that people understand. ``config``: as it was given, but for
    the device; ``torch``: its version."""
    names = [name for name in AdapterSettings.__struct_fields__ if name not in OWN]
    told = {name: _short(getattr(config, name)) for name in names}
    plain = {name: _short(getattr(Config(), name)) for name in told}
    given = {f"--{name.replace('_', '-')}": value for name, value in told.items() if value != plain[name]}
    return {"device": config.device, "torch": torch, "model": content(source)} | given


def _short(value: object) -> str:
    """A setting as text; of a long one its hash."""
    text = msgspec.json.encode(value, order="deterministic").decode().strip('"')
    return text if len(text) < 80 else f"{text[:20]}... {_digest(text.encode())}"


def content(source: ModelSource | None) -> str:
    """A hash of a model's configuration, and of the sizes and names of its weights."""
    files: list[tuple[str, int]] = []
    configs: list[Mapping[str, object]] = []
    while source is not None:
        files += sorted((path.name, os.path.getsize(path)) for path in source.files)
        configs.append(source.config)
        source = source.draft
    return _digest(msgspec.json.encode((configs, files), order="deterministic", enc_hook=str))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def of_node(config: Config, own: Config) -> Config:
    """Settings of the workers on another node: node 0's, but for what each host has of its ``own``."""
    changed = {name: getattr(own, name) for name in OWN}
    return msgspec.structs.replace(config, **changed)


def without_secrets(config: Config) -> Config:
    """For other hosts, which need none of what HTTP is served with."""
    plain = Config()
    changed = {name: getattr(plain, name) for name in OWN if name != "model"}
    return msgspec.structs.replace(config, **changed)


def at(host: str, port: int | str) -> str:
    """As addresses have it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def meeting(host: str, port: int, here: str) -> str:
    """Where the ranks of all hosts find each other, for ranks of the host that has the address ``here`` on
    the way there."""
    return f"tcp://{at(host, port)}?here={here}"


def listening(meeting: str, descriptor: int) -> str:
    """The same for rank 0, which listens there."""
    return f"{meeting}&listen={descriptor}"
