"""Experts that are whole on one rank each, instead of a part of each on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stages import Stages
from test_stages import MIXTURE, one, requests
from tiny import LLAMA, VOCAB, over_two_ranks, run, submit, tiny_config, tiny_source

from sgla.config import Config
from sgla.dist import Shard
from sgla.errors import ConfigError, UnsupportedField
from sgla.ledger import mesh
from sgla.loading.load import load_model
from sgla.messages import Control
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

ODD = LLAMA | MIXTURE | {"num_experts": 5, "num_hidden_layers": 1}
STACKED = {  # gpt-oss, with biases, and gate and up in turn
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("model", "quantization"), [(ODD, None), (ODD, "int8"), (STACKED, None)], ids=["each", "int8", "stacked"]
)
@torch.no_grad()
def test_what_ranks_make_adds_up(model: dict[str, Any], quantization: str | None) -> None:
    """Of 5 experts one rank has two and the other three."""
    source = tiny_source()
    source.config.clear()
    source.config.update(model)
    whole = load_model(source, quantization=quantization).blocks[0].mlp
    shards = [Shard(rank, 2, whole_experts=True) for rank in range(2)]
    parts = [load_model(source, quantization=quantization, shard=shard).blocks[0].mlp for shard in shards]
    assert [part.held for part in parts] == [range(2), range(2, 5)]
    assert [part.down.n for part in parts] == [2 * 64, 3 * 64]
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    made = [part.chosen(x, None) for part in parts]
    assert all(bool(one_.any()) for one_ in made)
    torch.testing.assert_close(sum(made), whole.chosen(x, None), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("native", [False, True])
async def test_two_ranks_with_whole_experts_equal_one(native: bool) -> None:
    source, wanted = tiny_source(**MIXTURE), requests("mixture")
    expected = run(one(source, native_kernels=native), wanted)
    found = await over_two_ranks(source, wanted, ep=2, native_kernels=native)
    assert found.tokens() == expected.tokens()


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"ep": 2}, MIXTURE, "--ep 2 must be as large as --tp"),
        ({"ep": 2, "tp": 2}, {}, "--ep 2 cannot be honoured by a model without experts"),
        ({"ep": 8, "tp": 8}, MIXTURE, "--ep 8 cannot be honoured by a model with 4 experts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    settings: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(Config(device="cpu", **settings), machine, tiny_source(**model).config)
    assert caught.value.param == "ep"


def test_who_has_which_experts_is_known_before_anything_loads() -> None:
    ranks = mesh(tiny_config(tp=2, ep=2), tiny_source(**ODD).config)
    assert [held.experts for held in ranks] == [(0, 1), (2, 4)]


def test_choices_of_experts_are_counted() -> None:
    """Each token chooses two in each layer; both stages tell of theirs."""
    stages = Stages(tiny_source(**MIXTURE), 2)
    wanted = [submit("r", list(range(20)), 6)]

    def told() -> dict[int, int]:
        taken = [runner.control(Control(verb="experts_dump"))["experts"] for runner in stages.runners]
        return {layer: sum(numbers) for stage in taken for layer, numbers in stage.items()}

    run(None, wanted, stages.core(prefix_cache=False), stages)
    assert told() == {0: 0, 1: 0, 2: 0}
    for runner in stages.runners:
        runner.control(Control(verb="experts_start"))
    run(None, wanted, stages.core(prefix_cache=False), stages)
    assert told() == dict.fromkeys(range(3), 2 * (20 + 5))
    for runner in stages.runners:
        runner.control(Control(verb="experts_stop"))
    run(None, wanted, stages.core(prefix_cache=False), stages)
    assert told() == {0: 0, 1: 0, 2: 0}
    dense = CpuRunner(tiny_config(), tiny_source(), 0, 1, "", lambda progress: None)
    with pytest.raises(UnsupportedField, match="no experts"):
        dense.control(Control(verb="experts_start"))


@pytest.mark.parametrize("native", [True, False])
def test_experts_are_counted_behind_a_sleep_as_before(native: bool) -> None:
    source = tiny_source(**MIXTURE)
    runner = CpuRunner(tiny_config(native_kernels=native), source, 0, 1, "", lambda progress: None)
    runner.control(Control(verb="experts_start"))
    runner.control(Control(verb="sleep", args={"kv": True, "weights": "files"}))
    runner.control(Control(verb="wake", args={"kv": True, "weights": True}))
    run(runner, [submit("r", list(range(20)), 6)])
    told: Any = runner.control(Control(verb="experts_dump"))
    assert [sum(numbers) for numbers in told["experts"].values()] == [2 * (20 + 5)] * 3
