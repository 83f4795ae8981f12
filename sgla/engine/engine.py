"""``Engine``: synchronous, asynchronous, batched and streaming generation in this process."""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sgla import messages
from sgla.engine.beams import BeamCalls
from sgla.engine.inputs import Messages, Prompt, check_tools, conversation_fields, is_conversation, is_one
from sgla.engine.loop import Message
from sgla.engine.outputs import Output
from sgla.engine.params import SamplingParams, priorities
from sgla.engine.pictures import Shown, chat_given, each, prompt_given
from sgla.engine.progress import Bar
from sgla.engine.vectors import VectorCalls
from sgla.engine.weights import WeightCalls
from sgla.errors import InvalidField, SglaError
from sgla.messages import MOST_PROFILED, Event, Job, Rejected

T = TypeVar("T")


class Chat(NamedTuple):
    """Fields of the jobs of a chat."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    sizes: dict[str, Any] | None

    @property
    def fields(self) -> dict[str, Any]:
        """Of a job, without what its pictures need."""
        return {name: value for name, value in self._asdict().items() if name != "sizes"}


class Engine(VectorCalls, BeamCalls, WeightCalls):
    """A loaded model. ``Engine(model="demo", dtype="float32")``: keywords are the fields of ``Config``.

    Methods are thread-safe; ``a*`` variants are awaited on the caller's own loop. Errors are
    ``sgla.errors.SglaError``. Use it as a context manager or call ``shutdown``.
    """

    # synchronous

    def generate(
        self,
        prompts: Any,
        sampling: Any = None,
        *,
        priority: Any = 0,
        progress: bool | None = None,
        lora_path: Any = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> Any:
        """Complete one prompt (text or token ids) or a batch of them.

        What ``sampling`` does not set is the model's own default (see ``sampling``), and 16 tokens. One
        prompt gives an ``Output`` (a list of them if ``n > 1``); a batch gives a list of that, and may have a
        list of ``sampling``, of ``priority`` and of ``lora_path``, names of adapters (None: the base).
        ``progress``: whether a batch shows a bar; by default on a terminal and in a notebook.
        ``image_data``: pictures of the prompt, one or a list, in the order of the model's own token for each
        in the text; of a batch a list with those of each. A picture is PIL's image, a path, what is in a
        file, base64, or a URL; ``video_data`` and ``audio_data`` likewise. ``mm_processor_kwargs``: how large
        pictures and videos become, of a batch one or a list.
        """
        shown = Shown(image_data, video_data, audio_data, mm_processor_kwargs)
        return self._call(self._generate(prompts, sampling, priority, progress, lora_path, shown))

    def chat(
        self,
        messages: Any,
        sampling: Any = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        lora_path: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Answer a conversation, or a batch of them, through the model's chat template;
        results are as of ``generate``.

        What ``sampling`` does not set is the model's own default; an output may go on to the context's end.
        Contents may be lists of parts, of which some are pictures: of the types ``image_url``,
        ``input_image`` and ``image``, whose values may be what ``generate`` takes, and vLLM's ``image_pil``;
        or videos (``video_url``, ``input_video``, ``video``) and sounds (``audio_url``, ``input_audio``,
        ``audio``).
        """
        chat = Chat(
            tools, add_generation_prompt, continue_final_message, template_kwargs, mm_processor_kwargs
        )
        return self._call(self._chat(messages, sampling, chat, progress, lora_path))

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        lora_path: str | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
    ) -> Iterator[Event]:
        """Yield events as they come. Leaving the loop early cancels the request."""
        given = self._call(self._input(prompt, messages, Shown(image_data, video_data, audio_data)))
        job = self._job(sampling, **given, **self._adapter(lora_path), stream=True)
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._begin(job, inbox.put)
        try:
            yield from until_finished(job, inbox.get)
        finally:
            self._cancel(job.rid)

    # asynchronous

    async def agenerate(
        self,
        prompts: Any,
        sampling: Any = None,
        *,
        priority: Any = 0,
        progress: bool | None = None,
        lora_path: Any = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> Any:
        """``generate`` for asyncio code."""
        shown = Shown(image_data, video_data, audio_data, mm_processor_kwargs)
        return await self._acall(self._generate(prompts, sampling, priority, progress, lora_path, shown))

    async def achat(
        self,
        messages: Any,
        sampling: Any = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        lora_path: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """``chat`` for asyncio code."""
        chat = Chat(
            tools, add_generation_prompt, continue_final_message, template_kwargs, mm_processor_kwargs
        )
        return await self._acall(self._chat(messages, sampling, chat, progress, lora_path))

    async def astream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        lora_path: str | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
    ) -> AsyncIterator[Event]:
        """``stream`` for asyncio code."""
        given = await self._acall(self._input(prompt, messages, Shown(image_data, video_data, audio_data)))
        job = self._job(sampling, **given, **self._adapter(lora_path), stream=True)
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def push(message: Message) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, message)
            except RuntimeError:  # the loop is closed
                self._cancel(job.rid)

        self._begin(job, push)
        left = job.sampling.n
        try:
            while left:
                event = checked(await inbox.get())
                left -= event.finish is not None
                yield event
        finally:
            self._cancel(job.rid)

    # the rest

    def sampling(self, **fields: Any) -> SamplingParams:
        """The sampling that the model's files recommend, with ``fields`` in its place: to look at and to
        change. ``SamplingParams`` mean the same where they set nothing else."""
        return SamplingParams(**{**self._defaults.values, **fields})

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text that a conversation becomes by the model's chat template. Raises BadRequest kinds."""
        template = self._ready().ingress.template
        if template is None:
            raise InvalidField("the model has no chat template; give a text", param="messages")
        messages = conversation_fields(messages)["messages"]
        text: str = template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return text

    @property
    def chat_params(self) -> dict[str, Any]:
        """What ``sgla chat`` and the page ask for besides, so that every answer ends (see ``sampling``)."""
        facts = self._ready().ingress.facts
        return self._defaults.talk(facts.context_len) if facts is not None else {}

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are running."""
        return self._call(self._ready().ingress.flush_cache())

    def stats(self) -> Any:
        """A snapshot of the scheduler's counters (``sgla.sched``)."""

        async def snapshot() -> Any:
            return self._ready().ingress.stats()

        return self._call(snapshot())

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter in PEFT's format (``enable_lora``). Raises InvalidAdapter and its kin."""
        adapters = self._ready().ingress.adapters
        self._call(adapters.load(lora_name, lora_path, pinned, trusted=True))

    @property
    def adapters(self) -> list[str]:
        """Names of those that are loaded."""
        return list(self._ready().ingress.adapters.loaded)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forget an adapter, when the requests that have it are done."""
        self._call(self._ready().ingress.adapters.unload(lora_name))

    def start_profile(self, folder: str | None = None, steps: int = MOST_PROFILED) -> None:
        """Record what the workers do, until ``stop_profile`` or for so many steps.
        The trace goes to ``folder``, or that of the settings."""
        args = {"folder": str(Path(folder or self.config.profile_folder).resolve()), "steps": steps}
        self._call(self._ready().ingress.control(messages.Control(verb="profile_start", args=args)))

    def stop_profile(self) -> list[str]:
        """Write the recording: a file for each rank, which Perfetto shows."""
        stopped = self._call(self._ready().ingress.control(messages.Control(verb="profile_stop")))
        return [rank["file"] for rank in stopped["ranks"]]

    # inside

    async def _generate(
        self,
        prompts: Any,
        sampling: Any,
        priority: Any,
        progress: bool | None,
        lora_path: Any,
        shown: Shown,
    ) -> Any:
        single = is_one(prompts)
        batch = [prompts] if single else list(prompts)
        ranks, names = priorities(priority, len(batch)), each(lora_path, len(batch), "adapters")
        own = [shown] if single else shown.each(len(batch))
        given = await self._inputs(list(map(prompt_given, batch, own)))
        inputs = [
            fields | {"priority": rank} | self._adapter(name)
            for fields, rank, name in zip(given, ranks, names)
        ]
        results = await self._batch(inputs, sampling, progress)
        return results[0] if single else results

    async def _chat(
        self, messages: Any, sampling: Any, chat: Chat, progress: bool | None, lora_path: Any
    ) -> Any:
        check_tools(chat.tools)
        single = is_conversation(messages)
        batch = [messages] if single else list(messages)
        names = each(lora_path, len(batch), "adapters")
        given = await self._inputs([chat_given(one, Shown(sizes=chat.sizes)) for one in batch])
        inputs = [chat.fields | fields | self._adapter(name) for fields, name in zip(given, names)]
        results = await self._batch(inputs, sampling, progress)
        return results[0] if single else results

    async def _batch(self, inputs: list[dict[str, Any]], sampling: Any, progress: bool | None) -> list[Any]:
        """The results of requests of one kind, told by fields of their jobs."""
        params = each(sampling, len(inputs), "sampling parameters")
        known = {id(one): one for one in params}  # most batches share one
        meant = {key: self._meant(one, inputs[0]) for key, one in known.items()}
        asked = [meant[id(one)] for one in params]
        # The longest outputs first, or one of them may go on alone when the others have ended (R. Graham,
        # "Bounds on multiprocessing timing anomalies", 1969: longest processing time first).
        limits = [one.sampling.max_tokens for one in asked]
        most = [math.inf if limit is None else limit for limit in limits]
        order = sorted(range(len(inputs)), key=lambda i: most[i], reverse=True)
        bar = Bar(len(inputs), "request", progress)
        try:
            outputs = await self._collect((self._job_of(asked[i], inputs[i]) for i in order), bar)
        finally:
            bar.close()
        return [unwrap(choices) for _, choices in sorted(zip(order, outputs))]


def checked(message: Message) -> Event:
    """The event, or the exception that the message is or stands for."""
    if isinstance(message, Exception):
        raise message
    if isinstance(message, Rejected):
        raise SglaError.from_rejected(message)
    return message


def until_finished(job: Job, get: Callable[[], Message]) -> Iterator[Event]:
    """Events of ``job`` until each of its choices has finished."""
    left = job.sampling.n
    while left:
        event = checked(get())
        left -= event.finish is not None
        yield event


def unwrap(choices: list[Output]) -> Any:
    return choices[0] if len(choices) == 1 else choices
