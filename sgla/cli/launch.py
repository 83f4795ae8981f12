"""``sgla launch``: a coding agent against a running server. Agents are told of the server by variables and
arguments where they can be, so that no file changes; what has to be written is shown before, with a copy kept
of what was there."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgla import homes
from sgla.cli.chat import Remote
from sgla.cli.settings import changing_files
from sgla.errors import ConfigError, SglaError
from sgla.hub.source import merged

COPY = ".sgla-backup-"
MADE = ".sgla-made-"  # marks a file that was not there before
ANSWER = 4  # a part of the context, at most
PATIENCE = 3600  # seconds for an answer: a CPU needs minutes to read a long prompt for the first time
NO_KEY = "none"  # clients want a key, and a server without keys takes any


class Target(NamedTuple):
    """The server. ``context``: tokens, if it tells."""

    url: str
    model: str
    key: str
    context: int | None


class Agent(NamedTuple):
    """``variables`` and ``arguments`` tell the agent of a server for one run. ``settings``: a JSON file of
    its own, and what belongs there, to tell it for good; with ``needed`` it has no other way."""

    name: str
    binary: str
    install: str
    least: int  # tokens of context that its prompt and tools leave room in
    variables: Callable[[Target], dict[str, str]]
    arguments: Callable[[Target], list[str]]
    settings: Callable[[Target], tuple[Path, dict[str, Any]]]
    needed: bool = False


def home(variable: str, *parts: str) -> Path:
    """A folder of settings: what the variable names, else below the user's home."""
    named = os.environ.get(variable)
    return Path(named) if named else homes.home().joinpath(*parts)


def claude_variables(target: Target) -> dict[str, str]:
    """It assumes a context of its own for a model that it does not know."""
    tiers = ("OPUS", "SONNET", "HAIKU")
    sizes = {"CONTEXT": target.context, "OUTPUT": target.context // ANSWER} if target.context else {}
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",  # goes before the token
        "ANTHROPIC_MODEL": target.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in tiers},
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        **{f"CLAUDE_CODE_MAX_{what}_TOKENS": str(max(1, size)) for what, size in sizes.items()},
        "API_TIMEOUT_MS": str(PATIENCE * 1000),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def claude_arguments(target: Target) -> list[str]:
    """Variables in the user's settings go before those of the process;
    settings of the command line before both. The key stays out of it."""
    variables = {
        name: value for name, value in claude_variables(target).items() if name != "ANTHROPIC_AUTH_TOKEN"
    }
    return ["--settings", json.dumps({"env": variables})]


def codex_provider(target: Target) -> dict[str, Any]:
    return {
        "name": "sgla",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": "SGLA_API_KEY",
    }


def codex_options(target: Target) -> dict[str, Any]:
    """Keys of its configuration, with dots."""
    options: dict[str, Any] = {"model": target.model, "model_provider": "sgla", "web_search": "disabled"}
    if target.context:
        options["model_context_window"] = target.context
    return options | {f"model_providers.sgla.{name}": value for name, value in codex_provider(target).items()}


def codex_arguments(target: Target) -> list[str]:
    return [
        word
        for name, value in codex_options(target).items()
        for word in ("-c", f"{name}={json.dumps(value)}")
    ]


def opencode_settings(target: Target) -> dict[str, Any]:
    model: dict[str, Any] = {"name": target.model}
    if target.context:
        model["limit"] = {"context": target.context, "output": max(1, target.context // ANSWER)}
    options = {"baseURL": f"{target.url}/v1", "apiKey": "{env:SGLA_API_KEY}"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "sgla",
        "options": options,
        "models": {target.model: model},
    }
    return {
        "provider": {"sgla": provider},
        "model": f"sgla/{target.model}",
        "small_model": f"sgla/{target.model}",
    }


def qwen_variables(target: Target) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model}


def pi_settings(target: Target) -> dict[str, Any]:
    model: dict[str, Any] = {"id": target.model}
    if target.context:
        model |= {"contextWindow": target.context, "maxTokens": max(1, target.context // ANSWER)}
    compat = {"supportsDeveloperRole": False, "supportsReasoningEffort": False}
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": "$SGLA_API_KEY",
        "compat": compat,
        "models": [model],
    }
    return {"providers": {"sgla": provider}}


AGENTS = {
    "claude": Agent(
        "Claude Code",
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        32768,
        claude_variables,
        claude_arguments,
        lambda target: (
            home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
            {"env": claude_variables(target)},
        ),
    ),
    "codex": Agent(
        "Codex",
        "codex",
        "npm install -g @openai/codex",
        16384,
        lambda target: {"SGLA_API_KEY": target.key},
        codex_arguments,
        lambda target: (home("CODEX_HOME", ".codex") / "sgla.config.toml", codex_options(target)),
    ),
    "opencode": Agent(
        "OpenCode",
        "opencode",
        "npm install -g opencode-ai",
        16384,
        lambda target: {
            "SGLA_API_KEY": target.key,
            "OPENCODE_CONFIG_CONTENT": json.dumps(opencode_settings(target)),
        },
        lambda target: [],
        lambda target: (
            home("XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json",
            opencode_settings(target),
        ),
    ),
    "qwen": Agent(
        "Qwen Code",
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        16384,
        qwen_variables,
        lambda target: ["--auth-type", "openai", "--model", target.model],
        lambda target: (
            home("QWEN_HOME", ".qwen") / "settings.json",
            {
                "security": {"auth": {"selectedType": "openai"}},
                "model": {"name": target.model},
                "modelProviders": {
                    "openai": [{"id": target.model, "envKey": "SGLA_API_KEY", "baseUrl": f"{target.url}/v1"}]
                },
            },
        ),
    ),
    "pi": Agent(
        "Pi",
        "pi",
        "npm install -g @earendil-works/pi-coding-agent",
        8192,
        lambda target: {"SGLA_API_KEY": target.key},
        lambda target: ["--provider", "sgla", "--model", target.model],
        lambda target: (home("PI_CODING_AGENT_DIR", ".pi", "agent") / "models.json", pi_settings(target)),
        needed=True,
    ),
}


def run(args: argparse.Namespace) -> int:
    """The agent's exit code; 0 where none is started."""
    agent = AGENTS[args.agent]
    if args.restore:
        return restore(agent.settings(Target("", "", NO_KEY, None))[0], args.yes)
    target = find(args.url, args.api_key, args.model)
    say(f"{target.model} on {target.url}" + (f", context {target.context} tokens" if target.context else ""))
    if target.context and target.context < agent.least:
        say(
            f"warning: {agent.name} needs a context of about {agent.least} tokens for its prompt and tools; "
            "this one is too short (sgla serve --context-length, or a model with a longer one)"
        )
    variables, arguments = agent.variables(target), agent.arguments(target)
    if agent.needed or args.config_only:
        path, settings = agent.settings(target)
        if not write(path, settings, args.yes, show_only=args.print, key=target.key):
            return 0 if args.print else 1
        if args.config_only:
            say(f"start it with: {with_settings(args.agent, agent, target)}")
            return 0
    else:
        say("no file is changed; for this run it is told by:")
    for name, value in variables.items():
        say(f"  {name}={'***' if value == target.key != NO_KEY else value}")
    command = [agent.binary, *arguments, *args.arguments]
    say(f"  {shlex.join(command)}")
    if args.print:
        return 0
    if shutil.which(agent.binary) is None:
        raise ConfigError(
            f"{agent.name} is not installed (there is no '{agent.binary}'); install it with: {agent.install}"
        )
    return start(command, os.environ | variables)


def with_settings(name: str, agent: Agent, target: Target) -> str:
    """How the agent is started by hand once its settings are written."""
    words = [
        agent.binary,
        *(["--profile", "sgla"] if name == "codex" else []),
        *(agent.arguments(target) if agent.needed else []),
    ]
    key = "SGLA_API_KEY=... " if "SGLA_API_KEY" in agent.variables(target) or name == "qwen" else ""
    return key + " ".join(words)


def say(text: str) -> None:
    print(text, file=sys.stderr)


def find(url: str, key: str | None, model: str | None) -> Target:
    """What the server says of itself. Raises SglaError."""
    remote = Remote(url, key, model, {})
    models = remote.models()
    if model is not None and model not in models:
        raise ConfigError(f"the server has no model {model!r}; it has {', '.join(models)}", param="model")
    chosen = models[model] if model is not None else next(iter(models.values()))
    context = chosen.get("max_model_len")
    return Target(remote.url, str(chosen["id"]), key or NO_KEY, context if isinstance(context, int) else None)


def start(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Ctrl-C is the agent's."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            list(command), env=dict(environ), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


# files


def write(path: Path, settings: dict[str, Any], yes: bool, show_only: bool, key: str) -> bool:
    """Put ``settings`` into a file, beside what is there; False if the user does not want it.
    Raises ConfigError."""
    before = read(path)
    after = as_toml(settings) if path.suffix == ".toml" else as_json(path, before, settings)
    if before == after:
        say(f"{path} says so already")
        return True
    lines = difflib.unified_diff(
        (before or "").splitlines(),
        after.splitlines(),
        str(path) if before is not None else "/dev/null",
        str(path),
        lineterm="",
    )
    for line in lines:
        say(line.replace(key, "***") if key != NO_KEY else line)
    if show_only or not agreed(f"write {path}?", yes):
        return False
    with changing_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = reserve(path, MADE if before is None else COPY)
        if before is not None:
            shutil.copy2(path, copy)
            say(f"a copy of what was there is {copy}; 'sgla launch AGENT --restore' gives it back")
        place = path.resolve()
        new = place.with_name(f"{place.name}.sgla-new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600, exist_ok=False)
        new.write_text(after)
        if before is not None and (key == NO_KEY or key not in after):
            shutil.copymode(place, new)
        os.replace(new, place)
    return True


def reserve(path: Path, kind: str) -> Path:
    """A new file beside ``path``, named after this second, or the next one that is free."""
    at = int(time.time())
    while True:
        copy = path.with_name(f"{path.name}{kind}{time.strftime('%Y%m%d-%H%M%S', time.localtime(at))}")
        try:
            copy.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            at += 1
        else:
            return copy


def restore(path: Path, yes: bool) -> int:
    """Give back the newest copy, or remove a file that was not there before."""
    found = [*path.parent.glob(f"{path.name}{COPY}*"), *path.parent.glob(f"{path.name}{MADE}*")]
    if not found:
        raise SglaError(f"there is no copy of {path} to give back")
    newest = max(found, key=lambda one: one.name[-15:])
    made = MADE in newest.name
    if not agreed(f"remove {path}?" if made else f"put {newest} in the place of {path}?", yes):
        return 1
    with changing_files():
        if made:
            path.unlink(missing_ok=True)
            newest.unlink()
        else:
            os.replace(newest, path.resolve())
    return 0


def agreed(question: str, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} there is no terminal to ask on; nothing is changed without --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def as_json(path: Path, before: str | None, settings: dict[str, Any]) -> str:
    try:
        known = json.loads(before) if before and before.strip() else {}
    except ValueError as error:
        raise ConfigError(
            f"{path} is not plain JSON ({error}), so nothing is written; "
            f"put this into it: {json.dumps(settings)}"
        ) from error
    if not isinstance(known, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return json.dumps(merged(known, settings), indent=2, ensure_ascii=False) + "\n"


def as_toml(settings: dict[str, Any]) -> str:
    """A file of our own: strings and numbers under keys with dots."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
