"""Compile the CUDA kernels of csrc/cuda with NVRTC, keep the result on disk, and launch them.

NVRTC and its Python bindings come with CUDA builds of torch, so no compiler has to be installed. The driver
is called through ctypes because torch has no way to launch with programmatic dependent launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgla.homes import made_anew
from sgla.kernels.build import make_once, source_folder
from sgla.kernels.device import this_device
from sgla.kernels.rehearsal import compilers, rehearsed

SHARED = 227 << 10, 113 << 10  # bytes of a block, of which one or two are on a multiprocessor
_ATTRIBUTE_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LAUNCH_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_LAUNCH_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {code} ({(text.value or b'?').decode()})")


def processors() -> int:
    """Multiprocessors that kernels may use. Blocks that wait for each other must all have room there, so each
    launch of such asks."""
    return this_device().multiprocessors


class Kernel:
    """One kernel that takes a single structure by value; its compilation begins at once, on another thread.

    ``defines`` set its compile-time parameters; ``shared`` is its dynamic shared memory in bytes; ``cluster``
    blocks that follow each other see each other's shared memory.
    """

    def __init__(
        self, file: str, name: str, defines: Mapping[str, int], shared: int = 0, cluster: int = 1
    ) -> None:
        self._file, self._name, self.shared, self._cluster = file, name, shared, cluster
        self._cubin = compilers().submit(_compiled, file, tuple(sorted(defines.items())), _target())
        self._function: ctypes.c_void_p | None = None
        attributes = [_Attribute(_LAUNCH_CLUSTER, 0, (cluster, 1, 1))] if cluster > 1 else []
        # The last one: `launch` may leave it out.
        attributes.append(_Attribute(_LAUNCH_SERIALIZATION, 0, (1,)))
        self._count = len(attributes)
        self._attributes = (_Attribute * self._count)(*attributes)

    def compiled(self, seconds: float) -> bool:
        """Whether it is compiled within so many seconds. Raises what its compilation has raised."""
        if wait([self._cubin], seconds).not_done:
            return False
        self._cubin.result()
        return True

    def load(self) -> ctypes.c_void_p:
        """The function on the GPU, when it is compiled."""
        if self._function is None:
            cubin = self._cubin.result()
            torch.cuda.current_stream()  # the context must exist
            module, function = ctypes.c_void_p(), ctypes.c_void_p()  # other threads may load it, too
            check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {self._file}")
            code = driver().cuModuleGetFunction(ctypes.byref(function), module, self._name.encode())
            check(code, self._name)
            if self.shared > 48 << 10:
                code = driver().cuFuncSetAttribute(function, _ATTRIBUTE_MAX_DYNAMIC_SHARED, self.shared)
                check(code, f"{self.shared} bytes of shared memory for {self._name}")
            self._module, self._function = module, function
        return self._function

    def clusters(self, threads: int) -> int:
        """How many of its clusters of blocks of so many threads run at once, when it is compiled."""
        found, function = ctypes.c_int(), self.load()
        config = _Config((self._cluster, 1, 1), (threads, 1, 1), self.shared, None, self._attributes, 1)
        code = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config))
        check(code, f"clusters of {self._name}")
        return found.value

    def launch(self, grid: int, threads: int, params: ctypes.Structure, dependent: bool = True) -> None:
        """On the current stream.
        ``dependent``: may start while the kernel before it runs (it waits by itself)."""
        if rehearsed(self):
            return
        function = self._function or self.load()
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(
            (grid, 1, 1),
            (threads, 1, 1),
            self.shared,
            stream,
            self._attributes,
            self._count if dependent else self._count - 1,
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        check(driver().cuLaunchKernelEx(ctypes.byref(config), function, arguments, None), "launch")


def _target() -> str:
    """The architecture to compile for."""
    major, minor = this_device().arch
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _compiled(file: str, defines: tuple[tuple[str, int], ...], target: str) -> bytes:
    """The cubin, from the cache folder if it is there."""
    text, key = source_of(file, defines, f"{target} {torch.version.cuda}")
    path = made_anew("sgla", "cuda", f"{Path(file).stem}-{key}.cubin")

    def make(scratch: Path) -> Path:
        (scratch / path.name).write_bytes(_nvrtc(text, file, target))
        return scratch / path.name

    if not path.exists():
        make_once(path, make)
    return path.read_bytes()


def source_of(file: str, defines: tuple[tuple[str, int], ...], target: str) -> tuple[str, str]:
    """The text to compile, and its key in the cache for ``target``."""
    text = "".join(f"#define {name} {value}\n" for name, value in defines) + _with_headers(file)
    return text, hashlib.sha256(f"{target} {text}".encode()).hexdigest()[:32]


def _with_headers(file: str) -> str:
    """A source with its headers in their place: no two of them may include the same one."""
    text = (source_folder("cuda") / file).read_text().replace("#pragma once", "")
    return re.sub(r'#include "(.+)"', lambda found: _with_headers(found[1]), text)


def _nvrtc(text: str, name: str, arch: str) -> bytes:
    from cuda.bindings import nvrtc

    def ok(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"NVRTC failed on {name}: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) == 2 else result[1:]

    program = ok(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--extra-device-vectorization"]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result[0]):
        log = b" " * ok(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile:\n{log.decode()}")
    cubin = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin
