"""``Engine``: batches, ``astream`` and callers that leave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sgla import Engine, SamplingParams
from sgla.actors.ingress import Ingress, Sink
from sgla.errors import BadRequest, ContextTooLong, InvalidField, Overloaded, SglaError
from sgla.messages import Job

ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), executor="fake", device="cpu") as engine:
        yield engine


def test_a_stream_is_what_generate_gives(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)

    async def stream() -> list[int]:
        return [token async for event in engine.astream("abc", sampling) for token in event.tokens]

    assert asyncio.run(stream()) == engine.generate("abc", sampling).tokens
    with pytest.raises(SglaError, match="no tokens"):
        next(engine.stream([]))


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"abc", {"prompt": "abc"}, [None], [1.5], iter("abc")])
def test_what_is_no_prompt_is_named(engine: Engine, prompt: Any) -> None:
    for call in (engine.generate, lambda prompt: engine.beam_search(prompt, 2, 1)):
        with pytest.raises(InvalidField, match="a prompt is a text or a list of token ids, got "):
            call(prompt)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (None, "messages must be a list of messages such as .*, got None"),
        ("hi", "messages must be a list of messages such as .*, got a value of type str"),
        ({"role": "user", "content": "hi"}, "messages must be a list of messages"),
        ([None], "messages must be a list of messages"),
        (["hi"], "messages must be a list of messages"),
        ([{"content": "hi"}], r"messages\[0\] must be a message with a role"),
        ([{"role": "user", "content": "hi"}, None], r"messages\[1\] must be a message with a role, got None"),
        ([{"role": "user"}], r"messages\[0\].content is required"),
    ],
)
def test_what_is_no_conversation_is_named(engine: Engine, chat: Any, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        engine.chat(chat, SamplingParams(max_tokens=1))


def test_token_ids_may_be_of_any_kind_of_integers(engine: Engine) -> None:
    """Other numbers would end the scheduler, and every request with it."""
    sampling = SamplingParams(max_tokens=2, temperature=0)
    expected = engine.generate([5, 6, 7], sampling)
    for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, np.uint8(7)]):
        one = engine.generate(ids, sampling)
        [of_several] = engine.generate([ids], sampling)
        assert one.tokens == of_several.tokens == expected.tokens
    for wrong in ([[5.0, 6.0]], np.array([[5.0]]), [["a", "b"]], [[None]], [np.array([[5]])]):
        with pytest.raises(InvalidField, match="token ids, which are integers"):
            engine.generate(wrong, sampling)


def test_a_value_that_no_template_can_show_is_refused(engine: Engine) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": b"x"}}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(BadRequest, match="a value that does not fit: TypeError: Object of type bytes"):
        engine.chat([*chat, {"role": "user", "content": "ho"}], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, 5, "greedy"])
def test_what_is_no_sampling_is_named(engine: Engine, sampling: Any) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for call in (partial(engine.generate, "abc"), partial(engine.chat, chat)):
        with pytest.raises(
            InvalidField, match=r"sampling must be SamplingParams\(...\), got a value of type "
        ):
            call(sampling)


@pytest.mark.parametrize("tools", [5, "x", {"type": "function"}, ["x"], [None]])
def test_what_is_no_tool_is_named(engine: Engine, tools: Any) -> None:
    with pytest.raises(InvalidField, match="tools must be a list of objects"):
        engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), tools=tools)


def test_tools_are_what_json_can_say(engine: Engine) -> None:
    """Others ended the process that renders templates, and nobody answered."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": {1, 2}}}}]
    with pytest.raises(InvalidField, match="tools must be what JSON can say: Object of type set"):
        engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), tools=tools)


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"width": "2"},
        {"width": 2**70},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"logprobs": 0.5},
        {"logprobs": -1},
        {"length_penalty": "x"},
        {"length_penalty": float("nan")},
        {"concurrency": 0},
    ],
)
def test_what_is_no_search_is_named(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=f"{next(iter(wrong))} must be "):
        engine.beam_search(["abc"], **{"width": 2, "max_tokens": 1} | wrong)


@pytest.mark.parametrize("priority", ["x", None, 1.5, True, 2**31, float("nan"), [3, "x"]])
def test_a_priority_is_a_number(engine: Engine, priority: Any) -> None:
    """Another one would end the scheduler, and every request with it."""
    prompts = ["abc", "def"] if isinstance(priority, list) else "abc"
    with pytest.raises(InvalidField, match="priority must be an integer between"):
        engine.generate(prompts, SamplingParams(max_tokens=1), priority=priority)


@pytest.mark.parametrize("name", ["n", "min_tokens", "logprobs", "prompt_logprobs", "logprob_start"])
def test_numbers_are_no_larger_than_a_message_holds(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidField, match=f"{name} must be an integer between"):
        engine.generate("abc", SamplingParams(**{name: 2**70}))


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), 1e300])
def test_a_bias_is_a_number(engine: Engine, bias: float) -> None:
    with pytest.raises(InvalidField, match="logit_bias: token 5 has"):
        engine.generate("abc", SamplingParams(logit_bias={5: bias}))
    engine.generate("abc", SamplingParams(logit_bias={5: float("-inf")}, max_tokens=1))


def test_what_a_request_is_refused_for_has_its_class(engine: Engine) -> None:
    with pytest.raises(ContextTooLong):
        engine.generate("a" * 100_000)
    with pytest.raises(InvalidField, match="vocabulary"):
        engine.generate([10**9])


def test_a_forked_process_is_told_that_nobody_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its end take the engine from the process that has it."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getpid", lambda: -1)
        for call in (engine.generate, engine.chat, lambda prompt: next(engine.stream(prompt))):
            with pytest.raises(SglaError, match="this process was forked"):
                call("abc")
        engine.shutdown()
    assert engine.generate("abc", SamplingParams(max_tokens=1)).tokens


def test_an_engine_sleeps_and_wakes(engine: Engine) -> None:
    before = engine.generate("abc", SamplingParams(max_tokens=4, seed=1)).tokens
    for rest, wake in (
        (partial(engine.sleep, 2), engine.wake_up),
        (partial(engine.release_memory_occupation, ["kv_cache"]), engine.resume_memory_occupation),
    ):
        assert rest()
        assert engine.is_sleeping
        with pytest.raises(SglaError, match="sleeps"):
            engine.generate("abc", SamplingParams(max_tokens=1))
        wake()
        assert not engine.is_sleeping
    assert engine.generate("abc", SamplingParams(max_tokens=4, seed=1)).tokens == before
    for wrong in (partial(engine.sleep, 3), partial(engine.wake_up, ["graphs"])):
        with pytest.raises(InvalidField):
            wrong()


def test_calls_behind_the_end_of_an_engine(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), executor="fake", device="cpu")
    engine.shutdown()
    for call in (partial(engine.generate, "abc"), partial(engine.chat, [{"role": "user", "content": "a"}])):
        with pytest.raises(SglaError, match="the engine is shut down"):
            call()


def test_a_caller_whose_loop_is_closed_ends_its_own_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave() -> None:
        async for _ in engine.astream("x", ENDLESS):
            return

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_cancel", lambda rid: None)  # the engine hears of it too late
        asyncio.run(leave())
        time.sleep(0.05)
    assert len(engine.generate("x", SamplingParams(max_tokens=3, ignore_eos=True)).tokens) == 3


def test_a_caller_that_leaves_while_it_is_let_in_leaves_nothing_behind(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.astream("x", ENDLESS)
        engine._loop.call_soon_threadsafe(time.sleep, 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)

    asyncio.run(leave())
    engine.stats()  # the engine's loop has seen all this
    assert engine._ready().ingress.open_requests == 0


def test_a_batch_is_opened_longest_first_and_answered_in_its_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress = engine._ready().ingress
    opened: list[int] = []

    def open_(job: Job, sink: Sink) -> None:
        opened.append(job.sampling.max_tokens or 0)
        Ingress.open(ingress, job, sink)

    monkeypatch.setattr(ingress, "open", open_)
    monkeypatch.setattr("sgla.engine.loop.FIRST_PART", 100)
    monkeypatch.setattr("sgla.engine.loop.PART", 50)
    prompts = [[1 + i % 7] * (3 + i) for i in range(20)]
    sampling = [SamplingParams(max_tokens=1 + 7 * i % 20, ignore_eos=True, seed=i) for i in range(20)]
    outputs = engine.generate(prompts, sampling)
    assert opened == sorted(opened, reverse=True)
    assert [output.prompt_tokens for output in outputs] == prompts
    alone = [engine.generate(prompt, each).tokens for prompt, each in zip(prompts, sampling)]
    assert [output.tokens for output in outputs] == alone


@pytest.mark.parametrize(("prompt_bytes", "queued"), [(200, 1 << 20), (1 << 20, 6)])
def test_a_batch_larger_than_there_is_room_for_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prompt_bytes: int, queued: int
) -> None:
    ingress = engine._ready().ingress
    most: list[int] = []

    def open_(job: Job, sink: Sink) -> None:
        Ingress.open(ingress, job, sink)
        most.append(ingress.open_requests)

    prompts = [[1 + i % 7] * (3 + i % 4) for i in range(40)]
    sampling = [SamplingParams(max_tokens=1 + i % 5, n=1 + i % 2, ignore_eos=True) for i in range(40)]
    monkeypatch.setattr(ingress, "open", open_)
    monkeypatch.setattr("sgla.actors.ingress.OPEN_BYTES", prompt_bytes)
    monkeypatch.setattr(ingress, "_capacity", queued)
    outputs = engine.generate(prompts, sampling)
    assert max(most) < 10
    found = [output if isinstance(output, list) else [output] for output in outputs]
    assert [each[0].prompt_tokens for each in found] == prompts
    assert [len(choice.tokens) for each in found for choice in each] == [
        each.max_tokens for each in sampling for _ in range(each.n)
    ]
    assert ingress.open_requests == 0


def test_a_batch_one_of_which_was_refused_waits_for_no_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress = engine._ready().ingress
    opened: list[str] = []

    def open_(job: Job, sink: Sink) -> None:
        opened.append(job.rid)
        Ingress.open(ingress, job, sink)

    monkeypatch.setattr(ingress, "open", open_)
    monkeypatch.setattr("sgla.actors.ingress.OPEN_BYTES", 20)
    with pytest.raises(SglaError, match="vocabulary"):
        engine.generate([[1], [-1], [1], [1], [1]], ENDLESS)
    assert len(opened) == 2
    assert ingress.open_requests == 0


def test_a_batch_that_waits_for_room_ends_with_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgla.actors.ingress.OPEN_BYTES", 20)
    with ThreadPoolExecutor(1) as pool:
        with Engine(str(tiny_model), executor="fake", device="cpu") as engine:
            batch = pool.submit(engine.generate, [[1], [1], [1], [1]], ENDLESS)
            while not engine._ready().ingress.open_requests:
                time.sleep(0.001)
        with pytest.raises(SglaError, match="shut down"):
            batch.result(5)


def test_who_is_refused_hears_what_is_full(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine.stream([1, 2, 3], ENDLESS)
    next(first)
    with monkeypatch.context() as patch:
        patch.setattr("sgla.actors.ingress.OPEN_BYTES", 5 << 20)
        with pytest.raises(Overloaded, match="prompts of the open requests fill the 5 MiB"):
            next(engine.stream([1] * (5 << 17), ENDLESS))
    with monkeypatch.context() as patch:
        patch.setattr(engine._ready().ingress, "_capacity", 1)
        with pytest.raises(Overloaded, match="1 requests are open.*--max-queued-requests"):
            next(engine.stream([1], ENDLESS))
    first.close()  # type: ignore[attr-defined]


def test_a_request_that_is_refused_ends_its_batch(engine: Engine) -> None:
    with pytest.raises(SglaError, match="no tokens"):
        engine.generate(["x", "y", []], [ENDLESS, ENDLESS, SamplingParams()])
    assert engine._ready().ingress.open_requests == 0
    assert (
        engine.generate(["x", "y"], SamplingParams(max_tokens=2, ignore_eos=True))[1].usage.completion_tokens
        == 2
    )


def test_an_engine_takes_other_weights_beside_paused_requests(tiny_model: Path, tmp_path: Path) -> None:
    """From tensors and from a folder; a later request is answered as by an engine of these weights."""
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cpu", "executor": "inline", "threads": 1, "dtype": "float32"}
    named = load_file(tiny_model / "model.safetensors")
    other = {name: tensor.flip(0) if tensor.dim() > 1 else tensor for name, tensor in named.items()}
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in other.items()}, tmp_path / "model.safetensors")
    with Engine(str(tmp_path), **settings) as engine:
        expected = engine.generate("abcd" * 8, greedy).tokens
    with Engine(str(tiny_model), **settings) as engine:
        before = engine.generate("abcd" * 8, greedy).tokens
        assert before != expected
        stream = engine.stream("abcd" * 8, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        told = list(next(stream).tokens)
        assert not engine.update_weights_from_tensor(other.items()), "requests run"
        engine.pause_generation()
        assert engine.update_weights_from_tensor(other.items(), weight_version="2")
        name = "model.layers.0.self_attn.k_proj.weight"
        assert engine.get_weights_by_name(name, 2) == other[name][:2].tolist()
        with pytest.raises(SglaError, match="unexpected"):
            engine.update_weights_from_tensor([("x", named["model.norm.weight"])])
        engine.continue_generation()
        told += [token for event in stream for token in event.tokens]
        assert len(told) == 200
        assert engine.generate("abcd" * 8, greedy).tokens == expected
        assert engine.update_weights_from_disk(str(tiny_model))
        assert engine.generate("abcd" * 8, greedy).tokens == before
        [told] = engine.check_weights("snapshot")
        assert engine.check_weights("reset_tensors") == []
        assert engine.generate("abcd" * 8, greedy).tokens != before
        with pytest.raises(SglaError, match="not those of the snapshot"):
            engine.check_weights("compare")
        assert engine.update_weights_from_disk(str(tiny_model))
        assert engine.check_weights("compare") == [told]
        assert engine.get_weights_by_name("model.norm.weight", 2) == named["model.norm.weight"][:2].tolist()


LEFT_OPEN = """
import atexit, sys, threading

@atexit.register
def last():
    print(sorted(thread.name for thread in threading.enumerate()))

if __name__ == "__main__":
    from sgla import Engine
    engines = [Engine(sys.argv[1], executor=sys.argv[2], device="cpu") for _ in range(2)]
"""


@pytest.mark.parametrize("executor", ["fake", "inline"])
def test_engines_that_nobody_shuts_down_end_before_the_interpreter(
    tiny_model: Path, tmp_path: Path, executor: str
) -> None:
    """A timer of a loop that goes on would call an interpreter that is no longer there."""
    (tmp_path / "script.py").write_text(LEFT_OPEN)
    command = [sys.executable, str(tmp_path / "script.py"), str(tiny_model), executor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "['MainThread']"), done.stderr[-2000:]
