"""The group's consumer: which partitions are ours in which generation, and the records of those that were started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import errors as kafka
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, OwnershipLostError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate, translated
from freezepoint.transport.kafka.scan import input_record

POLL_SLACK_S = 0.05
"""How much longer than asked a poll waits for the client to say by itself that there is nothing."""

UNREAD_OFFSET = 0
"""Position of a partition that is not started: it is paused there. Without a position the client would go for the
committed offset, and raise NoOffsetForPartition where there is none."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One partition being delivered. It ends with its generation: a new one is made at every start."""

    partition: int
    next_offset: int
    """The offset after the last record that was taken from the client."""
    paused: bool = False
    held: list[InputRecord] = field(default_factory=list)
    """Taken from the client, but not handed out: the partition was paused in between."""
    in_hand: int = 0
    """Records taken from the client and not handed out yet, the held ones among them."""


class Intake:
    """One consumer of the group and what it has been assigned.

    ``generation`` counts assignments. ``epoch`` also counts their ends, so that it tells whether a proof of ownership
    began and ended in one and the same assignment.
    """

    def __init__(self, cluster: Cluster, group: str, topic: str) -> None:
        self.generation = 0
        self.epoch = 0
        self.assigned: frozenset[int] = frozenset()
        self.rebalancing = True
        self._cluster = cluster
        self._clients = cluster.clients
        self._topic = topic
        self._group = group
        self._consumer: Any = None
        self._deliveries: dict[int, Delivery] = {}
        self._fetching: asyncio.Task[list[tuple[Delivery, list[InputRecord]]]] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._signs: Any = None
        self._silent_s = 0.0
        self._left = False

    async def open(self) -> None:
        """Join. Subscribing after the start keeps ``start`` from waiting for a first assignment, which other members
        may delay."""
        consumer = self._clients.consumer(self._group)
        await self._clients.start(consumer, f"joining group {self._group}")
        self._consumer = consumer
        consumer.subscribe([self._topic], listener=_Listener(self))

    # ------------------------------------------------------------------------------------------------- rebalancing

    def on_revoked(self) -> None:
        self.epoch += 1
        self.rebalancing = True

    def on_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.epoch += 1
        self.generation += 1
        self.rebalancing = False
        self.assigned = frozenset(partition.partition for partition in assigned)
        self._deliveries.clear()
        self._silent_s = 0.0
        for partition in assigned:
            self._consumer.pause(partition)
            self._consumer.seek(partition, UNREAD_OFFSET)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # --------------------------------------------------------------------------------------------------- delivering

    async def fetch(self, timeout_s: float, records_max: int) -> dict[int, Sequence[InputRecord]]:
        """Records of started partitions; early and without any on a new assignment.

        One ``getmany`` runs in a task that outlives the poll which began it: the client waits in it without any limit
        while the group rebalances, and cancelling it would spoil the client's notion of who still polls.
        """
        self._raise_if_dead()
        released = self._release()
        if released:
            return released
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._take(timeout_s, records_max))
        self._changed = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        waited: set[asyncio.Future[Any]] = {self._fetching, self._changed}
        await asyncio.wait(waited, timeout=timeout_s + POLL_SLACK_S, return_when=asyncio.FIRST_COMPLETED)
        records = self._hand_out() if self._fetching.done() else {}
        self._watch(time.monotonic() - began)
        return records

    async def _take(self, timeout_s: float, records_max: int) -> list[tuple[Delivery, list[InputRecord]]]:
        timeout_ms = max(0, int(timeout_s * 1000))
        batches = await self._consumer.getmany(timeout_ms=timeout_ms, max_records=records_max)
        # Nothing awaits from where the client moved its positions to here, so that no assignment comes in between.
        taken = []
        for source, messages in batches.items():
            delivery = self._deliveries.get(source.partition)
            if delivery is None:
                continue  # the client was quicker than the listener that pauses a partition just assigned
            records = [
                input_record(message) for message in messages if message.offset >= delivery.next_offset
            ]
            delivery.next_offset = messages[-1].offset + 1
            delivery.in_hand += len(records)
            taken.append((delivery, records))
            self._let_others_first(source)
        return taken

    def _let_others_first(self, source: TopicPartition) -> None:
        """The client would drain one partition to the end of what it has fetched, megabytes, before it looks at the next."""
        fetched = self._consumer._fetcher._records  # noqa: SLF001 - an ordered dict, drained from its front
        if source in fetched:
            fetched.move_to_end(source)

    def _hand_out(self) -> dict[int, Sequence[InputRecord]]:
        """What the finished task took, of partitions still delivered as they were then."""
        assert self._fetching is not None
        task, self._fetching = self._fetching, None
        try:
            taken = task.result()
        except CLIENT_ERRORS as error:
            self._rewind()
            if self._harmless(error):
                return {}
            raise translate(error, f"reading {self._topic} as group {self._group}") from error
        records: dict[int, Sequence[InputRecord]] = {}
        for delivery, batch in taken:
            if self._deliveries.get(delivery.partition) is not delivery:
                continue
            if delivery.paused:
                delivery.held.extend(batch)
            elif batch:
                delivery.in_hand -= len(batch)
                records[delivery.partition] = batch
        return records

    def _release(self) -> dict[int, Sequence[InputRecord]]:
        """What was held back of partitions that go on by now."""
        released: dict[int, Sequence[InputRecord]] = {}
        for delivery in self._deliveries.values():
            if delivery.held and not delivery.paused:
                released[delivery.partition], delivery.held = delivery.held, []
                delivery.in_hand = 0
        return released

    def _rewind(self) -> None:
        """Read again from what was taken: an error of one partition makes the client drop what it had already drained of
        others, with their positions moved on."""
        for delivery in self._deliveries.values():
            if self.is_delivered(delivery):
                self._consumer.seek(TopicPartition(self._topic, delivery.partition), delivery.next_offset)

    def _harmless(self, error: BaseException) -> bool:
        """Whether it only concerns partitions that are not started, whose position means nothing."""
        if isinstance(error, kafka.NoOffsetForPartitionError):
            return True
        if (
            isinstance(error, kafka.OffsetOutOfRangeError)
            and error.args
            and isinstance(error.args[0], Mapping)
        ):
            return all(partition.partition not in self._deliveries for partition in error.args[0])
        return False

    # --------------------------------------------------------------------------------------------- signs of life

    def _raise_if_dead(self) -> None:
        """The client reports the death of its coordination task, but not of the one that fetches."""
        if self._left:
            raise BrokerError(f"this member has left the group {self._group}")
        fetching = self._consumer._fetcher.error_future  # noqa: SLF001 - see above
        if fetching.done():
            reason = "" if fetching.cancelled() else f": {fetching.exception()}"
            raise BrokerError(f"the client stopped fetching from {self._topic}{reason}")

    def _watch(self, elapsed_s: float) -> None:
        """End a membership that hears nothing from the broker: the client retries for ever, and may be stuck for good
        after a broker restart. Every fetch is answered within half a second, if only with nothing."""
        reading = [delivery for delivery in self._deliveries.values() if not delivery.paused]
        signs = [
            (delivery.partition, delivery.next_offset, self._last_fetch(delivery.partition))
            for delivery in reading
        ]
        if signs != self._signs or not (reading or self.rebalancing):
            self._signs, self._silent_s = signs, 0.0
            return
        self._silent_s += elapsed_s
        limit_s = 2 * self._clients.timeout_s
        if self._silent_s > limit_s:
            self._silent_s = 0.0
            raise BrokerUnavailableError(
                f"no answer from the broker for {limit_s:g} s while "
                + ("the group rebalances" if self.rebalancing else f"reading {self._topic}")
                + ": restart this process if the broker is up again"
            )

    def _last_fetch(self, partition: int) -> Any:
        source = TopicPartition(self._topic, partition)
        return self._consumer.last_poll_timestamp(source) if source in self._consumer.assignment() else None

    # ----------------------------------------------------------------------------------------- for leases

    def require(self, partition: int, epoch: int | None = None) -> None:
        """:raises OwnershipLostError: not ours, or no longer in that epoch."""
        lost = epoch is not None and epoch != self.epoch
        if lost or self.rebalancing or partition not in self.assigned:
            raise OwnershipLostError(f"{self._topic}[{partition}] is not assigned here any more")

    def require_generation(self, partition: int, generation: int) -> None:
        """:raises OwnershipLostError: a newer assignment came, or one that has not got the partition."""
        if generation != self.generation or partition not in self.assigned:
            raise OwnershipLostError(f"the assignment that gave {self._topic}[{partition}] has passed")

    def deliver(self, partition: int, offset: int) -> Delivery:
        """Begin to deliver from that offset on.

        :raises OwnershipLostError: the client has just taken another assignment.
        """
        source = TopicPartition(self._topic, partition)
        delivery = Delivery(partition, offset)
        if source not in self._consumer.assignment():
            raise OwnershipLostError(f"{self._topic}[{partition}] is being assigned anew")
        self._consumer.seek(source, offset)
        self._consumer.resume(source)
        self._deliveries[partition] = delivery
        return delivery

    def is_delivered(self, delivery: Delivery | None) -> bool:
        """Also by the client's own assignment, which changes a moment before its listener is called."""
        return (
            delivery is not None
            and self._deliveries.get(delivery.partition) is delivery
            and TopicPartition(self._topic, delivery.partition) in self._consumer.assignment()
        )

    def pause(self, delivery: Delivery) -> None:
        """The client forgets what it had fetched ahead of a paused partition, and fetches it again later."""
        if not delivery.paused and self.is_delivered(delivery):
            delivery.paused = True
            self._consumer.pause(TopicPartition(self._topic, delivery.partition))

    def resume(self, delivery: Delivery) -> None:
        if delivery.paused and self.is_delivered(delivery):
            delivery.paused = False
            self._consumer.resume(TopicPartition(self._topic, delivery.partition))

    def end_delivery(self, delivery: Delivery) -> None:
        if self.is_delivered(delivery):
            self.pause(delivery)
            del self._deliveries[delivery.partition]

    async def commit(self, offsets: Mapping[int, int], text: str = "") -> None:
        """Commit offsets by partition as the client's current generation, whichever that is by the time the broker
        answers; the coordinator keeps the text beside them.

        :raises OwnershipLostError: the group does not count us as the owner.
        """
        named = ", ".join(f"{self._topic}[{partition}]" for partition in offsets)
        doing = f"committing {named} for group {self._group}"
        try:
            async with asyncio.timeout(self._clients.timeout_s):
                await self._consumer.commit(
                    {
                        TopicPartition(self._topic, partition): (offset, text)
                        for partition, offset in offsets.items()
                    }
                )
        except (kafka.CommitFailedError, kafka.IllegalStateError) as error:
            raise OwnershipLostError(f"the group has moved on while {doing}") from error
        except CLIENT_ERRORS as error:
            raise translate(error, doing) from error

    async def committed(self, partition: int) -> int | None:
        return (await self.stored(partition))[0]

    async def stored(self, partition: int) -> tuple[int | None, str]:
        """The group's offset, and the text that was committed with it."""
        source = TopicPartition(self._topic, partition)
        with translated(
            f"reading the committed offset of {self._topic}[{partition}] for group {self._group}"
        ):
            async with asyncio.timeout(self._clients.timeout_s):
                coordinator = self._consumer._coordinator  # noqa: SLF001 - the client's own `committed` drops the text
                found = (await coordinator.fetch_committed_offsets([source])).get(source)
        return (None, "") if found is None else (int(found.offset), found.metadata or "")

    async def caught_up(self, delivery: Delivery) -> bool:
        """Whether everything committed now was handed out. The end is the last stable offset: behind a transaction that
        stays open nothing can be read, and nothing counts as committed."""
        source = TopicPartition(self._topic, delivery.partition)
        ends = await self._cluster.ends([source])
        if not self.is_delivered(delivery) or delivery.in_hand:
            return False
        with translated(f"reading {self._topic}[{delivery.partition}]"):
            return int(await self._consumer.position(source)) >= ends[source]

    async def close(self) -> None:
        """Leave the group, so that its partitions move at once and not at the session's timeout."""
        self.epoch += 1
        self.assigned, self.rebalancing = frozenset(), True
        self._deliveries.clear()
        if self._consumer is None:
            return
        self._left = True
        await self._clients.close(self._consumer)
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})
            if not self._fetching.cancelled():
                self._fetching.exception()
            self._fetching = None


@ConsumerRebalanceListener.register
class _Listener:
    """Never waits: a rebalance lasts until every listener has returned, and a slow one makes it start over."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def on_partitions_revoked(self, _revoked: Collection[TopicPartition]) -> None:
        self._intake.on_revoked()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._intake.on_assigned(assigned)
