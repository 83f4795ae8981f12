"""DeepSeek V4 against HF transformers, float32 on the CPU: windows, entries of which all are read or
some, several streams, experts that a table chooses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, Eager, decided, random_prompts, save_checkpoint
from safetensors.torch import load_file, save_file
from tiny import make_core, over_two_ranks, run, submit, tiny_config

from sgla.errors import ConfigError, WeightError
from sgla.hub.source import open_source
from sgla.loading.checkpoint import renamed, stored_tensors
from sgla.loading.load import load_model
from sgla.loading.quantize import nearest, plan, write
from sgla.model.compressed_spec import CompressedSpec
from sgla.model.read import read_decoder
from sgla.model.registry import family_of
from sgla.model.sizes import weight_bytes
from sgla.observe.machine import detect
from sgla.quant.mxfp4 import VALUES
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

PROMPTS = random_prompts([1, 7, 33, 60])
KINDS = ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2]
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
SIZES: dict[str, Any] = {
    "intermediate_size": ...,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 16,
    "layer_types": KINDS,
    "compress_rates": RATES,
    "index_topk": 6,
    "index_n_heads": 12,
    "index_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "swiglu_limit": 0.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "all kinds": {},
    "wide entries, stretched": {
        "compress_rates": {"compressed_sparse_attention": 16, "heavily_compressed_attention": 32},
        "sliding_window": 32,
        "rope_parameters": YARN,
        "layer_types": KINDS[::-1],
        "hc_mult": 3,
    },
    "one group, all entries": {"o_groups": 1, "index_topk": 64, "scoring_func": "sigmoid", "hc_mult": 2},
}


# Tensors of the published files, but of quantized layers' scales.
_COMPRESSOR = ("ape", "norm.weight", "wgate.weight", "wkv.weight")
_ATTENTION = (
    *("attn_sink", "kv_norm.weight", "q_norm.weight"),
    *(f"{part}.weight" for part in ("wkv", "wo_a", "wo_b", "wq_a", "wq_b")),
    *(f"{of}.{part}" for of in ("compressor", "indexer.compressor") for part in _COMPRESSOR),
    *("indexer.weights_proj.weight", "indexer.wq_b.weight"),
)
_MLP = (
    *("gate.weight", "gate.bias", "gate.tid2eid"),
    *(f"{of}.w{n}.weight" for of in ("experts.N", "shared_experts") for n in (1, 2, 3)),
)
_STREAMS = [f"hc_{of}_{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale")]
PUBLISHED = {
    *("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"),
    *(f"layers.N.attn.{part}" for part in _ATTENTION),
    *(f"layers.N.ffn.{part}" for part in _MLP),
    *(f"layers.N.{part}" for part in ("attn_norm.weight", "ffn_norm.weight", *_STREAMS)),
}


def saved(folder: Path, **changes: Any) -> Any:
    """With tables of tokens that are no zeros."""
    hf = save_checkpoint(folder, "deepseek_v4", **SIZES | changes)
    generator = torch.Generator().manual_seed(3)
    for name, table in hf.named_buffers():
        if name.endswith("tid2eid"):
            experts = torch.rand(len(table), 8, generator=generator).argsort(1)
            table.copy_(experts[:, : table.shape[1]])
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize(
    "name", [*list(LAYOUTS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[2:])]
)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In torch, in a CPU program in chunks, and a prompt alone."""
    hf = saved(tmp_path, **LAYOUTS[name])
    model = load_model(open_source(tmp_path))
    expected = torch.cat([hf(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS])
    found = Eager(model, page_size=16).prompt_logprobs(PROMPTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    matrices = sum(p.numel() for key, p in hf.named_parameters() if p.dim() > 1 and "bias" not in key)
    assert abs(weight_bytes(model.spec, "float32", None, 1) / 4 / matrices - 1) < 0.02
    whole = decided(Eager(model, 150, 16).generate(PROMPTS, 6))
    assert decided(Eager(model, 40, 16, native=True).generate(PROMPTS, 6)) == whole
    assert decided(Eager(model, page_size=16, native=True).generate(PROMPTS[2:3], 6)) == whole[2:3]


@torch.no_grad()
def test_entries_that_tokens_choose_take_no_memory_while_a_model_is_recorded(tmp_path: Path) -> None:
    """Where a symbol stands for the tokens, which is a large number: of 512 entries each 32 GB."""
    saved(tmp_path, index_topk=1 << 16)
    model = load_model(open_source(tmp_path))
    whole = decided(Eager(model, 150, 16).generate(PROMPTS, 2))
    assert decided(Eager(model, 40, 16, native=True).generate(PROMPTS, 2)) == whole


async def test_chunks_caches_and_ranks_change_nothing(tmp_path: Path) -> None:
    """Beside windows that give pages back."""
    saved(tmp_path)
    source = open_source(tmp_path)
    prompts = random_prompts([1, 7, 33, 90])
    requests = [submit(str(i), prompt, 8) for i, prompt in enumerate(prompts)]
    runner = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    assert [group.window for group in runner.facts.groups] == [0, 16]
    expected = run(runner, requests).tokens()
    core = make_core(runner.facts, step_tokens=24)
    assert run(runner, requests, core).tokens() == expected
    warm = run(runner, requests, core)
    assert warm.tokens() == expected
    assert any(delta.cached_tokens for deltas in warm.values() for delta in deltas)
    assert (await over_two_ranks(source, requests)).tokens() == expected


def test_wrong_guesses_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither in windows, nor in entries that were made of them."""
    saved(tmp_path)
    source, prompts = open_source(tmp_path), random_prompts([7, 12])
    requests = [submit(str(i), (prompt * 6)[:50], 60) for i, prompt in enumerate(prompts)]
    plain = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    guessing = tiny_config(speculative_algorithm="ngram", speculative_num_draft_tokens=3)
    runner = CpuRunner(guessing, source, 0, 1, "", lambda progress: None)
    found = run(runner, requests, make_core(runner.facts, drafts=3, depth=1))
    assert found.tokens() == run(plain, requests).tokens()
    last = [delta.guesses for deltas in found.values() for delta in deltas if delta.finish]
    assert all(guesses[0] > 20 for guesses in last)


@torch.no_grad()
def test_a_file_may_have_the_names_it_was_published_with(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, own = load_file(path), Eager(load_model(open_source(tmp_path)), page_size=16)
    names = {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.": ""}
    stored = {}
    for name, tensor in tensors.items():
        for theirs, published in names.items():
            if name.startswith(theirs):
                name = published + name.removeprefix(theirs)
                break
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        stored[name] = tensor.int() if name.endswith("tid2eid") else tensor
    assert {re.sub(r"\.\d+\.", ".N.", name) for name in stored} == PUBLISHED
    save_file(stored | {"mtp.0.norm.weight": torch.ones(48)}, path, {"format": "pt"})
    found = Eager(load_model(open_source(tmp_path)), page_size=16)
    assert torch.equal(found.prompt_logprobs(PROMPTS), own.prompt_logprobs(PROMPTS))


def test_a_table_of_experts_that_are_not_there_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.ffn.gate.tid2eid"
    for wrong in (-1, 8):
        tensors[name][7, 1] = wrong
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(WeightError, match="not among the 8"):
            load_model(open_source(tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_experts_may_be_of_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    """As a trainer has it; they are whole numbers, or refused."""
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    expected = Eager(load_model(open_source(tmp_path)), page_size=16).prompt_logprobs(PROMPTS[:2])
    tensors, name = load_file(path), "model.layers.0.ffn.gate.tid2eid"
    tables = {key: table.to(dtype) for key, table in tensors.items() if key.endswith("tid2eid")}
    save_file(tensors | tables, path, {"format": "pt"})
    found = Eager(load_model(open_source(tmp_path)), page_size=16).prompt_logprobs(PROMPTS[:2])
    assert torch.equal(found, expected)
    for wrong in (0.5, float("nan"), 2.0**40):
        tables[name][7, 1] = wrong
        save_file(tensors | tables, path, {"format": "pt"})
        with pytest.raises(WeightError, match="no whole numbers"):
            load_model(open_source(tmp_path))


@torch.no_grad()
def test_a_trainer_sends_all_that_it_has(tmp_path: Path) -> None:
    """The tables of experts, too."""
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    model, other = load_model(open_source(tmp_path)), load_model(open_source(tmp_path, "dummy"))
    assert other.declared is not None
    other.declared.take(tensors, look=True)
    other.declared.take(tensors)
    found, expected = (Eager(each, page_size=16).prompt_logprobs(PROMPTS) for each in (other, model))
    assert torch.equal(found, expected)
    norm, wrong = "model.norm.weight", dict(tensors)
    wrong[norm] = torch.zeros(48)
    table = wrong["model.layers.2.ffn.gate.tid2eid"] = wrong["model.layers.2.ffn.gate.tid2eid"].clone()
    table[7, 1] = 8
    for look in (True, False):
        with pytest.raises(WeightError, match="not among the 8"):
            other.declared.take(wrong, look=look)
    assert torch.equal(Eager(other, page_size=16).prompt_logprobs(PROMPTS), expected)
    with pytest.raises(WeightError, match=r"no float: model\.norm\.weight"):
        other.declared.take({"model.norm.weight": torch.ones(48, dtype=torch.int64)})


@torch.no_grad()
def test_quantizing_leaves_the_tables_of_experts_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    write(plan(open_source(tmp_path / "model"), "int8"), tmp_path / "out", nearest, lambda _: None)
    tables = [
        {
            name: tensor
            for path in sorted((tmp_path / folder).glob("*.safetensors"))
            for name, tensor in load_file(path).items()
            if name.endswith("tid2eid")
        }
        for folder in ("model", "out")
    ]
    assert tables[0].keys() == tables[1].keys()
    assert all(torch.equal(tensor, tables[1][name]) for name, tensor in tables[0].items())
    found = Eager(load_model(open_source(tmp_path / "out")), page_size=16).prompt_logprobs(PROMPTS)
    expected = Eager(load_model(open_source(tmp_path / "model")), page_size=16).prompt_logprobs(PROMPTS)
    assert (found - expected).abs().mean() < 0.05


@torch.no_grad()
def test_experts_in_e2m1_beside_layers_in_e4m3(tmp_path: Path) -> None:
    """As it is published: numbers of 4 and of 8 bits with powers of two."""
    saved(tmp_path, hidden_size=64)
    path = tmp_path / "model.safetensors"
    plain, stored = load_file(path), {}
    for name, tensor in list(plain.items()):
        module, what = name.rpartition(".")[::2]
        if ".experts." in name:
            numbers = torch.randint(-128, 128, (tensor.shape[0], tensor.shape[1] // 2), dtype=torch.int8)
            powers = torch.randint(120, 125, (tensor.shape[0], tensor.shape[1] // 32), dtype=torch.uint8)
            stored |= {name: numbers, f"{module}.scale": powers.view(torch.float8_e8m0fnu)}
            pairs = numbers.view(torch.uint8)
            values = torch.tensor(VALUES)[torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).long()]
            plain[name] = values * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
        elif what == "weight" and tensor.dim() == 2 and ".attn.w" in name:
            powers = torch.full(
                (-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)), 118, dtype=torch.uint8
            )
            numbers = (tensor * 2.0**9).to(torch.float8_e4m3fn)
            stored |= {name: numbers, f"{module}.scale": powers.view(torch.float8_e8m0fnu)}
            plain[name] = numbers.float() * 2.0**-9
        else:
            stored[name] = tensor
    save_file(plain, path, {"format": "pt"})
    expected = Eager(load_model(open_source(tmp_path)), page_size=16).prompt_logprobs(PROMPTS[3:])
    save_file(stored, path, {"format": "pt"})
    source = open_source(tmp_path)
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    source.config.update(quantization_config=said, expert_dtype="fp4")
    model = load_model(source)
    found = Eager(model, page_size=16).prompt_logprobs(PROMPTS[3:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    packed = load_model(source, quantization="checkpoint")
    kinds = {packed.blocks[0].mlp.gate_up.kind, packed.blocks[0].attention.q_up.weight.kind}
    assert kinds == {"e2m1", "fp8g128"}
    found = Eager(packed, page_size=16).prompt_logprobs(PROMPTS[3:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": None, "compress_ratios": [0, 4, 128, 8]}, "compress_ratios"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "compress_rates"),
        ({"compress_rates": RATES | {"compressed_sparse_attention": 12}}, "compressed_sparse_attention"),
        ({"compress_rates": RATES | {"heavily_compressed_attention": 0}}, "heavily_compressed_attention"),
        ({"rope_parameters": {"main": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"main": {}, "compress": {}, "factor": 2.0}}, "factor"),
        (
            {"rope_parameters": {part: {"partial_rotary_factor": 0.5} for part in ("main", "compress")}},
            "partial_rotary_factor is 0.5.* 8 of 32",
        ),
        ({"o_groups": 3}, "o_groups"),
        ({"head_dim": 24}, "head_dim"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"qk_rope_head_dim": 16}, "qk_rope_head_dim"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"hc_eps": 0}, "hc_eps"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"expert_dtype": "int4", "quantization_config": {"quant_method": "fp8"}}, "expert_dtype"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], word: str) -> None:
    """By name, before anything is loaded."""
    with pytest.raises(ConfigError, match=word):
        read_decoder(config() | change)


def config() -> dict[str, Any]:
    named = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    return {key: value for key, value in (SMALL | SIZES).items() if value is not ...} | named


def test_published_sizes_follow_from_the_ratios() -> None:
    published = {"layer_types": None, "compress_rates": None, "compress_ratios": [0, 0, 4, 128, 0]}
    spec = read_decoder(config() | published | {"sliding_window": 128})
    assert [layer.rate for layer in spec.attention if isinstance(layer, CompressedSpec)] == [0, 0, 4, 128]
    assert [tensor.shape for tensor in spec.attention[3].beside()] == [(1, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 8}, "--page-size 8 cannot be honoured"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 cannot be honoured"),
        ({"tp": 2, "dp_attention": True}, "--dp-attention"),
        ({"tp": 2, "cp": 2}, "--cp"),
        ({"tp": 4}, "--tp 4 cannot be honoured .* 2 groups"),
    ],
)
def test_settings_that_it_cannot_have_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(tiny_config(**changes), detect(), config())


@pytest.mark.parametrize("changes", [{"page_size": 8}, {"kv_cache_dtype": "int8"}, {"tp": 4}])
def test_a_model_that_guesses_is_checked_as_well(changes: dict[str, Any]) -> None:
    asked = {"speculative_algorithm": "draft_model", "speculative_model": "a/b"}
    target = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    target |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    resolve(tiny_config(**asked), detect(), target, draft=config())
    with pytest.raises(ConfigError, match=r"cannot be honoured by DeepseekV4ForCausalLM"):
        resolve(tiny_config(**asked, **changes), detect(), target, draft=config())


def test_ends_of_names_are_told_from_parts() -> None:
    pairs = family_of("DeepseekV4ForCausalLM").renamed
    assert renamed("layers.0.attn.wkv.scale", pairs) == "model.layers.0.attn.wkv.weight_scale_inv"
    assert renamed("layers.0.attn.scales.x", pairs) == "model.layers.0.attn.scales.x"


def test_no_rows_of_a_tensor_are_none(tmp_path: Path) -> None:
    saved(tmp_path)
    for _, tensor in stored_tensors(open_source(tmp_path)):
        assert len(tensor.values(range(0))) == 0
