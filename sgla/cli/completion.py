"""``sgla completion``: a script that completes commands, flags and their values in a shell, made by shtab."""

from __future__ import annotations

import argparse

from sgla.cli.args import build

FILES = {"model_argument", "model", "tokenizer", "file"}  # beside those with the metavar FILE


def run(args: argparse.Namespace) -> int:
    import shtab

    parser = build()
    for action in _actions(parser):
        if action.metavar == "FILE" or action.dest in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Of the parser and of those of its commands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for command in action.choices.values() for inner in command._actions]
    return found
