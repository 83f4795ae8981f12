"""Who gets the bytes of a GPU. Weights come first, then the tables of slots and the workspaces of kernels;
the largest steps are run once to see what they take (``warm_up.py: measure``); graphs and a reserve get what
is estimated here, and the KV pool the rest.

Nothing may run out of memory later. What is in use during a step is bounded by the steps measured. What
torch's allocator keeps beyond that is not: a segment stays as long as one of its blocks is in use, and gives
its free ones to smaller blocks only. It lets go of segments that are free before it gives up, and next to
nothing outlives its step, so that as much again as the largest steps take is left to it. The reserve is for
what does not come from torch's allocator: code of kernels that are loaded late, stacks of threads, buffers of
cuBLAS and NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, OutOfMemory
from sgla.layers.linear import split_heads
from sgla.model.sizes import Offloaded, offloaded, weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import Pool
from sgla.worker.memory import MIB, mib

GIB = 1 << 30
RESERVE = 1024 * MIB
ID = 4  # bytes of a token in the token table
# Bytes of the driver for a layer in a graph.
# With activations, which are counted apart, 53 to 96 KiB were measured.
GRAPH_LAYER = 64 << 10
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


SPLITS = 2, 4, 8  # ranks that --tp may name


class Advice(NamedTuple):
    """What to change, and the name of that setting."""

    text: str
    param: str


FEWER_TOKENS = Advice("lower --step-tokens", "step_tokens")
OTHER_MODEL = Advice("use a smaller model", "model")
FEWER_ROWS = Advice("lower --max-running-requests", "max_running_requests")


class Peak(NamedTuple):
    """Bytes that the largest steps take beside weights, tables and KV:
    while they read prompts, and while they sample."""

    prompts: int
    samples: int

    def shrink(self, missing: int, step_tokens: int, slots: int) -> Advice | None:
        """The setting that makes the peak smaller by ``missing`` bytes, if one does."""
        tokens = step_tokens * (self.prompts - missing) // max(1, self.prompts)
        rows = slots * (self.samples - missing) // max(1, self.samples)
        if 0 < missing <= self.prompts - self.samples and tokens > 0:
            return Advice(f"lower --step-tokens to {tokens}", "step_tokens")
        if 0 < missing <= self.samples - self.prompts and rows > 0:
            return Advice(f"lower --max-running-requests to {rows}", "max_running_requests")
        return None


class Weights(NamedTuple):
    """What the size of a rank's weights depends on.
    ``e4m3``: they may be of 8 bits; ``splits``: numbers of ranks that there may be; ``offload``: bytes that
    stay on the host; ``beside``: those of a model that guesses; ``heads``: ranks that share out
    attention, ``mlps``: MLPs but for experts, if not all do."""

    spec: ModelSpec
    dtype: str
    quantization: str | None
    ranks: int
    e4m3: bool
    splits: tuple[int, ...] = SPLITS
    offload: float = 0.0
    beside: int = 0
    heads: int | None = None
    mlps: int | None = None

    @property
    def bytes(self) -> int:
        """Of the GPU."""
        away = self.offloaded
        whole = weight_bytes(
            self.spec, self.dtype, self.quantization, self.ranks, "cuda", self.heads, self.mlps
        )
        return whole - away.host + away.places + self.beside

    @property
    def offloaded(self) -> Offloaded:
        return offloaded(self.spec, self.dtype, self.quantization, self.ranks, self.offload)

    def check(self, free: int) -> None:
        """Raises OutOfMemory before anything is allocated."""
        missing = self.bytes - free
        if missing > 0:
            advice = self.lighter(free)
            raise OutOfMemory(
                f"the weights need {mib(self.bytes)} of each GPU, {mib(missing)} more than the {mib(free)} "
                f"that are free; {advice.text}",
                param=advice.param,
            )

    def lighter(self, room: int) -> Advice:
        """The setting with which the weights fit into ``room`` bytes."""
        plain = self.quantization is None and self.dtype == "bfloat16"
        if plain and self.e4m3 and self._replace(quantization="fp8").bytes <= room:
            return Advice("use --quantization fp8", "quantization")
        for ranks in self.splits:
            if ranks > self.ranks and self._replace(ranks=ranks, heads=None, mlps=None).bytes <= room:
                return Advice(f"use --tp {ranks}", "tp")
        for gib in range(int(self.offload / GIB) + 1, (self.bytes >> 30) + 2):
            if self._replace(offload=float(gib * GIB)).bytes <= room:
                return Advice(f"give --cpu-offload-gb {gib}, which is slow", "cpu_offload_gb")
        return OTHER_MODEL


def splits(spec: ModelSpec, gpus: int) -> tuple[int, ...]:
    """Numbers of ranks, up to ``gpus``, over which the heads can be split: of attention, and of states."""

    def fits(ranks: int) -> bool:
        try:
            for layer in set(spec.attention):
                layer.unit(partial(_share, ranks))
                if layer.kept(1):
                    split_heads(layer.heads, layer.kv_heads, Shard(0, ranks))
        except ConfigError:
            return False
        return True

    return tuple(ranks for ranks in SPLITS if ranks <= gpus and fits(ranks))


def _share(ranks: int, heads: int) -> int:
    """Of the heads of a state."""
    if heads % ranks:
        raise ConfigError(f"{heads} heads cannot be split over {ranks} ranks", param="tp")
    return heads // ranks


def ledger_of(peak: Peak, graphs: int) -> dict[str, int]:
    """What is kept from the KV pool, by purpose."""
    return {"activations": max(peak), "fragments": max(peak), "graphs": graphs, "reserve": RESERVE}


def graph_bytes(graphs: int, layers: int, peak: int) -> int:
    """What graphs take. ``peak``: bytes of activations of the largest; they share them."""
    return graphs * layers * GRAPH_LAYER + peak


def size_pool(
    free: int, pool: Pool, budget: int | None, wanted: int | None, advise: Callable[[int], Advice]
) -> list[int]:
    """Pages of each cache group, with the dummy pages. ``free``: bytes that they may have; ``budget`` and
    ``wanted``: bytes, and tokens of context, that the user asks for; ``advise``: what frees so many bytes.
    Raises OutOfMemory."""
    if budget is not None and budget > free:
        raise OutOfMemory(
            f"a KV cache of {mib(budget)} does not fit: {mib(max(0, free))} are left beside weights, steps "
            f"and graphs, {mib(budget - free)} are missing; lower --kv-cache-bytes",
            param="kv_cache_bytes",
        )
    room, page_size = free if budget is None else budget, pool.page_size
    pages = within(room, pool)
    least, held = pool.needed(wanted or 1) + sum(pool.page_bytes), pool.one([n - 1 for n in pages])
    if held >= (wanted or 1) and pages[-1] > 1:
        return pages
    missing = max(MIB, least - room)
    if budget is not None and least <= free:
        advice = Advice(f"raise --kv-cache-bytes to {-(-least // MIB)}M", "kv_cache_bytes")
    elif held > 0 and pool.page_bytes[0]:
        advice = Advice(f"lower --context-length to {held}", "context_length")
    else:
        advice = advise(missing)
    raise OutOfMemory(
        f"a context of {wanted or page_size} tokens needs {mib(least)} of KV cache, and "
        f"{mib(max(0, room))} are there; {mib(missing)} are missing; {advice.text}",
        param=advice.param,
    )


def within(room: int, pool: Pool) -> list[int]:
    """Pages of each group, with the dummies, that together take no more than ``room`` bytes, or none."""
    if (slab := pool.slab) is not None:
        slabs = max(0, room - slab.dummy) // slab.bytes
        return [1 + slabs * count for count in slab.pages]
    sizes = pool.page_bytes
    pages = [1 + count for count in pool.split(max(0, room - sum(sizes)))]
    over = sum(count * size for count, size in zip(pages, sizes)) - room
    first = 0 if sizes[0] else -1  # the others, where tokens take no bytes
    pages[first] -= max(0, -(-over // sizes[first]))  # a split may be a page of each more
    return pages


class Budget:
    """Who has which bytes of this rank's GPU: ``ledger``, by purpose. ``beside``: bytes that are kept for
    features of pictures and for other servers."""

    def __init__(self, weights: Weights, step_tokens: int, slots: int, beside: int = 0) -> None:
        self.weights, self._step_tokens, self._slots, self._beside = weights, step_tokens, slots, beside
        self.ledger: dict[str, int] = {}

    def pool(
        self, config: Config, pool: Pool, peak: Peak, graphs: int, guesses: int = 0, copies: int = 0
    ) -> list[int]:
        """As many pages of each group as there is memory for, or as the user wants. ``graphs``: bytes that
        these are going to take; ``guesses``: of states behind guesses; ``copies``: that threads take which
        move units. Raises OutOfMemory."""
        torch.cuda.empty_cache()
        later = {"guesses": guesses, "copies": copies}
        kept = ledger_of(peak, graphs) | {name: size for name, size in later.items() if size}
        free, total = torch.cuda.mem_get_info()
        free -= sum(kept.values()) + self._beside + round((1 - config.memory_fraction) * total)

        def advise(missing: int) -> Advice:
            if config.memory_fraction < 1:
                return Advice("raise --memory-fraction", "memory_fraction")
            smaller = peak.shrink(-(-missing // 2), self._step_tokens, self._slots)  # it is kept twice
            return smaller or self.weights.lighter(self.weights.bytes - missing)

        asked = pool, config.kv_cache_bytes, config.context_length, advise
        kept["tokens"] = ID * pool.page_size * size_pool(free, *asked)[0]
        pages = size_pool(free - kept["tokens"], *asked)
        self.ledger |= kept | {"kv": pool.taken(pages)}
        return pages

    def captured(self, taken: int) -> list[str]:
        """The graphs are there and have taken so many bytes.
        Returns a note if that is more than was kept for all that comes late."""
        self.ledger["reserve"] += self.ledger["graphs"] - taken
        self.ledger["graphs"] = taken
        if self.ledger["reserve"] >= 0:
            return []
        return [f"graphs took more than was kept for them: if memory runs out, {self.smaller_pool().text}"]

    def smaller_pool(self) -> Advice:
        """What frees memory once there is a pool."""
        left = self.ledger["kv"] - RESERVE
        if left < MIB:
            return self.lighter()
        return Advice(f"give --kv-cache-bytes {left // MIB}M", "kv_cache_bytes")

    def lighter(self) -> Advice:
        """What frees memory before there is one."""
        return self.weights.lighter(self.weights.bytes - 1)


@contextmanager
def within_memory(phase: str, advise: Callable[[], Advice]) -> Iterator[None]:
    """Turns torch's and CUDA's errors into OutOfMemory. ``phase``: what is being done."""
    try:
        yield
    except (
        RuntimeError
    ) as error:  # of which torch.OutOfMemoryError is one; those of graphs and of cuBLAS are others
        if not re.search(r"out of memory|ALLOC_FAILED", str(error)) and not isinstance(
            error, torch.OutOfMemoryError
        ):
            raise
        free = torch.cuda.mem_get_info()[0]
        asked = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
        missing = int(float(asked[1]) * UNITS[asked[2]]) - free if asked else 0
        advice = advise()
        raise OutOfMemory(
            f"the GPU's memory ran out while {phase}: {mib(free)} are free, at least "
            f"{mib(max(MIB, missing))} are missing; {advice.text}",
            param=advice.param,
        ) from error
