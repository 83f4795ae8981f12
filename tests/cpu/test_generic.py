"""Models that run through transformers' own module: equal to it over our pages, or refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import probing
import pytest
import torch
import transformers
from checkpoints import SMALL, Eager, check_against_hf, random_prompts, save_checkpoint
from parity import DELTA, LATENT, ROUTED
from parity import GENERIC as MODELS
from safetensors.torch import load_file, save_file
from tiny import make_core, over_two_ranks, run, submit, tiny_config
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as SENSING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as ENCODING

from sgla.config import Config
from sgla.errors import ConfigError, WeightError
from sgla.hub import source as files
from sgla.hub.source import ModelSource
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.model import generic_spec
from sgla.model.families import FAMILIES
from sgla.model.families.refused import REFUSED
from sgla.model.generic import Generic, probe
from sgla.model.generic_compile import compile_steps
from sgla.model.generic_spec import FACTS, check_generic, settled
from sgla.model.read import read_decoder
from sgla.model.registry import is_known
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import Machine
from sgla.processes import limit_memory, tied
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner
from sgla.worker.report import report

PROMPTS = random_prompts([1, 7, 33])


def seen(folder: Path, ranks: int = 1, **changes: Any) -> ModelSource:
    """The checkpoint with its facts, which another process finds out else."""
    source = files.open_source(folder)
    config = source.config | changes
    return replace(source, config=config | {FACTS: probe(config, folder, ranks=ranks)})


PLAIN = {"bitnet", "cohere2_moe", "flint", "kolibri1", "moshi"}  # as others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in PLAIN)) for name in MODELS]
)
@torch.no_grad()
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """Whole and in chunks, several rows in a step and each alone."""
    hf = save_checkpoint(tmp_path, name, **MODELS[name])
    source = seen(tmp_path)
    model = load_model(source)
    assert isinstance(model, Generic)
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].float().log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    tokens = [
        hf.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        for p in PROMPTS
    ]
    rows = Eager(model, budget=20, native=True).generate(PROMPTS, 6)
    assert [row.tokens for row in rows] == [row[0].tolist() for row in tokens]
    spec = model.spec
    assert any(spec.windows) == ("sliding_window" in MODELS[name] or "local_attention" in MODELS[name])
    assert weight_bytes(spec, "float32", None, 1) == 4 * sum(p.numel() for p in hf.parameters())


@pytest.mark.parametrize("by_layer", [False, True])
@torch.no_grad()
def test_dynamic_ropes_turn_as_trained_to_the_end_of_the_context(by_layer: bool, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}
    name = "cohere_compass_text" if by_layer else "olmo"
    rope = dict.fromkeys(("full_attention", "sliding_attention"), rope) if by_layer else rope
    changes = MODELS[name] | {"max_position_embeddings": 40, "rope_parameters": rope}
    hf = save_checkpoint(tmp_path, name, **changes)
    source = seen(tmp_path)
    model = load_model(source)
    assert model.spec.context_len == 40
    assert "dynamic depends on the longest sequence beyond 40 tokens" in source.config[FACTS]["notes"][0]
    (row,) = Eager(model, native=True).generate(random_prompts([24]), 16)
    check_against_hf([row], 16, hf)


WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DEEP = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
LOCAL = {"rope_type": "default", "rope_theta": 1e3}
# Models with towers that are not here: their language models, their towers, and the rest.
SIGHTED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cohere2_vision": (
        {"head_dim": 8, "logit_scale": 0.5} | WINDOWS,
        TOWER | {"image_size": 28, "patch_size": 14},
        {"alignment_intermediate_size": 32},
    ),
    "exaone4_5": (
        {"head_dim": 8} | WINDOWS,
        DEEP | {"num_key_value_heads": 1, "fullatt_block_indexes": [0]},
        {},
    ),
    "glm_ocr": ({"head_dim": 16, "rope_parameters": SECTIONS}, DEEP, {}),
    "granite_speech": (
        {},
        {},
        {"encoder_config": {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16}}
        | {"projector_config": TOWER | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32}},
    ),
    # Its tower looks its attention up in a table of its own.
    "deepseek_ocr2": (
        {"head_dim": 12, "mlp_layer_types": ["dense"] + ["sparse"] * 2, "moe_intermediate_size": 32}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        {
            "sam_config": TOWER
            | {"image_size": 32, "patch_size": 16, "output_channels": 32}
            | {"downsample_channels": [32, 32], "global_attn_indexes": [0], "mlp_dim": 32},
            "encoder_config": TOWER | {"num_key_value_heads": 2, "layer_types": ["full_attention"]},
        },
        {},
    ),
    "got_ocr2": ({}, TOWER | {"image_size": 32, "patch_size": 16, "output_channels": 32}, {}),
    "paddleocr_vl": ({"head_dim": 16, "rope_parameters": SECTIONS}, TOWER, {}),
    # Windows have other numbers of heads, and experts are a loop over those that are chosen.
    "step3p7": (
        {
            "head_dim": 8,
            "num_sliding_attention_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {"full_attention": LOCAL | {"rope_theta": 1e4}, "sliding_attention": LOCAL},
        }
        | WINDOWS,
        TOWER,
        {},
    ),
}


# The same of those whose language models have code here.
HALF_KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma4_unified": ({"head_dim": 8}, {"patch_size": 8}, {}),
    "lfm3_vl": ({"head_dim": 16, "sliding_window": 9}, TOWER | {"num_key_value_heads": 1}, {}),
    "minicpmv4_7": (DELTA, TOWER | {"num_hidden_layers": 2}, {"insert_layer_id": 0}),
    "minicpm_ocr": (DELTA, TOWER | {"num_hidden_layers": 2}, {"insert_layer_id": 0}),
    "lfm2_vl": ({}, TOWER | {"model_type": "siglip2_vision_model"}, {"projector_hidden_size": 32}),
}


def save_sighted(folder: Path, kind: str) -> PreTrainedModel:
    text, tower, more = (SIGHTED | HALF_KNOWN)[kind]
    own = {"model_type": AutoConfig.for_model(kind).get_text_config().model_type}
    towers = {"vision_config": tower} if tower else {}
    config = AutoConfig.for_model(kind, text_config=own | SMALL | text, **towers, **more)
    torch.manual_seed(0)
    hf: PreTrainedModel = getattr(transformers, (SEEING | SENSING)[kind])(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.15)
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("step3p7", "granite_speech")))
        for kind in SIGHTED
    ],
)
@torch.no_grad()
def test_a_model_with_towers_reads_text(kind: str, tmp_path: Path) -> None:
    hf = save_sighted(tmp_path, kind)
    source = seen(tmp_path)
    assert "it reads text alone, without its " in source.config[FACTS]["notes"][0]
    model = load_model(source)
    assert isinstance(model, Generic)
    found = Eager(model, native=True).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].float().log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    left = sum(parameter.numel() for parameter in model.module.parameters())
    assert source.config[FACTS]["values"] == left < sum(parameter.numel() for parameter in hf.parameters())


@pytest.mark.parametrize("kind", HALF_KNOWN)
@torch.no_grad()
def test_towers_without_code_are_left_out(kind: str, tmp_path: Path) -> None:
    hf = save_sighted(tmp_path, kind)
    model = load_model(open_source(tmp_path))
    assert not isinstance(model, Generic)
    found = Eager(model, native=True).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].float().log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


async def test_ranks_share_out_what_reads_text_beside_towers(tmp_path: Path) -> None:
    save_sighted(tmp_path, "exaone4_5")
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    alone = run(CpuRunner(tiny_config(), seen(tmp_path), 0, 1, "", lambda p: None), requests)
    assert (await over_two_ranks(seen(tmp_path, ranks=2), requests)).tokens() == alone.tokens()


def test_no_towers_are_left_out_of_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family here that takes pictures, with a value that it does not compute: the module takes none."""
    probing.fork_probes(monkeypatch)
    text = AutoConfig.for_model("llama").to_dict() | SMALL | {"hidden_act": "relu"}
    config = AutoConfig.for_model("llava", text_config=text).to_dict()
    config["architectures"] = ["LlavaForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="relu") as refused:
        open_source(tmp_path)
    assert "through transformers" not in str(refused.value)


@torch.no_grad()
def test_caches_and_preemption_change_nothing(tmp_path: Path) -> None:
    """Windows give pages back; a second request reads the first one's pages; few pages retract requests."""
    save_checkpoint(tmp_path, "granite_swa", **MODELS["granite_swa"])
    runner = CpuRunner(tiny_config(page_size=4, step_tokens=32), seen(tmp_path), 0, 1, "", lambda p: None)
    assert [group.window for group in runner.facts.groups] == [0, 10]
    prompts = random_prompts([40, 41, 42, 44], seed=3)
    alone = {str(i): run(runner, [submit(str(i), p, 20)]).tokens()[str(i)] for i, p in enumerate(prompts)}
    requests = [submit(str(i), p, 20) for i, p in enumerate(prompts)]
    core = make_core(runner.facts)
    assert run(runner, requests, core).tokens() == alone
    assert run(runner, [submit(f"{r.rid}", r.tokens, 20) for r in requests], core).tokens() == alone
    scarce = make_core(runner.facts, pages=34)
    assert run(runner, requests, scarce).tokens() == alone


@pytest.mark.parametrize("name", [pytest.param("olmo", marks=pytest.mark.slow), "granitemoe_swa"])
async def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """Dense, and experts with sinks and windows."""
    save_checkpoint(tmp_path, name, **MODELS[name])
    requests = [submit(str(i), prompt, 8, logprobs=1) for i, prompt in enumerate(PROMPTS)]
    alone = run(CpuRunner(tiny_config(), seen(tmp_path), 0, 1, "", lambda p: None), requests)
    source = seen(tmp_path, ranks=2)
    both = await over_two_ranks(source, requests)
    assert both.tokens() == alone.tokens()
    spec = read_decoder(source.config)
    assert weight_bytes(spec, "float32", None, 2) == 4 * spec.own < 0.7 * 4 * spec.values  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("opt", 2, "OPTForCausalLM gives no plan for that"),
        ("aria_text", 2, "has packed_rowwise"),
        ("afmoe", 2, "more or less than its share of the heads"),
        ("olmo", 4, "6 heads with 2 of k and v do not divide"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, ranks: int, message: str, tmp_path: Path) -> None:
    sizes = {key: value for key, value in (SMALL | MODELS[name]).items() if value is not ...}
    config = AutoConfig.for_model(name, **sizes).to_dict() | {"architectures": [CAUSAL[name]]}
    with pytest.raises(ConfigError, match=message):
        probe(config, tmp_path, ranks=ranks)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_equal_others(tmp_path: Path) -> None:
    """Decode steps of one row and of several; with sinks and windows. Prompts run as they are."""
    save_checkpoint(tmp_path, "granite_swa", **MODELS["granite_swa"])
    source = seen(tmp_path)
    prompts = [*PROMPTS, PROMPTS[2]]
    requests = [submit(str(i), prompt, 6 + 4 * i, logprobs=1) for i, prompt in enumerate(prompts)]
    settings = {"enable_torch_compile": True, "torch_compile_max_bs": 3}
    plain, fast = (
        CpuRunner(tiny_config(**given), source, 0, 1, "", lambda p: None) for given in ({}, settings)
    )
    model = fast.model
    assert isinstance(model, Generic)
    compiled, sizes = model.compiled, set()

    def counted(**given: Any) -> Any:
        sizes.add(given["input_ids"].shape[1])
        return compiled(**given)

    model.compiled = counted
    assert run(fast, requests).tokens() == run(plain, requests).tokens()
    assert sizes == {1, 2, 3}
    hook = model.module.register_forward_hook(lambda *given: print(float(given[2].logits.sum())))
    with pytest.raises(ConfigError, match="cannot be honoured for this module: torch cannot: "):
        compile_steps(model, 3)
    hook.remove()


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_another_process_sees_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: bool) -> None:
    """The main process has no torch. What config.json says of such facts counts for nothing."""
    if fork:
        probing.fork_probes(monkeypatch)
    save_checkpoint(tmp_path, "apertus")
    expected = seen(tmp_path).config[FACTS]
    source = files.open_source(tmp_path)
    source.config[FACTS] = {"architecture": "Llama"}
    assert settled(source, "transformers", False).config[FACTS] == expected
    assert FACTS not in settled(source, "native", False).config


def test_a_probe_ends_with_who_started_it_and_within_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def started(command: list[str], **_: Any) -> Any:
        commands.append(command)
        said = b'noise\nsgla: {"refused": "no model", "param": "model", "unknown": false}\nmore'
        return subprocess.CompletedProcess(command, 0, said, b"")

    save_checkpoint(tmp_path, "apertus")
    source = files.open_source(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(generic_spec.subprocess, "run", started)
        with pytest.raises(ConfigError, match="no model"):
            settled(source, "transformers", False)
    assert commands == [tied([sys.executable, "-m", "sgla.model.generic"])]

    def take_much() -> None:
        limit_memory(64 << 20)
        bytearray(1 << 30)

    done = probing.forked(take_much)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"MemoryError"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((3, b"", b""), "the module cannot be built: its process ended with 3"),
        ((2, b"noise", b"Traceback\nValueError: bang"), "the module cannot be built: ValueError: bang"),
        ((0, b"{}", b""), "the module cannot be built: its process ended with 0"),
        (
            (0, b'sgla: {"refused": "no class", "param": "model", "unknown": true}', b""),
            "architecture 'LamaForCausalLM' is not supported. Did you mean LlamaForCausalLM? Supported: ",
        ),
        (
            (0, b'sgla: {"refused": "its masks differ", "param": "model", "unknown": false}', b""),
            "LamaForCausalLM has no code here, and its masks differ",
        ),
    ],
)
def test_what_is_said_of_a_module_that_is_not_served(
    given: tuple[int, bytes, bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of a checkpoint may end its process or print. Names of others are for names that nobody knows."""
    done = subprocess.CompletedProcess([], *given)
    monkeypatch.setattr(generic_spec.subprocess, "run", lambda *given, **named: done)
    source = ModelSource("dummy", tmp_path, (), {"architectures": ["LamaForCausalLM"]}, {})
    with pytest.raises(ConfigError) as refused:
        settled(source, "auto", True)
    found = refused.value.message
    assert found.startswith(said) if said.endswith(" ") else said in found
    assert ("Supported" in found) == ("Supported" in said)


def test_a_module_whose_logits_are_no_numbers_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("persimmon", num_hidden_layers=1, hidden_size=32, vocab_size=99)
    config = config.to_dict() | {"architectures": ["PersimmonForCausalLM"], "intermediate_size": 32}
    config |= {"num_attention_heads": 2, "layer_norm_eps": float("nan"), "dtype": "float32"}
    facts = {FACTS: probe(config, tmp_path)}
    with pytest.raises(ConfigError, match="its logits are no numbers"):
        load_model(ModelSource("dummy", tmp_path, (), config | facts, {}))


def test_what_another_process_refuses_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module would run on one rank, so nothing is said of architectures that do. No rule takes it."""
    probing.fork_probes(monkeypatch)
    save_checkpoint(tmp_path, "persimmon", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="^transformers' module cannot be split over ranks") as refused:
        open_source(tmp_path, ranks=2)
    assert refused.value.param == "tp"
    monkeypatch.setattr("sgla.worker.report.use", lambda device: None)
    _, line = report(Config(), seen(tmp_path))
    assert "none: transformers' module computes it" in line


def test_native_code_comes_first(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    assert FACTS not in open_source(tmp_path).config


GPT = {"intermediate_size": ..., "num_key_value_heads": ...}
OPT = GPT | {"ffn_dim": 96, "tie_word_embeddings": True}
LACKING: dict[str, tuple[str, dict[str, Any]]] = {
    "do_layer_norm_before": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "word_embed_proj_dim": ("opt", OPT | {"word_embed_proj_dim": 32}),
    "_remove_final_layer_norm": ("opt", OPT | {"_remove_final_layer_norm": True}),
    "enable_bias": ("opt", OPT | {"enable_bias": False}),
    "layer_norm_elementwise_affine": ("opt", OPT | {"layer_norm_elementwise_affine": False}),
    "qk_layernorm": ("phi", {"qk_layernorm": True}),
    "attention_bias": ("gpt_neox", GPT | {"attention_bias": False}),
    "mlp_bias": ("minicpm3", LATENT | {"mlp_bias": True, "tie_word_embeddings": True}),
    "rope_interleave": ("deepseek_v3", LATENT | ROUTED | {"n_group": 4, "rope_interleave": False}),
    "clip_qkv": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.3}),
    "use_bias": ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "use_bias": True}),
    "use_post_norm": ("hyperclovax", {"use_post_norm": False, "residual_multiplier": 0.4}),
    "hidden_act": ("llama", {"hidden_act": "relu"}),
}


@pytest.mark.parametrize("key", LACKING)
@torch.no_grad()
def test_a_value_that_native_code_lacks_takes_the_module(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line that says so; ``--model-impl native`` refuses it by name."""
    probing.fork_probes(monkeypatch)
    model_type, changes = LACKING[key]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    assert isinstance(model, Generic)
    cost, why = model.spec.notes
    assert "transformers' own module computes it" in cost
    assert re.search(f"the code of this server does not: config.json.*: {key} ", why)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(Eager(model).prompt_logprobs(PROMPTS), expected, rtol=0, atol=2e-4)
    with pytest.raises(ConfigError, match=f"{key} "):
        read_decoder(open_source(tmp_path, impl="native").config)


def test_every_value_that_modules_compute_is_tried() -> None:
    """But for activations of layers that modules cannot be served with."""
    keys = {key for family in FAMILIES.values() for key in family.honoured}
    acts = {"hidden_act", "mlp_hidden_act", "hidden_activation"}
    assert keys - acts == LACKING.keys() - {"hidden_act", "word_embed_proj_dim"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size is 48; it must be a multiple of the 5 heads"),
        ({"do_layer_norm_before": False, "clip_qkv": 8.0}, "'clip_qkv' .8.0. may change what"),
        ({"do_layer_norm_before": False, "sliding_window": 8}, "'sliding_window'"),
        ({"do_layer_norm_before": None}, "do_layer_norm_before null is not supported"),
        ({"is_encoder_decoder": True, "do_layer_norm_before": False}, "is_encoder_decoder True"),
    ],
)
def test_what_is_wrong_is_refused_without_the_module(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, keys that no class reads, and kinds of attention that nobody knows."""
    monkeypatch.setattr("sgla.model.generic_spec.subprocess.run", None)
    save_checkpoint(tmp_path, "opt", **OPT)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        read_decoder(open_source(tmp_path).config)


def test_both_reasons_are_told_where_neither_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing.fork_probes(monkeypatch)
    save_checkpoint(tmp_path, "opt", **OPT | {"enable_bias": False})
    with pytest.raises(ConfigError, match="enable_bias False.*; through transformers: .*no plan") as refused:
        open_source(tmp_path, ranks=2)
    assert refused.value.param == "tp"
    path = tmp_path / "config.json"
    method = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    path.write_text(json.dumps(json.loads(path.read_text()) | method))
    with pytest.raises(ConfigError, match="enable_bias False.*; through transformers: .*it is quantized"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", {}, "keeps states of its own"),
        ("bamba", {}, "keeps states of its own"),  # whose file has an infinite number
        ("bart", {}, "an encoder and cross-attention"),
        ("t5", {}, "an encoder and cross-attention"),
        ("bloom", {}, "no interface for attention"),
        ("bert", {}, "neither causal nor a sliding window"),
        ("llama4_text", {"attention_chunk_size": 64}, "neither causal nor a sliding window|does not run"),
        ("diffllama", {}, "do not attend once each"),
        ("gemma", {"use_bidirectional_attention": True}, "see those behind them"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of the kind conv"),
        ("glm_moe_dsa", {}, "layers of the kind|changes its attention masks"),
        ("flint", {"head_dim": 1}, "attention heads of 1 values"),
        ("laguna", {"num_attention_heads_per_layer": [0, 48, 48]}, "has 0 attention heads"),
    ],
)
def test_what_it_cannot_do_right_is_refused(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made = AutoConfig.for_model(model_type, **{"num_hidden_layers": 3} | changes)
    config = json.loads(made.to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match=message):
        probe(config | {"architectures": [(ENCODING | CAUSAL)[model_type]]}, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_here_computes_is_refused_with_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, without transformers; no family has its name."""
    monkeypatch.setattr("sgla.model.generic_spec.subprocess.run", None)
    assert not is_known(name)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    (tmp_path / "model.safetensors").touch()
    for impl in ("auto", "transformers"):
        with pytest.raises(ConfigError, match=f"{name} is not supported: {re.escape(REFUSED[name])}"):
            open_source(tmp_path, impl=impl)


def test_a_name_that_is_written_wrongly_is_told_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing.fork_probes(monkeypatch)
    config = AutoConfig.for_model("llama", num_hidden_layers=1).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCasualLM"]}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is not supported. Did you mean LlamaForCausalLM"):
        open_source(tmp_path)


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("apertus", num_hidden_layers=1).to_dict()
    config["architectures"] = ["ApertusForCausalLM"]
    for changes, message in (
        ({"architectures": ["AnyForCausalLM"]}, "has no causal language model AnyForCausalLM"),
        ({"architectures": ["ApertusModel"]}, "has no causal language model"),
        ({"model_type": "llama"}, "says model_type llama, and the class is of apertus"),
        ({"hidden_size": "wide"}, "its configuration is refused"),
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantized"),
        ({"max_position_embeddings": None}, "refused|names no longest sequence"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 1024"),
        ({"vocab_size": 1 << 70}, "vocab_size is 1180591620717411303.; at most"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_labels": 10**9}, "num_labels is 1000000000"),
        ({"vision_config": {"depth": 10**9}}, "depth is 1000000000; at most 1024"),
        ({"dtype": "int8"}, "dtype.*float16"),
        ({"dtype": 1.5}, "dtype.*float16"),
    ):
        with pytest.raises(ConfigError, match=message):
            probe(config | changes, tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    dims = config["hidden_size"] // config["num_attention_heads"] // 2
    rope |= {"short_factor": [1.0] * dims, "long_factor": [2.0] * dims}
    facts = probe(config | {"rope_parameters": rope, "max_position_embeddings": 512}, tmp_path)
    assert facts["context"] == 128
    assert "longrope depends on the longest sequence" in facts["notes"][0]


def test_settings_that_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "apertus", num_hidden_layers=1)
    config = seen(tmp_path).config
    notes = resolve(Config(device="cpu"), Machine(), config).notes
    assert any("ApertusForCausalLM: transformers' own module computes it" in note for note in notes)
    for changes in (
        {"quantization": "int8"},
        {"deterministic": True},
        {"enable_return_hidden_states": True},
    ):
        with pytest.raises(ConfigError, match="cannot be honoured by transformers' module"):
            resolve(Config(device="cpu", **changes), Machine(), config)
    check_generic(Config(kv_cache_dtype="fp8"), "cuda", False)
    with pytest.raises(ConfigError, match="on CPUs and NVIDIA GPUs, not with --device third"):
        check_generic(Config(), "third", False)
    with pytest.raises(ConfigError, match="--enable-torch-compile cannot be honoured with --tp"):
        check_generic(Config(enable_torch_compile=True, tp=2), "cpu", False)
    with pytest.raises(ConfigError, match="--torch-compile-max-bs needs --enable-torch-compile"):
        check_generic(Config(torch_compile_max_bs=8), "cpu", False)
    with pytest.raises(ConfigError, match="makes text and no vectors; --task generate"):
        resolve(Config(device="cpu"), Machine(), config, pooled=True)
    with pytest.raises(ConfigError, match="makes text and no vectors; leave --task out"):
        resolve(Config(device="cpu", task="embed"), Machine(), config, pooled=True)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "apertus", num_hidden_layers=1)
    path = tmp_path / "model.safetensors"
    whole, source = load_file(path), seen(tmp_path)
    norm = whole.pop("model.norm.weight")
    save_file(whole, path, {"format": "pt"})
    with pytest.raises(WeightError, match=r"1 missing: model\.norm\.weight"):
        load_model(source)
    save_file(whole | {"model.norm.weight": norm[1:].clone()}, path, {"format": "pt"})
    with pytest.raises(WeightError, match=r"model\.norm\.weight"):
        load_model(source)


@torch.no_grad()
def test_files_of_any_name_are_read(tmp_path: Path) -> None:
    """Pickled, in one file and in several without an index; read as those of native code are."""
    save_checkpoint(tmp_path / "whole", "olmo", num_hidden_layers=1)
    source = seen(tmp_path / "whole")
    expected = Eager(load_model(source)).prompt_logprobs(PROMPTS)
    tensors = sorted(load_file(source.files[0]).items())
    halves = dict(tensors[:5]), dict(tensors[5:])
    for i, (kind, save, suffix) in enumerate(
        (("pt", torch.save, "pth"), ("safetensors", save_file, "safetensors"))
    ):
        files = tuple(tmp_path / f"{i}-{j}.{suffix}" for j in range(2))
        for path, half in zip(files, halves):
            save(half, path)
        model = load_model(replace(source, kind=kind, files=files))  # type: ignore[arg-type]
        assert torch.equal(Eager(model).prompt_logprobs(PROMPTS), expected)
        with pytest.raises(WeightError, match="is in two of the files"):
            load_model(replace(source, kind=kind, files=(*files, files[0])))  # type: ignore[arg-type]
        files[1].write_bytes(files[1].read_bytes()[:-9])
        with pytest.raises(WeightError, match=re.escape(files[1].name)):
            load_model(replace(source, kind=kind, files=files))  # type: ignore[arg-type]


def test_tokens_that_depend_on_each_other_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "apertus", num_hidden_layers=1)
    model = load_model(seen(tmp_path))
    assert isinstance(model, Generic)
    norm = model.module.model.norm  # type: ignore[union-attr]
    for mixes in (lambda x: x + x.roll(1, 1), lambda x: x * torch.arange(x.shape[1])[:, None]):
        hook = norm.register_forward_hook(lambda _, given, out, mixes=mixes: mixes(out))
        with pytest.raises(ConfigError, match="depend on each other, or on their places"):
            model.check_rows()
        hook.remove()
    model.check_rows(model.of_rows())
    with pytest.raises(ConfigError, match="do not give what the whole does"):
        model.check_rows(2 * model.of_rows())


def test_places_that_begin_elsewhere_are_refused(tmp_path: Path) -> None:
    """RoBERTa numbers tokens from behind its padding token."""
    save_checkpoint(tmp_path, "roberta", is_decoder=True, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="numbers the tokens of a sequence otherwise than from 0"):
        load_model(seen(tmp_path))


LENT = {
    "iquestcoder": ("IQuestCoderForCausalLM", {"head_dim": 8}),
    "internlm3": ("InternLM3ForCausalLM", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "sarvam_mla": ("SarvamMLAForCausalLM", LATENT | ROUTED | {"num_experts": 8, "first_k_dense_replace": 1}),
}


@pytest.mark.parametrize("kind", LENT)
@torch.no_grad()
def test_kinds_that_another_class_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files name a class of the checkpoint's own code, which is not needed."""
    probing.fork_probes(monkeypatch)
    name, changes = LENT[kind]
    hf = save_checkpoint(tmp_path, kind, **changes)
    own = {"architectures": [name], "auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    source = seen(tmp_path, **own)
    model = load_model(source)
    assert isinstance(model, Generic)
    assert not model.spec.code
    found = Eager(model).prompt_logprobs(PROMPTS[2:])
    expected = hf(torch.tensor(PROMPTS[2:])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    found = open_source(tmp_path)  # saved by transformers, with the name of the class that computes it
    assert FACTS in found.config
    assert "would run another class" in found.config[FACTS]["notes"][0]
    with pytest.raises(ConfigError, match="has no causal language model OwnForCausalLM"):
        probe(
            source.config | {"architectures": ["OwnForCausalLM"], "model_type": "llama", "auto_map": None},
            tmp_path,
        )


CODE = """
from transformers import OlmoConfig, OlmoForCausalLM
class OwnConfig(OlmoConfig):
    model_type = "own"
class OwnForCausalLM(OlmoForCausalLM):
    config_class = OwnConfig
    def forward(self, *given, position_ids=None, logits_to_keep=0, **named):
        out = super().forward(*given, position_ids=position_ids, logits_to_keep=logits_to_keep, **named)
        out.logits = -out.logits
        return out
"""


@torch.no_grad()
def test_code_of_a_checkpoint_runs_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    hf = save_checkpoint(tmp_path, "olmo")
    source = files.open_source(tmp_path)
    config = source.config | {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    with pytest.raises(ConfigError, match="runs only with --trust-remote-code"):
        probe(config, tmp_path)
    with pytest.raises(ConfigError, match="does not lie beside its weights"):
        probe(config, tmp_path, trusted=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "modeling_own.py").write_text("raise SystemExit")
    for name in (f"{elsewhere}/modeling_own", "elsewhere/modeling_own", "../modeling_own"):
        code = {"AutoModelForCausalLM": f"{name}.OwnForCausalLM"}
        with pytest.raises(ConfigError, match="does not lie beside its weights"):
            probe(config | {"auto_map": code}, tmp_path, trusted=True)
    (tmp_path / "modeling_own.py").write_text(CODE)
    model = load_model(replace(source, config=config | {FACTS: probe(config, tmp_path, trusted=True)}))
    found = Eager(model).prompt_logprobs(PROMPTS[2:])
    expected = (-hf(torch.tensor(PROMPTS[2:])).logits[0]).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert read_decoder(config | {FACTS: {**probe(config, tmp_path, True)}}).layers == 3
