"""Experts that some ranks have twice, and that go to other ranks while requests wait."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from forked import ForkedExecutor
from hypothesis import given
from hypothesis import strategies as st
from test_data_attention import parted
from test_stages import MIXTURE, one, requests
from test_whole_experts import STACKED
from tiny import make_core, run, run_executor, tiny_config, tiny_source

from sgla.actors import placing
from sgla.cli.explain import mesh_lines
from sgla.config import Config
from sgla.errors import ConfigError, NotReady, SglaError, UnsupportedField
from sgla.kernels.placement import Part, Placement, balance, balanced
from sgla.ledger import mesh
from sgla.messages import Control
from sgla.observe.machine import Machine
from sgla.observe.metrics import Metrics
from sgla.resolve import resolve


@given(st.data(), st.integers(2, 5), st.integers(1, 4))
def test_every_expert_has_a_home(data: Any, ranks: int, room: int) -> None:
    """Ranks have as many each, none of them one twice."""
    slots = ranks * room
    experts = data.draw(st.integers(room, slots))
    counts = data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    homes = balanced(counts, ranks, slots - experts)
    assert [len(held) for held in homes] == [room] * ranks
    assert all(len(set(held)) == room for held in homes)
    assert {expert for held in homes for expert in held} == set(range(experts))
    assert 0 < balance(counts, homes) <= 1


def test_what_is_wanted_most_is_there_twice() -> None:
    homes = balanced([90, 10, 10, 10, 10, 10, 10, 10], 2, 2)
    assert sum(0 in held for held in homes) == 2
    assert balance([90, 10, 10, 10, 10, 10, 10, 10], homes) > 0.93
    assert balance([90, 10, 10, 10, 10, 10, 10, 10], [range(4), range(4, 8)]) == 80 / 120
    part = Placement(2, 2, {0: [[0, 1], [1, 2]]}).part(0, 3, 1)
    assert (part.held, part.copies) == ((1, 2), ((2, 1), (1, 0)))


@given(st.data())
def test_what_stays_keeps_its_place(data: Any) -> None:
    before, behind = (data.draw(st.permutations(range(9)))[:4] for _ in range(2))
    part = Part(tuple(behind), tuple((expert + 1, expert) for expert in behind))
    made = part.keeping(before)
    assert sorted(zip(*made)) == sorted(zip(*part))
    assert all(new == old or old not in behind for new, old in zip(made.held, before))


STACKS = {"vocab_size": 331, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("model", "spare", "changes"),
    [
        (MIXTURE, 2, {}),
        (STACKED | STACKS, 1, {"native_kernels": True}),
        pytest.param(MIXTURE, 0, {"dp_attention": True}, marks=pytest.mark.slow),
    ],
    ids=["copies", "stacked, with biases", "attention by data"],
)
async def test_ranks_equal_one_before_and_behind_a_move(
    model: dict[str, Any], spare: int, changes: dict[str, Any]
) -> None:
    """Counts of the first requests say where experts go; the next ones find their prefixes cached."""
    source, wanted = tiny_source(**model), requests("mixture")
    expected = run(one(source, native_kernels=changes.get("native_kernels", False)), wanted)
    config = tiny_config(tp=2, ep=2, redundant_experts=spare, **changes)
    executor = ForkedExecutor(config, source)
    try:
        facts = await executor.start(lambda progress: None)
        with pytest.raises(UnsupportedField, match="nothing was counted"):
            await move(config, executor)
        core = parted(facts) if config.dp_attention else make_core(facts)
        await executor.control(Control(verb="experts_start"))
        assert (await run_executor(executor, facts, wanted, core)).tokens() == expected.tokens()
        moved = await move(config, executor)
        experts = source.config.get("num_experts") or source.config["num_local_experts"]
        assert [layer["layer"] for layer in moved] == list(range(source.config["num_hidden_layers"]))
        assert all(sum(map(len, layer["ranks"])) == experts + spare for layer in moved)
        assert all(layer["balance"] >= layer["balance_before"] for layer in moved)
        assert (await run_executor(executor, facts, wanted, core)).tokens() == expected.tokens()
        told = (await executor.control(Control(verb="experts_dump")))["ranks"][0]
        assert told["homes"] == {layer["layer"]: layer["ranks"] for layer in moved}
        assert all(map(any, told["experts"].values())), "they are counted as before"
    finally:
        await executor.close()


async def move(config: Config, executor: Any) -> list[dict[str, Any]]:
    told = await executor.control(Control(verb="experts_dump"))
    return await placing.place(config, executor.control, *placing.counts_of(told))


class Ranks:
    """Two, whose experts were chosen ``counts`` times since the last look."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.homes: Any = [[0, 1], [2, 3]]
        self.asked: list[tuple[str, int]] = []
        self.trouble: SglaError | None = NotReady("it sleeps", retry_after=1)

    async def count_experts(self, verb: str, every: int = 0) -> Any:
        self.asked.append((verb, every))
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble
        halves = [[n // 2 for n in self.counts], [n - n // 2 for n in self.counts]]
        return {"ranks": [{"experts": {0: half}, "homes": {0: self.homes}} for half in halves]}

    async def move_experts(self, counts: Any, before: Any) -> Any:
        self.homes = placing.better(Config(tp=2, ep=2), counts, before)[0]


async def test_experts_move_by_themselves_where_that_is_worth_it() -> None:
    ranks = Ranks()
    balancer = placing.Balancer(Config(tp=2, ep=2, rebalance_interval=0.001, rebalance_below=0.8), ranks)
    task = asyncio.ensure_future(balancer.run())
    while len(ranks.asked) < 4:
        await asyncio.sleep(0.001)
    task.cancel()
    start = ("experts_start", placing.EVERY)
    assert ranks.asked[:4] == [start, start, ("experts_dump", 0), ("experts_dump", 0)]
    assert balancer.balance is None, "nothing was counted"
    for counts, balanced_by, moves in (
        ([10, 11, 10, 9], 40 / 42, 0),
        ([30, 30, 10, 10], 80 / 120, 1),
        ([30, 30, 10, 10], 1.0, 1),
        ([90, 1, 1, 1], 93 / 182, 1),  # nothing would be better
    ):
        ranks.counts = counts
        await balancer.look()
        assert (balancer.balance, balancer.moves) == (pytest.approx(balanced_by), moves)
    metrics = Metrics("m")
    metrics.balancer = balancer
    text = metrics.text().decode()
    assert re.search(r"^sgla:expert_balance\{.*\} 0\.51", text, re.MULTILINE)
    assert re.search(r"^sgla:expert_moves_total\{.*\} 1\.0", text, re.MULTILINE)


def test_layers_that_would_get_no_more_even_stay() -> None:
    """Experts settle one by one, which is not always the best there is."""
    even, uneven = [[0, 1, 5], [2, 3, 4]], [[0, 1, 2], [3, 4, 5]]
    counts = {0: [5, 5, 4, 3, 3, 0], 1: [5, 5, 4, 3, 3, 0], 2: [0] * 6}
    found = placing.better(Config(tp=2, ep=2), counts, {0: even, 1: uneven, 2: uneven})
    assert (found[0], found[2]) == (even, uneven)
    assert balance(counts[1], found[1]) > balance(counts[1], uneven)


def test_copies_are_counted_before_anything_loads() -> None:
    configs = [tiny_config(tp=2, ep=2, redundant_experts=n) for n in (0, 2)]
    plain, more = (mesh(config, tiny_source(**MIXTURE).config) for config in configs)
    assert all(a.weights < b.weights for a, b in zip(plain, more))
    told = [line for line in mesh_lines(configs[1], more) if line.startswith("- rank")]
    for line, held in zip(told, ("experts 0 to 1", "experts 2 to 3"), strict=True):
        assert f"{held}, copies of 1 more" in line
    assert "copies" not in "".join(mesh_lines(configs[0], plain))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redundant_experts": 2}, "without --ep"),
        ({"redundant_experts": 1, "tp": 2, "ep": 2}, "with 4 experts on 2 ranks, which then differ; give 2"),
        ({"redundant_experts": 6, "tp": 2, "ep": 2}, "has all experts already"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(Config(device="cpu", **settings), machine, tiny_source(**MIXTURE).config)
    assert caught.value.param == "redundant_experts"
    with pytest.raises(UnsupportedField):
        placing.check(Config(device="cpu"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ep": 1}, "without --ep"),
        ({"cp": 2}, "with --cp"),
        ({"speculative_algorithm": "ngram"}, "with --speculative-algorithm, beside"),
        ({"enable_lora": True}, "with --enable-lora, beside which weights are"),
    ],
)
def test_where_experts_cannot_move_by_themselves(settings: dict[str, Any], words: str) -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    cut: dict[str, Any] = {"device": "cpu", "tp": 2, "ep": 2, "rebalance_interval": 5}
    config = Config(**cut | settings)
    with pytest.raises(ConfigError, match=f"--rebalance-interval 5 cannot be honoured {words}") as caught:
        resolve(config, machine, tiny_source(**MIXTURE).config)
    assert caught.value.param == "rebalance_interval"


def test_experts_do_not_move_beside_what_guesses() -> None:
    runner = one(tiny_source(**MIXTURE), speculative_algorithm="ngram", speculative_num_draft_tokens=3)
    with pytest.raises(UnsupportedField, match="experts cannot move beside what guesses: their weights"):
        runner.control(Control(verb="experts_place", args={"homes": []}))


async def test_steps_in_flight_end_before_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "TRY", 0.0)
    left = iter((2, 1, 0))
    await placing.still(lambda: next(left))
    monkeypatch.setattr(placing, "TRIES", 2)
    with pytest.raises(NotReady):
        await placing.still(lambda: 1)
