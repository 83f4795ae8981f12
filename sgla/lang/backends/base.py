"""What a program asks of whoever runs the model."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgla.errors import InvalidField, UnsupportedField
from sgla.lang.choices import Scored
from sgla.lang.sampling import Sampling


@dataclass(frozen=True)
class Conversation:
    """Messages that are complete; ``replying``: the assistant's turn has begun with the text ``reply``.
    ``frames``: of videos in them that are seen; None: as the model's files say."""

    messages: list[dict[str, Any]]
    replying: bool = True
    reply: str = ""
    frames: int | None = None

    @property
    def shows(self) -> bool:
        """It has pictures or videos."""
        return any(isinstance(message["content"], list) for message in self.messages)

    @property
    def sizes(self) -> dict[str, Any]:
        """``mm_processor_kwargs``."""
        return {} if self.frames is None else {"num_frames": self.frames}

    def begun(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages, with what the assistant has begun, and what to ask of a chat template."""
        if not self.reply:
            return self.messages, {"add_generation_prompt": self.replying}
        reply = {"role": "assistant", "content": self.reply}
        return [*self.messages, reply], {"add_generation_prompt": False, "continue_final_message": True}


Prompt = str | Conversation
Piece = tuple[str, dict[str, Any]]  # a text, and what is known of the request so far


class Backend(ABC):
    """Methods may be called from many threads. They raise SglaErrors."""

    @abstractmethod
    def generate(self, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        """Each of the ``n`` outputs."""

    @abstractmethod
    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        """One output as it comes."""

    @abstractmethod
    def score(self, prompt: Prompt, choices: Sequence[str], alone: bool) -> list[Scored]:
        """Logprobs of the tokens of ``choices`` behind ``prompt``; ``alone``: see Scored."""

    def cache_prefix(self, prompt: Prompt) -> None:
        """Have what ``prompt`` says computed and kept."""
        raise UnsupportedField(f"{type(self).__name__} keeps no prefixes; leave out cache()")

    def flush_cache(self) -> bool:
        raise UnsupportedField(f"{type(self).__name__} has no cache that can be emptied")

    def get_server_info(self) -> dict[str, Any]:
        raise UnsupportedField(f"{type(self).__name__} tells nothing of its server")


class TokenBackend(Backend):
    """One that makes tokens of texts, and tells logprobs of tokens in a prompt."""

    @abstractmethod
    def encode(self, prompt: Prompt, endings: Sequence[str] = ("",)) -> list[list[int]]:
        """The ids of the prompt with each of ``endings`` behind it. Special tokens of a text are the
        tokenizer's, those of a conversation the chat template's."""

    @abstractmethod
    def prompt_logprobs(
        self, prompts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[list[float | None]]:
        """Those of the tokens of each prompt from its start on. What comes before may be cached."""

    def score(self, prompt: Prompt, choices: Sequence[str], alone: bool) -> list[Scored]:
        """A choice's tokens are those in which the prompt with it differs from the prompt: where its first
        letters join the prompt's last token, that one is among them."""
        if isinstance(prompt, Conversation) and prompt.shows:
            raise UnsupportedField("select() is not supported behind pictures and videos; use gen()")
        head, *wholes = self.encode(prompt, ["", *choices])
        starts = [behind(head, whole) for whole in wholes]
        tokens = [whole[start:] for whole, start in zip(wholes, starts)]
        found = self.prompt_logprobs(wholes, starts)
        singly: list[Any] = [None] * len(choices)
        if alone:
            singly = self.prompt_logprobs(tokens, [0] * len(choices))
        return [
            Scored(ids, [float(value or 0.0) for value in values], single)
            for ids, values, single in zip(tokens, found, singly)
        ]


def behind(head: Sequence[int | str], whole: Sequence[int | str]) -> int:
    """Where ``whole`` begins to differ from ``head``, but not at the first token, which has no logprob.
    Raises InvalidField if it has no token there."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(head, whole))
    start = max(1, sum(1 for _ in alike))
    if start >= len(whole):
        raise InvalidField(
            "select() needs choices that add a token to a text that is there already; begin with a text",
            param="choices",
        )
    return start
