"""Settings: flags, files, presets, and what open values resolve to."""

from __future__ import annotations

import json
import math
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgla.actors.setup import make_limits
from sgla.cli.args import parse
from sgla.cli.explain import as_text
from sgla.cli.settings import load_config, parse_bytes
from sgla.cli.several import is_on_demand, models_of
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.device import PLATFORMS, Device, nvidia
from sgla.errors import ConfigError
from sgla.ledger import ledger
from sgla.messages import CacheGroup, Facts
from sgla.model.read import read_decoder
from sgla.model.sizes import offloaded
from sgla.observe.machine import Machine, detect
from sgla.resolve import GIB, MIB, RANGES, check, resolve
from sgla.sched.limits import LONGEST

PRESETS = sorted(Path(__file__).parent.parent.glob("configs/*.yaml"))
LAPTOP = Machine(
    cores=8,
    physical_cores=4,
    memory_total=16 * GIB,
    memory_available=8 * GIB,
    compiler="/usr/bin/c++",
    torch="2.13.0+cpu",
)
H200 = nvidia("NVIDIA H200", (9, 0), 132, 140 * GIB)
GPUS = Machine(gpus=(H200,) * 4, torch_cuda="13.0", memory_available=512 * GIB)
FACTS = Facts(
    groups=[CacheGroup(9)],
    page_size=4,
    slots=4,
    context_len=96,
    vocab_size=50,
    step_tokens=16,
    dtype="bfloat16",
    device="cuda",
)
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MINILM = {
    "architectures": ["BertModel"],
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}


def config_of(*argv: str) -> Config:
    args = parse(["serve", *argv])
    return load_config(args.flags, args.config)


def sample(name: str) -> tuple[list[str], Any]:
    """Words after the flag of field ``name``, and the value that they mean, unlike the default."""
    kind = typing.get_args(typing.get_type_hints(Config, include_extras=True)[name])[0]
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    kind = parts[0] if type(None) in typing.get_args(kind) else kind
    if kind is bool:
        return [], True
    if typing.get_origin(kind) is typing.Literal:
        choice = typing.get_args(kind)[-1]
        return [choice], choice
    if typing.get_origin(kind) is list:
        return ["a", "--" + name.replace("_", "-"), "b"], ["a", "b"]
    if typing.get_origin(kind) is dict:
        return ['{"top_k": 7}'], {"top_k": 7}
    return {int: (["7"], 7), float: (["7.5"], 7.5), str: (["text"], "text")}[kind]


def test_deterministic_refuses_what_it_cannot_have() -> None:
    gpus = Machine(gpus=(H200, H200), torch_cuda="13.0")
    for setting, value in (("tp", 2), ("quantization", "int8")):
        config = Config(deterministic=True, **{setting: value})
        with pytest.raises(ConfigError, match=setting):
            resolve(config, gpus)
    assert resolve(Config(deterministic=True, quantization="int8"), LAPTOP).config.deterministic
    with pytest.raises(ConfigError, match="native-kernels"):
        resolve(Config(deterministic=True, native_kernels=False), LAPTOP)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", "int4"),
        ("attention_backend", "triton"),
        ("decode_attention_backend", "native"),
        ("prefill_attention_backend", "flashinfer"),
    ],
)
def test_a_cpu_refuses_what_only_a_gpu_has(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value} needs a") as caught:
        resolve(Config(**{name: value}), LAPTOP)
    assert caught.value.param == name


def test_pages_of_8_bit_integers_hold_more_tokens() -> None:
    wide, narrow = (
        resolve(Config(kv_cache_dtype=each, kv_cache_bytes=17 << 20), LAPTOP, SMOLLM2).config.context_length
        for each in ("auto", "int8")
    )
    assert wide is not None
    assert narrow is not None
    assert round(narrow / wide, 2) == 1.88


def test_mxfp4_is_made_on_every_device_and_found_in_checkpoints() -> None:
    gpu = Machine(gpus=(H200,), torch_cuda="13.0")
    for machine in (LAPTOP, gpu):
        assert resolve(Config(quantization="mxfp4"), machine, SMOLLM2).config.quantization == "mxfp4"
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}
    stored = SMOLLM2 | {"quantization_config": method}
    assert resolve(Config(quantization="mxfp4"), gpu, stored).config.quantization is None


@pytest.mark.parametrize(
    "setting",
    [
        {"enable_return_hidden_states": True},
        {"deterministic": True},
        {"logits_processors": ["a:b"]},
        {"speculative_algorithm": "ngram"},
    ],
)
def test_what_a_step_does_not_give_is_refused(setting: dict[str, Any]) -> None:
    """To models that answer with vectors everywhere, and to those that make text where a device lacks it."""
    [name] = setting
    flag = f"--{name.replace('_', '-')}.* cannot be honoured"
    gpu = Machine(gpus=(H200,), torch_cuda="13.0")
    for machine in (LAPTOP, gpu):
        with pytest.raises(ConfigError, match=f"{flag} by a model that answers with vectors") as caught:
            resolve(Config(**setting), machine, SMOLLM2, pooled=True)
        assert caught.value.param == name
    assert getattr(resolve(Config(**setting), LAPTOP, SMOLLM2).config, name)
    if name in PLATFORMS["cuda"].lacks:
        with pytest.raises(ConfigError, match=f"{flag} by --device cuda"):
            resolve(Config(**setting), gpu, SMOLLM2)
    else:
        assert getattr(resolve(Config(**setting), gpu, SMOLLM2).config, name)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 cannot be honoured by an encoder"),
        ({"attention_backend": "triton"}, "--attention-backend triton cannot be honoured by an encoder"),
        ({"quantization": "fp8"}, "--quantization fp8 cannot be honoured for encoders on a GPU"),
        ({"quantization": "int8"}, "--quantization int8 cannot be honoured for encoders on a GPU"),
        ({"tp": 2}, "an encoder is not split over ranks; use --tp 1"),
    ],
)
def test_what_an_encoder_does_not_do_on_a_gpu(setting: dict[str, Any], message: str) -> None:
    gpu = Machine(gpus=(H200, H200), torch_cuda="13.0")
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Config(**setting), gpu, MINILM)
    assert caught.value.param == next(iter(setting))


def test_a_part_of_the_memory_is_a_gpus() -> None:
    gpu = Machine(gpus=(H200,), torch_cuda="13.0")
    assert resolve(Config(memory_fraction=0.5), gpu).config.memory_fraction == 0.5
    (note,) = [one for one in resolve(Config(memory_fraction=0.9), LAPTOP).notes if "--memory" in one]
    assert note.endswith("changes nothing here: --kv-cache-bytes sizes that of a CPU")
    found = resolve(Config(memory_fraction=0.9), gpu, MINILM)
    assert "changes nothing here: an encoder keeps no KV cache" in " ".join(found.notes)
    assert "--memory" not in " ".join(resolve(Config(memory_fraction=0.9), gpu).notes)


def test_variables_of_the_template_are_not_those_of_requests() -> None:
    check(Config(default_chat_template_kwargs={"enable_thinking": False}))
    with pytest.raises(ConfigError, match="cannot set messages, tools: requests do"):
        check(Config(default_chat_template_kwargs={"tools": [], "messages": []}))


@pytest.mark.parametrize("name", Config.__struct_fields__)
def test_every_field_is_a_flag(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    default = getattr(Config(), name)
    if isinstance(default, bool):
        assert getattr(config_of(flag), name) is True
        assert getattr(config_of(flag.replace("--", "--no-")), name) is False
        return
    words, value = sample(name)
    config = config_of(flag, *words)
    assert getattr(config, name) == value != default
    assert msgspec.structs.replace(config, **{name: default}) == Config()


def test_model_may_be_positional() -> None:
    assert config_of("a/b").model == config_of("a/b", "--model", "a/b").model == "a/b"
    with pytest.raises(ConfigError, match="two models"):
        config_of("a/b", "--model", "c/d")


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1234\nhost: 0.0.0.0\nkv_cache_bytes: 1.5G\nserved_model_name: [x]\n")
    config = config_of("--config", str(file), "--port", "5")
    assert (config.port, config.host, config.kv_cache_bytes) == (5, "0.0.0.0", 1536 * MIB)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("speculative-num-steps: 3\nspeculative_num_draft_tokens: 4", {"speculative_num_draft_tokens": 3}),
        ("speculative-num-draft-tokens: 4\nspeculative_num_steps: 3", {"speculative_num_draft_tokens": 3}),
        ("lora-modules: {name: a, path: /x}", {"lora_modules": ["a=/x"]}),
        ("state-path: ~/s", {"state_path": "/home/me/s"}),
        (
            "lora-folders: [~/a, /b]\nlora-modules: a=~/a",
            {"lora_folders": ["/home/me/a", "/b"], "lora_modules": ["a=/home/me/a"]},
        ),
        ("lora-modules: [{name: a, path: /x}, b=/y]", {"lora_modules": ["a=/x", "b=/y"]}),
        ("lora_paths: [a=/x, {lora_name: b, lora_path: /y}]", {"lora_modules": ["a=/x", "b=/y"]}),
    ],
)
def test_a_file_says_as_much_as_flags(
    text: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "c.yaml").write_text(text)
    config = config_of("--config", str(tmp_path / "c.yaml"))
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speculative-num-steps: 3\nspeculative-num-draft-tokens: 5", "which another key sets too"),
        ("prot: 1", r"c\.yaml: prot: unknown key; did you mean 'port'\?"),
        ("max_model_lem: 1", "unknown key; did you mean 'max_model_len'"),
        ("max-model-len: 1\ncontext_length: 2", "sets context_length, which another key sets too"),
        ("lora_strict_loading: true", "lora_strict_loading: not supported: there are --enable-lora"),
        ("port: many", r"c\.yaml: port: 'many' is no whole number"),
        ("dtype: float8", r"c\.yaml: dtype: 'float8' is none of auto"),
        ("tensor-parallel-size: true", "tensor-parallel-size: it takes a value"),
        ("kv_cache_bytes: 3 bananas", "kv_cache_bytes: '3 bananas' is no size"),
        ("port: 1\nhost: a\nport: 2", r"c\.yaml: port is given twice"),
        ("- port", "expected lines of 'key: value'"),
        ("port: [", "is not YAML"),
        ("port: " + "[" * 3000, "is not YAML: "),
        ("model: 2026-13-45", "is not YAML: month must be in 1"),
        ("port: !!int ''", "is not YAML: "),
        ("port: !!timestamp now", "is not YAML: "),
        ("port: !!bool maybe", "is not YAML: "),
        ("model: 2026-11-30", r"model: expected a text, .* quote it"),
        ("model-path: 2026-11-30", r"model-path: expected a text, .* quote it"),
        ("hf_overrides: {a: 2026-11-30}", r"hf_overrides: expected a text, .* quote it"),
        ("default_chat_template_kwargs: &a {b: *a}", "default_chat_template_kwargs: expected a text"),
        ("hicache-size: .inf", "hicache-size: 'Infinity' is no number"),
    ],
)
def test_mistakes_in_a_file_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config_of("--config", str(tmp_path / "c.yaml"))


def test_a_file_of_comments_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# port: 1\n")
    assert config_of("--config", str(tmp_path / "c.yaml")) == Config()


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        config_of("--config", "/no/such.yaml")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_presets_are_valid(path: Path) -> None:
    config = load_config({}, str(path))
    resolve(config, LAPTOP)
    assert config != Config()


def test_there_are_presets() -> None:
    assert {path.stem for path in PRESETS} >= {"cpu", "low-latency", "high-throughput"}


@given(st.integers(0, 2**50))
def test_plain_sizes(count: int) -> None:
    assert parse_bytes(str(count)) == count


@given(st.integers(0, 10**6), st.sampled_from("kKmMgGtT"), st.sampled_from(["", "B", "iB", "b"]))
def test_sizes_with_units(count: int, unit: str, suffix: str) -> None:
    assert parse_bytes(f"{count}{unit}{suffix}") == count * 1024 ** ("kmgt".index(unit.lower()) + 1)


@pytest.mark.parametrize("text", ["", "M", "-1", "1e3", "1 000", "5X", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


# resolve


def test_every_value_is_filled_and_has_a_reason() -> None:
    open_names = [
        "dtype",
        "device",
        "threads",
        "depth",
        "brief_depth",
        "max_running_requests",
        "step_tokens",
        "itl_target_ms",
    ]
    sizes = ["kv_cache_bytes", "context_length"]  # which the workers settle on a GPU
    for machine in (LAPTOP, Machine(), Machine(gpus=(H200,), torch_cuda="13.0")):
        resolved = resolve(Config(), machine, SMOLLM2)
        for name in [*open_names, *sizes]:
            known = name not in sizes or not machine.gpus
            assert (getattr(resolved.config, name) not in (None, "auto")) is known, name
            assert resolved.reasons[name] not in ("", "default", "given")
        assert set(resolved.reasons) == set(Config.__struct_fields__)
        check(resolved.config)


def test_given_values_stay() -> None:
    given_config = Config(
        dtype="float32",
        threads=3,
        depth=1,
        kv_cache_bytes=99,
        context_length=5,
        step_tokens=7,
        served_model_name=["m"],
    )
    resolved = resolve(given_config, LAPTOP, SMOLLM2)
    for name in (
        "dtype",
        "threads",
        "depth",
        "kv_cache_bytes",
        "context_length",
        "step_tokens",
        "served_model_name",
    ):
        assert getattr(resolved.config, name) == getattr(given_config, name)
        assert resolved.reasons[name] == "given"


@pytest.mark.parametrize("machine", [LAPTOP, GPUS])
def test_resolving_twice_changes_nothing(machine: Machine) -> None:
    once = resolve(Config(), machine, SMOLLM2).config
    assert resolve(once, machine, SMOLLM2).config == once


@pytest.mark.parametrize(
    ("machine", "changes", "depth", "brief"),
    [
        (LAPTOP, {}, 2, 2),
        (GPUS, {}, 2, 3),
        (GPUS, {"tp": 2}, 2, 3),
        (GPUS, {"depth": 2}, 2, 2),
        (GPUS, {"depth": 1}, 1, 1),
        (GPUS, {"depth": 2, "brief_depth": 3}, 2, 3),
        (GPUS, {"brief_depth": 2}, 2, 2),
        (GPUS, {"pp": 2}, 3, 3),
        (GPUS, {"pp": 4}, 5, 5),
        (GPUS, {"tp": 2, "dp_attention": True}, 2, 2),
    ],
)
def test_a_gpu_may_have_more_brief_steps_in_flight(
    machine: Machine, changes: dict[str, Any], depth: int, brief: int
) -> None:
    """In the scheduler that a system makes of what is resolved, and of what workers on GPUs say."""
    resolved, facts = resolve(Config(**changes), machine, SMOLLM2), msgspec.structs.replace(FACTS)
    facts.padded_drafts = resolved.config.speculative_adaptive
    limits = make_limits(resolve(resolved.config, machine, SMOLLM2).config, facts)
    assert (limits.depth, limits.brief_depth) == (depth, brief)
    assert resolved.reasons["brief_depth"] not in ("", "default")


@pytest.mark.parametrize(
    "changes",
    [
        {"brief_depth": 1},
        {"brief_depth": 4},
        {"pp": 2, "depth": 2, "brief_depth": 3},
        {"tp": 2, "dp_attention": True, "brief_depth": 3},
    ],
)
def test_brief_steps_in_flight_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Config(**changes), GPUS, SMOLLM2)
    assert caught.value.param == "brief_depth"


def test_threads_follow_cores_and_ranks() -> None:
    small = Machine(cores=2, physical_cores=1)
    assert resolve(Config(), small).config.threads == 2
    assert resolve(Config(tp=2), small).config.threads == 1
    assert resolve(Config(tp=4), small).config.threads == 1
    assert resolve(Config(), LAPTOP).config.threads == 4


def test_weights_on_the_host_are_for_models_of_text_on_gpus() -> None:
    gpu = Machine(gpus=(H200,), torch_cuda="13.0", memory_available=GIB)
    with pytest.raises(ConfigError, match="--cpu-offload-gb 2 cannot be honoured by --device cpu, whose"):
        resolve(Config(cpu_offload_gb=2), LAPTOP)
    with pytest.raises(ConfigError, match="cannot be honoured by a model that answers with vectors"):
        resolve(Config(cpu_offload_gb=2), gpu, MINILM)
    with pytest.raises(ConfigError, match="must be from 0 to 65536"):
        resolve(Config(cpu_offload_gb=-1), gpu)
    many = SMOLLM2 | {"num_hidden_layers": 600}
    with pytest.raises(ConfigError, match="needs 4050 MiB of the host's memory, and 1024 MiB are available"):
        resolve(Config(cpu_offload_gb=9), gpu, many)


@pytest.mark.parametrize("setting", [{"kv_host_bytes": 1 << 20}, {"kv_host_ratio": 2.0}])
def test_a_cpu_names_the_tiers_that_it_has(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="by --device cpu; use --kv-disk or --kv-store"):
        resolve(Config(**setting), LAPTOP)
    with pytest.raises(ConfigError, match="by a model that answers with vectors.*; leave it out"):
        resolve(Config(kv_disk="/tmp/kv:1M"), LAPTOP, MINILM)


def test_native_models_are_not_compiled() -> None:
    for changes in ({"enable_torch_compile": True}, {"torch_compile_max_bs": 8}):
        for model in (SMOLLM2, MINILM):
            with pytest.raises(ConfigError, match="kernels that are chosen for its layers, in which"):
                resolve(Config(**changes), LAPTOP, model)


def test_as_few_layers_as_hold_the_bytes_stay_on_the_host() -> None:
    spec = read_decoder(SMOLLM2)
    layer = 2 * (576 * 1536 * 3 + 576 * 64 * (9 + 9 + 3 + 3))
    assert offloaded(spec, "bfloat16", None, 1, 0) == ((), 0, 0)
    assert offloaded(spec, "bfloat16", None, 1, 1) == ((15,), layer, layer)
    assert offloaded(spec, "bfloat16", None, 1, 2.5 * layer) == ((5, 15, 25), 3 * layer, 2 * layer)
    assert offloaded(spec, "bfloat16", None, 1, 1e18).layers == tuple(range(30))
    gpu = Machine(gpus=(H200,), torch_cuda="13.0", memory_available=GIB)
    resolved = resolve(Config(cpu_offload_gb=0.01), gpu, SMOLLM2)
    rows = ledger(resolved.config, SMOLLM2)
    assert rows["weights_on_host"] == 2 * layer
    assert "on host    13.5 MiB  copied in every step: 0 ms by PCIe 5, 1 ms by PCIe 4" in as_text(
        resolved, rows, gpu, Defaults({}, {})
    )


def test_device_follows_gpu_and_torch_build() -> None:
    assert resolve(Config(), Machine(gpus=(H200,), torch_cuda="13.0")).config.device == "cuda"
    cpu_build = resolve(Config(), Machine(gpus=(H200,), torch="2.13.0+cpu"))
    assert cpu_build.config.device == "cpu"
    assert any("CUDA build" in note for note in cpu_build.notes)


def test_kv_cache_is_at_most_a_quarter_of_what_is_free() -> None:
    tight = Machine(memory_available=GIB)
    assert resolve(Config(), tight).config.kv_cache_bytes == GIB // 4
    assert resolve(Config(), LAPTOP).config.kv_cache_bytes == 512 * MIB


def test_context_is_bounded_by_the_model_and_by_the_cache() -> None:
    assert resolve(Config(), LAPTOP, SMOLLM2).config.context_length == 8192
    per_token = 2 * 30 * 3 * 64 * 2
    cut = resolve(Config(kv_cache_bytes=100 * per_token), LAPTOP, SMOLLM2)
    assert cut.config.context_length == 100
    said = "context cut from 8192 to 100 tokens, what the KV cache holds; --kv-cache-bytes gives more"
    assert said in cut.notes
    assert said not in resolve(Config(), LAPTOP, SMOLLM2).notes
    assert resolve(Config(), LAPTOP).config.context_length is None
    endless = SMOLLM2 | {"max_position_embeddings": 10 << 20}
    found = resolve(Config(kv_cache_bytes=100 * GIB), LAPTOP, endless)
    assert (found.config.context_length, found.reasons["context_length"]) == (
        LONGEST,
        "the longest there can be",
    )
    with pytest.raises(ConfigError, match="--context-length must be from 1 to 1048576"):
        resolve(Config(context_length=LONGEST + 1), LAPTOP, endless)


def test_ledger_of_a_known_model() -> None:
    rows = ledger(resolve(Config(), LAPTOP, SMOLLM2).config, SMOLLM2)
    assert rows["kv_bytes_per_token"] == 23040
    assert rows["kv_tokens"] * 23040 <= rows["kv_cache"] < (rows["kv_tokens"] + 16) * 23040
    matrices = 49152 * 576 + 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert rows["weights"] == 2 * matrices
    assert (
        ledger(resolve(Config(quantization="int4"), LAPTOP, SMOLLM2).config, SMOLLM2)["weights"]
        < rows["weights"] / 2
    )


def test_missing_compiler_is_noted() -> None:
    assert any("compiler" in note for note in resolve(Config(), Machine(cores=2)).notes)
    assert not resolve(Config(native_kernels=False), Machine(cores=2)).notes
    assert not resolve(Config(), Machine(cores=2, kernels="native CPU kernels (avx2) found")).notes


def test_torch_computes_with_weights_that_are_decoded_once() -> None:
    """Without kernels, every step would decode what a file has in few bits."""
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    model = SMOLLM2 | {"quantization_config": packed}
    bare = msgspec.structs.replace(LAPTOP, compiler=None)
    small = msgspec.structs.replace(bare, memory_available=1 << 28)
    for config, machine, kept in (
        (Config(), LAPTOP, "gptq"),
        (Config(), bare, None),
        (Config(native_kernels=False), LAPTOP, None),
        (Config(), small, "gptq"),
        (Config(quantization="gptq"), bare, "gptq"),
    ):
        assert resolve(config, machine, model).config.quantization == kept
    reason = "weights in float32, since torch computes"
    assert resolve(Config(), bare, model).reasons["quantization"] == reason


def test_torch_computes_in_float32_where_there_is_room() -> None:
    bare = msgspec.structs.replace(LAPTOP, compiler=None)
    tiles = msgspec.structs.replace(bare, flags=frozenset(["amx_bf16"]))
    small = msgspec.structs.replace(bare, memory_available=1 << 29)
    for config, machine, model, dtype in (
        (Config(), bare, SMOLLM2, "float32"),
        (Config(native_kernels=False), LAPTOP, SMOLLM2, "float32"),
        (Config(), LAPTOP, SMOLLM2, "bfloat16"),
        (Config(), bare, None, "float32"),
        (Config(), small, SMOLLM2, "bfloat16"),
        (Config(), tiles, SMOLLM2, "bfloat16"),
        (Config(quantization="int8"), bare, SMOLLM2, "bfloat16"),
        (Config(dtype="bfloat16"), bare, SMOLLM2, "bfloat16"),
    ):
        assert resolve(config, machine, model).config.dtype == dtype


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [-1, -math.inf, math.nan, math.inf])
def test_numbers_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        check(msgspec.structs.replace(Config(), **{name: value}))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(gpus=(H200,), torch="2.13.0+cpu"), r"2\.13\.0\+cpu is a CPU build"),
        (Machine(torch="2.13.0+cpu"), "CPU build"),
        (Machine(torch="2.13.0", torch_cuda="13.0"), "no NVIDIA GPU"),
    ],
)
def test_a_gpu_that_is_not_there(machine: Machine, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Config(device="cuda"), machine)
    assert caught.value.param == "device"


def test_what_is_given_for_a_gpu_stays() -> None:
    resolved = resolve(
        Config(kv_cache_bytes=7 * GIB, context_length=100), Machine(gpus=(H200,), torch_cuda="13.0"), SMOLLM2
    )
    assert (resolved.config.kv_cache_bytes, resolved.config.context_length) == (7 * GIB, 100)
    assert resolved.reasons["kv_cache_bytes"] == resolved.reasons["context_length"] == "given"
    assert ledger(resolved.config, SMOLLM2)["kv_cache"] == 7 * GIB


def test_explain_leaves_the_rest_of_a_gpu_to_the_kv_cache() -> None:
    machine = Machine(gpus=(H200,), torch_cuda="13.0")
    resolved = resolve(Config(), machine, SMOLLM2)
    rows = ledger(resolved.config, SMOLLM2)
    assert rows.keys() == {"weights", "kv_bytes_per_token"}
    assert re.search(
        r"KV cache +the rest .* 23040 bytes\nGPUs +\d+", as_text(resolved, rows, machine, Defaults())
    )


@pytest.mark.parametrize(
    ("model", "memory", "settings", "rows"),
    [
        ("qwen3-8b", 140, {}, 512),
        ("qwen3-8b", 80, {}, 256),
        ("qwen3-8b", 80, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, 512),
        ("qwen3-8b", 140, {"kv_cache_bytes": 8 * GIB}, 256),
        ("qwen3-8b", 140, {"memory_fraction": 0.5}, 256),
        ("qwen3-8b", 140, {"max_running_requests": 300}, 300),
        ("qwen3-8b", 140, {"tp": 2}, 256),
        ("qwen3-8b", 140, {"speculative_algorithm": "ngram"}, 256),
        ("qwen3-8b", 140, {"enable_lora": True}, 256),
        ("qwen3-30b-a3b", 140, {}, 512),
        ("qwen3.6-35b-a3b", 140, {}, 256),
    ],
)
def test_as_many_requests_run_on_a_gpu_as_there_is_room_for(
    model: str, memory: int, settings: dict[str, Any], rows: int
) -> None:
    shape = json.loads((Path(__file__).parents[1] / f"bench/models/{model}/config.json").read_text())
    gpu = nvidia("NVIDIA H200", (9, 0), 132, memory * GIB)
    found = resolve(Config(**settings), Machine(gpus=(gpu, gpu), torch_cuda="13.0"), shape)
    assert found.config.max_running_requests == rows


@pytest.mark.parametrize(
    ("changes", "gpu", "config", "message", "param"),
    [
        (
            {},
            nvidia("Tesla T4", (7, 5), 40, 16 * GIB),
            {},
            "Tesla T4 has compute capability 7.5.*--device cpu",
            "device",
        ),
        (
            {},
            nvidia("NVIDIA A100", (8, 0), 108, 80 * GIB),
            {"quantization": "fp8"},
            "no 8-bit floating point",
            "quantization",
        ),
    ],
)
def test_what_a_gpu_cannot_run_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], gpu: Device, config: dict[str, Any], message: str, param: str
) -> None:
    machine = Machine(gpus=(gpu,), torch_cuda="13.0")
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Config(**config), machine, SMOLLM2 | changes)
    assert caught.value.param == param
    assert resolve(Config(device="cpu"), machine, SMOLLM2 | changes).config.device == "cpu"


def test_models_for_vectors_run_on_the_gpu() -> None:
    machine = Machine(gpus=(H200,), torch_cuda="13.0")
    for model, pooled in ((SMOLLM2, True), (MINILM, False)):
        found = resolve(Config(), machine, model, pooled=pooled).config
        assert (found.device, found.dtype) == ("cuda", "bfloat16")
        assert resolve(Config(dtype="float32"), machine, model, pooled).config.dtype == "float32"
        assert resolve(Config(device="cpu"), machine, model, pooled).config.device == "cpu"
    assert resolve(Config(), LAPTOP, MINILM).config.dtype == "float32"


def test_a_build_of_torch_for_rocm() -> None:
    machine = Machine(torch="2.9.0+rocm6.4", torch_hip="6.4")
    assert resolve(Config(), machine).config.device == "cpu"
    assert "ROCm" in resolve(Config(), machine).reasons["device"]
    with pytest.raises(
        ConfigError, match="ROCm build, and AMD GPUs are not supported yet; give --device cpu"
    ):
        resolve(Config(device="cuda"), machine)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_float16_is_not_rounded_without_a_word(key: str) -> None:
    model = SMOLLM2 | {key: "float16"}
    (note,) = [note for note in resolve(Config(), LAPTOP, model).notes if "float16" in note]
    assert "computed in bfloat16" in note
    assert not any("float16" in note for note in resolve(Config(dtype="float32"), LAPTOP, model).notes)


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        resolve(Config(tp=2), Machine(gpus=(H200,), torch_cuda="13.0"))


def test_this_machine_is_plausible() -> None:
    machine = detect()
    assert 1 <= machine.physical_cores <= machine.cores
    assert 0 < machine.memory_available <= machine.memory_total
    assert machine.torch


def test_each_of_several_models_has_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("chat:\n  model: demo\n  kv-cache-bytes: 2M\nembed: minilm\n")
    chat, embed = models_of(Config(models=[str(file)], threads=2, demo="packaged"))
    assert (chat.model, chat.served_model_name, chat.kv_cache_bytes) == ("demo", ["chat"], 2 << 20)
    assert (embed.model, embed.served_model_name, embed.kv_cache_bytes) == ("minilm", ["embed"], None)
    assert (chat.threads, embed.threads) == (2, 2)
    assert not is_on_demand(Config(models=[str(file)]))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    (tmp_path / "b.gguf").touch()
    found = Config(models=[str(tmp_path)])
    assert is_on_demand(found)
    assert [model.served_model_name for model in models_of(found)] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("lines", "settings", "param"),
    [
        ("a: minilm", {"model": "org/b"}, "model"),
        ("a: minilm", {"tp": 2}, "tp"),
        ("a: minilm", {"role": "prefill"}, "role"),
        ("a: minilm", {"served_model_name": ["x"]}, "served_model_name"),
        ("a: minilm\nb: minilm", {"kv_disk": "/x:1M"}, "kv_disk"),
        ("a: {model: minilm, port: 1}", {}, "port"),
        ("a: {model: minilm, speed: 1}", {}, "speed"),
        ("a: {threads: 1}", {}, "models"),
        ("a: minilm\na: minilm", {}, "models"),
        ("a: {model: minilm, served-model-name: x}\nx: minilm", {}, "served_model_name"),
    ],
)
def test_what_several_models_cannot_have_is_refused_by_name(
    lines: str, settings: dict[str, Any], param: str, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(lines)
    with pytest.raises(ConfigError) as caught:
        models_of(Config(models=[str(file)], **settings))
    assert caught.value.param == param


def test_folders_of_one_of_several_models_may_be_below_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "m.yaml").write_text("one: {model: a/b, lora_modules: [x=~/x]}")
    (one,) = models_of(config_of("--models", str(tmp_path / "m.yaml")))
    assert one.lora_modules == ["x=/home/me/x"]


def test_several_models_are_for_servers() -> None:
    with pytest.raises(ConfigError, match="are for sgla serve"):
        resolve(Config(models=["a=minilm"]), LAPTOP)
