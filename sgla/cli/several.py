"""``--models``: the settings of each of several models. What an entry does not say is as for the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgla.cli.settings import Say, at_home, complain, read_yaml, settings
from sgla.config import AdapterSettings, Config
from sgla.errors import ConfigError
from sgla.homes import expanded
from sgla.hub.demo import DEMO, choose_model
from sgla.resolve import check
from sgla.validation import fault

NAMED = re.compile(r"([^=\s]+)=(\S.*)")
# Settings of an entry beside those of models, engines and adapters.
ALSO = (
    "moderation_labels",
    "preferred_sampling_params",
    "sampling_defaults",
    "watchdog_timeout",
    "weight_folders",
)
# Those of one model alone, which all cannot have together.
OWN = ("served_model_name", "lora_modules", "kv_disk", "revision", "tokenizer", "chat_template")
MODEL_FILES = ("config.json", "*.gguf")  # what a folder with a model has


def models_of(config: Config, say: Say = complain) -> list[Config]:
    """A Config for each model of ``config.models``. Raises ConfigError."""
    check_alone(config)
    entries: dict[str, dict[str, Any]] = {}
    for name, values in (found for item in config.models for found in entries_of(item, say)):
        if name in entries:
            raise ConfigError(f"--models: two models are named {name}", param="models")
        entries[name] = values
    models = [made(config, name, values, say) for name, values in entries.items()]
    check_together(models)
    return models


def is_on_demand(config: Config) -> bool:
    """Whether the models are those of a folder, which are loaded when somebody asks for them."""
    return len(config.models) == 1 and expanded(config.models[0]).is_dir()


def entries_of(item: str, say: Say) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings of a word of ``--models``. Raises ConfigError."""
    path = expanded(item)
    if path.is_dir():
        return in_folder(path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return in_file(path, say)
    if match := NAMED.fullmatch(item):
        return [(match[1], {"model": match[2]})]
    raise ConfigError(
        f"--models takes NAME=MODEL, a YAML file or a folder; {item!r} is none of them", param="models"
    )


def in_folder(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The models that lie in a folder: folders with a checkpoint, and GGUF files."""
    found = [
        (each.stem if each.is_file() else each.name, {"model": str(each)})
        for each in sorted(path.iterdir())
        if each.suffix == ".gguf" or (each.is_dir() and any(any(each.glob(kind)) for kind in MODEL_FILES))
    ]
    if not found:
        raise ConfigError(
            f"--models {path}: there is no model in this folder, neither a folder with a config.json nor a "
            ".gguf file",
            param="models",
        )
    return found


def in_file(path: Path, say: Say) -> list[tuple[str, dict[str, Any]]]:
    """``name: MODEL``, or ``name:`` with the flags of ``sgla serve`` below it."""
    entries = read_yaml("--models", path)
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"--models {path}: expected 'NAME: MODEL', or a name with flags", param="models")
    return [(str(name), values_of(path, str(name), entry, say)) for name, entry in entries.items()]


def values_of(path: Path, name: str, entry: Any, say: Say) -> dict[str, Any]:
    """The settings of an entry. Raises ConfigError."""
    if isinstance(entry, str):
        return {"model": entry}
    if not isinstance(entry, Mapping) or "model" not in entry:
        raise ConfigError(f"--models {path}: {name} needs a line 'model: MODEL'", param="models")
    found: dict[str, Any] = {}
    for key, value in entry.items():
        try:
            found |= settings(str(key), value, say)
        except ValueError as error:
            raise ConfigError(f"--models {path}: {name}: {key}: {error}", param=str(key)) from error
    return found


def made(config: Config, name: str, values: dict[str, Any], say: Say) -> Config:
    """The settings of model ``name``. Raises ConfigError."""
    for field in values:
        if field not in AdapterSettings.__struct_fields__ and field not in ALSO:
            flag = field.replace("_", "-")
            raise ConfigError(
                f"--models: {name}: {flag} is of the server, not of one model; give --{flag} beside --models",
                param=field,
            )
    whole = msgspec.structs.asdict(config) | {"served_model_name": [name], "models": []} | values
    try:
        model = at_home(msgspec.convert(whole, Config))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--models: {name}: {fault(error, Config)[1]}", param="models") from error
    check(model)
    return choose_model(model, say)


def check_alone(config: Config) -> None:
    """Raise ConfigError for what is given for all models, and can be of one alone."""
    usual = Config()
    if config.model != DEMO:
        raise ConfigError(
            f"--models has all models; name {config.model} there, as NAME={config.model}", param="model"
        )
    if config.grpc_port is not None:
        raise ConfigError(
            "the requests of --grpc-port name no model, so one alone can be served; leave it or --models out",
            param="grpc_port",
        )
    for name in OWN:
        if getattr(config, name) != getattr(usual, name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is of one model; write it below that one, in a file for --models",
                param=name,
            )


def check_together(models: list[Config]) -> None:
    """Raise ConfigError for models that cannot be in one server."""
    names: set[str] = set()
    disks: set[str] = set()
    for model in models:
        first = model.served_model_name[0]
        if model.ranks > 1:
            raise ConfigError(
                f"model {first}: several models in one server have one rank each; leave --tp, --pp and "
                "--cp out, or serve it in a server of its own",
                param="tp",
            )
        if model.role != "both":
            raise ConfigError(
                f"model {first}: several models in one server do all alone; leave --role out, or serve it in "
                "a server of its own",
                param="role",
            )
        if twice := names & {*model.served_model_name}:
            raise ConfigError(f"two models are named {min(twice)}", param="served_model_name")
        names |= {*model.served_model_name}
        if model.kv_disk is not None:
            folder = model.kv_disk.rpartition(":")[0]
            if folder in disks:
                raise ConfigError(
                    f"two models have the --kv-disk {folder}; give each its own", param="kv_disk"
                )
            disks.add(folder)
