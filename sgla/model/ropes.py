"""Rotary positions, as the keys of a configuration say them. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader, shown
from sgla.layers.spec import Growth, RopeSpec
from sgla.model.limits import POSITIONS

TRAINED = "original_max_position_embeddings"
# Kinds of rope scaling: the numbers they cannot do without, and those they may have.
# ``factors`` comes from GGUF files; longrope (arXiv 2402.13753) has others for contexts beyond its training.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ),
    ),
    "factors": (("factors",), ()),
    "longrope": (("short_factor", "long_factor"), (TRAINED, "factor", "attention_factor")),
    "proportional": ((), ("factor",)),  # the first of all a head's dims turn, as they do where all turn
}
ROPE, _SHARE = "rope_parameters", "partial_rotary_factor"
_ROPE_NOT_NULL = ("rope_theta", "partial_rotary_factor", TRAINED)
BY_LAYERS = ("full_attention", "sliding_attention")
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def ropes(
    c: Reader, head_dim: int, positions: int, partial: bool = False, local_theta: float = 0.0
) -> tuple[RopeSpec, RopeSpec]:
    """Global and local rotary embedding: ``rope_parameters`` (in Gemma and OLMo 3 by layer type) or
    ``rope_theta`` + ``rope_scaling``. ``local_theta``: base of the local one, where no key says it."""
    old, new = c.table("rope_scaling", nulls=True), c.table(ROPE, nulls=True)
    if "rope_local_base_freq" not in c.values and not local_theta:
        rope = _rope(old or new, c, c.values.get("rope_theta"), head_dim, positions, partial)
        return rope, rope
    if old.get("type", "default") != "default" and "rope_type" not in old:
        raise ConfigError(
            f"config.json: rope_scaling.type {shown(old['type'])} is ignored by transformers for "
            f"{c.architecture}; name the kind in rope_scaling.rope_type, or remove rope_scaling for the "
            "same numbers as there",
            param="model",
        )
    parts = Reader(c.architecture, new)
    full, local = (parts.table(kind, nulls=True) for kind in BY_LAYERS)
    full |= old
    if not (full.get("truncate", True) and local.get("truncate", True)):
        raise ConfigError(
            f"config.json: truncate is ignored by transformers for {c.architecture}, which has it true; "
            "remove it for the same numbers as there",
            param="model",
        )
    theta, base = c.values.get("rope_theta"), c.values.get("rope_local_base_freq", local_theta)
    # transformers 5 may write both beside the tables of the layers, which alone are read.
    same = {"rope_type": "default", "rope_theta": full.get("rope_theta", theta)}
    beside = {key: value for key, value in new.items() if key not in BY_LAYERS}
    if stray := {key for key, value in beside.items() if value not in (None, same.get(key))}:
        raise ConfigError(
            f"config.json: rope_parameters of {c.architecture} has {shown(min(stray))}, which transformers "
            f"ignores beside {' and '.join(BY_LAYERS)}; move it into these, or remove it for the same "
            "numbers as there",
            param="model",
        )
    return (
        _rope(full, c, theta, head_dim, positions, partial),
        _rope(local, c, base, head_dim, positions, partial),
    )


def _rope(
    table: dict[str, Any], c: Reader, theta: Any, head_dim: int, positions: int, partial: bool = False
) -> RopeSpec:
    kind = table.get("rope_type", table.get("type", "default"))
    kinds = [name for name in _ROPE_KEYS if not (partial and name == "proportional")]
    if kind not in kinds:
        raise ConfigError(
            f"config.json: rope scaling (rope_type) {shown(kind)} is not supported for {c.architecture}; "
            f"{', '.join(kinds)} are",
            param="model",
        )
    if kind == "yarn":
        table = _without_nulls(table, c, positions)
    needed, optional = _ROPE_KEYS[kind]
    for key in needed:
        if table.get(key) is None:
            raise ConfigError(f"config.json: rope scaling {kind!r} needs {key!r}", param="model")
    for key, value in table.items():
        known = key in (*needed, *optional, *_ROPE_COMMON, *(("truncate",) if kind == "yarn" else ()))
        if known and value is None and key in _ROPE_NOT_NULL:
            raise ConfigError(
                f"config.json: {key} null is not supported in rope scaling {kind!r}; give it a value, or "
                "leave it out",
                param="model",
            )
        if not known and value is not None:
            raise ConfigError(
                f"config.json: rope scaling {kind!r} has no {shown(key)} ({shown(value)}); remove it if the "
                "weights were trained without it",
                param="model",
            )
    share = 1.0
    if kind == "proportional":
        share = Reader(c.architecture, {_SHARE: 1.0, **table}).number(_SHARE, 1.0)
        table = {key: value for key, value in table.items() if key != _SHARE}
    rotated = _rotated(table, c, head_dim, partial)
    p = Reader(c.architecture, {"rope_theta": theta, **table})
    if kind == "longrope":
        return RopeSpec(_base(p), rotated, kind, _long(c, p, positions, rotated // 2))
    scaling: dict[str, Any] = {
        key: p.number(key) for key in (*needed, *optional) if key != "factors" and p.given(key)
    }
    if kind == "factors":
        scaling["factors"] = _factors(p, "factors", rotated // 2)
    if kind in ("llama3", "yarn"):
        scaling[TRAINED] = _trained(c, p, positions)
    if kind == "llama3" and scaling["low_freq_factor"] > scaling["high_freq_factor"]:
        raise p.error("high_freq_factor", "low_freq_factor or above")
    if kind == "yarn":
        scaling["truncate"] = p.flag("truncate") if p.given("truncate") else True
    if kind == "proportional":
        scaling["share"] = share
    return RopeSpec(_base(p), rotated, kind, scaling)


def _base(p: Reader) -> float:
    base = p.number("rope_theta")
    if base <= 1:
        raise p.error("rope_theta", "above 1")
    return base


def unmagnified(rope: RopeSpec) -> RopeSpec:
    """The rotation without the factor that multiplies it, which a norm behind it takes out."""
    plain = {"yarn": {"attention_factor": 1.0}, "longrope": {"magnitude": 1.0}}
    return replace(rope, scaling=rope.scaling | plain.get(rope.kind, {}))


def stretched(c: Reader, dim: int) -> Reader:
    """HunYuan's alpha, which multiplies the base by a power of it, instead of what its table else says."""
    table = c.table("rope_scaling") or c.table(ROPE)
    if table.get("rope_type", table.get("type")) != "dynamic" or not table.get("alpha"):
        return c
    p = Reader(f"{c.architecture}, rope_scaling", {"rope_theta": c.values.get("rope_theta"), **table})
    for key in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"):
        table.pop(key, None)
    table = {**table, "rope_type": "default", "rope_theta": p.number("rope_theta")}
    table["rope_theta"] *= min(p.number("alpha", 1e6) ** (dim / max(dim - 2, 1)), 1e30)
    del table["alpha"]
    return Reader(c.architecture, {**c.values, "rope_scaling": None, ROPE: table})


def magnified(c: Reader) -> Reader:
    """Phi-3.5-MoE's longrope, whose table has a magnitude for short contexts and one for long ones."""
    table = c.table("rope_scaling", nulls=True) or c.table(ROPE, nulls=True)
    if table.get("rope_type", table.get("type")) in (None, "default"):
        return c
    p = Reader(f"{c.architecture}, rope_scaling", dict(table))
    magnitude = p.number("short_mscale")
    if p.number("long_mscale") != magnitude:
        raise p.error("long_mscale", f"short_mscale, {magnitude:g}")
    table = {k: v for k, v in table.items() if k not in ("short_mscale", "long_mscale")}
    return Reader(
        c.architecture, {**c.values, "rope_scaling": None, ROPE: {**table, "attention_factor": magnitude}}
    )


def growth(c: Reader) -> tuple[Reader, Growth]:
    """Ministral 3's, and the configuration without what the table of rope says of it."""
    table = c.table("rope_scaling", nulls=True) or c.table(ROPE, nulls=True)
    p = Reader(f"{c.architecture}, {ROPE}", dict(table))
    growth = Growth(p.number("llama_4_scaling_beta"), p.integer(TRAINED, POSITIONS))
    table = {k: v for k, v in table.items() if k not in ("llama_4_scaling_beta", "max_position_embeddings")}
    return Reader(c.architecture, {**c.values, "rope_scaling": None, ROPE: table}), growth


def _without_nulls(table: dict[str, Any], c: Reader, positions: int) -> dict[str, Any]:
    """The keys of yarn to which a null says something: to stretch to the longest position, and not to
    truncate."""
    found = dict(table)
    if table.get("truncate", True) is None:
        found["truncate"] = False
    # Where there is an mscale_all_dim, DeepSeek's attention needs a factor itself.
    if "factor" in table and table["factor"] is None and not table.get("mscale_all_dim"):
        found["factor"] = positions / _trained(c, Reader(c.architecture, table), positions)
    return found


def _trained(c: Reader, p: Reader, positions: int) -> int:
    """Tokens that the model was trained with before it was stretched. What stands beside the scaling's table
    counts for more than what is in it, as in transformers."""
    found = c if c.given(TRAINED) else p if p.given(TRAINED) else Reader("", {TRAINED: positions})
    return found.integer(TRAINED, POSITIONS)


def _long(c: Reader, p: Reader, positions: int, count: int) -> dict[str, Any]:
    """Both lists of longrope's factors, the tokens up to which the short ones hold, and by what it multiplies
    cosines and sines."""
    trained = _trained(c, p, positions)
    stretch = p.number("factor") if p.given("factor") else positions / trained
    magnitude = math.sqrt(1 + math.log(stretch) / math.log(max(trained, 2))) if stretch > 1 else 1.0
    if p.given("attention_factor"):
        magnitude = p.number("attention_factor")
    short, long = (_factors(p, f"{which}_factor", count) for which in ("short", "long"))
    return {"short": short, "long": long, TRAINED: trained, "magnitude": magnitude}


def _rotated(table: dict[str, Any], c: Reader, head_dim: int, partial: bool) -> int:
    """Dims of a head that are rotated. ``partial``: whether the family may rotate fewer than all."""
    key = "partial_rotary_factor"
    outer = c.values.get(key) if partial else None
    if outer is None and c.given("rotary_dim"):  # MiniMax
        outer = c.integer("rotary_dim", head_dim) / head_dim
    share = table.get(key, 1 if outer is None else outer)
    if share == 1 and not isinstance(share, bool):
        if head_dim % 2:
            raise ConfigError(
                f"config.json: rotary positions need an even head_dim, not {head_dim}", param="model"
            )
        return head_dim
    if not partial:
        raise ConfigError(
            f"config.json: {key} {shown(share)} is not supported for {c.architecture}; 1 is", param="model"
        )
    dims = int(head_dim * Reader(c.architecture, {key: share}).number(key, 1.0))
    if dims % 2 or not dims:
        raise ConfigError(
            f"config.json: {key} {shown(share)} rotates {dims} of the {head_dim} "
            "dims of a head; an even number is supported",
            param="model",
        )
    return dims


def _factors(p: Reader, key: str, count: int) -> list[float]:
    """By which each frequency is divided."""
    values = p.values[key]
    if isinstance(values, list) and len(values) == count:
        return [Reader(p.architecture, {key: value}).number(key) for value in values]
    raise p.error(key, f"a list of {count} numbers")


def without_sections(c: Reader) -> Reader:
    """Which frequencies go by which axis of a picture matters to its tokens alone (``model/vision``)."""
    tables = {key: c.table(key, nulls=True) for key in (ROPE, "rope_scaling")}
    sections = ("mrope_section", "mrope_interleaved")
    left = {
        key: {
            name: "default" if name in ("type", "rope_type") and value == "mrope" else value
            for name, value in table.items()
            if name not in sections
        }
        for key, table in tables.items()
    }
    return Reader(c.architecture, {**c.values, **{key: table or None for key, table in left.items()}})
