"""Runners for a GPU that compute without one, compared with those of the CPU: torch's operations run on the
CPU, and Triton's kernels in its interpreter. CUDA's kernels do nothing, so attention is torch's, no graph is
captured, and no row asks for top-k, top-p or min-p. The kernels that take long in the interpreter, which
other tests compare, are replaced by the bodies of their ops.

``python interpreted_gpu.py [CASE ...]``: prints for each case what both answer, as JSON. It is a process of
its own, as ``fake_gpu.py``.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import interpreter
import numpy as np
import torch
import toy_family
import toy_latent_spec
import toy_weights
from adapters import invent
from config_cases import gemma3
from fake_gpu import Nothing, _cpu, pretend
from late_streams import late
from msgspec.structs import replace
from stages import Stages
from test_pooling import BERT, BOTH_WAYS, write_modules
from tiny import LLAMA, Transcript, make_core, run, submit, tiny_config
from torch.overrides import TorchFunctionMode

from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.cuda import build
from sgla.kernels.gpu.ops import LOWERINGS
from sgla.kernels.triton import attention
from sgla.loading import drafter, load
from sgla.messages import Control, Submit
from sgla.model import registry
from sgla.model.generic_spec import FACTS
from sgla.sched.prefill import Prefill
from sgla.worker import gpu_lent, gpu_setup, place
from sgla.worker.gpu_memory import Peak
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

SLOW = ops.rms_norm, ops.add_rms_norm, ops.qk_norm_rope_store, ops.act_mul


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU is done here. Memory that is not set is zero: a kernel that does nothing gives
    zeros."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: _cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        args = [_cpu(arg) for arg in args]
        if f is torch.mm and "out_dtype" in kwargs:
            return torch.mm(args[0], args[1]).to(kwargs["out_dtype"])
        return {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}.get(f, f)(*args, **kwargs)


class Event(Nothing):
    def query(self) -> bool:
        return True


def become_gpu() -> None:
    """From now on this process has one."""
    interpreter.patch_once()
    real = load.load_weights, load._device
    pretend("A100")
    load.load_weights, load._device = real
    drafter.load_weights = real[0]
    load.joins = lambda: True
    load._device_kind = lambda: "cuda"
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    build._compiled = lambda *args: b""  # type: ignore[assignment]
    build.Kernel.launch = lambda self, *args, **kwargs: None  # type: ignore[method-assign, assignment]
    for op in SLOW:
        del LOWERINGS[op]
    attention.splits_for = lambda rows, kv_heads, processors: 2  # programs run one after the other here
    gpu_setup.measure, gpu_setup.warm_up = (lambda *args: Peak(0, 0)), (lambda *args: None)
    gpu_lent.driver = Nothing
    gpu_lent._tensor = lambda at, units, nbytes: torch.zeros(units + 1, nbytes, dtype=torch.uint8)
    OnCpu().__enter__()
    place.Gpu.begin_thread = lambda self: OnCpu().__enter__()  # type: ignore[assignment, method-assign, return-value]


def text() -> list[Submit]:
    return [
        submit("greedy", [5, 9, 2], 4),
        submit("drawn", [7] * 20, 4, temperature=0.9, seed=3),
        submit("scored", list(range(1, 30)), 3, logprobs=2, prompt_logprobs=1),
        submit("labels", [4, 5, 6], 0, pool=[3, 9]),
        submit("states", list(range(40, 52)), 3, hidden=True),
    ]


def short_text() -> list[Submit]:
    return [submit("greedy", [5, 9, 2], 3), submit("scored", list(range(1, 20)), 2, logprobs=2)]


def routed_text() -> list[Submit]:
    """Beside the others one that wants to know which experts its tokens went to."""
    return [*short_text(), submit("routed", list(range(3, 40)), 3, experts=True)]


def inputs() -> list[Submit]:
    lengths = (1, 40, 5, 5, 17)
    prompts = [np.random.default_rng(n).integers(2, 300, length).tolist() for n, length in enumerate(lengths)]
    return [submit(str(n), prompt, 0, pool=[]) for n, prompt in enumerate(prompts)]


def long_text() -> list[Submit]:
    """Longer than a window, behind a prefix that others share, and shorter."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 331, 2 * WINDOW).tolist()
    tails = {"first": WINDOW + 3, "second": 2, "short": 1}
    return [
        submit(rid, shared * (rid != "short") + rng.integers(0, 331, n).tolist(), 3)
        for rid, n in tails.items()
    ]


def turns() -> list[Submit]:
    """One text goes on in several ways, from states that were left on the way."""
    rng = np.random.default_rng(5)
    begin = rng.integers(0, 331, 45).tolist()
    ends = {"whole": 45, "longer": 45, "branch": 30, "short": 0}
    made = [submit(rid, begin[:n] + rng.integers(0, 331, 5).tolist(), 2) for rid, n in ends.items()]
    return [*made, submit("scored", begin[:20], 2, logprobs=1)]


def adapted() -> list[Submit]:
    """Of three adapters and the base: more than there are places."""
    made = [submit(f"{n}", list(range(3 + n, 12 + 4 * n)), 2, logprobs=0) for n in range(6)]
    numbers = (1, 0, 2, 1, 3, 0)
    return [replace(one, adapter=n, namespace=str(n)) for one, n in zip(made, numbers)]


def by_turns() -> list[Submit]:
    """Texts that push each other from the device, each twice, and with other ends."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 331, 33).tolist() for _ in range(3)]
    return [
        replace(submit(f"{turn}{i}", [*text, turn, turn + i], 3, logprobs=1), arrival=10.0 * turn + i + 1)
        for turn in range(2)
        for i, text in enumerate(texts)
    ]


def longer() -> list[Submit]:
    """Texts that push each other from the device, and go on: each ends with what a window needs."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 331, 36).tolist() for _ in range(3)]
    return [
        replace(submit(f"{turn}{i}", [*text, *[turn + i] * turn], 1, logprobs=1), arrival=10.0 * turn + i + 1)
        for turn in range(2)
        for i, text in enumerate(texts)
    ]


def poison(runner: Any, core: Any) -> None:
    """From now on free slabs, or the free pages of windows, hold no numbers whenever a step is planned."""
    plan, pool = core.plan, core._memory.windows[0]

    def free(group: int) -> list[int]:
        if pool._slabs is None:
            return pool._free if group else []
        size = pool._slabs.pages[group]
        return [slab * size + i for slab in pool._slabs._free[-20:] for i in range(1, size + 1)]

    @torch.inference_mode()
    def poisoned(now: float) -> Any:
        for layer in runner.steps.kv if not core._queues.flights else []:
            pages = free(layer.group)
            layer.k[pages] = layer.v[pages] = float("nan")
        return plan(now)

    core.plan = poisoned


def source(folder: Path, model: dict[str, Any], pooling: str = "", module: bool = False) -> ModelSource:
    """A model with random weights. ``pooling``: how its files say that hidden states are pooled, or "";
    ``module``: whether transformers' computes it."""
    if module:
        from sgla.model.generic import probe  # which imports transformers

        model = model | {FACTS: probe(model, Path("."))}
    if pooling:
        folder = folder / f"{model['architectures'][0]}-{pooling}"
        folder.mkdir()
        write_modules(folder, pooling, dense=(48, 20))
    return ModelSource("dummy", folder, (), model, {})


DECODER = LLAMA | {"hidden_size": 48, "head_dim": 12}
DEEP = DECODER | {"num_hidden_layers": 7}
TOY = DECODER | {"architectures": ["ToyForCausalLM"], "model_type": "toy", "hidden_act": "silu"}
TOY_LATENT = DECODER | {"architectures": ["ToyLatentForCausalLM"], "model_type": "toy_latent"}
TERNARY = DECODER | {"quantization_config": {"quant_method": "toy-ternary"}}
LAYER_NORM = {key: value for key, value in DECODER.items() if key != "rms_norm_eps"}
LAYER_NORM |= {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
RISING = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 331,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 4,
}
PACKED = {  # gpt-oss' experts in four bits
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "quantization_config": {"quant_method": "mxfp4"},
}
EXPERTS = DECODER | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
OF_EXPERTS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6, "step_tokens": 24}
OF_EXPERTS |= {"lora_target_modules": ["experts", "o_proj"]}
ENCODER = BERT | {"architectures": ["BertModel"], "vocab_size": 331}
ROTARY = {key: value for key, value in ENCODER.items() if key != "type_vocab_size"}
ROTARY |= {"architectures": ["ModernBertModel"], "local_attention": 12, "pad_token_id": 0}
SEES_BOTH_WAYS = BOTH_WAYS | {"architectures": ["Gemma3TextModel"], "vocab_size": 331}
NORMED_HEADS = {key: value for key, value in DECODER.items() if key not in ("rms_norm_eps", "head_dim")}
NORMED_HEADS |= {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
NORMED_HEADS |= {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5}
WINDOW = 7
WINDOWS = gemma3(
    vocab_size=331,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    sliding_window=WINDOW,
    max_position_embeddings=64,
    layer_types=["sliding_attention", "full_attention"],
)
CHUNKS = {key: value for key, value in DECODER.items() if key != "num_hidden_layers"} | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": WINDOW,
    "moe_layers": [],
    "intermediate_size_mlp": 96,
}
LIGHTNING = DECODER | {
    "architectures": ["MiniMaxForCausalLM"],
    "model_type": "minimax",
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attn_alpha_factor": 1.5,
}
PICKED = {key: value for key, value in DECODER.items() if key != "head_dim"} | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 2,
    "num_key_value_heads": DECODER["num_attention_heads"],
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "dense"],
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_topk": 6,
    "index_n_heads": 3,
    "index_head_dim": 8,
}
OWN_STREAMS = PICKED | {  # Hy 4
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "hc_mult": 2,
    "indexer_types": ["full", "shared"],
}
IDLE = {  # LongCat-Flash, some of whose experts do nothing
    key: value
    for key, value in DECODER.items()
    if key not in ("head_dim", "num_hidden_layers", "intermediate_size", "num_key_value_heads")
} | {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "num_layers": 1,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "ffn_hidden_size": 64,
    "n_routed_experts": 3,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
}
OWN_KEYS = ("intermediate_size", "num_key_value_heads")
COMPRESSED = {key: value for key, value in DECODER.items() if key not in OWN_KEYS} | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "index_topk": 5,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
}
STATES_KEPT = DECODER | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
SINKS = DECODER | {
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONVOLUTIONS = {key: value for key, value in DECODER.items() if key not in ("rms_norm_eps", "hidden_act")}
CONVOLUTIONS |= {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}
CONVOLUTIONS_AND_WINDOWS = {
    key: value for key, value in CONVOLUTIONS.items() if key not in ("block_auto_adjust_ff_dim", "rope_theta")
} | {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "num_hidden_layers": 3,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 7,
}
BESIDE = DECODER | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 1,
    "mamba_d_ssm": None,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "ssm_in_multiplier": 1.5,
}
ONE_EACH = {key: value for key, value in DECODER.items() if key not in ("rope_theta", "hidden_act")} | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-",
    "layer_norm_epsilon": DECODER["rms_norm_eps"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 32,
}
SCANS = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 331,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_heads": 6,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 8,
}
DELTA_OF_CHANNELS = {
    key: value for key, value in DECODER.items() if key not in ("head_dim", "rope_theta")
} | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 2,
    "num_key_value_heads": DECODER["num_attention_heads"],
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
}
WIDER = {key: value for key, value in DECODER.items() if key != "head_dim"} | {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
SMALL_STEPS = {"page_size": 2, "step_tokens": 8}
ONE = {"max_running_requests": 1, "page_size": 4, "step_tokens": 24}
TORCH = {"attention_backend": "torch"}
PREFILL = {"role": "prefill", "kv_transfer_port": 0, "kv_transfer_secret": "s", "kv_transfer_bytes": 1 << 20}
STATES = {"enable_return_hidden_states": True}
# Model, pooling, requests, settings, those of the GPU alone.
CASES: dict[str, tuple[dict[str, Any], str, Callable[[], list[Submit]], dict[str, Any], dict[str, Any]]] = {
    "text": (DECODER, "", text, STATES, {"attention_backend": "torch"}),
    "stages": (DECODER, "", text, STATES, {"pp": 2, **TORCH}),
    "weights on the host": (
        DEEP,
        "",
        short_text,
        {},
        {"attention_backend": "torch", "cpu_offload_gb": 4e-4},
    ),
    "streams, weights on the host": (
        OWN_STREAMS
        | {"num_hidden_layers": 7, "indexer_types": ["full"] * 7, "mlp_layer_types": ["dense"] * 7},
        "",
        short_text,
        {},
        {"attention_backend": "torch", "cpu_offload_gb": 4.2e-4},
    ),
    "adapters": (
        DECODER,
        "",
        adapted,
        {
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 6,
            "step_tokens": 24,
            "lora_target_modules": ["embed_tokens", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        },
        {"attention_backend": "torch"},
    ),
    "adapters of experts": (EXPERTS, "", adapted, OF_EXPERTS, TORCH),
    "adapters of packed experts": (PACKED, "", adapted, OF_EXPERTS | {"quantization": "checkpoint"}, TORCH),
    "toy family": (TOY, "", short_text, {}, {"attention_backend": "torch"}),
    "toy latent": (
        TOY_LATENT,
        "",
        short_text,
        {},
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "toy format": (TERNARY, "", short_text, {"quantization": "checkpoint"}, {"attention_backend": "torch"}),
    "experts in mxfp4": (
        PACKED,
        "",
        routed_text,
        {"quantization": "checkpoint", "enable_return_routed_experts": True},
        {"attention_backend": "torch"},
    ),
    "layer norm": (LAYER_NORM, "", short_text, {}, {"attention_backend": "torch"}),
    "rising scores": (
        RISING,
        "",
        short_text,
        {"context_length": 64},
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "states": (STATES_KEPT, "", turns, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "a scan beside attention": (BESIDE, "", turns, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "one part in each layer": (ONE_EACH, "", short_text, {}, {"attention_backend": "torch"}),
    "scans alone": (
        SCANS,
        "",
        short_text,
        {"step_tokens": 24, "context_length": 128},
        {"attention_backend": "torch"},
    ),
    "convolutions": (CONVOLUTIONS, "", turns, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "convolutions, local attention": (
        CONVOLUTIONS_AND_WINDOWS,
        "",
        turns,
        {"step_tokens": 24},
        {"attention_backend": "torch"},
    ),
    "delta of channels": (DELTA_OF_CHANNELS, "", turns, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "lightning": (LIGHTNING, "", turns, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "last": (DECODER, "lasttoken", inputs, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "mean": (DECODER, "mean_tokens", inputs, {"step_tokens": 24}, {"attention_backend": "torch"}),
    "windows, decode": (
        WINDOWS,
        "",
        long_text,
        SMALL_STEPS,
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "windows, prompts": (
        WINDOWS,
        "",
        long_text,
        SMALL_STEPS,
        {"decode_attention_backend": "torch", "prefill_attention_backend": "triton"},
    ),
    "chunks": (
        CHUNKS,
        "",
        long_text,
        SMALL_STEPS,
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "picked tokens": (PICKED, "", long_text, SMALL_STEPS, {"attention_backend": "torch"}),
    "entries": (
        COMPRESSED,
        "",
        long_text,
        {"page_size": 4, "step_tokens": 8},
        {"attention_backend": "torch"},
    ),
    "picked tokens and sinks": (OWN_STREAMS, "", long_text, SMALL_STEPS, {"attention_backend": "torch"}),
    "experts that do nothing": (
        IDLE,
        "",
        short_text,
        {},
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "pages of int8": (
        DECODER,
        "",
        short_text,
        {"kv_cache_dtype": "int8"},
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "pages of int4": (  # those of the CPU are alone, their prompts whole
        DECODER | {"head_dim": 16},
        "",
        turns,
        {"kv_cache_dtype": "int4", "max_running_requests": 1},
        {
            "step_tokens": 24,
            "max_running_requests": 4,
            "decode_attention_backend": "triton",
            "prefill_attention_backend": "torch",
        },
    ),
    "module": (DECODER, "", short_text, {}, {"attention_backend": "torch"}),
    "module with windows": (
        SINKS,
        "",
        long_text,
        SMALL_STEPS,
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "module with wider keys": (
        WIDER,
        "",
        short_text,
        SMALL_STEPS,
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
    ),
    "prefixes on the host": (DECODER, "", by_turns, ONE, {"kv_host_bytes": 1 << 20, **TORCH}),
    "prefixes that come late": (DEEP, "", by_turns, ONE, {"kv_host_bytes": 1 << 20, **TORCH}),
    "prefixes with windows": (WINDOWS, "", longer, ONE, {"kv_host_bytes": 1 << 20, **TORCH}),
    "prefixes of latents": (PICKED, "", by_turns, ONE, {"kv_host_bytes": 1 << 20, **TORCH}),
    "prefixes on a disk": (DECODER, "", by_turns, ONE, {"kv_disk": "{}/disk:1M", **TORCH}),
    "prefixes for others": (DECODER, "", by_turns, ONE, {**PREFILL, **TORCH}),
    "prefixes for others on a GPU": (
        DECODER,
        "",
        by_turns,
        ONE,
        {**PREFILL, "kv_transfer_backend": "cuda_ipc", **TORCH},
    ),
    "states in a store": (STATES_KEPT, "", by_turns, ONE, {"kv_store": "{}/store", **TORCH}),
    "after a sleep": (DECODER, "", short_text, {}, {"kv_host_bytes": 1 << 20, **TORCH}),
    "states on the host": (STATES_KEPT, "", by_turns, ONE, {"kv_host_ratio": 2.0, **TORCH}),
    "encoder": (ENCODER, "mean_tokens", inputs, {"context_length": 64}, {}),
    "encoder that shares keys": (SEES_BOTH_WAYS, "mean_tokens", inputs, {"context_length": 64}, {}),
    "norms of heads": (NORMED_HEADS, "", short_text, {}, TORCH),
    "rotary encoder": (ROTARY, "mean_tokens", inputs, {"context_length": 64}, {}),
    "encoder in bfloat16": (ENCODER, "cls_token", inputs, {"context_length": 64}, {"dtype": "bfloat16"}),
}


def shown(transcript: Transcript) -> dict[str, Any]:
    """What each request got: tokens, and all floats one after the other."""

    def floats(data: list[bytes], kind: Any = np.float32) -> list[float]:
        return np.frombuffer(b"".join(data), kind).tolist()

    found: dict[str, Any] = {}
    for rid, deltas in transcript.items():
        places = [*chain.from_iterable([*(d.prompt_logprobs or []), *(d.logprobs or [])] for d in deltas)]
        found[rid] = {
            "tokens": [token for delta in deltas for token in delta.tokens],
            "logprobs": [place.logprob for place in places if place is not None],
            "vector": floats([deltas[-1].vector or b""]),
            "states": floats(
                [states for delta in deltas for states in delta.hidden or []],
                np.int32 if rid == "routed" else np.float32,
            ),
        }
    return found


@torch.inference_mode()
def sleep_and_wake(runner: Any, weights: str) -> None:
    """What is away has no numbers."""
    matrix, pages = runner.steps.model.lm_head.weight.data, runner.steps.kv[0].k
    for _ in range(2):
        runner.control(Control(verb="sleep", args={"kv": True, "weights": weights}))
        assert matrix.isnan().all()
        assert pages.isnan().all()
    runner.control(Control(verb="wake", args={"kv": False, "weights": True}))
    assert not matrix.isnan().any()
    assert pages.isnan().all()
    for _ in range(2):
        runner.control(Control(verb="wake", args={"kv": True, "weights": True}))
        assert not pages.any()


# Whose layers with windows and others share one memory. Pages of the other cases are too small for that, or
# layers keep more than keys and values, or a tier copies them.
SHARED = {"windows, decode", "windows, prompts"}


def answers(make: Callable[..., Any], case: str, model: ModelSource, **settings: Any) -> dict[str, Any]:
    _, _, requests, common, _ = CASES[case]
    if "pp" in settings:
        stages = Stages(model, settings.pop("pp"), make, **common | settings)
        return shown(run(None, requests(), stages.core(), stages))
    runner = make(tiny_config(**common | settings), model, 0, 1, "", lambda progress: None)
    facts = runner.facts
    encoder = facts.pooling is not None and facts.pooling.encoder
    windows = any(group.window for group in facts.groups) and not any(group.every for group in facts.groups)
    kept = not windows and (facts.pooling is None or facts.pooling.kind == "last")
    if settings.get("cpu_offload_gb"):
        assert any("the matrices of 6 of 7 layers" in note for note in facts.notes), facts.notes
    if facts.adapters:
        for number, rank in ((1, 6), (2, 1), (3, 3)):
            invent(runner, number, rank)
    if case == "prefixes on the host" and "device" in settings:
        sections = runner.copies._sources["host"]._sections
        assert all(len(section.memory) <= 1 for section in sections), "one kernel for all layers"
    if case == "after a sleep" and "device" in settings:
        for weights in ("host", "host", "files"):
            sleep_and_wake(runner, weights)
    core = make_core(
        facts, adapters=facts.adapters, encoder=encoder, prefix_cache=kept, depth=1 if windows else 2
    )
    if facts.tiers:
        core = make_core(facts, pages=12)
    if windows and "device" in settings:
        assert [group.window for group in facts.groups] == [0, WINDOW]
        assert bool(facts.groups[0].slab) == (case in SHARED)
        poison(runner, core)
    answered = shown(run(runner, requests(), core))
    if facts.adapters and "device" in settings:  # decode steps in graphs read these
        tables = runner.steps.tables
        assert tables.place.tolist() == tables.host.place.tolist() != [0] * len(tables.place)
    for tier in core.stats().tiers if "prefixes" in case or "states o" in case else []:
        assert tier.loaded > 12, tier
    return answered


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Requests begin with the first layers of their prefixes, while the others are still to come."""
    with late() as waits, patch.object(Prefill, "seconds", lambda *_: 1e9):
        yield
    assert waits.count > 12, waits.count


def main() -> None:
    cases = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        registry.register("ToyForCausalLM", toy_family.FAMILY)
        registry.register("ToyLatentForCausalLM", toy_latent_spec.FAMILY)
        toy_weights.register()
        sources = {
            case: source(Path(name), *CASES[case][:2], module=case.startswith("module")) for case in cases
        }
        found = {case: {"cpu": answers(cpu_runner, case, sources[case])} for case in cases}
        become_gpu()
        for case in cases:
            settings = {k: v.format(name) if isinstance(v, str) else v for k, v in CASES[case][-1].items()}
            with layer_by_layer() if case.endswith("come late") else nullcontext():
                found[case]["gpu"] = answers(cuda_runner, case, sources[case], device="cuda", **settings)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
