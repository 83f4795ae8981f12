"""Configurations, published and doctored, through resolve, explain and load: what runs equals HF, and the
rest is refused by name."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import bailing
import deepseek
import exaone
import mimo
import numpy as np
import pytest
import torch
from checkpoints import Eager, store_as_fp8
from config_cases import (
    FP8,
    HONOURED,
    REFUSED,
    RUN,
    TINY,
    Case,
    gemma3_vision,
    gemma4,
    llama,
    llama4,
    quantized,
)
from published_configs import KIMI_K2_5
from safetensors.torch import load_file, save_file
from tiny import make_core, run, submit, tiny_config

from sgla.errors import ConfigError
from sgla.hub.source import ModelSource, open_source
from sgla.layers.rope import rope_table
from sgla.ledger import ledger
from sgla.loading.load import load_model
from sgla.model.config_keys import HARMLESS
from sgla.model.families import FAMILIES
from sgla.model.families.heard import HEARD
from sgla.model.families.pictured import PICTURED
from sgla.model.pooling import read_pooling
from sgla.model.read import read_spec
from sgla.model.registry import family_of, is_encoder
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import Machine, detect
from sgla.resolve import resolve
from sgla.worker.start_cpu import cpu_runner

EQUAL = RUN | HONOURED
deepseek.register()
bailing.register()
exaone.register()
mimo.register()
PROMPT = [3 + 7 * i % 83 for i in range(40)]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return detect()


@torch.no_grad()
def save_as_hf(folder: Path, case: Case) -> Any:
    """HF's model of the configuration, with random weights, and its files with the configuration as it was
    given."""
    import transformers

    config = case.config
    name = (case.twin or {}).get("architectures", config["architectures"])[0]
    family = family_of(name)
    text = json.dumps({"model_type": family.types[0]} | (case.twin or config))
    (folder / "config.json").write_text(text)
    torch.manual_seed(0)
    settings = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, name)
    model = kind._from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        shift = 1.0 if "norm" in parameter_name.lower() and "gemma" not in settings.model_type else 0.0
        parameter.normal_(shift, 0.15)
    model.save_pretrained(folder)
    if case.fp8:
        values = store_as_fp8(folder, case.fp8)
        model = kind.from_pretrained(
            None, config=settings, state_dict=values, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    (folder / "config.json").write_text(json.dumps(config))
    return model


def vector(folder: Path) -> Any:
    """The pooled hidden states of the prompt."""
    runner: Any = cpu_runner(tiny_config(), open_source(folder), 0, 1, "", lambda progress: None)
    request = submit("r", PROMPT, 0, pool=[])
    deltas = run(runner, [request], make_core(runner.facts, encoder=True))["r"]
    return np.frombuffer(deltas[-1].vector or b"", np.float32)


@pytest.mark.parametrize("name", EQUAL)
@torch.no_grad()
def test_what_runs_equals_transformers(name: str, tmp_path: Path, machine: Machine) -> None:
    config = EQUAL[name].config
    hf = save_as_hf(tmp_path, EQUAL[name])
    source = open_source(tmp_path)
    resolved = resolve(tiny_config(device="cpu"), machine, source.config)
    assert ledger(resolved.config, source.config)["weights"] > 0
    ids = torch.tensor([PROMPT])
    if is_encoder(config["architectures"][0]):
        expected = hf(ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector(tmp_path), expected, atol=1e-4)
        return
    assert read_pooling(source) is None
    expected = hf(ids).logits[0].log_softmax(-1)
    model = load_model(source)
    torch.testing.assert_close(
        Eager(model, page_size=16).prompt_logprobs([PROMPT]), expected, rtol=0, atol=1e-4
    )
    counted = sum(
        slot.numel()
        for key, slot in hf.named_parameters()
        if slot.dim() > 1 and not re.search("vision|projector|bias$", key)
    )
    stacked = sum(1 for key, _ in hf.named_parameters() if key.endswith("mm_input_projection_weight"))
    assert stacked or abs(weight_bytes(model.spec, "float32", None, 1) / 4 / counted - 1) < 0.02


ANEW_OTHERWISE = {"glm that rotates all dims"}  # transformers, too, reads what it has written otherwise
# With fp8 it saves no method, and layers that guess are not in its files.
ANEW = {
    name: case
    for name, case in EQUAL.items()
    if name not in ANEW_OTHERWISE and "quantization_config" not in case.config
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (n % 8 > 0)) for n, name in enumerate(ANEW)]
)
def test_what_transformers_saves_anew_is_read_as_before(name: str, tmp_path: Path) -> None:
    """Who trains a model further has a config.json of transformers' making."""
    import transformers

    config, written = ANEW[name].config, ANEW[name].twin or ANEW[name].config
    architecture = written.get("architectures", config["architectures"])[0]
    if is_encoder(architecture):
        return
    path, before = tmp_path / "config.json", read_spec(config)
    path.write_text(json.dumps({"model_type": family_of(architecture).types[0]} | written))
    settings = transformers.AutoConfig.from_pretrained(tmp_path)
    settings.architectures = [architecture]
    settings.save_pretrained(tmp_path)
    after = read_spec(json.loads(path.read_text()))
    unlike = {key.name for key in fields(before) if getattr(before, key.name) != getattr(after, key.name)}
    assert unlike <= {"architecture", "predictors", "notes"}


BESIDE_TOWERS = {
    family.outer.types[0]: next((n for n in (*family.also, name) if "ForConditional" in n), name)
    for name, family in (FAMILIES | PICTURED | HEARD).items()
    if family.outer is not None and name not in ("Mistral4ForCausalLM", "PaliGemma2ForConditionalGeneration")
}
# Whose default sizes are none, or which has an output layer of its own in its files in any case.
UNSIZED = {"diffusion_gemma", "glm4v_moe", "minicpmv4_6", "qwen2_5_omni_thinker", "voxtral"}


@pytest.mark.parametrize("kind", sorted(BESIDE_TOWERS.keys() - UNSIZED))
def test_embeddings_are_tied_where_transformers_ties_them(kind: str) -> None:
    """Whatever stands in both tables: transformers' classes have other defaults in one than in the other, and
    write both."""
    import transformers

    plain = transformers.AutoConfig.for_model(kind).to_dict() | {"architectures": [BESIDE_TOWERS[kind]]}
    for outside, inside in itertools.product((None, True, False), repeat=2):
        config = copy.deepcopy(plain)
        for table, tied in ((config, outside), (config["text_config"], inside)):
            table.pop("tie_word_embeddings", None)
            table |= {} if tied is None else {"tie_word_embeddings": tied}
        expected = getattr(transformers.AutoConfig.for_model(**config), "tie_word_embeddings", False)
        assert read_spec(config).tied == expected, (outside, inside)


def test_a_file_with_towers_is_read_as_it_was_published() -> None:
    assert read_spec(KIMI_K2_5).layers == read_spec(KIMI_K2_5["text_config"]).layers == 4


@torch.no_grad()
def test_longrope_has_the_factors_of_its_context(tmp_path: Path) -> None:
    """Short ones for all where no sequence can be longer than was trained; else a note says what all have."""
    hf = save_as_hf(tmp_path, EQUAL["llama longrope beyond its training"])
    source = open_source(tmp_path)
    expected = hf(torch.tensor([PROMPT[:20]])).logits[0].log_softmax(-1)
    for context, close in ((32, True), (33, False)):
        found = Eager(load_model(source, context_len=context)).prompt_logprobs([PROMPT[:20]])
        assert torch.allclose(found, expected, rtol=0, atol=1e-4) == close
    assert "--context-length 32" in read_spec(source.config).notes[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_run_is_refused_by_name(name: str, machine: Machine) -> None:
    case: Case = REFUSED[name]
    source = ModelSource("dummy", Path("dummy"), (), json.loads(json.dumps(case.config)), {})
    assert case.refused is not None
    for step in (
        lambda: resolve(tiny_config(device="cpu"), machine, source.config),
        lambda: cpu_runner(tiny_config(), source, 0, 1, "", lambda progress: None),
    ):
        with pytest.raises(ConfigError) as caught:
            step()
        assert case.refused in caught.value.message.split("Supported:")[0]
        assert len(caught.value.message) < 3000


@pytest.mark.parametrize("value", [[], {}, "", False], ids=str)
def test_a_number_is_a_number_where_it_is_not_used(value: Any) -> None:
    """transformers looks at all keys, too: no window is ``null``, not an empty list."""
    numbers = 0
    for case in EQUAL.values():
        family = family_of(case.config["architectures"][0])
        for key, default in family.defaults.items():
            whole = isinstance(default, int) and not isinstance(default, bool)
            if "text_config" in case.config or not (whole or key in ("sliding_window", "head_dim")):
                continue
            if family.layers_differ and value == []:
                continue
            if key == "sliding_window_pattern" and value == "" and case.config.get("layer_types"):
                continue  # EXAONE's files say "LLLG", and the list is read
            with pytest.raises(ConfigError, match=key):
                read_spec(case.config | {key: value})
            numbers += 1
    assert numbers > 1000


NOTED = {
    "neither.*made_by": RUN["TinyLlama"].config | {"made_by": "somebody"},
    "auto_map.*never run": RUN["Yarn-Llama-2"].config,
    "auto_map": RUN["MiniLM-L6"].config | {"auto_map": {"AutoModel": "code.Model"}},
    "beyond 80 tokens": HONOURED["Qwen2.5-1M within its chunks"].config,
    "scales of activations": HONOURED["llama in fp8 by tensor"].config,
    "activation_scale_ub is not used": HONOURED["llama in fp8 by fbgemm"].config,
    "kv_cache_scheme is not used": llama(
        quantization_config=FP8["channel"] | {"kv_cache_scheme": {"num_bits": 8}}
    ),
    "keys of gptq that sgla does not know: secret": quantized(
        "gptq", bits=4, group_size=128, secret=1, lm_head=False, damp_percent=0.1, meta={"quantizer": ["a"]}
    ),
}


@pytest.mark.parametrize("words", NOTED)
def test_what_is_not_used_is_noted(words: str) -> None:
    (note,) = read_spec(NOTED[words]).notes
    assert re.search(words, note)


def test_nothing_else_is_noted() -> None:
    for name in ("SmolLM2-135M", "llama in fp8 by channel", "llama in fp8 by block"):
        assert not read_spec(EQUAL[name].config).notes


def test_dual_chunks_bound_the_context() -> None:
    config = HONOURED["Qwen2.5-1M within its chunks"].config
    assert read_spec(config).context_len == 80
    assert read_spec(config | {"max_position_embeddings": 40}).context_len == 40


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("Qwen3MoEForCausalLM", "Qwen3MoeForCausalLM"),
        ("Llama3ForCausalLM", None),
        ("Phi4ForCausalLM", None),
    ],
)
def test_hints_name_the_same_model_only(name: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec({"architectures": [name]})
    assert ("Did you mean" in caught.value.message) == (hint is not None)
    assert hint is None or f"Did you mean {hint}?" in caught.value.message


MINIMAX_PARTS = "full_attention", "linear_attention", "mlp"
READ_BY_ALL = {"rope_scaling", "original_max_position_embeddings", "dual_chunk_attention_config"}
# Keys of the family whose values are not computed with.
NOTHING = {
    "Qwen3MoeForCausalLM": {"max_window_layers"},
    "Glm4MoeLiteForCausalLM": {"num_nextn_predict_layers"},
    "MiniMaxM2ForCausalLM": {"attn_type_list"},
    "MiniMaxForCausalLM": {  # of the code that comes with checkpoints
        "attn_type_list",
        "rotary_dim",
        *(f"layernorm_{part}_{x}" for part in MINIMAX_PARTS for x in ("alpha", "beta")),
    },
    "Gemma4ForCausalLM": {"per_layer_config"},
    "AXK2ForCausalLM": {"num_nextn_predict_layers"},
    "DeepseekV32ForCausalLM": {"num_nextn_predict_layers"},
    "DeepseekV4ForCausalLM": {"num_key_value_heads", "num_nextn_predict_layers"},
    "HYV4ForCausalLM": {"learnable_sink_init"},
    "GlmMoeDsaForCausalLM": {"num_nextn_predict_layers"},
    "BambaForCausalLM": {"attn_rotary_emb"},
    "JambaForCausalLM": {"head_dim"},
    "Mamba2ForCausalLM": {"intermediate_size", "norm_before_gate"},
    "ExaoneForCausalLM": {"rope_theta"},
    "ExaoneMoeForCausalLM": {"is_moe_layer"},
    "MiMoV2FlashForCausalLM": {"hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads"},
    "KimiLinearForCausalLM": {"rope_theta"},
    "NomicBert": set(FAMILIES["NomicBert"].keys.values()),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_have_the_keys_and_defaults_of_transformers(architecture: str) -> None:
    """Each key that HF's configuration class declares is the family's, fixed, or harmless, and its default is
    ours; and HF's files have each key that is read here, or all its classes do."""
    from transformers import AutoConfig

    family = FAMILIES[architecture]
    theirs = AutoConfig.for_model(family.types[0] if architecture != "XLMRoberta" else "xlm-roberta")
    declared = {field.name: field.default for field in fields(theirs)}
    same = {"num_experts", "num_local_experts", "rope_parameters"}
    if family.mixture:  # names that mean another key's
        same |= family.same.keys()
    for key, default in declared.items():
        known = key in {*family.defaults, *family.fixed, *family.same, *HARMLESS}
        assert known or key.endswith(
            ("_token_id", "dropout", "dropout_prob", "_pdrop", "_coef", "_version", "output_attentions")
        ), key
        if key in family.defaults and key not in same:
            assert family.defaults[key] == default or key in ("dim", "n_layers", "n_heads"), key
    older = set(re.findall(r'kwargs\.pop\(\s*"(\w+)"', inspect.getsource(type(theirs))))
    assert older <= {*family.defaults, *family.fixed, *family.same, *HARMLESS}
    assert family.fixed.get("is_causal") is True or not family.model  # all masks of HF's read it
    sources = Path(inspect.getfile(type(theirs))).parent.glob("*.py")
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in sources)))
    assert family.defaults.keys() <= words | READ_BY_ALL | NOTHING.get(architecture, set())


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deeply|not valid JSON"),
        ('{"text_config":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("[1, 2]", "JSON object"),
        ("", "not valid JSON"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(write(tmp_path, "config.json", text), "dummy")


def test_a_file_of_100_mb_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(ConfigError, match="104857600 bytes; at most 16777216"):
        open_source(tmp_path, "dummy")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../other/model.safetensors"}}, "no .safetensors file beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no .safetensors file beside it"),
        ({"weight_map": {"a": "gone.safetensors"}}, "not there: gone.safetensors"),
        ({"weight_map": {"a": 1}}, "no weight_map"),
        ({"weight_map": ["a"]}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_is_wrong_is_refused(index: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps(RUN["TinyLlama"].config))
    write(tmp_path, "model.safetensors.index.json", json.dumps(index))
    with pytest.raises(ConfigError, match=words):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        (1 << 62).to_bytes(8, "little"),
        (200).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"[]",
        *(
            len(text).to_bytes(8, "little") + text + bytes(64)
            for text in (
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}',
                b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]}}',
                b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
            )
        ),
    ],
    ids=["huge header", "cut header", "a list", "overlapping", "overflowing", "negative"],
)
def test_a_weight_file_that_lies_is_refused(header: bytes, tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps(RUN["TinyLlama"].config))
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        load_model(open_source(tmp_path))


@pytest.mark.parametrize("ends", ["two", [1, "2"], -1, 1.5, True, [[1]], list(range(5000)), {"id": 1}])
def test_ends_that_are_no_token_ids_are_refused(ends: Any) -> None:
    source = ModelSource("dummy", Path("dummy"), (), {}, {"eos_token_id": ends})
    with pytest.raises(ConfigError, match="eos_token_id"):
        _ = source.eos_token_ids
    assert ModelSource("dummy", Path(), (), {"text_config": {"eos_token_id": [1, 2]}}, {}).eos_token_ids == [
        1,
        2,
    ]


POOLED = RUN["MiniLM-L6"].config
PLAIN = [{"type": "m.Transformer", "path": ""}, {"type": "m.Pooling", "path": "1_Pooling"}]
MEAN = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": {"a": 1}}, "list of modules"),
        ({"modules.json": [PLAIN[0]]}, "in this order"),
        ({"modules.json": [PLAIN[1], PLAIN[0]]}, "in this order"),
        (
            {
                "modules.json": [
                    *PLAIN,
                    {"type": "m.Normalize", "path": "2"},
                    {"type": "m.Dense", "path": "3"},
                ]
            },
            "in this order",
        ),
        ({"modules.json": [{"type": "m.Transformer", "path": "0_Transformer"}]}, "0_Transformer"),
        (
            {"modules.json": [PLAIN[0], {"type": "m.Pooling", "path": "../1_Pooling"}]},
            r"path '\.\./1_Pooling'",
        ),
        ({"modules.json": [*PLAIN, {"type": "m.Dense", "path": ".."}]}, "path"),
        ({"modules.json": [*PLAIN, {"type": "m.WeightedLayerPooling", "path": "2"}]}, "WeightedLayerPooling"),
        ({"1_Pooling/config.json": MEAN | {"include_prompt": False}}, "include_prompt"),
        ({"1_Pooling/config.json": MEAN | {"word_embedding_dimension": 8}}, "word_embedding_dimension"),
        ({"1_Pooling/config.json": MEAN | {"pooling_mode_cls_token": True}}, "this pooling"),
        ({"1_Pooling/config.json": [1]}, "JSON object"),
        ({"sentence_bert_config.json": {"max_seq_length": "long"}}, "max_seq_length"),
        ({"sentence_bert_config.json": {"max_seq_length": -1}}, "max_seq_length"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
        (
            {
                "config_sentence_transformers.json": {
                    "default_prompt_name": "query",
                    "prompts": {"query": "q: "},
                }
            },
            "default_prompt_name",
        ),
        (
            {
                "modules.json": [*PLAIN, {"type": "m.Dense", "path": "2_Dense"}],
                "2_Dense/config.json": {"in_features": 8, "out_features": 8},
            },
            "in_features",
        ),
    ],
)
def test_settings_of_sentence_transformers_are_honoured_or_refused(
    files: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = {"config.json": POOLED, "modules.json": PLAIN, "1_Pooling/config.json": MEAN}
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "1_Pooling").mkdir()
    for name, content in base.items():
        write(tmp_path, name, json.dumps(content))
    pooling = read_pooling(open_source(tmp_path, "dummy"))
    assert pooling is not None
    assert (pooling.kind, pooling.size) == ("mean", 32)
    for name, content in files.items():
        write(tmp_path, name, json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        read_pooling(open_source(tmp_path, "dummy"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_labels": 10**9}, "num_labels"),
        ({"num_labels": "two"}, "num_labels"),
        ({"id2label": {"0": "a", "7": "b"}}, "id2label"),
        ({"id2label": ["a", "b"]}, "id2label"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softplus"}}, "Softplus"),
    ],
)
def test_labels_and_scores_are_honoured_or_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = POOLED | {"architectures": ["BertForSequenceClassification"]} | changes
    with pytest.raises(ConfigError, match=words):
        read_pooling(open_source(write(tmp_path, "config.json", json.dumps(config)), "dummy"))


SMALL = {  # of mixtures and of latent attention
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16
    ),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    "qk_rope_head_dim": 4,  # not what follows from other sizes
    **dict.fromkeys(("num_experts_per_tok", "n_group", "moe_k"), 2),
    "sliding_window_pattern": 2,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("n_shared_experts", "topk_group", "moe_num_shared_experts", "type_vocab_size"), 1),
}


# What some classes need beside small sizes.
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}
ONLY: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": {"o_groups": 2, "head_dim": 64},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MiMoV2FlashForCausalLM": {"num_key_value_heads": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "GraniteMoeHybridForCausalLM": MAMBA,
    "BambaForCausalLM": MAMBA,
    "FalconH1ForCausalLM": MAMBA | {"mamba_d_ssm": 64},
    "NemotronHForCausalLM": {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "intermediate_size": 64},
    "MambaForCausalLM": {"intermediate_size": 64},
    "FalconMambaForCausalLM": {"intermediate_size": 64},
    "Gemma3Text": {"use_bidirectional_attention": True},
}


def small(family: str) -> dict[str, Any]:
    """A configuration of the family's own architecture with small sizes."""
    known = FAMILIES[family]
    name = family if known.model else f"{family}Model"
    sizes = {key: value for key, value in (TINY | SMALL).items() if key in known.defaults}
    sizes |= {key: (TINY | SMALL)[ours] for key, ours in known.names.items() if ours in TINY}
    if family == "Olmo3ForCausalLM":  # so many layers have all kinds
        sizes["num_hidden_layers"] = 4
    if known.attention and "num_key_value_heads" in known.defaults:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= ONLY.get(family, {})
    return sizes | {"architectures": [name], "model_type": known.types[0], "pad_token_id": 0}


def takes(config: dict[str, Any], key: str) -> bool:
    """Whether the configuration is taken; an error names ``key``."""
    said = ""
    try:
        read_spec(config)
    except ConfigError as error:
        said = error.message
    assert not said or (key in said and "neither" not in said)
    return not said


def hf_settings(config: dict[str, Any]) -> Any:
    """HF's configuration; None where it cannot be made."""
    import transformers

    try:
        return transformers.AutoConfig.for_model(**copy.deepcopy(config))
    except Exception:  # of many kinds
        return None


def hf_runs(config: dict[str, Any], settings: Any) -> bool:
    import transformers

    try:
        model = getattr(transformers, config["architectures"][0])._from_config(
            settings, attn_implementation="eager"
        )
        model(torch.tensor([PROMPT[:4]]))
    except Exception:  # of many kinds
        return False
    return True


# Keys that may be refused where HF runs: as it computes something else then, or as the key matters only with
# some kinds of rope scaling, or no file says it so.
OTHERWISE = {"is_causal", "rope_interleave", "original_max_position_embeddings", "num_hidden_layers"}
OTHERWISE |= {"mamba_conv_bias", "mamba_dt_limit", "use_bidirectional_attention"}


def check_null(config: dict[str, Any], key: str, read: bool) -> bool:
    """A configuration with a null in ``key`` is taken where HF runs with it, and nowhere else; returns
    whether it is. ``read``: it is a key of the family's."""
    import transformers

    settings = hf_settings(config)
    if not takes(config, key):
        assert settings is None or key in OTHERWISE or not hf_runs(config, settings), key
        return False
    assert settings is not None, key
    if read and key not in ("rope_parameters", "rope_scaling"):
        with torch.device("meta"):
            getattr(transformers, config["architectures"][0])._from_config(settings)
    return True


# HF's class of DiffusionGemma has no configuration of a language model alone, and no step without a block.
ALONE = [family for family in FAMILIES if family != "DiffusionGemmaForBlockDiffusion"]


@pytest.mark.parametrize(
    "family",
    [each if i % 3 == 0 else pytest.param(each, marks=pytest.mark.slow) for i, each in enumerate(ALONE)],
)
@torch.no_grad()
def test_a_null_is_taken_where_transformers_runs_with_it_and_nowhere_else(family: str) -> None:
    base, known = small(family), FAMILIES[family]
    read_spec(base)
    keys = sorted({*known.defaults, *known.fixed, *known.same})
    taken = [key for key in keys if check_null(base | {key: None}, key, key in known.defaults)]
    assert taken


@torch.no_grad()
def test_a_null_in_a_text_config_is_taken_where_transformers_runs_with_it_and_nowhere_else() -> None:
    keys = FAMILIES["Gemma3ForCausalLM"].defaults
    both = {"sliding_window_pattern": 2}  # kinds of layers
    assert {key for key in keys if check_null(gemma3_vision(both | {key: None}), key, True)} == {
        *("rope_parameters", "rope_scaling", "layer_types", "_sliding_window_pattern"),
        "final_logit_softcapping",
    }


TABLES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear of old": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with weights": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [2.0] * 4},
}
OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "factor", "original_max_position_embeddings")
OPTIONAL += ("partial_rotary_factor", "rope_theta", "truncate")


def angles(family: str, settings: Any, *kind: str) -> Any:
    """Cosines and sines of position 1 by HF; None where it makes no model."""
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, family)._from_config(settings)
        cos, sin = type(model.model.rotary_emb)(model.config)(torch.zeros(1), torch.tensor([[1]]), *kind)
    except Exception:  # of many kinds
        return None
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, 0, :half], sin[0, 0, :half]])


# Nulls without a part in what HF computes there, or that DeepSeek's attention fails with.
NEEDLESS = {
    ("LlamaForCausalLM", "default", "partial_rotary_factor"),
    ("Gemma3ForCausalLM", "default", "partial_rotary_factor"),
    ("Gemma3ForCausalLM", "default", "truncate"),
    ("Gemma3ForCausalLM", "yarn", "truncate"),
    ("LlamaForCausalLM", "yarn with weights", "factor"),
}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("LlamaForCausalLM", list(TABLES)),
        ("GlmForCausalLM", ["default", "linear"]),
        ("DeepseekV3ForCausalLM", ["yarn", "yarn with weights"]),
        ("Gemma3ForCausalLM", ["default", "yarn"]),
    ],
)
def test_a_null_in_a_table_of_rope_says_what_it_says_to_transformers(family: str, names: list[str]) -> None:
    base = small(family) | {"num_hidden_layers": 1}
    by_layer = ("full_attention",) if family == "Gemma3ForCausalLM" else ()
    if by_layer:
        base["layer_types"] = list(by_layer)
    for name in names:
        for key in sorted({*TABLES[name], *OPTIONAL}):
            table = {"rope_theta": 1e4} | TABLES[name] | {key: None}
            config = base | {"rope_parameters": {"full_attention": table} if by_layer else table}
            settings = hf_settings(config)
            expected = None if settings is None else angles(family, settings, *by_layer)
            if not takes(config, key):
                assert expected is None or (family, name, key) in NEEDLESS, (name, key)
                continue
            rope = read_spec(config).attention[0].rope
            assert rope is not None
            ours = rope_table(rope.theta, rope.dim, rope.kind, rope.scaling, 2)[1]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6, msg=f"{name} {key}")


ABSURD: list[Any] = [None, "", "x", -1, 0, 1.5, 1e308, 10**400, [], {}, True, [None], {"a": None}, "\ud800"]


def test_a_family_with_layer_types_names_a_rule_that_reads_them() -> None:
    for family, known in FAMILIES.items():
        if "layer_types" not in known.defaults or known.attention or not known.model:
            continue
        config = small(family) | {"sliding_window": 8}
        config |= {"use_sliding_window": True} if "use_sliding_window" in known.defaults else {}
        full = config["num_hidden_layers"] - 1
        config["layer_types"] = ["sliding_attention", *["full_attention"] * full]
        assert read_spec(config).windows == (8, *[0] * full), family


def test_without_layer_types_windows_are_where_transformers_has_them() -> None:
    """In more layers than any pattern has, and with a window that is less than the context."""
    compared = set()
    for family, known in FAMILIES.items():
        if "layer_types" not in known.defaults or known.attention or not known.model:
            continue
        config = small(family) | {"sliding_window": 8, "num_hidden_layers": 14}
        config |= {"use_sliding_window": True} if "use_sliding_window" in known.defaults else {}
        kinds = hf_settings(config).layer_types
        assert read_spec(config).windows == tuple(8 * (kind == "sliding_attention") for kind in kinds), family
        compared.add(tuple(kinds))
    assert len(compared) > 4


def test_a_list_of_layers_that_is_empty_says_what_it_says_to_transformers() -> None:
    """A null alone means that there is none; to Llama 4 an empty list of ``no_rope_layers`` does, too."""
    taken = []
    for family, known in FAMILIES.items():
        for key in known.defaults.keys() & {
            "layer_types",
            "mlp_layer_types",
            "no_rope_layers",
            "indexer_types",
        }:
            for value in ([], {}, "", 0, False):
                config = small(family)
                if takes(config | {key: value}, key):
                    taken.append((family, key, value))
                    assert read_spec(config | {key: value}) == read_spec(config)
    assert taken == [("Llama4ForCausalLM", "no_rope_layers", [])]


def test_no_value_of_any_key_ends_in_a_traceback(machine: Machine) -> None:
    """Each key of each family, with some of the values that it cannot have."""
    random = Random(0)
    for family, known in FAMILIES.items():
        for key in sorted({*known.defaults, *known.fixed, *known.same, "quantization_config", "dtype"}):
            for value in random.sample(ABSURD, 2):
                config = small(family) | {key: value}
                with contextlib.suppress(ConfigError):
                    resolved = resolve(tiny_config(device="cpu"), machine, config)
                    ledger(resolved.config, config)


@pytest.mark.parametrize("value", ABSURD)
def test_no_value_in_a_text_config_ends_in_a_traceback(value: Any) -> None:
    for config in (gemma3_vision({}), gemma4({}), llama4({})):
        for key in ("model_type", "architectures", "layer_types", "rope_parameters", "rope_scaling"):
            with contextlib.suppress(ConfigError):
                read_spec(config | {"text_config": config["text_config"] | {key: value}})


@torch.no_grad()
def test_hy_4_has_the_names_it_was_published_with(tmp_path: Path) -> None:
    """transformers writes those of streams in another order."""
    hf = save_as_hf(tmp_path, RUN["Hy4-preview"])
    file = tmp_path / "model.safetensors"
    published = {}
    for name, tensor in load_file(file).items():
        name = re.sub(r"hc_pre\.(hc_(?:attn|mlp)_layer)\.", r"\1.hc_pre.", name)
        name = name.replace(".hc_pre.hc_head.", ".hc_head.")
        published[re.sub(r"(mlp\.|experts\.)linear_gate", r"\1gate_proj", name)] = tensor
    parts = [f"hc_{of}_layer.hc_pre.hc_{part}" for of in ("attn", "mlp") for part in ("fn", "base", "scale")]
    parts += ["self_attn.linear_gate.weight", "self_attn.learnable_sink_param", "mlp.gate_proj.weight"]
    names = {f"model.layers.0.{part}" for part in parts}
    assert names | {f"model.hc_head.hc_head_{part}" for part in ("fn", "base", "scale")} <= published.keys()
    save_file(published, file, {"format": "pt"})
    expected = hf(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found = Eager(load_model(open_source(tmp_path)), page_size=16).prompt_logprobs([PROMPT])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
