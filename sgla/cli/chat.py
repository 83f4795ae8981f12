"""``sgla chat``: a conversation in the terminal, through a server (``--url``) or with the model in this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.streams import decode_event

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops the answer"
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
Messages = list[dict[str, Any]]


class Backend(Protocol):
    """Where answers come from. Closing the generator before its end cancels the request."""

    name: str

    def stream(self, messages: Messages) -> Generator[str, None, None]: ...


class Remote:
    """A server with ``/v1/chat/completions``."""

    def __init__(self, url: str, key: str | None, model: str | None, options: dict[str, Any]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self.options = options
        local = urllib.parse.urlsplit(self.url).hostname in LOOPBACK
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            return json.load(response)["data"][0]["id"]

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self.headers)
            return self._opener.open(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise SglaError(f"{self.url}: {error_text(error.read()) or error.reason}") from error
        except urllib.error.URLError as error:
            raise ConfigError(
                f"no answer from {self.url}: {error.reason}; start one with 'sgla serve'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: {error}") from error

    def stream(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True} | self.options
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]" or not line.startswith(b"data:"):
                    continue
                message = decode_event(data)
                if message is None or message.error:
                    raise SglaError(error_text(data))
                for choice in message.choices or []:
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
        self.sampling = engine.sampling(**options)

    def stream(self, messages: Messages) -> Generator[str, None, None]:
        events: Iterator[Any] = self.engine.stream(messages=messages, sampling=self.sampling)
        for event in events:
            yield event.text


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    names = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    options = {name: value for name, value in names.items() if value is not None}
    if args.url:
        return talk(
            Remote(args.url, next(iter(config.api_key), None), args.flags.get("model"), options), args.system
        )
    return _run_local(config, options, args.system)


def _run_local(config: Config, options: dict[str, Any], system: str | None) -> int:
    from sgla import Engine

    progress = ProgressPrinter()
    fields = {name: getattr(config, name) for name in Config.__struct_fields__}
    try:
        engine = Engine(**fields, on_progress=progress)
    finally:
        progress.close()
    with engine:
        return talk(Local(engine, options), system)


def talk(backend: Backend, system: str | None = None) -> int:
    """Read lines from stdin until its end. Answers and nothing else go to stdout."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history
        print(f"{backend.name}. {HELP}.")
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(backend, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(backend: Backend, messages: Messages) -> str | None:
    """Print the answer as it comes; what came of it if Ctrl-C stopped it; None if the request failed."""
    parts: list[str] = []
    stream = backend.stream(messages)
    try:
        for text in stream:
            parts.append(text)
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except (SglaError, OSError) as error:
        print(f"\nsgla: {error}", file=sys.stderr)
        return None
    finally:
        stream.close()
    return "".join(parts)
