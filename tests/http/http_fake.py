"""A stand-in for the engine: deterministic tokens, controllable pace, a record of what was asked of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from sgla.actors.adapters import AdapterTable
from sgla.actors.lanes import Lanes
from sgla.actors.resting import Clear
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.errors import ContextTooLong, Loading, UnsupportedField
from sgla.media import worker
from sgla.messages import (
    CacheGroup,
    Control,
    Event,
    Facts,
    Job,
    Rejected,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from sgla.model.sizes import Outline
from sgla.sched.stats import Stats

WORDS = [
    " alpha",
    " beta",
    " gamma",
    " delta",
    " \u00e9t\u00e9",
    " \u4e2d\u6587",
    " \U0001f600",
    ' "quoted"',
    " back\\slash",
    "\n",
]
BOS, EOS = 510, 511


class Ids(list[int]):
    @property
    def ids(self) -> list[int]:
        return self


class FakeTokenizer:
    """Bytes are ids 0-255; ids 256-509 are whole words, which only the model writes."""

    vocab_size = 512
    special_tokens = {"eos_token": "<eos>", "bos_token": "<bos>"}
    chat_template = "{{ messages }}"
    adds_bos = True
    special_ids = frozenset({BOS, EOS})
    eos_ids = frozenset({EOS})
    longest_token = 8
    decoding = SimpleNamespace(kind="bytes", trims_start=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encoding(self, text: str, add_special_tokens: bool = True) -> Any:
        return Ids(self.encode(text, add_special_tokens))

    def conversation(self, text: str, space: str = "") -> Any:
        return self.encoding(text, False)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        if token in self.special_ids:
            return b"<bos>" if token == BOS else b"<eos>"
        return WORDS[(token - 256) % len(WORDS)].encode()

    def token_string(self, token: int) -> str:
        return f"<{token}>"

    def byte_table(self, skip_special_tokens: bool) -> list[bytes]:
        return [
            b"" if skip_special_tokens and i in self.special_ids else self.token_bytes(i) for i in range(512)
        ]


class FakeTemplate:
    def render(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def shows_tools(self, name: str | None) -> bool:
        return name != "{# silent of calls #}"


class HerePool:
    """``media.pool.Pool`` without a process."""

    async def run(self, function: str, *args: Any, result: Any) -> Any:
        return worker.done(function, [*args])


class FakeIngress:
    """``pace`` is the seconds between events; with ``manual`` the test calls ``emit`` itself."""

    def __init__(self, pace: float = 0.0, manual: bool = False, context: int = 4096) -> None:
        self.phase = "ready"
        self.progress = SimpleNamespace(message="", done=0, total=0)
        self.trouble = ""
        self.model_names = ["fake", "fake-alias"]
        self.adapters = AdapterTable(Config())
        self.facts: Facts | None = Facts(
            groups=[CacheGroup(257)],
            page_size=16,
            slots=64,
            context_len=context,
            vocab_size=512,
            step_tokens=512,
            dtype="f",
            device="cpu",
        )
        self.tokenizer: Any = FakeTokenizer()
        self.template: Any = FakeTemplate()
        self.lanes = Lanes()
        self.media: Any = HerePool()
        self.pictures = self.speller = None
        self.model = Outline("FakeForCausalLM", "fake", 134_479_872, 30, 576, 512, "")
        file = "generation_config.json"
        self.default_sampling = Defaults(
            {"temperature": 0.6, "top_k": 50}, {"temperature": file, "top_k": file}
        )
        self.pace = pace
        self.manual = manual
        self.flushable = True
        self.users = 0
        self.paused = False
        self.refuses = False  # what changes memory or weights
        self.slept: list[bool | None] = []  # whether with the weights; None: woken
        self.jobs: list[Job] = []
        self.cancels: list[tuple[str, str]] = []
        self.open_jobs: dict[str, tuple[Job, Any]] = {}
        self.finished: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    dozing = False

    def enter(self) -> None:
        self.users += 1

    def leave(self) -> None:
        self.users -= 1

    async def awake(self) -> None:
        pass

    def require_ready(self, resting: bool = False) -> None:
        if not self.ready and not (resting and self.phase == "sleeping"):
            raise Loading(f"the model is not loaded yet (phase {self.phase})", retry_after=2.0)

    def open(self, job: Job, sink: Any) -> None:
        self.require_ready()
        assert job.rid not in self.open_jobs
        self.jobs.append(job)
        self.open_jobs[job.rid] = (job, sink)
        if not self.manual:
            task = asyncio.ensure_future(self._run(job))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def open_all(self, jobs: Any, extra: bool = False) -> None:
        for job, sink in jobs:
            self.open(job, sink)

    def preparing(self, rid: str) -> bool:
        return False

    def cancel(self, rid: str, reason: str) -> bool:
        if self.open_jobs.pop(rid, None) is None:
            return False
        self.cancels.append((rid, reason))
        return True

    def push(self, rid: str, message: Event | Rejected) -> None:
        """Deliver to the sink of an open request; its last finish or a Rejected forgets it."""
        if rid in self.open_jobs:
            job, sink = self.open_jobs[rid]
            if isinstance(message, Rejected):
                del self.open_jobs[rid]
            elif message.finish is not None:
                self.finished[rid] += 1
                if self.finished[rid] == job.sampling.n:
                    del self.open_jobs[rid]
            sink.push(message)

    def prompt(self, job: Job) -> list[int]:
        if job.token_ids is not None:
            return job.token_ids
        text = job.text
        if job.messages is not None:
            text = self.template.render(job.messages, add_generation_prompt=job.add_generation_prompt)
        return self.tokenizer.encode(text or "", job.add_special_tokens)

    def stats(self) -> Stats | None:
        pages = {"pages_total": 256, "pages_free": 200, "pages_cached": 40, "pages_evictable": 40}
        return Stats(**{"running": len(self.open_jobs)} | pages | self.load)

    async def sleep(self, kv: bool, weights: str, clear: Clear | None = None) -> bool:
        await self._cleared(clear)
        self.slept.append((kv, weights))
        return self.flushable

    async def _cleared(self, clear: Clear | None) -> None:
        if self.refuses:
            raise UnsupportedField("not here")
        if clear is not None:
            await clear()

    weight_version = "default"

    def name_weights(self, version: str) -> None:
        self.weight_version = version

    async def take_from_servers(
        self, servers: Mapping[str, str], version: str | None, clear: Clear | None = None
    ) -> bool:
        await self._cleared(clear)
        self.brought = [servers]
        self.weight_version = version or self.weight_version
        return self.flushable

    async def take_tensors(
        self,
        payloads: Sequence[bytes],
        version: str | None,
        names: Sequence[str] = (),
        clear: Clear | None = None,
    ) -> bool:
        await self._cleared(clear)
        self.brought = [*payloads, *names]
        self.weight_version = version or self.weight_version
        return self.flushable

    async def join_trainer(self, group: str, **where: Any) -> None:
        self.brought = [group, where]

    async def leave_trainer(self, group: str) -> None:
        self.brought = [group]

    async def take_from_trainer(
        self, group: str, tensors: Any, version: str | None, clear: Clear | None = None
    ) -> bool:
        await self._cleared(clear)
        self.brought = [group, *tensors]
        return self.flushable

    async def update_weights(
        self, folder: str, version: str | None, trusted: bool = False, clear: Clear | None = None
    ) -> bool:
        await self._cleared(clear)
        self.weight_version = version or folder
        return self.flushable

    async def wake(self, parts: Sequence[str] = ()) -> None:
        self.slept.append([*parts])

    async def flush_cache(self) -> bool:
        self.require_ready()
        return self.flushable

    async def place_experts(self) -> list[dict[str, Any]]:
        return [{"layer": 0, "ranks": [[0], [1]], "balance_before": 0.5, "balance": 1.0}]

    async def count_experts(self, verb: str, every: int = 0) -> Any:
        return await self.control(Control(verb=verb))

    async def control(self, command: Control) -> Any:
        return {"verb": command.verb, **command.args}

    async def check_weights(self, action: str) -> list[dict[str, Any]]:
        return [{"tensors": 3, "checksum": action}]

    async def show_weights(self, name: str, rows: int) -> list[Any]:
        return [[0.5]] * rows

    async def scramble_weights(self) -> bool:
        return self.flushable

    def pause(self, paused: bool) -> None:
        self.paused = paused

    files: ClassVar[dict[str, Path]] = {}
    load: ClassVar[dict[str, int]] = {}  # what else it tells of itself

    def step_log(self, why: str) -> bytes:
        return b"steps"

    async def _run(self, job: Job) -> None:
        await asyncio.sleep(0)
        prompt = self.prompt(job)
        assert self.facts is not None
        limit = self.facts.context_len
        new = job.sampling.max_tokens
        if job.clip and new is not None:
            new = max(1, min(new, limit - len(prompt)))
        if len(prompt) + (new or 1) > limit:
            error = ContextTooLong.of(limit, len(prompt), new or 0)
            self.push(job.rid, error.rejected(job.rid))
            return
        count = min(new or 24, 200)
        for step in range(count):
            for child in range(job.sampling.n):
                self.push(job.rid, make_event(job, prompt, child, step, last=step == count - 1))
            await asyncio.sleep(self.pace)

    def check(self) -> None:
        """Nothing is open any more."""
        assert not self.open_jobs


class ScriptedIngress(FakeIngress):
    """A model with the chat template ``source`` that answers everything with ``script``, ``cut`` characters a
    step."""

    def __init__(self, script: str, source: str, cut: int = 3) -> None:
        super().__init__()
        self.template.source = source
        self.script = script
        self.cut = cut

    async def _run(self, job: Job) -> None:
        await asyncio.sleep(0)
        prompt = self.prompt(job)
        made = 0
        for start in range(0, len(self.script), self.cut):
            text = self.script[start : start + self.cut]
            tokens = list(text.encode())
            made += len(tokens)
            last = start + self.cut >= len(self.script)
            event = Event(
                rid=job.rid,
                index=job.index_base,
                text=text,
                tokens=tokens,
                prompt_tokens=prompt if start == 0 else None,
                finish="stop" if last else None,
                usage=Usage(len(prompt), made, 0),
            )
            self.push(job.rid, event)
            await asyncio.sleep(self.pace)


def token_at(job: Job, prompt: list[int], child: int, step: int) -> int:
    """The token of a choice at a position: a function of the prompt, the seed and the choice."""
    seed = 0 if job.sampling.temperature == 0 else (job.sampling.seed or 0) * 1000 + child + 1
    digest = hashlib.blake2s(repr((prompt, seed, step)).encode(), digest_size=4).digest()
    return 256 + int.from_bytes(digest, "little") % len(WORDS)


def expected_text(job: Job, prompt: list[int], child: int, steps: int) -> str:
    tokenizer = FakeTokenizer()
    return tokenizer.decode([token_at(job, prompt, child, step) for step in range(steps)])


def make_event(job: Job, prompt: list[int], child: int, step: int, last: bool) -> Event:
    """The event of one token."""
    token = token_at(job, prompt, child, step)
    text = FakeTokenizer().decode([token])
    first = step == 0
    sampling = job.sampling
    return Event(
        rid=job.rid,
        index=job.index_base + child,
        text=text,
        tokens=[token],
        logprobs=None
        if sampling.logprobs is None
        else [entry(token, sampling.logprobs, sampling.logprob_token_ids)],
        prompt_tokens=prompt if first else None,
        prompt_logprobs=prompt_entries(prompt, sampling) if first else None,
        finish=("stop" if sampling.stop else "length") if last else None,
        matched=sampling.stop[0] if last and sampling.stop else None,
        usage=Usage(len(prompt), step + 1, 3),
    )


def entry(token: int, k: int, asked: list[int]) -> TokenLogprob:
    top = [((token + i) % 510, -0.5 - i) for i in range(k)]
    return TokenLogprob(token, -0.5, 1, top, [(other, -9.0 - other) for other in asked])


def prompt_entries(prompt: list[int], sampling: SamplingParams) -> list[TokenLogprob | None] | None:
    k, asked = sampling.prompt_logprobs, sampling.logprob_token_ids
    return None if k is None else [None, *(entry(token, k, asked) for token in prompt[1:])]
