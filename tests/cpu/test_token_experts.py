"""The experts of very few tokens: the CUDA kernel, emulated, against torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import HERE, compile_kernel

from sgla.kernels.cuda import integer_experts, token_experts
from sgla.kernels.cuda.token_experts import Chosen, Cut
from sgla.kernels.integers import are_integers
from sgla.quant.weight import pack

D, F, EXPERTS = 264, 56, 7
SIZES = ((12 * 2 * 136, 304), (12 * 304, 136))  # of experts in integers
CASES = (("int4m32", 2, 3), ("int8g128", 2, 10), ("int4g64", 1, 9))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels of three blocks."""

    class Emulated:
        def __init__(self, file: str, name: str, defines: dict[str, int], shared: int) -> None:
            assert shared <= (113 if file == "token_experts.cu" else 227) << 10
            self.library = compile_kernel(file, name, defines, 256, 1, tmp_path)

        def launch(self, grid: int, threads: int, params: Any) -> None:
            self.library.run(ctypes.byref(params), 1, grid)

    for module in (token_experts, integer_experts):
        monkeypatch.setattr(module, "Kernel", Emulated)
        monkeypatch.setattr(module, "processors", lambda: 3)
        module._kernel.cache_clear()
    yield
    for module in (token_experts, integer_experts):
        module._kernel.cache_clear()


def assert_products(x: torch.Tensor, pairs: Chosen, p: torch.Tensor, ids: torch.Tensor, experts: int) -> None:
    (tokens, top_k), named = p.shape, {"rtol": 1e-2, "atol": 1e-2}
    w, v = torch.randn(experts, 2 * F, D).bfloat16() / 16, torch.randn(experts, D, F).bfloat16() / 8
    inner = token_experts.gate_up(x, pairs, w.view(-1, D), F, "silu")
    g, up = torch.einsum("td,tkfd->tkf", x.float(), w.float()[ids]).chunk(2, -1)
    expected = torch.nn.functional.silu(g) * up * p[:, :, None]
    torch.testing.assert_close(inner.float().view(tokens, top_k, F), expected, **named)
    summed = torch.einsum("tkf,tkdf->td", inner.float().view(tokens, top_k, F), v.float()[ids])
    alone = token_experts.down(inner, pairs, v.view(-1, F), D)
    torch.testing.assert_close(alone.float(), summed, **named)
    residual = torch.randn(tokens, D).bfloat16()
    added = token_experts.down(inner, pairs, v.view(-1, F), D, residual.clone())
    torch.testing.assert_close(added.float(), summed + residual.float(), **named)


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("tokens", "top_k", "common"), [(2, 4, 2), pytest.param(2, 3, 0, marks=pytest.mark.slow)]
)
def test_the_kernel_equals_the_products(emulated: None, tokens: int, top_k: int, common: int) -> None:
    """Rows that fill no whole number of a warp's reads, warps with several outputs, and with none."""
    torch.manual_seed(0)
    x, p = torch.randn(tokens, D).bfloat16(), torch.rand(tokens, top_k)
    ids = torch.stack([torch.randperm(EXPERTS - common)[:top_k].int() for _ in range(tokens)])
    ids[:, top_k - common :] = EXPERTS - common + torch.arange(common)
    assert_products(x, Chosen(p, ids, common), p, ids, EXPERTS)


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k"),
    [("int4g128", 1, 5), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_integers_are_multiplied_as_they_are(emulated: None, kind: str, tokens: int, top_k: int) -> None:
    """Channels that fill no whole number of a warp's loads; tokens with more experts than a block warps."""
    torch.manual_seed(0)
    d, f, experts, named = 304, 136, 12, {"rtol": 1e-2, "atol": 1e-2}
    x, p = torch.randn(tokens, d).bfloat16(), torch.rand(tokens, top_k)
    ids = torch.stack([torch.randperm(experts)[:top_k].int() for _ in range(tokens)])
    pairs, w, v = Chosen(p, ids, 0), *(pack(torch.randn(n, k) / 8, kind) for n, k in SIZES)
    assert are_integers(w)
    assert are_integers(v)
    inner = integer_experts.gate_up(x, pairs, w, f, "silu")
    dense = w.dequant().view(experts, 2 * f, d)
    g, up = torch.einsum("td,tkfd->tkf", x.float(), dense[ids]).chunk(2, -1)
    expected = torch.nn.functional.silu(g) * up * p[:, :, None]
    torch.testing.assert_close(inner.float().view(tokens, top_k, f), expected, **named)
    of_down = v.dequant().view(experts, d, f)[ids]
    summed = torch.einsum("tkf,tkdf->td", inner.float().view(tokens, top_k, f), of_down)
    torch.testing.assert_close(integer_experts.down(inner, pairs, v, d).float(), summed, **named)
    residual = torch.randn(tokens, d).bfloat16()
    added = integer_experts.down(inner, pairs, v, d, residual.clone())
    torch.testing.assert_close(added.float(), summed + residual.float(), **named)


def test_two_blocks_fit_on_a_multiprocessor() -> None:
    assert token_experts.cut(2048, 512, 1, False) == Cut(1, 3, 8 * 3 * 4104 + 4096)
    assert token_experts.cut(512, 2048, 9, True) == Cut(2, 6, 8 * 6 * 2056 + 9216)
    assert token_experts.refuses(2, 9, 2048, 512) is token_experts.refuses(2, 8, 2048, 1408) is None
    assert token_experts.refuses(1, 8, 7168, 2048) is not None
    assert token_experts.refuses(2, 17, 2048, 512) is not None


def test_integers_that_were_not_timed_are_left_to_triton() -> None:
    assert integer_experts.refuses(2, 8, 2048, 768, 4, 128) is None
    for tokens, bits, group in ((1, 8, 128), (1, 4, 32), (5, 4, 128)):
        assert integer_experts.refuses(tokens, 8, 2048, 768, bits, group) is not None
