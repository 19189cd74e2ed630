"""Rollouts that nobody ends, and time that does not pass as it should."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.chaos.checker import Claims
from tests.chaos.load import Sent, tiny
from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, TAKEOVER_SLACK_S, Stage
from tests.events import complete, entry
from tests.polling import poll_until_async

STUCK = "stuck"
STUCK_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 12.0
TEN_YEARS_MS = 10 * 365 * 24 * 60 * 60 * 1000
REPLAY_BYTES_MAX = 256 * 1024
REPLAY_RECORDS_MAX = 20_000
RESTARTS = 3
SLACK_S = 60.0


@scenario(
    environment={
        "FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": str(STUCK_TIMEOUT_S),
        "FREEZEPOINT_WORKER__REPLAY_BYTES_MAX": str(REPLAY_BYTES_MAX),
    },
)
async def stuck_rollout(stage: Stage) -> None:
    """one rollout never completes, 50,000 others do."""
    others = round(50_000 * min(1.0, stage.seconds / 60))
    stage.fleet.start("worker")
    await stage.fleet.until_acquired(stage.partitions)
    await stage.send(*(Sent.of(entry(STUCK, f"c{number}", [number], [1])) for number in range(3)))
    opened = time.monotonic()
    working_s = 0.0
    for number in range(RESTARTS):
        began = time.monotonic()
        await stage.publish(others // RESTARTS, tiny(stage.profile()))
        await stage.settle()
        working_s += time.monotonic() - began
        if number == RESTARTS - 1:
            early = await _timed_out(stage)
            done = len(await stage.results()) - early
            stage.report.equal("others' results before the timeout", done, stage.tally.closed)
        await _restart(stage, time.monotonic() - opened)
    stage.report.tell("others per second", stage.tally.closed / working_s)
    await poll_until_async(
        lambda: _timed_out(stage), STUCK_TIMEOUT_S + SLACK_S, "the stuck rollout times out"
    )
    await stage.send(Sent.of(complete(STUCK)), Sent.of(entry(STUCK, "late", [1], [2])))
    await stage.settle(stage.tally.closed + 1, letters=1)
    await stage.conclude(Claims(may_time_out={STUCK}))
    stage.report.equal("dead letters (late for the stuck one)", len(await stage.letters()), 1)


async def _restart(stage: Stage, age_s: float) -> None:
    """kill -9 and a new worker: how long until it has all partitions, by the age of the oldest open rollout."""
    killed = stage.fleet.kill("worker")
    stage.fleet.start("worker")
    restart_s = await stage.fleet.until_owner("worker", stage.partitions) - killed
    age = f"oldest open for {age_s:.0f} s, {stage.publisher.records:,} records"
    stage.report.at_most(f"{age}: replay", max(stage.replay_sizes()[-stage.partitions :]), REPLAY_RECORDS_MAX)
    stage.report.at_most(f"{age}: restart", restart_s, SESSION_S + TAKEOVER_SLACK_S, "s")


async def _timed_out(stage: Stage) -> int:
    return sum(b"rollout_timeout" in (line.value or b"") for line in await stage.results())


@scenario(
    share=0.2,
    environment={"FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": str(IDLE_TIMEOUT_S)},
)
async def outages_and_clocks(stage: Stage) -> None:
    """timestamps 10 years ahead; 2 h outage (here: twice the timeout, of workers, of all of them, frozen)."""
    stage.fleet.start_many(2)
    await stage.fleet.until_acquired(stage.partitions)
    waiting = [f"waiting-{number}" for number in range(40)]
    for sign in (1, -1):
        stamp = int(time.time() * 1000) + sign * TEN_YEARS_MS
        await stage.send(*(_call(name, f"c{sign}", stamp) for name in waiting))
    await stage.until_applied()
    async with stage.load(rate=50):
        for name in stage.fleet.workers:
            stage.fleet.kill(name)
        await asyncio.sleep(2 * IDLE_TIMEOUT_S)
        stage.fleet.start_many(2)
        await stage.fleet.until_acquired(stage.partitions)
    await stage.settle()
    for running in stage.fleet:
        running.send(signal.SIGSTOP)
    await asyncio.sleep(2 * IDLE_TIMEOUT_S)
    for running in stage.fleet:
        running.send(signal.SIGCONT)
    await stage.send(*(Sent.of(complete(name, n_calls=2)) for name in waiting))
    await stage.settle(stage.tally.closed + len(waiting))
    stage.report.equal("false timeouts", await _timed_out(stage), 0)
    await stage.send(_call("idle", "c", None))
    await poll_until_async(lambda: _timed_out(stage), IDLE_TIMEOUT_S + SLACK_S, "what is idle times out")
    await stage.conclude(Claims(truths=stage.tally.truths, may_time_out={"idle"}))


def _call(name: str, call_id: str, stamp_ms: int | None) -> Sent:
    event = entry(name, call_id, [len(name), len(call_id)], [1], created_at=(stamp_ms or 0) / 1000)
    sent = Sent.of(event)
    return Sent(sent.key, sent.value, timestamp_ms=stamp_ms)
