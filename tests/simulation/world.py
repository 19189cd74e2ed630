"""One seed: a cluster, workers and producers; faults; and when all has settled, the judgement."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

import freezepoint.core.carry
import freezepoint.runner
from freezepoint_schemas.topics import Topic
from tests.simulation.broker import Broker
from tests.simulation.checker import Checker
from tests.simulation.client import SimTransport
from tests.simulation.clock import PROCESS, Process, SimulationStuck, VirtualLoop
from tests.simulation.faults import Faults
from tests.simulation.hosts import Host
from tests.simulation.network import LATE_S
from tests.simulation.plan import Plan
from tests.simulation.publishing import RECORD_BYTES_MAX, Publishing
from tests.simulation.trace import Trace
from tests.simulation.transactions import TIMEOUT_S
from tests.simulation.workload import Workload

SETTLE_S = 600.0
LOOK_S = 5.0
CHUNK_BYTES = 700


@dataclass(frozen=True, slots=True)
class Outcome:
    """``digest``: of the trace; equal for equal seeds. ``virtual_s``: how long it took in there."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    virtual_s: float
    records: int
    results: int
    letters: int
    faults: tuple[str, ...]


def run_seed(seed: int, show: Callable[[str], None] | None = None) -> Outcome:
    """Simulate one seed. ``show``: where the trace goes, line by line."""
    plan = Plan.draw(seed)
    loop = VirtualLoop()
    trace = Trace(loop.time, show)
    with (
        tempfile.TemporaryDirectory(prefix="simulation-") as spool,
        _logging_to(trace),
        _in_small(plan),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            world = loop.run_until_complete(_made(plan, trace, Path(spool)))
            _run(loop, world.run(), world)
            _run(loop, world.end(), world)
        finally:
            loop.close()
    violations = [*world.violations, *loop.problems, *(str(warning.message) for warning in caught)]
    monitor = world.broker.monitor
    return Outcome(
        seed=seed,
        violations=tuple(violations),
        digest=trace.digest,
        virtual_s=loop.time(),
        records=sum(log.end for log in world.broker.tokens()),
        results=sum(map(len, monitor.results.values())),
        letters=sum(map(len, monitor.letters.values())),
        faults=tuple(name for _, name in plan.faults),
    )


async def _made(plan: Plan, trace: Trace, spool: Path) -> World:
    return World(plan, trace, spool)


def _run(loop: VirtualLoop, work: Coroutine[Any, Any, None], world: World) -> None:
    try:
        loop.run_until_complete(work)
    except SimulationStuck as stuck:
        world.violations.append(str(stuck))


class World:
    """See the module."""

    def __init__(self, plan: Plan, trace: Trace, spool: Path) -> None:
        self.plan = plan
        self.broker = Broker(random.Random(f"broker {plan.seed}"), plan.partitions, trace)
        self.violations: list[str] = []
        self._trace = trace
        self._spool = spool
        self._visitors: list[Host] = []
        self._hosts = [self._host(f"worker{number}") for number in range(plan.workers)]
        rng = random.Random(f"faults {plan.seed}")
        self._faults = Faults(plan, self.broker, self._hosts, self._visitors, self._visitor, rng)

    def _host(self, name: str) -> Host:
        rng = random.Random(f"{name} {self.plan.seed}")
        return Host(name, self.plan, self.broker, rng, self._spool)

    def _visitor(self) -> Host:
        return self._host(f"visitor{len(self._visitors)}")

    async def run(self) -> None:
        for host in self._hosts:
            host.start()
        publishing = Publishing([self._producer(number) for number in range(self.plan.producers)])
        workload = Workload(self.plan, publishing, random.Random(f"workload {self.plan.seed}"))
        await asyncio.gather(workload.run(), self._faults.run())
        await publishing.close()
        self.broker.network.trace("world", "faults are over")
        await asyncio.sleep(LATE_S)  # a repeated append may still be on its way
        await self._settle()
        await asyncio.gather(*(host.shut_down() for host in self._hosts if host.runs))
        if self.broker.transactions.open:
            await asyncio.sleep(2 * TIMEOUT_S)  # what a loss left open ends by its timeout
        checker = Checker(self.plan, self.broker, self._faults.lost, self._faults.gaps, self._trace.timeouts)
        self.violations += [*self.broker.monitor.violations, *checker.check()]
        for host in (*self._hosts, *self._visitors):
            self.violations += host.leftovers()

    def _producer(self, number: int) -> SimTransport:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        rng = random.Random(f"producer {number} {self.plan.seed}")
        return SimTransport(self.broker, Process(loop, f"producer{number}"), rng, RECORD_BYTES_MAX)

    async def _settle(self) -> None:
        """Until every partition is worked up to its end: open rollouts time out on the way."""
        left_s = SETTLE_S + 2 * self.plan.settings.rollout_timeout_s
        while not all(self._is_settled(partition) for partition in range(self.plan.partitions)):
            if left_s < 0:
                self.violations.append("a partition is stuck")
                return
            left_s -= LOOK_S
            await asyncio.sleep(LOOK_S)

    def _is_settled(self, partition: int) -> bool:
        log = self.broker.log(Topic.TOKENS, partition)
        records = log.read(log.start, log.end)
        progress = self.broker.monitor.progress[partition]
        if not records or log.is_open:
            return not log.is_open
        is_open = any(
            decision.first_offset >= 0 for decision in self.broker.monitor.ledger[partition].values()
        )
        return bool(progress) and progress[-1].record.watermark == records[-1].offset + 1 and not is_open

    async def end(self) -> None:
        """Kill what still lives, so that nothing of this world is left in the next one."""
        for host in (*self._hosts, *self._visitors):
            for process in host.processes:
                process.kill()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(100.0)


@contextmanager
def _logging_to(trace: Trace) -> Iterator[None]:
    """The workers' log lines as part of the trace."""

    def record(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        process = PROCESS.get(None)
        if process is not None and process.alive:
            name = event.pop("event")
            trace(process.name, f"log {name} {sorted(event.items())}")
            if name == "rollout_timed_out":
                trace.timeouts.append((trace.now(), event["partition"], event["rollout_id"]))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[record], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _in_small(plan: Plan) -> Iterator[None]:
    """Constants of the worker for runs as small as these. A feed yields after every record, as if it took long, since
    virtual time does not pass in it; what is carried takes several chunks."""
    runner, carry = freezepoint.runner, freezepoint.core.carry
    before = runner.YIELD_AFTER_S, carry.CHUNK_BYTES
    runner.YIELD_AFTER_S = -1.0 if plan.slow_feed else before[0]
    carry.CHUNK_BYTES = CHUNK_BYTES
    try:
        yield
    finally:
        runner.YIELD_AFTER_S, carry.CHUNK_BYTES = before
        gc.collect(0)
