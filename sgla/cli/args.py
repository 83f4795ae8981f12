"""The command line, generated from ``Config``: one flag per field."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sgla.cli.aliases import (
    ALIASES,
    COMMANDS,
    SHORT,
    VALUES,
    Alias,
    Always,
    Fields,
    Switch,
    is_named,
    refusal,
)
from sgla.cli.settings import (
    TOKENS,
    alias_values,
    hint,
    kinds,
    less_of,
    parse_bytes,
    parse_count,
    parse_list,
    parse_number,
    parse_object,
    parse_url,
    understood,
)
from sgla.config import SECRETS, Config
from sgla.errors import ConfigError
from sgla.messages import MOST_PROFILED
from sgla.route.config import SECRETS as ROUTE_SECRETS
from sgla.route.config import RouteConfig
from sgla.validation import Range
from sgla.version import __version__

GROUPS = {
    "model": "model",
    "device": "device",
    "max_running_requests": "scheduling and cache",
    "host": "server",
}
GROUPS_OF_MODELS = ("model", "device", "scheduling and cache")  # what a command that runs a model takes
ARGUMENTS = {
    "bench": "[options]",
    "doctor": "[options]",
    "health": "[options]",
    "replay": "FILE [options]",
    "list": "[options]",
    "rm": "MODEL ... [options]",
    "completion": "SHELL",
    "debug": "{dump,compare} [MODEL] [options]",
    "quantize": "MODEL OUT [options]",
    "route": "--worker URL [--worker URL ...] [options]",
    "launch": "AGENT [options] [-- ARGUMENTS OF THE AGENT]",
}
AGENTS = ("claude", "codex", "opencode", "qwen", "pi")  # that launch.py knows
EPILOG = (
    "Each setting is also a variable, as SGLA_API_KEY, and a line of the --config file. Flags of vLLM, "
    "SGLang and llama.cpp are understood or refused with what to use instead: see docs/flags.md. 'sgla "
    "explain' shows what the settings resolve to."
)


NAMED_MODEL = re.compile(r"[\w.:@+-]+=\S.*")


class Parser(argparse.ArgumentParser):
    """No abbreviated flags, and errors of one line instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Given(NamedTuple):
    """A flag of a setting as it was typed.
    ``value``: of the setting ``name``; of a list, the words behind the flag."""

    flag: str
    name: str
    value: Any


class Choices(tuple[str, ...]):
    """Values of the setting ``name``, which is shown; words of peers, in any letters, are in it too."""

    name: str

    def __contains__(self, word: object) -> bool:
        low = str(word).lower()
        return super().__contains__(low) or super().__contains__(word) or low in VALUES.get(self.name, {})


class Give(argparse.Action):
    """Adds to ``given``, which keeps the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        assert flag is not None
        if self.nargs == 0:
            values = not flag.startswith("--no-")
        elif self.choices is not None:
            hints: list[str] = []
            try:
                values = understood(self.dest, values, hints.append)
            except ValueError as error:
                raise argparse.ArgumentError(self, str(error)) from error
            namespace.hints = [*getattr(namespace, "hints", ()), *hints]
        self.give(namespace, Given(flag, self.dest, values))

    def give(self, namespace: argparse.Namespace, *given: Given) -> None:
        namespace.given = [*getattr(namespace, "given", ()), *given]


class GiveAlias(Give):
    """A flag of another server: ``dest`` is its name. ``hints`` says how it was understood."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        assert flag is not None
        try:
            settings = alias_values(self.dest, True if self.nargs == 0 else values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        namespace.hints = [*getattr(namespace, "hints", ()), hint(self.dest, settings)]
        self.give(namespace, *(Given(flag, *setting) for setting in settings.items()))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse; ``flags`` holds the fields of Config that were given, and ``hints`` how other servers' flags
    were understood, where a command takes them. Exits with 2 on a wrong flag. Nothing means ``--help``."""
    argv = argv or ["--help"]
    parser = build(argv[0])
    if argv[0] in COMMANDS:
        parser.error(f"there is no command '{argv[0]}'; use 'sgla {COMMANDS[argv[0]]}'")
    if argv[0] not in BUILT and (close := difflib.get_close_matches(argv[0], BUILT, n=1)):
        parser.error(f"there is no command '{argv[0]}'; did you mean 'sgla {close[0]}'?")
    behind: list[str] = []
    if argv[0] == "launch" and "--" in argv:
        at = argv.index("--")
        argv, behind = argv[:at], [*argv[at + 1 :]]
    args, unknown = parser.parse_known_args([_long(word) for word in argv])
    if args.command == "launch":
        args.arguments = behind
    if (
        "model_argument" in args
        and args.model_argument is None
        and len(unknown) == 1
        and unknown[0][:1] != "-"
    ):
        args.model_argument = unknown.pop()  # before Python 3.12 a MODEL behind flags is not found
    if unknown:
        _refuse(args.parser, unknown)
    if "model_argument" not in args:
        return args
    args.hints = getattr(args, "hints", [])
    args.flags = _flags(args.parser, getattr(args, "given", []), args.model_argument)
    return args


def _long(word: str) -> str:
    """``-m`` -> ``--model``: flags of one hyphen that other servers have."""
    if re.fullmatch(r"-O\d", word):
        return f"{SHORT['-O']}={word[2]}"
    name, equals, value = word.partition("=")
    return SHORT[name] + equals + value if name in SHORT else word


def _flags(parser: argparse.ArgumentParser, given: Sequence[Given], model: str | None) -> dict[str, Any]:
    """Fields and values.
    A flag that is repeated overrides itself, a list grows; two flags for one setting must agree."""
    if model is None and not any(one.name == "model" for one in given):
        model, given = _behind_list(parser, given)
    fields: dict[str, Any] = {}
    flags: dict[str, str] = {}
    given = [*([Given("MODEL", "model", model)] if model is not None else []), *given]
    for flag, name, value in _strong(_named_models(given)):
        if isinstance(value, list):
            try:
                fields.setdefault(name, []).extend(part for word in value for part in parse_list(name, word))
            except ValueError as error:
                parser.error(f"argument {flag}: {error}")
        elif flags.setdefault(name, flag) == flag or fields[name] == value:
            fields[name] = value
        elif (less := less_of(flags[name], fields[name], flag, value)) is not None:
            fields[name] = less
        elif name == "model":
            raise ConfigError(f"two models given: {fields[name]} and {flag} {value}", param=name)
        else:
            raise ConfigError(
                f"{flags[name]} and {flag} are the same setting with two values; give one", param=name
            )
    return fields


def _strong(given: Sequence[Given]) -> list[Given]:
    """Without switches that say less than another flag does."""

    def weak(one: Given) -> bool:
        alias = ALIASES.get(one.flag.removeprefix("--"))
        return isinstance(alias, Switch) and alias.weak

    said = {one.name for one in given if not weak(one)}
    return [one for one in given if not (weak(one) and one.name in said)]


def _named_models(given: Sequence[Given]) -> Sequence[Given]:
    """``--model NAME=MODEL``, more than once, is ``--models``."""
    models = [one for one in given if one.name == "model"]
    if len(models) < 2 or not all(NAMED_MODEL.fullmatch(one.value) for one in models):
        return given
    return [one._replace(name="models", value=[one.value]) if one in models else one for one in given]


def _behind_list(parser: argparse.ArgumentParser, given: Sequence[Given]) -> tuple[str | None, list[Given]]:
    """MODEL, if the last word behind the only flag with two values is one, as in ``--served-model-name NAME
    MODEL``; and what else was given. Exits with 2 where it may be one more value just as well."""
    several = [
        one for one in given if isinstance(one.value, list) and len(one.value) > 1 and not _names_models(one)
    ]
    if not several:
        return None, [*given]
    one = several[0]
    if len(several) > 1 or len(one.value) > 2 or not could_be_model(one.value[1]):
        parser.error(
            f"is the last word behind {one.flag} the MODEL? Write MODEL before the flags, or if there is "
            f"none, each value behind a {one.flag} of its own"
        )
    return one.value[1], [
        given_ if given_ is not one else one._replace(value=one.value[:1]) for given_ in given
    ]


def _names_models(one: Given) -> bool:
    """Whether it is ``--models NAME=MODEL NAME=MODEL``."""
    return one.name == "models" and all(NAMED_MODEL.fullmatch(word) for word in one.value)


def could_be_model(word: str) -> bool:
    """Whether it is written as models are: a path that exists, a hub id, a .gguf file, a packaged model."""
    from sgla.hub.packaged import MODELS

    return "/" in word or word.endswith(".gguf") or word in MODELS or Path(word).exists()


def build(only: str | None = None) -> Parser:
    """The parser of ``sgla`` with its commands. If ``only`` is one of them, the others have no flags: a start
    need not wait for these."""
    parser = Parser(prog="sgla", description="An inference server for open-weight language models.")
    parser.add_argument("--version", action="version", version=f"sgla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help, add) in BUILT.items():
        command = _command(commands, name, help)
        if only == name or only not in BUILT:
            add(command)
    return parser


def _command(commands: Any, name: str, help: str) -> Parser:
    parser = commands.add_parser(
        name,
        help=help,
        usage=f"sgla {name} {ARGUMENTS.get(name, '[MODEL] [options]')}",
        description=help[0].upper() + help[1:] + ".",
        epilog=EPILOG if name in ("serve", "chat", "eval", "run-batch", "explain") else None,
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_config(
    parser: argparse.ArgumentParser,
    groups: Sequence[str] = tuple(GROUPS.values()),
    names: Sequence[str] = ("api_key",),
) -> None:
    """--config, MODEL if there is to be one, and a flag for each field of Config in ``groups`` or ``names``
    (of commands with groups api_key always: a client needs it too)."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags override it")
    docs, taken = descriptions(), set()
    group, title = parser.add_argument_group(), ""
    for field in _fields():
        if field.name in GROUPS:
            title = GROUPS[field.name]
            if title in groups:
                group = parser.add_argument_group(title)
        if title in groups or field.name in names:
            taken.add(field.name)
            flag = "--" + field.name.replace("_", "-")
            switch = [flag.replace("--", "--no-")] if kinds()[field.name] is bool else []
            text = _help(docs[field.name], field.default)
            group.add_argument(flag, *switch, help=text, dest=field.name, **_options(field.name))
    if "model" in taken:
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    else:
        parser.set_defaults(model_argument=None)
    for name, alias in ALIASES.items():
        if groups if isinstance(alias, Always) else _sets(alias) <= taken:
            switch_only = isinstance(alias, Switch) or (isinstance(alias, Always) and not alias.values)
            parser.add_argument(
                f"--{name}",
                action=GiveAlias,
                dest=name,
                nargs=0 if switch_only else "+" if isinstance(alias, Alias) and alias.several else None,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _sets(alias: Alias | Switch | Fields) -> set[str]:
    """Its settings."""
    return {each.field for each in alias.keys.values()} if isinstance(alias, Fields) else {alias.field}


def _options(name: str) -> dict[str, Any]:
    """argparse keywords for a field's type: Literal, bool, list[str], sizes, numbers, strings."""
    kind = kinds()[name]
    options: dict[str, Any] = {"action": Give, "default": argparse.SUPPRESS}
    if typing.get_origin(kind) is typing.Literal:
        choices = Choices(typing.get_args(kind))
        choices.name = name
        return options | {"choices": choices}
    if kind is bool:
        return options | {"nargs": 0}
    if typing.get_origin(kind) is list:
        return options | {"nargs": "+", "metavar": "KEY" if name in SECRETS else "NAME"}
    if typing.get_origin(kind) is dict:
        return options | {"type": reads(parse_object), "metavar": "JSON"}
    if name.endswith("_bytes"):
        return options | {"type": reads(parse_bytes), "metavar": "SIZE"}
    if name in TOKENS:
        return options | {"type": reads(parse_count), "metavar": "N"}
    return options | {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def reads(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` as an argparse type, whose ValueErrors tell the user something."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def real(fits: Range) -> Callable[[str], Any]:
    """The argparse type of numbers that may be such."""
    return reads(partial(parse_number, fits))


ABOVE = Range(0, open_low=True)
_fields = functools.cache(partial(msgspec.structs.fields, Config))


@functools.cache
def descriptions() -> dict[str, str]:
    """The description of every field of Config."""
    hints = typing.get_type_hints(Config, include_extras=True)
    return {name: typing.get_args(hints[name])[1].description for name in Config.__struct_fields__}


def _help(description: str, default: Any) -> str:
    text = description.replace("%", "%%")
    return text if default in (None, {}) or default is msgspec.NODEFAULT else f"{text} (default: {default})"


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> typing.NoReturn:
    """Name every unknown flag with what to do instead,
    or if there is none the first word that is too much."""
    names = [word.split("=")[0] for word in unknown if word.startswith("-")] or unknown[:1]
    flags = [option for action in parser._actions for option in action.option_strings]
    found = []
    for name in dict.fromkeys(names):
        router, bare = parser.prog.endswith(" route"), name.lstrip("-").replace("_", "-")
        instead = refusal(bare, router) if name.startswith("--") else None
        cutoff = 1 if instead and is_named(bare, router) else 0.93 if instead else 0.6
        close = difflib.get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=cutoff)
        if close:
            found.append(f"unknown argument {name}; did you mean {close[0]}?")
        else:
            found.append(f"{name} is not supported: {instead}" if instead else f"unknown argument {name}")
    parser.error("; ".join(found))


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--url",
        type=reads(parse_url),
        metavar="URL",
        help="a running server, for example http://127.0.0.1:30000",
    )
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer, tokens (default: up to the context)"
    )
    group.add_argument(
        "--temperature", type=real(Range(0)), metavar="X", help="0 always takes the likeliest token"
    )
    _add_config(parser, groups=GROUPS_OF_MODELS)


def _add_key(add: Callable[..., Any]) -> None:
    keys = os.environ.get("SGLA_API_KEY", "").split()
    add("--api-key", default=keys[0] if keys else None, help="sent as a bearer token (default: SGLA_API_KEY)")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    add(
        "--url",
        type=reads(parse_url),
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    _add_key(add)
    add("--model", metavar="NAME", help="one of the server's models (default: the first one)")
    add("--config-only", action="store_true", help="write the agent's settings, for good, and start nothing")
    add("--print", action="store_true", help="say what would be done, and do nothing")
    add("--restore", action="store_true", help="give back the copy of the settings that were changed")
    add("--yes", action="store_true", help="change files without asking")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help="from /step_log or --crash-dump-folder; or, with --url, from --dump-requests",
    )
    add("--url", type=reads(parse_url), metavar="URL", help="send the requests to this server")
    _add_key(add)
    add(
        "--speed",
        type=real(Range(0)),
        default=1.0,
        metavar="X",
        help="1 keeps the pace of the recording, 2 is twice as fast, 0 "
        "sends all at once (default: %(default)s)",
    )


def _add_eval(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("eval")
    add = group.add_argument
    add(
        "--url",
        type=reads(parse_url),
        metavar="URL",
        help="a running server, instead of one that is started for MODEL",
    )
    add("--tasks", required=True, type=_words, metavar="A,B", help="tasks or groups of lm_eval ('*' matches)")
    add("--include-path", metavar="FOLDER", help="with tasks of your own, in lm_eval's YAML")
    add("--limit", type=real(ABOVE), metavar="N", help="examples of each task; below 1, the share of them")
    add("--num-fewshot", type=int, metavar="N", help="examples in front of each (default: as the task says)")
    add("--gen-kwargs", type=reads(parse_object), default={}, metavar="JSON", help="how texts are generated")
    add("--apply-chat-template", action="store_true", help="ask through the model's chat template")
    add("--concurrency", type=int, default=16, metavar="N", help="requests at once (default: %(default)s)")
    add("--output", metavar="FILE", help="append the results to it, a JSON object for each metric")
    _add_config(parser, groups=GROUPS_OF_MODELS)


def _add_run_batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batch").add_argument
    what = "a JSON object on each line"
    add(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help=f"the requests, {what}, as OpenAI's batches have them",
    )
    add(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help=f"the answers and errors, {what}, in the same order",
    )
    tools = ("tool_server", "tool_timeout", "max_body_bytes", "log_level", "log_format")
    _add_config(parser, groups=GROUPS_OF_MODELS, names=tools)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        type=reads(parse_url),
        default="http://127.0.0.1:30000",
        help="an OpenAI-style server (default: %(default)s)",
    )
    _add_key(add)
    add("--model", help="model name to send (default: the first one the server lists)")
    add(
        "--api",
        choices=["completions", "chat"],
        default="completions",
        help="route to use (default: %(default)s)",
    )
    add(
        "--workload",
        choices=["random", "shared-prefix", "multi-turn"],
        default="random",
        help="default: %(default)s",
    )
    add("--name", help="name of the workload in the output (default: made from its numbers)")
    add(
        "--requests",
        type=int,
        default=32,
        metavar="N",
        help="requests, or conversations (default: %(default)s)",
    )
    add(
        "--input-len",
        type=int,
        default=64,
        metavar="N",
        help="tokens of each prompt or turn (default: %(default)s)",
    )
    add(
        "--output-len", type=int, default=64, metavar="N", help="tokens of each answer (default: %(default)s)"
    )
    add(
        "--spread",
        type=real(Range(0, 1)),
        default=0.0,
        metavar="X",
        help="lengths vary by up to this fraction (default: %(default)s)",
    )
    add(
        "--prefix-len",
        type=int,
        default=768,
        metavar="N",
        help="shared-prefix: common tokens (default: %(default)s)",
    )
    add(
        "--turns",
        type=int,
        default=4,
        metavar="N",
        help="multi-turn: turns of a conversation (default: %(default)s)",
    )
    add(
        "--concurrency", type=int, default=8, metavar="N", help="requests open at once (default: %(default)s)"
    )
    add(
        "--rate",
        type=real(ABOVE),
        metavar="X",
        help="requests that arrive each second, Poisson (default: as fast as they go)",
    )
    add("--text", action="store_true", help="send prompts as text, for servers that take no token ids")
    add("--temperature", type=real(Range(0)), default=0.0, metavar="X", help="default: %(default)s")
    add(
        "--stop-at-eos", action="store_true", help="let answers end early (no ignore_eos, for strict servers)"
    )
    add(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="runs, one line each, other prompts (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    add("--profile", action="store_true", help="have the server record what its workers do meanwhile")
    add(
        "--profile-output-dir",
        metavar="FOLDER",
        help="where the server writes the trace, inside of its --profile-folder (default: there)",
    )
    add(
        "--profile-num-steps",
        type=int,
        metavar="N",
        help=f"steps to record (default: the run, up to {MOST_PROFILED})",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _add_health(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=reads(parse_url), metavar="URL", help="another one, for example http://127.0.0.1:30000")
    add(
        "--timeout",
        type=real(Range(0, 86400, open_low=True)),
        default=4.0,
        metavar="SECONDS",
        help="for an answer (default: %(default)s)",
    )


def _add_pull(parser: argparse.ArgumentParser) -> None:
    names = ("model", "load_format", "model_source", "revision", "download_dir")
    _add_config(parser, groups=(), names=names)


def _add_downloads(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, groups=(), names=("download_dir",))
    _add_json(parser)


def _add_rm(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, groups=(), names=("download_dir",))
    shown = "as 'sgla list' shows it, or a hub id for all its files"
    parser.add_argument("names", nargs="+", metavar="MODEL", help=shown)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    shells = ["bash", "zsh", "tcsh"]
    parser.add_argument("shell", choices=shells, help="the shell that is to read it")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="which kernels layers take on a GPU (an H200 where there is none), and why not others",
    )
    _add_config(parser)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("dump", "compare"), help="write the states to a file, or compare them")
    add("--with", dest="other", metavar="FILE", help="compare with this dump instead of transformers")
    add("--out", default="states.npz", metavar="FILE", help="where dump writes")
    add("--reference", action="store_true", help="dump what transformers computes")
    add("--prompt", metavar="TEXT", help="what the model reads; random tokens if left out")
    add("--length", type=int, default=32, metavar="N", help="how many random tokens")
    add(
        "--tolerance",
        type=real(Range(0)),
        metavar="X",
        help="relative error of a layer; 0.001, in bfloat16 0.05",
    )
    _add_config(parser, GROUPS_OF_MODELS)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    names = ("model", "load_format", "model_source", "revision", "download_dir", "trust_remote_code")
    _add_config(parser, groups=(), names=names)
    add = parser.add_argument
    add("out", metavar="OUT", help="folder that the checkpoint is written to, empty or new")
    formats = ("w4a16", "fp8", "int8")
    add("--format", choices=formats, required=True, help="4-bit integers in groups, e4m3 or int8 by channels")
    add(
        "--method",
        choices=("gptq", "awq"),
        help="how integers are calibrated; to the nearest one if left out",
    )
    add("--calibrate", metavar="FILE", help="text that the model is calibrated on")
    add("--texts", type=int, default=64, metavar="N", help="how many pieces of 512 tokens of it are used")


def _add_route(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of RouteConfig; keys may come from variables."""
    hints = typing.get_type_hints(RouteConfig, include_extras=True)
    for field in msgspec.structs.fields(RouteConfig):
        kind, doc = typing.get_args(hints[field.name])
        kind = next((each for each in typing.get_args(kind) if each is not type(None)), kind)
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        if isinstance(kind, str):
            options["choices"] = typing.get_args(typing.get_args(hints[field.name])[0])
        elif kind is bool:
            options["action"] = "store_true"
        elif field.default_factory is list:
            options |= {"action": "extend", "nargs": "+"}
        else:
            options["type"] = reads(parse_bytes) if field.name.endswith(("_bytes", "_tree_size")) else kind
        if field.name in ROUTE_SECRETS and (keys := os.environ.get(f"SGLA_{field.name.upper()}", "").split()):
            options["default"] = keys if field.default_factory is list else keys[0]
        default = None if field.default is msgspec.NODEFAULT else field.default
        names = [f"--{field.name.replace('_', '-')}", *(["--worker-urls"] if field.name == "worker" else [])]
        parser.add_argument(*names, dest=field.name, help=_help(doc.description, default), **options)


# What each command is for, and what adds its flags.
BUILT: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("serve a model over the OpenAI API", _add_config),
    "route": ("pass requests on to several servers, each to the one that answers soonest", _add_route),
    "chat": ("talk to a model in the terminal, in this process or through a server", _add_chat),
    "bench": ("load a server and measure it; one JSON object a line", _add_bench),
    "eval": ("measure a model on tasks of lm_eval", _add_eval),
    "run-batch": ("answer the requests of a file, without a server", _add_run_batch),
    "doctor": ("show what of this machine will be used and what is missing", _add_downloads),
    "health": ("say whether the server on this machine is ready", _add_health),
    "replay": ("play a step log again, or send dumped requests to a server", _add_replay),
    "pull": ("download a model", _add_pull),
    "quantize": ("write a checkpoint whose linear layers have few bits", _add_quantize),
    "list": ("show the models on this disk", _add_downloads),
    "rm": ("delete models from this disk", _add_rm),
    "launch": ("start a coding agent that uses a running server", _add_launch),
    "completion": ("print a script that completes flags in a shell", _add_completion),
    "debug": ("compare a model's layers with transformers' or another run's", _add_debug),
    "explain": ("show every setting with its reason, and the memory it takes", _add_explain),
}
