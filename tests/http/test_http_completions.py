"""/v1/completions: prompts of every kind, echo, logprobs, choices, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fake import BOS, EOS, expected_text
from http_site import Site


def texts(site: Site, count: int, n: int, steps: int) -> list[str]:
    """What each choice of the last ``count`` jobs must say."""
    jobs = sorted(site.ingress.jobs[-count:], key=lambda job: job.index_base)
    return [expected_text(job, site.ingress.prompt(job), child, steps) for job in jobs for child in range(n)]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one", 1), (["one", "two", "three"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
    ids=["str", "strs", "ids", "lists"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts(site: Site, prompt: Any, count: int, stream: bool) -> None:
    asked = {"model": "fake", "prompt": prompt, "max_tokens": 4, "n": 2}
    if stream:
        found = dict.fromkeys(range(2 * count), "")
        async for chunk in await site.lenient.completions.create(**asked, stream=True):
            assert len(chunk.choices) == 1
            found[chunk.choices[0].index] += chunk.choices[0].text
        result = [found[i] for i in range(2 * count)]
    else:
        reply = await site.client.completions.create(**asked)
        assert [choice.index for choice in reply.choices] == list(range(2 * count))
        result = [choice.text for choice in reply.choices]
        prompts = sum(len(site.ingress.prompt(job)) for job in site.ingress.jobs)
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompts, 4 * 2 * count)
        assert usage.prompt_tokens_details.cached_tokens == 3 * count
    assert result == texts(site, count, 2, 4)
    site.ingress.check()


async def test_echo_of_ids_has_special_tokens(site: Site) -> None:
    body = {"prompt": [BOS, 97, EOS, 98], "max_tokens": 2, "echo": True, "logprobs": 0}
    _, reply = await site.post("/v1/completions", body)
    (choice,) = reply["choices"]
    assert choice["text"].startswith("<bos>a<eos>b")
    first = choice["logprobs"]["tokens"][4]
    assert choice["logprobs"]["text_offset"] == [0, 5, 6, 11, 12, 12 + len(first)]
    _, text = await site.post("/v1/completions", {**body, "prompt": "ab"})
    assert text["choices"][0]["text"].startswith("ab")
    assert text["choices"][0]["logprobs"]["text_offset"][:4] == [0, 0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a \u4e2d", [97, 98, 99]], ids=["text", "ids"])
async def test_echo_with_logprobs(site: Site, stream: bool, prompt: Any) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": 3,
        "echo": True,
        "logprobs": 2,
        "add_special_tokens": False,
        "stream": stream,
    }
    if stream:
        payloads = await site.sse("/v1/completions", body)
        parts = [json.loads(p)["choices"][0] for p in payloads[:-1]]
    else:
        parts = (await site.post("/v1/completions", body))[1]["choices"]
    text = "".join(part["text"] for part in parts)
    merged = {key: [x for p in parts for x in p["logprobs"][key]] for key in parts[0]["logprobs"]}
    ids = site.ingress.prompt(site.ingress.jobs[0])
    shown = prompt if isinstance(prompt, str) else "abc"
    assert text == shown + texts(site, 1, 1, 3)[0]
    assert {len(values) for values in merged.values()} == {len(ids) + 3}
    assert merged["token_logprobs"][0] is None
    assert merged["top_logprobs"][0] is None
    assert merged["token_logprobs"][1:] == [-0.5] * (len(ids) + 2)
    assert merged["text_offset"][-3:] == [
        len(shown),
        *(len(shown) + len("".join(merged["tokens"][-3:i])) for i in (-2, -1)),
    ]
    assert "".join(merged["tokens"][-3:]) == text[len(shown) :]


async def test_scoring_as_lm_eval_does(site: Site) -> None:
    """Batched ids, echo, one token, greedy: logprobs cover the prompt."""
    body = {
        "prompt": [[1, 2, 3], [4, 5]],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    _, reply = await site.post("/v1/completions", body)
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in reply["choices"]] == [4, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_output_tokens(site: Site, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
        replies = [json.loads(p) for p in (await site.sse("/v1/completions", body))[:-1]]
        usage = replies.pop()["usage"]
        choices = [reply["choices"][0] for reply in replies]
    else:
        reply = (await site.post("/v1/completions", body))[1]
        usage, choices = reply["usage"], reply["choices"]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == len(
        site.ingress.prompt(site.ingress.jobs[0])
    )
    assert usage["completion_tokens"] == 0
    status, _ = await site.post("/v1/completions", {"prompt": "abc", "max_tokens": 0})
    assert status == 400


async def test_token_ids(site: Site) -> None:
    body = {
        "prompt": [1, 2],
        "max_tokens": 3,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
    }
    _, reply = await site.post("/v1/completions", body)
    choice = reply["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    body.pop("logprobs")
    parts = [
        json.loads(p)["choices"][0] for p in (await site.sse("/v1/completions", body | {"stream": True}))[:-1]
    ]
    assert parts[0]["prompt_token_ids"] == [1, 2]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]


async def test_default_max_tokens(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "x"})
    assert site.ingress.jobs[0].sampling.max_tokens == 16
    await site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert site.ingress.jobs[1].sampling.max_tokens is None
