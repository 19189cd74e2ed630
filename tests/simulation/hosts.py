"""Machines that run workers: started, stopped, killed, started again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import cast

from freezepoint.errors import BrokerError
from freezepoint.transport.ports import Transport
from freezepoint.worker import Worker
from tests.simulation.broker import Broker
from tests.simulation.client import SimTransport
from tests.simulation.clock import Killed, Process, VirtualLoop
from tests.simulation.executor import SlowExecutor
from tests.simulation.plan import Plan

DEATH_S = 30.0
LEAVE_S = 15.0
"""How much longer than ``worker.shutdown_timeout_s`` a worker may take to leave, whatever has become of the broker."""


class Host:
    """Runs one worker at a time, each in a process of its own."""

    def __init__(self, name: str, plan: Plan, broker: Broker, rng: random.Random, spool: Path) -> None:
        self.name = name
        self.processes: list[Process] = []
        self._plan = plan
        self._broker = broker
        self._rng = rng
        self._settings = plan.settings.model_copy(update={"spool_folder": spool})
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.transport: SimTransport | None = None

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def runs(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start a worker, unless one runs."""
        if self.runs:
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.processes.append(Process(loop, f"{self.name}.{len(self.processes)}"))
        self._stop = asyncio.Event()
        self.transport = SimTransport(self._broker, self.process, self._rng, self._plan.output_bytes_max)
        self._broker.network.trace(self.process.name, "starts")
        self._task = self.process.start(self._work(self.transport, self._stop))

    async def _work(self, transport: SimTransport, stop: asyncio.Event) -> None:
        executor = SlowExecutor(self._rng, self._plan.build_delay_s)
        # What a worker needs of a transport; subscriptions are a trainer's.
        worker = Worker(cast("Transport", transport), self._settings, executor=executor)
        try:
            await worker.run(stop)
        except (Killed, asyncio.CancelledError):
            if transport.process.alive:
                self._broker.monitor.violated(f"{transport.process.name} was cancelled by itself")
        except Exception as error:  # noqa: BLE001 - nothing here is a reason to stop
            blame = "gave up on the broker" if isinstance(error, BrokerError) else "died"
            self._broker.monitor.violated(f"{transport.process.name} {blame}: {error!r}")

    async def kill(self) -> None:
        """SIGKILL, between two steps that are not foreseeable."""
        process, task = self.process, self._task
        assert task is not None

        def die() -> None:
            self._broker.network.trace(process.name, "is killed")
            process.kill()

        process.after_steps(self._rng.randrange(150), die)
        await asyncio.wait({task}, timeout=DEATH_S)
        if not task.done():
            die()
            await asyncio.wait({task})

    async def sleep(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        process = self.process

        def stop() -> None:
            self._broker.network.trace(process.name, "is stopped")
            process.stop()

        process.after_steps(self._rng.randrange(150), stop)
        await asyncio.sleep(seconds)
        if process.stopped:
            self._broker.network.trace(process.name, "wakes up")
            process.wake()
        else:
            process.after_steps(-1, process.wake)

    async def shut_down(self) -> None:
        """SIGTERM; a supervisor kills what does not end in time."""
        process, task = self.process, self._task
        assert task is not None
        self._broker.network.trace(process.name, "is asked to end")
        self._stop.set()
        limit_s = self._plan.settings.shutdown_timeout_s + LEAVE_S
        await asyncio.wait({task}, timeout=limit_s)
        if process is self.process and self.runs and not self.process.stopped:
            self._broker.monitor.violated(f"{self.process.name} did not end within {limit_s:g} s")
            await self.kill()

    def leftovers(self) -> list[str]:
        """What a process left behind that ended by itself."""
        return [
            f"{process.name} left {task!r} behind"
            for process in self.processes
            if process.alive
            for task in process.tasks
            if not task.done()
        ] + [
            f"nobody looked at {error!r} in {process.name}"
            for process in self.processes
            if process.alive
            for error in process.unseen_failures()
        ]
