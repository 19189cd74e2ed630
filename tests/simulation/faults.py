"""What goes wrong, from the plan: each fault begins at its time, lasts, and heals by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError
from freezepoint_schemas import codec
from freezepoint_schemas.events import CallIntent
from freezepoint_schemas.topics import Topic, partition_for
from tests.simulation.broker import Broker
from tests.simulation.hosts import Host
from tests.simulation.log import TxnState
from tests.simulation.plan import Plan

TEN_YEARS_MS = 315_576_000_000
CRASH_WAIT_S = 20.0
CRASH_LOOK_S = 0.005


@dataclass(slots=True)
class Faults:
    """``lost``: ids by partition of which retention took records that were still needed. ``gaps``: by partition, the first
    offset behind records that it took, perhaps, before anybody had read them."""

    plan: Plan
    broker: Broker
    hosts: list[Host]
    visitors: list[Host]
    new_host: Callable[[], Host]
    rng: random.Random
    lost: dict[int, set[bytes | None]] = field(default_factory=dict)
    gaps: dict[int, int] = field(default_factory=dict)

    async def run(self) -> None:
        now, running = 0.0, []
        for at, name in self.plan.faults:
            await asyncio.sleep(at - now)
            now = at
            fault: Coroutine[Any, Any, None] = getattr(self, f"_{name}")()
            self.broker.network.trace("fault", name)
            running.append(asyncio.create_task(fault))
        for task in running:
            await task

    def _host(self) -> Host | None:
        running = [host for host in self.hosts if host.runs and not host.process.stopped]
        return self.rng.choice(running) if running else None

    async def _for(self, *longest_s: float) -> None:
        await asyncio.sleep(self.rng.random() * self.rng.choice(longest_s))

    async def _kill(self) -> None:
        host = self._host()
        if host is not None:
            await host.kill()
            await self._for(0.1, 5.0, 30.0)
            host.start()

    async def _kill_all(self) -> None:
        killed = [host for host in self.hosts if host.runs and not host.process.stopped]
        for host in killed:
            await host.kill()
        await self._for(1.0, 3 * self.plan.settings.rollout_timeout_s)
        for host in killed:
            host.start()

    async def _stop(self) -> None:
        host = self._host()
        if host is not None:
            await host.sleep(self.rng.random() * self.rng.choice([1.0, 15.0, 40.0, 120.0]))

    async def _shutdown(self) -> None:
        host = self._host()
        if host is not None:
            await host.shut_down()
            await self._for(1.0, 20.0)
            host.start()

    async def _visitor(self) -> None:
        visitor = self.new_host()
        self.visitors.append(visitor)
        visitor.start()
        await self._for(1.0, 5.0, 30.0)
        if visitor.runs:
            await (visitor.kill() if self.rng.random() < 0.5 else visitor.shut_down())

    async def _outage(self) -> None:
        self.broker.network.down = True
        await self._for(1.0, 40.0, 2 * self.plan.settings.rollout_timeout_s)
        self.broker.network.down = False

    async def _crash(self) -> None:
        """At the worst moments there are: a transaction is open, or it is decided and its partitions are not told yet; or at one
        of these and then at the other."""
        moments = [TxnState.COMMITTING, TxnState.OPEN]
        for moment in self.rng.choice([moments, moments[:1], moments[1:]]):
            await self._until_one_is(moment)
            away_s = self.rng.random() * self.rng.choice([2.0, 20.0])
            self.broker.crash(self.rng, away_s)
            await asyncio.sleep(away_s)
            self.broker.network.down = False

    async def _until_one_is(self, state: TxnState) -> None:
        loop, transactions = asyncio.get_running_loop(), self.broker.transactions
        give_up_at = loop.time() + CRASH_WAIT_S
        while state not in transactions.states and loop.time() < give_up_at:
            await asyncio.sleep(CRASH_LOOK_S)

    async def _cut(self) -> None:
        host = self._host()
        if host is not None:
            process = host.process
            self.broker.network.cut.add(process)
            await self._for(1.0, 15.0, 100.0)
            self.broker.network.cut.discard(process)

    async def _loss(self) -> None:
        network = self.broker.network
        network.losing = self.rng.choice(
            ["", "produce", "commit", "commit transaction", "end", "join", "append"]
        )
        network.loss = self.rng.choice([0.02, 0.1, 0.3])
        await self._for(10.0, 60.0)
        network.loss = 0.0

    async def _slowness(self) -> None:
        """Requests cross each other's way."""
        self.broker.network.slowness_s = self.rng.choice([0.2, 1.0, 5.0])
        await self._for(10.0, 60.0)
        self.broker.network.slowness_s = 0.0

    async def _stall(self) -> None:
        """A client that gets no records for a while, although everything else works."""
        host = self._host()
        if host is not None and host.transport is not None and host.transport.member is not None:
            lasts_s = self.rng.random() * self.rng.choice([20.0, 3 * self.plan.settings.rollout_timeout_s])
            membership = host.transport.member.membership
            membership.stalled_until = asyncio.get_running_loop().time() + lasts_s

    async def _offsets_deleted(self) -> None:
        self.broker.group.offsets.clear()

    async def _compaction(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            for partition in range(self.broker.partitions):
                log = self.broker.log(Topic.LEDGER, partition)
                log.compact(self.rng.randint(0, log.end))
            await self._for(20.0)

    async def _clock(self) -> None:
        self.broker.skew_ms = self.rng.choice([-TEN_YEARS_MS, -3_600_000, 0, 3_600_000, TEN_YEARS_MS])

    async def _hanging_transaction(self) -> None:
        """A producer of tokens uses a transaction, and takes its time to end it; or never does."""
        key = f"run.{self.rng.randrange(self.plan.rollouts)}-0"
        partition = partition_for(key.encode(), self.broker.partitions)
        event = CallIntent(rollout_id=key, model_call_id="0-0")
        record = OutputRecord(Topic.TOKENS, key.encode(), codec.encode_event(event))
        name, transactions = f"foreign.{partition}", self.broker.transactions
        epoch = transactions.initialise(name, "foreign")
        while epoch is None:
            await asyncio.sleep(1.0)
            epoch = transactions.initialise(name, "foreign")
        try:
            await transactions.produce(name, epoch, self.broker.log(Topic.TOKENS, partition), [(0, record)])
            await self._for(1.0, 70.0)
            if self.rng.random() < 0.6:
                transactions.end(name, epoch)
        except BrokerError:
            return  # another fault of this kind began, or it took too long

    async def _truncation(self) -> None:
        """Retention takes records, some of them perhaps still needed."""
        partition = self.rng.randrange(self.broker.partitions)
        log = self.broker.log(Topic.TOKENS, partition)
        start = self.rng.randint(log.start, log.stable)
        watermark = self.broker.monitor.watermark(partition)
        progress = self.broker.monitor.progress[partition]
        if progress and start > progress[-1].record.applied_offset + 1:
            self.gaps.setdefault(partition, start)
        if start > watermark:
            needed = {record.key for record in log.read(max(watermark, log.start), start)}
            self.lost.setdefault(partition, set()).update(needed, self._doubtful(partition, start))
        log.truncate(start)

    def _doubtful(self, partition: int, start: int) -> set[bytes]:
        """The open rollouts that the next owner cannot know to be whole: it has not seen all that is gone."""
        return {
            name.encode()
            for name, decision in self.broker.monitor.ledger[partition].items()
            if 0 <= decision.first_offset < start
            and (decision.carried is None or decision.carried.through < start - 1)
        }
