"""Builds and finds the native CPU kernels (csrc/cpu) for an instruction-set level.

A released wheel brings them compiled (setup.py). Elsewhere the first use compiles them with g++ into the
cache folder, and later uses load the file found there. In both places the folder's name is a hash of the
sources and flags, so an upgrade never meets an old library. Without a compiler everything still works through
torch. To prepare a cache for other machines: ``python -m sgla.kernels.build --isa x86-64-v3,x86-64-v4``.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sgla.errors import ConfigError
from sgla.homes import made_anew
from sgla.processes import tied

FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
SCRATCH, DAY = "tmp", 86400  # how scratch folders' names begin; seconds


class Level(NamedTuple):
    """An instruction-set level:
    compiler flags, and the CPU flags (as in /proc/cpuinfo) it needs and must not have.
    ``arch``: as ``platform.machine`` calls it; empty: any."""

    name: str
    machine: list[str]
    needs: frozenset[str]
    without: frozenset[str] = frozenset()
    arch: str = "x86_64"


_AVX2 = ["avx2", "fma", "f16c", "bmi2"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"]
_VNNI = [*(f"-m{flag}" for flag in _AVX512), "-mavx512vnni"]


def _level(name: str, flags: list[str]) -> Level:
    # Single flags rather than -march=x86-64-v4, which older compilers do not know.
    return Level(name, [f"-m{flag}" for flag in flags], frozenset(flags))


LEVELS = [  # best first
    Level(
        "amx",
        [*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
        frozenset(_AVX512) | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    # Full rate on AMD's CPUs.
    # On Intel's with AMX half the rate of AVX512_VNNI: that is next best where tiles are not granted.
    Level(
        "avx512_bf16",
        [*_VNNI, "-mavx512bf16"],
        frozenset(_AVX512) | {"avx512_vnni", "avx512_bf16"},
        without=frozenset({"amx_tile"}),
    ),
    Level("avx512_vnni", _VNNI, frozenset(_AVX512) | {"avx512_vnni"}),
    _level("avx512", _AVX512),
    _level("avx2", _AVX2),
    # Those that have products of 8-bit integers in matrices have products of bfloat16, too.
    Level(
        "i8mm",
        ["-march=armv8.2-a+dotprod+i8mm+bf16"],
        frozenset({"asimd", "asimddp", "i8mm", "bf16"}),
        arch="aarch64",
    ),
    Level("dotprod", ["-march=armv8.2-a+dotprod"], frozenset({"asimd", "asimddp"}), arch="aarch64"),
    Level("generic", [], frozenset(), arch=""),
]
ALIASES = {"x86-64-v4": "avx512", "x86-64-v3": "avx2", "x86-64": "generic"}


OnFile = Callable[[int, int], None]  # told how many files of how many are compiled


class BuildError(Exception):
    """The library is neither there nor can be built; says why and what to do."""


class Built(NamedTuple):
    path: Path
    level: str
    note: str  # what happened, for people


def level(name: str) -> Level:
    """The level of that name or alias; ValueError lists the names."""
    name = ALIASES.get(name, name)
    for candidate in LEVELS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"unknown instruction-set level {name!r}: one of {', '.join(c.name for c in LEVELS)}")


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):  # x86, ARM
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def tiles_granted() -> bool:
    """Ask the kernel for the tile registers of AMX, for all threads of this process."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def levels_of(arch: str) -> list[Level]:
    """Those that there are for CPUs of this kind, best first."""
    return [level for level in LEVELS if level.arch in ("", arch)]


def supported() -> list[Level]:
    """Levels this CPU can run, best first. ``SGLA_CPU_ISA`` takes the ones above it away."""
    found = [c for c in levels_of(platform.machine()) if c.needs <= cpu_flags()]
    found = [c for c in found if not c.without & cpu_flags()]
    found = [c for c in found if c.name != "amx" or tiles_granted()]
    limit = os.environ.get("SGLA_CPU_ISA")
    return found if limit is None else [c for c in found if LEVELS.index(c) >= LEVELS.index(level(limit))]


def source_folder(device: str) -> Path:
    """Where the sources for ``cpu`` or ``cuda`` are:
    beside this file in a wheel, in the top folder of a checkout."""
    inside = Path(__file__).parent / "csrc"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "csrc") / device


def shipped_folder() -> Path:
    """Where a wheel has libraries that were compiled with it."""
    return Path(__file__).parent / "compiled"


def library_name(target: Level) -> Path:
    """Folder and file of the library of this level, below ``shipped_folder`` or the cache."""
    digest = hashlib.sha256(" ".join(FLAGS + target.machine).encode())
    for source in sorted(p for p in source_folder("cpu").iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(source.name.encode() + source.read_bytes())
    return Path(digest.hexdigest()[:16], f"{target.name}.so")


def library_path(target: Level) -> Path:
    """The library of this level: what the wheel brought, or where it belongs in the cache."""
    name = library_name(target)
    shipped = shipped_folder() / name
    return shipped if shipped.exists() else made_anew("sgla", "kernels", *name.parts)


def build(target: Level, path: Path | None = None, on_file: OnFile = lambda done, of: None) -> Path:
    """Compile one level unless it is there; ``path``: into this file.
    Several processes may ask at once: one builds, the others wait."""
    path = path or library_path(target)
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ found (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    on_file(0, len(_sources()))
    make_once(path, lambda scratch: _compile(compiler, target, scratch, on_file))
    return path


def make_once(path: Path, make: Callable[[Path], Path]) -> None:
    """Have ``make`` write the file in a scratch folder, unless it is there. Several processes and threads may
    ask at once: one makes it, the others wait. Where files cannot be locked, as in some homes on a network,
    each makes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _remove_left(path.parent)
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path.parent) as scratch:
                make(Path(scratch)).rename(path)


def _remove_left(folder: Path) -> None:
    """Scratch folders of processes that were killed."""
    for left in folder.glob(f"{SCRATCH}*"):
        with suppress(FileNotFoundError):  # another one removed it
            if time.time() - left.stat().st_mtime > DAY:
                shutil.rmtree(left, ignore_errors=True)


def _sources() -> list[Path]:
    return sorted(source_folder("cpu").glob("*.cpp"))


def _compile(compiler: str, target: Level, scratch: Path, on_file: OnFile) -> Path:
    flags = [*FLAGS, *target.machine]
    objects = {source: scratch / f"{source.stem}.o" for source in _sources()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_call, [compiler, *flags, "-c", str(s), "-o", str(o)]) for s, o in objects.items()
        ]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            on_file(done, len(jobs))
    library = scratch / "library.so"
    _call(
        [
            compiler,
            "-shared",
            "-pthread",
            "-static-libstdc++",
            "-static-libgcc",
            *map(str, objects.values()),
            "-o",
            str(library),
        ]
    )
    return library


def _call(command: list[str]) -> None:
    done = subprocess.run(tied(command), capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed on the CPU kernels: {done.stderr.strip()[-500:]}")


def find(on_file: OnFile = lambda done, of: None) -> Built:
    """The best library for this CPU: one that can be built, else the best one that was built before.

    Raises BuildError with the reason when there is none.
    """
    levels = supported()
    reason = ""
    for candidate in levels:
        try:
            known = library_path(candidate).exists()
            path = build(candidate, on_file=on_file)
        except (BuildError, ConfigError) as error:
            reason = reason or str(error)
            continue
        except OSError as error:
            reason = reason or f"{error}; set XDG_CACHE_HOME to a folder that this user may write to"
            continue
        done = _place(path) if known else "compiled"
        behind = f"; {levels[0].name} is not available: {reason}" if reason else ""
        return Built(path, candidate.name, f"native CPU kernels ({candidate.name}) {done}{behind}")
    raise BuildError(reason or "this CPU is not supported")


def compiled() -> str:
    """What ``find`` would find without a compiler, for people; "" if nothing."""
    for candidate in supported():
        path = library_path(candidate)
        if path.exists():
            return f"native CPU kernels ({candidate.name}) {_place(path)}"
    return ""


def _place(path: Path) -> str:
    return "came with the package" if path.is_relative_to(shipped_folder()) else "found in the cache"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgla.kernels.build", description=__doc__)
    parser.add_argument("--isa", help="levels to build, separated by commas (default: this CPU's best)")
    parser.add_argument("--into", type=Path, help="folder that gets the libraries (default: the cache)")
    args = parser.parse_args()
    for target in [level(name) for name in args.isa.split(",")] if args.isa else supported()[:1]:
        print(build(target, args.into / library_name(target) if args.into else None))


if __name__ == "__main__":
    main()
