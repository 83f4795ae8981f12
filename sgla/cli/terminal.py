"""The conversation on a terminal:
lines with history by prompt_toolkit, answers as Markdown by rich while they come."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from sgla.cli.conversation import COMMANDS
from sgla.errors import ConfigError
from sgla.homes import below_home

REFRESH = 8  # a second
# A terminal obeys these; nothing that a model writes may reach it.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FENCE = re.compile(r"^\s{0,3}(```|~~~)", re.MULTILINE)


def history_file() -> Path:
    """``$XDG_STATE_HOME/sgla/chat_history``, else below ``~/.local/state``."""
    return below_home("XDG_STATE_HOME", ".local", "state") / "sgla" / "chat_history"


def open_history() -> History:
    """The lines of earlier conversations, for this user alone;
    those of this one, if there is no place for a file."""
    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except (OSError, ConfigError):
        return InMemoryHistory()
    return FileHistory(str(path))


def line_reader() -> PromptSession[str]:
    """Enter sends, also one that was typed ahead; Alt-Enter and what is pasted make several lines."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=open_history(),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
    )


class Screen:
    """Shows one answer after the other."""

    def __init__(self, **options: Any) -> None:
        self.console = Console(highlight=False, **options)

    def say(self, text: str) -> None:
        self.console.print(CONTROLS.sub("", text), style="dim", markup=False)

    def answer(self, pieces: Iterator[str]) -> None:
        """Print Markdown as it comes. Blocks that are complete stay; only what follows them is drawn again
        and again, so an answer may be longer than the screen."""
        rest = ""
        with Live(console=self.console, refresh_per_second=REFRESH, transient=True) as live:
            try:
                for piece in pieces:
                    rest += CONTROLS.sub("", piece)
                    whole, rest = complete_blocks(rest)
                    if whole:
                        live.update("")
                        self.console.print(Markdown(whole))
                    live.update(Markdown(rest))
            finally:
                live.update("")
        if rest.strip():
            self.console.print(Markdown(rest))


def complete_blocks(text: str) -> tuple[str, str]:
    """``text`` in two: up to the last empty line outside of fenced code, and the rest."""
    at = len(text)
    while (at := text.rfind("\n\n", 0, at)) >= 0:
        if len(FENCE.findall(text[:at])) % 2 == 0 and text[:at].strip():
            return text[: at + 2], text[at + 2 :]
    return "", text
