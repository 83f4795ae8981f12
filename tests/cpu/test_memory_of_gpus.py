"""Who gets the bytes of a GPU, decided without one: the pool, and what is said when something does not
fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_cases import RUN
from forked import run_script

from sgla.attention import torch_ops
from sgla.attention.base import AttentionShape, DeviceBatch, ExtendRows
from sgla.config import Config
from sgla.device import nvidia
from sgla.dist import gpus
from sgla.errors import ConfigError, OutOfMemory
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer, Scoring
from sgla.layers.spec import StateTensor
from sgla.model.drafting import draft_bytes, predictor_layer
from sgla.model.read import read_decoder, read_spec
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import Demand, KVGroup, LayerState, Pool, kv_groups
from sgla.worker import gpu_load, gpu_memory
from sgla.worker.gpu_memory import Advice, Budget, Peak, Weights, size_pool, splits, within_memory
from sgla.worker.gpu_tiers import BATCH, GpuMemory, thread_bytes
from sgla.worker.region import Region
from sgla.worker.tier_setup import threaded

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "bench/models"
MIB, GIB = 1 << 20, 1 << 30


def spec(name: str) -> ModelSpec:
    return read_decoder(json.loads((MODELS / name / "config.json").read_text()))


def no_advice(missing: int) -> Advice:
    raise AssertionError("the context or the budget is to be changed")


POOL = Pool([KVGroup(0, (0,), MIB / 16)], 16, Demand(4, 64))  # with pages of 1 MiB


def test_the_pool_gets_what_is_free() -> None:
    assert size_pool(1000 * MIB + 5, POOL, None, None, no_advice) == [1000]
    assert size_pool(1000 * MIB, POOL, 10 * MIB, None, no_advice) == [10]
    assert size_pool(1000 * MIB, POOL, None, 999 * 16, no_advice) == [1000]  # page 0 is the dummy


def test_what_guesses_takes_as_much_as_a_gpu_keeps_of_it() -> None:
    config = json.loads((MODELS / "qwen3-0.6b/config.json").read_text())
    plain = read_decoder(config)
    stored = read_decoder(config | {"quantization_config": {"quant_method": "fp8"}})
    asked = Config(speculative_algorithm="draft_model", speculative_quantization="int4")
    own = Config(speculative_algorithm="draft_model")
    for kind, draft, settings in (("fp8", stored, own), ("int4", plain, asked), ("int4", stored, asked)):
        whole = weight_bytes(draft, "bfloat16", kind, 1, "cuda")
        assert draft_bytes(settings, draft, plain, "bfloat16", "cuda") == whole
        assert whole < draft_bytes(own, draft, plain, "bfloat16")


def test_an_output_layer_of_guesses_counts(tmp_path: Path) -> None:
    """A copy of the model's, split over ranks as that is; EAGLE-3 has its own instead."""
    target = spec("qwen3.6-35b-a3b")
    assert target.vocab * target.hidden == 248_320 * 2048

    def nbytes(name: str, device: str = "cuda", ranks: int = 1, **settings: Any) -> int:
        asked = Config(speculative_algorithm=name, **settings)
        return draft_bytes(asked, predictor_layer(target), target, "bfloat16", device, ranks)

    for name in ("mtp", "eagle", "dflash"):
        for device, ranks, value in (("cuda", 1, 0.5625), ("cuda", 2, 0.5625), ("cpu", 1, 0.625)):
            place = name, device, ranks
            more = nbytes(*place, speculative_head_quantization="int4") - nbytes(*place)
            assert more == int(target.vocab * target.hidden * value / ranks)
    assert nbytes("eagle3", speculative_head_quantization="int4") == nbytes("eagle3")
    (tmp_path / "map.json").write_text(json.dumps([*range(1000)]))
    some: dict[str, Any] = {"speculative_token_map": str(tmp_path / "map.json")}
    assert nbytes("mtp", **some) - nbytes("mtp") == 1000 * target.hidden * 2
    for device, value in (("cuda", 2.5625), ("cpu", 0.625)):  # a GPU keeps what was rounded
        both = nbytes("mtp", device, speculative_head_quantization="int4", **some)
        assert both - nbytes("mtp", device) == 1000 * target.hidden * value


def test_states_alone_get_what_is_free() -> None:
    memory = StateTensor("memory", (1, 512, 512), "float32")
    pool = Pool(kv_groups([LayerState(0, (), unit=(memory,))], 99, "fp8"), 16, Demand(8, 64))
    assert size_pool(50 * MIB + 7, pool, None, None, no_advice)[1] == 50
    with pytest.raises(OutOfMemory, match="MiB are missing; nothing"):
        size_pool(MIB, pool, None, None, lambda missing: Advice("nothing", ""))


def test_pools_of_groups_get_no_more_than_is_free() -> None:
    """Windows get what is of use, and whole histories the rest."""
    groups = [KVGroup(0, (0,), 3000.0), KVGroup(64, (1, 2), 5000.0)]
    pool = Pool(groups, 16, Demand(4, 64))
    sizes = pool.page_bytes
    for room in (GIB // 1000, GIB // 999, GIB // 77, GIB):
        whole, window = size_pool(room, pool, None, None, no_advice)
        assert room - sizes[0] <= whole * sizes[0] + window * sizes[1] <= room
        assert window <= 1 + 2 * 4 * 6 + 4
    assert whole > GIB // sizes[0] * 0.9
    with pytest.raises(OutOfMemory, match="lower --context-length to"):
        size_pool(GIB // 1000, pool, None, 1 << 20, no_advice)


@pytest.mark.parametrize(
    ("free", "budget", "wanted", "message", "param"),
    [
        (GIB, 3 * GIB, None, "2,048 MiB are missing; lower --kv-cache-bytes$", "kv_cache_bytes"),
        (
            -GIB,
            GIB,
            None,
            "0 MiB are left .* 2,048 MiB are missing; lower --kv-cache-bytes$",
            "kv_cache_bytes",
        ),
        (GIB, None, 1024 * 16, " 1 MiB are missing; lower --context-length to 16368$", "context_length"),
        (GIB, 10 * MIB, 20 * 16, " 11 MiB are missing; raise --kv-cache-bytes to 21M$", "kv_cache_bytes"),
        (GIB, 10 * MIB, 2000 * 16, "1,991 MiB are missing; lower --context-length to 144$", "context_length"),
    ],
)
def test_a_pool_that_does_not_fit(
    free: int, budget: int | None, wanted: int | None, message: str, param: str
) -> None:
    with pytest.raises(OutOfMemory, match=message) as caught:
        size_pool(free, POOL, budget, wanted, no_advice)
    assert caught.value.param == param


def test_no_pool_at_all() -> None:
    asked = []
    with pytest.raises(OutOfMemory, match="102 MiB are missing; change that$") as caught:
        size_pool(-100 * MIB, POOL, None, None, lambda n: asked.append(n) or Advice("change that", "x"))
    assert (caught.value.param, asked) == ("x", [102 * MIB])


def test_the_setting_that_frees_enough_of_the_peak() -> None:
    reads, samples = Peak(1000, 200), Peak(200, 1000)
    assert reads.shrink(500, 8192, 256) == Advice("lower --step-tokens to 4096", "step_tokens")
    assert samples.shrink(500, 8192, 256) == Advice(
        "lower --max-running-requests to 128", "max_running_requests"
    )
    assert reads.shrink(801, 8192, 256) is None
    assert samples.shrink(801, 8192, 256) is None
    assert reads.shrink(799, 1, 256) is None  # not to 0


def test_weights_that_do_not_fit() -> None:
    weights = Weights(spec("qwen3-8b"), "bfloat16", None, 1, True)
    weights.check(weights.bytes)
    with pytest.raises(OutOfMemory, match=r" 1 MiB more than .*; use --quantization fp8$") as caught:
        weights.check(weights.bytes - MIB)
    assert caught.value.param == "quantization"
    for other in (
        weights._replace(e4m3=False),
        weights._replace(quantization="fp8"),
        weights._replace(dtype="float32"),
    ):
        with pytest.raises(OutOfMemory, match="use --tp 2$"):
            other.check(other.bytes - MIB)
    with pytest.raises(OutOfMemory, match="use --tp 4$"):
        weights._replace(e4m3=False).check(weights.bytes // 3)
    with pytest.raises(OutOfMemory, match="use a smaller model$"):
        weights.check(MIB)


def test_only_ranks_that_can_be_are_advised() -> None:
    plain = spec("qwen3-8b")
    assert splits(plain, 8) == (2, 4, 8)
    assert splits(plain, 2) == (2,)
    few = dataclasses.replace(plain.attention[0], heads=28, kv_heads=4)
    assert splits(dataclasses.replace(plain, attention=(few,) * plain.layers), 8) == (2, 4)
    weights = Weights(plain, "bfloat16", None, 1, False, ())
    with pytest.raises(OutOfMemory, match="give --cpu-offload-gb 9, which is slow$"):
        weights.check(weights.bytes // 2)


@pytest.mark.parametrize("name", RUN)
def test_ranks_are_known_of_every_family(name: str) -> None:
    """Some of whose layers keep states, which have no heads of attention, or nothing."""
    found = read_spec(RUN[name].config)
    if isinstance(found, ModelSpec):
        assert set(splits(found, 8)) <= {2, 4, 8}


@pytest.mark.parametrize(
    ("asked", "missing"), [("2.00 GiB", "1,748 MiB"), ("20.00 MiB", "1 MiB"), (None, "1 MiB")]
)
def test_torch_runs_out(monkeypatch: pytest.MonkeyPatch, asked: str | None, missing: str) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (300 * MIB, GIB))
    text = f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has" if asked else "other words"
    with (
        pytest.raises(
            OutOfMemory, match=f"while loading: 300 MiB are free, at least {missing} are missing; less$"
        ),
        within_memory("loading", lambda: Advice("less", "x")),
    ):
        raise torch.OutOfMemoryError(text)


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "cuBLAS: CUBLAS_STATUS_ALLOC_FAILED"])
def test_others_run_out(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, GIB))
    with (
        pytest.raises(OutOfMemory, match="while capturing: 0 MiB are free"),
        within_memory("capturing", lambda: Advice("less", "x")),
    ):
        raise RuntimeError(text)
    with (
        pytest.raises(RuntimeError, match="^other$"),
        within_memory("capturing", lambda: Advice("less", "x")),
    ):
        raise RuntimeError("other")


def test_sums_of_whole_steps_go_through_the_memory_of_peers() -> None:
    """Of models up to 8,192 wide."""
    assert gpus.MESSAGE >= 2 * 8192 * gpu_load.STEP_TOKENS


def test_torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="is a CPU build" if torch.version.cuda is None else "shows none"):
        gpus.join_gpus(0, 1, str(HERE))


def test_runners_that_do_not_fit_and_runners_of_short_contexts() -> None:
    """In a process of its own: see ``fake_gpu.py``."""
    tiny = json.loads((MODELS / "qwen3-0.6b/config.json").read_text()) | {
        "num_hidden_layers": 2,
        "vocab_size": 3000,
    }
    few = {"step_tokens": 64, "max_running_requests": 8}
    cases: list[dict[str, Any]] = [
        {"free": 20 * MIB},
        {"free": 800 * MIB, "config": {"kv_cache_bytes": None}},
        {"free": 4 * GIB, "config": {"kv_cache_bytes": 5 * GIB}},
        {"free": 1200 * MIB, "config": {"kv_cache_bytes": None, "context_length": None}},
        *({"config": {"context_length": n, **few}} for n in (1, 2, 3, 17)),
    ]
    lines = run_script("fake_gpu.py", json.dumps([{"model": tiny} | case for case in cases]))
    weights, steps, pool, whole, *short = map(json.loads, lines)
    assert (weights["code"], weights["param"]) == ("out_of_memory", "model")  # there is one GPU
    assert weights["error"].endswith("46 MiB more than the 20 MiB that are free; use a smaller model")
    assert (steps["code"], steps["param"]) == ("out_of_memory", "model")
    assert (pool["code"], pool["param"]) == ("out_of_memory", "kv_cache_bytes")
    assert whole["late"] == []
    assert whole["context"] == (whole["pages"] - 1) * 16 < 40960
    assert f"context cut from 40960 to {whole['context']} tokens, what the KV cache holds" in whole["notes"]
    left = 1200 * MIB - sum(whole["ledger"].values())
    assert 0 <= left < 128 << 10  # less than a page
    assert [(case["context"], case["late"]) for case in short] == [(n, []) for n in (1, 2, 3, 17)]


def test_torch_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time give what all together give."""
    heads, dim, page_size = 4, 8, 4
    q_lens, kv_lens = np.array([1, 1, 1, 5, 7], np.int32), np.array([3, 9, 1, 5, 13], np.int32)
    tables = torch.arange(1, 21, dtype=torch.int32).view(5, 4)
    kv = KVLayer(*torch.randn(2, 21, page_size, 2, dim))
    tokens = int(q_lens.sum())
    q = torch.randn(tokens, heads * dim)
    empty = torch.zeros(tokens, dtype=torch.int32)
    batch = DeviceBatch(
        rows=5,
        tokens=tokens,
        ids=empty,
        positions=empty,
        slots=torch.arange(5, dtype=torch.int32),
        q_start=torch.tensor([0, *q_lens.cumsum()], dtype=torch.int32),
        kv_len=torch.from_numpy(kv_lens),
        out_loc=empty,
        page_table=tables,
        page_size=page_size,
        sample_rows=empty,
        decode_rows=3,
        extend=ExtendRows(np.arange(3, 5, dtype=np.int32), q_lens[3:], kv_lens[3:], tables.numpy()),
    )
    whole = ops.attention(q, kv, batch, 0.3)
    monkeypatch.setattr(torch_ops, "PLACES", 10)
    monkeypatch.setattr(torch_ops, "PAIRS", 30)
    shape = AttentionShape(heads, 2, dim, page_size, torch.float32, frozenset({0}), 0.0, 5)
    out, device = torch.empty_like(q), nvidia("H200", (9, 0))
    out[:3] = torch_ops.TorchDecode(shape, device).forward(q[:3], kv, batch, Scoring(0.3))
    torch_ops.TorchExtend(shape, device).forward(q[3:], kv, batch, Scoring(0.3), out[3:])
    torch.testing.assert_close(out, whole)


def test_a_part_of_the_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 MiB with 900 free and nothing else kept but ids of tokens, 0.75 leaves 650 to the pool, and
    0.01 too little."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900 * MIB, 1000 * MIB))
    monkeypatch.setattr(gpu_memory, "RESERVE", 0)
    budget = Budget(Weights(spec("qwen3-0.6b"), "bfloat16", None, 1, False), 1, 1)
    for fraction, pages in ((1.0, 899), (0.75, 649)):
        assert budget.pool(Config(memory_fraction=fraction), POOL, Peak(0, 0), 0) == [pages]
    with pytest.raises(OutOfMemory, match="raise --memory-fraction") as caught:
        budget.pool(Config(memory_fraction=0.1), POOL, Peak(0, 0), 0)
    assert caught.value.param == "memory_fraction"


def test_threads_that_move_units_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900 * MIB, 1000 * MIB))
    monkeypatch.setattr(gpu_memory, "RESERVE", 0)
    budget = Budget(Weights(spec("qwen3-0.6b"), "bfloat16", None, 1, False), 1, 1)
    assert budget.pool(Config(), POOL, Peak(0, 0), 0, copies=128 * MIB) == [771]
    assert budget.ledger["copies"] == 128 * MIB
    budget.ledger.clear()
    budget.pool(Config(), POOL, Peak(0, 0), 0)
    assert "copies" not in budget.ledger


def test_bytes_of_threads_that_move_units() -> None:
    """What the rooms of eight threads take for units of each cache group: some at a time, or a large one."""
    groups = [[torch.zeros(5, width, dtype=torch.uint8)] for width in (3 << 20, 1000, 20 << 20)]
    memory = [GpuMemory(tensors, lambda: None) for tensors in groups]
    assert [units.batch for units in memory] == [BATCH // (3 << 20), BATCH // 1000, 1]
    assert thread_bytes([units.nbytes for units in memory]) == 8 * sum(x.batch * x.nbytes for x in memory)
    tiers = [{}, {"kv_disk": "/kv:1G"}, {"kv_disk": "/kv:1G", "kv_store": "/kv"}]
    assert [threaded(Config(**settings)) for settings in tiers] == [0, 1, 2]


class Pieces:
    """Virtual memory that says in which pieces it was mapped, with room for so many bytes. ``there``: sizes
    by their handles."""

    granule = 2

    def __init__(self, room: int = 1 << 10) -> None:
        self.mapped: list[tuple[int, int]] = []
        self.there: dict[int, int] = {}
        self.room, self._count = room, 0

    def reserve(self, size: int) -> int:
        return 1000

    def create(self, size: int) -> int:
        if sum(self.there.values()) + size > self.room:
            raise RuntimeError("no memory")
        self._count += 1
        self.there[self._count] = size
        return self._count

    def release(self, handle: int) -> None:
        del self.there[handle]

    def map(self, at: int, size: int, handle: int) -> None:
        assert self.there[handle] == size
        self.mapped.append((at, size))

    def unmap(self, at: int, size: int, handle: int) -> None:
        self.mapped.remove((at, size))
        self.release(handle)

    def free(self, at: int, size: int) -> None: ...

    def wait(self) -> None: ...

    def view(self, at: int, size: int, owner: object) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


def test_a_region_comes_back_in_the_pieces_of_the_start() -> None:
    memory = Pieces()
    region = Region(memory, 1 << 10, piece=100)
    region.empty((250,), torch.uint8)
    first = list(memory.mapped)
    assert first[0] == (1000, 100)
    assert region.size == sum(size for _, size in first) >= 250
    region.unmap()
    assert not memory.mapped
    assert not region.mapped
    assert list(region.map()) == [(at - 1000, at - 1000 + size) for at, size in first]
    assert memory.mapped == first


@pytest.mark.parametrize("room", [60, 150, 220])
def test_a_region_that_does_not_come_back_takes_nothing(room: int) -> None:
    memory = Pieces()
    region = Region(memory, 1 << 10, piece=100)
    region.empty((250,), torch.uint8)
    region.unmap()
    memory.room = room
    with pytest.raises(RuntimeError, match="no memory"):
        list(region.map())
    assert (memory.mapped, memory.there) == ([], {})
    memory.room = 1 << 10
    coming = region.map()
    next(coming)
    coming.close()  # whoever fills it has failed
    assert (memory.mapped, memory.there) == ([], {})
    assert list(region.map())[-1][1] == region.size
