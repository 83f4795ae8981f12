"""Linear layers of prompts, with what follows them, against torch in higher precision."""

from __future__ import annotations

import pytest
import torch

from sgla.kernels import ops
from sgla.kernels.ops import KVLayer

pytest.importorskip("triton")
BF16 = torch.bfloat16


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    out, expected = out.double(), expected.double()
    return float((out - expected).norm() / expected.norm())


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16, device="cuda") * scale


@pytest.mark.parametrize("m", [257, 700, 4096])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 2048), (1088, 512)])
def test_prompt_gemm(m: int, n: int, k: int) -> None:
    from sgla.kernels.cuda import prompt_gemm

    x, w, bias = random(m, k), random(n, k, scale=k**-0.5), torch.randn(n, device="cuda")
    y = x.double() @ w.double().t()
    for _ in range(3):
        assert relative(prompt_gemm.linear(x, w), y) < 5e-3
    assert relative(prompt_gemm.linear(x, w, bias=bias), y + bias) < 5e-3
    for epilogue, kind in ((prompt_gemm.SILU, "silu"), (prompt_gemm.GELU, "gelu_tanh")):
        assert relative(prompt_gemm.linear(x, w, epilogue=epilogue), ops.act_mul(y, kind)) < 5e-3
        shifted = prompt_gemm.linear(x, w, bias=bias, epilogue=epilogue)
        assert relative(shifted, ops.act_mul(y + bias, kind)) < 5e-3


@pytest.mark.parametrize("m", [257, 5184])
@pytest.mark.parametrize(("heads", "dim", "k"), [(16, 80, 1280), (5, 72, 512), (4, 64, 1024)])
def test_turned(m: int, heads: int, dim: int, k: int) -> None:
    """Pairs of q and k by their token's angles, and v as it is."""
    from sgla.kernels.cuda import prompt_gemm

    columns, n = 2 * heads * dim, -(-3 * heads * dim // 32) * 32
    x, w, bias = random(m, k), random(n, k, scale=k**-0.5), torch.randn(n, device="cuda")
    angles = torch.randn(m, dim // 2, device="cuda")
    by = torch.stack([angles.cos(), angles.sin()], 2).flatten(1)
    y = x.double() @ w.double().t() + bias
    a, b = y[:, :columns].view(m, 2 * heads, -1, 2).unbind(3)
    cos, sin = (values.double()[:, None] for values in (angles.cos(), angles.sin()))
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], 3).reshape(m, columns)
    expected = torch.cat([turned, y[:, columns:]], 1)
    for _ in range(3):
        assert relative(prompt_gemm.linear_turned(x, w, bias, by, columns), expected) < 5e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (7, 2, 128), (14, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_heads(heads: int, kv_heads: int, dim: int, norm: bool, in_place: bool) -> None:
    """q, k and v beside each other and in the pages; with a norm of each head, or a bias."""
    from sgla.kernels.cuda import prompt_gemm
    from sgla.kernels.cuda.decode_attention import Projection

    m, k, n = 5003, 1024, (heads + 2 * kv_heads) * dim
    weight = random(n, k, scale=k**-0.5)
    positions = torch.randint(0, 500, (m,), device="cuda").int()
    out_loc = (16 + torch.randperm(m + 40, device="cuda")[:m]).int()
    angles = torch.randn(500, dim // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    q_norm, k_norm = (torch.rand(dim, device="cuda") + 0.5 for _ in range(2)) if norm else (None, None)
    bias = None if norm else torch.randn(n, device="cuda")
    projection = Projection(cos_sin, q_norm, k_norm, 1e-6)
    x = random(m, k)
    pages = [
        torch.zeros(2, 320, kv_heads, 16, dim, dtype=kind, device="cuda").transpose(2, 3)
        for kind in (BF16, torch.float32)
    ]
    kv, expected_kv = (KVLayer(pool[0], pool[1]) for pool in pages)
    assert prompt_gemm.holds_heads(projection, kv)
    qkv = (x.double() @ weight.double().t()).float() + (0 if bias is None else bias)
    expected = ops.qk_norm_rope_store(qkv, positions, *projection[:4], expected_kv, out_loc)
    q = prompt_gemm.linear_heads(x, weight, positions, projection, kv, out_loc, in_place, bias)
    assert relative(q, expected) < 5e-3
    for pool, wanted in ((kv.k, expected_kv.k), (kv.v, expected_kv.v)):
        assert relative(pool, wanted) < 5e-3
        assert torch.equal(pool == 0, wanted == 0)
    if in_place:
        shape, strides = (m, 2, kv_heads, dim), (q.stride(0), kv_heads * dim, dim, 1)
        beside = q.as_strided(shape, strides, heads * dim)
        where = out_loc.long() // 16, out_loc.long() % 16
        assert torch.equal(beside[:, 0], kv.k[where])
        assert torch.equal(beside[:, 1], kv.v[where])
