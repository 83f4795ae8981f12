"""Steps that run op by op, with products by native kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.products import op_by_op
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.quant.weight import pack

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("kind", "close"), [("f32", 1e-5), ("bf16", 1e-2), ("int8", 1e-2), ("int4", 1e-2), ("nf4", 1e-2)]
)
def test_products_are_those_of_dense_weights_and_none_are_unpacked(
    kind: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    table, w = pack(torch.randn(1000, 64), kind), pack(torch.randn(70, 64) / 8, kind)
    rows, dense, bias = table.dequant(), w.dequant(), torch.randn(70, dtype=torch.bfloat16)
    program = Program.record(
        lambda batch: ops.linear(ops.embedding(batch.ids, table), w, bias), ProgramLimits(16, 16)
    )
    ids = torch.tensor([999, 0, 31, 32, 999, 500], dtype=torch.int32)

    def forward(batch: ForwardBatch) -> Tensor:
        x = ops.embedding(ids, table)
        assert (x - rows[ids.long()]).norm() < 1e-3 * x.norm()  # some CPUs keep bfloat16 in 14 bits
        none = ops.linear(x[:0], w, bias)
        assert none.shape == (0, 70)
        return ops.linear(x, w, bias) + ops.linear(x.repeat(1, 2)[:, 64:], w)

    batch: ForwardBatch = None  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(type(w), "dequant", None)
        found = op_by_op(forward, program.run)(batch)
    expected = 2 * rows[ids.long()] @ dense.T + bias.float()
    assert (found - expected).norm() / expected.norm() < close
    assert op_by_op(forward, forward) is forward
