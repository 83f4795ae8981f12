"""Whisper in batches, chunks and ranks; ``test_transcriptions.py`` compares it with transformers."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hearing_models import END, sound, special, whisper
from msgspec.structs import replace
from tiny import Transcript, make_core, over_two_ranks, run, submit, tiny_config

from sgla.actors.pictures import windowed
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.media import prepare
from sgla.media.by_name import processor_of
from sgla.media.prepare import prepare_log_mel
from sgla.media.sound import Sound
from sgla.messages import Array, Placed, Prepared, RowSampling, Speech, Submit, Window
from sgla.model.read import read_decoder
from sgla.model.vision.served import settings_of, vision_of
from sgla.model.whisper_spec import read_speech
from sgla.sampling.warp import median
from sgla.text.languages import CODES, NAMES
from sgla.worker.aligning import Aligner
from sgla.worker.cpu import CpuRunner

SOUNDS = [sound(0.7, 1), sound(2.0, 2), sound(5.3, 3)]


class Served(NamedTuple):
    source: ModelSource
    runner: CpuRunner

    @property
    def speech(self) -> Speech:
        assert self.runner.facts.speech is not None
        return self.runner.facts.speech

    @property
    def settings(self) -> str:
        return json.dumps(settings_of(self.source.folder).images)

    def prepared(self, heard: Sound) -> Prepared:
        file = self.source.folder / f"{heard.digest.hex()}.bin"
        made = prepare_log_mel(heard, "WhisperFeatureExtractor", self.settings, str(file), 1 << 26)
        return Prepared(heard.digest, str(file), [Array(*fields) for fields in made])

    def request(
        self, heard: Sound, window: Window, tokens: list[int], timed: bool, **sampling: Any
    ) -> Submit:
        part = windowed(self.prepared(heard), window)
        asked = submit(f"{heard.seconds} {window.first}", tokens, 64, stop_ids=[END], **sampling)
        transcript = type(self.speech.transcript)(
            **{
                name: getattr(self.speech.transcript, name)
                for name in self.speech.transcript.__struct_fields__
            }
            | {"timed": timed}
        )
        return replace(
            asked,
            sampling=replace(asked.sampling, transcript=transcript),
            pictures=[Placed(0, 1, part)],
            media=[(0, part.digest)],
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Served:
    source, _ = whisper(tmp_path_factory.mktemp("model"))
    config = tiny_config(native_kernels=True)
    return Served(source, CpuRunner(config, source, 0, 1, "", lambda progress: None))


PROMPT = [special(name) for name in ("startoftranscript", "en", "transcribe")]
WHOLE = Window(0, 200)


def requests(served: Served, **sampling: Any) -> list[Submit]:
    """Of each sound, of a later window, and with a prompt as long as pages."""
    long = SOUNDS[2]
    return [
        *(served.request(heard, WHOLE, PROMPT, True, **sampling) for heard in SOUNDS),
        served.request(long, Window(188, 388), PROMPT, True, **sampling),
        served.request(long, Window(400, 530), [*range(40), *PROMPT], False, **sampling),
    ]


def reread(request: Submit, tokens: list[int]) -> Submit:
    """For the times of what a request was answered with."""
    sampling = RowSampling(pool=[len(request.tokens), 120])
    return replace(
        request, tokens=[*request.tokens, *tokens], max_new=0, stop_ids=frozenset(), sampling=sampling
    )


def times(found: Transcript) -> dict[str, list[float]]:
    vectors = ((rid, delta.vector) for rid, deltas in found.items() for delta in deltas)
    return {rid: np.frombuffer(vector, np.float32).tolist() for rid, vector in vectors if vector is not None}


def test_times_together_alone_and_in_chunks(served: Served) -> None:
    """And beside requests that want none, one of which has the slot next."""
    asked = requests(served)
    answers = run(served.runner, asked).tokens()
    again = [reread(request, answers[request.rid]) for request in asked[:3]]
    together = times(run(served.runner, [*again, *asked[3:]]))
    assert {rid: len(found) for rid, found in together.items()} == {
        request.rid: len(answers[request.rid]) for request in asked[:3]
    }
    for request in again:
        for step in (64, 3):
            alone = run(served.runner, [request], step_tokens=step, prefix_cache=False)
            assert times(alone) == {request.rid: together[request.rid]}
    aligner = served.runner._aligner
    assert aligner is not None
    assert run(served.runner, asked).tokens() == answers
    assert not aligner.begin(np.arange(len(asked), dtype=np.int32), np.ones(len(asked), np.int32))


def test_one_matrix_of_all_heads_crosses_to_the_host() -> None:
    heads, tokens, places = 3, 9, 20
    aligner = Aligner([(0, head) for head in range(heads)], 7, {0: np.array([2, 2 * places], np.int32)})
    assert aligner.begin(np.zeros(1, np.int32), np.full(1, tokens, np.int32))
    q, keys = torch.randn(tokens, heads * 4), torch.randn(1, heads, places, 4)
    aligner.take(0, q, keys, SimpleNamespace(), 1.0)  # type: ignore[arg-type]
    said = aligner.said(0)
    assert said.matrix.shape == (tokens - 2, places)
    weights = (q.unflatten(1, (heads, 4)).transpose(0, 1) @ keys[0].transpose(1, 2)).softmax(-1)[:, 2:]
    mean, std = weights.mean(1, keepdim=True), weights.std(1, keepdim=True, unbiased=False)
    assert torch.allclose(said.matrix, median((weights - mean) / std, 7).mean(0), atol=1e-5)
    assert len(said.numpy()) == tokens - 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_together_alone_and_in_chunks(served: Served, temperature: float) -> None:
    asked = requests(served, temperature=temperature, seed=7)
    together = run(served.runner, asked).tokens()
    assert len(set(map(tuple, together.values()))) == len(asked)
    for request in asked:
        assert run(served.runner, [request]).tokens()[request.rid] == together[request.rid]
        assert run(served.runner, [request], step_tokens=3).tokens()[request.rid] == together[request.rid]


def test_a_sound_is_heard_once_and_no_other_is_taken_for_it(served: Served) -> None:
    core, before = make_core(served.runner.facts), served.runner._listening
    assert before is not None
    computed, prompt = before.computed, [*range(40), *PROMPT]
    heard, other = sound(1.5, 8), sound(1.5, 9)
    first, again, another = (
        replace(served.request(one, WHOLE, prompt, False), rid=rid)
        for rid, one in (("first", heard), ("again", heard), ("another", other))
    )
    expected = run(served.runner, [another]).tokens()["another"]
    assert run(served.runner, [first], core).tokens()["first"] != expected
    found = run(served.runner, [again, another], core)
    assert found["again"][0].cached_tokens == 32
    assert found["another"][0].cached_tokens == 0
    assert found.tokens()["another"] == expected
    assert before.computed == computed + 2


def test_a_sound_that_cannot_be_had_ends_its_request_alone(served: Served) -> None:
    first, middle, last = requests(served)[:3]
    (placed,) = middle.pictures
    gone = replace(placed, picture=replace(placed.picture, digest=b"gone", file="/nowhere"))
    found = run(served.runner, [first, replace(middle, pictures=[gone]), last])
    assert found.finish()[middle.rid] == "error"
    assert found.tokens()[last.rid] == run(served.runner, [last]).tokens()[last.rid]


def test_a_spectrogram_in_pieces_is_that_of_the_whole(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    extractor = processor_of("WhisperFeatureExtractor", served.settings)
    for seconds in (2.1, 2.9931, 5.3):
        heard = sound(seconds, 4)
        samples = np.frombuffer(heard.samples, np.float32)
        (expected,) = extractor._np_extract_fbank_features(samples[None], "cpu")
        monkeypatch.setattr(prepare, "FRAMES", 73)
        found = prepare.log_mel_of(heard, "WhisperFeatureExtractor", served.settings)
        assert np.array_equal(found, expected.T)


@pytest.mark.slow
async def test_two_ranks_equal_one(served: Served) -> None:
    asked = requests(served)
    found = await over_two_ranks(served.source, asked, step_tokens=40)
    assert found.tokens() == run(served.runner, asked).tokens()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"pp": 2}, "--pp"),
        ({"speculative_algorithm": "ngram"}, "--speculative-algorithm ngram"),
    ],
)
def test_what_it_is_not_served_with_is_refused_by_name(
    served: Served, setting: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"hears sounds and does nothing else: .*{why}"):
        vision_of(tiny_config(**setting), served.source)


@pytest.mark.parametrize("setting", [{"role": "encode"}, {"encode_url": "tcp://a:1"}])
def test_its_encoder_runs_where_its_decoder_does(served: Served, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="runs where its decoder does; leave out --"):
        vision_of(tiny_config(**setting), served.source)


def test_what_its_files_lack_is_named(served: Served) -> None:
    lacking = dataclasses.replace(served.source, generation_config={})
    with pytest.raises(ConfigError, match="no_timestamps_token_id"):
        read_speech(lacking, {})


def test_published_configurations_are_read() -> None:
    spec = read_decoder(PUBLISHED)
    assert (spec.layers, spec.hidden, spec.vocab) == (4, 1280, 51866)
    assert (spec.heard, spec.context_len) == (1500, 448)


def test_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    assert NAMES == LANGUAGES
    assert CODES == TO_LANGUAGE_CODE


# That of large-v3-turbo.
PUBLISHED: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "apply_spec_augment": False,
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [220, 50256],
    "bos_token_id": 50257,
    "classifier_proj_size": 256,
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 4,
    "decoder_start_token_id": 50258,
    "dropout": 0.0,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 32,
    "eos_token_id": 50257,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "mask_feature_length": 10,
    "mask_feature_min_masks": 0,
    "mask_feature_prob": 0.0,
    "mask_time_length": 10,
    "mask_time_min_masks": 2,
    "mask_time_prob": 0.05,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "median_filter_width": 7,
    "num_hidden_layers": 32,
    "num_mel_bins": 128,
    "pad_token_id": 50257,
    "scale_embedding": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_weighted_layer_sum": False,
    "vocab_size": 51866,
}
