"""A server that makes features of pictures for others: two are as one, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sgla import Engine, SamplingParams, peers
from sgla.actors import encoding
from sgla.errors import ConfigError, SglaError, UnsupportedField, UnsupportedTask
from sgla.loading.tower import Tower
from sgla.peers import Accepted, Channel, Encode, Encoded, Hello, Identity, Message

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "Look: <image> and <image>"
SHOWN = [Image.effect_noise((20, 14), sigma).convert("RGB") for sigma in (20, 90)]
SECRET = {"kv_transfer_secret": "between us"}


def begin(folder: Path, **changes: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "executor": "inline", "random_seed": 1}
    settings |= {"media_processes": 1}
    return Engine(str(folder), **{"load_format": "dummy"} | settings | changes)


def encoding_server(folder: Path, port: int = 0, **changes: Any) -> Engine:
    return begin(folder, **{"role": "encode", "kv_transfer_port": port} | SECRET | changes)


def port_of(engine: Engine) -> int:
    [port] = engine._system.ingress.facts.peer_ports  # type: ignore[union-attr]
    return int(port)


def asking(folder: Path, port: int, **changes: Any) -> Engine:
    return begin(folder, **{"encode_url": f"tcp://127.0.0.1:{port}"} | SECRET | changes)


def say(engine: Engine, shown: list[Any] = SHOWN) -> list[int]:
    return engine.generate(TEXT, GREEDY, image_data=shown).tokens


def check_idle(engine: Engine) -> None:
    """Nobody waits for a picture."""
    system: Any = engine._system
    assert not system._encoding._waiting
    assert not system._pictures._making


def wait_until(true: Any) -> None:
    wait = threading.Event()
    for _ in range(2000):
        if true():
            return
        wait.wait(0.01)
    raise AssertionError("it does not come")


@pytest.fixture(scope="module")
def alone(tiny_llava: Path) -> list[int]:
    with begin(tiny_llava) as engine:
        found = say(engine)
        assert found != say(engine, SHOWN[::-1])
        return found


@pytest.fixture(scope="module")
def server(tiny_llava: Path) -> Iterator[Engine]:
    with encoding_server(tiny_llava) as engine:
        yield engine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "AGAIN", 0.01)


@pytest.fixture(scope="module")
def engine(tiny_llava: Path, server: Engine) -> Iterator[Engine]:
    with asking(tiny_llava, port_of(server)) as engine:
        yield engine


def test_two_servers_are_as_one(engine: Engine, server: Engine, alone: list[int]) -> None:
    """This one has no tower; pictures that come again have been seen."""
    assert not engine._system.ingress.facts.ledger["tower"]  # type: ignore[union-attr]
    assert say(engine) == alone
    plain = engine.generate("No picture", GREEDY).tokens
    assert engine.generate(["No picture", TEXT], GREEDY, image_data=[None, SHOWN])[1].tokens == alone
    assert engine.generate("No picture", GREEDY).tokens == plain
    assert say(engine, SHOWN[::-1]) != alone
    check_idle(engine)
    with pytest.raises(UnsupportedTask, match="reads pictures for others"):
        server.generate("No picture", GREEDY)
    with pytest.raises(UnsupportedField, match="reads pictures for others"):
        say(server)


@pytest.mark.parametrize("kind", [Encode, Encoded])
@pytest.mark.parametrize("changed", [False, True])
def test_a_server_that_dies_costs_its_pictures_alone(
    kind: type[Message], changed: bool, engine: Engine, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends in front of a message, or something in it has changed on the way."""
    send, left = Channel.send, [1]

    def other(channel: Channel, message: Message, beside: Any = b"") -> None:
        if isinstance(message, kind) and left:
            left.clear()
            if changed:
                beside = b"?" + bytes(beside)[1:]
            else:
                channel.close()
        send(channel, message, beside)

    monkeypatch.setattr(Channel, "send", other)
    shown = [Image.effect_noise((20, 14), 50).convert("RGB")] * 2  # not seen before
    with pytest.raises(SglaError, match="has no features" if changed else "is not there"):
        say(engine, shown)
    assert not left
    assert engine.generate("No picture", GREEDY).tokens
    wait_until(lambda: engine._system._encoding._link is not None)  # type: ignore[union-attr]
    assert say(engine) == alone
    check_idle(engine)


def test_a_picture_without_features_fails_alone(
    engine: Engine, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tower: Tower, arrays: Any) -> None:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(Tower, "__call__", fail)
        with pytest.raises(SglaError, match="no memory is left"):
            say(engine, [Image.new("RGB", (20, 14), "green")] * 2)
    assert say(engine) == alone
    check_idle(engine)


def test_what_is_not_answered_ends(
    engine: Engine, server: Engine, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for it has gone when it is made at last."""
    goes_on, look = threading.Event(), Tower.__call__

    def late(tower: Tower, arrays: Any) -> Any:
        goes_on.wait(20)
        return look(tower, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Tower, "__call__", late)
        patch.setattr(encoding, "PATIENCE", 0.05)
        with pytest.raises(SglaError, match="does not answer"):
            say(engine, [Image.new("RGB", (20, 14), "blue")] * 2)
        check_idle(engine)
        goes_on.set()
    assert say(engine) == alone


@pytest.mark.slow
def test_it_may_come_later(tiny_llava: Path, alone: list[int]) -> None:
    with encoding_server(tiny_llava) as first:
        port = port_of(first)
    with asking(tiny_llava, port) as engine:
        with pytest.raises(SglaError, match="--encode-url"):
            say(engine)
        with encoding_server(tiny_llava, port):
            wait_until(lambda: engine._system._encoding._link is not None)  # type: ignore[union-attr]
            assert say(engine) == alone


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"kv_transfer_secret": "another"}, "another secret"), ({"random_seed": 2}, "model: ")],
)
def test_strangers_are_refused(tiny_llava: Path, server: Engine, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--encode-url tcp://.*{words}"):
        asking(tiny_llava, port_of(server), **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Hello, Identity, Accepted])
def test_a_greeting_that_breaks_off_is_tried_again(
    kind: type[Message],
    tiny_llava: Path,
    server: Engine,
    alone: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, left = Channel.send, [1]

    def other(channel: Channel, message: Message, beside: Any = b"") -> None:
        if isinstance(message, kind) and left:
            left.clear()
            channel.close()
        send(channel, message, beside)

    monkeypatch.setattr(Channel, "send", other)
    with asking(tiny_llava, port_of(server)) as engine:
        wait_until(lambda: engine._system._encoding._link is not None)  # type: ignore[union-attr]
        assert say(engine) == alone


def serve(folder: str, pipe: Connection) -> None:
    with encoding_server(Path(folder)) as engine:
        pipe.send(port_of(engine))
        pipe.recv()


@pytest.mark.slow
def test_a_process_that_is_killed(tiny_llava: Path, alone: list[int]) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(str(tiny_llava), theirs), daemon=True)
    process.start()
    theirs.close()
    with asking(tiny_llava, ours.recv()) as engine:
        assert say(engine) == alone
        process.kill()
        process.join()
        wait_until(lambda: engine._system._encoding._link is None)  # type: ignore[union-attr]
        with pytest.raises(SglaError, match="--encode-url"):
            say(engine, [Image.new("RGB", (20, 14), "green")] * 2)
        check_idle(engine)
