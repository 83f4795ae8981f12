"""Model families: how each writes tool calls and reasoning, and how its chat template is recognised.

A family is one row; the rows are tried in order.
Sources of the formats: the families' published chat templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from sgla.errors import ConfigError
from sgla.text.reasoning.harmony import TAGS as HARMONY_TAGS
from sgla.text.reasoning.think import Think
from sgla.text.tools.calls import (
    json_call,
    listed_or_named_call,
    named_call,
    numbered,
    python_call,
)
from sgla.text.tools.generic import shows_tools
from sgla.text.tools.prose import Format
from sgla.text.tools.values import Syntax
from sgla.text.tools.writing import NAME, Writing
from sgla.text.tools.xml import OTHER, STRING, Markup, xml_call

THINK = Think("<think>", "</think>")
JSON_CLOSES, JSON_LEAD = ("]", "}"), ("[",)


def json_writing(before: str, after: str, keys: tuple[str, str] = ("name", "arguments")) -> Writing:
    """Objects in a list."""
    return Writing(f'{{"{keys[0]}": "{NAME}", "{keys[1]}": ', "}", before + "[", ", ", "]" + after)


def json_format(
    opens: tuple[str, ...],
    closes: tuple[str, ...] = (),
    writing: Writing | None = None,
    **more: tuple[str, ...],
) -> Format:
    """Objects with name and arguments between tags, one or a list of them."""
    separators = more.get("separators", (",",))
    return Format(
        json_call, opens, JSON_LEAD, (*JSON_CLOSES, *closes), separators, more.get("bare", ()), writing
    )


HERMES = json_format(
    ("<tool_call>",),
    ("</tool_call>",),
    Writing(f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", between="\n"),
)
LLAMA_JSON = json_format(
    ("<|python_tag|>", "<|python_start|>"),
    ("<|python_end|>",),
    Writing(f'{{"name": "{NAME}", "parameters": ', "}", between="; "),
    separators=(",", ";"),
    bare=("{", "["),
)
PYTHONIC = Format(
    python_call,
    ("<|python_start|>", "<|tool_call_start|>", "```tool_code"),
    JSON_LEAD,
    ("]", "<|python_end|>", "<|tool_call_end|>", "```"),
    (",",),
    bare=("[",),
)


def mistral(writing: Writing) -> Format:
    call = listed_or_named_call(("[ARGS]",), id_tag="[CALL_ID]")
    return Format(call, ("[TOOL_CALLS]",), JSON_LEAD, ("]",), (",",), writing=writing)


def deepseek(before: str, middle: str, after: str) -> Format:
    """``before`` and after a name, ``after`` the arguments."""
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    first, last = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return Format(
        named_call((middle.strip(),)),
        (first, begin),
        tuple(filter(None, (begin, before))),
        tuple(filter(None, (after.strip(), end, last))),
        writing=Writing(begin + before + NAME + middle, after + end, first, "\n" if after else "", last),
    )


KIMI = Format(
    named_call(("<|tool_call_argument_begin|>",), identity=numbered),
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_begin|>",),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    writing=Writing(
        f"<|tool_call_begin|>functions.{NAME}:",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        numbered="<|tool_call_argument_begin|>",
    ),
)
HARMONY_WRITING = Writing(
    f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    "<|call|>",
    reasoning=("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
)


def xml_format(markup: Markup, name: str, group: tuple[str, str] = ("", ""), each: bool = False) -> Format:
    """``name``: before a function's name. ``group``: around all calls, or around ``each``."""
    first, last = group
    begin, end = name + NAME + markup.name_end + "\n", markup.ends[0]
    if each:
        writing = Writing(f"{first}\n{begin}", f"{end}\n{last}", between="\n", markup=markup)
    elif first:  # without a separator: to a grammar's lexer it would be the beginning of ``last``
        writing = Writing(begin, end + "\n", first + "\n", "", last, markup=markup)
    else:
        writing = Writing(begin, end, between="\n", markup=markup)
    if not first:
        return Format(xml_call(markup), (name,), writing=writing)
    return Format(xml_call(markup), (first, name), (name,), (last,), writing=writing)


QWEN_MARKUP = Markup(
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    ends=("</function>",),
    name_end=">",
    missing_end=("<parameter=", "</function>"),
    lines=True,
)
GLM_MARKUP = Markup(
    key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), ends=("</tool_call>",)
)
MINIMAX_MARKUP = Markup(
    key=('<parameter name="', '">'), value=("", "</parameter>"), ends=("</invoke>",), name_end='">'
)
DSML_MARKUP = Markup(
    key=('<｜DSML｜parameter name="', '">'),
    value=("", "</｜DSML｜parameter>"),
    ends=("</｜DSML｜invoke>",),
    name_end='">',
    key_ends={'" string="true">': STRING, '" string="false">': OTHER},
)
STEP_MARKUP = Markup(
    key=('<steptml:parameter name="', '">'),
    value=("", "</steptml:parameter>"),
    ends=("</steptml:invoke>",),
    name_end='">',
)
STEP_CALL = ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="')
STEP = Format(
    xml_call(STEP_MARKUP),
    ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    STEP_CALL,
    ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    writing=Writing(
        "".join(STEP_CALL) + NAME + '">\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
        "<｜tool_calls_begin｜>\n",
        "",
        "<｜tool_calls_end｜>",
        markup=STEP_MARKUP,
    ),
)


def gemma(open_tag: str, closes: tuple[str, ...], quote: str) -> Format:
    return Format(named_call(syntax=Syntax(quote, bare=True)), (open_tag,), ("call:",), closes)


@dataclass(frozen=True)
class Family:
    """``mark``: a pattern found in the chat template. ``aliases``: names that SGLang and vLLM users type.

    ``harmony``: the whole output has a format of its own.
    ``short_ids``: its template takes ids of nine characters only.
    """

    name: str
    mark: str
    tools: Format | None = None
    think: Think | None = None
    aliases: tuple[str, ...] = ()
    harmony: bool = False
    short_ids: bool = False


# The family of models whose template shows tools, but nothing of a call:
# by the beginning of their architecture's name.
ARCHITECTURES = {
    "GptOss": "gpt-oss",
    "DeepseekV32": "deepseek_v32",
    "DeepseekV3": "deepseek_v3",
    "KimiLinear": "kimi_k2",
    "Kimi": "kimi_k2",
    "Glm4Moe": "glm45",
    "GlmMoe": "glm45",
    "SeedOss": "seed_oss",
    "MiniMaxM2": "minimax_m2",
    "Qwen3Next": "qwen3_coder",
    "Qwen3_5": "qwen3_coder",
    "Qwen": "hermes",
    "Mistral": "mistral",
    "Ministral": "mistral",
    "Mixtral": "mistral",
    "Cohere": "command",
    "Gemma4": "gemma4",
    "Gemma3": "pythonic",
    "Granite": "granite",
    "NemotronH": "qwen3_coder",
    "Nemotron": "nemotron",
    "Lfm2": "lfm2",
    "Llama4": "pythonic",
    "Olmo3": "pythonic",
    "Llama": "llama3_json",
}


GENERIC = "generic"
FAMILIES = (
    Family(
        "gpt-oss", r"<\|channel\|>", harmony=True, aliases=("openai", "gpt_oss", "openai_gptoss", "harmony")
    ),
    Family(
        "deepseek_v32",
        r"DSML",
        xml_format(
            DSML_MARKUP,
            '<｜DSML｜invoke name="',
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ),
        THINK,
        ("deepseekv32",),
    ),
    Family(
        "deepseek_v3",
        r"(?s)<｜tool▁sep｜>.*```json",
        deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
        THINK,
        ("deepseekv3", "deepseek_r1", "deepseek-r1", "deepseek-v3"),
    ),
    Family(
        "deepseek_v31",
        r"<｜tool▁sep｜>",
        deepseek("", "<｜tool▁sep｜>", ""),
        THINK,
        ("deepseekv31", "deepseek_v3.1"),
    ),
    Family(
        "kimi_k2",
        r"<\|tool_calls_section_begin\|>",
        KIMI,
        Think("<think>", "</think>", until=("<|tool_calls_section_begin|>",)),
    ),
    Family("step3", r"<steptml:", STEP, THINK),
    Family("glm45", r"<arg_key>", xml_format(GLM_MARKUP, "<tool_call>"), THINK, ("glm", "glm46", "glm47")),
    Family(
        "seed_oss",
        r"<seed:tool_call>",
        xml_format(QWEN_MARKUP, "<function=", ("<seed:tool_call>", "</seed:tool_call>"), each=True),
        Think("<seed:think>", "</seed:think>"),
    ),
    Family(
        "minimax_m2",
        r"<minimax:tool_call>",
        xml_format(MINIMAX_MARKUP, '<invoke name="', ("<minimax:tool_call>", "</minimax:tool_call>")),
        THINK,
        ("minimax", "minimax-m2"),
    ),
    Family(
        "qwen3_coder",
        r"<function=",
        xml_format(QWEN_MARKUP, "<function=", ("<tool_call>", "</tool_call>"), each=True),
        THINK,
        ("qwen3coder", "qwen3_xml", "nemotron_v3", "nemotron_3"),
    ),
    Family(
        "mistral_v11",
        r"\[ARGS\]",
        mistral(Writing(f"[TOOL_CALLS]{NAME}[ARGS]", "")),
        Think("[THINK]", "[/THINK]"),
        ("magistral",),
        short_ids=True,
    ),
    Family(
        "mistral",
        r"\[TOOL_CALLS\]",
        mistral(json_writing("[TOOL_CALLS] ", "")),
        Think("[THINK]", "[/THINK]"),
        short_ids=True,
    ),
    Family(
        "command",
        r"<\|START_ACTION\|>",
        json_format(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            json_writing("<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters")),
        ),
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
        json_format(
            ("<|tool_call|>", "<tool_call>", "<function_call>"),
            ("</tool_call>", "<|/tool_call|>"),
            json_writing("<|tool_call|>", ""),
        ),
        Think("<think>", "</think>", dropped=("<response>", "</response>")),
        ("granite3", "granite-20b-fc"),
    ),
    Family(
        "nemotron",
        r"<TOOLCALL>",
        json_format(("<TOOLCALL>",), ("</TOOLCALL>",), json_writing("<TOOLCALL>", "</TOOLCALL>")),
        THINK,
        ("nemotron_json",),
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
    Family(GENERIC, r"(?!)", HERMES),  # as generic.py tells the model
    Family("kimi", "◁think▷", None, Think("◁think▷", "◁/think▷")),
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
    def writing(self) -> Writing | None:
        """How its calls are written, if a grammar can describe that."""
        if self.tools and self.tools.harmony:
            return HARMONY_WRITING
        return self.tools.tools.writing if self.tools and self.tools.tools else None

    def forced(self) -> Dialect:
        """For outputs that must be calls:
        itself, or plain JSON if a grammar cannot describe its own calls."""
        return (
            self
            if self.writing
            else Dialect(BY_NAME["llama3_json"], None if self.harmony else self.reasoning)
        )

    @property
    def generic(self) -> bool:
        """Whether the model has not been trained to write its calls."""
        return self.tools is not None and self.tools.name == GENERIC

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
def dialect_of(
    template: str,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    architecture: str = "",
) -> Dialect:
    """The dialect of a model with the chat template ``template``; the names override what its text shows.

    A template that shows tools but no call is that of its ``architecture``'s family; one without either is
    told of them. Raises ConfigError for names that no family has.
    """
    found = next((family for family in FAMILIES if re.search(family.mark, template)), None)
    tools = found if found and (found.tools or found.harmony) else None
    if tools is None and re.search(r"\btools\b", template):
        beginning = next((name for name in ARCHITECTURES if architecture.startswith(name)), None)
        tools = BY_NAME[ARCHITECTURES[beginning]] if beginning else None
        found = tools if tools and tools.harmony else found
    if tools is None and template and not shows_tools(template):
        tools = BY_NAME[GENERIC]
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


def written_as_told(family: Family | None) -> bool:
    """Whether it reads calls in the words of ``generic.py``."""
    return family is not None and family.tools is HERMES


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
