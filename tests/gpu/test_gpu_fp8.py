"""fp8 weights on the GPU against the torch oracle in float32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_gpu_runner import TINY, agreement, assert_rows_alone_equal_all, generate, make, prompt

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm, skinny_gemm
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import e2m1, elementwise, fp8
from sgla.quant.channels import E4M3Groups
from sgla.quant.weight import pack
from sgla.worker.region import GROWN

pytest.importorskip("triton")
BF16 = torch.bfloat16


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


FEW, SIDES = (1, 2, 3, 5, 8, 12, 16), ((6144, 4096), (4096, 4096), (256, 512), (4096, 12288))
CUTS = (1, False, 5, 2), (1, True, 5, 2), (1, False, 4, 2), (2, False, 4, 1), (1, False, 8, 1)


@pytest.fixture(scope="module")
def compiled_few() -> None:
    """Side by side."""
    scale = torch.ones(12288, device="cuda")
    with rehearsing():
        for m, (n, k) in itertools.product(FEW, SIDES):
            x, w = torch.zeros(m, k, dtype=BF16, device="cuda"), random_e4m3(n, k)[0]
            for norm, epilogue in itertools.product((None, scale), (0, skinny_gemm.ADD, skinny_gemm.SILU)):
                skinny_gemm.linear(x, w, scale=scale, norm=norm, epilogue=epilogue)
        w = random_e4m3(256, 1024)[0]
        for m, cut in itertools.product(FEW, CUTS):
            given: Any = {"epilogue": skinny_gemm.FLOAT32, "config": skinny_gemm.Config(*cut)}
            skinny_gemm.linear(torch.zeros(m, 1024, dtype=BF16, device="cuda"), w, scale=scale, **given)


@pytest.mark.parametrize(("n", "k"), SIDES)
@pytest.mark.parametrize("m", FEW)
@pytest.mark.usefixtures("compiled_few")
def test_few_rows_are_not_rounded(m: int, n: int, k: int) -> None:
    """The weights' e4m3 numbers are exact in bfloat16, those below its normal range included."""
    w = pack(torch.randn(n, k, device="cuda") * torch.logspace(-3, 0, k, device="cuda"), "fp8")
    x, norm = torch.randn(m, k, dtype=BF16, device="cuda"), torch.rand(k, device="cuda") + 0.5
    for options, given in (
        ({}, x.float()),
        ({"norm": norm, "eps": 1e-6}, ops.rms_norm(x.float(), norm, 1e-6)),
    ):
        y = given @ w.dequant().T
        assert relative(skinny_gemm.linear(x, w.data, scale=w.scale, **options), y) < 5e-3
        h = torch.randn(m, n, dtype=BF16, device="cuda")
        total = h.clone()
        skinny_gemm.linear(x, w.data, scale=w.scale, epilogue=skinny_gemm.ADD, out=total, **options)
        assert relative(total, h.float() + y) < 5e-3
        out = skinny_gemm.linear(x, w.data, scale=w.scale, epilogue=skinny_gemm.SILU, **options)
        assert relative(out, ops.act_mul(y, "silu")) < 1e-2


@pytest.mark.parametrize("m", FEW)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("compiled_few")
def test_few_rows_take_every_e4m3_number(m: int, cut: tuple[Any, ...]) -> None:
    """And numbers of x near the ends of bfloat16's range, each row with its own."""
    numbers = torch.arange(256, device="cuda").to(torch.uint8)
    numbers[[127, 255]] = 0  # NaN
    k, config = 1024, skinny_gemm.Config(*cut)
    w = torch.stack([numbers.roll(i) for i in range(k)], 1).contiguous().view(torch.float8_e4m3fn)
    one, scale = torch.ones(256, device="cuda"), torch.rand(256, device="cuda") + 0.5
    x = torch.zeros(m, k, dtype=BF16, device="cuda")
    at = torch.randint(0, k, (m,), device="cuda")
    sizes = 2.0 ** torch.linspace(-60, 60, m, device="cuda") if m > 1 else one[:1]
    x[torch.arange(m), at] = sizes.to(BF16)
    y = skinny_gemm.linear(x, w, scale=one, epilogue=skinny_gemm.FLOAT32, config=config)
    assert torch.equal(y, w.float().t()[at] * sizes.to(BF16).float()[:, None])
    x = torch.randn(m, k, dtype=BF16, device="cuda") * sizes.to(BF16)[:, None]
    x[:, 7] *= 2.0**12  # a number that is much larger than the others
    y = skinny_gemm.linear(x, w, scale=scale, epilogue=skinny_gemm.FLOAT32, config=config)
    for row in range(m):
        assert relative(y[row], (x[row].double() @ w.double().t()) * scale) < 3e-5


@pytest.mark.parametrize("m", [2, 7])
def test_few_rows_alone_equal_all(m: int) -> None:
    """Rows that take the same kernel."""
    w = pack(torch.randn(512, 2048, device="cuda"), "fp8")
    x, norm = torch.randn(m, 2048, dtype=BF16, device="cuda"), torch.rand(2048, device="cuda")
    given: dict[str, Any] = {"scale": w.scale, "norm": norm, "eps": 1e-6}
    given["config"] = skinny_gemm.Config(1, False, 4, 2)
    least = m if m > 2 else 1
    y = skinny_gemm.linear(x, w.data, **given)
    assert torch.equal(y[:least], skinny_gemm.linear(x[:least], w.data, **given))
    assert torch.equal(y.flip(0), skinny_gemm.linear(x.flip(0), w.data, **given))


TILES = {  # of batch_gemm: its Config, and rows
    (64, 1, 2): (17, 64, 128),
    (64, 2, 1): (33, 80, 192, 256),
    (64, 4, 2): (20, 64, 128),
    (64, 8, 2): (17, 64),
    (128, 1, 1): (48, 129, 256),
    (128, 2, 1): (90, 128),
    (128, 4, 1, True): (40, 96, 205),
    (192, 1, 1): (17, 64, 100, 137, 192, 201, 250, 256),
    (256, 1, 1): (64, 128),
    (160, 1, 1): (40, 220),
    (224, 1, 1, False, 256, 2): (150, 256),
    (64, 4, 1, True, 64): (65, 128),
}
PRODUCTS = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # 8B
PRODUCTS += [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # 0.6B


CHOSEN = 17, 32, 64, 129, 200, 253  # rows


def chosen(m: int, n: int, k: int) -> batch_gemm.Config:
    config = batch_gemm.default_config(m, n, k, e4m3=True)
    assert config is not None
    return config


def rounded_rows(m: int, k: int) -> fp8.Rounded:
    """Of different sizes."""
    x = torch.randn(m, k, dtype=BF16, device="cuda")
    return fp8.quantize(x * torch.logspace(-2, 2, m, device="cuda")[:, None].to(BF16))


def random_e4m3(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and scales that make the products of x of its size."""
    w = torch.randn(n, k, device="cuda") * 64
    return w.to(torch.float8_e4m3fn), (torch.rand(n, device="cuda") + 0.5) / (64 * k**0.5)


@pytest.fixture(scope="module")
def compiled_tiles() -> None:
    """All of their kernels, side by side."""
    w, scale = random_e4m3(1024, 1024)
    with rehearsing():
        for cut, rows in TILES.items():
            for m in rows:
                for epilogue in (batch_gemm.STORE, batch_gemm.FLOAT32, batch_gemm.SILU):
                    scales, config = batch_gemm.Scales(scale[:m], scale), batch_gemm.Config(*cut)
                    batch_gemm.linear(w[:m], w, config, epilogue=epilogue, scales=scales)
        for m, (n, k) in itertools.product(CHOSEN, PRODUCTS):
            config = chosen(m, n, k)
            batch_gemm.linear(w[:m], w, config, scales=batch_gemm.Scales(scale[:m], scale))


@pytest.mark.parametrize(("n", "k"), [*PRODUCTS, (1000, 3072)])
@pytest.mark.parametrize("cut", TILES)
@pytest.mark.usefixtures("compiled_tiles")
def test_tiles(cut: tuple[Any, ...], n: int, k: int) -> None:
    """Against sums in float64 of what was rounded. The tensor cores keep some 14 bits of a sum, and lose some
    of them at each addition."""
    config = batch_gemm.Config(*cut)
    row_tiles = -(-max(TILES[cut]) // config.rows)
    if config.apart and batch_gemm._tiles(n, config.tile) * row_tiles * config.split > 132 * config.per_sm:
        pytest.skip("blocks that wait for each other must fit on the GPU")
    w, scale = random_e4m3(n, k)
    bias, wide = torch.randn(n, device="cuda"), w.double() * scale.double()[:, None]
    for m in TILES[cut]:
        x, by_row = rounded_rows(m, k)
        given: dict[str, Any] = {"config": config, "scales": batch_gemm.Scales(by_row, scale)}
        y = (x.double() * by_row.double()[:, None]) @ wide.t()
        found = [batch_gemm.linear(x, w, **given) for _ in range(3)]  # blocks that are apart count on
        for out in found:
            assert relative(out, y) < 5e-3
            assert torch.equal(out, found[0])
        if config.split == 1:
            few = batch_gemm.Scales(by_row[:17], scale)
            assert torch.equal(batch_gemm.linear(x[:17], w, config, scales=few), found[0][:17])
        assert relative(batch_gemm.linear(x, w, bias=bias, **given), y + bias) < 5e-3
        exact = batch_gemm.linear(x, w, epilogue=batch_gemm.FLOAT32, **given)
        assert max(relative(a, b) for a, b in zip(exact, y)) < 2e-3 * max(1.0, k / 4096) ** 0.5
        if n % 16 == 0:
            out = batch_gemm.linear(x, w, epilogue=batch_gemm.SILU, **given)
            assert relative(out, ops.act_mul(y, "silu")) < 5e-3


@pytest.mark.parametrize("m", CHOSEN)
@pytest.mark.parametrize(("n", "k"), PRODUCTS)
@pytest.mark.usefixtures("compiled_tiles")
def test_the_chosen_tiles_equal_the_library(m: int, n: int, k: int) -> None:
    """Whose sums are not more exact. Behind the last row nothing is read and nothing written."""
    w, scale = random_e4m3(n, k)
    x, by_row = rounded_rows(m + 3, k)
    by_row[m:] = torch.nan
    out = torch.zeros(m + 3, n, dtype=BF16, device="cuda")
    scales = batch_gemm.Scales(by_row[:m], scale)
    batch_gemm.linear(x[:m], w, chosen(m, n, k), scales=scales, out=out[:m])
    library = fp8.linear(fp8.Rounded(x[:m], by_row[:m]), w, scale)
    assert relative(out[:m], library) < 5e-3
    y = (x[:m].double() * by_row[:m].double()[:, None]) @ (w.double() * scale.double()[:, None]).t()
    assert relative(out[:m], y) < 1.1 * relative(library, y)
    assert not out[m:].any()


@pytest.mark.parametrize("m", [1, 17, 64, 128, 300, 2048])
def test_many_rows_are_rounded_token_by_token(m: int) -> None:
    n, k = 6144, 4096
    w = pack(torch.randn(n, k, device="cuda"), "fp8")
    assert w.scale is not None
    x = torch.randn(m, k, dtype=BF16, device="cuda") * torch.logspace(-2, 2, m, device="cuda")[:, None].to(
        BF16
    )
    bias = torch.randn(n, device="cuda")
    q, scale = rounded = fp8.quantize(x)
    y = fp8.linear(rounded, w.data, w.scale, bias)
    expected = (q.float() * scale[:, None]) @ w.dequant().T + bias
    assert relative(y, expected) < 5e-3
    for row in (0, m - 1):  # a small token beside a large one keeps its precision
        assert relative(y[row], x[row].float() @ w.dequant().T + bias) < 0.05


@pytest.mark.parametrize(("m", "k"), [(1, 512), (16, 4096), (300, 5120)])
def test_norms_round_what_they_make(m: int, k: int) -> None:
    x = torch.randn(m, 2 * k, dtype=BF16, device="cuda")[:, :k]
    weight, residual = torch.rand(k, device="cuda") + 0.5, torch.randn(m, k, dtype=BF16, device="cuda")
    q, scale = fp8.norm_quantize(x, weight, 1e-6)
    expected, by_row = fp8.quantize(elementwise.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(scale, by_row, rtol=2**-7, atol=0)
    assert (q.float() == expected.float()).float().mean() > 0.9  # but for the order of the squares' sum
    norm, total, rounded = fp8.add_norm_quantize(x.contiguous(), residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert relative(norm, elementwise.rms_norm(total, weight, 1e-6)) < 1e-3
    q, scale = fp8.quantize(norm)
    assert torch.equal(rounded.numbers.float(), q.float())
    assert torch.equal(rounded.scale, scale)


def test_a_model_in_fp8_decodes_alike_alone_and_in_a_batch() -> None:
    runner: Any = make(quantization="fp8")
    weights = 2 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072) + 2 * TINY["vocab_size"] * 1024
    assert runner.facts.ledger["weights"] < 1.1 * weights + GROWN
    prompts = {slot: prompt(slot, 20 + 13 * slot) for slot in range(20)}
    together = generate(runner, prompts, 12, True)
    assert (
        agreement(together, generate(runner, prompts, 12, False)) >= 0.3
    )  # see fp8.linear: few rows are exact
    assert len({tuple(tokens) for tokens in together.values()}) == 20
    assert_rows_alone_equal_all(runner, 0.1)
    torch.cuda.empty_cache()


def products_in_groups(kind: str, m: int, n: int, k: int) -> list[float]:
    """How far products of a packed weight are from the oracle: with nothing, norm, add, gate; tiles."""
    w = pack(torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, k, device="cuda"), kind)
    x, norm = torch.randn(m, k, dtype=BF16, device="cuda"), torch.rand(k, device="cuda") + 0.5
    h, bias = torch.randn(m, n, dtype=BF16, device="cuda"), torch.randn(n, device="cuda")
    y, normed = x.float() @ w.dequant().T, ops.rms_norm(x.float(), norm, 1e-6) @ w.dequant().T
    found = [relative(e2m1.linear(x, w, bias), y + bias)]
    if kind in ("fp8g128", "mxfp8") and m <= skinny_gemm.MAX_ROWS:
        total = h.clone()
        given: Any = {"scale": w.scale}
        found.append(relative(skinny_gemm.linear(x, w.data, bias=bias, **given), y + bias))
        skinny_gemm.linear(x, w.data, epilogue=skinny_gemm.ADD, out=total, **given)
        found.append(relative(total, h.float() + y))
        given |= {"norm": norm, "eps": 1e-6}
        found.append(relative(skinny_gemm.linear(x, w.data, **given), normed))
        gated = skinny_gemm.linear(x, w.data, epilogue=skinny_gemm.SILU, **given)
        found.append(relative(gated, ops.act_mul(normed, "silu")) / 2)
    if kind == "fp8g128" and m >= batch_gemm.MIN_GROUPED:
        assert w.scale is not None
        rounded = fp8.quantize(x)
        y = (rounded.numbers.float() * rounded.scale[:, None]) @ w.dequant().T
        found.append(relative(fp8.grouped(rounded, w.data, w.scale, bias), y + bias))
        given = {"scales": batch_gemm.Scales(rounded.scale, w.scale)}
        cut, gated_cut = (batch_gemm.grouped_config(m, n, k, gated) for gated in (False, True))
        tiled = batch_gemm.linear(rounded.numbers, w.data, cut, bias=bias, **given)
        found.append(relative(tiled, y + bias))
        gated = batch_gemm.linear(rounded.numbers, w.data, gated_cut, epilogue=batch_gemm.SILU, **given)
        found.append(relative(gated, ops.act_mul(y, "silu")) / 2)
        if isinstance(w, E4M3Groups) and (blocks := w.blocks()) is not None:
            found.append(relative(fp8.blocks(rounded, w.data, blocks, bias), y + bias))
    return found


@pytest.mark.parametrize("kind", ["fp8g128", "nvfp4", "nf4", "mxfp8"])
def test_weights_with_scales_of_groups_equal_the_oracle(kind: str) -> None:
    cases = [
        (m, n, k)
        for m in (1, 3, 8, 16, 40, 100, 150, 200, 1000)
        for n, k in ((6144, 4096), (4096, 12288), (336, 1280))
    ]
    with rehearsing():
        for case in cases:
            products_in_groups(kind, *case)
    for case in cases:
        found = products_in_groups(kind, *case)
        assert max(found) < 6e-3, (case, found)


def cut_in_groups(m: int, cut: batch_gemm.Config) -> list[float]:
    """How far products of tiles are from the oracle: of k in parts three times, since blocks leave each other
    their sums; with the gate."""
    n, k = 1920, 4096
    w = pack(torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, k, device="cuda"), "fp8g128")
    assert w.scale is not None
    rounded = fp8.quantize(torch.randn(m, k, dtype=BF16, device="cuda"))
    y = (rounded.numbers.float() * rounded.scale[:, None]) @ w.dequant().T
    given: Any = {"scales": batch_gemm.Scales(rounded.scale, w.scale)}
    found = [relative(batch_gemm.linear(rounded.numbers, w.data, cut, **given), y) for _ in range(3)]
    alone, given["epilogue"] = cut._replace(split=1, apart=False), batch_gemm.SILU
    gated = batch_gemm.linear(rounded.numbers, w.data, alone, **given)
    return [*found, relative(gated, ops.act_mul(y, "silu")) / 2]


def test_cuts_with_scales_of_groups() -> None:
    cut = batch_gemm.Config
    cuts = [cut(192, 1, 1, rows=128), cut(64, 2, 1, rows=128), cut(128, 4, 1, True, rows=128), cut(128, 1, 1)]
    cases = list(itertools.product((66, 100, 128, 250), cuts))
    with rehearsing():
        for case in cases:
            cut_in_groups(*case)
    for case in cases:
        found = cut_in_groups(*case)
        assert max(found) < 6e-3, (case, found)
