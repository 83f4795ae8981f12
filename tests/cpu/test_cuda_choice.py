"""Which GPUs the CUDA kernels take, asked without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from sgla.device import nvidia
from sgla.kernels import device
from sgla.kernels.build import source_folder
from sgla.kernels.cuda import batch_gemm, decode_attention, skinny_gemm
from sgla.kernels.cuda.build import SHARED
from sgla.kernels.cuda.decode_step import DenseShape
from sgla.kernels.cuda.mixture_step import MixtureShape
from sgla.kernels.gpu import e4m3
from sgla.kernels.gpu.tuning import Line, file_of

QWEN3 = DenseShape(hidden=1024, heads=16, kv_heads=8, inner=3072, qk_norm=True, page_size=16)


@pytest.mark.parametrize(
    ("arch", "why"), [((9, 0), None), ((8, 0), "compute capability"), ((12, 0), "shared memory")]
)
def test_decode_attention_needs_its_shared_memory(arch: tuple[int, int], why: str | None) -> None:
    refused = decode_attention.refuses(nvidia("", arch, 132), torch.bfloat16, 128, 8, 16, 256)
    assert refused is None if why is None else why in str(refused)


@pytest.mark.parametrize("group", range(1, 25))
def test_decode_attention_takes_groups_of_all_sizes(group: int) -> None:
    hopper = nvidia("", (9, 0), 132)
    assert decode_attention.refuses(hopper, torch.bfloat16, 128, group, 16, 256) is None
    parts, heads, lack = decode_attention.share(group)
    assert parts * heads - lack == group
    assert heads <= decode_attention.GROUP
    assert 0 <= lack < heads  # no part is empty
    assert "at most 24" in str(decode_attention.refuses(hopper, torch.bfloat16, 128, 25, 16, 256))


@pytest.mark.parametrize(
    ("arch", "processors", "pays"), [((9, 0), 132, True), ((9, 0), 127, False), ((8, 0), 132, False)]
)
def test_a_step_in_one_kernel_needs_room_for_all_blocks(
    monkeypatch: pytest.MonkeyPatch, arch: tuple[int, int], processors: int, pays: bool
) -> None:
    monkeypatch.setattr(device, "_this", [nvidia("", arch, processors)])
    assert QWEN3.pays(28, 151936) is pays


@pytest.mark.parametrize(
    ("shape", "layers", "pays"),
    [
        (DenseShape(4096, 32, 8, 12288, True, 16), 36, False),  # Qwen3-8B: too many bytes
        (QWEN3, 28, True),
        (MixtureShape(2048, 32, 4, 768, 128, 8, True, True, 16), 48, True),  # Qwen3-30B-A3B
        (MixtureShape(2048, 32, 4, 1024, 128, 8, True, True, 16), 48, False),  # too much shared memory
        (MixtureShape(2048, 16, 2, 384, 128, 8, True, True, 16, 2), 48, True),
        (MixtureShape(2048, 8, 1, 192, 128, 8, True, True, 16, 4), 48, False),
    ],
)
def test_steps_in_one_kernel(monkeypatch: pytest.MonkeyPatch, shape: Any, layers: int, pays: bool) -> None:
    monkeypatch.setattr(device, "_this", [nvidia("", (9, 0), 132)])
    assert shape.pays(layers, 75968) is pays
    assert shape._replace(copied=True).pays(layers, 75968) is pays


@pytest.mark.parametrize("processors", [32, 46, 64, 66, 78, 114, 132, 144])
def test_blocks_keep_to_the_rows_whose_scales_they_have(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(batch_gemm, "processors", lambda: processors)
    shapes = [(4096, 1024), (6144, 1024), (1024, 2048), (2048, 1536), (960, 2560), (6144, 4096)]
    for n, k in [*shapes, (28672, 4096)]:
        for m in range(9, batch_gemm.MAX_ROWS + 1):
            config = batch_gemm.default_config(m, n, k, gated=n > 6144)
            if config is None:
                continue
            tiles, row_tiles = batch_gemm._tiles(n, config.tile), -(-m // config.rows)
            blocks = batch_gemm._blocks(config, tiles, row_tiles, scaled=True)
            assert blocks > 0
            assert blocks % row_tiles == 0


@pytest.mark.parametrize("k", [2048, 4096, 6144, 12288])
def test_tiles_that_fill_the_gpu_in_two_parts_serve_all_but_whole_batches(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    configs = {batch_gemm.default_config(m, 4096, k) for m in range(65, 241)}
    assert configs == {batch_gemm.Config(64, 2, 1)}
    assert batch_gemm.default_config(256, 4096, k) is None
    assert batch_gemm.default_config(240, 3584, k) is None  # which leaves 20 multiprocessors idle


def apart() -> Iterator[tuple[int, int, batch_gemm.Config]]:
    """Rows, columns and what has blocks that wait for each other, as measured on an H200 and as estimated."""
    lines = (msgspec.json.decode(line, type=Line) for line in file_of("H200").read_bytes().splitlines())
    shapes = itertools.product((9, 64, 128, 192, 256), (1024, 2048, 4096, 6144), (1024, 4096, 12288))
    found = [(line.last, line.n, line.algorithm.config) for line in lines]
    found += [(m, n, batch_gemm._choose(132, m, n, k, False)) for m, n, k in shapes]
    for m, n, config in found:
        if isinstance(config, batch_gemm.Config) and config.apart:
            yield m, n, config


@pytest.mark.parametrize("processors", [16, 44, 66, 88, 132])
def test_blocks_that_wait_for_each_other_have_room_at_once(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    """On a part of the GPU, too, with what is for all of it."""
    monkeypatch.setattr(batch_gemm, "processors", lambda: processors)
    found = list(apart())
    assert len(found) > 9
    for m, n, config in found:
        held = batch_gemm.held(config, m, n)
        blocks = batch_gemm._tiles(n, held.tile) * -(-m // batch_gemm.rows_of(held, m)) * held.split
        assert not held.apart or blocks <= processors * held.per_sm
        assert processors < 132 or held == config
        assert batch_gemm.fits(held, m, batch_gemm.ADD)


@pytest.mark.parametrize("processors", [78, 132, 144])
def test_blocks_that_share_sums_of_groups_run_at_once(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(batch_gemm, "processors", lambda: processors)
    for n, k in [(4096, 1024), (1024, 2048), (6144, 4096), (4096, 12288), (336, 1280)]:
        for m in [*range(9, 300), 1000, 8192]:
            config = batch_gemm.grouped_config(m, n, k)
            rows = batch_gemm.rows_of(config, m)
            # Sums of a group stand in registers beside those of all.
            many = batch_gemm.MAX_ROWS if m > batch_gemm.MAX_ROWS else batch_gemm.GROUPED_ROWS
            assert rows <= (64 if config.tile > 192 else 128 if config.tile > 128 else many)
            if batch_gemm.GROUPED_ROWS < m <= 192:  # two tiles of about as many rows
                assert rows == 96
            assert rows <= batch_gemm.GROUPED_ROWS or rows == batch_gemm.MAX_ROWS
            blocks = batch_gemm._tiles(n, config.tile) * -(-m // rows) * config.split
            assert m <= 64 or config.split == 1 or blocks <= processors


@pytest.mark.parametrize("inner", [14336, 12288, 13824, 27648, 9728, 6144, 17408, 18944])
def test_gate_and_up_keep_the_multiprocessors_busy(monkeypatch: pytest.MonkeyPatch, inner: int) -> None:
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    for m in range(9, batch_gemm.MAX_ROWS + 1):
        config = batch_gemm.default_config(m, 2 * inner, 4096, gated=True)
        assert config is not None
        waves = -(-batch_gemm._tiles(2 * inner, config.tile) // 132)
        assert 2 * inner / (132 * waves * config.tile) > 0.9


@pytest.mark.parametrize(
    ("n", "k", "gated"),
    [
        (6144, 4096, False),
        (12288, 4096, True),
        (4096, 12288, False),
        (1536, 4096, False),
        (2048, 16384, False),
    ],
)
def test_few_rows_beside_e4m3_weights_are_kept_where_they_are_few_enough(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, gated: bool
) -> None:
    """Whatever the cut that is chosen for them leaves room for."""
    monkeypatch.setattr(skinny_gemm, "processors", lambda: 132)
    for m in range(1, skinny_gemm.MAX_ROWS + 1):
        config = skinny_gemm.default_config(m, n, k, gated, True)
        staged = skinny_gemm._staged(m, k, config, True, True)
        assert (staged.rows >= m) is (m <= 4 and m * k <= 16384)
        assert config.ring() + staged.bytes < SHARED[config.per_sm - 1]


@pytest.mark.parametrize(
    ("m", "n", "k", "gated", "faster"),
    [
        (64, 24576, 4096, True, False),
        (128, 24576, 4096, False, True),
        (128, 24576, 4096, True, False),  # the gate is done on the way
        (8192, 24576, 4096, True, False),
        (128, 6144, 4096, False, False),  # all tiles run at once, with 64 rows of the weight
        (192, 6144, 4096, False, False),  # with k in two
        (256, 6144, 4096, False, True),
        (256, 4096, 12288, False, False),
        (257, 4096, 4096, False, True),
        (257, 4096, 12288, False, True),
        (257, 24576, 4096, True, True),
        (2048, 4096, 12288, False, False),  # long sums
        (8192, 4096, 4096, False, True),
        (2048, 4000, 4096, False, False),  # no whole blocks
    ],
)
def test_the_library_multiplies_by_blocks_where_it_is_faster(
    m: int, n: int, k: int, gated: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_gemm, "processors", lambda: 132)
    for arch, expected in (((9, 0), faster), ((8, 9), False)):
        monkeypatch.setattr(e4m3, "this_device", lambda arch=arch: nvidia("", arch, 132))
        assert e4m3.blocks_faster(m, n, k, gated) == expected


@pytest.mark.parametrize(
    ("cuda", "takes"), [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True)]
)
def test_libraries_before_cuda_12_9_take_no_blocks(
    cuda: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(e4m3, "this_device", lambda: nvidia("", (9, 0), 132))
    assert e4m3.blocks_faster(2048, 4096, 4096) == takes


@pytest.mark.parametrize("n", [64, 2048, 4096, 6144, 151936])
def test_one_row_is_kept_where_it_fits_beside_the_weights(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(skinny_gemm, "processors", lambda: 132)
    kept = {}
    for k in range(64, 32768, 64):
        config = skinny_gemm.default_config(1, n, k, gated=False)
        staged = skinny_gemm._staged(1, k, config, False, False)
        kept[k] = staged.rows == 1
        assert staged.bytes == (2 * k if kept[k] else 0)
        taken = config.ring() + staged.bytes + config.sums(8)
        assert taken <= SHARED[config.per_sm - 1]
        assert not skinny_gemm._staged(2, k, config, False, False).rows, "two rows take longer to keep"
    assert kept[4096]
    assert kept[12288]
    assert kept[32704] is (n > 100_000), "there is one block on a multiprocessor"


@pytest.mark.parametrize("name", ["skinny_gemm", "integer_gemm", "stationary_gemm", "integer_experts"])
def test_weights_of_few_rows_leave_the_cache_before_all_else(name: str) -> None:
    """Whose copies are told so; the copy engine's orders of other kernels have the same policy."""
    source = (source_folder("cuda") / f"{name}.cu").read_text()
    assert "cp_async_once(" in source
    assert "cp_async16(" not in source
