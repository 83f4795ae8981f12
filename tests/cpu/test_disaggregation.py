"""A server that reads prompts and one that answers, over TCP or in memory that both read: what comes is what
one server computes, whatever becomes of the other."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import runpy
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from adapters import save_adapter
from aiohttp import web
from forked import CONTEXT, ForkedExecutor
from safetensors.torch import save_file
from servers import (
    ASKED,
    MODELS,
    RECURRENT,
    SECRET,
    TEXTS,
    begin,
    check_idle,
    decoding,
    port_of,
    prefilling,
    same,
    same_text,
    stats,
    tell,
    wait_until,
    write,
)

from sgla import peers
from sgla.actors import prefilling as door
from sgla.engine import Engine
from sgla.engine.params import SamplingParams
from sgla.errors import ConfigError, SglaError
from sgla.executor import procs
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.messages import KEY
from sgla.peers import (
    Accepted,
    Ask,
    Borrowed,
    Channel,
    Done,
    Hello,
    Identity,
    Lent,
    Message,
    Placed,
    Unit,
    Want,
)
from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig
from sgla.route.front import Front
from sgla.route.owner import LocalOwner
from sgla.route.workers import Look
from sgla.worker import lent, remote
from sgla.worker.lent import TOKEN
from sgla.worker.offer import HostUnits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name), model) for name, model in (MODELS | RECURRENT).items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> list[Any]:
    with begin(folders["pages"]) as engine:
        return tell(engine, ASKED)


@pytest.fixture(scope="module")
def prefill(folders: dict[str, Path]) -> Iterator[Engine]:
    with prefilling(folders["pages"]) as engine:
        yield engine


@pytest.fixture
def fresh(prefill: Engine) -> Engine:
    """A prefill server that has seen nothing."""
    prefill._call(flush(prefill))
    prefill.generate([1, 2], SamplingParams(max_tokens=1))  # a plan, so that workers forget, too
    return prefill


@pytest.fixture
def pair(folders: dict[str, Path], fresh: Engine) -> Iterator[tuple[Engine, Engine]]:
    """It, and a decode server that is sent units."""
    with decoding(folders["pages"], port_of(fresh), kv_transfer_backend="tcp") as decode:
        yield fresh, decode


async def flush(engine: Engine) -> None:
    assert engine._system is not None
    assert engine._system._core is not None
    engine._system._core.flush_cache()


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_one_server(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    with begin(folder) as one, prefilling(folder) as first, decoding(folder, port_of(first)) as second:
        assert same(tell(second, ASKED), tell(one, ASKED))
        [tier] = stats(second).tiers
        assert (tier.asked, tier.unanswered, tier.failed) == (3, 0, 0)
        assert tier.loaded > 12
        # Of three that are asked for the last token, of one that is there what is behind whole pages, and one
        # of less than a page.
        read = stats(second).prefilled_tokens
        assert read < 100 if name == "states" else read == 3 + 6 + 9
        check_idle(second)
        check_idle(first)


class Dies:
    """The prefill server's side of all connections ends in front of its ``count``th message of a kind, once;
    with ``changed``, that message has another byte."""

    def __init__(self, kind: type[Message], count: int, changed: bool, patch: pytest.MonkeyPatch) -> None:
        self.kind, self.left, self.changed, self.happened = kind, count, changed, False
        self._send = Channel.send
        patch.setattr(Channel, "send", lambda channel, *frame: self.send(channel, *frame))

    def send(self, channel: Channel, message: Message, beside: bytes = b"") -> None:
        self.left -= isinstance(message, self.kind)
        if isinstance(message, self.kind) and self.left == 0:
            self.happened = True
            if not self.changed:
                channel.close()
            else:
                made = channel._sum
                channel._sum = lambda *parts: made(*parts)[:-1] + b"?"  # type: ignore[method-assign]
        self._send(channel, message, beside)


def test_what_the_peer_had_cached_counts(folders: dict[str, Path], pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    with begin(folders["pages"]) as one:
        for engine in (one, first):
            tell(engine, [TEXTS[0]])
        assert same(tell(second, ASKED), tell(one, ASKED))
    assert stats(second).hits["prefill"] == 144


EITHER = (2, 1, "tcp"), (1, 2, "auto")


@pytest.mark.parametrize(
    ("name", "first", "second", "backend"),
    [
        ("windows", 2, 1, "tcp"),
        ("pages", 1, 2, "auto"),
        ("states", 2, 1, "tcp"),
        pytest.param("states", 1, 2, "auto", marks=pytest.mark.slow),
        *(pytest.param(name, *ranks, marks=pytest.mark.slow) for name in RECURRENT for ranks in EITHER),
        pytest.param("windows", 2, 1, "auto", marks=pytest.mark.slow),
        pytest.param("pages", 1, 2, "tcp", marks=pytest.mark.slow),
        pytest.param("latent", 1, 2, "auto", marks=pytest.mark.slow),
    ],
)
def test_either_side_may_have_more_ranks(
    folders: dict[str, Path],
    name: str,
    first: int,
    second: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is lent is copied out of the memory of each rank, and nothing is sent."""
    monkeypatch.setattr(procs, "ProcsExecutor", ForkedExecutor)
    kinds = {1: {"tp": 1}, 2: {"tp": 2, "executor": "procs"}}
    folder, both = folders[name], {"kv_transfer_backend": backend}
    with (
        begin(folder) as one,
        prefilling(folder, **both | kinds[first]) as prefill,
        decoding(folder, port_of(prefill), **both | kinds[second]) as decode,
    ):
        assert same(tell(decode, ASKED), tell(one, ASKED))
        [tier] = stats(decode).tiers
        assert (tier.asked, tier.unanswered, tier.failed) == (3, 0, 0)
        assert tier.loaded > 12
        check_idle(decode)
        check_idle(prefill)


def test_adapters_are_known_by_their_weights(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each server has its own names and numbers for them. What one lacks the other computes."""
    shapes = {"q_proj": (64, 64), "v_proj": (32, 64)}
    weights = {f"model.layers.1.self_attn.{name}.weight": torch.zeros(n) for name, n in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    for seed, name in enumerate("abc"):
        save_adapter(tmp_path / name, tmp_path, seed=seed)
    a, b, c = (f"{name}={tmp_path / name}" for name in "abc")
    ours: dict[str, Any] = {"lora_modules": [a, b, c], "max_lora_rank": 8}
    theirs: dict[str, Any] = {"lora_modules": [b.replace("b=", "mine="), a], "max_lora_rank": 8}
    prompts, asked = [TEXTS[0]] * 4, ["a", "b", None, "a"]
    wanted = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)
    with (
        begin(folders["pages"], **ours) as one,
        prefilling(folders["pages"], **theirs) as first,
        decoding(folders["pages"], port_of(first), **ours) as second,
    ):
        for prompt, name in zip(prompts, asked):
            expected, found = (engine.generate(prompt, wanted, lora_path=name) for engine in (one, second))
            assert (found.tokens, found.usage) == (expected.tokens, expected.usage)
        assert (stats(second).tiers[0].asked, stats(second).tiers[0].unanswered) == (3, 0)
        second.generate(TEXTS[0], wanted, lora_path="c")
        assert stats(second).tiers[0].unanswered == 1
        assert "an adapter is not loaded here" in caplog.text


MOMENTS = [(Ask, 1), (Want, 1), (Unit, 1), (Unit, 5), (Unit, 9), (Done, 1), (Done, 2)]


@pytest.mark.parametrize(
    ("kind", "count", "changed"),
    [
        *((*moment, False) for moment in MOMENTS),
        (Unit, 5, True),
        *(pytest.param(*moment, True, marks=pytest.mark.slow) for moment in MOMENTS),
    ],
)
def test_a_peer_that_dies_costs_time_alone(
    pair: tuple[Engine, Engine],
    alone: list[Any],
    kind: type[Message],
    count: int,
    changed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = pair
    monkeypatch.setattr(peers, "AGAIN", 0.01)
    dies = Dies(kind, count, changed, monkeypatch)
    assert same_text(tell(second, ASKED), alone)
    assert dies.happened
    assert "is gone; prompts are read here" in caplog.text
    wait_until(lambda: "answers" in caplog.text)
    assert same_text(tell(second, [TEXTS[1]]), tell(second, [TEXTS[1]]))
    check_idle(second)
    wait_until(lambda: not first._system.ingress.open_requests)  # type: ignore[union-attr]
    check_idle(first)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (Hello, 1),
        (Hello, 2),
        (Identity, 1),
        (Accepted, 1),
        (Accepted, 2),
        (Lent, 1),
        (Borrowed, 1),
        (Placed, 1),
        (Placed, 3),
    ],
)
def test_a_peer_that_dies_while_memory_is_lent_costs_time_alone(
    folders: dict[str, Path],
    fresh: Engine,
    alone: list[Any],
    kind: type[Message],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or before that, while the two greet."""
    monkeypatch.setattr(peers, "AGAIN", 0.01)
    dies = Dies(kind, count, False, monkeypatch)
    with decoding(folders["pages"], port_of(fresh)) as second:
        assert same_text(tell(second, ASKED), alone)
        assert dies.happened
        wait_until(lambda: "answers" in caplog.text)
        assert same_text(tell(second, [TEXTS[1]]), tell(second, [TEXTS[1]]))
        assert stats(second).tiers[0].asked > 0
        check_idle(second)
    wait_until(lambda: not fresh._system.ingress.open_requests)  # type: ignore[union-attr]
    check_idle(fresh)


def test_units_that_have_changed_are_not_used(
    pair: tuple[Engine, Engine], alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = HostUnits.end

    def spoil(units: HostUnits, unit: int, key: bytes, threads: Any) -> None:
        end(units, unit, key, threads)
        units._sums[unit].result()
        units.memory.units[unit, 3] ^= 1

    monkeypatch.setattr(HostUnits, "end", spoil)
    _, second = pair
    assert same_text(tell(second, ASKED), alone)
    [tier] = stats(second).tiers
    assert (tier.loaded, tier.failed) == (0, 3)


def test_memory_is_borrowed_on_one_host(
    folders: dict[str, Path], fresh: Engine, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Message, int]] = []
    send = Channel.send

    def watch(channel: Channel, message: Message, beside: bytes = b"") -> None:
        sent.append((message, len(beside)))
        send(channel, message, beside)

    monkeypatch.setattr(Channel, "send", watch)
    with decoding(folders["pages"], port_of(fresh)) as second:
        assert same_text(tell(second, ASKED), alone)
        assert stats(second).tiers[0].failed == 0
    placed = [message for message, _ in sent if isinstance(message, Placed)]
    assert sum(len(message.keys) // KEY for message in placed) > 12
    assert not any(isinstance(message, Unit) or beside for message, beside in sent)


def test_borrowed_units_that_are_overwritten_are_not_used(
    folders: dict[str, Path], fresh: Engine, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = HostUnits.lent

    def late(units: HostUnits, key: bytes) -> Any:
        found = lent(units, key)
        assert found is not None
        place, mark = found
        return place, mark - 2 * (place % 3 == 1)

    monkeypatch.setattr(HostUnits, "lent", late)
    with decoding(folders["pages"], port_of(fresh)) as second:
        assert same_text(tell(second, ASKED), alone)
        assert stats(second).tiers[0].failed > 0
        check_idle(second)


@pytest.mark.parametrize("changes", [{"pid": 1 << 22}, {"token": b"?" * TOKEN}, {"units": [1]}, {"fds": [0]}])
def test_what_cannot_be_borrowed_is_sent(
    folders: dict[str, Path],
    fresh: Engine,
    alone: list[Any],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = Channel.send

    def other(channel: Channel, message: Message, beside: bytes = b"") -> None:
        assert not isinstance(message, Borrowed)
        terms = isinstance(message, Lent)
        send(channel, msgspec.structs.replace(message, **changes) if terms else message, beside)

    monkeypatch.setattr(Channel, "send", other)
    with decoding(folders["pages"], port_of(fresh)) as second:
        assert same_text(tell(second, ASKED[:2]), alone[:2])
        assert stats(second).tiers[0].loaded > 0
        assert stats(second).tiers[0].failed == 0


def test_a_system_without_sealed_memory_lends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(fcntl) if name.startswith("F_SEAL") or name.endswith("_SEALS")]:
        monkeypatch.delattr(fcntl, name)
    monkeypatch.delattr(os, "memfd_create")
    lending = runpy.run_path(lent.__file__)["HostLending"]()
    segment = lending.lend(3, 16, bytes(TOKEN))
    assert segment.fd is None
    assert segment.units.shape == (4, 16)
    assert lending.borrow(Lent(1 << 22, bytes(TOKEN), [0], [3]), 0, 16) is None


def test_a_prefill_server_brings_back_what_its_tree_has_lost(folders: dict[str, Path]) -> None:
    texts = [[(a * i + a) % 300 for i in range(150)] for a in (7, 11, 13, 17, 19, 23)]
    small = {"kv_cache_bytes": 256 << 10, "context_length": 200, "kv_transfer_bytes": 2 << 20}
    with begin(folders["pages"]) as one, prefilling(folders["pages"], **small) as first:
        for _ in range(2):
            assert same_text(tell(first, texts), tell(one, texts))
        assert stats(first).tiers[0].loaded > 0
        assert stats(first).tiers[0].failed == 0
        check_idle(first)


def test_a_prefill_server_that_refuses_is_no_error(
    pair: tuple[Engine, Engine], alone: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    assert first._system is not None
    first._system.ingress.phase = "draining"
    assert same_text(tell(second, ASKED), alone)
    first._system.ingress.phase = "ready"
    assert "shutting down" in caplog.text
    assert stats(second).tiers[0].unanswered == 3


def test_bytes_that_are_no_ids_cost_their_sender_alone(
    pair: tuple[Engine, Engine],
    alone: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remote, "Ask", lambda number, name, tokens: Ask(number, name, tokens + b"x"))
    _, second = pair
    assert same_text(tell(second, ASKED), alone)
    assert "no int32 ids" in caplog.text
    assert stats(second).tiers[0].unanswered == 3


def test_requests_that_leave_are_not_read_on(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    assert first._system is not None
    first._system._schedule.pause(True)  # type: ignore[union-attr]
    stream = second.stream(TEXTS[0])

    def read() -> None:
        with contextlib.suppress(SglaError):
            next(iter(stream))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: first._system.ingress.open_requests == 1)  # type: ignore[union-attr]
    second.shutdown()
    wait_until(lambda: not first._system.ingress.open_requests)  # type: ignore[union-attr]
    first._system._schedule.pause(False)  # type: ignore[union-attr]
    thread.join()


@pytest.mark.parametrize(("pages", "asked"), [(12, 1), (8, 0)])
def test_a_prompt_may_take_all_that_is_lent(
    folders: dict[str, Path], prefill: Engine, pages: int, asked: int
) -> None:
    """Nine pages of it, and where it ends. What has no room there is computed here, as is all that does not
    come."""
    assert prefill._system is not None
    [group] = prefill._system.ingress.facts.groups  # type: ignore[union-attr]
    with (
        prefilling(folders["pages"], kv_transfer_bytes=pages * group.page_bytes) as first,
        decoding(folders["pages"], port_of(first)) as second,
    ):
        assert same_text(tell(second, [TEXTS[0]]), tell(prefill, [TEXTS[0]]))
        [tier] = stats(second).tiers
        assert (tier.loaded, tier.unanswered) == (10 * asked, 1 - asked)


def test_prompt_logprobs_are_computed_here(pair: tuple[Engine, Engine], folders: dict[str, Path]) -> None:
    _, second = pair
    with begin(folders["pages"]) as one:
        wanted = {"prompt_logprobs": 1, "temperature": 0.0}
        assert same(tell(second, ASKED[:2], **wanted), tell(one, ASKED[:2], **wanted))
    assert stats(second).tiers[0].asked == 0


def test_small_memory_costs_time_alone(folders: dict[str, Path], prefill: Engine, alone: list[Any]) -> None:
    """There is room for a third of a prompt on its way, and on the device for one."""
    sizes: dict[str, Any] = {"kv_transfer_bytes": 32 << 10, "kv_cache_bytes": 256 << 10}
    sizes |= {"context_length": 200, "kv_transfer_backend": "tcp"}
    with decoding(folders["pages"], port_of(prefill), **sizes) as second:
        wanted = SamplingParams(temperature=0.7, seed=5, max_tokens=4)
        outputs = second.generate(ASKED * 2, wanted)
        assert [out.tokens for out in outputs] == [tokens for tokens, *_ in alone] * 2
        check_idle(second)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_secret": "another"}, "another secret"),
        ({"random_seed": 2}, "model: "),
        ({"page_size": 8}, "settings: .*page_size=16"),
    ],
)
def test_strangers_are_refused(
    folders: dict[str, Path], prefill: Engine, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"--prefill-url tcp://.*{words}"):
        decoding(folders["pages"], port_of(prefill), **changes)


def test_other_versions_are_refused(
    folders: dict[str, Path], prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def older(channel: Channel, message: Message, beside: bytes = b"") -> None:
        if isinstance(message, Hello):
            message.version = "0.0.1"
        send(channel, message, beside)

    monkeypatch.setattr(Channel, "send", older)
    with pytest.raises(ConfigError, match="and this is 0.0.1; install the same"):
        decoding(folders["pages"], port_of(prefill))


def test_who_sends_nonsense_is_not_let_in(prefill: Engine) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 99, bytes(99)):
        with socket.create_connection(("127.0.0.1", port_of(prefill)), 5) as sock:
            sock.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(99) == b""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"role": "encode", **SECRET}, "the model takes no pictures"),
        ({"role": "encode"}, "SGLA_KV_TRANSFER_SECRET"),
        ({"encode_url": "http://a:1", **SECRET}, "--encode-url takes tcp://HOST:PORT"),
        ({"encode_url": "tcp://a:1", "role": "prefill", **SECRET}, "which takes no pictures"),
        ({"role": "prefill"}, "SGLA_KV_TRANSFER_SECRET"),
        ({"role": "decode", **SECRET}, "--prefill-url tcp://HOST:PORT"),
        ({"role": "decode", "prefill_url": "http://a:1", **SECRET}, "--prefill-url tcp://HOST:PORT"),
        ({"prefill_url": "tcp://a:1"}, "needs --role decode"),
        ({"kv_transfer_backend": "tcp"}, "--kv-transfer-backend tcp: it needs --role prefill or decode"),
        ({"kv_transfer_backend": "nixl"}, "--kv-transfer-backend nixl: it needs --role prefill or decode"),
        ({"kv_transfer_bytes": 1 << 20}, "--kv-transfer-bytes 1048576: it needs --role prefill or decode"),
        ({"kv_transfer_port": 1}, "--kv-transfer-port 1: it needs --role prefill, decode or encode"),
        ({"role": "prefill", "kv_transfer_backend": "cuda_ipc", **SECRET}, "cuda_ipc needs GPUs"),
        ({"role": "prefill", "prefix_cache": False, **SECRET}, "--no-prefix-cache"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        begin(folders["pages"], **changes)


def serve_until_killed(folder: str, pipe: Connection, beat: float) -> None:
    door.BEAT = beat
    with prefilling(Path(folder)) as engine:
        pipe.send(port_of(engine))
        pipe.recv()
        assert engine._system is not None
        engine._system._schedule.pause(True)  # type: ignore[union-attr]
        pipe.send("paused")
        pipe.recv()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed(
    end: signal.Signals,
    folders: dict[str, Path],
    alone: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While a prompt waits for it. One that has stopped says nothing any more."""
    monkeypatch.setattr(remote, "SILENCE", 1.5)
    ours, theirs = Pipe()
    args = (str(folders["pages"]), theirs, 0.2)
    process = CONTEXT.Process(target=serve_until_killed, args=args, daemon=True)
    process.start()
    theirs.close()
    with contextlib.ExitStack() as last, decoding(folders["pages"], ours.recv()) as second:
        last.callback(process.kill)  # one that has stopped would not end by itself
        assert same(tell(second, ASKED[:1]), alone[:1])
        assert stats(second).tiers[0].loaded == 10
        ours.send("pause")
        assert ours.recv() == "paused"
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.extend(tell(second, [TEXTS[2]])))
        thread.start()
        wait_until(lambda: stats(second).tiers[0].asking == 1)
        os.kill(process.pid or 0, end)
        thread.join()
        assert same_text(told, alone[-1:])
        assert "is gone; prompts are read here" in caplog.text
        assert same_text(tell(second, ASKED[:1]), alone[:1])
        check_idle(second)


def test_who_says_nothing_for_long_is_asked_no_more(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "SILENCE", 1.0)
    monkeypatch.setattr(door, "BEAT", 0.05)
    with prefilling(folders["pages"]) as first:
        with decoding(folders["pages"], port_of(first)):
            time.sleep(1.5)
            assert "is gone" not in caplog.text
        monkeypatch.setattr(door, "BEAT", 60)
        with decoding(folders["pages"], port_of(first)):
            wait_until(lambda: "is gone; prompts are read here" in caplog.text)


async def listen(engine: Engine) -> tuple[Runner, str]:
    """The server's routes; runs on its loop."""
    assert engine._system is not None
    runner = Runner(make_app(engine._system.ingress, engine._system.config, engine._system.metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def generated(session: aiohttp.ClientSession, url: str) -> list[int]:
    sampling = {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 4}
    body = {"input_ids": TEXTS[0], "sampling_params": sampling}
    async with session.post(f"{url}/generate", json=body) as answer:
        found: list[int] = (await answer.json())["output_ids"]
        return found


async def test_a_router_has_decode_servers_that_share_a_prefill_server(
    folders: dict[str, Path], alone: list[Any]
) -> None:
    """Also once that is gone."""
    [wanted, *_] = alone[0]
    with (
        prefilling(folders["pages"]) as first,
        decoding(folders["pages"], port_of(first)) as one,
        decoding(folders["pages"], port_of(first)) as other,
    ):
        served = [(engine, *engine._call(listen(engine))) for engine in (one, other)]
        urls = [url for *_, url in served]
        balancer = Balancer(RouteConfig(worker=urls, policy="round_robin"), seed=0)
        for url in urls:
            balancer.add(url)
            balancer.saw(url, Look(cards=[{"id": "m", "object": "model"}]))
        front, listening = (
            Front(balancer.config, LocalOwner(balancer)),
            socket.create_server(("127.0.0.1", 0)),
        )
        listening.setblocking(False)
        await front.listen([listening], None)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(generated(session, url) for _ in range(6)))
            assert answers == [wanted] * 6
            assert [stats(engine).tiers[0].asked for engine in (one, other)] == [3, 3]
            assert stats(first).prefilled_tokens < 2 * len(TEXTS[0]), "it is read once"
            await asyncio.to_thread(first.shutdown)
            assert await generated(session, url) == wanted
        front.close()
        for engine, runner, _ in served:
            engine._call(runner.cleanup())
            check_idle(engine)
