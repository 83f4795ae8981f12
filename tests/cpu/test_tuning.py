"""Which kernel serves a product: tables, estimates, and what ``bench/tune.py`` makes of times, without a
GPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_compile import BASE, SHAPES

from sgla.config import Config
from sgla.device import nvidia
from sgla.hub.source import ModelSource
from sgla.kernels import device
from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.gpu import tuning
from sgla.kernels.gpu.tuning import LIBRARY, PROMPT, Algorithm, Line, Product, Table
from sgla.worker import report

H200 = nvidia("NVIDIA H200", (9, 0), 132)
BENCH = Path(__file__).parents[2] / "bench"
PRODUCT = Product(6144, 4096)
QWEN = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(device, "_this", [H200])
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.syspath_prepend(str(BENCH))
    tuning.table_of.cache_clear()
    yield
    tuning.table_of.cache_clear()


def source_of(**more: Any) -> ModelSource:
    return ModelSource("dummy", Path("dummy"), (), BASE | more, {})


def write(*lines: Line) -> None:
    tuning.file_of(H200.name).write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    tuning.table_of.cache_clear()


def before(m: int, n: int, k: int, gated: bool) -> Algorithm:
    """What the launchers said by themselves, before there were tables."""
    if m < batch_gemm.MIN_ROWS:
        return Algorithm("few rows", skinny_gemm.default_config(m, n // 2 if gated else n, k, gated))
    clusters, rows = 132 // 2, -(-m // 256)
    sides = n % (64 if gated else 32) == 0 and k % 64 == 0 and k >= 512
    waves = -(-rows * -(-n // 256) // clusters)
    if m > 256 and sides and m * n > 0.9 * waves * clusters * 256 * 256:
        return PROMPT
    config = batch_gemm.default_config(m, n, k, gated)
    return Algorithm("tiles", config) if config else LIBRARY


def products() -> list[Product]:
    import tune

    found: dict[Product, None] = {}
    for model in SHAPES.values():
        inner = {"intermediate_size": 4 * model["hidden_size"], "vocab_size": 128_000}
        layers = tune.layers_of(source_of(**model, **inner))
        found |= dict.fromkeys(layer.product for layer in layers)
    return list(found)


@pytest.mark.parametrize(("every", "step"), [(4, 331), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_choices_are_those_from_before_the_tables(every: int, step: int) -> None:
    """Of the products of all models, as estimated, and read from a table in which nothing was faster."""
    import tune

    rows = sorted({*range(1, 8193, step), *(m + d for m in tune.ROWS for d in (-1, 0, 1) if m + d)})
    found = products()[::every]
    assert len(found) > 80 / every
    for product in found:
        n, k, gated, _ = product
        expected = [before(m, n, k, gated) for m in rows]
        assert [tuning.algorithm_for(m, product) for m in rows] == expected
        times = {(product, m): dict.fromkeys(tune.candidates(m, product, ""), 1.0) for m in tune.ROWS}
        table = Table(tune.table(times, 0.03))
        assert [table.find(m, product) or tuning.estimated(m, product) for m in rows] == expected


def test_a_line_counts_for_its_rows_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    config = batch_gemm.Config(64, 2)
    line = Line(*PRODUCT, first=33, last=64, kernel="tiles", config=config._asdict())
    write(line, msgspec.structs.replace(line, first=65, last=96, kernel="library", config={}))
    assert [tuning.measured(m, PRODUCT) for m in (32, 33, 64, 96, 97)] == [
        None,
        Algorithm("tiles", config),
        Algorithm("tiles", config),
        LIBRARY,
        None,
    ]
    assert tuning.algorithm_for(96, PRODUCT) == LIBRARY != tuning.estimated(96, PRODUCT)
    assert tuning.measured(64, PRODUCT._replace(gated=True)) is None
    monkeypatch.setattr(device, "_this", [nvidia("NVIDIA H100 PCIe", (9, 0), 114)])
    assert tuning.measured(64, PRODUCT) is None
    assert tuning.file_of("NVIDIA H100 PCIe").name == "H100-PCIe.jsonl"


def test_rules_and_their_report_follow_the_table() -> None:
    source = source_of(**SHAPES["qwen3-8b"] | QWEN)
    down = Product(4096, 12288)
    assert tuning.estimated(64, down).kernel == "tiles"
    forward = report.forward_of(Config(dtype="bfloat16"), source)
    asked = report.Asked({"tokens": 64, "sampled": 0, "rows": 64})
    plain = forward.rewritten("step", False, asked)
    kind = forward._kind(forward._record("step", False), 64)
    write(Line(*down, first=33, last=64, kernel="library"))
    work = forward.rewritten("step", False, asked)
    assert work.taken["tiles + added"] < plain.taken["tiles + added"]
    assert work.refused["added", "cuBLAS is faster for this shape"] == 2
    assert forward._kind(forward._record("step", False), 64) != kind
    lines = list(report._lines("64 rows", work))
    assert any("products: " in line and "2 as measured (" in line and "H200.jsonl)" in line for line in lines)


def test_e4m3_products_take_tiles_where_they_are_faster() -> None:
    """Up to 256 rows, with the gate, where no kernel of few rows does. What they multiply is rounded in the
    norm before, or apart. Elsewhere, and where a table says so, the library multiplies."""
    source = source_of(**SHAPES["qwen3-8b"] | QWEN)
    forward = report.forward_of(Config(dtype="bfloat16", quantization="fp8"), source)

    def taken(rows: int) -> dict[str, int]:
        asked = report.Asked({"tokens": rows, "sampled": 0, "rows": rows})
        found = forward.rewritten("step", False, asked).taken
        return {name: found[name] for name in found if "e4m3" in name}

    ours = {"norm and e4m3": 4, "norm + e4m3": 1, "e4m3 tiles": 4, "e4m3": 1, "e4m3 + gate": 2}
    assert taken(8) == {}
    assert taken(16) == {"norm + e4m3": 2, "norm + e4m3 + gate": 2}  # wide weights
    assert taken(17) == taken(64) == taken(256) == ours
    assert taken(257) == {"norm and e4m3": 4, "norm + e4m3": 1, "gate and e4m3": 2, "e4m3": 3}
    write(Line(24576, 4096, True, "fp8", 33, 64, "library"))
    del ours["e4m3 + gate"]
    assert taken(64) == ours | {"gate and e4m3": 2, "e4m3 tiles": 2, "e4m3": 3}
    record = forward._record("step", False)
    assert forward._kind(record, 64) != forward._kind(record, 65)


NATIVE = "heads + decode"  # the rule of the decode kernel that takes q, k and v from the projection


@pytest.mark.parametrize(
    ("settings", "changes", "expected", "native"),
    [
        ({}, {}, "attention: native decode, native prefill", True),
        ({"decode_attention_backend": "triton"}, {}, "attention: triton decode, native prefill", False),
        (
            {},
            {"head_dim": 80},
            "native decode not used: it needs a head dimension of 64, 128 or 256, not 80",
            False,
        ),
        ({"deterministic": True}, {}, "not 'tiles' (8): its sums depend on the number of rows", False),
    ],
)
def test_the_report_is_of_the_attention_that_serves(
    settings: dict[str, Any], changes: dict[str, Any], expected: str, native: bool
) -> None:
    asked = Config(dtype="bfloat16", max_running_requests=64, **settings)
    lines = list(report.report(asked, source_of(**SHAPES["qwen3-8b"] | QWEN | changes)))
    assert any(expected in line for line in lines)
    assert not any("e4m3" in line for line in lines)  # rules for weights that there are not
    taken = [line for line in lines if " rows: " in line]
    assert len(taken) == len(report.DECODES)
    assert [NATIVE in line for line in taken] == [native] * len(taken)
    assert native is not any("q, k and v from the projection: decode attention is" in line for line in lines)


def test_the_report_of_an_encoder_says_that_no_rule_takes_it() -> None:
    bert = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 99, "hidden_size": 32}
    bert |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (line,) = report.report(Config(), ModelSource("dummy", Path("dummy"), (), bert, {}))
    assert "an encoder runs op by op" in line


def test_what_is_faster_by_little_is_not_taken() -> None:
    import tune

    first, other = tuning.estimated(64, PRODUCT), LIBRARY
    assert tune.fastest({first: 10.0, other: 9.8}, gain=0.03) == first
    assert tune.fastest({first: 10.0, other: 9.6}, gain=0.03) == other


def test_the_bench_measures_in_its_order_until_its_time_is_spent() -> None:
    import tune

    layers = tune.layers_of(source_of(**SHAPES["qwen3-8b"] | QWEN))
    assert [layer.behind for layer in layers] == ["heads", "add", "gate", "add", "logits"]
    assert layers[2].product == Product(2 * 12288, 4096, gated=True)
    halves = tune.layers_of(source_of(**SHAPES["qwen3-8b"] | QWEN), 2)
    assert [layer.behind for layer in halves] == ["heads", "", "gate", "", "logits"]
    assert halves[2].product == Product(12288, 4096, gated=True)
    left = iter(range(12))

    def fake(layer: Any, m: int, algorithm: Algorithm) -> float:
        next(left)
        if algorithm.kernel == "tiles" and algorithm.config.tile == 192:
            raise RuntimeError("does not compile")
        return {"library": 5.0, "tiles": 9.0}.get(algorithm.kernel, 7.0)

    ready = lambda *_: left.__length_hint__() > 0  # noqa: E731
    measured = list(tune.measure(layers, (64, 1), fake, ready, 4))
    assert measured
    assert len(measured) < len(layers)
    times = {(layer.product, m): found for layer, m, found in measured}
    lines = tune.table(times, 0.03)
    assert all(line.kernel == "library" and line.last == 64 for line in lines)
    assert all(line.us["library"] == 5.0 for line in lines)
    read = [msgspec.json.decode(json.dumps(msgspec.to_builtins(line)), type=Line) for line in lines]
    assert read == lines


def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each kernel would be compiled behind all others."""
    import tune

    asked: list[Any] = []

    class Asked:
        def __init__(self, file: str, name: str, *more: Any) -> None:
            asked.append(more)

        def launch(self, *args: Any) -> None: ...

    layers = tune.layers_of(source_of(**SHAPES["qwen3-8b"] | QWEN), 2)[:4]
    monkeypatch.setattr(batch_gemm, "Kernel", Asked)
    monkeypatch.setattr(batch_gemm, "_maps", lambda *args: (None, None))
    monkeypatch.setattr(batch_gemm, "_Params", lambda *args: None)
    monkeypatch.setattr(batch_gemm, "_exchange", lambda *args: (torch.empty(1), torch.empty(1)))
    batch_gemm._kernel.cache_clear()
    tune.compile_ahead(layers, (64, 256), 4)
    ahead = len(asked)
    assert ahead > 12
    for m, layer in tune.jobs(layers, (64, 256)):
        n, k, gated, _ = layer.product
        x, w = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16).expand(n, k)
        for kernel, config in tune.candidates(m, *layer, 4):
            if kernel == "tiles":
                batch_gemm.linear(x, w, config, epilogue=batch_gemm.SILU if gated else batch_gemm.STORE)
    assert len(asked) == ahead
    batch_gemm._kernel.cache_clear()


def test_what_is_not_compiled_in_time_is_left_out() -> None:
    import tune

    layers = tune.layers_of(source_of(**SHAPES["qwen3-8b"] | QWEN), 2)[:1]
    first, *others = tune.candidates(256, *layers[0], 4)
    timer = lambda layer, m, algorithm: 5.0  # noqa: E731
    for late, expected in (([], [first, *others]), (others[:1], [first, *others[1:]]), ([first], None)):
        ready = lambda layer, m, algorithm, late=late: algorithm not in late  # noqa: E731
        found = list(tune.measure(layers, (256,), timer, ready, 4))
        assert [[*times] for _, _, times in found] == ([] if expected is None else [expected])


def test_a_ring_of_one_stage_is_refused() -> None:
    """It would wait for itself for ever."""
    wide = batch_gemm.Config(192, 8, 1)
    assert batch_gemm.fits(wide, 128, batch_gemm.STORE)
    assert not batch_gemm.fits(wide, 256, batch_gemm.STORE)
    with pytest.raises(AssertionError, match="no room"):
        batch_gemm.ask(wide, 256, batch_gemm.STORE)


@pytest.mark.parametrize("m", [1, 8, 16, 64, 160, 192, 256, 512, 8192])
def test_candidates_can_run(m: int) -> None:
    import tune

    for product in (PRODUCT, Product(24576, 4096, gated=True), Product(8192, 1024), Product(1024, 3072)):
        found = tune.candidates(m, product, "")
        assert found[0] == tuning.estimated(m, product)
        assert len(found) > (1 if m > 8 else 3)
        for kernel, config in found:
            if kernel == "tiles":
                assert batch_gemm.fits(config, m, batch_gemm.STORE)
                rows, tiles = batch_gemm.rows_of(config, m), batch_gemm._tiles(product.n, config.tile)
                row_tiles = -(-m // rows)
                assert batch_gemm._blocks(config, tiles, row_tiles, scaled=False) > 0
                assert row_tiles == 1 or config.split == 1 or config.rows < batch_gemm.MAX_ROWS
                assert config.tile % 64 == 0 or config.split == 1
            if kernel == "prompt tiles":
                assert prompt_gemm.refuses(m, *product[:3]) is None


def test_tables_of_the_package_can_be_read() -> None:
    tables = list(Path(tuning.__file__).with_name("tuned").glob("*.jsonl"))
    assert tables
    for path in tables:
        lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
        assert lines
        spans = sorted((line.product, line.first, line.last) for line in lines)
        assert all(first <= last for _, first, last in spans)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in itertools.pairwise(spans))
        for line in lines:
            assert (line.algorithm.config is None) == (line.kernel not in tuning.CONFIGS)
            if line.kernel == "tiles":
                assert batch_gemm.fits(line.algorithm.config, line.last, batch_gemm.STORE)
