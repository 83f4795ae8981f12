"""A model on several hosts, on two loopback addresses: node 0's executor and the agent of node 1, each with
workers of its own, in one process. ``tests/server/test_two_hosts.py`` has them in two network namespaces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import psutil
import pytest
from forked import ForkedExecutor
from msgspec.structs import replace
from test_executor import STUB, collect, make_plan
from test_stages import MODELS, one, requests, scores
from tiny import make_core, run, run_executor, tiny_config, tiny_source

from sgla.actors.placing import counts_of, place
from sgla.config import Config
from sgla.dist.meeting import interface_of
from sgla.errors import ConfigError, SglaError, UnsupportedField, WeightError, WorkerDied
from sgla.executor import bridge
from sgla.executor.agent import Agent
from sgla.executor.nodes import CAUSE, NodesExecutor
from sgla.executor.procs import ProcsExecutor
from sgla.messages import Control
from sgla.nodes import (
    OWN,
    address,
    answering,
    answering_nodes,
    check_nodes,
    common,
    of_node,
    ranks_of,
    secret_of,
)
from sgla.peers import NONCE, PROTOCOL, Channel, Hello, Refused
from sgla.resolve import check, resolve
from sgla.sched.parts import PartedCore

Source = dict[str, Any]
DRAFTS = "speculative_num_draft_tokens"
SENT: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True, "moe_a2a_backend": "alltoall"}
GUESSES: dict[str, Any] = {"speculative_algorithm": "ngram", DRAFTS: 3}
DUMP = Control(verb="experts_dump")


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as sock:
        return int(sock.getsockname()[1])


def settings(node: int = 0, **changes: Any) -> Config:
    given: dict[str, Any] = {"threads": 1, "pp": 2, "nnodes": 2, "device": "cpu"}
    given |= {"dist_init_addr": "127.0.0.2:29501", "dist_secret": "between us", "dist_timeout": 30.0}
    return Config(**given | changes, node_rank=node)


class Pair:
    """Node 0 and the agents of the other nodes, with the stub's ``sources`` of it and of these."""

    def __init__(
        self,
        config: Config,
        sources: tuple[Any, Any],
        runner: str | None = STUB,
        kind: type[ProcsExecutor] = ProcsExecutor,
    ) -> None:
        self.kind = kind
        config = replace(config, dist_init_addr=f"127.0.0.2:{free_port()}")
        self.config, self.runner, self.sources = config, runner, sources
        self.first = NodesExecutor(config, sources[0], runner=runner, torch="one")
        self.deaths: list[WorkerDied] = []
        self.first.on_death(self.deaths.append)
        self.said: list[str] = []
        self.agents: list[Agent] = []

    def agent(self, **changes: Any) -> Agent:
        """``changes`` of its settings, and ``torch``."""
        torch = changes.pop("torch", "one")
        own = replace(self.config, **{"node_rank": 1} | changes)
        executor = self.kind(own, self.sources[1], runner=self.runner)
        executor.spawn()
        made = Agent(own, own, self.sources[1], executor, self.said.append, torch)
        self.agents.append(made)
        return made

    async def start(self) -> Any:
        agents = [self.agent(node_rank=number) for number in range(1, self.config.nnodes)]
        joining = asyncio.gather(*(agent.join() for agent in agents))
        facts = await asyncio.wait_for(self.first.start(lambda progress: None), 60)
        await joining
        return facts

    async def death(self) -> WorkerDied:
        while not self.deaths:
            await asyncio.sleep(0.005)
        return self.deaths[0]

    async def close(self) -> None:
        await self.first.close()
        for agent in self.agents:
            await agent.close()


Make = Callable[..., Pair]


@pytest.fixture(autouse=True)
def stub_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the stub have no files."""
    for module in ("sgla.executor.nodes", "sgla.executor.agent"):
        monkeypatch.setattr(f"{module}.common", lambda config, torch, source: common(config, torch, None))


@pytest.fixture
async def pair() -> AsyncIterator[Make]:
    """Makes pairs; in the end closes them and looks for what they left behind."""
    made: list[Pair] = []
    await asyncio.to_thread(int)
    process = psutil.Process()
    before, others = process.num_fds(), process.children()

    def make(first: Source | None = None, second: Source | None = None, **changes: Any) -> Pair:
        made.append(Pair(settings(**changes), (first or {}, second or {})))
        return made[-1]

    yield make
    for each in made:
        await each.close()
    assert process.children() == others
    assert process.num_fds() <= before


async def test_plans_and_commands_cross(pair: Make) -> None:
    both = pair({"blob": "x" * 4}, {"blob": "y" * 4})
    facts = await both.start()
    assert facts.groups[0].pages == 100  # rank 1 has one more
    assert facts.notes[-1] == "2 nodes: 127.0.0.2, 127.0.0.1"
    assert both.said[-1] == "is ready"
    for step in range(1, 30):
        both.first.submit(make_plan(step))
        assert [result.step for result in await collect(both.first, 1)] == [step]
    while True:  # rank 0 may lag behind the one that answers
        told = (await both.first.control(Control(verb="signals")))["ranks"]
        if [each["executed"] for each in told] == [29, 29]:
            break
    assert len({each["pid"] for each in told}) == 2
    with pytest.raises(UnsupportedField, match="no verb nonsense"):
        await both.first.control(Control(verb="nonsense"))
    with pytest.raises(UnsupportedField, match="name a folder that all hosts have"):
        await both.first.control(Control(verb="weights_receive", args={"paths": []}))
    with pytest.raises(SglaError, match="'fail' failed: ZeroDivisionError"):
        await both.first.control(Control(verb="fail"))
    assert (await both.first.inquire()).count("worker rank") == 2
    await both.first.close()
    assert await asyncio.wait_for(both.agents[0].over, 5) is None
    with pytest.raises(WorkerDied):
        await both.first.control(Control(verb="signals"))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_worker_ends_both_nodes_and_is_named(pair: Make, capfd: Any, rank: int) -> None:
    trouble = {"rank": rank, "at": 2, "step": "kill"}
    both = pair(trouble, trouble)
    await both.start()
    both.first.submit(make_plan(1))
    await collect(both.first, 1)
    both.first.submit(make_plan(2))
    death = await asyncio.wait_for(both.death(), 2)
    assert f"worker rank {rank} " in death.message
    assert "SIGKILL" in death.message
    assert death.message.startswith("node 1 (127.0.0.1): ") == (rank == 1)
    outcome = await asyncio.wait_for(both.agents[0].over, 2)
    assert isinstance(outcome, WorkerDied)
    assert f"worker rank {rank} " in outcome.message
    assert both.first.drain() == []


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ({"load": "kill"}, WorkerDied, r"node 1 \(127.0.0.1\): worker rank 1 .*SIGKILL"),
        ({"load": "typed"}, WeightError, r"node 1 \(127.0.0.1\): lm_head is missing"),
    ],
)
async def test_trouble_while_node_1_loads_fails_the_start(
    pair: Make, capfd: Any, trouble: Source, error: type[SglaError], words: str
) -> None:
    both = pair({}, trouble | {"rank": 1})
    with pytest.raises(error, match=f"(?s){words}"):
        await both.start()
    assert both.agents[0].over.done()


async def test_a_node_that_falls_silent_is_lost_within_two_seconds(
    pair: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    await both.start()
    link = both.agents[0]._link
    assert link is not None
    monkeypatch.setattr(link._channel, "send", lambda *_: None)  # as if the cable were cut
    death = await asyncio.wait_for(both.death(), 5)
    assert "node 1 (127.0.0.1) is lost" in death.message
    assert bridge.SILENCE + CAUSE < 2.0


async def test_a_node_that_has_ended_is_lost_at_once(pair: Make) -> None:
    both = pair()
    await both.start()
    waiting = asyncio.ensure_future(both.first.control(Control(verb="hang")))
    assert both.agents[0]._link is not None
    both.agents[0]._link.close()
    death = await asyncio.wait_for(both.death(), 1.4)
    assert "is lost" in death.message
    with pytest.raises(SglaError):
        await waiting
    outcome = await asyncio.wait_for(both.agents[0].over, 2)
    assert outcome is not None
    assert "node 0 is lost" in outcome.message


async def test_a_node_that_was_told_to_end_says_so(pair: Make) -> None:
    both = pair()
    await both.start()
    both.agents[0].stop()
    assert "it was told to end" in (await asyncio.wait_for(both.death(), 2)).message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dist_secret": "another"}, "another secret"),
        ({"page_size": 32}, "--page-size: 32 here, None there"),
        ({"torch": "two"}, "torch: two here, one there"),
        ({"node_rank": 0}, "there is a node 0 already"),
    ],
)
async def test_a_node_that_does_not_belong_is_sent_away_and_another_may_come(
    pair: Make, changes: Source, words: str
) -> None:
    both = pair()
    starting = asyncio.ensure_future(both.first.start(lambda progress: None))
    wrong = both.agent(**changes)
    with pytest.raises(ConfigError, match=words):
        await asyncio.wait_for(joined(wrong), 10)
    await wrong.close()
    await both.agent().join()
    facts = await asyncio.wait_for(starting, 30)
    assert facts.slots == 8


async def test_a_node_of_another_version_is_sent_away(pair: Make) -> None:
    both = pair()
    starting = asyncio.ensure_future(both.first.start(lambda progress: None))
    await asyncio.sleep(0.01)
    channel = Channel(socket.create_connection(address(both.config)))
    channel.send(Hello(PROTOCOL, "0.0.0", bytes(NONCE)))
    answer, _ = await asyncio.to_thread(channel.receive)
    assert isinstance(answer, Refused)
    assert "install the same" in answer.why
    channel.close()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def joined(agent: Agent) -> None:
    await agent.join()
    outcome = await agent.over
    assert outcome is not None
    raise outcome


async def test_nodes_that_do_not_come_are_named(pair: Make) -> None:
    both = pair(dist_timeout=1.0)
    with pytest.raises(WorkerDied, match="node 1 of 2 has not come within 1 s"):
        await asyncio.wait_for(both.first.start(lambda progress: None), 10)


async def test_node_0_that_does_not_answer_is_named(pair: Make) -> None:
    both = pair(dist_timeout=1.0)
    with pytest.raises(ConfigError, match="node 0 has not answered on 127.0.0.2:.*Connection refused"):
        await both.agent().join()


async def test_an_address_of_another_host_is_refused(pair: Make) -> None:
    both = pair()
    both.first._config = replace(both.config, dist_init_addr="192.0.2.1:5")
    with pytest.raises(ConfigError, match="must be an address of this host, node 0"):
        await both.first.start(lambda progress: None)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        both = pair()
        both.first._config = replace(both.config, dist_init_addr=f"127.0.0.2:{port}")
        with pytest.raises(ConfigError, match="the port is taken; give another one"):
            await both.first.start(lambda progress: None)


@asynccontextmanager
async def real(source: Any, **changes: Any) -> AsyncIterator[tuple[NodesExecutor, Any]]:
    """Of models, by worker processes."""
    given = tiny_config(**{"nnodes": 2, "dist_secret": "s", "dist_timeout": 60.0} | changes)
    with mock.patch("sgla.executor.nodes.ProcsExecutor", ForkedExecutor):
        both = Pair(given, (source, source), None, ForkedExecutor)
    try:
        yield both.first, await both.start()
    finally:
        await both.close()


def core_of(facts: Any, changes: dict[str, Any]) -> Any:
    stages = changes.get("pp", 1)
    core = make_core(facts, stages=stages, depth=stages + 1, drafts=changes.get(DRAFTS, 0))
    return PartedCore(core.limits, changes["tp"]) if "dp_attention" in changes else core


async def equal(model: str, **changes: Any) -> None:
    source, wanted = tiny_source(**MODELS[model]), requests("short")
    expected = run(one(source), wanted)
    check_nodes(settings(**{"pp": 1} | changes))
    async with real(source, **changes) as (executor, facts):
        core = core_of(facts, changes)
        for _ in range(2):  # with a cold cache and a warm one
            found = await run_executor(executor, facts, wanted, core)
            assert found.tokens() == expected.tokens()
            for rid, values in scores(expected).items():
                assert scores(found)[rid] == pytest.approx(values, abs=1e-4)


async def test_two_nodes_equal_one_rank() -> None:
    await equal("dense", pp=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixture", "latent", "states"])
async def test_stages_on_two_nodes_equal_one_rank(model: str) -> None:
    await equal(model, pp=2)


@pytest.mark.slow
async def test_experts_on_two_nodes_equal_one_rank() -> None:
    await equal("mixture", tp=2, ep=2)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("latent", SENT),
        ("mixture", {"cp": 2}),
        pytest.param("mixture", {"tp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("dense, tied", {"tp": 4, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("latent", {"tp": 2, "ep": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("latent", SENT | {"tp": 4, "ep": 4}, marks=pytest.mark.slow),
        pytest.param("mixture", {"tp": 2, "ep": 2, "cp": 2, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("latent", {"tp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param(
            "mixture", {"nnodes": 4, "tp": 2, "pp": 2, "dp_attention": True}, marks=pytest.mark.slow
        ),
        pytest.param("mixture", {"tp": 2, "dp_attention": True, **GUESSES}, marks=pytest.mark.slow),
        pytest.param("mixture", {"cp": 2, **GUESSES}, marks=pytest.mark.slow),
    ],
)
async def test_ranks_with_own_tokens_on_several_nodes_equal_one(model: str, changes: dict[str, Any]) -> None:
    await equal(model, **changes)


@pytest.mark.slow
async def test_commands_reach_ranks_with_own_requests() -> None:
    """Experts are counted and moved, and the ranks sleep and wake."""
    source, wanted = tiny_source(**MODELS["mixture"]), requests("short")
    changes = SENT | {"redundant_experts": 2}
    expected = run(one(source), wanted).tokens()
    async with real(source, **changes) as (executor, facts):
        core, config = core_of(facts, changes), tiny_config(**changes)
        await executor.control(Control(verb="experts_start"))
        assert (await run_executor(executor, facts, wanted, core)).tokens() == expected
        moved = await place(config, executor.control, *counts_of(await executor.control(DUMP)))
        assert len(moved) == source.config["num_hidden_layers"]
        assert (await run_executor(executor, facts, wanted, core)).tokens() == expected
        for verb, weights in (("sleep", "host"), ("wake", True)):
            command = Control(verb=verb, args={"kv": True, "weights": weights})
            assert len((await executor.control(command))["ranks"]) == 2
        core.flush_cache()
        assert (await run_executor(executor, facts, wanted, core)).tokens() == expected


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tp": 2}, {"cp": 2}, {"tp": 2, "dp_attention": True}])
async def test_stages_of_two_ranks_on_two_nodes_equal_one_rank(changes: dict[str, Any]) -> None:
    await equal("dense", pp=2, **changes)


WAIT = 6.0  # seconds: ranks wait so long for each other at the start, too


async def stuck(executor: Any, facts: Any, rank: Any) -> str:
    """What a death is told as when ``rank`` stands still and the others wait for its data."""
    dead = asyncio.get_running_loop().create_future()
    executor.on_death(dead.set_result)
    psutil.Process(rank.process.pid).suspend()
    running = asyncio.ensure_future(run_executor(executor, facts, requests("short")))
    try:
        error: WorkerDied = await asyncio.wait_for(dead, WAIT + 20)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return error.message


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"pp": 2}, {"cp": 2}])
async def test_ranks_wait_for_data_as_long_as_dist_timeout_says(changes: dict[str, int]) -> None:
    """Those of a stage or a set, too, of which the first that gives up may be heard of last."""
    config = tiny_config(tp=2, dist_timeout=WAIT, **changes)
    executor = ForkedExecutor(config, tiny_source(**MODELS["dense"]))
    try:
        facts = await executor.start(lambda progress: None)
        message = await stuck(executor, facts, executor._ranks[-1])
    finally:
        await executor.close()
    assert message.startswith("a model step failed: ")
    assert changes or f"{WAIT * 1000:.0f}ms" in message


@pytest.mark.slow
async def test_nodes_wait_for_data_as_long_as_dist_timeout_says() -> None:
    async with real(tiny_source(**MODELS["dense"]), pp=2, dist_timeout=WAIT) as (executor, facts):
        message = await stuck(executor, facts, executor._local._ranks[0])
    assert "a model step failed: " in message
    assert f"{WAIT * 1000:.0f}ms" in message


def test_ranks_of_nodes() -> None:
    config = settings(pp=4, tp=2)
    assert [list(ranks_of(config, node)) for node in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks_of(replace(config, node_rank=1)) == range(4, 8)
    assert answering(config) == range(6, 7)
    assert config.local_ranks == 4
    assert settings(pp=1, dp=4, tp=2).local_ranks == 2
    assert ranks_of(Config(tp=3)) == range(3)
    data = settings(pp=2, tp=4, dp_attention=True, nnodes=4)
    assert answering(data) == range(4, 8)
    assert answering_nodes(data) == [2, 3]
    assert answering_nodes(config) == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node_rank": 2}, "--node-rank 2 must be below --nnodes 2"),
        ({"dist_init_addr": None}, "needs --dist-init-addr HOST:PORT"),
        ({"dist_init_addr": "http://a:1"}, "needs --dist-init-addr HOST:PORT"),
        ({"dist_secret": None}, "needs a secret"),
        ({"dist_secret_file": "/x"}, "are two secrets"),
        ({"pp": 1, "tp": 2}, "a layer's ranks stay on one host"),
        ({"pp": 3}, "a layer's ranks stay on one host"),
        ({"pp": 1, "cp": 3}, "a layer's ranks stay on one host"),
        ({"pp": 1, "tp": 3, "dp_attention": True}, "do not divide evenly"),
        ({"pp": 1, "tp": 3, "ep": 3}, "do not divide evenly"),
        ({"dp": 3}, "with --dp 3: each host has as many of the servers"),
        ({"models": ["a=b"]}, "with --models"),
        ({"role": "prefill"}, "with --role"),
        ({"executor": "inline"}, "with --executor inline"),
        ({"executor": "fake"}, "without --fake-step-ms"),
    ],
)
def test_what_nodes_cannot_be_is_refused(changes: Source, words: str) -> None:
    config = replace(settings(), **changes)
    with pytest.raises(ConfigError, match=words):
        check_nodes(config)
    with pytest.raises(ConfigError):
        check(config)


def test_addresses_and_secrets(tmp_path: Any) -> None:
    assert address(settings(dist_init_addr="a.b:7")) == ("a.b", 7)
    assert address(settings(dist_init_addr="a.b")) == ("a.b", 29501)
    assert address(settings(dist_init_addr="tcp://[fd00::1]:7")) == ("fd00::1", 7)
    file = tmp_path / "secret"
    config = settings(dist_secret=None, dist_secret_file=str(file))
    with pytest.raises(ConfigError, match="No such file"):
        secret_of(config)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        secret_of(config)
    file.write_text("it\n")
    assert secret_of(config) == "it"


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.2") == "lo"
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                assert interface_of(each.address) == name
    assert interface_of("192.0.2.1") is None


def test_a_node_computes_with_the_settings_of_node_0() -> None:
    first, own = settings(page_size=32, port=5), settings(1, threads=4, port=6)
    made = of_node(first, own)
    assert (made.page_size, made.threads, made.node_rank, made.port) == (32, 4, 1, 6)
    assert {"page_size", "tp", "pp", "dtype", "context_length", "step_tokens"}.isdisjoint(OWN)


def test_several_hosts_need_their_own_gpus_alone() -> None:
    from sgla.device import H200
    from sgla.observe.machine import detect

    machine = replace(detect(), gpus=(H200,) * 2, torch_cuda="any", torch_hip=None)
    config = settings(device="cuda", tp=2, pp=2)
    assert resolve(config, machine).config.device == "cuda"
    with pytest.raises(ConfigError, match="on 2 hosts needs 4 GPUs, this machine shows 2"):
        resolve(replace(config, tp=4), machine)
