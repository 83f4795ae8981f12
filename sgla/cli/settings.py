"""``Config`` from flags, the environment and a YAML file, in this order;
every mistake is a ConfigError that names its place."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sgla.cli.aliases import ALIASES, VALUES, VARIABLES, Alias, Always, Fields, Switch, Word, refusal
from sgla.config import SECRETS, TOOL_TOKEN, Config
from sgla.errors import ConfigError
from sgla.homes import expanded
from sgla.validation import Range, fault, parse_bytes, root

PATHS = (  # others may be names, and begin with ~ until they are read
    *("state_path", "dump_requests", "profile_folder", "allowed_media_path"),
    *("crash_dump_folder", "dist_secret_file"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
)
FOLDERS = "lora_folders", "weight_folders"
COUNTS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
TOKENS = {"context_length", "step_tokens"}  # numbers that people write as 32k
SWITCHES = {
    word: value
    for value, words in ((True, "1 true yes on"), (False, "0 false no off"))
    for word in words.split()
}
PREFIX = "SGLA_"
# Variables that are no setting of Config.
ELSEWHERE = {"SGLA_CONFIG", "SGLA_CPU_ISA", "SGLA_REMOTE_KEY", "SGLA_URL"}
# What Kubernetes sets in a namespace with a service named sgla; SGLA_PORT is then a URL.
KUBERNETES = re.compile(r"SGLA_(SERVICE_(HOST|PORT)\w*|PORT_\d+_\w+)")
Say = Callable[[str], None]


def parse_count(text: str) -> int:
    """``"32k"`` -> 32,000, ``"32K"`` -> 32,768, as vLLM reads them. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmM]?)", text)
    if match is None or (not match[2] and "." in text):
        raise ValueError(f"'{text}' is no number of tokens; write 4096, 32k (32,000) or 32K (32,768)")
    return round(float(match[1]) * COUNTS[match[2]]) if match[2] else int(text)


def parse_url(text: str) -> str:
    """``"127.0.0.1:30000"``, ``"http://127.0.0.1:30000/v1/"`` -> ``"http://127.0.0.1:30000"``.
    Raises ValueError."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if known and not re.search(r"[\s\x00-\x1f\x7f]", url) and (parts.path + parts.query).isascii():
            return url
    except ValueError:
        pass
    raise ValueError(f"'{text}' is no server's address; write http://HOST:PORT")


def parse_number(fits: Range, text: str) -> float:
    """Raises ValueError."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) in fits:
            return value
    raise ValueError(f"'{text}' is no number {fits}")


def reason(error: BaseException | str) -> str:
    """Why a server could not be asked, in the system's words where it has some."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number and number > 0 else str(error)


def parse_list(name: str, text: str) -> list[str]:
    """Values between commas, or a JSON list. An API key may hold commas, so it is one value; an adapter may
    be an object."""
    objects = name == "lora_modules"
    if objects and text.startswith("{"):
        return [_module(parse_object(text))]
    if text.startswith("["):
        try:
            found = msgspec.json.decode(text, type=list[str | dict[str, Any]] if objects else list[str])
        except msgspec.DecodeError as error:
            what = "strings and objects" if objects else "strings"
            raise ValueError(f"it begins as a JSON list of {what} and is none") from error
        return [each if isinstance(each, str) else _module(each) for each in found]
    return [text] if name in SECRETS else [part.strip() for part in text.split(",")]


def _module(given: dict[str, Any]) -> str:
    """An adapter as vLLM and SGLang have it in JSON, as NAME=FOLDER. Raises ValueError."""
    name, folder = (given.get(key, given.get(f"lora_{key}")) for key in ("name", "path"))
    if given.get("pinned"):
        raise ValueError("pinned: POST /load_lora_adapter pins an adapter; leave it out")
    if not (isinstance(name, str) and isinstance(folder, str)):
        raise ValueError("an object has name and path, or lora_name and lora_path; NAME=FOLDER is the same")
    return f"{name}={folder}"


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{text[:99]!r} is no JSON object: {error}") from error


@functools.cache
def kinds() -> dict[str, Any]:
    """The type of every field of Config:
    Literal, bool, int, float, str, list[str] or dict; None is left out of it."""
    found = {}
    for name, hint in typing.get_type_hints(Config, include_extras=True).items():
        kind = typing.get_args(hint)[0]
        found[name] = typing.get_args(kind)[0] if type(None) in typing.get_args(kind) else kind
    return found


def understood(name: str, text: str, say: Say) -> Any:
    """``text``, or where it is a peer's word for a value of field ``name``, that value, of which ``say`` is
    told. Raises ValueError, with what to use, for a word of what there is not."""
    word = VALUES.get(name, {}).get(text.lower())
    if word is None:
        own = typing.get_args(kinds()[name])
        return text.lower() if text not in own and text.lower() in own else text
    if not isinstance(word, Word):
        raise ValueError(f"{text} is not supported: {word}")
    flag = "--" + name.replace("_", "-")
    value = "as if it were left out" if word.value is None else f"{flag} {word.value}"
    say(f"{flag} {text} is {value} here" + (f": {word.hint}" if word.hint else ""))
    return word.value


def value_of(name: str, text: str, say: Say = lambda text: None) -> Any:
    """A value of field ``name`` that is written as ``text``, in an alias,
    the environment or a string of a file; ``say`` is told of a peer's word. Raises ValueError."""
    kind = kinds()[name]
    text = understood(name, text, say)
    if text is None:
        return None
    if typing.get_origin(kind) is list:
        return parse_list(name, text)
    if typing.get_origin(kind) is dict:
        return parse_object(text)
    if name.endswith("_bytes"):
        return parse_bytes(text)
    if name in TOKENS:
        return parse_count(text)
    if kind is bool:
        if text.lower() not in SWITCHES:
            raise ValueError(f"'{text}' is neither true nor false")
        return SWITCHES[text.lower()]
    if typing.get_origin(kind) is typing.Literal and text not in typing.get_args(kind):
        raise ValueError(f"'{text}' is none of {', '.join(typing.get_args(kind))}")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            raise ValueError(f"'{text}' is no {'whole number' if kind is int else 'number'}") from error
    return text


def alias_values(name: str, text: str | bool | list[str]) -> dict[str, Any]:
    """The fields and values that a peer's flag ``name`` means with ``text`` (True: as a switch; several
    words stay as they are); none if it is so in any case. Raises ValueError."""
    alias = ALIASES[name]
    if isinstance(text, list):
        assert isinstance(alias, Alias)
        return {alias.field: text}
    if isinstance(alias, Switch):
        return {alias.field: alias.value} if text is True else {}
    if isinstance(alias, Always):
        values = alias.values or (True, False)
        if text not in values and not (text is True and "on" in values):  # YAML's on is true
            raise ValueError(f"{text} is not supported: {alias.hint}")
        return {}
    if isinstance(text, bool):
        raise ValueError("it takes a value")
    if isinstance(alias, Fields):
        return _fields(alias, parse_object(text))
    return {alias.field: _value(alias, text)}


def _value(alias: Alias, text: str) -> Any:
    """Raises ValueError."""
    if text in alias.words:
        return alias.words[text]
    if alias.others:
        raise ValueError(f"{text} is not supported: {alias.others}")
    if not alias.unit:
        return value_of(alias.field, text)
    try:
        return int(float(text) * alias.unit)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"'{text}' is no number") from error


def _fields(alias: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError."""
    key, inside = alias.inner or ("", None)
    known = {*alias.keys, *alias.free, key}
    if unknown := next((key for key in given if key not in known), None):
        raise ValueError(f"'{unknown}' is not supported; leave it out: {alias.hint}")
    found, within = {}, _inner(key, inside, given.get(key, {})) if inside else {}
    for key, each in alias.keys.items():
        if key in given:
            text = given[key] if isinstance(given[key], str) else json.dumps(given[key])
            try:
                found[each.field] = _value(each, text)
            except ValueError as error:
                also = f", nor of {', '.join(each.words)}" if each.words else ""
                raise ValueError(f"{key}: {error}{also}; {alias.hint}") from error
    bare = None if within else alias.bare.get(str(given.get(next(iter(alias.keys)))))
    if isinstance(bare, str):
        raise ValueError(f"{bare}; {alias.hint}")
    return found | within | ({bare.field: bare.value} if bare else {})


def _inner(key: str, alias: Fields, given: Any) -> dict[str, Any]:
    """Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError(f"{key} is no object")
    try:
        return _fields(alias, given)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def hint(name: str, meant: Mapping[str, Any]) -> str:
    """How a peer's flag ``name`` was understood; ``meant``: its ``alias_values``."""
    alias = ALIASES[name]
    if isinstance(alias, Always):
        return f"--{name} is not needed: {alias.hint}"
    if isinstance(alias, Fields):
        said = [spelled(Switch(field, value)) for field, value in meant.items() if value is not None]
        return f"--{name} is {' '.join(said) or 'not needed'} here; {alias.hint}"
    return f"--{name} is {spelled(alias)} here"


def spelled(alias: Alias | Switch) -> str:
    """The flag that it stands for."""
    flag = alias.field.replace("_", "-")
    if isinstance(alias, Alias):
        return f"--{flag} {' or '.join(alias.words.values())}" if alias.others else f"--{flag}"
    if isinstance(alias.value, bool):
        return f"--{flag}" if alias.value else f"--no-{flag}"
    return f"--{flag} {alias.value}"


def less_of(flag: str, value: Any, other: str, more: Any) -> Any:
    """The smaller one of two values of a setting by two flags, where a peer's two flags differ so; or
    None."""
    for one, less, most in ((flag, value, more), (other, more, value)):
        alias = ALIASES.get(one.removeprefix("--"))
        if isinstance(alias, Alias) and alias.beside and most == less + alias.beside:
            return less
    return None


def nearest(name: str) -> str:
    """``"; did you mean 'x'?"`` for the setting closest to ``name``, or nothing."""
    known = {field: field for field in Config.__struct_fields__}
    known |= {alias.replace("-", "_"): alias.replace("-", "_") for alias in ALIASES}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"; did you mean '{known[close[0]]}'?" if close else ""


def read_file(path: str, say: Say = lambda text: None) -> dict[str, Any]:
    """Fields and values of a ``--config`` file, whose keys are flags with ``_`` or ``-``;
    ``say`` is told about other servers' flags."""
    values = read_yaml("--config", expanded(path))
    if values is None:  # nothing but comments
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected lines of 'key: value'")
    found: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for key, value in values.items():
        flag = str(key).replace("_", "-")
        try:
            known = settings(str(key), value, say)
        except ValueError as error:
            raise ConfigError(f"--config {path}: {key}: {error}", param=str(key)) from error
        for name, value in known.items():
            other = flags.setdefault(name, flag)
            if found.setdefault(name, value) == value:
                continue
            found[name] = less_of(other, found[name], flag, value)
            if found[name] is None:
                raise ConfigError(
                    f"--config {path}: {key} sets {name}, which another key sets too", param=name
                )
    return found


def read_yaml(flag: str, path: Path) -> Any:
    """What the file says that ``flag`` names. Raises ConfigError, also where its first level has a key
    twice."""
    import yaml

    param = flag.removeprefix("--")
    try:
        text = path.read_text()
        top, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", param=param) from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Not UTF-8, a 32nd of May, a tag that a text does not fit, brackets in brackets without end.
        raise ConfigError(f"{flag} {path} is not YAML: {error}", param=param) from error
    keys = [key.value for key, _ in top.value] if isinstance(top, yaml.MappingNode) else []
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{flag} {path}: {twice} is given twice", param=param)
    return values


def settings(key: str, value: Any, say: Say) -> dict[str, Any]:
    """The fields and values of a line of a file. Raises ValueError."""
    name, flag = key.replace("-", "_"), key.replace("_", "-")
    written = value if isinstance(value, str | bool | None) else _text(value)
    if name in Config.__struct_fields__:
        if name == "lora_modules" and isinstance(value, list | dict):
            value = _text(value)  # it may have objects
        return {name: value_of(name, value, say) if isinstance(value, str) else value}
    if flag in ALIASES:
        meant = alias_values(flag, "" if written is None else written)
        if value is not False:
            say(hint(flag, meant))
        return meant
    if other := refusal(flag):
        if value is None or value is False or value in ("", [], {}):  # what it is without the line
            return {}
        raise ValueError(f"not supported: {other}")
    raise ValueError(f"unknown key{nearest(key)}")


def _text(value: Any) -> str:
    """What the value of a file is as a flag's. Raises ValueError for what YAML alone has, as dates."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("expected a text, a number, a list or an object of these; quote it") from error


def read_environment(environ: Mapping[str, str], say: Say) -> dict[str, Any]:
    """Fields and values of variables ``SGLA_...``;
    ``say`` is told about those that mean nothing, and about other servers'.

    A variable that is empty is as good as none, unless it is a key:
    a server that was to have one must not start without.
    """
    found: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if variable == "SGLA_USE_MODELSCOPE":
            if _variable(variable, "deterministic", text or "false", say):
                found.setdefault("model_source", "modelscope")
            continue
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX):
            instead = next((VARIABLES[peer] for peer in VARIABLES if fnmatchcase(variable, peer)), None)
            if instead and re.split(r"[ =]", instead)[0] not in environ:
                say(f"{variable} is not read; set {instead}")
        elif name in Config.__struct_fields__:
            if name == "port" and "://" in text:
                say("SGLA_PORT is ignored: it is a URL, as Kubernetes sets it for a service named sgla")
            elif text or name in SECRETS:
                found[name] = _variable(variable, name, text, say)
        elif (
            variable not in ELSEWHERE
            and not variable.startswith(TOOL_TOKEN)
            and not KUBERNETES.fullmatch(variable)
        ):
            close = difflib.get_close_matches(name, Config.__struct_fields__, n=1)
            meant = f"; did you mean {PREFIX}{close[0].upper()}?" if close else ""
            say(f"{variable} is no setting and is ignored{meant}")
    return found


def _variable(variable: str, name: str, text: str, say: Say) -> Any:
    if name in SECRETS:
        if not text.split():
            raise ConfigError(f"{variable} is empty; unset it to serve without a key", param=name)
        return text.split() if typing.get_origin(kinds()[name]) is list else text
    try:
        return value_of(name, text, say)
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}", param=name) from error


@contextlib.contextmanager
def changing_files() -> Iterator[None]:
    """What the system refuses about a file becomes a ConfigError that names its path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}; make it writable, or choose another place"
        ) from error


def complain(text: str) -> None:
    """One line for the user, beside the output."""
    print(f"sgla: {text}", file=sys.stderr)


def load_config(
    flags: Mapping[str, Any], path: str | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """The settings: ``flags`` (field names to values),
    else what ``environ`` says, else the file ``path`` or ``SGLA_CONFIG``."""
    path = path or environ.get("SGLA_CONFIG") or None
    given = read_environment(environ, complain) | dict(flags)
    values = (read_file(path, complain) if path else {}) | given
    try:
        return _as_meant(at_home(msgspec.convert(values, Config)))
    except msgspec.ValidationError as error:
        where, text = fault(error, Config)
        source = f"--config {path}: " if path and root(where) not in given else ""
        raise ConfigError(f"{source}{text}") from error


def at_home(config: Config) -> Config:
    """With ``~`` of the environment and of files as a shell has it. Raises ConfigError."""

    def full(path: Any) -> Any:
        return str(expanded(path)) if isinstance(path, str) and path.startswith("~") else path

    found = {name: full(getattr(config, name)) for name in PATHS}
    found |= {name: [full(path) for path in getattr(config, name)] for name in FOLDERS}
    modules = [each.partition("=") for each in config.lora_modules]
    found["lora_modules"] = [f"{name}{equals}{full(path)}" for name, equals, path in modules]
    return msgspec.structs.replace(config, **found)


def _as_meant(config: Config) -> Config:
    """llama.cpp's ``--parallel N``, which is another thing than ours, and SGLang's ``--dp N`` of attention by
    data, which says what ``--tp`` says."""
    if config.dp_attention and config.dp == config.tp:
        config = msgspec.structs.replace(config, dp=1)
    if not config.parallel.isdigit():
        return config
    complain(f"--parallel {config.parallel} is --max-running-requests {config.parallel} here")
    return msgspec.structs.replace(config, parallel="given", max_running_requests=int(config.parallel))
