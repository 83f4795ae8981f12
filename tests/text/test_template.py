"""Chat templates: the same text as transformers' apply_chat_template, and shapes of messages that OpenAI's
clients send."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_tokenizers as tiny

from sgla.errors import BadRequest, ConfigError, InvalidField, UnsupportedField
from sgla.text.template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

TOOLS = """{{- bos_token }}
{%- if tools %}
{{- '<|im_start|>system\n# Tools' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(seen=0) %}
{% for message in messages %}
    {% set ns.seen = ns.seen + 1 %}
    {% if message.role == 'tool' %}{% if ns.seen == 1 %}{% continue %}{% endif %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {%- if message.content is string %}{{ message.content | trim }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + call.function.name + call.function.arguments | tojson(indent=2) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if documents %}{{ documents | length }} documents{% endif %}
{%- if add_generation_prompt %}{% generation %}{{ '<|im_start|>assistant\n' }}{% endgeneration %}{% endif %}"""  # noqa: E501

GEMMA = """{{ bos_token }}{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\n' }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"""  # noqa: E501

SYSTEM_FIRST = """{%- set skipped = 1 if messages[0]['role'] == 'system' else 0 -%}
{%- for m in messages -%}
    {%- if loop.index0 >= skipped and (m['role'] == 'user') != ((loop.index0 - skipped) % 2 == 0) -%}
        {{ raise_exception("After the optional system message, roles must alternate") }}
    {%- endif -%}
    [{{ m['role'] }}]{{ m['content'] }}
{%- endfor -%}"""

PARTS_ONLY = """{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endfor %}"""  # noqa: E501

TEMPLATES = {"chatml": CHATML, "tools": TOOLS, "gemma": GEMMA, "parts only": PARTS_ONLY}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


WEATHER = {"type": "function", "function": {"name": "weather", "description": "<b>'Wetter' & \"天气\"</b>"}}
CHATS = [
    [message("user", "hi")],
    [message("system", "be kind"), message("user", " hi \n")],
    [message("user", "a"), message("assistant", "b "), message("user", "c")],
    [message("user", "a"), message("assistant", " the answer", reasoning="hm")],
    [
        message("user", "weather?"),
        message("assistant", "", tool_calls=[call({"city": "Köln", "days": 2})]),
        message("tool", "rain"),
    ],
    [message("user", "a"), message("user", "b")],
]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny.byte_level(), **TOKENS)


def outcome(refusals: type[Exception], render: Callable[..., str], *args: Any, **kwargs: Any) -> str | None:
    """The text, or None where rendering is refused."""
    try:
        return render(*args, **kwargs)
    except refusals:
        return None


FLAGS = [
    {"add_generation_prompt": prompt, "continue_final_message": final} | extra
    for prompt, final in ((True, False), (False, False), (False, True))
    for extra in ({}, {"enable_thinking": False, "documents": [{"title": "t", "text": "x"}]})
]


@pytest.mark.parametrize("name", ["chatml", "tools", "gemma"])
def test_text_equals_transformers(name: str, reference: Any) -> None:
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    reference.chat_template = TEMPLATES[name]
    texts = 0
    for chat, tools, flags in itertools.product(CHATS, (None, [WEATHER]), FLAGS):
        expected = outcome(Exception, reference.apply_chat_template, chat, tools, tokenize=False, **flags)
        got = outcome(BadRequest, ours.render, chat, tools, tool_prompt=False, **flags)
        assert got == expected, (chat, tools, flags)
        texts += got is not None
    assert texts > 20


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_text_parts_read_like_the_text(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    parts = [{"type": "text", "text": "the dog"}]
    assert template.render([message("user", parts)]) == template.render([message("user", "the dog")])
    assert "the dog" in template.render([message("user", parts)])


def test_several_parts_are_lines_where_the_template_wants_a_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert "\na\nb<" in ChatTemplate(CHATML).render([message("user", parts)])


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5, {"text": 3}]
)
def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    with pytest.raises(InvalidField, match="content parts"):
        ChatTemplate(CHATML).render([message("user", [part])])


def test_developer_is_system_unless_the_template_knows_it() -> None:
    chat = [message("developer", "x"), message("user", "y")]
    assert ChatTemplate(CHATML).render(chat).startswith("<|im_start|>system\n")
    assert ChatTemplate("{# developer #}" + CHATML).render(chat).startswith("<|im_start|>developer\n")


def test_arguments_of_calls_may_be_json_text() -> None:
    template = ChatTemplate(TOOLS, TOKENS)
    as_object, as_text = (
        [message("user", "?"), message("assistant", None, tool_calls=[call(arguments)])]
        for arguments in ({"city": "Köln"}, '{"city": "Köln"}')
    )
    assert template.render(as_text) == template.render(as_object)
    broken = [message("user", "?"), message("assistant", None, tool_calls=[call('{"city')])]
    assert '{\\"city' in template.render(broken)


def test_missing_content_is_an_empty_text() -> None:
    template = ChatTemplate(CHATML)
    called = [message("user", "?"), message("assistant", None, tool_calls=[call("{}")])]
    with_none = template.render(called, tool_prompt=False)
    assert with_none == template.render([message("user", "?"), message("assistant", "")])
    assert template.render([{"role": "user"}]) == template.render([message("user", "")])


def test_a_refusal_is_what_was_said() -> None:
    template = ChatTemplate(CHATML)
    said = template.render([message("user", "?"), message("assistant", "No.")])
    for nothing in (None, ""):
        assert template.render([message("user", "?"), message("assistant", nothing, refusal="No.")]) == said
    assert template.render([message("user", "?"), message("assistant", "No.", refusal=None)]) == said


CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOL_TURNS = [
    message("user", "weather?"),
    message("assistant", None, tool_calls=[call('{"city": "Köln"}'), call({"city": "Köln"})]),
    message("tool", "rain"),
    message("tool", [{"type": "text", "text": "sun"}]),
    message("user", "so?"),
]


def test_a_template_without_tools_shows_them_as_text() -> None:
    text = ChatTemplate(CHATML).render([message("system", "be kind"), *TOOL_TURNS], [WEATHER])
    system, user, assistant, results, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nbe kind\n\n# Tools\n")
    assert json.dumps(WEATHER, ensure_ascii=False) in system
    assert user == "user\nweather?<|im_end|>\n"
    assert assistant == f"assistant\n{CALLED}\n{CALLED}<|im_end|>\n"
    responses = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert results == f"user\n{responses}\nso?<|im_end|>\n"


def test_tools_stand_in_the_first_turn_where_there_is_no_system() -> None:
    text = ChatTemplate(GEMMA, TOKENS).render(TOOL_TURNS, [WEATHER])
    first, called, results, _ = text.split("<start_of_turn>")[1:]
    assert first.startswith("user\n# Tools")
    assert first.endswith("weather?<end_of_turn>\n")
    assert (called.split("\n")[0], results.split("\n")[0]) == ("assistant", "user")


def test_a_later_system_message_is_the_users_where_the_template_refuses_it() -> None:
    chat = [
        message("system", "be kind"),
        message("user", [{"type": "text", "text": "a"}]),
        message("system", "more"),
        message("assistant", "b"),
        message("developer", "still more"),
    ]
    assert ChatTemplate(CHATML).render(chat).count("<|im_start|>system") == 3
    strict = ChatTemplate(SYSTEM_FIRST)
    assert strict.render(chat) == "[system]be kind[user]a\nmore[assistant]b[user]still more"
    text = strict.render([message("user", "a"), message("system", "x")], [WEATHER])
    assert text.endswith("[user]a\nx")
    assert ChatTemplate(GEMMA, TOKENS).render(chat[1:4]).count("<start_of_turn>user") == 1


def test_a_template_with_tools_shows_them_itself() -> None:
    assert "<tool_call>" not in ChatTemplate(TOOLS, TOKENS).render([message("user", "x")], [WEATHER])
    assert "# Tools" not in ChatTemplate(CHATML).render([message("user", "x")])


def test_named_templates() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert both.render([message("user", "a")]) == "plain"
    assert both.render([message("user", "a")], tools=[WEATHER]) == "tools"
    assert both.render([message("user", "a")], tools=[]) == "plain"
    assert both.render([message("user", "a")], chat_template="rag") == "rag"
    with pytest.raises(UnsupportedField, match="default, rag, tool_use"):
        both.render([message("user", "a")], chat_template="tools")
    assert both.render([message("user", "a")], chat_template="{{ messages[0].content }}!") == "a!"
    for wrong in ("{% for", "{{ 1 }}" * 10_000):
        with pytest.raises(InvalidField, match="chat.template"):
            both.render([message("user", "a")], chat_template=wrong)
    assert ChatTemplate({"only": "one"}).render([message("user", "a")]) == "one"


def test_refusals_of_a_template_reach_the_client() -> None:
    with pytest.raises(BadRequest, match="Conversation roles must alternate"):
        ChatTemplate(GEMMA, TOKENS).render([message("assistant", "a")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages | tojson(indent=messages) }}",
    ],
)
def test_faults_of_a_template_are_bad_requests(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        ChatTemplate(source).render([message("user", "a")])


def test_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("{% for m in messages %}\n{{ m. }}")


def test_messages_cannot_be_overwritten_by_variables() -> None:
    chat, template = [message("user", "a")], ChatTemplate(CHATML)
    assert template.render(chat, **{"messages": [], "self": 1}) == template.render(chat)


@pytest.mark.parametrize("chat", [[], [message("assistant", None)], [message("assistant", [])]])
def test_continuing_needs_a_text(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidField, match="continue_final_message"):
        ChatTemplate(CHATML).render(chat, add_generation_prompt=False, continue_final_message=True)


def test_continuing_a_message_of_parts() -> None:
    chat = [message("user", "a"), message("model", [{"type": "text", "text": "the d"}])]
    assert ChatTemplate(GEMMA, TOKENS).render(chat, continue_final_message=True).endswith("model\nthe d")
    assert chat[-1]["content"] == [{"type": "text", "text": "the d"}]


def test_messages_are_left_as_they_were_in_any_thread() -> None:
    template = ChatTemplate(TOOLS, TOKENS)
    chats = [
        [message("user", f"dog {i}"), message("assistant", "", tool_calls=[call("{}")])] for i in range(50)
    ]
    expected = [template.render(chat) for chat in chats]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(template.render, chats)) == expected
    assert chats[3][1]["tool_calls"][0]["function"]["arguments"] == "{}"


PICTURE = {"type": "image"}
WITH_PARTS = (  # as Qwen2-VL's
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}[img]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SILENT_OF_THEM = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)
OF_STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def seen(*parts: str | dict[str, str], role: str = "user") -> list[dict[str, object]]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": role, "content": texts}]


@pytest.mark.parametrize(
    ("source", "parts", "shown"),
    [
        (WITH_PARTS, ("a", PICTURE, "b", PICTURE), "<user>a[img]b[img]"),
        (WITH_PARTS, (PICTURE,), "<user>[img]"),
        (OF_STRINGS, ("a", PICTURE, "b", PICTURE), "<user><img>\n<img>\na\nb"),
        (OF_STRINGS, (PICTURE,), "<user><img>"),
        (OF_STRINGS, (PICTURE, "<img> is a cat"), "<user><img> is a cat"),
        (OF_STRINGS, (PICTURE, PICTURE, "<img> is a cat"), "<user><img>\n<img> is a cat"),
        (SILENT_OF_THEM, (PICTURE, "a"), "<user><img>\na"),
    ],
)
def test_pictures_stand_where_the_template_shows_them_or_before_the_text(
    source: str, parts: tuple[str | dict[str, str], ...], shown: str
) -> None:
    assert ChatTemplate(source).render(seen(*parts), placeholders={"image": "<img>"}) == shown


def test_pictures_that_a_tool_returns_and_beside_tools_that_are_told_as_text() -> None:
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
    turns = [*seen("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = [*turns, *seen(PICTURE, "y", role="tool")]
    assert (
        ChatTemplate(WITH_PARTS + "{{ tools }}").render(chat, placeholders={"image": "<img>"}).count("[img]y")
        == 1
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = ChatTemplate(OF_STRINGS).render(
        [*seen(PICTURE, "x"), *chat[1:]], tools, placeholders={"image": "<img>"}
    )
    assert text.index("<img>\nx") < text.index("<img>\ny")
    assert text.count("<img>") == 2
    later = [*seen("x"), *seen(PICTURE, "z", role="system")]
    refusing = OF_STRINGS.replace(
        "<{{", "{% if not loop.first and m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<{{"
    )
    assert "<img>\nz" in ChatTemplate(refusing).render(later, placeholders={"image": "<img>"})
