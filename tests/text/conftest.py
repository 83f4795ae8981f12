from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_tokenizers as tiny

from sgla.text.tokenizer import Tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
KINDS: dict[str, Callable[[], object]] = {
    "byte_level": tiny.byte_level,
    "llama3_like": tiny.llama3_like,
    "llama2_like": tiny.sentencepiece,
    "gemma_like": lambda: tiny.sentencepiece(prefix=False),
    "metaspace": tiny.metaspace,
}
_made: dict[str, Tokenizer] = {}


def make(kind: str) -> Tokenizer:
    if kind not in _made:
        _made[kind] = Tokenizer(KINDS[kind](), NAMED)
    return _made[kind]


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    return make(request.param)


@pytest.fixture
def byte_level() -> Tokenizer:
    return make("byte_level")


@pytest.fixture
def llama2_like() -> Tokenizer:
    return make("llama2_like")
