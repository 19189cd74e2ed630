"""Two worker processes against one, on the same prefilled SQLite file."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from freezepoint.core.records import OutputRecord
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint.transport.sqlite.log import require_topic, streams_of
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.topics import Topic, TopicNames
from tests.benchmarks.measuring import Figure, Row
from tests.benchmarks.rollouts import Shape, by_reference, rollout
from tests.integration.workers import WorkerProcess

PARTITIONS = 8
CALLS = 20
ROUND_S_MAX = 120.0
LOOK_S = 0.01


def scaling_rows(rounds: int, *, quick: bool) -> list[Row]:
    rollouts = 80 if quick else 3_000
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "prefilled.db"
        asyncio.run(_prefill(source, rollouts))
        rates: dict[int, list[float]] = {1: [], 2: []}
        for number in range(rounds + 1):
            for workers, found in rates.items():
                rate = _rate(source, Path(folder) / f"{number}-{workers}", workers, rollouts)
                if number:
                    found.append(rate)
    gains = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    notes = [
        f"{name} {Figure.of(rates[count]).median * CALLS:,.0f} records/s"
        for count, name in ((1, "one"), (2, "two"))
    ]
    return [
        Row("workers", "two workers, prefilled SQLite, 1 KB records", "one worker", Figure.of(gains), 1.7,
            at_least=True, note=", ".join(notes)),
    ]  # fmt: skip


async def _prefill(path: Path, rollouts: int) -> None:
    """One rollout after the other, so that results come from the beginning on."""
    async with SqliteTransport(path, TopicNames(), SqliteSettings(partitions=PARTITIONS)) as transport:
        producer = await transport.producer()
        for start in range(0, rollouts, 50):
            await producer.send(list(_records(range(start, min(start + 50, rollouts)))))


def _records(numbers: range) -> Iterator[OutputRecord]:
    for number in numbers:
        key = f"r{number}".encode()
        for value in VALUES:
            body = value.replace(b'"rollout_id":"standard"', b'"rollout_id":"' + key + b'"')
            yield OutputRecord(Topic.TOKENS, key, body)
        end = RolloutComplete(rollout_id=key.decode(), n_calls=CALLS)
        yield OutputRecord(Topic.TOKENS, key, codec.encode_event(end))


VALUES = by_reference(list(rollout(Shape(CALLS, 40, 20, 20))))


def _rate(source: Path, folder: Path, workers: int, rollouts: int) -> float:
    """Rollouts a second, from when all partitions are shared out until the last result is committed."""
    folder.mkdir()
    path = shutil.copy(source, folder / "work.db")
    environment = {"FREEZEPOINT_BROKER": f"sqlite:///{path}"}
    with ExitStack() as stack, closing(sqlite3.connect(path)) as connection:
        running = [WorkerProcess(environment, folder / f"worker{number}.log") for number in range(workers)]
        for worker in running:
            stack.callback(worker.kill)
        for worker in running:
            worker.until_acquired(PARTITIONS // workers)
        began, before = time.perf_counter(), _results(connection)
        deadline = began + ROUND_S_MAX
        while (found := _results(connection)) < rollouts:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{found} of {rollouts} results after {ROUND_S_MAX:g} s")
            time.sleep(LOOK_S)
        elapsed = time.perf_counter() - began
    shutil.rmtree(folder)
    return (rollouts - before) / elapsed


def _results(connection: sqlite3.Connection) -> int:
    topic = require_topic(connection, TopicNames()[Topic.TRAJECTORIES])
    return sum(stream.next_offset for stream in streams_of(connection, topic))
