"""Memory goes and comes back, and graphs do not notice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_moe import TINY as MIXTURE
from test_gpu_runner import LATENT, TINY, generate, ints, make, prompt
from test_gpu_states import MODEL as STATES
from test_gpu_windows import MODEL as WINDOWS

from sgla.errors import OutOfMemory
from sgla.messages import KEY, Control, Copy, StepPlan
from sgla.worker.region import Region, gpu_memory

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from tiny import Transcript, make_core, run, submit

KINDS = {"all tokens": TINY, "windows": WINDOWS, "latents": LATENT, "states": STATES}
PROMPTS = {slot: prompt(slot, 20 + 13 * slot) for slot in range(8)}


def sleep(kv: bool = True, weights: str = "host") -> Control:
    return Control(verb="sleep", args={"kv": kv, "weights": weights})


def wake(kv: bool = True, weights: bool = True) -> Control:
    return Control(verb="wake", args={"kv": kv, "weights": weights})


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (TINY, {}),
        (TINY, {"quantization": "fp8"}),
        (TINY, {"quantization": "int4"}),
        (TINY, {"deterministic": True}),
        (MIXTURE, {}),
        (TINY, {"kv_host_bytes": 64 << 20}),
    ],
)
def test_graphs_go_on_after_a_sleep(model: dict[str, Any], settings: dict[str, Any]) -> None:
    runner = make(model, **settings)
    first = generate(runner, PROMPTS, 12, True)
    for weights in ("", "host", "files"):
        before = torch.cuda.mem_get_info()[0]
        runner.control(sleep(weights=weights))
        runner.control(sleep(weights=weights))
        given = torch.cuda.mem_get_info()[0] - before
        least = runner.facts.ledger["kv"] + bool(weights) * runner.regions.weights.size
        assert given >= 0.9 * least
        runner.control(wake(kv=False))
        runner.control(wake())
        assert torch.cuda.mem_get_info()[0] > before - (64 << 20)
        assert generate(runner, PROMPTS, 12, True) == first


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [("host", "auto"), ("disk", "auto"), ("host", "fp8"), ("disk", "fp8"), ("host", "int8")],
)
def test_prefixes_come_back_from_where_they_were_saved(tier: str, dtype: str, tmp_path: Path) -> None:
    """Pages that others have written meanwhile are what they were."""
    settings: dict[str, Any] = {"host": {"kv_host_bytes": 64 << 20}, "disk": {"kv_disk": f"{tmp_path}:64M"}}
    runner = make(**settings[tier], kv_cache_dtype=dtype)
    first = generate(runner, {0: PROMPTS[0]}, 12, True)
    count = -(-len(PROMPTS[0]) // runner.facts.page_size)
    pages, places = ints(*range(1, count + 1)), ints(*range(3, count + 3))
    keys = [bytes(range(KEY)) * count]

    def copy(source: str, target: str, sources: bytes, targets: bytes) -> None:
        told = Copy(1, source, target, [sources], [targets], keys)
        empty = StepPlan(step=0, slots=b"", starts=b"", q_lens=b"", flags=b"", new=[], copies=[told])
        runner.launch(empty)
        moved: list[Any] = []
        while not moved:
            moved = runner.moved()
        assert moved[0].ok
        assert not runner.copying

    kept = [x.view(torch.uint8) for layer in runner.steps.kv for x in (layer.k, layer.v)]
    before = [x[1 : count + 1].clone() for x in kept]
    copy("device", tier, pages, places)
    with torch.inference_mode():
        for x in kept:
            x[1 : count + 1] = 0xFF  # of floats, that is none
    copy(tier, "device", places, pages)
    for x, had in zip(kept, before):
        assert torch.equal(x[1 : count + 1], had)
    assert generate(runner, {0: PROMPTS[0]}, 12, True) == first
    runner.close()


def said(transcript: Transcript) -> dict[str, list[Any]]:
    """Tokens and their logprobs, as they are."""
    return {
        rid: [(each.token, each.logprob) for delta in deltas for each in delta.logprobs or []]
        for rid, deltas in transcript.items()
    }


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [*((kind, False) for kind in KINDS), ("all tokens", True), ("windows", True)],
)
def test_text_goes_on_from_what_a_tier_has(kind: str, deterministic: bool, tier: str, tmp_path: Path) -> None:
    """As it does if all of it is computed: in float32, whose tokens rounding decides seldom, and bit by bit
    where nothing depends on the batch. Latents and states refuse that."""
    settings: dict[str, Any] = {"host": {"kv_host_bytes": 64 << 20}, "disk": {"kv_disk": f"{tmp_path}:64M"}}
    how = {"deterministic": True} if deterministic else {"dtype": "float32"}
    runner = make(KINDS[kind], **settings[tier], **how)
    core = make_core(runner.facts)
    texts = {str(i): prompt(i, 300 + 7 * i) for i in range(4)}
    first = run(runner, [submit(rid, text, 20) for rid, text in texts.items()], core).tokens()
    later = [submit(rid, [*text, *first[rid], 1, 2, 3], 20, logprobs=1) for rid, text in texts.items()]
    assert core.flush_cache(tiers=False)
    computed = run(runner, later, make_core(runner.facts, prefix_cache=False))
    found = run(runner, later, core)
    size = runner.facts.page_size
    assert all(found[rid][0].cached_tokens >= len(text) // size * size for rid, text in texts.items())
    assert sum(each.loaded for each in core.stats().tiers) >= 4 * 288 // size
    assert found.tokens() == computed.tokens()
    if deterministic:
        assert said(found) == said(computed)
    runner.close()


def test_a_runner_that_finds_no_memory_sleeps_on() -> None:
    runner = make()
    first = generate(runner, PROMPTS, 12, True)
    runner.control(sleep())
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory, match="while waking"):
        runner.control(wake())
    del filler
    torch.cuda.empty_cache()
    runner.control(wake())
    assert generate(runner, PROMPTS, 12, True) == first


def test_a_region_keeps_its_addresses() -> None:
    memory = gpu_memory(0)
    assert memory is not None
    region = Region(memory, 4 << 30)
    tensors = [region.empty((n, 1 << 20), torch.bfloat16) for n in (1, 300, 7)]
    places = [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(2.0)
    graph, sums = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    with torch.cuda.graph(graph):
        for i, tensor in enumerate(tensors):
            sums[i] = tensor.sum(dtype=torch.float32)
    for value in (2.0, 3.0):
        graph.replay()
        assert sums.tolist() == [value * tensor.numel() for tensor in tensors]
        torch.cuda.synchronize()
        region.unmap()
        assert not region.mapped
        assert [stop for _, stop in region.map()][-1] == region.size
        for tensor in tensors:
            tensor.fill_(3.0)
    assert [tensor.data_ptr() for tensor in tensors] == places
