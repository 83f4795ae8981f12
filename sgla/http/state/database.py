"""One SQLite database for all that clients store, in one thread of its own: the loop never waits for a disk.

With ``--state-path`` it is the file ``state.db`` in that folder, in WAL mode with ``synchronous=NORMAL``:
what is committed outlives the process however it ends, and the last commits may be lost where the machine
loses its power. Without, it is in memory.

SQLite lets go of Python's lock once a row, and gets it back when the loop is idle: a statement that brings or
takes many rows should do so as one (``group_concat``, ``json_each``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sgla.errors import ConfigError, Overloaded, SglaError, StorageFailed
from sgla.http.clients import Client
from sgla.http.state.leftovers import Leftovers
from sgla.http.state.lines import Lines

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T | Generator[None, None, T]]

NAME = "state.db"
APPLICATION = 0x73676C61  # "sgla", so that other databases are not taken for ours
VERSION = 2  # of all tables together; a change of any of them counts it up
SERVER = ""  # the line of the server's own works; no client has this name
WAITING = 256  # works of one client that requests wait for
BACKLOG_BYTES = 64 << 20  # of writes that nobody waits for; those of one client may be half of it
PAUSES = (1.0, 60.0)  # seconds before a clean-up that failed is tried again: at first, and at most
LATE = 4096  # clean-ups that wait for that
CHECKED = 1 << 30  # bytes of a file that is read to its end at the start, which takes a second or two
CENTRAL = ("objects", "shares", "totals")  # tables of which a larger one is checked
VACUUMED = 4096  # pages of 4 KiB that the file gets smaller by in a minute
VACUUMED_AT_ONCE = 256  # in one transaction
SPARE = 256  # pages that stay free in memory
PRAGMAS = """
PRAGMA foreign_keys = ON;
PRAGMA temp_store = MEMORY;
PRAGMA cache_size = -8192;
PRAGMA secure_delete = ON;
"""
WAL = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA journal_size_limit = 16777216;
"""
SECRETS = "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"


class Database:
    """Clients take turns at its thread (``state.lines``): what is begun for a client is done in that order.
    Raises ConfigError for a ``folder`` that cannot be used: one that another server uses, or whose file is
    damaged or of another version.

    ``schema``: SQL that makes the tables, run once for each file.
    """

    def __init__(self, folder: str | None, schema: Iterable[str]) -> None:
        self.on_disk = folder is not None
        self.failures = 0  # of writes that nobody waited for
        self.begun = 0  # works that are not done
        self.leftovers = Leftovers()
        self._tidying = self._tidy_again = False
        self._lock = None if folder is None else locked(Path(folder))
        self._connection = connected(folder, schema)
        self._lines = Lines()
        self._asking: Counter[str] = Counter()  # works of a client that somebody waits for
        self._backlog: Counter[str] = Counter()  # bytes of a client's writes that nobody waits for
        self._late: deque[Callable[[], None]] = deque()  # clean-ups that failed
        self._pause = PAUSES[0]
        self._timer: asyncio.TimerHandle | None = None
        self._broken = False
        self._thread: threading.Thread | None = None
        self._closed, self._over = False, asyncio.Event()
        self.salt = self._secret("salt")

    async def run(
        self, client: Client | None, work: Work[T], always: bool = False, line: str | None = None
    ) -> T:
        """``work(connection)`` as one transaction, behind all that was begun for the client before (None: for
        the server itself), or in another ``line``. A generator is one transaction for each of its parts,
        between which others have their turn. It holds Python's lock where it is no SQL, so it should be
        short. Raises what ``work`` raises, which undoes the part, StorageFailed, and, unless it is ``always``
        taken, Overloaded."""
        name = client.name if client is not None else SERVER
        if self._asking[name] >= WAITING and client is not None and not always:
            raise Overloaded(
                f"{WAITING} requests of yours wait for what is stored, which is the limit; retry later",
                retry_after=1.0,
            )
        self._asking[name] += 1
        try:
            return await self._begin(name if line is None else line, work)
        finally:
            self._asking[name] -= 1
            if not self._asking[name]:
                del self._asking[name]

    def queue(
        self, client: Client | None, work: Work[T], size: int = 0, line: str | None = None
    ) -> asyncio.Future[T | None]:
        """The same for a write of about ``size`` bytes that nobody waits for. The future has its result; None
        for a failure, which is logged and counted. Raises StorageFailed, and counts that, too, where too much
        waits for the disk, of all or of the client."""
        name = client.name if client is not None else SERVER
        most = BACKLOG_BYTES // 2 if client is not None else BACKLOG_BYTES
        if size and (self._backlog[name] + size > most or self._backlog.total() + size > BACKLOG_BYTES):
            self._fail(f"more than {most >> 20} MiB wait for the disk")
            raise StorageFailed("the disk does not keep up with what is to be stored; retry later")
        self._backlog[name] += size
        ended: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

        def over(done: asyncio.Future[T]) -> None:
            self._backlog[name] -= size
            if not self._backlog[name]:
                del self._backlog[name]
            result = self._checked(done)
            if not ended.done():
                ended.set_result(result)

        self._begin(name if line is None else line, work).add_done_callback(over)
        return ended

    def clean(self, client: Client | None, work: Work[T], then: Callable[[T], None] | None = None) -> None:
        """``queue`` for a work that removes something, and may be done again: where the disk fails it is
        tried again, after pauses that grow, until it succeeds. ``then`` gets its result."""

        def attempt() -> None:
            if not self._closed:
                name = client.name if client is not None else SERVER
                self._begin(name, work).add_done_callback(over)

        def over(done: asyncio.Future[T]) -> None:
            result = self._checked(done)
            if isinstance(done.exception(), StorageFailed):
                self._try_later(attempt)
                return
            self._catch_up()
            if then is not None and done.exception() is None:
                then(result)  # type: ignore[arg-type]

        attempt()

    def tidy(self) -> None:
        """Free all leftovers, in turn with what clients ask for."""
        if self._tidying:
            self._tidy_again = True
            return
        self._tidying, self._tidy_again = True, False
        self.clean(None, self.leftovers.free_all, lambda _: self._tidied())

    def _tidied(self) -> None:
        self._tidying = False
        if self._tidy_again:
            self.tidy()
        elif not self.on_disk:
            self.give_back()

    def give_back(self) -> None:
        """Let the file shrink by some of what is free in it, or the memory by all but ``SPARE``."""

        def work(tx: sqlite3.Connection) -> Iterator[None]:
            (free,) = tx.execute("PRAGMA freelist_count").fetchone()
            for _ in range(0, min(free, VACUUMED) if self.on_disk else free - SPARE, VACUUMED_AT_ONCE):
                # It has a step for each page, of which execute takes the first one;
                # executescript ends the transaction.
                tx.executescript(f"PRAGMA incremental_vacuum({VACUUMED_AT_ONCE}); BEGIN")
                yield

        self.clean(None, work)

    def at_start(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """``work(connection)`` as a transaction in this thread, before there is another."""
        assert self._thread is None
        return self._transaction(work)

    async def close(self, timeout: float = 1.0) -> None:
        """Wait until all that was begun is done, but not longer than ``timeout`` seconds;
        nothing can be begun after that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._lines.end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), timeout)
        else:
            self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin(self, line: str, work: Work[T]) -> asyncio.Future[T]:
        """What ``work`` returns or raises."""
        if self._closed:
            raise StorageFailed("the server is ending; ask again when it is back")
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(loop,), name="state", daemon=True)
            self._thread.start()
        future: asyncio.Future[T] = loop.create_future()
        parts: Generator[None, None, T] | None = None

        def settle(result: T | None, error: BaseException | None) -> None:
            self.begun -= 1
            if future.done():  # whoever asked has gone
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def part(tx: sqlite3.Connection) -> tuple[T | None, bool]:
            """Its result, and whether there is more."""
            nonlocal parts
            if parts is None:
                found = work(tx)
                if not isinstance(found, Generator):
                    return found, False
                parts = found
            try:
                next(parts)
            except StopIteration as end:
                return end.value, False
            return None, True

        def step() -> bool:
            result, failure, more = None, None, False
            try:
                result, more = self._transaction(part)
            except BaseException as error:
                failure = error
            if more and self._closed and line == SERVER:
                return False  # the next start goes on with it
            if not more:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(settle, result, failure)
            return more

        self.begun += 1
        self._lines.put(line, step)
        return future

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lines.serve()
        self._connection.close()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._over.set)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN")
            result = work(connection)
            connection.execute("COMMIT")
            return result
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise StorageFailed(f"the server could not reach its state: {error}") from error
            raise

    # writes that nobody waits for

    def _checked(self, done: asyncio.Future[T]) -> T | None:
        """The result; None for a failure, which is logged and counted."""
        error = done.exception()
        if error is None:
            if self._broken:
                log.info("what clients store can be written again")
            self._broken = False
            return done.result()
        if isinstance(error, SglaError):
            self._fail(error.message)
        else:
            log.error("a write to the state failed", exc_info=error)
            self.failures += 1
        return None

    def _fail(self, why: str) -> None:
        if not self._broken:
            log.error("something could not be stored: %s; a metric counts such failures", why)
        self._broken = True
        self.failures += 1

    def _try_later(self, attempt: Callable[[], None]) -> None:
        if len(self._late) < LATE:  # the next start removes what others leave
            self._late.append(attempt)
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._try_again)
            self._pause = min(2 * self._pause, PAUSES[1])

    def _try_again(self) -> None:
        """One of them: where the disk is still full the others would fail, too."""
        self._timer = None
        self._late.popleft()()

    def _catch_up(self) -> None:
        """A clean-up has succeeded, so others may."""
        self._pause = PAUSES[0]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late, self._late = self._late, deque()
        for attempt in late:
            attempt()

    def _secret(self, name: str) -> bytes:
        """Random bytes that stay the same as long as the database does."""
        query = "SELECT value FROM secrets WHERE name = ?"
        if found := self._connection.execute(query, (name,)).fetchone():
            return bytes(found[0])
        value = secrets.token_bytes(16)
        self.at_start(lambda tx: tx.execute("INSERT INTO secrets VALUES (?, ?)", (name, value)))
        return value


def locked(folder: Path) -> int:
    """The lock of the folder, which is made if it is not there; the process's end unlocks it.
    Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--state-path {folder}: {error.strerror}", param="state_path") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(fd, 20).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"--state-path {folder} is in use by another server, process "
            f"{owner}; end that one, or choose another folder",
            param="state_path",
        ) from error
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def connected(folder: str | None, schema: Iterable[str]) -> sqlite3.Connection:
    """The database with its tables, in ``folder`` or in memory. Raises ConfigError."""
    path = None if folder is None else Path(folder) / NAME
    try:
        if path is not None:
            os.close(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            )  # SQLite would let others read it
        connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        return prepared(connection, path, schema)
    except sqlite3.DatabaseError as error:
        why = damaged(path, str(error))
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            why = f"{path}: the disk is full; make room on it, or choose another folder for --state-path"
        raise ConfigError(why, param="state_path") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="state_path") from error


def prepared(connection: sqlite3.Connection, path: Path | None, schema: Iterable[str]) -> sqlite3.Connection:
    """Checked, or filled if it is new. Raises ConfigError."""

    def value(name: str) -> Any:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]

    new = not value("schema_version")
    if not new and value("application_id") != APPLICATION:
        raise ConfigError(
            f"{path} is no state of sgla; choose another folder for --state-path", param="state_path"
        )
    if not new and (version := value("user_version")) != VERSION:
        raise ConfigError(
            f"{path} has version {version} of the tables, this server knows version {VERSION}; start the "
            "release that made it, or choose another folder for --state-path",
            param="state_path",
        )
    if new:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect before there are tables
    connection.executescript(PRAGMAS)
    if path is not None:
        connection.executescript(WAL)
    if new:
        tables = "\n".join([SECRETS, *schema])
        connection.executescript(
            f"BEGIN; {tables} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    whole = value("page_count") * value("page_size") <= CHECKED
    for what in ("1",) if whole else CENTRAL:
        if (found := value(f"quick_check({what})")) != "ok":
            raise ConfigError(damaged(path, found), param="state_path")
    return connection


def damaged(path: Path | None, why: str) -> str:
    return (
        f"{path} is damaged or out of reach ({why}); put a backup in its place, "
        "or move it away to begin with nothing stored"
    )
