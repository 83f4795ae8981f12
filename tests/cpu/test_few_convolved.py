"""A linear layer of few rows with the convolution behind it: the CUDA kernel, emulated, against the op; and
where the rule puts it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_cuda import HERE, compile_kernel
from recurrence import batch_of

pytest.importorskip("triton")
from test_gpu_ops import attend, nvidia, skinny_linear
from test_triton_states import UNITS, batch

from sgla.dist import Shard
from sgla.kernels import gpu, ops
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.cuda.skinny_gemm import CONVOLVED, TAPS, Config
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import rewrite
from sgla.kernels.gpu.states import DeviceStates, marks_of
from sgla.quant.weight import pack

CHANNELS, OTHERS, K = 56, 24, 512


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize("cut", [Config(2, False, 3, 1), Config(1, True, 4, 1)])
def test_the_kernel_equals_the_ops(cut: Config, tmp_path: Path) -> None:
    """Rows that begin, that go on, and that leave a second state; the last tile is moved back."""
    torch.manual_seed(0)
    reads, writes, marks = [3, 0, 5], [3, 1, 2], [(1, 1, 4)]
    x, w = torch.randn(3, K).bfloat16(), (torch.randn(CHANNELS + OTHERS, K) * K**-0.5).bfloat16()
    taps, norm = torch.randn(CHANNELS, TAPS), torch.rand(K) + 0.5
    state = ops.StateLayer(torch.randn(UNITS, CHANNELS, TAPS - 1).bfloat16(), torch.empty(UNITS, 0, 0, 0))
    mine, batch = state.conv.clone(), batch_of([1] * 3, reads, writes, marks)
    y = (ops.rms_norm(x.float(), norm, 1e-6) @ w.float().T).bfloat16()
    expected = ops.causal_conv(y[:, :CHANNELS], taps, None, state, batch)

    staged = skinny_gemm._staged(3, K, cut, False, True)
    defines = {"NT": 1, "MT": cut.tiles, "HALF": int(cut.half), "STAGES": cut.stages}
    defines |= {"NORM": 1, "EPILOGUE": CONVOLVED, "STAGED": staged.rows}
    n = len(w)
    units = [torch.tensor(column, dtype=torch.int32) for column in (reads, writes)]
    units.append(torch.from_numpy(marks_of(torch.tensor(marks).numpy(), 3)))
    out = torch.zeros(3, n).bfloat16()
    given = skinny_gemm._Convolved(
        x.data_ptr(), w.data_ptr(), None, norm.data_ptr(), None, None, out.data_ptr(), 3, n, K, x.stride(0),
        0, out.stride(0), 1e-6, 1.0, 0, taps.data_ptr(), mine.data_ptr(), *(u.data_ptr() for u in units),
        CHANNELS, mine.stride(1), mine.stride(2), mine.stride(0),
    )  # fmt: skip
    library = compile_kernel("skinny_gemm.cu", "skinny_gemm", defines, 256, 1, tmp_path, 18 << 10)
    library.run(ctypes.byref(given), 1, 2)
    torch.testing.assert_close(out[:, CHANNELS:], y[:, CHANNELS:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[:, :CHANNELS], expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mine[1:], state.conv[1:], rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it on the device")
@pytest.mark.parametrize("runs", [False, True])
def test_the_rule_takes_rows_that_do_not_guess(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """Others go through both kernels, one behind the other."""
    monkeypatch.setattr(rewrite, "this_device", lambda: nvidia("H200", (9, 0), 132))
    plain, device = batch(0, 3), batch(3, 3)
    device.media = device.canvas = None
    device.ids = torch.arange(3, dtype=torch.int32)
    assert isinstance(device.states, DeviceStates)
    device.states.runs = torch.ones(3, dtype=torch.int32) if runs else None
    taken: list[bool] = []

    def linear(x: Any, w: Any, *, convolution: Any = None, **given: Any) -> Any:
        taken.append(convolution is not None)
        if convolution is None:
            return skinny_linear(x, w, **given)
        y = skinny_linear(x, w, **given | {"epilogue": skinny_gemm.STORE})
        state = ops.StateLayer(convolution.state, torch.empty(UNITS, 0, 0, 0))
        with using(None):
            made = ops.causal_conv.body(y[:, :CHANNELS], convolution.taps, None, state, plain)
        return torch.cat([made, y[:, CHANNELS:]], 1)

    monkeypatch.setattr(skinny_gemm, "linear", linear)
    torch.manual_seed(0)
    table, w = (pack(torch.randn(n, 64) / 8, "bf16") for n in (9, CHANNELS + OTHERS))
    taps, norm = torch.randn(CHANNELS, TAPS), torch.rand(64) + 0.5
    state = ops.StateLayer(torch.randn(UNITS, CHANNELS, TAPS - 1).bfloat16(), torch.empty(UNITS, 0, 0, 0))
    begun = state.conv.clone()

    class Layer:
        unrecorded, shard = "", Shard()
        spec, embed = SimpleNamespace(hidden=64), SimpleNamespace(weight=table)

        def forward(self, batch: Any, kv: Any, rows: Any) -> torch.Tensor:
            x = ops.rms_norm(ops.embedding(batch.ids, table), norm, 1e-6)
            x, z, b = ops.linear(x, w).split([CHANNELS, OTHERS - 8, 8], dim=1)
            return torch.cat([ops.causal_conv(x, taps, None, state, batch), z, b], 1)

    plain.ids = device.ids
    expected = Layer().forward(plain, [], None).float()
    left = state.conv.clone()
    state.conv.copy_(begun)
    forward = gpu.RecordedForward(Layer(), [], gpu.GpuOps(attend))  # type: ignore[arg-type]
    found = forward.hidden(device).float()
    assert not forward.notes
    [program] = forward._programs.values()
    assert program.work.taken["norm + few rows + convolved"] == 1
    assert taken == [not runs]
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(state.conv[1:], left[1:], rtol=3e-2, atol=3e-2)
