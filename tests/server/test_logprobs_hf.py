"""Logprobs over HTTP against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from torch import Tensor

TEXT = "The quick brown fox jumps over the lazy dog."
MESSAGES = [{"role": "user", "content": "Hello there!"}]
TOP = 4


@pytest.fixture(scope="module")
def server(tiny_server: ServerProcess) -> ServerProcess:
    return tiny_server


@pytest.fixture(scope="module")
def hf(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def post(server: ServerProcess, path: str, body: Any) -> Any:
    status, reply = server.request("POST", path, body)
    assert status == 200, reply
    return reply


@torch.no_grad()
def logprobs(hf: Any, ids: list[int]) -> Tensor:
    """float32 [len(ids) - 1, V]: [i] is of the token behind ids[: i + 1]."""
    found: Tensor = hf(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found


def close(value: float) -> Any:
    return pytest.approx(value, abs=2e-4)


def tops(row: Tensor) -> list[Any]:
    return [close(value) for value in row.topk(TOP).values.tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat(server: ServerProcess, hf: Any, temperature: float) -> None:
    wish = {"logprobs": True, "top_logprobs": TOP, "return_token_ids": True, "seed": 3, "ignore_eos": True}
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": temperature, **wish}
    reply = post(server, "/v1/chat/completions", body)
    prompt, choice = reply["prompt_token_ids"], reply["choices"][0]
    rows = logprobs(hf, prompt + choice["token_ids"])[len(prompt) - 1 :]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(rows) == 12
    for token, entry, row in zip(choice["token_ids"], entries, rows):
        assert entry["logprob"] == close(float(row[token]))
        assert [other["logprob"] for other in entry["top_logprobs"]] == tops(row)
        if temperature == 0:
            assert entry["logprob"] == close(float(row.max()))


def test_completions_with_echo(server: ServerProcess, hf: Any) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    wish = {"echo": True, "logprobs": TOP, "return_token_ids": True, "ignore_eos": True, "seed": 1}
    reply = post(server, "/v1/completions", {"prompt": TEXT, "max_tokens": 5, "temperature": 1, **wish})
    shown = reply["choices"][0]["logprobs"]
    every = ids + reply["choices"][0]["token_ids"][-5:]
    rows = logprobs(hf, every)
    assert shown["token_logprobs"][0] is None
    assert len(shown["token_logprobs"]) == len(every)
    for token, value, top, row in zip(
        every[1:], shown["token_logprobs"][1:], shown["top_logprobs"][1:], rows
    ):
        assert value == close(float(row[token]))
        assert sorted(top.values(), reverse=True)[:TOP] == tops(row)


def test_prompt_logprobs_and_ranks(server: ServerProcess, hf: Any) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": TOP}
    shown = post(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    assert len(shown) == len(ids)
    assert shown[0] is None
    for token, entries, row in zip(ids[1:], shown[1:], logprobs(hf, ids)):
        assert set(entries) == {str(i) for i in row.topk(TOP).indices.tolist()} | {str(token)}
        for name, entry in entries.items():
            assert entry["logprob"] == close(float(row[int(name)]))
            assert entry["rank"] == 1 + int((row > row[int(name)]).sum())


def test_prompt_logprobs_of_the_whole_vocabulary(server: ServerProcess, hf: Any) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": -1}
    shown = post(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    assert (len(shown), shown[0]) == (len(ids), None)
    for entries, row in zip(shown[1:], logprobs(hf, ids)):
        assert len(entries) == len(row)
        assert [entries[str(token)]["logprob"] for token in range(len(row))] == close(row.tolist())
        assert sorted(entry["rank"] for entry in entries.values()) == [*range(1, len(row) + 1)]
    chat = post(
        server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": -1}
    )
    assert {len(entries) for entries in chat["prompt_logprobs"][1:]} == {len(row)}
