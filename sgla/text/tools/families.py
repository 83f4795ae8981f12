"""Model families: how each writes tool calls and reasoning, and how its chat template is recognised.

A family is one row; the rows are tried in order. Sources of the formats: the families' published chat templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from sgla.errors import ConfigError
from sgla.text.reasoning.harmony import TAGS as HARMONY_TAGS
from sgla.text.reasoning.think import Think
from sgla.text.tools.calls import (
    Format,
    json_call,
    listed_or_named_call,
    named_call,
    numbered,
    python_call,
)
from sgla.text.tools.values import Syntax
from sgla.text.tools.xml import OTHER, STRING, Shape, xml_call

THINK = Think("<think>", "</think>")
JSON_CLOSES, JSON_LEAD = ("]", "}"), ("[",)


def json_format(opens: tuple[str, ...], closes: tuple[str, ...] = (), **more: tuple[str, ...]) -> Format:
    """Objects with name and arguments between tags, one or a list of them."""
    return Format(json_call, opens, JSON_LEAD, (*JSON_CLOSES, *closes), **({"separators": (",",)} | more))


HERMES = json_format(("<tool_call>",), ("</tool_call>",))
LLAMA_JSON = json_format(
    ("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",), separators=(",", ";"), bare=("{", "[")
)
PYTHONIC = Format(
    python_call,
    ("<|python_start|>", "<|tool_call_start|>", "```tool_code"),
    JSON_LEAD,
    ("]", "<|python_end|>", "<|tool_call_end|>", "```"),
    (",",),
    bare=("[",),
)
MISTRAL = Format(
    listed_or_named_call(("[ARGS]",), id_tag="[CALL_ID]"), ("[TOOL_CALLS]",), JSON_LEAD, ("]",), (",",)
)


def deepseek(lead: str, separators: tuple[str, ...], closes: tuple[str, ...] = ()) -> Format:
    begin = "<｜tool▁call▁begin｜>"
    return Format(
        named_call(separators),
        ("<｜tool▁calls▁begin｜>", begin),
        tuple(filter(None, (begin, lead))),
        (*closes, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )


KIMI = Format(
    named_call(("<|tool_call_argument_begin|>",), identity=numbered),
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_begin|>",),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
QWEN_SHAPE = Shape(
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    ends=("</function>",),
    name_end=">",
    missing_end=("<parameter=", "</function>"),
    lines=True,
)
QWEN_XML = Format(xml_call(QWEN_SHAPE), ("<tool_call>", "<function="), ("<function=",), ("</tool_call>",))
SEED_XML = Format(
    xml_call(QWEN_SHAPE), ("<seed:tool_call>", "<function="), ("<function=",), ("</seed:tool_call>",)
)
GLM_XML = Format(
    xml_call(
        Shape(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), ends=("</tool_call>",))
    ),
    ("<tool_call>",),
)
MINIMAX_XML = Format(
    xml_call(
        Shape(
            key=('<parameter name="', '">'),
            value=("", "</parameter>"),
            ends=("</invoke>",),
            name_end='">',
        )
    ),
    ("<minimax:tool_call>", '<invoke name="'),
    ('<invoke name="',),
    ("</minimax:tool_call>",),
)
DSML = Format(
    xml_call(
        Shape(
            key=('<｜DSML｜parameter name="', '">'),
            value=("", "</｜DSML｜parameter>"),
            ends=("</｜DSML｜invoke>",),
            name_end='">',
            key_ends={'" string="true">': STRING, '" string="false">': OTHER},
        )
    ),
    ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'),
    ('<｜DSML｜invoke name="',),
    ("</｜DSML｜function_calls>",),
)


def gemma(open_tag: str, closes: tuple[str, ...], quote: str) -> Format:
    return Format(named_call(syntax=Syntax(quote, bare=True)), (open_tag,), ("call:",), closes)


@dataclass(frozen=True)
class Family:
    """``mark``: a pattern found in the chat template. ``aliases``: names that SGLang and vLLM users type.

    ``harmony``: the whole output has a format of its own. ``short_ids``: its template takes ids of nine characters only.
    """

    name: str
    mark: str
    tools: Format | None = None
    think: Think | None = None
    aliases: tuple[str, ...] = ()
    harmony: bool = False
    short_ids: bool = False


FAMILIES = (
    Family(
        "gpt-oss", r"<\|channel\|>", harmony=True, aliases=("openai", "gpt_oss", "openai_gptoss", "harmony")
    ),
    Family(
        "deepseek_v32",
        r"DSML",
        DSML,
        THINK,
        ("deepseekv32",),
    ),
    Family(
        "deepseek_v3",
        r"(?s)<｜tool▁sep｜>.*```json",
        deepseek("function<｜tool▁sep｜>", ("```json",), ("```",)),
        THINK,
        ("deepseekv3", "deepseek_r1", "deepseek-r1", "deepseek-v3"),
    ),
    Family(
        "deepseek_v31",
        r"<｜tool▁sep｜>",
        deepseek("", ("<｜tool▁sep｜>",)),
        THINK,
        ("deepseekv31", "deepseek_v3.1"),
    ),
    Family(
        "kimi_k2",
        r"<\|tool_calls_section_begin\|>",
        KIMI,
        Think("<think>", "</think>", until=("<|tool_calls_section_begin|>",)),
        ("kimi",),
    ),
    Family("glm45", r"<arg_key>", GLM_XML, THINK, ("glm", "glm46", "glm47")),
    Family("seed_oss", r"<seed:tool_call>", SEED_XML, Think("<seed:think>", "</seed:think>")),
    Family("minimax_m2", r"<minimax:tool_call>", MINIMAX_XML, THINK, ("minimax", "minimax-m2")),
    Family(
        "qwen3_coder",
        r"<function=",
        QWEN_XML,
        THINK,
        ("qwen3coder", "qwen3_xml", "nemotron_v3", "nemotron_3"),
    ),
    Family(
        "mistral", r"\[TOOL_CALLS\]", MISTRAL, Think("[THINK]", "[/THINK]"), ("magistral",), short_ids=True
    ),
    Family(
        "command",
        r"<\|START_ACTION\|>",
        json_format(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        Think(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            until=("<|START_ACTION|>", "<|START_RESPONSE|>"),
            dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ("cohere", "cohere_command3", "cohere_command4"),
    ),
    Family(
        "functiongemma",
        r"<start_function_call>",
        gemma("<start_function_call>", ("<end_function_call>", "<start_function_response>"), "<escape>"),
    ),
    Family(
        "gemma4",
        r"<\|tool_call>|<\|channel>",
        gemma("<|tool_call>", ("<tool_call|>", "<|tool_response>"), '<|"|>'),
        Think("<|channel>thought\n", "<channel|>"),
        ("gemma",),
    ),
    Family(
        "granite",
        r"<\|tool_call\|>|<function_call> ",
        json_format(("<|tool_call|>", "<tool_call>", "<function_call>"), ("</tool_call>", "<|/tool_call|>")),
        Think("<think>", "</think>", dropped=("<response>", "</response>")),
        ("granite3", "granite-20b-fc"),
    ),
    Family(
        "nemotron", r"<TOOLCALL>", json_format(("<TOOLCALL>",), ("</TOOLCALL>",)), THINK, ("nemotron_json",)
    ),
    Family("lfm2", r"<\|tool_call_start\|>", PYTHONIC, THINK),
    Family(
        "hermes",
        r"<tool_call>",
        HERMES,
        THINK,
        ("qwen", "qwen25", "qwen3", "qwen3-thinking", "qwen3_json", "granite4"),
    ),
    Family("pythonic", r"\[func_name1\(", PYTHONIC, None, ("llama4_pythonic", "llama4", "olmo3", "gemma3")),
    Family(
        "llama3_json",
        r"dictionary of argument name|<\|python_tag\|>",
        LLAMA_JSON,
        None,
        ("llama3", "llama4_json"),
    ),
    Family(
        "granite_text",
        r"Here is my thought process:",
        json_format(("<|tool_call|>",)),
        Think("Here is my thought process:", "Here is my response:"),
        ("granite3.2",),
    ),
    Family("think", r"</?think>", None, THINK, ("seed",)),
    Family("magistral_think", r"\[THINK\]", None, Think("[THINK]", "[/THINK]")),
)
BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}
NONE = "none"


@dataclass(frozen=True)
class Dialect:
    """What is parsed in a model's outputs: the tool calls of one family, the reasoning of one."""

    tools: Family | None = None
    reasoning: Family | None = None

    @property
    def harmony(self) -> bool:
        return any(family is not None and family.harmony for family in (self.tools, self.reasoning))

    @property
    def think(self) -> Think | None:
        return self.reasoning.think if self.reasoning else None

    @property
    def tags(self) -> frozenset[str]:
        """Texts that must reach the parser even where the tokenizer has them as special tokens."""
        form = self.tools.tools if self.tools else None
        found = (*(form.tags if form else ()), *(self.think.tags if self.think else ()))
        return frozenset(found if not self.harmony else HARMONY_TAGS)


@lru_cache(maxsize=8)
def choose(template: str, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Dialect:
    """The dialect of a model with the chat template ``template``; the names override what its text shows.

    Raises ConfigError for names that no family has.
    """
    found = next((family for family in FAMILIES if re.search(family.mark, template)), None)
    tools = found if found and (found.tools or found.harmony) else None
    if tool_parser is not None:
        tools = named(tool_parser, "tool-call-parser")
    if reasoning_parser is not None:
        return Dialect(tools, named(reasoning_parser, "reasoning-parser"))
    if found and found.harmony:
        return Dialect(tools, found)
    own = [found] if found else []
    thinking = (family for family in (*own, *FAMILIES) if family.think and shows(template, family.think))
    return Dialect(tools, next(thinking, None))


def shows(template: str, spec: Think) -> bool:
    return spec.close in template or spec.open in template


def named(name: str, flag: str) -> Family | None:
    if name == NONE:
        return None
    family = BY_NAME.get(name)
    wanted = family and (family.harmony or (family.tools if flag == "tool-call-parser" else family.think))
    if family is None or not wanted:
        known = sorted(f.name for f in FAMILIES if f.harmony or (f.tools if "tool" in flag else f.think))
        raise ConfigError(
            f"--{flag} {name}: not known; give one of {', '.join(known)}, or none",
            param=flag.replace("-", "_"),
        )
    return family
