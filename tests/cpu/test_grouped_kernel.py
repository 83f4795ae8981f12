"""Products of experts with grouped pairs: the CUDA kernel, emulated, against torch."""

from __future__ import annotations

from pathlib import Path

import emulated_cuda
import pytest
import torch
from torch.nn.functional import silu

from sgla.kernels.cuda import grouped_gemm
from sgla.kernels.triton.moe import Groups
from sgla.quant.weight import pack

D, F, EXPERTS, TOP_K = 192, 64, 3, 2


def groups_of(ids: torch.Tensor, rows: int) -> Groups:
    """As ``moe.group`` has them, with a block more than there are."""
    flat = ids.flatten()
    order, blocks, first = flat.argsort(stable=True), [], 0
    for expert in range(EXPERTS):
        last = first + int((flat == expert).sum())
        blocks += [(expert, at, min(at + rows, last)) for at in range(first, last, rows)]
        first = last
    return Groups(order.int(), torch.tensor([*blocks, (-1, 0, 0)], dtype=torch.int32), TOP_K, rows)


@pytest.mark.skipif(not emulated_cuda.HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "tokens", "rows"),
    [
        ("int4g128", 50, 64),
        pytest.param("int4m32", 3, 64, marks=pytest.mark.slow),
        pytest.param("int4g64", 90, 128, marks=pytest.mark.slow),
        pytest.param("bf16", 90, 256, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_the_products(
    kind: str, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Channels that end in the middle of a load, blocks of few pairs and of all that there may be."""
    monkeypatch.setattr(grouped_gemm, "Kernel", emulated_cuda.kernels(tmp_path))
    monkeypatch.setattr(grouped_gemm, "tensor_map", emulated_cuda.tensor_map)
    monkeypatch.setattr(grouped_gemm, "processors", lambda: 2)
    for cached in (grouped_gemm._kernel, grouped_gemm._weight_map):
        cached.cache_clear()
    torch.manual_seed(0)
    x, ids = torch.randn(tokens, D).bfloat16(), torch.randint(0, 2, (tokens, TOP_K)) * 2
    ids[1, 1] = 1
    groups = groups_of(ids, rows)
    w, v = pack(torch.randn(EXPERTS * 2 * F, D) / 14, kind), pack(torch.randn(EXPERTS * 128, F) / 8, kind)
    given = (w.data, v.data) if kind == "bf16" else (w, v)
    inner = grouped_gemm.product(x, given[0], F, groups, "silu")
    y = grouped_gemm.product(inner, given[1], 128, groups)
    pairs = groups.order.long()
    of_pairs = ids.flatten()[pairs]
    gate, up = torch.einsum(
        "pd,pfd->pf", x[pairs // TOP_K].float(), w.dequant().view(EXPERTS, 2 * F, D)[of_pairs]
    ).chunk(2, -1)
    torch.testing.assert_close(inner.float(), silu(gate) * up, rtol=0.02, atol=0.02)
    expected = torch.einsum("pf,pdf->pd", inner.float(), v.dequant().view(EXPERTS, 128, F)[of_pairs])
    torch.testing.assert_close(y[pairs].float(), expected, rtol=0.02, atol=0.02)
