"""Which family a chat template belongs to; what templates need of calls in the history."""

from __future__ import annotations

import json

import pytest

from sgla.errors import ConfigError
from sgla.text.template import ChatTemplate
from sgla.text.tools.families import ARCHITECTURES, BY_NAME, FAMILIES, dialect_of, written_as_told

# How templates show calls and reasoning, in the fewest words: (excerpt, family of the tools, family of the
# reasoning).
EXCERPTS = [
    ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes", None),
    ("<tool_call>{{ name }}</tool_call>{{ '<think>\\n' }}", "hermes", "hermes"),
    ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder", None),
    ("<tool_call>\n<function=name>{% if '</think>' in content %}", "qwen3_coder", "qwen3_coder"),
    ("<tool_call>{name}\n<arg_key>{key}</arg_key></tool_call><think></think>", "glm45", "glm45"),
    ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", None),
    ("[func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic", None),
    ("[TOOL_CALLS] [", "mistral", None),
    ("[THINK][/THINK][TOOL_CALLS]name[ARGS]", "mistral_v11", "mistral_v11"),
    ("<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3", None),
    (
        "<｜tool▁sep｜>' + name + '\\n' + '```json' {% if '</think>' in content %}",
        "deepseek_v3",
        "deepseek_v3",
    ),
    (
        "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments {{ '</think>' }}",
        "deepseek_v31",
        "deepseek_v31",
    ),
    ("<｜DSML｜function_calls></think>", "deepseek_v32", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2", None),
    ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss", "gpt-oss"),
    ("<start_function_call>call:", "functiongemma", None),
    ("<|tool_call>call:{{ name }}<tool_call|> <|channel>thought\n<channel|>", "gemma4", "gemma4"),
    ("<|start_of_role|>assistant<|tool_call|>", "granite", None),
    ("<|tool_call|> Here is my thought process: Here is my response:", "granite", "granite_text"),
    ("<|START_ACTION|>[<|START_THINKING|><|END_THINKING|>", "command", "command"),
    ("<TOOLCALL>[{</TOOLCALL>{{ '<think></think>' }}", "nemotron", "nemotron"),
    ("<|tool_call_start|>[", "lfm2", None),
    ("<seed:tool_call>\n<function=", "seed_oss", None),
    ("<minimax:tool_call><think>", "minimax_m2", "minimax_m2"),
    ("<steptml:invoke name=<think>", "step3", "step3"),
    ("{% for tool in tools %}<|tool_calls_section_begin|>◁think▷◁/think▷", "kimi_k2", "kimi"),
    ("{% if '◁think▷' in content %}", "generic", "kimi"),
    ("<|im_start|>{% if '</think>' in content %}", "generic", "think"),
    ("<start_of_turn>model", "generic", None),
    ("<start_of_turn>model {% for tool in tools %}", None, None),
    ("", None, None),
]


def test_a_parser_of_the_same_writing_leaves_the_tools_told() -> None:
    told = [
        name
        for name in ("generic", "hermes", "qwen25", "mistral", "none")
        if written_as_told(BY_NAME.get(name))
    ]
    assert told == ["generic", "hermes", "qwen25"]


@pytest.mark.parametrize(("template", "tools", "reasoning"), EXCERPTS)
def test_families_of_templates(template: str, tools: str | None, reasoning: str | None) -> None:
    dialect = dialect_of(template)
    assert (dialect.tools and dialect.tools.name, dialect.reasoning and dialect.reasoning.name) == (
        tools,
        reasoning,
    )


def test_every_family_is_found() -> None:
    """But for those that only flags choose."""
    found = {name for _, *names in EXCERPTS for name in names}
    assert {family.name for family in FAMILIES} - found == {"magistral_think"}


def test_names_override_the_template() -> None:
    template = "<tool_call><think></think>"
    dialect = dialect_of(template, "mistral", "none")
    assert (dialect.tools, dialect.reasoning) == (BY_NAME["mistral"], None)
    dialect = dialect_of(template, None, "gpt-oss")
    assert (dialect.tools, dialect.reasoning) == (BY_NAME["hermes"], BY_NAME["gpt-oss"])
    assert dialect_of(template, "none").tools is None
    assert dialect_of("", "qwen", "deepseek_r1").reasoning is BY_NAME["deepseek_v3"]


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("hermse", None), (None, "mind"), ("think", None), (None, "llama3")]
)
def test_unknown_names_are_refused(tools: str | None, reasoning: str | None) -> None:
    with pytest.raises(ConfigError, match="not known; give one of .*gpt-oss.*hermes"):
        dialect_of("", tools, reasoning)


def test_names_are_unique() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.aliases)]
    assert len(names) == len(set(names)) == len(BY_NAME)


JOINS_TEXT = """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"""  # noqa: E501
DUMPS = """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"""  # noqa: E501


@pytest.mark.parametrize("source", [JOINS_TEXT, DUMPS])
@pytest.mark.parametrize("arguments", ['{"x": "é"}', {"x": "é"}])
def test_arguments_reach_templates_as_they_need_them(source: str, arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert json.loads(text.removeprefix("f")) == {"x": "é"}


def test_the_architecture_tells_where_the_template_does_not() -> None:
    shows = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert dialect_of(shows, architecture="LlamaForCausalLM").tools is BY_NAME["llama3_json"]
    assert dialect_of(shows, architecture="Llama4ForConditionalGeneration").tools is BY_NAME["pythonic"]
    assert dialect_of(shows, architecture="UnknownForCausalLM").tools is None
    assert dialect_of(shows).tools is None
    harmony = dialect_of(shows, architecture="GptOssForCausalLM")
    assert harmony.harmony
    assert harmony.reasoning is harmony.tools
    assert dialect_of("{{ messages }}", architecture="LlamaForCausalLM").generic
    assert dialect_of(shows + "<tool_call>", architecture="LlamaForCausalLM").tools is BY_NAME["hermes"]
    assert dialect_of(shows, "none", architecture="LlamaForCausalLM").tools is None


def test_every_architecture_has_a_family_that_it_can_reach() -> None:
    names = list(ARCHITECTURES)
    for i, name in enumerate(names):
        assert ARCHITECTURES[name] in BY_NAME
        assert not any(name.startswith(earlier) for earlier in names[:i])
