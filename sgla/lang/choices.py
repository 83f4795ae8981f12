"""How ``select`` chooses: the methods of SGLang's language, by the logprobs of the choices' tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scored:
    """A choice behind a prompt: its ``tokens`` (ids, or texts where a backend tells no ids) and their
    logprobs. ``alone``: the logprobs of the same tokens with nothing in front, of which the first has
    none."""

    tokens: Sequence[int | str]
    logprobs: list[float]
    alone: list[float | None] | None = None

    @property
    def mean(self) -> float:
        return sum(self.logprobs) / len(self.logprobs)


class ChoicesMethod(ABC):
    alone = False  # whether it reads ``Scored.alone``

    @abstractmethod
    def pick(self, choices: Sequence[Scored]) -> tuple[int, dict[str, Any]]:
        """The index of the choice, and what there is to tell of it."""


class TokenLengthNormalized(ChoicesMethod):
    """The highest mean logprob of a token, so that long choices are not at a disadvantage."""

    def pick(self, choices: Sequence[Scored]) -> tuple[int, dict[str, Any]]:
        return highest([choice.mean for choice in choices]), {}


class GreedyTokenSelection(ChoicesMethod):
    """Token by token those choices stay whose token is most probable, as a greedy output would be
    written. A choice that has ended goes on with its mean."""

    def pick(self, choices: Sequence[Scored]) -> tuple[int, dict[str, Any]]:
        width = max(len(choice.tokens) for choice in choices)
        rows = [list(choice.logprobs) + [choice.mean] * (width - len(choice.tokens)) for choice in choices]
        # Sums depend on the batch in their last bits: choices that begin alike share one value.
        shared: dict[tuple[int | str, ...], float] = {}
        for choice, row in zip(choices, rows):
            for at in range(len(choice.tokens)):
                row[at] = shared.setdefault(tuple(choice.tokens[: at + 1]), row[at])
        left = list(range(len(choices)))
        for at in range(width):
            best = max(rows[i][at] for i in left)
            left = [i for i in left if rows[i][at] == best]
        return left[0], {"greedy_logprob_matrix": rows}


class UnconditionalLikelihoodNormalized(ChoicesMethod):
    """The highest mean of what the prompt adds to the logprob of a token, so that common words are not at
    an advantage."""

    alone = True

    def pick(self, choices: Sequence[Scored]) -> tuple[int, dict[str, Any]]:
        gains = []
        for choice in choices:
            assert choice.alone is not None
            added = [here - (there or 0.0) for here, there in zip(choice.logprobs, choice.alone)]
            gains.append(sum(added) / len(added))
        found = {
            "unconditional_token_logprobs": [choice.alone for choice in choices],
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return highest(gains), found


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def highest(values: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(values)), key=values.__getitem__)


def meta(choices: Sequence[Scored], told: dict[str, Any]) -> dict[str, Any]:
    """What ``get_meta_info`` tells of a select, in SGLang's names."""
    return {
        "normalized_prompt_logprobs": [choice.mean for choice in choices],
        "input_token_logprobs": [
            [[logprob, token, None] for logprob, token in zip(choice.logprobs, choice.tokens)]
            for choice in choices
        ],
    } | told
