"""Workers by password over TLS, with exactly the published rights. A module, and so a broker, of its own: they stay granted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_count
from tests.integration.secured_kafka import PASSWORD, SecuredKafka, add_scram_user
from tests.integration.workers import WorkerProcess, publish, worker
from tests.rights import grant, granted

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


@asynccontextmanager
async def working(
    secured: SecuredKafka, prefix: str, mechanism: str, log: Path
) -> AsyncIterator[tuple[KafkaTransport, WorkerProcess]]:
    """The super user's transport, and alice's worker over TLS, with the published rights and no more."""
    names, group = TopicNames(f"{prefix}."), f"{prefix}-workers"
    environment = {
        "FREEZEPOINT_BROKER": f"kafka://{secured.by_tls}",
        "FREEZEPOINT_TOPIC_PREFIX": names.prefix,
        "FREEZEPOINT_WORKER__GROUP": group,
        "FREEZEPOINT_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "FREEZEPOINT_KAFKA__SSL_CA_FILE": str(secured.pem),
        "FREEZEPOINT_KAFKA__SASL_MECHANISM": mechanism,
        "FREEZEPOINT_KAFKA__SASL_USERNAME": "alice",
        "FREEZEPOINT_KAFKA__SASL_PASSWORD": PASSWORD,
        "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "5000",
    }
    rights = granted("worker", "User:alice", PREFIX=names.prefix, GROUP=group)
    async with KafkaTransport(secured.kafka.bootstrap, names, SETTINGS) as root:
        await root.admin().apply(topic_specs(names, 1))
        await grant(root, rights)
        with worker(environment, log) as running:
            running.until_acquired(1)
            await publish(root, [entry("r", "c", [1, 2], [3]), complete("r", reward=1.0)])
            assert len(await read_count(root, Topic.TRAJECTORIES, 1)) == 1
            yield root, running


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_worker_works_by_every_mechanism_over_tls_with_exactly_the_published_rights(
    secured: SecuredKafka, mechanism: str, unique_prefix: str, tmp_path: Path
) -> None:
    async with working(secured, unique_prefix, mechanism, tmp_path / "log") as (_, running):
        assert running.terminate() == 0
    assert PASSWORD not in running.log.read_text()


async def test_a_password_that_is_changed_ends_a_worker_and_an_outage_does_not(
    secured: SecuredKafka, unique_prefix: str, tmp_path: Path
) -> None:
    async with working(secured, unique_prefix, "SCRAM-SHA-256", tmp_path / "log") as (root, running):
        secured.kafka.kill()
        secured.kafka.restart()
        await publish(root, [entry("s", "c", [1, 2], [3]), complete("s", reward=1.0)])
        assert len(await read_count(root, Topic.TRAJECTORIES, 2)) == 2
        add_scram_user(secured.kafka, "SCRAM-SHA-256", "another")
        try:
            secured.kafka.kill()
            secured.kafka.restart()
            assert running.wait() == 2
        finally:
            add_scram_user(secured.kafka, "SCRAM-SHA-256")
    assert "error: the broker refused the credentials: check kafka.sasl" in running.log.read_text()
