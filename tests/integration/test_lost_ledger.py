"""A ledger topic that is deleted and created again: what was published is known no more, and nothing may be published twice."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition

from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.ports import Transport
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_all, read_count, recreate, transport
from tests.integration.shell import Shell
from tests.integration.workers import publish, read_results, run_until_idle, worker


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


# ------------------------------------------------------------------ where the group's offset alone would tell nothing


def execute(cluster: Cluster, *statements: str) -> None:
    with closing(sqlite3.connect(cluster.url.removeprefix("sqlite:///"))) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def stream_of(topic: str) -> str:
    return f"(SELECT stream.id FROM stream JOIN topic ON topic = topic.id WHERE name = '{topic}')"


async def lose_the_ledger(cluster: Cluster, made: Transport) -> None:
    """On Kafka the topic is deleted and created again; in a file all that is in it."""
    if isinstance(made, KafkaTransport):
        await recreate(made, Topic.LEDGER)
        return
    ledger = stream_of(made.names[Topic.LEDGER])
    execute(
        cluster,
        f"DELETE FROM record WHERE position >> 40 = {ledger}",
        f"DELETE FROM latest WHERE stream = {ledger}",
    )


async def commit_by_hand(cluster: Cluster, made: Transport, offset: int) -> None:
    """As Kafka's own tools and older releases do: nothing beside the offset."""
    if isinstance(made, SqliteTransport):
        execute(cluster, f"UPDATE committed SET offset = {offset}, recorded = NULL")
        return
    servers = cluster.url.removeprefix("kafka://")
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, group_id="freezepoint", enable_auto_commit=False)
    await consumer.start()
    partition = TopicPartition(made.names[Topic.TOKENS], 0)
    consumer.assign([partition])
    await consumer.commit({partition: offset})
    await consumer.stop()


async def expire_the_tokens(cluster: Cluster, made: Transport, before: int) -> None:
    if isinstance(made, KafkaTransport):
        admin = await made._cluster.admin()
        await admin.delete_records({TopicPartition(made.names[Topic.TOKENS], 0): RecordsToDelete(before)})
        return
    tokens = stream_of(made.names[Topic.TOKENS])
    execute(
        cluster,
        f"DELETE FROM record WHERE position >> 40 = {tokens} AND position & ((1 << 40) - 1) < {before}",
        f"UPDATE stream SET log_start = {before} WHERE id = {tokens}",
    )


async def with_two_results(cluster: Cluster, log: Path, *, opened_first: bool) -> Transport:
    """Two results are published, and the group's offset is the log's start, or its end."""
    made = await cluster.with_topics(partitions=1)
    if opened_first:
        await publish(made, [entry("open", "c", [1], [2])])
    for name in ("one", "other"):
        await publish(made, [entry(name, "c", [1], [2]), complete(name)])
    run_until_idle(cluster.environment(), log)
    assert len(await read_results(made)) == 2
    return made


@pytest.mark.parametrize("opened_first", [True, False], ids=["at the log's start", "at its end"])
async def test_what_is_said_with_the_offset_tells_a_lost_ledger(
    cluster: Cluster, shell: Shell, tmp_path: Path, opened_first: bool
) -> None:
    made = await with_two_results(cluster, tmp_path / "first.log", opened_first=opened_first)
    (held,) = (await cluster.transport().offsets("freezepoint")).values()
    assert (held.committed, held.recorded) == ((0, 5) if opened_first else (4, 4))
    await lose_the_ledger(cluster, made)
    for attempt in range(2):  # a refusal leaves what told it
        with worker(cluster.environment(), tmp_path / f"{attempt}.log", "--until-idle") as refused:
            assert refused.wait() == 2
        assert "has lost what it knew" in refused.log.read_text()
    examined = await asyncio.to_thread(shell, "doctor", environment=cluster.environment())
    assert examined.code == 1
    assert b"FAIL " in examined.out
    assert b"has lost what it knew" in examined.out
    assert len(await read_results(made)) == 2


async def test_an_offset_that_was_set_by_hand_says_nothing_of_the_ledger(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Who loses the ledger on purpose and sets the offsets back has everything published anew."""
    made = await with_two_results(cluster, tmp_path / "first.log", opened_first=True)
    await lose_the_ledger(cluster, made)
    await commit_by_hand(cluster, made, 0)
    run_until_idle(cluster.environment(), tmp_path / "again.log")
    assert len(await read_results(made)) == 4


async def test_a_ledger_that_expired_together_with_its_tokens_was_not_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Nothing came for longer than anything is kept."""
    made = await with_two_results(cluster, tmp_path / "first.log", opened_first=False)
    await lose_the_ledger(cluster, made)
    await expire_the_tokens(cluster, made, before=4)
    await publish(made, [entry("new", "c", [1], [2]), complete("new")])
    run_until_idle(cluster.environment(), tmp_path / "again.log")
    assert [result.rollout_id for result in await read_results(made)][2:] == ["new"]
