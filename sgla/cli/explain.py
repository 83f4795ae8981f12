"""``sgla explain``: every setting with its reason, and the memory it takes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import msgspec

from sgla.cli.args import descriptions
from sgla.cli.settings import complain, load_config
from sgla.cli.show import table
from sgla.config import SECRETS, Config
from sgla.defaults import Defaults, find_defaults
from sgla.device import H200, platform
from sgla.errors import ConfigError
from sgla.hub.demo import choose_model
from sgla.hub.fetch import find_local
from sgla.hub.source import ModelSource
from sgla.loading.source import configured_source, drafting
from sgla.model.drafting import draft_bytes, draft_state, read_guessing
from sgla.model.encoder import EncoderSpec
from sgla.model.pooling import read_pooling
from sgla.model.read import read_spec
from sgla.model.sizes import Parameters, parameters, short_count, weight_bytes
from sgla.model.state import state_of, token_bytes, unit_bytes, with_draft
from sgla.observe.machine import Machine, detect
from sgla.processes import tied
from sgla.resolve import GIB, MIB, MOST_RANKS, Resolved, host_bytes, kv_pool, resolve


def run(args: argparse.Namespace) -> int:
    config = choose_model(load_config(args.flags, args.config), complain, ask=False)
    machine = detect()
    if args.kernels:
        return kernels(config, machine)
    source = model_source(config)
    model = source.config if source else None
    draft = draft_config(config)
    pooled = source is not None and read_pooling(source, config.task) is not None
    resolved = resolve(config, machine, model, pooled, draft)
    rows = ledger(resolved.config, model, draft) if model else {}
    counts = parameters(read_spec(model)) if model else None
    defaults = find_defaults(config, source)
    resolved.notes.extend((*(source.notes if source else ()), *defaults.notes))
    if args.json:
        print(as_json(resolved, rows, defaults, counts))
    elif sys.stdout.isatty():
        table(["SETTING", "VALUE", "REASON"], settings(resolved))
        print(summary(resolved, rows, machine, defaults, counts))
    else:
        print(as_text(resolved, rows, machine, defaults, counts))
    return 0


def kernels(config: Config, machine: Machine) -> int:
    """Print which kernels a GPU's layers take. A process of its own has torch."""
    path = find_local(config)
    if path is None:
        raise ConfigError("--kernels needs the model's files: 'sgla pull' brings them", param="model")
    if config.device not in ("auto", "cuda"):
        platform(config.device)
        raise ConfigError(
            f"--kernels says what NVIDIA GPUs run; leave it or --device {config.device} out", param="kernels"
        )
    if find_spec("triton") is None:
        raise ConfigError("--kernels needs Triton: pip install triton", param="kernels")
    source = configured_source(path, config)
    pooled = read_pooling(source, config.task) is not None
    config = msgspec.structs.replace(config, device="cuda")
    config = resolve(config, imagined(machine), source.config, pooled).config
    command = tied([sys.executable, "-m", "sgla.worker.report", str(path)])
    done = subprocess.run(command, input=msgspec.json.encode(config), capture_output=True)
    if done.returncode:
        raise ConfigError(done.stderr.decode().strip().rpartition("\n")[2], param="kernels")
    print(done.stdout.decode(), end="")
    return 0


def imagined(machine: Machine) -> Machine:
    """``machine`` with as many GPUs as ranks may ask for: its own kind where it has some, else H200s."""
    usable = machine.gpus and machine.torch_cuda
    gpu = machine.gpus[0] if usable else H200
    return msgspec.structs.replace(machine, gpus=(gpu,) * MOST_RANKS, torch_cuda="any", torch_hip=None)


def model_source(config: Config) -> ModelSource | None:
    """The model, if it is on this disk; nothing is downloaded."""
    path = find_local(config)
    return None if path is None else configured_source(path, config)


def draft_config(config: Config) -> dict[str, Any] | None:
    """That of the model that guesses, if there is one on this disk."""
    source = None if config.speculative_model is None else model_source(drafting(config))
    return None if source is None else source.config


def ledger(config: Config, model: dict[str, Any], draft: dict[str, Any] | None = None) -> dict[str, int]:
    """Bytes by purpose for all ranks together, and what the KV cache holds, unless it gets what a GPU has
    left. Weights are estimated from the shape. ``draft``: see ``resolve``."""
    spec = read_spec(model)
    if isinstance(spec, EncoderSpec):
        weights = weight_bytes(spec, config.dtype, config.quantization, config.tp)
        return {"weights": weights, "kv_cache": 0, "kv_bytes_per_token": 0, "kv_pages": 0, "kv_tokens": 0}
    kind = "cuda" if config.device == "cuda" else "cpu"
    quantization = spec.quantized(config.quantization, kind)
    weights = weight_bytes(spec, config.dtype, quantization, config.tp, kind) * config.tp
    dtype = config.kv_dtype(config.dtype)
    guessing = read_guessing(config, draft, spec)
    weights += draft_bytes(config, guessing, config.dtype, kind)
    states = [with_draft(state_of(spec, config.tp, rank), draft_state(guessing)) for rank in range(config.tp)]
    rows = {"weights": weights, "kv_bytes_per_token": sum(token_bytes(state, dtype) for state in states)}
    if spec.recurrent:
        rows["state_bytes"] = sum(unit_bytes(state, dtype) for state in states)
    if config.kv_cache_bytes is None:
        if config.cpu_offload_gb:
            rows["weights_on_host"] = host_bytes(config, spec, config.dtype)
        return rows
    pool = kv_pool(config, spec, dtype, guessing)
    pages = pool.tokens(config.kv_cache_bytes) // config.page_size
    rows |= {"kv_cache": config.kv_cache_bytes * config.tp, "kv_pages": pages}
    if spec.recurrent:
        rows["states"] = pool.split(config.kv_cache_bytes)[-1]
    return rows | {"kv_tokens": pages * config.page_size}


def settings(resolved: Resolved) -> list[list[str]]:
    """Name, value and reason of every setting."""
    return [
        [name, shown(name, getattr(resolved.config, name)), reason(resolved, name)]
        for name in Config.__struct_fields__
    ]


def as_text(
    resolved: Resolved,
    rows: dict[str, int],
    machine: Machine,
    defaults: Defaults,
    counts: Parameters | None = None,
) -> str:
    found = settings(resolved)
    width, column = max(len(name) for name, *_ in found), min(28, max(len(value) for _, value, _ in found))
    lines = [f"{name:<{width}}  {value:<{column}}  {why}" for name, value, why in found]
    return "\n".join([*lines, summary(resolved, rows, machine, defaults, counts)])


def summary(
    resolved: Resolved,
    rows: dict[str, int],
    machine: Machine,
    defaults: Defaults,
    counts: Parameters | None = None,
) -> str:
    """Memory, sampling defaults and notes."""
    lines = []
    if rows:
        lines += ["", *([parameters_line(counts)] if counts else [])]
        lines += [f"weights    {size(rows['weights']):>10}  estimated from the model's shape"]
        if "weights_on_host" in rows:
            lines += [host_line(rows["weights_on_host"], resolved.config.tp)]
        lines += [kv_line(rows)]
        if resolved.config.device == "cuda":
            memory = sum(gpu.memory for gpu in machine.gpus[: resolved.config.tp])
            lines.append(f"GPUs       {size(memory):>10}")
        else:
            total = rows["weights"] + rows["kv_cache"]
            lines.append(f"together   {size(total):>10}  of {size(machine.memory_available)} available")
    else:
        lines += ["", "the model is not on this disk yet, so its memory is unknown"]
    lines.append(f"sampling   {defaults}")
    return "\n".join(lines + [f"note: {note}" for note in resolved.notes])


def parameters_line(counts: Parameters) -> str:
    total, active = map(short_count, counts)
    return f"parameters {total:>10}" + (f"  {active} of them for a token" if active != total else "")


def host_line(nbytes: int, ranks: int) -> str:
    """What of the weights stays in the host's memory, and what that costs."""
    fast, slow = (nbytes / ranks / rate * 1e3 for rate in (50e9, 25e9))
    cost = f"{fast:.0f} ms by PCIe 5, {slow:.0f} ms by PCIe 4"
    return f"- on host  {size(nbytes):>10}  copied in every step: {cost}"


def kv_line(rows: dict[str, int]) -> str:
    tokens = f"of {rows['kv_bytes_per_token']} bytes"
    if "state_bytes" in rows:
        count = f"{rows['states']} " if "states" in rows else ""
        tokens += f", {count}states of {size(rows['state_bytes'])}"
    if "kv_cache" not in rows:
        return f"KV cache   {'the rest':>10}  less what the largest steps take; tokens {tokens}"
    return (
        f"KV cache   {size(rows['kv_cache']):>10}  {rows['kv_pages']} "
        f"pages, {rows['kv_tokens']} tokens {tokens}"
    )


def reason(resolved: Resolved, name: str) -> str:
    """Why the value is what it is; what the setting means, where the reason alone says nothing of that."""
    text = resolved.reasons[name]
    return f"{text}: {descriptions()[name]}" if text in ("default", "given") else text


def as_json(
    resolved: Resolved, rows: dict[str, int], defaults: Defaults, counts: Parameters | None = None
) -> str:
    values = msgspec.to_builtins(resolved.config)
    values |= {name: shown(name, values[name]) for name in SECRETS}
    settings = {name: {"value": value, "reason": resolved.reasons[name]} for name, value in values.items()}
    sampling = {
        name: {"value": value, "source": defaults.sources[name]} for name, value in defaults.values.items()
    }
    whole = {"settings": settings, "memory": rows, "sampling": sampling, "notes": resolved.notes}
    if counts is not None:
        whole["parameters"] = counts._asdict()
    return json.dumps(whole, indent=2)


def shown(name: str, value: Any) -> str:
    """A value as the user would write it; the key itself is never printed."""
    if value in (None, [], {}):
        return "-"
    if name in SECRETS:
        return "(set)"
    if name.endswith("_bytes"):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return json.dumps(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def size(value: int) -> str:
    return f"{value / GIB:.1f} GiB" if value >= 4 * GIB else f"{value / MIB:.1f} MiB"
