"""A trainer's reader and a broker that dies and comes back."""

from __future__ import annotations

import asyncio

import pytest

from freezepoint.reader import Trajectory, TrajectoryReader
from freezepoint.settings import KafkaSettings, Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas.topics import TopicNames, topic_specs
from kafka_local import LocalKafka
from tests.results import publish_results, result


@pytest.mark.slow
async def test_a_reader_outlives_a_killed_broker(local_kafka: LocalKafka, unique_prefix: str) -> None:
    settings = Settings(
        broker=f"kafka://{local_kafka.bootstrap}",
        topic_prefix=unique_prefix,
        kafka=KafkaSettings(session_timeout_ms=6_000, heartbeat_interval_ms=500, request_timeout_ms=10_000),
    )
    async with connect(settings) as transport:
        await transport.admin().apply(topic_specs(TopicNames(unique_prefix), 2))
        await publish_results(transport, [result(f"r{n}", freeze_offset=n) for n in range(4)])
    async with TrajectoryReader(settings=settings, group=unique_prefix) as reader:
        items = aiter(reader)
        before: list[Trajectory] = [await anext(items) for _ in range(4)]
        for trajectory in before[:2]:
            reader.ack(trajectory)
        local_kafka.kill()
        await asyncio.to_thread(local_kafka.restart)
        async with connect(settings) as transport:
            await publish_results(transport, [result("after")])
        names = set()
        async with asyncio.timeout(100):
            while "after" not in names:
                names.add((await anext(items)).rollout_id)
            for trajectory in before[2:]:
                reader.ack(trajectory)
            await reader.commit()
        assert names <= {"after", *(trajectory.rollout_id for trajectory in before)}
