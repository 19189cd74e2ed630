"""Worker processes and who looks after them: killed, frozen and restarted as an orchestrator's would be."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from tests.polling import poll_until_async

COMMAND = [sys.executable, "-m", "freezepoint", "run"]
READY_S = 120.0
STOP_S = 90.0
SUPERVISION_S = 0.1
RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class LogLine:
    """One of a worker's log lines, ``at`` in seconds of the wall clock."""

    worker: str
    at: float
    event: str
    fields: Mapping[str, Any]

    @property
    def partitions(self) -> list[int]:
        """What a line tells of that is told for several at once."""
        found: list[int] = self.fields["partitions"]
        return found


@dataclass(slots=True)
class WorkerProcess:
    """``freezepoint run`` as a process. Its log is a file, so that a full pipe never stops it."""

    name: str
    environment: Mapping[str, str]
    log: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] = field(init=False)
    _read_bytes: int = 0
    _lines: list[LogLine] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *self.options],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, event: str | None = None) -> list[LogLine]:
        """Its log lines so far, or those of one event."""
        with self.log.open("rb") as file:
            file.seek(self._read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read_bytes += len(whole) + 1
            self._lines += [line for raw in whole.splitlines() if (line := self._parse(raw)) is not None]
        return [line for line in self._lines if event in (None, line.event)]

    def _parse(self, raw: bytes) -> LogLine | None:
        try:
            fields = orjson.loads(raw)
            return LogLine(
                self.name, datetime.fromisoformat(fields["timestamp"]).timestamp(), fields["event"], fields
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return None

    def send(self, how: signal.Signals) -> None:
        if self.exit_code is None:
            self.process.send_signal(how)

    def kill(self) -> None:
        """SIGKILL, also of a stopped one."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def peak_rss_mb(self) -> float:
        """The most memory it has held, as long as it runs."""
        return int(self._status("VmHWM")) / 1024

    async def until_it_can_be_stopped(self) -> None:
        """Wait until it answers SIGTERM in its own way: one that is just starting is ended by it, having begun nothing."""

        async def catches_it() -> bool:
            return self.exit_code is not None or bool(
                int(self._status("SigCgt"), 16) & 1 << (signal.SIGTERM - 1)
            )

        await poll_until_async(catches_it, READY_S, f"{self.name} has started")

    def _status(self, name: str) -> str:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
        return line.split()[1]


class Fleet:
    """The workers of one scenario. What ends by itself is started again, unless it ended as it should: ``restarts``
    counts that, ``exit_codes`` says how it ended. No process outlives the block."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = dict(environment)
        self._folder = folder
        self._started = 0
        self._watched: set[str] = set()
        self.workers: dict[str, WorkerProcess] = {}
        self.past: list[WorkerProcess] = []
        self.exit_codes: list[int] = []
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def restarts(self) -> int:
        return len(self.exit_codes)

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self.workers.values())

    def start(
        self, name: str, *options: str, environment: Mapping[str, str] | None = None, supervised: bool = True
    ) -> WorkerProcess:
        """Start a worker of that name, also anew; its name is its client id."""
        before = self.workers.pop(name, None)
        if before is not None:
            self.past.append(before)
        self._started += 1
        own = {
            **self._environment,
            "FREEZEPOINT_KAFKA__CLIENT_ID": name,
            **(environment or (before.environment if before else {})),
        }
        log = self._folder / f"{self._started:03}-{name}.log"
        made = self.workers[name] = WorkerProcess(name, own, log, options)
        if supervised:
            self._watched.add(name)
        return made

    def start_many(self, count: int) -> None:
        for number in range(count):
            self.start(f"worker-{number}")

    def kill(self, name: str) -> float:
        """kill -9, and nobody starts it again; when."""
        self._watched.discard(name)
        self.workers[name].kill()
        return time.time()

    async def stop(self, name: str) -> int:
        """SIGTERM; its exit code."""
        self._watched.discard(name)
        running = self.workers[name]
        running.send(signal.SIGCONT)
        await running.until_it_can_be_stopped()
        running.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.to_thread(running.process.wait, STOP_S), STOP_S + 5)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not stop within {STOP_S:g} s:\n{running.text}") from None

    async def stop_all(self) -> list[int]:
        """SIGTERM to all of them, one after the other, as a deployment is scaled down."""
        return [
            await self.stop(name) for name, running in list(self.workers.items()) if running.exit_code is None
        ]

    async def until_acquired(self, partitions: int, timeout_s: float = READY_S) -> None:
        """Wait until the running workers have, together, acquired so many partitions."""

        async def acquired() -> bool:
            found = {
                number for running in self for line in running.lines("acquired") for number in line.partitions
            }
            return len(found) >= partitions

        await poll_until_async(acquired, timeout_s, f"{partitions} partitions are acquired")

    async def until_owner(self, name: str, partitions: int, timeout_s: float = READY_S) -> float:
        """Wait until this worker has acquired so many partitions; when the last one was."""
        running = self.workers[name]

        async def acquired() -> bool:
            assert running.exit_code is None, f"{name} ended: {running.text}"
            found = {number for line in running.lines("acquired") for number in line.partitions}
            return len(found) >= partitions

        await poll_until_async(acquired, timeout_s, f"{name} acquires {partitions} partitions")
        return max(line.at for line in running.lines("acquired"))

    async def until_acquired_since(
        self, partitions: Collection[int], since: float, timeout_s: float = READY_S
    ) -> float:
        """Wait until each of these partitions was acquired after that moment; when the last one was."""

        async def acquired() -> dict[int, float] | None:
            first: dict[int, float] = {}
            for line in self.lines("acquired"):
                if line.at >= since:
                    for number in line.partitions:
                        first.setdefault(number, line.at)
            return first if first.keys() >= set(partitions) else None

        found = await poll_until_async(acquired, timeout_s, f"partitions {sorted(partitions)} are taken over")
        assert found is not None
        return max((found[partition] for partition in partitions), default=since)

    async def until_exit(self, name: str, timeout_s: float = READY_S) -> int:
        """Its exit code, once it has ended by itself."""
        running = self.workers[name]

        async def ended() -> bool:
            return running.exit_code is not None

        await poll_until_async(ended, timeout_s, f"{name} ends by itself; its log: {running.log}")
        return running.process.wait()

    def lines(self, event: str | None = None) -> list[LogLine]:
        """Log lines of all workers there ever were, in the order of time."""
        found = [line for running in (*self.past, *self) for line in running.lines(event)]
        return sorted(found, key=lambda line: line.at)

    async def _supervise(self) -> None:
        while True:
            for name in sorted(self._watched):
                code = self.workers[name].exit_code
                if code is not None:
                    self.exit_codes.append(code)
                    await asyncio.sleep(RESTART_PAUSE_S)
                    if name in self._watched:
                        self.start(name, *self.workers[name].options)
            await asyncio.sleep(SUPERVISION_S)

    async def __aenter__(self) -> Self:
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._supervisor is not None
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        for running in self:
            running.kill()
