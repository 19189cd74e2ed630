"""Client certificates in place of passwords (mTLS), against a broker that asks for one and checks rights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freezepoint.errors import ConfigurationError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from kafka_local import LocalKafka
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_count, varied, worker_variables
from tests.integration.secured_kafka import certificate, openssl, securely
from tests.integration.workers import publish, worker
from tests.rights import grant, granted

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


@dataclass
class MutualKafka:
    """Ways in: openly (a super user), and by a certificate that the broker trusts: alice's, not mallory's."""

    kafka: LocalKafka
    port: int
    folder: Path

    @property
    def by_certificate(self) -> str:
        return f"127.0.0.1:{self.port}"

    def settings(self, **more: Any) -> KafkaSettings:
        given = {
            "security_protocol": "SSL",
            "ssl_ca_file": self.folder / "cert.pem",
            "request_timeout_ms": 5_000,
        }
        return varied(**given | more)

    def shown_by(self, name: str) -> dict[str, Path]:
        return {
            "ssl_cert_file": self.folder / f"{name}.pem",
            "ssl_key_file": self.folder / f"{name}.key",
        }


def client_certificate(folder: Path, name: str) -> None:
    make = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem"
    openssl(folder, *make.split())


@pytest.fixture(scope="module")
def mutual(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutualKafka]:
    folder = tmp_path_factory.mktemp("mutual")
    certificate(folder)
    for name in ("alice", "mallory"):
        client_certificate(folder, name)
    kafka, (port,) = securely(
        folder,
        {"MUTUAL": "SSL"},
        {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "alice.pem"),
            "ssl.client.auth": "required",
        },
    )
    with kafka:
        yield MutualKafka(kafka, port, folder)


async def test_a_worker_works_by_its_certificate_with_exactly_the_published_rights(
    mutual: MutualKafka, unique_prefix: str, tmp_path: Path
) -> None:
    names, group = TopicNames(f"{unique_prefix}."), f"{unique_prefix}-workers"
    settings = mutual.settings(**mutual.shown_by("alice"))
    environment = worker_variables(mutual.by_certificate, unique_prefix, settings)
    rights = granted("worker", "User:CN=alice", PREFIX=names.prefix, GROUP=group)
    async with KafkaTransport(mutual.kafka.bootstrap, names, SETTINGS) as root:
        await root.admin().apply(topic_specs(names, 1))
        await grant(root, [right for right in rights if right.resource != "group"])
        with worker(environment, tmp_path / "lacking") as running:
            assert running.wait() == 2
            assert "grant this user READ on the consumer group" in running.log.read_text()
        await grant(root, [right for right in rights if right.resource == "group"])
        with worker(environment, tmp_path / "log") as running:
            running.until_acquired(1)
            await publish(root, [entry("r", "c", [1, 2], [3]), complete("r", reward=1.0)])
            assert len(await read_count(root, Topic.TRAJECTORIES, 1)) == 1
            assert running.terminate() == 0


@pytest.mark.parametrize("who", [None, "mallory"])
async def test_a_certificate_that_is_missing_or_not_trusted_is_told_from_an_outage(
    mutual: MutualKafka, unique_prefix: str, who: str | None
) -> None:
    settings = mutual.settings(**mutual.shown_by(who) if who else {})
    async with KafkaTransport(mutual.by_certificate, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(ConfigurationError, match=r"kafka\.ssl_cert_file"):
            await made.producer()


async def test_a_certificate_that_was_renewed_is_shown_without_a_restart(
    mutual: MutualKafka, unique_prefix: str, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"

    def show(name: str) -> None:
        shutil.copy(mutual.folder / f"{name}.pem", cert)
        shutil.copy(mutual.folder / f"{name}.key", key)

    show("mallory")
    settings = mutual.settings(ssl_cert_file=cert, ssl_key_file=key)
    async with KafkaTransport(mutual.by_certificate, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(ConfigurationError, match=r"kafka\.ssl_cert_file"):
            await made.producer()
        show("alice")
        await (await made.producer()).close()
