"""Ranks that share out the tokens of a cache of latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from config_cases import RUN
from msgspec.structs import replace
from test_context import through
from test_stages import LATENT, MODELS, one, requests, scores
from tiny import VOCAB, run, tiny_config, tiny_source

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.ledger import ledger, mesh
from sgla.model.read import read_spec
from sgla.model.shared_cache import check_dcp

ODD = LATENT | {"num_attention_heads": 3, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "dcp": 2},
        pytest.param({"tp": 2, "dcp": 2, "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "dcp": 4}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "dcp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
async def test_a_shared_cache_equals_that_of_one_rank(changes: dict[str, Any]) -> None:
    """In chunks, beside rows that decode, and behind cached prefixes."""
    model = LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4}
    source, wanted = tiny_source(**model), requests("latent")
    alike = {name: changes[name] for name in ("kv_cache_dtype",) if name in changes}
    expected = run(one(source, **alike), wanted)
    found = await through(source, wanted, **changes)
    assert found.tokens() == expected.tokens()
    for rid, values in scores(expected).items():
        assert scores(found)[rid] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("changes", [{"tp": 2, "dcp": 2}, {"cp": 2}])
async def test_ranks_of_pairs_of_layers_equal_one(changes: dict[str, Any]) -> None:
    """LongCat-Flash, with a latent for each attention of a layer."""
    source = dataclasses.replace(tiny_source(), config=RUN["LongCat-Flash"].config | {"vocab_size": VOCAB})
    expected = run(one(source), requests("latent"))
    found = await through(source, requests("latent"), **changes)
    assert found.tokens() == expected.tokens()
    for rid, values in scores(expected).items():
        assert scores(found)[rid] == pytest.approx(values, abs=1e-4)


def test_a_rank_keeps_its_part_of_the_tokens() -> None:
    source = tiny_source(**LATENT)
    whole, parts = (tiny_config(tp=2, dcp=dcp, kv_cache_bytes=1 << 20) for dcp in (1, 2))
    each, halves = (mesh(config, source.config)[0].kv_bytes_per_token for config in (whole, parts))
    assert each == 2 * halves
    once, twice = (ledger(config, source.config)["kv_tokens"] for config in (whole, parts))
    assert 2 * once <= twice <= 2 * once + parts.page_size


@pytest.mark.parametrize(
    "name",
    """
    pp cp nnodes dp_attention speculative_algorithm enable_lora kv_disk kv_host_bytes kv_host_ratio
    kv_store role encode_url cpu_offload_gb enable_torch_compile
    """.split(),  # noqa: SIM905
)
def test_settings_that_it_is_not_together_with(name: str) -> None:
    kinds: dict[type, Any] = {int: 2, bool: True, dict: {"a": 1}, list: ["x"]}
    config = replace(Config(tp=2, dcp=2), **{name: kinds.get(type(getattr(Config(), name)), "x")})
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} cannot be honoured with --dcp") as caught:
        check_dcp(config, "cpu", None, False)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("changes", "model", "device", "words"),
    [
        ({"tp": 4, "dcp": 2}, LATENT, "cpu", "with --tp 4"),
        ({"tp": 3, "dcp": 3}, LATENT, "cpu", "with --page-size"),
        ({"tp": 2, "dcp": 2}, LATENT, "other", "on --device other"),
        ({"tp": 2, "dcp": 2, "executor": "ray"}, LATENT, "cpu", "with --executor ray"),
        ({"tp": 2, "dcp": 2}, MODELS["dense"], "cpu", "do not all keep latents"),
        ({"tp": 2, "dcp": 2}, ODD, "cpu", "does not divide"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], model: dict[str, Any], device: str, words: str
) -> None:
    spec = read_spec(tiny_source(**model).config)
    with pytest.raises(ConfigError, match=words) as caught:
        check_dcp(Config(**changes), device, spec, False)
    assert caught.value.param == "dcp"
    with pytest.raises(ConfigError, match="with vectors"):
        check_dcp(Config(tp=2, dcp=2), "cpu", None, True)
