"""The shape of a model, read from HF's ``config.json``. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from sgla.errors import ConfigError, UnsupportedValue
from sgla.hub.reader import Reader, shown
from sgla.layers.spec import Activation, AttentionSpec, MoESpec, QKNorm
from sgla.model.config_keys import check_keys, noted
from sgla.model.dual import read_dual
from sgla.model.encoder import EncoderSpec
from sgla.model.family import QK_NORM, Family
from sgla.model.generic_spec import FACTS, generic_spec
from sgla.model.limits import HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS, UNBOUNDED, VOCAB, WIDTH
from sgla.model.registry import architecture_of, check_architecture, family_of, is_dual, is_encoder
from sgla.model.ropes import (
    ROPE,
    TRAINED,
    growth,
    magnified,
    ropes,
    stretched,
    unmagnified,
    without_sections,
)
from sgla.model.spec import ModelSpec
from sgla.model.windows import dual_chunk
from sgla.quant.methods import method_of, unsupported

_GATES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_ACTIVATIONS: dict[str, Activation] = _GATES | {
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}  # without a gate
_LEARNED: dict[str, Activation] = {"xielu": "xielu"}
_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
TIED = ("tie_word_embeddings",)
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_spec(config: Mapping[str, Any]) -> ModelSpec | EncoderSpec:
    """The shape of the model that a config.json describes. Raises ConfigError."""
    name = architecture_of(config)
    if is_dual(config):
        return read_dual(name, config)
    return EncoderSpec.from_config(config) if is_encoder(name) else read_decoder(config)


def read_decoder(config: Mapping[str, Any]) -> ModelSpec:
    """From the content of ``config.json``, transformers 4 or 5 style. Raises ConfigError for an architecture
    that is not supported and for what cannot be honoured, naming the key."""
    if FACTS in config:
        return generic_spec(config[FACTS])
    architecture = architecture_of(config)
    check_architecture(architecture)
    method = method_of(config)
    family = family_of(architecture)
    text = _text(architecture, family.outer, config)
    if text is not config and isinstance(kind := text.get("model_type"), str) and kind in family.texts:
        name = family.texts[kind]
        family = family_of(name)
        if family.outer is not None and config.get("model_type") in family.outer.types:
            architecture = name
    unknown = check_keys(architecture, family, text)
    values = {**family.defaults, **text}
    if values.get(ROPE) is None:  # HF's classes fill it in then, too
        values[ROPE] = family.defaults.get(ROPE)
    values |= _by_our_names(family, text, values)
    for key in family.by_layer:
        values[key] = _of_all_layers(architecture, key, values)
    reader = Reader(architecture, values)
    spec = _read(reader, family)
    if family.completed:
        spec = resolve_name(family.completed)(reader, spec)
    if method is not None and method.experts_alone and not (spec.moe and spec.moe.crossed):
        raise unsupported(method.name, {})
    return replace(
        spec,
        method=method,
        notes=noted(architecture, family, config, unknown)
        + _of_length(spec)
        + (method.notes if method is not None else ()),
    )


def _by_our_names(family: Family, text: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a family calls otherwise; where it has both names, one that is given counts."""
    found = {}
    for theirs, ours in family.names.items():
        if ours not in family.defaults:
            found[ours] = values[theirs]
        elif text.get(theirs) is not None:
            found[ours] = values[theirs]
            if text.get(ours) not in (None, values[theirs]):
                raise ConfigError(f"config.json: {ours} and {theirs} are not the same", param="model")
    return found


def _of_all_layers(architecture: str, key: str, values: Mapping[str, Any]) -> Any:
    """What a list has for each layer. Raises ConfigError unless that is the same."""
    found, layers = values[key], values["num_hidden_layers"]
    if not isinstance(found, list):
        return found
    if len(found) != layers or any(each != found[0] for each in found):
        raise Reader(architecture, values).error(key, f"a number, or the same number {layers} times")
    return found[0]


def _of_length(spec: ModelSpec) -> tuple[str, ...]:
    """What to say of a context whose length changes how all positions rotate."""
    for rope in (layer.rope for layer in spec.attention):
        if rope is not None and rope.kind == "longrope" and rope.scaling[TRAINED] < spec.context_len:
            trained = rope.scaling[TRAINED]
            return (
                f"longrope: in a context of more than {trained} tokens all sequences have its long factors, "
                "in transformers the longer ones alone; --context-length "
                f"{trained} gives all the short ones",
            )
    return ()


def _text(architecture: str, outer: Family | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model, which stand in ``text_config`` beside those of towers."""
    if outer is None or (config.get("text_config") is None and config.get("model_type") not in outer.types):
        return config
    if config.get("text_config") is None and "hidden_size" in config:  # old files: all keys stand together
        return {key: value for key, value in config.items() if key not in outer.defaults or key in TIED}
    check_keys(architecture, outer, config)
    whole = Reader(architecture, {**outer.defaults, **config})
    text, tied = whole.table("text_config", nulls=True), whole.flag("tie_word_embeddings")
    inside = text.get("tie_word_embeddings", False)
    if not isinstance(inside, bool):
        raise Reader(f"{architecture}, text_config", text).error("tie_word_embeddings", "true or false")
    tied = tied or (inside and outer.either_ties)  # else it says nothing, as in transformers
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    beside = {key: whole.values[key] for key in outer.beside}
    return {**text, **dtype, **beside, "tie_word_embeddings": tied}


def _read(c: Reader, family: Family) -> ModelSpec:
    hidden, positions = c.integer("hidden_size", WIDTH), UNBOUNDED
    if "max_position_embeddings" in (*family.defaults, *family.names.values()):
        positions = c.integer("max_position_embeddings", POSITIONS)
    layers = c.integer("num_hidden_layers", LAYERS)
    attention = _attention(c, family, hidden, layers, positions)
    bias = family.biased or _flag(c, family, "attention_bias", "use_bias")
    scale = hidden**0.5 if family.scaled_embedding else 1.0
    depth = _number(c, family, "scale_depth", layers**0.5) / layers**0.5
    base = _number(c, family, "dim_model_base", hidden) / hidden
    return ModelSpec(
        architecture=c.architecture,
        hidden=hidden,
        intermediate=_inner(c, family, hidden),
        attention=attention,
        vocab=c.integer("vocab_size", VOCAB),
        eps=_eps(c, family),
        activation=_activation(c, family),
        context_len=_context(c, attention, positions),
        final_softcap=_number(c, family, "final_logit_softcapping", 0.0),
        qkv_bias=family.qkv_bias or bias or _flag(c, family, "use_qkv_bias", "qkv_bias"),
        out_bias=_out_bias(c, family, bias),
        mlp_bias=family.biased or _flag(c, family, "mlp_bias", "use_bias"),
        head_bias=family.head_bias or _flag(c, family, "lm_head_bias"),
        parallel=_flag(c, family, "use_parallel_residual"),
        learned=positions if family.learned else 0,
        tied=c.flag("tie_word_embeddings"),
        dtype=dtype_of(c),
        moe=_mixture(c, family, layers),
        predictors=_predictors(c, family),
        qk_norm=_qk_norm(c, family),
        late_norm=family.late_norm,
        norm=family.norm,
        norm_bias=family.norm_bias,
        norm_offset=family.norm_offset,
        gated=family.gated,
        interleaved=family.interleaved,
        embedding_scale=_number(c, family, "scale_emb", _number(c, family, "embedding_multiplier", scale)),
        residual_scale=_number(c, family, "residual_multiplier", depth),
        logit_scale=_number(c, family, "logit_scale", base) / _number(c, family, "logits_scaling", 1.0),
    )


def _attention(
    c: Reader, family: Family, hidden: int, layers: int, positions: int
) -> tuple[AttentionSpec, ...]:
    """That of each layer: by the family's own function, or from the keys that most families have."""
    if family.attention:
        own: tuple[AttentionSpec, ...] = resolve_name(family.attention)(c, layers, positions)
        return own
    windows = family.windows(c, layers) if "sliding_window" in family.defaults else (0,) * layers
    unrotated = family.unrotated(c, windows)
    heads = _of_layers(c, family, "num_attention_heads", layers, HEADS)
    kv_heads = heads
    if c.given("num_key_value_heads"):
        kv_heads = _of_layers(c, family, "num_key_value_heads", layers, HEADS)
    dims = [hidden // count for count in heads]
    if c.given("head_dim"):
        dims = _of_layers(c, family, "head_dim", layers, HEAD_DIM)
    found = []
    for i, (head_dim, window) in enumerate(zip(dims, windows)):
        if heads[i] % kv_heads[i]:
            raise ConfigError(
                f"config.json: {heads[i]} attention heads (num_attention_heads) do not divide among "
                f"{kv_heads[i]} KV heads (num_key_value_heads)",
                param="model",
            )
        if head_dim % 2 or not head_dim:
            raise ConfigError(
                f"config.json: rotary positions need an even head_dim, not {head_dim}", param="model"
            )
        said, grown = growth(c) if family.growing else (c, None)
        said = stretched(c, head_dim) if family.alpha else said
        said = magnified(c) if family.mscales else said
        said = without_sections(said) if family.sections else said
        rope, local = ropes(said, head_dim, positions, _partial(family), family.local_theta)
        if family.late_norm:
            rope, local = unmagnified(rope), unmagnified(local)
        if family.longrope and rope.kind not in ("default", "factors", "longrope"):
            raise ConfigError(
                f"config.json: rope scaling {rope.kind!r} is not supported for {c.architecture}; longrope is",
                param="model",
            )
        known = "query_pre_attn_scalar" in family.defaults
        scale = c.number("query_pre_attn_scalar") if known else head_dim
        layer = AttentionSpec(
            heads=heads[i],
            kv_heads=kv_heads[i],
            head_dim=head_dim,
            scale=_number(c, family, "attention_multiplier", scale**-0.5),
            rope=None if i in unrotated else local if window else rope,
            window=window,
            softcap=_number(c, family, "attn_logit_softcapping", 0.0),
            sinks=family.sinks,
            growth=grown,
        )
        found.append(layer)
    return tuple(found)


def _of_layers(c: Reader, family: Family, key: str, layers: int, most: int) -> list[int]:
    """The key's number for each layer: one for all, or, in families whose layers differ, a list."""
    if not (family.layers_differ and isinstance(c.values.get(key), list)):
        return [c.integer(key, most)] * layers
    found = c.integers(key, most)
    if len(found) != layers or 0 in found:
        raise c.error(key, f"a list of {layers} numbers above 0, one for each layer")
    return found


def _context(c: Reader, attention: tuple[AttentionSpec, ...], positions: int) -> int:
    """Tokens of the longest sequence."""
    for rope in (layer.rope for layer in attention):
        if rope is not None and rope.kind == "yarn":
            extended = rope.scaling["original_max_position_embeddings"] * rope.scaling["factor"]
            positions = min(max(positions, int(extended)), POSITIONS)
    return min(positions, dual_chunk(c) or positions)


def _number(c: Reader, family: Family, key: str, otherwise: float) -> float:
    """``otherwise``: where the family has no such key, or the file says null."""
    return c.number(key) if key in family.defaults and c.given(key) else otherwise


def _eps(c: Reader, family: Family) -> float:
    """torch's own, where a family has no such key."""
    keys = [key for key in _EPS if key in (*family.defaults, *family.names.values())]
    return c.number(keys[0], 1.0) if keys else 1e-5


def _flag(c: Reader, family: Family, *keys: str) -> bool:
    return any(c.flag(key) for key in keys if key in family.defaults)


def _qk_norm(c: Reader, family: Family) -> QKNorm:
    key = next((key for key in QK_NORM if key in family.defaults), None)
    return family.qk_norm if key is None or (c.given(key) and c.flag(key)) else ""


def _inner(c: Reader, family: Family, hidden: int) -> int:
    """Width of the MLPs."""
    key = "intermediate_size"
    if not c.given(key) and not family.mixture:  # GPT-2
        return 4 * hidden
    if family.layers_differ and isinstance(c.values[key], list):
        return max(c.integers(key, INNER), default=0)
    return c.integer(key if c.given(key) else f"moe_{key}", INNER)


def _predictors(c: Reader, family: Family) -> int:
    key = "num_nextn_predict_layers"
    return c.integer(key, LAYERS, 0) if key in family.defaults and c.given(key) else 0


def _out_bias(c: Reader, family: Family, bias: bool) -> bool:
    if "attention_out_bias" in family.defaults:
        return c.flag("attention_out_bias")
    return bias and family.out_bias


def _activation(c: Reader, family: Family) -> Activation:
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    found = family.fixed.get(key, c.values.get(key))
    found = family.words.get(found, found) if isinstance(found, str) else found
    known = _GATES if family.gated else _ACTIVATIONS
    if family.defaults.get(key) in _LEARNED:
        known = _LEARNED
    if not isinstance(found, str) or found not in known:
        raise (UnsupportedValue if isinstance(found, str) else ConfigError)(
            f"config.json: {key} {shown(found)} is not supported for "
            f"{c.architecture}; {', '.join(known)} are",
            param="model",
        )
    return known[found]


def dtype_of(c: Reader) -> str:
    """Of the weights in the files. Raises ConfigError."""
    key = "dtype" if c.given("dtype") else "torch_dtype"
    found = c.values.get(key)
    name = str(found if found not in (None, "auto") else "float32")[:99].removeprefix("torch.")
    if name not in _DTYPES:
        raise c.error(key, f"one of {', '.join(_DTYPES)}")
    return name


def _mixture(c: Reader, family: Family, layers: int) -> MoESpec | None:
    if not family.mixture:
        return None
    found: MoESpec | None = resolve_name(family.mixture)(c, layers)
    return found


def _partial(family: Family) -> bool:
    """Whether fewer than all dims of a head may be rotated."""
    return "partial_rotary_factor" in (*family.defaults, *family.names.values())
