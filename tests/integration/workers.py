"""Worker processes and what they publish, for tests: real processes of the real command, over any transport."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.reader import ResultReader
from freezepoint.transport.ports import Transport
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic
from tests.polling import poll_until

COMMAND = [sys.executable, "-m", "freezepoint"]
START_S = 60.0


class WorkerProcess:
    """``freezepoint run`` as a process. Its log is a file, so that a full pipe never stops it."""

    def __init__(self, environment: Mapping[str, str], log: Path, *options: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*COMMAND, "run", *options],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def until_acquired(self, partitions: int = 1) -> None:
        """Wait until it has started work on that many partitions."""
        poll_until(
            lambda: len(self.acquired) >= partitions or self.process.poll() is not None,
            START_S,
            f"a worker acquires {partitions} partitions",
        )
        assert self.process.poll() is None, self.log.read_text()

    @property
    def acquired(self) -> list[int]:
        """The partitions it has told of, in order, as often as it has acquired them."""
        told = [line for line in self.log.read_text().splitlines(keepends=True) if '"acquired"' in line]
        return [number for line in told if line.endswith("\n") for number in json.loads(line)["partitions"]]

    def kill(self) -> None:
        """SIGKILL: no chance to finish anything."""
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout_s)


@contextmanager
def worker(environment: Mapping[str, str], log: Path, *options: str) -> Iterator[WorkerProcess]:
    """A worker process that does not outlive the block."""
    running = WorkerProcess(environment, log, *options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


def run_until_idle(environment: Mapping[str, str], log: Path) -> None:
    """One worker that processes what is there."""
    with worker(environment, log, "--until-idle") as running:
        assert running.wait() == 0, log.read_text()


async def publish(transport: Transport, events: Iterable[InputEvent]) -> None:
    """Publish events in order."""
    await publish_raw(
        transport,
        [
            OutputRecord(Topic.TOKENS, event.rollout_id.encode(), codec.encode_event(event))
            for event in events
        ],
    )


async def publish_raw(transport: Transport, records: Iterable[OutputRecord]) -> None:
    """Publish records as they are."""
    producer = await transport.producer()
    try:
        await producer.send(list(records))
    finally:
        await producer.close()


async def read_results(transport: Transport) -> list[Result]:
    """All committed results."""
    reader = await transport.reader(Topic.TRAJECTORIES)
    try:
        return [read.result async for read in ResultReader(reader).results()]
    finally:
        await reader.close()


async def read_all(transport: Transport, topic: Topic) -> list[InputRecord]:
    """All committed records of a topic."""
    reader = await transport.reader(topic)
    records: list[InputRecord] = []
    try:
        while not await reader.at_end():
            records += await reader.poll(0.5, 1_000)
    finally:
        await reader.close()
    return records


def by_rollout(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Results without their offsets, by rollout id, of which each has one."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        assert result.rollout_id not in found, f"two results of {result.rollout_id}"
        body = codec_body(result)
        for name in ("partition", "first_offset", "freeze_offset"):
            del body["snapshot"][name]
        found[result.rollout_id] = body
    return found


def codec_body(result: Result) -> dict[str, Any]:
    """A result as its plain JSON object: arrays as lists."""
    body: dict[str, Any] = result.model_dump(mode="json", exclude_none=True)
    return body
