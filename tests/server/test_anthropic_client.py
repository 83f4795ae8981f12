"""The ``anthropic`` client against a real server process, as a coding agent uses it."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess

if TYPE_CHECKING:
    import anthropic

PROMPT = "You are a coding agent. " * 80


@pytest.fixture(scope="module", autouse=True)
def published() -> None:
    """Thousands of modules, which only the process that runs these tests imports."""
    global anthropic
    import anthropic


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=tiny_server.url, api_key="k", max_retries=0, _strict_response_validation=True
    )


def system() -> list[Any]:
    """A system prompt as Claude Code writes it, with its nonce."""
    nonce = secrets.token_hex(3)
    line = f"x-anthropic-billing-header: cc_version=2.1.37.{nonce}; cc_entrypoint=cli; cch={nonce};"
    cache: Any = {"type": "ephemeral"}
    return [{"type": "text", "text": line}, {"type": "text", "text": PROMPT, "cache_control": cache}]


def test_the_second_turn_hits_the_prefix_cache(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "claude-of-any-kind",
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "List the files."}]}]
    first = client.messages.create(**asked, messages=turns, system=system())
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Read one."}]
    counted = client.messages.count_tokens(model="", messages=turns, system=system()).input_tokens
    with client.messages.stream(**asked, messages=turns, system=system()) as stream:
        second = stream.get_final_message()
    hit = second.usage.cache_read_input_tokens
    assert hit is not None
    assert hit + second.usage.input_tokens == counted
    assert hit > 0.95 * counted


def test_stream_equals_whole(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "",
        "max_tokens": 20,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": "Hello"}],
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_long_answer_ends_with_the_context(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="",
        max_tokens=20_000,
        messages=[{"role": "user", "content": "x" * 4000}],
        extra_body={"ignore_eos": True},
    )
    used = message.usage
    assert message.stop_reason == "model_context_window_exceeded"
    assert used.input_tokens + (used.cache_read_input_tokens or 0) + used.output_tokens == 4096


def test_the_format_of_an_answer(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        model="",
        max_tokens=200,
        messages=[{"role": "user", "content": "How large?"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(message.content[0].text)["size"] in ("small", "large")
