"""Topics created, compared and mended, against a real broker."""

from dataclasses import replace

import pytest
from aiokafka.admin import NewPartitions

from freezepoint.errors import MissingTopicError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.ports import Retention, TopicFinding
from freezepoint_schemas.topics import Topic, TopicSpec, topic_specs
from tests.events import entry
from tests.integration.kafka_kit import config, recreate, set_config, transport
from tests.integration.shell import Shell
from tests.integration.workers import publish
from tests.polling import poll_until_async

DAY_MS = 24 * 60 * 60 * 1000


def specs(made: KafkaTransport, partitions: int = 2) -> list[TopicSpec]:
    return topic_specs(made.names, partitions)


def wrong(findings: list[TopicFinding]) -> list[str]:
    """What is not as it should be: the topic's name without its prefix, and the message."""
    assert all("\n" not in finding.message for finding in findings)
    return [
        f"{finding.topic.partition('rollout-')[2]}: {finding.message}"
        for finding in findings
        if not finding.ok
    ]


async def test_applying_creates_what_is_missing_and_then_changes_nothing(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=0) as made:
        admin = made.admin()
        missing = wrong(await admin.check(specs(made)))
        assert len(missing) == 4
        assert all(message.endswith("does not exist: freezepoint topics apply") for message in missing)
        with pytest.raises(MissingTopicError):
            await admin.partitions(Topic.TOKENS)

        created = await admin.apply(specs(made))
        assert [finding.ok for finding in created] == [True] * 4
        assert all("created with 2 partitions" in finding.message for finding in created)
        for findings in (await admin.check(specs(made)), await admin.apply(specs(made))):
            assert len(findings) == 4
            assert all(finding.ok and "configured as needed" in finding.message for finding in findings)
        assert await admin.partitions(Topic.TOKENS) == 2
        assert (await config(made, Topic.TOKENS))["message.timestamp.type"] == "LogAppendTime"


async def test_what_differs_is_named_with_its_reason_and_mended_alone(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        await set_config(
            made,
            Topic.TOKENS,
            {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime", "segment.ms": "3600000"},
        )
        await set_config(
            made, Topic.LEDGER, {"retention.bytes": "1000000", "cleanup.policy": "delete,compact"}
        )
        found = wrong(await made.admin().check(specs(made)))
        mend = "freezepoint topics apply"
        assert [message.removesuffix(f": {mend}") for message in found] == [
            "tokens: cleanup.policy is compact, needs delete (compaction would destroy rollouts: all their records share a key)",
            "tokens: message.timestamp.type is CreateTime, needs LogAppendTime (idle time is counted by the broker's clock)",
            "ledger: retention.bytes is 1000000, needs -1 (size must not shorten it below the tokens' own)",
        ]
        assert all(message.endswith(mend) for message in found)
        applied = await made.admin().apply(specs(made))
        assert all(finding.ok for finding in applied)
        assert wrong(await made.admin().check(specs(made))) == []
        tokens = await config(made, Topic.TOKENS)
        assert (tokens["cleanup.policy"], tokens["segment.ms"]) == (
            "delete",
            "3600000",
        )  # an operator's own stays


async def test_retention_is_a_minimum_and_the_ledger_outlives_the_tokens_there_are(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        await set_config(made, Topic.TOKENS, {"retention.ms": str(30 * DAY_MS)})
        await set_config(made, Topic.TRAJECTORIES, {"retention.ms": "-1"})
        (found,) = wrong(await made.admin().check(specs(made)))
        assert found.startswith(
            f"ledger: retention.ms is {15 * DAY_MS}, needs {38 * DAY_MS} (it must outlive"
        )
        await made.admin().apply(specs(made))
        assert wrong(await made.admin().check(specs(made))) == []
        assert (await config(made, Topic.TOKENS))["retention.ms"] == str(30 * DAY_MS)
        assert (await config(made, Topic.LEDGER))["retention.ms"] == str(38 * DAY_MS)
        await set_config(made, Topic.TOKENS, {"retention.ms": "-1"})
        await made.admin().apply(specs(made))
        assert (await config(made, Topic.LEDGER))["retention.ms"] == "-1"
        await set_config(made, Topic.TOKENS, {"retention.ms": "1000"})
        assert len(wrong(await made.admin().check(specs(made)))) == 1


async def test_a_partition_count_is_reported_and_never_changed(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        for findings in (await made.admin().check(specs(made, 3)), await made.admin().apply(specs(made, 3))):
            found = wrong(findings)
            assert len(found) == 4
            assert all(
                "has 2 partitions, not 3" in message and "--partitions 2" in message for message in found
            )
        assert await made.admin().partitions(Topic.TOKENS) == 2


async def test_the_ledger_needs_the_partitions_of_the_tokens_topic(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        admin = await made._cluster.admin()
        await admin.create_partitions({made.names[Topic.TOKENS]: NewPartitions(3)})

        async def grown() -> bool:
            return await made.admin().partitions(Topic.TOKENS) == 3

        await poll_until_async(grown, 10.0, "three partitions")
        found = wrong(await made.admin().check(specs(made)))
        assert any("they need the same" in message for message in found)


async def test_what_the_broker_refuses_becomes_a_finding(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=0) as made:
        tokens, *others = specs(made)
        bad = replace(tokens, config={**tokens.config, "cleanup.policy": "shred"})
        findings = await made.admin().apply([bad, *others])
        assert [finding.ok for finding in findings] == [False, True, True, True]
        assert "creating topic" in findings[0].message
        await made.admin().apply(specs(made))
        findings = await made.admin().apply([bad, *others])
        assert [finding.ok for finding in findings] == [False, True, True, True]
        assert "altering the configuration" in findings[0].message


async def test_a_topic_created_again_is_another_one(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=1) as made:
        admin = made.admin()
        first = await admin.identity(Topic.TOKENS)
        assert first is not None
        assert first == await admin.identity(Topic.TOKENS) != await admin.identity(Topic.LEDGER)
        await recreate(made, Topic.TOKENS)
        assert await admin.identity(Topic.TOKENS) not in (None, first)


async def test_a_limit_in_bytes_is_told_where_it_cuts_a_time_short(
    kafka_bootstrap: str, unique_prefix: str, shell: Shell
) -> None:
    """It is the operator's to set, so it is a warning, and no promise is made that it may break."""
    async with transport(kafka_bootstrap, unique_prefix, partitions=1) as made:
        assert await made.admin().retention(Topic.TOKENS) == Retention(7 * DAY_MS)
        await set_config(made, Topic.TOKENS, {"retention.bytes": "123456789"})
        assert await made.admin().retention(Topic.TOKENS) == Retention(7 * DAY_MS, 123_456_789)
        findings = await made.admin().check(specs(made, 1))
        assert all(finding.ok for finding in findings)
        [warning] = [finding for finding in findings if finding.warns]
        assert warning.message.startswith(
            "retention.bytes is 123456789: a partition that grows beyond it loses"
        )
        await publish(made, [entry("r", "a", [1], [2])])
        tokens = made.names[Topic.TOKENS]
    broker = ("--broker", f"kafka://{kafka_bootstrap}", "--topic-prefix", made.names.prefix)
    said = shell.ok("topics", "check", *broker).out.decode()
    assert f"WARN {tokens}: retention.bytes is 123456789" in said
    assert (
        "unless its partition grows beyond 123456789 bytes" in shell.ok("inspect", "r", *broker).out.decode()
    )
