"""``sgla explain``: every setting with its reason, and the memory it takes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from sgla.cli.args import descriptions
from sgla.cli.parallel import settled
from sgla.cli.settings import complain, load_config
from sgla.cli.several import is_on_demand, models_of
from sgla.cli.show import table
from sgla.config import SECRETS, Config
from sgla.defaults import Defaults, find_defaults
from sgla.device import H200, platform
from sgla.errors import ConfigError
from sgla.hub.demo import choose_model
from sgla.hub.fetch import find_local
from sgla.hub.source import ModelSource
from sgla.ledger import Held, check_fits, ledger, mesh, need_of, room_of, size_text, table_of
from sgla.loading.source import configured_source, drafting
from sgla.model.pooling import read_pooling
from sgla.model.read import read_spec
from sgla.model.sizes import Parameters, parameters, short_count
from sgla.model.vision.served import told
from sgla.observe.machine import Machine, detect
from sgla.processes import tied
from sgla.resolve import MOST_RANKS, Resolved, resolve
from sgla.route.replicas import alone, shares


def run(args: argparse.Namespace) -> int:
    config = load_config(args.flags, args.config)
    machine = detect()
    if config.models:
        return several(config, machine, args.json)
    config = choose_model(config, complain, ask=False)
    if args.kernels:
        return kernels(config, machine)
    why: list[str] = []
    config = settled(config, why.append, machine, download=False)
    whole, config = config, alone(config)
    source = model_source(config)
    model = source.config if source else None
    draft = draft_config(config)
    pooled = source is not None and read_pooling(source, config.task) is not None
    resolved = resolve(config, part_of(machine, of_host(whole)), model, pooled, draft)
    if whole.dp > 1:
        resolved = replicated(resolved, whole, machine)
    rows = ledger(resolved.config, model, draft) if model else {}
    ranks = mesh(resolved.config, model) if model else []
    counts = parameters(read_spec(model)) if model else None
    defaults = find_defaults(config, source)
    resolved.notes.extend((*(source.notes if source else ()), *defaults.notes))
    resolved.notes.extend(why)
    resolved.notes.extend(told(resolved.config, source) if source else ())
    if args.json:
        print(as_json(resolved, rows, defaults, counts, ranks))
        return 0
    if sys.stdout.isatty():
        table(["SETTING", "VALUE", "REASON"], settings(resolved))
        print(summary(resolved, rows, machine, defaults, counts))
    else:
        print(as_text(resolved, rows, machine, defaults, counts))
    print("".join(f"{line}\n" for line in mesh_lines(resolved.config, ranks)), end="")
    return 0


def of_host(config: Config) -> int:
    """Servers on one host."""
    return config.dp // config.nnodes if config.dp > 1 else 1


def part_of(machine: Machine, replicas: int) -> Machine:
    """What each of so many servers has of the machine's cores."""
    return msgspec.structs.replace(
        machine,
        cores=max(1, machine.cores // replicas),
        physical_cores=max(1, machine.physical_cores // replicas),
    )


def replicated(resolved: Resolved, config: Config, machine: Machine) -> Resolved:
    """With who holds what of ``--dp`` servers. Raises ConfigError where there are too few GPUs."""
    parts = shares(config, resolved.config.device, machine)
    names = [f"replica {i}" for i in range(config.dp)]
    if config.nnodes > 1:
        names = [f"node {i // len(parts)}, {name}" for i, name in enumerate(names)]
    told = [f"{name}: {parts[i % len(parts)]}" for i, name in enumerate(names)]
    return msgspec.structs.replace(
        resolved,
        config=msgspec.structs.replace(resolved.config, dp=config.dp),
        reasons={**resolved.reasons, "dp": "given"},
        notes=[*resolved.notes, "all bytes are those of one replica", *told],
    )


def several(config: Config, machine: Machine, as_json: bool) -> int:
    """Print the ledger of several models. Raises OutOfMemory where they do not fit, unless they are loaded
    when somebody asks for them: then for one that does not fit alone."""
    needs = {}
    for each in models_of(config):
        name = each.served_model_name[0]
        if (source := model_source(each)) is None:
            print(f"{name}: {each.model} is not on this disk yet, so its memory is unknown", file=sys.stderr)
            continue
        draft = draft_config(each)
        pooled = read_pooling(source, each.task) is not None
        resolved = resolve(each, machine, source.config, pooled, draft)
        needs[name] = need_of(name, resolved.config, source.config, draft)
    room = room_of(machine)
    if as_json:
        rows = {name: need._asdict() for name, need in needs.items()}
        print(json.dumps({"models": rows, "room": room}, indent=2))
    else:
        print(table_of(needs, room))
    for group in ({name: need} for name, need in needs.items()) if is_on_demand(config) else (needs,):
        check_fits(group, room)
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
        lines += [f"weights    {size_text(rows['weights']):>10}  estimated from the model's shape"]
        if "weights_on_host" in rows:
            lines += [host_line(rows["weights_on_host"], resolved.config.tp)]
        lines += [kv_line(rows)]
        if resolved.config.device == "cuda":
            memory = sum(gpu.memory for gpu in machine.gpus[: resolved.config.ranks])
            lines.append(f"GPUs       {size_text(memory):>10}")
        else:
            total = rows["weights"] + rows["kv_cache"]
            lines.append(
                f"together   {size_text(total):>10}  of {size_text(machine.memory_available)} available"
            )
    else:
        lines += ["", "the model is not on this disk yet, so its memory is unknown"]
    lines.append(f"sampling   {defaults}")
    return "\n".join(lines + [f"note: {note}" for note in resolved.notes])


def mesh_lines(config: Config, ranks: Sequence[Held]) -> Iterator[str]:
    """Who holds what, where several ranks share a model."""
    if not ranks:
        return
    nodes = f" on {config.nnodes} nodes" if config.nnodes > 1 else ""
    sets = f" in {config.cp} sets (--cp)" if config.cp > 1 else ""
    sets += ", which share out the tokens (--dcp)" if config.dcp > 1 else ""
    sets += ", each with attention of its own (--dp-attention)" if config.dp_attention else ""
    stages = f"{config.pp} stage{'s' * (config.pp > 1)} (--pp) of {config.tp} (--tp)"
    yield f"ranks      {len(ranks):>10}  {stages}{sets}{nodes}"
    cache = "" if config.kv_cache_bytes is None else f", KV cache {size_text(config.kv_cache_bytes)}"
    experts = max(held.experts[1] + 1 if held.experts is not None else 0 for held in ranks)
    for held in ranks:
        first, last = held.layers
        what = [f"node {held.node}"] if nodes else []
        what += [f"layers {first} to {last}" if last > first else f"layer {first}"]
        what += ["embedding"] * held.embedding + ["output layer"] * held.output
        if held.experts is not None:
            begin, end = held.experts
            what.append(f"experts {begin} to {end}")
            if config.redundant_experts:
                copies = (experts + config.redundant_experts) // config.ep - (end + 1 - begin)
                what.append(f"copies of {copies} more")
        part = f", part {held.tp_rank + 1} of {config.tp}" if config.tp > 1 else ""
        part += f", set {held.rank // config.tp % config.cp + 1} of {config.cp}" if config.cp > 1 else ""
        yield (
            f"- rank {held.rank:<3}  {size_text(held.weights):>10}  {', '.join(what)}{part}{cache}, "
            f"{held.kv_bytes_per_token} bytes a token"
        )


def parameters_line(counts: Parameters) -> str:
    total, active = map(short_count, counts)
    return f"parameters {total:>10}" + (f"  {active} of them for a token" if active != total else "")


def host_line(nbytes: int, ranks: int) -> str:
    """What of the weights stays in the host's memory, and what that costs."""
    fast, slow = (nbytes / ranks / rate * 1e3 for rate in (50e9, 25e9))
    cost = f"{fast:.0f} ms by PCIe 5, {slow:.0f} ms by PCIe 4"
    return f"- on host  {size_text(nbytes):>10}  copied in every step: {cost}"


def kv_line(rows: dict[str, int]) -> str:
    tokens = f"of {rows['kv_bytes_per_token']} bytes"
    if "state_bytes" in rows:
        count = f"{rows['states']} " if "states" in rows else ""
        tokens += f", {count}states of {size_text(rows['state_bytes'])}"
    if "kv_cache" not in rows:
        return f"KV cache   {'the rest':>10}  less what the largest steps take; tokens {tokens}"
    found = f"{rows['kv_pages']} pages, {rows['kv_tokens']} tokens {tokens}"
    if "kv_tokens_of_short_texts" in rows:
        found += f" in one text, {rows['kv_tokens_of_short_texts']} in texts shorter than a window"
    if "kv_tokens_without_windows" in rows:
        found += f"; {rows['kv_tokens_without_windows']} tokens if layers with windows kept all"
    return f"KV cache   {size_text(rows['kv_cache']):>10}  {found}"


def reason(resolved: Resolved, name: str) -> str:
    """Why the value is what it is; what the setting means, where the reason alone says nothing of that."""
    text = resolved.reasons[name]
    return f"{text}: {descriptions()[name]}" if text in ("default", "given") else text


def as_json(
    resolved: Resolved,
    rows: dict[str, int],
    defaults: Defaults,
    counts: Parameters | None = None,
    ranks: Sequence[Held] = (),
) -> str:
    values = msgspec.to_builtins(resolved.config)
    values |= {name: shown(name, values[name]) for name in SECRETS}
    settings = {name: {"value": value, "reason": resolved.reasons[name]} for name, value in values.items()}
    sampling = {
        name: {"value": value, "source": defaults.sources[name]} for name, value in defaults.values.items()
    }
    whole = {"settings": settings, "memory": rows, "sampling": sampling, "notes": resolved.notes}
    if defaults.talks:
        whole["sampling_in_words"] = defaults.talks
    if ranks:
        whole["mesh"] = [held._asdict() for held in ranks]
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
        return size_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return json.dumps(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
