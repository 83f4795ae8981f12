"""Models that run through transformers' own module: what the module has shown of itself, as *facts* that
``open_source`` puts into the model's configuration, and the shape that is made of them. Loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgla.config import Config
from sgla.errors import ConfigError, UnknownArchitecture, UnsupportedValue
from sgla.hub.source import ModelSource
from sgla.layers.spec import AttentionSpec
from sgla.model.families.refused import REFUSED
from sgla.model.registry import HEADS, architecture_of, check_architecture, is_known
from sgla.model.spec import ModelSpec
from sgla.processes import tied

FACTS = "sgla_facts"  # key of the configuration that has what a module has shown
DEVICES = "cpu", "cuda"
ANSWER = b"sgla: "  # before the line of a module's process that has the facts
SECONDS = 300  # that the module may take to show itself
LACKS = (
    "quantization",
    "deterministic",
    "enable_return_hidden_states",
    "enable_return_routed_experts",
    "cpu_offload_gb",
)
COST = (
    "transformers' own module computes it with this server's pages: torch operations instead of kernels, "
    "which is two to three times slower on a CPU, weights in --dtype"
)


@dataclass(frozen=True)
class GenericAttention(AttentionSpec):
    """``values``: of a head of v."""

    values: int = 0

    @property
    def v_dim(self) -> int:
        return self.values


@dataclass(frozen=True)
class GenericSpec(ModelSpec):
    """The shape that a module has shown. ``values``: of its parameters, ``own``: of those that each of
    ``ranks`` has; ``code``: its class in the checkpoint's own code, or empty."""

    values: int = 0
    own: int = 0
    ranks: int = 1
    code: str = ""


def generic_spec(facts: Mapping[str, Any]) -> GenericSpec:
    """From what ``generic.probe`` returns."""
    layers = tuple(GenericAttention(rope=None, **layer) for layer in facts["layers"])
    architecture = facts["architecture"]
    return GenericSpec(
        architecture=architecture,
        hidden=facts["hidden"],
        intermediate=facts["intermediate"],
        attention=layers,
        vocab=facts["vocab"],
        eps=0.0,
        activation="silu",
        context_len=facts["context"],
        final_softcap=0.0,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tied=False,
        dtype=facts["dtype"],
        notes=(f"{architecture}: {COST}", *facts["notes"]),
        values=facts["values"],
        own=facts["own"],
        ranks=facts["ranks"],
        code=facts["code"],
    )


def settled(
    source: ModelSource, impl: str, trusted: bool, ranks: int = 1, lacking: UnsupportedValue | None = None
) -> ModelSource:
    """``source``, with facts if transformers' module is to run it. ``impl``: auto, native or transformers;
    ``trusted``: code of the checkpoint may run; ``ranks``: how many are to share it; ``lacking``: why the
    code here does not compute an architecture that it knows. Raises ConfigError for what the module cannot do
    right."""
    config = {key: value for key, value in source.config.items() if key != FACTS}
    source = replace(source, config=config)
    name = architecture_of(config)
    if impl == "native" and not (is_known(name) or name in HEADS):
        raise ConfigError(
            f"architecture {name[:99]!r} has no code here; --model-impl auto tries transformers' module",
            param="model_impl",
        )
    if impl == "native" or (impl == "auto" and is_known(name) and lacking is None):
        return source
    if name in REFUSED:
        raise ConfigError(f"{name} is not supported: {REFUSED[name]}", param="model")
    if impl == "auto" and lacking is not None and isinstance(config.get("text_config"), dict):
        raise ConfigError(str(lacking), param=lacking.param)  # the module would read text alone
    try:
        facts = _shown(source, trusted, ranks)
        if impl == "auto" and lacking is not None:
            facts["notes"].append(f"the code of this server does not: {lacking}")
        return replace(source, config={**config, FACTS: facts})
    except ConfigError as refused:
        if lacking is not None and impl == "auto":
            raise ConfigError(f"{lacking}; through transformers: {refused}", param=refused.param) from None
        if impl == "transformers" or refused.param == "tp":
            raise
        if isinstance(refused, UnknownArchitecture):  # perhaps it is written wrongly
            check_architecture(name)
        raise ConfigError(f"{name[:99]} has no code here, and {refused}", param="model") from None


def _shown(source: ModelSource, trusted: bool, ranks: int) -> dict[str, Any]:
    """The facts: torch builds the module without weights, in a process of its own."""
    if source.gguf_path is not None:
        raise ConfigError("GGUF files need a native family; take safetensors", param="model")
    asked = {"config": source.config, "folder": str(source.folder), "trusted": trusted, "ranks": ranks}
    command = tied([sys.executable, "-m", "sgla.model.generic"])
    try:
        done = subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the module is not built after {SECONDS} seconds", param="model") from None
    said = next((line for line in done.stdout.splitlines()[::-1] if line.startswith(ANSWER)), None)
    if said is None:  # code of the checkpoint may have ended it
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = last[:300] or f"its process ended with {done.returncode}"
        raise ConfigError(f"the module cannot be built: {why}", param="model")
    found: dict[str, Any] = json.loads(said.removeprefix(ANSWER))
    if "refused" in found:
        kind = UnknownArchitecture if found["unknown"] else ConfigError
        raise kind(found["refused"], param=found["param"])
    return found


def check_generic(config: Config, device: str, vectors: bool) -> None:
    """Raise ConfigError for what transformers' module cannot honour. ``device``: kind of the one it runs
    on."""
    if device not in DEVICES:
        raise ConfigError(
            f"transformers' module runs on CPUs and NVIDIA GPUs, not with --device {device}; give --device "
            "cpu",
            param="device",
        )
    plain = Config()
    for name in LACKS:
        value = getattr(config, name)
        if value != getattr(plain, name):
            shown = "" if value is True else f" {value}"
            flag = "--" + name.replace("_", "-") + shown
            raise ConfigError(f"{flag} cannot be honoured by transformers' module; leave it out", param=name)
    if config.enable_torch_compile and config.tp > 1:
        raise ConfigError(
            "--enable-torch-compile cannot be honoured with --tp, whose sums torch does not compile; leave "
            "one of them out",
            param="enable_torch_compile",
        )
    if not config.enable_torch_compile and config.torch_compile_max_bs != plain.torch_compile_max_bs:
        raise ConfigError("--torch-compile-max-bs needs --enable-torch-compile", param="torch_compile_max_bs")
    if vectors:
        how = "--task generate makes text of it" if config.task == "auto" else "leave --task out"
        raise ConfigError(f"transformers' module makes text and no vectors; {how}", param="task")
