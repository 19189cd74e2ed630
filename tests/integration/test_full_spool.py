"""A spool that is full of open rollouts, whose complete events lie behind the pause."""

from __future__ import annotations

from pathlib import Path

from freezepoint_schemas import codec
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster, read_until
from tests.events import complete, entry
from tests.integration.test_health import get, port_of
from tests.integration.workers import by_rollout, publish, read_results, worker
from tests.polling import poll_until

CALLS = [entry(f"r{number}", "c", [number] * 2_000, [1]) for number in range(40)]
SPOOLED = sum(len(codec.encode_event(call, packed=True)) for call in CALLS)
"""What the spool holds of them, but for a few bytes of framing."""


def settings_of(cluster: Cluster, spool_bytes_max: int) -> dict[str, str]:
    return {
        **cluster.environment(),
        "FREEZEPOINT_WORKER__MEMORY_BYTES_MAX": "0",
        "FREEZEPOINT_WORKER__SPOOL_BYTES_MAX": str(spool_bytes_max),
        "FREEZEPOINT_WORKER__POLL_RECORDS_MAX": "1",
        "FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": "100",  # it looks around a hundred times in this
        "FREEZEPOINT_HTTP__PORT": "0",
    }


async def test_it_reads_on_when_nothing_else_makes_room_and_says_so_at_the_limit(
    cluster: Cluster, tmp_path: Path
) -> None:
    transport = await cluster.with_topics(1)
    await publish(transport, [*CALLS, *(complete(call.rollout_id) for call in CALLS)])
    small = tmp_path / "small.log"
    with worker(settings_of(cluster, SPOOLED // 2), small) as running:
        port = port_of(running)
        poll_until(lambda: "intake_stands_still" in small.read_text(), 60, "it says that it cannot go on")
        assert "freezepoint_intake_stands_still 1.0" in get(port, "/metrics")[1]
        assert running.terminate() == 0
    assert "raise worker.spool_bytes_max" in small.read_text()
    assert "spool_reserve_used" in small.read_text()
    assert not await read_results(transport)

    enough = tmp_path / "enough.log"
    with worker(settings_of(cluster, int(SPOOLED / 0.95)), enough) as running:
        await read_until(transport, Topic.TRAJECTORIES, len(CALLS))
        assert running.terminate() == 0
    assert "spool_reserve_used" in enough.read_text(), "it was full before the first complete event"
    assert "intake_stands_still" not in enough.read_text()
    assert by_rollout(await read_results(transport)).keys() == {call.rollout_id for call in CALLS}
