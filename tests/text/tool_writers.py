"""What models of each family write: calls as their chat templates show them, and texts made of their
syntax."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "any": {}, "n": {"type": ["integer", "null"]}},
            },
        },
    }
    for name in ("find", "get.it", "mcp__put-1")
]
NAMES = [tool["function"]["name"] for tool in TOOLS]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(arguments: str = "arguments", name: str = "name") -> Callable[[Calls], list[str]]:
    return lambda calls: [dumped({name: called, arguments: args}) for called, args in calls]


def each(
    before: str, write: Callable[[Calls], list[str]], after: str, between: str = "\n"
) -> Callable[[Calls], str]:
    return lambda calls: between.join(before + text + after for text in write(calls))


def listed(before: str, write: Callable[[Calls], list[str]], after: str) -> Callable[[Calls], str]:
    return lambda calls: before + "[" + ", ".join(write(calls)) + "]" + after


def python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(item, quote) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote}{k}{quote}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    return dumped(value)


def gemma(quote: str) -> Callable[[Calls], list[str]]:
    return lambda calls: [
        f"call:{name}{{{','.join(f'{key}:{gemma_value(value, quote)}' for key, value in args.items())}}}"
        for name, args in calls
    ]


def element(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def qwen_xml(calls: Calls) -> list[str]:
    return [
        f"<function={name}>\n"
        + "".join(f"<parameter={k}>\n{element(v)}\n</parameter>\n" for k, v in args.items())
        + "</function>"
        for name, args in calls
    ]


def glm_xml(calls: Calls) -> list[str]:
    return [
        name
        + "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{element(v)}</arg_value>" for k, v in args.items())
        for name, args in calls
    ]


def minimax_xml(calls: Calls) -> list[str]:
    return [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{element(v)}</parameter>\n' for k, v in args.items())
        + "</invoke>"
        for name, args in calls
    ]


def step_xml(calls: Calls) -> list[str]:
    return [
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
        + "".join(
            f'<steptml:parameter name="{k}">{element(v)}</steptml:parameter>\n' for k, v in args.items()
        )
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, args in calls
    ]


def dsml(calls: Calls) -> list[str]:
    def parameter(key: str, value: Any) -> str:
        text = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{text}">{element(value)}</｜DSML｜parameter>\n'

    return [
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(k, v) for k, v in args.items())
        + "</｜DSML｜invoke>"
        for name, args in calls
    ]


def named(before: str, between: str, after: str, numbered: bool = False) -> Callable[[Calls], list[str]]:
    return lambda calls: [
        f"{before}{name}{f':{i}' if numbered else ''}{between}{dumped(args)}{after}"
        for i, (name, args) in enumerate(calls)
    ]


def section(
    before: str, write: Callable[[Calls], list[str]], after: str, between: str = ""
) -> Callable[[Calls], str]:
    return lambda calls: before + between.join(write(calls)) + after


def lines(before: str, write: Callable[[Calls], list[str]], after: str) -> Callable[[Calls], str]:
    return lambda calls: before + "\n" + "\n".join(write(calls)) + "\n" + after


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": each("<tool_call>\n", objects(), "\n</tool_call>"),
    "qwen3_coder": each("<tool_call>\n", qwen_xml, "\n</tool_call>"),
    "seed_oss": each("<seed:tool_call>\n", qwen_xml, "\n</seed:tool_call>"),
    "glm45": each("<tool_call>", glm_xml, "\n</tool_call>"),
    "minimax_m2": lines("<minimax:tool_call>", minimax_xml, "</minimax:tool_call>"),
    "step3": lines("<｜tool_calls_begin｜>", step_xml, "<｜tool_calls_end｜>"),
    "deepseek_v32": lines("<｜DSML｜function_calls>", dsml, "</｜DSML｜function_calls>"),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(objects("parameters")(calls)),
    "pythonic": listed("<|python_start|>", python, "<|python_end|>"),
    "lfm2": listed("<|tool_call_start|>", python, "<|tool_call_end|>"),
    "mistral": listed("[TOOL_CALLS] ", objects(), ""),
    "mistral_v11": section("", named("[TOOL_CALLS]", "[ARGS]", ""), ""),
    "deepseek_v3": section(
        "<｜tool▁calls▁begin｜>",
        named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": section(
        "<｜tool▁calls▁begin｜>",
        named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": section(
        "<|tool_calls_section_begin|>",
        named("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>", True),
        "<|tool_calls_section_end|>",
    ),
    "gpt-oss": section(
        "",
        named(
            "<|start|>assistant<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "<|call|>",
        ),
        "",
    ),
    "functiongemma": each("<start_function_call>", gemma("<escape>"), "<end_function_call>", ""),
    "gemma4": each("<|tool_call>", gemma('<|"|>'), "<tool_call|>", ""),
    "granite": listed("<|tool_call|>", objects(), ""),
    "command": listed("<|START_ACTION|>", objects("parameters", "tool_name"), "<|END_ACTION|>"),
    "nemotron": listed("<TOOLCALL>", objects(), "</TOOLCALL>"),
}
# Without a tag, at the beginning of an output.
BARE_WRITERS: dict[str, Callable[[Calls], str]] = {
    "llama3_json": each("", objects("parameters"), "", "; "),
    "pythonic": listed("", python, ""),
}
