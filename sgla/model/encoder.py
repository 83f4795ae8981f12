"""The shape of a bidirectional encoder, read from HF's ``config.json``, and the names of its tensors. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sgla.errors import ConfigError
from sgla.model.registry import body_of

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# DistilBERT's names for what its configuration and tensors have in common with BERT's.
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
    """``positions``: rows of the table of positions, of which the first ``offset`` are never used. ``types``: rows of the
    table of token types; 0: there is none."""

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

    @property
    def values(self) -> int:
        """Numbers in the matrices."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return self.layers * layer + (self.vocab + self.positions + self.types) * self.hidden

    @property
    def context_len(self) -> int:
        return self.positions - self.offset

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EncoderSpec:
        """Raises ConfigError naming what is wrong."""
        name = str(config["architectures"][0])
        family = body_of(name)
        assert family is not None
        c = {key: value for key, value in config.items() if value is not None}
        if family == "DistilBert":
            c |= {ours: c[theirs] for ours, theirs in DISTILBERT_KEYS.items() if theirs in c}
            c |= {"type_vocab_size": 0, "layer_norm_eps": 1e-12}
        try:
            return _read(name, family, c)
        except KeyError as error:
            raise ConfigError(f"config.json of {name} lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.json of {name} has a value of the wrong type: {error}") from error

    def rename(self, name: str) -> str:
        """From a checkpoint's name to the one the model declares: BERT's, without the prefix of models with a head."""
        name = re.sub(r"^(distilbert|bert|roberta)\.", "", name)
        if self.family == "DistilBert":
            for theirs, ours in DISTILBERT_NAMES.items():
                name = name.replace(theirs, ours)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _read(name: str, family: str, c: dict[str, Any]) -> EncoderSpec:
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(
            f"config.json: positions of type {c['position_embedding_type']!r} are not supported; absolute ones are"
        )
    if c.get("is_decoder"):
        raise ConfigError(f"config.json: {name} as a decoder is not supported")
    activation = c.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {activation!r} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
    if hidden % heads:
        raise ConfigError(f"config.json: {heads} attention heads do not divide a width of {hidden}")
    return EncoderSpec(
        architecture=name,
        family=family,
        layers=int(c["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(c["intermediate_size"]),
        heads=heads,
        vocab=int(c["vocab_size"]),
        positions=int(c["max_position_embeddings"]),
        offset=int(c.get("pad_token_id", 1)) + 1 if family.endswith("Roberta") else 0,
        types=int(c.get("type_vocab_size", 2)),
        eps=float(c.get("layer_norm_eps", 1e-12)),
        activation=ACTIVATIONS[activation],
    )
