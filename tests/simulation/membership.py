"""A member's client: it joins, keeps its session alive in the background, and reads what was started."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, OwnershipLostError
from freezepoint_schemas.topics import Topic
from tests.simulation.broker import Broker
from tests.simulation.clock import Process
from tests.simulation.groups import IllegalGenerationError, Stored, UnknownMemberError
from tests.simulation.log import Log
from tests.simulation.network import TIMEOUT_S

HEARTBEAT_S = 3.0
SILENT_S = 60.0
RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class Delivery:
    """A started partition; it ends with its generation."""

    partition: int
    next_offset: int
    paused: bool = False


class Membership:
    """Believes in its assignment until it hears otherwise, as a client does: a zombie never knows.

    ``generation`` counts assignments here, ``epoch`` also their ends. ``stalled_until``: the client gets no records
    before that time, although everything else works.
    """

    def __init__(self, broker: Broker, process: Process, rng: random.Random) -> None:
        self.generation = 0
        self.epoch = 0
        self.assigned: frozenset[int] = frozenset()
        self.rebalancing = True
        self.left = False
        self.stalled_until = 0.0
        self._broker = broker
        self._process = process
        self._rng = rng
        self._deliveries: dict[int, Delivery] = {}
        self._group_generation = -1
        self._lives = 0
        self._wake = asyncio.Event()
        self._watched: set[Log] = set()
        self._heard_at = self._now()
        self._coordination = asyncio.create_task(self._coordinate())

    @property
    def member_id(self) -> str:
        return f"{self._process.name}-{self._lives}"

    # ------------------------------------------------------------------------------------------------ the group

    async def _coordinate(self) -> None:
        while True:
            try:
                if self.rebalancing:
                    await self._join()
                await asyncio.sleep(HEARTBEAT_S)
                if not await self._heartbeat():
                    self._revoke()
            except UnknownMemberError:
                self._lives += 1
                self._revoke()
            except BrokerUnavailableError:
                await asyncio.sleep(RETRY_S)

    async def _heartbeat(self) -> bool:
        group, member_id, generation = self._broker.group, self.member_id, self._group_generation
        return await self._broker.network.request(
            self._process, f"heartbeat {member_id}", lambda: group.heartbeat(member_id, generation)
        )

    def _revoke(self) -> None:
        self.epoch += 1
        self.rebalancing = True

    async def _join(self) -> None:
        group, member_id = self._broker.group, self.member_id
        given = await self._broker.network.request(
            self._process, f"join {member_id}", lambda: group.join(member_id)
        )
        self.epoch += 1
        self.generation += 1
        self.rebalancing = False
        self.assigned = given.partitions
        self._group_generation = given.generation
        self._deliveries.clear()
        self._wake.set()

    def require(self, partition: int, epoch: int | None = None) -> None:
        """:raises OwnershipLostError: not ours, or no longer in that epoch."""
        if self.rebalancing or partition not in self.assigned or (epoch is not None and epoch != self.epoch):
            raise OwnershipLostError(f"partition {partition} is not assigned here any more")

    def require_generation(self, partition: int, generation: int) -> None:
        """:raises OwnershipLostError: a newer assignment came, or one without the partition."""
        if generation != self.generation or partition not in self.assigned:
            raise OwnershipLostError(f"the assignment that gave partition {partition} has passed")

    async def commit(self, partition: int, stored: Stored) -> None:
        """As whatever generation this client is in by then: a refused commit may be repeated after a rejoin.

        :raises OwnershipLostError: refused.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        await self._commit_once(partition, stored)
                    except (UnknownMemberError, IllegalGenerationError) as error:
                        if self._rng.random() < 0.3:
                            raise OwnershipLostError("the group has moved on") from error
                        await self._rejoined()
                    else:
                        return
        except TimeoutError:
            raise BrokerUnavailableError("no answer to a commit in time") from None

    async def _commit_once(self, partition: int, stored: Stored) -> None:
        broker, member_id, generation = self._broker, self.member_id, self._group_generation
        await broker.network.request(
            self._process,
            f"commit {partition}@{stored.offset} of generation {generation}",
            lambda: broker.commit_offset(member_id, generation, partition, stored),
        )

    async def _rejoined(self) -> None:
        before = self._group_generation
        while self.rebalancing or self._group_generation == before:
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        if self.left:
            return
        self.left = True
        self.epoch += 1
        self.assigned, self.rebalancing = frozenset(), True
        self._deliveries.clear()
        self._coordination.cancel()
        await asyncio.wait({self._coordination})
        group, member_id = self._broker.group, self.member_id
        try:
            await self._broker.network.request(
                self._process, f"leave {member_id}", lambda: group.leave(member_id), timeout_s=5.0
            )
        except BrokerError:
            return  # its session times out

    # --------------------------------------------------------------------------------------------------- reading

    async def fetch(self, timeout_s: float, records_max: int) -> dict[int, Sequence[InputRecord]]:
        """Records of started partitions, or nothing at the timeout or on a new assignment.

        :raises BrokerError: left, out of range, or nothing heard from the broker for long.
        """
        if self.left:
            raise BrokerError("this member has left the group")
        if self._coordination.done():
            self._coordination.result()
        generation, deadline = self.generation, self._now() + timeout_s
        while self.generation == generation:
            self._wake.clear()
            if self._broker.network.reaches(self._process):
                self._heard_at = self._now()
                await asyncio.sleep(self._broker.network.latency_s())
                records = self._take(records_max) if self.generation == generation else {}
                if records:
                    return records
            elif self._now() - self._heard_at > SILENT_S:
                self._heard_at = self._now()
                raise BrokerUnavailableError(f"no answer from the broker for {SILENT_S:g} s")
            left_s = deadline - self._now()
            if left_s <= 0:
                break
            await self._woken(min(left_s, RETRY_S if self._hindered else left_s))
        return {}

    @property
    def _hindered(self) -> bool:
        return not self._broker.network.reaches(self._process) or self._now() < self.stalled_until

    async def _woken(self, timeout_s: float) -> None:
        for partition in self._deliveries:
            self._watch(self._broker.log(Topic.TOKENS, partition))
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _watch(self, log: Log) -> None:
        def grown() -> None:
            self._watched.discard(log)
            self._wake.set()

        if log not in self._watched:
            self._watched.add(log)
            log.waiters.append(grown)

    def _take(self, records_max: int) -> dict[int, Sequence[InputRecord]]:
        """Some records of some partitions, as fetch answers have come in."""
        taken: dict[int, Sequence[InputRecord]] = {}
        if self._now() < self.stalled_until:
            return taken
        deliveries = [delivery for delivery in self._deliveries.values() if not delivery.paused]
        self._rng.shuffle(deliveries)
        for delivery in deliveries:
            log = self._broker.log(Topic.TOKENS, delivery.partition)
            if delivery.next_offset < log.start:
                raise BrokerError(
                    f"offset {delivery.next_offset} of partition {log.partition} is out of range"
                )
            records = log.read(delivery.next_offset, log.end, self._rng.randint(1, records_max))
            if records and records_max:
                records_max -= len(records)
                delivery.next_offset = records[-1].offset + 1
                taken[delivery.partition] = records
            if records_max <= 0:
                break
        return taken

    def deliver(self, partition: int, offset: int) -> Delivery:
        delivery = self._deliveries[partition] = Delivery(partition, offset)
        self._wake.set()
        return delivery

    def is_delivered(self, delivery: Delivery | None) -> bool:
        return delivery is not None and self._deliveries.get(delivery.partition) is delivery

    def resume(self, delivery: Delivery) -> None:
        delivery.paused = False
        self._wake.set()

    def end(self, delivery: Delivery) -> None:
        if self.is_delivered(delivery):
            del self._deliveries[delivery.partition]

    async def end_of(self, partition: int) -> int:
        log = self._broker.log(Topic.TOKENS, partition)
        return await self._broker.network.request(self._process, f"end of {partition}", lambda: log.stable)

    async def caught_up(self, delivery: Delivery) -> bool:
        log = self._broker.log(Topic.TOKENS, delivery.partition)
        end = await self._broker.network.request(self._process, f"end of {log.partition}", lambda: log.stable)
        return self.is_delivered(delivery) and not log.read(delivery.next_offset, end, 1)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
