"""User settings. ``None`` means: resolve it (sgla/resolve.py) and say why.

One field is one flag (``step_tokens`` -> ``--step-tokens``), one variable (``SGLA_STEP_TOKENS``) and one key
of a ``--config`` file. Names that users of other servers type are in ``cli/aliases.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Doc = msgspec.Meta

SECRETS = ("api_key", "admin_api_key", "kv_transfer_secret", "dist_secret")  # settings that are never shown
# With a label of ``tool_server``: the variable that has the bearer token for that MCP server.
TOOL_TOKEN = "SGLA_TOOL_TOKEN_"


class ModelSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights, tokenizer and templates are read."""

    model: Annotated[
        str,
        Doc(
            description="hub id (of GGUF files with ':Q4_K_M'), local folder, .gguf file, or a packaged "
            "model: demo (SmolLM2-135M-Instruct), minilm (all-MiniLM-L6-v2, for vectors), gemma3-270m (Gemma "
            "3 270M, under the terms of ai.google.dev/gemma/terms)"
        ),
    ] = "demo"
    demo: Annotated[
        Literal["auto", "packaged", "hub"],
        Doc(
            description="which model demo is in sgla serve, chat and explain: that of the package index, one "
            "of the model hub, which knows more, or (auto) the one on this disk, else the hub's if it answers"
        ),
    ] = "auto"
    served_model_name: Annotated[
        list[str], Doc(description="names clients may use; the first one is shown")
    ] = []
    tokenizer: Annotated[
        str | None, Doc(description="folder or hub id of the tokenizer, if not the model's")
    ] = None
    chat_template: Annotated[
        str | None, Doc(description="file with a Jinja chat template, if not the model's")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Doc(
            description="variables of the chat template where requests do not set them, such as "
            "'{\"enable_thinking\": false}'"
        ),
    ] = {}
    trust_request_chat_template: Annotated[
        bool, Doc(description="let requests bring chat templates, which may keep the server busy for ever")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Doc(description="format of the model's tool calls, if its template does not tell; or none"),
    ] = None
    reasoning_parser: Annotated[
        str | None, Doc(description="format of the model's reasoning, if its template does not tell; or none")
    ] = None
    json_whitespace: Annotated[
        str,
        Doc(
            description="space in constrained JSON: compact (one behind each comma and colon: "
            '{"a": 1, "b": 2}), free, or a regular expression for what may stand between its parts; '
            "requests may ask for another"
        ),
    ] = "compact"
    json_additional_properties: Annotated[
        bool,
        Doc(
            description="read schemas as JSON Schema does: objects may have other properties than those that "
            "are declared, and a schema without type allows all types"
        ),
    ] = False
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Doc(
            description="what computes the model: this server's own code, or transformers' module with this "
            "server's pages, which is slower; auto = transformers for architectures, and values in "
            "config.json, that our code lacks"
        ),
    ] = "auto"
    enable_torch_compile: Annotated[
        bool,
        Doc(
            description="compile transformers' module (--model-impl transformers) with torch.compile; models "
            "with code of this server's own have kernels instead"
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int, Doc(description="tokens of the largest step that runs compiled, none of them of a prompt")
    ] = 32
    trust_remote_code: Annotated[
        bool,
        Doc(description="run a model's code that lies beside its weights, where transformers has no class"),
    ] = False
    hf_overrides: Annotated[
        dict[str, Any],
        Doc(
            description="keys of the model's config.json that are others than in the file, such as "
            '\'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, '
            '"original_max_position_embeddings": 32768}}\'; objects are joined'
        ),
    ] = {}
    load_format: Annotated[
        Literal["auto", "safetensors", "pt", "gguf", "dummy", "remote", "remote-instance"],
        Doc(
            description="format of the weights' files: safetensors, pt (pickled by PyTorch: .bin, .pt, .pth; "
            "no code in them is run), gguf, dummy (none: random weights); auto: the first that is there; "
            "remote: MODEL is the address of a folder (s3://, gs://, http://), which is copied to the cache; "
            "remote-instance: that of a running server, whose files are (SGLA_REMOTE_KEY: its admin key)"
        ),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "rerank"],
        Doc(description="what the model is for; auto = what its files say; rerank = Qwen3-Reranker"),
    ] = "auto"
    model_source: Annotated[
        Literal["huggingface", "modelscope"],
        Doc(description="hub that models come from (ModelScope: sgla[modelscope])"),
    ] = "huggingface"
    revision: Annotated[str | None, Doc(description="hub revision")] = None
    download_dir: Annotated[str | None, Doc(description="cache folder for downloads")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Doc(description="type of weights and KV cache")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8", "int4"],
        Doc(
            description="KV cache in dtype, or 8-bit (int8; on GPUs also fp8, which is e4m3): twice "
            "the tokens, slightly different answers; int4 (on GPUs): values in 4 bits and keys in 8, 2.4 "
            "times the tokens"
        ),
    ] = "auto"
    quantization_param_path: Annotated[
        str | None,
        Doc(
            description="JSON file with the scales of an fp8 KV cache, for each layer of each rank, as vLLM "
            "and SGLang read it; without one they are those of the checkpoint, or measured at the start"
        ),
    ] = None
    quantization: Annotated[
        Literal["int8", "int4", "mxfp4", "fp8", "gguf", "gptq", "awq", "checkpoint", "none"] | None,
        Doc(
            description="quantization of the weights at load: gguf (on a CPU), gptq and awq (the default "
            "for such files: as they are; checkpoint is the same for any format), int8 (on a CPU a KL of "
            "0.0001 nats a token on Gemma 3 270M, as bfloat16) and "
            "int4 (0.024, the most probable token is another one at 8 % of places; no loss for GGUF "
            "Q4_0 and Q4_1), mxfp4 on a CPU (4-bit floating point), fp8 (8-bit)"
        ),
    ] = None
    logits_processors: Annotated[
        list[str],
        Doc(
            description="classes MODULE:CLASS on PYTHONPATH that requests may name in "
            "logits_processors, to change their logits (CPU)"
        ),
    ] = []
    enable_return_hidden_states: Annotated[
        bool,
        Doc(
            description="let requests ask for hidden states by return_hidden_states: those of the last "
            "layer behind the norm"
        ),
    ] = False
    enable_return_routed_experts: Annotated[
        bool,
        Doc(
            description="let requests ask by return_routed_experts which experts of a mixture each token "
            "went to"
        ),
    ] = False
    context_length: Annotated[int | None, Doc(description="longest prompt + output, tokens")] = None
    deterministic: Annotated[
        bool, Doc(description="a request's results are the same bits in any batch; slower on a GPU")
    ] = False


class RankSettings(ModelSettings, kw_only=True):
    """Where it computes: on which device, and how ranks share a model out."""

    device: Annotated[
        str, Doc(description="where the model runs: auto, cpu, cuda, or a kind that a package registers")
    ] = "auto"
    tp: Annotated[int, Doc(description="tensor-parallel ranks, one process each")] = 1
    pp: Annotated[
        int, Doc(description="pipeline stages, each of which has some of the layers and --tp ranks")
    ] = 1
    dp: Annotated[
        int,
        Doc(
            description="servers of the same model behind one port, each with its own --tp and --pp ranks or "
            "part of the cores (sgla serve)"
        ),
    ] = 1
    ep: Annotated[
        int,
        Doc(
            description="ranks that have each some experts of a mixture, whole, as many as --tp; 1: each has "
            "a part of every expert"
        ),
    ] = 1
    moe_a2a_backend: Annotated[
        Literal["auto", "gather", "alltoall", "deepep"],
        Doc(
            description="how tokens of --dp-attention ranks reach --ep experts. gather: all go to all ranks; "
            "alltoall: each goes to the ranks of its experts alone, and all but these experts is whole on "
            "each rank; deepep: the same by DeepEP, where that is installed; auto: alltoall between hosts, "
            "gather inside of one"
        ),
    ] = "auto"
    redundant_experts: Annotated[
        int,
        Doc(
            description="experts of each layer, beside all, that --ep ranks have twice or more often: those "
            "that most tokens want, see /rebalance_experts"
        ),
    ] = 0
    rebalance_interval: Annotated[
        float,
        Doc(
            description="seconds between two looks at how evenly --ep ranks have work, behind which experts "
            "move where that is worth it; 0: never by themselves"
        ),
    ] = 0.0
    rebalance_below: Annotated[
        float,
        Doc(
            description="what ranks do on average, against the one that does most, below which experts move "
            "(--rebalance-interval)"
        ),
    ] = 0.9
    cp: Annotated[
        int,
        Doc(
            description="sets of --tp ranks that share out the tokens of prompts, each with the whole model "
            "and KV cache: long prompts are read sooner"
        ),
    ] = 1
    dcp: Annotated[
        int,
        Doc(
            description="--tp, or 1: as many ranks share out the tokens of a KV cache of latents, which --tp "
            "alone keeps on each of them"
        ),
    ] = 1
    dp_attention: Annotated[
        bool,
        Doc(
            description="attention by data: each of the --tp ranks has all heads, and requests and a KV "
            "cache of its own, and they share out MLPs and experts alone"
        ),
    ] = False
    sequence_parallel: Annotated[
        bool,
        Doc(
            description="between products the --tp ranks share out the rows of long steps: sums are "
            "scattered, norms are of own rows, which are gathered before the next product, rounded if that "
            "is of e4m3"
        ),
    ] = False
    two_batch_overlap: Annotated[
        bool,
        Doc(
            description="long steps that read prompts are two batches of half of the tokens each, whose "
            "layers take turns: while the --tp ranks add up what one has made, the other one is computed"
        ),
    ] = False
    parallel: Annotated[
        str,
        Doc(
            description="auto: choose --dp, --pp, --tp and --ep, as far as they are not given, by the model, "
            "the GPUs, the links between them and --goal, and say why (sgla serve); a number is "
            "--max-running-requests, as llama.cpp has it"
        ),
    ] = "given"
    goal: Annotated[
        Literal["throughput", "latency"],
        Doc(description="what --parallel auto chooses for: tokens a second of all, or a single answer"),
    ] = "throughput"
    nnodes: Annotated[
        int, Doc(description="hosts that share the ranks, or the --dp servers, out; each runs sgla serve")
    ] = 1
    node_rank: Annotated[
        int, Doc(description="which of the --nnodes hosts this is; 0 serves, the others run its ranks")
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        Doc(description="HOST:PORT of node 0, on which it waits for the other --nnodes; port 29501 if none"),
    ] = None
    dist_timeout: Annotated[
        float | None,
        Doc(
            description="seconds that ranks wait for each other's data, and nodes for each other at the "
            "start; 300"
        ),
    ] = None
    dist_secret: Annotated[
        str | None,
        Doc(
            description="what all nodes know in common; the variable SGLA_DIST_SECRET keeps it out of lists "
            "of processes"
        ),
    ] = None
    dist_secret_file: Annotated[str | None, Doc(description="file that has it instead")] = None


class EngineSettings(RankSettings, kw_only=True):
    """What computes, and how much of it at a time: kernels, memory, scheduling and cache."""

    threads: Annotated[int | None, Doc(description="CPU threads of each worker")] = None
    executor: Annotated[
        Literal["procs", "ray", "inline", "fake"],
        Doc(
            description="worker processes; those of nodes that Ray places, one for each of the --pp stages "
            "if --nnodes says nothing else; in-process (debugging); no model (tests)"
        ),
    ] = "procs"
    attention_backend: Annotated[
        Literal["auto", "native", "triton", "flashinfer", "torch", "flex"],
        Doc(
            description="attention on a GPU: our CUDA kernels (native); Triton; flashinfer, which reads "
            "prompts alone, beside the decode of auto; torch and flex (PyTorch's FlexAttention), the slow "
            "oracles; auto: the first that takes the model"
        ),
    ] = "auto"
    decode_attention_backend: Annotated[
        Literal["auto", "native", "triton", "flashinfer", "torch", "flex"] | None,
        Doc(description="another one for tokens that are generated, if not --attention-backend's"),
    ] = None
    prefill_attention_backend: Annotated[
        Literal["auto", "native", "triton", "flashinfer", "torch", "flex"] | None,
        Doc(description="another one for prompts, if not --attention-backend's"),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        Doc(
            description="GiB of each GPU's weights that stay in the host's memory, for a model larger than "
            "the GPU: whole layers, which are copied to the GPU in every step"
        ),
    ] = 0.0
    native_kernels: Annotated[
        bool, Doc(description="build and use the C++ CPU kernels (else torch operations)")
    ] = True
    fake_step_ms: Annotated[
        float,
        Doc(
            description="with executor=fake: duration of a step in a worker process; 0 = in process, at once"
        ),
    ] = 0.0

    max_running_requests: Annotated[int | None, Doc(description="rows in one step, at most")] = None
    max_queued_requests: Annotated[int, Doc(description="requests waiting before new ones get 429")] = 1024
    step_tokens: Annotated[int | None, Doc(description="token budget of one step (chunked prefill size)")] = (
        None
    )
    itl_target_ms: Annotated[
        float | None, Doc(description="inter-token target that limits prefill beside decode; 0 = no limit")
    ] = None
    speculative_algorithm: Annotated[
        Literal[
            "ngram",
            "draft_model",
            "mtp",
            "eagle",
            "eagle3",
            "medusa",
            "dflash",
            "NGRAM",
            "STANDALONE",
            "NEXTN",
            "EAGLE",
            "EAGLE3",
            "DFLASH",
            "deepseek_mtp",
            "auto",
            "off",
        ]
        | None,
        Doc(
            description="guess the next tokens and compute them in one step, which changes no text: auto "
            "takes --speculative-model, if there is one, else ngram, where that can be done; ngram "
            "guesses what came behind the same tokens before, draft_model what --speculative-model draws, "
            "mtp, eagle and eagle3 what a layer makes of the model's hidden states: one of its own "
            "checkpoint (DeepSeek-V3, GLM-4.5, Qwen3.5), or the EAGLE head in --speculative-model; medusa "
            "and dflash what the heads there make of them, a block at a time"
        ),
    ] = None
    speculative_model: Annotated[
        str | None,
        Doc(
            description="a smaller model with the same vocabulary, an EAGLE head, those of Medusa or DFlash, "
            "which guesses the next tokens: hub id, folder or .gguf file"
        ),
    ] = None
    speculative_quantization: Annotated[
        Literal["int8", "int4"] | None,
        Doc(description="weights of --speculative-model, if not as --dtype says"),
    ] = None
    speculative_head_quantization: Annotated[
        Literal["int8", "int4"] | None,
        Doc(
            description="weights of the output layer that mtp, eagle, eagle3 and dflash guess with, a copy; "
            "guesses are verified by the model's own"
        ),
    ] = None
    speculative_token_map: Annotated[
        str | None,
        Doc(
            description="JSON file with a list of token ids, the only ones that mtp and eagle guess: an "
            "output layer of fewer rows takes less time"
        ),
    ] = None
    speculative_adaptive: Annotated[
        bool,
        Doc(
            description="models that guess do so for fewer tokens, or none, where more would bring no more "
            "tokens a second, by what steps take and by how many guesses were right"
        ),
    ] = True
    speculative_num_draft_tokens: Annotated[
        int | None, Doc(description="tokens that a row may guess in a step, at most; 0: none")
    ] = None
    speculative_eagle_topk: Annotated[
        int,
        Doc(
            description="guesses of a model for each place, on GPUs: 2 has steps of up to four rows verify "
            "the second best one, too, where that brings more tokens a second; the best alone is gone on from"
        ),
    ] = 1
    policy: Annotated[
        Literal["fcfs", "lpm", "auto", "dfs-weight", "lof", "random", "priority"],
        Doc(
            description="order of the waiting list: arrival, longest cached prefix, one of these two by the "
            "hit rate, heaviest branch of prefixes, longest possible output (max_tokens), none, priority "
            "field of the request"
        ),
    ] = "fcfs"
    depth: Annotated[int | None, Doc(description="steps in flight: 1 = no overlap, 2, 3")] = None
    brief_depth: Annotated[
        int | None,
        Doc(
            description="steps in flight while each takes less than 1 ms, has one token of each row, and no "
            "row guesses, but by n-grams in the last, or has a grammar (default: --depth; 3 on GPUs without "
            "--depth)"
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None, Doc(description="size of the KV cache; 512M, 2G are understood")
    ] = None
    window_ratio: Annotated[
        float | None,
        Doc(
            description="room for tokens in layers with a sliding window, as a part of that in the others, "
            "which does not change then: with less more tokens fit, and fewer requests run at a time "
            "(default: one memory for all of these layers; where they cannot share one, what "
            "--max-running-requests use, at most three quarters of equal room)"
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        Doc(
            description="part of a GPU's memory that weights, KV cache and "
            "steps may take; the rest stays free"
        ),
    ] = 1.0
    page_size: Annotated[int, Doc(description="tokens in one KV page")] = 16
    prefix_cache: Annotated[bool, Doc(description="reuse the KV of shared prompt prefixes (radix tree)")] = (
        True
    )
    eviction: Annotated[
        Literal["lru", "lfu", "fifo", "mru", "cost"],
        Doc(
            description="which cached prefix goes first: the least recently, rarely or early, or most "
            "recently used; cost: recently used and deep ones, which take long to compute, stay longer"
        ),
    ] = "lru"
    kv_host_bytes: Annotated[
        int | None,
        Doc(description="host memory for prefixes that a GPU's KV cache loses, of all ranks together; 64G"),
    ] = None
    kv_disk: Annotated[
        str | None,
        Doc(
            description="PATH:BYTES: keep prefixes in files of this folder, too, which survive eviction and "
            "restarts, such as /var/cache/sgla:100G"
        ),
    ] = None
    kv_store: Annotated[
        str | None,
        Doc(
            description="folder or address that fsspec knows (s3://, gs://, file://; needs sgla[remote]), "
            "mooncake://MASTER:PORT (sgla[mooncake]), nixl:///FOLDER (sgla[nixl]) or lm://HOST:PORT "
            "(LMCache's server), where servers of the same model keep prefixes for each other"
        ),
    ] = None
    kv_host_ratio: Annotated[
        float | None,
        Doc(
            description="host memory for what the KV cache of GPUs loses, as a multiple of that; "
            "--kv-host-bytes counts more"
        ),
    ] = None
    kv_write_policy: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        Doc(
            description="what is copied beside the device: when a request ends, all of its text, or what "
            "another request has found in the KV cache again; write_back: what the KV cache is about to lose"
        ),
    ] = "write_through"
    role: Annotated[
        Literal["both", "prefill", "decode", "encode"],
        Doc(
            description="prefill: read prompts for decode servers; decode: have prompts read by the server "
            "of --prefill-url; encode: make features of pictures for servers with --encode-url; both: do all "
            "alone"
        ),
    ] = "both"
    prefill_url: Annotated[
        str | None,
        Doc(description="the prefill server of --role decode, as tcp://HOST:PORT, its --kv-transfer-port"),
    ] = None
    encode_url: Annotated[
        str | None,
        Doc(
            description="a server with --role encode that makes features of this one's pictures, as "
            "tcp://HOST:PORT, its --kv-transfer-port"
        ),
    ] = None
    kv_transfer_port: Annotated[
        int, Doc(description="port where --role prefill waits for decode servers; 0 picks one")
    ] = 8998
    kv_transfer_secret: Annotated[
        str | None,
        Doc(
            description="what servers with a role know in common; the variable SGLA_KV_TRANSFER_SECRET keeps "
            "it out of lists of processes"
        ),
    ] = None
    kv_transfer_bytes: Annotated[
        int | None,
        Doc(
            description="host memory for KV on its way, of all ranks together; as much as the KV cache of "
            "--role prefill and at most 16G a rank, 1G a rank of --role decode; with cuda_ipc memory of the "
            "GPUs of --role prefill, 8G a rank"
        ),
    ] = None
    kv_transfer_backend: Annotated[
        Literal["auto", "tcp", "cuda_ipc", "nixl", "mooncake"],
        Doc(
            description="how KV gets from server to server; auto: shared memory on one host, else tcp; "
            "cuda_ipc: from GPU to GPU of one host; nixl, mooncake: read by that engine (sgla[nixl], "
            "sgla[mooncake])"
        ),
    ] = "auto"
    random_seed: Annotated[int | None, Doc(description="makes requests without a seed repeatable too")] = None


class AdapterSettings(EngineSettings, kw_only=True):
    """Adapters (LoRA) that requests may choose."""

    enable_lora: Annotated[
        bool, Doc(description="make room for LoRA adapters, which requests choose by model or lora_path")
    ] = False
    lora_modules: Annotated[
        list[str],
        Doc(description="adapters to load at the start, as NAME=FOLDER (PEFT); turns --enable-lora on"),
    ] = []
    max_loras: Annotated[
        int, Doc(description="adapters that a step may have, each of which takes a place on the device")
    ] = 8
    max_lora_rank: Annotated[
        int, Doc(description="largest rank of an adapter; the places on the device are made for it")
    ] = 16
    max_cpu_loras: Annotated[
        int | None, Doc(description="adapters that may be loaded, all in the host's memory; None: any number")
    ] = None
    lora_target_modules: Annotated[
        list[str],
        Doc(
            description="layers that adapters may change, such as q_proj, lm_head and experts; if none is "
            "named, all linear layers of the blocks but experts; fewer make steps with adapters faster"
        ),
    ] = []
    lora_folders: Annotated[
        list[str],
        Doc(description="folders whose adapters /load_lora_adapter may load; without any it loads none"),
    ] = []


class MediaSettings(AdapterSettings, kw_only=True):
    """Pictures, sounds and videos in requests: where they may come from, and their limits."""

    allowed_media_path: Annotated[
        str | None,
        Doc(
            description="folder whose pictures, sounds and videos requests may name by file:// or a path; "
            "none = no files"
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str],
        Doc(description="hosts that media may be fetched from, redirects included; none given = all"),
    ] = []
    allow_private_media: Annotated[
        bool,
        Doc(
            description="fetch media from addresses that are not public, too: of this host, of its "
            "network, of a cloud's metadata"
        ),
    ] = False
    limit_mm_per_prompt: Annotated[
        dict[str, int],
        Doc(
            description="pictures, sounds and videos that a prompt may have, as "
            '\'{"image": 8, "audio": 2, "video": 1}\'; 64 where it does not say'
        ),
    ] = {}
    mm_processor_kwargs: Annotated[
        dict[str, Any],
        Doc(
            description="settings of the model's processors that say how large pictures become, and what of "
            'videos is seen, as \'{"max_pixels": 1003520, "fps": 1}\'; a request may have its own'
        ),
    ] = {}
    diffusion_config: Annotated[
        dict[str, Any],
        Doc(
            description="how a diffusion language model makes blocks out of noise, in place of what its "
            'generation_config.json says, as \'{"max_denoising_steps": 24, "confidence_threshold": 0.01}\''
        ),
    ] = {}
    max_media_bytes: Annotated[int, Doc(description="largest file of a picture, a sound or a video")] = (
        32 << 20
    )
    max_image_pixels: Annotated[
        int,
        Doc(description="width times height of the largest picture or frame, looked at before it is decoded"),
    ] = 1 << 25
    max_audio_seconds: Annotated[float, Doc(description="length of the longest sound, once decoded")] = 3600.0
    max_video_seconds: Annotated[float, Doc(description="length of the longest video")] = 600.0
    max_video_frames: Annotated[
        int, Doc(description="frames that the file of a video may have, of which the model sees a few")
    ] = 36_000
    media_timeout: Annotated[
        float, Doc(description="seconds until a file must have been fetched, redirects included")
    ] = 10.0
    media_redirects: Annotated[int, Doc(description="redirects that are followed to a file")] = 3
    media_processes: Annotated[
        int | None,
        Doc(
            description="processes in which media are decoded, and as many that prepare them for the "
            "model; they start when they are wanted; default = a quarter of the cores, from 2 to 8"
        ),
    ] = None
    media_cpu_seconds: Annotated[
        float,
        Doc(description="seconds of a CPU that decoding or preparing one picture, sound or video may take"),
    ] = 10.0
    media_cache_bytes: Annotated[
        int,
        Doc(
            description="host's memory for what was prepared of media, which are neither decoded nor "
            "prepared when they come again; nothing is kept with 0 and with --isolate-keys"
        ),
    ] = 1 << 30


class Config(MediaSettings, kw_only=True):
    """Everything ``sgla serve`` and ``Engine`` can be told.
    The annotation's description is the flag's help text."""

    host: Annotated[str, Doc(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Doc(description="port to listen on; 0 picks one")] = 30000
    dp_policy: Annotated[
        Literal["cache_aware", "power_of_two", "round_robin", "least_load", "session", "consistent_hashing"],
        Doc(description="how a request gets one of the --dp servers, as sgla route's --policy"),
    ] = "cache_aware"
    grpc_port: Annotated[
        int | None,
        Doc(
            description="serve SGLang's and vLLM's gRPC protocols on this port, too; 0 picks one "
            "(pip install 'sgla[grpc]')"
        ),
    ] = None
    api_key: Annotated[
        list[str], Doc(description="require 'Authorization: Bearer KEY'; may be given several times")
    ] = []
    admin_api_key: Annotated[
        list[str],
        Doc(
            description="keys that may do what changes the server for all clients: pauses, profiles, "
            "emptying the cache, ending others' requests; may be given several times"
        ),
    ] = []
    isolate_keys: Annotated[
        bool,
        Doc(
            description="each API key reuses the KV of its own prompts alone, so that no "
            "time of an answer tells what others sent"
        ),
    ] = False
    ssl_certfile: Annotated[
        str | None, Doc(description="PEM file with the certificate chain: serve HTTPS")
    ] = None
    ssl_keyfile: Annotated[str | None, Doc(description="PEM file with its key, if not in the same file")] = (
        None
    )
    ssl_ca_certs: Annotated[
        str | None, Doc(description="PEM file with CAs: clients must show a certificate")
    ] = None
    allowed_origins: Annotated[
        list[str], Doc(description="web origins whose pages may use the server (CORS); none given = all")
    ] = []
    forwarded_allow_ips: Annotated[
        list[str],
        Doc(description="proxies whose X-Forwarded-For names the client: addresses, networks, or * for all"),
    ] = []
    max_connections: Annotated[
        int | None, Doc(description="open connections; idle ones make room for new ones")
    ] = None
    max_body_bytes: Annotated[int, Doc(description="largest request body")] = 16 << 20
    request_memory_bytes: Annotated[
        int, Doc(description="memory for the bodies of all requests together, decoded ones included")
    ] = 512 << 20
    sink_limit_bytes: Annotated[
        int, Doc(description="unread stream bytes before a slow reader is dropped")
    ] = 4 << 20
    state_path: Annotated[
        str | None,
        Doc(description="folder for what clients store, which then survives a restart; none = in memory"),
    ] = None
    state_bytes: Annotated[
        int | None,
        Doc(description="bytes of stored responses, and of conversations; 128M, with --state-path 1G"),
    ] = None
    files_bytes: Annotated[
        int | None,
        Doc(description="bytes of uploaded files and of what batches make; 256M, with --state-path 4G"),
    ] = None
    response_store: Annotated[
        int | None,
        Doc(
            description="responses kept for previous_response_id, and conversations; "
            "0 = none; 1024, with --state-path 65536"
        ),
    ] = None
    response_ttl: Annotated[
        float | None,
        Doc(
            description="seconds a response or an unchanged conversation is "
            "kept; 3600, with --state-path 30 days"
        ),
    ] = None
    tool_server: Annotated[
        list[str],
        Doc(
            description="MCP servers whose tools /v1/responses may call: URL, HOST:PORT, LABEL=URL or "
            "'LABEL=COMMAND ARGUMENTS' (needs sgla[mcp])"
        ),
    ] = []
    tool_timeout: Annotated[float, Doc(description="seconds that one call to an MCP server may take")] = 60.0
    drain_timeout: Annotated[
        float,
        Doc(description="seconds requests may take after SIGTERM, and tiers for what they have left"),
    ] = 30.0
    watchdog_timeout: Annotated[
        float,
        Doc(
            description="seconds without a result of the workers after which the server gives up and exits "
            "(ten times their longest wait so far, if that is more); 0 = never"
        ),
    ] = 300.0
    sse_keepalive: Annotated[
        float, Doc(description="seconds between ': ping' comments on an idle stream; 0 = off")
    ] = 15.0
    kv_events_config: Annotated[
        dict[str, Any],
        Doc(
            description="publish what the prefix cache gets and loses, for routers: endpoint, "
            "replay_endpoint, topic, buffer_steps, hwm, as vLLM's (needs sgla[events])"
        ),
    ] = {}
    metrics_compat: Annotated[
        Literal["sglang", "vllm"] | None, Doc(description="show the metrics under this server's names, too")
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None, Doc(description="OpenTelemetry collector to send traces to (needs sgla[otel])")
    ] = None
    step_log: Annotated[
        int, Doc(description="steps of the scheduler kept for /step_log and crash dumps; 0 = none")
    ] = 1000
    crash_dump_folder: Annotated[
        str | None,
        Doc(description="where the step log goes if the engine fails; it holds prompts' token ids"),
    ] = None
    dump_requests: Annotated[
        str | None, Doc(description="file to append request bodies to, prompts included, for 'sgla replay'")
    ] = None
    weight_folders: Annotated[
        list[str],
        Doc(description="folders whose weights /update_weights_from_disk may take; it takes none without"),
    ] = []
    profile_folder: Annotated[str, Doc(description="where /stop_profile writes traces")] = "profile"
    moderation_labels: Annotated[
        list[str],
        Doc(
            description="LABEL=CATEGORY: what /v1/moderations calls a class "
            "of the model; LABEL= flags nothing"
        ),
    ] = []
    sampling_defaults: Annotated[
        str,
        Doc(
            description="where sampling fields that a request leaves out come from: model (its files and "
            "card), openai, or a folder or file of a generation_config.json"
        ),
    ] = "model"
    preferred_sampling_params: Annotated[
        dict[str, Any],
        Doc(description="sampling defaults that go before those, such as '{\"temperature\": 0.5}'"),
    ] = {}
    models: Annotated[
        list[str],
        Doc(
            description="several models in one server, which requests choose by model: NAME=MODEL for each, "
            "or a YAML file with the flags of each, or a folder, whose models are loaded when somebody asks "
            "for them"
        ),
    ] = []
    sleep_idle: Annotated[
        float,
        Doc(
            description="seconds after which a model that nobody uses gives its memory back, until somebody "
            "asks for it; 0 = never"
        ),
    ] = 0.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Doc(description="log level")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Doc(description="lines for people, or one JSON object a line")
    ] = "text"
    log_requests: Annotated[
        bool,
        Doc(
            description="log one line a request: tokens, prefix cache hits, time to the first token; no text"
        ),
    ] = True
    log_interval: Annotated[
        float, Doc(description="seconds between log lines with the throughput while requests run; 0 = none")
    ] = 10.0

    @property
    def media_kept(self) -> int:
        """Bytes of the host for what was prepared of earlier requests' media."""
        return 0 if self.isolate_keys else self.media_cache_bytes

    @property
    def ranks(self) -> int:
        """Processes, and GPUs, that share the model."""
        return self.tp * self.pp * self.cp

    @property
    def heads_over(self) -> int:
        """Ranks that share out attention, and what is kept of a token."""
        return 1 if self.dp_attention else self.tp

    @property
    def sends_tokens(self) -> bool:
        """Tokens go to the ranks of their experts alone."""
        return self.moe_a2a_backend in ("alltoall", "deepep")

    @property
    def mlps_over(self) -> int:
        """Ranks that share out MLPs which are no experts."""
        return 1 if self.sends_tokens else self.tp

    @property
    def local_ranks(self) -> int:
        """Of these, those of one host."""
        return self.ranks if self.dp > 1 else self.ranks // self.nnodes

    def kv_dtype(self, dtype: str) -> str:
        """Of the KV cache of a model that computes in ``dtype``."""
        return dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
