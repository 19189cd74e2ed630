"""Credentials, TLS and rights, against a broker that asks for them. Also shows the rights that suffice."""

import asyncio
import re
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka.protocol.admin import CreateAclsRequest
from pydantic import SecretStr

from freezepoint.errors import BrokerError, BrokerUnavailableError, ConfigurationError, PublishError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.events import complete, entry
from tests.integration.kafka_kit import (
    SETTINGS,
    assigned,
    progress,
    read_all,
    read_count,
    receive,
    result,
    token,
)
from tests.integration.secured_kafka import PASSWORD, SecuredKafka, alice, eventually
from tests.integration.workers import publish, worker
from tests.polling import poll_until_async

pytestmark = pytest.mark.slow

TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = 2, 3, 4, 5
READ, WRITE, CREATE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS = 3, 4, 5, 8, 10, 11
PREFIXED, ALLOW = 4, 3
LITERAL = 3


async def allow(made: KafkaTransport, kind: int, name: str, *operations: int) -> None:
    """Give alice rights on everything that begins with ``name``."""
    admin = await made._cluster.admin()
    for operation in operations:
        request = CreateAclsRequest(
            kind, name, LITERAL if kind == CLUSTER else PREFIXED, "User:alice", "*", operation, ALLOW
        )
        response = await admin._send_to_controller(request)
        assert [code for code, *_ in response.creation_responses] == [0]


@asynccontextmanager
async def both(secured: SecuredKafka, prefix: str) -> AsyncIterator[tuple[KafkaTransport, KafkaTransport]]:
    """The super user's transport, whose topics exist, and alice's."""
    names = TopicNames(prefix + "-")
    async with (
        KafkaTransport(secured.kafka.bootstrap, names, SETTINGS) as root,
        KafkaTransport(secured.by_password, names, alice()) as hers,
    ):
        await root.admin().apply(topic_specs(names, 1))
        yield root, hers


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_every_mechanism_connects_openly_and_over_tls(
    secured: SecuredKafka, mechanism: str, unique_prefix: str
) -> None:
    for address, settings in (
        (secured.by_password, alice(sasl_mechanism=mechanism)),
        (
            secured.by_tls,
            alice(sasl_mechanism=mechanism, security_protocol="SASL_SSL", ssl_ca_file=secured.pem),
        ),
    ):
        async with KafkaTransport(address, TopicNames(unique_prefix), settings) as made:
            assert await made._cluster.partition_counts([]) == {}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
async def test_a_wrong_password_is_told_from_a_dead_broker_and_not_repeated(
    secured: SecuredKafka, mechanism: str, unique_prefix: str
) -> None:
    settings = alice(sasl_password=SecretStr("not hers"), sasl_mechanism=mechanism)
    async with KafkaTransport(secured.by_password, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(ConfigurationError, match=r"refused the credentials: check kafka\.sasl") as caught:
            await made.producer()
    assert "not hers" not in str(caught.value)


async def test_an_untrusted_certificate_is_told_from_a_dead_broker(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with KafkaTransport(
        secured.by_tls, TopicNames(unique_prefix), alice(security_protocol="SASL_SSL")
    ) as made:
        with pytest.raises(ConfigurationError, match=r"CERTIFICATE_VERIFY_FAILED.*kafka\.ssl_ca_file"):
            await made.producer()


@pytest.mark.parametrize("way", ["by_password", "by_tls"])
async def test_a_port_that_wants_tls_or_a_password_is_told_from_a_dead_broker(
    secured: SecuredKafka, way: str, unique_prefix: str
) -> None:
    settings = SETTINGS.model_copy(update={"request_timeout_ms": 3_000})
    async with KafkaTransport(getattr(secured, way), TopicNames(unique_prefix), settings) as made:
        with pytest.raises(
            BrokerUnavailableError, match=r"answers as PLAINTEXT goes.*kafka\.security_protocol"
        ):
            await made.producer()


async def test_every_missing_right_is_named_and_those_named_suffice(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with both(secured, unique_prefix) as (root, hers):
        group = f"{unique_prefix}-group"
        with pytest.raises(ConfigurationError, match=r"grant this user DESCRIBE on topic .*-rollout-tokens"):
            await hers.join(group)
        await allow(root, TOPIC, unique_prefix, DESCRIBE)
        with pytest.raises(ConfigurationError, match="grant this user WRITE on the topics it sends to"):
            await eventually(lambda: send_once(hers), refusal="grant this user DESCRIBE")
        # Without a right to read configurations the record limit is assumed.
        await allow(root, TOPIC, unique_prefix, WRITE)
        await eventually(lambda: send_once(hers))
        with pytest.raises(ConfigurationError, match="READ and DESCRIBE on topic"):
            await read_all(hers, Topic.TOKENS)
        await allow(root, TOPIC, unique_prefix, READ)
        await eventually(lambda: read_all(hers, Topic.TOKENS))

        member = await hers.join(group)
        with pytest.raises(ConfigurationError, match="grant this user READ on the consumer group"):
            await assigned(member, {0})
        await member.leave()
        await allow(root, GROUP, unique_prefix, READ)
        member = await hers.join(group)
        await eventually(lambda: assigned(member, {0}))
        with pytest.raises(ConfigurationError, match="transactional ids"):
            await member.acquire(0)
        await allow(root, TRANSACTIONAL_ID, "freezepoint", WRITE, DESCRIBE)
        lease = await eventually(lambda: member.acquire(0))
        await lease.start(0)
        await receive(member, 1)
        await lease.publish([progress("1")])
        assert [record.value for record in await read_count(hers, Topic.LEDGER, 1)] == [b"1"]


async def test_the_doctor_names_each_missing_right_with_the_command_that_grants_it(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    own = alice(
        transactional_id_prefix=f"{unique_prefix}-ids"
    )  # other tests grant what begins with freezepoint
    async with (
        both(secured, unique_prefix) as (root, _),
        KafkaTransport(secured.by_password, TopicNames(f"{unique_prefix}-"), own) as hers,
    ):
        group = f"{unique_prefix}-group"

        async def wrong() -> dict[str, tuple[str, str]]:
            examined = await hers.examine(group)
            assert examined.usable
            return {
                check.subject.removeprefix("rights on ").replace(f"{unique_prefix}-", ""): (
                    check.verdict,
                    check.mend or "",
                )
                for check in examined.checks
                if check.verdict != "ok"
            }

        async def until(expected: dict[str, str]) -> dict[str, str]:
            """Rights reach the authorizer a moment after they were granted."""
            async with asyncio.timeout(10):
                while True:
                    found = await wrong()
                    if {what: verdict for what, (verdict, _) in found.items()} == expected:
                        return {what: mend for what, (_, mend) in found.items()}
                    await asyncio.sleep(0.1)

        topics = [f"rollout-{name}" for name in ("tokens", "trajectories", "ledger", "dead-letters")]
        ids = "transactional ids ids.rollout-tokens.*"
        mends = await until(dict.fromkeys([*topics, ids, "group group"], "fail"))
        command = f"kafka-acls.sh --bootstrap-server {secured.by_password} --add --allow-principal User:alice"
        assert mends["rollout-ledger"] == (
            f"{command} --operation Read --operation Write --operation Describe --topic {unique_prefix}-rollout-ledger"
        )
        assert "--operation Write" not in mends["rollout-tokens"]
        assert mends["group group"] == f"{command} --operation Read --group {group}"
        assert mends[ids].startswith(
            f"{command} --operation Write --operation Describe --resource-pattern-type prefixed"
        )

        await allow(root, TOPIC, f"{unique_prefix}-rollout-tokens", READ, DESCRIBE)
        await allow(root, TOPIC, f"{unique_prefix}-rollout-ledger", READ, WRITE, DESCRIBE)
        await allow(root, TOPIC, f"{unique_prefix}-rollout-trajectories", WRITE, DESCRIBE)
        await allow(root, TOPIC, f"{unique_prefix}-rollout-dead-letters", DESCRIBE)
        await allow(root, GROUP, unique_prefix, READ)
        await allow(root, TRANSACTIONAL_ID, f"{unique_prefix}-ids.{unique_prefix}-", WRITE, DESCRIBE)
        mends = await until(dict.fromkeys(topics[:3], "warn") | {topics[3]: "fail"})
        assert mends[topics[3]] == f"{command} --operation Write --topic {unique_prefix}-rollout-dead-letters"
        assert "--operation DescribeConfigs" in mends[topics[0]]

        await allow(root, TOPIC, unique_prefix, DESCRIBE_CONFIGS)
        await allow(root, TOPIC, f"{unique_prefix}-rollout-dead-letters", WRITE)
        await until({})
        with pytest.raises(ConfigurationError, match="WRITE"):
            await hers.clock_ahead_s()  # this alone takes a right that no worker needs
        await root.clock_ahead_s()


async def send_once(made: KafkaTransport) -> None:
    await (await made.producer()).send([token("a")])


async def test_a_right_withdrawn_from_a_lease_ends_it_with_the_reason(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    async with both(secured, unique_prefix) as (root, hers):
        await allow(root, TOPIC, unique_prefix, DESCRIBE, READ)
        await allow(root, GROUP, unique_prefix, READ)
        await allow(root, TRANSACTIONAL_ID, "freezepoint", WRITE, DESCRIBE)
        member = await eventually(lambda: hers.join(f"{unique_prefix}-group"))
        await eventually(lambda: assigned(member, {0}))
        lease = await eventually(lambda: member.acquire(0))
        with pytest.raises(ConfigurationError, match=r"grant this user WRITE and DESCRIBE on topic .*ledger"):
            await lease.publish([progress("1")])
        with pytest.raises(PublishError):
            await lease.publish([progress("2")])


async def test_a_refusal_between_two_sends_is_still_the_reason(
    secured: SecuredKafka, unique_prefix: str
) -> None:
    """The client answers the second one that there is no transaction, not why."""
    async with both(secured, unique_prefix) as (root, hers):
        await allow(root, TOPIC, unique_prefix, DESCRIBE, READ)
        await allow(root, TOPIC, f"{unique_prefix}-rollout-ledger", WRITE)
        await allow(root, GROUP, unique_prefix, READ)
        await allow(root, TRANSACTIONAL_ID, "freezepoint", WRITE, DESCRIBE)
        member = await eventually(lambda: hers.join(f"{unique_prefix}-group"))
        await eventually(lambda: assigned(member, {0}))
        lease = await eventually(lambda: member.acquire(0))
        producer = lease._publisher._producer
        look = producer.partitions_for

        async def broken() -> bool:
            return not producer._txn_manager.is_in_transaction()

        async def slowly(topic: str) -> Collection[int]:
            if topic.endswith("rollout-ledger"):
                await poll_until_async(broken, 30, "the refusal has come")
            found: Collection[int] = await look(topic)
            return found

        producer.partitions_for = slowly
        with pytest.raises(
            ConfigurationError, match=r"grant this user WRITE and DESCRIBE on topic .*trajectories"
        ):
            await lease.publish([result("r"), progress("1")])


async def test_creating_topics_needs_its_rights(secured: SecuredKafka, unique_prefix: str) -> None:
    async with both(secured, unique_prefix) as (root, hers):
        specs = topic_specs(TopicNames(unique_prefix + "-"), 1)
        await allow(root, TOPIC, unique_prefix, DESCRIBE)
        with pytest.raises(ConfigurationError, match="grant this user DESCRIBE_CONFIGS on topic"):
            await eventually(lambda: hers.admin().check(specs), refusal="grant this user DESCRIBE on")
        await allow(root, TOPIC, unique_prefix, DESCRIBE_CONFIGS)
        assert all(finding.ok for finding in await eventually(lambda: hers.admin().check(specs)))
        others = topic_specs(TopicNames(unique_prefix + "-others-"), 1)
        findings = await hers.admin().apply(others)
        assert not any(finding.ok for finding in findings)
        assert all("not authorized" in finding.message for finding in findings)
        await allow(root, TOPIC, unique_prefix, CREATE, ALTER_CONFIGS)

        async def created() -> None:
            findings = await hers.admin().apply(others)
            for finding in findings:
                if not finding.ok:
                    raise BrokerError(finding.message)

        await eventually(created)


GRANTS = {
    "DESCRIBE": (DESCRIBE,),
    "READ": (READ,),
    "WRITE": (WRITE,),
    "READ and DESCRIBE": (READ, DESCRIBE),
    "WRITE and DESCRIBE": (WRITE, DESCRIBE),
}


@pytest.mark.timeout(300)
async def test_a_worker_ends_by_each_missing_right_and_works_once_it_has_those_named(
    secured: SecuredKafka, unique_prefix: str, tmp_path: Path
) -> None:
    """Whoever follows the messages one by one gets there, and the message is all that the worker leaves behind."""
    environment = {
        "FREEZEPOINT_BROKER": f"kafka://{secured.by_password}",
        "FREEZEPOINT_TOPIC_PREFIX": f"{unique_prefix}-",
        "FREEZEPOINT_WORKER__GROUP": f"{unique_prefix}-group",
        "FREEZEPOINT_KAFKA__TRANSACTIONAL_ID_PREFIX": f"{unique_prefix}-ids",
        "FREEZEPOINT_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "FREEZEPOINT_KAFKA__SASL_USERNAME": "alice",
        "FREEZEPOINT_KAFKA__SASL_PASSWORD": PASSWORD,
    }
    named: list[str] = []
    async with both(secured, unique_prefix) as (root, _):
        await publish(root, [entry("r", "c", [1], [2]), complete("r")])
        for number in range(40):
            with worker(environment, tmp_path / f"{number}.log", "--until-idle") as running:
                code = await asyncio.to_thread(running.wait)
            if code == 0:
                break
            assert code == 2, running.log.read_text()
            named.append(
                await grant(root, unique_prefix, running.log.read_text().strip().rpartition("\n")[2])
            )
        assert len(await read_count(root, Topic.TRAJECTORIES, 1)) == 1
    assert {"the consumer group", "the transactional ids"} <= set(named)
    assert {f"topic {unique_prefix}-rollout-tokens", f"topic {unique_prefix}-rollout-ledger"} <= set(named)


async def grant(root: KafkaTransport, prefix: str, message: str) -> str:
    """What the message asks for, and for what it does."""
    found = re.search(
        r"grant this user ([A-Z_]+(?: and [A-Z_]+)?) on (topic \S+|the consumer group|the transactional ids)",
        message,
    )
    assert found, message
    rights, what = found[1], found[2]
    kind, name = {
        "the consumer group": (GROUP, prefix),
        "the transactional ids": (TRANSACTIONAL_ID, f"{prefix}-ids"),
    }.get(what, (TOPIC, what.removeprefix("topic ")))
    await allow(root, kind, name, *GRANTS[rights])
    return what
