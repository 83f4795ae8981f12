"""``docs/flags.md``: where settings come from, and other servers' flags.
``python -m sgla.cli.flags_page docs/flags.md`` writes it, and with ``docs/router.md`` the router's flags."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sgla.cli.aliases import (
    ALIASES,
    REFUSED,
    REFUSED_BY_ROUTER,
    SHORT,
    VALUES,
    VARIABLES,
    Alias,
    Always,
    Fields,
    Switch,
    Word,
)
from sgla.cli.settings import spelled
from sgla.route.config import RouteConfig

HEAD = """# Flags, variables and files

Each setting of `sgla serve --help` can be given in three ways. The first that has it counts:

1. a flag: `--step-tokens 4096`
2. a variable of the environment: `SGLA_STEP_TOKENS=4096`
3. a line of the YAML file that `--config` or `SGLA_CONFIG` names: `step_tokens: 4096`

A flag with several values takes them with commas (`--served-model-name a,b`), repeated, or in a row behind
MODEL (`sgla serve MODEL --served-model-name a b`). Commas part them in a variable too. API keys may hold
commas: there they are given in a row or repeated, and in `SGLA_API_KEY` and `SGLA_ADMIN_API_KEY` with spaces
between them. Numbers of tokens may be written as vLLM does, `32k` (32,000) or `32K` (32,768), sizes as `512M`
or `2G` (powers of 1024).

An empty variable is as good as none, but an empty `SGLA_API_KEY` ends the start: a server that was to have a
key does not begin without one. A variable `SGLA_...` that is no setting is named in a warning, once. `sgla
bench`, `sgla replay` and `sgla chat --url` send `SGLA_API_KEY` too. Keys are never printed. `SGLA_CPU_ISA`
limits the instruction sets of the CPU kernels (`avx2`, `avx512`, ...).

The flags of `sgla route` are [on its page](router.md#flags).

## Flags of other servers

Names of vLLM, SGLang, llama.cpp, TGI and LMDeploy that are understood, as flags and as keys of a file:

| there | here |
|---|---|
"""
MIDDLE = """
What is refused, and what to do instead (`*` stands for any text):

| there | here |
|---|---|
"""
BEGIN = "<!-- flags of sgla route: python -m sgla.cli.flags_page docs/router.md -->\n"
END = "<!-- end of flags -->"
WORDS = """
Values that other servers write differently, in small or large letters:

| flag | there | here |
|---|---|---|
"""
TAIL = """
Variables of other servers are not read. A note says what to set:

| there | here |
|---|---|
"""


def page() -> str:
    """The text of ``docs/flags.md``."""
    understood = "".join(f"| {_names(name)} | {_meaning(alias)} |\n" for name, alias in ALIASES.items())
    refused = "".join(f"| {_patterns(patterns)} | {hint} |\n" for patterns, hint in REFUSED)
    variables = "".join(f"| `{name}` | `{instead}` |\n" for name, instead in VARIABLES.items())
    words = "".join(
        f"| `--{name.replace('_', '-')}` | {', '.join(f'`{word}`' for word in there)} | {_here(here)} |\n"
        for name, known in VALUES.items()
        for here, there in _grouped(known).items()
    )
    return HEAD + understood + MIDDLE + refused + WORDS + words + TAIL + variables


def _grouped(known: Mapping[str, Word | str]) -> dict[Word | str, list[str]]:
    """Words that mean the same."""
    found: dict[Word | str, list[str]] = {}
    for word, here in known.items():
        found.setdefault(here, []).append(word)
    return found


def _here(word: Word | str) -> str:
    if not isinstance(word, Word):
        return f"refused: {word}"
    return "; ".join(filter(None, (f"`{word.value}`" if word.value else "left out", word.hint)))


def _names(name: str) -> str:
    short = [f"`{hyphen}`" for hyphen, long in SHORT.items() if long == f"--{name}"]
    return ", ".join([f"`--{name}`", *short])


def _meaning(alias: Alias | Switch | Always | Fields) -> str:
    if isinstance(alias, Always):
        only = f" (as {', '.join(f'`{value}`' for value in alias.values if value)})" if alias.values else ""
        return f"{alias.hint}{only}"
    if isinstance(alias, Fields):
        keys = "; ".join(f"`{key}` is `{spelled(each)}`" for key, each in alias.keys.items())
        within = "; ".join(f"in `{key}`: {_meaning(each)}" for key, each in filter(None, [alias.inner]))
        return "; ".join(
            filter(None, [keys, within, f"{', '.join(f'`{key}`' for key in alias.free)}: {alias.hint}"])
        )
    if isinstance(alias, Alias) and alias.others:
        return f"`{spelled(alias)}` (as {', '.join(f'`{word}`' for word in alias.words)}); {alias.others}"
    beside = isinstance(alias, Alias) and alias.beside
    return f"`{spelled(alias)}`" + (f"; where both are given, that may be {beside} more" if beside else "")


def _patterns(patterns: str) -> str:
    return ", ".join(f"`--{pattern}`" for pattern in patterns.split())


def route_table() -> str:
    """The flags of ``sgla route``, and those of others, for ``docs/router.md``."""
    hints = typing.get_type_hints(RouteConfig, include_extras=True)
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(RouteConfig):
        default = field.default if field.default not in (None, msgspec.NODEFAULT) else ""
        text = typing.get_args(hints[field.name])[1].description
        rows.append(
            f"| `--{field.name.replace('_', '-')}` | {f'`{default}`' if default != '' else ''} | {text} |"
        )
    rows += ["", "Flags of other routers that are refused, and what to do instead:", ""]
    rows += ["| there | here |", "|---|---|"]
    rows += [f"| {_patterns(patterns)} | {hint} |" for patterns, hint in REFUSED_BY_ROUTER]
    return "\n".join(rows) + "\n"


def with_route_table(text: str) -> str:
    """``docs/router.md`` with that table between its marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return head + begin + route_table() + end + tail


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_route_table(target.read_text()) if target.name == "router.md" else page())
