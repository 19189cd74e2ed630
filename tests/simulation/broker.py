"""The cluster: topics, their coordinators, and what an operator or the cluster itself does to them."""

from __future__ import annotations

import asyncio
import random

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint_schemas.topics import Topic, TopicNames
from tests.simulation.groups import GroupCoordinator, Stored
from tests.simulation.log import Log, Transaction
from tests.simulation.monitor import Monitor
from tests.simulation.network import Network
from tests.simulation.trace import Trace
from tests.simulation.transactions import TransactionCoordinator

EPOCH_MS = 1_700_000_000_000


class Broker:
    """``skew_ms``: by how much its wall clock is off; nothing may depend on it."""

    def __init__(self, rng: random.Random, partitions: int, trace: Trace) -> None:
        self.partitions = partitions
        self.names = TopicNames()
        self.network = Network(rng, trace)
        self.skew_ms = 0
        self._loop = asyncio.get_running_loop()
        self.monitor = Monitor(self._loop.time)
        self.logs = {
            (topic, partition): Log(topic, partition, self._clock_ms, self._loop.time)
            for topic in Topic
            for partition in range(partitions)
        }
        written = [log for log in self.logs.values() if log.topic is not Topic.TOKENS]
        self.transactions = TransactionCoordinator(rng, self._committed, self._contradicted, written)
        self.group = GroupCoordinator(partitions)

    def log(self, topic: Topic, partition: int) -> Log:
        return self.logs[topic, partition]

    def tokens(self) -> list[Log]:
        return [self.log(Topic.TOKENS, partition) for partition in range(self.partitions)]

    def append(self, output: OutputRecord, partition: int) -> InputRecord:
        """Outside of any transaction."""
        return self.log(output.topic, partition).append(output, None)

    def commit_offset(self, member_id: str, generation: int, partition: int, stored: Stored) -> None:
        self.group.commit(member_id, generation, partition, stored)
        if self.group.owns(member_id, partition):
            self.monitor.proved(member_id.rpartition("-")[0], partition)
        self.monitor.offset_committed(partition, stored, self.log(Topic.TOKENS, partition).start)

    def _committed(self, transaction: Transaction) -> None:
        if not transaction.transactional_id.startswith("foreign."):
            process, at = self.transactions.begun[transaction.transactional_id, transaction.epoch]
            self.monitor.committed(transaction, process, at)

    def _contradicted(self, transaction: Transaction, log: Log) -> None:
        decided, name = "committed" if transaction.commits else "aborted", transaction.transactional_id
        self.monitor.violated(
            f"{log.topic} {log.partition} is told the opposite of what {name} had {decided}"
        )

    def crash(self, rng: random.Random, away_s: float) -> None:
        """Everything that is connected is cut off; what workers write to comes back partition by partition."""
        self.network.down = True
        self.network.crashes += 1
        self.transactions.crashes += 1
        for log in self.logs.values():
            if log.topic is not Topic.TOKENS:
                log.leader_at = self._loop.time() + away_s + rng.choice([0.0, 0.5, 5.0]) * rng.random()

    def _clock_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self.skew_ms
