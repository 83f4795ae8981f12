"""``sgla quantize``: write a checkpoint whose linear layers have few bits."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from sgla.cli.progress import ProgressPrinter
from sgla.cli.settings import changing_files, load_config
from sgla.errors import ConfigError
from sgla.hub.fetch import resolve_model
from sgla.hub.source import ModelSource
from sgla.loading.source import configured_source
from sgla.text.tokenizer import Tokenizer, load_path

LENGTH = 512  # tokens of each text that a model is calibrated on


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    if (args.calibrate is None) != (args.method is None):
        raise ConfigError("--calibrate FILE and --method go together; leave both out to round to nearest")
    if args.method and args.format == "fp8":
        raise ConfigError("--method rounds integers; leave it out with --format fp8")
    source = configured_source(resolve_model(config), config)
    quantize = import_module("sgla.loading.quantize")  # brings torch
    job, solve = quantize.plan(source, args.format), quantize.nearest
    if args.calibrate:
        solve = _calibration(source, Path(args.calibrate), args.texts, args.method)
    progress = ProgressPrinter()
    try:
        with changing_files():
            quantize.write(job, Path(args.out), solve, progress)
            if source.kind == "gguf":
                _write_tokenizer(source, Path(args.out))
    finally:
        progress.close()
    print(f"{args.out}: {args.format}" + (f", groups of {job.recipe.group}" if job.recipe.group else ""))
    return 0


def _calibration(source: ModelSource, file: Path, texts: int, method: str) -> object:
    """Of the first ``texts`` pieces of a file. Raises ConfigError."""
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"--calibrate {file} cannot be read: {error.strerror}") from error
    tokens = _tokenizer(source).encode(text)[: texts * LENGTH]
    length = min(LENGTH, len(tokens))
    if not tokens:
        raise ConfigError(f"{file} has no text")
    rows = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return import_module("sgla.loading.calibrate").calibration(rows, method)


def _tokenizer(source: ModelSource) -> Tokenizer:
    return load_path(source.gguf_path or source.folder)


def _write_tokenizer(source: ModelSource, out: Path) -> None:
    """That of a GGUF file, as HF has it."""
    tokenizer = _tokenizer(source)
    tokenizer.backend.save(str(out / "tokenizer.json"))
    said: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    said["chat_template"] = tokenizer.chat_template
    (out / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
