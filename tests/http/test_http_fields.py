"""Fields that few clients send: the best of several, logprobs of prompts, cuts, and tools by their older
names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from http_fake import FakeIngress, ScriptedIngress
from http_site import Serve, Site

from sgla.errors import InvalidField
from sgla.http.request.schema import MAX_LOGPROBS
from sgla.http.request.work import limit_logprobs
from sgla.messages import Event, Job, SamplingParams, Thinking, TokenLogprob

USER = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in ("weather", "time")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QWEN = "<tool_call>"


class Graded(FakeIngress):
    """Choice ``i`` has the mean logprob ``grades[i]``."""

    grades = (-3.0, -1.0, -2.0, -0.5)

    def push(self, rid: str, message: Any) -> None:
        if isinstance(message, Event) and message.logprobs is not None:
            grade = self.grades[message.index % 4]
            message.logprobs = [TokenLogprob(e.token, grade, e.rank, e.top) for e in message.logprobs]
        super().push(rid, message)


async def test_the_best_of_several_are_returned(serve: Serve) -> None:
    site = await serve(Graded())
    body = {"prompt": ["a", "b"], "best_of": 4, "n": 2, "max_tokens": 3, "seed": 1, "temperature": 1.0}
    _, every = await site.post("/v1/completions", {**body, "n": 4})
    texts = [choice["text"] for choice in every["choices"]]
    status, reply = await site.post("/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == [texts[3], texts[1], texts[7], texts[5]]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 2 * 4 * 3
    _, shown = await site.post("/v1/completions", {**body, "logprobs": 1})
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3


@pytest.mark.parametrize("more", [{"best_of": 2, "n": 3}, {"best_of": 3, "stream": True}, {"best_of": 129}])
async def test_a_best_of_that_cannot_be_is_refused(site: Site, more: dict[str, Any]) -> None:
    status, reply = await site.post("/v1/completions", {"prompt": "x", **more})
    assert (status, reply["error"]["param"]) == (400, "best_of")


async def test_prompt_logprobs_are_those_of_vllm(site: Site) -> None:
    _, reply = await site.post(
        "/v1/completions", {"prompt": [7, 8, 9], "prompt_logprobs": 2, "max_tokens": 1}
    )
    (choice,) = reply["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [["8", "9"], ["9", "10"]]
    assert others[0]["8"] == {"logprob": -0.5, "rank": 1, "decoded_token": "\b"}
    _, chat = await site.post(
        "/v1/chat/completions", {"messages": USER, "prompt_logprobs": 0, "max_tokens": 1}
    )
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {len(entry) for entry in chat["prompt_logprobs"][1:]} == {1}


def test_logprobs_of_one_prompt_are_counted_in_its_tokens() -> None:
    facts = FakeIngress(context=8192).facts
    sampling = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=49_152, logprob_token_ids=[5])
    for prompt in ({"text": "x" * 900}, {"messages": USER}, {"token_ids": [7] * 900}):
        job = Job(rid="r", sampling=sampling, **prompt)
        for limit, room in ((MAX_LOGPROBS, MAX_LOGPROBS - 6), (100, 94), (200, 94)):
            limit_logprobs([job], facts, limit)
            assert job.prompt_logprobs == room
        with pytest.raises(InvalidField, match="may have"):
            limit_logprobs([job, job], facts, MAX_LOGPROBS)


async def test_echoed_logprobs_have_only_the_alternatives_that_were_asked_for(site: Site) -> None:
    body = {"prompt": [7, 8], "echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 0}
    _, reply = await site.post("/v1/completions", body)
    (choice,) = reply["choices"]
    assert [alternatives and len(alternatives) for alternatives in choice["logprobs"]["top_logprobs"]] == [
        None,
        1,
    ]
    assert len(choice["prompt_logprobs"][1]) == 4


@pytest.mark.parametrize(
    ("path", "start"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": USER})]
)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
    ],
)
async def test_wrong_values_are_named(site: Site, path: str, start: Any, more: Any, param: str) -> None:
    status, reply = await site.post(f"/v1/{path}", start | more)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_whole_floats_are_integers(site: Site) -> None:
    body = (
        b'{"prompt": [97.0, 98], "max_tokens": 2.0, "n": 2e0, "temperature": 1.0, "logit_bias": {"5": 3.0}}'
    )
    status, reply = await site.post("/v1/completions", body)
    assert (status, len(reply["choices"])) == (200, 2)
    (job,) = site.ingress.jobs
    assert (job.token_ids, job.sampling.max_tokens, job.sampling.temperature) == ([97, 98], 2, 1.0)
    status, reply = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 2.5})
    assert (status, reply["error"]["param"]) == (400, "max_tokens")


async def test_cuts_and_gaps_reach_the_engine(site: Site) -> None:
    body = {"prompt": "x", "suffix": "y", "truncate_prompt_tokens": 5}
    await site.post("/v1/completions", body)
    await site.post("/v1/completions", {**body, "truncation_side": "right"})
    left, right = site.ingress.jobs
    assert (left.suffix, left.keep_last, left.truncate) == ("y", 5, None)
    assert (right.keep_last, right.truncate) == (None, 5)
    status, reply = await site.post("/v1/completions", {**body, "echo": True})
    assert (status, reply["error"]["param"]) == (400, "suffix")


async def test_messages_as_the_model_sees_them(site: Site) -> None:
    status, reply = await site.post("/apply-template", {"messages": USER})
    assert (status, reply) == (200, {"prompt": "<user>weather?<assistant>"})
    _, tokens = await site.post("/tokenize", {"prompt": reply["prompt"], "add_special_tokens": False})
    _, same = await site.post("/tokenize", {"messages": USER})
    assert tokens["tokens"] == same["tokens"]
    assert (await site.post("/apply-template", {"prompt": "x"}))[0] == 400


# which tokens

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/messages", {"messages": USER, "max_tokens": 5}),
    ("/v1/responses", {"input": "x"}),
    ("/generate", {"text": "x"}),
]


async def post(site: Site, path: str, start: dict[str, Any], more: dict[str, Any]) -> tuple[int, Any]:
    return await site.post(path, start | ({"sampling_params": more} if path == "/generate" else more))


@pytest.mark.parametrize(("path", "start"), ROUTES)
async def test_words_and_tokens_reach_the_engine(site: Site, path: str, start: dict[str, Any]) -> None:
    status, _ = await post(site, path, start, {"bad_words": ["a", " b"], "allowed_token_ids": [3, 4]})
    assert status == 200
    sampling = site.ingress.jobs[0].sampling
    assert (sampling.bad_words, sampling.allowed_token_ids) == (["a", " b"], [3, 4])


@pytest.mark.parametrize(("path", "start"), ROUTES)
@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_thinking_tokens"])
async def test_limits_of_reasoning(serve: Serve, path: str, start: dict[str, Any], name: str) -> None:
    site = await serve(ScriptedIngress("x", "<think></think>"))
    assert (await post(site, path, start, {name: 7}))[0] == 200
    assert (await post(site, path, start, {name: -1}))[0] == 200
    limited, free = (job.sampling.thinking for job in site.ingress.jobs)
    assert limited == Thinking(tokens=7, open="<think>", close="</think>", param=name)
    assert free is None


async def test_a_limit_beside_the_switch_of_reasoning(serve: Serve) -> None:
    site = await serve(ScriptedIngress("x", "<think></think>"))
    for switch in ("enabled", "disabled"):
        body = {"messages": USER, "thinking": {"type": switch, "budget_tokens": 7}}
        assert (await site.post("/v1/chat/completions", body))[0] == 200
    limited, off = (job.sampling.thinking for job in site.ingress.jobs)
    assert limited == Thinking(tokens=7, open="<think>", close="</think>", param="thinking.budget_tokens")
    assert off is None
    body = {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": -2}}
    assert (await site.post("/v1/chat/completions", body))[0] == 400


async def test_a_limit_beside_the_switch_where_nothing_is_known_of_reasoning(site: Site) -> None:
    body = {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": 7}}
    status, reply = await site.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "thinking.budget_tokens")


async def test_a_limit_where_the_last_message_is_within_reasoning(serve: Serve) -> None:
    site = await serve(ScriptedIngress("x", "<think></think>"))
    messages = [*USER, {"role": "assistant", "content": "<think>Hm"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await site.post("/v1/chat/completions", {**body, "thinking_budget": 7}))[0] == 200
    assert site.ingress.jobs[0].sampling.thinking == Thinking(
        tokens=7, open="", close="</think>", param="thinking_budget"
    )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"thinking_token_budget": 7}, "thinking_token_budget"),  # this model has no tags for it
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x" * 1025]}, "bad_words"),
    ],
)
async def test_wrong_tokens_are_refused(site: Site, more: dict[str, Any], param: str) -> None:
    for path, start in ROUTES:
        status, reply = await post(site, path, start, more)
        assert status == 400
        assert path == "/v1/messages" or reply["error"]["param"] == param


async def test_logprobs_of_named_tokens_are_among_the_likeliest(site: Site) -> None:
    more = {"logprob_token_ids": [7, 8], "max_tokens": 2}
    _, text = await site.post("/v1/completions", {"prompt": "x", "logprobs": 1, **more})
    assert [list(top.values())[1:] for top in text["choices"][0]["logprobs"]["top_logprobs"]] == [
        [-16, -17]
    ] * 2
    _, chat = await site.post("/v1/chat/completions", {"messages": USER, "logprobs": True, **more})
    for one in chat["choices"][0]["logprobs"]["content"]:
        assert [(top["logprob"], top["bytes"]) for top in one["top_logprobs"]] == [(-16, [7]), (-17, [8])]
    for path, start in ROUTES[:2]:
        status, reply = await site.post(path, start | more)
        assert (status, reply["error"]["param"]) == (400, "logprob_token_ids")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_trusted_request_may_bring_its_template(serve: Serve, path: str) -> None:
    site = await serve(FakeIngress(), trust_request_chat_template=True)
    status, _ = await site.post(path, {"messages": USER, "chat_template": "{{ messages }}"})
    assert status == 200
    if site.ingress.jobs:
        assert site.ingress.jobs[0].template_kwargs == {"chat_template": "{{ messages }}"}


# functions


async def test_functions_are_tools_by_their_old_name(serve: Serve) -> None:
    site = await serve(ScriptedIngress("Hm. " + CALL + CALL, QWEN))
    reply = await site.client.chat.completions.create(model="fake", messages=USER, functions=FUNCTIONS)  # type: ignore[call-overload]
    (choice,) = reply.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.content == "Hm."
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Rome"}
    assert site.ingress.jobs[0].tools == TOOLS


async def test_a_function_call_streams(serve: Serve) -> None:
    site = await serve(ScriptedIngress(CALL, QWEN))
    stream = await site.client.chat.completions.create(  # type: ignore[call-overload]
        model="fake", messages=USER, functions=FUNCTIONS, stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    calls = [delta.function_call for delta in deltas if delta.function_call]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Rome"}
    assert not any(delta.tool_calls for delta in deltas)


async def test_old_messages_become_calls_and_results(site: Site) -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    status, _ = await site.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    _, asked, answered = site.ingress.jobs[0].messages or []
    assert asked["tool_calls"][0]["function"] == call
    assert (answered["role"], answered["tool_call_id"]) == ("tool", asked["tool_calls"][0]["id"])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": FUNCTIONS, "function_call": "must"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "nothing"}}, "tool_choice"),
        ({"functions": [{"parameters": {}}]}, "tools"),
    ],
)
async def test_wrong_functions_are_refused(serve: Serve, more: dict[str, Any], param: str) -> None:
    site = await serve(ScriptedIngress("x", QWEN))
    status, reply = await site.post("/v1/chat/completions", {"messages": USER, **more})
    assert (status, reply["error"]["param"]) == (400, param)


# allowed tools


def some(mode: str, *names: str) -> dict[str, Any]:
    references = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": references}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_in_the_grammar_and_all_in_the_prompt(serve: Serve, mode: str) -> None:
    ingress = ScriptedIngress(CALL, QWEN)
    assert ingress.facts is not None
    ingress.facts.grammars = True
    site = await serve(ingress)
    body = {"messages": USER, "tools": TOOLS, "tool_choice": some(mode, "weather")}
    status, _ = await site.post("/v1/chat/completions", body)
    assert status == 200
    (job,) = ingress.jobs
    assert job.tools == TOOLS
    assert job.sampling.grammar is not None
    assert ("weather" in job.sampling.grammar.text, "time" in job.sampling.grammar.text) == (True, False)


async def test_allowed_tools_that_cannot_be_enforced_are_refused(serve: Serve) -> None:
    site = await serve(ScriptedIngress(CALL, QWEN))  # which has no grammars
    body = {"messages": USER, "tools": TOOLS, "tool_choice": some("auto", "weather")}
    status, reply = await site.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "tool_choice")
    status, _ = await site.post(
        "/v1/chat/completions", body | {"tool_choice": some("auto", "weather", "time")}
    )
    assert status == 200


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (some("auto"), "needs a mode"),
        (some("maybe", "weather"), "needs a mode"),
        ({"type": "allowed_tools"}, "needs a mode"),
        (some("auto", "weather", "wether"), "'wether', which is not among the tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["weather"]}, "list of tools"),
    ],
)
async def test_wrong_allowed_tools_are_refused(serve: Serve, choice: dict[str, Any], words: str) -> None:
    site = await serve(ScriptedIngress(CALL, QWEN))
    status, reply = await site.post(
        "/v1/chat/completions", {"messages": USER, "tools": TOOLS, "tool_choice": choice}
    )
    assert (status, reply["error"]["param"]) == (400, "tool_choice")
    assert words in reply["error"]["message"]


def test_a_choice_without_tokens_is_the_worst() -> None:
    from sgla.http.answer.collect import Choice
    from sgla.http.openai.text import mean_logprob

    assert mean_logprob(Choice(0)) == -math.inf


async def test_every_route_lets_runs_come_once(serve: Serve) -> None:
    site = await serve()
    chat = {"model": "", "messages": USER}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": chat | {"max_tokens": 9},
    }
    for path, body in bodies.items():
        status, reply = await site.post(path, body | {"no_repeat_ngram_size": 4})
        assert (status, site.ingress.jobs[-1].sampling.no_repeat_ngram_size) == (200, 4), (path, reply)
        status, reply = await site.post(path, body | {"no_repeat_ngram_size": 65})
        assert status == 400
        assert "no_repeat_ngram_size must be" in reply["error"]["message"]
    await site.post("/generate", {"text": "a", "sampling_params": {"no_repeat_ngram_size": 3}})
    assert site.ingress.jobs[-1].sampling.no_repeat_ngram_size == 3
    beams = {"prompt": "a", "use_beam_search": True, "temperature": 0, "no_repeat_ngram_size": 2}
    status, reply = await site.post("/v1/completions", beams)
    assert (status, reply["error"]["param"]) == (400, "no_repeat_ngram_size")
