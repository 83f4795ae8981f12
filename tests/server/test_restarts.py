"""What clients store outlives the server's process, however that ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess, serving

FAKE = ("--executor", "fake", "--fake-step-ms", "5", "--drain-timeout", "0.5")


def client(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


def begun(api: openai.OpenAI) -> str:
    """A response in the background that does not end by itself."""
    endless: Any = {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}
    running = api.responses.create(input="five", background=True, **endless)
    assert api.responses.retrieve(running.id).status in ("queued", "in_progress")
    return running.id


def test_what_is_stored_outlives_the_process(tiny_model: Path, tmp_path: Path) -> None:
    keys = ("--api-key", "anna", "--api-key", "ben")
    flags = ("--model", str(tiny_model), *FAKE, *keys, "--state-path", str(tmp_path / "state"))
    with serving(*flags) as server:
        api = client(server, "anna")
        talk = api.conversations.create(metadata={"a": "b"})
        first = api.responses.create(input="one", max_output_tokens=3)
        second = api.responses.create(input="two", max_output_tokens=3, previous_response_id=first.id)
        third = api.responses.create(input="three", max_output_tokens=3, conversation=talk.id)
        events = list(api.responses.create(input="four", max_output_tokens=3, stream=True))
        fourth: Any = events[-1].response  # type: ignore[union-attr]
        running = begun(api)
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
    for message in (
        "the server shut down before the request finished",
        "the server ended before the response did",
    ):
        with serving(*flags) as server:
            api = client(server, "anna")
            for response in (first, second, third, fourth):
                assert api.responses.retrieve(response.id) == response
            assert api.conversations.retrieve(talk.id) == talk
            items = api.conversations.items.list(talk.id, order="asc").data
            assert [item.role for item in items] == ["user", "assistant"]  # type: ignore[union-attr]
            failed = api.responses.retrieve(running)
            assert failed.error is not None
            assert (failed.status, failed.error.message) == ("failed", message)
            after = api.responses.create(input="six", max_output_tokens=1, previous_response_id=fourth.id)
            assert len(api.responses.input_items.list(after.id).data) == 1
            other = client(server, "ben")
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                other.conversations.retrieve(talk.id)
            running = begun(api)
            server.signal(signal.SIGKILL)
            server.wait(60)


def test_a_damaged_file_ends_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """One that is in use, too: tests/http/test_state.py."""
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with serving("--model", str(tiny_model), *FAKE, "--state-path", str(tmp_path), ready=False) as server:
        assert server.wait(60) == 2
        assert "state.db is damaged" in server.output
        assert "Traceback" not in server.output
