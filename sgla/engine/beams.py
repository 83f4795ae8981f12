"""The calls of ``Engine`` for beam search."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from sgla import messages
from sgla.defaults import TOKENS
from sgla.engine.inputs import Prompt, is_one, prompt_fields
from sgla.engine.loop import EngineLoop
from sgla.engine.outputs import Output
from sgla.engine.params import COUNTS, check_count
from sgla.engine.progress import Bar
from sgla.errors import ContextTooLong, InvalidField
from sgla.messages import Usage
from sgla.text.beams import MAX_WIDTH, BeamSearch, Finished, Stopping, one_token
from sgla.text.output import OutputStream
from sgla.validation import Range


class BeamCalls(EngineLoop):
    """What ``Engine`` inherits."""

    def beam_search(
        self,
        prompts: Any,
        width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: Stopping = False,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        concurrency: int = 64,
        progress: bool | None = None,
    ) -> Any:
        """The ``width`` best beams of a prompt, the best first, or such a list for each of many prompts, of
        which ``concurrency`` are searched at a time; see ``sgla.text.beams.BeamSearch``."""

        def search(prompt: Prompt) -> Coroutine[Any, Any, list[Output]]:
            return self._beam_search(
                prompt, width, max_tokens, length_penalty, early_stopping, ignore_eos, logprobs
            )

        return self._call(self._beam_searches(search, prompts, concurrency, progress))

    # inside

    async def _beam_searches(
        self,
        search: Callable[[Prompt], Coroutine[Any, Any, list[Output]]],
        prompts: Any,
        concurrency: int,
        progress: bool | None,
    ) -> Any:
        if is_one(prompts):
            return await search(prompts)
        check_count("concurrency", concurrency, TOKENS)
        places = asyncio.Semaphore(concurrency)
        bar = Bar(len(prompts), "request", progress)

        async def searched(prompt: Prompt) -> list[Output]:
            async with places:
                found = await search(prompt)
            bar.add(found)
            return found

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(searched(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            bar.close()
        return [task.result() for task in tasks]

    async def _beam_search(
        self,
        prompt: Prompt,
        width: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: Stopping,
        ignore_eos: bool,
        logprobs: int | None,
    ) -> list[Output]:
        check_count("width", width, Range(1, MAX_WIDTH))
        check_count("max_tokens", max_tokens, TOKENS)
        if logprobs is not None:
            check_count("logprobs", logprobs, COUNTS["logprobs"])
        if type(length_penalty) not in (int, float) or not math.isfinite(length_penalty):
            raise InvalidField("length_penalty must be a number", param="length_penalty")
        tokenizer, facts = self.tokenizer, self._ready().ingress.facts
        assert facts is not None
        ends = frozenset() if ignore_eos else tokenizer.eos_ids
        search = BeamSearch(width, ends, max_tokens, length_penalty, early_stopping, logprobs)
        step = one_token(width, len(ends))
        ((first,),) = await self._collect([self._job(step, **prompt_fields(prompt))])
        tokens = first.prompt_tokens
        if len(tokens) + max_tokens > facts.context_len:
            raise ContextTooLong.of(facts.context_len, len(tokens), max_tokens)
        search.take([(first.logprobs or [])[0]])
        while not search.done:
            jobs = [self._job(step, token_ids=tokens + beam.tokens) for beam in search.running]
            search.take([(output.logprobs or [])[0] for (output,) in await self._collect(jobs)])
        return [self._beam(one, index, first) for index, one in enumerate(search.finished)]

    def _beam(self, one: Finished, index: int, first: Output) -> Output:
        text = OutputStream(self.tokenizer, messages.SamplingParams(), first.prompt_tokens)
        beam, finish = one.beam, "length" if one.matched is None else "stop"
        piece = text.feed(beam.tokens, beam.entries or None, finish, one.matched)
        usage = Usage(len(first.prompt_tokens), len(beam.tokens), first.usage.cached_tokens)
        return Output(
            index=index,
            text=piece.text,
            tokens=piece.tokens,
            prompt_tokens=first.prompt_tokens,
            logprobs=piece.logprobs,
            finish=finish,
            matched=one.matched,
            usage=usage,
        )
