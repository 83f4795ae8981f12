"""The shapes of encoders whose positions rotate. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.model.encoder import EncoderSpec, GroupedSpec, RotarySpec
from sgla.model.limits import HEAD_DIM, LAYERS, POSITIONS
from sgla.model.ropes import ropes
from sgla.model.windows import every, layer_types, listed


def modern(c: Reader, spec: EncoderSpec) -> EncoderSpec:
    """See ``Family.completed``: ModernBERT."""
    if c.values["classifier_activation"] != "gelu":
        raise c.error("classifier_activation", "gelu")
    bases = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}
    said = Reader(c.architecture, {**c.values, **{ours: c.values[theirs] for ours, theirs in bases.items()}})
    whole, local = ropes(said, _head_dim(spec), spec.positions)
    far = c.integer("local_attention", POSITIONS, 2) // 2
    if c.given("layer_types"):
        kinds = layer_types(c, spec.layers, far)
    else:
        every = c.integer("global_attn_every_n_layers", LAYERS)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(spec.layers)]
    near = [kind == "sliding_attention" for kind in kinds]
    flags = {"qkv": "attention_bias", "out": "attention_bias", "gate_up": "mlp_bias", "down": "mlp_bias"}
    biases = [
        name
        for name, flag in (flags | {"norm": "norm_bias", "head": "classifier_bias"}).items()
        if c.flag(flag)
    ]
    rotary = RotarySpec(
        tuple(local if sliding else whole for sliding in near),
        tuple(far if sliding else 0 for sliding in near),
        frozenset(biases),
        before=True,
    )
    return replace(spec, rotary=rotary)


def gemma(c: Reader, spec: EncoderSpec) -> EncoderSpec:
    """EmbeddingGemma: Gemma 3, whose layers see both ways."""
    if not c.architecture.endswith("Model"):
        raise ConfigError(f"{c.architecture} is not supported; Gemma3TextModel is", param="model")
    if not c.flag("use_bidirectional_attention"):
        raise c.error("use_bidirectional_attention", "true for an encoder")
    heads, head_dim = _grouped(c, spec)
    windows = tuple(window // 2 for window in listed(every())(c, spec.layers))
    whole, local = ropes(c, head_dim, spec.positions)
    turns = tuple(local if window else whole for window in windows)
    rotary = RotarySpec(turns, windows, frozenset(["qkv", "out"] if c.flag("attention_bias") else ()))
    scale = float(c.number("query_pre_attn_scalar") ** -0.5)
    return replace(spec, rotary=rotary, grouped=GroupedSpec(heads, head_dim, scale, gemma=True))


def euro(c: Reader, spec: EncoderSpec) -> EncoderSpec:
    """EuroBERT: a Llama whose layers see both ways."""
    if c.architecture.endswith("ForSequenceClassification"):
        raise ConfigError(f"{c.architecture} is not supported; EuroBertModel is", param="model")
    heads, head_dim = _grouped(c, spec)
    rope, _ = ropes(c, head_dim, spec.positions)
    biases = {"attention_bias": ("qkv", "out"), "mlp_bias": ("gate_up", "down")}
    named = frozenset(part for key, parts in biases.items() if c.flag(key) for part in parts)
    rotary = RotarySpec((rope,) * spec.layers, (0,) * spec.layers, named)
    return replace(spec, rotary=rotary, grouped=GroupedSpec(heads, head_dim, head_dim**-0.5))


def _grouped(c: Reader, spec: EncoderSpec) -> tuple[int, int]:
    """Heads of keys, and values of each. Raises ConfigError."""
    heads, dim = spec.heads, spec.hidden // spec.heads
    if c.given("num_key_value_heads"):
        heads = c.integer("num_key_value_heads", spec.heads)
    if c.given("head_dim"):
        dim = c.integer("head_dim", HEAD_DIM)
    if spec.heads % heads or dim % 2:
        raise ConfigError(
            f"config.json: {spec.heads} attention heads of {dim} values (head_dim) with {heads} of keys and "
            "values are not supported; these must divide the heads, and head_dim must be even",
            param="model",
        )
    return heads, dim


def nomic(c: Reader, spec: EncoderSpec) -> EncoderSpec:
    """NomicBERT."""
    if c.given("head_dim") and c.values["head_dim"] != _head_dim(spec):
        raise c.error("head_dim", f"{_head_dim(spec)}, the width of a head")
    return _alike(c, spec, "norm")


def gte(c: Reader, spec: EncoderSpec) -> EncoderSpec:
    return _alike(c, spec, "norm", "qkv", "out", "down")


def _alike(c: Reader, spec: EncoderSpec, *biases: str) -> EncoderSpec:
    """All layers see all tokens."""
    rope, _ = ropes(c, _head_dim(spec), spec.positions)
    rotary = RotarySpec((rope,) * spec.layers, (0,) * spec.layers, frozenset(biases))
    return replace(spec, rotary=rotary)


def _head_dim(spec: EncoderSpec) -> int:
    dim = spec.hidden // spec.heads
    if dim % 2:
        raise ConfigError(f"config.json: rotary positions need even heads, not {dim} dims", param="model")
    return dim
