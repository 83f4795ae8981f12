"""``sgla chat``: a conversation in the terminal,
through a server (``--url``) or with the model in this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from sgla.cli.conversation import Backend, Conversation, Leave, Messages, checked
from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import complain, load_config, reason
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.hub.demo import about, with_demo
from sgla.streams import decode_event

if TYPE_CHECKING:
    from sgla import Engine

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
ENDS = {"length": "ended by max_tokens", "repetition": "ended because it repeated itself"}


class Remote:
    """A server with ``/v1/chat/completions``."""

    def __init__(self, url: str, key: str | None, model: str | None, options: dict[str, Any]) -> None:
        self.url = url
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self.finish: str | None = None
        local = urllib.parse.urlsplit(self.url).hostname in LOOPBACK
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        self.name = model or next(iter(self.models()))
        info = self._info()
        self.options = info.get("chat_params", {}) | options
        self.about = about(str(info.get("model_path")))

    def models(self) -> dict[str, dict[str, Any]]:
        """What it lists, by their names."""
        with self._open("/v1/models") as response:
            return {entry["id"]: entry for entry in json.load(response)["data"]}

    def _info(self) -> dict[str, Any]:
        """What a server of this kind tells of itself; nothing of another one."""
        try:
            with self._open(f"/get_model_info?model={urllib.parse.quote(self.name)}") as response:
                info = json.load(response)
        except ConfigError:
            raise
        except (SglaError, ValueError):
            return {}
        return info if isinstance(info, dict) and "chat_params" in info else {}

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self.headers)
            return self._opener.open(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise SglaError(f"{self.url}: {error_text(error.read()) or error.reason}") from error
        except urllib.error.URLError as error:
            raise ConfigError(
                f"no answer from {self.url}: {reason(error.reason)}; start one with 'sgla serve'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: {error}") from error

    def stream(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True} | self.options
        self.finish = None
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]" or not line.startswith(b"data:"):
                    continue
                message = decode_event(data)
                if message is None or message.error:
                    raise SglaError(error_text(data))
                for choice in message.choices or []:
                    self.finish = choice.finish_reason or self.finish
                    yield choice.output


def error_text(body: bytes) -> str:
    """The message of an OpenAI-style error body, else the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.decode(errors="replace").strip()


class Local:
    """The engine in this process."""

    def __init__(self, engine: Any, options: dict[str, Any]) -> None:
        self.engine = engine
        self.name = engine.config.model
        self.about = about(engine.config.model)
        self.options = engine.chat_params | options
        self.finish: str | None = None

    def stream(self, messages: Messages) -> Generator[str, None, None]:
        if not all(isinstance(message["content"], str) for message in messages):
            raise SglaError("pictures go to a server: 'sgla serve MODEL', and 'sgla chat --url URL'")
        sampling = self.engine.sampling(**self.options)
        events: Iterator[Any] = self.engine.stream(messages=messages, sampling=sampling)
        for event in events:
            self.finish = event.finish
            yield event.text


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    names = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    options = {name: value for name, value in names.items() if value is not None}
    for name, value in options.items():
        try:
            checked(name, value)
        except ValueError as error:
            raise ConfigError(f"--{error}".replace("_", "-", 1), param=name) from error
    if args.url:
        return talk(
            Remote(args.url, next(iter(config.api_key), None), args.flags.get("model"), options), args.system
        )
    with with_demo(config, complain, _loaded) as engine:
        return talk(Local(engine, options), args.system)


def _loaded(config: Config) -> Engine:
    from sgla import Engine

    progress = ProgressPrinter()
    fields = {name: getattr(config, name) for name in Config.__struct_fields__}
    try:
        return Engine(**fields, on_progress=progress)
    finally:
        progress.close()


def talk(backend: Backend, system: str | None = None) -> int:
    """A conversation, to the end of stdin. 1 if a request has failed and nobody has typed it."""
    conversation = Conversation(backend, system)
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return talk_on_terminal(conversation)
    return talk_plainly(conversation)


def talk_plainly(conversation: Conversation) -> int:
    """Answers and what commands say go to stdout, nothing else."""
    typed, failed = sys.stdin.isatty(), False
    while True:
        try:
            line = input("> " if typed else "").strip()
            if line.startswith("/"):
                print(conversation.command(line))
            elif line and not ask(conversation, line, write, lambda text: print(f" [{text}]")):
                failed = not typed
        except (EOFError, Leave):
            return int(failed)
        except KeyboardInterrupt:
            print()


def talk_on_terminal(conversation: Conversation) -> int:
    from sgla.cli.terminal import Screen, line_reader

    screen, reader, backend = Screen(), line_reader(), conversation.backend
    screen.say(f"{backend.name}. /help lists the commands, Ctrl-D leaves." + f" {backend.about}".rstrip())
    while True:
        try:
            line = reader.prompt("> ").strip()
            if line.startswith("/"):
                screen.say(conversation.command(line))
            elif line:
                ask(conversation, line, screen.answer, screen.say)
                if backend.finish in ENDS:
                    screen.say(f"[{ENDS[backend.finish]}]")
        except (EOFError, Leave):
            return 0
        except KeyboardInterrupt:
            pass


def write(pieces: Iterator[str]) -> None:
    for text in pieces:
        print(text, end="", flush=True)
    print()


def ask(
    conversation: Conversation, line: str, show: Callable[[Iterator[str]], None], say: Callable[[str], None]
) -> bool:
    """Have the answer shown as it comes. Both belong to the conversation then, unless the request fails
    (False); if Ctrl-C stops it, what came of it does."""
    conversation.say(line)
    parts: list[str] = []
    stream = conversation.backend.stream(conversation.messages)
    try:
        show(kept(stream, parts))
    except KeyboardInterrupt:
        say("stopped")
    except SglaError as error:
        print(f"\nsgla: {error}", file=sys.stderr)
        conversation.messages.pop()
        return False
    finally:
        stream.close()
    conversation.messages.append({"role": "assistant", "content": "".join(parts)})
    return True


def kept(stream: Iterator[str], parts: list[str]) -> Iterator[str]:
    """``stream``, of which ``parts`` keeps a copy. Raises SglaError where the server cannot be read, so that
    an OSError is one of the output."""
    try:
        for text in stream:
            parts.append(text)
            yield text
    except OSError as error:
        raise SglaError(str(error)) from error
