"""The server's side of compiling grammars: a cache, and whose turn it is."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from sgla.errors import BadRequest, InvalidField, Overloaded, SglaError, UnsupportedField
from sgla.grammar.processes import Child, Died, Sandbox
from sgla.grammar.protocol import Answer, Ask, Vocabulary
from sgla.messages import MAX_GRAMMAR, Control, Grammar

log = logging.getLogger(__name__)

ENTRIES = 256
ENTRY_BYTES = 4 << 20  # of their sources; less than workers keep (``matcher.KEPT_BYTES``)
REFUSALS = 4096
FIRST = 0.2  # seconds of CPU time that a grammar has before it makes room for others
TIMEOUT = 5.0  # that it may take alone
QUEUE = 30.0  # seconds to wait for the grammars of other clients
WAITING = 64  # grammars of one client
START = 60.0
SLOW = 0.001  # seconds of compilation that a step may be kept waiting for

STOPPING = "the server is stopping"
CHECKED = ("json_object", "json_schema")
CHECKS = 256  # that may wait


class Making:
    """A grammar that ``waiters`` wait for."""

    def __init__(self, task: asyncio.Task[str | SglaError]) -> None:
        self.task = task
        self.waiters = 0


class Client:
    """What one client waits for.
    Of each kind of work, one thing of a client is done, or waits for its turn, at a time."""

    def __init__(self) -> None:
        self.makings: dict[bytes, Making] = {}
        self.first, self.long, self.telling = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()


class Compiler:
    """Lives on the running loop. Starts nothing before its first use.

    A grammar has a first try of ``FIRST`` seconds. One that takes longer goes on beside the first tries of
    others, up to ``TIMEOUT``; there is one such at a time. Clients take turns at both.

    ``vocabulary`` makes the model's, in a thread; ``tell`` sends the workers a command and waits for rank 0's
    answer. ``whitespace`` and ``additional`` are for grammars that do not say.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        tell: Callable[[Control], Awaitable[dict[str, Any]]],
        whitespace: str = "compact",
        additional: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._tell = tell
        self._whitespace, self._additional = whitespace, additional
        self._cache: OrderedDict[bytes, str] = OrderedDict()
        self._cache_bytes = 0
        self._refusals: OrderedDict[bytes, SglaError] = OrderedDict()
        self._clients: dict[str, Client] = {}
        self._first, self._long, self._checking = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._longer = 0  # grammars that are at their long try or wait for it
        self._starting = asyncio.Lock()
        self._file: NamelessFile | None = None
        self._told = False  # the workers have the vocabulary
        self._sandbox: Sandbox | None = None
        self._spare: Child | None = None
        self._checker: Child | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.numbers = {"waiting": 0, "checking": 0}  # calls and checks now
        # compiled | cached | refused | late | valid | invalid | unchecked
        self.counts: Counter[str] = Counter()
        self._seconds: list[float] = []

    def find(self, grammar: Grammar) -> str | None:
        """The source for the workers, if it is known.
        Raises InvalidField or UnsupportedField for one that is known to be refused."""
        if len(grammar.text) > MAX_GRAMMAR:
            raise InvalidField(
                f"{grammar.param}: the grammar has {len(grammar.text)} "
                f"characters, the limit is {MAX_GRAMMAR}",
                param=grammar.param,
            )
        key = _key(grammar)
        if (refusal := self._refusals.get(key)) is not None:
            self._refusals.move_to_end(key)
            self.counts["cached"] += 1
            raise _named(refusal, grammar)
        if (source := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self.counts["cached"] += 1
        return source

    async def compile(self, grammar: Grammar, client: str = "") -> str:
        """The source for the workers. Raises InvalidField or UnsupportedField, which say why, or Overloaded,
        but not for "", which is nobody's ``client``."""
        if (source := self.find(grammar)) is not None:
            return source
        key, mine = _key(grammar), self._clients.setdefault(client, Client())
        making = mine.makings.get(key)
        if making is None:
            if client and len(mine.makings) >= WAITING:
                raise Overloaded(
                    f"{grammar.param}: {WAITING} grammars of yours wait to be "
                    "compiled, which is the limit; retry later",
                    param=grammar.param,
                    retry_after=5.0,
                )
            making = mine.makings[key] = Making(self._spawn(self._make(grammar, mine)))
        making.waiters += 1
        self.numbers["waiting"] += 1
        try:
            found = await asyncio.shield(making.task)
        finally:
            self.numbers["waiting"] -= 1
            making.waiters -= 1
            if not making.waiters:
                making.task.cancel()
                del mine.makings[key]
                if not mine.makings:
                    del self._clients[client]
        if isinstance(found, SglaError):
            raise _named(found, grammar)
        return found

    def check(self, grammar: Grammar, output: str) -> None:
        """Count, at some time, whether a finished output is what ``grammar`` asks for."""
        if grammar.kind not in CHECKED:
            return
        if grammar.after:
            output = answer_of(grammar, output)
        if not output or self.numbers["checking"] >= CHECKS or self._closed:
            self.counts["unchecked"] += 1
            return
        self.numbers["checking"] += 1
        self._spawn(self._check(grammar, output))

    async def _check(self, grammar: Grammar, output: str) -> None:
        fits = None
        try:
            async with self._checking:
                fits = await self._fits(Ask(grammar, output))
        finally:
            self.numbers["checking"] -= 1
            self.counts["unchecked" if fits is None else "valid" if fits else "invalid"] += 1
        if fits is False:
            log.warning("an output does not fit its %s", grammar.kind)

    async def _fits(self, ask: Ask) -> bool | None:
        """By a child that is kept as long as it answers."""
        child, self._checker = self._checker, None
        try:
            child = child or await self._child()
            child.ask(ask)
            answer = await child.answer(TIMEOUT)
        except (SglaError, Died):
            answer = None
        if answer is not None:
            self._checker = child
            return answer.fits
        if child is not None:
            child.close()
        return None

    def drain_seconds(self) -> list[float]:
        """CPU seconds of the compilations since the last call."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def close(self) -> None:
        """End the processes and give back the vocabulary. Calls under way are cancelled."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._sandbox is not None:
            self._sandbox.kill()
        if self._file is not None:
            self._file.close()

    # inside

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _keep(self, grammar: Grammar, source: str) -> str:
        key = _key(grammar)
        self._cache_bytes += len(source) - len(self._cache.pop(key, ""))
        self._cache[key] = source
        while len(self._cache) > ENTRIES or self._cache_bytes > ENTRY_BYTES:
            self._cache_bytes -= len(self._cache.popitem(last=False)[1])
        return source

    def _refuse(self, grammar: Grammar, error: SglaError, outcome: str = "refused") -> SglaError:
        self.counts[outcome] += 1
        self._refusals[_key(grammar)] = error
        while len(self._refusals) > REFUSALS:
            self._refusals.popitem(last=False)
        return error

    async def _make(self, grammar: Grammar, mine: Client) -> str | SglaError:
        """Returns the errors that are the user's."""
        try:
            answer = await self._answer(grammar, mine)
        except Overloaded as error:
            return error
        except Died:
            return self._refuse(grammar, InvalidField("the grammar is too complex: it cannot be compiled"))
        if isinstance(answer, str | SglaError):
            return answer
        if answer.error is not None:
            kind: type[BadRequest] = UnsupportedField if answer.unsupported else InvalidField
            return self._refuse(grammar, kind(answer.error))
        self.counts["compiled"] += 1
        self._seconds.append(answer.seconds)
        if answer.seconds > SLOW:
            try:
                async with mine.telling:
                    await self._forewarn(answer.source)
            except InvalidField as error:  # not kept: it compiled here, so it may yet compile there
                return error
        return self._keep(grammar, answer.source)

    async def _answer(self, grammar: Grammar, mine: Client) -> Answer | str | SglaError:
        """Of the compiler, or what another client has learned meanwhile. Raises Died and Overloaded."""
        child: Child | None = None
        longer = False
        try:
            async with turn(mine.first, self._first):
                if (known := self._known(grammar)) is not None:
                    return known
                child, answer = await self._first_try(Ask(self._settled(grammar)))
                if answer is not None:
                    self._spare, child = child, None
                    return answer
                longer = True
                self._longer += 1
                if self._longer > 1:  # it would have to wait, and begins again then
                    child.close()
                    child = None
            async with turn(mine.long, self._long):
                if child is None:
                    if (known := self._known(grammar)) is not None:
                        return known
                    child = await self._child()
                    child.ask(Ask(self._settled(grammar)))
                child.stand_back()
                begun = child.cpu_seconds()
                if (answer := await child.answer(TIMEOUT)) is not None:
                    return answer
                if child.cpu_seconds() < begun + TIMEOUT:
                    raise Overloaded(
                        "the machine is too busy to compile the grammar; please retry later", retry_after=5.0
                    )
                why = f"it takes more than {TIMEOUT:.0f} s to compile"
                return self._refuse(grammar, InvalidField(f"the grammar is too complex: {why}"), "late")
        finally:
            self._longer -= longer
            if child is not None:
                child.close()

    def _settled(self, grammar: Grammar) -> Grammar:
        return msgspec.structs.replace(
            grammar,
            whitespace=self._whitespace if grammar.whitespace is None else grammar.whitespace,
            additional=self._additional if grammar.additional is None else grammar.additional,
        )

    def _known(self, grammar: Grammar) -> str | SglaError | None:
        return self._cache.get(_key(grammar)) or self._refusals.get(_key(grammar))

    async def _first_try(self, ask: Ask) -> tuple[Child, Answer | None]:
        """By the child that served before, or by a new one if there is none,
        or if it dies, maybe of what it did before."""
        child, self._spare = self._spare, None
        while True:
            fresh = child is None
            child = child or await self._child()
            try:
                child.ask(ask)
                return child, await child.answer(FIRST)
            except BaseException as error:
                child.close()
                if fresh or not isinstance(error, Died):
                    raise
                child = None

    async def _forewarn(self, source: str) -> None:
        """Have the workers compile it beside their steps, and wait for that.
        Raises InvalidField if they cannot."""
        end = time.monotonic() + TIMEOUT
        with tempfile.NamedTemporaryFile("w", prefix="sgla-") as file:
            file.write(source)
            file.flush()
            while not (await self._tell(Control(verb="grammar", args={"path": file.name})))["ready"]:
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.01)

    async def _child(self) -> Child:
        """A new process to ask. Raises SglaError if there can be none."""
        async with self._starting:
            for _ in range(2):  # the one that forks may have been killed
                if self._closed:
                    raise SglaError(STOPPING)
                if self._sandbox is None:
                    self._sandbox = Sandbox(await self._vocabulary_file())
                try:
                    return await self._sandbox.child(START)
                except (Died, TimeoutError):
                    self._sandbox.kill()
                    self._sandbox = None
        raise SglaError("the grammar compiler does not start; see the server's log")

    async def _vocabulary_file(self) -> Path:
        if self._file is None:
            vocabulary = await asyncio.to_thread(self._vocabulary)
            self._file = await asyncio.to_thread(lambda: NamelessFile(vocabulary.encoded()))
        path = self._file.path
        if not self._told:
            await self._tell(Control(verb="vocabulary", args={"path": str(path)}))
            self._told = True
        return path


class NamelessFile:
    """A file in memory that this user's processes find at ``path`` until it is closed.
    Nothing of it is left behind by a SIGKILL."""

    def __init__(self, content: bytes) -> None:
        self._file = os.fdopen(os.memfd_create("sgla"), "wb")
        self._file.write(content)
        self._file.flush()
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        self._file.close()


@asynccontextmanager
async def turn(own: asyncio.Lock, everybodys: asyncio.Lock) -> AsyncIterator[None]:
    """A turn of a client, then of this client among all. Locks are given in the order of asking. Raises
    Overloaded if the others take ``QUEUE`` seconds."""
    async with own:
        try:
            await asyncio.wait_for(everybodys.acquire(), QUEUE)
        except TimeoutError as error:
            raise Overloaded(
                f"the grammars of others have taken {QUEUE:.0f} s; please retry later", retry_after=5.0
            ) from error
        try:
            yield
        finally:
            everybodys.release()


def answer_of(grammar: Grammar, output: str) -> str:
    """The part of an output that the grammar is about."""
    if grammar.opener and grammar.opener not in output and not any(end in output for end in grammar.after):
        return output
    ends = [(at, len(end)) for end in grammar.after if (at := output.find(end)) >= 0]
    return output[sum(min(ends)) :] if ends else ""


def _key(grammar: Grammar) -> bytes:
    parts = (grammar.kind, grammar.text, grammar.whitespace, grammar.additional)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()


def _named(error: SglaError, grammar: Grammar) -> SglaError:
    """``error`` about the field that the grammar came in."""
    return type(error)(
        f"{grammar.param}: {error.message}", param=grammar.param, retry_after=error.retry_after
    )
