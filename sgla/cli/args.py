"""The command line, generated from ``Config``: one flag per field."""

from __future__ import annotations

import argparse
import difflib
import functools
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from sgla import __version__
from sgla.cli.settings import parse_bytes
from sgla.config import ALIASES, Config
from sgla.errors import ConfigError

GROUPS = {
    "model": "model",
    "device": "device",
    "max_running_requests": "scheduling and cache",
    "host": "server",
}
ARGUMENTS = {"bench": "[options]", "doctor": "[options]", "replay": "FILE [options]"}
EPILOG = (
    "SGLang's and vLLM's spellings, such as --tp-size, --max-model-len or --max-num-seqs, are understood too. "
    "docs/ has the reasons behind the settings; 'sgla explain' shows what they resolve to."
)


class Parser(argparse.ArgumentParser):
    """No abbreviated flags, and errors of one line instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse; ``flags`` holds the fields of Config that were given, where a command takes them. Exits with 2 on a wrong flag."""
    parser = build()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(args.parser, unknown)
    if "model_argument" not in args:
        return args
    fields = [name for name in Config.__struct_fields__ if name in args]
    args.flags = {name: vars(args).pop(name) for name in fields}
    model = args.model_argument
    if model is not None and args.flags.setdefault("model", model) != model:
        raise ConfigError(f"two models given: {model} and --model {args.flags['model']}", param="model")
    return args


def build() -> Parser:
    """The parser of ``sgla`` with its commands."""
    parser = Parser(prog="sgla", description="An inference server for open-weight language models.")
    parser.add_argument("--version", action="version", version=f"sgla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _command(commands, "serve", "serve a model over the OpenAI API")
    _add_config(serve)
    chat = _command(commands, "chat", "talk to a model in the terminal, in this process or through a server")
    _add_chat(chat)
    _add_config(chat, groups=("model", "device", "scheduling and cache"))
    _add_bench(_command(commands, "bench", "load a server and measure it; one JSON object a line"))
    doctor = _command(commands, "doctor", "show what of this machine will be used and what is missing")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    _add_replay(_command(commands, "replay", "play a step log again, or send dumped requests to a server"))
    explain = _command(commands, "explain", "show every setting with its reason, and the memory it takes")
    explain.add_argument("--json", action="store_true", help="machine-readable output")
    _add_config(explain)
    return parser


def _command(commands: Any, name: str, help: str) -> Parser:
    parser = commands.add_parser(
        name,
        help=help,
        usage=f"sgla {name} {ARGUMENTS.get(name, '[MODEL] [options]')}",
        description=help[0].upper() + help[1:] + ".",
        epilog=EPILOG,
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_config(parser: argparse.ArgumentParser, groups: Sequence[str] = tuple(GROUPS.values())) -> None:
    """MODEL, --config and a flag for each field of Config in ``groups`` (api_key always: a client needs it too)."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags override it")
    hints, docs = typing.get_type_hints(Config, include_extras=True), descriptions()
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name, []).append(alias)
    group, title = parser.add_argument_group(), ""
    for field in msgspec.structs.fields(Config):
        if field.name in GROUPS:
            title = GROUPS[field.name]
            if title in groups:
                group = parser.add_argument_group(title)
        if title in groups or field.name == "api_key":
            kind = typing.get_args(hints[field.name])[0]
            options = _options(field.name, kind)
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(flag, help=_help(docs[field.name], field.default), **options)
            for alias in aliases.get(field.name, []):
                group.add_argument(f"--{alias}", help=argparse.SUPPRESS, **(options | {"dest": field.name}))


def _options(name: str, kind: Any) -> dict[str, Any]:
    """argparse keywords for a field's type: Literal, bool, list[str], sizes, numbers, strings."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
    if type(None) in typing.get_args(kind):
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        return options | {"choices": typing.get_args(kind)}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if name.endswith("api_key"):
        return options | {"action": "append", "metavar": "KEY"}
    if typing.get_origin(kind) is list:
        return options | {"nargs": "+", "metavar": "NAME"}
    if typing.get_origin(kind) is dict:
        return options | {"type": json_object, "metavar": "JSON"}
    if name.endswith("_bytes"):
        return options | {"type": size, "metavar": "SIZE"}
    return options | {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def size(text: str) -> int:
    """argparse type of a size in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def json_object(text: str) -> dict[str, Any]:
    """argparse type of a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text[:99]!r} is no JSON object: {error}") from error


@functools.cache
def descriptions() -> dict[str, str]:
    """The description of every field of Config."""
    hints = typing.get_type_hints(Config, include_extras=True)
    return {name: typing.get_args(hints[name])[1].description for name in Config.__struct_fields__}


def _help(description: str, default: Any) -> str:
    text = description.replace("%", "%%")
    return text if default in (None, {}) or default is msgspec.NODEFAULT else f"{text} (default: {default})"


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> typing.NoReturn:
    wrong = next((word for word in unknown if word.startswith("-")), unknown[0]).split("=")[0]
    flags = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(wrong.replace("_", "-"), flags, n=1)
    parser.error(f"unknown argument {wrong}" + (f"; did you mean {close[0]}?" if close else ""))


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument("--url", metavar="URL", help="a running server, for example http://127.0.0.1:30000")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer, tokens (default: up to the context)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 always takes the likeliest token")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help="from /step_log or --crash-dump-folder; or, with --url, from --dump-requests",
    )
    add("--url", metavar="URL", help="send the requests to this server")
    add("--api-key", help="sent as a bearer token")
    add(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="1 keeps the pace of the recording, 2 is twice as fast, 0 sends all at once (default: %(default)s)",
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000", help="an OpenAI-style server (default: %(default)s)")
    add("--api-key", help="sent as a bearer token")
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
        type=float,
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
        type=float,
        metavar="X",
        help="requests that arrive each second, Poisson (default: as fast as they go)",
    )
    add("--text", action="store_true", help="send prompts as text, for servers that take no token ids")
    add("--temperature", type=float, default=0.0, metavar="X", help="default: %(default)s")
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
