"""Which ways to share a model out go together, with each other and with what else there is: the rest is
refused by name before anything loads."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import ForkedExecutor
from test_data_attention import parted
from test_stages import MIXTURE, MODELS, one, requests, scores
from tiny import make_core, run, run_executor, tiny_config, tiny_source

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.observe.machine import Machine
from sgla.resolve import check, resolve
from sgla.route.replicas import of_replica

WAYS: dict[str, dict[str, Any]] = {
    "--tp": {"tp": 2},
    "--pp": {"pp": 2},
    "--ep": {"tp": 2, "ep": 2},
    "--cp": {"cp": 2},
    "--dp-attention": {"tp": 2, "dp_attention": True},
    "--dp": {"dp": 2},
    "--nnodes": {"nnodes": 2, "dist_init_addr": "10.0.0.1", "dist_secret": "s"},
}
APART = {  # pairs that do not go together
    ("--tp", "--nnodes"),  # but for the other ways
}
SECRET = {"kv_transfer_secret": "s"}
BESIDE: dict[str, dict[str, Any]] = {
    "`--quantization`": {"quantization": "int8"},
    "`--kv-cache-dtype`": {"kv_cache_dtype": "int8"},
    "`--kv-disk`, `--kv-store`": {"kv_disk": "/tmp:1G"},
    "`--deterministic`": {"deterministic": True},
    "`--speculative-algorithm`": {"speculative_algorithm": "ngram"},
    "`--enable-lora`": {"enable_lora": True},
    "`--role`": {"role": "prefill"} | SECRET,
    "`--logits-processors`": {"logits_processors": ["a:B"]},
    "`--executor inline`": {"executor": "inline"},
}
COLUMNS = ("--tp", "--pp", "--ep", "--cp", "--dp-attention")
PAGE = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()


def refused(settings: dict[str, Any]) -> bool:
    """Whether it is, by name, before anything loads."""
    found = fault(settings)
    if found is None:
        return False
    assert found.param in Config.__struct_fields__
    assert re.search(r"--[a-z]", found.message)
    return True


def fault(settings: dict[str, Any]) -> ConfigError | None:
    config = Config(device="cpu", **settings)
    machine = Machine(cores=8, physical_cores=8, memory_available=1 << 34, compiler="g++")
    try:
        check(config)
        one = of_replica(config) if config.dp > 1 else config
        resolve(one, machine, tiny_source(**MIXTURE).config)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("pair", list(combinations(WAYS, 2)))
def test_ways_go_together_or_are_refused(pair: tuple[str, str]) -> None:
    settings = WAYS[pair[0]] | WAYS[pair[1]]
    assert refused(settings) == (pair in APART)


def cells() -> dict[tuple[str, str], str]:
    """What the page says of each of ``BESIDE`` with each way."""
    found = {}
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("|") and line.count("|") == len(COLUMNS) + 2
    ]
    assert head == ["beside", *(f"`{way}`" for way in COLUMNS)]
    for name, *cells in rows:
        found |= {(name, way): cell for way, cell in zip(COLUMNS, cells)}
    return found


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("way", COLUMNS)
def test_the_page_says_what_is_refused(name: str, way: str) -> None:
    told = cells()[name, way]
    assert told in ("yes", "refused")
    assert refused(WAYS[way] | BESIDE[name]) == (told == "refused")


def test_the_page_says_which_ways_go_together() -> None:
    behind = PAGE.partition("but for one, which is refused:")[2].strip().partition("\n\n")[0]
    assert {tuple(re.findall(r"`(--[\w-]+)`", line)) for line in behind.splitlines()} == APART


def test_settings_are_those_that_there_are() -> None:
    assert {name for each in [*WAYS.values(), *BESIDE.values()] for name in each} <= set(
        Config.__struct_fields__
    )
    assert msgspec.structs.asdict(Config())["cp"] == 1


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("mixture", {"tp": 2, "ep": 2, "pp": 2}),
        pytest.param("mixture", {"tp": 4, "ep": 4}, marks=pytest.mark.slow),
        pytest.param("dense", {"tp": 4}, marks=pytest.mark.slow),
        pytest.param("latent", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", {"tp": 4, "dp_attention": True}, marks=pytest.mark.slow),
        pytest.param("latent", {"tp": 4, "ep": 4, "dp_attention": True}, marks=pytest.mark.slow),
    ],
)
async def test_four_ranks_equal_one(model: str, changes: dict[str, Any]) -> None:
    """Other products are in ``test_context.py``, ``test_data_attention.py``, ``test_shared_cache.py`` and
    ``test_nodes.py``."""
    source, wanted = tiny_source(**MODELS[model]), requests(model)
    expected, stages = run(one(source), wanted), changes.get("pp", 1)
    executor = ForkedExecutor(tiny_config(**changes), source)
    try:
        facts = await executor.start(lambda progress: None)
        staged = {"stages": stages, "depth": stages + 1} if stages > 1 else {}
        core = parted(facts, 4) if "dp_attention" in changes else make_core(facts, **staged)
        found = await run_executor(executor, facts, wanted, core)
    finally:
        await executor.close()
    assert found.tokens() == expected.tokens()
    for rid, values in scores(expected).items():
        assert scores(found)[rid] == pytest.approx(values, abs=1e-4)
