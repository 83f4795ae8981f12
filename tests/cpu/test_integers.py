"""Weights of 4 and 8 bits for GPUs: what they hold, and their kernels in Triton's interpreter."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from sgla.errors import ConfigError
from sgla.kernels.cuda import integer_gemm
from sgla.kernels.integers import GROUPS, KINDS
from sgla.model.sizes import kinds_of
from sgla.quant.integers import Integers
from sgla.quant.weight import pack, storage


def made(kind: str, n: int, k: int) -> tuple[Integers, tuple[torch.Tensor, ...]]:
    """A weight of random numbers, and these."""
    bits, group = KINDS[kind]
    found: Any = storage(kind)
    groups = -(-k // group)
    q = torch.randint(0, 1 << bits, (n, k)).to(torch.uint8)
    zero, scale = torch.randint(0, 1 + (1 << bits), (n, groups)).float(), torch.rand(n, groups).half().float()
    if not found.whole:
        zero = torch.rand(n, groups).half().float() * 8 + (128 if bits == 8 else 0)
    return found.of(q, zero, scale), (q, zero, scale)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_held_without_loss(kind: str) -> None:
    _, group = KINDS[kind]
    for n, k in ((3, 128), (2, 200), (1, 40), (4, 384)):
        w, (q, zero, scale) = made(kind, n, k)
        for found, given in zip(w.unpack(k, *w.tensors), (q, zero, scale), strict=True):
            assert torch.equal(found, given)
        dense = (q - zero.repeat_interleave(group, 1)[:, :k]) * scale.repeat_interleave(group, 1)[:, :k]
        assert torch.equal(w.dequant(), dense)
        assert torch.equal(w.take(torch.tensor([n - 1, 0])), dense[[n - 1, 0]])
        if k > group:
            assert torch.equal(w.columns(group, k).dequant(), dense[:, group:])
            with pytest.raises(ConfigError, match="split over ranks between groups"):
                w.columns(0, group // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_as_fine_as_the_bits_allow(kind: str) -> None:
    bits, group = KINDS[kind]
    dense = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    dense[0, :group] = 0
    error = (pack(dense, kind).dequant() - dense).norm() / dense.norm()
    assert error < (0.1 if bits == 4 else 0.007)
    assert not pack(dense, kind).dequant()[0, :group].any()


def test_what_gpus_make_of_a_quantization() -> None:
    for name, kind in (("int4", "int4g64"), ("int8", "int8g128")):
        assert kinds_of("bfloat16", name, None, "cuda") == (kind, "bf16", "bf16")
        assert kinds_of("bfloat16", name).linear == name
    assert {group for _, group in KINDS.values()} == set(GROUPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on the device")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_oracle(kind: str) -> None:
    """Tiles that reach beyond rows, outputs and channels; a k in two parts."""
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton")
    from sgla.kernels.triton import integers

    torch.manual_seed(0)
    for m, n, k, splits in ((5, 70, 200, 1), (33, 40, 256, 2)):
        w, bias = pack(torch.randn(n, k), kind), torch.randn(n)
        assert isinstance(w, Integers)
        x = torch.randn(m, k)
        found = integers.linear(x, w, bias, tile=integers.Tile(32, 64, 4, 2, splits))
        torch.testing.assert_close(found, x @ w.dequant().T + bias, rtol=1e-4, atol=1e-4)
        assert torch.equal(integers.unpack(w, torch.float32), w.dequant())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on the device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_packs_as_torch_does(kind: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton")
    from sgla.kernels.triton import integers

    found: Any = storage(kind)
    for n, k in ((40, 384), (5, 200), (17, 1000)):
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()
        dense[0, :128], dense[1], dense[2] = 0, dense[1].abs(), 1e-9 * dense[2]
        w = pack(dense, kind)
        for made, expected in zip(integers.pack(dense, *KINDS[kind], found.whole), w.tensors, strict=True):
            assert torch.equal(made, expected)


@pytest.mark.parametrize("kind", [*KINDS, *integer_gemm.OTHERS])
@pytest.mark.parametrize(("n", "k"), [(32, 8), (200, 1000), (6144, 4096), (8192, 29568), (64, 32768)])
def test_a_cut_for_few_rows_fits_every_weight(kind: str, n: int, k: int) -> None:
    """Into the shared memory of a multiprocessor, with all the blocks that are to be there; so many rows that
    nothing fits are cut in halves that do."""
    bits, group, codes = integer_gemm.packing(kind)
    assert integer_gemm.refuses(n, k) is None
    for rows, epilogue in itertools.product((1, 2, 4, 8, 16), (integer_gemm.ADD, integer_gemm.SILU)):
        outputs = n // 2 if epilogue == integer_gemm.SILU else n
        shape = integer_gemm.Shape(rows, outputs, k, bits, group, True, epilogue, codes=codes)
        config = integer_gemm.default_config(shape)
        assert config is not None or rows > 8, shape
        if config is not None:
            made = integer_gemm.plan(shape, config)
            assert made is not None
            assert config.resident * (made.shared + 1024) <= integer_gemm.SHARED
            assert made.shared > rows * made.x_row
            assert shape.columns(config) <= outputs
            assert (made.grid % config.slices, -(-shape.blocks // config.unit) >= config.slices) == (0, True)
