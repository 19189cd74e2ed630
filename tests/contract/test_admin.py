"""Creating and verifying topics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import MissingTopicError
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Extent, Retention
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.contract.driving import Cluster


async def test_apply_creates_all_four_with_their_partitions(cluster: Cluster) -> None:
    admin = (await cluster.with_topics(partitions=3)).admin()
    assert [await admin.partitions(topic) for topic in Topic] == [3, 3, 3, 3]
    findings = await admin.check(cluster.specs(3))
    assert [finding.topic for finding in findings] == list(cluster.names.all().values())
    assert all(finding.ok for finding in findings), findings


async def test_apply_again_changes_nothing(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    findings = await transport.admin().apply(cluster.specs(2))
    assert all(finding.ok for finding in findings), findings
    assert await transport.admin().partitions(Topic.TOKENS) == 2


@pytest.mark.parametrize("asked", [1, 8])
async def test_another_partition_count_is_reported_and_not_applied(cluster: Cluster, asked: int) -> None:
    admin = (await cluster.with_topics(partitions=3)).admin()
    for findings in (await admin.check(cluster.specs(asked)), await admin.apply(cluster.specs(asked))):
        assert not any(finding.ok for finding in findings), findings
        assert all("3" in finding.message and str(asked) in finding.message for finding in findings)
    assert await admin.partitions(Topic.TOKENS) == 3


async def test_a_differing_configuration_is_reported_then_set(cluster: Cluster) -> None:
    admin = (await cluster.with_topics(partitions=1)).admin()
    specs = [replace(spec, config={**spec.config, "retention.ms": "2000000000"}) for spec in cluster.specs(1)]
    assert not any(finding.ok for finding in await admin.check(specs))
    assert all(finding.ok for finding in await admin.apply(specs))
    assert all(finding.ok for finding in await admin.check(specs))


async def test_missing_topics_are_reported_with_the_command_that_creates_them(cluster: Cluster) -> None:
    admin = cluster.transport().admin()
    await admin.apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    findings = await admin.check(cluster.specs(1))
    assert [finding.ok for finding in findings] == [False] * 4
    assert all("freezepoint topics apply" in finding.message for finding in findings)
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await admin.partitions(Topic.LEDGER)


async def test_check_creates_nothing(cluster: Cluster) -> None:
    admin = cluster.transport().admin()
    await admin.apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    await admin.check(cluster.specs(1))
    assert not any(finding.ok for finding in await admin.check(cluster.specs(1)))


async def test_the_retention_is_told(cluster: Cluster) -> None:
    admin = (await cluster.with_topics(partitions=1)).admin()
    day_ms = 24 * 60 * 60 * 1000
    assert await admin.retention(Topic.TOKENS) == Retention(7 * day_ms)
    forever = [replace(spec, config={**spec.config, "retention.ms": "-1"}) for spec in cluster.specs(1)]
    await admin.apply(forever)
    assert await admin.retention(Topic.TOKENS) == Retention()


async def test_extents_are_what_each_partition_has(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    await (await transport.producer()).send(
        [OutputRecord(Topic.TOKENS, b"r", b"{}", partition=1) for _ in range(3)]
    )
    async with connect(cluster.settings()) as broker:
        assert await broker.extents(Topic.TOKENS) == {0: Extent(0, 0), 1: Extent(0, 3)}
        assert (await broker.extents(Topic.LEDGER)).keys() == {0, 1}
