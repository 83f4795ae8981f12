"""The frontend language: programs of several calls of a model, with SGLang's names.

import sgla.lang as sgl

@sgl.function
def question(s, text):
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("answer", max_tokens=64))
"""

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
