"""The frontend language: programs of several calls of a model, with SGLang's names.

import sgla.lang as sgl

@sgl.function
def question(s, text):
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("answer", max_tokens=64))
"""

from typing import Any

from sgla.lang.api import (
    Runtime,
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from sgla.lang.backends.base import Backend
from sgla.lang.backends.local import EngineBackend
from sgla.lang.backends.openai import OpenAI
from sgla.lang.backends.server import RuntimeEndpoint
from sgla.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgla.lang.default import set_default_backend

__all__ = [
    "Backend",
    "EngineBackend",
    "OpenAI",
    "Runtime",
    "RuntimeEndpoint",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

INSTEAD = {
    "Anthropic": "OpenAI, with the base_url of a server of OpenAI's API",
    "Engine": "sgla.Engine, which is a backend, too",
    "LiteLLM": "OpenAI, with the base_url of its proxy",
    "global_config": "arguments of RuntimeEndpoint, gen and select",
    "separate_reasoning": 'gen("thoughts", stop="</think>"), then the text "</think>" and a second gen',
}


def __getattr__(name: str) -> Any:
    """Names of SGLang's module that are not here say what to use."""
    if name in INSTEAD:
        raise AttributeError(f"{__name__} has no {name}; use {INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
