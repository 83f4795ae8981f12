"""Families beside those of ``test_models.py``: tiny random checkpoints against HF transformers, float32 on
the CPU."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_family
from checkpoints import Eager, check_against_hf, random_prompts, save_checkpoint
from safetensors.torch import save_file
from tiny import over_two_ranks, run, submit, tiny_config, tiny_source

from sgla import packages
from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.hub.source import open_source
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.layers.spec import AttentionSpec
from sgla.loading.load import load_model
from sgla.model import alibi_spec, registry
from sgla.model.llama import Llama
from sgla.model.read import read_decoder, read_spec
from sgla.model.ropes import ropes
from sgla.model.sizes import weight_bytes
from sgla.model.state import token_bytes
from sgla.worker.cpu import CpuRunner

LLAMA = "sgla.model.llama:Llama"
PROMPTS = random_prompts([1, 7, 33, 90])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GPT2 = {"intermediate_size": ..., "num_key_value_heads": ..., "tie_word_embeddings": True}
OPT = {"ffn_dim": 96, "intermediate_size": ..., "num_key_value_heads": ..., "tie_word_embeddings": True}
WINDOWED = {"num_hidden_layers": 5, "sliding_window": 10}
PLAIN = {"num_key_value_heads": ..., "intermediate_size": ..., "tie_word_embeddings": True}
FALCON = PLAIN | {"ffn_hidden_size": 80}
NAMED = dict.fromkeys(
    ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"), ...
)
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 10,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 311,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral sliding": ("mistral", {"sliding_window": 20, "head_dim": 8}),
    "phi3": ("phi3", {}),
    "phi3 partly rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "granite with windows": (
        "granite_swa",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "sliding_window": 20,
            "layer_rope_theta": [0, 500.0, 1e4],
            "mlp_bias": True,
        },
    ),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.3,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3 listed": ("smollm3", {"no_rope_layers": [0, 1, 1]}),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "helium": ("helium", {"head_dim": 8}),
    "ernie": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "glm": ("glm", {"head_dim": 16}),
    "gemma3n": (
        "gemma3n_text",
        {key: value for key, value in GEMMA4.items() if key != "global_head_dim"}
        | {"laurel_rank": 8, "num_kv_shared_layers": 2, "intermediate_size": [96, 64] * 3}
        | {"activation_sparsity_pattern": [0.9, 0.5, 0.0] * 2},
    ),
    "gemma4": ("gemma4_text", GEMMA4 | {"final_logit_softcapping": 5.0, "num_key_value_heads": 3}),
    "gemma4 sharing keys and values": (
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4 with experts": (
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "falcon": ("falcon", FALCON),
    "falcon, new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, new, one norm": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, rising": (
        "falcon",
        FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": ("bloom", PLAIN | {"max_position_embeddings": ...}),
    "mpt": ("mpt", PLAIN | {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 512} | NAMED),
    "mpt, clipped": (
        "mpt",
        PLAIN
        | {"d_model": 64, "n_heads": 8, "n_layers": 3, "max_seq_len": 512}
        | NAMED
        | {"attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.2}},
    ),
    "codegen": (
        "codegen",
        {"n_inner": 80, "rotary_dim": 6, "num_attention_heads": 4}
        | dict.fromkeys(("intermediate_size", "num_key_value_heads"), ...),
    ),
    "gpt-neo": (
        "gpt_neo",
        {
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "window_size": 9,
            "num_key_value_heads": ...,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", WINDOWED | {"head_dim": 16, "query_pre_attn_scalar": 24}),
    "stablelm": (
        "stablelm",
        {"use_qkv_bias": True, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "stablelm, side by side": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "head_dim": None},
    ),
    "stablelm, normed heads": ("stablelm", {"qk_layernorm": True, "head_dim": None}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "nemotron": ("nemotron", {"head_dim": 16, "num_key_value_heads": 3}),
    "arcee": ("arcee", {"head_dim": 8}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one key": ("olmo2", {"num_key_value_heads": 1}),
    "exaone4": ("exaone4", WINDOWED),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "cohere": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere, normed heads": (
        "cohere",
        {"use_qk_norm": True, "logit_scale": 0.5, "tie_word_embeddings": True},
    ),
    "cohere, one key": (
        "cohere",
        {"use_qk_norm": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "cohere2": ("cohere2", WINDOWED | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "olmo3": (
        "olmo3",
        WINDOWED
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
    ),
    "ministral": ("ministral", {"sliding_window": 20, "head_dim": 8}),
    "cwm": ("cwm", {"sliding_window": 20, "head_dim": 8, "num_hidden_layers": 5}),
    "ministral3": (
        "ministral3",
        {"head_dim": 8, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "apertus": ("apertus", {"head_dim": 8, "rope_parameters": YARN}),
    "phi": ("phi", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 with other scales": (
        "gpt2",
        GPT2
        | {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}
        | {"tie_word_embeddings": False},
    ),
    "opt": ("opt", OPT),
    "gptj": (
        "gptj",
        GPT2 | {"rotary_dim": 4, "tie_word_embeddings": False, "num_attention_heads": 4},
    ),
    "neox": ("gpt_neox", {"num_key_value_heads": ...}),
    "neox in sequence": (
        "gpt_neox",
        {"num_key_value_heads": ..., "use_parallel_residual": False}
        | {"num_attention_heads": 3, "rotary_pct": 0.5, "rotary_emb_base": 500.0},
    ),
    "vaultgemma": ("vaultgemma", WINDOWED | {"head_dim": 8, "query_pre_attn_scalar": 24}),
    "jais2": ("jais2", {}),
    "mimo": ("mimo", {}),
    "exaone": ("exaone", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan stretched": (
        "hunyuan_v1_dense",
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan, yarn, whose factor its norms take out": (
        "hunyuan_v1_dense",
        {"head_dim": 8, "rope_parameters": YARN},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In torch, in a CPU program where there are kernels, and in chunks."""
    model_type, changes = FAMILIES[name]
    hf = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(open_source(tmp_path))
    found = Eager(model).prompt_logprobs(PROMPTS)
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for p in hf.parameters() if p.dim() > 1)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    rows = Eager(model, budget=150).generate(PROMPTS, 12)
    native = Eager(model, budget=40, native=True).generate(PROMPTS, 12)
    assert [row.tokens for row in native] == [row.tokens for row in rows]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("glm", "auto"),
        ("neox", "auto"),
        ("falcon, new", "auto"),
        ("mpt, clipped", "int8"),
        ("codegen", "auto"),
        ("gemma4 sharing keys and values", "int8"),
        ("gemma4 with experts", "auto"),
        ("olmo2", "auto"),
        pytest.param("gemma3n", "auto", marks=pytest.mark.slow),
        ("olmo2 with one key", "auto"),
        ("stablelm, side by side", "auto"),
        ("cohere, normed heads", "int8"),
        ("cohere, one key", "auto"),
    ],
)
async def test_two_ranks_equal_one(name: str, cache: str, tmp_path: Path) -> None:
    """Rows in another order, slopes of heads, matrices that a checkpoint has fused, MLPs without a gate,
    layers that read others' keys and values (with scales of their heads), experts beside an MLP, norms over
    the heads of all ranks, which may each have the one key, norms with weights of each head."""
    model_type, changes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    source = open_source(tmp_path)
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    one = CpuRunner(tiny_config(kv_cache_dtype=cache), source, 0, 1, "", lambda progress: None)
    both = await over_two_ranks(source, requests, kv_cache_dtype=cache)
    assert both.tokens() == run(one, requests).tokens()


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
async def test_ranks_share_mlps_that_are_narrower_than_a_group_for_each(
    model_type: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, model_type, intermediate_size=32)
    source = open_source(tmp_path)
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(PROMPTS)]
    one = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    both = await over_two_ranks(source, requests, native_kernels=True)
    assert both.tokens() == run(one, requests).tokens()


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt

    ours, two = alibi_spec.slopes(heads), torch.ones(1, 2, dtype=torch.long)
    torch.testing.assert_close(torch.tensor(ours), bloom(two, heads, torch.float32)[:, 0, 1])
    rounded = torch.tensor([alibi_spec.bfloat16(slope) for slope in ours])
    torch.testing.assert_close(rounded, falcon(two, heads, torch.float32)[:, 0, 1], rtol=0, atol=0)
    for most in (8, 16):
        torch.testing.assert_close(
            torch.tensor(alibi_spec.slopes(heads, most)), -mpt(heads, 2, most)[:, 0, 0]
        )


@torch.no_grad()
def test_mpt_has_the_slopes_that_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the code that comes with its checkpoints; transformers' takes 8, whatever is said."""
    from transformers.models.mpt import modeling_mpt

    model_type, sizes = FAMILIES["mpt"]
    hf = save_checkpoint(tmp_path, model_type, **sizes | {"attn_config": {"alibi_bias_max": 16}})
    found = Eager(load_model(open_source(tmp_path))).prompt_logprobs(PROMPTS)

    def expected() -> torch.Tensor:
        return torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])

    assert (expected() - found).abs().max() > 1e-3
    made = modeling_mpt.build_mpt_alibi_tensor
    most = hf.config.attn_config.alibi_bias_max
    own = lambda heads, length, _, device: made(heads, length, most, device)  # noqa: E731
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", own)
    torch.testing.assert_close(found, expected(), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon", {"parallel_attn": False, "new_decoder_architecture": True}, "parallel_attn"),
        ("falcon, new", {"num_kv_heads": 4}, "num_kv_heads"),
        ("codegen", {"n_head": 6}, "n_head"),
        ("gpt-neo", {"attention_layers": ["global", "far", "local"]}, "attention_layers"),
        ("gpt-neo", {"attention_layers": ..., "attention_types": [[["global"], 2]]}, "attention_types"),
    ],
)
def test_what_old_families_have_not_is_refused(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model_type, sizes = FAMILIES[name]
    save_checkpoint(tmp_path, model_type, **sizes)
    config = open_source(tmp_path).config | changes
    with pytest.raises(ConfigError, match=said):
        read_decoder({key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize("native", [False, True])
@torch.no_grad()
def test_a_family_with_an_op_of_its_own(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file and one entry: it runs on every device (GPUs: test_gpu_ops.py), and equals transformers' Llama
    with that activation."""
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    registry.register("ToyForCausalLM", toy_family.FAMILY)
    hf = save_checkpoint(tmp_path, "llama", hidden_act="relu2", hidden_size=64, num_attention_heads=4)
    source = open_source(tmp_path)
    source.config.update(architectures=["ToyForCausalLM"], model_type="toy", hidden_act="silu")
    rows = Eager(load_model(source), native=native).generate(PROMPTS, 12)
    expected = [
        hf.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
        for p in PROMPTS
    ]
    assert [row.tokens for row in rows] == expected


def test_a_package_brings_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is a family like any other; a broken one is named."""
    brought = [EntryPoint("ToyForCausalLM", "toy_entry:FAMILY", "sgla.models")]
    brought += [EntryPoint("LostForCausalLM", "toy_entry:LOST", "sgla.models")]
    brought += [EntryPoint("OddForCausalLM", "toy_family:Toy", "sgla.models")]
    chosen = {entry.name: [entry] for entry in brought}
    monkeypatch.setattr(packages, "entry_points", lambda group, name: chosen.get(name, []))
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    toy = tiny_source(architectures=["ToyForCausalLM"], model_type="toy")
    assert read_spec(toy.config).layers == 2
    runner = CpuRunner(tiny_config(), toy, 0, 1, "", lambda progress: None)
    assert len(run(runner, [submit("a", [5, 9, 2], 8)]).tokens()["a"]) == 8
    for name, message in (
        ("Lost", "'LostForCausalLM': toy_entry:LOST cannot be loaded: AttributeError"),
        ("Odd", "'OddForCausalLM': toy_family:Toy is no sgla.model.family.Family but of type ABCMeta"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_spec(toy.config | {"architectures": [f"{name}ForCausalLM"]})


SHAPES = [(6, 3, 8), (3, 3, 8), (6, 6, 4)]  # heads, KV heads and values of a head, layer by layer


def narrowed(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint of layers with ``SHAPES``; ``whole``, of layers with 6, 6 and 8, is changed to compute the
    same."""
    parts = dict(whole)
    for i, (heads, kv_heads, dim) in enumerate(SHAPES):
        name = f"model.layers.{i}.self_attn"
        kept = torch.tensor([0, 2, 4, 6]) if dim == 4 else torch.arange(8)  # these turn as those of 4 do
        for which, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            w = whole[f"{name}.{which}_proj.weight"].view(6, 8, -1)
            own = w[:count, kept].clone()
            parts[f"{name}.{which}_proj.weight"] = own.flatten(0, 1)
            w.zero_()
            same = own.repeat_interleave(heads // count, 0)
            w[:heads, kept] = same * (8 / dim) ** 0.5 if which == "q" else same
        out = whole[f"{name}.o_proj.weight"].view(-1, 6, 8)
        parts[f"{name}.o_proj.weight"] = out[:, :heads, kept].flatten(1).clone()
    return {key: value.contiguous() for key, value in parts.items()}


@pytest.mark.parametrize("native", [False, True])
@torch.no_grad()
def test_layers_with_shapes_of_their_own(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists in config.json, as OpenELM and DeciLM have them: equal to a Llama that has all heads in every
    layer."""
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    registry.register(
        "ToyForCausalLM", dataclasses.replace(toy_family.FAMILY, layers_differ=True, model=LLAMA)
    )
    hf = save_checkpoint(tmp_path, "llama", num_key_value_heads=6, hidden_size=48)
    save_file(narrowed(hf.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    heads, kv_heads, dims = (list(column) for column in zip(*SHAPES))
    source.config.update(architectures=["ToyForCausalLM"], model_type="toy", num_attention_heads=heads)
    source.config.update(num_key_value_heads=kv_heads, head_dim=dims)
    model = load_model(source)
    assert [layer.tensors[0].shape for layer in model.state()] == [(3, 8), (3, 8), (6, 4)]
    rows = Eager(model, native=native, budget=40).generate(PROMPTS, 12)
    check_against_hf(rows, 12, hf)
    matrices = sum(p.numel() for p in narrowed(hf.state_dict()).values() if p.dim() > 1)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    with pytest.raises(ConfigError, match="head_dim is .* a list of 3 numbers"):
        read_decoder(source.config | {"head_dim": [8, 8]})


def with_sinks(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    rope, _ = ropes(c, 8, positions)
    return tuple(AttentionSpec(6, 2, 8, 8**-0.5, rope, sinks=True) for _ in range(layers))


@torch.no_grad()
def test_sinks_equal_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama with the attention of gpt-oss."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.eager_attention_forward", eager_attention_forward
    )
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    family = dataclasses.replace(toy_family.FAMILY, model=LLAMA, attention="test_families:with_sinks")
    registry.register("ToyForCausalLM", family)
    hf = save_checkpoint(tmp_path, "llama")
    hf.set_attn_implementation("eager")
    for layer in hf.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(6) + 2)
    save_file({name: x.contiguous() for name, x in hf.state_dict().items()}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.config.update(architectures=["ToyForCausalLM"], model_type="toy")
    for native in (False, True):
        rows = Eager(load_model(source), native=native, budget=40).generate(PROMPTS, 12)
        check_against_hf(rows, 12, hf)


class SharingAttention:
    """Attention of a layer that makes queries alone, and reads keys and values of another."""

    def __init__(
        self, build: Build, name: str, hidden: int, layer: AttentionSpec, cos_sin: torch.Tensor
    ) -> None:
        width = layer.heads * layer.head_dim
        self.q = MergedColumnLinear(build, hidden, [(f"{name}.q_proj", width, range(width))])
        self.out = RowLinear(build, f"{name}.o_proj", hidden, width, range(width))
        self.layer, self.cos_sin = layer, cos_sin

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVLayer) -> torch.Tensor:
        q = self.q(x).unflatten(1, (-1, self.layer.head_dim))
        q = ops.rotate(q, batch.positions, self.cos_sin).flatten(1)
        return ops.attention(q, kv, batch, self.layer.scale)


class Sharing(Llama):
    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if layer.reads is None:
            return super().attention(build, name, index)
        return SharingAttention(build, name, self.spec.hidden, layer, self.angles(layer.rope, layer.head_dim))


def sharing(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    rope, _ = ropes(c, 8, positions)
    own = AttentionSpec(6, 2, 8, 8**-0.5, rope)
    return (own, own, *[dataclasses.replace(own, reads=1)] * (layers - 2))


@torch.no_grad()
def test_layers_that_read_what_another_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 3n and 4 have them: equal to a Llama whose later layers are given keys and values of the
    second."""
    from transformers.models.llama import modeling_llama

    eager, kept = modeling_llama.eager_attention_forward, {}

    def given(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        kept[module.layer_idx] = key, value
        return eager(module, query, *kept[min(1, module.layer_idx)], *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", given)
    monkeypatch.setattr(registry, "_GENERATING", dict(registry._GENERATING))
    family = dataclasses.replace(
        toy_family.FAMILY, model="test_families:Sharing", attention="test_families:sharing"
    )
    registry.register("ToyForCausalLM", family)
    hf = save_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    hf.set_attn_implementation("eager")
    gone = [f"model.layers.{i}.self_attn.{which}_proj.weight" for i in (2, 3) for which in "kv"]
    own = {name: x.contiguous() for name, x in hf.state_dict().items() if name not in gone}
    save_file(own, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.config.update(architectures=["ToyForCausalLM"], model_type="toy")
    for native in (False, True):
        model = load_model(source)
        assert token_bytes(model.state(), "float32") == 2 * 2 * 2 * 8 * 4
        rows = Eager(model, native=native, budget=40).generate(PROMPTS, 12)
        check_against_hf(rows, 12, hf)
