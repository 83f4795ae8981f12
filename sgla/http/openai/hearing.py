"""What a request for a transcription has the engine do: a job for each window of its sound, one behind the
other, for where the next one begins follows from what was written of the one before."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from sgla import clock
from sgla.errors import InvalidField, SglaError
from sgla.http.answer.collect import Choice, Collector
from sgla.http.request.schema import RequestFields
from sgla.http.request.work import make_work
from sgla.http.server import Server, Work, raise_aborted
from sgla.media.sound import RATE, Sound
from sgla.messages import Event, SamplingParams, Speech, Window
from sgla.text.transcript import Segment, Windows, pairs
from sgla.text.words_said import Word, words_of


class Asked(msgspec.Struct, kw_only=True):
    """``task``: transcribe or translate; ``language``: its code, None: it is to be found out; ``before``: ids
    of what was said before; ``timed``: with timestamps; ``rated``: with how sure the model is;
    ``worded``: with times of words."""

    task: str
    language: str | None
    before: list[int]
    timed: bool
    rated: bool
    worded: bool
    temperature: float
    seed: int | None


class Rated(msgspec.Struct, frozen=True):
    """A segment, and of its window the mean logprob of a token and the probability that nobody speaks."""

    segment: Segment
    logprob: float
    silence: float


class Listener(Collector):
    """Wakes its reader whenever something has come."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.choices, work.share)
        self.wake = asyncio.Event()
        self.done.add_done_callback(lambda _: self.wake.set())

    def _hold(self, event: Event) -> None:
        super()._hold(event)
        self.wake.set()


class Transcription:
    """Of one sound. What was written so far: ``segments`` and ``text``; ``language``: its code;
    ``prompt_tokens`` and ``completion_tokens`` of all windows, which have ``frames`` together."""

    def __init__(
        self, request: web.Request, server: Server, fields: RequestFields, sound: Sound, asked: Asked
    ) -> None:
        facts = server.ingress.facts
        assert facts is not None
        assert facts.speech is not None
        self.speech = speech = facts.speech
        self.language, self.segments, self.said = asked.language, list[Rated](), list[Word]()
        self.prompt_tokens = self.completion_tokens = self.frames = 0
        self._request, self._server, self._fields = request, server, fields
        self._sound, self._asked = sound, asked
        self._windows = Windows(speech, len(sound.samples) // 4)
        self._deadline = None if fields.timeout is None else clock.now() + fields.timeout
        self._kept: list[Work] = []  # the latest two, since the sound's file is there as long as they are
        transcript = msgspec.structs.replace(speech.transcript, timed=asked.timed or self._windows.long)
        self._sampling = SamplingParams(
            temperature=asked.temperature,
            seed=asked.seed,
            max_tokens=None,
            logprobs=0 if asked.rated else None,
            transcript=transcript,
        )

    @property
    def text(self) -> str:
        return self.words([token for rated in self.segments for token in rated.segment.tokens]).strip()

    @property
    def heard(self) -> int:
        """Tokens that its windows count for."""
        return self.frames // 2

    def words(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps."""
        first = self.speech.transcript.first_time
        return str(self._server.ingress.tokenizer.decode([token for token in tokens if token < first]))

    async def write(self) -> AsyncIterator[str]:
        """All windows; text that will not change any more. Raises what refuses or ends the request."""
        while (window := self._windows.next()) is not None:
            silence = await self._look(window)
            prompt = [*self._asked.before, *self._prompt()]
            work = await self._work(window, prompt, self._sampling)
            told, sink = "", Listener(work)
            self._server.open(work, sink)
            try:
                while not sink.done.done():
                    await sink.wake.wait()
                    sink.wake.clear()
                    text = self.words(self._certain(sink.choices[0].tokens))
                    if text.startswith(told) and not text.endswith("\ufffd") and text != told:
                        yield text[len(told) :]
                        told = text
            finally:
                self._server.close(work)
            tokens = sink.choices[0].tokens
            segments = self._take(sink, silence)
            if self._asked.worded:
                await self._align(window, prompt, tokens, segments)
            text = self.words([token for segment in segments for token in segment.tokens])
            if text.startswith(told) and text != told:
                yield text[len(told) :]

    def _prompt(self) -> list[int]:
        speech, found = self.speech, [self.speech.begin]
        if self.language is not None and speech.languages:
            found.append(speech.languages[self.language])
        if speech.tasks:
            found.append(speech.tasks[self._asked.task])
        transcript = self._sampling.transcript
        assert transcript is not None
        return found if transcript.timed else [*found, transcript.untimed]

    def _certain(self, tokens: Sequence[int]) -> Sequence[int]:
        """Those of a window that is not over yet which will be kept: up to the last two timestamps."""
        ends = pairs(tokens, self.speech.transcript.first_time)
        return tokens[: ends[-1]] if ends else tokens

    def _take(self, sink: Listener, silence: float) -> list[Segment]:
        choice = whole(sink)
        self._count(choice)
        tokens = choice.tokens
        if tokens and tokens[-1] == self.speech.transcript.end:
            tokens = tokens[:-1]
        values = [entry.logprob for entry in choice.logprobs or []]
        logprob = sum(values) / len(values) if values else 0.0
        window = self._windows.next()
        assert window is not None
        self.frames += window.end - window.first
        segments = self._windows.took(tokens)
        self.segments += [Rated(segment, logprob, silence) for segment in segments]
        return segments

    async def _look(self, window: Window) -> float:
        """Find the language out, if nobody says it, as transformers does; returns how probable it is that
        nobody speaks, where somebody wants to know."""
        speech = self.speech
        detects = self.language is None and bool(speech.languages)
        if not detects and not self._asked.rated:
            return 0.0
        silent = speech.transcript.untimed - 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            allowed_token_ids=sorted(speech.languages.values()) if detects else None,
            logprobs=0,
            logprob_token_ids=[silent],
        )
        work = await self._work(window, [speech.begin], sampling)
        sink = Listener(work)
        self._server.open(work, sink)
        try:
            await sink.done
        finally:
            self._server.close(work)
        choice = whole(sink)
        self._count(choice)
        if detects:
            codes = {token: code for code, token in speech.languages.items()}
            self.language = codes[choice.tokens[0]]
        (entry,) = choice.logprobs or []
        return float(min(1.0, math.exp(dict(entry.asked)[silent])))

    async def _align(
        self, window: Window, prompt: list[int], tokens: Sequence[int], segments: Sequence[Segment]
    ) -> None:
        """Find out when the words of a window were said: the model reads its text again."""
        count = sum(len(segment.tokens) for segment in segments)
        text = list(tokens[:-1]) if tokens and tokens[-1] == self.speech.transcript.end else list(tokens)
        if not count or not text:
            return
        frames = min(window.end, len(self._sound.samples) // 4 // self.speech.hop) - window.first
        asked = [len(prompt), max(frames, 2)]
        work = await self._work(window, [*prompt, *text], SamplingParams(), pool=asked)
        sink = Listener(work)
        self._server.open(work, sink)
        try:
            await sink.done
        finally:
            self._server.close(work)
        vector = whole(sink).vector
        assert vector is not None
        second = 2 * self.speech.hop / RATE
        begins = [window.first // 2 * second + place * second for place in memoryview(vector).cast("f")]
        decode = self._server.ingress.tokenizer.decode
        self.said += words_of(text[:count], begins, self.speech.transcript, decode, self.language)

    async def _work(self, window: Window, prompt: list[int], sampling: SamplingParams, **more: Any) -> Work:
        """The one before is kept until its own sound is prepared, which is the same."""
        given: dict[str, Any] = {"token_ids": prompt, "pictures": [self._sound], "window": window}
        work = await make_work(self._request, self._fields, [given], sampling, clip=True, **more)
        for job in work.jobs:
            if more:  # all tokens are looked at, so none may be read from the cache
                job.namespace = f"{job.namespace}\0{job.rid}"
            job.deadline = self._deadline
        self._kept = [*self._kept[-1:], work]
        return work

    def _count(self, choice: Choice) -> None:
        self.prompt_tokens += choice.usage.prompt_tokens
        self.completion_tokens += choice.usage.completion_tokens


def whole(sink: Listener) -> Choice:
    """Raises what refuses or ends the request."""
    if (rejected := sink.done.result()) is not None:
        raise SglaError.from_rejected(rejected)
    raise_aborted(sink.choices)
    return sink.choices[0]


def compression(text: str) -> float:
    """How often the text repeats itself: by how much it is longer than zlib makes it."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def check_prompt(tokens: list[int], speech: Speech, context: int) -> list[int]:
    """What stands before a text: the last of ``tokens``, which are of what was said before. Raises
    InvalidField."""
    if not tokens:
        return []
    if speech.previous is None or any(token >= speech.transcript.end for token in tokens):
        raise InvalidField(
            "prompt: this model takes none" if speech.previous is None else "prompt: it has special tokens",
            param="prompt",
        )
    return [speech.previous, *tokens[-(context // 2 - 1) :]]
