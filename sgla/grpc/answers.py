"""Fields of a choice's messages, which both protocols have alike."""

from __future__ import annotations

from typing import Any

from sgla.grpc.logprobs import Logprobs
from sgla.http.answer.collect import Choice
from sgla.messages import Event


def of_chunk(logprobs: Logprobs, choice: Choice, event: Event, first: bool) -> dict[str, Any]:
    """What is new in ``event``; the first chunk has the prompt's logprobs, too."""
    return {
        "token_ids": event.tokens,
        "output_logprobs": logprobs.output(event.logprobs),
        "input_logprobs": logprobs.prompt(choice.prompt_tokens, choice.prompt_logprobs) if first else None,
        **_counts(choice),
    }


def of_whole(logprobs: Logprobs, choice: Choice) -> dict[str, Any]:
    return {
        "output_ids": choice.tokens,
        "finish_reason": "stop" if choice.finish == "repetition" else choice.finish,
        "output_logprobs": logprobs.output(choice.logprobs),
        "input_logprobs": logprobs.prompt(choice.prompt_tokens, choice.prompt_logprobs),
        "spec_accepted_tokens": choice.usage.right,
        "spec_draft_tokens": choice.usage.guessed,
        **_counts(choice),
        **_matched(choice),
    }


def _counts(choice: Choice) -> dict[str, int]:
    usage = choice.usage
    return {
        "index": choice.index,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _matched(choice: Choice) -> dict[str, int | str]:
    """What stopped it."""
    if choice.finish != "stop" or choice.matched is None:
        return {}
    name = "matched_token_id" if isinstance(choice.matched, int) else "matched_stop_str"
    return {name: choice.matched}
