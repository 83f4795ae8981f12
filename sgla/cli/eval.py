"""``sgla eval``: tasks of lm_eval on a model,
through a server that runs (``--url``) or one that is started for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import msgspec

from sgla.cli.bench import describe
from sgla.cli.settings import PREFIX, load_config
from sgla.cli.show import table
from sgla.config import Config
from sgla.errors import ConfigError, SglaError
from sgla.observe.machine import detect

# The server may have other defaults for its users; a task says what it wants, or greedy decoding.
PLAIN = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "no_repeat_ngram_size": 0}
TIMEOUT = 3600  # seconds for an answer, the wait for a place included
HEAD = ("task", "metric", "filter", "value", "stderr", "samples", "shots")


def run(args: argparse.Namespace) -> int:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"sgla eval needs lm_eval ({error}); install it with: pip install 'sgla[eval]'"
        ) from error
    config = load_config(args.flags, args.config)
    if args.concurrency < 1 or (args.limit is not None and args.limit <= 0):
        raise ConfigError("--concurrency must be at least 1, and --limit above 0")
    if args.url and (others := args.flags.keys() - {"model", "api_key"}):
        flag = min(others).replace("_", "-")
        raise ConfigError(f"--{flag} is for a server that is started; --url names one that runs", param=flag)
    manager = find_tasks(args.tasks, args.include_path)
    key = next(iter(config.api_key), None)
    with output_file(args.output) as file:
        if args.url:
            rows = evaluate(args, manager, args.url, args.flags.get("model"), key)
        else:
            with started(config) as url:
                rows = evaluate(args, manager, url, None, key)
        table(HEAD, [[cell(row[name]) for name in HEAD] for row in rows])
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def output_file(path: str | None) -> TextIO:
    """Raises ConfigError before anything is measured."""
    try:
        return open(path or os.devnull, "a")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}", param="output") from error


def cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


@contextlib.contextmanager
def started(config: Config) -> Iterator[str]:
    """The address of a server with these settings, which ends with the block.
    Raises SglaError if it does not start."""
    settings = msgspec.to_builtins(config)
    fields = {name: value for name, value in settings.items() if value is not None}
    # A variable would come before the file, in which it has been taken into account.
    others = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() in settings)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.yaml")
        file.write_text(json.dumps(fields))
        command = [sys.executable, "-m", "sgla", "serve", "--config", str(file)]
        command += ["--host", "127.0.0.1", "--port", "0", "--log-interval", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=others) as server:
            try:
                yield address(server)
            finally:
                server.terminate()


def address(server: subprocess.Popen[str]) -> str:
    """Where it listens, once it is ready. Raises SglaError if it ends before; it has said why."""
    url = ""
    for line in server.stdout or ():
        if line.startswith("listening on "):
            url = line.split()[2]
        elif line.startswith("ready in "):
            return url
    raise SglaError(f"the server did not start: exit code {server.wait()}")


def evaluate(
    args: argparse.Namespace, manager: Any, url: str, model: str | None, key: str | None
) -> list[dict[str, Any]]:
    """A row for each metric of each task, and of each group of tasks. Raises ConfigError for a server that is
    not there, and SglaError for requests that fail and data that cannot be had."""
    facts = asyncio.run(describe(url, key))
    model = model or facts["model"]
    try:
        results = measure(args, manager, url, model, key, facts["context"])
    except (aiohttp.ClientError, OSError) as error:
        raise SglaError(f"lm_eval ended: {type(error).__name__}: {error}") from error
    head = {
        "engine": facts["engine"],
        "version": facts["version"],
        "machine": detect().label(),
        "model": model,
        "limit": args.limit,
    }
    return [head | row for row in rows_of(results)]


def measure(
    args: argparse.Namespace, manager: Any, url: str, model: str, key: str | None, context: int | None
) -> Mapping[str, Any]:
    """What lm_eval finds out by ``/v1/completions``. The server tokenizes, if it can."""
    from lm_eval import simple_evaluate

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{url}/v1/completions",
            "model": model,
            "tokenizer_backend": "auto",
            "num_concurrent": args.concurrency,
            "timeout": TIMEOUT,
        }
        | ({"max_length": context} if context else {})
        | ({"auth_token": key, "header": {"Authorization": f"Bearer {key}"}} if key else {}),
        tasks=manager.match_tasks(args.tasks),
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        gen_kwargs=PLAIN | args.gen_kwargs,
        apply_chat_template=args.apply_chat_template,
        fewshot_as_multiturn=args.apply_chat_template,
        log_samples=False,
    )
    assert found is not None  # it is on rank 0 alone
    return found


def find_tasks(names: Sequence[str], folder: str | None) -> Any:
    """lm_eval's manager of tasks. To list its own takes 15 seconds, which is left out where ``folder`` has
    all that are named. Raises ConfigError for a name that nothing has."""
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--include-path: there is no folder {folder}", param="include_path")
    managers = [TaskManager(include_path=folder, include_defaults=False)] if folder else []
    if not managers or not all(managers[0].match_tasks([name]) for name in names):
        managers.append(TaskManager(include_path=folder))
    manager = managers[-1]
    for name in names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            more = f"; did you mean {close[0]}?" if close else "; --include-path FOLDER adds your own"
            raise ConfigError(f"--tasks: there is no task {name}{more}", param="tasks")
    return manager


def rows_of(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """lm_eval keeps them as ``{task: {"metric,filter": value, "metric_stderr,filter": value}}``."""
    for task, values in (results["results"] | results.get("groups", {})).items():
        for name, value in values.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            yield {
                "task": task,
                "metric": metric,
                "filter": None if chosen == "none" else chosen,
                "value": value,
                "stderr": error if isinstance(error, int | float) else None,
                "samples": results.get("n-samples", {}).get(task, {}).get("effective"),
                "shots": results.get("n-shot", {}).get(task),
            }
