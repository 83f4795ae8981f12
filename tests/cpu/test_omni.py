"""Models that take sounds beside pictures and videos, against transformers: float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hearing_models import TOWER, sound
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from test_vision import gemma4_small
from tiny import make_core, run, tiny_config
from video_files import clip
from vision_models import TEXT, Answer, Model, answer_of, check_answers, picture, save_model, token

from sgla.errors import InvalidField
from sgla.hub.source import open_source, thinking
from sgla.loading.tower import small_config
from sgla.media.film import Film
from sgla.media.prepare import trimmed_of
from sgla.media.sound import RATE, Sound
from sgla.media.video import Video, Watchable
from sgla.media.watch import video
from sgla.messages import Submit
from sgla.model.read import read_decoder
from sgla.model.vision.served import tower_bytes
from sgla.model.vision.table import VISIONS
from sgla.worker.cpu import CpuRunner

SOUNDS = [sound(0.7, 1), sound(2.0, 2), sound(1.21, 3)]
SHOWN: dict[str, tuple[str, list[Any]]] = {
    "none": ("Nothing at all.", []),
    "heard": ("Hear: <sound> and tell.", SOUNDS[:1]),
    "both": ("<sound>See <image>, hear<sound><sound>.", [SOUNDS[0], picture(20, 30, 1), *SOUNDS[1:]]),
}


def qwen2_5_omni(folder: Path) -> Model:
    from transformers import Qwen2_5OmniThinkerConfig

    sounds = TOWER | {"n_window": 20, "output_dim": 48}
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [1],
    }
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1]}}
    config = Qwen2_5OmniThinkerConfig(
        audio_config=sounds,
        vision_config=tower,
        text_config={**text, "tie_word_embeddings": False},
        audio_token_index=token("<|AUDIO|>"),
        image_token_index=token("<|IMAGE|>"),
        video_token_index=token("<|VIDEO|>"),
        audio_start_token_id=token("<|audio_bos|>"),
        audio_end_token_id=token("<|audio_eos|>"),
        vision_start_token_id=token("<|vision_bos|>"),
        vision_end_token_id=token("<|vision_eos|>"),
        user_token_id=7,
    )
    settings = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "chunk_length": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "min_pixels": 64,
        "max_pixels": 1500,
    }
    return save_model(folder, "Qwen2_5OmniThinkerForConditionalGeneration", config, settings)


def gemma4(folder: Path) -> Model:
    sounds = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 24,
    }
    return gemma4_small(folder, sounds, seed=6)


MAKERS = {"qwen2.5-omni": qwen2_5_omni, "gemma4": gemma4}


def filmed() -> dict[str, tuple[str, list[Any]]]:
    """With a video, which PyAV writes."""
    film = video(clip(rate=3, frames=7), "file", Watchable(1 << 24, 1 << 20, 60.0, 1000))
    return {"all": ("<image><sound> and <video>, <sound>", [picture(36, 20, 2), SOUNDS[1], film, SOUNDS[0]])}


def given(model: Model, request: Submit, shown: list[Any]) -> dict[str, Any]:
    """What transformers' module is given."""
    found = model.given(request, [one for one in shown if not isinstance(one, Sound)])
    heard = [model.heard(one) for one in shown if isinstance(one, Sound)]
    for name in heard[0] if heard else {}:
        if name != "frames":
            found[name] = together([arrays[name] for arrays in heard])
    if model.source.config["model_type"] == "qwen2_5_omni_thinker":
        found.pop("mm_token_type_ids", None)
    if films := [one for one in shown if isinstance(one, Video)]:
        seen = [len(Film("Qwen2VLVideoProcessor", {}).numbers(one)) / one.frames * one.rate for one in films]
        found["video_second_per_grid"] = torch.tensor([2 / each for each in seen])
    return found


def together(arrays: list[Any]) -> torch.Tensor:
    """Of several sounds, with zeros behind the shorter ones."""
    most = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays))]
    rows = [np.pad(x[0], [(0, to - has) for to, has in zip(most, x.shape[1:])]) for x in arrays]
    return torch.from_numpy(np.stack(rows))


class Served(NamedTuple):
    model: Model
    runner: CpuRunner
    requests: list[Submit]
    answers: dict[str, Answer]  # of transformers


@pytest.fixture(scope="module", params=MAKERS)
def served(request: Any, tmp_path_factory: Any) -> Served:
    model = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    cases = SHOWN | (filmed() if request.param == "qwen2.5-omni" else {})
    requests = [model.submit(rid, text, shown) for rid, (text, shown) in cases.items()]
    answers = {
        one.rid: answer_of(model.module, given(model, one, cases[one.rid][1]), one.max_new)
        for one in requests
    }
    config = tiny_config(step_tokens=512, native_kernels=True)
    return Served(model, CpuRunner(config, model.source, 0, 1, "", lambda progress: None), requests, answers)


def test_equal_to_transformers(served: Served) -> None:
    """Together, again with what the first time has left in the cache, and in chunks, alone."""
    core = make_core(served.runner.facts)
    check_answers(run(served.runner, served.requests, core), served.answers)
    assert len({tuple(answer.tokens) for answer in served.answers.values()}) == len(served.requests)
    again = [replace(request, rid=f"{request.rid} again") for request in served.requests]
    warm = run(served.runner, again, core)
    check_answers(warm, served.answers)
    for request in again:
        assert warm[request.rid][0].cached_tokens >= (len(request.tokens) - 1) // 16 * 16
    for request in served.requests[1:]:
        check_answers(run(served.runner, [request], step_tokens=19, prefix_cache=False), served.answers)


def test_a_sound_longer_than_the_model_hears_is_refused(served: Served) -> None:
    hearing = served.model.speller.vision.sounds
    assert hearing is not None
    longest = {"trimmed": 2, "masked": 30}[hearing.heard]
    with pytest.raises(InvalidField, match=f"hears {longest} s; send it in pieces"):
        served.model.heard(sound(longest + 0.1))


@pytest.mark.parametrize("seconds", [0.1, 0.507, 1.999])
def test_frames_are_those_of_transformers(seconds: float) -> None:
    """Which fills every sound up to the longest one."""
    from transformers import WhisperFeatureExtractor

    heard, settings = sound(seconds, 5), {"feature_size": 16, "chunk_length": 2}
    ours = trimmed_of(heard, "WhisperFeatureExtractor", json.dumps(settings))
    samples = np.frombuffer(heard.samples, np.float32)
    theirs = WhisperFeatureExtractor(**settings)(
        samples, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    frames = theirs["attention_mask"].sum()
    assert ours["frames"] == ours["feature_attention_mask"].sum() == frames
    np.testing.assert_allclose(ours["input_features"], theirs["input_features"][..., :frames], atol=1e-5)


def test_what_speaks_is_left_out(tmp_path: Path) -> None:
    """Of files that have it, of which what thinks is served."""
    model = qwen2_5_omni(tmp_path)
    request = model.submit("both", *SHOWN["both"], 8)
    runner = CpuRunner(tiny_config(), model.source, 0, 1, "", lambda progress: None)
    expected = run(runner, [request]).tokens()
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "enable_talker": True}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"thinker_config": config, "talker_config": {}}))
    tensors = {f"thinker.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {"talker.model.norm.weight": torch.ones(4), "token2wav.dit.x": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    assert tower_bytes(source, model.speller.vision) == tower_bytes(model.source, model.speller.vision) > 0
    thinking = CpuRunner(tiny_config(), source, 0, 1, "", lambda progress: None)
    assert run(thinking, [request]).tokens() == expected


# As files on the Hub have it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "enable_audio_output": True,
    "enable_talker": True,
    "model_type": "qwen2_5_omni",
    "talker_config": {"model_type": "qwen2_5_omni_talker"},
    "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "_attn_implementation_autoset": True,
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 100, "output_dim": 3584},
        "audio_end_token_id": 151648,
        "audio_start_token_id": 151647,
        "audio_token_index": 151646,
        "ignore_index": -100,
        "image_token_index": 151655,
        "init_std": 0.02,
        "model_type": "qwen2_5_omni_thinker",
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": {
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2_5_omni_text",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        "user_token_id": 872,
        "video_token_index": 151656,
        "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", "spatial_merge_size": 2},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    },
}


def test_a_published_configuration_is_read() -> None:
    config = thinking(PUBLISHED)
    spec = read_decoder(config)
    assert (spec.vocab, spec.layers, spec.tied) == (152064, 28, True)  # but where files have another head
    assert VISIONS[spec.architecture].tokens_of(config) == (151655, 151656, 151646)
    assert small_config(config).get_text_config().num_hidden_layers == 0
