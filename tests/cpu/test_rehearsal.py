"""What a runner rehearses is what it launches later, and a rehearsal compiles all of it at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from config_cases import gemma3
from forked import run_script
from tiny import ENTRIES

from sgla.device import nvidia
from sgla.kernels import device
from sgla.kernels.build import make_once
from sgla.kernels.cuda import build
from sgla.kernels.rehearsal import compilers
from sgla.model.generic import probe
from sgla.model.generic_spec import FACTS

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "bench/models"
# With so many KV heads all graphs cut decode attention finely, so that only eager steps cut it coarsely.
DENSE = {"num_hidden_layers": 2, "vocab_size": 3000, "num_attention_heads": 32, "num_key_value_heads": 32}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head", "re:.*gate$"],
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
# Longer than the context. Gate and up take a kernel with 1193 to 1200 tokens, another with 1201 to 1280,
# and the projection to heads takes one from 1268 on.
BANDS = {
    "num_hidden_layers": 2,
    "vocab_size": 3000,
    "hidden_size": 512,
    "head_dim": 128,
    "intermediate_size": 4864,
}
SIZES = {"bands": [1196, 1240, 1275]}
MIXTURE = {"num_hidden_layers": 2, "vocab_size": 3000, "moe_intermediate_size": 128}
FEW_EXPERTS = {
    "num_hidden_layers": 2,
    "vocab_size": 3000,
    "num_attention_heads": 16,
    "intermediate_size": 128,
    "num_local_experts": 32,
}
WINDOWS = gemma3(
    vocab_size=3000,
    hidden_size=512,
    head_dim=128,
    sliding_window=64,
    max_position_embeddings=2048,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
KINDS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 3000,
    "sliding_window": 64,
    "num_experts": 16,
}
STATES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 3000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 2048,
}
CONVOLUTIONS = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 3000,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
ONE_EACH = {  # experts without a gate
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*",
    "vocab_size": 3000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
    "max_position_embeddings": 2048,
}
FEW_LATENTS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "vocab_size": 3000}
FEW_LATENTS |= {"n_routed_experts": 8}
CASES = {
    "dense": ("qwen3-0.6b", DENSE, {}),
    "bands": ("llama-3.1-8b", BANDS, {"step_tokens": 1280}),
    "portable": (
        "llama-3.1-8b",
        BANDS | {"head_dim": 16, "intermediate_size": 1024},
        {},
    ),  # attention in Triton
    "fp8": ("qwen3-0.6b", DENSE, {"kv_cache_dtype": "fp8", "quantization": "fp8"}),
    "blocks of fp8": ("qwen3-0.6b", DENSE | {"quantization_config": BLOCKS}, {}),
    "nvfp4": ("qwen3-0.6b", DENSE | {"quantization_config": NVFP4}, {}),
    "mixture": ("qwen3-30b-a3b", MIXTURE, {}),
    "packed mixture": ("minimax-m2", FEW_EXPERTS | {"quantization_config": W4A16}, {}),
    "adapters": (
        "qwen3-0.6b",
        DENSE,
        {
            "enable_lora": True,
            "max_loras": 4,
            "step_tokens": 600,
            "lora_target_modules": [
                *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            ],
        },
    ),
    "adapters of experts": (
        "qwen3-30b-a3b",
        MIXTURE,
        {"enable_lora": True, "max_loras": 2, "step_tokens": 600, "lora_target_modules": ["experts"]},
    ),
    "deterministic": ("qwen3-0.6b", DENSE, {"deterministic": True}),
    "windows": ("", WINDOWS, {}),
    "kinds of heads": ("gemma-4-26b-a4b", KINDS, {}),
    "states": ("", STATES, {}),
    "convolutions": ("", CONVOLUTIONS, {}),
    "one each": ("", ONE_EACH, {}),
    "entries": ("", ENTRIES, {}),
    "latents": ("glm-4.7-flash", FEW_LATENTS, {}),
    "queries that grow": ("ministral-3-8b", {"num_hidden_layers": 2, "vocab_size": 3000}, {}),
    "norms behind rotations": ("hunyuan-7b", {"num_hidden_layers": 2, "vocab_size": 3000}, {}),
    "guesses": (
        "qwen3-0.6b",
        DENSE,
        {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 8},
    ),
    "many guess at times": (
        "qwen3-0.6b",
        DENSE,
        {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 2, "max_running_requests": 40},
    ),
    "a hybrid guesses": (
        "",
        STATES,
        {"speculative_algorithm": "mtp", "speculative_num_draft_tokens": 3, "kv_cache_bytes": 256 << 20},
    ),
    "another guesses": (
        "qwen3-8b",
        DENSE,
        {
            "speculative_algorithm": "draft_model",
            "speculative_num_draft_tokens": 4,
            "kv_cache_bytes": 256 << 20,
        },
    ),
    "a head guesses": (
        "qwen3-8b",
        {"num_hidden_layers": 8, "vocab_size": 3000},
        {
            "speculative_algorithm": "eagle3",
            "speculative_num_draft_tokens": 5,
            "kv_cache_bytes": 256 << 20,
        },
    ),
}
CASES["a head of 4 bits guesses"] = (
    *CASES["a head guesses"][:2],
    CASES["a head guesses"][2] | {"speculative_head_quantization": "int4"},
)
CASES["a head guesses beside steps of one kernel"] = (
    "qwen3-0.6b",
    {"num_hidden_layers": 8, "vocab_size": 3000},
    CASES["a head guesses"][2],
)
CASES["a head guesses twice"] = (
    *CASES["a head guesses"][:2],
    CASES["a head guesses"][2] | {"speculative_eagle_topk": 2},
)
MEDUSA = {"medusa_num_heads": 4, "medusa_num_layers": 1}
CASES["medusa guesses"] = (
    "qwen3-0.6b",
    DENSE,
    {"speculative_algorithm": "medusa", "speculative_num_draft_tokens": 4, "kv_cache_bytes": 256 << 20},
)
CASES["blocks are guessed"] = (
    "qwen3-8b",
    {"num_hidden_layers": 8, "vocab_size": 3000},
    {"speculative_algorithm": "dflash", "speculative_num_draft_tokens": 15, "kv_cache_bytes": 256 << 20},
)
BLOCKS = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "vocab_size": 3000,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 7},
}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa guesses": ("", MEDUSA),
    "blocks are guessed": ("qwen3-8b", BLOCKS),
    "another guesses": ("qwen3-0.6b", DENSE | {"num_hidden_layers": 3}),
    "a head guesses": ("../heads/qwen3-8b", {"vocab_size": 3000, "draft_vocab_size": 2048}),
}
DRAFTS["a head guesses beside steps of one kernel"] = (
    "../heads/qwen3-0.6b",
    {"vocab_size": 3000, "draft_vocab_size": 2048},
)
DRAFTS["a head of 4 bits guesses"] = DRAFTS["a head guesses twice"] = DRAFTS["a head guesses"]
OTHERS = "medusa guesses", "blocks are guessed", "another guesses"


def test_kernels_of_a_module_are_rehearsed(tmp_path: Path) -> None:
    """One has values of another width than keys. One whose steps cannot be captured runs them one by one, and
    says so. Graphs run before they are captured, each with columns of its own size: out of those of another
    one its tokens would land outside of what there is."""
    from transformers import AutoConfig

    shape = {"num_hidden_layers": 2, "vocab_size": 300, "hidden_size": 256, "intermediate_size": 64}
    config = AutoConfig.for_model("olmo", num_attention_heads=4, num_key_value_heads=4, **shape).to_dict()
    config["architectures"] = ["OlmoForCausalLM"]
    wider = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    youtu = AutoConfig.for_model("youtu", num_attention_heads=4, v_head_dim=12, **wider, **shape).to_dict()
    youtu["architectures"] = ["YoutuForCausalLM"]
    model = config | {FACTS: probe(config, tmp_path)}
    few = {"step_tokens": 64, "max_running_requests": 8}
    cases = [{"model": model, "looks": looks, "config": few} for looks in (False, True)]
    cases.append({"model": youtu | {FACTS: probe(youtu, tmp_path)}, "config": few})
    captured, looks, uneven = map(json.loads, run_script("fake_gpu.py", json.dumps(cases)))
    assert any("attention: triton decode, triton prefill" in note for note in uneven["notes"])
    for found in (captured, looks, uneven):
        assert not found["late"]
        assert not found["askew"]
        assert found["asked"] > 10
    assert not any("captured" in note for note in captured["notes"])
    (note,) = (note for note in looks["notes"] if "captured" in note)
    assert note.endswith("cannot be captured (called a synchronizing CUDA operation)")


@pytest.mark.parametrize(
    ("names", "few"),
    [
        (["dense", "mixture", "states", "entries", "queries that grow"], {"step_tokens": 256}),
        (["latents", "packed mixture"], {"step_tokens": 256}),
        pytest.param(list(CASES), {}, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_launched_that_was_not_rehearsed(names: list[str], few: dict[str, int]) -> None:
    """In a process of its own: see ``fake_gpu.py``. Rows of nobody read and write the unit of nobody."""
    cases = [case_of(name, few) for name in names]
    found = dict(zip(names, map(json.loads, run_script("fake_gpu.py", json.dumps(cases))), strict=True))
    assert not [case["error"] for case in found.values() if "error" in case]
    assert {name: case["late"] for name, case in found.items()} == {name: [] for name in names}
    assert {name: case["askew"] for name, case in found.items()} == {name: [] for name in names}
    assert min(case["asked"] for case in found.values()) > 20


@pytest.mark.parametrize(
    "name",
    [
        "a head guesses",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("guesses", "a hybrid guesses", *OTHERS)),
    ],
)
def test_stages_launch_nothing_that_was_not_rehearsed(name: str) -> None:
    """Where the last one guesses."""
    case = case_of(name, {"pp": 2})
    if "layer_types" in case["model"]:  # each stage has all kinds
        case["model"] |= {"num_hidden_layers": 4, "layer_types": 2 * case["model"]["layer_types"][:2]}
    both = json.dumps([case | {"stage": stage} for stage in (0, 1)])
    for found in map(json.loads, run_script("fake_gpu.py", both)):
        assert found.get("error") is None
        assert found["late"] == []
        assert found["askew"] == []
        assert found["asked"] > 20


def case_of(name: str, settings: dict[str, int]) -> dict[str, Any]:
    def read(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        return (json.loads((MODELS / name / "config.json").read_text()) if name else {}) | changes

    model, changes, config = CASES[name]
    case = {"model": read(model, changes), "config": config | settings, "sizes": SIZES.get(name, [])}
    return case | ({"draft": read(*DRAFTS[name])} if name in DRAFTS else {})


def few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """As few of the first layers of a published config as have all kinds."""
    part = config.get("text_config", config)
    pattern = part.get("hybrid_override_pattern", "")
    kinds = next((part[key] for key in LAYER_TYPES if part.get(key)), [*pattern])
    count = max(4, *(kinds.index(kind) + 1 for kind in {*kinds}), part.get("first_k_dense_replace", 0) + 2)
    changes: dict[str, Any] = {key: part[key][:count] for key in LAYER_TYPES if part.get(key)}
    changes |= {"hybrid_override_pattern": pattern[:count]} if pattern else {}
    if linear := part.get("linear_attn_config"):
        layers = {key: [n for n in linear[key] if n <= count] for key in NUMBERED}
        changes["linear_attn_config"] = linear | layers
    for key in ("num_hidden_layers", "n_layer"):
        if key in part:
            changes[key] = min(count, part[key])
    return config | ({"text_config": part | changes} if part is not config else changes)


LAYER_TYPES = "layer_types", "mlp_layer_types", "layers_block_type"
NUMBERED = "full_attn_layers", "kda_layers"  # lists of the layers of a kind, the first of which is 1
LARGE = "deepseek-v3", "hunyuan-a13b", "llama-4-scout", "minimax-m2"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.parent.name for path in MODELS.glob("*/config.json")))
def test_published_shapes_start(name: str) -> None:
    """All that a GPU rehearses and launches, but for what kernels compute."""
    if name in LARGE:
        pytest.skip("four layers of it do not fit into a small machine's memory")
    model = few_layers(json.loads((MODELS / name / "config.json").read_text()))
    case = {"model": model, "config": {"step_tokens": 600, "kv_cache_bytes": 1 << 28}}
    (found,) = map(json.loads, run_script("fake_gpu.py", json.dumps([case])))
    assert found.get("error") is None
    assert found["late"] == []
    assert found["asked"] > 20


class Compiler:
    """In the place of NVRTC. Compiles when all whom ``together`` wants are there."""

    def __init__(self, together: int) -> None:
        self.barrier, self.texts = threading.Barrier(together), list[str]()

    def __call__(self, text: str, name: str, target: str) -> bytes:
        self.texts.append(text)
        self.barrier.wait(20)
        if "broken" in text:
            raise RuntimeError(f"{name} does not compile")
        return text.encode()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "source_folder", lambda device: tmp_path)
    monkeypatch.setattr(device, "_this", [nvidia("H200", (9, 0), 132)])
    (tmp_path / "a.cu").write_text("kernel")
    (tmp_path / "b.cu").write_text("broken")


def test_kernels_compile_side_by_side_and_once(sources: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compilers", lambda: pool)
    compiler = Compiler(3)
    monkeypatch.setattr(build, "_nvrtc", compiler)
    with ThreadPoolExecutor(6) as pool:
        kernels = [build.Kernel("a.cu", "a", {"N": n % 3}) for n in range(6)]
        texts = [kernel._cubin.result(30) for kernel in kernels]
    assert texts == [f"#define N {n % 3}\nkernel".encode() for n in range(6)]
    assert len(compiler.texts) == 3
    assert build._compiled("a.cu", (("N", 1),), "sm_90a") == texts[1]
    assert len(compiler.texts) == 3  # found on disk


def test_who_needs_a_kernel_hears_of_its_failure(sources: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_nvrtc", Compiler(1))
    kernel = build.Kernel("b.cu", "b", {})
    with pytest.raises(RuntimeError, match="b.cu does not compile"):
        kernel.load()


def test_make_once_leaves_nothing_half_made(tmp_path: Path) -> None:
    def fail(scratch: Path) -> Path:
        (scratch / "x").write_text("half")
        raise OSError("disk full")

    def make(scratch: Path) -> Path:
        (scratch / "x").write_text("whole")
        return scratch / "x"

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "x", fail)
    assert not (tmp_path / "x").exists()
    make_once(tmp_path / "x", make)
    make_once(tmp_path / "x", fail)
    assert (tmp_path / "x").read_text() == "whole"


@pytest.mark.parametrize("locks", [True, False])
def test_make_once_removes_what_killed_processes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def make(scratch: Path) -> Path:
        (scratch / "x").write_text("whole")
        return scratch / "x"

    if not locks:
        monkeypatch.setattr(fcntl, "flock", flock)
    old, new = tmp_path / "tmpold", tmp_path / "tmpnew"
    for folder in (old, new):
        folder.mkdir()
        (folder / "half").touch()
    os.utime(old, (0, 0))
    make_once(tmp_path / "x", make)
    assert {p.name for p in tmp_path.iterdir()} == {"tmpnew", "x", "x.lock"}


def test_compilers_are_few_on_large_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(192))
    assert compilers.__wrapped__()._max_workers == 16
