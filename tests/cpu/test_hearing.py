"""Models that take sounds, against transformers: float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hearing_models import Heard, qwen2_audio, qwen3_asr, sound, voxtral
from msgspec.structs import replace
from tiny import make_core, over_two_ranks, run, tiny_config
from vision_models import Answer, check_answers

from sgla.errors import InvalidField
from sgla.loading.tower import small_config
from sgla.media.prepare import chunks_of
from sgla.media.sound import RATE
from sgla.messages import Submit
from sgla.model.hearing import HEARINGS
from sgla.model.read import read_decoder
from sgla.model.vision.served import untaken, vision_of
from sgla.worker.cpu import CpuRunner

MAKERS = {"qwen2-audio": qwen2_audio, "voxtral": voxtral, "qwen3-asr": qwen3_asr}
SOUNDS = [sound(0.7, 1), sound(2.0, 2), sound(1.21, 3)]
TEXTS = {0: "No sound at all.", 1: "Hear: <sound> and tell.", 3: "<sound> One, <sound><sound> three."}


class Served(NamedTuple):
    model: Heard
    runner: CpuRunner
    requests: list[Submit]
    answers: dict[str, Answer]  # of transformers


@pytest.fixture(scope="module", params=MAKERS)
def served(request: Any, tmp_path_factory: Any) -> Served:
    model = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    requests = [model.submit(str(count), text, SOUNDS[:count]) for count, text in TEXTS.items()]
    answers = {r.rid: model.answer(r, SOUNDS[: int(r.rid)]) for r in requests}
    config = tiny_config(step_tokens=256, native_kernels=True)
    return Served(model, CpuRunner(config, model.source, 0, 1, "", lambda progress: None), requests, answers)


def test_equal_to_transformers(served: Served) -> None:
    """Together, and again with what the first time has left in the cache."""
    core = make_core(served.runner.facts)
    check_answers(run(served.runner, served.requests, core), served.answers)
    assert served.runner._pictures is not None
    assert served.runner._pictures.computed == len(SOUNDS)  # once each, though two requests have the first
    assert len({tuple(answer.tokens) for answer in served.answers.values()}) == 3
    again = [replace(request, rid=f"{request.rid} again") for request in served.requests]
    warm = run(served.runner, again, core)
    check_answers(warm, served.answers)
    for request in again:
        assert warm[request.rid][0].cached_tokens >= (len(request.tokens) - 1) // 16 * 16


def test_in_chunks_and_alone(served: Served) -> None:
    for request in served.requests:
        check_answers(run(served.runner, [request], step_tokens=9, prefix_cache=False), served.answers)


def test_another_sound_is_no_hit(served: Served) -> None:
    core = make_core(served.runner.facts)
    text = f"{'As long as a page, or two of them. '} <sound>{' and more' * 6}"
    first, other = (served.model.submit(str(i), text, SOUNDS[i : i + 1], 4) for i in (0, 1))
    run(served.runner, [first], core)
    assert run(served.runner, [other], core)["1"][0].cached_tokens == other.pictures[0].first // 16 * 16


def test_a_sound_that_cannot_be_had_ends_its_request_alone(served: Served) -> None:
    first, middle, last = served.requests
    (heard,) = middle.pictures
    wrong = replace(heard, picture=replace(heard.picture, digest=b"gone", file="/nowhere"))
    found = run(served.runner, [first, replace(middle, rid="broken", pictures=[wrong]), last])
    assert found.finish() == {first.rid: "length", "broken": "error", last.rid: "length"}
    assert found.tokens()[last.rid] == served.answers[last.rid].tokens


def test_a_sound_longer_than_the_model_hears_is_refused(served: Served) -> None:
    """But where it is heard in windows."""
    long = sound(4.01, 4)
    if (how := served.model.speller.vision.heard) != "once":
        request = served.model.submit("long", "Hear: <sound>", [long])
        heard = {"windows": 3 * 25 + 1, "chunks": 4 * 13 + 1 + 2}[how]
        assert len(request.tokens) == len("Hear: ") + heard
        check_answers(run(served.runner, [request]), {"long": served.model.answer(request, [long])})
        return
    with pytest.raises(InvalidField, match="hears 2 s; send it in pieces"):
        served.model.prepared(long)


@pytest.mark.parametrize("seconds", [0.2, 1.0, 2.345])
def test_chunks_are_those_of_transformers(seconds: float) -> None:
    """Which makes them with torch."""
    from transformers import Qwen3ASRFeatureExtractor

    heard = sound(seconds, 5)
    ours = chunks_of(heard, "WhisperFeatureExtractor", '{"feature_size": 128}')
    samples = np.frombuffer(heard.samples, np.float32)
    theirs = Qwen3ASRFeatureExtractor()(samples, sampling_rate=RATE, padding=True, return_attention_mask=True)
    assert (ours["input_features_mask"] == theirs["attention_mask"].numpy()).all()
    np.testing.assert_allclose(ours["input_features"], theirs["input_features"].numpy(), atol=1e-4)


@pytest.mark.slow
async def test_two_ranks_equal_one(tmp_path: Path) -> None:
    model = qwen2_audio(tmp_path)
    requests = [model.submit(str(count), text, SOUNDS[:count]) for count, text in TEXTS.items()]
    runner = CpuRunner(tiny_config(step_tokens=256), model.source, 0, 1, "", lambda progress: None)
    found = await over_two_ranks(model.source, requests, step_tokens=40)
    assert found.tokens() == run(runner, requests).tokens()


def test_a_model_sampled_at_another_rate_serves_text_alone(tmp_path: Path) -> None:
    model = qwen2_audio(tmp_path)
    assert vision_of(tiny_config(), model.source) == (model.speller.vision, "")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 48000}))
    assert vision_of(tiny_config(), model.source) == (
        None,
        "no sounds are taken: they are sampled at 48000 Hz",
    )
    assert vision_of(tiny_config(enable_lora=True), model.source)[0] is None
    assert untaken(model.source, "why") == {"audio": "why"}
    assert untaken(model.source, "") == {}


# As files on the Hub have them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 1280, "encoder_layerdrop": 0.0},
        "audio_token_index": 151646,
        "ignore_index": -100,
        "text_config": {
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "intermediate_size": 11008,
            "max_position_embeddings": 8192,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000,
            "torch_dtype": "bfloat16",
            "use_mrope": False,
            "vocab_size": 156032,
        },
        "vocab_size": 156032,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    config = {"architectures": [name], **PUBLISHED[name]}
    assert read_decoder(config).vocab == PUBLISHED[name]["text_config"]["vocab_size"]
    assert HEARINGS[name].token_of(config) < PUBLISHED[name]["text_config"]["vocab_size"]
    assert small_config(config).get_text_config().num_hidden_layers == 0
