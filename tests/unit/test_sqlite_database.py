"""Opening the file, and connections on threads of their own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from freezepoint.errors import BrokerError, ConfigurationError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite.database import Job, WriteConnection, open_database

SETTINGS = SqliteSettings()


def execute(statement: str) -> Job[None]:
    def job(connection: sqlite3.Connection) -> None:
        connection.execute(statement).close()

    return job


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[WriteConnection]:
    made = WriteConnection(tmp_path / "f.db", SETTINGS)
    await made.run(execute("CREATE TABLE number (value)"))
    yield made
    await made.close()


def add(value: int, *, then: Exception | None = None) -> Job[int]:
    def job(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO number VALUES (?)", (value,))
        if then is not None:
            raise then
        return value

    return job


async def numbers(writer: WriteConnection) -> list[int]:
    return await writer.run(lambda c: [n for (n,) in c.execute("SELECT value FROM number ORDER BY value")])


def test_a_new_file_is_marked_and_synced_before_it_acknowledges(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "f.db", SETTINGS)) as connection:
        pragmas = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version", "journal_mode", "synchronous")
        }
    assert pragmas == {
        "application_id": int.from_bytes(b"frzp", "big"),
        "user_version": 1,
        "journal_mode": "wal",
        "synchronous": 2,
    }


def test_an_empty_file_counts_as_new(tmp_path: Path) -> None:
    path = tmp_path / "f.db"
    path.touch()
    open_database(path, SETTINGS).close()
    open_database(path, SETTINGS).close()


def test_a_file_of_the_first_releases_gets_what_it_lacks_and_they_read_on_in_it(tmp_path: Path) -> None:
    path = tmp_path / "f.db"
    open_database(path, SETTINGS).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE committed DROP COLUMN recorded")
        connection.execute("INSERT INTO committed VALUES (1, 0, 5)")
        connection.commit()
    for _ in range(2):
        with closing(open_database(path, SETTINGS)) as connection:
            assert connection.execute("SELECT * FROM committed").fetchall() == [(1, 0, 5, None)]
            assert connection.execute("PRAGMA user_version").fetchone() == (1,)


def other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")


def newer_layout(path: Path) -> None:
    open_database(path, SETTINGS).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=99")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: path.write_bytes(b"not a database, but long enough to be one" * 100),
            "no freezepoint database",
        ),
        (other_program, "another program's"),
        (newer_layout, "newer freezepoint"),
        (lambda path: path.mkdir(), "is a directory"),
    ],
)
def test_what_is_not_ours_is_refused_and_left_as_it_is(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "f.db"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_database(path, SETTINGS)
    assert "\n" not in str(caught.value)
    assert path.is_dir() or path.read_bytes() == before


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gone does not exist"):
        open_database(tmp_path / "gone" / "f.db", SETTINGS)


def test_memory_cannot_be_shared() -> None:
    with pytest.raises(ConfigurationError, match="name a file"):
        open_database(Path(":memory:"), SETTINGS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="must be writable"):
        open_database(tmp_path / "f.db", SETTINGS)
    tmp_path.chmod(0o700)


async def test_a_job_that_fails_takes_nothing_of_the_others_with_it(writer: WriteConnection) -> None:
    jobs = [add(n, then=ValueError("no") if n % 3 == 0 else None) for n in range(10)]
    outcomes = await asyncio.gather(*map(writer.run, jobs), return_exceptions=True)
    failed = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, ValueError)]
    assert failed == [0, 3, 6, 9]
    assert await numbers(writer) == [1, 2, 4, 5, 7, 8]


async def test_jobs_run_in_the_order_they_were_asked_for(writer: WriteConnection) -> None:
    seen: list[int] = []
    await asyncio.gather(*(writer.run(lambda _, n=n: seen.append(n)) for n in range(600)))  # type: ignore[misc]
    assert seen == list(range(600))


async def test_a_full_disk_is_an_error_of_the_broker_and_leaves_nothing(writer: WriteConnection) -> None:
    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO number VALUES (zeroblob(10000000))")

    await writer.run(execute("PRAGMA max_page_count=100"))
    outcomes = await asyncio.gather(*map(writer.run, (add(1), fill, add(2))), return_exceptions=True)
    assert isinstance(outcomes[1], BrokerError)
    acknowledged = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert await numbers(writer) == acknowledged


async def test_a_cancelled_job_that_has_not_begun_is_skipped_and_one_that_has_is_finished(
    writer: WriteConnection,
) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(connection: sqlite3.Connection) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        connection.execute("INSERT INTO number VALUES (1)")

    running = asyncio.create_task(writer.run(slow))
    await begun.wait()
    waiting = asyncio.create_task(writer.run(add(2)))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.wait([running, waiting])
    gate.set()
    assert await numbers(writer) == [1]


async def test_closing_finishes_what_was_begun_and_refuses_the_rest(tmp_path: Path) -> None:
    writer = WriteConnection(tmp_path / "f.db", SETTINGS)
    await writer.run(execute("CREATE TABLE number (value)"))
    sending = [asyncio.create_task(writer.run(add(n))) for n in range(20)]
    await asyncio.sleep(0)
    await writer.close()
    assert await asyncio.gather(*sending) == list(range(20))
    with pytest.raises(BrokerError, match="closed"):
        await writer.run(add(99))
