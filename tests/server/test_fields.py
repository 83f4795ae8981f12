"""Fields and routes that need the real engine to be right: logprobs of prompts, the best of several, cuts,
sessions."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server_process import ServerProcess, serving

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    with serving("--model", str(tiny_model), "--dtype", "float32", "--context-length", "1024") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: ServerProcess, path: str, body: Any) -> Any:
    status, reply = server.request("POST", path, body)
    assert status == 200, reply
    return reply


def test_prompt_logprobs_are_those_of_an_echo(server: ServerProcess) -> None:
    body = {"prompt": TEXT[:90], "max_tokens": 1, "temperature": 0}
    echoed = post(server, "/v1/completions", {**body, "echo": True, "logprobs": 2})["choices"][0]["logprobs"]
    shown = post(server, "/v1/completions", {**body, "prompt_logprobs": 2})["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    ids = post(server, "/tokenize", {"prompt": TEXT[:90]})["tokens"]
    assert len(shown) == len(ids)
    for token, entry, value in zip(ids[1:], shown[1:], echoed["token_logprobs"][1:]):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-5)
        ranks = sorted((other["rank"], -other["logprob"]) for other in entry.values())
        assert ranks == sorted(ranks, key=lambda pair: pair[1])


def test_the_best_is_the_likeliest(server: ServerProcess) -> None:
    body = {
        "prompt": TEXT[:40],
        "max_tokens": 6,
        "temperature": 2.0,
        "seed": 3,
        "logprobs": 0,
        "ignore_eos": True,
    }
    every = post(server, "/v1/completions", {**body, "n": 5})["choices"]
    (best,) = post(server, "/v1/completions", {**body, "best_of": 5})["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every}
    assert best["text"] == max(means, key=lambda text: means[text])


def test_a_cut_prompt_is_its_end(server: ServerProcess) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (cut,) = post(server, "/v1/completions", {**body, "prompt": TEXT, "truncate_prompt_tokens": 30})[
        "choices"
    ]
    assert cut["prompt_token_ids"] == ids[-30:]
    long = post(server, "/v1/completions", {**body, "prompt": TEXT * 4, "truncate_prompt_tokens": -1})
    assert long["usage"]["prompt_tokens"] == 1024 - 4


def test_a_model_without_the_marks_refuses_a_suffix(server: ServerProcess) -> None:
    status, reply = server.request("POST", "/v1/completions", {"prompt": "x", "suffix": "y"})
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (
        400,
        "suffix",
        "unsupported_parameter",
    )


def events(server: ServerProcess, path: str, body: Any) -> list[Any]:
    text = post(server, path, {**body, "stream": True})
    *chunks, done = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


STOPPING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT[:40]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT[:40]}]},
    "/generate": {"text": TEXT[:40]},
}


@pytest.mark.parametrize("path", STOPPING)
@pytest.mark.parametrize("include", [False, True])
def test_an_expression_ends_an_output(server: ServerProcess, path: str, include: bool) -> None:
    def ask(**stops: Any) -> tuple[str, Any, str]:
        """(text, what matched, the text that a stream of the same request brings)"""
        sampling = {"temperature": 0, "ignore_eos": True, "no_stop_trim": include, **stops}
        if path == "/generate":
            body = {**STOPPING[path], "sampling_params": {**sampling, "max_new_tokens": 60}}
            reply = post(server, path, body)
            *_, last = events(server, path, body)
            assert reply["meta_info"]["finish_reason"] == last["meta_info"]["finish_reason"]
            return reply["text"], reply["meta_info"]["finish_reason"].get("matched"), last["text"]
        body = {**STOPPING[path], **sampling, "max_tokens": 60}
        (choice,) = post(server, path, body)["choices"]
        chunks = [chunk["choices"][0] for chunk in events(server, path, body)]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["matched_stop"] == choice["matched_stop"]
        deltas = [
            chunk["text"] if "text" in chunk else chunk["delta"].get("content") or "" for chunk in chunks
        ]
        return (
            choice.get("text", choice.get("message", {}).get("content")),
            choice["matched_stop"],
            "".join(deltas),
        )

    whole, matched, _ = ask()
    assert matched is None
    place = len(whole) // 2
    while not whole[place : place + 2].isascii():
        place += 1
    literal = "".join(f"[{re.escape(char)}]" for char in whole[place : place + 2])
    expression = f"(?s){literal}.{{3}}"
    found = re.search(expression, whole)
    assert found is not None
    expected = whole[: found.end() if include else found.start()]
    assert ask(stop_regex=[expression]) == (expected, expression, expected)


def test_a_wrong_expression_is_named(server: ServerProcess) -> None:
    for stream in (False, True):
        body = {"prompt": "x", "stop_regex": ["ok", "(a"], "stream": stream}
        status, reply = server.request("POST", "/v1/completions", body)
        assert (status, reply["error"]["param"]) == (400, "stop_regex")


def test_a_turn_of_a_session_reads_the_cache(server: ServerProcess) -> None:
    session = post(server, "/open_session", {"capacity_of_str_len": 1000})

    def turn(text: str, rid: str, after: str | None, **more: Any) -> Any:
        params = {"id": session, "rid": after, **more}
        sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
        return post(
            server,
            "/generate",
            {"text": text, "rid": rid, "session_params": params, "sampling_params": sampling},
        )

    first = turn(TEXT, "1", None)
    second = turn(" And then?", "2", "1")
    branch = turn(" And then?", "3", "1")
    assert branch["output_ids"] == second["output_ids"]
    known = first["meta_info"]["prompt_tokens"] + 20
    assert second["meta_info"]["prompt_tokens"] == known + len(" And then?")
    assert second["meta_info"]["cached_tokens"] >= known - 17
    post(server, "/close_session", {"session_id": session})
    assert server.request("POST", "/close_session", {"session_id": session})[0] == 404


def test_a_response_loses_its_oldest_turns(client: OpenAI) -> None:
    turns: Any = [{"role": role, "content": TEXT[:200]} for _ in range(6) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "now"})
    response = client.responses.create(model="", input=turns, truncation="auto", max_output_tokens=8)
    assert response.usage is not None
    assert 600 < response.usage.input_tokens <= 1016


def test_a_stream_in_the_background_can_be_left_and_found_again(client: OpenAI) -> None:
    stream = client.responses.create(
        model="",
        input="hi",
        background=True,
        stream=True,
        max_output_tokens=12,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created"
    again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert again[0].sequence_number == 1
    assert again[-1].type in ("response.incomplete", "response.completed")
    assert again[-1].response.usage.output_tokens == 12  # type: ignore[union-attr]


LOOP = {"temperature": 0, "max_tokens": 50, "logit_bias": {"70": 100}, "ignore_eos": True}
DETECT = {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}}


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_answer_that_repeats_itself_ends(server: ServerProcess, tiny_model: Path, ahead: bool) -> None:
    """In a stream or not, each choice by itself, with steps planned ahead or not; the route says so in its
    own words."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--depth", "1")
    with contextlib.nullcontext(server) if ahead else serving(*flags) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chat: Any = {"model": str(tiny_model), "messages": [{"role": "user", "content": "a"}], "n": 2}
        bias, more = LOOP["logit_bias"], {"ignore_eos": True} | DETECT
        chat |= {"temperature": 0, "max_tokens": 50, "logit_bias": bias, "extra_body": more}
        reply = client.chat.completions.create(**chat)
        text = reply.choices[0].message.content
        assert [(choice.finish_reason, choice.message.content) for choice in reply.choices] == [
            ("repetition", text)
        ] * 2
        assert (reply.usage.completion_tokens, reply.choices[0].stop_reason) == (2 * 6, "repetition_detected")
        streamed: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in client.chat.completions.create(**chat, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += [choice.delta.content or "", choice.finish_reason]
        for pieces in streamed.values():
            assert "".join(filter(None, pieces)) == text + "repetition"
        native = {key: value for key, value in LOOP.items() if key != "max_tokens"}
        native |= {"max_new_tokens": 50} | DETECT
        reply = post(server, "/generate", {"text": "a", "sampling_params": native})
        assert reply["meta_info"]["finish_reason"] == {"type": "repetition", "length": 6}
        whole = post(server, "/v1/completions", {"prompt": "a", **LOOP, "max_tokens": 9})["choices"][0]
        assert whole["finish_reason"] == "length"
        wrong = {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}
        status, error = server.request("POST", "/v1/completions", {"prompt": "a", **wrong})
        assert (status, error["error"]["param"]) == (400, "repetition_detection")
