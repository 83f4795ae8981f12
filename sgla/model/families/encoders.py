"""Encoders, whose names are those of their classes without what the class is for."""

from __future__ import annotations

from dataclasses import replace

from sgla.hub.gguf_keys import RANKED
from sgla.model.families import gemma
from sgla.model.families.keys import HEAD_DIM
from sgla.model.family import Family
from sgla.model.gguf_words import (
    BERT,
    BERT_HEAD,
    BERT_TOP,
    EURO,
    EURO_TOP,
    GEMMA,
    GEMMA_TOP,
    MODERN,
    MODERN_TOP,
    NOMIC,
    NOMIC_TOP,
    Gguf,
)

_GEMMA3 = gemma.FAMILIES["Gemma3ForCausalLM"]
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
_LOOSE = ("is_decoder", "add_cross_attention")
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

# NomicBERT's files have GPT-2's names, which transformers' class does not read.
_NOMIC = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_NOMIC_ALONE = {
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "causal": False,
    **dict.fromkeys(("rotary_emb_interleaved", "prenorm", "parallel_block", "use_rms_norm"), False),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
}

FAMILIES = {
    "Bert": Family(
        ("bert",),
        _BERT,
        _ENCODER,
        _SAME,
        nulls=("pad_token_id",),
        classifier=("pooler.dense", "tanh", "classifier"),
        gguf=(
            Gguf("bert", tensors=BERT, top=BERT_TOP, layers="encoder.layer"),
            Gguf(
                "bert",
                tensors=BERT,
                top=BERT_TOP | BERT_HEAD,
                layers="encoder.layer",
                head="ForSequenceClassification",
                when={"pooling_type": RANKED},
            ),
        ),
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
        nulls=("pad_token_id", *_LOOSE),
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
    "ModernBert": Family(
        ("modernbert",),
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "layer_types": None,
            "global_attn_every_n_layers": 3,
            "local_attention": 128,
            "rope_parameters": None,
            "rope_scaling": None,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "classifier_pooling": "cls",
            "classifier_bias": False,
            "classifier_activation": "gelu",
            "decoder_bias": True,
        },
        _ENCODER,
        {**_SAME, "layer_norm_eps": "norm_eps"},
        nulls=_LOOSE,
        completed="sgla.model.rotary_spec:modern",
        classifier=("head.dense", "gelu", "classifier"),
        keys={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        renamed=(
            ("embeddings.tok_embeddings.", "embeddings.word_embeddings."),
            ("embeddings.norm.", "embeddings.LayerNorm."),
            (".attn.Wqkv.", ".self_attn.qkv_proj."),
            (".attn.Wo.", ".self_attn.o_proj."),
            (".mlp.Wi.", ".mlp.gate_up_proj."),
            (".mlp.Wo.", ".mlp.down_proj."),
            (".attn_norm.", ".post_attention_layernorm."),
            (".mlp_norm.", ".post_mlp_layernorm."),
        ),
        gguf=(
            Gguf(
                "modern-bert",
                tensors=MODERN,
                top=MODERN_TOP,
                layers="layers",
                missing={"rope.freq_base": 160_000.0},
                keys={
                    "attention.sliding_window": "local_attention",
                    "rope.freq_base": "global_rope_theta",
                    "rope.freq_base_swa": "local_rope_theta",
                },
                full_first=True,
            ),
        ),
    ),
    "Gemma3Text": Family(
        ("gemma3_text",),
        {key: value for key, value in _GEMMA3.defaults.items() if key != "final_logit_softcapping"}
        | {"use_bidirectional_attention": False},
        {key: value for key, value in _GEMMA3.fixed.items() if key != "use_bidirectional_attention"}
        | {"final_logit_softcapping": None},
        _GEMMA3.same,
        nulls=(*_GEMMA3.nulls, *_LOOSE),
        completed="sgla.model.rotary_spec:gemma",
        keys={"hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps"},
        norm_offset=1.0,
        gguf=(
            Gguf(
                "gemma-embedding",
                tensors=GEMMA,
                top=GEMMA_TOP,
                layers="layers",
                missing={"rope.freq_base": 1e6},
            ),
        ),
    ),
    "EuroBert": Family(
        ("eurobert",),
        {key: value for key, value in _BERT.items() if key not in ("type_vocab_size", "layer_norm_eps")}
        | {
            "vocab_size": 128256,
            "num_key_value_heads": None,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "rope_parameters": None,
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": None,
            "classifier_pooling": "late",
            "pad_token_id": 128001,
        },
        _ENCODER,
        _SAME,
        nulls=(*_LOOSE, *HEAD_DIM, "num_key_value_heads", "pad_token_id"),
        completed="sgla.model.rotary_spec:euro",
        keys={"layer_norm_eps": "rms_norm_eps"},
        gguf=(Gguf("eurobert", tensors=EURO, top=EURO_TOP, layers="layers"),),
    ),
    "NomicBert": Family(
        ("nomic_bert",),
        _BERT
        | {
            "vocab_size": 30528,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rope_theta": 1000.0,
            "rope_scaling": None,
            "rope_parameters": None,
            "head_dim": None,
            **dict.fromkeys(_NOMIC.values()),
        },
        {**_ENCODER, **_NOMIC_ALONE},
        nulls=(*_LOOSE, *HEAD_DIM, *_NOMIC.values()),
        completed="sgla.model.rotary_spec:nomic",
        classifier=("pooler.dense", "tanh", "classifier"),
        keys=_NOMIC,
        renamed=(
            ("encoder.layers.", "layers."),
            ("emb_ln.", "embeddings.LayerNorm."),
            (".attn.Wqkv.", ".self_attn.qkv_proj."),
            (".attn.out_proj.", ".self_attn.o_proj."),
            (".mlp.fc11.", ".mlp.up_proj."),
            (".mlp.fc12.", ".mlp.gate_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
            (".norm1.", ".post_attention_layernorm."),
            (".norm2.", ".post_mlp_layernorm."),
        ),
        gguf=(Gguf("nomic-bert", tensors=NOMIC, top=NOMIC_TOP, layers="layers"),),
    ),
    "Gte": Family(
        ("gte",),
        _BERT
        | {
            "vocab_size": 250048,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "rope_theta": 160_000.0,
            "rope_scaling": None,
            "rope_parameters": None,
        },
        _ENCODER,
        nulls=(*_LOOSE, "pad_token_id"),
        completed="sgla.model.rotary_spec:gte",
        classifier=("pooler.dense", "tanh", "classifier"),
        renamed=(
            ("encoder.layer.", "layers."),
            (".attention.qkv_proj.", ".self_attn.qkv_proj."),
            (".attention.o_proj.", ".self_attn.o_proj."),
            (".attn_ln.", ".post_attention_layernorm."),
            (".mlp_ln.", ".post_mlp_layernorm."),
        ),
    ),
}
