"""Who hears of what the prefix tree gets and loses has the same picture of it."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tiny import LLAMA, VOCAB
from tokenizers import Tokenizer, models

from sgla.cache.events import BlockRemoved, BlockStored, Events, KvEvent
from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.config import Config
from sgla.engine import Engine
from sgla.engine.params import SamplingParams
from sgla.errors import ConfigError
from sgla.observe import kv_events

PAGE = 2


class Picture:
    """What a router knows: the text up to the end of each block."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, ...]] = {}

    def hear(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                for gone in event.block_hashes:
                    del self.texts[gone]
                continue
            above = () if event.parent_block_hash is None else self.texts[event.parent_block_hash]
            for i, block in enumerate(event.block_hashes):
                assert block not in self.texts
                size = event.block_size
                above = self.texts[block] = (*above, *event.token_ids[i * size : (i + 1) * size])


def texts_of(cache: RadixCache) -> list[tuple[int, ...]]:
    found = []
    for node in cache.walk():
        above: tuple[int, ...] = ()
        parent = node.parent
        while parent is not None and parent.parent is not None:
            above = (*array("i", parent.key), *above)
            parent = parent.parent
        own = tuple(array("i", node.key))
        found += [(*above, *own[: end + PAGE]) for end in range(0, len(own), PAGE)]
    return sorted(found)


@pytest.mark.parametrize("seed", range(40))
def test_a_picture_is_the_tree(seed: int) -> None:
    rng, pool, picture = random.Random(seed), PagePool(40), Picture()
    cache = RadixCache(PAGE, pool)
    cache.events = Events(PAGE, "CPU")
    for _ in range(60):
        text = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 9))]
        data, count = array("i", text).tobytes(), len(text) // PAGE
        match = cache.match("", data, len(text))
        cache.lock(match.node)
        lacking = count - len(match.pages)
        if lacking > len(pool):
            cache.evict(lacking - len(pool))
        if lacking <= len(pool):
            left, _ = cache.insert(
                cache.root, "", data, match.pages + (pool.alloc(lacking) if lacking else [])
            )
            assert list(left) == match.pages
        cache.unlock(match.node)
        if rng.random() < 0.1:
            cache.evict(rng.randrange(10))
        picture.hear(cache.events.drain())
        cache.check()
        assert sorted(picture.texts.values()) == texts_of(cache)
    assert cache.flush()
    picture.hear(cache.events.drain())
    assert picture.texts == {}


def test_hashes_say_text_and_namespace() -> None:
    def hashes(namespace: str, *texts: list[int]) -> list[int]:
        cache, pool = RadixCache(PAGE, PagePool(40)), PagePool(40)
        cache.events = Events(PAGE, "CPU")
        for text in texts:
            cache.insert(cache.root, namespace, array("i", text).tobytes(), pool.alloc(len(text) // PAGE))
        return [h for e in cache.events.drain() if isinstance(e, BlockStored) for h in e.block_hashes]

    whole, parts = hashes("", [1, 2, 3, 4, 5, 6]), hashes("", [1, 2], [1, 2, 3, 4, 5, 6])
    assert whole == parts
    assert not set(whole) & set(hashes("other", [1, 2, 3, 4, 5, 6]))


def replayed(endpoint: str) -> list[tuple[int, Any]]:
    """All messages that are kept, by their numbers."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", bytes(8)))
        while True:
            assert socket.poll(10_000)
            *_, number, payload = socket.recv_multipart()
            if number == kv_events.END:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def test_a_server_publishes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = {f"<{i}>": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv", "format": "dynamo"}
    settings: dict[str, Any] = {"device": "cpu", "executor": "inline", "threads": 1, "page_size": 4}
    settings |= {"load_format": "dummy", "native_kernels": False, "kv_cache_bytes": 1 << 20}
    with Engine(str(tmp_path), kv_events_config=config, **settings) as engine:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.connect(endpoint)
            socket.subscribe(b"kv")
            prompt = [i % VOCAB for i in range(1, 22)]
            for _ in range(200):  # until the subscription has come
                engine.generate(prompt, SamplingParams(max_tokens=1))
                if socket.poll(20):
                    break
                engine.flush_cache()
            topic, _, payload = socket.recv_multipart()
        messages = replayed(replay)
    assert topic == b"kv"
    assert [number for number, _ in messages] == list(range(len(messages)))
    assert msgspec.msgpack.decode(payload) in [message for _, message in messages]
    events = [event for _, message in messages for event in message[1]]
    event = next(event for event in events if event.get("token_ids") == prompt[:20])
    assert (event["type"], event["block_size"], event["medium"]) == ("BlockStored", 4, "CPU")
    assert len(event["block_hashes"]) == 5
    assert event["parent_block_hash"] is None


def publisher_of(config: dict[str, Any]) -> kv_events.Publisher:
    found = kv_events.read(config)
    assert found is not None
    return kv_events.Publisher(found)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"endpoint": "nowhere"}, "nowhere"),
        ({"hwm": 0}, "hwm must be at least 1"),
        ({"bind": False}, "binds its endpoint"),
        ({"format": "other"}, "format"),
        ({"publisher": "kafka"}, "publisher"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_published_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        publisher_of(config)


def test_nothing_is_published_unless_it_is_wanted() -> None:
    assert kv_events.read(Config().kv_events_config) is None
    assert kv_events.read({"enable_kv_cache_events": False}) is None
    assert kv_events.read({"publisher": "null"}) is None
