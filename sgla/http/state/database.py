"""One SQLite database for all that clients store, in one thread of its own: the loop never waits for a disk.

With ``--state-path`` it is the file ``state.db`` in that folder, in WAL mode with ``synchronous=NORMAL``: what is committed outlives the
process however it ends, and the last commits may be lost where the machine loses its power. Without, it is in memory.

SQLite lets go of Python's lock once a row, and gets it back when the loop is idle: a statement that brings or takes many rows should do so as
one (``group_concat``, ``json_each``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from sgla.errors import ConfigError, SglaError, StorageFailed

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

NAME = "state.db"
APPLICATION = 0x73676C61  # "sgla", so that other databases are not taken for ours
VERSION = 1  # of all tables together; a change of any of them counts it up
BACKLOG_BYTES = 64 << 20  # of writes that nobody waits for
CHECKED = 1 << 30  # bytes of a file that is read to its end at the start, which takes a second or two
CENTRAL = ("objects", "shares", "totals")  # tables of which a larger one is checked
VACUUMED = 4096  # pages of 4 KiB that the file gets smaller by at once
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
    """Raises ConfigError for a ``folder`` that cannot be used: one that another server uses, or whose file is damaged or of another version.

    ``schema``: SQL that makes the tables, run once for each file.
    """

    def __init__(self, folder: str | None, schema: Iterable[str]) -> None:
        self.on_disk = folder is not None
        self.failures = 0  # of writes that nobody waited for
        self._lock = None if folder is None else locked(Path(folder))
        self._connection = connected(folder, schema)
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._taken = self._done = 0  # bytes of writes that queue took, and that the thread is done with
        self._thread: threading.Thread | None = None
        self._closed = False
        self.salt = self._secret("salt")

    async def run(self, work: Work[T]) -> T:
        """``work(connection)`` as one transaction, behind all that was begun before; it holds Python's lock where it is no SQL, so it
        should be short. Raises what ``work`` raises, which undoes it, and StorageFailed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():  # whoever asked has gone
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def step() -> None:
            result, failure = None, None
            try:
                result = self._transaction(work)
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, failure)

        self._begin(step)
        return await future

    def queue(self, work: Work[T], size: int = 0, then: Callable[[T], None] | None = None) -> None:
        """The same for a write of about ``size`` bytes that nobody waits for; ``then`` gets its result on the loop. A failure is logged and
        counted. Raises StorageFailed, and counts that, too, where too much waits for the disk; a write of 0 bytes,
        which cleans up, is always taken."""
        if self._taken - self._done + size > BACKLOG_BYTES:
            self._fail(f"more than {BACKLOG_BYTES >> 20} MiB wait for the disk")
            raise StorageFailed("the disk does not keep up with what is to be stored; retry later")
        self._taken += size
        loop = asyncio.get_running_loop()

        def step() -> None:
            try:
                result = self._transaction(work)
                if then is not None:
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(then, result)
            except SglaError as error:
                self._fail(error.message)
            except Exception:
                log.exception("a write to the state failed")
                self.failures += 1
            finally:
                self._done += size

        self._begin(step)

    def give_back(self) -> None:
        """Let the file shrink by some of what is free in it."""
        self.queue(lambda tx: tx.execute(f"PRAGMA incremental_vacuum({VACUUMED})").fetchall())

    def at_start(self, work: Work[T]) -> T:
        """``work(connection)`` as a transaction in this thread, before there is another."""
        assert self._thread is None
        return self._transaction(work)

    async def close(self, timeout: float = 1.0) -> None:
        """Wait until all that was begun is done, but not longer than ``timeout`` seconds; nothing can be begun after that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()

            def end() -> None:
                self._connection.close()
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(over.set)

            self._works.put(end)
            self._works.put(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), timeout)
        else:
            self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin(self, step: Callable[[], None]) -> None:
        if self._closed:
            raise StorageFailed("the server is ending; ask again when it is back")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="state", daemon=True)
            self._thread.start()
        self._works.put(step)

    def _run(self) -> None:
        while (step := self._works.get()) is not None:
            step()

    def _transaction(self, work: Work[T]) -> T:
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

    def _fail(self, why: str) -> None:
        if not self.failures:
            log.error("something could not be stored: %s; a metric counts such failures", why)
        self.failures += 1

    def _secret(self, name: str) -> bytes:
        """Random bytes that stay the same as long as the database does."""
        query = "SELECT value FROM secrets WHERE name = ?"
        if found := self._connection.execute(query, (name,)).fetchone():
            return bytes(found[0])
        value = secrets.token_bytes(16)
        self.at_start(lambda tx: tx.execute("INSERT INTO secrets VALUES (?, ?)", (name, value)))
        return value


def locked(folder: Path) -> int:
    """The lock of the folder, which is made if it is not there; the process's end unlocks it. Raises ConfigError."""
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
            f"--state-path {folder} is in use by another server, process {owner}; end that one, or choose another folder",
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
        raise ConfigError(damaged(path, str(error)), param="state_path") from error
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
            f"{path} has version {version} of the tables, this server knows version {VERSION}; start the release that made it, "
            "or choose another folder for --state-path",
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
    return f"{path} is damaged or out of reach ({why}); put a backup in its place, or move it away to begin with nothing stored"
