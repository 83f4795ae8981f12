"""A pipeline of stages: what it computes is what one rank computes."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_cases import gemma3
from msgspec.structs import replace
from safetensors.torch import load_file, save
from stages import Stages
from test_draft_heads import DEEP, DFLASH, EAGLE, HYBRID, MIMO_7B, Guesses, source_of
from test_draft_heads import LATENT as NEXT
from test_drafts import make_requests as make_repetitive
from test_sleep import save as save_model
from test_worker import make_requests
from tiny import LLAMA, VOCAB, Transcript, check_draws, make_core, run, submit, tiny_config, tiny_source

from sgla.actors.resting import in_memory
from sgla.cli.explain import mesh_lines
from sgla.config import Config
from sgla.device import H200
from sgla.errors import ConfigError
from sgla.hub.source import open_source
from sgla.ledger import ledger, mesh
from sgla.messages import Control, Submit
from sgla.model.read import read_decoder
from sgla.model.stages import cut, stages_of
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "head_dim": 8,
}
WINDOWS = gemma3(
    vocab_size=VOCAB, num_hidden_layers=4, sliding_window=40, max_position_embeddings=256,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
STATES = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, tied": {"tie_word_embeddings": True, "num_hidden_layers": 5},
    "mixture": MIXTURE,
    "latent": LATENT,
    "windows": WINDOWS,
    "states": STATES,
    "a scan beside attention": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": None,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mlp_multipliers": [0.7, 1.5],
    },
    "an MLP beside attention": {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "head_dim": None,
    },
}


def one(source: Any, **changes: Any) -> CpuRunner:
    runner = CpuRunner(tiny_config(**changes), source, 0, 1, "", lambda progress: None)
    check_draws(runner)
    return runner


def requests(model: str) -> list[Submit]:
    """Two of "dense" have 64 tokens with logprobs; the others' texts are short."""
    rng, whole = random.Random(8), model == "dense"
    long, short = ([rng.randrange(VOCAB) for _ in range(n)] for n in (60, 6))
    wanted = [
        submit("least of all", short, 64 if whole else 10, logprobs=2),
        submit("scored", long, 64 if whole else 3, prompt_logprobs=1, logprobs=1),
    ]
    others = make_requests() if whole else make_requests()[3:5]
    return wanted + [replace(other, max_new=12 if whole else 5) for other in others]


def scores(found: Transcript) -> dict[str, list[float]]:
    return {
        rid: [
            lp.logprob
            for delta in deltas
            for lp in [*(delta.prompt_logprobs or []), *(delta.logprobs or [])]
            if lp is not None
        ]
        for rid, deltas in found.items()
    }


@pytest.mark.parametrize(
    ("model", "count"),
    [("dense", 2), ("dense, tied", 3), ("mixture", 2), ("latent", 3), ("windows", 2), ("states", 2)],
)
def test_stages_equal_one_rank(model: str, count: int) -> None:
    """With a cold cache and a warm one; of "dense" also with prompts in chunks, and one step at a time."""
    source, wanted, native = tiny_source(**MODELS[model]), requests(model), model != "mixture"
    expected = run(one(source, native_kernels=native), wanted)
    stages = Stages(source, count, native_kernels=native)
    cores = [stages.core()] * 2
    if model == "dense":
        cores += [stages.core(step_tokens=23), stages.core(depth=1)]
    for core in cores:
        found = run(None, wanted, core, stages)
        assert found.tokens() == expected.tokens()
        for rid, values in scores(expected).items():
            assert scores(found)[rid] == pytest.approx(values, abs=1e-4)
    assert stages.most >= count


def same(stages: Stages, expected: Transcript) -> None:
    wanted = requests("short")
    assert run(None, wanted, stages.core(), stages).tokens() == expected.tokens()


def test_stages_give_memory_and_weights_back_and_take_others(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        save_model(folder, seed, num_hidden_layers=3)
        folders.append(folder)
    sources = [open_source(folder) for folder in folders]
    first, second = (run(one(source), requests("short")) for source in sources)
    assert first.tokens() != second.tokens()
    stages = Stages(sources[0], 2)
    tensors = load_file(folders[1] / "model.safetensors")
    everywhere(stages, "sleep", kv=True, weights="files")
    assert not any(hasattr(runner, "model") for runner in stages.runners)
    everywhere(stages, "wake", kv=True, weights=True)
    same(stages, first)
    everywhere(stages, "weights_update", path=str(folders[1]))
    same(stages, second)
    everywhere(stages, "weights_update", path=str(folders[0]))
    with in_memory(save(tensors)) as path:
        everywhere(stages, "weights_receive", paths=[path])
    same(stages, first)
    everywhere(stages, "weights_take", keep=True)
    same(stages, second)


def everywhere(stages: Stages, verb: str, **args: Any) -> None:
    for runner in stages.runners:
        runner.control(Control(verb=verb, args=args))


FEW_PAGES = {"pages": 14, "reserve": 0.0}


@pytest.mark.parametrize("limits", [{}, FEW_PAGES, {"step_tokens": 11}, {"depth": 1}])
def test_guesses_change_no_text(limits: dict[str, Any]) -> None:
    """The last stage makes them, and tells the others through the plan. They save steps."""
    source, wanted = tiny_source(num_hidden_layers=3), make_repetitive()
    expected = run(one(source), wanted)
    plain = Stages(source, 2)
    core = plain.core(**limits)
    run(None, wanted, core, plain)
    how = {"speculative_algorithm": "ngram", "speculative_adaptive": False}
    stages = Stages(source, 2, speculative_num_draft_tokens=4, **how)
    guessing = stages.core(drafts=4, guided_drafts=True, **limits)
    for _ in range(2):  # the second time behind cached prefixes
        found = run(None, wanted, guessing, stages)
        assert found.tokens() == expected.tokens()
        assert found.finish() == expected.finish()
    assert guessing.stats().steps < 1.9 * core.stats().steps
    assert sum(guessing.stats().right_at) > 100
    assert ("pages" not in limits) or guessing.stats().preemptions > 0


@pytest.mark.parametrize(
    ("name", "shape", "draft"),
    [
        ("draft_model", DEEP, DEEP | {"num_hidden_layers": 3}),
        ("mtp", NEXT, None),
        ("eagle", DEEP, LLAMA | {"num_hidden_layers": 1}),
        pytest.param("draft_model", LLAMA | LATENT, LLAMA, marks=pytest.mark.slow),
        pytest.param("draft_model", LLAMA | WINDOWS, LLAMA, marks=pytest.mark.slow),
        pytest.param("mtp", MIMO_7B, None, marks=pytest.mark.slow),
        pytest.param(
            "eagle",
            DEEP | {"tie_word_embeddings": True},
            LLAMA | {"num_hidden_layers": 1},
            marks=pytest.mark.slow,
        ),
        ("medusa", DEEP, {"medusa_num_heads": 3}),
    ],
)
def test_what_guesses_is_beside_the_last_stage(
    name: str, shape: dict[str, Any], draft: dict[str, Any] | None
) -> None:
    """As many of its guesses are right as on one rank, whatever is in flight; where pages are short it makes
    fewer."""
    source, wanted = source_of(shape, draft), make_repetitive()
    how: dict[str, Any] = {"speculative_algorithm": name, "speculative_num_draft_tokens": 3}
    how |= {"speculative_adaptive": False, "random_seed": 6}
    runner = one(source, **how)
    alone = make_core(runner.facts, drafts=3, depth=1)
    expected = run(runner, wanted, alone)
    stages = Stages(source, 2, **how)
    for limits in ({}, FEW_PAGES):
        core = stages.core(drafts=3, **limits)
        assert run(None, wanted, core, stages).tokens() == expected.tokens()
        if not limits:
            assert sum(core.stats().right_at) == pytest.approx(sum(alone.stats().right_at), abs=1, rel=0.06)
    assert sum(alone.stats().right_at) > 1


@pytest.mark.parametrize("native", [True, False])
def test_states_of_stages_go_back_behind_wrong_guesses(native: bool) -> None:
    """In parts of prompts, behind cached prefixes, and where pages and states are few."""
    source = tiny_source(**STATES)
    two = [(7, 90.0), (8, 90.0)]
    wanted = [
        submit("same", [7] * 5, 24, logit_bias=[(7, 90.0)]),
        submit("of two", [7, 8] * 3, 24, temperature=1.0, seed=4, logit_bias=two, logprobs=1),
        submit("of three", [7, 8] * 20, 30, temperature=1.0, seed=5, logit_bias=[*two, (9, 90.0)]),
        submit("read", [(3 * i + 2) % VOCAB for i in range(40)], 9, logprobs=1),
    ]
    expected = run(one(source, native_kernels=native), wanted, depth=1)
    guessing = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 3}
    stages = Stages(source, 2, speculative_adaptive=False, native_kernels=native, **guessing)
    pages, states = stages.facts.groups
    few = [replace(pages, pages=14), replace(states, pages=stages.facts.slots + 4)]
    for limits in ({"step_tokens": 17}, {"groups": few, "reserve": 0.0}):
        core = stages.core(drafts=3, **limits)
        for _ in range(2):
            found = run(None, wanted, core, stages)
            assert found.tokens() == expected.tokens()
            for rid, values in scores(expected).items():
                assert scores(found)[rid] == pytest.approx(values, abs=1e-4)
        assert core.stats().hits["device"] > 40
        assert core.stats().draft_tokens - 10 > sum(core.stats().right_at) > 20


@pytest.mark.parametrize(
    ("name", "shape", "draft", "count"),
    [
        ("eagle3", DEEP, EAGLE, 2),
        ("eagle3", DEEP, EAGLE, 3),
        ("dflash", DEEP, DFLASH, 3),
        ("mtp", HYBRID | {"num_hidden_layers": 4}, None, 2),
        pytest.param("dflash", DEEP, DFLASH, 4, marks=pytest.mark.slow),
    ],
)
def test_a_head_guesses_behind_each_text_as_on_one_rank(
    name: str, shape: dict[str, Any], draft: dict[str, Any] | None, count: int
) -> None:
    """It reads what layers of other stages make, or layers go back behind its wrong guesses."""
    source, native = source_of(shape, draft), count == 2
    wanted = [submit("long", list(range(40)), 30), *make_repetitive()[:3]]
    how: dict[str, Any] = {"speculative_algorithm": name, "speculative_num_draft_tokens": 3}
    how |= {"speculative_adaptive": False, "random_seed": 6, "native_kernels": native}
    runner = one(source, **how)
    alone, limits = Guesses(runner), {"drafts": 3, "step_tokens": 17}
    expected = run(runner, wanted, make_core(runner.facts, depth=1, **limits))
    stages = Stages(source, count, **how)
    beside = Guesses(stages.runners[-1])
    assert run(None, wanted, stages.core(**limits), stages).tokens() == expected.tokens()
    assert len(beside) > 50
    assert beside == {text: alone[text] for text in beside}
    assert any(stage.shard.pipe.left for stage in stages.runners) == (draft is not None)


def test_stages_bring_hidden_states() -> None:
    """The last one does; results are as those of one rank."""
    wanted = [submit("r", list(range(40)), 5, hidden=True), *requests("short")]
    settings = {"enable_return_hidden_states": True, "native_kernels": True}
    expected = run(one(tiny_source(), **settings), wanted)
    stages = Stages(tiny_source(), 2, **settings)
    found = run(None, wanted, stages.core(step_tokens=16), stages)
    assert found.tokens() == expected.tokens()
    states = [
        b"".join(part for delta in all_["r"] for part in delta.hidden or []) for all_ in (found, expected)
    ]
    ours, theirs = (np.frombuffer(data, np.float32) for data in states)
    assert len(ours) == 44 * 64
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_stages_of_quantized_weights(quantization: str) -> None:
    settings: dict[str, Any] = {"quantization": quantization, "native_kernels": True}
    source = tiny_source(num_hidden_layers=3)
    expected = run(CpuRunner(tiny_config(**settings), source, 0, 1, "", lambda progress: None), requests(""))
    same(Stages(source, 2, **settings), expected)


def test_each_stage_has_the_memory_of_its_layers() -> None:
    source = tiny_source(num_hidden_layers=5)
    whole, parts = one(source).facts, Stages(source, 2)
    ledgers = [runner.facts.ledger for runner in parts.runners]
    assert sum(ledger["weights"] for ledger in ledgers) == whole.ledger["weights"]
    layers = [len(runner.kv) for runner in parts.runners]
    assert sorted(layers) == [2, 3]
    for runner in parts.runners:
        (group,) = runner.facts.groups
        assert group.page_bytes * 5 == len(runner.kv) * whole.groups[0].page_bytes
        assert group.pages == 1 - -(1 << 20) // group.page_bytes
    assert parts.runners[0].matchers is None
    assert parts.runners[1].matchers is not None


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_stage_is_as_small_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 20) for _ in range(rng.randrange(2, 9))]
    count = rng.randrange(1, len(sizes) + 1)
    runs = cut(sizes, count)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert len(runs) == count
    assert all(runs)
    ways = combinations(range(1, len(sizes)), count - 1)
    bounds = ((0, *way, len(sizes)) for way in ways)
    least = min(max(sum(sizes[a:b]) for a, b in pairwise(way)) for way in bounds)
    assert max(sum(sizes[run.start : run.stop]) for run in runs) == least


def test_the_embedding_makes_the_first_stage_shorter() -> None:
    spec = read_decoder(tiny_source(num_hidden_layers=6, vocab_size=3000, tie_word_embeddings=False).config)
    stages = stages_of(Config(pp=3, device="cpu", dtype="float32"), spec)
    assert [stage.stage for stage in stages] == [range(1), range(1, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"role": "prefill", "kv_transfer_secret": "x"}, {}, "--role cannot be honoured with --pp 2"),
        ({"cpu_offload_gb": 1.0}, {}, "--cpu-offload-gb cannot be honoured with --pp 2"),
        ({"task": "embed"}, {}, "--pp 2 cannot be honoured by a model that answers with vectors"),
        (
            {"device": "cuda", "kv_host_bytes": 1 << 20},
            {},
            "--kv-host-bytes cannot be honoured with --pp 2",
        ),
        ({"device": "cuda", "pp": 3}, {}, "--tp 1 --pp 3 needs 3 GPUs"),
        ({"pp": 3}, {}, "--pp 3 cannot be honoured by a model of fewer layers"),
        ({"depth": 4}, {}, "--depth must be from 1 to 3"),
        ({}, WINDOWS | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "of every kind"),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(
    settings: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    config = Config(**{"device": "cpu", "pp": 2} | settings)
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    if config.device == "cuda":
        machine = replace(machine, gpus=(H200,) * 2, torch_cuda="13.0")
    with pytest.raises(ConfigError) as caught:
        resolve(config, machine, tiny_source(**model).config, pooled=config.task == "embed")
    assert words in caught.value.message
    assert caught.value.param is not None


def test_ranks_and_what_they_hold_are_known_before_anything_loads() -> None:
    """Together they have what one rank has, and a table twice where the output layer is the embedding."""
    config = tiny_config(pp=2, tp=2)
    model = tiny_source(num_hidden_layers=5, tie_word_embeddings=True).config
    ranks = mesh(config, model)
    assert [(held.rank, held.stage, held.tp_rank, held.layers) for held in ranks] == [
        (0, 0, 0, (0, 1)),
        (1, 0, 1, (0, 1)),
        (2, 1, 0, (2, 4)),
        (3, 1, 1, (2, 4)),
    ]
    assert [(held.embedding, held.output) for held in ranks] == [(True, False)] * 2 + [(False, True)] * 2
    lines = list(mesh_lines(config, ranks))
    assert lines[0].split() == ["ranks", "4", "2", "stages", "(--pp)", "of", "2", "(--tp)"]
    assert "layers 2 to 4, output layer, part 1 of 2, KV cache 1.0 MiB, 384 bytes a token" in lines[3]
    together, alone = (ledger(replace(config, pp=pp), model) for pp in (2, 1))
    assert together["kv_bytes_per_token"] == alone["kv_bytes_per_token"]
    assert together["kv_cache"] == 2 * alone["kv_cache"]
    assert together["weights"] == alone["weights"] + 2 * 4 * VOCAB * 64
    assert sum(held.weights for held in ranks) == together["weights"]
    guessing = replace(config, speculative_algorithm="draft_model", speculative_model="x")
    beside = [ledger(replace(guessing, pp=pp), model, LLAMA) for pp in (2, 1)]
    for name in ("weights", "kv_bytes_per_token"):  # the last stage alone has what guesses
        assert beside[0][name] - together[name] == beside[1][name] - alone[name] > 0
    assert mesh(replace(config, pp=1, tp=1), model) == []
    over = replace(config, nnodes=2)
    told = list(mesh_lines(over, mesh(over, model)))
    assert told[0].endswith(" on 2 nodes")
    assert [line.split("MiB")[1].split(",")[0].strip() for line in told[1:]] == ["node 0"] * 2 + [
        "node 1"
    ] * 2
