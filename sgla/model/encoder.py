"""The shape of a bidirectional encoder, read from HF's ``config.json``,
and the names of its tensors. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgla.errors import ConfigError
from sgla.model.families import Reader, check_keys, shown
from sgla.model.methods import method_of
from sgla.model.registry import architecture_of, body_of, check_architecture, family_of
from sgla.model.spec import HEADS, INNER, LAYERS, VOCAB, WIDTH, noted

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
# DistilBERT's names for what its configuration and tensors have in common with BERT's;
# it may have the first three by both.
DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
DISTILBERT_NAMES = {
    "transformer.layer.": "encoder.layer.",
    ".attention.q_lin.": ".attention.self.query.",
    ".attention.k_lin.": ".attention.self.key.",
    ".attention.v_lin.": ".attention.self.value.",
    ".attention.out_lin.": ".attention.output.dense.",
    ".sa_layer_norm.": ".attention.output.LayerNorm.",
    ".ffn.lin1.": ".intermediate.dense.",
    ".ffn.lin2.": ".output.dense.",
    ".output_layer_norm.": ".output.LayerNorm.",
    "pre_classifier.": "pooler.dense.",
}
IGNORED = ("cls.", "lm_head.", "vocab_", "embeddings.token_type_ids")


@dataclass(frozen=True)
class EncoderSpec:
    """``positions``: rows of the table of positions, of which the first ``offset`` are never used. ``types``:
    rows of the table of token types; 0: there is none."""

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
    notes: tuple[str, ...] = ()  # about the file

    @property
    def values(self) -> int:
        """Numbers in the matrices."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return self.layers * layer + (self.vocab + self.positions + self.types) * self.hidden

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
        if method_of(config) is not None:
            raise ConfigError(f"config.json: quantization_config is not supported for {name}", param="model")
        known = family_of(name)
        unknown = check_keys(name, known, config)
        values = {**known.defaults, **config}
        if family == "DistilBert":
            for ours, theirs in DISTILBERT_KEYS.items():
                if values.get(theirs) is not None:
                    if config.get(ours, values[theirs]) != values[theirs]:
                        raise ConfigError(f"config.json: {ours} and {theirs} are not the same", param="model")
                    values[ours] = values[theirs]
        return replace(_read(Reader(name, values), family), notes=noted(name, config, unknown))

    def rename(self, name: str) -> str:
        """From a checkpoint's name to the one the model declares:
        BERT's, without the prefix of models with a head."""
        name = re.sub(r"^(distilbert|bert|roberta)\.", "", name)
        if self.family == "DistilBert":
            for theirs, ours in DISTILBERT_NAMES.items():
                name = name.replace(theirs, ours)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _read(c: Reader, family: str) -> EncoderSpec:
    activation = c.values.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        key = "activation" if family == "DistilBert" else "hidden_act"
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
    offset = c.integer("pad_token_id", vocab, 0) + 1 if family.endswith("Roberta") else 0
    distilled = family == "DistilBert"
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
        types=0 if distilled else c.integer("type_vocab_size", VOCAB),
        eps=1e-12 if distilled else c.number("layer_norm_eps", 1.0),
        activation=ACTIVATIONS[activation],
    )
