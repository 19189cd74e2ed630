"""The worker's answers to orchestrators and scrapers, from a real process."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

from freezepoint.core.records import OutputRecord
from freezepoint.telemetry.metrics import COUNTERS, FREEZE_TO_PUBLISH, GAUGES, LABELLED
from freezepoint_schemas.topics import Topic
from tests.contract.driving import PARTITIONS, Cluster
from tests.events import complete, entry
from tests.integration.workers import WorkerProcess, publish, publish_raw, worker
from tests.polling import poll_until


def port_of(running: WorkerProcess) -> int:
    found = poll_until(
        lambda: re.search(rb'"port": (\d+)', running.log.read_bytes()), 30, "the worker listens"
    )
    assert found is not None
    return int(found[1])


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


WHEN_DONE = (
    'freezepoint_results_published_total{outcome="delivered"} 1.0',
    'freezepoint_results_published_total{outcome="masked"} 1.0',
    "freezepoint_rollouts_open 2.0",
)


async def test_a_worker_says_how_it_stands(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    environment = {**cluster.environment(), "FREEZEPOINT_HTTP__PORT": "0"}
    await publish(
        transport, [entry("r", "c", [1], [2]), complete("r"), entry("s", "c", [1], [2]), complete("t")]
    )
    await publish_raw(transport, [OutputRecord(Topic.TOKENS, b"u", b"{")])
    with worker(environment, tmp_path / "worker.log") as running:
        port = port_of(running)
        running.until_acquired(PARTITIONS)
        poll_until(lambda: get(port, "/readyz")[0] == 200, 30, "the worker is ready")
        assert get(port, "/livez") == (200, "ok\n")
        poll_until(
            lambda: all(figure in get(port, "/metrics")[1] for figure in WHEN_DONE),
            30,
            "all that was sent, on whichever partition, is counted",
        )
        metrics = get(port, "/metrics")[1]
        for name in (*COUNTERS, *LABELLED, *GAUGES, FREEZE_TO_PUBLISH[0]):
            assert f"# TYPE {name}" in metrics
        assert 'freezepoint_masked_total{reason="no_records"} 1.0' in metrics
        status = json.loads(get(port, "/status")[1])
        assert status["alive"]
        assert sum(partition["open_rollouts"] for partition in status["partitions"]) == 2
        assert sum(partition["lag"] for partition in status["partitions"]) == status["lag"] == 0
        assert {life["rollout_id"]: life["calls"] for life in status["open"]} == {"s": 1, "u": 0}
        assert all(life["age_seconds"] >= 0 for life in status["open"])
        assert {done["rollout_id"]: done["reasons"] for done in status["finished"]} == {
            "r": [],
            "t": ["no_records"],
        }
        assert status["last_error"] is None
        assert status["memory"]["resident_bytes"] > 1_000_000
        assert get(port, "/nowhere")[0] == 404
        assert get(port, "/livez", "POST")[0] == 405
        assert running.terminate() == 0
