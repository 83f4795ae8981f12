"""Models that take videos, against transformers: float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_vision import (
    gemma4_large,
    gemma4_small,
    glm4v,
    internvl,
    kimi,
    llava_onevision,
    minicpm,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
    smolvlm,
)
from tiny import make_core, run, tiny_config
from video_files import clip
from vision_models import Answer, Model, answer_of, check_answers, picture

from sgla.errors import InvalidField
from sgla.media.film import Film, filmed
from sgla.media.prepare import arrays_of as arrays_made
from sgla.media.video import Video, Watchable
from sgla.media.watch import video
from sgla.messages import Submit
from sgla.worker.cpu import CpuRunner
from sgla.worker.features import arrays_of
from sgla.worker.pictures import grid_of

MAKERS = {"qwen3-vl": qwen3_vl, "qwen2-vl": qwen2_vl, "qwen2.5-vl": qwen2_5_vl, "qwen3.5": qwen3_5}
LIMITS = Watchable(1 << 24, 1 << 20, 60.0, 1000)


def film(**of: Any) -> Video:
    return video(clip(**of), "file", LIMITS)


# 8 frames, 5 of 15, one.
VIDEOS = [film(rate=2), film(frames=15, width=88, rate=6, seed=1), film(frames=1, height=56, seed=2)]
SHOWN = {
    "one": ("Look: <video> and tell.", VIDEOS[:1]),
    "all": ("<video> and <image>, <video><video> last.", [VIDEOS[0], picture(20, 30, 1), *VIDEOS[1:]]),
}


class Served(NamedTuple):
    model: Model
    runner: CpuRunner
    requests: list[Submit]
    answers: dict[str, Answer]  # of transformers


def positions(model: Model, request: Submit) -> tuple[Any, int, list[Any]]:
    """Ours: see ``grid_of``; and the places of parts."""
    vision, config, ids = model.speller.vision, model.source.config, np.array(request.tokens)
    assert vision.merged is not None
    parts = [
        p.first + np.flatnonzero(np.isin(ids[p.first : p.end], vision.tokens_of(config)))
        for p in request.pictures
    ]
    return *grid_of(request.pictures, parts, len(ids), vision.merged(config)), parts


def answer(model: Model, request: Submit, shown: list[Any]) -> Answer:
    """Where transformers 5 has other positions (see the test of these), at ours."""
    with pytest.MonkeyPatch.context() as patch:
        if (film := model.speller.vision.film) is not None and film.paced is not None:
            grid, shift, _ = positions(model, request)
            found = torch.from_numpy(grid)[:, None], torch.tensor([[shift]])
            patch.setattr(model.module.model, "get_rope_index", lambda *given, **more: found)
        return model.answer(request, shown)


@pytest.fixture(
    scope="module",
    params=[name if name == "qwen3-vl" else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS],
)
def served(request: Any, tmp_path_factory: Any) -> Served:
    model = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    requests = [model.submit(rid, text, shown) for rid, (text, shown) in SHOWN.items()]
    answers = {r.rid: answer(model, r, SHOWN[r.rid][1]) for r in requests}
    config = tiny_config(step_tokens=512, native_kernels=True)
    return Served(model, CpuRunner(config, model.source, 0, 1, "", lambda progress: None), requests, answers)


def test_equal_to_transformers(served: Served) -> None:
    """Together, again with what the first time has left in the cache, and in chunks."""
    core = make_core(served.runner.facts)
    check_answers(run(served.runner, served.requests, core), served.answers)
    assert served.runner._pictures is not None
    assert served.runner._pictures.computed == 4
    again = [replace(request, rid=f"{request.rid} again") for request in served.requests]
    warm = run(served.runner, again, core)
    check_answers(warm, served.answers)
    for request in again:
        assert warm[request.rid][0].cached_tokens >= (len(request.tokens) - 1) // 16 * 16
    chunked = run(served.runner, served.requests[:1], step_tokens=19, prefix_cache=False)
    check_answers(chunked, served.answers)


def test_positions_equal_transformers(served: Served) -> None:
    """Where a video's frames come to later positions than its rows and columns, what is behind it goes on
    from there, as in the paper (arXiv 2409.12191), and as transformers has it for Qwen2.5-Omni; for this
    model transformers 5 goes on from the rows and columns."""
    model, request = served.model, served.requests[1]
    vision, ids = model.speller.vision, np.array(request.tokens)
    assert vision.film is not None
    image, film = vision.tokens_of(model.source.config)
    grid, shift, places = positions(model, request)
    told = [{array.name: array.values for array in p.picture.arrays} for p in request.pictures]
    sampler = Film(vision.film.processor, {})
    more = {}
    if vision.film.paced is not None:
        seen = [len(sampler.numbers(one)) / one.frames * one.rate for one in VIDEOS]
        more["second_per_grid_ts"] = torch.tensor([2 / each for each in seen])
    expected, delta = model.module.model.get_rope_index(
        input_ids=torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy((ids == image) + 2 * (ids == film))[None],
        image_grid_thw=torch.tensor([each["image_grid_thw"] for each in told if "steps" not in each]),
        video_grid_thw=torch.tensor([each["image_grid_thw"] for each in told if "steps" in each]),
        **more,
    )
    if vision.film.paced is None:
        np.testing.assert_array_equal(grid, expected[:, 0])
        assert shift == delta.item()
        return
    ends, behind = [int(p[-1]) + 1 for p in places], 0
    for first, end, each in zip([0, *ends], ends, told):
        np.testing.assert_array_equal(grid[:, first:end] - behind, expected[:, 0, first:end])
        _, rows, columns = (length // 2 for length in each["image_grid_thw"])
        behind += max(0, max(each.get("steps", [0])) + 1 - max(rows, columns))
    assert behind > 0
    assert shift == grid.max() + 1 - len(ids)


def test_a_tower_sees_pictures_and_videos_together(served: Served) -> None:
    """As one after the other, in any order: on GPUs it does so."""
    assert served.runner._pictures is not None
    tower, shown = served.runner._pictures._tower, [p.picture for p in served.requests[1].pictures]
    arrays = [arrays_of(one) for one in shown]
    with torch.inference_mode():
        alone = [tower(each) for each in arrays]
        for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
            found = tower.several([arrays[i] for i in order], [len(alone[i].values) for i in order])
            for own, i in zip(found, order):
                torch.testing.assert_close(own.values, alone[i].values, atol=1e-4, rtol=1e-4)


def test_a_frame_is_a_picture(tmp_path: Path) -> None:
    """InternVL, whose frames go with pictures, in the order of the prompt."""
    model, shown = internvl(tmp_path), [VIDEOS[0], picture(20, 30, 1)]
    request = model.submit("both", "Look: <video> and <image>.", shown, 16)
    frames = model.filmed(VIDEOS[0])["pixel_values"]
    assert frames.shape == (8, 3, 16, 16)
    tiles = arrays_made(shown[1], model.processor, model.settings, model.asked())["pixel_values"]
    values = torch.from_numpy(np.concatenate([frames, tiles]))
    ids = torch.tensor([request.tokens])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": values}
    answers = {"both": answer_of(model.module, given, 16)}
    runner = CpuRunner(tiny_config(step_tokens=256), model.source, 0, 1, "", lambda progress: None)
    core = make_core(runner.facts)
    for _ in range(2):
        check_answers(run(runner, [request], core), answers)
    check_answers(run(runner, [request], step_tokens=24, prefix_cache=False), answers)


def of_frames(name: str, film: dict[str, Any], ids: Any, image: int) -> dict[str, Any]:
    """What transformers' module is given of a video."""
    made = {key: torch.from_numpy(values) for key, values in film.items()}
    if name == "llava-onevision":
        return {"pixel_values_videos": made["pixel_values_videos"]}
    if name.startswith("minicpm"):
        return {"pixel_values_videos": made["pixel_values"], "target_sizes_videos": made["target_sizes"]}
    if name == "smolvlm":
        return {key: made[key] for key in ("pixel_values", "pixel_attention_mask")}
    kinds = {"mm_token_type_ids": 2 * (ids == image).int()}
    if name.startswith("gemma4"):
        frames = torch.tensor([len(made["pixel_values"])])
        places = {"video_position_ids": made["image_position_ids"], "num_frames_per_video": frames}
        return {"pixel_values_videos": made["pixel_values"], **places, **kinds}
    grid = {"pixel_values_videos": made["pixel_values"], "video_grid_thw": made["image_grid_thw"]}
    return grid if name == "kimi-k2.5" else grid | kinds


POOLED = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 6, "num_frames": 4}
FAST = ("gemma4", "kimi-k2.5")
CUT = {"patch_size": 4, "scale_resolution": 16}
FRAMED = {
    "minicpm-v": (minicpm, CUT | {"max_slice_nums": 4}),
    "minicpm-v whole": (minicpm, CUT | {"slice_mode": False, "max_num_frames": 2}),
    "llava-onevision": (llava_onevision, {"size": {"height": 16, "width": 16}, "num_frames": 5}),
    "smolvlm": (smolvlm, {"size": {"longest_edge": 24}, "max_image_size": {"longest_edge": 16}}),
    "gemma4": (
        gemma4_large,
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 6, "num_frames": 4},
    ),
    "gemma4-small": (
        gemma4_small,
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 6, "num_frames": 4},
    ),
    "glm4v": (glm4v, {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 3000}}),
    "kimi-k2.5": (kimi, {"patch_size": 4, "max_patches": 24, "size": {"max_height": 64, "max_width": 64}}),
}


@pytest.mark.parametrize(
    "name",
    [
        each if each in ("gemma4", "kimi-k2.5") else pytest.param(each, marks=pytest.mark.slow)
        for each in FRAMED
    ],
)
def test_frames_equal_transformers(name: str, tmp_path: Path) -> None:
    """Whole, again, and in chunks; another video is no hit."""
    make, settings = FRAMED[name]
    model = make(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    request = model.submit("video", "Look: <video> and tell.", VIDEOS[1:2], 16)
    film, vision = model.filmed(VIDEOS[1]), model.speller.vision
    assert vision.film is not None
    ids = torch.tensor([request.tokens])
    shown = of_frames(name, film, ids, vision.film.token_of(model.source.config))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **shown}
    answers = {"video": answer_of(model.module, given, 16)}
    runner = CpuRunner(tiny_config(step_tokens=256), model.source, 0, 1, "", lambda progress: None)
    core = make_core(runner.facts)
    for _ in range(2):
        check_answers(run(runner, [request], core), answers)
    wholes = [shown.end - shown.first for shown in request.pictures if shown.whole]
    step = max([24, *(whole + 8 for whole in wholes)])
    check_answers(run(runner, [request], step_tokens=step, prefix_cache=False), answers)
    other = replace(model.submit("other", "Look: <video> and tell.", VIDEOS[:1], 16), rid="other")
    assert run(runner, [other], core)["other"][0].cached_tokens <= other.pictures[0].first


@pytest.mark.parametrize(
    ("settings", "count"),
    [("{}", 8), ('{"num_frames": 3}', 3), ('{"fps": 1}', 4), ('{"num_frames": 99}', 8), ('{"fps": 0.01}', 1)],
)
def test_frames_at_equal_distances(settings: str, count: int) -> None:
    made = filmed(VIDEOS[0], "InternVLVideoProcessor", settings, {}, 1 << 26)["pixel_values"]
    assert made.shape == (count, 3, 384, 384)
    with pytest.raises(InvalidField, match="ask for fewer"):
        filmed(VIDEOS[0], "InternVLVideoProcessor", settings, {}, 1 << 10)
