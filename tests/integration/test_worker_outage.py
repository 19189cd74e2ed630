"""A worker without a broker: it waits, says for what, and counts as alive for as long as that makes sense."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic
from kafka_local import LocalKafka
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_count, transport
from tests.integration.test_health import get, port_of
from tests.integration.workers import WorkerProcess, publish, worker
from tests.polling import poll_until

BROKER_WAIT_S = 12.0
"""Stands for the quarter of an hour that it is by default."""
LINES_MAX = 150
"""Of a worker whose broker was away twice, for half a minute: the Kafka client alone has some twenty a second to say."""


def all_lines(running: WorkerProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]


def lines(running: WorkerProcess, event: str) -> list[dict[str, object]]:
    return [line for line in all_lines(running) if line["event"] == event]


def settings_of(broker: LocalKafka, prefix: str) -> dict[str, str]:
    return {
        "FREEZEPOINT_BROKER": f"kafka://{broker.bootstrap}",
        "FREEZEPOINT_TOPIC_PREFIX": f"{prefix}-",
        "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": str(SETTINGS.session_timeout_ms),
    }


def live(port: int) -> bool:
    return get(port, "/livez")[0] == 200


async def finish_one(made: KafkaTransport, rollout_id: str, results: int) -> None:
    """Publish one more rollout, and wait for its result."""
    await publish(made, [entry(rollout_id, "c", [1], [2]), complete(rollout_id)])
    assert len(await read_count(made, Topic.TRAJECTORIES, results)) == results


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_lost_broker_is_waited_for_and_liveness_ends_in_time(
    local_kafka: LocalKafka, unique_prefix: str, tmp_path: Path
) -> None:
    environment = settings_of(local_kafka, unique_prefix) | {
        "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "2000",
        "FREEZEPOINT_HTTP__PORT": "0",
        "FREEZEPOINT_HTTP__BROKER_WAIT_S_MAX": str(BROKER_WAIT_S),
    }
    async with transport(local_kafka.bootstrap, unique_prefix):
        pass
    local_kafka.kill()
    with worker(environment, tmp_path / "worker.log") as running:
        port = port_of(running)
        poll_until(lambda: lines(running, "waiting_for_broker"), 30, "it says that it waits")
        assert live(port)
        assert get(port, "/readyz")[0] == 503
        first = lines(running, "waiting_for_broker")[0]
        assert local_kafka.bootstrap in str(first["error"])

        local_kafka.restart()
        poll_until(lambda: get(port, "/readyz")[0] == 200, 60, "it begins by itself")
        async with transport(local_kafka.bootstrap, unique_prefix) as made:
            await finish_one(made, "before", 1)

        before = len(lines(running, "waiting_for_broker"))
        local_kafka.kill()
        poll_until(lambda: len(lines(running, "waiting_for_broker")) > before, 60, "it waits again")
        began = time.monotonic()
        assert live(port)
        poll_until(lambda: not live(port), 2 * BROKER_WAIT_S, "it counts as dead")
        assert time.monotonic() - began > BROKER_WAIT_S / 2
        pauses = [float(str(line["retry_in_s"])) for line in lines(running, "waiting_for_broker")[before:]]
        assert pauses == sorted(pauses), "the pauses grow"
        assert running.process.poll() is None, "it goes on trying, should nobody restart it"

        local_kafka.restart()
        poll_until(lambda: live(port) and get(port, "/readyz")[0] == 200, 90, "it lives and works again")
        async with transport(local_kafka.bootstrap, unique_prefix) as made:
            await finish_one(made, "after", 2)
        per_event = Counter(str(line["event"]) for line in all_lines(running))
        assert max(per_event.values()) < 30, per_event.most_common(3)
        assert sum(per_event.values()) < LINES_MAX, per_event.most_common(10)
        assert not [line for line in all_lines(running) if line["level"] == "error"]
        assert running.terminate() == 0


LEAVE_S = 6.0
"""What the shortest grace of a container leaves room for; 5 s and what this machine is slow by."""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
async def test_a_worker_leaves_a_broker_that_is_gone_in_time(
    local_kafka: LocalKafka, unique_prefix: str, tmp_path: Path, sign: signal.Signals
) -> None:
    """With a transaction that can never land, and an open rollout."""
    pid = local_kafka.pid
    assert pid is not None
    async with transport(local_kafka.bootstrap, unique_prefix, partitions=3) as made:
        with worker(settings_of(local_kafka, unique_prefix), tmp_path / "worker.log") as running:
            running.until_acquired(3)
            await publish(made, [entry(f"open{number}", "c", [1], [2]) for number in range(20)])
            await finish_one(made, "before", 1)
            await publish(made, [complete(f"open{number}") for number in range(10)])
            os.kill(pid, sign)
            began = time.monotonic()
            try:
                assert running.terminate() == 0, running.log.read_text()
                assert time.monotonic() - began < LEAVE_S, running.log.read_text()
            finally:
                if sign is signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
            assert "Traceback" not in running.log.read_text()


@pytest.mark.slow
async def test_a_worker_that_waits_for_its_broker_leaves_in_time(
    local_kafka: LocalKafka, unique_prefix: str, tmp_path: Path
) -> None:
    async with transport(local_kafka.bootstrap, unique_prefix):
        pass
    pid = local_kafka.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        environment = settings_of(local_kafka, unique_prefix) | {"FREEZEPOINT_HTTP__PORT": "0"}
        with worker(environment, tmp_path / "worker.log") as running:
            assert live(port_of(running))
            began = time.monotonic()
            assert running.terminate() == 0, running.log.read_text()
            assert time.monotonic() - began < LEAVE_S
    finally:
        os.kill(pid, signal.SIGCONT)
