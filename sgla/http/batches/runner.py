"""Runs batches: line by line through the handlers of the routes that they are for, at the lowest priority.

A line counts as done once its answer is stored, so a batch goes on after a restart where it was. ``turns``
says which line is next. Clients take turns at the work on the loop, too: reading and checking go on for a few
milliseconds, then another client's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from sgla import census, clock
from sgla.errors import SglaError
from sgla.http.batches import usage
from sgla.http.batches.asking import Handler, ask
from sgla.http.batches.files import StorageFull
from sgla.http.batches.lines import (
    MAX_LINES,
    MAX_NUMBER,
    BadLine,
    Line,
    answer_line,
    check_request,
    error_line,
    line_id,
    name_of,
    parsed,
    told,
)
from sgla.http.batches.reading import Lines, Numbered, TooManyLines
from sgla.http.batches.store import Batch, BatchStore
from sgla.http.batches.turns import Admission, Turns
from sgla.http.models import MODELS
from sgla.http.openai import chat, text
from sgla.http.pooling import embeddings, moderations, rerank, score
from sgla.http.request.intake import counted
from sgla.http.responses import routes as responses
from sgla.http.server import SERVER
from sgla.http.turns import Desk
from sgla.messages import Facts

log = logging.getLogger(__name__)

ROUTES: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": text.completions,
    "/v1/embeddings": embeddings.embeddings,
    "/v1/responses": responses.create,
    "/v1/moderations": moderations.moderations,
    "/v1/score": score.score,
    "/v1/rerank": rerank.rerank,
}

GROUP = "batches"  # of all lines: together they share in what the server has as one client does
MOST_TOLD = 100  # errors that a batch lists
LOOK = 0.2  # seconds between looks whether the model is loaded
# Seconds before a line is tried again for which the server had no room: at first, and at most.
WAITS = 0.05, 5.0
AGAIN = 16  # lines of a batch that wait for that while it begins with others
SLICE = 200  # errors that are stored at once
TURN = 0.005  # seconds of reading or checking for one client, if others wait; a long line may take longer
CHECKED = 16  # batches that are checked at once, of as many clients


class Refused(Exception):
    """The batch as a whole cannot be run, because of these errors."""

    def __init__(self, *errors: dict[str, Any]) -> None:
        super().__init__()
        self.errors = errors


class Runner:
    """``batches``: those that have not ended, by id."""

    def __init__(self, app: web.Application, store: BatchStore) -> None:
        self.batches: dict[str, Batch] = {}
        self.store = store
        self._app = app
        self._server = app[SERVER]
        self._longest = self._server.config.max_body_bytes
        self._turns = Turns()
        self._tasks: dict[Batch, asyncio.Task[None]] = {}  # that run
        self._works: dict[Batch, asyncio.Task[None]] = {}  # that an early end cancels
        # One client at a time reads or checks, one batch of it at a time.
        self._working, self._checking = Desk(), Desk(CHECKED)
        self._start: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for batch in await self.store.unended():
            self.add(batch)
        self._start = asyncio.ensure_future(self._open())

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._start] if self._start is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, batch: Batch) -> None:
        self.batches[batch.id] = batch
        task = self._tasks[batch] = asyncio.ensure_future(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch))

    def end(self, batch: Batch, status: str) -> None:
        """Have it end before all lines are done; no effect on one that ends already."""
        if not batch.wanted:
            batch.wanted = status
            if batch in self._works:
                self._works[batch].cancel()

    async def _open(self) -> None:
        """Hand out places once a model is loaded."""
        while (facts := self._facts()) is None:
            await asyncio.sleep(LOOK)
        self._turns.open(facts.slots)

    def _facts(self) -> Facts | None:
        """Of the first model that is loaded."""
        found = (server.ingress.facts for server in self._app[MODELS].servers)
        return next((facts for facts in found if facts is not None), None)

    # one batch

    async def _run(self, batch: Batch) -> None:
        timer = asyncio.get_running_loop().call_later(
            max(0.0, batch.seen["expires_at"] - clock.wall()), self.end, batch, "expired"
        )
        try:
            status = batch.wanted = await self._worked(batch)  # who wants another one now comes too late
            if status == "expired":
                with contextlib.suppress(StorageFull, TooManyLines):
                    await self._expire(batch)
            elif status == "completed":
                batch.become("finalizing")
                await self.store.save(batch)
            await self.store.end(batch, status)
        except SglaError as error:  # the state is out of reach; the next start tries again
            log.error("batch %s could not be stored: %s", batch.id, error.message)
        finally:
            timer.cancel()
            self.batches.pop(batch.id, None)

    async def _worked(self, batch: Batch) -> str:
        """Do the lines; returns the status that the batch ends with."""
        if batch.seen["status"] == "cancelling":
            batch.wanted = "cancelled"
        if batch.wanted:
            return batch.wanted
        work = self._works[batch] = asyncio.ensure_future(self._work(batch))
        try:
            await work
        except asyncio.CancelledError:
            if not batch.wanted:
                work.cancel()
                await asyncio.wait([work])
                raise
            return batch.wanted
        except Refused as refused:
            batch.seen["errors"] = listed(refused.errors)
            return "failed"
        except SglaError as error:  # there is no room for what it makes
            batch.seen["errors"] = listed([whole(error.code, error.message)])
            return "failed"
        except Exception:
            log.exception("batch %s failed", batch.id)
            message = "internal error; the server's log has the details"
            batch.seen["errors"] = listed([whole(SglaError.code, message)])
            return "failed"
        finally:
            del self._works[batch]
        return "completed"

    async def _work(self, batch: Batch) -> None:
        if self._facts() is None:
            await self._server.ingress.awake()
        await self._until_loaded()
        if batch.seen["status"] == "validating":
            async with self._checking.turn(batch.client.name):
                await self._validate(batch)
        try:
            async with asyncio.TaskGroup() as group:
                await self._answer_all(batch, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _answer_all(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        """Begin with one line after the other, each when it is admitted."""
        done, lines = await self.store.done(batch), self._lines(batch, census.SMALL)
        again = Again()
        while (found := await self._next(batch, lines, done)) is not None:
            await again.few()
            admission = Admission(batch, found.number, found.size)
            await self._turns.admit(admission)
            task = group.create_task(self._answer(admission, lines, found, again))
            # By itself one that is cancelled before its first step would give nothing back.
            task.add_done_callback(partial(self._release, admission))

    async def _until_loaded(self) -> None:
        assert self._start is not None
        await asyncio.shield(self._start)

    async def _in_turns(self, batch: Batch, step: Callable[[], Awaitable[bool]]) -> None:
        """Call ``step`` until it returns False, in turns with other clients."""
        more = True
        while more:
            async with self._working.turn(batch.client.name):
                end = clock.now() + TURN
                while more and clock.now() < end:
                    more = await step()
            if more:
                await asyncio.sleep(0)

    async def _validate(self, batch: Batch) -> None:
        """Count the lines, and answer those with errors that are no requests. Raises Refused."""
        await self.store.clear(batch)
        batch.total = batch.failed = 0
        seen: set[bytes] = set()
        errors: list[dict[str, Any]] = []
        bad: list[tuple[int, bytes]] = []
        lines = self._lines(batch, self._longest)

        async def check() -> bool:
            if (found := await lines.next()) is None:
                return not lines.ended
            batch.total += 1
            if batch.total > MAX_LINES and not batch.local:
                message = f"the file has more than {MAX_LINES} requests; send several batches"
                raise Refused(whole("too_many_lines", message))
            try:
                self._check_new(await self._checked(batch, await lines.text(found)), seen)
            except BadLine as error:
                bad.append((found.number, failure(found.number, error)))
                if len(errors) < MOST_TOLD:
                    errors.append(told(found.number, error))
            if len(bad) == SLICE:
                await self._keep_errors(batch, bad)
            return True

        try:
            await self._in_turns(batch, check)
        except TooManyLines as error:
            message = f"the file has more than {MAX_NUMBER} lines, empty ones included; leave these out"
            raise Refused(whole("too_many_lines", message)) from error
        await self._keep_errors(batch, bad)
        if not batch.total:
            raise Refused(whole("empty_file", "the file has no lines; each line is a request as JSON"))
        if batch.failed == batch.total:
            raise Refused(*errors)
        batch.seen["errors"] = listed(errors) if errors else None
        batch.become("in_progress")
        await self.store.save(batch)

    async def _keep_errors(self, batch: Batch, lines: list[tuple[int, bytes]]) -> None:
        if lines:
            await self.store.keep_errors(batch, lines)
            lines.clear()

    async def _checked(self, batch: Batch, text: bytes | None) -> Line:
        """Raises BadLine. A long line is counted before it is decoded,
        as bodies are, and others run in between."""
        if text is None or len(text) <= census.SMALL:
            return await self._decoded(batch, text)
        async with self._server.memory.decoding.turn(batch.client.name):
            try:
                await counted(self._server, text)
            except SglaError as error:
                raise BadLine(error.code, error.message) from error
            return await self._decoded(batch, text)

    async def _decoded(self, batch: Batch, text: bytes | None) -> Line:
        try:
            line = parsed(text, self._longest)
        except BadLine as error:
            await others(text)
            error.custom_id = None if text is None else name_of(text)
            raise
        await others(text)
        check_request(line, ROUTES if batch.local else (batch.seen["endpoint"],), self._app[MODELS].check)
        await others(text)
        return line

    @staticmethod
    def _check_new(line: Line, seen: set[bytes]) -> None:
        digest = hashlib.blake2s(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in seen:
            raise BadLine(
                "duplicate_custom_id",
                f"custom_id {line.custom_id[:100]!r} stands in an earlier line, too; the first one is run",
                "custom_id",
                line.custom_id,
            )
        seen.add(digest)

    async def _expire(self, batch: Batch) -> None:
        """Answer what is left, as far as there is room."""
        done, lines = await self.store.done(batch), self._lines(batch, self._longest)
        late: list[tuple[int, bytes]] = []
        message = f"the request was not run within the completion window of {batch.seen['completion_window']}"

        async def answer() -> bool:
            if (found := await lines.next()) is None:
                return not lines.ended
            if is_done(done, found):
                return True
            try:
                name: str | None = (await self._checked(batch, await lines.text(found))).custom_id
            except BadLine as error:
                name = error.custom_id
            late.append((found.number, error_line(found.number, name, "batch_expired", message)))
            if len(late) == SLICE:
                await self._keep_errors(batch, late)
            return True

        await self._in_turns(batch, answer)
        await self._keep_errors(batch, late)

    # lines

    def _lines(self, batch: Batch, kept: int) -> Lines:
        most = math.inf if batch.local else MAX_NUMBER
        return Lines(self.store.files, batch.client, batch.input, self._longest, kept, most)

    async def _next(self, batch: Batch, lines: Lines, done: bytearray) -> Numbered | None:
        """The next line that is not done."""
        found: Numbered | None = None

        async def look() -> bool:
            nonlocal found
            found = await lines.next()
            return not lines.ended if found is None else is_done(done, found)

        await self._in_turns(batch, look)
        return found

    async def _answer(self, admission: Admission, lines: Lines, found: Numbered, again: Again) -> None:
        """Run a line, and keep its answer.
        Where the server has no room for it, others are admitted in its place for a while."""
        batch, uid, delay = admission.batch, line_id(), WAITS[0]
        while (kept := await self._asked(admission, lines, found, uid)) is None:
            async with again:
                self._turns.release(admission)
                await asyncio.sleep(delay)
                delay = min(2 * delay, WAITS[1])
                await self._turns.admit(admission)
        data, failed = kept
        await self.store.keep(batch, found.number, data, failed)
        self._server.metrics.batch_line(failed)

    def _release(self, admission: Admission, task: asyncio.Task[None]) -> None:
        self._turns.release(admission)

    async def _asked(
        self, admission: Admission, lines: Lines, found: Numbered, uid: str
    ) -> tuple[bytes, bool] | None:
        """The answer to a line, and whether it failed; None if it is to be tried again."""
        batch = admission.batch
        try:
            line = await self._checked(batch, await lines.text(found))
        except BadLine as error:  # it was right once: the server has other names now
            return failure(found.number, error), True
        url, name, body = line.url, line.custom_id, bytes(line.body)
        del line
        client = batch.client._replace(group=GROUP)
        answer = await ask(
            self._app, ROUTES[url], url, body, client, uid, partial(self._turns.resize, admission)
        )
        if answer.later:
            return None
        await others(answer.body)
        usage.add(batch.usage, answer.body)
        await others(answer.body)
        return answer_line(uid, name, answer.status, answer.body, answer.ignored), answer.status >= 400


class Again:
    """Lines of one batch for which the server had no room: ``async with`` while one waits."""

    def __init__(self) -> None:
        self._count = 0
        self._fewer = asyncio.Event()

    async def __aenter__(self) -> None:
        self._count += 1

    async def __aexit__(self, *error: object) -> None:
        self._count -= 1
        self._fewer.set()

    async def few(self) -> None:
        """Wait while there are ``AGAIN``."""
        while self._count >= AGAIN:
            self._fewer.clear()
            await self._fewer.wait()


async def others(text: bytes | None) -> None:
    """Let others run between two looks at a long text."""
    if text is not None and len(text) > census.SMALL:
        await asyncio.sleep(0)


def is_done(done: bytearray, line: Numbered) -> bool:
    return line.number < len(done) and bool(done[line.number])


def failure(number: int, error: BadLine) -> bytes:
    return error_line(number, error.custom_id, error.code, error.message, error.param)


def listed(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": errors}


def whole(code: str, message: str) -> dict[str, Any]:
    """An error of no single line."""
    return {"code": code, "line": None, "message": message, "param": None}


RUNNER = web.AppKey("batches", Runner)


async def run_batches(app: web.Application) -> AsyncIterator[None]:
    """For ``cleanup_ctx``."""
    await app[RUNNER].start()
    yield
    with contextlib.suppress(asyncio.CancelledError):
        await app[RUNNER].close()
