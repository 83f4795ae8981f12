"""The shape of a model, read from HF's ``config.json``. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sgla.errors import ConfigError

# What HF's configuration classes fill in when a file leaves it out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32768},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Kinds of rope scaling and the numbers they cannot do without. ``factors`` comes from GGUF files.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": ("factors",),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: ``theta`` base, ``dim`` rotated dims of each head, ``kind`` and numbers of the scaling."""

    theta: float
    dim: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: each token goes to ``top_k`` of ``experts`` MLPs of width ``intermediate``.

    ``normalize``: the chosen experts' probabilities are scaled to the sum 1. ``layers``: those that are mixtures; the
    others have one MLP of the model's ``intermediate``.
    """

    experts: int
    top_k: int
    intermediate: int
    normalize: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of a decoder. ``windows[i]`` is the sliding window of layer i (0: full attention)."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    activation: Literal["silu", "gelu_tanh"]
    context_len: int
    rope: RopeSpec
    local_rope: RopeSpec  # of layers with a window; other than ``rope`` in Gemma
    windows: tuple[int, ...]
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool  # the output layer is the embedding
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    moe: MoESpec | None = None
    quantization: Literal["fp8"] | None = None  # of the checkpoint

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSpec:
        """From the content of ``config.json``, transformers 4 or 5 style. Raises ConfigError naming what is wrong."""
        names = config.get("architectures") or [None]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ConfigError("config.json has no 'architectures' list, so the model's class is unknown")
        c = _flatten(config)
        try:
            return _read(names[0], c)
        except KeyError as error:
            raise ConfigError(f"config.json of {names[0]} lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.json of {names[0]} has a value of the wrong type: {error}") from error


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's keys on one level, over the defaults of its type; ``null`` counts as absent."""
    text = config | (config.get("text_config") or {})
    model_type = "gemma3_text" if text.get("model_type") == "gemma3" else str(text.get("model_type"))
    return _DEFAULTS.get(model_type, {}) | {key: value for key, value in text.items() if value is not None}


def _read(architecture: str, c: dict[str, Any]) -> ModelSpec:
    hidden, heads, layers = int(c["hidden_size"]), int(c["num_attention_heads"]), int(c["num_hidden_layers"])
    kv_heads = int(c.get("num_key_value_heads", heads))
    head_dim = int(c.get("head_dim", hidden // heads))
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads do not divide among {kv_heads} KV heads")
    activation = c.get("hidden_activation", c.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    if c.get("use_bidirectional_attention"):
        raise ConfigError(
            f"{architecture} with bidirectional attention (an embedding model) is not supported"
        )
    rope, local_rope = _ropes(c, head_dim)
    context_len = int(c["max_position_embeddings"])
    if rope.kind == "yarn":
        extended = rope.scaling.get("original_max_position_embeddings", context_len) * rope.scaling.get(
            "factor", 1.0
        )
        context_len = max(context_len, int(extended))
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=int(c["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(c["vocab_size"]),
        eps=float(c["rms_norm_eps"]),
        activation=_ACTIVATIONS[activation],
        context_len=context_len,
        rope=rope,
        local_rope=local_rope,
        windows=_windows(c, layers),
        attention_scale=float(c.get("query_pre_attn_scalar", head_dim)) ** -0.5,
        attention_softcap=float(c.get("attn_logit_softcapping", 0.0)),
        final_softcap=float(c.get("final_logit_softcapping", 0.0)),
        attention_bias=bool(c.get("attention_bias", False)),
        mlp_bias=bool(c.get("mlp_bias", False)),
        tied=bool(c.get("tie_word_embeddings", False)),
        dtype=str(c.get("dtype", c.get("torch_dtype", "float32"))).removeprefix("torch."),
        moe=_moe(c, layers),
        quantization=checkpoint_quantization(c),
    )


def checkpoint_quantization(config: Mapping[str, Any]) -> Literal["fp8"] | None:
    """Whether the weights are e4m3, by the ``quantization_config`` of those who write such. Other formats show when their
    tensors are read."""
    c = config.get("quantization_config") or {}
    e4m3 = c.get("quant_method") in ("fp8", "fbgemm_fp8") or c.get("format") == "float-quantized"
    return "fp8" if e4m3 or c.get("quant_algo") == "FP8" else None


def scale_block(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of the weights that share a ``weight_scale_inv``."""
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _moe(c: dict[str, Any], layers: int) -> MoESpec | None:
    """Mixtral is a mixture in every layer; Qwen in every ``decoder_sparse_step``-th but the ``mlp_only_layers``."""
    if c.get("model_type") not in ("mixtral", "qwen3_moe"):
        return None
    experts = int(c["num_local_experts"] if "num_local_experts" in c else c["num_experts"])
    top_k = int(c["num_experts_per_tok"])
    if not 1 <= top_k <= experts:
        raise ConfigError(f"config.json: {top_k} experts a token of {experts} experts")
    step, dense = int(c.get("decoder_sparse_step", 1)), set(c.get("mlp_only_layers", ()))
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=int(c.get("moe_intermediate_size", c["intermediate_size"])),
        normalize=bool(c.get("norm_topk_prob", c.get("model_type") == "mixtral")),
        layers=frozenset(i for i in range(layers) if (i + 1) % step == 0 and i not in dense),
    )


def _windows(c: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Gemma slides by default, Qwen only when ``use_sliding_window`` is set, from layer ``max_window_layers`` on.

    The mixtures have one window for all layers.
    """
    window, family = int(c.get("sliding_window", 0)), str(c.get("model_type"))
    if not window or not c.get("use_sliding_window", family.startswith(("gemma", "mixtral"))):
        return (0,) * layers
    if family in ("mixtral", "qwen3_moe"):
        return (window,) * layers
    if "layer_types" in c:
        if len(c["layer_types"]) != layers:
            raise ConfigError(f"config.json: {len(c['layer_types'])} layer_types for {layers} layers")
        sliding = [kind == "sliding_attention" for kind in c["layer_types"]]
    elif "max_window_layers" in c:
        sliding = [i >= int(c["max_window_layers"]) for i in range(layers)]
    else:
        pattern = int(c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6)))
        sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    return tuple(window if s else 0 for s in sliding)


def _ropes(c: dict[str, Any], head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Global and local rotary embedding: ``rope_parameters`` (possibly by layer type) or ``rope_theta`` + ``rope_scaling``."""
    parameters = c.get("rope_parameters") or {}
    old_style = {"rope_theta": c.get("rope_theta", 1e4)} | (c.get("rope_scaling") or {})
    full = parameters.get("full_attention") if "full_attention" in parameters else parameters
    rope = _rope(old_style | (full or {}), c, head_dim)
    if "rope_local_base_freq" not in c and "sliding_attention" not in parameters:
        return rope, rope
    local = {"rope_theta": c.get("rope_local_base_freq", 1e4)} | (parameters.get("sliding_attention") or {})
    return rope, _rope(local, c, head_dim)


def _rope(p: dict[str, Any], c: dict[str, Any], head_dim: int) -> RopeSpec:
    kind = p.get("rope_type", p.get("type", "default"))
    if kind not in _ROPE_NEEDS:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not supported; {', '.join(_ROPE_NEEDS)} are"
        )
    partial = float(p.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)))
    scaling = {key: value for key, value in p.items() if value is not None}
    for needed in _ROPE_NEEDS[kind]:
        if needed not in scaling:
            raise ConfigError(f"config.json: rope scaling {kind!r} needs {needed!r}")
    if kind in ("yarn", "llama3"):
        scaling.setdefault("original_max_position_embeddings", int(c["max_position_embeddings"]))
    return RopeSpec(float(p["rope_theta"]), int(head_dim * partial), kind, scaling)
