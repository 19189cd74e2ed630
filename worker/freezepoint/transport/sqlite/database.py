"""Opening the file, and two kinds of connection, each on a thread of its own so that the event loop never waits.

Every write is one ``BEGIN IMMEDIATE`` transaction: a blocked writer waits for the lock, and never meets the
``SQLITE_BUSY`` that an upgrade from a read transaction gets at once, past the busy handler.

Checkpoints (moving the write-ahead log into the file) happen only while the write lock is held, never by themselves:
SQLite up to 3.51.2, which most Pythons bring, can lose committed pages when a commit of another connection resets the
log in the middle of a checkpoint (the "WAL-reset bug"). Under the lock there is no such commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from freezepoint.errors import BrokerError, BrokerUnavailableError, ConfigurationError, StorageFullError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite.layout import ADDED, APPLICATION_ID, LAYOUT_VERSION, TABLES

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]

JOBS_MAX = 256
"""Jobs that share one transaction, and so one fsync; more would let the first one wait too long."""

WAL_BYTES_MAX = 8 * 1024 * 1024
"""A write-ahead log above this is moved into the file after the next commit."""

WAL_BYTES_KEPT = 4 * 1024 * 1024
"""What is left of the log at its reset, so that its size tells whether it has grown since."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection was in the way, so that trying again can help."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BUSY


def patiently(action: Callable[[], T], wait_ms_max: int) -> T:
    """The action's result, tried again while the database is busy.

    SQLite's own handler is not asked in every case (switching to WAL, recovery), and its waits grow to 100 ms, which
    starves a process that competes with a steady writer; short random ones share the lock fairly.
    """
    deadline = time.monotonic() + wait_ms_max / 1000
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0003, 0.003))


def broker_error(error: sqlite3.Error, path: Path) -> BrokerError:
    """The error in terms of the ports."""
    if is_busy(error):
        return BrokerUnavailableError(
            f"{path} stayed locked by another process for longer than sqlite.busy_timeout_ms; "
            "find what holds it (lsof), or raise FREEZEPOINT_SQLITE__BUSY_TIMEOUT_MS"
        )
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return StorageFullError(f"{path}: the disk is full; make room there, the work then goes on")
    return BrokerError(f"{path}: {error}")


def open_database(path: Path, settings: SqliteSettings) -> sqlite3.Connection:
    """A connection to the file, which is created where it does not exist; safe among processes that do the same.

    :raises ConfigurationError: the file cannot be there, cannot be written, or is not ours.
    """
    _check_path(path)
    try:
        return patiently(lambda: _connect(path, settings), settings.busy_timeout_ms)
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise
        raise ConfigurationError(
            f"{path} cannot be opened ({error}); set --broker or FREEZEPOINT_BROKER"
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(f"{path} is no freezepoint database ({error}); name another file") from error


def open_for_reading(path: Path, settings: SqliteSettings) -> sqlite3.Connection:
    """A connection to a file that is there, which stays as it is; also where this user may not write.

    :raises ConfigurationError: the file is not there, not ours, or cannot be read as it lies there.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path} does not exist, and reading creates nothing; name a file that was written with --broker or "
            "FREEZEPOINT_BROKER"
        )
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"{path} must be readable by this user")
    try:
        return patiently(lambda: _connect_reading(path, settings), settings.busy_timeout_ms)
    except sqlite3.DatabaseError as error:
        if is_busy(error):
            raise
        raise ConfigurationError(f"{path} cannot be read ({error}); name another file") from error


def _connect_reading(path: Path, settings: SqliteSettings) -> sqlite3.Connection:
    """Where writing is possible the connection shares the log with the writers; where not, it shares a log that is there, and
    without one the file is all there is."""
    if _is_writable(path):
        ways = ["mode=rw"]
    elif _wal_bytes(path):
        ways = ["mode=ro"]
    else:
        ways = ["mode=ro", "mode=ro&immutable=1"]
    for way in ways:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{way}",
            uri=True,
            timeout=settings.busy_timeout_ms / 1000,
            isolation_level=None,
        )
        try:
            with snapshot(connection):
                if _is_new(connection, path):
                    raise ConfigurationError(f"{path} is empty: nothing was written to it yet")
            connection.execute("PRAGMA wal_autocheckpoint=0")
        except sqlite3.OperationalError as error:
            connection.close()
            if is_busy(error):
                raise
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise ConfigurationError(
        f"{path} has a write-ahead log that was never moved into it, and this user may not write there: copy "
        f"{path.name} and {path.name}-wal to a folder of your own and read them there"
    )


def _wal_bytes(path: Path) -> int:
    try:
        return path.with_name(f"{path.name}-wal").stat().st_size
    except OSError:
        return 0


def _is_writable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK | os.X_OK) and os.access(path, os.R_OK | os.W_OK)


def _check_path(path: Path) -> None:
    if path.name == ":memory:":
        raise ConfigurationError("sqlite:///:memory: cannot be shared by processes; name a file")
    if not path.parent.is_dir():
        raise ConfigurationError(f"the directory {path.parent} does not exist; create it, or set --broker")
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a directory; name a file in it, as in sqlite:///{path}/freezepoint.db"
        )
    if not (_is_writable(path) if path.exists() else os.access(path.parent, os.W_OK | os.X_OK)):
        raise ConfigurationError(f"{path} and its directory must be writable by this user")


def _connect(path: Path, settings: SqliteSettings) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=settings.busy_timeout_ms / 1000, isolation_level=None)
    try:
        with snapshot(connection):  # somebody else's file must stay as it is, so nothing is written before
            new = _is_new(connection, path)
        _configure(connection, path, settings)
        if new:
            _create_tables(connection, path)
        elif _missing_columns(connection):
            _add_columns(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_new(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is empty; asked in a transaction, since another process may be creating it.

    :raises ConfigurationError: it is not ours, or newer than we are.
    """
    identity, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if identity == APPLICATION_ID and version > LAYOUT_VERSION:
        raise ConfigurationError(
            f"{path} has layout {version}, written by a newer freezepoint; this one knows {LAYOUT_VERSION}: upgrade it"
        )
    if identity == APPLICATION_ID:
        return False
    if identity or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise ConfigurationError(f"{path} is another program's SQLite database; name another file")
    return True


def _configure(connection: sqlite3.Connection, path: Path, settings: SqliteSettings) -> None:
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise ConfigurationError(
            f"{path} cannot keep a write-ahead log there ({mode}); name a file on a local disk"
        )
    connection.execute(f"PRAGMA synchronous={settings.synchronous}")
    connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
    connection.execute("PRAGMA wal_autocheckpoint=0")


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """All or nothing: the mark that says the file is ours is part of the transaction."""
    with writing(connection):
        if _is_new(connection, path):
            for statement in TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={LAYOUT_VERSION}")


def _missing_columns(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """What a file lacks that an older release made."""
    return [
        (table, column, kind)
        for table, column, kind in ADDED
        if column not in {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
    ]


def _add_columns(connection: sqlite3.Connection) -> None:
    with writing(connection):
        for table, column, kind in _missing_columns(connection):  # another process may have been first
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")


@contextmanager
def writing(connection: sqlite3.Connection, wait_ms_max: int = 0) -> Iterator[None]:
    """One write transaction, committed at the end and rolled back on any error."""
    patiently(lambda: connection.execute("BEGIN IMMEDIATE"), wait_ms_max)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def _roll_back(connection: sqlite3.Connection) -> None:
    # A full disk makes SQLite roll back by itself.
    with contextlib.suppress(sqlite3.Error):
        connection.execute("ROLLBACK")


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """One read transaction: all its queries see the same state."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        _roll_back(connection)


class _OnThread:
    """A connection opened, used and closed on one thread."""

    def __init__(self, path: Path, settings: SqliteSettings, *, only_reading: bool = False) -> None:
        self._path = path
        self._settings = settings
        self._open = open_for_reading if only_reading else open_database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._open(self._path, self._settings)
        return self._connection

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("the transport is closed")

    async def close(self) -> None:
        """Finish what was begun, then release everything."""
        if self._closed:
            return
        self._closed = True
        closing = self._thread.submit(self._close_connection)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ReadConnection(_OnThread):
    """Runs queries, one after the other."""

    async def run(self, job: Job[T]) -> T:
        """The job's result.

        :raises BrokerError: SQLite failed.
        """
        self._check_open()
        try:
            return await asyncio.wrap_future(self._thread.submit(lambda: job(self._opened())))
        except sqlite3.Error as error:
            raise broker_error(error, self._path) from error


class WriteConnection(_OnThread):
    """Runs writing jobs. Those that wait at the same time share a transaction, each in a savepoint of its own.

    A job either happens wholly, durable before it is acknowledged, or not at all, whoever it shared with. One whose
    caller was cancelled is skipped if it had not begun, else finished.
    """

    def __init__(self, path: Path, settings: SqliteSettings) -> None:
        super().__init__(path, settings)
        self._waiting: deque[tuple[Job[Any], Future[Any]]] = deque()
        self._checkpointer: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._draining = False

    async def run(self, job: Job[T]) -> T:
        """The job's result, once it is committed.

        :raises BrokerUnavailableError: others held the write lock longer than the busy timeout.
        :raises BrokerError: SQLite failed; nothing of the job was written, unless the commit itself failed.
        """
        self._check_open()
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((job, future))
            idle, self._draining = not self._draining, True
        if idle:
            self._thread.submit(self._drain)
        try:
            return await asyncio.wrap_future(future)
        except sqlite3.Error as error:
            raise broker_error(error, self._path) from error

    def _drain(self) -> None:
        while batch := self._take_batch():
            for (_, future), outcome in zip(batch, self._commit([job for job, _ in batch]), strict=True):
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            self._checkpoint_when_grown()

    def _checkpoint_when_grown(self) -> None:
        # What fails here fails the next job too, and is reported there; nothing that was acknowledged hangs on it.
        with contextlib.suppress(sqlite3.Error, OSError, ConfigurationError):
            if self._path.with_name(f"{self._path.name}-wal").stat().st_size > WAL_BYTES_MAX:
                if self._checkpointer is None:  # the connection that holds the lock cannot
                    self._checkpointer = open_database(self._path, self._settings)
                with writing(self._opened(), self._settings.busy_timeout_ms):
                    self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _close_connection(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        super()._close_connection()

    def _take_batch(self) -> list[tuple[Job[Any], Future[Any]]]:
        """The jobs for the next transaction; none is the sign that the next :meth:`run` starts a new drain."""
        batch: list[tuple[Job[Any], Future[Any]]] = []
        with self._lock:
            while self._waiting and len(batch) < JOBS_MAX:
                job, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    batch.append((job, future))
            self._draining = bool(batch)
        return batch

    def _commit(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """Each job's result or error, after the transaction that they shared."""
        try:
            connection = self._opened()
            with writing(connection, self._settings.busy_timeout_ms):
                return [_attempt(connection, job) for job in jobs]
        except BaseException as error:  # noqa: BLE001 - it is the callers' to see, not this thread's
            return [error] * len(jobs)

    def _opened(self) -> sqlite3.Connection:
        first = self._connection is None
        connection = super()._opened()
        if first:  # `patiently` waits for the lock instead
            connection.execute("PRAGMA busy_timeout=0")
        return connection


def _attempt(connection: sqlite3.Connection, job: Job[Any]) -> Any:
    """The job's result, or its error with all that it wrote undone."""
    connection.execute("SAVEPOINT job")
    try:
        result = job(connection)
    except Exception as error:
        if not connection.in_transaction:
            raise  # SQLite has rolled back everything, the other jobs' work too
        connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        return error
    connection.execute("RELEASE job")
    return result


__all__ = [
    "Job",
    "ReadConnection",
    "WriteConnection",
    "open_database",
    "open_for_reading",
    "snapshot",
    "writing",
]
