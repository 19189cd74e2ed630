"""What the cluster says about our topics: whether they exist, their partitions, their record limits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import errors as kafka
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.client import CoordinationType
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.structs import TopicPartition

from freezepoint.errors import BrokerError, BrokerUnavailableError, ConfigurationError
from freezepoint.transport.kafka.client import Clients
from freezepoint.transport.kafka.decisions import Decision, TransactionState, decision_in
from freezepoint.transport.kafka.faults import missing_topic, translate, translated
from freezepoint.transport.kafka.identity import TopicIds, id_in
from freezepoint.transport.kafka.versions import Versions, refusal
from freezepoint.transport.ports import Extent
from freezepoint_schemas.topics import Topic, TopicNames

RECORD_BYTES_FALLBACK = 1024 * 1024
"""The limit assumed where the topic's configuration may not be read; an untouched broker takes 1,048,588."""

BATCH_FRAMING_BYTES = 128
LIMIT = "max.message.bytes"
METADATA_RETRY_S = 0.1
READ_UNCOMMITTED, LATEST = 0, -1
COORDINATOR_MOVES = (
    kafka.CoordinatorNotAvailableError,
    kafka.CoordinatorLoadInProgressError,
    kafka.NotCoordinatorError,
)
GONE_S = 0.5
"""How long a topic that was there has to be missing from every answer until it is believed to be gone."""


class Cluster:
    """One admin client and one for offsets, opened on first use, shared by everything the transport makes."""

    def __init__(self, clients: Clients, names: TopicNames) -> None:
        self.clients = clients
        self.names = names
        self._admin: Any = None
        self._consumer: Any = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._limits: dict[Topic, int] = {}
        self._looked_at: set[Topic] = set()
        self._seen: set[str] = set()

    async def admin(self) -> Any:
        async with self._starting:
            self._require_open()
            if self._admin is None:
                admin = self.clients.admin()
                await self.clients.start(admin, "connecting")
                try:
                    await self._refuse_old(admin)
                except BaseException:
                    self.clients.dispose(admin)
                    raise
                self._admin = admin
            return self._admin

    async def _refuse_old(self, admin: Any) -> None:
        """:raises ConfigurationError: the broker lacks what all work needs."""
        node = admin._client.get_random_node()  # noqa: SLF001 - the client keeps what brokers answer to itself
        found = None if node is None else await broker_versions(admin, node)
        why = None if found is None else refusal(found)
        if why is not None:
            raise ConfigurationError(why)

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerError("the transport is closed")

    async def _offsets(self) -> Any:
        """A consumer that never reads. One that does would answer late: a broker works off a connection's requests one by
        one, and a fetch that waits for records holds up those behind it, half a second each."""
        async with self._starting:
            self._require_open()
            if self._consumer is None:
                consumer = self.clients.consumer()
                await self.clients.start(consumer, "connecting")
                self._consumer = consumer
            return self._consumer

    async def close(self) -> None:
        self._closed = True
        made = [client for client in (self._admin, self._consumer) if client is not None]
        self._admin = self._consumer = None
        await asyncio.gather(*(self.clients.close(client) for client in made))

    async def partitions(self, topic: Topic) -> int:
        """How many partitions the topic has now.

        :raises MissingTopicError: it does not exist.
        """
        name = self.names[topic]
        counts = await self.partition_counts([name])
        if name not in counts:
            raise missing_topic(name)
        return counts[name]

    async def partition_counts(self, names: Iterable[str]) -> dict[str, int]:
        """Partitions by topic name; a topic that does not exist is left out.

        Asked by our own request, because the client's lets the broker create what is missing (with one partition),
        wherever auto.create.topics.enable is left at its default.

        Whatever begins anew after a failure comes by here first, so that this is where credentials that are no longer
        taken are told from an outage: the client connects again by itself, for ever, and only logs why it cannot.
        """
        wanted = list(names)
        admin = await self.admin()
        try:
            with translated(f"describing {', '.join(wanted)}"):
                async with asyncio.timeout(self.clients.timeout_s):
                    counts = await self._settled(admin, wanted)
        except asyncio.CancelledError:
            self.clients.silent = True
            raise
        except BrokerError as error:
            self.clients.silent = isinstance(error, BrokerUnavailableError)
            refused = await self.clients.refusal()
            if refused is not None:
                raise refused from error
            raise
        self.clients.silent = False
        self._seen = (self._seen - set(wanted)) | counts.keys()
        return counts

    async def _settled(self, admin: Any, names: list[str]) -> dict[str, int]:
        """What a broker says that knows its cluster, and goes on saying of a topic that was there and is missing."""
        missing_since: float | None = None
        while True:
            response = await admin._send_request(MetadataRequest(names, False))  # noqa: SLF001 - see partition_counts
            counts = counts_in(response)
            if counts is not None:
                if counts.keys() >= self._seen.intersection(names):
                    return counts
                now = asyncio.get_running_loop().time()
                missing_since = missing_since or now
                if now - missing_since >= GONE_S:
                    return counts
            await asyncio.sleep(METADATA_RETRY_S)

    async def topic_id(self, name: str) -> str | None:
        """None if there is no such topic, or the broker is too old to tell."""
        admin = await self.admin()
        with translated(f"describing {name}"):
            async with asyncio.timeout(self.clients.timeout_s):
                try:
                    return id_in(await admin._send_request(TopicIds(name)))  # noqa: SLF001 - see identity
                except kafka.IncompatibleBrokerVersion:
                    return None

    async def starts(self, sources: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset there is, by partition."""
        consumer = await self._offsets()
        with translated(f"reading the first offsets of {_named(sources)}"):
            found = await consumer.beginning_offsets(list(sources))
        return {source: int(found[source]) for source in sources}

    async def ends(self, sources: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The end of what is committed, by partition: the last stable offset, behind which nothing can be read."""
        consumer = await self._offsets()
        with translated(f"reading the end of {_named(sources)}"):
            found = await consumer.end_offsets(list(sources))
        return {source: int(found[source]) for source in sources}

    async def stored_ends(self, sources: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The end of what is stored, decided or not, by partition whose :meth:`ends` were asked, so that the client knows the
        leaders. Asked by our own request, because the client's asks with its own isolation level."""
        client = (await self._offsets())._client  # noqa: SLF001 - as above
        by_leader: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for source in sources:
            leader = client.cluster.leader_for_partition(source)
            by_leader[leader][source.topic].append((source.partition, LATEST))
        found: dict[TopicPartition, int] = {}
        with translated(f"reading the stored end of {_named(sources)}"):
            async with asyncio.timeout(self.clients.timeout_s):
                for leader, asked in by_leader.items():
                    answer = await client.send(
                        leader, OffsetRequest(-1, READ_UNCOMMITTED, list(asked.items()))
                    )
                    found |= _offsets_in(answer)
        return found

    async def decision(self, transactional_id: str) -> Decision:
        """What became of the last transaction of the id; forgotten where the broker is too old to tell."""
        admin = await self.admin()
        client = admin._client  # noqa: SLF001 - the admin client does not ask coordinators of transactions
        with translated(f"asking how {transactional_id} stands"):
            async with asyncio.timeout(self.clients.timeout_s):
                while True:
                    try:
                        node = await client.coordinator_lookup(CoordinationType.TRANSACTION, transactional_id)
                        if await client.ready(node):
                            return decision_in(await client.send(node, TransactionState.of(transactional_id)))
                    except kafka.IncompatibleBrokerVersion:
                        return Decision.FORGOTTEN
                    except COORDINATOR_MOVES:
                        pass
                    await asyncio.sleep(METADATA_RETRY_S)

    async def extents(self, topic: Topic) -> dict[int, Extent]:
        """What there is of each partition.

        :raises MissingTopicError: the topic does not exist.
        """
        name = self.names[topic]
        sources = [TopicPartition(name, partition) for partition in range(await self.partitions(topic))]
        firsts, ends = await self.starts(sources), await self.ends(sources)
        return {source.partition: Extent(firsts[source], ends[source]) for source in sources}

    async def at_time(
        self, sources: Sequence[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int]:
        """The offset of the first record stamped then or later, the end where there is none, by partition."""
        ends = await self.ends(sources)
        consumer = await self._offsets()
        with translated(f"looking up a time in {_named(sources)}"):
            found = await consumer.offsets_for_times(dict.fromkeys(sources, timestamp_ms))
        return {
            source: ends[source] if found[source] is None else int(found[source].offset) for source in sources
        }

    async def prepare(self, topics: Iterable[Topic] = tuple(Topic)) -> None:
        """Make sure that the topics exist and their limits are known. Costs nothing once they are.

        :raises MissingTopicError: one does not exist.
        """
        unknown = [topic for topic in topics if topic not in self._looked_at]
        if not unknown:
            return
        names = [self.names[topic] for topic in unknown]
        counts = await self.partition_counts(names)
        for name in names:
            if name not in counts:
                raise missing_topic(name)
        configs = await self._configs_or_nothing(names)
        for topic, name in zip(unknown, names, strict=True):
            self._limits[topic] = int(configs.get(name, {}).get(LIMIT) or RECORD_BYTES_FALLBACK)
        self._looked_at.update(unknown)

    async def _configs_or_nothing(self, names: list[str]) -> Mapping[str, Mapping[str, str]]:
        """A missing right to read configurations, or a failure to, costs a conservative limit and nothing else."""
        try:
            return await self.configs(names, (LIMIT,))
        except BrokerUnavailableError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, publishing will tell if it matters
            return {}

    def record_bytes_max(self, topic: Topic) -> int:
        """The topic's record limit, as last looked at."""
        return self._limits[topic]

    @property
    def request_bytes_max(self) -> int:
        """What a client must be allowed to send: the largest limit."""
        return max(self._limits.values())

    def batch_bytes(self, wanted: int) -> int:
        """Up to which size records are batched: a batch counts against the limit of its topic as a record does."""
        return min(wanted, min(self._limits.values()) - BATCH_FRAMING_BYTES)

    def forget(self) -> None:
        """Look anew at the next preparation: after a failure a topic may be gone, or its limit lowered. What was known
        stays in use until then, by others too."""
        self._looked_at.clear()

    async def configs(
        self, names: Iterable[str], keys: Iterable[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """Configuration values by topic; topics that do not exist are left out."""
        wanted = None if keys is None else dict.fromkeys(keys, "")
        resources = [ConfigResource(ConfigResourceType.TOPIC, name, wanted) for name in names]
        admin = await self.admin()
        with translated("comparing topic configurations"):
            async with asyncio.timeout(self.clients.timeout_s):
                (response,) = await admin.describe_configs(resources)
        found: dict[str, dict[str, str]] = {}
        for code, _message, _type, name, entries in response.resources:
            error = kafka.for_code(code)
            if error is kafka.NoError:
                found[name] = {entry[0]: entry[1] for entry in entries}
            elif error is not kafka.UnknownTopicOrPartitionError:
                raise translate(error(name), f"comparing the configuration of {name}")
        return found


def counts_in(response: Any) -> dict[str, int] | None:
    """Partitions by the name of each topic that exists. None where the answer says nothing yet: a topic is just being
    created, or the broker, back from an outage, knows of no broker in its cluster, itself included."""
    if not response.brokers:
        return None
    counts: dict[str, int] = {}
    for topic in response.to_object()["topics"]:
        error = kafka.for_code(topic["error_code"])
        if error is kafka.LeaderNotAvailableError:
            return None
        if error is kafka.TopicAuthorizationFailedError:
            raise error(topic["topic"])
        if error is kafka.NoError:
            counts[topic["topic"]] = len(topic["partitions"])
        elif error is not kafka.UnknownTopicOrPartitionError:
            raise error(topic["topic"])
    return counts


def _offsets_in(answer: Any) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, partitions in answer.topics:
        for partition, code, _timestamp, offset in partitions:
            error = kafka.for_code(code)
            if error is not kafka.NoError:
                raise error()
            found[TopicPartition(topic, partition)] = int(offset)
    return found


async def broker_versions(admin: Any, node: int) -> Versions | None:
    """What this broker answers, None where it cannot be reached."""
    connection = await admin._client._get_conn(node)  # noqa: SLF001 - as above: a connection knows, nothing public asks it
    return None if connection is None else dict(connection._versions)  # noqa: SLF001


def _named(sources: Sequence[TopicPartition]) -> str:
    if len(sources) == 1:
        return f"{sources[0].topic}[{sources[0].partition}]"
    return ", ".join(sorted({str(source.topic) for source in sources}))
