"""Several processes on one file, killed at any moment: what was acknowledged stays, and nothing stays half done."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas.topics import Topic, TopicNames
from tests.contract.driving import read_all, token

PROGRAMS = Path(__file__).with_name("sqlite_programs.py")
WAIT_S = 60.0


class Program:
    """A running program and the lines it has said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[str] = []

    async def until_said(self, count: int) -> None:
        while len(self.said) < count:
            async with asyncio.timeout(WAIT_S):
                line = await self._stdout.readline()
            assert line, f"ended with {self._process.returncode} after {len(self.said)} lines"
            self.said.append(line.decode().strip())

    async def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    async def kill(self) -> None:
        """With -9, and take what it said until then."""
        if self._process.returncode is None:
            self._process.kill()
        rest, _ = await self._process.communicate()
        self.said += [line for line in rest.decode().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout


@asynccontextmanager
async def running(name: str, *arguments: str) -> AsyncIterator[Program]:
    program = Program(
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAMS),
            name,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    )
    try:
        yield program
    finally:
        await program.kill()


async def contents(path: Path, topic: Topic) -> list[InputRecord]:
    async with SqliteTransport(path, TopicNames(), SqliteSettings()) as transport:
        return await read_all(transport, topic)


def assert_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def assert_contiguous(records: list[InputRecord]) -> None:
    """Offsets of each partition count up from 0 without a gap."""
    expected: Counter[int] = Counter()
    for record in records:
        assert record.offset == expected[record.partition]
        expected[record.partition] += 1


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_and_no_batch_is_half_there_when_writers_are_killed(
    tmp_path: Path,
) -> None:
    path, chance = tmp_path / "f.db", random.Random(1)
    acknowledged: dict[str, int] = {}
    for round_number in range(3):
        async with AsyncExitStack() as stack:
            names = [f"{round_number}-{index}" for index in range(4)]
            programs = [await stack.enter_async_context(running("write", str(path), name)) for name in names]
            await asyncio.gather(*(program.until_said(20) for program in programs))
            for name, program in zip(names, programs, strict=True):
                await program.until_said(len(program.said) + chance.randrange(1, 60))
                await program.kill()
                acknowledged[name] = len(program.said)
    records = await contents(path, Topic.TOKENS)
    assert_sound(path)
    assert_contiguous(records)
    batches = Counter(record.key.rpartition(b".")[0].decode() for record in records if record.key)
    assert len({record.key for record in records}) == len(records)
    for name, count in acknowledged.items():
        written = [batch for batch in batches if batch.startswith(f"{name}.")]
        assert count <= len(written) <= count + 1, "more than the one batch that was under way"
    for batch, size in batches.items():
        assert size == int(batch.rpartition(".")[2]) % 7 + 1, f"batch {batch} is half there"


@pytest.mark.slow
async def test_publications_of_killed_owners_are_whole_or_absent_and_each_once(tmp_path: Path) -> None:
    path, chance = tmp_path / "f.db", random.Random(2)
    said: list[str] = []
    for _ in range(4):
        async with running("publish", str(path), "0") as program:
            await program.until_said(chance.randrange(1, 80))
            await program.kill()
            said += [line.strip() for line in program.said]
    assert_sound(path)
    keys = {
        topic: sorted(record.key or b"" for record in await contents(path, topic))
        for topic in (Topic.TRAJECTORIES, Topic.LEDGER, Topic.DEAD_LETTERS)
    }
    assert keys[Topic.TRAJECTORIES] == keys[Topic.LEDGER] == keys[Topic.DEAD_LETTERS]
    assert len(set(keys[Topic.LEDGER])) == len(keys[Topic.LEDGER])
    assert {f"0.{number}".encode() for number in said} <= set(keys[Topic.LEDGER])


@pytest.mark.slow
async def test_many_processes_may_create_the_same_file_at_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        programs = [await stack.enter_async_context(running("create")) for _ in range(8)]
        await asyncio.gather(*(program.until_said(1) for program in programs))
        for number in range(10):
            path = tmp_path / f"{number}.db"
            await asyncio.gather(*(program.tell(str(path)) for program in programs))
            await asyncio.gather(*(program.until_said(number + 2) for program in programs))
            records = await contents(path, Topic.TOKENS)
            assert_contiguous(records)
            assert len(records) == 8
            assert_sound(path)


async def test_a_lock_held_too_long_is_reported_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "f.db"
    async with SqliteTransport(path, TopicNames(), SqliteSettings(busy_timeout_ms=200)) as transport:
        producer = await transport.producer()
        with closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(BrokerUnavailableError, match="BUSY_TIMEOUT_MS"):
                await producer.send([token(b"r", b"1")])
            holder.execute("ROLLBACK")
        await producer.send([token(b"r", b"2")])
        assert [record.value for record in await read_all(transport, Topic.TOKENS)] == [b"2"]


async def test_a_lock_held_for_a_while_only_delays(tmp_path: Path) -> None:
    path = tmp_path / "f.db"
    async with SqliteTransport(path, TopicNames(), SqliteSettings()) as transport:
        producer = await transport.producer()
        with closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            sending = asyncio.create_task(producer.send([token(b"r", b"1")]))
            done, _ = await asyncio.wait([sending], timeout=0.3)
            assert not done
            holder.execute("ROLLBACK")
        await sending
