"""Adapters: the same numbers as a base with merged weights, alone and in a batch of many, float32."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, ATTENTION, load, save_adapter, save_merged
from checkpoints import DELTA_NET, save_checkpoint
from forked import ForkedExecutor
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny import Transcript, make_core, run, run_executor, submit, tiny_config

from sgla.actors.adapters import Adapter, AdapterTable
from sgla.config import Config
from sgla.errors import ConfigError, InvalidAdapter
from sgla.hub.adapter import CONFIG, PATTERNS, LoraConfig, _compiled
from sgla.hub.source import open_source
from sgla.loading.adapter import WEIGHTS
from sgla.messages import Control, Submit
from sgla.quant.weight import Weight, pack
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

TOLERANCE = 1e-4
DELTA = DELTA_NET | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID = DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
HYBRID |= {"shared_expert_intermediate_size": 72}
NETS = "in_proj_qkvz", "in_proj_ba", "out_proj"
PROMPT = list(range(5, 29))


def runner_of(folder: Path, **changes: Any) -> CpuRunner:
    source = open_source(folder)
    if changes.get("speculative_algorithm") == "draft_model":  # the base guesses for all
        source = dataclasses.replace(source, draft=source)
    return CpuRunner(tiny_config(**changes), source, 0, 1, "", lambda progress: None)


def adapted(base: Path, **changes: Any) -> CpuRunner:
    return runner_of(base, enable_lora=True, **{"max_lora_rank": 8} | changes)


def wanted(rid: str, adapter: int, tokens: list[int] = PROMPT, new: int = 6) -> Submit:
    made = submit(rid, tokens, new, logprobs=0, prompt_logprobs=0, seed=3)
    return replace(made, adapter=adapter, namespace=str(adapter))


def logprobs(runner: CpuRunner, submits: list[Submit], **limits: Any) -> dict[str, torch.Tensor]:
    """Of prompt and outputs, which are greedy."""
    return numbers(run(runner, submits, make_core(runner.facts, adapters=runner.facts.adapters, **limits)))


def numbers(transcript: Transcript) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rid, deltas in transcript.items():
        prompt = [p for delta in deltas for p in delta.prompt_logprobs or () if p is not None]
        outputs = [p for delta in deltas for p in delta.logprobs or ()]
        found[rid] = torch.tensor([p.logprob for p in prompt + outputs])
    return found


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= TOLERANCE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "llama", head_dim=8)
    return folder


@pytest.mark.parametrize("native", [True, False])
def test_each_role_is_as_merged(base: Path, tmp_path: Path, native: bool) -> None:
    """Adapters of one module each, all in one batch with the base, and each alone."""
    runner = adapted(base, native_kernels=native, max_loras=8)
    expected = {"base": logprobs(runner_of(base, native_kernels=native), [wanted("base", 0)])["base"]}
    for number, module in enumerate(ALL, 1):
        added = save_adapter(tmp_path / module, base, [module], seed=number)
        load(runner, number, tmp_path / module)
        merged = runner_of(save_merged(tmp_path / f"{module}-merged", base, added), native_kernels=native)
        expected[module] = logprobs(merged, [wanted(module, 0)])[module]
        check_equal(logprobs(runner, [wanted(module, number)])[module], expected[module])
    check_equal(logprobs(runner, [wanted("base", 0)])["base"], expected["base"])
    submits = [wanted(module, number) for number, module in enumerate(ALL, 1)] + [wanted("base", 0)]
    for rid, found in logprobs(runner, submits).items():
        check_equal(found, expected[rid])
    assert len({round(values.sum().item(), 2) for values in expected.values()}) == len(expected)


def test_a_batch_of_eight_adapters(base: Path, tmp_path: Path) -> None:
    """Of all roles, ranks and scales, beside base rows; with two places for them; chunked, with few pages."""
    kinds: list[dict[str, Any]] = [
        {},
        {"rank": 8, "use_rslora": True},
        {"rank": 1, "lora_alpha": 3.5},
        {"ranks": {"q_proj": 8, "down_proj": 2}, "alpha_pattern": {"q_proj": 4, "down_proj": 1}},
        {"modules": ATTENTION},
        {"modules": ("gate_proj", "down_proj")},
        {"drop": ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
        {"modules": ("v_proj",), "rank": 3},
    ]
    runner = adapted(base, max_loras=8)
    few = adapted(base, max_loras=2)
    expected = {"base": logprobs(runner_of(base), [wanted("base", 0, new=14)])["base"]}
    for number, kind in enumerate(kinds, 1):
        folder = tmp_path / str(number)
        added = save_adapter(folder, base, seed=number, **kind)
        load(runner, number, folder)
        load(few, number, folder)
        merged = runner_of(save_merged(tmp_path / f"{number}-merged", base, added))
        expected[f"a{number}"] = logprobs(merged, [wanted("x", 0, new=14)])["x"]
    submits = [wanted(f"a{n}", n, new=14) for n in range(1, 9)] + [wanted("base", 0, new=14)]
    short = make_core(few.facts, adapters=2, pages=6, reserve=0.0)
    for found in (
        logprobs(runner, submits),
        logprobs(few, submits),
        logprobs(runner, submits, step_tokens=7),
        numbers(run(few, submits, short)),
    ):
        assert found.keys() == expected.keys()
        for rid, values in found.items():
            check_equal(values, expected[rid])
    assert short.stats().preemptions > 0
    assert short.stats().adapter_loads == 8


@pytest.mark.parametrize(
    ("ways", "nets"), [({"tp": 2}, False), ({"pp": 2}, False), ({"tp": 2}, True)], ids=["tp", "pp", "nets"]
)
def test_two_ranks_are_as_one(base: Path, tmp_path: Path, ways: dict[str, int], nets: bool) -> None:
    submits = [wanted(f"a{number}", number) for number in range(4)]
    if nets:
        base = tmp_path / "nets"
        save_checkpoint(base, "qwen3_next", **HYBRID)
    runner = adapted(base)
    for number in (1, 2, 3):
        save_adapter(tmp_path / str(number), base, (*ATTENTION, *NETS) if nets else ALL, seed=number)
        load(runner, number, tmp_path / str(number))
    alone = logprobs(runner, submits)
    contents = set()
    save_adapter(tmp_path / "odd", base, ATTENTION)
    _rename(tmp_path / "odd", "layers.1", "layers.9")

    async def ranks() -> Transcript:
        config = tiny_config(**ways, enable_lora=True, max_lora_rank=8)
        executor = ForkedExecutor(config, open_source(base))
        try:
            facts = await executor.start(lambda progress: None)
            for number in (1, 2, 3):
                args = {"number": number, "path": str(tmp_path / str(number))}
                told = await executor.control(Control(verb="adapter_load", args=args))
                contents.add(tuple(rank["content"] for rank in told["ranks"]))
            none = Control(verb="adapter_load", args={"number": 9, "path": str(tmp_path / "none")})
            with pytest.raises(InvalidAdapter, match=r"none/adapter_config\.json"):
                await executor.control(none)
            odd = Control(verb="adapter_load", args={"number": 8, "path": str(tmp_path / "odd")})
            with pytest.raises(InvalidAdapter, match=r"layers\.9.* this model has no such layer"):
                await executor.control(odd)
            stages = ways.get("pp", 1)
            limits = {"stages": stages, "depth": stages + 1, "adapters": facts.adapters}
            return await run_executor(executor, facts, submits, **limits)
        finally:
            await executor.close()

    for rid, found in numbers(asyncio.run(ranks())).items():
        check_equal(found, alone[rid])
    assert runner.adapters is not None
    whole = [runner.adapters._load(9, tmp_path / str(number))["content"] for number in (1, 2, 3)]
    assert contents == {(content, content) for content in whole}


def test_prefixes_of_an_adapter_are_known_by_its_weights(base: Path, tmp_path: Path) -> None:
    """A number means another adapter to another server."""
    runner = adapted(base)
    assert runner.adapters is not None
    content = {}
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        save_adapter(tmp_path / name, base, seed=seed)
        content[name] = runner.adapters._load(len(content) + 1, tmp_path / name)["content"]
    assert content["first"] == content["same"] != content["other"]
    table = AdapterTable(tiny_config())
    for number, name in enumerate(content, 1):
        table._by_number[number] = Adapter(name=name, folder="", number=number, content=content[name])
    spaces = [table.namespace("salt", number) for number in range(4)]
    assert spaces[1] == spaces[2]
    assert len({spaces[0], spaces[1], spaces[3], table.namespace("", 1), table.namespace(spaces[1], 0)}) == 5


async def test_an_adapter_comes_although_its_client_goes(tmp_path: Path) -> None:
    """The workers have it then, under a number that nobody would know."""
    table, read = AdapterTable(tiny_config(enable_lora=True, lora_folders=[str(tmp_path)])), asyncio.Event()

    async def tell(command: Control) -> dict[str, Any]:
        await read.wait()
        return {}

    table.connect(tell, lambda told: None)
    asks = asyncio.ensure_future(table.load("one", str(tmp_path)))
    await asyncio.sleep(0.001)
    asks.cancel()
    await asyncio.wait([asks])
    read.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert asks.cancelled()
    assert "one" in table.loaded
    await table.unload("one")


def _config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def _cut(folder: Path, part: float) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(len(data) * part)])


def _add(folder: Path, name: str, tensor: torch.Tensor) -> None:
    _tensors(folder, lambda tensors: tensors.update({name: tensor}))


def _rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


Q_A, Q_B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")
MAGNITUDE = Q_A.replace("A.weight", "magnitude_vector")
BASE = "base_model.model.model.embed_tokens.base_layer.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
NAN, INF = float("nan"), float("inf")
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (lambda f: _config(f, use_dora=True), "DoRA is not supported"),
    "other kind": (lambda f: _config(f, peft_type="IA3"), "peft_type is 'IA3', only LORA"),
    "bias": (lambda f: _config(f, bias="lora_only"), "bias 'lora_only' is not supported"),
    "modules to save": (lambda f: _config(f, modules_to_save=["x"]), "modules_to_save in adapter_conf"),
    "pissa": (lambda f: _config(f, init_lora_weights="pissa"), "'pissa' changes the base's weights"),
    "parameters": (
        lambda f: _config(f, target_parameters=["x"]),
        "'x' in target_parameters is not supported",
    ),
    "new key": (lambda f: _config(f, use_magic=True), "use_magic in adapter_config.json is not supported"),
    "rank": (lambda f: _config(f, r=16), "r is 16, more than --max-lora-rank 8; start the server with"),
    "no rank": (lambda f: _config(f, r=0), "r is 0, not from 1 to 256"),
    "huge rank": (lambda f: _config(f, r=257), "r is 257, not from 1 to 256"),
    "rank of a word": (
        lambda f: _config(f, rank_pattern={"q_proj": "8"}),
        r"rank_pattern\[q_proj\] is '8', not from",
    ),
    "slow pattern": (lambda f: _config(f, rank_pattern={"(a+)+b": 4}), "is no plain name of a module"),
    "slow beginning": (lambda f: _config(f, rank_pattern={".*a.*b": 4}), "is no plain name of a module"),
    "alpha": (lambda f: _config(f, lora_alpha=NAN), "lora_alpha is nan, not a number"),
    "alpha of 400 digits": (lambda f: _config(f, lora_alpha=10**400), "not a number of at most 1e.30"),
    "rooted by a word": (lambda f: _config(f, use_rslora="yes"), "use_rslora is 'yes', not true or false"),
    "half an escape": (lambda f: _config(f, rank_pattern={"q_proj\\": 4}), "is no plain name of a module"),
    "no group": (lambda f: _config(f, alpha_pattern={r"\1": 4}), "is no plain name of a module"),
    "other rank": (lambda f: _config(f, r=2), r"lora_[AB] has shape .*, expected"),
    "no config": (lambda f: (f / CONFIG).unlink(), "adapter_config.json cannot be read: No such file"),
    "a pipe": (lambda f: ((f / CONFIG).unlink(), os.mkfifo(f / CONFIG)), "adapter_config.json is no file"),
    "no json": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json is not valid JSON"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "pickled": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "adapter_model.bin is not read"),
    "cut header": (lambda f: _cut(f, 0.01), "cannot be read"),
    "cut": (lambda f: _cut(f, 0.7), "cannot be read"),
    "empty": (lambda f: _cut(f, 0), "cannot be read"),
    "too large": (lambda f: _add(f, "x", torch.zeros(1 << 19)), "more than an adapter of rank 8 can have"),
    "nan": (lambda f: _tensors(f, lambda t: t[Q_A].fill_(NAN)), "values that are no numbers"),
    "infinite": (lambda f: _tensors(f, lambda t: t[Q_B][3].fill_(INF)), "values that are no numbers"),
    "integers": (lambda f: _add(f, Q_A, torch.ones(4, 48, dtype=torch.int32)), "has type torch.int32"),
    "half": (lambda f: _tensors(f, lambda t: t.pop(Q_B)), "lora_B is missing"),
    "shape": (lambda f: _add(f, Q_A, torch.ones(4, 47)), r"expected \[4, 48\] \(another base\?\)"),
    "magnitudes": (lambda f: _add(f, MAGNITUDE, torch.ones(3)), "DoRA is not supported"),
    "embedding": (lambda f: _add(f, EMBEDDING, torch.ones(4, 311)), "embed_tokens in --lora-target-modules"),
    "weights of the base": (lambda f: _add(f, BASE, torch.ones(3)), "save_embedding_layers=False"),
    "other base": (lambda f: _rename(f, "layers.0", "layers.7"), "no such layer that adapters can change"),
    "other names": (lambda f: _rename(f, "lora_A", "down"), "is no layer's lora_A or lora_B"),
    "twice": (lambda f: _add(f, Q_A.removeprefix("base_model.model."), torch.ones(4, 48)), "is there twice"),
    "nothing": (lambda f: _tensors(f, lambda t: t.clear()), "has no tensors"),
}


@pytest.fixture(scope="module")
def server(base: Path) -> CpuRunner:
    return adapted(base)


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters_are_refused(server: CpuRunner, base: Path, tmp_path: Path, kind: str) -> None:
    """Each with a reason, and nothing of it is taken."""
    save_adapter(tmp_path / "bad", base)
    spoil, message = BAD[kind]
    spoil(tmp_path / "bad")
    with pytest.raises(InvalidAdapter, match=message):
        load(server, 1, tmp_path / "bad")
    assert server.adapters is not None
    assert not server.adapters._host


def test_layers_are_named_as_files_and_peers_name_them(base: Path) -> None:
    runner = adapted(base, lora_target_modules=["qkv_proj", "down_proj"])
    assert runner.adapters is not None
    found = {name.rpartition(".")[2] for name in runner.adapters.adapters.table}
    assert found == {"q_proj", "k_proj", "v_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r"zzz: no layer of this model is called so; there are down_proj, "):
        adapted(base, lora_target_modules=["q_proj", "zzz"])
    for every in ("all", "all-linear"):
        asked = Config(device="cpu", enable_lora=True, lora_target_modules=[every])
        assert resolve(asked).config.lora_target_modules == []
        with pytest.raises(ConfigError, match="all stands alone"):
            resolve(replace(asked, lora_target_modules=[every, "lm_head"]))


@pytest.mark.parametrize("pattern", [r".*\.gate_up_proj", ".*_proj", ".*experts.gate_up_proj"])
def test_patterns_may_begin_with_anything(pattern: str) -> None:
    """As those that PEFT makes of gate_proj and up_proj of experts."""
    config = LoraConfig(4, 4.0, {pattern: 8}, {pattern: 16.0}, False)
    told = [config.rank_of(name) for name in ("layers.0.mlp.experts.gate_up_proj", "gate_up_proj.x")]
    assert (told, config.scale_of("mlp.experts.gate_up_proj")) == ([8, 4], 2.0)


def test_many_patterns_are_compiled_once() -> None:
    """Or those of a hostile adapter would keep others waiting for minutes."""
    patterns = {f"{'a' * 150}\\w{i}": 4 for i in range(PATTERNS)}
    config = LoraConfig(8, 8.0, patterns, patterns, False)
    _compiled.cache_clear()
    for layer in range(3):
        assert config.rank_of(f"model.layers.{layer}.self_attn.q_proj") == 8
        assert config.scale_of(f"model.layers.{layer}.self_attn.q_proj") == 1.0
    assert _compiled.cache_info().misses == PATTERNS


def test_names_of_no_layer_are_compared_with_no_pattern(
    server: CpuRunner, base: Path, tmp_path: Path
) -> None:
    """For they may be as long as a file, and patterns as many as ``PATTERNS``."""
    save_adapter(tmp_path / "bad", base, rank_pattern={f".*{'a' * 99}{i}": 4 for i in range(PATTERNS)})
    _rename(tmp_path / "bad", "model.layers.", f"{'a' * 9_999}.")
    _compiled.cache_clear()
    with pytest.raises(InvalidAdapter, match="this model has no such layer"):
        load(server, 1, tmp_path / "bad")
    assert _compiled.cache_info().misses == 0


def test_good_adapters_of_other_types(server: CpuRunner, base: Path, tmp_path: Path) -> None:
    """PEFT writes what training used; keys that are off are no obstacle."""
    save_adapter(tmp_path / "good", base, use_dora=False, modules_to_save=None, loftq_config={})
    _tensors(tmp_path / "good", lambda t: t.update({name: x.half() for name, x in t.items()}))
    load(server, 7, tmp_path / "good")
    assert server.adapters is not None
    assert server.adapters._host.pop(7).ranks == [4] * 3 * 4  # q, k and v are one, and gate and up


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "quantization": "int8"}])
def test_copies_of_the_base_lie_beside_what_is_added_to_its_tables(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT writes them, with an adapter of these layers; they have to be the base's, whose weights are not
    read again: a GPU of a server that sleeps has none."""
    tables = "embed_tokens", "lm_head"
    settings = {"lora_target_modules": [*tables, "q_proj"], "quantization": changes.pop("quantization", None)}
    save_checkpoint(tmp_path / "base", "llama", head_dim=8, **changes)
    runner = adapted(tmp_path / "base", **settings)
    monkeypatch.delattr(Weight, "told")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    own = {"model.embed_tokens": weights["model.embed_tokens.weight"]}
    own["lm_head"] = weights.get("lm_head.weight", own["model.embed_tokens"])
    folder = tmp_path / "adapter"
    save_adapter(folder, tmp_path / "base", settings["lora_target_modules"])
    load(runner, 1, folder)
    assert runner.adapters is not None
    alone = runner.adapters._host[1].memory
    copies = {f"base_model.model.{name}.base_layer.weight": copy.clone() for name, copy in own.items()}
    _tensors(folder, lambda tensors: tensors.update(copies))
    load(runner, 2, folder)
    assert torch.equal(runner.adapters._host[2].memory, alone)
    q_proj = "model.layers.0.self_attn.q_proj"
    for name, copy, why in (
        ("lm_head", torch.randn_like(own["lm_head"]), "lm_head is another one than the base's"),
        ("lm_head", own["lm_head"] * NAN, "lm_head is another one than the base's"),
        ("model.embed_tokens", own["lm_head"][:-1], r"embed_tokens has shape \[\d+, 48\], and the base's"),
        (q_proj, weights[f"{q_proj}.weight"], "no weights of the base"),
    ):
        _add(folder, f"base_model.model.{name}.base_layer.weight", copy.clone())
        with pytest.raises(InvalidAdapter, match=why):
            load(runner, 3, folder)
        _tensors(folder, lambda tensors: tensors.update(copies))


SPACES = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "q, k and v, gate and up fused": ("phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "q, k and v fused head by head": (
        "gpt_neox",
        {"num_key_value_heads": ...},
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "dims that rotate in pairs": ("cohere", {"tie_word_embeddings": True, "head_dim": 8}, ALL),
    "norms around, tied": ("gemma3_text", {"head_dim": 8, "tie_word_embeddings": True}, ALL),
    "a mixture's other layers": (
        "qwen3_moe",
        {"head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
        ATTENTION,
    ),
    "a gate behind each query, delta nets": ("qwen3_next", HYBRID, (*ATTENTION, *NETS)),
    "delta nets whose rows are apart": (
        "qwen3_5_text",
        DELTA,
        (*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
    "state spaces with their factors": (
        "falcon_h1",
        SPACES | {"mamba_d_ssm": None, "ssm_multipliers": [0.5, 0.7, 1.2, 1.1, 0.9]},
        ("in_proj", "out_proj", "q_proj"),
    ),
    "the first state spaces": (
        "jamba",
        {"num_experts": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8},
        ("in_proj", "x_proj", "dt_proj", "v_proj"),
    ),
    "both ends": ("llama", {"head_dim": 8}, ("lm_head", "up_proj", "embed_tokens")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_families_are_as_merged(tmp_path: Path, family: str) -> None:
    kind, changes, modules = FAMILIES[family]
    save_checkpoint(tmp_path / "base", kind, **changes)
    added = save_adapter(tmp_path / "adapter", tmp_path / "base", modules)
    assert {name.split(".")[-2] for name in added} == set(modules)
    targets = list(modules) if "lm_head" in modules else []
    native = {"native_kernels": family == "both ends"}
    runner = adapted(tmp_path / "base", lora_target_modules=targets, **native)
    load(runner, 1, tmp_path / "adapter")
    merged = runner_of(save_merged(tmp_path / "merged", tmp_path / "base", added))
    found = logprobs(runner, [wanted("adapted", 1), wanted("base", 0)])
    check_equal(found["adapted"], logprobs(merged, [wanted("x", 0)])["x"])
    check_equal(found["base"], logprobs(runner_of(tmp_path / "base"), [wanted("x", 0)])["x"])
    assert (found["adapted"] - found["base"]).abs().max() > 0.01


def test_a_quantized_base_is_as_its_values_with_merged_weights(base: Path, tmp_path: Path) -> None:
    """An adapter's numbers are not rounded with those of the base."""
    added = save_adapter(tmp_path / "adapter", base)
    tensors = load_file(base / "model.safetensors")
    rounded = {
        name: pack(x, "int8").dequant().contiguous() if x.dim() == 2 else x for name, x in tensors.items()
    }
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    merged = runner_of(save_merged(tmp_path / "merged", tmp_path, added))
    quantized = adapted(base, quantization="int8")
    load(quantized, 1, tmp_path / "adapter")
    found = logprobs(quantized, [wanted("adapted", 1), wanted("base", 0)])
    check_equal(found["adapted"], logprobs(merged, [wanted("x", 0)])["x"])
    check_equal(found["base"], logprobs(runner_of(tmp_path), [wanted("x", 0)])["x"])


SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "int8": ({"quantization": "int8", "native_kernels": True}, 0.05),
    "bfloat16": ({"dtype": "bfloat16", "native_kernels": True}, 0.2),
    "drafts": ({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 3}, 0.0),
    "model's drafts": ({"speculative_algorithm": "draft_model", "speculative_num_draft_tokens": 3}, 0.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_change_no_more_than_without_adapters(base: Path, tmp_path: Path, name: str) -> None:
    """A base in fewer bits differs by its bits alone; with drafts the text is the same."""
    settings, tolerance = SETTINGS[name]
    repetitive = [7, 8, 9] * 8
    submits = [wanted(f"a{number}", number, repetitive, new=12) for number in range(3)]
    found: list[dict[str, torch.Tensor]] = []
    for changes in ({}, settings):
        runner = adapted(base, **changes)
        for number in (1, 2):
            save_adapter(tmp_path / str(number), base, seed=number)
            load(runner, number, tmp_path / str(number))
        found.append(logprobs(runner, submits, drafts=runner.facts.drafts))
    plain, other = found
    prompt = len(repetitive) - 1
    for rid, values in plain.items():
        count = len(values) if name.endswith("drafts") else prompt  # outputs may part where rounding decides
        difference = (values[:count] - other[rid][:count]).abs().mean().item()
        assert difference <= max(tolerance, TOLERANCE)
    assert (plain["a0"][:prompt] - plain["a1"][:prompt]).abs().mean() > 0.5
