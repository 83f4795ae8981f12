"""Attention by data whose tokens go to the ranks of their experts alone, and to no others."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import standing_deepep
import torch
import torch.distributed as dist
from forked import ForkedExecutor
from msgspec.structs import replace
from test_data_attention import parted
from test_stages import MODELS, one, requests, scores
from tiny import run, run_executor, tiny_config, tiny_source

from sgla.actors.placing import counts_of
from sgla.cli.settings import value_of
from sgla.config import Config
from sgla.device import H200, nvidia
from sgla.dist import Shard
from sgla.dist.all_to_all import AllToAll
from sgla.dist.deepep import DeepEP
from sgla.dist.lockstep import Lockstep
from sgla.errors import ConfigError
from sgla.kernels.placement import balanced
from sgla.kernels.sent_moe import Sent, Slots, through
from sgla.ledger import mesh
from sgla.loading.load import load_model
from sgla.messages import Control
from sgla.model.whole_experts import way_of_tokens
from sgla.observe.machine import Machine
from sgla.quant.weight import Weight
from sgla.resolve import resolve

MACHINE = Machine(cores=2, physical_cores=2, memory_available=1 << 34, torch_cuda="13.0")
GPUS: dict[str, Any] = {"device": "cuda", "moe_a2a_backend": "deepep"}
HOSTS: dict[str, Any] = {"nnodes": 2, "dist_init_addr": "10.0.0.1", "dist_secret": "between us"}
SENT: dict[str, Any] = {"dp_attention": True, "moe_a2a_backend": "alltoall"}


@pytest.mark.parametrize(
    ("model", "ranks", "changes"),
    [
        ("latent", 2, {}),
        ("mixture", 2, {"redundant_experts": 2, "quantization": "int8"}),
        pytest.param("mixture", 2, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", 2, {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("states", 2, {}, marks=pytest.mark.slow),
        pytest.param("latent", 4, {}, marks=pytest.mark.slow),
        pytest.param("mixture", 4, {"redundant_experts": 4}, marks=pytest.mark.slow),
    ],
)
async def test_ranks_that_send_tokens_equal_one(model: str, ranks: int, changes: dict[str, Any]) -> None:
    """Prompts are read in chunks, beside ranks that decode or have nothing to do; each choice of an expert is
    counted once, before and behind a move of experts."""
    source, wanted = tiny_source(**MODELS[model]), requests(model)
    own = {name: value for name, value in changes.items() if name == "quantization"}
    expected = run(one(source, **own), wanted)
    executor = ForkedExecutor(tiny_config(tp=ranks, ep=ranks, **SENT, **changes), source)
    try:
        facts = await executor.start(lambda progress: None)
        stages = changes.get("pp", 1)
        limits: dict[str, Any] = {"prefix_cache": False}
        limits |= {"stages": stages, "depth": stages + 1} if stages > 1 else {}
        for turn in range(2):
            if "cp" not in changes:
                await executor.control(Control(verb="experts_start"))
            found = await run_executor(executor, facts, wanted, parted(facts, ranks, **limits))
            assert found.tokens() == expected.tokens()
            for rid, values in scores(expected).items():
                assert scores(found)[rid] == pytest.approx(values, abs=1e-4)
            if "cp" in changes or turn:
                continue
            counts, _ = counts_of(await executor.control(Control(verb="experts_dump")))
            homes = {
                layer: balanced(n, ranks, changes.get("redundant_experts", 0)) for layer, n in counts.items()
            }
            await executor.control(Control(verb="experts_place", args={"homes": [*homes.items()]}))
    finally:
        await executor.close()


@pytest.mark.parametrize(("copies", "first"), [(0, 0), (1, 0), (3, 1)])
def test_slots_of_all_copies_take_turns(copies: int, first: int) -> None:
    homes = balanced([5, 1, 1, 9, 2], 2, copies)
    slots = Slots(homes, max(map(len, homes)))
    found = slots.of(torch.arange(5).repeat(4, 1), first)
    for row in found.tolist():
        assert [homes[slot // slots.width][slot % slots.width] for slot in row] == list(range(5))
    assert set(found.flatten().tolist()) == {
        rank * slots.width + place for rank, held in enumerate(homes) for place in range(len(held))
    }
    alone = slots.of(torch.arange(5)[None], first + 1)
    assert torch.equal(alone[0], found[1]), "ranks with one token each begin with other copies"


@pytest.mark.parametrize("model", ["latent", "mixture"])
def test_who_holds_what_is_known_before_anything_loads(model: str) -> None:
    """All but the experts is whole."""
    source = tiny_source(**MODELS[model])
    config = tiny_config(tp=2, ep=2, dtype="float32", **SENT)
    for held in mesh(config, source.config):
        lockstep = Lockstep(held.tp_rank, 2, None, AllToAll(held.tp_rank, 2))
        shard = Shard(lockstep=lockstep, mlps=Shard(held.tp_rank, 2, whole_experts=True))
        made = 4 * sum(x.numel() for x in matrices(load_model(source, "float32", shard=shard)))
        assert abs(held.weights / made - 1) < 0.02


def matrices(*found: Any) -> list[torch.Tensor]:
    """Of weights below ``found``, each once."""
    seen: dict[int, torch.Tensor] = {}
    todo, known = list(found), set[int]()
    while todo:
        each = todo.pop()
        if id(each) in known or isinstance(each, Shard):
            continue
        known.add(id(each))
        if isinstance(each, Weight):
            seen[each.data.data_ptr()] = each.data
        elif isinstance(each, torch.Tensor) and each.dim() == 3:  # of heads that read latents
            seen[each.data_ptr()] = each
        elif isinstance(each, list | tuple):
            todo += each
        elif type(each).__module__.startswith("sgla."):
            todo += getattr(each, "__dict__", {}).values()
    return list(seen.values())


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"ep": 1}, {}, "without --ep, whose ranks have whole experts"),
        ({"dp_attention": False}, {}, "without --dp-attention, where each rank has all tokens"),
        ({"moe_a2a_backend": "deepep"}, {}, "on --device cpu; give alltoall"),
        (GPUS, {}, "without its package: build it as https://github.com/deepseek-ai/DeepEP says"),
        (GPUS | {"dtype": "float32"}, {}, "with --dtype float32: tokens travel in bfloat16"),
        (GPUS, {"hidden_size": 2880}, "by a model of the width 2880, which is no multiple of 256"),
        (GPUS, {"num_experts_per_tok": 33, "num_experts": 64}, "by a model whose tokens have 33 experts"),
        (GPUS | HOSTS, {"num_experts": 256}, "between hosts of 1 ranks with 128 experts each: .* 128 tog"),
        (GPUS | HOSTS, {"num_experts": 254}, "without its package"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    settings: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    machine, model = replace(MACHINE, gpus=(H200,) * 2), MODELS["mixture"] | {"hidden_size": 256}
    config = Config(**{"device": "cpu", "tp": 2, "ep": 2, **SENT} | settings)
    with pytest.raises(ConfigError, match=f"--moe-a2a-backend .*cannot be honoured {words}") as caught:
        resolve(config, machine, tiny_source(**model | changes).config)
    assert caught.value.param == "moe_a2a_backend"


def test_gpus_older_than_hopper_have_no_deepep() -> None:
    old = nvidia("A100", (8, 0), memory=80 << 30)
    machine = replace(MACHINE, gpus=(old, old))
    config = Config(tp=2, ep=2, **SENT | GPUS)
    with pytest.raises(ConfigError, match="on GPUs older than Hopper"):
        resolve(config, machine, tiny_source(**MODELS["mixture"]).config)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"tp": 2, "ep": 2, "dp_attention": True}, "gather"),
        ({"tp": 2, "ep": 2, "dp_attention": True, "pp": 2, "nnodes": 2}, "gather"),
        ({"tp": 4, "ep": 4, "dp_attention": True, "nnodes": 2}, "alltoall"),
        ({"tp": 4, "ep": 4, "nnodes": 2}, "gather"),
    ],
)
def test_tokens_are_sent_between_hosts(settings: dict[str, Any], found: str) -> None:
    assert way_of_tokens(Config(**settings))[0] == found


@pytest.mark.parametrize(
    ("word", "found"),
    [("none", "gather"), ("naive", "gather"), ("deepep_low_latency", "deepep"), ("alltoall", "alltoall")],
)
def test_words_of_others_mean_it(word: str, found: str) -> None:
    assert value_of("moe_a2a_backend", word) == found


@pytest.mark.parametrize("kind", [AllToAll, DeepEP], ids=["alltoall", "deepep"])
def test_tokens_go_once_to_each_rank_of_theirs_and_sums_come_back(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, of three ranks with unequal numbers of tokens, one with none."""
    monkeypatch.setitem(sys.modules, "deep_ep", standing_deepep)
    monkeypatch.setattr(standing_deepep, "WIDE", {torch.bfloat16})
    count, width, d = 3, 2, 16
    tokens = [torch.randn(n, d, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 0, 9)]
    draw = torch.Generator().manual_seed(3)
    slots = [torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(9)])[: len(x)] for x in tokens]
    weights = [torch.rand(len(x), 2, generator=draw) for x in tokens]
    store, came, back = dist.HashStore(), [0] * count, [torch.empty(0)] * count

    def rank(at: int) -> None:
        group, gloo = dist.ProcessGroup(store, at, count), dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, at, count))
        traffic = DeepEP(count, group) if kind is DeepEP else AllToAll(at, count, group)
        traffic.open(d, 2, 9)
        sent = traffic.dispatch(tokens[at], slots[at], weights[at], width)
        came[at] = len(sent.x)
        share = (sent.weights * (at * width + sent.places + 1)).masked_fill(sent.places < 0, 0).sum(1, True)
        back[at] = traffic.combine((sent.x * share).bfloat16(), sent)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(rank, range(count)))
    homes = torch.cat(slots) // width
    assert came == [int((homes == at).any(1).sum()) for at in range(count)]
    for at in range(count):
        expected = tokens[at].float() * (weights[at] * (slots[at] + 1)).sum(1, True)
        assert back[at].dtype == torch.bfloat16
        torch.testing.assert_close(back[at].float(), expected, atol=0.05, rtol=0.02)


def test_what_is_not_computed_here_has_no_weight() -> None:
    """Kernels leave outputs of such pairs as they find them, and read none with the weight 0."""

    class Ranks:
        rank, size, traffic = 0, 2, None

        def own_tokens(self, rows: int) -> int:
            return rows - 1

        def dispatch(self, x: torch.Tensor, slots: torch.Tensor, *_: Any) -> Sent:
            return Sent(x, torch.tensor([[-1, 0]]), torch.tensor([[torch.nan, 0.25]]), None)

        def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
            return y

    ranks, x = Ranks(), torch.ones(2, 3)
    ranks.traffic = ranks  # type: ignore[assignment]
    found = through(
        ranks,
        Slots([[0], [1]], 1),
        x,
        None,
        2,
        lambda x, seen: (torch.ones(1, 2), torch.tensor([[1, 0]])),
        lambda sent: sent.x * sent.weights.sum(1, True),
    )
    assert found.tolist() == [[0.25] * 3, [0.0] * 3]


def test_a_package_that_cannot_be_used_is_told_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A legacy one has no such buffer."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(topk_idx_t=torch.int64))
    with pytest.raises(ConfigError, match="AttributeError: .*ElasticBuffer.*; DeepEP 2 is needed"):
        DeepEP(2).open(16, 2, 9)
