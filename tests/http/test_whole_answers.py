"""Long answers: made a piece at a time beside the loop, and the same as those that are made in one go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.http.answer import whole
from sgla.http.answer.collect import Choice
from sgla.http.answer.whole import INLINE, PART, PIECE, TEXT, each, in_parts, pieces, written
from sgla.http.openai.common import answer_size
from sgla.messages import Event, Job, Pooling, SamplingParams, TokenLogprob, Usage

PROMPT = {"prompt": "hi", "logprobs": 20}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
NATIVE = {"text": "hi", "return_logprob": True, "top_logprobs_num": 20}


@pytest.mark.parametrize("count", [0, 1, PART, PART + 1, 3 * PART])
def test_what_is_written_is_json(count: int) -> None:
    value = {
        "text": '\n"\u4e2d' * count * 100,
        "ids": list(range(count)),
        "rows": [{"i": i, "none": None} for i in range(count)],
        "empty": {},
    }
    assert json.loads(b"".join(written(value))) == value
    lists = {"a": in_parts(count, lambda part: value["ids"][part]), "b": each(count, lambda i: {"i": i})}
    assert json.loads(b"".join(written(lists))) == {"a": value["ids"], "b": [{"i": i} for i in range(count)]}


def test_nothing_long_is_encoded_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, encode = [], whole.encode

    def watched(value: Any) -> bytes:
        data = encode(value)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(whole, "encode", watched)
    value = {"text": "x" * 1_000_000, "ids": [70_000] * 100_000, "long": each(10_000, lambda i: [i] * 10)}
    made = list(pieces(lambda: value))
    assert json.loads(b"".join(made)) == value | {"long": [[i] * 10 for i in range(10_000)]}
    assert max(sizes) <= TEXT + 2
    assert all(PIECE <= len(piece) < 2 * PIECE for piece in made[:-1])


def test_of_a_long_answer_not_all_choices_are_counted() -> None:
    work: Any = SimpleNamespace(jobs=[SimpleNamespace(sampling=SamplingParams())], n=4)

    def choices() -> Iterator[Choice]:
        for i in range(2):
            choice = Choice(i)
            choice.tokens = [1] * INLINE
            yield choice
        raise AssertionError("it is long already")

    assert answer_size(choices(), work) > INLINE


def test_logprobs_are_freed_once_they_are_written() -> None:
    choice = Choice(0)
    choice.logprobs = [TokenLogprob(1, -1.0, 1)] * 1000
    assert b"".join(pieces(lambda: {"count": len(choice.logprobs or ())}, [choice])) == b'{"count":1000}'
    assert choice.logprobs == []


class PooledIngress(FakeIngress):
    """A model with vectors of ``pooling``, or of the scores that a request asks of a model of text."""

    def __init__(self, pooling: Pooling | None) -> None:
        super().__init__()
        assert self.facts is not None
        self.facts.pooling = pooling
        self.facts.scores = pooling is None

    async def _run(self, job: Job) -> None:
        size = (
            self.facts.pooling.size if self.facts is not None and self.facts.pooling else len(job.pool or ())
        )
        values = [float(len(job.text or "") % (7 + i)) for i in range(size)]
        vector = np.array(values, np.float32).tobytes()
        self.push(
            job.rid, Event(rid=job.rid, index=job.index_base, finish="stop", usage=Usage(3), vector=vector)
        )


TEXTS = ["a" * (1 + i % 50) for i in range(700)]
CLASSES = Pooling(task="classify", kind="cls", size=3, labels=["hate", "safe", "x"], activation="softmax")
EMBEDDER = Pooling(task="embed", kind="mean", size=8, normalize=True)
POOLED = {
    "classify": (CLASSES, "/v1/classify", {"input": TEXTS}),
    "classify texts": (CLASSES, "/classify", {"text": TEXTS}),
    "moderations": (CLASSES, "/v1/moderations", {"input": TEXTS}),
    "embeddings": (EMBEDDER, "/v1/embeddings", {"input": TEXTS}),
    "encode": (EMBEDDER, "/encode", {"text": TEXTS}),
    "pairs": (EMBEDDER, "/v1/score", {"text_1": "a", "text_2": TEXTS}),
    "items": (None, "/v1/score", {"query": "a", "items": TEXTS, "label_token_ids": [5, 6, 7]}),
    "rerank": (EMBEDDER, "/rerank", {"query": "a", "documents": TEXTS}),
}


@pytest.mark.parametrize("name", POOLED)
async def test_long_lists_of_vectors_are_made_elsewhere_and_are_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pooling, route, body = POOLED[name]
    site = await serve(PooledIngress(pooling))
    await same(site, monkeypatch, route, body)


@pytest.mark.parametrize(
    ("route", "body", "lengths"),
    [
        ("/v1/chat/completions", CHAT, {"max_tokens": 200}),
        ("/v1/completions", PROMPT, {"max_tokens": 200}),
        ("/generate", NATIVE, {"sampling_params": {"max_new_tokens": 200}}),
    ],
)
async def test_long_answers_are_made_elsewhere_and_are_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], lengths: dict[str, Any]
) -> None:
    monkeypatch.setattr(whole, "PART", 64)
    await same(site, monkeypatch, route, body | lengths)


async def same(site: Site, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]) -> None:
    """Whether the loop makes the answer or a thread does."""
    names: list[str] = []
    encode = whole.encode
    monkeypatch.setattr(
        whole, "encode", lambda value: names.append(threading.current_thread().name) or encode(value)
    )
    status, long = await site.post(route, body)
    assert status == 200
    assert {name[:7] for name in names} == {"answers"}
    made = len(names)
    assert made > 2
    monkeypatch.setattr(whole, "INLINE", 1 << 30)
    status, plain = await site.post(route, body)
    assert status == 200
    assert {name[:7] for name in names[made:]} <= {"MainThr"}
    assert told(long) == told(plain)


def told(reply: Any) -> Any:
    """Without what is of the request alone."""
    if isinstance(reply, list):
        return list(map(told, reply))
    if not isinstance(reply, dict):
        return reply
    return {name: told(item) for name, item in reply.items() if name not in ("id", "created", "e2e_latency")}
