"""The ``openai`` client against a real server process with a tiny random model."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess

from sgla import Engine, SamplingParams

MESSAGES = [{"role": "user", "content": "Hello there, how are you?"}]


@pytest.fixture(scope="module")
def server(tiny_server: ServerProcess) -> ServerProcess:
    return tiny_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def lenient(server: ServerProcess) -> openai.OpenAI:
    """Not strict: the client's types forbid the nulls that OpenAI itself sends in text chunks and echoed
    logprobs."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat_stream_equals_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_second_turn_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "the same long beginning " * 20
    first = client.completions.create(model="tiny", prompt=prompt + "one", max_tokens=4, temperature=0)
    second = client.completions.create(model="tiny", prompt=prompt + "one", max_tokens=4, temperature=0)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 17


def test_logprobs_align_with_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens - (choice.finish_reason == "stop")
    assert b"".join(bytes(e.bytes) for e in entries).decode(errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(t.logprob for t in entry.top_logprobs))


def test_n_choices_and_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=["abc", "something else"], n=3, seed=7, temperature=1.0, max_tokens=16
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        return [choice.text for choice in answer.choices]

    first = texts()
    assert first == texts()
    assert len(set(first)) > 2


def test_stop_string_is_cut(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]
    streamed = lenient.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_echo_and_prompt_logprobs(lenient: openai.OpenAI) -> None:
    prompt = [10, 11, 12, 13, 14]
    answer = lenient.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, echo=True, logprobs=2, temperature=0
    ).model_dump()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + 2
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 100_000)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is" in str(long.value)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"lora_path": "x"})
    assert unsupported.value.code == "unsupported_parameter"


def test_leaving_a_stream_frees_it(server: ServerProcess, lenient: openai.OpenAI) -> None:
    stream = lenient.completions.create(
        model="tiny", prompt="abc", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for _ in range(100):
        if server.metric("sgla:num_running_reqs") == 0:
            return
        time.sleep(0.02)
    raise AssertionError("the abandoned request still runs")


def test_http_equals_engine(tiny_model: Path, client: openai.OpenAI) -> None:
    prompts = ["abc", "Hello there", "x" * 50]
    over_http = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    with Engine(str(tiny_model), dtype="float32") as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
        streamed = list(engine.stream(prompts[0], SamplingParams(max_tokens=20, temperature=0)))
    assert [output.text for output in outputs] == [choice.text for choice in over_http.choices]
    assert [output.tokens for output in outputs] == [
        choice.model_extra["token_ids"] for choice in over_http.choices
    ]
    assert "".join(event.text for event in streamed) == outputs[0].text
