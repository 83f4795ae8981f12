"""The kernels of other CPUs, in an emulator: the tests of each op against its torch body, as on this one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import test_kernels
import torch
from emulated import TOOLS, emulated, executable
from levels import STORAGES

from sgla.kernels import build

LEVELS = [("i8mm", "aarch64"), ("dotprod", "aarch64"), ("generic", "aarch64"), ("avx2", "x86_64")]
# Each takes the compiler half a minute, the first time.
each = pytest.mark.parametrize(
    ("name", "arch"), [pytest.param(*level, marks=pytest.mark.slow) for level in LEVELS]
)
pytestmark = pytest.mark.native

X86 = "fma f16c bmi2 avx2"
AVX512 = f"{X86} avx512f avx512bw avx512vl avx512dq avx512cd"
VNNI = f"{AVX512} avx512_vnni"


@each
def test_a_program_is_of_its_level(name: str, arch: str) -> None:
    command = [*TOOLS[arch][1], str(executable(name, arch)), "--isa"]
    assert subprocess.check_output(command, text=True).strip() == name


@each
@pytest.mark.parametrize("kind", STORAGES)
def test_linear(name: str, arch: str, kind: str) -> None:
    with emulated(name, arch):
        for n, k in ((33, 50), (96, 576)):
            test_kernels.test_linear(name, kind, n, k)
        test_kernels.test_a_row_of_linear_does_not_depend_on_the_others(name, kind)


@each
def test_integer_products_at_their_largest(name: str, arch: str) -> None:
    if name == "generic":
        pytest.skip("it has none")
    with emulated(name, arch):
        for kind in ("int8", "q8_0", "int4", "iq4_nl"):
            test_kernels.test_integer_products_at_their_largest(kind, name)


@each
def test_other_ops(name: str, arch: str) -> None:
    with emulated(name, arch):
        test_kernels.test_rows_ops(name, 100)
        test_kernels.test_act_mul(name, "silu", 100)
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            test_kernels.test_qk_norm_rope_store(name, dtype, 4, 1, 80, 40, True)
        test_kernels.test_an_addend_comes_before_what_is_fused_behind(name, "bf16")
        for width in (7, 1024):
            test_kernels.test_rows_without_a_largest_number_have_no_best_token(width, name)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention(name: str, arch: str, dtype: torch.dtype) -> None:
    with emulated(name, arch):
        test_kernels.test_attention(name, 9, 3, 64, 16, dtype, 0, 0.0)
        test_kernels.test_attention(name, 6, 1, 80, 3, dtype, 129, 20.0)


@pytest.mark.parametrize(
    ("arch", "flags", "tiles", "best"),
    [
        ("x86_64", "sse4_2", False, "generic"),
        ("x86_64", X86, False, "avx2"),  # Haswell
        ("x86_64", AVX512, False, "avx512"),  # Skylake
        ("x86_64", VNNI, False, "avx512_vnni"),  # Cascade Lake
        ("x86_64", f"{VNNI} avx512_bf16", False, "avx512_bf16"),  # Zen 4
        ("x86_64", f"{VNNI} avx512_bf16 amx_tile amx_bf16", True, "amx"),  # Sapphire Rapids
        ("x86_64", f"{VNNI} avx512_bf16 amx_tile amx_bf16", False, "avx512_vnni"),  # tiles are not granted
        ("aarch64", "fp asimd", False, "generic"),  # Cortex-A72: Raspberry Pi 4
        ("aarch64", "fp asimd asimdhp asimddp", False, "dotprod"),  # Graviton 2, Apple M1, Raspberry Pi 5
        ("aarch64", "fp asimd asimddp sve i8mm bf16", False, "i8mm"),  # Graviton 3 and 4, Apple M2
        ("aarch64", "fp asimd asimddp i8mm", False, "dotprod"),
        ("riscv64", "", False, "generic"),
    ],
)
def test_the_best_level_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, arch: str, flags: str, tiles: bool, best: str
) -> None:
    monkeypatch.delenv("SGLA_CPU_ISA", raising=False)
    monkeypatch.setattr(build.platform, "machine", lambda: arch)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(build, "tiles_granted", lambda: tiles)
    found = [level.name for level in build.supported()]
    assert (found[0], found[-1]) == (best, "generic")
    monkeypatch.setenv("SGLA_CPU_ISA", found[-1])
    assert [level.name for level in build.supported()] == ["generic"]


def test_flags_of_arm_are_features(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0c\n"
    monkeypatch.setattr(Path, "read_text", lambda self: told)
    assert build.cpu_flags.__wrapped__() == {"fp", "asimd", "asimddp"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [level.name for level in build.levels_of("x86_64")])
def test_levels_of_other_machines_compile(name: str, tmp_path: Path) -> None:
    if name in [level.name for level in build.supported()]:
        pytest.skip("it runs here")
    if (compiler := shutil.which("g++")) is None or build.platform.machine() != "x86_64":
        pytest.skip("needs g++ for x86-64")
    for source in ("linear", "program", "sample"):
        path = build.source_folder("cpu") / f"{source}.cpp"
        command = [
            compiler,
            *build.FLAGS,
            *build.level(name).machine,
            "-c",
            str(path),
            "-o",
            str(tmp_path / source),
        ]
        subprocess.run(command, check=True)
