"""Settings from flags, the environment and files; and what other servers' flags are here: the one table of
them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_config import sample

from sgla.cli import args, flags_page
from sgla.cli.aliases import (
    ALIASES,
    COMMANDS,
    REFUSED,
    SHORT,
    VALUES,
    Alias,
    Always,
    Fields,
    Switch,
    Word,
    refusal,
)
from sgla.cli.args import parse
from sgla.cli.settings import kinds, load_config
from sgla.config import SECRETS, Config
from sgla.errors import ConfigError
from sgla.llm import translated

HERE = Path(__file__).parent
OWN = {name.replace("_", "-") for name in Config.__struct_fields__} | {"config"}
PEERS = {path.stem: path.read_text().split() for path in sorted((HERE / "peer_flags").glob("*.txt"))}
LISTS = [name for name in Config.__struct_fields__ if isinstance(getattr(Config(), name), list)]
# features.md of the project's beginnings, 2.3, and the peers' start commands.
NAMED = [
    "--model-path",
    "--tokenizer-path",
    "--tokenizer-mode",
    "--served-model-name",
    "--host",
    "--port",
    "--api-key",
    "--admin-api-key",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--fastapi-root-path",
    "--root-path",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--context-length",
    "--max-model-len",
    "--mem-fraction-static",
    "--gpu-memory-utilization",
    "--max-running-requests",
    "--max-num-seqs",
    "--max-queued-requests",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--max-total-tokens",
    "--num-gpu-blocks-override",
    "--kv-cache-memory-bytes",
    "--chunked-prefill-size",
    "--max-num-batched-tokens",
    "--max-prefill-tokens",
    "--schedule-policy",
    "--scheduling-policy",
    "--schedule-conservativeness",
    "--watermark",
    "--page-size",
    "--block-size",
    "--enable-mixed-chunk",
    "--disable-overlap-schedule",
    "--async-scheduling",
    "--disable-radix-cache",
    "--no-enable-prefix-caching",
    "--radix-eviction-policy",
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--sampling-backend",
    "--grammar-backend",
    "--structured-outputs-config",
    "--tp-size",
    "--tensor-parallel-size",
    "--pp-size",
    "--dp-size",
    "--ep-size",
    "--enable-expert-parallel",
    "--enable-dp-attention",
    "--moe-runner-backend",
    "--moe-a2a-backend",
    "--moe-backend",
    "--all2all-backend",
    "--enable-eplb",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--disable-cuda-graph",
    "--cuda-graph-max-bs",
    "--cuda-graph-bs",
    "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs-prefill",
    "--cuda-graph-bs-prefill",
    "--enforce-eager",
    "--compilation-config",
    "--cudagraph-capture-sizes",
    "--enable-torch-compile",
    "--torch-compile-max-bs",
    "--disable-custom-all-reduce",
    "--load-format",
    "--model-loader-extra-config",
    "--download-dir",
    "--revision",
    "--trust-remote-code",
    "--json-model-override-args",
    "--hf-overrides",
    "--model-impl",
    "--random-seed",
    "--seed",
    "--chat-template",
    "--default-chat-template-kwargs",
    "--tool-call-parser",
    "--reasoning-parser",
    "--enable-auto-tool-choice",
    "--sampling-defaults",
    "--generation-config",
    "--override-generation-config",
    "--preferred-sampling-params",
    "--enable-cache-report",
    "--enable-prompt-tokens-details",
    "--enable-lora",
    "--lora-paths",
    "--max-loras-per-batch",
    "--max-lora-rank",
    "--max-loaded-loras",
    "--lora-backend",
    "--lora-eviction-policy",
    "--lora-modules",
    "--max-loras",
    "--max-cpu-loras",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
    "--speculative-config",
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-write-policy",
    "--hicache-storage-backend",
    "--kv-offloading-size",
    "--kv-transfer-config",
    "--cpu-offload-gb",
    "--enable-metrics",
    "--log-level",
    "--log-requests",
    "--log-requests-level",
    "--crash-dump-folder",
    "--decode-log-interval",
    "--enable-log-requests",
    "--disable-log-stats",
    "--enable-trace",
    "--otlp-traces-endpoint",
    "--kv-events-config",
    "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold",
    "--retraction-policy",
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
    "--enable-deterministic-inference",
    "--enable-memory-saver",
    "--enable-sleep-mode",
    "--weight-version",
    "--stream-interval",
    "--incremental-streaming-output",
    "--watchdog-timeout",
    "--soft-watchdog-timeout",
    "--skip-server-warmup",
    "--warmups",
    "--is-embedding",
    "--runner",
    "--convert",
    "--enable-multimodal",
    "--limit-mm-data-per-request",
    "--limit-mm-per-prompt",
    "--allowed-media-domains",
    "--config",
    "--shutdown-timeout",
    "--sse-keep-alive-interval",
    "--uds",
    "--enable-request-id-headers",
    "--max-logprobs",
    "--return-tokens-as-token-ids",
    "--enable-force-include-usage",
    "--quantization-param-path",
    "--torchao-config",
    "--multi-item-scoring-delimiter",
    "-m",
    "-c",
    "-ngl",
    "-tp",
    "-pp",
    "-dp",
    "-q",
]


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """Parsers are made once for each command, which is most of what it takes to parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(args, "build", cache(args.build))
        yield


def flags_of(*argv: str) -> dict[str, Any]:
    return parse(["serve", *argv]).flags


def refused(*argv: str) -> str:
    """What the command line says of flags that it does not take."""
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
        parse(["serve", *argv])
    assert err.getvalue().count("\n") == 1
    return err.getvalue()


OBJECTS: dict[str, dict[str, Any]] = {
    "speculative-config": {
        **{"method": "draft_model", "model": "a/b", "quantization": "int8"},
        **{"num_speculative_tokens": 5, "prompt_lookup_max": 4},
    },
    "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_port": 7},
}


def words_of(name: str) -> list[str]:
    """A flag, its own or another server's, with a value that it takes."""
    alias = ALIASES.get(name)
    if isinstance(alias, Switch):
        return [f"--{name}"]
    if isinstance(alias, Always):
        return [f"--{name}", *alias.values[:1]]
    if isinstance(alias, Fields):
        return [f"--{name}", json.dumps(OBJECTS[name])]
    field = alias.field if alias else name.replace("-", "_")
    default = getattr(Config(), field)
    value = {
        "task": "embed",
        "executor": "ray",
        "policy": "lpm",
        "dp_policy": "least_load",
        "role": "prefill",
        "kv_transfer_backend": "tcp",
        "speculative_algorithm": "ngram",
        "speculative_quantization": "int8",
        "eviction": "lfu",
        "kv_write_policy": "write_through",
        "preferred_sampling_params": '{"top_k": 7}',
        "hf_overrides": '{"rope_theta": 50000}',
        "limit_mm_per_prompt": '{"image": 4}',
        "mm_processor_kwargs": '{"max_pixels": 4096}',
        "kv_events_config": '{"topic": "a"}',
        "moe_a2a_backend": "alltoall",
    }.get(field, "7")
    if alias and alias.others:
        value = next(iter(alias.words))
    return [f"--{name}", "0.5" if isinstance(default, float) else value]


@pytest.mark.parametrize("flag", NAMED)
def test_every_flag_of_the_peers_start_commands_is_decided(flag: str) -> None:
    """Honoured, an alias, or refused by name with what to use."""
    name = SHORT.get(flag, flag).removeprefix("--")
    if name in OWN:
        return
    if name not in ALIASES:
        assert f"{SHORT.get(flag, flag)} is not supported: {refusal(name)}" in refused(flag, "1")
        return
    alias, args = ALIASES[name], parse(["serve", *words_of(name)])
    if isinstance(alias, Always):
        assert args.flags == {}
        assert alias.hint in args.hints[0]
    else:
        settings = (
            [each.field for each in alias.keys.values()] if isinstance(alias, Fields) else [alias.field]
        )
        assert list(args.flags) == settings
        assert args.hints[0].startswith(f"--{name} is --")


@pytest.mark.parametrize("peer", PEERS)
def test_every_flag_of_the_peers_is_decided(peer: str) -> None:
    undecided = [
        name for name in PEERS[peer] if name not in OWN and name not in ALIASES and not refusal(name)
    ]
    assert undecided == []


def test_the_tables_hold_nothing_for_nobody() -> None:
    names = {name.removeprefix("no-") for found in PEERS.values() for name in found}
    patterns = [pattern for patterns, _ in REFUSED for pattern in patterns.split()]
    assert [one for one in patterns if not any(fnmatchcase(name, one) for name in names)] == []
    assert [name for name in ALIASES if name in OWN] == []
    assert [
        name
        for name in ALIASES
        if not isinstance(ALIASES[name], Always | Fields)
        and ALIASES[name].field not in Config.__struct_fields__  # type: ignore[union-attr]
    ] == []


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_are_keys_of_a_file_too(name: str, tmp_path: Path) -> None:
    words = words_of(name)
    file = tmp_path / "c.yaml"
    file.write_text(f"{name.replace('-', '_')}: {words[1] if len(words) > 1 else 'true'}\n")
    assert load_config({}, str(file), {}) == load_config(flags_of(*words), None, {})


def test_values_that_peers_write_differently() -> None:
    assert flags_of("--max-model-len", "auto") == {"context_length": None}
    assert flags_of("--max-model-len", "32K") == {"context_length": 32768}
    assert flags_of("--max-model-len=1.5k") == {"context_length": 1500}
    assert flags_of("--no-enable-prefix-caching", "--disable-overlap-schedule") == {
        "prefix_cache": False,
        "depth": 1,
    }
    assert flags_of("-m", "a.gguf", "-c", "0", "-tp", "2") == {
        "model": "a.gguf",
        "context_length": None,
        "tp": 2,
    }
    assert "--runner: 'pooling' is none of auto, generate, embed" in refused("--runner", "pooling")
    assert "1 is not supported: the port is that of --dist-init-addr" in refused("--master-port", "1")


@pytest.mark.parametrize(
    ("flag", "word", "value", "said"),
    [
        ("--dtype", "half", "bfloat16", "--dtype half is --dtype bfloat16 here: float16 is not computed in"),
        ("--dtype", "float16", "bfloat16", "--dtype float16 is --dtype bfloat16 here"),
        ("--dtype", "float", "float32", "--dtype float is --dtype float32 here"),
        ("--kv-cache-dtype", "fp8_e4m3", "fp8", "--kv-cache-dtype fp8_e4m3 is --kv-cache-dtype fp8 here"),
        ("--kv-cache-dtype", "fp8_e5m2", None, "fp8_e5m2 is not supported: an 8-bit KV cache is e4m3"),
        ("--attention-backend", "fa3", "auto", "the kernels are this server's own"),
        ("--attention-backend", "FLASH_ATTN", "auto", "the kernels are this server's own"),
        ("--attention-backend", "FLASHINFER", "flashinfer", ""),
        ("--attention-backend", "TRITON_ATTN", "triton", "is --attention-backend triton here"),
        ("--attention-backend", "FLEX_ATTENTION", "flex", "is --attention-backend flex here"),
        ("--decode-attention-backend", "torch_native", "torch", "is --decode-attention-backend torch here"),
        ("--attention-backend", "flashmla", None, "flashmla is not supported: latent attention has kernels"),
        ("--quantization", "gptq_marlin", "default", "as if it were left out here: the checkpoint tells"),
        ("--quantization", "modelopt", "default", "as if it were left out here: the checkpoint tells"),
        ("--quantization", "modelopt_fp4", "default", "as if it were left out here: the checkpoint tells"),
        ("--quantization", "fp8_per_block", "fp8", "weights have a scale for each row"),
        ("--quantization", "bitsandbytes", None, "bitsandbytes is not supported: of a checkpoint"),
        ("--load-format", "mistral", None, "mistral is not supported: weights are safetensors, PyTorch"),
        (
            "--load-format",
            "redis",
            None,
            "--load-format remote copies what MODEL is the address of: redis://",
        ),
        ("--chunked-prefill-size", "-1", None, "-1 is not supported: long prompts are always read in chunks"),
        ("--dtype", "nonsense", None, "invalid choice: 'nonsense' (choose from"),
    ],
)
def test_values_of_peers_are_understood_or_refused_by_name(
    flag: str, word: str, value: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    file = tmp_path / "c.yaml"
    file.write_text(f"{name}: {word}\n")
    if value is None:
        assert said in refused(flag, word)
        with pytest.raises(ConfigError, match="is none of" if word == "nonsense" else "is not supported"):
            load_config({}, str(file), {})
        return
    want = None if value == "default" else value
    args = parse(["serve", flag, word])
    assert args.flags == {name: want}
    assert said in "".join(args.hints)
    assert getattr(load_config({}, str(file), {}), name) == want
    assert getattr(load_config({}, None, {f"SGLA_{name.upper()}": word}), name) == want
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("flashmla", "latent attention has kernels of this server"),
        ("cutlass_mla", "latent attention has kernels of this server"),
        ("trtllm_mla", "latent attention has kernels of this server"),
        ("dual_chunk", "a context ends where dual chunk attention would begin"),
        ("aiter", "AMD GPUs are not supported yet"),
        ("wave", "AMD GPUs are not supported yet"),
        ("ascend", "Ascend NPUs are not supported yet"),
        ("intel_xpu", "Intel GPUs are not supported yet"),
    ],
)
def test_attention_that_is_not_there_is_refused_with_what_to_use(backend: str, said: str) -> None:
    for flag in ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"):
        assert f"{backend} is not supported: " in refused(flag, backend)
        assert said in refused(flag, backend)


def test_attention_of_other_names_runs() -> None:
    for name in ("fa3", "fa4", "trtllm_mha", "intel_amx"):
        args = parse(["serve", "--attention-backend", name])
        assert args.flags == {"attention_backend": "auto"}
        assert "the kernels are this server's own" in args.hints[0]


def test_what_is_there_without_a_flag_needs_none() -> None:
    """vLLM's and SGLang's commands for servers that sleep start one."""
    for flag in ("--enable-sleep-mode", "--enable-memory-saver"):
        args = parse(["serve", "a/b", flag])
        assert args.flags == {"model": "a/b"}
        assert "POST /sleep" in args.hints[0]


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--sampling-backend", "kernels are chosen"),
        ("--structured-outputs-config", "--json-whitespace"),
        ("--structured-outputs-config.backend", "--json-whitespace"),
        ("--hicache-storage-backend", "nixl:///FOLDER"),
        ("--hicache-storage-backend-extra-config", "mooncake://MASTER:PORT?segment=BYTES"),
        ("--kv-offloading-backend", "lm://HOST:PORT"),
        ("--encoder-urls", "--encode-url tcp://HOST:PORT"),
        ("--ec-transfer-config", "--role encode"),
        ("--lmcache-config-file", "--kv-disk PATH:BYTES"),
        ("--enable-lmcache", "--kv-store lm://HOST:PORT"),
        ("--mamba-ssm-dtype", "--kv-cache-bytes"),
        ("--linear-attn-backend", "kernels of their own"),
        ("--weight-version", "POST /update_weights_from_disk"),
        ("--enable-mscclpp", "MSCCL++ and RCCL are not supported"),
        ("--enable-expert-parallel", "--ep N"),
    ],
)
def test_refusals_say_what_to_use(flag: str, instead: str) -> None:
    assert instead in refused(flag, "x")


def test_debugging_what_is_compiled_is_refused() -> None:
    assert "compiles transformers' modules" in refused("--enable-torch-compile-debug-mode")


@pytest.mark.parametrize("name", VALUES)
def test_words_of_peers_stand_for_values_that_there_are(name: str) -> None:
    own = typing.get_args(kinds()[name])
    for word, here in VALUES[name].items():
        assert word == word.lower()
        assert word not in own
        if isinstance(here, Word):
            assert here.value is None or here.value in own


def test_levels_of_optimization_and_reasoning() -> None:
    for given in (["-O3"], ["-O", "3"], ["--enforce-eager"], ["--disable-cuda-graph"]):
        args = parse(["serve", "a/b", *given])
        assert args.flags == {"model": "a/b"}
        assert "run from CUDA graphs" in args.hints[0]
    assert "reasoning is told apart" in parse(["serve", "--enable-reasoning"]).hints[0]


def test_a_script_of_vllm_changes_one_import(caplog: pytest.LogCaptureFixture) -> None:
    """What vLLM's scripts give, its own defaults among them."""
    caplog.set_level("WARNING", "sgla.llm")  # other tests have let more through
    nothing = {
        "enforce_eager": False,
        "swap_space": 4,
        "cpu_offload_gb": 0,
        "trust_remote_code": False,
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "enable_lora": False,
        "enable_sleep_mode": False,
        "hf_overrides": {"rope_theta": 1e6},
        "allowed_local_media_path": "",
        "max_seq_len_to_capture": 8192,
        "disable_custom_all_reduce": False,
        "pipeline_parallel_size": 1,
        "quantization": None,
        "compilation_config": None,
    }
    assert translated(nothing) == {
        "cpu_offload_gb": 0,
        "trust_remote_code": False,
        "enable_lora": False,
        "hf_overrides": {"rope_theta": 1e6},
        "allowed_media_path": None,
        "pp": 1,
    }
    assert translated({"enforce_eager": True}) == {}
    assert "run from CUDA graphs" in caplog.text
    caplog.clear()
    assert translated({"dtype": "half", "gpu_memory_utilization": 0.9, "tensor_parallel_size": 2}) == {
        "dtype": "bfloat16",
        "memory_fraction": 0.9,
        "tp": 2,
    }
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "--dtype half is --dtype bfloat16 here"
    ]
    with pytest.raises(ConfigError, match=r"LLM\(lora_strict_loading=...\): not supported"):
        translated({"lora_strict_loading": True})


def test_speculation_as_vllm_and_llama_cpp_ask_for_it() -> None:
    ngram = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5}
    for given in (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2}'],
        ["-sc", '{"num_speculative_tokens": "5", "method": "ngram"}'],
        ["--spec-type", "ngram-mod", "--draft-max", "5"],
        ["--speculative-algorithm", "ngram", "--draft", "5"],
        ["--speculative", "ngram", "--speculative-tokens", "5"],
    ):
        assert flags_of(*given) == ngram
    assert flags_of("--spec-type", "none") == {"speculative_algorithm": None}
    hints = parse(["serve", "-sc", '{"method": "ngram", "prompt_lookup_max": 9}']).hints
    assert hints == [
        "--speculative-config is --speculative-algorithm ngram here; "
        "ngram looks up runs of 2 to 4 tokens, and what guesses is split as the model is"
    ]
    one = parse(["serve", "-sc", '{"model": "a/b", "num_speculative_tokens": 1}']).hints[0]
    assert "is --speculative-model a/b --speculative-num-draft-tokens 1 here" in one
    for given, told in (
        ('{"method": "ngram", "model_path": "a/b"}', "'model_path' is not supported"),
        ('{"method": "hydra", "num_speculative_tokens": 1}', "method: 'hydra' is none of ngram"),
        ('{"speculative_token_tree": "[(0,)]"}', "'speculative_token_tree' is not supported"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens: 'true' is no"),
        ('{"method": "ngram", "disable_by_batch_size": 4}', "'disable_by_batch_size' is not supported"),
        ("ngram", "is no JSON object"),
    ):
        assert told in refused("--speculative-config", given)
    model = {"speculative_model": "a/b", "speculative_num_draft_tokens": 3}
    for given in (
        ["--speculative-config", '{"model": "a/b", "num_speculative_tokens": 3}'],
        [
            "--speculative-draft-model-path",
            "a/b",
            "--speculative-num-steps",
            "3",
        ],
        ["-md", "a/b", "--speculative-tokens", "3"],
        # SGLang counts the last token of the text, too.
        ["-md", "a/b", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"],
        ["-md", "a/b", "--speculative-num-draft-tokens", "4", "--speculative-num-steps", "3"],
        ["-sc", '{"model": "a/b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'],
    ):
        assert flags_of(*given) == model
    with pytest.raises(ConfigError, match="the same setting with two values"):
        flags_of("--speculative-num-draft-tokens", "5", "--speculative-num-steps", "3")
    assert flags_of("-sc", '{"method": "suffix"}') == {"speculative_algorithm": "ngram"}
    assert flags_of("-sc", '{"method": "qwen3_next_mtp"}') == {"speculative_algorithm": "mtp"}
    assert flags_of("--speculative-accept-threshold-acc", "1.0") == {}
    assert "token that is drawn" in refused("--speculative-accept-threshold-single", "0.5")
    for given in ("--spec-type", "draft"), ("--draft-min", "1"):
        assert given[0] in refused(*given)
    assert flags_of("--speculative-eagle-topk", "2") == {"speculative_eagle_topk": 2}


def test_adapters_as_vllm_and_sglang_write_them() -> None:
    two = {"lora_modules": ["a=/x", "b=/y,z"]}
    objects = '{"name": "a", "path": "/x", "base_model_name": "m"}', '{"lora_name": "b", "lora_path": "/y,z"}'
    for flag in ("--lora-modules", "--lora-paths"):
        assert flags_of("--model", "m", flag, *objects) == two | {"model": "m"}
        assert flags_of("--model", "m", flag, f"[{', '.join(objects)}]") == two | {"model": "m"}
        assert flags_of("m", flag, "a=/x", "b=/y") == {"lora_modules": ["a=/x", "b=/y"], "model": "m"}
        assert "POST /load_lora_adapter pins" in refused(flag, '{"name": "a", "path": "/x", "pinned": true}')
        assert "an object has name and path" in refused(flag, '{"name": "a"}')
        assert "a JSON list of strings and objects and is none" in refused(flag, "[3]")


@pytest.mark.parametrize("flag", ["--ubatch-size", "-ub", "--detokenizer-worker-num"])
def test_a_flag_that_is_refused_by_name_is_no_slip_of_another(flag: str) -> None:
    text = refused(flag, "2")
    assert "is not supported: " in text
    assert "did you mean" not in text


def test_all_refused_flags_are_named_at_once() -> None:
    text = refused(
        "--speculative-attention-mode",
        "4",
        "--radix-cache-backend",
        "2",
        "a/b",
        "--hf-token=secret",
        "--prot",
        "1",
    )
    for part in (
        "--speculative-attention-mode is not",
        "--radix-cache-backend is not",
        "set HF_TOKEN",
        "did you mean --port?",
    ):
        assert part in text
    assert "secret" not in text
    assert "--compilation-config.mode is not supported: a GPU's steps" in refused(
        "--compilation-config.mode", "3"
    )


def test_two_names_of_a_setting_must_agree() -> None:
    assert flags_of("--tp", "2", "--tp", "4") == {"tp": 4}
    assert flags_of("--tp", "2", "--tp-size", "2") == {"tp": 2}
    assert flags_of("--pp-size", "2") == flags_of("-pp", "2") == {"pp": 2}
    assert flags_of("--ep-size", "2") == {"ep": 2}
    with pytest.raises(ConfigError, match="--tp-size and --tp are the same setting"):
        parse(["serve", "--tp-size", "4", "--tp", "2"])


# lists and MODEL


@pytest.mark.parametrize("name", LISTS)
def test_a_list_takes_no_model_away(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    assert flags_of(flag, "v=1", "a/b") == {"model": "a/b", name: ["v=1"]}
    assert flags_of(flag, "v=1", "a/b", "--port", "1") == {"model": "a/b", name: ["v=1"], "port": 1}
    assert flags_of("a/b", flag, "v=1", "w=2") == {"model": "a/b", name: ["v=1", "w=2"]}
    assert flags_of(flag, "v=1", "w=2", "--model", "a/b") == {"model": "a/b", name: ["v=1", "w=2"]}
    assert flags_of(flag, "v=1", flag, "w=2") == {name: ["v=1", "w=2"]}
    assert flags_of(flag, '["v=1", "w=2"]') == {name: ["v=1", "w=2"]}
    named = name == "models"  # whose words are no MODEL
    for words in (("v=1", "w=2"), ("v=1", "w=2", "a/b"), ("v=1", "a/b", flag, "w=2", "c/d"))[named:]:
        text = refused(flag, *words)
        assert f"is the last word behind {flag} the MODEL? Write MODEL before the flags" in text
        assert "w=2" not in text
    if named:
        assert flags_of(flag, "v=1", "w=2") == {name: ["v=1", "w=2"]}
    parted = ["v=1,w=2"] if name in SECRETS else ["v=1", "w=2"]
    assert flags_of(flag, "v=1,w=2", "a/b")[name] == parted


def test_models_with_names_are_several() -> None:
    assert flags_of("--model", "a=x", "--model", "b=org/y") == {"models": ["a=x", "b=org/y"]}
    assert flags_of("--model", "a=x") == {"model": "a=x"}
    assert flags_of("--model", "x", "--model", "b=y") == {"model": "b=y"}


def test_a_model_may_stand_behind_other_flags() -> None:
    assert flags_of("--port", "1", "a/b", "--tp", "2") == {"model": "a/b", "port": 1, "tp": 2}


# the environment


def test_flags_come_before_the_environment_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\ntp: 1\nthreads: 1\n")
    environ = {"SGLA_CONFIG": str(file), "SGLA_TP": "2", "SGLA_THREADS": "2"}
    config = load_config(flags_of("--threads", "3"), None, environ)
    assert (config.port, config.tp, config.threads) == (1, 2, 3)


@pytest.mark.parametrize("name", Config.__struct_fields__)
def test_every_setting_is_a_variable(name: str) -> None:
    default = getattr(Config(), name)
    if isinstance(default, bool):
        text, value = str(not default), not default
    elif isinstance(default, list):
        text, value = "a b" if name in SECRETS else "a, b", ["a", "b"]
    else:
        (text, *_), value = sample(name)
    assert getattr(load_config({}, None, {f"SGLA_{name.upper()}": text}), name) == value


def test_keys_are_not_lost_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config({}, None, {"SGLA_API_KEY": "geheim"}).api_key == ["geheim"]
    assert load_config({}, None, {"SGLA_TOKENIZER": ""}).tokenizer is None
    for empty in ("", " "):
        with pytest.raises(ConfigError, match="SGLA_API_KEY is empty"):
            load_config({}, None, {"SGLA_API_KEY": empty})
    load_config({}, None, {"SGLA_API_KEYS": "geheim", "VLLM_API_KEY": "geheim", "OLLAMA_HOST": "0.0.0.0"})
    said = capsys.readouterr().err
    assert "SGLA_API_KEYS is no setting and is ignored; did you mean SGLA_API_KEY?" in said
    assert "VLLM_API_KEY is not read; set SGLA_API_KEY" in said
    assert "OLLAMA_HOST is not read; set SGLA_HOST and SGLA_PORT" in said
    assert "geheim" not in said


def test_what_kubernetes_sets_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {
        "SGLA_PORT": "tcp://10.0.0.1:80",
        "SGLA_SERVICE_HOST": "10.0.0.1",
        "SGLA_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_config({}, None, environ).port == Config().port
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SGLA_PORT", "x", "SGLA_PORT: 'x' is no whole number"),
        ("SGLA_DTYPE", "fp8", "SGLA_DTYPE: 'fp8' is none of auto, float32, bfloat16"),
        ("SGLA_PREFIX_CACHE", "maybe", "'maybe' is neither true nor false"),
        ("SGLA_KV_CACHE_BYTES", "5X", "'5X' is no size"),
        ("SGLA_CONTEXT_LENGTH", "long", "'long' is no number of tokens"),
    ],
)
def test_mistakes_name_the_variable(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({}, None, {variable: text})


def test_the_page_is_what_the_tables_are() -> None:
    text = (HERE.parent / "docs" / "flags.md").read_text()
    assert text == flags_page.page(), "run: python -m sgla.cli.flags_page docs/flags.md"
    text = (HERE.parent / "docs" / "router.md").read_text()
    assert text == flags_page.with_route_table(text), "run: python -m sgla.cli.flags_page docs/router.md"


def test_the_page_for_those_who_come_says_what_the_tables_say() -> None:
    text = (HERE.parent / "docs" / "migrating.md").read_text()
    rows = [re.findall(r"`--([\w-]+)`", row) for row in re.findall(r"^\| `--.*\|$", text, re.M)]
    assert len(rows) > 10
    for *theirs, ours in rows:
        field = ours.removeprefix("no-").replace("-", "_")
        assert field in Config.__struct_fields__
        for name in theirs:
            alias = ALIASES.get(name)
            assert name == ours or (isinstance(alias, Alias | Switch) and alias.field == field), name


def test_commands_of_peers_are_named_as_ours() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
        parse(["fly"])
    ours = set(re.findall(r"[\w-]+", err.getvalue()))
    assert set(COMMANDS.values()) <= ours | {"--version"}
    assert not COMMANDS.keys() & ours


@pytest.mark.parametrize(
    ("flag", "value", "size"),
    [
        ("--kv-offloading-size", "1.5", 3 << 29),
        ("--hicache-size", "2", 2 * 10**9),
        ("--kv-offloading-size", "0", None),
    ],
)
def test_host_memory_of_peers_is_in_gigabytes(flag: str, value: str, size: int | None) -> None:
    assert parse(["serve", "demo", flag, value]).flags.get("kv_host_bytes") == size


LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
OFFLOADING = {"kv_connector": "OffloadingConnector"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hicache-storage-backend", "file"], {"kv_store": "~/.cache/sgla/kv"}),
        (LMCACHE, {"kv_host_bytes": 5 << 30}),
        (LMCACHE | {"kv_connector_extra_config": {}}, {"kv_host_bytes": 5 << 30}),
        (
            LMCACHE | {"kv_connector_extra_config": {"lmcache.remote_url": "lm://h:1"}},
            {"kv_store": "lm://h:1"},
        ),
        (
            LMCACHE
            | {"kv_connector_extra_config": {"lmcache.max_local_cpu_size": 2.5, "lmcache.chunk_size": 256}},
            {"kv_host_bytes": 5 << 29},
        ),
        (OFFLOADING | {"kv_connector_extra_config": {"cpu_bytes_to_use": 99}}, {"kv_host_bytes": 99}),
        (
            {
                "kv_connector": "SharedStorageConnector",
                "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv"},
            },
            {"kv_store": "/mnt/kv"},
        ),
    ],
)
def test_connectors_that_keep_prefixes_are_tiers(words: Any, expected: dict[str, Any]) -> None:
    words = words if isinstance(words, list) else ["--kv-transfer-config", json.dumps(words)]
    args = parse(["serve", "demo", *words])
    flags = args.flags
    for name, value in expected.items():
        assert f"--{name.replace('_', '-')} {value} " in args.hints[0]
    assert {name: value for name, value in flags.items() if name.startswith("kv_") and value != "auto"} == (
        expected
    )
    assert flags.get("role", "both") == "both"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OFFLOADING, "cpu_bytes_to_use is missing"),
        (OFFLOADING | {"kv_connector_extra_config": {"num_cpu_blocks": 9}}, "cpu_bytes_to_use, in bytes"),
        ({"kv_connector": "SharedStorageConnector"}, "shared_storage_path is missing"),
        (LMCACHE | {"kv_connector_extra_config": 3}, "kv_connector_extra_config is no object"),
        ({"kv_connector": "MultiConnector"}, "'MultiConnector' is none of auto, tcp"),
        ({"kv_connector": "P2pNcclConnector"}, ", nor of NixlConnector, MooncakeConnector, LMCacheConn"),
        ({"kv_connector": ["x"]}, "is none of auto, tcp"),
    ],
)
def test_what_connectors_lack_is_said(given: dict[str, Any], said: str) -> None:
    assert said in refused("--kv-transfer-config", json.dumps(given))


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_no_policy_of_prefetching_changes_answers(policy: str) -> None:
    args = parse(["serve", "demo", "--hicache-storage-prefetch-policy", policy])
    assert args.flags == {"model": "demo"}
    assert "waits for its prefix as long as something of it comes" in args.hints[0]
    assert "sometimes is not supported" in refused("--hicache-storage-prefetch-policy", "sometimes")


@pytest.mark.parametrize(
    ("words", "ratio", "size"),
    [
        (["--enable-hierarchical-cache"], 2.0, None),
        (["--enable-hicache"], 2.0, None),
        (["--enable-hierarchical-cache", "--hicache-ratio", "3.5"], 3.5, None),
        (["--hicache-ratio", "3.5", "--enable-hierarchical-cache"], 3.5, None),
        (
            ["--enable-hierarchical-cache", "--hicache-size", "30", "--hicache-io-backend", "direct"],
            2.0,
            30 * 10**9,
        ),
        (["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"], 2.0, None),
    ],
)
def test_a_hierarchical_cache_is_a_tier_in_the_hosts_memory(
    words: list[str], ratio: float, size: int | None
) -> None:
    flags = parse(["serve", "demo", *words]).flags
    assert (flags["kv_host_ratio"], flags.get("kv_host_bytes")) == (ratio, size)
