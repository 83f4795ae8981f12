"""How many bytes a model's weights and its KV cache take, from its shape. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sgla.errors import ConfigError
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.read import read_spec
from sgla.model.registry import architecture_of
from sgla.model.spec import ModelSpec
from sgla.quant.formats import FORMATS, ON_CPU, ON_GPU
from sgla.quant.method import Method

FOUR_BITS = ("int4", "mxfp4")  # of ``--quantization`` on CPUs
WIDER = 0.1  # of an int4 model's bytes, what may be added by keeping layers in int8
PLAIN = {"float32": "f32", "bfloat16": "bf16"}  # the storage of what is not quantized
# Of one value of a KV cache; int4: of values, the keys are int8.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


class Kinds(NamedTuple):
    """Storages of linear layers, of embedding and output layer, and of what is never quantized."""

    linear: str
    vocab: str
    plain: str


class Wide(NamedTuple):
    """Names of matrices that are int8 in an int4 model, and the bytes that this adds to it."""

    names: frozenset[str]
    nbytes: float


def as_stored(method: Method | None, quantization: str | None) -> Method | None:
    """``method``, if what the checkpoint holds is to be kept."""
    return method if method is not None and quantization in ("checkpoint", method.name) else None


def kinds_of(
    dtype: str, quantization: str | None, method: Method | None = None, device: str = "cpu"
) -> Kinds:
    """``quantization``: int8 | int4 | mxfp4 | fp8 | checkpoint, or the name of the checkpoint's ``method``;
    ``device``: the kind. Raises ConfigError for that of another."""
    plain = PLAIN[dtype]
    if (kept := as_stored(method, quantization)) is not None:
        return Kinds(kept.stored(device) or plain, plain, plain)
    if quantization in ON_GPU and device != "cpu":
        return Kinds(ON_GPU[quantization], plain, plain)
    if quantization in ON_CPU:
        return Kinds(ON_CPU[quantization], "int8", plain)
    if quantization not in (None, "fp8"):
        raise ConfigError(
            f"--quantization {quantization} is for checkpoints that are stored so; leave it out",
            param="quantization",
        )
    return Kinds(quantization or plain, plain, plain)


def experts_kind(spec: ModelSpec, dtype: str, quantization: str | None) -> str | None:
    """In which storage GPUs keep the experts of a mixture; None for a model without. Raises ConfigError as
    ``kinds_of``."""
    if spec.moe is None:
        return None
    return kinds_of(dtype, spec.quantized(quantization, "cuda"), spec.method, "cuda").linear


class Parameters(NamedTuple):
    """Values of a model's matrices, and those that a token meets: all, but for experts it does not choose."""

    total: int
    active: int


def parameters(spec: ModelSpec | EncoderSpec) -> Parameters:
    if isinstance(spec, EncoderSpec | GenericSpec):
        return Parameters(spec.values, spec.values)
    tables = (spec.vocab * (1 if spec.tied else 2) + spec.learned) * spec.hidden
    tables += _given(spec)
    attention = sum(layer.weights(spec.hidden) for layer in spec.attention) + _giving(spec)
    every = spec.moe.experts if spec.moe else 0
    chosen = spec.moe.routing.top_k if spec.moe else 0
    total, active = (tables + attention + _mlps(spec, experts) for experts in (every, chosen))
    return Parameters(total, active)


class Outline(NamedTuple):
    """What clients are told of a model: the name of its class and config.json's ``model_type``, its sizes
    (``parameters``: values of its matrices), and the quantization of its file, as ``Q4_1``; empty if its
    values are not quantized."""

    architecture: str
    family: str
    parameters: int
    layers: int
    hidden: int
    vocab: int
    quantization: str


def outline(config: Mapping[str, Any], quantization: str) -> Outline:
    """Raises ConfigError."""
    spec, name = read_spec(config), architecture_of(config)
    family = str(config.get("model_type") or name)
    total = parameters(spec).total
    return Outline(name, family, total, spec.layers, spec.hidden, spec.vocab, quantization)


def short_count(count: int) -> str:
    """``134.5M``, ``7.6B``"""
    return f"{count / 1e9:.1f}B" if count >= 999.95e6 else f"{count / 1e6:.1f}M"


def weight_bytes(
    spec: ModelSpec | EncoderSpec,
    dtype: str,
    quantization: str | None,
    ranks: int,
    device: str = "cpu",
    heads_over: int | None = None,
    mlps_over: int | None = None,
) -> int:
    """Bytes of one rank's matrices on this kind of device, of the layers that its stage has; norms are left
    out, and whether the file has 4 bits itself. ``heads_over``: ranks that share out attention and output
    layer, if not all do; ``mlps_over``: those that share out MLPs but for the experts of mixtures."""
    whole = _matrix_bytes(spec, dtype, quantization, ranks, device, heads_over, mlps_over)
    if isinstance(spec, ModelSpec) and quantization in FOUR_BITS and device == "cpu":
        made = as_stored(spec.method, quantization) is None
        whole += wide_matrices(spec).nbytes * len(spec.held) / spec.layers / ranks if made else 0
    return int(whole)


def _matrix_bytes(
    spec: ModelSpec | EncoderSpec,
    dtype: str,
    quantization: str | None,
    ranks: int,
    device: str = "cpu",
    heads_over: int | None = None,
    mlps_over: int | None = None,
) -> float:
    heads_over, mlps_over = heads_over or ranks, mlps_over or ranks
    if isinstance(spec, EncoderSpec | GenericSpec):
        values = spec.own if isinstance(spec, GenericSpec) and ranks > 1 else spec.values
        kinds, kept = kinds_of(dtype, quantization, spec.method, device), as_stored(spec.method, quantization)
        return values * (FORMATS[kinds.linear].bytes if kept is None else kept.bytes(kinds.plain, device))
    kinds = kinds_of(dtype, quantization, spec.method, device)
    linear, vocab = FORMATS[kinds.linear].bytes, FORMATS[kinds.vocab].bytes
    if (kept := as_stored(spec.method, quantization)) is not None:
        linear, vocab = kept.bytes(kinds.plain, device), kept.vocab_bytes(kinds.plain, device)
    attention = sum(layer.weights(spec.hidden) for layer in spec.attention_held)
    if spec.norm_gates:
        sparse = spec.moe.layers.intersection(spec.held) if spec.moe else ()
        attention += 2 * spec.hidden * spec.norm_gates * (len(spec.held) + len(sparse))
    table = positions = head = 0.0
    if spec.first or (spec.last and spec.tied):
        table = (spec.vocab * spec.hidden + _given(spec)) * vocab + _giving(spec) * linear
    if spec.first:
        positions = spec.learned * spec.hidden * FORMATS[kinds.plain].bytes
    if spec.last and not spec.tied:
        head = spec.vocab * spec.hidden * vocab / heads_over
    mlps, experts = _mlps(spec, spec.moe.experts if spec.moe else 0), _experts(spec)
    layers = attention + mlps
    others = layers - experts if kept is not None and kept.experts_alone else 0
    if kept is not None and kept.scatters:  # at most: see ``Build.kind_of``
        others = layers if ranks > 1 else experts
    matrices = (layers - others) * linear + others * FORMATS[kinds.plain].bytes
    more = attention * (1 / heads_over - 1 / ranks) + (mlps - experts) * (1 / mlps_over - 1 / ranks)
    more *= FORMATS[kinds.plain].bytes if kept is not None and kept.experts_alone else linear
    return matrices / ranks + more + table + positions + head + _mixing(spec) * FORMATS["f32"].bytes


def _experts(spec: ModelSpec) -> int:
    """Values of the matrices of all mixtures' experts."""
    if (moe := spec.moe) is None:
        return 0
    each = (3 if spec.gated else 2) * (moe.latent or spec.hidden)
    return each * len(moe.layers.intersection(spec.held)) * moe.experts * moe.intermediate


def _given(spec: ModelSpec) -> int:
    """Values of the embedding that gives each layer values of a token."""
    return spec.per_layer.vocab * spec.per_layer.width * spec.layers if spec.per_layer else 0


def _giving(spec: ModelSpec) -> int:
    """Those of the matrices around it, and of those that make several residual streams of one."""
    streams = 2 * (spec.altup.inputs - 1) * spec.hidden**2 if spec.altup else 0
    return streams + (3 * spec.layers * spec.per_layer.width * spec.hidden if spec.per_layer else 0)


def _mixing(spec: ModelSpec) -> int:
    """Values of the matrices by which layers mix streams, and of the one behind the last."""
    if (hyper := spec.hyper) is None:
        return 0
    wide = hyper.streams * hyper.streams * spec.hidden
    of_layer = 2 * (2 + (hyper.streams if hyper.iterations else 0))
    return wide * (of_layer * len(spec.held) + spec.last)


def _mlps(spec: ModelSpec, experts: int) -> int:
    """Values of their matrices with so many ``experts`` in a mixture."""
    return sum(_mlp(spec, layer, experts) for layer in spec.held)


def _mlp(spec: ModelSpec, layer: int, experts: int) -> int:
    """Those of one layer."""
    moe = spec.moe if spec.moe and layer in spec.moe.layers else None
    width = spec.inner[layer] if spec.inner else spec.intermediate if moe is None else 0
    each, routers, inside = (3 if spec.gated else 2), 0, 0
    if moe is not None:
        inside, width = experts * moe.intermediate * (moe.latent or spec.hidden), width + moe.shared
        routers = (moe.experts + moe.idle + 2 * moe.latent) * spec.hidden
    return each * (spec.hidden * width + inside) + routers


class Offloaded(NamedTuple):
    """``layers`` whose matrices a rank keeps in ``host`` bytes of the host's memory; ``places``: bytes of the
    GPU that they are copied to."""

    layers: tuple[int, ...]
    host: int
    places: int


def offloaded(spec: ModelSpec, dtype: str, quantization: str | None, ranks: int, nbytes: float) -> Offloaded:
    """As few layers as hold ``nbytes``, or all, at equal distances, so that copies run beside what is
    computed."""
    kinds = kinds_of(dtype, quantization, spec.method, "cuda")
    kept = as_stored(spec.method, quantization)
    value = FORMATS[kinds.linear].bytes if kept is None else kept.bytes(kinds.plain, "cuda")
    experts = spec.moe.experts if spec.moe else 0
    sizes = [
        int((layer.weights(spec.hidden) + _mlp(spec, index, experts)) * value / ranks)
        for index, layer in enumerate(spec.attention)
    ]
    found: tuple[int, ...] = ()
    for count in range(spec.layers + 1):
        found = tuple((2 * turn + 1) * spec.layers // (2 * count) for turn in range(count))
        if sum(sizes[layer] for layer in found) >= nbytes:
            break
    own = sorted((sizes[layer] for layer in found), reverse=True)
    return Offloaded(found, sum(own), sum(own[:2]))


def wide_matrices(spec: ModelSpec, exact: Callable[[str], bool] = lambda name: False) -> Wide:
    """What a model in 4 bits keeps in int8, where rounding does most harm for its bytes
    (docs/performance-cpu.md): q, k and v of all layers, then down, gate and up of the first and the last
    eighth and of every third between, as long as they add no more than ``WIDER`` to the weights. ``exact``:
    whether the file has a tensor in 4 bits, which int4 keeps as it is."""
    eighth = spec.layers // 8
    ends = [i for i in range(spec.layers) if i < eighth or i >= spec.layers - eighth]
    some = ends + [i for i in range(eighth, spec.layers - eighth) if (i - eighth) % 3 == 2]
    dense = [i for i in some if spec.gated and (spec.moe is None or i not in spec.moe.layers)]
    qkv = [spec.hidden * a.head_dim * (a.heads + 2 * a.kv_heads) for a in spec.attention]
    inner = spec.hidden * spec.intermediate
    wanted: list[tuple[int, str, tuple[str, ...], int]] = [
        *((i, "self_attn", ("q", "k", "v"), qkv[i]) for i in range(spec.layers)),
        *((i, "mlp", ("down",), inner) for i in dense),
        *((i, "mlp", ("gate", "up"), 2 * inner) for i in dense),
    ]
    room, added = WIDER * _matrix_bytes(replace(spec, stage=None), "bfloat16", "int4", 1), 0.0
    found: set[str] = set()
    for i, module, parts, values in wanted:
        names = [f"model.layers.{i}.{module}.{part}_proj.weight" for part in parts]
        cost = values * (FORMATS["int8"].bytes - FORMATS["int4"].bytes)
        if added + cost <= room and not all(map(exact, names)):
            found.update(names)
            added += cost
    return Wide(frozenset(found), added)
