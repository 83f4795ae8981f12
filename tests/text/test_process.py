"""The process for texts: its limits, and that what it makes is what would be made here."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgla.errors import BadRequest, ConfigError, InvalidField
from sgla.text import process, sandbox
from sgla.text.process import NOTHING, BoundedTemplate, Parse, Render, parse, pickled
from sgla.text.template import ChatTemplate
from sgla.text.tools.families import BY_NAME
from sgla.text.tools.parser import parser_of

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"}]
TWICE = "{% if messages|length > 3 %}%s{% endif %}" + PLAIN  # harmless as long as the chat is short
BOMBS = {
    "repetition": "{{ 'x' * 10000000000 }}",
    "doubling": "{% set n = namespace(x='x' * 99) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% "
    "endfor %}{{ n.x }}",
    "join": "{{ range(99999)|list|join('x' * 99999) }}",
    "power": "{{ 10 ** (messages|length * 10 ** 9) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": "{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% "
    "endfor %}{{ n.x }}",
}


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS", 1.0)


def test_renders_as_the_template_does() -> None:
    sources = {"default": PLAIN, "tool_use": "{{ tools|tojson }}" + PLAIN}
    bounded, plain = (
        BoundedTemplate(sources, {"bos_token": "<s>"}),
        ChatTemplate(sources, {"bos_token": "<s>"}),
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    options: list[dict[str, Any]] = [
        {},
        {"tools": [tool]},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template": "{{ bos_token }}" + PLAIN},
    ]
    for each in options:
        assert bounded.render(CHAT, **each) == plain.render(CHAT, **each)
    assert bounded.source == plain.source


ALIKE = {"doubling", "join", "nested lists"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ALIKE)) for kind in BOMBS]
)
@pytest.mark.usefixtures("short_limits")
def test_a_template_that_explodes_is_refused_and_the_next_is_rendered(kind: str) -> None:
    template = BoundedTemplate(TWICE.replace("%s", BOMBS[kind]))
    with pytest.raises(
        BadRequest, match="more than 1 s|memory|MemoryError|OverflowError|more than 67108864 bytes|ValueError"
    ):
        template.render(CHAT * 2)
    assert template.render(CHAT[:1]) == "<user>hé"


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("chat_template", [BOMBS["loops"], "bomb"])
def test_a_rendering_does_not_wait_for_another(chat_template: str) -> None:
    template = BoundedTemplate({"default": PLAIN, "bomb": TWICE.replace("%s", BOMBS["loops"])})
    for idle in process._models.idle:
        idle.start()
    bomb = threading.Thread(target=refused, args=(template, chat_template))
    bomb.start()
    time.sleep(0.2)
    assert template.render(CHAT) == "<user>hé<assistant>ho"
    assert bomb.is_alive()
    bomb.join()


def refused(template: BoundedTemplate, chat_template: str) -> None:
    with pytest.raises(BadRequest):
        template.render(CHAT * 2, chat_template=chat_template)


@pytest.mark.usefixtures("short_limits")
def test_a_model_with_a_broken_or_endless_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        BoundedTemplate("{% if")
    with pytest.raises(ConfigError, match="more than 1 s"):
        BoundedTemplate(BOMBS["loops"])


def test_errors_keep_their_types() -> None:
    template = BoundedTemplate(PLAIN + "{{ raise_exception('no') }}")
    with pytest.raises(BadRequest, match="refuses the messages: no"):
        template.render(CHAT)
    with pytest.raises(InvalidField, match="does not compile"):
        template.render(CHAT, chat_template="{% if")
    with pytest.raises(InvalidField, match="65536 characters"):
        template.render(CHAT, chat_template="{{ x }}" * 10_000)
    with pytest.raises(BadRequest, match="no template can be given"):
        template.render(CHAT, now=lambda: 0)


def test_arguments_that_are_nested_deeply_are_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "ho" in BoundedTemplate(PLAIN).render(chat)


def test_a_killed_process_is_replaced() -> None:
    template = BoundedTemplate(PLAIN)
    assert process._models.idle
    for idle in process._models.idle:
        idle._popen.kill()
    assert template.render(CHAT) == "<user>hé<assistant>ho"


class Ends:
    """A value that ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_task_that_ends_its_process_is_refused() -> None:
    """It is tried once more, with a process that nobody can have ended before."""
    template = BoundedTemplate(PLAIN)
    for _ in range(2):
        with pytest.raises(BadRequest, match="its process ended"):
            template.render(CHAT, value=Ends())
        assert template.render(CHAT) == "<user>hé<assistant>ho"


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([*CHAT, called({"a": b"x"})], {}, "TypeError: Object of type bytes is not JSON serializable"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], {}, "TypeError: unhashable type"),
        ([*CHAT, {"role": "assistant", "content": 5}], {"continue_final_message": True}, "TypeError"),
        (CHAT, {"chat_template": "{{ raise_exception('\ud800') }}"}, r"\\ud800"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_the_process_that_goes_on(
    chat: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    task = Render((("default", PLAIN),), {}, chat, {"continue_final_message": False} | options)
    found = msgspec.msgpack.decode(sandbox.answer(b"".join(pickled(task))), type=process.Answer)
    assert found.kind == "BadRequest"
    assert re.search(message, found.text)


def test_large_values_do_not_stay_behind_errors_of_the_template() -> None:
    """A new process compiles a template with the first task, and finds out what it refuses."""
    worker = process.Process()
    try:
        worker.start()
        before = resident(worker)
        source = {"default": "{% for m in messages %}{{ 'text: ' + m.content }}{% endfor %}"}
        values = {"values": [float(i) for i in range(300_000)]}
        task = Render(tuple(source.items()), {}, [{"role": "user", "content": "a"}], values)
        assert worker.ask(pickled(task)).text == "text: a"
        worker.ask(NOTHING)  # memory is given back between two tasks
        assert resident(worker) < before + (8 << 20)
    finally:
        worker.kill()


def resident(worker: process.Process) -> int:
    """Bytes in memory."""
    fields = Path(f"/proc/{worker._popen.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_texts_are_parsed_as_here() -> None:
    text = 'x <tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call> y'
    task = Parse(text, tools="hermes", functions=[{"function": {"name": "f"}}])
    parser = parser_of(task)
    assert parse(task) == [tuple(piece) for piece in parser.feed(text) + parser.close()]
    assert BY_NAME["qwen"].name == "hermes"
    assert parse(Parse("<think>a</think>b", reasoning="think")) == [
        ("reasoning", "a", None),
        ("content", "b", None),
    ]


def test_which_template_shows_tools() -> None:
    named = BoundedTemplate({"default": PLAIN, "tool_use": "{{ tools }}", "rag": "{{ documents }}"})
    assert named.knows_tools()
    sent = ("{{ messages }}", "{{ messages }}{{ tools }}")
    assert [named.shows_tools(name) for name in (None, "tool_use", "rag", "default", *sent)] == [
        *(True, True, False, False),
        *(False, True),
    ]
    assert not BoundedTemplate(PLAIN).knows_tools()
    assert not BoundedTemplate(PLAIN).shows_tools(None)


def test_variables_have_defaults() -> None:
    template = BoundedTemplate("{{ mood }}, {{ depth }}", defaults={"mood": "calm", "depth": 1})
    assert template.render([]) == "calm, 1"
    assert template.render([], depth=2) == "calm, 2"
