"""The group: who has which partition, and how long nobody has."""

from __future__ import annotations

import asyncio
import time

from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, TAKEOVER_SLACK_S, Stage

LATE_S = 10.0


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
    """SIGTERM; the seconds from its exit until its partitions are worked on again."""
    owned = _owned(stage, name)
    assert await stage.fleet.stop(name) == 0
    return await _taken_over(stage, owned, time.time())


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
    latencies = stage.latencies_s()
    stage.report.tell("latency, median", latencies[len(latencies) // 2], "s")
    stage.report.at_most("latency, largest", latencies[-1], LATE_S, "s")
    generations = len({line.fields["generation"] for line in stage.fleet.lines("assigned")})
    stage.report.tell("assignments of a worker, at most", generations)
