"""Triton's kernels for the shapes of models that people serve compile for each generation of GPUs, without
one, and fit the shared memory of its blocks; as do those of CUDA where they run."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from test_cards import CARDS, HERE, start

from sgla.device import nvidia
from sgla.kernels.build import source_folder

pytest.importorskip("triton")
Model = dict[str, Any]
BASE: Model = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "vocab_size": 500,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
}


def llama(heads: int, kv_heads: int, head_dim: int, hidden: int, **more: Any) -> Model:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return sizes | {"hidden_size": hidden} | more


def family(architecture: str, model_type: str, **more: Any) -> Model:
    return {"architectures": [architecture], "model_type": model_type} | more


QWEN2, QWEN3 = family("Qwen2ForCausalLM", "qwen2"), family("Qwen3ForCausalLM", "qwen3")
MIXTURE = family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    num_experts=16,
    num_experts_per_tok=8,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
MIXTRAL = family("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2)
GEMMA2 = family("Gemma2ForCausalLM", "gemma2", sliding_window=64, query_pre_attn_scalar=256)
GEMMA3 = family("Gemma3ForCausalLM", "gemma3_text", sliding_window=64, query_pre_attn_scalar=256)
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
QUARTER = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
SHAPES: dict[str, Model] = {
    "qwen2.5-0.5b": llama(14, 2, 64, 896) | QWEN2,
    "qwen2.5-7b": llama(28, 4, 128, 3584) | QWEN2,
    "qwen2.5-72b": llama(64, 8, 128, 8192) | QWEN2,
    "qwen3-0.6b": llama(16, 8, 128, 1024) | QWEN3,
    "qwen3-8b": llama(32, 8, 128, 4096) | QWEN3,
    "qwen3-14b": llama(40, 8, 128, 5120) | QWEN3,
    "qwen3-30b-a3b": llama(32, 4, 128, 2048) | MIXTURE,
    "qwen3-235b-a22b": llama(64, 4, 128, 4096) | MIXTURE,
    "llama-3.2-1b": llama(32, 8, 64, 2048),
    "llama-3.2-3b": llama(24, 8, 128, 3072),
    "llama-3.1-8b": llama(32, 8, 128, 4096),
    "llama-3.1-70b": llama(64, 8, 128, 8192),
    "llama-2-7b": llama(32, 32, 128, 4096),
    "tinyllama": llama(32, 4, 64, 2048),
    "open-llama-3b": llama(32, 32, 100, 3200),
    "falcon3-7b": llama(12, 4, 256, 3072),
    "yi-34b": llama(56, 8, 128, 7168),
    "mixtral-8x7b": llama(32, 8, 128, 4096) | MIXTRAL,
    "mistral-nemo": llama(32, 8, 128, 5120) | family("MistralForCausalLM", "mistral"),
    "phi-3-mini": llama(32, 32, 96, 3072) | family("Phi3ForCausalLM", "phi3", pad_token_id=0),
    "phi-4": llama(40, 10, 128, 5120) | family("Phi3ForCausalLM", "phi3", pad_token_id=0),
    "gemma-2-9b": llama(16, 8, 256, 3584) | GEMMA2,
    "gemma-2-27b": llama(32, 16, 128, 4608) | GEMMA2,
    "gemma-3-1b": llama(4, 1, 256, 1152) | GEMMA3,
    "gemma-3-27b": llama(32, 16, 128, 5376) | GEMMA3,
    "smollm2-135m": llama(9, 3, 64, 576),
    "stablelm-2-1.6b": llama(32, 32, 64, 2048) | family("StableLmForCausalLM", "stablelm") | QUARTER,
    "stablelm-3b": llama(32, 32, 80, 2560) | family("StableLmForCausalLM", "stablelm") | QUARTER,
    "starcoder2-3b": llama(24, 2, 128, 3072) | family("Starcoder2ForCausalLM", "starcoder2"),
    "glm-4-9b": llama(32, 2, 128, 4096) | family("GlmForCausalLM", "glm", pad_token_id=0) | HALF,
    "command-r7b": llama(32, 8, 128, 4096) | family("CohereForCausalLM", "cohere"),
    "heads of 112": llama(16, 4, 112, 1792),
    "heads of 192": llama(16, 1, 192, 3072),
    "heads of 72": llama(16, 16, 72, 1152),
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
FEW = {"A100": "gemma-2-9b"}  # the others are left to .ci/full
PARTS = 3  # of the shapes: all of them take a card up to 17 minutes


def compiled(card: str, names: list[str]) -> None:
    fp8 = nvidia(card, CARDS[card]).fp8
    cases = [{"card": card, "model": SHAPES[name], "compile": True} for name in names]
    cases += [case | {"config": {"quantization": "int8"}} for case in cases[:1]]
    if len(names) == 1:
        del cases[0]  # int8 takes all of its kernels but one
    else:
        few = cases[:1]
        cases += [case | {"config": {"deterministic": True}} for case in cases[: len(few) + 1]]
        cases += [case | {"config": FP8} for case in few if fp8]
        cases += [case | {"config": {"kv_cache_dtype": kind}} for case in few for kind in ("int8", "int4")]
        cases += [case | {"config": {"quantization": "int4"}} for case in few]
    found = start(cases, BASE)
    limit = nvidia(card, CARDS[card]).shared
    for case, answer in zip(cases, found, strict=True):
        assert "error" not in answer, (case, answer)
        too_large = {name: size for name, size in answer["shared"].items() if size > limit}
        assert not too_large, (json.dumps(case), too_large)
        assert any(name.startswith(("_extend", "_attend")) for name in answer["shared"]) or card == "H200"


@pytest.mark.parametrize("card", FEW)
def test_kernels_compile(card: str) -> None:
    compiled(card, [FEW[card]])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("card", CARDS)
def test_kernels_of_all_shapes_compile(card: str, part: int) -> None:
    compiled(card, list(SHAPES)[part::PARTS])


def published(name: str, card: str = "H200", **config: Any) -> dict[str, Any]:
    """A model of the benches, of the third layer and the fourth. ``config``: settings."""
    model = json.loads((HERE.parents[1] / f"bench/models/{name}/config.json").read_text())
    sizes = {"step_tokens": 1024, "context_length": 1024, "kv_cache_bytes": 64 << 20}
    for key, value in model.items():
        if isinstance(value, list) and len(value) == model["num_hidden_layers"]:
            model[key] = value[2:4]
    model |= {"num_hidden_layers": 2, "vocab_size": 32000}
    return {"card": card, "model": model, "config": sizes | config, "compile": True}


# Experts in MXFP4 with sinks, latents, states.
OTHER_LAYERS = {
    "gpt-oss-20b": {"num_local_experts": 16},
    "glm-4.7-flash": {"n_routed_experts": 16},
    "qwen3-next-80b-a3b": {"num_experts": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_kernels_of_other_layers_compile(card: str) -> None:
    cases = [published(name, card, step_tokens=64, context_length=64) for name in OTHER_LAYERS]
    for case, fewer in zip(cases, OTHER_LAYERS.values()):
        case["model"] |= fewer
    limit = nvidia(card, CARDS[card]).shared
    for name, answer in zip(OTHER_LAYERS, start(cases, {}), strict=True):
        assert "error" not in answer, (name, answer)
        assert max(answer["shared"].values()) <= limit, (name, answer["shared"])


MODELOPT = {"fp8": "FP8", "blocks": "FP8_PB_WO", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
STORED = {name: {"quant_method": "modelopt", "quant_algo": kind} for name, kind in MODELOPT.items()}
STORED |= {
    kind: {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    for kind in ("nf4", "fp4")
}
STORED["awq"] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
OLDER = {"RTX 3090": (8, 6)}  # has no e4m3, and less memory for a block than an A100
PACKED = llama(4, 2, 64, 256, num_hidden_layers=1)
PACKED_EXPERTS = PACKED | MIXTURE | {"num_experts": 8, "num_experts_per_tok": 2}


def compile_or_refuse(card: str, kinds: list[str], models: list[Model]) -> None:
    """Layers and experts as checkpoints have them; where there is no e4m3 fp8 is refused by name."""
    device = nvidia(card, OLDER.get(card) or CARDS[card])
    few = {"step_tokens": 64, "context_length": 64}
    pairs = [(kind, model) for kind in kinds for model in models]
    cases = [
        {"card": card, "model": model | {"quantization_config": STORED[kind]}, "config": few, "compile": True}
        for kind, model in pairs
    ]
    for (kind, _), answer in zip(pairs, start(cases, BASE), strict=True):
        if kind in ("fp8", "blocks") and not device.fp8:
            assert "no 8-bit floating point" in answer["error"], kind
            assert not answer["loaded"]
        else:
            assert "error" not in answer, (kind, answer)
            assert max(answer["shared"].values()) <= device.shared, (kind, answer["shared"])


def test_weights_in_e4m3_compile_or_are_refused_where_no_card_has_such_numbers() -> None:
    compile_or_refuse("RTX 3090", ["fp8"], [PACKED])
    compile_or_refuse("RTX 3090", ["nvfp4", "mxfp8"], [PACKED_EXPERTS])


@pytest.mark.slow
@pytest.mark.parametrize("card", [*CARDS, *OLDER])
def test_weights_in_few_bits_compile_or_are_refused(card: str) -> None:
    compile_or_refuse(card, list(STORED), [PACKED, PACKED_EXPERTS])


@pytest.fixture
def nvrtc() -> None:
    """Where it is installed: ``pip install -e '.[nvrtc]'``."""
    found = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        found.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.slow
def test_every_file_of_cuda_compiles(nvrtc: None) -> None:
    from sgla.kernels.cuda import build

    cases = [published(name, **more) for name in ("qwen3-0.6b", "qwen3-30b-a3b") for more in ({}, FP8)]
    cases += [published("qwen3-8b", quantization=kind) for kind in ("int4", "int8")]
    limit = nvidia("H200", CARDS["H200"]).shared
    files: set[str] = set()
    for case, answer in zip(cases, start(cases, {}), strict=True):
        assert "error" not in answer, (case, answer)
        assert max(answer["shared"].values()) <= limit, answer["shared"]
        files |= {name for name in answer["shared"] if name.endswith(".cu")}
    apart = {  # no step of these cases takes them
        "all_reduce.cu": [
            {"RANKS": ranks, "THREADS": 256, "VECS": 1, "TWO_SHOT": ranks // 8, "NORM": norm}
            for ranks in (2, 8)
            for norm in (0, 1)
        ]
        + [{"RANKS": 2, "THREADS": 256, "VECS": 1, "TWO_SHOT": 0, "NORM": 1, "SENT": 2}],
        "grouped_gemm.cu": [
            {"GATED": gated} | packing
            for gated in (0, 1)
            for packing in ({}, {"BITS": 4}, {"BITS": 4, "GROUP": 32, "WHOLE": 0, "ROWS": 64})
        ],
        "decode_attention.cu": [
            {"FUSED": 1, "SCALED": 1},
            {"LEAVES": 1},
            *(
                {"GROUP": 7, "SHARE": 2, "LACK": 1, "FUSED": fused, "INT8": int8, "INT4": int4}
                for fused in (0, 1)
                for int8, int4 in ((0, 0), (1, 0), (1, 1))
            ),
        ],
        "batch_gemm.cu": [{"SEND": 2, "SPLIT": 4}, {"E4M3": 1, "GROUPED": 1, "BN": 256, "PER_SM": 1}],
        "prompt_gemm.cu": [{"EPILOGUE": 6}],
        "prompt_attention.cu": [{"HD": 72, "GROUP": 1, "STAGES": 3, "WHOLE": 1}],
        "skinny_gemm.cu": [
            {"EPILOGUE": 4},
            {"EPILOGUE": 5, "NORM": 1, "STAGED": 1},
            {"E4M3": 1, "GROUPED": 1, "STAGED": 2, "NORM": 1},
            {"E4M3": 1, "GROUPED": 4, "MX": 1, "NT": 2, "MT": 2},
            {"SEND": 2},
        ],
        "integer_gemm.cu": [
            {"CODES": 1, "GROUP": 64},
            {"CODES": 2, "GROUP": 32, "WIDTH": 4},
            {"CODES": 2, "GROUP": 16, "NT": 2, "MT": 2},
        ],
        "experts.cu": [{"GELU": 1}],
        "integer_experts.cu": [
            {"DOWN": 1, "CHANNELS": 768, "OUTPUTS": 2048, "ADD": 1},
            {"BITS": 8, "GROUP": 32},
        ],
        "token_experts.cu": [
            {"COMMON": 1},
            {"DOWN": 1, "WIDTH": 1408, "OUTPUTS": 2048, "ROWS": 2, "ADD": 1},
            {"HELD": 1},
            {"HELD": 1, "DOWN": 1, "WIDTH": 768, "OUTPUTS": 2048, "ROWS": 2, "ADD": 1},
            {"E4M3": 1, "WIDTH": 4096, "COMMON": 1},
            {"E4M3": 1, "DOWN": 1, "WIDTH": 8192, "OUTPUTS": 5120, "PARTS": 2, "STAGES": 2},
        ],
        "stationary_gemm.cu": [
            {"NORM": 1, "EPILOGUE": 2},
            {"NT": 1, "BITS": 8, "SLICES": 3, "EPILOGUE": 1},
            {"CODES": 1, "GROUP": 64},
            {"CODES": 2, "GROUP": 16},
        ],
        "latent_attention.cu": [{"HEADS": 16, "CONTENT": 256}, {"EARLY": 1}],
        "act_mul.cu": [{"GELU": gelu} for gelu in (0, 1)],
        "decode_step.cu": [{"COPIED": 1}],
        "mixture_step.cu": [
            {"COPIED": 1},
            {"COPIED": 1, "HEADS": 16, "KV_HEADS": 2, "INTER": 384, "RANKS": 2},
        ],
    }
    for file, cases in apart.items():
        for defines in cases:
            assert build._nvrtc(build.source_of(file, tuple(defines.items()), "sm_90a")[0], file, "sm_90a")
    assert {path.name for path in source_folder("cuda").glob("*.cu")} == files | set(apart)


@pytest.mark.slow
def test_every_cut_with_scales_of_groups_has_registers(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sums of two groups beside those of all."""
    from sgla.kernels.cuda import batch_gemm, build

    found: set[tuple[tuple[str, int], ...]] = set()
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    monkeypatch.setattr(batch_gemm, "Kernel", lambda *kernel: found.add(tuple(kernel[2].items())))
    rows, widths = (9, 33, 65, 97, 129, 4096), (128, 512, 1024, 1536, 3072, 4096, 6144, 12288, 18432, 24576)
    for m, n, k, gated in itertools.product(rows, widths, (1024, 4096), (False, True)):
        config = batch_gemm.grouped_config(m, n, k, gated)
        epilogue = batch_gemm.SILU if gated else batch_gemm.STORE
        size = batch_gemm.rows_of(config, m)
        batch_gemm._kernel.__wrapped__(config, size, epilogue, False, True, 0, True, False)
    assert len(found) > 20
    for defines in found:
        assert build._nvrtc(build.source_of("batch_gemm.cu", defines, "sm_90a")[0], "batch_gemm.cu", "sm_90a")
