"""The reader on a transport that fails: a real one, with a fault put in at one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from freezepoint.errors import BrokerUnavailableError
from freezepoint.reader import Trajectory
from freezepoint.reader import seat as seat_module
from freezepoint.reader.engine import Engine, Slot
from freezepoint.reader.options import ReadOptions
from freezepoint.reader.shelf import SingleShelf
from freezepoint.reader.trajectory import StalenessRule
from freezepoint.settings import ReaderSettings, SqliteSettings
from freezepoint.transport.ports import FROM_THE_BEGINNING, Feed, StartAt, Subscription
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas.topics import Topic, TopicNames
from tests.polling import poll_until_async
from tests.results import publish_results, result

WAIT_S = 30.0


class Faults:
    """What goes wrong: so many of the next polls, subscriptions or commits fail; so many subscriptions deliver nothing."""

    def __init__(self) -> None:
        self.polls = 0
        self.subscriptions = 0
        self.deaf = 0
        self.commits = 0


class FaultySubscription:
    def __init__(self, real: Subscription, faults: Faults) -> None:
        self._real = real
        self._faults = faults
        self._deaf = faults.deaf > 0
        faults.deaf -= self._deaf

    async def poll(self, timeout_s: float, records_max: int) -> Feed:
        if self._faults.polls:
            self._faults.polls -= 1
            raise BrokerUnavailableError("no answer while polling")
        feed = await self._real.poll(timeout_s, records_max)
        return Feed(feed.generation, feed.assigned, feed.started) if self._deaf else feed

    async def commit(self, generation: int, offsets: Mapping[int, int]) -> None:
        if self._faults.commits:
            self._faults.commits -= 1
            raise BrokerUnavailableError("no answer while committing")
        await self._real.commit(generation, offsets)

    async def caught_up(self) -> bool:
        return not self._deaf and await self._real.caught_up()

    def shared_out(self) -> bool:
        return self._real.shared_out()

    def pause(self) -> None:
        self._real.pause()

    def resume(self) -> None:
        self._real.resume()

    async def close(self) -> None:
        await self._real.close()


class FaultyTransport(SqliteTransport):
    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(path, TopicNames(), SqliteSettings(partitions=1))
        self._faults = faults

    async def subscribe(  # type: ignore[override] # the port's type is enough here
        self, topic: Topic, group: str, start: StartAt = FROM_THE_BEGINNING
    ) -> FaultySubscription:
        if self._faults.subscriptions:
            self._faults.subscriptions -= 1
            raise BrokerUnavailableError("no answer while joining")
        return FaultySubscription(await super().subscribe(topic, group, start), self._faults)


async def engine_of(tmp_path: Path, faults: Faults, **limits: float) -> Engine:
    """A running engine with three results before it."""
    transport = FaultyTransport(tmp_path / "test.db", faults)
    await publish_results(transport, [result(f"r{n}", freeze_offset=n) for n in range(3)])
    options = ReadOptions("trainer", FROM_THE_BEGINNING, "", False, None, None, StalenessRule(), None, True)
    settings = ReaderSettings(commit_interval_ms=0, poll_timeout_ms=10, **limits)  # type: ignore[arg-type]
    engine = Engine(transport, options, settings, SingleShelf(), time.monotonic)
    engine.start()
    return engine


async def take(engine: Engine) -> Trajectory:
    slot = Slot()
    async with asyncio.timeout(WAIT_S):
        await engine.fill(slot)
    assert isinstance(slot.handed, Trajectory)
    return slot.handed


async def test_after_a_failure_reading_begins_anew_at_what_is_not_acknowledged(tmp_path: Path) -> None:
    faults = Faults()
    engine = await engine_of(tmp_path, faults)
    before = [await take(engine) for _ in range(3)]
    engine.ack([before[0].claim])
    await engine.commit()
    faults.polls, faults.subscriptions = 1, 1
    again = [await take(engine) for _ in range(2)]
    assert [trajectory.rollout_id for trajectory in again] == ["r1", "r2"]
    engine.ack([before[1].claim])
    engine.ack([trajectory.claim for trajectory in again])
    assert (engine.counts.acked, engine.counts.lost_acks, engine.counts.rejoins) == (3, 1, 2)
    await engine.close()


async def test_patience_ends(tmp_path: Path) -> None:
    faults = Faults()
    engine = await engine_of(tmp_path, faults, broker_patience_s=0)
    await take(engine)
    faults.polls, faults.subscriptions = 1, 1_000

    async def take_all() -> None:
        while True:
            await take(engine)

    with pytest.raises(BrokerUnavailableError):
        await take_all()
    await engine.close()


async def test_a_first_connection_that_fails_is_said_at_once(tmp_path: Path) -> None:
    faults = Faults()
    faults.subscriptions = 1
    engine = await engine_of(tmp_path, faults)
    with pytest.raises(BrokerUnavailableError, match="joining"):
        await take(engine)
    await engine.close()


async def test_a_commit_that_fails_is_tried_again(tmp_path: Path) -> None:
    faults = Faults()
    engine = await engine_of(tmp_path, faults)
    found = [await take(engine) for _ in range(3)]
    faults.commits = 2
    engine.ack([trajectory.claim for trajectory in found])
    await poll_until_async(
        lambda: asyncio.sleep(0, engine.counts.failed_commits == 2), WAIT_S, "two commits have failed"
    )
    await engine.commit()
    await engine.close()
    second = FaultyTransport(tmp_path / "test.db", Faults())
    subscription = await second.subscribe(Topic.TRAJECTORIES, "trainer")
    while not (feed := await subscription.poll(0.1, 10)).started:
        pass
    assert feed.started[0].offset == 3
    await second.close()


async def test_a_subscription_that_delivers_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "LOOK_S", 0.01)
    faults = Faults()
    faults.deaf = 1
    engine = await engine_of(tmp_path, faults, stall_timeout_s=0.1)
    assert (await take(engine)).rollout_id == "r0"
    assert engine.counts.rejoins == 1
    await engine.close()
