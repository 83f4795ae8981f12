"""Ranks that share out the tokens of prompts, and have the same weights and KV cache."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from forked import ForkedExecutor
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_stages import MODELS, one, requests, scores
from tiny import Transcript, make_core, run, run_executor, submit, tiny_config, tiny_source

from sgla.actors.placing import counts_of
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.ledger import mesh
from sgla.messages import Control
from sgla.model.context import check_cp
from sgla.model.read import read_spec
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.worker.batch import Columns
from sgla.worker.context import part_of, shares


async def through(source: Any, wanted: Any, **changes: Any) -> Transcript:
    executor = ForkedExecutor(tiny_config(**changes), source)
    try:
        facts, count = await executor.start(lambda progress: None), changes.get("pp", 1)
        core = make_core(facts, stages=count, depth=count + 1) if count > 1 else None
        return await run_executor(executor, facts, wanted, core)
    finally:
        await executor.close()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("dense", {"cp": 2}, marks=pytest.mark.slow),
        ("dense, tied", {"cp": 2, "native_kernels": True, "kv_cache_dtype": "int8"}),
        ("mixture", {"cp": 2}),
        pytest.param("latent", {"cp": 3}, marks=pytest.mark.slow),
        pytest.param("windows", {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", {"cp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.slow),
        ("latent", {"cp": 2, "tp": 2}),
        ("mixture", {"cp": 2, "pp": 2}),
        pytest.param("latent", {"cp": 2, "pp": 2, "native_kernels": True}, marks=pytest.mark.slow),
        pytest.param("dense, tied", {"cp": 3, "pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
async def test_prompts_that_ranks_share_out_equal_those_of_one(model: str, changes: dict[str, Any]) -> None:
    """In chunks, beside rows that decode, and behind cached prefixes."""
    source, wanted = tiny_source(**MODELS[model]), requests(model)
    alike = {name: changes[name] for name in ("native_kernels", "kv_cache_dtype") if name in changes}
    expected = run(one(source, **alike), wanted)
    found = await through(source, wanted, **changes)
    assert found.tokens() == expected.tokens()
    close = 1e-3 if "native_kernels" in changes else 1e-4  # whose products round x together with other rows
    for rid, values in scores(expected).items():
        assert scores(found)[rid] == pytest.approx(values, abs=close)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 4), st.randoms())
def test_parts_of_a_step_are_all_of_it(lengths: list[int], size: int, rng: Any) -> None:
    """Each token, and each of those with logits, is one rank's."""
    total = sum(lengths)
    starts = [rng.randrange(50) for _ in lengths]
    logits = sorted(rng.sample(range(total), rng.randint(0, total)))
    columns = Columns(*(np.array(x, np.int32) for x in (range(len(lengths)), starts, lengths, logits)))
    places = [(slot, start + i) for slot, (start, n) in enumerate(zip(starts, lengths)) for i in range(n)]
    seen, named = [], []
    for own in shares(total, size):
        part, which = part_of(columns, own)
        tokens = [t for run in own for t in run]
        rows = zip(part.slots.tolist(), part.starts.tolist(), part.q_lens.tolist())
        assert [(slot, start + i) for slot, start, n in rows for i in range(n)] == [places[t] for t in tokens]
        assert [tokens[i] for i in part.logits] == [logits[i] for i in which]
        seen, named = seen + tokens, named + which.tolist()
    assert sorted(seen) == list(range(total))
    assert sorted(named) == list(range(len(logits)))


def test_ranks_attend_to_about_as_much() -> None:
    """Of one long prompt, where a token attends to all before it."""
    work = [sum(t for run in own for t in run) for own in shares(8192, 4)]
    assert max(work) < 1.001 * min(work)


@pytest.mark.parametrize(
    "name",
    """
    deterministic enable_lora kv_disk kv_host_bytes
    kv_host_ratio kv_store role encode_url logits_processors cpu_offload_gb enable_torch_compile
    enable_return_routed_experts
    """.split(),  # noqa: SIM905
)
def test_settings_that_it_is_not_together_with(name: str) -> None:
    kinds: dict[type, Any] = {int: 2, bool: True, dict: {"a": 1}, list: ["x"]}
    config = replace(Config(cp=2), **{name: kinds.get(type(getattr(Config(), name)), "x")})
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} cannot be honoured with --cp") as caught:
        check_cp(config, "cpu", None, False)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"enable_lora": True}, {}, "--enable-lora cannot be honoured with --cp"),
        ({}, MODELS["states"], "layers keep a state"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(
    settings: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    with pytest.raises(ConfigError, match=words):
        resolve(Config(**{"device": "cpu", "cp": 2} | settings), machine, tiny_source(**model).config)


def test_other_devices_and_models() -> None:
    spec = read_spec(tiny_source().config)
    for device, vectors, words in (("other", False, "on --device other"), ("cpu", True, "with vectors")):
        with pytest.raises(ConfigError, match=words):
            check_cp(Config(cp=2), device, spec, vectors)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int4"):
        check_cp(Config(cp=2, kv_cache_dtype="int4"), "cuda", spec, False)
    check_cp(Config(cp=2, tp=2, dp_attention=True), "cuda", spec, False)
    check_cp(Config(cp=2, pp=2), "cuda", spec, False)


def test_who_holds_what_is_known_before_anything_loads() -> None:
    """Each set of ranks has all of the model."""
    ranks = mesh(tiny_config(tp=2, cp=2), tiny_source().config)
    found = [(held.stage, held.tp_rank, held.layers) for held in ranks]
    assert found == [(0, i % 2, (0, 1)) for i in range(4)]
    assert len({held.weights for held in ranks}) == 1
    ranks = mesh(tiny_config(pp=2, cp=2), tiny_source().config)
    assert [(held.stage, held.tp_rank, held.layers) for held in ranks] == [
        (stage, 0, (stage, stage)) for stage in (0, 0, 1, 1)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"native_kernels": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
async def test_choices_of_experts_are_counted_once(changes: dict[str, Any]) -> None:
    """Each token chooses two in each layer, in steps that are shared out and in others."""
    executor = ForkedExecutor(tiny_config(cp=2, **changes), tiny_source(**MODELS["mixture"]))
    prompts = [submit(str(n), list(range(n, n + 40)), 6) for n in range(3)]
    try:
        facts, count = await executor.start(lambda progress: None), changes.get("pp", 1)
        core = make_core(facts, stages=count, depth=count + 1)
        await executor.control(Control(verb="experts_start"))
        await run_executor(executor, facts, prompts, core)
        counts, _ = counts_of(await executor.control(Control(verb="experts_dump")))
        assert {layer: sum(numbers) for layer, numbers in counts.items()} == dict.fromkeys(
            range(3), 3 * 2 * 45
        )
    finally:
        await executor.close()


async def test_a_lost_rank_is_told() -> None:
    executor = ForkedExecutor(tiny_config(cp=2), tiny_source(**MODELS["mixture"]))
    try:
        await executor.start(lambda progress: None)
        lost = asyncio.get_running_loop().create_future()
        executor.on_death(lost.set_result)
        executor._ranks[1].process.kill()
        assert "rank 1" in str(await asyncio.wait_for(lost, 10))
    finally:
        await executor.close()
