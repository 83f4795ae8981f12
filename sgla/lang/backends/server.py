"""A server of sgla, through its native routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sgla.errors import UnsupportedField
from sgla.lang.backends.base import Conversation, Piece, Prompt, TokenBackend
from sgla.lang.backends.client import Client
from sgla.lang.backends.openai import OpenAI
from sgla.lang.sampling import USUAL, Sampling

ASKED = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
NATIVE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class RuntimeEndpoint(TokenBackend):
    """``url`` such as http://127.0.0.1:30000. Roles become text by the server's chat template."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        if chat_template_name is not None:
            raise UnsupportedField(
                "the server renders conversations: give it another template by --chat-template",
                param="chat_template_name",
            )
        self._client = Client(base_url, api_key, verify)
        self._key, self._verify = api_key, verify

    def _chats(self) -> OpenAI:
        """For conversations with pictures, which have no text that stands for them."""
        model = self._client.ask("/v1/models")["data"][0]["id"]
        url, key = f"{self._client.url}/v1", self._key or "none"
        return OpenAI(model, True, base_url=url, api_key=key, verify=self._verify, ours=True)

    def generate(self, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        if isinstance(prompt, Conversation) and prompt.shows:
            return self._chats().generate(prompt, sampling)
        answer = self._client.ask("/generate", self._body(prompt, sampling))
        answers = answer if isinstance(answer, list) else [answer]
        return [(one["text"], one["meta_info"]) for one in answers]

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        if isinstance(prompt, Conversation) and prompt.shows:
            yield from self._chats().stream(prompt, sampling)
            return
        known = 0
        for event in self._client.events("/generate", self._body(prompt, sampling) | {"stream": True}):
            text = event["text"]
            yield text[known:], event["meta_info"]
            known = len(text)

    def encode(self, prompt: Prompt, endings: Sequence[str] = ("",)) -> list[list[int]]:
        if isinstance(prompt, Conversation):
            asked = {"messages": prompt.messages, "add_generation_prompt": prompt.replying}
            text = str(self._client.ask("/apply-template", asked)["prompt"]) + prompt.reply
        else:
            text = prompt
        body = {"prompt": [text + end for end in endings], "add_special_tokens": isinstance(prompt, str)}
        found: list[list[int]] = self._client.ask("/tokenize", body)["tokens"]
        return found

    def prompt_logprobs(
        self, prompts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[list[float | None]]:
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": starts,
        }
        answers = self._client.ask("/generate", body)
        return [[row[0] for row in answer["meta_info"]["input_token_logprobs"]] for answer in answers]

    def cache_prefix(self, prompt: Prompt) -> None:
        self.generate(prompt, Sampling(max_tokens=0))

    def flush_cache(self) -> bool:
        self._client.ask("/flush_cache", {}, plain=True)
        return True

    def get_server_info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.ask("/get_server_info")
        return found

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        given = {"max_tokens": USUAL} | sampling.given()
        body = {name: given.pop(name) for name in ASKED if name in given}
        body["sampling_params"] = {NATIVE.get(name, name): value for name, value in given.items()}
        if isinstance(prompt, str):
            return body | {"text": prompt}
        return body | {"input_ids": self.encode(prompt)[0]}
