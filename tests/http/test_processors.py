"""Logit processors that the server was started with, by HTTP and by the Engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_models import serving, write_model

from sgla.engine import Engine
from sgla.errors import BadRequest, ConfigError, SglaError
from sgla.messages import Processor, SamplingParams

HERE = Path(__file__).stem
PROMPT = [2, 7, 8, 9]


class Count:
    """Output ``i`` is token ``start + i``."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, output: Any, logits: Any) -> None:
        if self.start == 40:
            raise RuntimeError("no more")
        if self.start == 41:
            sys.exit("and no worker")
        assert not output.flags.writeable
        chosen = self.start + len(output)
        logits[:] = -np.inf
        logits[chosen] = 0


class Spoil:
    def __call__(self, output: Any, logits: Any) -> None:
        logits[0] = np.nan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processors")
    settings = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    write_model(folder, "qwen3", "AutoModelForCausalLM", **settings)
    return folder


SETTINGS: dict[str, Any] = {"logits_processors": [f"{HERE}:Count", f"{HERE}:Spoil"]}
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}


@pytest.mark.parametrize(
    "more",
    [
        {"logits_processors": [{"qualname": "Count", "kwargs": {"start": 20}}]},
        {"vllm_xargs": {"Count": {"start": 20}}},
        {"vllm_xargs": {"Count.start": 20}},
        {"vllm_xargs": {"start": 20}},
    ],
)
async def test_requests_name_processors(folder: Path, more: dict[str, Any]) -> None:
    async with serving(folder, **SETTINGS) as (site, _):
        _, plain = await site.post("/v1/completions", {**ASK, "temperature": 0})
        _, reply = await site.post("/v1/completions", {**ASK, **more, "n": 2, "logprobs": 1})
        for choice in reply["choices"]:
            assert choice["token_ids"] == [20, 21, 22, 23]
            assert min(choice["logprobs"]["token_logprobs"]) > -50  # the model's own
        _, native = await site.post(
            "/generate", {"input_ids": PROMPT, "sampling_params": {**more, "max_new_tokens": 3}}
        )
        assert native["output_ids"] == [20, 21, 22]
        _, again = await site.post("/v1/completions", {**ASK, "temperature": 0})
        assert again["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


async def test_wrong_processors_end_their_request_alone(folder: Path) -> None:
    async with serving(folder, **SETTINGS) as (site, _):
        for more, param, text in (
            ({"logits_processors": ["Other"]}, "logits_processors", "Count, Spoil"),
            ({"logits_processors": [{"name": "Count"}]}, "logits_processors", "qualname"),
            ({"logits_processors": [{"qualname": "Count", "args": [1]}]}, "logits_processors", "kwargs"),
            ({"logits_processors": [""]}, "logits_processors", "qualname"),
            ({"logits_processors": ["Count"] * 17}, "logits_processors", "16"),
            ({"vllm_xargs": {"start": 20, "odd": 3}}, "vllm_xargs", "vllm_xargs.odd: no logit processor"),
            ({"vllm_xargs": {"Other.start": 3}}, "logits_processors", "'Other'"),
            ({"vllm_xargs": {"Count.odd": 3}}, None, "odd"),
            ({"vllm_xargs": {"odd": {}}}, "logits_processors", "'odd'"),
            ({"logits_processors": ["Count"]}, None, "missing 1 required positional argument"),
            ({"vllm_xargs": {"Count": {"start": 40}}}, None, "no more"),
            ({"vllm_xargs": {"Count": {"start": 41}}}, None, "SystemExit: and no worker"),
            ({"logits_processors": ["Spoil"]}, None, "no numbers"),
        ):
            status, reply = await site.post("/v1/completions", {**ASK, **more})
            assert (status, reply["error"]["param"]) == (400, param), reply
            assert text in reply["error"]["message"]
        assert (await site.post("/v1/completions", ASK))[0] == 200
    async with serving(folder) as (site, _):
        status, reply = await site.post("/v1/completions", {**ASK, "logits_processors": ["Count"]})
        assert (status, reply["error"]["param"]) == (400, "logits_processors")
        assert "--logits-processors" in reply["error"]["message"]


def test_the_engine_has_processors(folder: Path) -> None:
    fixed: dict[str, Any] = {"executor": "inline", "native_kernels": False, "kv_cache_bytes": 1 << 20}
    with Engine(model=str(folder), device="cpu", dtype="float32", threads=1, **fixed, **SETTINGS) as engine:
        counted = SamplingParams(max_tokens=3, processors=[Processor("Count", {"start": 30})])
        assert engine.generate(PROMPT, counted).tokens == [30, 31, 32]
        with pytest.raises(SglaError, match="Other"):
            engine.generate(PROMPT, SamplingParams(processors=[Processor("Other")]))
        with pytest.raises(SglaError, match="no numbers") as failed:
            engine.generate(PROMPT, SamplingParams(processors=[Processor("Spoil")]))
        assert failed.value.status == BadRequest.status


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"logits_processors": ["no_such_module:Count"]}, "MODULE:CLASS"),
        ({"logits_processors": [f"{HERE}:Nothing"]}, "MODULE:CLASS"),
        ({"logits_processors": [f"{HERE}:PROMPT"]}, "is no class"),
        ({"logits_processors": [f"{HERE}:Count"] * 2}, "another one"),
        ({**SETTINGS, "executor": "fake"}, "--executor fake"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_the_start(
    folder: Path, settings: dict[str, Any], text: str
) -> None:
    fixed = {"executor": "inline", "native_kernels": False, "kv_cache_bytes": 1 << 20, **settings}
    with pytest.raises(ConfigError, match=text):
        Engine(model=str(folder), device="cpu", dtype="float32", threads=1, **fixed)


def test_models_that_answer_with_vectors_have_none(tmp_path: Path) -> None:
    write_model(tmp_path, "bert", "AutoModel", "mean_tokens")
    with pytest.raises(ConfigError, match="vectors"):
        Engine(model=str(tmp_path), executor="inline", device="cpu", threads=1, **SETTINGS)
