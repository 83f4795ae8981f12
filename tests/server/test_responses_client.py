"""``client.responses`` against a real server process, as a coding agent uses it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_process import ServerProcess

PROMPT = "You are a coding agent. " * 80


@pytest.fixture(scope="module")
def server(tiny_server: ServerProcess) -> ServerProcess:
    return tiny_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.mark.parametrize("stored", [True, False])
def test_the_second_turn_hits_the_prefix_cache(client: openai.OpenAI, stored: bool) -> None:
    """Whether the server keeps the conversation, or the client sends all of it again."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "instructions": f"{PROMPT} {stored}",
        "max_output_tokens": 24,
        "temperature": 0,
    }
    turns: list[Any] = [{"role": "user", "content": "List the files."}]
    first = client.responses.create(**asked, input=turns, store=stored)
    more = [{"role": "user", "content": "Read one."}]
    if stored:
        second = client.responses.create(**asked, input=more, previous_response_id=first.id)
    else:
        kept = [item.model_dump(exclude_none=True) for item in first.output]
        second = client.responses.create(**asked, input=[*turns, *kept, *more], store=False)
    assert second.usage.input_tokens_details.cached_tokens > 0.95 * second.usage.input_tokens


def test_the_format_of_an_answer(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    response = client.responses.create(
        model="tiny",
        input="How large?",
        text={"format": {"type": "json_schema", "name": "size", "schema": schema, "strict": True}},
    )
    assert json.loads(response.output_text)["size"] in ("small", "large")


def test_a_background_response_is_cancelled(server: ServerProcess, client: openai.OpenAI) -> None:
    started = client.responses.create(
        model="tiny", input="Go on.", background=True, extra_body={"ignore_eos": True}
    )
    cancelled = client.responses.cancel(started.id)
    assert (started.status, cancelled.status) == ("queued", "cancelled")
    for _ in range(100):
        if server.metric("sgla:num_running_reqs") == 0:
            return
    raise AssertionError("the cancelled response still runs")
