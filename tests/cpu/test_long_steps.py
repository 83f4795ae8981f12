"""What ``--sequence-parallel`` and ``--two-batch-overlap`` cannot be together with is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace
from test_stages import MODELS
from tiny import tiny_source

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.long_steps import REFUSED, check_long_steps
from sgla.model.read import read_spec
from sgla.model.spec import ModelSpec

PAIRS = [(name, other) for name, refused in REFUSED.items() for other in refused]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_settings_that_they_are_not_together_with(name: str, other: str) -> None:
    kinds: dict[type, Any] = {int: 2, float: 2.0, bool: True}
    config = replace(Config(tp=2), **{name: True})
    config = replace(config, **{other: kinds.get(type(getattr(Config(), other)), "x")})
    with pytest.raises(ConfigError, match=f"{flag(other)} cannot be honoured with {flag(name)}") as caught:
        check_long_steps(config, "cuda", None, False)
    assert caught.value.param == other


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    ("tp", "device", "vectors", "words"),
    [(1, "cuda", False, "--tp 1"), (2, "cpu", False, "--device cpu"), (2, "cuda", True, "with vectors")],
)
def test_what_cannot_be_is_refused(name: str, tp: int, device: str, vectors: bool, words: str) -> None:
    spec = read_spec(tiny_source(**MODELS["dense"]).config)
    config = replace(Config(tp=tp), **{name: True})
    with pytest.raises(ConfigError, match=f"{flag(name)} cannot be honoured .*{words}") as caught:
        check_long_steps(config, device, spec, vectors)
    assert caught.value.param == name
    check_long_steps(replace(config, tp=2), "cuda", spec, False)


def test_heads_do_not_guess_beside_two_batches() -> None:
    config = Config(tp=2, two_batch_overlap=True, speculative_algorithm="mtp")
    with pytest.raises(
        ConfigError, match="mtp cannot be honoured with --two-batch-overlap.*; ngram can"
    ) as caught:
        check_long_steps(config, "cuda", None, False)
    assert caught.value.param == "speculative_algorithm"
    check_long_steps(replace(config, speculative_algorithm="ngram"), "cuda", None, False)


def test_two_batches_do_not_tell_when_words_were_said() -> None:
    spec = read_spec(tiny_source(**MODELS["dense"]).config)
    assert isinstance(spec, ModelSpec)
    spec = dataclasses.replace(spec, heard=8)
    with pytest.raises(ConfigError, match="cannot be honoured by LlamaForCausalLM, of which one batch"):
        check_long_steps(Config(tp=2, two_batch_overlap=True), "cuda", spec, False)
    check_long_steps(Config(tp=2, sequence_parallel=True), "cuda", spec, False)
