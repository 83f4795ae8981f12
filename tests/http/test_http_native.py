"""/generate: SGLang's native shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fake import expected_text
from http_site import Site

from sgla.http.native.generate import AnswerFormat


def text_of(site: Site, job: int, steps: int, child: int = 0) -> str:
    return expected_text(site.ingress.jobs[job], site.ingress.prompt(site.ingress.jobs[job]), child, steps)


async def test_text(site: Site) -> None:
    status, reply = await site.post(
        "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    )
    assert status == 200
    assert reply["text"] == text_of(site, 0, 5)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 5, 3)
    assert meta["e2e_latency"] > 0
    assert len(reply["output_ids"]) == 5


async def test_default_length(site: Site) -> None:
    await site.post("/generate", {"input_ids": [1, 2]})
    assert site.ingress.jobs[0].sampling.max_tokens == 128
    assert site.ingress.jobs[0].token_ids == [1, 2]


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[1], [2, 3]]}], ids=["text", "ids"])
async def test_batch(site: Site, prompts: dict[str, Any]) -> None:
    params = [{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 3, "n": 2}]
    _, replies = await site.post("/generate", prompts | {"sampling_params": params, "rid": ["x", "y"]})
    jobs = [site.ingress.jobs.index(job) for job in sorted(site.ingress.jobs, key=lambda job: job.index_base)]
    assert [reply["text"] for reply in replies] == [
        text_of(site, job, steps, child) for job, steps in zip(jobs, (2, 3)) for child in (0, 1)
    ]
    assert [reply["meta_info"]["id"] for reply in replies] == ["x-0", "x-1", "y-0", "y-1"]


async def test_stream_is_cumulative(site: Site) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 6}, "stream": True, "return_logprob": True}
    payloads = await site.sse("/generate", body)
    assert payloads[-1] == "[DONE]"
    results = [json.loads(payload) for payload in payloads[:-1]]
    whole = text_of(site, 0, 6)
    assert all(whole.startswith(result["text"]) for result in results)
    assert results[-1]["text"] == whole
    assert [result["meta_info"]["completion_tokens"] for result in results] == list(range(1, 7))
    assert [len(result["meta_info"]["output_token_logprobs"]) for result in results] == list(range(1, 7))
    assert [result["meta_info"]["finish_reason"] for result in results[:-1]] == [None] * 5
    assert "index" not in results[0]


async def test_stream_batch_has_indices(site: Site) -> None:
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}, "stream": True}
    results = [json.loads(payload) for payload in (await site.sse("/generate", body))[:-1]]
    assert sorted(result["index"] for result in results) == [0, 0, 1, 1]


async def test_logprobs(site: Site) -> None:
    body = {
        "input_ids": [97, 98, 99],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = (await site.post("/generate", body))[1]["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert [row[0] for row in meta["output_token_logprobs"]] == [-0.5, -0.5]
    assert len(meta["output_top_logprobs"]) == 2
    assert all(len(row) == 2 for row in meta["input_top_logprobs"])
    body["logprob_start_len"] = 0
    meta = (await site.post("/generate", body))[1]["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 97, "a"]
    assert meta["input_top_logprobs"][0] is None
    del body["logprob_start_len"]
    meta = (await site.post("/generate", body))[1]["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert site.ingress.jobs[-1].sampling.prompt_logprobs is None


async def test_logprobs_of_named_tokens(site: Site) -> None:
    body = {
        "input_ids": [[97, 98], [99, 97]],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": [[65], [66, 67]],
        "return_text_in_logprobs": True,
    }
    for ids in ([[65], [66, 67]], [65]):
        _, replies = await site.post("/generate", body | {"token_ids_logprob": ids})
        for i, reply in enumerate(replies):
            shown = [[-9 - token, token, chr(token)] for token in (ids[i] if len(ids) > 1 else ids)]
            assert reply["meta_info"]["output_token_ids_logprobs"] == [shown] * 2
            assert reply["meta_info"]["input_token_ids_logprobs"] == [None, shown]
            assert "output_top_logprobs" not in reply["meta_info"]
    _, (plain, _) = await site.post("/generate", body | {"token_ids_logprob": None})
    assert "output_token_ids_logprobs" not in plain["meta_info"]


async def test_prompt_only(site: Site) -> None:
    body = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    _, reply = await site.post("/generate", body)
    assert (reply["text"], reply["output_ids"], reply["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(reply["meta_info"]["input_token_logprobs"]) == 3
    assert reply["meta_info"]["output_token_logprobs"] == []
    del body["logprob_start_len"]  # as SGLang's client asks for the likelihood of a text alone
    assert (await site.post("/generate", body))[1]["meta_info"]["input_token_logprobs"] == reply["meta_info"][
        "input_token_logprobs"
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": [{"temperature": "hot"}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ],
)
async def test_refusals(site: Site, body: dict[str, Any], param: str) -> None:
    status, reply = await site.post("/generate", body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert not site.ingress.jobs


async def test_a_stream_makes_each_row_of_logprobs_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event has all of them."""
    made = 0

    def count(*given: Any) -> Any:
        nonlocal made
        made += 1
        return top(*given)

    top = AnswerFormat._top
    monkeypatch.setattr(AnswerFormat, "_top", count)
    body = {
        "text": "hi",
        "sampling_params": {"max_new_tokens": 40},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    _, whole = await site.post("/generate", body)
    made = 0
    events = [json.loads(data) for data in (await site.sse("/generate", {**body, "stream": True}))[:-1]]
    assert len(events) > 20
    assert made == 40
    for i, name in ((5, "output_token_logprobs"), (-1, "output_token_logprobs"), (-1, "output_top_logprobs")):
        assert events[i]["meta_info"][name] == whole["meta_info"][name][: len(events[i]["output_ids"])]
