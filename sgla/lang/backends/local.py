"""An engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sgla.errors import UnsupportedField
from sgla.lang.backends.base import Conversation, Piece, Prompt, TokenBackend
from sgla.lang.sampling import USUAL, Sampling
from sgla.messages import Grammar, TokenLogprob, Usage

if TYPE_CHECKING:
    from sgla.engine import Engine, SamplingParams

GRAMMARS = {"regex": "regex", "json_schema": "json_schema"}  # a field, and the kind of its grammar


class EngineBackend(TokenBackend):
    """``owned``: it is shut down with the backend."""

    def __init__(self, engine: Engine, owned: bool = False) -> None:
        self.engine = engine
        self._owned = owned

    def generate(self, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        given = sampling.given()
        if isinstance(prompt, Conversation) and prompt.shows:
            messages, how = prompt.begun()
            sizes = prompt.sizes or None
            outputs = self.engine.chat(messages, self._params(given), mm_processor_kwargs=sizes, **how)
        else:
            outputs = self.engine.generate(self.encode(prompt)[0], self._params(given))
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return [
            (one.text, meta_of(one.usage, one.finish, one.matched) | self._logprobs(given, one))
            for one in outputs
        ]

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        given = sampling.given()
        if given.get("return_logprob") or (isinstance(prompt, Conversation) and prompt.shows):
            yield from self.generate(prompt, sampling)
            return
        for event in self.engine.stream(self.encode(prompt)[0], self._params(given)):
            yield event.text, meta_of(event.usage, event.finish, event.matched)

    def encode(self, prompt: Prompt, endings: Sequence[str] = ("",)) -> list[list[int]]:
        special = isinstance(prompt, str)
        if isinstance(prompt, Conversation):
            rendered = self.engine.render(prompt.messages, add_generation_prompt=prompt.replying)
            prompt = rendered + prompt.reply
        return [self.engine.tokenizer.encode(prompt + ending, special) for ending in endings]

    def prompt_logprobs(
        self, prompts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[list[float | None]]:
        params = [
            self._params({"max_tokens": 1, "return_logprob": True, "logprob_start_len": start})
            for start in starts
        ]
        outputs = self.engine.generate(list(prompts), params, progress=False)
        return [
            [entry and entry.logprob for entry in output.prompt_logprobs[start:]]
            for output, start in zip(outputs, starts)
        ]

    def cache_prefix(self, prompt: Prompt) -> None:
        self.generate(prompt, Sampling(max_tokens=1))

    def flush_cache(self) -> bool:
        return self.engine.flush_cache()

    def shutdown(self) -> None:
        """End the engine, if it is the backend's own."""
        if self._owned:
            self.engine.shutdown()

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        """As the engine has them."""
        from sgla.engine import SamplingParams

        given = {"max_tokens": USUAL} | given
        given.pop("return_text_in_logprobs", None)  # they are there in any case
        wanted, top = given.pop("return_logprob", False), given.pop("top_logprobs_num", 0)
        start = given.pop("logprob_start_len", -1)
        if wanted:
            given["logprobs"] = top
            if start >= 0:
                given |= {"prompt_logprobs": top, "logprob_start": start}
        kinds = [name for name in GRAMMARS if name in given]
        if len(kinds) > 1:
            raise UnsupportedField("regex and json_schema exclude each other", param="json_schema")
        for name in kinds:
            given["grammar"] = Grammar(kind=GRAMMARS[name], text=given.pop(name), param=name)
        return SamplingParams(**given)

    def _logprobs(self, given: dict[str, Any], output: Any) -> dict[str, Any]:
        """In SGLang's form: rows of a logprob, a token and its text."""
        if not given.get("return_logprob"):
            return {}

        def row(entry: TokenLogprob | None, token: int) -> list[Any]:
            return [entry and entry.logprob, token, self.engine.tokenizer.token_string(token)]

        found = {"output_token_logprobs": [row(one, one.token) for one in output.logprobs or []]}
        start = given.get("logprob_start_len", -1)
        if start >= 0 and output.prompt_logprobs is not None:
            pairs = list(zip(output.prompt_logprobs, output.prompt_tokens))[start:]
            found["input_token_logprobs"] = [row(entry, token) for entry, token in pairs]
        if given.get("top_logprobs_num"):
            found["output_top_logprobs"] = [
                [[value, token, self.engine.tokenizer.token_string(token)] for token, value in one.top]
                for one in output.logprobs or []
            ]
        return found


def meta_of(usage: Usage, finish: str | None, matched: str | int | None) -> dict[str, Any]:
    """As ``/generate`` tells it."""
    reason: dict[str, Any] | None = None
    if finish == "stop":
        reason = {"type": "stop", "matched": matched}
    elif finish is not None:
        reason = {"type": finish, "length": usage.completion_tokens}
    return {
        "finish_reason": reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
