"""Bytes that a model takes, known before anything is loaded, and who of several models has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sgla.config import Config
from sgla.errors import ConfigError, OutOfMemory
from sgla.model.drafting import draft_bytes, draft_state, read_guessing
from sgla.model.encoder import EncoderSpec
from sgla.model.read import read_spec
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.stages import stages_of
from sgla.model.state import shared_out, state_of, token_bytes, unit_bytes, with_draft
from sgla.model.whole_experts import with_copies
from sgla.observe.machine import Machine
from sgla.resolve import GIB, MIB, host_bytes, kv_pool


class Need(NamedTuple):
    """What a model takes where it runs: ``place`` is cpu, cuda or another device."""

    place: str
    weights: int
    cache: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache


def ledger(config: Config, model: dict[str, Any], draft: dict[str, Any] | None = None) -> dict[str, int]:
    """Bytes by purpose for all ranks together, and what the KV cache holds, unless it gets what a GPU has
    left. Weights are estimated from the shape. ``draft``: see ``resolve``."""
    spec = read_spec(model)
    if isinstance(spec, EncoderSpec):
        weights = weight_bytes(spec, config.dtype, config.quantization, config.tp)
        return {"weights": weights, "kv_cache": 0, "kv_bytes_per_token": 0, "kv_pages": 0, "kv_tokens": 0}
    kind = "cuda" if config.device == "cuda" else "cpu"
    dtype = config.kv_dtype(config.dtype)
    guessing = read_guessing(config, draft, spec)
    weights = sum(_weights(config, part) for part, _ in _parts(config, spec))
    over = config.heads_over
    weights += draft_bytes(config, guessing, spec, config.dtype, kind, over) * config.ranks // config.pp
    states = [
        with_draft(
            shared_out(state_of(part, over, rank % over), config.dcp),
            draft_state(guessing, over, rank % over) if part.last else [],
        )
        for part, rank in _parts(config, spec)
    ]
    rows = {"weights": weights, "kv_bytes_per_token": sum(token_bytes(state, dtype) for state in states)}
    if spec.recurrent:
        rows["state_bytes"] = sum(unit_bytes(state, dtype) for state in states)
    if config.kv_cache_bytes is None:
        if config.cpu_offload_gb:
            rows["weights_on_host"] = host_bytes(config, spec, config.dtype)
        return rows
    pool = kv_pool(config, spec, dtype, guessing)
    pages = pool.tokens(config.kv_cache_bytes) // config.page_size
    rows |= {"kv_cache": config.kv_cache_bytes * config.ranks, "kv_pages": pages}
    if spec.recurrent:
        rows["states"] = pool.split(config.kv_cache_bytes)[-1]
    if any(group.window for group in pool.groups):
        rows["kv_tokens_without_windows"] = pool.whole(config.kv_cache_bytes)
    if pool.slab is not None:
        rows["kv_tokens_of_short_texts"] = pool.least(config.kv_cache_bytes)
    return rows | {"kv_tokens": pages * config.page_size}


class Held(NamedTuple):
    """What a rank, which is on ``node``, holds: which ``layers``, of these the part of ``tp_rank``; whether
    the embedding and the output layer; which ``experts``, if those are whole; bytes of weights, and those
    that it keeps of a token."""

    rank: int
    node: int
    stage: int
    tp_rank: int
    layers: tuple[int, int]  # first and last
    embedding: bool
    output: bool
    experts: tuple[int, int] | None
    weights: int
    kv_bytes_per_token: int


def mesh(config: Config, model: dict[str, Any]) -> list[Held]:
    """Each rank of a model that several share; none for one rank, or an encoder."""
    spec = read_spec(model)
    if config.ranks == 1 or not isinstance(spec, ModelSpec):
        return []
    dtype, found = config.kv_dtype(config.dtype), list[Held]()
    for number, (part, rank) in enumerate(_parts(config, spec)):
        state = state_of(part, config.heads_over, rank % config.heads_over)
        kept = token_bytes(shared_out(state, config.dcp), dtype)
        layers = part.held.start, part.held.stop - 1
        sizes, whole = (_weights(config, part), kept), None
        if part.moe is not None and config.ep > 1:
            whole = rank * part.moe.experts // config.ep, (rank + 1) * part.moe.experts // config.ep - 1
        place = number, number // config.local_ranks, number // (config.tp * config.cp), rank
        found.append(Held(*place, layers, part.first, part.last, whole, *sizes))
    return found


def _parts(config: Config, spec: ModelSpec) -> Iterator[tuple[ModelSpec, int]]:
    """Of each rank its stage, and its place there."""
    sets = range(config.cp)
    return ((stage, rank) for stage in stages_of(config, spec) for _ in sets for rank in range(config.tp))


def _weights(config: Config, part: ModelSpec) -> int:
    kind = "cuda" if config.device == "cuda" else "cpu"
    part, quantization = with_copies(config, part), part.quantized(config.quantization, kind)
    return weight_bytes(
        part, config.dtype, quantization, config.tp, kind, config.heads_over, config.mlps_over
    )


def need_of(name: str, config: Config, model: dict[str, Any], draft: dict[str, Any] | None = None) -> Need:
    """Of one of several models; ``config`` is resolved. Raises ConfigError for a KV cache that would take
    what a GPU has left."""
    rows = ledger(config, model, draft)
    if "kv_cache" not in rows:
        raise ConfigError(
            f"model {name} shares the GPU's memory with other models, so its KV cache needs a size; give it "
            "kv-cache-bytes",
            param="kv_cache_bytes",
        )
    return Need(config.device, rows["weights"], rows["kv_cache"])


def room_of(machine: Machine) -> dict[str, int]:
    """Bytes that all models together may take, by place; a place that is not named has no limit here."""
    room = {"cuda": machine.gpus[0].memory} if machine.gpus else {}
    return room | ({"cpu": machine.memory_available} if machine.memory_available else {})


def lacking(needs: Iterable[Need], room: Mapping[str, int]) -> dict[str, int]:
    """Bytes that are missing, by place."""
    taken: dict[str, int] = {}
    for need in needs:
        taken[need.place] = taken.get(need.place, 0) + need.bytes
    return {place: size - room[place] for place, size in taken.items() if size > room.get(place, size)}


def check_fits(needs: Mapping[str, Need], room: Mapping[str, int]) -> None:
    """Raises OutOfMemory, with the whole ledger, for models that do not fit together."""
    if missing := lacking(needs.values(), room):
        place, size = next(iter(missing.items()))
        raise OutOfMemory(
            f"the models do not fit together, {size_text(size)} of {place} memory are missing; serve fewer "
            "of them, or give them less kv-cache-bytes or quantization: int8\n" + table_of(needs, room),
            param="models",
        )


def table_of(needs: Mapping[str, Need], room: Mapping[str, int]) -> str:
    """A line for each model, and one for each place."""
    width = max(map(len, ("together", *needs)))
    lines = [f"{'model':<{width}}  {'weights':>10}  {'KV cache':>10}  {'together':>10}  on"]
    for name, need in needs.items():
        sizes = "  ".join(f"{size_text(size):>10}" for size in (need.weights, need.cache, need.bytes))
        lines.append(f"{name:<{width}}  {sizes}  {need.place}")
    for place in dict.fromkeys(need.place for need in needs.values()):
        total = sum(need.bytes for need in needs.values() if need.place == place)
        there = f", {size_text(room[place])} available" if place in room else ""
        lines.append(f"{'together':<{width}}  {'':>10}  {'':>10}  {size_text(total):>10}  {place}{there}")
    return "\n".join(lines)


def size_text(value: int) -> str:
    return f"{value / GIB:.1f} GiB" if value >= 4 * GIB else f"{value / MIB:.1f} MiB"
