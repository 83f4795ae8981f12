"""``sgla doctor``: what of this machine will be used, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import NamedTuple

from sgla.cli.settings import load_config
from sgla.cli.show import table
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub import packaged
from sgla.hub.disk import bytes_text
from sgla.observe.machine import Machine, detect
from sgla.resolve import GIB, MIB, resolve
from sgla.version import __version__

PACKAGES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "aiohttp",
    "uvloop",
    "msgspec",
    "huggingface_hub",
)
MARKS = {"ok": " ", "missing": "-", "broken": "!"}
SHM_NEEDED = 16 * MIB


class Finding(NamedTuple):
    """``status``: ok | missing (works without) | broken (does not work)."""

    name: str
    status: str
    detail: str
    advice: str = ""


def run(args: argparse.Namespace) -> int:
    found = examine(detect(), load_config(args.flags, args.config).download_dir)
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    elif sys.stdout.isatty():
        table(
            ["", "", ""],
            [[MARKS[one.status], one.name, "\n-> ".join(filter(None, one[2:]))] for one in found],
        )
    else:
        print(as_text(found))
    return int(any(finding.status == "broken" for finding in found))


def examine(machine: Machine, download_dir: str | None = None) -> list[Finding]:
    return [
        Finding(
            "sgla",
            "ok",
            f"{__version__}, Python {platform.python_version()}, {platform.system()} {machine.arch}",
        ),
        _cpu(machine),
        Finding(
            "memory",
            "ok",
            f"{machine.memory_available / GIB:.1f} of {machine.memory_total / GIB:.1f} GiB available",
        ),
        _torch(machine),
        _compiler(machine),
        _gpu(machine),
        _shared_memory(machine),
        _model(download_dir),
        Finding("packages", "ok", ", ".join(f"{name} {version(name) or '(missing)'}" for name in PACKAGES)),
        _choice(machine),
    ]


def version(package: str) -> str | None:
    """Installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu(machine: Machine) -> Finding:
    detail = (
        f"{machine.cpu}; {machine.cores} cores usable, {machine.physical_cores} physical; "
        f"{' '.join(machine.isa) or 'no SIMD known'}"
    )
    if machine.arch == "x86_64" and "avx2" not in machine.flags:
        return Finding(
            "cpu", "missing", detail, "without AVX2 the CPU kernels cannot be used; torch operations are"
        )
    return Finding("cpu", "ok", detail)


def _torch(machine: Machine) -> Finding:
    if machine.torch is None:
        return Finding("torch", "broken", "not installed", "pip install torch")
    return Finding(
        "torch",
        "ok",
        f"{machine.torch}, " + (_build(machine)),
    )


def _build(machine: Machine) -> str:
    if machine.torch_hip:
        return f"ROCm {machine.torch_hip}, whose GPUs are not supported yet"
    return f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU build"


def _compiler(machine: Machine) -> Finding:
    if machine.kernels:
        return Finding("compiler", "ok", f"{machine.compiler or 'none'}; {machine.kernels}")
    if machine.compiler:
        return Finding("compiler", "ok", f"{machine.compiler}, builds the CPU kernels on first use")
    return Finding(
        "compiler",
        "missing",
        "no C++ compiler, CPU kernels fall back to torch operations",
        "install g++ (Debian, Ubuntu: apt-get install g++)",
    )


def _gpu(machine: Machine) -> Finding:
    if not machine.gpus:
        return Finding("gpu", "ok", "none, the CPU is used")
    detail = "; ".join(
        f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, sm_{gpu.arch[0]}{gpu.arch[1]}" for gpu in machine.gpus
    )
    old = [gpu.name for gpu in machine.gpus if not gpu.bf16]
    if old:
        return Finding("gpu", "missing", f"{detail}; {old[0]} is older than Ampere", "give --device cpu")
    if not machine.torch_cuda:
        return Finding("gpu", "missing", f"{detail}; torch is a CPU build", "install a CUDA build of torch")
    flashinfer = version("flashinfer-python") or "is not there, and optional"
    return Finding("gpu", "ok", f"{detail}; flashinfer {flashinfer}")


def _shared_memory(machine: Machine) -> Finding:
    detail = f"/dev/shm has {machine.shm_free / MIB:.0f} MiB free"
    if len(machine.gpus) > 1 and machine.shm_free < SHM_NEEDED:
        detail += ", of which ranks on several GPUs need more"
        return Finding("shared memory", "missing", detail, "with docker: docker run --shm-size 1g")
    return Finding("shared memory", "ok", detail)


def _model(download_dir: str | None) -> Finding:
    path = packaged.cached("demo", download_dir)
    if path:
        return Finding("demo model", "ok", str(path))
    size = bytes_text(packaged.MODELS["demo"].download)
    detail = (
        f"not in {packaged.cache_folder(download_dir)}; the first 'sgla serve' downloads it ({size}) "
        "or a larger one from the model hub (--demo)"
    )
    try:
        packaged.find_pip()
    except ConfigError as error:
        return Finding("demo model", "missing", detail, error.message)
    return Finding("demo model", "ok", detail)


def _choice(machine: Machine) -> Finding:
    resolved = resolve(Config(), machine)
    config, reasons = resolved.config, resolved.reasons
    detail = f"{config.device} ({reasons['device']}), {config.dtype}, {config.threads} threads"
    return Finding("sgla serve uses", "ok", detail, "; ".join(resolved.notes))


def as_text(found: list[Finding]) -> str:
    width = max(len(finding.name) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{MARKS[finding.status]} {finding.name:<{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"  {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)
