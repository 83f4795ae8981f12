"""``--parallel auto``: how a model is best shared out between GPUs, by arithmetic; nothing is measured.

A step's time is what its bytes, its products and its exchanges between ranks take, one after the other. That
orders the ways to share a model out well enough, and says more than it is worth about each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.kernels.placement import reached
from sgla.model.generic_spec import GenericSpec
from sgla.model.read import read_spec
from sgla.model.sizes import parameters, weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.stages import stages_of
from sgla.model.state import state_of, token_bytes
from sgla.model.whole_experts import way_of_tokens
from sgla.observe.machine import Machine
from sgla.resolve import GIB, ROW_TOKENS, ROWS, check, resolve

DATA = "dp_attention"
AXES = ("dp", "pp", "tp", "ep", DATA)
LEAST = 8192  # tokens that a KV cache must hold, if the context is not given
SPARE = 2 * GIB  # of a GPU, for what steps take, graphs and libraries
NARROW = 128  # columns of an expert on a rank, below which it is better whole
PCIE = 25e9  # bytes a second between two GPUs without NVLink
ETHERNET = 12.5e9  # bytes a second of a host, where nobody knows
MEETING = {True: 8e-6, False: 30e-6}  # seconds of a small sum over ranks, with NVLink and without
ABROAD = 40e-6  # seconds of a small exchange between hosts; nobody has measured it
SAME = 0.02  # of a number, that estimates may differ by and mean nothing


class Rates(NamedTuple):
    """Bytes that a GPU reads a second, and operations in bfloat16, as they are reached."""

    read: float
    products: float


RATES = {  # by a word of the GPU's name; those of the H200 were measured, the others are the makers' by 0.85
    "B200": Rates(6.8e12, 1900e12),
    "H200": Rates(4.34e12, 795e12),
    "H100": Rates(2.85e12, 795e12),
    "A100": Rates(1.7e12, 265e12),
    "L40S": Rates(0.73e12, 300e12),
    "L4": Rates(0.25e12, 100e12),
}
OTHERS = Rates(0.7e12, 100e12)


@dataclass(frozen=True)
class Way:
    """A way to share a model out. ``weights``: bytes of a GPU; ``rows``: requests of a replica at a time;
    ``alone``: seconds a token of a single request; ``rate``: tokens a second of all replicas."""

    dp: int
    pp: int
    tp: int
    ep: int
    dp_attention: bool
    weights: int
    rows: int
    alone: float
    rate: float

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        return (
            f"{flags_of(self.axes)}: {self.weights / GIB:.1f} GiB of weights a GPU, "
            f"{self.alone * 1e3:.2f} ms a token for one request, {self.rate:,.0f} tokens a second for "
            f"{self.rows * self.dp}"
        )


def flags_of(axes: Mapping[str, int]) -> str:
    told = [f"--{axis} {axes[axis]}" for axis in AXES if axis != DATA and axes[axis] > 1]
    return " ".join(told + ["--dp-attention"] * bool(axes[DATA])) or "--tp 1"


def shared_by(config: Config) -> str:
    """The flags by which ranks share a model out, and of its replicas; "" for one rank."""
    sizes = {axis: getattr(config, axis) for axis in (*AXES, "cp", "dcp") if axis != DATA}
    told = [f"--{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " ".join(told + ["--dp-attention"] * config.dp_attention)


class Chosen(NamedTuple):
    """``why``: lines for people."""

    config: Config
    why: list[str]


@dataclass(frozen=True)
class Chips:
    """What there is: ``count`` GPUs of ``memory`` bytes each on each of the ``hosts``, and bytes a second
    between two of them (0: no NVLink), and that each sends to other hosts (``far``)."""

    name: str
    count: int
    memory: int
    link: float
    hosts: int
    far: float

    @property
    def rates(self) -> Rates:
        return next((rates for word, rates in RATES.items() if word in self.name), OTHERS)

    def __str__(self) -> str:
        link = f"NVLink of {self.link / 1e9:.0f} GB/s" if self.link else "no NVLink"
        told = f"{self.count} GPUs ({self.name}), {link}" if self.count > 1 else f"one GPU ({self.name})"
        if self.hosts == 1:
            return told
        return f"{self.hosts} hosts of {told}, {self.far / 1e9:.1f} GB/s a GPU between hosts"


class Estimate:
    """Of ``spec``, on these ``chips``, as ``config`` has it."""

    def __init__(self, spec: ModelSpec, config: Config, chips: Chips) -> None:
        self.spec, self.config, self.chips = spec, config, chips
        self.dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        self.quantization = spec.quantized(config.quantization, "cuda")

    def way(self, axes: Mapping[str, int]) -> Way | None:
        """None if it does not fit."""
        tp, pp, dp, data = axes["tp"], axes["pp"], axes["dp"], bool(axes[DATA])
        config = msgspec.structs.replace(self.config, device="cuda", **{**axes, DATA: data})
        if config.moe_a2a_backend == "auto":
            config = msgspec.structs.replace(config, moe_a2a_backend=way_of_tokens(config)[0])
        stages, over, sends = stages_of(config, self.spec), config.heads_over, config.sends_tokens
        kept = self.dtype, self.quantization, tp, "cuda", over, config.mlps_over
        weights = max(weight_bytes(stage, *kept) for stage in stages)
        token = max(token_bytes(state_of(s, over), config.kv_dtype(self.dtype)) for s in stages)
        room = self.chips.memory * config.memory_fraction - SPARE - weights
        tokens = room / max(token, 1)
        if room <= 0 or tokens < (config.context_length or min(LEAST, self.spec.context_len)):
            return None
        rows = int(max(1, min(config.max_running_requests or ROWS, tokens // ROW_TOKENS)))
        cohort, parts = max(1, rows // pp), tp if data else 1  # requests of each of so many
        rate = dp * cohort * parts * pp / self.seconds(cohort * parts, tp, pp, data, sends)
        alone = self.seconds(1, tp, pp, data, sends)
        return Way(dp, pp, tp, axes["ep"], data, weights, rows * parts, alone, rate)

    def seconds(self, rows: int, tp: int, pp: int, data: bool = False, sends: bool = False) -> float:
        """Of a step with so many rows on one replica, whose stages come one after the other. All stages work
        at a time, so in as long each of them has such a step of its own. ``sends``: tokens go to the ranks of
        their experts alone."""
        rates, near = self.chips.rates, self.chips.link or PCIE
        over, busiest = (1, -(-rows // tp)) if data else (tp, rows)
        token = token_bytes(state_of(self.spec, over), self.config.kv_dtype(self.dtype))
        read = (self.weights(rows, tp, over, 1 if sends else tp) + busiest * ROW_TOKENS * token) / rates.read
        made = 2 * parameters(replace(self.spec, tied=True)).active * busiest / over / rates.products
        sent = busiest * self.spec.hidden * 2
        meeting = MEETING[bool(self.chips.link)]
        sums = 2 * self.spec.layers * (meeting + 2 * sent * (tp - 1) / tp / near) if tp > 1 else 0.0
        if data:
            layers, brought = self.spec.layers, float(rows)
            if sends and self.spec.moe is not None:
                layers = len(self.spec.moe.layers)
                brought = busiest * reached(tp, self.spec.moe.routing.top_k)
            sums = 2 * layers * self.exchange(brought, tp)
        crossed = min(pp, self.chips.hosts) - 1 if tp * pp > self.chips.count else 0
        hops = (pp - 1 - crossed) * (meeting + sent / near) + crossed * (ABROAD + sent / self.chips.far)
        return max(read, made) + sums + hops

    def exchange(self, rows: float, tp: int) -> float:
        """Seconds in which a GPU has so many rows of all ranks, its own among them, or sends as many back."""
        nbytes, chips = rows * self.spec.hidden * 2, self.chips
        within = MEETING[bool(chips.link)] + nbytes * (tp - 1) / tp / (chips.link or PCIE)
        if tp <= chips.count:
            return within
        return max(within, ABROAD + nbytes * (tp - chips.count) / tp / chips.far)

    def weights(self, rows: int, tp: int, over: int, mlps: int) -> float:
        """Bytes of a GPU's matrices that the step reads: of experts those that some row chooses, on average.
        ``over``, ``mlps``: see ``Config.heads_over`` and ``mlps_over``."""
        none, every = self.bounds
        own = none / tp
        if over < tp:
            own = weight_bytes(self.bare, self.dtype, self.quantization, tp, "cuda", over, mlps)
        if self.spec.moe is None:
            return own
        missed = (1 - self.spec.moe.routing.top_k / self.spec.moe.experts) ** rows
        return own + (every - none) * (1 - missed) / tp

    @cached_property
    def bare(self) -> ModelSpec:
        """Without experts."""
        spec = replace(self.spec, tied=True)
        return spec if spec.moe is None else replace(spec, moe=replace(spec.moe, experts=0))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Bytes without experts, and with all."""
        both = self.bare, replace(self.spec, tied=True)
        none, every = (weight_bytes(s, self.dtype, self.quantization, 1, "cuda") for s in both)
        return none, every


def ways(config: Config, chips: Chips, spec: ModelSpec, data: bool = False) -> Iterator[dict[str, int]]:
    """All products of axes that take the GPUs of all hosts, and have those that are given. Ranks of a layer
    stay on one host, but with attention by ``data``, whose experts are whole."""
    total, plain = chips.count * chips.hosts, Config()
    given = {axis: getattr(config, axis) for axis in AXES if getattr(config, axis) != getattr(plain, axis)}
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    for pp, tp in product(sizes, sizes):
        if total % (pp * tp) or (tp == 1 if data else tp > chips.count):
            continue
        if not data and any(getattr(layer, "heads", tp) % tp for layer in spec.attention):
            continue
        whole = data and spec.moe is not None and spec.moe.experts >= tp
        axes = {"dp": total // (pp * tp), "pp": pp, "tp": tp, DATA: data}
        axes["ep"] = given.get("ep", tp if whole or _narrow(spec, tp) else 1)
        if given.items() <= axes.items():
            yield axes


def _narrow(spec: ModelSpec, tp: int) -> bool:
    """Whether experts are better whole than cut into so many."""
    moe = spec.moe
    return moe is not None and tp > 1 and moe.intermediate / tp < NARROW and moe.experts >= tp


def choose(
    config: Config, machine: Machine, model: Mapping[str, Any], link: float, network: float = 0.0
) -> Chosen:
    """The best way for ``config.goal``, and why. ``link``: as of ``Chips``; ``network``: bytes a second that
    this host sends to others, 0 if that is not known. Raises ConfigError if there is none."""
    spec = read_spec(model)
    config = msgspec.structs.replace(config, parallel="given")
    alone = dict.fromkeys(AXES, 1) | {DATA: False}
    one = msgspec.structs.replace(config, **alone, nnodes=1, node_rank=0)
    device = resolve(one, machine, model).config.device
    if device != "cuda":
        given = shared_by(config)
        what = f"{given}, as given" if given else "one rank, which has all cores"
        return Chosen(config, [f"parallel: {what} (--device {device})"])
    count, memory = len(machine.gpus), min(gpu.memory for gpu in machine.gpus)
    far = (network or ETHERNET) / count
    chips = Chips(machine.gpus[0].name, count, memory, link, config.nnodes, far)
    if not isinstance(spec, ModelSpec) or isinstance(spec, GenericSpec):
        axes = {"dp": chips.count * config.nnodes} if config.dp == 1 else {}
        line = f"parallel: --dp {axes.get('dp', config.dp)} for {chips}, since such a model is not cut"
        return Chosen(msgspec.structs.replace(config, **axes), [line])
    estimate, found, why = Estimate(spec, config, chips), list[Way](), list[str]()

    def look(data: bool) -> None:
        for axes in ways(config, chips, spec, data):
            try:
                _check(config, axes, machine, model)
                way = estimate.way(axes)
            except ConfigError as error:
                why.append(f"- {flags_of(axes)}: refused: {error.message}")
                continue
            if way is None:
                why.append(f"- {flags_of(axes)}: weights and a KV cache do not fit a GPU")
            else:
                found.append(way)

    look(config.dp_attention)
    large = all(way.tp * way.pp > chips.count for way in found)  # for one host
    if chips.hosts > 1 and spec.moe is not None and large and not config.dp_attention:
        look(data=True)
    if not found:
        raise ConfigError(
            f"--parallel auto: there is no way to serve this model on {chips}\n" + "\n".join(why),
            param="parallel",
        )
    found = sorted(found, key=lambda way: _order(way, config.goal, found))
    best = found[0]
    what = "the most tokens a second" if config.goal == "throughput" else "the quickest single answer"
    told = [f"parallel: {flags_of(best.axes)} for {chips}, by estimate {what} (--goal {config.goal})"]
    told += [f"- {way}" for way in found]
    return Chosen(msgspec.structs.replace(config, **best.axes), told + why)


def _order(way: Way, goal: str, found: list[Way]) -> tuple[float, float, int]:
    """What is better comes first. What is about as good as the best counts as that; then the other goal
    says."""
    fast, much = min(w.alone for w in found), max(w.rate for w in found)
    slow = 1.0 if way.alone <= fast * (1 + SAME) else way.alone / fast
    less = 1.0 if way.rate >= much * (1 - SAME) else much / way.rate
    return (less, slow, way.tp * way.pp) if goal == "throughput" else (slow, less, way.tp * way.pp)


def _check(config: Config, axes: Mapping[str, int], machine: Machine, model: Mapping[str, Any]) -> None:
    """Raise ConfigError for what this way cannot be together with."""
    changed = msgspec.structs.replace(config, device="cuda", **axes)
    check(changed)
    one = {"dp": 1, "nnodes": 1, "node_rank": 0} if changed.dp > 1 else {}
    resolve(msgspec.structs.replace(changed, **one), machine, model)
