"""A ledger topic that is deleted and created again: what was published is known no more, and nothing may be published twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_all, read_count, recreate, transport
from tests.integration.workers import publish, run_until_idle, worker


@pytest.fixture
async def made(kafka_bootstrap: str, unique_prefix: str) -> AsyncIterator[KafkaTransport]:
    async with transport(kafka_bootstrap, unique_prefix, SETTINGS) as opened:
        yield opened


@pytest.fixture
def environment(kafka_bootstrap: str, unique_prefix: str) -> dict[str, str]:
    return {
        "FREEZEPOINT_BROKER": f"kafka://{kafka_bootstrap}",
        "FREEZEPOINT_TOPIC_PREFIX": f"{unique_prefix}-",
        "FREEZEPOINT_WORKER__TOPIC_CHECK_INTERVAL_S": "0.5",
        "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": str(SETTINGS.session_timeout_ms),
    }


async def publish_around_an_open_one(made: KafkaTransport) -> None:
    """One is done, one stays open, and one behind it is done."""
    await publish(made, [entry("first", "c", [1], [2]), complete("first"), entry("open", "c", [1], [2])])
    await publish(made, [entry("behind", "c", [1], [2]), complete("behind")])


async def test_a_ledger_that_is_new_to_a_group_that_is_not_is_refused(
    made: KafkaTransport, environment: dict[str, str], tmp_path: Path
) -> None:
    await publish_around_an_open_one(made)
    run_until_idle(environment, tmp_path / "first.log")
    assert len(await read_count(made, Topic.TRAJECTORIES, 2)) == 2
    await recreate(made, Topic.LEDGER)
    with worker(environment, tmp_path / "second.log") as refused:
        assert refused.wait() == 2
    assert "has lost what it knew" in refused.log.read_text()
    assert len(await read_all(made, Topic.TRAJECTORIES)) == 2


async def test_a_ledger_that_is_replaced_under_a_worker_stops_it(
    made: KafkaTransport, environment: dict[str, str], tmp_path: Path
) -> None:
    await publish_around_an_open_one(made)
    with worker(environment, tmp_path / "worker.log") as stopped:
        stopped.until_acquired()
        await read_count(made, Topic.TRAJECTORIES, 2)
        await recreate(made, Topic.LEDGER)
        await publish(made, [complete("open")])
        assert stopped.wait() == 2
    (said,) = [line for line in stopped.log.read_text().splitlines() if line.startswith("error: ")]
    assert f"{made.names[Topic.LEDGER]} was recreated" in said or "does not exist" in said
