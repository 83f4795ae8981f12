"""Runs batches: line by line through the handlers of the routes that they are for, at the lowest priority.

A line counts as done once its answer is stored, so a batch goes on after a restart where it was. As many lines run as the model has slots; who
has the fewest running gets the next place, first among clients, then among the batches of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from sgla import census, clock
from sgla.errors import SglaError
from sgla.http.batches.asking import Handler, ask
from sgla.http.batches.files import StorageFull
from sgla.http.batches.lines import (
    MAX_LINES,
    MAX_NUMBER,
    BadLine,
    Line,
    Numbered,
    Splitter,
    answer_line,
    checked,
    error_line,
    line_id,
    told,
)
from sgla.http.batches.store import Batch, BatchStore
from sgla.http.openai import chat, text
from sgla.http.pooling import embeddings, moderations, rerank, score
from sgla.http.responses import routes as responses
from sgla.http.server import SERVER

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
LINE_BYTES = 32 << 20  # of lines that run, together; a line alone may be longer
MOST_TOLD = 100  # errors that a batch lists
LOOK = 0.2  # seconds between looks whether the model is loaded
WAITS = (
    0.05,
    5.0,
)  # seconds before a line is tried again for which the server had no room: at first, and at most
SLICE = 200  # errors that are stored at once
SPLIT = 8 << 10  # bytes that are split into lines in one turn of the loop: all may be line ends


class Refused(Exception):
    """The batch as a whole cannot be run, because of these errors."""

    def __init__(self, *errors: dict[str, Any]) -> None:
        super().__init__()
        self.errors = errors


class Turns:
    """Places for lines."""

    def __init__(self) -> None:
        self.free = 0
        self._running: Counter[str] = Counter()  # by client
        self._waiting: dict[Batch, asyncio.Future[None]] = {}

    async def take(self, batch: Batch) -> None:
        """Wait for a place. A batch waits for one at a time."""
        turn = self._waiting[batch] = asyncio.get_running_loop().create_future()
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(batch, None) is None:
                self.give(batch)
            raise

    def give(self, batch: Batch) -> None:
        self.free += 1
        batch.running -= 1
        self._running[batch.client.name] -= 1
        if not self._running[batch.client.name]:
            del self._running[batch.client.name]
        self._hand_out()

    def _hand_out(self) -> None:
        while self.free > 0 and self._waiting:
            batch = min(
                self._waiting,
                key=lambda batch: (self._running[batch.client.name], batch.running, batch.number),
            )
            self.free -= 1
            batch.running += 1
            self._running[batch.client.name] += 1
            self._waiting.pop(batch).set_result(None)


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
        self._checking = asyncio.Lock()  # the lines of one batch at a time
        self._reading = asyncio.Lock()  # one line at a time is put together
        self._bytes = 0  # of lines that run
        self._shrunk = asyncio.Event()  # set when they get fewer
        self._start: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for batch in await self.store.unended():
            self.add(batch)
        self.store.files.tidy()
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
        """Hand out places once the model is loaded."""
        ingress = self._server.ingress
        while ingress.facts is None:
            await asyncio.sleep(LOOK)
        self._turns.free = ingress.facts.slots
        self._turns._hand_out()

    # one batch -------------------------------------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        timer = asyncio.get_running_loop().call_later(
            max(0.0, batch.seen["expires_at"] - clock.wall()), self.end, batch, "expired"
        )
        try:
            status = await self._worked(batch)
            if status == "expired":
                with contextlib.suppress(StorageFull):
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
        await self._until_loaded()
        if batch.seen["status"] == "validating":
            async with self._checking:
                await self._validate(batch)
        try:
            async with asyncio.TaskGroup() as group:
                await self._answer_all(batch, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _answer_all(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        """Begin with one line after the other, each when it has a place."""
        done, lines = await self.store.done(batch), self._lines(batch)
        while True:
            await self._turns.take(batch)
            found = None
            try:
                found = await self._next(lines, done)
            finally:
                if found is None:
                    self._turns.give(batch)
            if found is None:
                return
            group.create_task(self._answer(batch, found))

    async def _until_loaded(self) -> None:
        assert self._start is not None
        await asyncio.shield(self._start)

    async def _validate(self, batch: Batch) -> None:
        """Count the lines, and answer those with errors that are no requests. Raises Refused."""
        await self.store.clear(batch)
        batch.total = batch.failed = 0
        seen: set[bytes] = set()
        errors: list[dict[str, Any]] = []
        bad: list[tuple[int, str]] = []
        async for line in self._lines(batch):
            batch.total += 1
            if batch.total > MAX_LINES:
                message = f"the file has more than {MAX_LINES} requests; send several batches"
                raise Refused(whole("too_many_lines", message))
            try:
                self._check_new(await self._checked(batch, line), seen)
            except BadLine as error:
                bad.append(
                    (
                        line.number,
                        error_line(line.number, error.custom_id, error.code, error.message, error.param),
                    )
                )
                if len(errors) < MOST_TOLD:
                    errors.append(told(line.number, error))
            if len(bad) == SLICE:
                await self.store.keep_errors(batch, bad)
                bad = []
        if bad:
            await self.store.keep_errors(batch, bad)
        if not batch.total:
            raise Refused(whole("empty_file", "the file has no lines; each line is a request as JSON"))
        if batch.failed == batch.total:
            raise Refused(*errors)
        batch.seen["errors"] = listed(errors) if errors else None
        batch.become("in_progress")
        await self.store.save(batch)

    async def _checked(self, batch: Batch, line: Numbered) -> Line:
        """Raises BadLine. A long line is counted before it is decoded, as bodies are."""
        if size(line) > census.SMALL:
            facts = self._server.ingress.facts
            counted = census.Census(facts.context_len if facts is not None else 0)
            try:
                for _ in census.counting(line.text or b"", counted):
                    await asyncio.sleep(0)
            except SglaError as error:
                raise BadLine(error.code, error.message) from error
        return checked(line.text, self._longest, batch.seen["endpoint"], self._server.model)

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
        done, late = await self.store.done(batch), []
        message = f"the request was not run within the completion window of {batch.seen['completion_window']}"
        async for line in self._lines(batch):
            if line.number in done:
                continue
            try:
                name: str | None = (await self._checked(batch, line)).custom_id
            except BadLine as error:
                name = error.custom_id
            late.append((line.number, error_line(line.number, name, "batch_expired", message)))
            if len(late) == SLICE:
                await self.store.keep_errors(batch, late)
                late = []
        if late:
            await self.store.keep_errors(batch, late)

    # lines -----------------------------------------------------------------------------------------------------------

    async def _lines(self, batch: Batch) -> AsyncIterator[Numbered]:
        splitter = Splitter(self._longest)
        async for piece in self.store.files.content(batch.input):
            for at in range(0, len(piece), SPLIT):
                for line in splitter.feed(piece[at : at + SPLIT]):
                    yield line
                await asyncio.sleep(0)
            if splitter.number > MAX_NUMBER:
                message = f"the file has more than {MAX_NUMBER} lines, empty ones included; leave these out"
                raise Refused(whole("too_many_lines", message))
        for line in splitter.end():
            yield line

    async def _next(self, lines: AsyncIterator[Numbered], done: set[int]) -> Numbered | None:
        """The next line that is not done, when there is room for its bytes."""
        async with self._reading:
            async for line in lines:
                if line.number not in done:
                    while self._bytes and self._bytes + size(line) > LINE_BYTES:
                        self._shrunk.clear()
                        await self._shrunk.wait()
                    self._bytes += size(line)
                    return line
        return None

    async def _answer(self, batch: Batch, found: Numbered) -> None:
        """Run a line, and keep its answer."""
        try:
            line = await self._checked(batch, found)
            uid, delay = line_id(), WAITS[0]
            client = batch.client._replace(group=GROUP)
            while True:
                handler = ROUTES[batch.seen["endpoint"]]
                answer = await ask(self._app, handler, line.url, bytes(line.body), client, uid)
                if answer.status not in (429, 503):
                    break
                await asyncio.sleep(delay)
                delay = min(2 * delay, WAITS[1])
            failed = answer.status >= 400
            data = answer_line(uid, line.custom_id, answer.status, answer.body, answer.ignored)
            await self.store.keep(batch, found.number, data, failed)
            self._server.metrics.batch_line(failed)
        except BadLine as error:  # it was right once: the server has other names now
            data = error_line(found.number, error.custom_id, error.code, error.message, error.param).encode()
            await self.store.keep(batch, found.number, data, True)
        finally:
            self._bytes -= size(found)
            self._shrunk.set()
            self._turns.give(batch)


def size(line: Numbered) -> int:
    return len(line.text or b"")


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
