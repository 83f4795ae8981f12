"""What ``adapter_config.json`` says of an adapter in PEFT's format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sgla.errors import ConfigError, InvalidAdapter
from sgla.hub.source import read_object

CONFIG = "adapter_config.json"
MAX_RANK = 256
MAX_ALPHA = 1e30
PATTERNS = 1024  # of ranks, and of alphas
SHOWN = 4  # names in an error
ANY = ".*"  # what patterns may begin with, as PEFT's own of experts do
_PLAIN = re.compile(r"(?=.{1,200}\Z)(?:\.\*)?(?:[\w.^$-]|\\[.dw])+")  # patterns that match in linear time
FUSED = ("gate_up_proj", "up_proj", "down_proj")  # of experts, in the order in which PEFT wraps them

# Keys that say how an adapter was trained, or that are said by its tensors.
_OF_TRAINING = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
]
# Begun from these values, the weights of the base stay as they are.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva", None)


@dataclass(frozen=True)
class LoraConfig:
    """What ``adapter_config.json`` says of rank and scale, for each module by its path."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rooted: bool  # rsLoRA (arXiv 2312.03732)
    parameters: tuple[str, ...] = ()  # ends of the names of tensors that hold all experts of a layer

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def _by_pattern(values: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that the end of a module's path matches, as in PEFT."""
    for pattern, value in values.items():
        if _compiled(pattern).match(module):
            return value
    return default


@lru_cache(maxsize=4 * PATTERNS)  # to compile one takes much longer than to match it
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"{pattern}$" if pattern.startswith(ANY) else rf"(.*\.)?({pattern})$")


def read_config(folder: Path, most_rank: int) -> LoraConfig:
    """Raises InvalidAdapter for what is no LoRA, or one that is not honoured to the letter."""
    try:
        config = read_object(folder / CONFIG)
    except ConfigError as error:
        raise InvalidAdapter(error.message) from None
    _check_kind(folder, config)
    rank, alpha = config.pop("r", 8), config.pop("lora_alpha", 8)
    ranks, alphas = config.pop("rank_pattern", None) or {}, config.pop("alpha_pattern", None) or {}
    if not isinstance(rooted := config.pop("use_rslora", None) or False, bool):
        raise InvalidAdapter(f"{folder.name}: use_rslora is {str(rooted)[:99]!r}, not true or false")
    parameters = tuple(_parameters(folder, config.pop("target_parameters", None) or []))
    if unknown := [key for key, value in config.items() if value and key not in _OF_TRAINING]:
        raise InvalidAdapter(f"{folder.name}: {some(unknown)} in {CONFIG} is not supported")
    for name, value in [("r", rank), *_entries("rank_pattern", ranks)]:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise InvalidAdapter(f"{folder.name}: {name} is {repr(value)[:99]}, not from 1 to {MAX_RANK}")
        if value > most_rank:
            raise InvalidAdapter(
                f"{folder.name}: {name} is {value}, more than --max-lora-rank {most_rank}; start the server "
                f"with --max-lora-rank {value}"
            )
    for name, value in [("lora_alpha", alpha), *_entries("alpha_pattern", alphas)]:
        if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:
            raise InvalidAdapter(
                f"{folder.name}: {name} is {repr(value)[:99]}, not a number of at most {MAX_ALPHA:.0e}"
            )
    return LoraConfig(rank, float(alpha), ranks, alphas, rooted, parameters)


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    """Take away the keys that say what kind of adapter it is. Raises InvalidAdapter."""
    if (kind := config.pop("peft_type", None)) != "LORA":
        raise InvalidAdapter(f"{folder.name}: peft_type is {str(kind)[:99]!r}, only LORA is supported")
    if config.pop("use_dora", False):
        raise InvalidAdapter(f"{folder.name}: DoRA is not supported (use_dora); merge it into the weights")
    if (bias := config.pop("bias", None) or "none") != "none":
        raise InvalidAdapter(f"{folder.name}: bias {str(bias)[:99]!r} is not supported, only 'none'")
    if (begun := config.pop("init_lora_weights", True)) not in _BEGINNINGS:
        raise InvalidAdapter(
            f"{folder.name}: init_lora_weights {str(begun)[:99]!r} changes the base's weights; convert the "
            "adapter to a plain one (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )


def _parameters(folder: Path, names: Any) -> Iterator[str]:
    """Raises InvalidAdapter for what is no tensor of experts."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidAdapter(f"{folder.name}: target_parameters is {str(names)[:99]!r}, not a list of names")
    for name in names:
        if name.rpartition(".")[2] not in FUSED:
            raise InvalidAdapter(
                f"{folder.name}: {name[:200]!r} in target_parameters is not supported, only "
                f"{', '.join(FUSED)} of experts"
            )
        yield name


def _entries(key: str, patterns: Any) -> Iterator[tuple[str, Any]]:
    """Names and values. Patterns are PEFT's regular expressions; what takes long to match is refused."""
    if not isinstance(patterns, dict) or len(patterns) > PATTERNS:
        raise InvalidAdapter(f"{key} is not an object of at most {PATTERNS} patterns")
    for pattern, value in patterns.items():
        if not _PLAIN.fullmatch(pattern):
            raise InvalidAdapter(f"{key}: {pattern[:99]!r} is no plain name of a module")
        yield f"{key}[{pattern}]", value


def some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:99] for name in names[:SHOWN]) + more
