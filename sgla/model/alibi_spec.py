"""The shapes of Falcon, BLOOM and MPT, whose scores may rise with places (ALiBi, arXiv 2108.12409) instead of
keys and queries that turn. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec
from sgla.model.limits import HEADS, WIDTH
from sgla.model.ropes import ropes
from sgla.model.spec import ModelSpec


def slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Of each head: a geometric series that ends at ``2 ** -most``; behind the largest power of two of them,
    every other one of a series that is twice as long."""
    whole = 1 << heads.bit_length() - 1
    first = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-most * (2 * i + 1) / (2 * whole)) for i in range(heads - whole)]
    return tuple(first + between)


def bfloat16(x: float) -> float:
    """Rounded as a bfloat16."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 256), exponent - 8)


def _divided(c: Reader) -> tuple[int, int]:
    """Heads, and values of each."""
    heads, hidden = c.integer("num_attention_heads", HEADS), c.integer("hidden_size", WIDTH)
    if hidden % heads:
        raise ConfigError(
            f"config.json: the hidden size, {hidden}, is no multiple of the {heads} heads", param="model"
        )
    return heads, hidden // heads


def bloom(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, dim = _divided(c)
    return (AttentionSpec(heads, heads, dim, dim**-0.5, None, slopes=slopes(heads)),) * layers


def _is(c: Reader, key: str) -> bool:
    """A null is false."""
    return c.given(key) and c.flag(key)


def falcon(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``. With ALiBi places count before scores are scaled, and slopes are those that
    bfloat16 has."""
    heads, dim = _divided(c)
    kv_heads = c.integer("num_kv_heads", heads) if c.given("num_kv_heads") else heads
    if _is(c, "multi_query") and not _is(c, "new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        raise c.error("num_kv_heads", f"a number that divides the {heads} heads")
    if not _is(c, "alibi"):
        if dim % 2:
            raise c.error("num_attention_heads", "a number that leaves each head an even number of values")
        rope, _ = ropes(c, dim, positions)
        return (AttentionSpec(heads, kv_heads, dim, dim**-0.5, rope),) * layers
    rising = tuple(bfloat16(slope) * dim**-0.5 for slope in slopes(heads))
    return (AttentionSpec(heads, kv_heads, dim, dim**-0.5, None, slopes=rising),) * layers


def falcon_blocks(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    new, parallel = _is(c, "new_decoder_architecture"), _is(c, "parallel_attn")
    if new and not parallel:
        raise c.error("parallel_attn", "true, as new_decoder_architecture says")
    norms = c.integer("num_ln_in_parallel_attn", 2) if c.given("num_ln_in_parallel_attn") else 1 + new
    if norms == 2 and not new and parallel:
        raise c.error("num_ln_in_parallel_attn", "null or 1 without new_decoder_architecture")
    bias = _is(c, "bias")
    return replace(
        spec,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        one_norm=parallel and norms == 1,
    )


def mpt(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    heads, dim = _divided(c)
    table = _mpt(c)
    scale = table.number("softmax_scale") if table.given("softmax_scale") else dim**-0.5
    most = table.number("alibi_bias_max")
    return (AttentionSpec(heads, heads, dim, scale, None, slopes=slopes(heads, most)),) * layers


def mpt_clipped(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    table = _mpt(c)
    return replace(spec, qkv_clip=table.number("clip_qkv") if table.values["clip_qkv"] else 0.0)


def _mpt(c: Reader) -> Reader:
    """The keys of ``attn_config``. Raises ConfigError for those that HF's class ignores although they change
    results."""
    fixed = {
        "alibi": True,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "kv_n_heads": None,
        "prefix_lm": False,
        "qk_gn": False,
        "qk_ln": False,
        "rope": False,
        "sliding_window_size": -1,
    }
    read = {"clip_qkv": None, "softmax_scale": None, "alibi_bias_max": 8}
    given = c.table("attn_config", nulls=True)
    p = Reader(f"{c.architecture}, attn_config", {**fixed, **read, **given})
    for key, value in given.items():
        if key in fixed and value is not None and value != fixed[key]:
            raise p.error(key, repr(fixed[key]))
    return p
