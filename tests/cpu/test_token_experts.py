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
from sgla.quant.weight import Weight, pack

D, F, EXPERTS = 264, 56, 7
SIZES = ((12 * 2 * 136, 304), (12 * 304, 136))  # of experts in integers
CASES = (("int4m32", 2, 3), ("int8g128", 2, 10), ("int4g64", 1, 9))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels of three blocks."""

    class Emulated:
        def __init__(self, file: str, name: str, defines: dict[str, int], shared: int) -> None:
            assert shared <= (113 if file == "token_experts.cu" else 227) << 10
            self.library = compile_kernel(file, name, defines, 32 * defines.get("WARPS", 8), 1, tmp_path)

        def launch(self, grid: int, threads: int, params: Any) -> None:
            self.library.run(ctypes.byref(params), 1, grid)

    for module in (token_experts, integer_experts):
        monkeypatch.setattr(module, "Kernel", Emulated)
        monkeypatch.setattr(module, "processors", lambda: 3)
        module._kernel.cache_clear()
    yield
    for module in (token_experts, integer_experts):
        module._kernel.cache_clear()


def assert_products(x: torch.Tensor, pairs: Chosen, f: int, w: Weight, v: Weight) -> None:
    """``w`` and ``v``: gate and up, and down, of all experts that are here."""
    (tokens, d), top_k, named = x.shape, pairs.ids.shape[1], {"rtol": 1e-2, "atol": 1e-2}
    ids, here, p = pairs.ids.clamp(min=0), pairs.ids >= 0, pairs.probabilities
    inner = token_experts.gate_up(x, pairs, w.data, f, "silu", w.scale)
    g, up = torch.einsum("td,tkfd->tkf", x.float(), w.dequant().view(-1, 2 * f, d)[ids]).chunk(2, -1)
    expected = torch.nn.functional.silu(g) * up * p[:, :, None]
    torch.testing.assert_close(inner.float().view(tokens, top_k, f)[here], expected[here], **named)
    inner.view(tokens, top_k, f)[~here] = torch.nan  # nobody reads it
    of_down = v.dequant().view(-1, d, f)[ids].where(here[:, :, None, None], 0)
    known = inner.float().view(tokens, top_k, f).where(here[:, :, None], 0)
    summed = torch.einsum("tkf,tkdf->td", known, of_down)
    alone = token_experts.down(inner, pairs, v.data, d, scale=v.scale)
    torch.testing.assert_close(alone.float(), summed, **named)
    residual = torch.randn(tokens, d).bfloat16()
    added = token_experts.down(inner, pairs, v.data, d, residual.clone(), v.scale)
    torch.testing.assert_close(added.float(), summed + residual.float(), **named)


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "common", "room"),
    [
        ("bf16", 2, 4, 2, 113 << 10),
        ("fp8", 2, 4, 1, 113 << 10),
        ("fp8", 1, 3, 0, 6 << 10),
        pytest.param("bf16", 2, 3, 0, 113 << 10, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_the_products(
    emulated: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tokens: int,
    top_k: int,
    common: int,
    room: int,
) -> None:
    """Rows that fill no whole number of a warp's reads, warps with several outputs, and with none. Where
    there is little ``room`` rows come in parts."""
    torch.manual_seed(0)
    monkeypatch.setattr(token_experts, "SHARED", (0, room))
    d, f = (D, F) if kind == "bf16" else (544, 64)
    if room < 20 << 10:
        d, f = (544, 288)
    assert (token_experts.cut(d, f, tokens, False, 1 + (kind == "bf16")).parts > 1) == (room < 20 << 10)
    x, p = torch.randn(tokens, d).bfloat16(), torch.rand(tokens, top_k)
    ids = torch.stack([torch.randperm(EXPERTS - common)[:top_k].int() for _ in range(tokens)])
    ids[:, top_k - common :] = EXPERTS - common + torch.arange(common)
    w, v = pack(torch.randn(EXPERTS * 2 * f, d) / 16, kind), pack(torch.randn(EXPERTS * d, f) / 8, kind)
    assert_products(x, Chosen(p, ids, common), f, w, v)


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("bf16", [[-1, 3, -1, 0], [2, -1, -1, -1]]),
        ("fp8", [[-1, -1, -1, -1], [2, 0, 6, 1]]),
        pytest.param("bf16", [[-1, -1, 5]], marks=pytest.mark.slow),
        pytest.param("bf16", [[-1, -1, -1]], marks=pytest.mark.slow),
    ],
)
def test_experts_of_other_ranks_are_left_out(emulated: None, kind: str, ids: list[list[int]]) -> None:
    """One token has fewer here than the other, or none."""
    torch.manual_seed(0)
    d, f = (D, F) if kind == "bf16" else (544, 64)
    w, v = pack(torch.randn(EXPERTS * 2 * f, d) / 16, kind), pack(torch.randn(EXPERTS * d, f) / 8, kind)
    chosen = torch.tensor(ids, dtype=torch.int32)
    x, p = torch.randn(len(ids), d).bfloat16(), torch.rand(chosen.shape)
    assert_products(x, Chosen(p, chosen, 0, held=True), f, w, v)


@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "blocks"),
    [
        ("int4g128", 1, 5, 3),
        ("int4g128", 1, 5, 19),
        *(pytest.param(*case, 3, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_integers_are_multiplied_as_they_are(
    emulated: None, kind: str, tokens: int, top_k: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels that fill no whole number of a warp's loads; tokens with more experts than a block warps.
    Blocks that have many tiles, and those that have fewer loads than warps."""
    monkeypatch.setattr(integer_experts, "processors", lambda: blocks)
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
    assert token_experts.cut(2048, 512, 1, False) == Cut(1, 1, 3, 8 * 3 * 4104 + 4096)
    assert token_experts.cut(512, 2048, 9, True) == Cut(2, 1, 6, 8 * 6 * 2056 + 9216)
    assert token_experts.cut(8192, 5120, 2, True, 1) == Cut(1, 2, 2, 8 * 2 * 4104 + 32768)
    assert token_experts.refuses(2, 9, 2048, 512) is token_experts.refuses(2, 8, 2048, 1408) is None
    for tokens, d, f in ((2, 5120, 8192), (1, 4096, 14336), (2, 4096, 6400)):
        assert token_experts.refuses(tokens, 2, d, f, 1) is None
    assert token_experts.refuses(1, 8, 7168, 2048) is not None
    assert token_experts.refuses(1, 9, 4096, 3072, 1) is not None
    assert token_experts.refuses(2, 17, 2048, 512) is not None


def test_integers_that_were_not_timed_are_left_to_triton() -> None:
    assert integer_experts.refuses(2, 8, 2048, 768, 4, 128) is None
    assert integer_experts.refuses(4, 8, 2048, 768, 4, 128) is None
    for tokens, bits, group in ((1, 8, 128), (1, 4, 32), (5, 4, 128)):
        assert integer_experts.refuses(tokens, 8, 2048, 768, bits, group) is not None
