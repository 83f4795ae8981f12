from __future__ import annotations

import pytest
import tiny_tokenizers as tiny

from sgla.text.tokenizer import Tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
_made: dict[str, Tokenizer] = {}


def make(kind: str) -> Tokenizer:
    if kind not in _made:
        _made[kind] = Tokenizer(tiny.KINDS[kind](), NAMED)
    return _made[kind]


@pytest.fixture(params=list(tiny.KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    return make(request.param)


@pytest.fixture
def byte_level() -> Tokenizer:
    return make("byte_level")


@pytest.fixture
def llama2_like() -> Tokenizer:
    return make("llama2_like")
