"""Run a CUDA kernel of ours on an x86-64 CPU, thread by thread: its source as C++, with what a GPU does from
``emulated_cuda.h``. Slow, so for small shapes; what threads must wait for is checked, too."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sgla.kernels.cuda import build

HERE = shutil.which("g++") is not None and platform.machine() == "x86_64"  # whether it can
FOLDER = Path(__file__).parent
# A function with its template line, if it has one; those with PTX are the header's.
FUNCTION = re.compile(
    r"^(?:template <.*>\n)?__device__ __forceinline__ [^;{]*\{(?:.*\}\n|\n?(?:.*\n)*?\}\n)", re.M
)
SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?([\w<>?: ]+) (\w+)((?:\[[^\]]*\])*);")
APART = 228 << 10  # where arrays lie that are not of the dynamic shared memory
# Functions of one source, whose PTX needs numbers of that source.
OWN = {
    "cp_async_constants": "void cp_async_constants(u32 to, const void* from, int bytes, u64) "
    "{ copy(to, from, bytes, WIDTH); }\n",
    "cp_async_run": "void cp_async_run(u32 to, const float* from) { copy(to, from, 4 * RUN, 4 * RUN); }\n",
    "forget": "void forget(Self&, Place&) {}\n",
    "mma_halves": "void mma_halves(float (&d)[4], u32 lo, u32 hi, u32 x0, u32 x1) { u32 a[4] = {}; "
    "halves(lo, a[0], a[2]); if (!HALF) halves(hi, a[1], a[3]); "
    "mma_of<true>(d, a[0], a[1], a[2], a[3], x0, x1); }\n",
    "copy_tile": "template <class Map> "
    "void copy_tile(u32 to, const Map& map, u32 bar, int token, int at, u64) "
    "{ copy_box(to, map, bar, 0ll, (long long)token, 0ll, 0ll, (long long)at); }\n",
    "copy_w": "template <class Map> void copy_w(u32 to, const Map& map, u32 bar, int step, int row, u64) "
    "{ const long long k = step * BK; if (GATED) copy_box(to, map, bar, k, 0ll, 0ll, row / 16ll); "
    "else copy_2d(to, map, bar, k, row); }\n"
    "template <class Map> void copy_w(u32 to, const Map& map, u32 bar, int k, int w) "
    "{ for (int block = 0; block < CLUSTER; ++block) copy_box(emulated::there(to, block), map, "
    "emulated::there(bar, block), (long long)k, 0ll, 0ll, 0ll, (long long)w); }\n",
    "copy_weights": "template <class Map> "
    "void copy_weights(u32 to, const Map& map, u32 bar, int k, int row, int expert) "
    "{ if (GATED) copy_box(to, map, bar, (long long)k, 0ll, 0ll, row / 16ll, (long long)expert); "
    "else copy_2d(to, map, bar, k, row); }\n",
    "arrive_with_copies": "void arrive_with_copies(u32 bar) "
    "{ cp_async_commit(); cp_async_wait<0>(); emulated::counted(bar, 1, 0); }\n",
    "stmatrix_trans": "void stmatrix_trans(u32 to, u32 a, u32 b) { "
    "const int lane = emulated::me->number % 32, row = lane % 4 * 2, column = lane / 4 * 2; "
    "for (int i = 0; i < 4; ++i) emulated::write(from_lane(to, i / 2 * 8 + row + i % 2) + column, "
    "uint16_t((i < 2 ? a : b) >> 16 * (i % 2))); }\n",
    "times2": "u32 times2(u32 a, u32 b) { return pack2(emulated::lower(a) * emulated::lower(b), "
    "emulated::upper(a) * emulated::upper(b)); }\n",
    "release": "void release(u32 bar) { const u32 block = threadIdx.x % 128; "
    "if (block < CLUSTER) emulated::counted(emulated::there(bar, block), 1, 0); }\n",
    "log2_fast": "float log2_fast(float x) { return std::log2(x); }\n",
    "nanoseconds": "u64 nanoseconds() { return 0; }\n",
    "send_key": "void send_key(u64* to, long long key) { *to = key; }\n",
    "look_at_key": "long long look_at_key(const u64* from) { emulated::give_way(); return *from; }\n",
    "larger": "float larger(float a, float b) { return a != a || a > b ? a : b; }\n",
    "copy_16": "void copy_16(u32, const void*) { }\n",
    "arrive_when_copied": "void arrive_when_copied(u32) { }\n",
    "prefetch": "template <class Map> void prefetch(const Map&) { }\n",
    "first_halves": "u32 first_halves(u32) { return 0; }\n",
    "last_halves": "u32 last_halves(u32) { return 0; }\n",
    "with_bits": "template <u32 MASK, u32 BITS> u32 with_bits(u32) { return 0; }\n",
    "even_numbers": "u32 even_numbers(u32) { return 0; }\n",
    "multiply_bytes": "void multiply_bytes(int (&)[4], const u32 (&)[4], const u32 (&)[2]) { }\n",
    "to_e4m3": "unsigned short to_e4m3(float, float) { return 0; }\n",
    "value": "u32 value(u32, int, u32, u32) { return 0; }\n",
    "tanh_fast": "float tanh_fast(float x) { return std::tanh(x); }\n",
    "count_one": "int count_one(int* count) { return (*count)++; }\n",
    "arrive": "u32 arrive(u32* count) { return (*count)++; }\n",
    "arrived": "u32 arrived(const u32* count) { emulated::give_way(); return *count; }\n",
    "tell4": "void tell4(u32 to, u32 bar, int rank, const float* d) "
    "{ for (int i = 0; i < 4; ++i) tell(to + 4 * i, bar, rank, d[i]); }\n",
    "lds_float4": "float4 lds_float4(u32 from) { return emulated::read<float4>(from); }\n",
    "discard": "void discard(const float4*) { }\n",
    "cluster_wait_aligned": "void cluster_wait_aligned() { cluster_wait(); }\n",
    "pack_operand": "u32 pack_operand(float lo, float hi) { return pack2(lo, hi); }\n",
    "multiply": "void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) "
    "{ mma(d, a0, a1, a2, a3, b0, b1); }\n",
}


def compile_kernel(
    file: str,
    name: str,
    defines: Mapping[str, int],
    threads: int,
    cluster: int,
    folder: Path,
    room: int = 1 << 10,
) -> ctypes.CDLL:
    """A library whose ``run(params, ranks, grid)`` is the kernel ``name`` of ``csrc/cuda/file``; each of the
    ranks has its own of ``params``. ``room``: bytes of a shared array that is none of the dynamic memory."""
    source, key = build.source_of(file, tuple(sorted(defines.items())), "cpu")
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines.items())
    source = source.removeprefix(
        "".join(f"#define {macro} {value}\n" for macro, value in sorted(defines.items()))
    )
    source = FUNCTION.sub(_without_ptx, source)
    source = re.sub(r"^WGMMA\(.*\n", "", source, flags=re.M)
    arrays = iter(range(APART, 320 << 10, room))
    memory = "emulated::block().memory.data()"
    dynamic = r"extern __shared__ (?:__align__\(128\) )?unsigned char smem\[\];"
    source = re.sub(dynamic, f"unsigned char* smem = {memory};", source)
    source = SHARED.sub(
        lambda found: (
            f"auto& {found[2]} = *reinterpret_cast<{found[1]} (*){found[3]}>({memory} + {next(arrays)});"
        ),
        source,
    )
    path = folder / f"{name}-{key}.cpp"
    path.write_text(
        f'{macros}#include "{FOLDER / "emulated_cuda.h"}"\n{source}\n'
        f"static const Params* given;\n"
        f"static void entry() {{ {name}(given[emulated::me->block / gridDim.x]); "
        f"emulated::me->done = true; emulated::give_way(); }}\n"
        f'extern "C" void run(const Params* p, int ranks, int grid) '
        f"{{ given = p; emulated::launch(grid, ranks, {threads}, {cluster}, entry); }}\n"
    )
    library = path.with_suffix(".so")
    subprocess.run(["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


class Tensor(ctypes.Structure):
    """What the emulated copy engine knows of a tensor: see the header."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_longlong),
        ("size", ctypes.c_longlong),
        *((name, ctypes.c_longlong * 5) for name in ("dims", "strides", "box")),
    )


_tensors: list[Tensor] = []  # that kernels point to


def tensor_map(
    data: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], bytes_: bool = False
) -> ctypes.Array[ctypes.c_uint64]:
    """In the place of ``sgla.kernels.cuda.tensor_map``."""
    made = Tensor(data, len(dims), 1 if bytes_ else 2)
    for to, values in ((made.dims, dims), (made.strides, (made.size, *strides)), (made.box, box)):
        to[: len(values)] = values
    _tensors.append(made)
    return (ctypes.c_uint64 * 16)(ctypes.addressof(made))


def _without_ptx(found: re.Match[str]) -> str:
    if "asm" not in found[0]:
        return found[0]
    name = re.search(r"(\w+)\(", found[0].replace("__forceinline__", ""))
    return OWN.get(name[1], "") if name else ""


def kernels(folder: Path, room: int = 1 << 10) -> Any:
    """In place of ``build.Kernel``. Each is compiled at its first launch, with libraries in ``folder``."""

    class Emulated:
        def __init__(
            self, file: str, name: str, defines: dict[str, int], shared: int = 0, cluster: int = 1
        ) -> None:
            self.of = file, name, tuple(defines.items()), cluster

        def launch(self, grid: int, threads: int, params: Any) -> None:
            room = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
            at = -(-ctypes.addressof(room) // 64) * 64
            ctypes.memmove(at, ctypes.addressof(params), ctypes.sizeof(params))
            compiled(*self.of, threads).run(ctypes.c_void_p(at), 1, grid)

    @cache
    def compiled(
        file: str, name: str, defines: tuple[tuple[str, int], ...], cluster: int, threads: int
    ) -> ctypes.CDLL:
        return compile_kernel(file, name, dict(defines), threads, cluster, folder, room)

    return Emulated
