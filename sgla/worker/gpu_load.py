"""What is decided before a GPU gets its weights: sizes, kernels, and whether all of it can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sgla import attention
from sgla.attention.cascade import Cascade
from sgla.config import Config
from sgla.device import check as check_device
from sgla.dist import Shard
from sgla.dist.lockstep import PlannedLockstep
from sgla.errors import ConfigError
from sgla.kernels.gpu import GpuOps
from sgla.kernels.gpu.ops import Attend
from sgla.kernels.kept import FEWEST, int4_dims
from sgla.layers.linear import split_heads
from sgla.layers.spec import AttentionSpec
from sgla.messages import LONGEST, VERIFIED, Pooling
from sgla.model.drafting import Guessing, draft_bytes
from sgla.model.generic_spec import GenericSpec
from sgla.model.sizes import experts_kind
from sgla.model.spec import ModelSpec
from sgla.model.whole_experts import with_copies
from sgla.worker.facts import guesses_of, most_rows
from sgla.worker.gpu_memory import FEWER_ROWS, GIB, Weights, splits, within_memory
from sgla.worker.gpu_shared_cache import Shares
from sgla.worker.gpu_steps import Kernels, Sizes
from sgla.worker.kv import DTYPES
from sgla.worker.place import Gpu

SLOTS, STEP_TOKENS = 256, 8448  # where the configuration leaves them open


def dtype_of(config: Config) -> str:
    """In which a model computes."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def choose_sizes(config: Config, spec: ModelSpec, pooling: Pooling | None) -> Sizes:
    slots = most_rows(config, spec, pooling, SLOTS)
    return Sizes(
        slots,
        config.step_tokens or STEP_TOKENS,
        config.context_length or min(spec.context_len, LONGEST),
        config.page_size,
        slots + min(VERIFIED, slots * guesses_of(config)),
    )


def choose_kernels(
    config: Config, spec: ModelSpec, place: Gpu, sizes: Sizes, together: bool = False
) -> tuple[Kernels, list[str]]:
    """Also notes on what was decided why. ``together``: tokens of a picture see each other. Raises
    ConfigError for a model that this GPU cannot run."""
    together = together or bool(spec.canvas)
    dtype = dtype_of(config)
    experts = experts_kind(spec, dtype, config.quantization)
    check_device(place.device, config, dtype, experts, spec.quantization)
    shapes = shapes_of(config, spec, place.shard, sizes, together)
    choose = partial(
        attention.choose_backend,
        config.attention_backend,
        shapes,
        place.device,
        decode=config.decode_attention_backend,
        prefill=config.prefill_attention_backend,
    )
    with within_memory("allocating workspaces of attention", lambda: FEWER_ROWS):
        backend, notes = choose()
        second = choose()[0] if config.two_batch_overlap else None
    if config.speculative_eagle_topk > 1 and not (backend.decode.leaves and backend.captures):
        raise ConfigError(
            f"--speculative-eagle-topk 2 cannot be honoured: {backend.name} has no places for second "
            "guesses; leave it out, or the backend of attention",
            param="speculative_eagle_topk",
        )
    attend: Attend = backend
    if config.dcp > 1:
        shard = place.shard
        attend = Shares(PlannedLockstep(shard.rank, shard.size, shard.exchange), backend)
    ops = GpuOps(attend, config.deterministic)
    guesses = sizes.rows > sizes.slots  # then the host does not know where rows begin
    alone = guesses or place.shard.lockstep is not None  # or other ranks would have another graph
    cascade = None if alone else Cascade.of(shapes, backend, place.device)
    kv_dtype = config.kv_dtype(dtype)
    kernels = Kernels(backend, ops, cascade, DTYPES[dtype], kv_dtype, config.deterministic, second)
    return kernels, notes


def check_integers(kind: str, shapes: Sequence[attention.AttentionShape]) -> None:
    """Raise ConfigError for a KV cache of integers that has no kernels."""
    if kind not in ("int8", "int4"):
        return
    if any(shape.latent for shape in shapes):
        raise ConfigError(
            f"--kv-cache-dtype {kind} has no kernels for latent attention on a GPU; use fp8",
            param="kv_cache_dtype",
        )
    for shape in shapes:
        width = shape.v_dim or shape.head_dim
        if kind == "int4" and (shape.uneven or int4_dims(width) < FEWEST):
            raise ConfigError(
                f"--kv-cache-dtype int4 needs values as wide as keys, a multiple of {FEWEST} a head; this "
                f"model has keys of {shape.head_dim} and values of {width}: use int8",
                param="kv_cache_dtype",
            )


def shapes_of(
    config: Config, spec: ModelSpec, shard: Shard, sizes: Sizes, together: bool = False
) -> list[attention.AttentionShape]:
    """What attention has to serve on a rank: layers with the same heads have one shape; those that keep no
    tokens have none. Raises ConfigError for a KV cache that has no kernels for them."""
    groups: dict[attention.Heads, list[AttentionSpec]] = {}
    for layer in spec.attention:
        if not layer.kept(1):
            continue
        # Where ranks share out the tokens of a cache, each attends with the heads of all.
        own = shard if config.dcp == 1 else Shard()
        heads, kv_heads = split_heads(layer.heads, layer.kv_heads, own)
        key = attention.Heads(len(heads), len(kv_heads), layer.head_dim, layer.v_dim)
        groups.setdefault(key, []).append(layer)
    if not groups:  # steps are planned as if a layer read tokens
        groups[attention.Heads(1, 1, 64, 64)] = [AttentionSpec(1, 1, 64, 1.0, None)]
    shapes = [
        attention.AttentionShape(
            key.heads,
            key.kv_heads,
            key.head_dim,
            sizes.page_size // config.dcp,
            DTYPES[dtype_of(config)],
            frozenset(layer.window for layer in layers),
            max(layer.softcap for layer in layers),
            sizes.rows,
            kv_dtype="" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            deterministic=config.deterministic,
            context_len=sizes.context_len + 1,
            v_dim=key.v_dim,
            scale=layers[0].scale,
            sinks=any(layer.sinks for layer in layers),
            alone=len(groups) == 1,
            latent=layers[0].latent,
            together=together,
            chunked=any(layer.chunked and layer.window < sizes.context_len for layer in layers),
            rising=any(layer.slopes for layer in layers),
            parts=config.dcp > 1,
        )
        for key, layers in groups.items()
    ]
    check_integers(config.kv_cache_dtype, shapes)
    return shapes


def weights_of(config: Config, spec: ModelSpec, place: Gpu, guessing: Guessing | None) -> Weights:
    """``guessing``: the shape of what guesses for the model, if it has weights."""
    whole = config.deterministic or isinstance(spec, GenericSpec)
    return Weights(
        with_copies(config, spec),
        dtype_of(config),
        spec.quantized(config.quantization, "cuda"),
        place.shard.of_mlps.size,
        place.device.fp8 and not whole,
        () if whole else splits(spec, torch.cuda.device_count()),
        config.cpu_offload_gb * GIB,
        draft_bytes(config, guessing, spec, dtype_of(config), "cuda", place.shard.size),
        place.shard.size,
        config.mlps_over,
    )
