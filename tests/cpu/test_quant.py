from __future__ import annotations

import pytest
import torch

from sgla.quant import Weight, concat, pack
from sgla.quant.weight import Kind

KINDS: list[Kind] = ["f32", "bf16", "int8", "int4", "fp8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 7), (32, 64), (33, 100)])
def test_error_is_within_half_a_quantum(kind: Kind, n: int, k: int) -> None:
    torch.manual_seed(n)
    w = torch.randn(n, k)
    if kind in ("int8", "int4"):
        w[:, 0] *= 100  # which concerns its own group alone
    error = (pack(w, kind).dequant() - w).abs()
    if kind == "f32":
        bound = torch.zeros(n, 1)
    elif kind == "bf16":
        bound = w.abs() * 2**-8
    elif kind == "fp8":
        # half of the last of three bits, and of the smallest number below those
        bound = w.abs() * 2**-4 * 1.001 + w.abs().amax(1, keepdim=True) / 448 * 2**-10
    else:
        # half a step, plus the rounding of scale and minimum to float16; int4 gives up ends of a group where that pays
        groups = torch.nn.functional.pad(w, (0, -k % 32), mode="replicate").view(n, -1, 32)
        span = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1)[:, :k]
        levels = 15 if kind == "int4" else 255
        bound = span / levels * (1.5 if kind == "int4" else 0.75)
    assert bool((error <= bound).all())


def test_int4_is_fitted_to_its_groups() -> None:
    """A fifth less squared error than from the least to the largest weight, and never more in any group."""
    torch.manual_seed(0)
    w = torch.randn(64, 320)
    groups = w.view(-1, 32)
    low = groups.amin(1, keepdim=True).half().float()
    scale = ((groups.amax(1, keepdim=True) - low) / 15).half().float()
    plain = ((groups - low) / scale).round() * scale + low
    errors = [(values.view(-1, 32) - groups).square().sum(1) for values in (pack(w, "int4").dequant(), plain)]
    assert bool((errors[0] <= errors[1] * 1.0001).all())
    assert errors[0].sum() < 0.83 * errors[1].sum()


def test_int4_keeps_what_has_sixteen_levels() -> None:
    torch.manual_seed(0)
    w = torch.randint(0, 16, (9, 64)) * 0.25 - 1.5
    assert torch.equal(pack(w, "int4").dequant(), w)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_tiny_weights_keep_their_shape(kind: Kind, size: float) -> None:
    """Steps are multiples of float16's smallest number: one more of them at the most."""
    torch.manual_seed(0)
    w = torch.randn(16, 64) * size
    error = (pack(w, kind).dequant() - w).abs().max()
    span = w.view(16, 2, 32).amax(2) - w.view(16, 2, 32).amin(2)
    assert error <= 0.75 * (span.max() / (15 if kind == "int4" else 255) + 2**-24)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_and_concat_commute_with_dequant(kind: Kind) -> None:
    torch.manual_seed(0)
    a, b = pack(torch.randn(10, 96), kind), pack(torch.randn(6, 96), kind)
    both = concat([a, b])
    dense = both.dequant()
    assert torch.equal(dense, torch.cat([a.dequant(), b.dequant()]))
    assert torch.equal(both.rows(3, 12).dequant(), dense[3:12])
    assert torch.equal(both.columns(32, 96).dequant(), dense[:, 32:])
    ids = torch.tensor([15, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(both.take(ids), dense[ids.long()].float())


@pytest.mark.parametrize(("kind", "levels"), [("int4", 16), ("int8", 256)])
def test_given_quants_are_kept(kind: Kind, levels: int) -> None:
    torch.manual_seed(0)
    q = torch.randint(0, levels, (9, 64))
    scale, low = torch.rand(9, 2).half(), torch.randn(9, 2).half()
    want = q.view(9, 2, 32) * scale.float()[..., None] + low.float()[..., None]
    assert torch.equal(Weight.of_groups(kind, q, scale, low).dequant(), want.view(9, 64))


def test_constant_and_zero_weights() -> None:
    for value in (0.0, 0.25):
        for kind in KINDS:
            got = pack(torch.full((3, 40), value), kind).dequant()
            assert torch.allclose(got, torch.full((3, 40), value), rtol=1e-2)
