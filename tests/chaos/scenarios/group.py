"""The group: who has which partition, and how long nobody has."""

from __future__ import annotations

import asyncio
import time

from freezepoint_schemas.topics import Topic
from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, TAKEOVER_SLACK_S, Stage
from tests.polling import poll_until_async

LATE_S = 10.0
MANY = 64
RESTART_S = 20.0


@scenario(share=0.4)
async def join_and_leave(stage: Stage) -> None:
    """a second and a third worker join and leave."""
    await _start_one_after_the_other(stage, 1)
    async with stage.load():
        await _start_one_after_the_other(stage, 3)
        await asyncio.sleep(stage.seconds / 3)
        orderly = [await _leave(stage, "worker-2"), await _leave(stage, "worker-1")]
        await _start_one_after_the_other(stage, 3)
        await asyncio.sleep(stage.seconds / 3)
        crashed = []
        for name in ("worker-2", "worker-1"):
            crashed.append(await _vanish(stage, name))
            await asyncio.sleep(stage.seconds / 4)
    await stage.settle()
    report = stage.report
    report.at_most("takeover after SIGTERM", max(orderly), TAKEOVER_SLACK_S, "s")
    report.at_most("takeover after kill -9", max(crashed), SESSION_S + TAKEOVER_SLACK_S, "s")
    report.tell("largest replay", max(stage.replay_sizes()), "records")
    await stage.conclude()
    report.at_most(
        "longest silence of a partition", stage.longest_silence_s(), SESSION_S + TAKEOVER_SLACK_S, "s"
    )


async def _start_one_after_the_other(stage: Stage, total: int) -> None:
    for number in range(total):
        name = f"worker-{number}"
        running = stage.fleet.workers.get(name)
        if running is None or running.exit_code is not None:
            stage.fleet.start(name)
            await stage.fleet.until_owner(name, 1)


async def _leave(stage: Stage, name: str) -> float:
    """SIGTERM; the seconds from there until its partitions are worked on again."""
    owned, told = _owned(stage, name), time.time()
    assert await stage.fleet.stop(name) == 0
    return await _taken_over(stage, owned, told)


async def _vanish(stage: Stage, name: str) -> float:
    owned = _owned(stage, name)
    return await _taken_over(stage, owned, stage.fleet.kill(name))


def _owned(stage: Stage, name: str) -> set[int]:
    (latest,) = stage.fleet.workers[name].lines("assigned")[-1:]
    return set(latest.fields["partitions"])


async def _taken_over(stage: Stage, partitions: set[int], since: float) -> float:
    taken = await stage.fleet.until_acquired_since(partitions, since)
    return taken - since


@scenario(share=0.3)
async def rolling_restart(stage: Stage) -> None:
    """Beside the table: rolling restart of 3 workers under load, no result later than 10 s because of it."""
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    async with stage.load():
        await asyncio.sleep(stage.seconds / 4)
        for name in list(stage.fleet.workers):
            assert await stage.fleet.stop(name) == 0
            stage.fleet.start(name)
            await stage.fleet.until_owner(name, 1)
            await asyncio.sleep(stage.seconds / 6)
    await stage.settle()
    await stage.conclude()
    stage.report.at_most("latency, largest", _tell_latency(stage), LATE_S, "s")
    generations = len({line.fields["generation"] for line in stage.fleet.lines("assigned")})
    stage.report.tell("assignments of a worker, at most", generations)


@scenario(partitions=2, share=0.2)
async def stand_by(stage: Stage) -> None:
    """Beside the table: a worker without partitions stands by and takes over."""
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    await poll_until_async(lambda: _assigned(stage), SESSION_S * 2, "every worker has an assignment")
    spare = [running.name for running in stage.fleet if not _owned(stage, running.name)]
    stage.report.equal("workers without a partition", len(spare), 1)
    owners = [running.name for running in stage.fleet if running.name not in spare]
    async with stage.load():
        await asyncio.sleep(stage.seconds / 2)
        takeover_s = await _vanish(stage, owners[0])
        stage.report.at_most("takeover after kill -9", takeover_s, SESSION_S + TAKEOVER_SLACK_S, "s")
        stage.report.equal("spare one's partitions now", len(_owned(stage, spare[0])), 1)
        await asyncio.sleep(stage.seconds / 2)
    await stage.settle()
    await stage.conclude()


async def _assigned(stage: Stage) -> bool:
    """Whether all have joined, in one assignment that gives each partition to one."""
    if not all(running.lines("assigned") for running in stage.fleet):
        return False
    owned = [number for running in stage.fleet for number in _owned(stage, running.name)]
    return sorted(owned) == list(range(stage.partitions))


@scenario(partitions=MANY, share=0.3)
async def many_partitions(stage: Stage) -> None:
    """Beside the table: 64 partitions on one worker."""
    worker = stage.fleet.start("worker")
    began = time.time()
    owner_at = await stage.fleet.until_owner("worker", MANY)
    stage.report.tell("start to all acquired", owner_at - began, "s")
    async with stage.load(rate=300, concurrency=4 * MANY):
        await asyncio.sleep(stage.seconds)
    await stage.settle()
    await stage.tails[Topic.TOKENS].pull()
    stage.report.tell("latency, largest", _tell_latency(stage), "s")
    stage.report.tell("peak RSS", worker.peak_rss_mb(), "MB")
    began = stage.fleet.kill("worker")
    stage.fleet.start("worker")
    restart_s = await stage.fleet.until_owner("worker", MANY) - began
    stage.report.at_most("kill -9 to all acquired", restart_s, SESSION_S + RESTART_S, "s")
    await stage.settle()
    await stage.conclude()


def _tell_latency(stage: Stage) -> float:
    """The median is told, the largest returned."""
    latencies = stage.latencies_s()
    stage.report.tell("latency, median", latencies[len(latencies) // 2] * 1000, "ms")
    return latencies[-1]
