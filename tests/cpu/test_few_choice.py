"""Which kernel multiplies few rows by weights of each storage on an H200, without one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from torch import Tensor

from sgla.device import H200
from sgla.kernels import device, ops
from sgla.kernels.cuda import batch_gemm, integer_gemm, skinny_gemm, stationary_gemm
from sgla.kernels.dispatch import using
from sgla.kernels.gpu.ops import GpuOps
from sgla.kernels.gpu.program import Program
from sgla.kernels.gpu.record import Record, Recorder
from sgla.kernels.gpu.rewrite import Asked
from sgla.kernels.gpu.rules import apply
from sgla.kernels.trace import STAND_INS
from sgla.kernels.triton import e2m1, integers
from sgla.quant.formats import FORMATS
from sgla.quant.weight import pack

K, N = 2048, 256
KERNELS = {
    "skinny": skinny_gemm,
    "integer": integer_gemm,
    "stationary": stationary_gemm,
    "batch": batch_gemm,
    "triton": integers,
    "packed": e2m1,  # Triton, too
}
JOINING = "skinny", "integer", "stationary"  # do what stands before and after the product, too
ROWS = 1, 5, 16, 64
CHOSEN = {
    "fp8": ("skinny", "skinny", "skinny", "batch"),
    "fp8g128": ("skinny", "skinny", "skinny", "batch"),
    "mxfp8": ("skinny", "skinny", "skinny", "packed"),
    "mxfp4": ("integer", "stationary", "stationary", "packed"),
    "nvfp4": ("integer", "stationary", "stationary", "packed"),
    "nf4": ("integer", "stationary", "stationary", "packed"),
    "fp4": ("integer", "stationary", "stationary", "packed"),
    "int4g32": ("integer", "stationary", "stationary", "triton"),
    "int4m32": ("integer", "stationary", "stationary", "triton"),
    "int4g64": ("integer", "stationary", "stationary", "triton"),
    "int4m64": ("integer", "stationary", "stationary", "triton"),
    "int4g128": ("integer", "stationary", "stationary", "triton"),
    "int4m128": ("integer", "stationary", "stationary", "triton"),
    "int8g32": ("integer", "stationary", "stationary", "triton"),
    "int8m32": ("integer", "stationary", "stationary", "triton"),
    "int8g64": ("integer", "stationary", "stationary", "triton"),
    "int8m64": ("integer", "stationary", "stationary", "triton"),
    "int8g128": ("integer", "stationary", "stationary", "triton"),
    "int8m128": ("integer", "stationary", "stationary", "triton"),
}


def recorded(kind: str) -> Record:
    """Gate and up behind a norm, and a product that is added to a stream."""
    gate_up, down = (pack(torch.randn(N, K), kind) for _ in range(2))
    recorder = Recorder()
    hidden, inner, stream = (
        recorder.input(name, (STAND_INS["tokens"], width), torch.bfloat16)
        for name, width in (("hidden", K), ("inner", K), ("stream", N))
    )
    with using(recorder):
        y = ops.act_mul(ops.linear(ops.rms_norm(hidden, torch.ones(K), 1e-6), gate_up), "silu")
        x, _ = ops.add_rms_norm(ops.linear(inner, down), stream + stream, torch.ones(N), 1e-6)
    recorder.record.outputs += [recorder.number(y), recorder.number(x)]
    return recorder.record


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What products come to, and with which epilogue. Nothing is computed."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(device, "_this", [H200])
    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *args, **given: None)

    def stand_in(name: str) -> Any:
        def linear(x: Tensor, *more: Any, epilogue: int = 0, **given: Any) -> Tensor:
            found.append((name, epilogue))
            return torch.zeros(len(x), N // 2 if epilogue == skinny_gemm.SILU else N, dtype=torch.bfloat16)

        return linear

    for name, module in KERNELS.items():
        monkeypatch.setattr(module, "linear", stand_in(name))
    return found


@pytest.mark.parametrize("kind", CHOSEN)
def test_each_storage_has_its_kernels(kind: str, launched: list[tuple[str, int]]) -> None:
    record, attend = recorded(kind), None
    for rows, kernel in zip(ROWS, CHOSEN[kind]):
        sizes = {"tokens": rows, "rows": rows, "sampled": 0, "gathered": 0}
        shapes = {"hidden": (rows, K), "inner": (rows, K), "stream": (rows, N)}
        given = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        launched.clear()
        Program(GpuOps(attend), apply(record, Asked(sizes)))(given)  # type: ignore[arg-type]
        assert [name for name, _ in launched] == [kernel] * 2, rows
        if kernel in JOINING:
            assert [epilogue for _, epilogue in launched] == [skinny_gemm.SILU, skinny_gemm.ADD], rows


def test_every_storage_of_gpus_is_in_the_table() -> None:
    ours = (format for format in FORMATS.values() if format.storage.startswith("sgla."))
    kept = {format.name for format in ours if "cuda" in format.devices}
    assert kept == {"f32", "bf16", *CHOSEN}
