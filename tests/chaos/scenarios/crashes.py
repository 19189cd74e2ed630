"""Workers that are killed and frozen, at random and at every step of their conversation with the broker."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.chaos.fleet import WorkerProcess
from tests.chaos.load import Garbage, Spoiler, reused
from tests.chaos.proxy import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    NAMES,
    OFFSET_COMMIT,
    PRODUCE,
    Proxy,
    Request,
    Verdict,
    let_pass,
)
from tests.chaos.registry import scenario
from tests.chaos.stage import SESSION_S, TAKEOVER_SLACK_S, Stage
from tests.polling import poll_until_async

SHORT_SESSION = {"FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": "3000"}
POINT_S = 60.0
ZOMBIE_LIVES = 30


@scenario(environment=SHORT_SESSION)
async def kills(stage: Stage) -> None:
    """kill -9 of a worker, at random, 50 times under load, 3 workers."""
    await _kills(stage, round(stage.seconds * 50 / 60), None)
    await stage.conclude()


@scenario(environment=SHORT_SESSION, share=0.5)
async def garbage(stage: Stage) -> None:
    """1 of 1,000 records is garbage, keyed and unkeyed, with kills."""
    one_in, rate = (1_000, 1_000.0) if stage.seconds >= 30 else (50, 200.0)
    spoiler = Garbage(one_in, stage.seed, stage.partitions)
    await _kills(stage, round(stage.seconds * 12 / 60), spoiler, rate=rate)
    injected = sum(spoiler.injected.values())
    stage.report.tell(f"garbage injected (1 in {one_in})", injected)
    stage.report.equal("dead letters (= injected)", len(await stage.letters()), injected)
    await stage.conclude()


async def _kills(stage: Stage, wanted: int, spoil: Spoiler | None, rate: float = 200.0) -> None:
    wanted = max(3, wanted)
    stage.fleet.start_many(3)
    await stage.fleet.until_acquired(stage.partitions)
    pause_s = stage.seconds / wanted
    async with stage.load(spoil=spoil, rate=rate):
        for _ in range(wanted):
            await asyncio.sleep(stage.rng.uniform(0.5, 1.5) * pause_s)
            victim = await poll_until_async(lambda: _someone(stage), POINT_S, "a worker is alive")
            assert victim is not None
            victim.kill()
    injected = sum(spoil.injected.values()) if isinstance(spoil, Garbage) else 0
    settled_s = await stage.settle(letters=injected)
    stage.report.equal("kills", stage.fleet.exit_codes.count(-signal.SIGKILL), wanted)
    stage.report.equal("other ends", stage.fleet.restarts - wanted, 0)
    stage.report.tell("largest replay", max(stage.replay_sizes()), "records")
    stage.report.tell("settled after", settled_s, "s")


async def _someone(stage: Stage) -> WorkerProcess | None:
    alive = [running for running in stage.fleet if running.exit_code is None]
    return stage.rng.choice(alive) if alive else None


class Trap:
    """Holds one worker's request of one kind, the ``number``-th from now: ``sprung`` is set when it is there, and setting
    ``release`` lets it go on to what ``verdict`` says."""

    def __init__(
        self, client_id: str, api_key: int, number: int = 1, verdict: Verdict = Verdict.PASS
    ) -> None:
        self._client_id = client_id
        self._api_key = api_key
        self._number = number
        self._verdict = verdict
        self.sprung = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, request: Request) -> Verdict:
        if (request.client_id, request.api_key) != (self._client_id, self._api_key):
            return Verdict.PASS
        self._number -= 1
        if self._number:
            return Verdict.PASS
        self.sprung.set()
        await self.release.wait()
        return self._verdict


@scenario(through_proxy=True)
async def zombies(stage: Stage) -> None:
    """SIGSTOP in mid-transaction, new owner takes over, SIGCONT."""
    async with stage.broker.proxy() as proxy:
        for number, (api_key, seen) in enumerate([(PRODUCE, False), (END_TXN, False), (END_TXN, True)]):
            takeover_s = await _zombie(stage, proxy, f"sleeper-{number}", api_key, seen=seen)
            name = f"takeover, {NAMES[api_key]} {'done' if seen else 'held back'}"
            stage.report.at_most(name, takeover_s, SESSION_S + TAKEOVER_SLACK_S, "s")
        await stage.conclude()


async def _zombie(stage: Stage, proxy: Proxy, name: str, api_key: int, *, seen: bool) -> float:
    """A worker falls asleep with that request under way, which the broker gets before the takeover or after it; the
    seconds until its heir had everything."""
    sleeper = stage.fleet.start(name, supervised=False)
    await stage.fleet.until_owner(name, stage.partitions)
    trap = Trap(name, api_key)
    proxy.hook = trap
    await stage.publish(ZOMBIE_LIVES)
    await asyncio.wait_for(trap.sprung.wait(), POINT_S)
    sleeper.send(signal.SIGSTOP)
    fell_asleep = time.time()
    if seen:
        trap.release.set()
    heir = f"{name}-heir"
    stage.fleet.start(heir, supervised=False)
    taken_over = await stage.fleet.until_owner(heir, stage.partitions)
    await stage.settle()
    trap.release.set()
    sleeper.send(signal.SIGCONT)
    await stage.publish(ZOMBIE_LIVES)
    await poll_until_async(lambda: _has_rejoined(sleeper), POINT_S, "the zombie is a member again, or ended")
    await stage.publish(ZOMBIE_LIVES)
    await stage.settle()
    proxy.hook = let_pass
    stage.report.equal(f"exit codes of {name} and heir", set(await stage.fleet.stop_all()), {0})
    return taken_over - fell_asleep


async def _has_rejoined(sleeper: WorkerProcess) -> bool:
    return len(sleeper.lines("assigned")) > 1 or sleeper.exit_code is not None


CRASH_POINTS = (INIT_PRODUCER_ID, OFFSET_COMMIT, ADD_PARTITIONS_TO_TXN, PRODUCE, END_TXN)


@scenario(through_proxy=True, environment=SHORT_SESSION)
async def crash_points(stage: Stage) -> None:
    """clear and reuse of ids around every crash point."""
    rounds = max(1, round(stage.seconds / 60))
    author = reused(stage.profile(turns=(1, 3)), 60, stage.rng)
    kills = 0
    async with stage.broker.proxy() as proxy:
        stage.fleet.start("victim")
        await stage.fleet.until_acquired(stage.partitions)
        async with stage.load(author, rate=100):
            for api_key in CRASH_POINTS * rounds:
                for seen in (False, True):
                    kills += await _crash_at(stage, proxy, api_key, seen=seen)
        proxy.hook = let_pass
        await stage.settle()
        stage.report.equal("kills", stage.fleet.exit_codes.count(-signal.SIGKILL), kills)
        stage.report.equal("other ends", stage.fleet.restarts - kills, 0)
        await stage.conclude()


async def _crash_at(stage: Stage, proxy: Proxy, api_key: int, *, seen: bool) -> int:
    """kill -9 when one of the worker's next requests of that kind is on its way, or was answered by the broker; the
    number of kills it took."""
    starting = api_key == INIT_PRODUCER_ID
    if starting:
        await _crash_at(stage, proxy, END_TXN, seen=False)
    trap = Trap(
        "victim",
        api_key,
        stage.rng.randint(1, 4 if starting else 6),
        Verdict.ANSWER_LOST if seen else Verdict.CUT,
    )
    proxy.hook = trap
    await asyncio.wait_for(trap.sprung.wait(), POINT_S)
    victim = stage.fleet.workers["victim"]
    victim.send(signal.SIGSTOP)
    lost = proxy.answers_lost
    trap.release.set()
    if seen:
        await poll_until_async(lambda: _answered(proxy, lost), POINT_S, "the broker answers")
    victim.kill()
    return 1 + starting


async def _answered(proxy: Proxy, before: int) -> bool:
    return proxy.answers_lost > before
