"""What a server with a role opens: a prefill server's units for others, a decode server's way to them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, OutOfMemory
from sgla.hub.source import ModelSource
from sgla.messages import CacheGroup, Tier
from sgla.peers import PeerRefused
from sgla.version import __version__
from sgla.worker.lent import TOKEN, Lending, Mover, Segment, SegmentUnits
from sgla.worker.memory import mib, tier_units
from sgla.worker.mooncake_engine import MooncakeEngine
from sgla.worker.nixl import Nixl
from sgla.worker.offer import HostUnits, Offer
from sgla.worker.parts import Fit, Part
from sgla.worker.remote import COPYING, RemoteTier
from sgla.worker.tiers import FileTier, UnitMemory
from sgla.worker.transfer import TransferEngine

SAMPLES, SAMPLE = 256, 4096  # pieces of a file of weights, and their bytes
LEAST = 1  # pages that a prompt must have before others read it
# Bytes of units that a rank of a prefill server keeps for others, if nobody says how many: of its host's
# memory at most, and of its GPU's.
MOST, ON_GPU = 16 << 30, 8 << 30
ROOM = 1 << 30  # bytes of units on their way to a rank, if nobody says how many


class Peering(NamedTuple):
    """``ports``: ``Facts.peer_ports``"""

    tier: Offer | RemoteTier
    told: Tier
    ports: list[int]


def open_peer(
    config: Config,
    identity: dict[str, str],
    groups: Sequence[CacheGroup],
    memory: Sequence[UnitMemory],
    mover: Mover,
    lending: Lending,
    parts: Sequence[Sequence[Part]],
    shard: Shard,
    abreast: int = 1,
) -> Peering:
    """Of ``--role prefill`` or ``decode``. ``parts``: of units (``parts_of_units``); ``abreast``: see
    ``FileTier``. Raises ConfigError and OutOfMemory."""
    rank, size = shard.rank, shard.size
    if config.role == "decode":
        room = ROOM if config.kv_transfer_bytes is None else config.kv_transfer_bytes // size
        fit = partial(fitting, parts, groups, [units.nbytes for units in memory], shard)
        remote = RemoteTier(config, identity, memory, mover, lending, fit, room, abreast, engine_of(config))
        told = Tier("prefill", [0] * len(memory), shared=True, least=LEAST, computes=True)
        return Peering(remote, told, [])
    pages, nbytes = [group.pages for group in groups], [units.nbytes for units in memory]
    own = sum(count * n for count, n in zip(pages, nbytes))
    room = gpu_room(config, size)
    if not room:
        room = min(own, MOST) if config.kv_transfer_bytes is None else config.kv_transfer_bytes // size
    units = tier_units(room, pages, nbytes)
    if not all(units):
        raise ConfigError(
            f"--kv-transfer-bytes {config.kv_transfer_bytes} has no room for one page; raise it, or leave it "
            "out",
            param="kv_transfer_bytes",
        )
    token = os.urandom(TOKEN)
    lent = token if config.kv_transfer_backend in ("auto", "cuda_ipc") else b""
    try:
        kept = [HostUnits(count, n, token, lending) for count, n in zip(units, nbytes)]
        moving = mover([units.memory for units in kept])
    except RuntimeError as error:  # of pages that cannot be locked
        raise OutOfMemory(
            f"memory ran out while {mib(room)} for KV on its way were taken ({error}); lower "
            "--kv-transfer-bytes",
            param="kv_transfer_bytes",
        ) from error
    offer = Offer(config, identity, kept, moving, rank, abreast, lent, engine_of(config))
    return Peering(offer, Tier("peers", units, early=True), [offer.port])


def gpu_room(config: Config, ranks: int) -> int:
    """Bytes of its GPU that each of so many ranks keeps for KV on its way to other servers."""
    if config.role != "prefill" or config.kv_transfer_backend != "cuda_ipc":
        return 0
    return ON_GPU if config.kv_transfer_bytes is None else config.kv_transfer_bytes // ranks


def engine_of(config: Config) -> TransferEngine | None:
    """Raises ConfigError."""
    if config.kv_transfer_backend == "nixl":
        return Nixl()
    if config.kv_transfer_backend == "mooncake":
        return MooncakeEngine(config.host if config.role == "prefill" else None)
    return None


def fitting(
    parts: Sequence[Sequence[Part]],
    groups: Sequence[CacheGroup],
    nbytes: Sequence[int],
    shard: Shard,
    others: int,
) -> Fit:
    """What this rank reads of a prefill server with ``others`` ranks. Raises PeerRefused."""
    untold = any(group.every and not part for group, part in zip(groups, parts))
    if others != shard.size and (not others or untold):
        raise PeerRefused(
            f"ranks: {shard.size} here, {others} there; of this model's states it is not known which heads "
            "they are of, so it needs the same --tp on both"
        )
    return Fit(parts, nbytes, shard.rank, shard.size, others)


def by_threads(memory: Sequence[UnitMemory], segments: Sequence[Segment]) -> FileTier:
    """A ``Mover`` of devices that threads read and write."""
    return FileTier("--role", [SegmentUnits(segment) for segment in segments], memory, COPYING)


def peer_identity(
    config: Config, source: ModelSource, layout: object, long: Sequence[bool]
) -> dict[str, str]:
    """What KV depends on beside the text, the same for all ranks: of weights a part of their bytes, so that
    copies on two hosts are alike. ``layout``: of units on all ranks together; ``long``: see
    ``disk.identity_of``."""
    names = ("dtype", "kv_cache_dtype", "quantization", "load_format", "model_impl", "page_size")
    settings = {name: getattr(config, name) for name in (*names, "deterministic")}
    backend = config.kv_transfer_backend
    return {
        "version": __version__,
        "model": model_digest(config, source),
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
        "layout": _digest([layout, long]),
        "--kv-transfer-backend": "auto or tcp" if backend in ("auto", "tcp") else backend,
    }


def model_digest(config: Config, source: ModelSource) -> str:
    """Of its configuration, and of pieces of its weights."""
    beside = sorted([*source.folder.glob("*.json"), *source.folder.glob("*.py")])
    seed = config.random_seed if source.kind == "dummy" else None
    return _digest([source.kind, source.config, seed, [_content(path) for path in (*source.files, *beside)]])


def _digest(value: object) -> str:
    told = json.dumps(value, sort_keys=True, default=msgspec.to_builtins)
    return blake2b(told.encode(), digest_size=8).hexdigest()


def _content(path: Path) -> list[object]:
    """The file's name, size, and a hash of pieces from all parts of it."""
    size, made = path.stat().st_size, blake2b(digest_size=16)
    with path.open("rb") as file:
        for i in range(SAMPLES if size > SAMPLES * SAMPLE else 1):
            file.seek(i * (size - SAMPLE) // (SAMPLES - 1))
            made.update(file.read(SAMPLE if size > SAMPLES * SAMPLE else size))
    return [path.name, size, made.hexdigest()]
