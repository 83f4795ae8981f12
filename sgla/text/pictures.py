"""What stands for pictures or sounds in a prompt: as many tokens as the model's tower gives for each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from sgla.errors import InvalidField, UnsupportedField
from sgla.messages import Job, Placed, Prepared
from sgla.model.vision.spec import Settings, Spelled, Vision

Encode = Callable[[str], list[int]]  # without special tokens around


class Speller:
    """Of one model: ``config`` and ``settings`` are those of its files."""

    def __init__(self, vision: Vision, config: Mapping[str, Any], settings: Settings) -> None:
        self.vision, self._config, self._settings = vision, config, settings
        self._token = vision.token_of(config)

    def prompt(
        self, job: Job, render: Callable[[Job], str], encode: Callable[[str, bool, str], list[int]]
    ) -> tuple[list[int], list[Placed]]:
        """The token ids of a job with pictures, and where these are. ``encode``: a text, whether special
        tokens are added, and the field that errors name. Raises InvalidField, UnsupportedField."""
        sampling = job.sampling
        for param, given in (
            ("prompt_logprobs", sampling.prompt_logprobs is not None),
            ("return_hidden_states", sampling.hidden_states),
            ("suffix", job.suffix is not None),
        ):
            if given:
                message = f"{param} is not supported with {self.vision.things}; leave one of the two out"
                raise UnsupportedField(message, param=param)
        if job.token_ids is not None:
            return self.in_tokens(job.token_ids, job.prepared, lambda text: encode(text, False, "prompt"))
        if job.messages is not None:
            return self.in_text(render(job), job.prepared, lambda text: encode(text, False, "messages"))
        framed, special = self.vision.framed, job.add_special_tokens
        if framed is None:
            return self.in_text(job.text or "", job.prepared, lambda text: encode(text, special, "prompt"))
        return self.in_text(framed(job.text or ""), job.prepared, lambda text: encode(text, False, "prompt"))

    def in_text(
        self, text: str, pictures: Sequence[Prepared], encode: Encode
    ) -> tuple[list[int], list[Placed]]:
        """The tokens of a text in which each picture has its placeholder. Raises InvalidField."""
        pieces = text.split(self.vision.written)
        spelled = self._spelled(len(pieces) - 1, pictures)
        whole = pieces[0] + "".join(f"{entry.text}{piece}" for entry, piece in zip(spelled, pieces[1:]))
        return self._repeated(encode(whole), pictures, spelled)

    def in_tokens(
        self, tokens: list[int], pictures: Sequence[Prepared], encode: Encode
    ) -> tuple[list[int], list[Placed]]:
        """As ``in_text`` for tokens."""
        written = encode(self.vision.written)
        places = [i for i, token in enumerate(tokens) if [token] == written]
        spelled = self._spelled(len(places), pictures)
        made: list[int] = []
        for entry, first, end in zip(spelled, [-1, *places], [*places, len(tokens)]):
            made += tokens[first + 1 : end] + encode(entry.text)
        return self._repeated(made + tokens[places[-1] + 1 :], pictures, spelled)

    def _spelled(self, places: int, pictures: Sequence[Prepared]) -> list[Spelled]:
        things = self.vision.things
        if places != len(pictures):
            raise InvalidField(
                f"the prompt has {places} places for {things} ({self.vision.written}), and the request "
                f"{len(pictures)} {things}; give each its place, and write that text nowhere else",
                param="messages",
            )
        return [self.vision.spelled(self._config, self._settings, picture) for picture in pictures]

    def _repeated(
        self, tokens: list[int], pictures: Sequence[Prepared], spelled: list[Spelled]
    ) -> tuple[list[int], list[Placed]]:
        """With the token for parts of pictures as often as each entry says."""
        if tokens.count(self._token) != sum(len(entry.counts) for entry in spelled):
            raise InvalidField(
                "the prompt's text has tokens of its own that stand for parts of "
                f"{self.vision.things}; leave them out",
                param="messages",
            )
        made: list[int] = []
        placed: list[Placed] = []
        rest = iter(tokens)
        for entry, picture in zip(spelled, pictures):
            first = -1
            for count in entry.counts:
                made += _until(rest, self._token)
                first = len(made) if first < 0 else first
                made += [self._token] * count
            placed.append(Placed(first, len(made), picture, self.vision.together))
        made += rest
        if self.vision.prefix:
            placed.insert(0, _prefix(made, pictures))
        return made, placed


def _prefix(tokens: list[int], pictures: Sequence[Prepared]) -> Placed:
    """All tokens of a prompt, which see each other, and are cached for prompts alone that begin with all."""
    digest = sha256(array("q", tokens).tobytes() + b"".join(picture.digest for picture in pictures))
    return Placed(0, len(tokens), Prepared(digest.digest(), "", []), True)


def _until(tokens: Iterator[int], token: int) -> list[int]:
    """Those before the next ``token``, which is taken, too."""
    return list(iter(lambda: next(tokens), token))
