"""The cluster: topics, their coordinators, and what an operator or the cluster itself does to them."""

from __future__ import annotations

import asyncio
import random

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint_schemas.topics import Topic, TopicNames
from tests.simulation.groups import GroupCoordinator
from tests.simulation.log import Log
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
        self.transactions = TransactionCoordinator(rng, self.monitor.committed)
        self.group = GroupCoordinator(partitions)

    def log(self, topic: Topic, partition: int) -> Log:
        return self.logs[topic, partition]

    def tokens(self) -> list[Log]:
        return [self.log(Topic.TOKENS, partition) for partition in range(self.partitions)]

    def append(self, output: OutputRecord, partition: int) -> InputRecord:
        """Outside of any transaction."""
        return self.log(output.topic, partition).append(output, None)

    def commit_offset(self, member_id: str, generation: int, partition: int, offset: int) -> None:
        self.group.commit(member_id, generation, partition, offset)
        self.monitor.offset_committed(partition, offset, self.log(Topic.TOKENS, partition).start)

    def _clock_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self.skew_ms
