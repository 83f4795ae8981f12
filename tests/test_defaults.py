"""Sampling defaults: what the model's files, its card and the user say, and what each way into the engine
makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgla import cli
from sgla.cli.args import parse
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.defaults import ALIASES, GIVEN, LEFT_ASIDE, SAMPLING, TALK_REPETITION, Defaults, find_defaults
from sgla.errors import ConfigError
from sgla.hub import packaged
from sgla.hub.source import ModelSource
from sgla.messages import SamplingParams
from sgla.text.template import ChatTemplate

FILE = "generation_config.json"


def source(**generation_config: Any) -> ModelSource:
    return ModelSource("dummy", Path("nowhere"), (), {}, generation_config)


def test_every_field_is_one_of_the_parameters() -> None:
    assert set(SAMPLING) <= set(SamplingParams.__struct_fields__)


def test_the_file_goes_before_the_card_and_the_user_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"temperature": 0.2, "top_p": 0.9, "min_p": 0.1}
    card = replace(packaged.MODELS["demo"], sampling=sampling, talk={})
    monkeypatch.setitem(packaged.MODELS, "demo", card)
    config = Config(preferred_sampling_params={"min_p": 0, "max_new_tokens": 7})
    found = find_defaults(config, source(top_p=0.5, max_new_tokens=9, eos_token_id=3))
    assert found.values == {"temperature": 0.2, "top_p": 0.5, "min_p": 0, "max_tokens": 7}
    assert found.sources == {
        "temperature": "chosen for the demo",
        "top_p": FILE,
        "min_p": GIVEN,
        "max_tokens": GIVEN,
    }
    assert str(found) == (
        "temperature 0.2 (chosen for the demo), top_p 0.5 (generation_config.json), "
        "min_p 0, max_tokens 7 (--preferred-sampling-params)"
    )
    assert found.notes == []


def test_conversations_end_and_have_the_cards_penalty_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = replace(
        packaged.MODELS["demo"], sampling={"repetition_penalty": 1.1}, talk={"repetition_penalty": 1}
    )
    monkeypatch.setitem(packaged.MODELS, "demo", card)
    talk = find_defaults(Config(), None).talk(1000)
    assert talk == {"max_tokens": 250, "repetition_detection": TALK_REPETITION, "repetition_penalty": 1}
    given = {"repetition_penalty": 1.3, "max_tokens": 9, "repetition_detection": {}, "top_k": 5}
    asked = find_defaults(Config(preferred_sampling_params=given), None).talk(1000)
    assert asked == {"max_tokens": 9, "repetition_detection": None}
    assert find_defaults(Config(model="x/y"), source(max_new_tokens=2048)).talk(1000)["max_tokens"] == 2048
    assert find_defaults(Config(sampling_defaults="openai"), None).talk(1 << 20)["max_tokens"] == 4096


def test_chats_in_words_have_the_cards_penalty_unless_a_file_or_the_user_says_otherwise() -> None:
    demo = find_defaults(Config(), None)
    assert demo.in_words().values == demo.values | {"frequency_penalty": 0.2}
    assert str(demo).endswith("(chosen for the demo); chats without tools and formats: frequency_penalty 0.2")
    given = find_defaults(Config(preferred_sampling_params={"frequency_penalty": 0}), None)
    assert given.in_words() == given
    assert (
        find_defaults(Config(), source(frequency_penalty=0.5)).in_words().values["frequency_penalty"] == 0.5
    )
    other = find_defaults(Config(model="x/y"), source(top_k=3))
    assert other.in_words() == other


def test_the_demo_answers_briefly_unless_it_is_told_otherwise() -> None:
    template = ChatTemplate(packaged.SHORT_ANSWERS)
    asked = [{"role": "user", "content": "Hi"}]
    end = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    brief = "You are a helpful AI assistant. Give short, correct answers."
    assert template.render(asked) == f"<|im_start|>system\n{brief}<|im_end|>\n{end}"
    told = [{"role": "system", "content": "Be long."}, *asked]
    assert template.render(told) == f"<|im_start|>system\nBe long.<|im_end|>\n{end}"


def test_who_says_nothing_gets_the_models_length_but_for_short_routes() -> None:
    file = find_defaults(Config(), source(max_new_tokens=2048))
    assert (file.max_tokens(), file.max_tokens(16)) == (2048, 16)
    given = find_defaults(Config(preferred_sampling_params={"max_tokens": 5}), source(max_new_tokens=2048))
    assert (given.max_tokens(), given.max_tokens(16)) == (5, 5)
    assert (Defaults().max_tokens(), Defaults().max_tokens(16)) == (None, 16)
    assert given.fields(16)["max_tokens"] == 5
    assert given.fields()["max_tokens"] == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": 1e30},
        {"min_p": [0.1]},
        {"repetition_penalty": 0},
        {"temperature": float("nan")},
        {"top_p": {"a": 1}},
        {"max_new_tokens": -5},
        {"max_new_tokens": 10**400},
    ],
)
def test_nonsense_of_the_file_is_told_and_left_aside(wrong: dict[str, Any]) -> None:
    found = find_defaults(Config(model="x/y"), source(**wrong))
    (name,) = wrong
    assert name not in found.values
    (note,) = found.notes
    assert note.startswith(f"{FILE}: {name} must be a")
    with pytest.raises(ConfigError, match=f"--preferred-sampling-params: {name} must be a"):
        find_defaults(Config(preferred_sampling_params=wrong), None)


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": False},
        {"num_beams": 4},
        {"encoder_no_repeat_ngram_size": 3},
        {"mirostat": 2},
        {"guidance_scale": 1.5},
        {"stop_strings": ["x"]},
        {"forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": [5, 1.1]},
    ],
)
def test_what_is_not_supported_is_told(asked: dict[str, Any]) -> None:
    (note,) = find_defaults(Config(model="x/y"), source(**asked)).notes
    assert next(iter(asked)) in note
    quiet = {"do_sample": True, "num_beams": 1, "top_k": None, "transformers_version": "5", "bos_token_id": 1}
    assert find_defaults(Config(model="x/y"), source(**quiet)) == Defaults()


# Of HF's GenerationConfig, what changes no token of a request: lengths, which requests have, beams' options,
# outputs, caches, speed.
NO_CHANGE = """
    max_length early_stopping length_penalty num_return_sequences use_cache cache_implementation cache_config max_cache_len
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate renormalize_logits
    remove_invalid_values pad_token_id bos_token_id eos_token_id decoder_start_token_id forced_bos_token_id use_mtp is_assistant
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
    max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type
    compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size transformers_version
"""  # noqa: E501


def test_all_that_generation_config_may_say_is_known() -> None:
    from transformers import GenerationConfig

    said = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert said - {*SAMPLING, *LEFT_ASIDE, *ALIASES, *NO_CHANGE.split()} == set()


@pytest.mark.parametrize("words", [("model", "openai"), ("auto", "vllm")])
def test_the_peers_words_and_flags_mean_the_same(words: tuple[str, str], tmp_path: Path) -> None:
    def parsed(*argv: str) -> Config:
        return load_config(parse(["serve", "x/y", *argv]).flags)

    for flag in ("--generation-config", "--sampling-defaults"):
        assert find_defaults(parsed(flag, words[0]), source(top_k=3)).values == {"top_k": 3}
        assert find_defaults(parsed(flag, words[1]), source(top_k=3)) == Defaults()
        (tmp_path / FILE).write_text(json.dumps({"top_p": 0.5}))
        for path in (tmp_path, tmp_path / FILE):
            assert find_defaults(parsed(flag, str(path)), source(top_k=3)).values == {"top_p": 0.5}
        with pytest.raises(ConfigError, match="takes model, openai, or a folder"):
            find_defaults(parsed(flag, str(tmp_path / "nowhere")), source())
    for flag in ("--preferred-sampling-params", "--override-generation-config"):
        config = parsed(words[0] and flag, '{"top_k": 4}')
        assert find_defaults(config, source(top_k=3, top_p=0.5)).values == {"top_k": 4, "top_p": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5", "is no JSON object"),
        ("{'a': 1}", "is no JSON object"),
        ('{"temprature": 1}', "temprature is none of temperature, "),
        ('{"top_p": 2}', "top_p must be a number greater than 0 and at most 1, not '2'"),
    ],
)
def test_nonsense_on_the_command_line_ends_the_start(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["serve", "demo", "--preferred-sampling-params", text])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_name_of_a_file_tells_its_quantization() -> None:
    names = {
        "a.Q4_1.gguf": "Q4_1",
        "gemma-3-270m-q4_k_m.gguf": "Q4_K_M",
        "a-NVFP4.gguf": "NVFP4",
        "model.gguf": "",
        "a.safetensors": "",
    }
    for name, kind in names.items():
        assert ModelSource("gguf", Path(), (Path(name),), {}, {}).quantization == kind
