"""The broker and the way to it: down, slow, cut, and silent at the worst moment."""

from __future__ import annotations

import asyncio

from tests.chaos.proxy import END_TXN, Request, Verdict, let_pass
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage

DOWN_S = 3.0


@scenario(share=0.5)
async def broker_restart(stage: Stage) -> None:
    """broker restart under load."""
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    async with stage.load():
        for orderly in (False, True):
            await asyncio.sleep(stage.seconds / 3)
            if not orderly:
                await stage.broker.crash()
                await asyncio.sleep(DOWN_S)
            await stage.broker.restart()
        await asyncio.sleep(stage.seconds / 3)
    stage.report.tell("settled after", await stage.settle(), "s")
    stage.report.tell("workers that ended and were restarted", stage.fleet.restarts)
    await stage.conclude()
    stage.report.tell("latency, largest", stage.latencies_s()[-1], "s")


@scenario(through_proxy=True, share=0.5)
async def network(stage: Stage) -> None:
    """Beside the table: connections cut, delayed by 0.3 s and refused for 8 s, under load."""
    async with stage.broker.proxy() as proxy:
        stage.fleet.start_many(3)
        await stage.fleet.until_acquired(stage.partitions)
        async with stage.load():
            for _ in range(max(2, round(stage.seconds / 4))):
                await asyncio.sleep(stage.rng.uniform(0.5, 2.0))
                proxy.cut(stage.rng.choice([None, *stage.fleet.workers]))
            proxy.delay_s = 0.3
            await asyncio.sleep(stage.seconds / 4)
            proxy.delay_s = 0.0
            proxy.closed = True
            proxy.cut()
            await asyncio.sleep(8.0)
            proxy.closed = False
            await asyncio.sleep(stage.seconds / 4)
        await stage.settle()
        stage.report.tell("connections cut", proxy.cuts)
        stage.report.tell("workers that ended and were restarted", stage.fleet.restarts)
        await stage.conclude()


@scenario(through_proxy=True, share=0.5)
async def ambiguous_commits(stage: Stage) -> None:
    """Beside the table: 1 of 4 commits breaks its connection, seen by the broker or not."""
    async with stage.broker.proxy() as proxy:
        stage.fleet.start_many(2)
        await stage.fleet.until_acquired(stage.partitions)
        broken = 0

        async def break_commits(request: Request) -> Verdict:
            nonlocal broken
            if request.api_key != END_TXN or stage.rng.random() > 0.25:
                return Verdict.PASS
            broken += 1
            return stage.rng.choice([Verdict.CUT, Verdict.ANSWER_LOST])

        proxy.hook = break_commits
        async with stage.load():
            await asyncio.sleep(stage.seconds)
        proxy.hook = let_pass
        await stage.settle()
        stage.report.at_least("commits broken", broken, 1)
        stage.report.tell("leases lost", len(stage.fleet.lines("lease_lost")))
        stage.report.equal("workers that ended", stage.fleet.restarts, 0)
        await stage.conclude()


