"""Encoders, whose names are those of their classes without what the class is for."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.family import Family

_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ENCODER = {
    "is_decoder": False,
    "is_causal": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
_SAME = {"embedding_size": "hidden_size"}
_DISTILBERT = (
    ("transformer.layer.", "encoder.layer."),
    (".attention.q_lin.", ".attention.self.query."),
    (".attention.k_lin.", ".attention.self.key."),
    (".attention.v_lin.", ".attention.self.value."),
    (".attention.out_lin.", ".attention.output.dense."),
    (".sa_layer_norm.", ".attention.output.LayerNorm."),
    (".ffn.lin1.", ".intermediate.dense."),
    (".ffn.lin2.", ".output.dense."),
    (".output_layer_norm.", ".output.LayerNorm."),
    ("pre_classifier.", "pooler.dense."),
)
_ROBERTA = Family(
    ("roberta", "xlm-roberta"),
    _BERT | {"vocab_size": 50265, "pad_token_id": 1},
    _ENCODER,
    _SAME,
    classifier=("classifier.dense", "tanh", "classifier.out_proj"),
    positions_behind_padding=True,
)

FAMILIES = {
    "Bert": Family(
        ("bert",),
        _BERT,
        _ENCODER,
        _SAME,
        nulls=("pad_token_id",),
        classifier=("pooler.dense", "tanh", "classifier"),
    ),
    "DistilBert": Family(
        ("distilbert",),
        {
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "n_layers": None,
            "n_heads": None,
            "dim": None,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "hidden_size": 768,
            "hidden_dim": 3072,
            "activation": "gelu",
            "pad_token_id": 0,
        },
        _ENCODER | {"layer_norm_eps": 1e-12},
        nulls=("pad_token_id", "is_decoder", "add_cross_attention"),
        classifier=("pooler.dense", "relu", "classifier"),
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        renamed=_DISTILBERT,
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": replace(_ROBERTA, defaults=_BERT | {"pad_token_id": 1}),
}
