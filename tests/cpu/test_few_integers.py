"""Products of few rows by weights of 4 and 8 bits: the CUDA kernels, emulated, against the dense product."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from emulated_cuda import HERE, compile_kernel

from sgla.kernels import ops
from sgla.kernels.cuda import integer_gemm, stationary_gemm
from sgla.kernels.cuda.stationary_gemm import ADD, FLOAT32, SILU, STORE, Config, Shape
from sgla.quant.weight import pack

Few = integer_gemm.Config


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "rows", "epilogue", "cut"),
    [
        ("int4g128", 3, STORE, Config(1, 2)),
        ("int4g64", 16, ADD, Config(2, 1, 4, 2)),
        ("int4m32", 11, SILU, Config(1, 1, 3)),
        ("int8g128", 9, SILU, Config(1, 1, 2, early=1, behind=True)),
        ("int8g32", 16, ADD, Config(1, 2, 2)),
        ("int8m32", 6, SILU, Config(2, 2, 2)),
        ("int4g128", 1, FLOAT32, Config(1, 4, 1, 1, 2, 2, late=True)),
        ("int4g128", 16, ADD, Config(2, 2, early=1, behind=True)),
        ("int4g128", 16, SILU, Config(1, 2, 2, 4)),
        ("int4g128", 13, STORE, Config(4, 2, 2, 2, behind=True)),
        ("int4m32", 7, SILU, Config(4, 3, early=2)),
        ("int4g128", 1, STORE, Few(1, 8, 1, 2, early=0, after=True)),
        ("int4m32", 3, ADD, Few(1, 4, 2, 2, early=1, after=True)),
        ("int4g128", 16, SILU, Few(1, 4, 2)),
        ("int8g64", 1, SILU, Few(1, 4, 1, 2, after=True)),
        ("nf4", 9, SILU, Config(1, 1, 3)),
        ("nf4", 16, ADD, Config(2, 2, 2, 2, behind=True)),
        ("fp4", 6, STORE, Config(1, 4)),
        ("mxfp4", 16, ADD, Config(1, 2, 2, 2)),
        ("mxfp4", 11, SILU, Config(2, 2, behind=True)),
        ("nvfp4", 8, FLOAT32, Config(1, 2, 2)),
        ("nvfp4", 13, SILU, Config(2, 2, behind=True)),
        ("nf4", 1, SILU, Few(1, 4, 1, 2, early=1, after=True)),
        ("nf4", 13, ADD, Few(2, 2, 2, 2, 1, 1)),
        ("fp4", 3, STORE, Few(1, 8, 1, 2)),
        ("mxfp4", 1, SILU, Few(1, 4, 1, 4, early=1, after=True)),
        ("mxfp4", 16, ADD, Few(1, 2, 2)),
        ("nvfp4", 1, FLOAT32, Few(1, 8, 1, 2, after=True)),
        ("nvfp4", 2, SILU, Few(1, 1)),
        ("nvfp4", 11, SILU, Few(2, 2, 2, 2, 1, 1)),
    ],
)
def test_the_kernel_equals_the_oracle(
    kind: str, rows: int, epilogue: int, cut: Config | Few, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile reaches beyond the weight, the last block of channels beyond x."""
    for module in (integer_gemm, stationary_gemm):
        monkeypatch.setattr(module, "processors", lambda: 3)
    torch.manual_seed(0)
    n, k = 201 if epilogue == FLOAT32 else 200, 1000  # vocabularies may be odd
    w, x = pack(torch.randn(n, k), kind), torch.randn(rows, k).bfloat16()
    norm, columns = (None if epilogue == ADD else torch.rand(k) + 0.5), n // 2 if epilogue == SILU else n
    out = torch.randn(rows, columns).to(torch.float32 if epilogue == FLOAT32 else torch.bfloat16)
    y = (x.float() if norm is None else ops.rms_norm(x.float(), norm, 1e-6)) @ w.dequant().T
    y = ops.act_mul(y, "silu") if epilogue == SILU else y + out.float() if epilogue == ADD else y
    shape = integer_gemm.shape_of(w, integer_gemm.padded(rows), columns, norm is not None, epilogue)
    words, constants, factors = integer_gemm.tensors_of(w)
    tensors = x, words, constants, norm, None, out, factors
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    sizes = rows, columns, k, x.stride(0), out.stride(0), shape.blocks
    if isinstance(cut, Few):
        few = integer_gemm.plan(shape, cut)
        assert few is not None
        of = few.defines, 32 * integer_gemm.WARPS, cut.slices, tmp_path
        given: ctypes.Structure = integer_gemm._Params(*pointers, *sizes, few.x_row, 1e-6)
        compile_kernel("integer_gemm.cu", "integer_gemm", *of).run(ctypes.byref(given), 1, few.grid)
    else:
        made = stationary_gemm.plan(shape, cut)
        assert made is not None
        of = made.defines, made.threads, cut.slices, tmp_path
        library = compile_kernel("stationary_gemm.cu", "stationary_gemm", *of)
        given = stationary_gemm._Params(*pointers, *sizes, 1e-6)
        library.run(ctypes.byref(given), 1, made.parts * cut.slices)
    assert (out.float() - y).norm() < 5e-3 * y.norm()


@pytest.mark.parametrize("kind", ["int4g128", "int4m64", "nf4"])
def test_no_block_of_a_cluster_is_without_columns(kind: str) -> None:
    """It would wait for ever."""
    bits, group, codes = integer_gemm.packing(kind)
    for epilogue, slices in ((ADD, (5, 7)), (SILU, (5, 6, 7))):
        shape = Shape(16, 4096, 4096, bits, group, True, epilogue, codes=codes)
        for count in slices:
            assert stationary_gemm.plan(shape, Config(1, 1, count)) is None
        assert stationary_gemm.plan(shape, Config(1, 1, 8)) is not None


@pytest.mark.parametrize("kind", ["int4g128", "int4m32", "int8g64", *integer_gemm.OTHERS])
@pytest.mark.parametrize(("n", "k"), [(200, 1000), (6144, 4096), (4096, 14336), (5120, 17408)])
def test_cuts_fit_a_multiprocessor(kind: str, n: int, k: int) -> None:
    for rows in (1, 8, 16):
        for epilogue, columns in ((ADD, n), (SILU, n // 2)):
            bits, group, codes = integer_gemm.packing(kind)
            shape = Shape(rows, columns, k, bits, group, True, epilogue, codes=codes)
            cut = stationary_gemm.default_config(shape)
            assert cut is not None, shape
            made = stationary_gemm.plan(shape, cut)
            assert made is not None
            assert cut.resident * (made.shared + 1024) <= stationary_gemm.SHARED
            columns_of_tile = shape.columns(cut)
            assert -(-columns_of_tile // cut.slices) * (cut.slices - 1) < columns_of_tile
            covered = made.defines["WK"] * cut.blocks * cut.slices
            assert covered >= shape.blocks > covered - made.defines["WK"] * cut.blocks
