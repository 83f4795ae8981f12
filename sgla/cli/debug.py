"""``sgla debug``: hidden states of each layer for a prompt, written down, or compared with transformers' or
with those of another run."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgla.cli.settings import changing_files, load_config
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.fetch import resolve_model
from sgla.hub.source import ModelSource
from sgla.loading.source import configured_source
from sgla.messages import RowSampling, Submit
from sgla.model.pooling import read_pooling
from sgla.resolve import resolve
from sgla.sched.core import Core
from sgla.sched.limits import Limits

LENGTH = 32  # random tokens, if no prompt is given
# Relative errors that rounding explains.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
NAT = 0.05  # what a logprob may differ by, in tolerances of bfloat16


class Run(NamedTuple):
    """``states``: by name, in the order in which they are computed, float32[tokens, width];
    ``next``: the most probable next token, and its logprob; ``dtype``: computed in."""

    tokens: list[int]
    states: dict[str, NDArray[np.float32]]
    next: tuple[int, float]
    dtype: str


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    if args.action == "dump":
        return dump(config, args)
    first, source = _read_or_compute(config, args)
    if args.other is not None:
        second, what = read(Path(args.other)), args.other
    elif source is None:
        raise ConfigError("two dumps are compared by 'sgla debug compare A.npz --with B.npz'", param="with")
    else:
        second, what = _reference(source, first.tokens), "transformers"
    return compare(first, second, what, args.tolerance)


def dump(config: Config, args: argparse.Namespace) -> int:
    source = configured_source(resolve_model(config), config)
    tokens = prompt_of(config, source, args)
    done = _reference(source, tokens) if args.reference else computed(config, source, tokens)
    path = Path(args.out)
    with changing_files():
        write(path, done)
    print(f"{path}: {len(done.states)} states of {len(done.tokens)} tokens, next token {done.next[0]}")
    return 0


def _read_or_compute(config: Config, args: argparse.Namespace) -> tuple[Run, ModelSource | None]:
    if config.model.endswith(".npz"):
        return read(Path(config.model)), None
    source = configured_source(resolve_model(config), config)
    tokens = read(Path(args.other)).tokens if args.other is not None else prompt_of(config, source, args)
    return computed(config, source, tokens), source


def prompt_of(config: Config, source: ModelSource, args: argparse.Namespace) -> list[int]:
    """The tokens of ``--prompt``, or ``--length`` random ones, none of which is the padding, whose embedding
    transformers zeroes."""
    if args.prompt is not None:
        from sgla.text.tokenizer import load_text

        return load_text(config, source)[0].encode(args.prompt)
    if args.length < 1:
        raise ConfigError("--length must be at least 1", param="length")
    vocab = source.vocab_size or 1
    tokens = np.random.default_rng(0).integers(0, vocab, args.length).tolist()
    return [(token + (token == source.config.get("pad_token_id"))) % vocab for token in tokens]


def computed(config: Config, source: ModelSource, tokens: list[int]) -> Run:
    """By a runner of this process, in one step. Raises ConfigError."""
    if read_pooling(source, config.task) is not None:
        raise ConfigError("sgla debug is for models that make text", param="model")
    size = max(64, len(tokens) + 1)
    changes: dict[str, Any] = {"context_length": size, "step_tokens": size, "max_running_requests": 1}
    if config.dtype == "auto" and config.device != "cuda":
        changes["dtype"] = "float32"
    config = resolve(msgspec.structs.replace(config, **changes), model=source.config).config
    if config.ranks > 1:
        raise ConfigError("sgla debug runs one rank; leave --tp and --pp out", param="tp")
    watched = importlib.import_module("sgla.worker.watched")
    runner = watched.watched(config, source, lambda progress: None)
    core = Core(
        Limits(
            slots=runner.facts.slots,
            groups=runner.facts.groups,
            page_size=runner.facts.page_size,
            context_len=runner.facts.context_len,
            step_tokens=runner.facts.step_tokens,
        )
    )
    asked: dict[str, Any] = {"tokens": tokens, "max_new": 1, "stop_ids": frozenset()}
    core.offer(Submit(rid="0", parent="0", index=0, sampling=RowSampling(logprobs=1), **asked), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    result = runner.execute(plan)
    if result.error is not None:
        raise ConfigError(f"the step failed: {result.error}", param="model")
    (delta,) = core.retire(result, 0.0)
    assert delta.logprobs
    return Run(tokens, runner.watch.taken(), (delta.tokens[0], delta.logprobs[0].logprob), config.dtype)


def _reference(source: ModelSource, tokens: list[int]) -> Run:
    watched = importlib.import_module("sgla.worker.watched")
    states, best, logprob = watched.reference(source, tokens)
    return Run(tokens, states, (best, logprob), "float32")


def write(path: Path, done: Run) -> None:
    with path.open("wb") as file:
        states: dict[str, Any] = {f"state {name}": state for name, state in done.states.items()}
        states |= {"tokens": np.array(done.tokens), "next": np.array(done.next)}
        np.savez(file, dtype=np.array(done.dtype), **states)


def read(path: Path) -> Run:
    """Raises ConfigError for a file that ``dump`` has not written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        token, logprob = found["next"].tolist()
        states = {name.removeprefix("state "): s for name, s in found.items() if name.startswith("state ")}
        if not states or any(state.ndim != 2 or state.dtype != np.float32 for state in states.values()):
            raise ValueError("its states are no matrices")
        return Run(found["tokens"].tolist(), states, (int(token), logprob), str(found["dtype"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigError(f"{path} is no dump of sgla debug: {error}") from error


def compare(first: Run, second: Run, what: str, tolerance: float | None) -> int:
    """Print the relative error of each state, and the first beyond ``tolerance``; 1 if there is one."""
    if first.tokens != second.tokens:
        raise ConfigError("the two runs have read different tokens; dump them with the same prompt")
    if tolerance is None:
        tolerance = max(TOLERANCE[run.dtype] for run in (first, second))
    wrong = None
    for name in dict.fromkeys((*first.states, *second.states)):
        error = difference(first.states.get(name), second.states.get(name))
        beyond = not error <= tolerance  # a NaN is
        wrong = wrong or (name if beyond else None)
        print(f"{name:<12} {error:.2e}{'  differs' if beyond else ''}")
    (token, logprob), (other, theirs) = first.next, second.next
    print(f"next token   {token} ({logprob:.4f}); {what}: {other} ({theirs:.4f})")
    if wrong is not None:
        print(f"first difference from {what}: {wrong} (relative error beyond {tolerance:g})")
    elif token != other or abs(logprob - theirs) > max(tolerance, NAT * tolerance / TOLERANCE["bfloat16"]):
        print(f"the layers equal those of {what}; what follows them (last norm, output layer) differs")
    else:
        print(f"all {len(first.states)} states equal those of {what} within {tolerance:g}")
        return 0
    return 1


def difference(a: NDArray[np.float32] | None, b: NDArray[np.float32] | None) -> float:
    """Of the last rows that both have, relative to the second; infinite where one is missing or has another
    width."""
    if a is None or b is None or a.shape[1] != b.shape[1]:
        return float("inf")
    rows = min(len(a), len(b))
    size = float(np.linalg.norm(b[-rows:]))
    return float(np.linalg.norm(a[-rows:] - b[-rows:])) / max(size, 1e-30)
