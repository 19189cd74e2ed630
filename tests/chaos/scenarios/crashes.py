"""Workers that die, freeze, come and go."""

from __future__ import annotations

import asyncio
import signal

from tests.chaos.checker import Claims
from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, TAKEOVER_SLACK_S, Stage

KILLS_PER_S = 50 / 60


@scenario(environment={"FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": "3000"})
async def kills(stage: Stage) -> None:
    """kill -9 of a worker, at random, 50 times under load, 3 workers."""
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    wanted = max(3, round(stage.seconds * KILLS_PER_S))
    async with stage.load() as load:
        for _ in range(wanted):
            await asyncio.sleep(stage.rng.uniform(0.2, 3.0))
            alive = [running for running in stage.fleet if running.exit_code is None]
            stage.rng.choice(alive or list(stage.fleet)).kill()
    settled_s = await stage.settle(load.closed)
    stage.report.equal("kills", stage.fleet.exit_codes.count(-signal.SIGKILL), wanted)
    stage.report.equal("other ends", stage.fleet.restarts - wanted, 0)
    stage.report.tell("largest replay", max(stage.replay_sizes()), "records")
    stage.report.tell("settled after", settled_s, "s")
    await stage.conclude(Claims(truths=load.truths))
