"""Memory that is given back while nobody needs the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import run, submit, tiny_config, tiny_source

from sgla.actors.ingress import Ingress
from sgla.config import Config
from sgla.errors import Loading, UnsupportedField
from sgla.executor.fake import fake_facts
from sgla.memory import resident
from sgla.messages import Control
from sgla.worker.cpu import CpuRunner

TEXT = [(7 * i) % 300 for i in range(100)]
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128}
SLEEP, WAKE = Control(verb="sleep", args={"weights": True}), Control(verb="wake")


def start(config: dict[str, Any] | None = None, **model: Any) -> CpuRunner:
    settings = tiny_config(**(config or {}))
    return CpuRunner(settings, tiny_source(**model), 0, 1, "", lambda progress: None)


def answer(runner: CpuRunner) -> list[int]:
    return run(runner, [submit("r", TEXT, 5)]).tokens()["r"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_answers_are_the_same_after_a_sleep(weights: bool, native: bool) -> None:
    runner = start({"native_kernels": native})
    first = answer(runner)
    assert any(bool(layer.k.any()) for layer in runner.kv)
    for _ in range(2):
        runner.control(Control(verb="sleep", args={"weights": weights}))
    assert not any(bool(layer.k.any() | layer.v.any()) for layer in runner.kv)
    assert hasattr(runner, "model") is not weights
    runner.control(WAKE)
    runner.control(WAKE)
    assert answer(runner) == first


def test_the_memory_goes_back_to_the_system() -> None:
    runner = start({"kv_cache_bytes": 8 << 20}, **WIDE)
    answer(runner)
    awake = resident()
    runner.control(SLEEP)
    weights = runner.facts.ledger["weights"]
    assert weights > 80 << 20
    assert awake - resident() > 0.9 * weights


def test_prefixes_on_a_disk_stay(tmp_path: Path) -> None:
    runner = start({"kv_disk": f"{tmp_path}:1M"})
    first = run(runner, [submit("r", TEXT, 5)])
    runner.control(SLEEP)
    runner.control(WAKE)
    keys = [file.keys() for file in runner._tiers["disk"]._kept]
    runner.facts.found = [keys]
    again = run(runner, [submit("r", TEXT, 5)])
    assert again.tokens() == first.tokens()
    assert again["r"][0].cached_tokens == 96


def test_weights_that_cannot_be_read_again_stay() -> None:
    for config in ({"speculative_algorithm": "ngram"}, {"enable_lora": True}):
        runner = start(config)
        with pytest.raises(UnsupportedField, match="KV cache alone"):
            runner.control(SLEEP)
        runner.control(Control(verb="sleep", args={"weights": False}))
        runner.control(WAKE)
        assert len(answer(runner)) == 5


async def test_nobody_comes_while_the_server_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.actors.ingress.TRIES", 2)
    told, full = list[Control](), [True]
    ingress: Any = Ingress(Config())

    async def control(command: Control) -> None:
        told.append(command)
        if len(told) == 2:
            raise UnsupportedField("not here")

    facts = fake_facts(tiny_config(), tiny_source())
    ingress.connect(
        object(), facts, lambda: None, control, lambda: not full[0], lambda: "", lambda paused: None
    )
    assert not await ingress.sleep(weights=True)
    assert (ingress.phase, told) == ("ready", [])
    full[0] = False
    assert await ingress.sleep(weights=True)
    assert not ingress.ready
    with pytest.raises(Loading, match="/wake_up"):
        ingress.require_ready()
    told.clear()
    await ingress.wake()
    assert (ingress.phase, [one.verb for one in told]) == ("ready", ["wake"])
    with pytest.raises(UnsupportedField):
        await ingress.sleep(weights=False)
    assert ingress.ready
