"""Which keys of GGUF metadata are honoured, and what becomes of all others.

In the namespace of the architecture (``llama.*``) every key must be in its table: the keys that
``GGUFFile.config`` reads, and keys that change nothing, some of them at certain values only. Any other key,
and any other value, is refused by name. ``general.*`` describes the file, but for a few keys. In
``tokenizer.*`` the same rule holds as in the architecture's namespace, unless the vocabulary is not used.
Namespaces that other tools write for themselves (``quantize.*``, ``mradermacher.*``) are ignored, those that
stand for another kind of file are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.gguf_deltas import KDA, RECURRENT
from sgla.hub.gguf_gemma import SPARSE
from sgla.hub.gguf_layout import HF_KEYS, Layout
from sgla.hub.gguf_mimo import COUNTS, PATTERN, VALUE_SCALE


@dataclass(frozen=True)
class Number:
    """Values of a key: whole numbers or any finite ones, from ``low`` on, up to ``high``; ``layers``: or a
    list with one for each layer, which must all be the same; ``zero``: or 0."""

    whole: bool = False
    low: float = 0.0
    layers: bool = False
    zero: bool = False
    high: float = 2**31 - 1

    def fits(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if type(value) not in kinds or not isfinite(value):
            return False
        return self.low <= value <= self.high or (self.zero and value == 0)

    def __str__(self) -> str:
        to = "on" if self.high == Number.high else f"to {self.high:g}"
        return f"a {'whole ' if self.whole else ''}number from {self.low:g} {to}"


@dataclass(frozen=True)
class Only:
    """Values of a key that change nothing, or that alone are supported."""

    values: tuple[Any, ...]

    def fits(self, value: Any) -> bool:
        return not isinstance(value, list) and value in self.values

    def __str__(self) -> str:
        return " or ".join(map(repr, self.values))


@dataclass(frozen=True)
class Text:
    """A string, or a list of items of one type."""

    items: type | None = None

    def fits(self, value: Any) -> bool:
        if self.items is None:
            return isinstance(value, str)
        return isinstance(value, list) and (not value or type(value[0]) is self.items)

    def __str__(self) -> str:
        return "a string" if self.items is None else f"a list of {self.items.__name__}"


@dataclass(frozen=True)
class Flags:
    """For each layer whether it is something."""

    def fits(self, value: Any) -> bool:
        return isinstance(value, list) and all(flag in (0, 1) for flag in value)

    def __str__(self) -> str:
        return "a list of true and false"


@dataclass(frozen=True)
class Pattern:
    """Every how many layers there is one without a window, or for each layer whether it has one."""

    def fits(self, value: Any) -> bool:
        return Flags().fits(value) if isinstance(value, list) else SIZE.fits(value)

    def __str__(self) -> str:
        return f"a whole number from 1 on, or {Flags()}"


@dataclass(frozen=True)
class Some:
    """A number for each layer: 0, or the same."""

    def fits(self, value: Any) -> bool:
        whole = isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
        return whole and len({x for x in value if x}) == 1

    def __str__(self) -> str:
        return "a list of whole numbers from 0 on, which are the same where they are not 0"


@dataclass(frozen=True)
class Sizes:
    """A number for all layers, or one for each."""

    def fits(self, value: Any) -> bool:
        return all(map(SIZE.fits, value)) if isinstance(value, list) else SIZE.fits(value)

    def __str__(self) -> str:
        return "a whole number from 1 on, or a list of them"


SIZE = Number(whole=True, low=1)
COUNT = Number(whole=True)
SIZE_OF_LAYERS = Number(whole=True, low=1, layers=True)
FEW = Number(whole=True, low=2, high=64)
POSITIVE = Number(low=1e-30)
TOKEN = Number(whole=True)
FLAG = Only((True, False))
Rule = Number | Only | Text | Pattern | Flags | Some | Sizes

PICKS = "attention.indexer.types"  # which layers have an indexer; others read what it picked
LAYERS = 1024  # as config.json may have (``model.spec``)
REQUIRED = ("block_count", "context_length", "embedding_length")
_OF_ATTENTION = ("feed_forward_length", "attention.head_count")
_OF_MIXTURES = ("expert_count", "expert_used_count")
_OF_LATENTS = ("attention.kv_lora_rank", "attention.key_length", "rope.dimension_count")
_MLA = ("attention.key_length_mla", "attention.value_length_mla")
_OF_INDEXERS = tuple(f"attention.indexer.{name}" for name in ("head_count", "key_length", "top_k"))

_OF_SCANS = tuple(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank"))
_OF_GROUPS = ("ssm.group_count",)

_COMMON: dict[str, Rule] = {
    "vocab_size": SIZE,  # the embedding says it too
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.layer_norm_rms_epsilon": Number(),
    "attention.scale": Number(low=1e-30, zero=True),
    "attention.causal": Only((True,)),
    "rope.dimension_count": SIZE,
    "rope.freq_base": POSITIVE,
    "rope.scale_linear": Number(),  # what rope.scaling.factor was called
    "rope.scaling.type": Only(("none", "linear", "yarn")),
    "rope.scaling.factor": Number(),
    "rope.scaling.original_context_length": SIZE,
    "rope.scaling.attn_factor": POSITIVE,
    "rope.scaling.finetuned": Only((True, False)),  # says how the model was made
    "rope.scaling.yarn_ext_factor": Only((1.0,)),
    "rope.scaling.yarn_beta_fast": POSITIVE,
    "rope.scaling.yarn_beta_slow": POSITIVE,
    "rope.scaling.yarn_log_multiplier": Only((0.0,)),
    # Off, in models that have them not.
    # transformers and llama.cpp disagree on yarn_attn_factor, so no value is allowed.
    "attention.clamp_kqv": Only((0.0,)),
    "attention.max_alibi_bias": Only((0.0,)),
    "attention.sliding_window": Only((0,)),
    "attn_logit_softcapping": Only((0.0,)),
    "final_logit_softcapping": Only((0.0,)),
    "embedding_scale": Only((0.0, 1.0)),
    "residual_scale": Only((0.0, 1.0)),
    "logit_scale": Only((0.0, 1.0)),
    "expert_count": Only((0,)),
    "expert_used_count": Only((0,)),
    "expert_shared_count": Only((0,)),
    "nextn_predict_layers": Only((0,)),
    "pooling_type": Only((0,)),
    "use_parallel_residual": Only((False,)),
}
_MIXTURE: dict[str, Rule] = {
    "expert_feed_forward_length": SIZE,  # feed_forward_length and the tensors say it too
    "expert_shared_feed_forward_length": COUNT,
    "expert_weights_scale": Only((0.0, 1.0)),
    "expert_group_count": Only((0, 1)),
    "expert_group_used_count": Only((0, 1)),
    "leading_dense_block_count": Only((0,)),
    "interleave_moe_layer_step": Only((0, 1)),
}
_LATENT: dict[str, Rule] = {
    **dict.fromkeys(_MLA, SIZE),
    "rope.scaling.yarn_log_multiplier": Number(),
    "rope.scaling.attn_factor": Only((1.0,)),
}
_KINDS: dict[str, Rule] = {
    "attention.head_count_kv": Sizes(),
    "attention.key_length_swa": SIZE,
    "attention.scale": Only((0.0, 1.0)),
    "attention.shared_kv_layers": COUNT,
    "attention.sliding_window": SIZE,
    "attention.sliding_window_pattern": Flags(),
    "attention.value_length_swa": SIZE,
    "embedding_length_per_layer_input": COUNT,
    "expert_count": COUNT,
    "expert_feed_forward_length": COUNT,
    "expert_used_count": COUNT,
    "feed_forward_length": Sizes(),
    "rope.dimension_count_swa": SIZE,
    "rope.freq_base_swa": POSITIVE,
    "rope.scaling.factor": Only((0.0, 1.0)),
    "rope.scaling.type": Only(("none",)),
}
# Of the keys that HF's class may have, too (``HF_KEYS``): the values, where it does.
_HONOURED: dict[str, Rule] = {
    "block_count": Number(whole=True, low=1, high=LAYERS),
    "context_length": SIZE,
    "embedding_length": SIZE,
    "feed_forward_length": SIZE_OF_LAYERS,
    "attention.head_count": SIZE_OF_LAYERS,
    "attention.head_count_kv": SIZE_OF_LAYERS,
    "attention.layer_norm_rms_epsilon": Number(),
    "attention.layer_norm_epsilon": Number(),
    "attention.sliding_window": COUNT,
    "attention.q_lora_rank": COUNT,
    "attention.kv_lora_rank": SIZE,
    "attn_logit_softcapping": Number(),
    "final_logit_softcapping": Number(),
    "rope.freq_base_swa": POSITIVE,
    "embedding_scale": Number(),
    "residual_scale": Number(),
    "logit_scale": Number(),
    "expert_count": SIZE,
    "expert_used_count": SIZE,
    "expert_feed_forward_length": SIZE,
    "expert_shared_count": COUNT,
    "expert_shared_feed_forward_length": COUNT,
    "expert_weights_scale": Number(),
    "expert_weights_norm": FLAG,
    "expert_group_count": COUNT,
    "expert_group_used_count": COUNT,
    "leading_dense_block_count": COUNT,
    "interleave_moe_layer_step": COUNT,
    "nextn_predict_layers": COUNT,
    "attention.indexer.head_count": SIZE,
    "attention.indexer.key_length": SIZE,
    "attention.indexer.top_k": SIZE,
    "shortconv.l_cache": SIZE,
    "moe_latent_size": SIZE,
}


def rules(layout: Layout) -> dict[str, Rule]:
    """The keys that files of an architecture may have, without its name, and their values."""
    table = {**_COMMON, **(_MIXTURE if layout.mixture else {}), **(_LATENT if layout.latent else {})}
    for key, names in HF_KEYS.items():
        fixed = [layout.fixed[name] for name in names if layout.fixed.get(name) is not None]
        if layout.hf_key(key):
            table[key] = _HONOURED[key]
        elif fixed:
            table[key] = Only((fixed[0],))
    if layout.scans:
        table |= dict.fromkeys(_OF_SCANS if layout.first_mamba else (*_OF_SCANS, *_OF_GROUPS), SIZE)
    if layout.missing.get("expert_shared_count"):
        table["expert_shared_count"] = Only((layout.missing["expert_shared_count"],))
    if layout.growing:
        table |= dict.fromkeys(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"), Number())
        table["attention.temperature_length"] = SIZE
        table["rope.scaling.type"] = Only(("yarn",))
    if "use_parallel_residual" in layout.known:
        table["use_parallel_residual"] = FLAG
    if layout.longrope:
        table["rope.scaling.type"] = Only(("none", "linear", "yarn", "longrope"))
    if layout.scans == "only":
        table |= dict.fromkeys((*_OF_ATTENTION, "attention.head_count_kv"), Only((0,)))
        table |= {"context_length": SIZE} | ({"ssm.dt_b_c_rms": FLAG} if layout.first_mamba else {})
    if layout.scans in ("instead", "alone") or layout.convolves:
        table["attention.head_count_kv"] = Some()
    if layout.scans == "alone":
        table["feed_forward_length"] = Some()
        table["nextn_predict_layers"] = COUNT
    if layout.deltas == "channels":
        table |= {"attention.head_count_kv": Some(), "attention.q_lora_rank": Only((0,))}
        table |= dict.fromkeys((KDA, "ssm.conv_kernel"), SIZE)
    elif layout.deltas:
        table |= dict.fromkeys((*_OF_SCANS, *_OF_GROUPS, "full_attention_interval"), SIZE)
        table |= {RECURRENT: Flags(), "rope.dimension_sections": Text(int), "nextn_predict_layers": COUNT}
    if layout.scans == "instead" and not layout.mixture:
        table |= {"expert_count": Only((0,)), "expert_used_count": COUNT}
    if layout.windowed and "layer_types" in layout.known:
        table["attention.sliding_window_pattern"] = Pattern()
    if layout.kinds:
        table |= _KINDS
    if layout.wider:
        table |= {"attention.head_count_kv": Text(int), VALUE_SCALE: Number()}
        table |= {PATTERN: Flags(), "rope.freq_base_swa": POSITIVE, "attention.sliding_window": SIZE}
        table |= {"nextn_predict_layers": COUNT, "rope.scaling.type": Only(("none",))}
    if "indexer_types" in layout.known:
        table[PICKS] = Flags()
    if layout.altup:
        table |= {SPARSE: Text(float), "altup.active_idx": COUNT, "altup.num_inputs": FEW}
        table |= {"attention.shared_kv_layers": COUNT, "embedding_length_per_layer_input": SIZE}
    if layout.pooled:
        table["pooling_type"] = Only((0, *POOLED, *((RANKED,) if layout.judges else ())))
    if layout.sees:  # of text all axes are one
        table |= {"rope.dimension_sections": Text(int), "n_deepstack_layers": COUNT}
    if layout.judges:
        table["classifier.output_labels"] = Text(str)
    if layout.encoder:
        table |= {"attention.causal": Only((False,)), "pooling_type": Only((0, *POOLED))}
        table["classifier.output_labels"] = Text(str)
        table |= dict.fromkeys(_FEATURES, SIZE)
    if layout.permuted:
        table["tensor_data_layout"] = Only(("Meta AI original pth",))
    return table | {key: Only(values) for key, values in layout.only.items()}


RANKED = 4  # value of pooling_type: there is a classification head
POOLED = {1: "mean", 2: "cls", 3: "last"}  # values of pooling_type, and how hidden states become one vector
_FILES: dict[str, Rule] = {
    "general.type": Only(("model",)),
    "general.quantization_version": Only((2,)),
    "split.count": Only((0, 1)),
}
SEPARATED = "tokenizer.ggml.add_sep_token"  # whether one stands between two texts
SQUEEZED = "tokenizer.ggml.remove_extra_whitespaces"
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"  # bytes that say how characters are replaced
_TOKENIZER: dict[str, Rule] = {
    "tokenizer.ggml.model": Text(),
    "tokenizer.ggml.pre": Text(),
    "tokenizer.ggml.tokens": Text(str),
    "tokenizer.ggml.token_type": Text(int),
    "tokenizer.ggml.scores": Text(float),
    "tokenizer.ggml.merges": Text(str),
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_eos_token": FLAG,
    SEPARATED: FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
    CHARSMAP: Text(int),
    SQUEEZED: FLAG,
    "tokenizer.ggml.token_type_count": SIZE,  # of encoders
    "tokenizer.huggingface.json": Text(),  # says the same again
    "tokenizer.chat_template": Text(),
    "tokenizer.chat_templates": Text(str),  # names
}
_TOKEN_IDS = (
    *(
        "bos",
        "eos",
        "eot",
        "eom",
        "unknown",
        "padding",
        "seperator",
        "mask",
        "cls",
        "prefix",
        "suffix",
        "middle",
    ),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_TOKENIZER |= {f"tokenizer.ggml.{name}_token_id": TOKEN for name in _TOKEN_IDS}
_ADVICE = {
    "split.count": "; join the parts with llama-gguf-split --merge",
    "pooling_type": "; serve embedding models from a folder with safetensors",
}
_FEATURES = tuple(f"dense_{i}_feat_{end}" for i in (2, 3) for end in ("in", "out"))  # as tensors say
# Of general.sampling, in the words of generation_config.json.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}
_OTHER_SAMPLERS = ("sequence", "xtc_probability", "mirostat")
_SEEING = ("mm.", "vision.")  # of the part of Gemma 3 that reads images, which the file does not hold
_OTHER_FILES = ("adapter.", "clip.", "diffusion.", "imatrix.")
_XIELU = tuple(f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))


def read_keys(metadata: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The values of the architecture's own keys, by names without the architecture;
    one number for each list over layers.

    Raises ConfigError for a key that is neither honoured nor harmless,
    for a value of a wrong kind, and for a missing key.
    """
    architecture, table, found = layout.name, rules(layout), {}
    for key, value in metadata.items():
        if key in _FILES:
            _check(key, value, _FILES[key])
        elif layout.xielu and key in _XIELU:
            found[key] = _check(key, value, Text(float))
        elif key.startswith((*_OTHER_FILES, "xielu.")):
            raise ConfigError(f"the key {key} belongs to another kind of GGUF file than a language model's")
        elif key.startswith(f"{architecture}."):
            name = key.removeprefix(f"{architecture}.")
            if architecture == "gemma3" and name.startswith(_SEEING):
                continue
            if name not in table:
                raise ConfigError(
                    f"the key {key} is not supported, and it may change what the model computes"
                )
            found[name] = _check(key, value, table[name], metadata.get(f"{architecture}.block_count"))
    for name in _required(layout):
        if name not in found:
            whole = name if name in _XIELU else f"{architecture}.{name}"
            raise ConfigError(f"the GGUF metadata lacks {whole}")
    return found


def _required(layout: Layout) -> Iterator[str]:
    yield from (*REQUIRED, layout.eps)
    if layout.xielu:
        yield from _XIELU
    if layout.altup:
        yield from (SPARSE, "altup.active_idx", "altup.num_inputs", "embedding_length_per_layer_input")
    if layout.kinds:
        yield from (
            *(f"attention.{name}" for name in ("head_count_kv", "key_length", "key_length_swa")),
            *(f"attention.{name}" for name in ("sliding_window", "sliding_window_pattern")),
        )
    if layout.wider:
        yield from (COUNTS, PATTERN, "attention.key_length", "attention.value_length", "rope.freq_base")
        yield "attention.sliding_window"
    if layout.growing:
        yield "rope.scaling.type"
        if "attention.temperature_scale" not in layout.missing:
            yield "attention.temperature_scale"
    if layout.scans != "only":
        yield from _OF_ATTENTION if "intermediate_size" in layout.known else _OF_ATTENTION[1:]
    if layout.mixture:
        yield from _OF_MIXTURES
    if layout.latent:
        yield from _OF_LATENTS
    if layout.indexed:
        yield from _OF_INDEXERS
    if layout.deltas == "channels":
        yield from (KDA, "ssm.conv_kernel", "attention.head_count_kv", *_MLA)
    elif layout.scans or layout.deltas:
        yield from _OF_SCANS if layout.first_mamba else (*_OF_SCANS, *_OF_GROUPS)
    if layout.scans not in ("", "only") or layout.convolves:
        yield "attention.head_count_kv"
    if layout.convolves:
        yield "shortconv.l_cache"
    if layout.scans == "alone" and layout.mixture:
        yield "expert_shared_feed_forward_length"


def read_vocabulary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``tokenizer.*``, by their whole names. Raises ConfigError as ``read_keys`` does."""
    found = {}
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            rule = Text() if key.startswith("tokenizer.chat_template.") else _TOKENIZER.get(key)
            if rule is None:
                raise ConfigError(f"the key {key} is not supported, and it may change the tokens of a text")
            found[key] = _check(key, value, rule)
    tokens = found.get("tokenizer.ggml.tokens", [])
    kind = found.get("tokenizer.ggml.model")
    for key, kinds in ((SEPARATED, ("bert", "t5")), (SQUEEZED, ("t5",)), (CHARSMAP, ("t5",))):
        if kind not in kinds and found.get(key) and found.get("tokenizer.ggml.pre") != "modern-bert":
            raise ConfigError(f"the key {key} is not supported with tokens of kind {str(kind)[:60]!r}")
    for key, value in found.items():
        if key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores") and len(value) != len(tokens):
            raise ConfigError(f"{key} has {len(value)} values for {len(tokens)} tokens")
        if key.endswith("_token_id") and tokens and value >= len(tokens):
            raise ConfigError(f"{key} is {value}, and there are {len(tokens)} tokens")
    return found


def read_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How the model's authors recommend to sample, in the words of generation_config.json; what switches
    llama.cpp's other samplers on keeps its name."""
    keys = {f"general.sampling.{name}": hf for name, hf in _SAMPLING.items()}
    others = {f"general.sampling.{name}": name for name in _OTHER_SAMPLERS}
    found = {hf: _check(key, metadata[key], Number()) for key, hf in keys.items() if key in metadata}
    return found | {name: metadata[key] for key, name in others.items() if key in metadata}


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """``name``: bos | eos | ... Raises ConfigError for what is no id."""
    key = f"tokenizer.ggml.{name}_token_id"
    value: int | None = _check(key, metadata[key], TOKEN) if key in metadata else None
    return value


def _check(key: str, value: Any, rule: Rule, layers: Any = None) -> Any:
    """The value, or the one that a list repeats."""
    if isinstance(rule, Number) and rule.layers and isinstance(value, list):
        if len(value) != layers or len(set(value)) != 1:
            raise ConfigError(
                f"{key} has {len(value)} values, {len(set(value))} of them different; "
                "only one value for all layers is supported"
            )
        value = value[0]
    if not rule.fits(value):
        advice = next((text for name, text in _ADVICE.items() if key.endswith(name)), "")
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:100]
        raise ConfigError(f"{key} is {shown}, which is not supported; it must be {rule}{advice}")
    return value
