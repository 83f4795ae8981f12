"""Transcriptions by models for chats, which hear a whole sound and are told to write it down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from sgla import clock
from sgla.http.openai.hearing import Listener, whole
from sgla.http.request.schema import RequestFields
from sgla.http.request.work import make_work
from sgla.http.server import Server
from sgla.media.sound import Sound
from sgla.messages import SamplingParams


class Dictated:
    """Of one sound. ``prompt``: see ``Dictation``. What was written so far: ``text``; ``prompt_tokens`` are
    those of the prompt's text, and ``heard`` those that stand for the sound."""

    def __init__(self, request: web.Request, server: Server, fields: Any, sound: Sound, prompt: str) -> None:
        facts = server.ingress.facts
        assert facts is not None
        assert facts.dictation is not None
        self.text = ""
        self.prompt_tokens = self.completion_tokens = self.heard = 0
        # Where the prompt ends with the mark, the model does not write it.
        self._mark = (
            "" if facts.dictation.mark and prompt.endswith(facts.dictation.mark) else facts.dictation.mark
        )
        self._request, self._server, self._sound, self._prompt = request, server, sound, prompt
        self._fields: RequestFields = fields
        self._sampling = SamplingParams(
            temperature=fields.temperature or 0.0,
            seed=fields.seed,
            max_tokens=None,
            skip_special_tokens=False,
        )

    async def write(self) -> AsyncIterator[str]:
        """Text, as it comes. Raises what refuses or ends the request."""
        given: dict[str, Any] = {"text": self._prompt, "pictures": [self._sound]}
        work = await make_work(
            self._request, self._fields, [given], self._sampling, clip=True, add_special_tokens=False
        )
        for job in work.jobs:
            job.deadline = None if self._fields.timeout is None else clock.now() + self._fields.timeout
        sink, told = Listener(work), ""
        self._server.open(work, sink)
        try:
            while not sink.done.done():
                await sink.wake.wait()
                sink.wake.clear()
                text = self._written(sink.choices[0].text)
                if len(text) > len(told):
                    yield text[len(told) :]
                    told = text
        finally:
            self._server.close(work)
        choice = whole(sink)
        self.text = self._written(choice.text, over=True).strip()
        plain = self._server.ingress.tokenizer.encode(self._prompt, add_special_tokens=False)
        self.prompt_tokens = min(len(plain), choice.usage.prompt_tokens)
        self.heard = choice.usage.prompt_tokens - self.prompt_tokens
        self.completion_tokens = choice.usage.completion_tokens
        if rest := self._written(choice.text, over=True)[len(told) :]:
            yield rest

    def _written(self, text: str, over: bool = False) -> str:
        """What is behind the mark; what never has one is text as it is."""
        if not self._mark:
            return text
        _, found, behind = text.partition(self._mark)
        return behind if found else text if over else ""
