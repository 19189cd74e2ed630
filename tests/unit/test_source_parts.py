"""The parts of TokenSource: where reading starts, what expired, how waiting freezes share their work."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from freezepoint.core.ledger import Decided
from freezepoint.core.partition import PartitionConfig
from freezepoint.core.rollout import LogLimits
from freezepoint.errors import BrokerError, ExpiredCaptureError
from freezepoint.settings import Settings
from freezepoint.source import TokenSource
from freezepoint.source.batches import Batches
from freezepoint.source.reading import RolloutFold, start_of
from freezepoint.transport.connect import connect
from freezepoint_schemas.reasons import Reason
from tests.events import complete, entry, records_of
from tests.integration.workers import publish, run_until_idle

CONFIG = PartitionConfig("t", 0, 1, "g", 1 << 20, LogLimits(1 << 30, 100), 1.0)


@pytest.mark.parametrize(
    ("decided", "start"),
    [
        (Decided(), 50),
        (Decided(first_offset=70), 70),
        (Decided(freeze_offset=20), 0),
        (Decided(freeze_offset=90), 0),
        (Decided(freeze_offset=20, clear_offset=30), 50),
        (Decided(freeze_offset=20, clear_offset=30, first_offset=40), 40),
        (Decided(clear_offset=30), 50),
    ],
)
def test_where_reading_starts(decided: Decided, start: int) -> None:
    assert start_of(decided, watermark=50) == start


def fold(decided: Decided, until: int = -1) -> RolloutFold:
    return RolloutFold("r", CONFIG, decided, start_of(decided, 0), until)


@pytest.mark.parametrize(("first_offset", "expired"), [(3, False), (4, True)])
def test_an_open_life_whose_first_record_is_gone_has_expired(first_offset: int, expired: bool) -> None:
    rollout = fold(Decided(first_offset=3))
    rollout.begin(first_offset)
    for record in records_of([entry("r", "a", [1], [2]), complete("r")], start=first_offset):
        rollout.feed(record)
    assert rollout.log is not None
    assert (Reason.INPUT_EXPIRED in rollout.log.faults) == expired


def test_what_comes_after_the_complete_event_is_not_looked_at() -> None:
    rollout = fold(Decided(), until=1)
    for record in records_of([entry("r", "a", [1], [2]), complete("r"), complete("r", n_calls=9)]):
        rollout.feed(record)
    assert rollout.log is not None
    assert rollout.log.freeze_offset == 1
    assert not rollout.was_decided


def settings(path: Path) -> Settings:
    return Settings(broker=f"sqlite:///{path}")


def remove_first_record(path: Path, rollout_id: str) -> None:
    """As retention does, without the wait."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "DELETE FROM record WHERE position = (SELECT min(position) FROM record WHERE key = ?)",
            (rollout_id.encode(),),
        )
    connection.close()


async def test_a_decided_rollout_that_is_not_all_there_any_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with connect(settings(path)) as transport:
        await publish(transport, [entry("r", "a", [1], [2]), entry("r", "b", [1, 2], [3]), complete("r")])
    run_until_idle({"FREEZEPOINT_BROKER": f"sqlite:///{path}"}, tmp_path / "worker.log")
    async with TokenSource(broker=f"sqlite:///{path}") as source:
        assert not (await source.freeze("r")).incomplete
        remove_first_record(path, "r")
        with pytest.raises(ExpiredCaptureError, match="the result that was published"):
            await source.freeze("r")


async def test_an_open_rollout_that_lost_its_beginning_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with connect(settings(path)) as transport:
        await publish(transport, [entry("r", "a", [1], [2]), entry("r", "b", [1, 2], [3])])
    run_until_idle({"FREEZEPOINT_BROKER": f"sqlite:///{path}"}, tmp_path / "worker.log")
    remove_first_record(path, "r")
    async with TokenSource(broker=f"sqlite:///{path}") as source:
        assert (await source.freeze("r")).incomplete


class Work:
    """Doubles numbers; the first batch waits for ``go``."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.batches: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int | BaseException]:
        self.batches.append(list(items))
        await self.go.wait()
        if 0 in items:
            raise BrokerError("zero")
        return [ValueError("odd") if item % 2 else 2 * item for item in items]


async def submitted(batches: Batches[int, int], *items: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(batches.submit(item)) for item in items]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_what_comes_meanwhile_is_the_next_batch() -> None:
    work = Work()
    batches = Batches(work)
    first = await submitted(batches, 2)
    rest = await submitted(batches, 4, 3, 6)
    rest[0].cancel()
    work.go.set()
    outcomes = await asyncio.gather(*first, *rest, return_exceptions=True)
    assert work.batches == [[2], [4, 3, 6]]
    assert [outcomes[0], outcomes[3]] == [4, 12]
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert isinstance(outcomes[2], ValueError)
    assert await batches.submit(8) == 16


async def test_a_batch_that_fails_fails_alone() -> None:
    work = Work()
    work.go.set()
    batches = Batches(work)
    with pytest.raises(BrokerError, match="zero"):
        await batches.submit(0)
    assert await batches.submit(2) == 4


async def test_closing_gives_up_what_waits() -> None:
    work = Work()
    batches = Batches(work)
    tasks = [*await submitted(batches, 2), *await submitted(batches, 4)]
    await batches.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == [
        "closed before it was done",
        "closed before it was begun",
    ]
    await batches.close()
