"""``LLM`` (vLLM's offline class), its ``SamplingParams``, and what ``Engine`` shows of a batch."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sgla
from sgla import LLM, Engine, LoRARequest, SamplingParams, StructuredOutputsParams, messages
from sgla.defaults import Defaults
from sgla.engine.params import resolved
from sgla.errors import ConfigError, InvalidField, UnsupportedField
from sgla.http.request.grammar import structured_outputs


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny_model), executor="fake", device="cpu", tensor_parallel_size=1, max_model_len=512, seed=None
    ) as llm:
        yield llm


# SamplingParams


def test_params_may_be_written_as_for_vllm() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, stop="\n", stop_token_ids=None, logit_bias=None)
    params.max_tokens = 7
    assert resolved(params) == messages.SamplingParams(temperature=0.8, top_p=0.95, stop=["\n"], max_tokens=7)
    assert resolved(SamplingParams()) == messages.SamplingParams()


def test_structured_outputs_become_a_grammar() -> None:
    schema = {"type": "object"}
    for asked in (StructuredOutputsParams(json=schema), {"json": schema}):
        grammar = resolved(SamplingParams(structured_outputs=asked)).grammar
        assert grammar is not None
        assert grammar.kind == "json_schema"
        assert json.loads(grammar.text) == schema
    grammar = resolved(SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("choice", '["a","b"]')


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_any_whitespace": True},
        {"disable_any_whitespace": False},
        {"whitespace_pattern": " ?", "disable_any_whitespace": False},
        {"disable_additional_properties": True},
        {"disable_additional_properties": False},
    ],
)
def test_options_of_structured_outputs_mean_what_they_mean_to_the_server(options: dict[str, Any]) -> None:
    asked = {"json": {"type": "object"}, **options}
    given = resolved(SamplingParams(structured_outputs=StructuredOutputsParams(**asked))).grammar
    assert given == structured_outputs("structured_outputs", asked)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"temperature": -1}, InvalidField, "temperature must be a number at least 0"),
        ({"top_p": "high"}, InvalidField, "top_p"),
        ({"n": "two"}, InvalidField, "n"),
        ({"n": 0}, InvalidField, "n must be an integer between 1 and"),
        ({"n": 2**31 - 1}, InvalidField, "n must be an integer between 1 and 65536"),
        ({"logprobs": -5}, InvalidField, "logprobs must be an integer between 0 and 2147483647, not -5"),
        ({"prompt_logprobs": -2}, InvalidField, "prompt_logprobs"),
        ({"best_of": 4}, UnsupportedField, "best_of"),
        ({"logits_processors": [print]}, UnsupportedField, "logits_processors"),
        ({"structured_outputs": {}}, InvalidField, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, InvalidField, "structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], error: Any, named: str) -> None:
    with pytest.raises(error, match=named):
        resolved(SamplingParams(**fields))


# LLM


def test_generate_gives_what_the_engine_gives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1, logprobs=2)
    prompts = ["abc", {"prompt": "abd"}, {"prompt_token_ids": [5, 6, 7]}, [5, 6, 7]]
    found = llm.generate(prompts, params)
    assert [one.prompt for one in found] == ["abc", "abd", None, None]
    assert len({one.request_id for one in found}) == 4
    for one, prompt in zip(found, ["abc", "abd", [5, 6, 7], [5, 6, 7]]):
        expected = llm.engine.generate(prompt, params)
        [output] = one.outputs
        assert output.token_ids == expected.tokens
        assert output.text == expected.text
        assert one.prompt_token_ids == expected.prompt_tokens
        assert (output.finish_reason, one.finished) == ("length", True)
        assert output.logprobs is not None
        for place, token in zip(output.logprobs, output.token_ids):
            assert place[token].decoded_token == llm.get_tokenizer().decode([token])
            assert len(place) in (2, 3)
    assert llm.generate("abc", params)[0].outputs[0].token_ids == found[0].outputs[0].token_ids


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, n=n) for n in (1, 2, 3)]
    found = llm.generate(["a", "b", "c"], params)
    assert [[len(output.token_ids) for output in one.outputs] for one in found] == [[1], [2, 2], [3, 3, 3]]
    with pytest.raises(ValueError, match="3 inputs but 1"):
        llm.generate(["a", "b", "c"], params[:1])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=3)
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "user", "content": "ho"}]
    alone = llm.chat(one, params)
    both = llm.chat([one, two], params)
    assert both[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert alone[0].prompt is not None
    assert "hi" in alone[0].prompt
    assert "ho" in str(both[1].prompt)
    other = llm.chat(one, params, chat_template="<{{ messages[0].content }}>")
    assert other[0].prompt == "<hi>"


def test_defaults_may_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    params.ignore_eos = True
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 3


def test_it_sleeps_and_wakes(llm: LLM) -> None:
    llm.sleep(level=2)
    assert llm.engine.is_sleeping
    llm.wake_up(tags=["weights"])
    assert llm.engine.is_sleeping
    llm.wake_up()
    assert not llm.engine.is_sleeping


def test_what_is_not_set_is_the_models_default_or_vllms(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's with ``Engine``, vLLM's in a script that was written for its class."""
    values = {
        "temperature": 0.2,
        "top_k": 3,
        "repetition_detection": messages.Repetition(max_pattern_size=4, min_count=3),
    }
    monkeypatch.setattr(
        llm.engine._ready().ingress, "default_sampling", Defaults(values, dict.fromkeys(values, "file"))
    )
    jobs: list[messages.Job] = []
    open_job = llm.engine._ready().ingress.open
    monkeypatch.setattr(
        llm.engine._ready().ingress, "open", lambda job, sink: (jobs.append(job), open_job(job, sink))
    )
    params = SamplingParams(top_k=1, ignore_eos=True)
    assert (params.max_tokens, repr(params)) == (msgspec.UNSET, "SamplingParams(top_k=1, ignore_eos=True)")
    llm.engine.generate("abc", params)
    llm.generate("abc", [params])
    llm.generate("abc")
    llm.engine.generate("abc", llm.engine.sampling(temperature=0))
    llm.generate("abc", llm.get_default_sampling_params())
    fields = ("temperature", "top_k", "max_tokens", "repetition_detection")
    assert [tuple(getattr(job.sampling, name) for name in fields) for job in jobs] == [
        (0.2, 1, 16, values["repetition_detection"]),
        (1.0, 1, 16, None),
        (0.2, 3, 16, values["repetition_detection"]),
        (0, 3, 16, values["repetition_detection"]),
        (0.2, 3, 16, values["repetition_detection"]),
    ]
    assert [job.clip for job in jobs] == [True, False, True, True, False]
    chat = llm.engine._job(params, messages=[])
    assert (chat.sampling.max_tokens, chat.sampling.temperature, chat.clip) == (None, 0.2, True)


def test_a_default_may_hold_for_chats_in_words_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = llm.engine._ready().ingress
    monkeypatch.setattr(ingress, "default_sampling", Defaults(talks={"frequency_penalty": 0.2}))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    constrained = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    for fields, params, penalty in (
        (chat, None, 0.2),
        (chat, SamplingParams(top_k=3), 0.2),
        (chat, SamplingParams(frequency_penalty=0), 0),
        (chat, constrained, 0),
        (chat | {"tools": [{}]}, None, 0),
        ({"text": "Hi"}, None, 0),
    ):
        assert llm.engine._job(params, **fields).sampling.frequency_penalty == penalty


def test_what_is_not_supported_is_refused_by_name(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(UnsupportedField, match="no adapters; start it with --enable-lora"):
        llm.generate("abc", lora_request=LoRARequest("x"))
    with pytest.raises(UnsupportedField, match="multi_modal_data"):
        llm.generate({"prompt": "abc", "multi_modal_data": {"smell": []}})
    with pytest.raises(ConfigError, match="nonsense"):
        LLM(str(tiny_model), nonsense=1)
    with pytest.raises(ConfigError, match=r"several replicas \(--dp\)"):
        LLM(str(tiny_model), data_parallel_size=2)


def test_the_package_offers_both_and_loads_no_torch() -> None:
    script = "import sys, sgla; sgla.LLM, sgla.Engine, sgla.SamplingParams; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert {"LLM", "BeamSearchParams", "Engine", "SamplingParams", "StructuredOutputsParams"} <= set(
        sgla.__all__
    )


# Engine

BATCH = """
import sys
from sgla import Engine, SamplingParams
with Engine(sys.argv[1], executor="fake", device="cpu") as engine:
    engine.generate(["a", "b", "c"], SamplingParams(max_tokens=5, ignore_eos=True))
"""


def test_a_batch_shows_a_bar_on_a_terminal_and_nothing_elsewhere(tiny_model: Path) -> None:
    command = [sys.executable, "-c", BATCH, str(tiny_model)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    assert b"3/3" in shown
    assert b"tok/s" in shown


def test_ctrl_c_ends_the_requests_of_a_call_and_leaves_the_engine(tiny_model: Path) -> None:
    with Engine(str(tiny_model), executor="fake", device="cpu", fake_step_ms=25.0) as engine:
        endless = SamplingParams(max_tokens=900, ignore_eos=True)

        def interrupt() -> None:
            while not engine.stats().running:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["abc"] * 4, endless)
        thread.join()
        deadline = time.monotonic() + 20
        while engine.stats().running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().running == 0
        assert len(engine.generate("x", SamplingParams(max_tokens=2, ignore_eos=True)).tokens) == 2


def test_an_engine_may_follow_another_inside_a_running_loop(tiny_model: Path) -> None:
    import asyncio

    async def notebook() -> list[int]:
        counts = []
        for _ in range(2):
            with Engine(str(tiny_model), executor="fake", device="cpu") as engine:
                output = engine.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))
                counts.append(len(output.tokens))
        return counts

    assert asyncio.run(notebook()) == [3, 3]


def test_a_profile_of_what_the_workers_do(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "executor": "inline", "threads": 1}
    with LLM(str(tiny_model), **settings, profile_folder=str(tmp_path)) as llm:
        llm.start_profile()
        llm.generate("a", SamplingParams(max_tokens=2))
        [file] = llm.stop_profile()
        with pytest.raises(InvalidField, match="no profile"):
            llm.stop_profile()
    assert Path(file).parent == tmp_path
    assert "traceEvents" in Path(file).read_text()
