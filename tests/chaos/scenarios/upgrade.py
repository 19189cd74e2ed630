"""From one release to the next."""

from __future__ import annotations

from freezepoint_schemas.topics import Topic
from tests.chaos import golden
from tests.chaos.load import Publisher, Sent, rollouts
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.chaos.tails import Line
from tests.events import complete, entry


@scenario(
    topic_config=lambda _: {
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": str(2**63 - 1),
    },
    environment={"FREEZEPOINT_WORKER__GROUP": golden.GROUP},
)
async def rolling_upgrade(stage: Stage) -> None:
    """rolling upgrade: ledger and results of the previous release (read by this one; the way back: test_golden)."""
    topics = golden.read()
    for topic, lines in topics.items():
        await _refill(stage, topic, lines)
    await stage.broker.set_config(stage.names[Topic.TOKENS], {"message.timestamp.type": "LogAppendTime"})
    before = len(topics[Topic.TRAJECTORIES])
    stage.fleet.start_many(2)
    await stage.fleet.until_acquired(stage.partitions)
    for name in golden.OPEN:
        await stage.send(Sent.of(entry(name, "c2", [1, 2, 3, 4], [5])), Sent.of(complete(name, n_calls=2)))
    await stage.publish(100, rollouts(stage.profile(run="new")))
    await stage.settle(before + stage.tally.closed + len(golden.OPEN))
    stage.report.tell("results of the previous release", before)
    stage.report.equal(
        "results in all", len(await stage.results()), before + stage.tally.closed + len(golden.OPEN)
    )
    await stage.conclude()


async def _refill(stage: Stage, topic: Topic, lines: list[Line]) -> None:
    """Write the records as they were, with their timestamps; gaps between offsets are gone."""
    async with Publisher(stage.broker.direct, stage.names[topic], stage.partitions) as publisher:
        await publisher.send(
            Sent(line.key, line.value, line.partition, line.timestamp_ms, line.headers) for line in lines
        )
