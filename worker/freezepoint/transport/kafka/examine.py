"""What a worker needs of the cluster: answers, their versions, rights, the group. For ``freezepoint doctor``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetFetchRequest

from freezepoint.addresses import is_loopback
from freezepoint.errors import ConfigurationError, FreezepointError, NoTokenError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.cluster import Cluster, broker_versions
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate, translated
from freezepoint.transport.kafka.marks import recorded_in, require_answer
from freezepoint.transport.kafka.versions import OPERATING, missing, refusal, release
from freezepoint.transport.kafka.wire import GroupRights, TopicRights
from freezepoint.transport.ports import Check, Examined, GroupOffset
from freezepoint.wording import counted
from freezepoint_schemas.topics import Topic

CONNECTION: Final = "connection"
CONNECT: Final = "set FREEZEPOINT_BROKER=kafka://host:port and FREEZEPOINT_KAFKA__…, or start the broker"
ENCRYPT: Final = (
    "set FREEZEPOINT_KAFKA__SECURITY_PROTOCOL=SASL_SSL, and a listener of the brokers that goes with it"
)
READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS = 3, 4, 8, 10
NAMES: Final = {READ: "Read", WRITE: "Write", DESCRIBE: "Describe", DESCRIBE_CONFIGS: "DescribeConfigs"}
NOT_TOLD: Final = -(2**31)
"""A broker's answer where it does not tell rights."""

NEEDED: Final[dict[Topic, tuple[int, ...]]] = {
    Topic.TOKENS: (READ, DESCRIBE),
    Topic.TRAJECTORIES: (WRITE, DESCRIBE),
    Topic.LEDGER: (READ, WRITE, DESCRIBE),
    Topic.DEAD_LETTERS: (WRITE, DESCRIBE),
}
"""A worker's rights on topics; the same list stands in the README and in the published ACLs."""

TOLD_AS_IT_IS: Final = ("PLAIN", "OAUTHBEARER")
"""Mechanisms that send the secret itself."""
RETRY_S = 0.2
PROBE: Final = "doctor"
"""Ends the transactional ids of probes, where a worker's end with a partition's number."""


async def examine(cluster: Cluster, group: str) -> Examined:
    """See the ``Broker`` port."""
    try:
        admin = await cluster.admin()
        found = [_connection(cluster, admin)]
    except FreezepointError as error:
        says_it = isinstance(error, ConfigurationError | NoTokenError)
        mend = "as it says" if says_it else CONNECT
        return Examined([Check(CONNECTION, "fail", str(error), mend)], usable=False)
    for checks in (_versions, _topic_rights, _transactional_rights):
        found += await checks(cluster, admin)
    return Examined(found + await _group(cluster, admin, group))


def _connection(cluster: Cluster, admin: Any) -> Check:
    brokers = admin._client.cluster.brokers()  # noqa: SLF001 - the client has them, nothing public tells them
    where = ", ".join(sorted(f"{broker.host}:{broker.port}" for broker in brokers))
    settings = cluster.clients.settings
    message = f"{counted(len(brokers), 'broker answers', 'brokers answer')} by {settings.security_protocol}: {where}"
    if tells_secret(settings, [broker.host for broker in brokers]):
        return Check(CONNECTION, "warn", f"{message}; whoever listens on the way learns our secret", ENCRYPT)
    return Check(CONNECTION, "ok", message)


def tells_secret(settings: KafkaSettings, hosts: Iterable[str]) -> bool:
    """Whether a password or a token goes over the network as it is."""
    as_it_is = settings.security_protocol == "SASL_PLAINTEXT" and settings.sasl_mechanism in TOLD_AS_IT_IS
    return as_it_is and not all(is_loopback(host) for host in hosts)


async def _versions(_: Cluster, admin: Any) -> list[Check]:
    checks: list[Check] = []
    for broker in sorted(admin._client.cluster.brokers(), key=lambda broker: broker.nodeId):  # noqa: SLF001 - as above
        subject = f"version of broker {broker.nodeId}"
        versions = await broker_versions(admin, broker.nodeId)
        if versions is None:
            why = f"{broker.host}:{broker.port} cannot be reached"
            checks.append(Check(subject, "fail", why, "make advertised.listeners reachable from here"))
            continue
        old, lacking = refusal(versions), missing(versions, OPERATING)
        if old is not None:
            checks.append(Check(subject, "fail", old, "update the broker"))
        elif lacking:
            less = "; ".join(f"{need.what} takes Kafka {need.release}" for need in lacking)
            checks.append(Check(subject, "warn", f"{release(versions)}: {less}", "update the broker"))
        else:
            checks.append(Check(subject, "ok", release(versions)))
    return checks


async def _topic_rights(cluster: Cluster, admin: Any) -> list[Check]:
    topics = {name: topic for topic, name in cluster.names.all().items()}
    try:
        with translated("describing rights"):
            response = await admin._send_request(TopicRights.of(list(topics)))  # noqa: SLF001 - see wire
    except FreezepointError as error:
        return [Check("rights on topics", "warn", f"cannot be told: {error}", "update the broker")]
    return [
        check
        for code, name, _, _, operations in response.topics
        for check in _rights_on(cluster, topics[name], name, kafka.for_code(code), operations)
    ]


def _rights_on(cluster: Cluster, topic: Topic, name: str, error: Any, operations: int) -> Iterator[Check]:
    subject = f"rights on {name}"
    if error is kafka.TopicAuthorizationFailedError:
        operations = 0
    elif error is not kafka.NoError:
        return  # that it is missing is the topics' own check
    if operations == NOT_TOLD:
        yield Check(
            subject, "warn", "the broker does not tell them", "update the broker to Kafka 2.3 or newer"
        )
        return
    lacking = [right for right in NEEDED[topic] if not operations >> right & 1]
    if lacking:
        names = _joined(lacking)
        yield Check(subject, "fail", f"{names} is missing", _grant(cluster, lacking, "--topic", name))
    elif not operations >> DESCRIBE_CONFIGS & 1:
        yield Check(
            subject,
            "warn",
            "all a worker needs; without DescribeConfigs its configuration goes unchecked and records are split at 1 MiB",
            _grant(cluster, [DESCRIBE_CONFIGS], "--topic", name),
        )
    else:
        yield Check(subject, "ok", _joined([*NEEDED[topic], DESCRIBE_CONFIGS]))


async def _transactional_rights(cluster: Cluster, _: Any) -> list[Check]:
    """Asked by a producer of an id of our own: to ask by a worker's would fence it."""
    prefix = f"{cluster.clients.settings.transactional_id_prefix}.{cluster.names[Topic.TOKENS]}."
    subject = f"rights on transactional ids {prefix}*"
    producer = _probe(cluster)
    try:
        await cluster.clients.start(producer, f"starting the producer {prefix}{PROBE}")
    except ConfigurationError as error:
        mend = _grant(
            cluster, [WRITE, DESCRIBE], "--resource-pattern-type prefixed --transactional-id", prefix
        )
        return [Check(subject, "fail", str(error), mend)]
    except FreezepointError as error:
        return [Check(subject, "fail", str(error), "look at the brokers' logs")]
    await cluster.clients.close(producer)
    return [Check(subject, "ok", "Write, Describe")]


def _probe(cluster: Cluster) -> Any:
    prefix, tokens = cluster.clients.settings.transactional_id_prefix, cluster.names[Topic.TOKENS]
    return cluster.clients.producer(
        batch_bytes=16 * 1024,
        record_bytes_max=1024 * 1024,
        linger_ms=0,
        transactional_id=f"{prefix}.{tokens}.{PROBE}",
    )


async def _group(cluster: Cluster, admin: Any, group: str) -> list[Check]:
    subject = f"group {group}"
    try:
        with translated(f"describing group {group}"):
            coordinator = await _coordinator(cluster, admin, group)
            response = await admin._send_request(GroupRights.of(group), coordinator)  # noqa: SLF001 - see wire
        ((code, _, state, _, _, members, operations),) = response.groups
        if code:
            raise translate(kafka.for_code(code)(), f"describing group {group}")
    except ConfigurationError as error:
        return [Check(subject, "fail", str(error), _grant(cluster, [READ], "--group", group))]
    except FreezepointError as error:
        return [Check(subject, "warn", str(error), "look at the brokers' logs")]
    if operations != NOT_TOLD and not operations >> READ & 1:
        return [Check(subject, "fail", "Read is missing", _grant(cluster, [READ], "--group", group))]
    text = f"{counted(len(members), 'member')}, {state}" if members else "no worker is a member now"
    return [Check(subject, "ok", text)]


async def _coordinator(cluster: Cluster, admin: Any, group: str) -> int:
    """A young cluster has none yet: its first use creates the topic that the coordinators keep groups in."""
    async with asyncio.timeout(cluster.clients.timeout_s):
        while True:
            try:
                return int(await admin.find_coordinator(group))
            except kafka.GroupCoordinatorNotAvailableError:
                await asyncio.sleep(RETRY_S)


async def offsets(cluster: Cluster, group: str) -> dict[int, GroupOffset]:
    """See the ``Broker`` port."""
    name = cluster.names[Topic.TOKENS]
    count = await cluster.partitions(Topic.TOKENS)
    admin = await cluster.admin()
    with translated(f"reading the offsets of group {group}"):
        coordinator = await _coordinator(cluster, admin, group)
        request = OffsetFetchRequest(group, [(name, list(range(count)))])
        async with asyncio.timeout(cluster.clients.timeout_s):
            response = await admin._send_request(request, coordinator)  # noqa: SLF001 - its own does not see every error
        require_answer(response, group)
        ((_, partitions),) = response.topics
        for _, _, _, code in partitions:
            if (error := kafka.for_code(code)) is not kafka.NoError:
                raise error(group)
    return {
        partition: GroupOffset(int(offset), recorded_in(text))
        for partition, offset, text, _ in partitions
        if offset >= 0
    }


async def clock_ahead_s(cluster: Cluster) -> tuple[float, float]:
    """By the append time of one record, written in a transaction that is aborted: no reader of what is committed sees it."""
    await cluster.partitions(Topic.TOKENS)
    name = cluster.names[Topic.TOKENS]
    producer = _probe(cluster)
    await cluster.clients.start(producer, "starting a producer to see the broker's clock")
    try:
        async with asyncio.timeout(cluster.clients.timeout_s):
            await producer.begin_transaction()
            before = time.time()
            written = await producer.send_and_wait(name, key=b"!doctor", value=b"")
            after = time.time()
            await producer.abort_transaction()
    except CLIENT_ERRORS as error:
        raise translate(error, f"sending to {name}") from error
    finally:
        cluster.clients.dispose(producer, unflushed=True)
    if written.timestamp_type != 1:
        raise ConfigurationError(
            f"{name} is not stamped by the broker: freezepoint topics apply sets message.timestamp.type=LogAppendTime"
        )
    return written.timestamp / 1000 - (before + after) / 2, (after - before) / 2 + 0.001


def _joined(rights: list[int]) -> str:
    return ", ".join(NAMES[right] for right in rights)


def _grant(cluster: Cluster, rights: list[int], kind: str, name: str) -> str:
    """The command for somebody who may; ``USER`` where we do not know who we are to the broker."""
    clients = cluster.clients
    operations = " ".join(f"--operation {NAMES[right]}" for right in rights)
    return (
        f"kafka-acls.sh --bootstrap-server {clients.bootstrap} --add --allow-principal "
        f"User:{clients.user or 'USER'} {operations} {kind} {name}"
    )
