"""The shape of a model, read from HF's ``config.json``. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple

from sgla.errors import ConfigError
from sgla.hub.reader import Reader, shown
from sgla.kernels.routing import Clamped, Routing
from sgla.model.config_keys import check_keys
from sgla.model.family import EVERY, Family
from sgla.model.registry import architecture_of, check_architecture, family_of
from sgla.quant.method import Method
from sgla.quant.methods import method_of, unsupported

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
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
# Kinds of rope scaling: the numbers they cannot do without, and those they may have.
# ``factors`` comes from GGUF files, and from longrope (arXiv 2402.13753) up to the length of its short ones.
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
    "longrope": (("short_factor", "long_factor"), ("original_max_position_embeddings",)),
    "proportional": ((), ("factor",)),  # the first of all a head's dims turn, as they do where all turn
}
_TRAINED = "original_max_position_embeddings"
_ROPE, _SHARE = "rope_parameters", "partial_rotary_factor"
_ROPE_NOT_NULL = ("rope_theta", "partial_rotary_factor", _TRAINED)
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
FACTS = "sgla_facts"  # what a module of transformers has shown, in the configuration (``generic_spec.py``)
# The largest sizes that are taken for a model's and not for a broken file's.
LAYERS, WIDTH, INNER, HEADS, HEAD_DIM = 1024, 1 << 17, 1 << 20, 4096, 4096
VOCAB, EXPERTS, POSITIONS = 1 << 24, 1 << 14, 1 << 31


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding:
    ``theta`` base, ``dim`` rotated dims of each head, ``kind`` and numbers of the scaling."""

    theta: float
    dim: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: ``experts`` MLPs of the width ``intermediate``, to some of which ``routing`` sends
    each token. ``layers``: those that are mixtures; the others have one MLP of the model's ``intermediate``.
    A family has a function that reads it (``Family.mixture``)."""

    experts: int
    intermediate: int
    routing: Routing
    layers: frozenset[int]
    clamped: Clamped | None = None  # in place of the model's activation
    bias: bool = False  # of the experts and the router
    choice: bool = False  # a bias of the scores, which decides who is chosen and not with what weight
    crossed: bool = False  # a file has gpt-oss' stacks of experts
    shared: int = 0  # width of an MLP that every token goes through, too; 0: there is none
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a linear layer with one output


class LayerInputs(NamedTuple):
    """Of a token each layer is given ``width`` values of its own, from an embedding of ``vocab`` tokens."""

    width: int
    vocab: int


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of a token, by the name that ``KVLayer`` has for it. ``dtype``: where it
    is not the KV cache's."""

    name: str
    shape: tuple[int, ...]  # of a token
    dtype: str = ""


class Growth(NamedTuple):
    """A query is multiplied by ``1 + beta * log(1 + whole)``, where ``whole`` is how often ``length`` tokens
    stand before its position."""

    beta: float
    length: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer: ``heads`` of queries, ``kv_heads`` of keys and values, each of ``head_dim``
    values. ``rope`` None: positions are not rotated; ``window`` 0: a token reads all before it. ``sinks``:
    each head has a score that takes its share of the softmax and has no value. A family whose layers are
    others has a subclass. ``growth``: of queries."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    growth: Growth | None = None
    reads: int | None = None  # the layer whose keys and values it reads, with the same window; None: its own

    @property
    def v_dim(self) -> int:
        """Values of a head of v."""
        return self.head_dim

    @property
    def latent(self) -> bool:
        """v is the beginning of k, and not kept beside it."""
        return False

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        """What a rank with so many KV heads keeps of a token."""
        return StateTensor("k", (kv_heads, self.head_dim)), StateTensor("v", (kv_heads, self.v_dim))

    def weights(self, hidden: int) -> int:
        """Values of its matrices."""
        own = 0 if self.reads is not None else self.kv_heads
        return hidden * self.head_dim * 2 * (self.heads + own)


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of a decoder. ``attention``: of each layer."""

    architecture: str
    hidden: int
    intermediate: int
    attention: tuple[AttentionSpec, ...]
    vocab: int
    eps: float
    activation: Activation
    context_len: int
    final_softcap: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool  # the output layer is the embedding
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    qk_norm: Literal["", "head", "width"] = ""  # RMSNorm on each head of q and k, or on all of them as one
    learned: int = 0  # positions that have vectors
    parallel: bool = False  # attention and MLP stand side by side, where a family may have either
    head_bias: bool = False  # of the output layer
    late_norm: bool = False  # behind the rotation
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True  # of layer norms
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    gated: bool = True  # MLPs
    interleaved: bool = False  # rotation of dims 2i and 2i + 1 together
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    moe: MoESpec | None = None
    inner: tuple[int, ...] = ()  # widths of the layers' MLPs, where they differ
    inputs: LayerInputs | None = None
    predictors: int = 0  # layers behind the last, which guess further tokens; they are left out
    method: Method | None = field(default=None, compare=False)  # in which the checkpoint is quantized

    notes: tuple[str, ...] = ()  # about the file

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def quantization(self) -> str | None:
        """The checkpoint's method, if GPUs keep what it holds."""
        return self.method.name if self.method is not None and "cuda" in self.method.devices else None

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding windows of the layers; 0: full attention."""
        return tuple(layer.window for layer in self.attention)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From the content of ``config.json``, transformers 4 or 5 style. Raises ConfigError for an
        architecture that is not supported and for what cannot be honoured, naming the key."""
        if FACTS in config:
            shown: ModelSpec = import_module("sgla.model.generic_spec").generic_spec(config[FACTS])
            return shown
        architecture = architecture_of(config)
        check_architecture(architecture)
        method = method_of(config)
        family = family_of(architecture)
        text = _text(architecture, family.outer, config)
        unknown = check_keys(architecture, family, text)
        values = {**family.defaults, **text}
        if values.get(_ROPE) is None:  # HF's classes fill it in then, too
            values[_ROPE] = family.defaults.get(_ROPE)
        values |= {ours: values[theirs] for theirs, ours in family.names.items()}
        reader = Reader(architecture, values)
        spec = _read(reader, family)
        if family.completed:
            module, name = family.completed.split(":")
            spec = getattr(import_module(module), name)(reader, spec)
        if method is not None and method.experts_alone and not (spec.moe and spec.moe.crossed):
            raise unsupported(method.name, {})
        return replace(
            spec,
            method=method,
            notes=noted(architecture, config, unknown) + (method.notes if method is not None else ()),
        )


def noted(architecture: str, config: Mapping[str, Any], unknown: list[str]) -> tuple[str, ...]:
    """What to say of a file that is served:
    of its ``unknown`` keys, and of what it names that is not used."""
    found = []
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        names = ", ".join(key[:40] for key in unknown[:8])
        found.append(f"config.json: keys that neither transformers nor sgla reads: {names}{more}")
    if config.get("auto_map"):
        found.append(
            "config.json: auto_map names code that comes with the checkpoint; it is never run, and the "
            f"model computes what transformers' own {architecture} does"
        )
    if chunk := _dual_chunk(Reader(architecture, config)):
        found.append(
            f"config.json: dual_chunk_attention_config changes attention beyond {chunk} tokens, which is "
            "not supported, so the context ends there"
        )
    return tuple(found)


def _text(architecture: str, outer: Family | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model, which stand in ``text_config`` beside those of towers."""
    if outer is None or (config.get("text_config") is None and config.get("model_type") not in outer.types):
        return config
    check_keys(architecture, outer, config)
    whole = Reader(architecture, {**outer.defaults, **config})
    text, tied = whole.table("text_config", nulls=True), whole.flag("tie_word_embeddings")
    if text.get("tie_word_embeddings", tied) != tied:
        raise ConfigError("config.json: tie_word_embeddings is another one in text_config", param="model")
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    return {**text, **dtype, "tie_word_embeddings": tied}


def _read(c: Reader, family: Family) -> ModelSpec:
    hidden, positions = c.integer("hidden_size", WIDTH), c.integer("max_position_embeddings", POSITIONS)
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
        eps=c.number(next(key for key in _EPS if key in (*family.defaults, *family.names.values())), 1.0),
        activation=_activation(c, family),
        context_len=_context(c, attention, positions),
        final_softcap=_number(c, family, "final_logit_softcapping", 0.0),
        qkv_bias=family.qkv_bias or bias or _flag(c, family, "use_qkv_bias", "qkv_bias"),
        out_bias=_out_bias(c, family, bias),
        mlp_bias=family.biased or _flag(c, family, "mlp_bias", "use_bias"),
        head_bias=family.head_bias,
        parallel=_flag(c, family, "use_parallel_residual"),
        learned=positions if family.learned else 0,
        tied=c.flag("tie_word_embeddings"),
        dtype=_dtype(c),
        moe=_mixture(c, family, layers),
        predictors=_predictors(c, family),
        qk_norm=family.qk_norm if "use_qk_norm" not in family.defaults or c.flag("use_qk_norm") else "",
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
        module, name = family.attention.split(":")
        own: tuple[AttentionSpec, ...] = getattr(import_module(module), name)(c, layers, positions)
        return own
    windows = _windows(c, family, layers)
    unrotated = _unrotated(c, family, windows)
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
        said, growth = _growth(c) if family.growing else (c, None)
        said = _stretched(c, head_dim) if family.alpha else said
        rope, local = ropes(said, head_dim, positions, _partial(family), family.local_theta)
        if family.longrope and rope.kind not in ("default", "factors"):
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
            growth=growth,
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
    return min(positions, _dual_chunk(c) or positions)


def _number(c: Reader, family: Family, key: str, otherwise: float) -> float:
    """``otherwise``: where the family has no such key, or the file says null."""
    return c.number(key) if key in family.defaults and c.given(key) else otherwise


def _flag(c: Reader, family: Family, *keys: str) -> bool:
    return any(c.flag(key) for key in keys if key in family.defaults)


def _inner(c: Reader, family: Family, hidden: int) -> int:
    """Width of the MLPs."""
    key = "intermediate_size"
    if not c.given(key) and not family.mixture:  # GPT-2
        return 4 * hidden
    return c.integer(key if c.given(key) else f"moe_{key}", INNER)


def _predictors(c: Reader, family: Family) -> int:
    key = "num_nextn_predict_layers"
    return c.integer(key, LAYERS, 0) if key in family.defaults and c.given(key) else 0


def _out_bias(c: Reader, family: Family, bias: bool) -> bool:
    if "attention_out_bias" in family.defaults:
        return c.flag("attention_out_bias")
    return bias and family.out_bias


def _unrotated(c: Reader, family: Family, windows: tuple[int, ...]) -> frozenset[int]:
    """SmolLM3 names these layers; others do not rotate where they see all. but EXAONE 4
    rotates everywhere without ``sliding_window``."""
    if family.rotates == "listed":
        return _listed(c, len(windows))
    if family.rotates == "all" or (family.windows_optional and not c.given("sliding_window")):
        return frozenset()
    return frozenset(i for i, window in enumerate(windows) if not window)


def _listed(c: Reader, layers: int) -> frozenset[int]:
    """The layers that do not rotate: those with a 0 in ``no_rope_layers``, or every
    ``no_rope_layer_interval``-th."""
    flags = c.integers("no_rope_layers", LAYERS)
    if not flags:
        step = c.integer("no_rope_layer_interval", LAYERS)
        flags = [(i + 1) % step for i in range(layers)]
    if len(flags) != layers:
        raise c.error("no_rope_layers", f"a list of {layers} numbers, one for each layer")
    return frozenset(i for i, flag in enumerate(flags) if not flag)


def _dual_chunk(c: Reader) -> int:
    """How many tokens Qwen's dual chunk attention (arXiv 2402.17463) reads as full attention does;
    0: it is not wanted."""
    name = "dual_chunk_attention_config"
    table = c.table(name)
    if not table:
        return 0
    known = ("chunk_size", "local_size", "original_max_position_embeddings")
    for key in table:
        if key not in known and not key.startswith("sparse_attention"):
            raise c.error(name, f"an object of {', '.join(known)} and sparse_attention settings")
    sizes = Reader(f"{c.architecture}, {name}", table)
    chunk = sizes.integer("chunk_size", POSITIONS) - sizes.integer("local_size", POSITIONS)
    if chunk < 1:
        raise c.error(name, "a chunk_size above the local_size")
    return chunk


def _activation(c: Reader, family: Family) -> Activation:
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    found = c.values.get(key)
    known = _GATES if family.gated else _ACTIVATIONS
    if family.defaults.get(key) in _LEARNED:
        known = _LEARNED
    if not isinstance(found, str) or found not in known:
        raise ConfigError(
            f"config.json: {key} {shown(found)} is not supported for "
            f"{c.architecture}; {', '.join(known)} are",
            param="model",
        )
    return known[found]


def _dtype(c: Reader) -> str:
    key = "dtype" if c.given("dtype") else "torch_dtype"
    found = c.values.get(key)
    name = str(found if found not in (None, "auto") else "float32")[:99].removeprefix("torch.")
    if name not in _DTYPES:
        raise c.error(key, f"one of {', '.join(_DTYPES)}")
    return name


def _mixture(c: Reader, family: Family, layers: int) -> MoESpec | None:
    if not family.mixture:
        return None
    module, name = family.mixture.split(":")
    found: MoESpec | None = getattr(import_module(module), name)(c, layers)
    return found


def _windows(c: Reader, family: Family, layers: int) -> tuple[int, ...]:
    """Gemma slides in layers of ``layer_types``, or all but every ``sliding_window_pattern``-th; Qwen only
    when ``use_sliding_window`` is set, from layer ``max_window_layers`` on, or (Qwen2-MoE) in every other one
    before it; SmolLM3 in the layers that do not rotate. Other mixtures have one window for all layers."""
    known = family.defaults
    if "sliding_window" not in known or ("use_sliding_window" in known and not c.flag("use_sliding_window")):
        window = 0
    else:
        window = c.integer("sliding_window", POSITIONS) if c.given("sliding_window") else 0
    if "layer_types" not in known:
        return (window,) * layers
    needed = not (window or family.windows_optional or "use_sliding_window" in known)
    if c.given("layer_types"):
        if needed:
            raise c.error("sliding_window", "a number of tokens")
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types(c, layers, window))
    if family.rotates == "listed":
        return tuple(window if i in _listed(c, layers) else 0 for i in range(layers))
    if "max_window_layers" in known:
        if not window and not c.given("max_window_layers"):
            return (0,) * layers
        first = c.integer("max_window_layers", POSITIONS, 0)
        if family.pattern:  # and there are none from that layer on
            return tuple(window if (i + 1) % family.pattern and i < first else 0 for i in range(layers))
        return tuple(window if i >= first else 0 for i in range(layers))
    if not window and family.windows_optional and family.pattern != EVERY:
        raise c.error("layer_types", "a list, where sliding_window is null")
    pattern = family.pattern or c.integer("sliding_window_pattern", LAYERS)
    if c.values.get("_sliding_window_pattern") not in (None, pattern):
        raise c.error(
            "_sliding_window_pattern", f"that of sliding_window_pattern, {pattern}, or with layer_types"
        )
    if needed and pattern > 1:
        raise c.error("sliding_window", "a number of tokens")
    return tuple(window if (i + 1) % pattern else 0 for i in range(layers))


def layer_types(c: Reader, layers: int, window: int) -> list[str]:
    kinds = c.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else shown(kinds)
        raise ConfigError(f"config.json: {count} layer_types for {layers} layers", param="model")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json: layer_types has {shown(kind)}; "
                "full_attention and sliding_attention are supported",
                param="model",
            )
    if "sliding_attention" in kinds and not window:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, but there is no sliding_window in use",
            param="model",
        )
    return kinds


def ropes(
    c: Reader, head_dim: int, positions: int, partial: bool = False, local_theta: float = 0.0
) -> tuple[RopeSpec, RopeSpec]:
    """Global and local rotary embedding: ``rope_parameters`` (in Gemma and OLMo 3 by layer type) or
    ``rope_theta`` + ``rope_scaling``. ``local_theta``: base of the local one, where no key says it."""
    old, new = c.table("rope_scaling", nulls=True), c.table(_ROPE, nulls=True)
    if "rope_local_base_freq" not in c.values and not local_theta:
        rope = _rope(old or new, c, c.values.get("rope_theta"), head_dim, positions, partial)
        return rope, rope
    stray = {key for key, value in new.items() if value is not None}
    if stray := stray - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"config.json: rope_parameters of {c.architecture} has {shown(min(stray))}; full_attention and "
            "sliding_attention are supported",
            param="model",
        )
    if old.get("type", "default") != "default" and "rope_type" not in old:
        raise ConfigError(
            f"config.json: rope_scaling.type {shown(old['type'])} is ignored by transformers for "
            f"{c.architecture}; name the kind in rope_scaling.rope_type, or remove rope_scaling for the "
            "same numbers as there",
            param="model",
        )
    parts = Reader(c.architecture, new)
    full, local = (parts.table(f"{kind}_attention", nulls=True) for kind in ("full", "sliding"))
    full |= old
    if not (full.get("truncate", True) and local.get("truncate", True)):
        raise ConfigError(
            f"config.json: truncate is ignored by transformers for {c.architecture}, which has it true; "
            "remove it for the same numbers as there",
            param="model",
        )
    return (
        _rope(full, c, c.values.get("rope_theta"), head_dim, positions),
        _rope(local, c, c.values.get("rope_local_base_freq", local_theta), head_dim, positions),
    )


def _rope(
    table: dict[str, Any], c: Reader, theta: Any, head_dim: int, positions: int, partial: bool = False
) -> RopeSpec:
    kind = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS or (kind == "proportional" and partial):
        raise ConfigError(
            f"config.json: rope scaling (rope_type) {shown(kind)} is not supported; "
            f"{', '.join(_ROPE_KEYS)} are",
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
        kind, p, optional = "factors", _short(c, p, positions), ()
        needed = ("factors",)
    scaling: dict[str, Any] = {
        key: p.number(key) for key in (*needed, *optional) if key != "factors" and p.given(key)
    }
    if kind == "factors":
        scaling["factors"] = _factors(p, rotated // 2)
    if kind in ("llama3", "yarn"):
        scaling[_TRAINED] = _trained(c, p, positions)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise p.error("high_freq_factor", "above low_freq_factor")
    if kind == "yarn":
        scaling["truncate"] = p.flag("truncate") if p.given("truncate") else True
    if kind == "proportional":
        scaling["share"] = share
    base = p.number("rope_theta")
    if base <= 1:
        raise p.error("rope_theta", "above 1")
    return RopeSpec(base, rotated, kind, scaling)


def _stretched(c: Reader, dim: int) -> Reader:
    """HunYuan's alpha, which multiplies the base by a power of it, instead of what its table else says."""
    table = c.table("rope_scaling") or c.table(_ROPE)
    if table.get("rope_type", table.get("type")) != "dynamic" or not table.get("alpha"):
        return c
    p = Reader(f"{c.architecture}, rope_scaling", {"rope_theta": c.values.get("rope_theta"), **table})
    for key in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"):
        table.pop(key, None)
    table = {**table, "rope_type": "default", "rope_theta": p.number("rope_theta")}
    table["rope_theta"] *= min(p.number("alpha", 1e6) ** (dim / max(dim - 2, 1)), 1e30)
    del table["alpha"]
    return Reader(c.architecture, {**c.values, "rope_scaling": None, _ROPE: table})


def _growth(c: Reader) -> tuple[Reader, Growth]:
    """Ministral 3's, and the configuration without what the table of rope says of it."""
    table = c.table("rope_scaling", nulls=True) or c.table(_ROPE, nulls=True)
    p = Reader(f"{c.architecture}, {_ROPE}", dict(table))
    growth = Growth(p.number("llama_4_scaling_beta"), p.integer(_TRAINED, POSITIONS))
    table = {k: v for k, v in table.items() if k not in ("llama_4_scaling_beta", "max_position_embeddings")}
    return Reader(c.architecture, {**c.values, "rope_scaling": None, _ROPE: table}), growth


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
    found = c if c.given(_TRAINED) else p if p.given(_TRAINED) else Reader("", {_TRAINED: positions})
    return found.integer(_TRAINED, POSITIONS)


def _short(c: Reader, p: Reader, positions: int) -> Reader:
    """The factors of longrope, which has others for longer sequences than it was trained with."""
    if (trained := _trained(c, p, positions)) < positions:
        raise ConfigError(
            f"config.json: rope scaling 'longrope' changes its factors beyond {trained} tokens, "
            f"which is not supported; set max_position_embeddings to {trained}",
            param="model",
        )
    return Reader(p.architecture, {**p.values, "factors": p.values["short_factor"]})


def _rotated(table: dict[str, Any], c: Reader, head_dim: int, partial: bool) -> int:
    """Dims of a head that are rotated. ``partial``: whether the family may rotate fewer than all."""
    key = "partial_rotary_factor"
    outer = c.values.get(key) if partial else None
    if outer is None and c.given("rotary_dim"):  # MiniMax
        outer = c.integer("rotary_dim", head_dim) / head_dim
    share = table.get(key, 1 if outer is None else outer)
    if share == 1 and not isinstance(share, bool):
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


def _partial(family: Family) -> bool:
    """Whether fewer than all dims of a head may be rotated."""
    return "partial_rotary_factor" in (*family.defaults, *family.names.values())


def _factors(p: Reader, count: int) -> list[float]:
    """By which each frequency is divided."""
    values = p.values["factors"]
    if isinstance(values, list) and len(values) == count:
        return [Reader(p.architecture, {"factors": value}).number("factors") for value in values]
    raise p.error("factors", f"a list of {count} numbers")
