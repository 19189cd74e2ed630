"""Every role works with exactly the rights that deploy/kafka publishes, and with none of them missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from freezepoint.app import run_worker
from freezepoint.consumer import trajectories_from_source
from freezepoint.core.records import OutputRecord
from freezepoint.doctor import examine
from freezepoint.errors import BrokerError, ConfigurationError
from freezepoint.inspection.finding import find_in_broker
from freezepoint.reader import TrajectoryReader
from freezepoint.settings import ReaderSettings, Settings, WorkerSettings
from freezepoint.sink import TokenSink
from freezepoint.source import TokenSource
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.faults import translated
from freezepoint.worker import WorkerSummary
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_all
from tests.integration.secured_kafka import SecuredKafka, alice, eventually
from tests.integration.workers import publish, publish_raw
from tests.rights import Right, grant, granted

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

ALICE = "User:alice"
WORKER = granted("worker", ALICE, PREFIX="", GROUP="", TRANSACTIONS="")
CONVENIENT = "DescribeConfigs"
"""A worker does without it; what it then assumes is in test_kafka_security.py."""


@dataclass(frozen=True, slots=True)
class Place:
    """Topics of a test's own on the secured broker: ``root`` may do everything, as may whoever comes in by
    ``open_bootstrap``; ``settings`` are alice's."""

    root: KafkaTransport
    settings: Settings
    open_bootstrap: str

    def rights(self, role: str) -> list[Right]:
        group = self.settings.reader.group if role == "reader" else self.settings.worker.group
        return granted(role, ALICE, PREFIX=self.settings.topic_prefix, GROUP=group)

    async def seed(self, rollout_id: str = "r") -> None:
        """A rollout, and a record that becomes a dead letter."""
        await publish(self.root, [entry(rollout_id, "c", [1, 2], [3]), complete(rollout_id, reward=1.0)])
        await publish_raw(self.root, [OutputRecord(Topic.TOKENS, b"u", b"{")])


@asynccontextmanager
async def place(secured: SecuredKafka, prefix: str, *, topics: bool = True) -> AsyncIterator[Place]:
    names = TopicNames(f"{prefix}.")
    settings = Settings(
        broker=f"kafka://{secured.by_password}",
        topic_prefix=names.prefix,
        kafka=alice(),
        worker=WorkerSettings(group=f"{prefix}-workers"),
        reader=ReaderSettings(group=f"{prefix}-trainers"),
    )
    async with KafkaTransport(secured.kafka.bootstrap, names, SETTINGS) as root:
        if topics:
            await root.admin().apply(topic_specs(names, 1))
        yield Place(root, settings, secured.kafka.bootstrap)


async def work(at: Place) -> WorkerSummary:
    return await run_worker(at.settings, until_idle=True)


async def work_as_root(at: Place) -> None:
    """So that every topic has records: an empty one can be read without the right to."""
    settings = at.settings.model_copy(update={"broker": f"kafka://{at.open_bootstrap}", "kafka": SETTINGS})
    assert (await run_worker(settings, until_idle=True)).results


async def test_a_worker_needs_no_more_than_is_published(secured: SecuredKafka, unique_prefix: str) -> None:
    async with place(secured, unique_prefix) as at:
        await grant(at.root, at.rights("worker"))
        await at.seed()
        summary = await eventually(lambda: work(at))
        assert (summary.results, summary.dead_letters) == (1, 1)


async def test_the_doctor_finds_the_published_rights_in_order(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with place(secured, unique_prefix) as at:
        await grant(at.root, at.rights("worker"))
        await at.seed()
        await eventually(lambda: work(at))
        checks = [check async for check in examine(at.settings)]
        assert [check for check in checks if check.verdict != "ok"] == []
        assert sum(check.subject.startswith("rights on ") for check in checks) == 5


@pytest.mark.parametrize(
    "missing",
    [index for index, right in enumerate(WORKER) if right.operation != CONVENIENT],
    ids=lambda index: f"{WORKER[index].operation}-{WORKER[index].resource}-{WORKER[index].name}",
)
async def test_a_worker_needs_no_less_and_says_what_is_missing(
    secured: SecuredKafka, unique_prefix: str, missing: int
) -> None:
    async with place(secured, unique_prefix) as at:
        rights = at.rights("worker")
        lacked = rights.pop(missing)
        await grant(at.root, rights)
        await at.seed()
        await work_as_root(at)
        await at.seed("s")
        await refused(lambda: work(at), lacked)


async def refused(attempt: Callable[[], Awaitable[object]], lacked: Right) -> None:
    """The attempt is refused for want of that, once the rights that were granted have reached the authorizer."""
    named = {
        "topic": f"on topic {lacked.name}",
        "group": "READ on the consumer group",
        "transactional_id": "WRITE on the transactional ids",
    }
    pattern = f"grant this user .*{named[lacked.resource]}"
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(ConfigurationError) as caught:
                await attempt()
            try:
                caught.match(pattern)
            except AssertionError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_sink_puts_with_its_rights(secured: SecuredKafka, unique_prefix: str) -> None:
    async with place(secured, unique_prefix) as at:
        await grant(at.root, at.rights("sink"))
        await eventually(lambda: put(at))
        assert len(await read_all(at.root, Topic.TOKENS)) == 2


async def test_a_reader_needs_no_more_than_is_published_and_no_less(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with place(secured, unique_prefix) as at:
        await at.seed()
        await work_as_root(at)
        topic, group = at.rights("reader")
        await refused(lambda: read(at), topic)
        await grant(at.root, [topic])
        await refused(lambda: read(at), group)
        await grant(at.root, [group])
        assert await eventually(lambda: read(at)) == ["r"]


async def put(at: Place) -> None:
    sink = TokenSink(
        broker=at.settings.broker,
        topic_prefix=at.settings.topic_prefix,
        kafka=at.settings.kafka.model_dump(),
    )
    try:
        await sink.put(entry("r", "c", [1, 2], [3]))
        await sink.complete("r", reward=1.0)
    finally:
        await sink.close()


async def read(at: Place) -> list[str]:
    async with TrajectoryReader(settings=at.settings, follow=False) as reader:
        return [trajectory.rollout_id async for trajectory in reader]


async def test_a_source_closes_a_rollout_and_reads_it_back_with_its_rights(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with place(secured, unique_prefix) as at:
        await grant(at.root, at.rights("source"))
        await publish(at.root, [entry("r", "c", [1, 2], [3])])

        async def freeze() -> bool:
            async with TokenSource(
                broker=at.settings.broker,
                topic_prefix=at.settings.topic_prefix,
                kafka=at.settings.kafka.model_dump(),
            ) as source:
                built = await trajectories_from_source("r", source)
            assert "not authorized" not in str(built)
            return bool(built["mask_sample"])

        assert not await eventually(freeze)


async def test_an_admin_applies_the_topics_with_its_rights(secured: SecuredKafka, unique_prefix: str) -> None:
    async with place(secured, unique_prefix, topics=False) as at:
        await grant(at.root, at.rights("admin"))
        specs = topic_specs(at.settings.topics, 2)

        async def apply() -> None:
            async with KafkaTransport(secured.by_password, at.settings.topics, alice()) as hers:
                for finding in await hers.admin().apply(specs):
                    if not finding.ok:
                        raise BrokerError(finding.message)
                await at.root.admin()._set(specs[0].name, {"cleanup.policy": "compact"})
                assert all(finding.ok for finding in await hers.admin().apply(specs))

        await eventually(apply)
        assert all(finding.ok for finding in await at.root.admin().check(specs))


async def test_an_operator_looks_with_its_rights(secured: SecuredKafka, unique_prefix: str) -> None:
    async with place(secured, unique_prefix) as at:
        await at.seed()
        await grant(at.root, at.rights("operator"))

        async def look() -> bool:
            async with KafkaTransport(secured.by_password, at.settings.topics, alice()) as hers:
                for topic in Topic:
                    await read_all(hers, topic)
                assert all(
                    finding.ok for finding in await hers.admin().check(topic_specs(at.settings.topics, 1))
                )
                await group_offsets(hers, at.settings.worker.group)
                return await find_in_broker(at.settings, "r") is not None

        assert await eventually(look)


async def test_a_scaler_sees_the_lag_with_its_rights(secured: SecuredKafka, unique_prefix: str) -> None:
    async with place(secured, unique_prefix) as at:
        await at.seed()
        await grant(at.root, at.rights("scaler"))

        async def look() -> None:
            async with KafkaTransport(secured.by_password, at.settings.topics, alice()) as hers:
                assert await hers.admin().partitions(Topic.TOKENS) == 1
                await group_offsets(hers, at.settings.worker.group)
                with pytest.raises(ConfigurationError, match="grant this user READ"):
                    await read_all(hers, Topic.TOKENS)

        await eventually(look)


async def group_offsets(transport: KafkaTransport, group: str) -> None:
    admin = await transport._cluster.admin()
    with translated(f"reading the offsets of {group}"):
        await admin.list_consumer_group_offsets(group)
