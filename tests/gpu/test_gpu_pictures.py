"""Pictures on a GPU: what the CPU answers, in graphs and without, in chunks, from the cache and alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from test_vision import MAKERS, SHOWN, qwen_vl
from tiny import Transcript, make_core, run, tiny_config
from vision_models import Model

from sgla.attention import torch_ops
from sgla.kernels.cuda import prompt_attention
from sgla.kernels.device import this_device
from sgla.loading import tower_attention
from sgla.loading.tower import load_tower
from sgla.messages import Submit
from sgla.worker.cpu import CpuRunner
from sgla.worker.features import arrays_of

NAMES = "llava", "gemma3", "qwen2.5-vl", "qwen3-vl", "internvl"
TEXTS = {0: "No picture at all.", 1: "Look: <image> and tell.", 3: "<image> One, <image><image> three."}
ASKED = list(range(3, 40))  # tokens whose logprobs are compared


class Served(NamedTuple):
    model: Model
    runner: Any
    requests: list[Submit]
    expected: Transcript  # of the CPU


def gpu_runner(model: Model, **settings: Any) -> Any:
    from sgla.worker.cuda import CudaRunner

    config = tiny_config(**{"device": "cuda", "step_tokens": 256, "kv_cache_bytes": 64 << 20} | settings)
    return CudaRunner(config, model.source, 0, 1, "", lambda progress: None)


def requests_of(model: Model, max_new: int = 12) -> list[Submit]:
    made = [model.submit(str(count), text, SHOWN[:count], max_new) for count, text in TEXTS.items()]
    return [replace(r, sampling=replace(r.sampling, logprobs=1, logprob_ids=ASKED)) for r in made]


def of_cpu(model: Model, requests: list[Submit]) -> Transcript:
    runner = CpuRunner(tiny_config(step_tokens=256), model.source, 0, 1, "", lambda progress: None)
    return run(runner, requests)


def places(transcript: Transcript, rid: str) -> list[Any]:
    return [place for delta in transcript[rid] for place in delta.logprobs or []]


def logprobs(place: Any) -> torch.Tensor:
    """Of ASKED at one place."""
    return torch.tensor([value for _, value in place.asked])


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Convolutions of towers, too, are of float32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(scope="module", params=NAMES)
def served(request: Any, tmp_path_factory: Any) -> Iterator[Served]:
    model = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    requests = requests_of(model)
    yield Served(model, gpu_runner(model), requests, of_cpu(model, requests))
    torch.cuda.empty_cache()


def check(found: Transcript, expected: Transcript, within: float = 2e-3) -> None:
    """The same tokens, and their logprobs within so much."""
    assert found.tokens() == expected.tokens()
    for rid in expected:
        for a, b in zip(places(found, rid), places(expected, rid), strict=True):
            assert (logprobs(a) - logprobs(b)).abs().max() < within


def test_equal_to_the_cpu(served: Served) -> None:
    assert served.runner._captures
    check(run(served.runner, served.requests), served.expected)
    assert served.runner.pictures.computed == len(SHOWN), "the tower has seen each once"
    assert served.runner.facts.ledger["tower"] == served.runner.pictures._tower.nbytes


def test_graphs_equal_eager_steps(served: Served) -> None:
    graphs = run(served.runner, served.requests)
    served.runner._captures = False
    try:
        check(run(served.runner, served.requests), graphs)
    finally:
        served.runner._captures = True


def test_in_chunks_and_alone(served: Served) -> None:
    wholes = [shown.end - shown.first for r in served.requests for shown in r.pictures if shown.whole]
    step = max([9, *(whole + 8 for whole in wholes)])
    for request in served.requests:
        found = run(served.runner, [request], step_tokens=step, prefix_cache=False)
        assert found.tokens()[request.rid] == served.expected.tokens()[request.rid]


def test_warm_equals_cold(served: Served) -> None:
    core, expected = make_core(served.runner.facts), served.expected.tokens()
    assert run(served.runner, served.requests, core).tokens() == expected
    again = [replace(request, rid=f"{request.rid} again") for request in served.requests]
    warm = run(served.runner, again, core)
    for request in served.requests:
        rid = f"{request.rid} again"
        assert warm.tokens()[rid] == expected[request.rid]
        assert warm[rid][0].cached_tokens >= (len(request.tokens) - 1) // 16 * 16


def test_a_lost_picture_ends_its_request_alone(served: Served) -> None:
    first, _, last = served.requests
    picture = served.requests[1].pictures[0]
    wrong = replace(picture, picture=replace(picture.picture, digest=b"gone", file="/nowhere"))
    broken = replace(served.requests[1], rid="broken", pictures=[wrong], media=[(picture.first, b"gone")])
    found = run(served.runner, [first, broken, last])
    assert found.finish() == {first.rid: "length", "broken": "error", last.rid: "length"}
    assert found.tokens()[last.rid] == served.expected.tokens()[last.rid]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl"])
def test_bfloat16_is_near(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "PAIRS", 64)  # prompts in pieces
    model = MAKERS[name](tmp_path)
    requests = requests_of(model, 1)
    found = run(gpu_runner(model, dtype="bfloat16", attention_backend=backend), requests)
    expected = of_cpu(model, requests)
    for request in requests:
        a, b = (logprobs(places(each, request.rid)[0]) for each in (found, expected))
        assert (a - b).abs().max() < 0.5
        assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.98


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "internvl"])
def test_kernels_of_towers(name: str, tmp_path: Path) -> None:
    """A start has compared them with transformers' own, and says so where they are not taken."""
    model = MAKERS[name](tmp_path)
    runner = gpu_runner(model, dtype="bfloat16")
    assert not any("slower" in note for note in runner.facts.notes if "tower" in note), runner.facts.notes
    exact = load_tower(model.source, model.speller.vision, torch.float32, torch.device("cuda"))
    for shown in SHOWN:
        arrays = arrays_of(model.prepared(shown))
        with torch.inference_mode():  # weights are loaded outside of it
            found, expected = runner.pictures._tower(arrays), exact(arrays)
        for a, b in zip([found.values, *found.deep], [expected.values, *expected.deep], strict=True):
            assert (a.float() - b).norm() < 0.05 * b.norm()


def wide(folder: Path) -> Model:
    """Qwen2.5-VL with heads that the native kernels take, each axis of which turns some frequencies."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 256, "window_size": 16}
    tower["fullatt_block_indexes"] = [1]
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 320}
    return qwen_vl(folder, "qwen2_5_vl", tower, {"rope_parameters": rope, **shape})


@pytest.mark.parametrize("lengths", [[1500, 1024, 1900], [5184], [130, 40, 2000, 1], [64] * 40 + [32] * 9])
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_attention_over_whole_texts(dim: int, lengths: list[int]) -> None:
    if not prompt_attention.takes_whole(this_device(), torch.bfloat16, dim):
        pytest.skip("this GPU has no such kernel")
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    tokens, scale = sum(lengths), dim**-0.5
    q, k, v = torch.randn(tokens, 3, 3, dim, device="cuda", dtype=torch.bfloat16).unbind(1)
    expected = tower_attention.attend(q, k, v, ends, max(lengths), scale)
    for _ in range(3):
        made = prompt_attention.attend_whole(q, k, v, prompt_attention.tiles_of(ends, tokens), scale)
        torch.testing.assert_close(made, expected, atol=4e-3, rtol=2e-2)


def test_native_decode_turns_by_its_own_positions(tmp_path: Path) -> None:
    """Fused kernels in graphs, against torch's attention op by op, in bfloat16: tokens up to a near tie."""
    model = wide(tmp_path)
    requests = requests_of(model)
    native = gpu_runner(model, dtype="bfloat16")
    assert native.steps.attention.decode.fused is not None
    found = run(native, requests)
    expected = run(gpu_runner(model, dtype="bfloat16", attention_backend="torch"), requests)
    same = 0
    for request in requests:
        for a, b in zip(places(found, request.rid), places(expected, request.rid)):
            assert (logprobs(a) - logprobs(b)).abs().max() < 0.6
            if a.token != b.token:
                break
            same += 1
    assert same > 12, "of 36"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
async def test_two_ranks_equal_one(tmp_path: Path) -> None:
    from tiny import over_two_ranks

    model = MAKERS["qwen2.5-vl"](tmp_path)
    requests = requests_of(model)
    found = await over_two_ranks(model.source, requests, device="cuda", kv_cache_bytes=64 << 20)
    assert found.tokens() == of_cpu(model, requests).tokens()
