"""Facts about the machine, read from the system without loading torch; a few milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import platform
import re
import shutil
from pathlib import Path

import msgspec

from sgla.device import Device, nvidia
from sgla.kernels import build

ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "neon",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
    "bf16",
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() decides from. Memory in bytes.
    Cores are those this process may use (affinity, cgroup quota)."""

    cpu: str = "unknown"
    arch: str = "x86_64"
    cores: int = 1
    physical_cores: int = 1
    flags: frozenset[str] = frozenset()
    memory_total: int = 0
    memory_available: int = 0
    shm_free: int = 0
    compiler: str | None = None
    kernels: str = ""  # those for the CPU that need no compiler, for people
    torch: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    gpus: tuple[Device, ...] = ()

    @property
    def isa(self) -> list[str]:
        """The instruction sets that matter here, in the order of ISA_FLAGS."""
        return [flag for flag in ISA_FLAGS if flag in self.flags]

    def label(self) -> str:
        """One line for benchmark results."""
        gpus = "".join(f", {gpu.name}" for gpu in self.gpus)
        return f"{self.cpu}, {self.cores} cores, {self.memory_total / 2**30:.0f} GiB{gpus}"


def detect() -> Machine:
    """Look at this machine."""
    info = _read("/proc/cpuinfo")
    total, available = _memory()
    version, cuda, hip = torch_build()
    return Machine(
        cpu=_field(info, "model name") or platform.processor() or "unknown",
        arch=platform.machine(),
        cores=_usable_cores(),
        physical_cores=_physical_cores(),
        flags=frozenset((_field(info, "flags") or _field(info, "Features") or "").split()),
        memory_total=total,
        memory_available=available,
        shm_free=_free("/dev/shm"),
        compiler=find_compiler(),
        kernels=build.compiled(),
        torch=version,
        torch_cuda=cuda,
        torch_hip=hip,
        gpus=cuda_devices(),
    )


def find_compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def torch_build() -> tuple[str | None, str | None, str | None]:
    """Version, CUDA version and ROCm version of the installed torch, from its version file;
    None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None, None
    text = _read(Path(spec.origin).with_name("version.py"))
    version = re.search(r"^__version__\s*(?::.*?)?=\s*'([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\s*(?::.*?)?=\s*'([^']+)'", text, re.M)
    hip = re.search(r"^hip\s*(?::.*?)?=\s*'([^']+)'", text, re.M)
    return version and version[1], cuda and cuda[1], hip and hip[1]


def cuda_devices() -> tuple[Device, ...]:
    """The GPUs that the CUDA driver shows this process (CUDA_VISIBLE_DEVICES holds);
    empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Device:
    name, memory = ctypes.create_string_buffer(96), ctypes.c_size_t()
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    facts = []
    for attribute in (75, 76, 16):  # compute capability, major and minor; multiprocessors
        facts.append(ctypes.c_int())
        driver.cuDeviceGetAttribute(ctypes.byref(facts[-1]), attribute, device)
    major, minor, multiprocessors = (fact.value for fact in facts)
    return nvidia(name.value.decode(errors="replace"), (major, minor), multiprocessors, memory.value)


NVLINK = {
    1: 20e9,
    2: 25e9,
    3: 25e9,
    4: 25e9,
    5: 50e9,
}  # bytes a second of a link in one direction, by version
LINKS = 18  # that a GPU may have


def nvlink_rate() -> float:
    """Bytes a second that the first GPU sends by NVLink, as NVIDIA's management library (NVML) tells; 0
    without any, or without the library."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0.0
    device, state, version, rate = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint(), 0.0
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return 0.0
    for link in range(LINKS):
        if library.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(state)) or not state.value:
            continue
        if not library.nvmlDeviceGetNvLinkVersion(device, link, ctypes.byref(version)):
            rate += NVLINK.get(version.value, 25e9)
    library.nvmlShutdown()
    return rate


def network_rate(devices: Path = Path("/sys/class")) -> float:
    """Bytes a second that this host sends to others, as its devices tell: by all ports of InfiniBand, or else
    by the fastest of Ethernet; 0 where none tells."""
    rates = [0.0]
    for port in devices.glob("infiniband/*/ports/*"):  # "4: ACTIVE", "400 Gb/sec (4X NDR)"
        rate = _read(port / "rate").partition(" ")[0]
        if "ACTIVE" in _read(port / "state") and rate.isdigit():
            rates.append(float(rate))
    if len(rates) > 1:
        return sum(rates) * 1e9 / 8
    for device in devices.glob("net/*"):  # Mbit a second
        speed = _read(device / "speed").strip()
        if (device / "device").exists() and speed.isdigit():
            rates.append(float(speed))
    return max(rates) * 1e6 / 8


def _usable_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            allowed = min(allowed, max(1, math.ceil(int(quota) / int(period))))
    return allowed


def _physical_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    base = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {_read(base.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)}
    return min(len(siblings), _usable_cores())


def _memory() -> tuple[int, int]:
    """(total, available) bytes: the machine's, lowered by the limits of the control groups."""
    info = _read("/proc/meminfo")
    total, available = (_kib(info, name) for name in ("MemTotal", "MemAvailable"))
    for folder in _cgroups():
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)$", _read(folder / "memory.stat"), re.M)
            free = int(limit) - int(used) + (int(cached[1]) if cached else 0)
            total, available = min(total, int(limit)), min(available, max(0, free))
    return total, available


def _cgroups() -> list[Path]:
    """Folders of this process's version 2 control group and its ancestors."""
    root = Path("/sys/fs/cgroup")
    match = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.M)
    inner = root / match[1] if match else root
    return [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]


def _kib(info: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", info, re.M)
    return int(match[1]) << 10 if match else 0


def _field(info: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*:\s*(.*)$", info, re.M)
    return match[1].strip() if match else None


def _free(path: str) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return 0


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
