"""Grammars on a GPU: through the whole engine, two steps in flight."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from schema_cases import CASES
from test_engine import FORCED, MIXED, json_schema, outputs, params

from sgla import Engine
from sgla.messages import Grammar

pytestmark = pytest.mark.gpu
Start = Callable[..., Engine]
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def on_gpu(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """An engine with these settings; the one before is ended."""
    larger = tmp_path_factory.mktemp("larger")
    shutil.copytree(folder, larger, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps(config | SHAPE))
    made: list[tuple[Any, Engine]] = []

    def make(**changes: Any) -> Engine:
        if made and made[0][0] == changes:
            return made[0][1]
        end()
        settings: dict[str, Any] = {"max_running_requests": 64, "kv_cache_bytes": 256 << 20, "random_seed": 3}
        engine = Engine(str(larger), device="cuda", load_format="dummy", **settings | changes)
        made.append((changes, engine))
        return engine

    def end() -> None:
        while made:
            made.pop()[1].shutdown()

    yield make
    end()


def test_every_document_fits_its_schema(on_gpu: Start) -> None:
    engine = on_gpu()
    made = outputs(engine, [json_schema(schema) for schema in CASES.values()])
    finished = [(schema, out.text) for schema, out in zip(CASES.values(), made) if out.finish == "stop"]
    for schema, text in finished:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert validator.is_valid(json.loads(text)), (schema, text)
    assert len(finished) > 0.95 * len(made)


def test_other_grammars_beside_free_rows_and_every_option(on_gpu: Start) -> None:
    engine = on_gpu()
    regexes = ["[a-c]{3}-[0-9]{2}", "(yes|no)( (yes|no)){0,3}", "[xyz]{4}"]
    options: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"frequency_penalty": 1.0},
        {"logprobs": 3},
        {"min_tokens": 9},
    ]
    for option in options:
        grammars = [*(Grammar(kind="regex", text=text) for text in regexes), None]
        *made, free = outputs(engine, grammars, max_tokens=30, **option)
        assert all(re.fullmatch(regex, out.text) for regex, out in zip(regexes, made))
        assert len(free.tokens) > 0
    thinking = Grammar(kind="regex", text="[0-9]{3}", after=("</think>",))
    close = engine.tokenizer.encode("</think>")[0]
    out = engine.generate("x", params(engine, thinking, logit_bias={close: 6.0}, max_tokens=200))
    assert out.finish == "stop"
    assert re.search("[0-9]{3}$", out.text)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_ranks(on_gpu: Start) -> None:
    engine = on_gpu(tp=2)
    made = outputs(
        engine, [*[Grammar(kind="regex", text="[a-c]{3}-[0-9]{2}")] * 8, *[None] * 4], max_tokens=30
    )
    assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", out.text) for out in made[:8])


def texts(engine: Engine) -> list[tuple[list[int], str | None]]:
    made = outputs(engine, [*MIXED, *[None] * 10], temperature=0.8, max_tokens=60)
    return [(out.tokens, out.finish) for out in made]


def test_depth_batch_and_forced_tokens_change_nothing(on_gpu: Start) -> None:
    """With kernels that give the same bits whatever else runs."""
    engine = on_gpu(deterministic=True)
    together = texts(engine)
    before = engine.stats().forced_tokens
    alone = outputs(engine, [FORCED], temperature=0.8, max_tokens=60)[0]
    assert engine.stats().forced_tokens > before
    assert (alone.tokens, alone.finish) == together[0]
    assert texts(on_gpu(deterministic=True, depth=1)) == together
    assert texts(on_gpu(deterministic=True, depth=3)) == together


def test_rows_that_guess_beside_grammars_change_nothing(on_gpu: Start) -> None:
    expected = texts(on_gpu(deterministic=True))
    for depth in (1, 3):
        engine = on_gpu(deterministic=True, depth=depth, speculative_algorithm="ngram")
        assert texts(engine) == expected
        assert engine.stats().verifies > 0
