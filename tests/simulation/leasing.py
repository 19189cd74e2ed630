"""Leases over the simulated cluster, in the steps of the Kafka adapter: fence, prove, read the ledger, publish."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, FreezepointError, PublishError
from freezepoint.transport.kafka.decisions import Decision
from freezepoint.transport.ports import Poll
from freezepoint.transport.splitting import split_record
from freezepoint_schemas.topics import Topic, partition_for
from tests.simulation.broker import Broker
from tests.simulation.clock import Process
from tests.simulation.groups import SESSION_S, Stored
from tests.simulation.log import Log
from tests.simulation.membership import Delivery, Membership
from tests.simulation.network import TIMEOUT_S as REQUEST_S
from tests.simulation.transactions import TIMEOUT_S

T = TypeVar("T")
LEDGER_STEP = 50
LEDGER_BYTES_MAX = 1_000_000
RETRY_S = 0.05
BRIEFLY_S = 0.3
MARKERS_S = 2.0


class Publisher:
    """The transactional producer of one partition; any doubt is its end."""

    def __init__(self, broker: Broker, process: Process, partition: int, record_bytes_max: int) -> None:
        self.ended = False
        self._broker = broker
        self._process = process
        self._transactional_id = f"tokens.{partition}"
        self._record_bytes_max = record_bytes_max
        self._epoch: int | None = None
        self._turn = asyncio.Lock()
        self._partition_number = partition
        self._connection = broker.network.crashes
        self._last = Decision.FORGOTTEN

    async def start(self) -> None:
        """Fence the predecessor; returns once its transaction is settled."""
        try:
            async with asyncio.timeout(REQUEST_S):
                epoch = await self._init()
        except TimeoutError as error:
            raise BrokerUnavailableError("the producer did not start in time") from error
        self._epoch = None if self.ended else epoch
        if self._epoch is not None:
            await self.mend(self._epoch)

    async def _init(self) -> int:
        transactions, name = self._broker.transactions, self._transactional_id
        while True:
            await self.ask()
            try:
                epoch = await self._request("init", lambda: transactions.initialise(name, self._process.name))
            except BaseException:
                transactions.excuse(name)  # if it was served, what is to be told is forgotten
                raise
            if epoch is not None:
                return int(epoch)
            await asyncio.sleep(RETRY_S)

    async def ask(self) -> None:
        """What became of the last transaction, before each request that may fence its producer."""
        decision = self._broker.transactions.decision
        asked = await self._request("decision", lambda: decision(self._transactional_id))
        if asked is not Decision.FORGOTTEN:
            self._last = asked

    async def mend(self, epoch: int) -> None:
        """Tell the partitions what was decided, where the coordinator has not."""
        commit = self._last is not Decision.ABORT
        ledger = self._broker.log(Topic.LEDGER, self._partition_number)
        if not commit:
            await self.tell(epoch, [ledger], commit=False)
        if await self._is_decided(self._written, BRIEFLY_S):
            return
        await self.tell(epoch, self._written, commit=commit)
        if not await self._is_decided([ledger], REQUEST_S):
            raise PublishError(f"the ledger of {self._partition_number} stays undecided")

    async def tell(self, epoch: int, logs: Sequence[Log], *, commit: bool) -> None:
        """A transaction without a record."""
        transactions, name = self._broker.transactions, self._transactional_id
        try:
            await self._until_answered("add partitions", lambda: transactions.add(name, epoch, logs))
            if await self._until_answered("end", lambda: transactions.end(name, epoch, commit=commit)):
                raise PublishError("it may be ended twice")
        except BaseException:
            transactions.excuse(name)
            raise

    async def _until_answered(self, name: str, serve: Callable[[], Any]) -> int:
        """Ask again as the client does; how often it had to."""
        again = 0
        give_up_at = asyncio.get_running_loop().time() + REQUEST_S
        while True:
            try:
                await self._request(name, serve)
            except BrokerUnavailableError:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                again += 1
                await asyncio.sleep(RETRY_S)
            else:
                return again

    async def _request(self, name: str, serve: Callable[[], Any]) -> Any:
        return await self._broker.network.request(self._process, f"{name} of {self._transactional_id}", serve)

    @property
    def _written(self) -> list[Log]:
        """All that its transactions may write to."""
        outputs = (Topic.TRAJECTORIES, Topic.DEAD_LETTERS)
        return [
            self._broker.log(Topic.LEDGER, self._partition_number),
            *(
                self._broker.log(topic, number)
                for topic in outputs
                for number in range(self._broker.partitions)
            ),
        ]

    async def _is_decided(self, logs: Sequence[Log], within_s: float) -> bool:
        """Whether everything that is stored there now is decided soon."""

        def ends() -> list[tuple[int, int]]:
            for log in logs:
                log.require_leader()
            return [(log.stable, log.end) for log in logs]

        give_up_at = asyncio.get_running_loop().time() + within_s
        found = await self._request("ends", ends)
        stored = [end for _, end in found]
        while any(stable < end for (stable, _), end in zip(found, stored, strict=True)):
            if asyncio.get_running_loop().time() > give_up_at:
                return False
            await asyncio.sleep(RETRY_S)
            found = await self._request("ends", ends)
        return True

    async def require_decided(self) -> None:
        """After a crash: another transaction could decide the one before otherwise than it was decided."""
        if self._connection == self._broker.network.crashes:
            return
        self._connection = self._broker.network.crashes
        if not await self._is_decided(self._written, MARKERS_S):
            raise PublishError(f"the last transaction of {self._transactional_id} is left undecided")

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        if not records:
            return
        self._process.require_alive()
        async with self._turn:
            if self._epoch is None:
                raise PublishError(f"{self._transactional_id} publishes no more: acquire the partition anew")
            parts = [part for record in records for part in split_record(record, self._limit(record.topic))]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self.require_decided()
                    await self.transact(self._epoch, parts)
            except BaseException as error:
                self.discard()
                if isinstance(error, PublishError) or not isinstance(error, (BrokerError, TimeoutError)):
                    raise
                raise PublishError(f"publishing as {self._transactional_id}: {error}") from error

    async def transact(self, epoch: int, parts: Sequence[OutputRecord]) -> None:
        """One transaction: every record acknowledged, and then its end."""
        outcomes = await asyncio.gather(*self.send(epoch, parts), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        await self.end(epoch)

    def send(self, epoch: int, parts: Sequence[OutputRecord]) -> list[asyncio.Task[None]]:
        """One request to each partition, side by side."""
        by_log: defaultdict[Log, list[tuple[int, OutputRecord]]] = defaultdict(list)
        for place, record in enumerate(parts):
            by_log[self._broker.log(record.topic, self._partition(record))].append((place, record))
        return [asyncio.create_task(self._produce(epoch, log, batch)) for log, batch in by_log.items()]

    async def _produce(self, epoch: int, log: Log, batch: Sequence[tuple[int, OutputRecord]]) -> None:
        transactions = self._broker.transactions
        await self._broker.network.request(
            self._process,
            f"produce {len(batch)} to {log.topic} {log.partition} as {self._transactional_id}:{epoch}",
            lambda: transactions.produce(self._transactional_id, epoch, log, batch),
        )

    async def end(self, epoch: int) -> None:
        transactions = self._broker.transactions
        await self._broker.network.request(
            self._process,
            f"commit transaction of {self._transactional_id}:{epoch}",
            lambda: transactions.end(self._transactional_id, epoch),
        )

    def _limit(self, topic: Topic) -> int:
        return LEDGER_BYTES_MAX if topic is Topic.LEDGER else self._record_bytes_max

    def _partition(self, record: OutputRecord) -> int:
        if record.partition is not None:
            return record.partition
        return 0 if record.key is None else partition_for(record.key, self._broker.partitions)

    def discard(self) -> None:
        """Let go of it; whoever starts next settles what it left open."""
        self.ended = True
        self._epoch = None

    async def close(self) -> None:
        async with self._turn:
            self.discard()


@dataclass(slots=True)
class SimLease:
    """See the ``Lease`` port."""

    partition: int
    partition_count: int
    log_start: int
    log_end: int
    committed: int | None
    recorded: int | None
    ledger: Sequence[InputRecord]
    _generation: int
    _publisher: Publisher
    _membership: Membership
    _broker: Broker
    _process: Process
    _delivery: Delivery | None = None

    async def record_at(self, offset: int) -> InputRecord | None:
        log = self._broker.log(Topic.TOKENS, self.partition)
        found = await self._broker.network.request(
            self._process, f"read {self.partition}@{offset}", lambda: log.read(offset, offset + 1, 1)
        )
        return found[0] if found else None

    async def first(self) -> int:
        log = self._broker.log(Topic.TOKENS, self.partition)
        return await self._broker.network.request(
            self._process, f"start of {self.partition}", lambda: log.start
        )

    async def start(self, offset: int) -> None:
        self._membership.require_generation(self.partition, self._generation)
        self._broker.monitor.started(self, offset)
        self._delivery = self._membership.deliver(self.partition, offset)

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        await self._publisher.publish(records)

    async def renew(self, generation: int, offset: int, records: Sequence[OutputRecord]) -> None:
        """A transaction that commits after the new assignment proves that nobody started in between."""
        self._membership.require_generation(self.partition, generation)
        await self._publisher.publish(records)
        self._membership.require_generation(self.partition, generation)
        self._generation = generation
        self._delivery = self._membership.deliver(self.partition, offset)

    async def commit_hint(self, offset: int, recorded: int) -> bool:
        if not self._membership.is_delivered(self._delivery) or self._publisher.ended:
            return False
        try:
            await self._membership.commit(self.partition, Stored(offset, recorded))
        except FreezepointError:
            return False
        return True

    async def caught_up(self) -> bool:
        return self._delivery is not None and await self._membership.caught_up(self._delivery)

    async def end(self) -> int:
        return await self._membership.end_of(self.partition)

    def pause(self) -> None:
        if self._delivery is not None:
            self._delivery.paused = True

    def resume(self) -> None:
        if self._delivery is not None:
            self._membership.resume(self._delivery)

    async def close(self) -> None:
        if self._delivery is not None:
            self._membership.end(self._delivery)
        await self._publisher.close()


class SimMember:
    """See the ``GroupMember`` port."""

    def __init__(self, broker: Broker, process: Process, rng: random.Random, record_bytes_max: int) -> None:
        self.membership = Membership(broker, process, rng)
        self._broker = broker
        self._process = process
        self._record_bytes_max = record_bytes_max
        self._reported = 0

    @property
    def session_timeout_s(self) -> float:
        return SESSION_S

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        """A new generation is reported at once, before any record of it."""
        self._process.require_alive()
        records: dict[int, Sequence[InputRecord]] = {}
        if self.membership.generation == self._reported:
            records = await self.membership.fetch(timeout_s, records_max)
        self._reported = self.membership.generation
        return Poll(self._reported, self.membership.assigned, records)

    async def acquire(self, partition: int) -> SimLease:
        epoch, generation = self.membership.epoch, self.membership.generation
        self.membership.require(partition, epoch)
        publisher = Publisher(self._broker, self._process, partition, self._record_bytes_max)
        try:
            await publisher.start()
            tokens = self._broker.log(Topic.TOKENS, partition)
            log_start = await self._ask(f"start of {partition}", lambda: tokens.start)
            log_end = await self._ask(f"end of {partition}", lambda: tokens.stable)
            stored = await self.prove(partition, epoch, log_start)
            ledger = await self._ledger(partition)
            self.membership.require(partition, epoch)
        except BaseException:
            publisher.discard()
            raise
        return SimLease(
            partition,
            self._broker.partitions,
            log_start,
            log_end,
            stored.offset,
            stored.recorded,
            ledger,
            generation,
            publisher,
            self.membership,
            self._broker,
            self._process,
        )

    async def prove(self, partition: int, epoch: int, log_start: int) -> Stored:
        """The group takes a commit from us, and the assignment is the same after its answer."""
        offsets = self._broker.group.offsets
        stored = await self._ask(f"committed of {partition}", lambda: offsets.get(partition, Stored()))
        await self.membership.commit(
            partition, Stored(log_start, stored.recorded) if stored.offset is None else stored
        )
        self.membership.require(partition, epoch)
        return stored

    async def _ledger(self, partition: int) -> list[InputRecord]:
        """The latest record of each key, read in steps: the log may be compacted in between."""
        log = self._broker.log(Topic.LEDGER, partition)
        end = await self._ask(f"end of ledger {partition}", lambda: log.stable)
        position, latest = 0, dict[bytes | None, InputRecord]()
        while position < end:
            start = position
            records = await self._ask(
                f"read ledger {partition} from {start}",
                lambda: log.read(start, end, LEDGER_STEP),  # noqa: B023
            )
            latest.update((record.key, record) for record in records)
            position = records[-1].offset + 1 if len(records) == LEDGER_STEP else end
        return sorted(latest.values(), key=lambda record: record.offset)

    async def _ask(self, name: str, serve: Callable[[], T]) -> T:
        return await self._broker.network.request(self._process, name, serve)

    async def leave(self) -> None:
        await self.membership.leave()
