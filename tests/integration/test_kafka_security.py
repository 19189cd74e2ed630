"""Credentials, TLS and rights, against a broker that asks for them. Also shows the rights that suffice."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka.protocol.admin import CreateAclsRequest
from pydantic import SecretStr

from freezepoint.errors import BrokerError, ConfigurationError, FreezepointError, PublishError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from kafka_local import LocalKafka, _free_port, _java_command, fetch_jars, find_java
from tests.integration.kafka_kit import SETTINGS, assigned, progress, read_all, read_count, receive, token

pytestmark = pytest.mark.slow

PASSWORD = "alice-secret"
TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = 2, 3, 4, 5
READ, WRITE, CREATE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS = 3, 4, 5, 8, 10, 11
PREFIXED, ALLOW = 4, 3
LITERAL = 3


@dataclass
class SecuredKafka:
    """A broker with three ways in: openly (a super user), by password, and by password over TLS."""

    kafka: LocalKafka
    password_port: int
    tls_port: int
    pem: Path

    @property
    def by_password(self) -> str:
        return f"127.0.0.1:{self.password_port}"

    @property
    def by_tls(self) -> str:
        return f"127.0.0.1:{self.tls_port}"


def certificate(folder: Path) -> Path:
    """A self-signed certificate of 127.0.0.1, and its key in the same file for the broker."""
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=broker -addext subjectAltName=IP:127.0.0.1 "
    try:
        subprocess.run(
            ["openssl", *make.split(), "-keyout", "key.pem", "-out", "cert.pem"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return folder / "cert.pem"


def add_scram_user(kafka: LocalKafka, mechanism: str) -> None:
    command = _java_command(
        find_java(),
        fetch_jars(),
        "kafka.admin.ConfigCommand",
        *(
            "--bootstrap-server",
            kafka.bootstrap,
            "--alter",
            "--entity-type",
            "users",
            "--entity-name",
            "alice",
        ),
        *("--add-config", f"{mechanism}=[password={PASSWORD}]"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def secured(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    folder = tmp_path_factory.mktemp("broker-pem")
    pem = certificate(folder)
    kafka = LocalKafka()
    ports = [_free_port(other_than=kafka.port), _free_port(other_than=kafka._controller_port)]
    listeners = f"PLAINTEXT://{kafka.bootstrap},PASSWORD://127.0.0.1:{ports[0]},TLS://127.0.0.1:{ports[1]}"
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    kafka._extra_properties |= {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{kafka._controller_port}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PASSWORD:SASL_PLAINTEXT,TLS:SASL_SSL"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "both.pem"),
        "ssl.client.auth": "none",
    }
    for listener in ("password", "tls"):
        name = f"listener.name.{listener}"
        kafka._extra_properties |= {
            f"{name}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            f"{name}.plain.sasl.jaas.config": f'{plain} user_alice="{PASSWORD}";',
            f"{name}.scram-sha-256.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            f"{name}.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
    with kafka:
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            add_scram_user(kafka, mechanism)
        yield SecuredKafka(kafka, ports[0], ports[1], pem)


def alice(**more: Any) -> KafkaSettings:
    given = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": "alice",
        "sasl_password": SecretStr(PASSWORD),
        "request_timeout_ms": 5_000,
    }
    return SETTINGS.model_copy(update=given | more)


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


async def eventually(attempt: Any, refusal: str = "not authorized") -> Any:
    """Rights reach the broker's authorizer a moment after they were granted."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await attempt()
            except FreezepointError as error:
                if refusal not in str(error):
                    raise
            await asyncio.sleep(0.05)


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
