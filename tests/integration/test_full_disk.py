"""A full disk under the embedded transport: said once, and waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from freezepoint.errors import StorageFullError
from freezepoint.settings import SqliteSettings, WorkerSettings
from freezepoint.transport.sqlite.transport import SqliteTransport
from freezepoint.worker import Worker
from freezepoint_schemas.topics import Topic, TopicNames
from tests.events import complete, entry
from tests.integration.workers import publish, read_all
from tests.polling import poll_until_async

PARTITIONS = 16
SETTINGS = SqliteSettings(partitions=PARTITIONS)
NO_LIMIT = 1 << 30


async def allow(transport: SqliteTransport, pages: int) -> None:
    """A limit below the file's size is its size: as a disk on which nothing is left."""
    await transport._writer.run(lambda connection: connection.execute(f"PRAGMA max_page_count={pages}"))


async def test_a_full_disk_is_told_in_one_line_and_work_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path, names, stop = tmp_path / "full.db", TopicNames(""), asyncio.Event()
    calls = [entry(f"r{number}", "c", [number] * 2_000, [1]) for number in range(4 * PARTITIONS)]
    async with (
        SqliteTransport(path, names, SETTINGS) as others,
        SqliteTransport(path, names, SETTINGS) as own,
    ):
        worker = Worker(own, WorkerSettings(spool_folder=tmp_path))
        with capture_logs() as lines:
            working = asyncio.create_task(worker.run(stop))

            async def settled() -> bool:
                return worker.session is not None and worker.session.settled

            await poll_until_async(settled, 30, "all partitions are at work")
            await allow(own, 1)
            await publish(others, [*calls, *(complete(call.rollout_id) for call in calls)])

            async def said() -> bool:
                return any(line["event"] == "waiting_for_broker" for line in lines)

            await poll_until_async(said, 30, "it is told")
            assert {line["event"] for line in lines if line["log_level"] == "warning"} == {
                "waiting_for_broker"
            }
            assert all("full.db: the disk is full" in line["error"] for line in lines if "error" in line)
            with pytest.raises(StorageFullError):
                await publish(own, calls)
            await allow(own, NO_LIMIT)

            async def published() -> bool:
                return len(await read_all(others, Topic.TRAJECTORIES)) == len(calls)

            await poll_until_async(published, 30, "every result")
            stop.set()
            await working
        assert not [line for line in lines if line["event"] in ("lease_lost", "acquire_failed")]
