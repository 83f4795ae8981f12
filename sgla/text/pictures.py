"""What stands for pictures, sounds or videos in a prompt: as many tokens as the model's tower gives for
each."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from hashlib import sha256
from typing import Any

from sgla.errors import BadRequest, InvalidField, SglaError, UnsupportedField
from sgla.messages import Job, Placed, Prepared
from sgla.model.vision.spec import Film, Settings, Spelled, Vision

STANDS_FOR = (0,)  # tokens of a picture that is a prompt by itself
Encode = Callable[[str], list[int]]  # without special tokens around


class Speller:
    """Of one model: ``config`` and ``settings`` are those of its files."""

    def __init__(self, vision: Vision, config: Mapping[str, Any], settings: Settings) -> None:
        self.vision, self._config, self._settings = vision, config, settings
        self._takers: dict[str, Vision | Film] = vision.takers
        self._tokens = {taker.token_of(config) for taker in self._takers.values()}

    def prompt(
        self, job: Job, render: Callable[[Job], str], encode: Callable[[str, bool, str], list[int]]
    ) -> tuple[list[int], list[Placed]]:
        """The token ids of a job with pictures, and where these are. ``encode``: a text, whether special
        tokens are added, and the field that errors name. Raises InvalidField, UnsupportedField."""
        try:
            return self._prompt(job, render, encode)
        except BadRequest as error:
            raise of_prompt(error, job) from None

    def _prompt(
        self, job: Job, render: Callable[[Job], str], encode: Callable[[str, bool, str], list[int]]
    ) -> tuple[list[int], list[Placed]]:
        if self.vision.crossed:
            return list(job.token_ids or ()), [Placed(0, 1, heard) for heard in job.prepared]
        if self.vision.apart:
            if job.text or job.token_ids or len(job.prepared) > 1:
                raise InvalidField(
                    "this model makes a vector of a text or of a picture; send each as an input of its own",
                    param="input",
                )
            return list(STANDS_FOR), [Placed(0, 1, shown) for shown in job.prepared]
        sampling = job.sampling
        for param, given in (
            ("prompt_logprobs", sampling.prompt_logprobs is not None),
            ("return_hidden_states", sampling.hidden_states),
            ("return_routed_experts", sampling.routed_experts),
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
        kinds = {taker.written: kind for kind, taker in self._takers.items()}
        pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
        pictures = self._in_place([kinds[written] for written in pieces[1::2]], pictures)
        spelled = self._spelled(pictures)
        pieces[1::2] = [entry.text for entry in spelled]
        whole = "".join(pieces)
        joined = self.vision.joined
        return self._repeated(encode(whole if joined is None else joined(whole)), pictures, spelled)

    def in_tokens(
        self, tokens: list[int], pictures: Sequence[Prepared], encode: Encode
    ) -> tuple[list[int], list[Placed]]:
        """As ``in_text`` for tokens."""
        written = {kind: encode(taker.written) for kind, taker in self._takers.items()}
        firsts = {ids[0] for ids in written.values() if ids}
        places = [
            (i, kind)
            for i in [i for i, token in enumerate(tokens) if token in firsts]
            for kind, ids in written.items()
            if ids and tokens[i : i + len(ids)] == ids
        ]
        pictures = self._in_place([kind for _, kind in places], pictures)
        spelled = self._spelled(pictures)
        made: list[int] = []
        at = 0
        for entry, (first, kind) in zip(spelled, places):
            made += tokens[at:first] + encode(entry.text)
            at = first + len(written[kind])
        return self._repeated(made + tokens[at:], pictures, spelled)

    def _in_place(self, kinds: list[str], pictures: Sequence[Prepared]) -> list[Prepared]:
        """Those for places of such ``kinds``. Raises InvalidField if there are more or fewer."""
        for kind, taker in self._takers.items():
            things, places = taker.things, kinds.count(kind)
            if places != (found := sum(picture.kind == kind for picture in pictures)):
                raise InvalidField(
                    f"the prompt has {places} places for {things} ({taker.written}), and the request "
                    f"{found} {things}; give each its place, and write that text nowhere else",
                    param="messages",
                )
        left = {kind: iter([each for each in pictures if each.kind == kind]) for kind in self._takers}
        return [next(left[kind]) for kind in kinds]

    def _spelled(self, pictures: Sequence[Prepared]) -> list[Spelled]:
        return [
            self._takers[picture.kind].spelled(self._config, self._settings, picture) for picture in pictures
        ]

    def _repeated(
        self, tokens: list[int], pictures: Sequence[Prepared], spelled: list[Spelled]
    ) -> tuple[list[int], list[Placed]]:
        """With the token for parts of pictures as often as each entry says."""
        if sum(map(tokens.count, self._tokens)) != sum(len(entry.counts) for entry in spelled):
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
                *before, token = _until(rest, self._tokens)
                made += before
                first = len(made) if first < 0 else first
                made += [token] * count
            whole = self.vision.together and picture.kind != "audio"
            placed.append(Placed(first, len(made), picture, whole))
        made += rest
        if self.vision.prefix:
            placed.insert(0, _prefix(made, pictures))
        return made, placed


def positions(job: Job, tokens: Sequence[int], placed: Sequence[Placed], limit: int) -> int:
    """How many a prompt takes at most, of ``limit``. Those of a video may go by seconds, and be more than its
    tokens. Raises InvalidField."""
    taken, why = len(tokens), ""
    for shown in placed:
        steps = next((found for found in shown.picture.arrays if found.name == "steps"), None)
        if steps is not None and not steps.values:
            why = f"a video has {steps.shape[0]} steps in time, of which positions are not known"
        elif steps is not None:
            taken += max(0, steps.values[-1] + 1 - (shown.end - shown.first))
    if limit <= taken > len(tokens):
        why = f"positions of a video go by its seconds, and the prompt takes {taken} of {limit} with them"
    if why:
        hint = "mm_processor_kwargs: fps, num_frames"
        error = InvalidField(f"{why}; ask for other frames ({hint}) or a shorter video", param="messages")
        raise of_prompt(error, job)
    return taken


def of_prompt(error: SglaError, job: Job) -> SglaError:
    """What is said of messages is of the prompt, where a job has none."""
    if error.param == "messages" and job.messages is None:
        error.param = "prompt"
    return error


def _prefix(tokens: list[int], pictures: Sequence[Prepared]) -> Placed:
    """All tokens of a prompt, which see each other, and are cached for prompts alone that begin with all."""
    digest = sha256(array("q", tokens).tobytes() + b"".join(picture.digest for picture in pictures))
    return Placed(0, len(tokens), Prepared(digest.digest(), "", []), True)


def _until(tokens: Iterator[int], ends: Set[int]) -> Iterator[int]:
    """Those up to the next one of ``ends``, and this."""
    for token in tokens:
        yield token
        if token in ends:
            return
