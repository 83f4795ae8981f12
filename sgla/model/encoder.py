"""The shape of a bidirectional encoder, read from HF's ``config.json``,
and the names of its tensors. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

from sgla.errors import ConfigError
from sgla.hub.reader import Reader, shown
from sgla.layers.spec import RopeSpec
from sgla.model.config_keys import check_keys, noted
from sgla.model.families import FAMILIES
from sgla.model.limits import HEADS, INNER, LAYERS, VOCAB, WIDTH
from sgla.model.registry import architecture_of, body_of, check_architecture, family_of
from sgla.quant.method import Method
from sgla.quant.methods import method_of

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
IGNORED = ("cls.", "lm_head.", "decoder.", "vocab_", "embeddings.token_type_ids")


class RotarySpec(NamedTuple):
    """Of encoders whose positions rotate, for each layer: how, and how many tokens on either side a token
    sees, 0 for all. ``biases``: which of qkv, out, gate_up, down and norm have one. ``before``: norms stand
    before attention and MLPs, and not behind the sums."""

    ropes: tuple[RopeSpec, ...]
    windows: tuple[int, ...]
    biases: frozenset[str]
    before: bool = False


class GroupedSpec(NamedTuple):
    """Of encoders whose heads share keys and values: how many there are of these, values of a head, what
    scores are multiplied by, and whether it is Gemma 3 else, and not a Llama."""

    kv_heads: int
    head_dim: int
    scale: float
    gemma: bool = False


@dataclass(frozen=True)
class EncoderSpec:
    """``positions``: rows of the table of positions, of which the first ``offset`` are never used. ``types``:
    rows of the table of token types; 0: there is none. With ``rotary`` positions have no table."""

    architecture: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    positions: int
    offset: int
    types: int
    eps: float
    activation: str
    rotary: RotarySpec | None = None
    grouped: GroupedSpec | None = None
    beside: int = 0  # numbers in the matrices of a tower for pictures
    method: Method | None = field(default=None, compare=False)  # in which a GGUF file is quantized
    notes: tuple[str, ...] = ()  # about the file

    @property
    def values(self) -> int:
        """Numbers in the matrices."""
        attention = 4 * self.hidden**2
        if self.grouped is not None:
            heads = 2 * (self.heads + self.grouped.kv_heads)
            attention = heads * self.grouped.head_dim * self.hidden
        layer = attention + (2 if self.rotary is None else 3) * self.hidden * self.intermediate
        places = self.positions if self.rotary is None else 0
        return self.layers * layer + (self.vocab + places + self.types) * self.hidden + self.beside

    @property
    def context_len(self) -> int:
        return self.positions - self.offset

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EncoderSpec:
        """Raises ConfigError for what cannot be honoured, naming the key."""
        name = architecture_of(config)
        check_architecture(name)
        family = body_of(name)
        assert family is not None, name
        method = method_of(config)
        if method is not None and method.name != "gguf":
            raise ConfigError(f"config.json: quantization_config is not supported for {name}", param="model")
        known = family_of(name)
        unknown = check_keys(name, known, config)
        values = {**known.defaults, **config}
        for ours, theirs in known.keys.items():
            if values.get(theirs) is not None:
                if config.get(ours) not in (None, values[theirs]):
                    raise ConfigError(f"config.json: {ours} and {theirs} are not the same", param="model")
                values[ours] = values[theirs]
        spec = _read(Reader(name, values), family)
        if known.completed:
            spec = resolve_name(known.completed)(Reader(name, values), spec)
        return replace(spec, method=method, notes=noted(name, known, config, unknown))

    def rename(self, name: str) -> str:
        """From a checkpoint's name to the one the model declares:
        BERT's, without the prefix of models with a head."""
        name = re.sub(r"^(distilbert|bert|roberta|model|nomic_bert|new|gte)\.", "", name)
        for theirs, ours in FAMILIES[self.family].renamed:
            name = name.replace(theirs, ours)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _read(c: Reader, family: str) -> EncoderSpec:
    known = FAMILIES[family]
    activation = c.values.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        key = known.keys.get("hidden_act", "hidden_act")
        raise ConfigError(
            f"config.json: {key} {shown(activation)} is not supported; {', '.join(ACTIVATIONS)} are",
            param="model",
        )
    hidden, heads = c.integer("hidden_size", WIDTH), c.integer("num_attention_heads", HEADS)
    if hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads: {heads} attention heads do not divide a width of {hidden}",
            param="model",
        )
    vocab = c.integer("vocab_size", VOCAB)
    offset = c.integer("pad_token_id", vocab, 0) + 1 if known.positions_behind_padding else 0
    return EncoderSpec(
        architecture=c.architecture,
        family=family,
        layers=c.integer("num_hidden_layers", LAYERS),
        hidden=hidden,
        intermediate=c.integer("intermediate_size", INNER),
        heads=heads,
        vocab=vocab,
        positions=c.integer("max_position_embeddings", VOCAB, offset + 1),
        offset=offset,
        types=c.integer("type_vocab_size", VOCAB) if "type_vocab_size" in known.defaults else 0,
        eps=known.fixed.get("layer_norm_eps") or c.number("layer_norm_eps", 1.0),
        activation=ACTIVATIONS[activation],
    )
