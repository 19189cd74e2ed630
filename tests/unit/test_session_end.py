"""A session ends in time, whatever is still under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from freezepoint import session as session_module
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.memory import MemoryBudget
from freezepoint.session import Session
from freezepoint.settings import WorkerSettings
from freezepoint.telemetry.figures import Figures
from freezepoint.transport.ports import GroupMember, Poll
from tests.events import complete, entry, records_of
from tests.polling import poll_until_async


class Stuck:
    """A lease of an empty partition, whose transactions never end."""

    partition, partition_count, log_start, log_end = 0, 1, 0, 2
    committed = recorded = None
    ledger: Sequence[InputRecord] = ()

    def __init__(self) -> None:
        self.publishing = self.closed = False

    async def first(self) -> int:
        return 0

    async def start(self, offset: int) -> None:
        assert offset == 0

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        assert records
        self.publishing = True
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True

    async def caught_up(self) -> bool:
        return True

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Member:
    """Is given the partition, and then loses it."""

    session_timeout_s = 10.0

    def __init__(self) -> None:
        self.lease = Stuck()
        self.generation = 1
        self.left = False

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        assert timeout_s > 0 < records_max
        await asyncio.sleep(0.001)
        assigned = frozenset({0} if self.generation == 1 else ())
        records = records_of([entry("r", "c", [1], [2]), complete("r")])
        return Poll(self.generation, assigned, {0: records} if assigned else {})

    async def acquire(self, partition: int) -> Stuck:
        assert partition == 0
        return self.lease

    async def leave(self) -> None:
        self.left = True


async def test_a_transaction_of_a_partition_given_back_before_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers, all but this one request: it is not silent, and nobody else's drain covers it."""
    monkeypatch.setattr(session_module, "FINISH_S", 0.1)
    settings = WorkerSettings(spool_folder=tmp_path, shutdown_timeout_s=0.1)
    memory, member = MemoryBudget.of(settings), Member()
    with ThreadPoolExecutor(1) as executor:
        session = Session(
            cast("GroupMember", member), "rollout-tokens", settings, executor, memory, Figures()
        )

        async def turned_until_publishing() -> bool:
            await session.turn()
            return member.lease.publishing

        await poll_until_async(turned_until_publishing, 10, "a transaction is under way")
        member.generation = 2
        await session.turn()
        await asyncio.wait_for(session.close(_never), 10)
    assert member.left
    assert member.lease.closed
    memory.close()


async def _never() -> None:
    await asyncio.Event().wait()
