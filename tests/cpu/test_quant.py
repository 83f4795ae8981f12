from __future__ import annotations

import pytest
import torch

from sgla.quant import HALF, LEVELS, Kind, Weight, concat, pack

KINDS: list[Kind] = ["f32", "bf16", "int8", "int4", "q8_0", "q5_0", "q4_0", "fp8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 7), (32, 64), (33, 100)])
def test_error_is_within_half_a_quantum(kind: Kind, n: int, k: int) -> None:
    torch.manual_seed(n)
    w = torch.randn(n, k)
    if kind in LEVELS:
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
        span = groups.amax(2) - groups.amin(2) if kind not in HALF else 2.05 * groups.abs().amax(2)
        if kind in HALF:
            span *= HALF[kind] / (HALF[kind] - 1)  # the lowest level has no opposite
        bound = span.repeat_interleave(32, 1)[:, :k] / LEVELS[kind] * (1.5 if kind == "int4" else 0.75)
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


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_tiny_weights_keep_their_shape(kind: Kind, size: float) -> None:
    """Steps are multiples of float16's smallest number: one more of them at the most."""
    torch.manual_seed(0)
    w = torch.randn(16, 64) * size
    error = (pack(w, kind).dequant() - w).abs().max()
    span = w.view(16, 2, 32).amax(2) - w.view(16, 2, 32).amin(2)
    if kind in HALF:
        span = 2 * w.abs().view(16, 2, 32).amax(2) * HALF[kind] / (HALF[kind] - 1)
    assert error <= 0.75 * (span.max() / LEVELS[kind] + 2**-24)


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


@pytest.mark.parametrize("kind", LEVELS)
def test_given_quants_are_kept(kind: Kind) -> None:
    torch.manual_seed(0)
    q = torch.randint(0, LEVELS[kind] + 1, (9, 64))
    scale, low = torch.rand(9, 2).half(), torch.randn(9, 2).half()
    if kind in HALF:
        low = scale * -HALF[kind]
    want = q.view(9, 2, 32) * scale.float()[..., None] + low.float()[..., None]
    got = Weight.of_groups(kind, q, scale, None if kind in HALF else low)
    assert torch.equal(got.dequant(), want.view(9, 64))


def test_constant_and_zero_weights() -> None:
    for value in (0.0, 0.25):
        for kind in KINDS:
            got = pack(torch.full((3, 40), value), kind).dequant()
            assert torch.allclose(got, torch.full((3, 40), value), rtol=1e-2)
