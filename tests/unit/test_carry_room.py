"""Old open lives are carried as there is room for them, however many are overdue at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from freezepoint import runner as runner_module
from freezepoint.core.records import OutputRecord
from freezepoint.memory import MemoryBudget
from freezepoint.runner import PartitionRunner
from freezepoint.settings import WorkerSettings
from freezepoint.telemetry.figures import Figures
from freezepoint.transport.ports import Lease
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.topics import Topic
from tests.events import Bench, complete, entry, records_of
from tests.polling import poll_until_async

STUCK = 40
PENDING_BYTES_MAX = 40_000
LIFE_BYTES = 12_000


class Committed:
    """A lease whose transactions all land: the bytes of each, and what counted as waiting while it was in flight."""

    partition = 0
    committed = recorded = None

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self.sizes: list[int] = []
        self.waiting_bytes: list[int] = []
        self.hints: list[int] = []
        self.refused = 0

    @property
    def pending_bytes(self) -> int:
        return self._memory.pending_bytes

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        self.sizes.append(sum(record.size for record in records if record.topic is Topic.LEDGER))
        await asyncio.sleep(0)
        self.waiting_bytes.append(self.pending_bytes)

    async def commit_hint(self, offset: int, recorded: int) -> bool:
        assert offset <= recorded
        self.hints.append(recorded)
        return len(self.hints) > self.refused

    async def caught_up(self) -> bool:
        return True

    def pause(self) -> None:
        return None

    def resume(self) -> None:
        return None

    async def close(self) -> None:
        return None


@asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[tuple[PartitionRunner, Committed]]:
    memory = MemoryBudget.of(settings)
    lease = Committed(memory)
    with ThreadPoolExecutor(1) as executor:
        runner = PartitionRunner(
            cast("Lease", lease), Bench().core, settings, executor=executor, memory=memory, figures=Figures()
        )
        try:
            yield runner, lease
        finally:
            await runner.stop(drain_s=0, lost=asyncio.Event())
            memory.spool.close()


async def test_no_transaction_of_carried_lives_takes_more_than_the_room_and_one_life(tmp_path: Path) -> None:
    settings = WorkerSettings(
        spool_folder=tmp_path / "spool",
        pending_bytes_max=PENDING_BYTES_MAX,
        replay_bytes_max=0,
        flush_interval_ms=1,
        progress_interval_ms=10,
    )
    stuck: list[InputEvent] = [
        entry(f"stuck{number}", "c", list(range(1_800)), [1]) for number in range(STUCK)
    ]
    passing: list[InputEvent] = []
    for number in range(3 * STUCK):
        passing += [entry(f"r{number}", "c", list(range(1_800)), [1]), complete(f"r{number}")]
    async with running(settings) as (runner, lease):
        await runner.feed(records_of([*stuck, *passing]))

        async def carried_all() -> bool:
            assert runner.failure is None
            return bool(runner.core.counters["carried"] >= STUCK and runner.idle)

        await poll_until_async(carried_all, 30.0, "every stuck rollout carried")
    large = [size for size in lease.sizes if size > LIFE_BYTES // 2]
    assert len(large) > STUCK * LIFE_BYTES // (PENDING_BYTES_MAX * 3)
    assert max(lease.sizes) <= PENDING_BYTES_MAX + 2 * LIFE_BYTES
    assert max(lease.waiting_bytes) <= PENDING_BYTES_MAX + 2 * LIFE_BYTES
    assert lease.pending_bytes == 0


async def test_an_offset_that_could_not_be_committed_is_committed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing more comes: what stands beside it tells a ledger that was lost."""
    monkeypatch.setattr(runner_module, "MARK_INTERVAL_S", 0.05)
    monkeypatch.setattr(runner_module, "HINT_INTERVAL_S", 0.05)
    settings = WorkerSettings(spool_folder=tmp_path / "spool", progress_interval_ms=10, flush_interval_ms=1)
    async with running(settings) as (runner, lease):
        lease.refused = 2
        await runner.feed(records_of([entry("r", "c", [1], [2]), complete("r")]))

        async def tried_again() -> bool:
            return len(lease.hints) > 2

        await poll_until_async(tried_again, 10.0, "the offset is committed in the end")
    assert lease.hints == [2, 2, 2]
