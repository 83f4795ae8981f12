"""What vLLM's, SGLang's, llama.cpp's, TGI's and LMDeploy's flags are here: another name of a setting, what is
always so, or refused with what to use instead. ``docs/flags.md`` is made of these tables (``flags_page.py``).

Read from the sources of SGLang 0.5.23 and vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple


class Alias(NamedTuple):
    """Takes a value, which the setting ``field`` gets;
    ``words`` are values that are written differently here. ``unit``: it takes so many bytes, not one.
    ``others``: why it takes no value but ``words``. ``several``: values may follow each other. ``beside``: by
    so much the setting's own flag says more where both are given."""

    field: str
    words: Mapping[str, Any] = MappingProxyType({})
    unit: int = 0
    others: str = ""
    several: bool = False
    beside: int = 0


class Switch(NamedTuple):
    """Takes no value: the setting ``field`` becomes ``value``; ``weak``: if no other flag says what."""

    field: str
    value: Any
    weak: bool = False


class Always(NamedTuple):
    """Asks for what is so in any case: as a switch, or with one of ``values``;
    others are refused with the same ``hint``."""

    hint: str
    values: tuple[str, ...] = ()


class Fields(NamedTuple):
    """Takes a JSON object, whose keys are other names of settings; a key of ``free`` may have any value, as
    ``hint`` explains. ``inner``: the key of another such object. ``bare``: what a value of the first key is
    where that one sets nothing, or what it lacks then."""

    keys: Mapping[str, Alias]
    free: tuple[str, ...]
    hint: str
    inner: tuple[str, Fields] | None = None  # type: ignore[misc]
    bare: Mapping[str, Switch | str] = MappingProxyType({})


class Word(NamedTuple):
    """A peer's word for ``value``; ``hint`` says what is different, if anything is."""

    value: Any
    hint: str = ""


OPEN = {"auto": None, "-1": None, "0": None}  # of a length that the model decides
ALL_TO_ALL = "tokens of --dp-attention reach experts as --moe-a2a-backend says: gather, alltoall or deepep"
DEEPEP = "DeepEP chooses its kernels and its buffers by itself; leave it out"
ONE_HOST = (
    "a model is split by --tp and --pp, over several hosts by --nnodes, --node-rank and --dist-init-addr, "
    "or by --executor ray"
)
OFF = Switch("prefix_cache", False)
ONLY_DRAWN = "a guess counts while it is the token that is drawn"
GRAPHS = "a GPU's steps run from CUDA graphs in any case, with the same answers, and a CPU has none"
HICACHE = "what a page holds lies together in the host's memory, and copies run beside steps"
SLEEPS = "every server can give memory back: POST /sleep"

LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # of llama.cpp
# Of vLLM: names that say of which model the layers are, and what looks texts up.
VLLM_METHODS = dict.fromkeys(
    ("qwen3_next_mtp", "qwen3_5_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "mimo_mtp", "mimo_v2_mtp"), "mtp"
) | dict.fromkeys(("ngram_gpu", "suffix"), "ngram")
NGRAM = dict.fromkeys(LOOKUPS, "ngram") | {"none": None}

FILES = "~/.cache/sgla/kv"  # where SGLang has /tmp/hicache, which any user of a host may make
# Connectors of vLLM's that keep prefixes for the server itself.
KEEPERS: dict[str, Switch | str] = {
    "LMCacheConnectorV1": Switch("kv_host_bytes", 5 << 30),  # LMCache's own
    "OffloadingConnector": "kv_connector_extra_config: cpu_bytes_to_use is missing",
    "SharedStorageConnector": "kv_connector_extra_config: shared_storage_path is missing",
    "SimpleCPUOffloadConnector": "kv_connector_extra_config: cpu_bytes_to_use is missing",
    "ExampleConnector": "kv_connector_extra_config: shared_storage_path is missing",
}

ALIASES: dict[str, Alias | Switch | Always | Fields] = {
    # the model
    "model-path": Alias("model"),
    "model-id": Alias("model"),
    "hf-repo": Alias("model"),
    "tokenizer-path": Alias("tokenizer"),
    "chat-template-file": Alias("chat_template"),
    "alias": Alias("served_model_name"),
    "json-model-override-args": Alias("hf_overrides"),
    "allowed-local-media-path": Alias("allowed_media_path", {"": None}),
    "limit-mm-data-per-request": Alias("limit_mm_per_prompt"),
    "mm-process-config": Alias("mm_processor_kwargs"),
    "media-url-max-file-size-mb": Alias("max_media_bytes", unit=1 << 20),
    "mm-processor-cache-gb": Alias("media_cache_bytes", unit=1 << 30),
    "max-model-len": Alias("context_length", OPEN),
    "ctx-size": Alias("context_length", OPEN),
    "session-len": Alias("context_length"),
    "convert": Alias("task", {"none": "auto"}),
    "runner": Alias("task"),
    "is-embedding": Switch("task", "embed"),
    "embedding": Switch("task", "embed"),
    "embeddings": Switch("task", "embed"),
    "rerank": Switch("task", "rerank"),
    "reranking": Switch("task", "rerank"),
    "enable-deterministic-inference": Switch("deterministic", True),
    "tokenizer-mode": Always("the tokenizer is the model's fast one", ("auto", "fast", "hf")),
    "config-format": Always("configurations are read in Hugging Face's format", ("auto", "hf")),
    "response-role": Always("answers have the role assistant", ("assistant",)),
    "chat-template-content-format": Always("the chat template tells how content is rendered", ("auto",)),
    "enable-reasoning": Always("reasoning is told apart wherever the chat template shows it"),
    "enable-auto-tool-choice": Always("tools may be called wherever the chat template shows them"),
    "use-tqdm-on-load": Always("loading shows its progress"),
    "jinja": Always("chat templates are rendered by jinja2"),
    # devices
    "tp-size": Alias("tp"),
    "tensor-parallel-size": Alias("tp"),
    "num-shard": Alias("tp"),
    "pp-size": Alias("pp"),
    "pipeline-parallel-size": Alias("pp"),
    "dp-size": Alias("dp"),
    "data-parallel-size": Alias("dp"),
    "router": Always("--dp has one in front of its servers"),
    "load-balance-method": Alias(
        "dp_policy",
        {"auto": "cache_aware", "shortest_queue": "least_load", "total_requests": "least_load"},
    ),
    "ep-size": Alias("ep"),
    "ep-num-redundant-experts": Alias("redundant_experts"),
    "all2all-backend": Alias("moe_a2a_backend"),
    "enable-eplb": Switch("rebalance_interval", 60.0, weak=True),
    "eplb-min-rebalancing-utilization-threshold": Alias("rebalance_below"),
    "num-redundant-experts": Alias("redundant_experts"),
    "enable-dp-attention": Switch("dp_attention", True),
    "enable-layernorm-sp": Switch("sequence_parallel", True),
    "enable-two-batch-overlap": Switch("two_batch_overlap", True),
    "enable-dbo": Switch("two_batch_overlap", True),
    "prefill-context-parallel-size": Alias("cp"),
    "attention-context-parallel-size": Alias("cp"),
    "attn-cp-size": Alias("cp"),
    "decode-context-parallel-size": Alias("dcp"),
    "dcp-size": Alias("dcp"),
    "expert-parallel-size": Alias("ep"),
    "master-addr": Alias("dist_init_addr"),
    "master-port": Always("the port is that of --dist-init-addr HOST:PORT, without one 29501", ("29501",)),
    "distributed-timeout-seconds": Alias("dist_timeout"),
    "headless": Always("nodes above 0 have no HTTP"),
    "distributed-executor-backend": Alias("executor", {"mp": "procs", "uni": "procs"}),
    "use-ray": Switch("executor", "ray"),
    "worker-use-ray": Switch("executor", "ray"),
    "enforce-eager": Always(GRAPHS),
    "disable-cuda-graph": Always(GRAPHS),
    "optimization-level": Always(GRAPHS, ("0", "1", "2", "3")),
    "max-seq-len-to-capture": Always(GRAPHS, ("8192",)),
    "flash-attn": Always("attention is fused; --attention-backend chooses its kernels", ("on", "auto", "1")),
    # memory
    "gpu-memory-utilization": Alias("memory_fraction"),
    "mem-fraction-static": Alias("memory_fraction"),
    "swa-full-tokens-ratio": Alias("window_ratio"),
    "cuda-memory-fraction": Alias("memory_fraction"),
    "kv-cache-memory-bytes": Alias("kv_cache_bytes"),
    "block-size": Alias("page_size"),
    "disaggregation-mode": Alias("role", {"null": "both"}),
    "encoder-only": Switch("role", "encode"),
    "disaggregation-bootstrap-port": Alias("kv_transfer_port"),
    "disaggregation-transfer-backend": Alias("kv_transfer_backend"),
    "disaggregation-enable-kv-checksum": Always("KV on its way has checksums"),
    "disaggregation-decode-enable-radix-cache": Always("decode servers have a prefix cache"),
    "swap-space": Always("requests that lose their KV cache are computed again", ("0", "0.0", "4", "4.0")),
    "kv-offloading-size": Alias("kv_host_bytes", {"0": None, "0.0": None}, 1 << 30),
    "hicache-size": Alias("kv_host_bytes", {"0": None}, 10**9),
    "enable-hierarchical-cache": Switch("kv_host_ratio", 2.0, weak=True),
    "enable-hicache": Switch("kv_host_ratio", 2.0, weak=True),
    "hicache-ratio": Alias("kv_host_ratio"),
    "hicache-io-backend": Always(HICACHE, ("kernel", "direct", "kernel_ascend")),
    "hicache-mem-layout": Always(
        HICACHE, ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")
    ),
    "enable-sleep-mode": Always(SLEEPS),
    "enable-memory-saver": Always(SLEEPS),
    "enable-cumem-allocator": Always(SLEEPS),
    "hicache-write-policy": Alias("kv_write_policy"),
    "hicache-storage-prefetch-policy": Always(
        "a request waits for its prefix as long as something of it comes; no answer depends on that",
        ("wait_complete", "best_effort", "timeout"),
    ),
    "hicache-storage-backend": Alias(
        "kv_store",
        {"file": FILES},
        others="--kv-store takes the address of a store: a folder or what fsspec knows (s3://...), "
        "nixl:///FOLDER, mooncake://MASTER:PORT or lm://HOST:PORT",
    ),
    "kv-offloading-backend": Always(
        "prefixes in the host's memory are this server's own; those in a server of LMCache are --kv-store "
        "lm://HOST:PORT",
        ("native",),
    ),
    "kv-transfer-config": Fields(
        {
            "kv_connector": Alias(
                "kv_transfer_backend",
                {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"} | dict.fromkeys(KEEPERS, "auto"),
            ),
            "kv_role": Alias("role", {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}),
            "kv_port": Alias("kv_transfer_port"),
        },
        ("engine_id", "kv_load_failure_policy"),
        "the decode server asks the one of --prefill-url; what does not come is computed; --kv-host-bytes, "
        "--kv-disk and --kv-store keep prefixes",
        (
            "kv_connector_extra_config",
            Fields(
                {
                    "cpu_bytes_to_use": Alias("kv_host_bytes"),
                    "shared_storage_path": Alias("kv_store"),
                    "lmcache.max_local_cpu_size": Alias("kv_host_bytes", unit=1 << 30),
                    "lmcache.remote_url": Alias("kv_store"),
                },
                ("block_size", "spec_name", "lmcache.chunk_size", "lmcache.remote_serde"),
                "memory is cpu_bytes_to_use, in bytes, a block is a page; --kv-disk and --kv-store keep more",
            ),
        ),
        KEEPERS,
    ),
    # scheduling and cache
    "max-num-seqs": Alias("max_running_requests"),
    "max-batch-size": Alias("max_running_requests"),
    "max-num-queued-reqs": Alias("max_queued_requests"),
    "max-num-batched-tokens": Alias("step_tokens"),
    "chunked-prefill-size": Alias("step_tokens"),
    "max-prefill-tokens": Alias("step_tokens"),
    "batch-size": Alias("step_tokens"),
    "speculative-config": Fields(
        {
            "method": Alias("speculative_algorithm", VLLM_METHODS),
            "model": Alias("speculative_model"),
            "quantization": Alias("speculative_quantization"),
            "num_speculative_tokens": Alias("speculative_num_draft_tokens"),
        },
        ("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"),
        "ngram looks up runs of 2 to 4 tokens, and what guesses is split as the model is",
    ),
    "lora-paths": Alias("lora_modules", several=True),
    "max-loras-per-batch": Alias("max_loras"),
    "max-loaded-loras": Alias("max_cpu_loras"),
    "lora-backend": Always("adapters have kernels of their own", ("csgmv", "triton", "torch_native")),
    "lora-eviction-policy": Always("the adapter that nobody has used for longest leaves its place", ("lru",)),
    "lora-dtype": Always("adapters are in --dtype", ("auto",)),
    "enable-lora-overlap-loading": Always("adapters are copied beside the steps"),
    "fully-sharded-loras": Always("ranks have a part of the adapters' wider matrices"),
    "speculative": Alias("speculative_algorithm"),
    "speculative-algo": Alias("speculative_algorithm"),
    "speculative-draft-model-path": Alias("speculative_model"),
    "speculative-draft-model-quantization": Alias("speculative_quantization"),
    "speculative-tokens": Alias("speculative_num_draft_tokens"),
    "speculative-num-steps": Alias("speculative_num_draft_tokens", beside=1),
    "num-speculative-tokens": Alias("speculative_num_draft_tokens"),
    "speculative-accept-threshold-single": Always(ONLY_DRAWN, ("1", "1.0")),
    "speculative-accept-threshold-acc": Always(ONLY_DRAWN, ("1", "1.0")),
    "model-draft": Alias("speculative_model"),
    "spec-type": Alias("speculative_algorithm", NGRAM),
    "draft": Alias("speculative_num_draft_tokens"),
    "draft-n": Alias("speculative_num_draft_tokens"),
    "draft-max": Alias("speculative_num_draft_tokens"),
    "schedule-policy": Alias("policy"),
    "scheduling-policy": Alias("policy"),
    "enable-priority-scheduling": Switch("policy", "priority"),
    "radix-eviction-policy": Alias("eviction"),
    "seed": Alias("random_seed"),
    "constrained-json-whitespace-pattern": Alias("json_whitespace"),
    "constrained-json-disable-any-whitespace": Always("constrained JSON has one form"),
    "enable-prefix-caching": Switch("prefix_cache", True),
    "no-enable-prefix-caching": OFF,
    "disable-radix-cache": OFF,
    "disable-overlap-schedule": Switch("depth", 1),
    "no-async-scheduling": Switch("depth", 1),
    "async-scheduling": Always("the next step is planned while one runs"),
    "enable-chunked-prefill": Always("long prompts are read in chunks of --step-tokens"),
    "enable-mixed-chunk": Always("prompts are read beside running answers"),
    "cont-batching": Always("requests are batched as they come"),
    "stream-interval": Always("each step's tokens are sent at once", ("1",)),
    "schedule-conservativeness": Always(
        "requests start when their prompts fit, and wait when memory runs out", ("1", "1.0")
    ),
    "num-continuous-decode-steps": Always("each step is planned anew", ("1",)),
    # sampling and output
    "generation-config": Alias("sampling_defaults"),
    "override-generation-config": Alias("preferred_sampling_params"),
    "grammar-backend": Always("llguidance compiles grammars", ("llguidance",)),
    "guided-decoding-backend": Always("llguidance compiles grammars", ("auto", "guidance")),
    "max-logprobs": Always("a token has 20 logprobs at most", ("20",)),
    "logprobs-mode": Always("logprobs are those of the model before sampling", ("raw_logprobs",)),
    "enable-cache-report": Always("usage counts cached tokens"),
    "enable-prompt-tokens-details": Always("usage counts cached tokens"),
    # the server
    "hostname": Alias("host"),
    "models-dir": Alias("models"),
    "sleep-idle-seconds": Alias("sleep_idle"),
    "server-name": Alias("host"),
    "server-port": Alias("port"),
    "ssl-key-file": Alias("ssl_keyfile"),
    "ssl-cert-file": Alias("ssl_certfile"),
    "shutdown-timeout": Alias("drain_timeout"),
    "sse-keep-alive-interval": Alias("sse_keepalive"),
    "enable-log-requests": Switch("log_requests", True),
    "no-enable-log-requests": Switch("log_requests", False),
    "disable-log-requests": Switch("log_requests", False),
    "disable-uvicorn-access-log": Switch("log_requests", False),
    "disable-log-stats": Switch("log_interval", 0.0),
    "enable-metrics": Always("/metrics is always there"),
    "metrics": Always("/metrics is always there"),
    "enable-streaming-session": Always("sessions may stream"),
    "enable-response-store": Always("responses are kept; --response-store says how many"),
    "enable-request-id-headers": Always("every answer has an x-request-id"),
    "enable-server-load-tracking": Always("/load is always there"),
    "enable-tokenizer-info-endpoint": Always("/tokenizer_info is always there"),
    "api-server-count": Always("one process serves HTTP", ("1",)),
    "tokenizer-worker-num": Always("one process tokenizes, in several threads", ("1",)),
    "root-path": Always("let the proxy take its prefix off the path", ("", "/")),
    "fastapi-root-path": Always("let the proxy take its prefix off the path", ("", "/")),
}

STORED = Word(None, "the checkpoint tells how it is quantized")
CHOSEN = Word("auto", "the kernels are this server's own, chosen for the device")
FP16 = Word("bfloat16", "float16 is not computed in; bfloat16 keeps 8 of its 11 bits, float32 all")
ONLY_E4M3 = "an 8-bit KV cache is e4m3: use fp8"
NO_METHOD = "of a checkpoint it is known without the flag; else use --quantization int8, int4 or fp8"
KERNELS = "--attention-backend auto chooses for the model and the device; leave it out"
LATENT = "latent attention has kernels of this server's own, chosen for the device; leave it out"
DUAL = "a context ends where dual chunk attention would begin (1M models of Qwen2.5); leave it out"
STATES = (
    "layers that keep states have kernels of their own, and others --attention-backend auto; leave it out"
)
STREAMED = "--load-format remote copies what lies in an object store; files of this disk need no flag"
KEPT = "--load-format remote copies what MODEL is the address of: redis://, s3://, gs://, http:// and others"
AMD = "AMD GPUs are not supported yet: --device cpu, without it"

BACKENDS: dict[str, Word | str] = {
    **dict.fromkeys(
        ("fa2", "fa3", "fa4", "flash_attn", "flash_attention", "flash-attn", "trtllm_mha"), CHOSEN
    ),
    **dict.fromkeys(("cpu_attn", "intel_amx"), CHOSEN),
    **dict.fromkeys(("torch_native", "torch_sdpa", "sdpa"), Word("torch")),
    "triton_attn": Word("triton"),
    **dict.fromkeys(("flash_attn_vllm_v1", "triton_attn_vllm_v1", "flashinfer_vllm_v1"), KERNELS),
    **dict.fromkeys(("xformers", "tree_attn"), KERNELS),
    "flex_attention": Word("flex"),
    **dict.fromkeys(("flashmla", "cutlass_mla", "trtllm_mla", "flashinfer_mla", "triton_mla"), LATENT),
    **dict.fromkeys(("dual_chunk", "dual_chunk_flash_attn"), DUAL),
    **dict.fromkeys(("aiter", "rocm_attn", "rocm_aiter_fa", "wave"), AMD),
    "nsa": CHOSEN,
    "hybrid_linear_attn": STATES,
    "ascend": "Ascend NPUs are not supported yet: --device cpu, without it",
    "intel_xpu": "Intel GPUs are not supported yet: --device cpu, without it",
}
# Values of settings that peers write differently, in small letters: our word, or what to do instead.
VALUES: dict[str, dict[str, Word | str]] = {
    "moe_a2a_backend": {
        **dict.fromkeys(("none", "naive", "allgather_reducescatter"), Word("gather")),
        **dict.fromkeys(("deepep_high_throughput", "deepep_low_latency", "deepep_v2"), Word("deepep")),
        **dict.fromkeys(("pplx", "mooncake", "mori", "nixl", "nixl_ep", "flashinfer"), ALL_TO_ALL),
        **dict.fromkeys(("flashinfer_all2allv", "flashinfer_nvlink_one_sided"), ALL_TO_ALL),
        **dict.fromkeys(("flashinfer_nvlink_two_sided", "mori_high_throughput"), ALL_TO_ALL),
        **dict.fromkeys(("mori_low_latency", "ascend_fuseep", "megamoe"), ALL_TO_ALL),
    },
    "dtype": {
        **dict.fromkeys(("half", "float16", "fp16"), FP16),
        "float": Word("float32"),
        "fp32": Word("float32"),
        "bf16": Word("bfloat16"),
    },
    "kv_cache_dtype": {
        "fp8_e4m3": Word("fp8"),
        "bfloat16": Word("auto", "the KV cache is in --dtype"),
        "bf16": Word("auto", "the KV cache is in --dtype"),
        "fp8_e5m2": ONLY_E4M3,
        "fp8_inc": ONLY_E4M3,
        **dict.fromkeys(("fp4_e2m1", "nvfp4"), "the KV cache is in --dtype, fp8, int8 or int4"),
    },
    "attention_backend": BACKENDS,
    "decode_attention_backend": BACKENDS,
    "prefill_attention_backend": BACKENDS,
    "quantization": {
        **dict.fromkeys(("gptq_marlin", "awq_marlin", "marlin", "compressed-tensors"), STORED),
        **dict.fromkeys(("modelopt", "modelopt_fp8", "fbgemm_fp8"), STORED),
        **dict.fromkeys(("modelopt_fp4", "petit_nvfp4", "hqq", "w4afp8"), STORED),
        **dict.fromkeys(("auto-round", "auto_round", "inc"), STORED),
        **dict.fromkeys(("modelopt_mxfp8", "modelopt_mixed"), STORED),
        **dict.fromkeys(
            ("fp8_per_tensor", "fp8_per_block"), Word("fp8", "weights have a scale for each row")
        ),
        **dict.fromkeys(("bitsandbytes", "nvfp4", "quark", "moe_wna16", "qoq"), NO_METHOD),
        **dict.fromkeys(("w8a8_fp8", "torchao", "experts_int8", "w8a8_int8"), NO_METHOD),
        **dict.fromkeys(("deepspeedfp", "ptpc_fp8", "aqlm"), NO_METHOD),
        **dict.fromkeys(("mxfp8", "online", "humming", "rtn", "modelslim", "quark_int4fp8_moe"), NO_METHOD),
    },
    "step_tokens": {
        "-1": "long prompts are always read in chunks; leave it out, or give their length in tokens"
    },
    "model_impl": {
        **dict.fromkeys(("vllm", "sglang"), Word("native")),
        "terratorch": "TerraTorch's models are not supported",
    },
    "load_format": {
        **dict.fromkeys(
            ("mistral", "bitsandbytes", "npcache", "sharded_state", "tensorizer"),
            "weights are safetensors, PyTorch's or GGUF files in Hugging Face's layout; leave it out",
        ),
        **dict.fromkeys(("runai_streamer", "runai_streamer_sharded"), STREAMED),
        **dict.fromkeys(("redis", "private"), KEPT),
        "remote_instance": Word("remote-instance"),
        "fastsafetensors": Word("safetensors", "files are read by several threads in any case"),
        "hf": Word("auto"),
    },
    "task": {"generation": Word("generate"), "embedding": Word("embed")},
}

# Flags of one hyphen, and what they are short for.
SHORT = {
    "-m": "--model",
    "-hf": "--hf-repo",
    "-a": "--alias",
    "-c": "--ctx-size",
    "-t": "--threads",
    "-np": "--parallel",
    "-b": "--batch-size",
    "-s": "--seed",
    "-fa": "--flash-attn",
    "-cb": "--cont-batching",
    "-ngl": "--n-gpu-layers",
    "-md": "--model-draft",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-ub": "--ubatch-size",
    "-n": "--predict",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}

# Patterns of names, and what to do instead. The first that fits counts.
REFUSED: list[tuple[str, str]] = [
    ("lora", "adapters are in PEFT's format: --lora-modules NAME=FOLDER"),
    (
        "*lora*",
        "there are --enable-lora, --lora-modules, --max-loras, --max-lora-rank, --max-cpu-loras, "
        "--lora-target-modules and --lora-folders; leave this out",
    ),
    (
        "speculative-ngram-*-bfs-breadth",
        "n-grams guess one text, and no tree of them; leave this out",
    ),
    (
        "speculative-* spec-* decoupled-spec-* model-draft draft* num-speculative-tokens "
        "num-lookahead-slots enable-multi-layer-eagle",
        "of speculative decoding there are --speculative-algorithm, --speculative-model, "
        "--speculative-quantization and --speculative-num-draft-tokens; leave this out",
    ),
    (
        "dllm-*",
        "how blocks come out of noise generation_config.json says, and --diffusion-config; leave this out",
    ),
    (
        "hicache-storage-*",
        "what a store is told stands in its address: --kv-store FOLDER, what fsspec knows, nixl:///FOLDER, "
        "mooncake://MASTER:PORT?segment=BYTES or lm://HOST:PORT; --kv-disk PATH:BYTES is for one server",
    ),
    (
        "*kv-transfer-config",
        "--role prefill and --role decode share prompts and answers out; --kv-host-bytes, --kv-disk and "
        "--kv-store keep prefixes",
    ),
    (
        "disaggregation-*",
        "of disaggregation there are --role, --prefill-url, --kv-transfer-port, --kv-transfer-secret, "
        "--kv-transfer-bytes and --kv-transfer-backend; leave this out",
    ),
    (
        "encoder-* ec-* language-only mm-encoder-only *-dispatch-to-encoder",
        "--role encode is a server that reads pictures, at --kv-transfer-port; others name it: --encode-url "
        "tcp://HOST:PORT, and load no tower then",
    ),
    (
        "*pdmux* sm-group-num num-reserved-decode-tokens "
        "optimistic-prefill-attempts enable-pd-role-switch tokens-only "
        "prefill-decode-interval* prefill-delayer-* enable-prefill-delayer prefill-schedule-interval",
        (
            "steps read prompts and generate; leave it out, "
            "--itl-target-ms bounds how long a prompt holds up answers"
        ),
    ),
    (
        "*lmcache*",
        "what LMCache keeps in the host's memory (max_local_cpu_size) is --kv-host-bytes, on a disk "
        "(local_disk) --kv-disk PATH:BYTES, in its server (remote_url) --kv-store lm://HOST:PORT",
    ),
    (
        "hicache-* radix-cache-backend *flexkv* "
        "*hisparse* hierarchical-sparse-* *external-linker* enable-linker-* kv-offloading-* kv-canary* "
        "enable-session-radix-cache",
        "--kv-host-bytes 64G keeps prefixes of a GPU in the host's memory, --kv-disk PATH:BYTES on a disk, "
        "--kv-store lm://HOST:PORT in a server of LMCache",
    ),
    (
        "mm-* *-mm-* *multimodal* media-* image-* *-image-* "
        "video-* asr-* *mmproj* language-model-only trust-mm-* interleave-mm-strings "
        "enable-precise-embedding-interpolation enable-prompt-embeds enable-mm-embeds",
        "prompts given as vectors are not supported, and pictures, sound and videos need no such flag; leave "
        "it out",
    ),
    (
        "max-total-tokens num-gpu-blocks-override max-num-queued-tokens",
        (
            "--kv-cache-bytes sizes the KV cache, --max-queued-requests the "
            "queue; 'sgla explain' shows the bytes of a token"
        ),
    ),
    (
        "kv-cache-dtype-skip-layers calculate-kv-scales prefill-kv-cache-dequant-dtype",
        "scales of an 8-bit KV cache are measured at the start: --kv-cache-dtype fp8 alone is enough",
    ),
    ("cache-type-k cache-type-v", "use --kv-cache-dtype int8 for an 8-bit KV cache"),
    (
        (
            "torchao-config modelopt-* quantize-and-serve rl-quant-profile quantization-config "
            "allow-deprecated-quantization"
        ),
        "use --quantization int8, int4 or fp8",
    ),
    (
        "multi-item-scoring-delimiter enable-mis",
        "no delimiter is needed: send several items to /v1/score, which scores each by itself",
    ),
    ("n-gpu-layers gpu-layers", "--device cuda puts the whole model on the GPU, --device cpu none of it"),
    (
        "*torch-compile*",
        "--enable-torch-compile compiles transformers' modules; leave it out",
    ),
    (
        "cuda-graph-* *-cuda-graph* *cudagraph* compilation-config performance-mode",
        "a GPU's steps run from CUDA graphs, made for --max-running-requests; leave it out",
    ),
    (
        "tbo-* dbo-* *single-batch-overlap",
        "with --two-batch-overlap steps of more than 2,048 tokens that read prompts are cut in the middle, "
        "inside of a request, too; others are one batch; leave it out",
    ),
    (
        "ubatch-size",
        "a step of --step-tokens at most is one batch, or two with --two-batch-overlap; leave it out",
    ),
    (
        "speculative-moe-a2a-backend",
        "what guesses has its experts whole on each rank; leave it out",
    ),
    ("*deepep*", DEEPEP),
    (
        "enable-expert-parallel",
        "experts are whole with --ep N, where N is that of --tp",
    ),
    (
        "moe-* *eplb* ep-* *expert* *-moe-* *megamoe* kt-* *waterfill fuseep-* dwdp-* enable-ep-*",
        "a mixture's experts are split by --tp, or shared out by --ep, and their kernels are chosen for the "
        "device; leave it out",
    ),
    (
        "*-all-reduce* *-allreduce* *mscclpp nccl-* *-nccl* *symm-mem enable-p2p-check",
        "GPUs add up through each other's memory where they reach it, and else by NCCL, which its own "
        "variables set (NCCL_...); MSCCL++ and RCCL are not supported; leave it out",
    ),
    (
        "data-parallel-* dp-* attn-* attention-context-* attention-data-* *-dp-* pp-* pipeline-* "
        "*-context-parallel-* dcp-* cp-* *-cp dist-* master-* *elastic* max-ep-size "
        "mooncake-* enable-attn-* *-attn-tp* enable-cp-* enable-dp-* gated-launch-port "
        "distributed-* cpu-distributed-* ray-* numa* device-ids base-gpu-id "
        "gpu-id-step headless tensor-split "
        "split-mode main-gpu enable-kv-cache-sharding enable-batch-sharded-sampling enable-tp-lm-head-* "
        "*layernorm-sp",
        f"{ONE_HOST}; CUDA_VISIBLE_DEVICES chooses them",
    ),
    (
        "temp top-k top-p min-p repeat-penalty predict",
        (
            "requests bring sampling fields; --preferred-sampling-params "
            "has the defaults of those that are left out"
        ),
    ),
    (
        "hf-chat-template-name completion-template enable-strict-thinking strip-thinking-cache "
        "exclude-tools-when-tool-choice-none reasoning-format reasoning-budget reasoning-config",
        (
            "--default-chat-template-kwargs and --chat-template are what the template is told; requests may "
            "carry chat_template_kwargs"
        ),
    ),
    ("tool-parser-plugin reasoning-parser-plugin", "name one of the parsers that --tool-call-parser lists"),
    (
        "model-class-overrides rope-* yarn-* hf-config-path model-config-parser pooler-config "
        "disable-sliding-window override-kv",
        "the configuration is the model's; --hf-overrides takes keys of config.json with other values",
    ),
    ("hf-token", "set HF_TOKEN in the environment, or run 'hf auth login'"),
    (
        "model-url hf-file",
        "name a hub id as MODEL, for a GGUF file with its quantization: ORGANISATION/NAME:Q4_K_M",
    ),
    (
        "grammar-file json-schema",
        "requests carry their grammar or schema: response_format, or structured_outputs",
    ),
    ("threads-batch", "--threads is for prompts and answers alike"),
    (
        "code-revision tokenizer-revision",
        "--revision is that of the model's files; --tokenizer may name a folder",
    ),
    ("weight-version", "POST /update_weights_from_disk names the version that answers tell of"),
    (
        "load-balance* model-loader-* weight-* *-weight-load* *weight-loader* safetensors-* pt-load-* "
        "ignore-patterns custom-weight-* remote-instance-* *checkpoint* *ckpt* decrypted-* modelexpress-* "
        "engine-info-* max-parallel-loading-workers mmap mlock model-checksum offload-* cpu-offload-* ple-*",
        "weights are files, read at the start; --load-format, --quantization and --cpu-offload-gb are what "
        "there is",
    ),
    ("*-cpu-backup sleep-on-idle enable-weights-*", SLEEPS),
    (
        "skip-tokenizer-init skip-server-warmup warmup* enable-tokenizer-batch-* disable-tokenizer-batch-* "
        "enable-dynamic-batch-tokenizer dynamic-batch-* tokenizer-pool-* tokenizer-backend "
        "detokenizer-worker-num renderer-*",
        "text is always tokenized here, and requests wait until the model is warm; leave it out",
    ),
    (
        "log-level-http uvicorn-* disable-uvicorn-* disable-access-log-* log-requests-* log-config-file "
        "max-log-len enable-log-* log-error-stack log-disable log-file verbose decode-log-interval "
        "aggregate-engine-logging show-time-cost enable-request-time-stats-logging gc-warning-* "
        "enable-logging-iteration-details",
        (
            "--log-level, --log-format, --log-requests and --log-interval "
            "are what there is; /metrics has statistics"
        ),
    ),
    (
        "enable-trace trace-modules collect-detailed-traces otlp-service-name",
        "--otlp-traces-endpoint is enough; OTEL_SERVICE_NAME names the service",
    ),
    (
        "*metrics* bucket-* *-buckets tokenizer-metrics-* load-snapshot-* load-publish-* stat-loggers "
        "show-hidden-metrics-* jit-monitor-* *nvtx* profiler-config slots props "
        "extra-metric-labels",
        "/metrics has them all; --metrics-compat shows them under SGLang's or vLLM's names",
    ),
    (
        (
            "soft-watchdog-timeout api-key-file ssl-keyfile-password "
            "ssl-cert-reqs ssl-ciphers enable-ssl-refresh"
        ),
        "see --watchdog-timeout, --ssl-certfile and SGLA_API_KEY in docs/operating.md",
    ),
    (
        "grpc grpc-mode grpc-http-sidecar-port grpc-response-timeout-secs grpc-worker-threads smg-grpc-mode",
        "gRPC is --grpc-port, beside HTTP",
    ),
    (
        "uds smg-* sidecar* *http2* middleware allow-credentials allowed-methods allowed-headers "
        "h11-* enable-http-worker-* disable-fastapi-docs enable-offline-docs api-prefix path webui timeout",
        "HTTP/1.1 on --host and --port is what there is; a proxy can do the rest",
    ),
    (
        "return-hidden-states-mode",
        (
            "--enable-return-hidden-states lets requests ask for those of "
            "all their tokens, behind the last layer"
        ),
    ),
    (
        "structured-outputs-config guided-decoding-*",
        "llguidance compiles the grammars that requests bring; there are --json-whitespace and "
        "--json-additional-properties; leave this out",
    ),
    (
        "enable-force-include-usage stream-response-default-include-usage return-tokens-as-token-ids "
        "return-input-ids return-output-ids incremental-streaming-output allow-auto-truncate "
        "enable-return-* return-* enable-custom-logit-processor aux-hidden-* constrained-json-* "
        "sampling-mask-* use-fp64-gumbel *watermark-* enable-watermark default-priority-value fingerprint-* "
        "cohere-* enable-per-request-*",
        "requests ask for it by a field, where it is supported; leave it out",
    ),
    (
        "schedule-low-priority-values-first *priority-* priority-* retraction-policy scheduler-* "
        "scheduling-* long-prefill-* disable-chunked-* enable-chunked-prefill prefill-max-requests "
        "min-free-slots-delay watermark max-num-scheduled-tokens enable-dynamic-chunking num-scheduler-steps",
        "--policy, --step-tokens and --max-running-requests are what the scheduler is told",
    ),
    (
        "radix-eviction-policy-config prefix-cach* *-prefix-cache disable-cascade-attn "
        "disable-chunked-prefix-cache prefix-match-unit enable-unified-memory enable-page-major-* c128-* "
        "swa-* *hybrid-swa* *hybrid-kv-* prefill-only-* kv-sharing-* keep cache-reuse slot-* "
        "file-storage-path kv-offload context-shift use-v2-block-manager",
        "--prefix-cache, --eviction and --page-size are what the KV cache is told",
    ),
    (
        (
            "*mamba* *replayssm* linear-attn-* linear-replay* gdn-* kda-* dsa-* dsv4-* *-dsa-* *deepseek* "
            "qsa-* *swa-bounded-replay *sconv"
        ),
        "layers that keep states, and sparse attention, have kernels of their own; --kv-cache-bytes holds "
        "states, too: leave it out",
    ),
    (
        "*-backend *-autotune* *-megakernel *-monokernel kernel-config attention-config additional-config "
        "ir-op-priority *flashinfer-* triton-attention-* enable-fused-* *-fusion* enable-fp32-lm-head "
        "enable-tf32-matmul enable-bf16x3-* *-gemm* enable-lean-attention rl-on-policy-target "
        "boundary-reduction enable-quant-* enable-flash-late-interaction threads-http",
        "kernels are chosen for the model and the device; --attention-backend is what there is to choose",
    ),
    (
        "debug-* *forward-hooks *dump-* msprobe-* *profile* worker-cls worker-extension-cls "
        "io-processor-plugin custom-sigquit-handler gc-threshold *fault-tolerance* fail-on-* "
        "enable-trace-replay batch-notify-size mlx-* export-metrics-* forward-pass-* context-bucket "
        "disable-outlines-disk-cache",
        "it belongs to that server's inside; leave it out",
    ),
]  # fmt: skip

# Commands of Ollama, vLLM, SGLang and llama.cpp.
COMMANDS = {
    "run": "chat",
    "ls": "list",
    "download": "pull",
    "delete": "rm",
    "show": "explain",
    "env": "doctor",
    "collect-env": "doctor",
    "check_env": "doctor",
    "start": "serve",
    "launch_server": "serve",
    "api_server": "serve",
    "server": "serve",
    "help": "--help",
    "version": "--version",
}

# Variables of the environment that peers read, and what to set instead. A * stands for the rest of the name.
VARIABLES = {
    "VLLM_API_KEY": "SGLA_API_KEY",
    "VLLM_USE_MODELSCOPE": "SGLA_MODEL_SOURCE=modelscope",
    "SGLANG_USE_MODELSCOPE": "SGLA_MODEL_SOURCE=modelscope",
    "LLAMA_API_KEY": "SGLA_API_KEY",
    "LLAMA_ARG_*": "SGLA_* (sgla serve --help)",
    "OLLAMA_HOST": "SGLA_HOST and SGLA_PORT",
    "OLLAMA_CONTEXT_LENGTH": "SGLA_CONTEXT_LENGTH",
    "OLLAMA_NUM_PARALLEL": "SGLA_MAX_RUNNING_REQUESTS",
    "OLLAMA_MODELS": "SGLA_DOWNLOAD_DIR",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "SGLA_KV_HOST_BYTES",
    "LMCACHE_LOCAL_DISK": "SGLA_KV_DISK=PATH:BYTES",
    "LMCACHE_REMOTE_URL": "SGLA_KV_STORE",
    "LMCACHE_CONFIG_FILE": "SGLA_KV_HOST_BYTES, SGLA_KV_DISK and SGLA_KV_STORE",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "SGLA_KV_STORE",
    "OLLAMA_ORIGINS": "SGLA_ALLOWED_ORIGINS",
}


# The same of routers' flags, for ``sgla route``.
REFUSED_BY_ROUTER = (
    (
        "pd-disaggregation prefill decode prefill-* decode-* bootstrap-* mini-lb vllm-pd-*",
        "give servers that answer as --worker; those of --role decode ask prefill servers themselves",
    ),
    (
        "cache-threshold balance-* eviction-interval* bucket-* assignment-* max-idle-secs block-size",
        "cache_aware weighs what is to be done, by --load-weight and --max-tree-size",
    ),
    ("routing-logic", "it is --policy"),
    ("session-key", "it is --session-header"),
    ("static-backends static-models backends", "it is --worker; models are found by themselves"),
    ("k8s-*", "pods are found by --service-discovery, --selector, --service-discovery-port and -namespace"),
    ("max-payload-size", "it is --max-body-bytes, in bytes or as 16M"),
    ("tls-* *-ca-cert* client-cert-*", "certificates are --ssl-certfile, --ssl-keyfile and --ssl-ca-certs"),
    (
        "disable-retries retry-* max-retries",
        "retries go to another worker at once: --retry-max-retries, 0 for none",
    ),
    (
        "disable-circuit-breaker cb-*",
        "a circuit breaker has --cb-failure-threshold and --cb-timeout-duration-secs",
    ),
    (
        "health-* worker-startup-* disable-health-check remove-unhealthy-*",
        "workers are looked at every --health-check-interval-secs, with --health-check-timeout-secs",
    ),
    (
        "max-concurrent-requests rate-limit-*",
        "limits are --worker-max-requests, and for each key --rpm-limit and --tpm-limit",
    ),
    ("prometheus-* otlp-* enable-trace", "metrics are at /metrics, on the router's own port"),
    ("log-dir log-json request-id-headers", "a request's id is X-Request-Id; the log goes to stderr"),
    (
        "model-path tokenizer-path chat-template tool-call-parser reasoning-parser backend history-* "
        "enable-igw dp-aware mcp-* oracle-* postgres-* redis-*",
        "requests pass unchanged, and nothing of them is kept; the workers do that",
    ),
)


def is_named(name: str, router: bool = False) -> bool:
    """Whether a flag is refused by its own name, not by a pattern."""
    return any(name in patterns.split() for patterns, _ in (REFUSED_BY_ROUTER if router else REFUSED))


def refusal(name: str, router: bool = False) -> str | None:
    """What to do instead of a peer's flag ``name`` (no hyphens before it;
    ``compilation-config.mode`` is ``compilation-config``)."""
    name = name.split(".")[0].removeprefix("no-") or name
    for patterns, hint in REFUSED_BY_ROUTER if router else REFUSED:
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return hint
    return None
