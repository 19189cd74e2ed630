"""The broker and the way to it: down, slow, cut, and silent at the worst moment."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.chaos.load import rollouts
from tests.chaos.proxy import END_TXN, PRODUCE, Proxy, Request, Verdict, let_pass
from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, SETTLE_S, Stage
from tests.polling import poll_until_async

DOWN_S = 3.0
LATE_S = 60.0
LARGE_LIVES = 40
FROZEN_S = 45.0
LINES_MAX = 60
"""Of a worker's log while the broker says nothing: one a second, about."""


@scenario(share=0.5)
async def broker_restart(stage: Stage) -> None:
    """broker restart under load."""
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    async with stage.load():
        for how in ("kill -9", "SIGTERM"):
            await asyncio.sleep(stage.seconds / 3)
            gone = time.time()
            if how == "kill -9":
                await stage.broker.crash()
                await asyncio.sleep(DOWN_S)
            await stage.broker.restart()
            back = time.time()
            stage.report.tell(f"broker away by {how} for", back - gone, "s")
            await _each_publishes(stage, back)
            stage.report.at_most("every partition publishes again after", time.time() - back, LATE_S, "s")
        await asyncio.sleep(stage.seconds / 3)
    stage.report.tell("settled after", await stage.settle(), "s")
    stage.report.tell("workers that ended and were restarted", stage.fleet.restarts)
    await stage.conclude()
    stage.report.tell("latency, largest", stage.latencies_s()[-1], "s")


@scenario(share=0.2)
async def broker_frozen(stage: Stage) -> None:
    """Beside the table: the broker is frozen (SIGSTOP) for longer than a session, and for longer than any deadline."""
    stage.fleet.start_many(2)
    await stage.fleet.until_acquired(stage.partitions)
    async with stage.load(rate=50):
        for pause_s in (2 * SESSION_S, FROZEN_S):
            await asyncio.sleep(stage.seconds / 2)
            lines = len(stage.fleet.lines())
            stage.broker.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(pause_s)
            finally:
                stage.broker.send(signal.SIGCONT)
            thawed = time.time()
            told = len(stage.fleet.lines()) - lines
            workers = len(stage.fleet.workers)
            stage.report.at_most(f"frozen for {pause_s:g} s: log lines", told, workers * LINES_MAX)
            await _each_publishes(stage, thawed)
            stage.report.at_most(
                f"frozen for {pause_s:g} s: all resumed after", time.time() - thawed, LATE_S, "s"
            )
    await stage.settle()
    stage.report.tell("workers that ended and were restarted", stage.fleet.restarts)
    await stage.conclude()


async def _each_publishes(stage: Stage, since: float) -> None:
    """Wait until every partition has a result of after that moment."""

    async def published() -> bool:
        late = {line.partition for line in await stage.results() if line.timestamp_ms > since * 1000}
        return len(late) == stage.partitions

    await poll_until_async(published, SETTLE_S, "every partition publishes again")


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


class LateCommit:
    """Holds back one commit, breaks its connection, and delivers it in the middle of the same producer's next transaction,
    which has several writes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._producer: str | None = None
        self._commits = 0
        self._writes = 0
        self.delivered = 0

    async def __call__(self, request: Request) -> Verdict:
        if request.api_key == END_TXN and self._producer in (None, request.transactional_id):
            self._producer = request.transactional_id
            self._commits += 1
            self._writes = 0
            return Verdict.LATE if self._commits == 1 else Verdict.PASS
        if request.api_key == PRODUCE and request.transactional_id == self._producer and self._commits > 1:
            self._writes += 1
            if self._writes == 2 and not self.delivered:
                self.delivered = await self._proxy.deliver_late()
        return Verdict.PASS


@scenario(through_proxy=True, environment={"FREEZEPOINT_WORKER__FLUSH_INTERVAL_MS": "300"})
async def late_commits(stage: Stage) -> None:
    """Beside the table: a commit that was given up reaches the broker within the next transaction."""
    rounds, delivered = max(1, round(stage.seconds / 20)), 0
    author = rollouts(stage.profile(prompt_tokens=(10_000, 20_000), generation_tokens=(500, 1_000)))
    async with stage.broker.proxy() as proxy:
        stage.fleet.start("worker")
        await stage.fleet.until_acquired(stage.partitions)
        for _ in range(rounds):
            late = LateCommit(proxy)
            proxy.hook = late
            deadline = time.monotonic() + LATE_S
            while not late.delivered and time.monotonic() < deadline:
                await stage.publish(LARGE_LIVES, author)
            proxy.hook = let_pass
            delivered += late.delivered
            await stage.settle(timeout_s=LATE_S)
        stage.report.equal("commits delivered late", delivered, rounds)
        stage.report.tell("leases lost", len(stage.fleet.lines("lease_lost")))
        await stage.conclude()
