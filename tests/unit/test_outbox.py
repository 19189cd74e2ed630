"""What waits to be published: in order, and accounted for until it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.memory import MemoryBudget
from freezepoint.outbox import Outbox
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.events import RolloutComplete
from tests.events import Bench, entry, record

WAIT_S = 10.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def freeze(name: str, offset: int, tokens: int = 10) -> Freeze:
    call = entry(name, "c", [1], [2] * tokens)
    log = FrozenLog(
        name, 0, offset - 1, offset, RolloutComplete(rollout_id=name), (call,), memory_bytes=tokens * 20
    )
    return Freeze(log, offset - 1)


def letter(offset: int) -> Effect:
    bench = Bench()
    (found,) = bench.core.feed(record(offset, None, b"junk"))
    return found


def outbox_of(
    tmp_path: Path, executor: ThreadPoolExecutor, woken: asyncio.Event, **settings: int
) -> tuple[Outbox, MemoryBudget]:
    chosen = WorkerSettings(spool_folder=tmp_path, **settings)  # type: ignore[arg-type]
    memory = MemoryBudget.of(chosen)
    return Outbox(chosen, executor, memory, woken.set), memory


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_what_was_taken_counts_until_it_is_published(
    tmp_path: Path, executor: ThreadPoolExecutor, inline_bytes: int
) -> None:
    woken = asyncio.Event()
    outbox, memory = outbox_of(tmp_path, executor, woken, inline_build_bytes_max=inline_bytes)
    for effect in (freeze("a", 1), letter(2), freeze("b", 4)):
        outbox.add(effect)
    taken: list[tuple[int, int]] = []
    async with asyncio.timeout(WAIT_S):
        while len(taken) < 3:
            await woken.wait()
            woken.clear()
            for item in outbox.take_ready():
                if isinstance(item, DeadLetter):
                    taken.append((item.offset, item.record.size))
                else:
                    taken.append((item[0].offset, item[1].record.size))
    assert [offset for offset, _ in taken] == [1, 2, 4]
    assert memory.pending_bytes == sum(size for _, size in taken)
    outbox.settle()
    assert memory.pending_bytes == 0


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_a_built_log_is_let_go(tmp_path: Path, executor: ThreadPoolExecutor, inline_bytes: int) -> None:
    woken = asyncio.Event()
    outbox, memory = outbox_of(tmp_path, executor, woken, inline_build_bytes_max=inline_bytes)
    outbox.add(freeze("a", 1, tokens=10_000))
    async with asyncio.timeout(WAIT_S):
        await woken.wait()
    waiting = memory.pending_bytes
    (item,) = outbox.take_ready()
    assert not isinstance(item, DeadLetter)
    effect, built = item
    assert (effect.log.entries, effect.log.rollout_id, effect.held_offset) == ((), "a", 0)
    assert waiting == built.record.size < 10_000 * 20


async def test_what_is_abandoned_counts_no_more_though_its_build_goes_on(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    outbox, memory = outbox_of(tmp_path, executor, asyncio.Event(), inline_build_bytes_max=0)
    outbox.add(freeze("a", 1))
    build = outbox._items[0].built
    assert isinstance(build, asyncio.Future)
    outbox.abandon()
    assert memory.pending_bytes == 0
    await asyncio.wait({build}, timeout=WAIT_S)
    await asyncio.sleep(0)  # so that whoever waits for it has heard
    assert memory.pending_bytes == 0
    assert len(outbox) == 0
