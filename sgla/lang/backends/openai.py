"""Any server of OpenAI's API: chats, or completions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from sgla.errors import UnsupportedField
from sgla.lang.backends.base import Backend, Conversation, Piece, Prompt, behind
from sgla.lang.backends.client import Client
from sgla.lang.choices import Scored
from sgla.lang.sampling import USUAL, Sampling

OPENAI = "https://api.openai.com/v1"
COMPLETERS = {"gpt-3.5-turbo-instruct", "davinci-002", "babbage-002"}  # OpenAI's models that are no chats


class OpenAI(Backend):
    """``is_chat_model``: whether programs with roles run on it, through ``/chat/completions``, or plain
    texts, through ``/completions``. What a program asks for beside OpenAI's fields is sent under vLLM's and
    SGLang's names. ``base_url`` ends in ``/v1``; OPENAI_BASE_URL and OPENAI_API_KEY are read, too.
    ``ours``: a server of sgla, whose chats go on with an answer that has begun."""

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        verify: str | bool | None = None,
        ours: bool = False,
    ) -> None:
        url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI
        self._client = Client(url, api_key or os.environ.get("OPENAI_API_KEY"), verify)
        self._model = model_name
        self._ours = ours
        self._chat = model_name not in COMPLETERS if is_chat_model is None else is_chat_model
        # OpenAI's newest models refuse the name that all other servers know.
        self._limit = "max_completion_tokens" if self._chat and url == OPENAI else "max_tokens"

    def generate(self, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        answer = self._client.ask(*self._request(prompt, sampling))
        return [(self._text(choice, "message"), told(choice, answer)) for choice in answer["choices"]]

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        path, body = self._request(prompt, sampling)
        for event in self._client.events(path, body | {"stream": True}):
            for choice in event.get("choices") or []:
                yield self._text(choice, "delta"), told(choice, event)

    def score(self, prompt: Prompt, choices: Sequence[str], alone: bool) -> list[Scored]:
        if self._chat or isinstance(prompt, Conversation):
            raise UnsupportedField(
                "chats of OpenAI's API tell no logprobs of given texts, so there is no select() on them; "
                "use a completion model (is_chat_model=False), RuntimeEndpoint or an Engine"
            )
        if alone:
            raise UnsupportedField(
                "OpenAI's API tells no token ids, which unconditional_likelihood_normalized needs; use "
                "another choices_method, RuntimeEndpoint or an Engine",
                param="choices_method",
            )
        texts = [prompt, *(prompt + choice for choice in choices)]
        body = {"model": self._model, "prompt": texts, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = self._client.ask("/completions", body)
        lists = [choice["logprobs"] for choice in sorted(answer["choices"], key=lambda one: one["index"])]
        head = lists[0]["tokens"]
        starts = [behind(head, one["tokens"]) for one in lists[1:]]
        return [
            Scored(one["tokens"][start:], [float(value) for value in one["token_logprobs"][start:]])
            for one, start in zip(lists[1:], starts)
        ]

    def _request(self, prompt: Prompt, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model} | self._fields({"max_tokens": USUAL} | sampling.given())
        if isinstance(prompt, str):
            if self._chat:
                raise UnsupportedField(
                    f"{self._model} is a chat model, whose programs are made of system(), user() and "
                    "assistant(); give is_chat_model=False for a completion model"
                )
            return "/completions", body | {"prompt": prompt}
        if not self._chat:
            raise UnsupportedField(f"{self._model} is a completion model, whose programs have no roles")
        if self._ours:
            messages, how = prompt.begun()
            sizes = {"mm_processor_kwargs": prompt.sizes} if prompt.sizes else {}
            return "/chat/completions", body | how | sizes | {"messages": messages}
        if prompt.frames is not None:
            raise UnsupportedField("OpenAI's API takes no num_frames; leave it out", param="num_frames")
        if prompt.reply:
            raise UnsupportedField(
                "chats of OpenAI's API begin each answer anew: gen() must be the first and only part of "
                "assistant()"
            )
        return "/chat/completions", body | {"messages": prompt.messages}

    def _fields(self, given: dict[str, Any]) -> dict[str, Any]:
        """Of a body. Raises UnsupportedField."""
        if given.pop("logprob_start_len", -1) >= 0:
            raise UnsupportedField("OpenAI's API tells no logprobs of prompts", param="logprob_start_len")
        given.pop("return_text_in_logprobs", None)  # they are there in any case
        wanted, top = given.pop("return_logprob", False), given.pop("top_logprobs_num", 0)
        if wanted and self._chat:
            given |= {"logprobs": True, "top_logprobs": top}
        elif wanted:
            given["logprobs"] = top
        schema = given.pop("json_schema", None)
        if schema is not None:
            shape = {"name": "answer", "schema": json.loads(schema), "strict": True}
            given["response_format"] = {"type": "json_schema", "json_schema": shape}
        given[self._limit] = given.pop("max_tokens")
        return given

    def _text(self, choice: dict[str, Any], key: str) -> str:
        return (choice[key].get("content") if self._chat else choice["text"]) or ""


def told(choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What is known of a choice, as far as it can be under the names of ``/generate``."""
    usage = answer.get("usage") or {}
    finish = choice.get("finish_reason")
    return {
        "id": answer.get("id"),
        "finish_reason": finish and {"type": finish},
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "logprobs": choice.get("logprobs"),
    }
