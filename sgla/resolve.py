"""From the user's settings and the machine's facts to the value of every setting,
each with its reason. Pure."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from sgla.config import Config
from sgla.defaults import read_given
from sgla.device import check as check_device
from sgla.device import check_answers, check_encoder, devices
from sgla.errors import ConfigError
from sgla.messages import LONGEST
from sgla.model.cache_scales import check_scales
from sgla.model.compressed_spec import check_compressed
from sgla.model.context import check_cp
from sgla.model.data_attention import check_data
from sgla.model.diffusion_gemma_spec import check_canvas
from sgla.model.drafting import (
    Guessing,
    automatic,
    block_size,
    by_our_names,
    check_context,
    draft_state,
    read_guessing,
)
from sgla.model.drafting import check_settings as check_guesses
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec, check_generic
from sgla.model.long_steps import check_long_steps
from sgla.model.read import read_spec
from sgla.model.shared_cache import check_dcp
from sgla.model.sizes import as_stored, experts_kind, offloaded, weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.stages import check_settings as check_stages
from sgla.model.stages import stages_of
from sgla.model.state import (
    Demand,
    LayerState,
    Pool,
    apart,
    kv_groups,
    shared_out,
    state_of,
    token_bytes,
    unit_bytes,
    whole_heads,
    with_draft,
)
from sgla.model.whole_experts import check_experts, check_routed, check_traffic, way_of_tokens
from sgla.nodes import check_nodes, count_of
from sgla.observe import kv_events
from sgla.observe.machine import Machine, detect
from sgla.text.tools.families import dialect_of
from sgla.validation import folder_and_size

MIB, GIB = 1 << 20, 1 << 30
MOST_RANKS = 1024
ROOM_TOKENS = 16384  # tokens the default KV cache has room for
OF_CHECKPOINTS = {
    "gguf": "a quantized GGUF file",
    "gptq": "a GPTQ checkpoint",
    "awq": "an AWQ checkpoint",
    "checkpoint": "a quantized checkpoint",
}
# Requests that run at a time on a GPU, and on one with room for so many tokens of each.
ROWS, MANY_ROWS, ROW_TOKENS = 256, 512, 1024
DRAFTS, OF_MODELS = 8, 4  # most tokens that a row guesses in a step, if nobody says otherwise
BY_WORKERS = {  # who see the free memory of a GPU, or how long the model's sequences are
    "kv_cache_bytes": "what weights and the largest steps leave of the GPU's memory",
    "context_length": "the model's own limit, or what the KV cache holds",
}


# Settings that belong to one server, which several cannot share.
ALONE = {
    "models": "several models in one server have one replica each",
    "grpc_port": "the router in front of replicas speaks HTTP",
    "state_path": "what clients store is kept by one server",
    "kv_disk": "its files belong to one server; --kv-store is for several",
    "kv_events_config": "its address belongs to one server",
    "dump_requests": "the file belongs to one server",
}


class Settled(NamedTuple):
    value: Any
    reason: str


class Resolved(msgspec.Struct, frozen=True):
    """``config`` has no open value left,
    except context_length as long as the model is unknown, and ``BY_WORKERS`` on a GPU.

    ``reasons``: one per field. ``notes``: what the user may want to know or change.
    """

    config: Config
    reasons: dict[str, str]
    notes: list[str]


class Filling:
    """A configuration whose open values are being settled: ``filled``, and why each value is what it is."""

    def __init__(self, config: Config) -> None:
        defaults = Config()
        self.config = config
        self.filled: dict[str, Any] = {}
        self.reasons = {
            name: "default" if getattr(config, name) == getattr(defaults, name) else "given"
            for name in Config.__struct_fields__
        }

    def settle(self, name: str, choice: Settled) -> Any:
        """The value of a field: ``choice`` if it is open."""
        if getattr(self.config, name) in (None, "auto"):
            self.filled[name], self.reasons[name] = choice
            return choice.value
        return getattr(self.config, name)

    def done(self) -> Config:
        return msgspec.structs.replace(self.config, **self.filled)


def resolve(
    config: Config,
    machine: Machine | None = None,
    model: Mapping[str, Any] | None = None,
    pooled: bool = False,
    draft: Mapping[str, Any] | None = None,
) -> Resolved:
    """Fill every open value of ``config``.

    ``machine``: its facts (this machine's if None). ``model``: the content of the model's config.json, if
    known; ``pooled``: it answers with vectors; ``draft``: that of the model that guesses for it. Raises
    ConfigError for values out of range or impossible together, and for a model that is not supported.
    """
    machine = machine or detect()
    if config.speculative_algorithm == "auto":
        return with_guesses(config, machine, model, pooled, draft)
    if config.speculative_algorithm is None and config.speculative_model is not None:
        config = automatic(config, draft)
    check(config)
    check_one(config)
    spec = read_spec(model) if model is not None else None
    encoder = isinstance(spec, EncoderSpec)
    filling = Filling(by_our_names(config, spec if isinstance(spec, ModelSpec) else None))
    settle_nodes(filling)
    config = filling.config
    guessing = read_guessing(filling.config, draft, spec) if isinstance(spec, ModelSpec) else None
    device = filling.settle("device", choose_device(machine))
    if device == "cuda":
        check_gpus(config, machine)
    elif device != "cpu" and not devices(device):
        raise ConfigError(f"--device {device}: this machine shows none; give --device cpu", param="device")
    dtype = filling.settle("dtype", choose_dtype(config, machine, device, spec))
    asked = filling.config.quantization
    settle_quantization(filling, machine, device, spec, dtype)
    settle_adapters(filling)
    config = filling.config
    check_model(config, device, spec, pooled)
    check_compressed(config, guessing)
    check_scales(config, spec, model or {})
    filling.settle("moe_a2a_backend", Settled(*way_of_tokens(config)))
    check_traffic(config, device, dtype, spec, machine.gpus[: config.local_ranks])
    if config.dp_attention:
        filling.filled["step_log"], filling.reasons["step_log"] = 0, "--dp-attention: steps are not recorded"
    check_features(config, machine, device, pooled or encoder, encoder)
    if config.speculative_algorithm:
        filling.settle("speculative_num_draft_tokens", choose_drafts(config.speculative_algorithm, draft))
    if config.cpu_offload_gb:
        check_offload(config, machine, device, spec, pooled or encoder)
    if device == "cuda":
        check_cards(config, machine, spec, dtype)
    filling.settle("threads", choose_threads(machine, config.local_ranks))
    rows = choose_rows(config, machine, device, spec, dtype, pooled)
    settle_steps(filling, device == "cuda", spec.canvas if isinstance(spec, ModelSpec) else 0, rows)
    settle_cache(filling, machine, device, spec, dtype, guessing)
    if not config.served_model_name:
        filling.filled["served_model_name"] = [config.model]
        filling.reasons["served_model_name"] = "the model's name"
    found = [*notes(config, machine, device, encoder), *(spec.notes if spec else ())]
    if spec is not None and spec.method is not None and asked is None and spec.method.expands(device):
        found.append(
            f"--device {device} has no storage for some or all quantized layers of this checkpoint: they are "
            f"made {dtype} at load, which takes more memory and time"
        )
    if config.window_ratio is not None and spec is not None and not has_windows(filling.done(), spec):
        found.append(
            "--window-ratio is for models some of whose layers have a sliding window, which is shorter than "
            "the context: it changes nothing here"
        )
    elif isinstance(spec, ModelSpec) and has_windows(done := filling.done(), spec):
        reason = apart(done, spec, _kept(done, spec, guessing), done.kv_dtype(dtype))
        if reason and done.window_ratio is None:
            found.append(
                f"layers with windows and the others have a memory each, whose sizes do not change: {reason}"
            )
    if isinstance(spec, ModelSpec) and filling.reasons["context_length"] == WHAT_FITS:
        found.append(
            f"context cut from {min(LONGEST, spec.context_len)} to {filling.done().context_length} tokens, "
            f"{WHAT_FITS}"
        )
    if isinstance(spec, ModelSpec) and spec.dtype == "float16" and dtype == "bfloat16":
        found.append(
            "the checkpoint is float16 and is computed in bfloat16, which keeps "
            "8 of its 11 bits; --dtype float32 keeps all"
        )
    return Resolved(filling.done(), filling.reasons, found)


def check_model(config: Config, device: str, spec: ModelSpec | EncoderSpec | None, pooled: bool) -> None:
    """Raise ConfigError for settings that this model cannot have on such a device."""
    check_adapters(config, device, isinstance(spec, GenericSpec))
    check_experts(config, device, spec)
    check_routed(config, spec)
    check_data(config, device, spec, pooled)
    check_cp(config, device, spec, pooled)
    check_dcp(config, device, spec, pooled)
    check_long_steps(config, device, spec, pooled)
    check_compressed(config, spec)
    if isinstance(spec, GenericSpec):
        check_generic(config, device, pooled)
    elif spec is not None:
        check_compiles(config)
    if isinstance(spec, ModelSpec):
        check_canvas(config, device, spec)
    if isinstance(spec, ModelSpec) and spec.recurrent:
        check_recurrent(config)


def check_cards(config: Config, machine: Machine, spec: ModelSpec | EncoderSpec | None, dtype: str) -> None:
    """Raise ConfigError for a model that one of the GPUs has no kernels for."""
    for gpu in machine.gpus[: config.local_ranks]:
        if isinstance(spec, ModelSpec):
            experts = experts_kind(spec, dtype, config.quantization)
            check_device(gpu, config, dtype, experts, spec.quantization)
        elif spec is not None:
            check_encoder(gpu, config, dtype)


def settle_quantization(
    filling: Filling, machine: Machine, device: str, spec: ModelSpec | EncoderSpec | None, dtype: str
) -> None:
    """On a CPU as the checkpoint is, where that has a storage there; but in ``dtype`` where torch computes,
    which would make that of all weights in every step, and there is room. Raises ConfigError for what
    ``device`` has not."""
    asked = filling.config.quantization
    method = None if spec is None else spec.method
    if asked == "mxfp4" and device == "cuda" and as_stored(method, asked) is not None:
        asked, filling.config = None, msgspec.structs.replace(filling.config, quantization=None)
    if method is not None and device not in method.devices:
        method = None
    named = asked in OF_CHECKPOINTS and (spec is None or as_stored(method, asked) is not None)
    if asked in OF_CHECKPOINTS and (device == "cuda" or not named):
        raise ConfigError(
            f"--quantization {asked} is for {OF_CHECKPOINTS[asked]} on a CPU; leave it out",
            param="quantization",
        )
    if asked == "none":
        filling.config = msgspec.structs.replace(filling.config, quantization=None)
    elif asked is None and method is not None and device == "cpu":
        assert spec is not None
        room = machine.memory_available // 2
        if not has_kernels(filling.config, machine) and weight_bytes(spec, dtype, None, 1) <= room:
            filling.reasons["quantization"] = f"weights in {dtype}, since torch computes"
            return
        reason = "as the file is, so that a step reads no more; none gives --dtype"
        filling.filled["quantization"] = method.name if method.name in OF_CHECKPOINTS else "checkpoint"
        filling.reasons["quantization"] = reason


def check_one(config: Config) -> None:
    """Raise ConfigError for several models or replicas where there can be one."""
    if config.models:
        raise ConfigError("several models (--models) are for sgla serve and sgla explain", param="models")
    if config.dp > 1:
        raise ConfigError("several replicas (--dp) are for sgla serve and sgla explain", param="dp")
    if config.executor == "inline" and config.ranks > 1:
        raise ConfigError(
            "--executor inline runs one rank; use procs for --tp, --pp or --cp above 1", param="executor"
        )
    if config.parallel == "auto":
        raise ConfigError("--parallel auto is for sgla serve and sgla explain", param="parallel")


def check_features(config: Config, machine: Machine, device: str, vectors: bool, encoder: bool) -> None:
    """Raise ConfigError for what ``device``, or a model that answers with vectors, cannot do."""
    if config.kv_cache_dtype in ("fp8", "int4") and device != "cuda":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU; use --kv-cache-dtype int8 on the CPU",
            param="kv_cache_dtype",
        )
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        backend = getattr(config, name)
        if backend not in (None, "auto") and device != "cuda":
            raise ConfigError(
                f"--{name.replace('_', '-')} {backend} needs a GPU; leave it out on the CPU", param=name
            )
    check_answers(config, device, vectors, encoder)
    if config.logits_processors and config.executor == "fake":
        raise ConfigError(
            "--logits-processors cannot be honoured by --executor fake; leave it out",
            param="logits_processors",
        )
    check_guesses(config, device)
    check_stages(config, device, vectors)
    check_tiers(config, machine)
    check_role(config, device, vectors)
    check_events(config, vectors)
    if config.deterministic:
        check_deterministic(config, device)


def check_compiles(config: Config) -> None:
    """Raise ConfigError for settings of torch.compile, of a model that no module of transformers runs."""
    for name in ("enable_torch_compile", "torch_compile_max_bs"):
        if getattr(config, name) != getattr(Config(), name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for --model-impl transformers: this model runs by kernels "
                "that are chosen for its layers, in which torch.compile finds nothing to join; leave it out",
                param=name,
            )


def check_offload(
    config: Config,
    machine: Machine,
    device: str,
    spec: ModelSpec | EncoderSpec | None,
    vectors: bool,
) -> None:
    """Raise ConfigError where weights cannot stay in the host's memory."""
    obstacle = None
    if device != "cuda":
        obstacle = f"by --device {device}, whose weights lie in the host's memory anyway"
    elif vectors:
        obstacle = "by a model that answers with vectors"
    if obstacle:
        raise ConfigError(
            f"--cpu-offload-gb {config.cpu_offload_gb:g} cannot be honoured {obstacle}; leave it out",
            param="cpu_offload_gb",
        )
    if isinstance(spec, ModelSpec):
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        host = host_bytes(config, spec, dtype)
        if host > machine.memory_available:
            raise ConfigError(
                f"--cpu-offload-gb {config.cpu_offload_gb:g} needs {host // MIB} MiB of the host's memory, "
                f"and {machine.memory_available // MIB} MiB are available; lower it",
                param="cpu_offload_gb",
            )


def host_bytes(config: Config, spec: ModelSpec, dtype: str) -> int:
    """Of the weights that all ranks together keep there."""
    quantization, nbytes = spec.quantized(config.quantization, "cuda"), config.cpu_offload_gb * GIB
    return offloaded(spec, dtype, quantization, config.tp, nbytes).host * config.tp


def choose_rows(
    config: Config,
    machine: Machine,
    device: str,
    spec: ModelSpec | EncoderSpec | None,
    dtype: str,
    pooled: bool,
) -> Settled:
    """In a step. Many only where they were measured: on one GPU, of a model that writes a token at a time and
    keeps nothing but tokens."""
    if device != "cuda":
        return Settled(64, "beyond this a CPU step only gets longer")
    few = Settled(ROWS, "rows a GPU decodes at little extra cost")
    if not isinstance(spec, ModelSpec) or isinstance(spec, GenericSpec) or config.ranks > 1:
        return few
    if pooled or spec.canvas or spec.heard or spec.recurrent:
        return few
    if config.speculative_algorithm or config.enable_lora:
        return few
    weights = weight_bytes(spec, dtype, spec.quantized(config.quantization, device), 1, device)
    room = min(gpu.memory for gpu in machine.gpus) * config.memory_fraction - weights
    each = ROW_TOKENS * token_bytes(state_of(spec, 1), config.kv_dtype(dtype))
    if MANY_ROWS * each > min(room, config.kv_cache_bytes or room):
        return few
    return Settled(MANY_ROWS, f"there is room for {ROW_TOKENS} tokens of each")


def settle_steps(filling: Filling, cuda: bool, canvas: int, rows: Settled) -> None:
    """How many ``rows`` and tokens a step has, and how long it may take. ``canvas``: of a ModelSpec."""
    tokens, seconds = (
        (Settled(8448, "64 tokens a multiprocessor of an H200"), Settled(30.0, "smooth streaming on a GPU"))
        if cuda
        else (
            Settled(512, "prefill chunk that fills a CPU's cores"),
            Settled(200.0, "five tokens a second while prompts are read"),
        )
    )
    if 2 * canvas > tokens.value:
        tokens = Settled(2 * canvas, "a block, and as much of prompts")
    settle_depth(filling, cuda)
    filling.settle("max_running_requests", rows)
    filling.settle("step_tokens", tokens)
    filling.settle("itl_target_ms", seconds)


def settle_depth(filling: Filling, cuda: bool) -> None:
    """How many steps are in flight, and how many while these are brief. Raises ConfigError where that cannot
    be more."""
    config, ahead = filling.config, Settled(2, "plans the next step while this one runs")
    if config.pp > 1:
        ahead = Settled(config.pp + 1, "a step in each stage, and one that is planned meanwhile")
    depth = filling.settle("depth", ahead)
    alone, brief = config.pp == 1 and not config.dp_attention, Settled(depth, "as many as of others")
    if cuda and alone and config.depth is None:
        brief = Settled(depth + 1, "hosts come late for steps that a GPU does in less than a millisecond")
    most = filling.settle("brief_depth", brief)
    if most < depth or (most > depth and not alone):
        raise ConfigError(
            f"--brief-depth {most} cannot be honoured with --depth {depth}"
            + ("" if alone else " and --pp or --dp-attention, whose steps in flight are always as many")
            + "; leave it out",
            param="brief_depth",
        )


def settle_cache(
    filling: Filling,
    machine: Machine,
    device: str,
    spec: ModelSpec | EncoderSpec | None,
    dtype: str,
    guessing: Guessing | None,
) -> None:
    """Bytes of the KV cache, and the longest context. On a GPU the workers see what there is room for.
    ``dtype``: in which the model computes; ``guessing``: the model that guesses."""
    config, reasons, dtype = filling.config, filling.reasons, filling.config.kv_dtype(dtype)
    if isinstance(spec, EncoderSpec):
        reasons["kv_cache_bytes"] = "an encoder keeps no KV"
        reasons["context_length"] = "the longest input the model's files recommend"
    elif device == "cuda":
        if isinstance(spec, ModelSpec):
            stages_of(filling.done(), spec)  # whether it can be cut
        reasons |= {name: reason for name, reason in BY_WORKERS.items() if getattr(config, name) is None}
    else:
        room = filling.settle(
            "kv_cache_bytes", choose_kv_bytes(machine, spec, dtype, filling.done(), guessing)
        )
        if isinstance(spec, ModelSpec):
            fits = kv_pool(filling.done(), spec, dtype, guessing).tokens(room)
            length = filling.settle("context_length", choose_context(spec.context_len, fits))
            if config.speculative_algorithm == "draft_model" and guessing is not None:
                check_context(guessing, length)
        elif config.context_length is None:
            reasons["context_length"] = BY_WORKERS["context_length"]


def check_gpus(config: Config, machine: Machine) -> None:
    """Raise ConfigError if there are too few GPUs, or torch cannot use them."""
    if machine.torch_hip:
        raise ConfigError(
            f"--device cuda: torch {machine.torch} is a ROCm build, and AMD "
            "GPUs are not supported yet; give --device cpu",
            param="device",
        )
    if machine.torch and not machine.torch_cuda:
        raise ConfigError(
            f"--device cuda needs a CUDA build of torch; {machine.torch} is a CPU "
            "build; install the other, or give --device cpu",
            param="device",
        )
    if not machine.gpus:
        raise ConfigError("--device cuda: the driver shows no NVIDIA GPU; give --device cpu", param="device")
    if config.local_ranks > len(machine.gpus):
        flags = f"--tp {config.tp}" + (f" --pp {config.pp}" if config.pp > 1 else "")
        flags += f" --cp {config.cp}" if config.cp > 1 else ""
        flags += f" on {config.nnodes} hosts" if config.nnodes > 1 else ""
        raise ConfigError(
            f"{flags} needs {config.local_ranks} GPUs, this machine shows {len(machine.gpus)}", param="tp"
        )


def settle_nodes(filling: Filling) -> None:
    count = count_of(filling.config)
    if count != filling.config.nnodes:
        filling.config = msgspec.structs.replace(filling.config, nnodes=count)
        filling.reasons["nnodes"] = "Ray places each of the --pp stages"


ALL_TARGETS = {"all", "all-linear"}  # as SGLang and PEFT say that no layer is named


def settle_adapters(filling: Filling) -> None:
    """Adapters to load are reason enough to make room for them."""
    if filling.config.lora_modules and not filling.config.enable_lora:
        filling.config = msgspec.structs.replace(filling.config, enable_lora=True)
        filling.reasons["enable_lora"] = "there are --lora-modules"
    named = filling.config.lora_target_modules
    if ALL_TARGETS.intersection(named):
        if len(named) > 1:
            raise ConfigError(
                f"--lora-target-modules {named[0]} and others: all stands alone; else name each layer",
                param="lora_target_modules",
            )
        filling.config = msgspec.structs.replace(filling.config, lora_target_modules=[])
        filling.reasons["lora_target_modules"] = f"{named[0]}: all linear layers of the blocks but experts"


def check_adapters(config: Config, device: str, generic: bool) -> None:
    """Raise ConfigError for settings of adapters that are nothing without them, or cannot be together.
    ``generic``: a module of transformers computes."""
    plain = Config()
    if not config.enable_lora:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules", "lora_folders"):
            if getattr(config, name) != getattr(plain, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora", param=name)
        return
    names = dict.fromkeys(config.served_model_name or [config.model], "this is the model's name")
    for entry in config.lora_modules:
        name, equals, folder = entry.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora-modules takes NAME=FOLDER, got {entry[:99]!r}", param="lora_modules")
        if name in names:
            raise ConfigError(f"--lora-modules {name[:99]}: {names[name]}", param="lora_modules")
        names[name] = "two adapters have this name"
    if config.max_cpu_loras is not None and len(config.lora_modules) > config.max_cpu_loras:
        raise ConfigError(
            f"--lora-modules: {len(config.lora_modules)} are more than --max-cpu-loras "
            f"{config.max_cpu_loras}",
            param="lora_modules",
        )
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {config.max_cpu_loras} is below --max-loras {config.max_loras}: an adapter on "
            "the device is in the host's memory, too",
            param="max_cpu_loras",
        )
    if generic:
        raise ConfigError(
            "--enable-lora cannot be honoured for a model that runs through transformers' module; leave "
            "it out",
            param="enable_lora",
        )
    if device == "cuda" and "lm_head" in config.lora_target_modules:
        raise ConfigError(
            "--lora-target-modules lm_head is for --device cpu; leave it out", param="lora_target_modules"
        )
    for name in ("deterministic", "cpu_offload_gb"):
        if getattr(config, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be honoured with --enable-lora yet; leave one out",
                param=name,
            )


def check_tiers(config: Config, machine: Machine) -> None:
    """Raise ConfigError for settings of places beside the device that keep prefixes."""
    if config.kv_disk is not None:
        folder_and_size(config.kv_disk)
    if config.kv_store is not None and not config.kv_store.strip():
        raise ConfigError(
            "--kv-store takes a folder, or an address such as s3://bucket/kv; give one, or leave it out",
            param="kv_store",
        )
    obstacle = None
    if not config.prefix_cache:
        obstacle = "with --no-prefix-cache, which keeps no prefixes"
    elif config.executor == "fake":
        obstacle = "by --executor fake"
    names = ("kv_disk", "kv_host_bytes", "kv_host_ratio", "kv_store")
    tiers = {name: getattr(config, name) for name in names}
    for name, value in tiers.items():
        if obstacle and value is not None:
            flag = f"--{name.replace('_', '-')} {str(value)[:99]}"
            raise ConfigError(f"{flag} cannot be honoured {obstacle}; leave it out", param=name)
    if config.kv_write_policy != "write_through" and not any(tiers.values()):
        raise ConfigError(
            f"--kv-write-policy {config.kv_write_policy}: it needs --kv-host-bytes, --kv-disk or --kv-store; "
            "leave it out",
            param="kv_write_policy",
        )
    if (config.kv_host_bytes or 0) > machine.memory_available > 0:
        raise ConfigError(
            f"--kv-host-bytes {config.kv_host_bytes} is more than the {machine.memory_available // MIB} MiB "
            "of the host's memory that are available; lower it",
            param="kv_host_bytes",
        )


def check_events(config: Config, vectors: bool) -> None:
    """Raise ConfigError for KV events that nobody could have."""
    if kv_events.read(config.kv_events_config) is None:
        return
    if vectors or not config.prefix_cache:
        why = "a model that answers with vectors" if vectors else "--no-prefix-cache"
        raise ConfigError(
            f"--kv-events-config cannot be honoured with {why}, which has no cached prefixes; leave it out",
            param="kv_events_config",
        )


def check_encoding(config: Config) -> None:
    """Raise ConfigError for settings of servers that make features of pictures for others, or have them
    made."""
    url, encodes = config.encode_url, config.role == "encode"
    if url is None and not encodes:
        return
    flag, param = ("--role encode", "role") if encodes else (f"--encode-url {url}", "encode_url")
    beside = {
        "--tp or --pp above 1, since the tower is whole": encodes and config.ranks > 1,
        "tiers of prefixes, of which it has none": encodes
        and bool(config.kv_disk or config.kv_store or config.kv_host_bytes or config.kv_host_ratio),
        f"--role {config.role}, which takes no pictures": not encodes and config.role != "both",
        "--encode-url": encodes and url is not None,
        "--executor fake": config.executor == "fake",
    }
    for what, there in beside.items():
        if there:
            raise ConfigError(f"{flag} cannot be honoured with {what}; leave one out", param=param)
    if not config.kv_transfer_secret:
        raise ConfigError(
            f"{flag} needs a secret that the servers share: set SGLA_KV_TRANSFER_SECRET",
            param="kv_transfer_secret",
        )
    parts = urlsplit(url or "tcp://a:1")
    if not (parts.scheme == "tcp" and parts.hostname and _port_of(parts)):
        raise ConfigError(
            "--encode-url takes tcp://HOST:PORT, the host and the --kv-transfer-port of a server with --role "
            f"encode, got {url!r}",
            param="encode_url",
        )


def check_unused(config: Config) -> None:
    """Raise ConfigError for settings of KV on its way that a server has none of."""
    names = ["kv_transfer_backend", "kv_transfer_bytes"]
    if config.role == "both":
        names.append("kv_transfer_port")
    plain = Config()
    for name in names:
        if (value := getattr(config, name)) != getattr(plain, name):
            others = ", decode or encode" if name == "kv_transfer_port" else " or decode"
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: it needs --role prefill{others}; leave it out",
                param=name,
            )


def check_role(config: Config, device: str, vectors: bool) -> None:
    """Raise ConfigError for settings of servers that hand KV to each other."""
    flag, backend = f"--role {config.role}", config.kv_transfer_backend
    check_encoding(config)
    if config.role in ("both", "encode"):
        if config.prefill_url is not None:
            raise ConfigError("--prefill-url needs --role decode", param="prefill_url")
        check_unused(config)
        return
    if backend in ("nixl", "mooncake") and importlib.util.find_spec(backend) is None:
        raise ConfigError(
            f"--kv-transfer-backend {backend}: pip install 'sgla[{backend}]'", param="kv_transfer_backend"
        )
    if backend == "cuda_ipc" and device != "cuda":
        raise ConfigError(
            "--kv-transfer-backend cuda_ipc needs GPUs; leave it out on the CPU", param="kv_transfer_backend"
        )
    obstacle = None
    if not config.prefix_cache:
        obstacle = "--no-prefix-cache, which keeps no prefixes"
    elif config.executor == "fake":
        obstacle = "--executor fake"
    elif vectors:
        obstacle = "a model that answers with vectors"
    elif config.speculative_algorithm not in (None, "ngram"):
        obstacle = "a model that guesses, whose own KV is not handed over"
    if obstacle is not None:
        raise ConfigError(f"{flag} cannot be honoured with {obstacle}; leave one out", param="role")
    if not config.kv_transfer_secret:
        raise ConfigError(
            f"{flag} needs a secret that the servers share: set SGLA_KV_TRANSFER_SECRET",
            param="kv_transfer_secret",
        )
    parts = urlsplit(config.prefill_url or "")
    if config.role == "decode" and not (parts.scheme == "tcp" and parts.hostname and _port_of(parts)):
        raise ConfigError(
            "--role decode needs --prefill-url tcp://HOST:PORT, the host and the --kv-transfer-port of a "
            f"server with --role prefill, got {config.prefill_url!r}",
            param="prefill_url",
        )
    if config.role == "prefill" and config.prefill_url is not None:
        raise ConfigError("--prefill-url needs --role decode", param="prefill_url")


def _port_of(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        return None


def check_recurrent(config: Config) -> None:
    """Raise ConfigError for what layers that keep a state cannot do: to sum up alike however a prompt is
    cut."""
    if config.deterministic:
        raise ConfigError(
            "--deterministic cannot be honoured for a model whose layers keep a state of all tokens; leave "
            "it out",
            param="deterministic",
        )


def check_deterministic(config: Config, device: str) -> None:
    """Raise ConfigError for what cannot be done in the same bits whatever is in the batch. What depends on
    the model, and whether there are native kernels, the workers check (``worker/start_cpu.py``)."""
    obstacle = None
    if config.tp > 1:
        obstacle = f"with --tp {config.tp}; leave one of them out"
    elif device == "cuda" and config.quantization:
        obstacle = f"with --quantization {config.quantization} on a GPU; leave one of them out"
    elif device == "cpu" and not config.native_kernels:
        obstacle = "by torch operations on the CPU; leave --no-native-kernels out"
    if obstacle:
        raise ConfigError(f"--deterministic cannot be honoured {obstacle}", param="deterministic")


def has_kernels(config: Config, machine: Machine) -> bool:
    """Whether a CPU computes with kernels of ours, and not with torch operations."""
    return config.native_kernels and bool(machine.compiler or machine.kernels)


def choose_device(machine: Machine) -> Settled:
    if machine.torch_hip:
        return Settled("cpu", f"torch {machine.torch} is a ROCm build, and AMD GPUs are not supported yet")
    if machine.gpus and machine.torch_cuda:
        return Settled("cuda", f"{machine.gpus[0].name} and a torch built for CUDA {machine.torch_cuda}")
    if machine.gpus:
        return Settled("cpu", f"{machine.gpus[0].name} is there, but torch {machine.torch} is a CPU build")
    return Settled("cpu", "no NVIDIA GPU")


def choose_dtype(
    config: Config, machine: Machine, device: str, spec: ModelSpec | EncoderSpec | None
) -> Settled:
    """``spec``: the model, if it is known; an unknown one has room."""
    if isinstance(spec, EncoderSpec) and device != "cuda":
        return Settled("float32", "an encoder computes in float32 on a CPU")
    plain = config.quantization in (None, "none") and not has_kernels(config, machine)
    if device == "cpu" and plain and "amx_bf16" not in machine.flags:
        wide = 0 if spec is None else weight_bytes(spec, "float32", None, 1)
        if wide <= machine.memory_available // 2:
            return Settled("float32", "torch computes, which is slower in bfloat16")
    return Settled("bfloat16", "half the memory traffic of float32, which bounds decode")


def has_windows(config: Config, spec: ModelSpec | EncoderSpec) -> bool:
    """Whether some layers keep whole histories, and others less."""
    if not isinstance(spec, ModelSpec):
        return False
    context = config.context_length or min(spec.context_len, LONGEST)
    return any(group.window for group in kv_groups(state_of(spec, 1), context, "bfloat16"))


def kv_pool(config: Config, spec: ModelSpec, dtype: str, guessing: Guessing | None = None) -> Pool:
    """How a rank shares out the bytes of its KV cache, which is of ``dtype``: one of the stage that holds
    fewest tokens. ``guessing``: the model that guesses."""
    context = config.context_length or min(spec.context_len, LONGEST)
    assert config.max_running_requests is not None
    assert config.step_tokens is not None
    demand = Demand(config.max_running_requests, config.step_tokens, config.prefix_cache, config.window_ratio)
    state = _kept(config, spec, guessing)
    groups = kv_groups(state, context, dtype)
    shared = whole_heads(config, spec, state, groups, dtype)
    return Pool(groups, config.page_size, demand, shared)


def _kept(config: Config, spec: ModelSpec, guessing: Guessing | None) -> list[LayerState]:
    """What a rank keeps, of each layer, in the stage that keeps most of a token."""
    states = [
        with_draft(
            shared_out(state_of(stage, config.heads_over), config.dcp),
            draft_state(guessing, config.heads_over) if stage.last else [],
        )
        for stage in stages_of(config, spec)
    ]
    dtype = config.kv_dtype(config.dtype)
    return max(states, key=lambda state: token_bytes(state, dtype))


def choose_threads(machine: Machine, ranks: int) -> Settled:
    few = machine.cores <= 4
    cores = machine.cores if few else machine.physical_cores
    kind = "usable" if few else "physical"
    if ranks == 1:
        return Settled(cores, f"all {kind} cores")
    return Settled(max(1, cores // ranks), f"{cores} {kind} cores over {ranks} ranks")


def choose_kv_bytes(
    machine: Machine,
    spec: ModelSpec | EncoderSpec | None,
    dtype: str,
    config: Config,
    guessing: Guessing | None,
) -> Settled:
    """Of a CPU: room for ROOM_TOKENS and a state for each row, at least 512 MiB, at most a quarter of what is
    free. ``dtype``: of the KV cache."""
    state = _kept(config, spec, guessing) if isinstance(spec, ModelSpec) else []
    assert config.max_running_requests is not None
    rows = (config.max_running_requests + 1) * unit_bytes(state, dtype)
    wanted = max(512 * MIB, token_bytes(state, dtype) * ROOM_TOKENS + rows)
    limit = machine.memory_available // 4
    if wanted > limit > 0:
        return Settled(limit, f"a quarter of the {machine.memory_available / GIB:.1f} GiB available")
    return Settled(wanted, "512 MiB" if wanted == 512 * MIB else f"room for {ROOM_TOKENS} tokens")


def with_guesses(
    config: Config,
    machine: Machine,
    model: Mapping[str, Any] | None,
    pooled: bool,
    draft: Mapping[str, Any] | None,
) -> Resolved:
    """``resolve`` for ``--speculative auto``. Where n-grams cannot guess nothing does."""
    reason, facts = "auto", (machine, model, pooled, draft)
    try:
        found = resolve(automatic(config, draft), *facts)
    except ConfigError as refused:
        if config.speculative_model is not None:
            raise
        reason = f"auto, but {refused}"
        none = {"speculative_algorithm": None, "speculative_num_draft_tokens": None}
        found = resolve(msgspec.structs.replace(config, **none), *facts)
    return msgspec.structs.replace(found, reasons={**found.reasons, "speculative_algorithm": reason})


def choose_drafts(algorithm: str, draft: Mapping[str, Any] | None) -> Settled:
    if algorithm == "dflash" and draft is not None:
        return Settled(block_size(draft) - 1, "a block of the head, beside the last token")
    if algorithm == "ngram":
        return Settled(DRAFTS, "a row learns how many of them pay")
    return Settled(OF_MODELS, "each takes time, and is right only if those before it are")


WHAT_FITS = "what the KV cache holds; --kv-cache-bytes gives more"


def choose_context(positions: int, room: int) -> Settled:
    """``room``: tokens that the KV cache holds."""
    if room < min(LONGEST, positions):
        return Settled(room, WHAT_FITS)
    if positions > LONGEST:
        return Settled(LONGEST, "the longest there can be")
    return Settled(positions, "the model's own limit")


def notes(config: Config, machine: Machine, device: str, encoder: bool) -> list[str]:
    """Advice: what slows this configuration down on this machine, and how to change it."""
    found = []
    if device == "cpu" and config.native_kernels and not has_kernels(config, machine):
        found.append(
            "no C++ compiler: the CPU kernels run as torch operations, several times slower; install g++ "
            "(Debian, Ubuntu: apt-get install g++)"
        )
    if device == "cpu" and machine.gpus and not machine.torch_cuda:
        found.append("a GPU is there but torch is a CPU build: install a CUDA build of torch to use it")
    if device == "cpu" and config.quantization == "mxfp4":
        found.append(
            "mxfp4 changes answers, more than int4 does, unless the checkpoint is MXFP4: --quantization int8 "
            "has those of bfloat16"
        )
    if device == "cpu" and config.quantization == "int4":
        found.append(
            "int4 changes answers, unless the file is GGUF Q4_0 or Q4_1: measured on Gemma 3 270M, a KL of "
            "0.024 nats a token and another most probable token at 8 % of places; --quantization int8 has "
            "0.0001 and 1 %, as bfloat16 has"
        )
    if config.memory_fraction != 1 and (device != "cuda" or encoder):
        what = "an encoder keeps no KV cache" if encoder else "--kv-cache-bytes sizes that of a CPU"
        found.append(f"--memory-fraction is for the KV cache of a GPU and changes nothing here: {what}")
    if config.threads and config.threads * config.local_ranks > machine.cores:
        threads = config.threads * config.local_ranks
        found.append(f"{threads} threads on {machine.cores} cores: they will wait for each other")
    return found


RANGES: dict[str, tuple[float, float]] = {
    "speculative_num_draft_tokens": (0, 63),
    "speculative_eagle_topk": (1, 2),
    "cpu_offload_gb": (0, 1 << 16),
    "max_loras": (1, 4096),
    "max_lora_rank": (1, 256),
    "max_cpu_loras": (1, math.inf),
    "torch_compile_max_bs": (1, 65536),
    "kv_transfer_bytes": (1, math.inf),
    "kv_transfer_port": (0, 65535),
    "context_length": (1, LONGEST),
    "tp": (1, MOST_RANKS),
    "pp": (1, MOST_RANKS),
    "cp": (1, 64),
    "dcp": (1, MOST_RANKS),
    "ep": (1, MOST_RANKS),
    "redundant_experts": (0, 65536),
    "rebalance_interval": (0, math.inf),
    "rebalance_below": (0, 1),
    "nnodes": (1, MOST_RANKS),
    "node_rank": (0, MOST_RANKS - 1),
    "dist_timeout": (1, math.inf),
    "threads": (1, 4096),
    "fake_step_ms": (0, math.inf),
    "max_running_requests": (1, 65536),
    "max_queued_requests": (0, math.inf),
    "step_tokens": (1, math.inf),
    "itl_target_ms": (0, math.inf),
    "depth": (1, 3),
    "brief_depth": (1, 3),
    "kv_cache_bytes": (1, math.inf),
    "kv_host_bytes": (1, math.inf),
    "kv_host_ratio": (0.01, 1000),
    "window_ratio": (0.001, 1),
    "memory_fraction": (0.05, 1),
    "page_size": (1, 1024),
    "dp": (1, 256),
    "port": (0, 65535),
    "grpc_port": (0, 65535),
    "max_connections": (1, math.inf),
    "max_body_bytes": (1, math.inf),
    "request_memory_bytes": (1 << 20, math.inf),
    "sink_limit_bytes": (1, math.inf),
    "max_media_bytes": (1, math.inf),
    "max_image_pixels": (1, 1 << 28),
    "max_audio_seconds": (1, 1 << 16),
    "max_video_seconds": (1, 1 << 16),
    "max_video_frames": (1, 1 << 24),
    "media_timeout": (0.1, 3600),
    "media_redirects": (0, 32),
    "media_processes": (1, 256),
    "media_cpu_seconds": (0.1, 3600),
    "media_cache_bytes": (0, math.inf),
    "tool_timeout": (0.1, 86400),
    "drain_timeout": (0, math.inf),
    "sleep_idle": (0, math.inf),
    "watchdog_timeout": (0, math.inf),
    "sse_keepalive": (0, math.inf),
    "state_bytes": (1 << 20, math.inf),
    "files_bytes": (1 << 20, math.inf),
    "response_store": (0, math.inf),
    "response_ttl": (0, math.inf),
    "step_log": (0, math.inf),
    "log_interval": (0, math.inf),
}


MEDIA = ("image", "video", "audio")  # kinds of vLLM's --limit-mm-per-prompt


def check_media(config: Config) -> None:
    for kind, most in config.limit_mm_per_prompt.items():
        if kind not in MEDIA or most < 0:
            raise ConfigError(
                f"--limit-mm-per-prompt takes numbers of at least 0 for {', '.join(MEDIA)}, "
                f"got {most} for {kind[:40]!r}",
                param="limit_mm_per_prompt",
            )


def check_replicas(config: Config) -> None:
    """Raise ConfigError for settings that replicas cannot have."""
    for name, why in ALONE.items():
        if getattr(config, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be honoured with --dp {config.dp}: {why}; leave one out",
                param=name,
            )
    if config.role != "both":
        raise ConfigError(
            f"--role {config.role} cannot be honoured with --dp {config.dp}: start the servers one by one, "
            "behind 'sgla route'",
            param="role",
        )


def check(config: Config) -> None:
    """Raise ConfigError if a number is out of its range, or a name unknown."""
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if name in ("depth", "brief_depth"):
            high = max(high, config.pp + 1)
        if not (low <= value <= high and math.isfinite(value)):
            span = f"at least {low:g}" if math.isinf(high) else f"from {low} to {high}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {span}, got {value}", param=name)
    if config.parallel not in ("given", "auto"):
        raise ConfigError(f"--parallel is auto, or a number, got {config.parallel[:99]!r}", param="parallel")
    if config.parallel == "given":
        check_nodes(config)
    if config.dp > 1:
        check_replicas(config)
    if "" in config.served_model_name or not config.model:
        raise ConfigError("--model and --served-model-name cannot be empty", param="model")
    for name in ("api_key", "admin_api_key"):
        if "" in getattr(config, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is empty; leave it out to serve without one", param=name)
    if config.isolate_keys and not config.api_key:
        raise ConfigError(
            "--isolate-keys needs --api-key, by which clients are told apart", param="isolate_keys"
        )
    if config.ssl_certfile is None and (config.ssl_keyfile or config.ssl_ca_certs):
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile", param="ssl_certfile")
    try:
        re.compile(config.json_whitespace)
    except re.error as error:
        raise ConfigError(
            f"--json-whitespace is compact, free or a regular expression; {error}", param="json_whitespace"
        ) from error
    for entry in config.moderation_labels:
        if "=" not in entry:
            raise ConfigError(
                f"--moderation-labels takes LABEL=CATEGORY, got {entry!r}", param="moderation_labels"
            )
    check_template_variables(config)
    check_media(config)
    read_given(config)
    dialect_of("", config.tool_call_parser, config.reasoning_parser)


def check_template_variables(config: Config) -> None:
    """Raise ConfigError for variables that requests have fields for."""
    if config.default_chat_template_kwargs:
        from sgla.text.template import RESERVED  # brings jinja2, which takes a tenth of a second

        if wrong := config.default_chat_template_kwargs.keys() & (RESERVED | {"chat_template"}):
            raise ConfigError(
                f"--default-chat-template-kwargs cannot set {', '.join(sorted(wrong))}: requests do",
                param="default_chat_template_kwargs",
            )
