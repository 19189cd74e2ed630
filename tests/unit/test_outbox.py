"""What waits to be published: in order, and accounted for until it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freezepoint.core.build import result_tokens_max
from freezepoint.core.digests import tokens_digest
from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.frozen import FrozenLog, SpillRef
from freezepoint.core.rollout import memory_of
from freezepoint.memory import MemoryBudget
from freezepoint.outbox import Outbox, is_quick
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


def _branching(tokens: int, calls: int) -> FrozenLog:
    """Calls that share a stem written once: the larger part of a result, and a small part of what was received."""
    stem = list(range(tokens))
    first = entry("r", "c0", stem, [1])
    digest = tokens_digest(np.array([*stem, 1], dtype=np.int32)).hex()
    prefix = {"call_id": "c0", "length": tokens + 1, "digest": digest}
    others = [entry("r", f"c{number}", [number], [2], prompt_prefix=prefix) for number in range(1, calls)]
    size = sum(map(memory_of, (first, *others)))
    return FrozenLog("r", 0, 0, calls, RolloutComplete(rollout_id="r"), (first, *others), memory_bytes=size)


def test_what_takes_long_is_not_built_on_the_event_loop() -> None:
    """A few milliseconds are less than a thread would cost; by the size of the log, and by what could come of it."""
    chosen = WorkerSettings(inline_build_bytes_max=2 << 20)
    logs = {
        "many tokens": _branching(200_000, 1),
        "too many": _branching(600_000, 1),
        "branches": _branching(100_000, 20),
        "many branches": _branching(100_000, 40),
        "announced": replace(_branching(10, 1), intents=frozenset(map(str, range(20_000)))),
        "spilled": replace(_branching(10, 1), spilled=(SpillRef(0, 0, 1),)),
    }
    inline = {name: is_quick(log, chosen) for name, log in logs.items()}
    assert inline == {
        "many tokens": True,
        "too many": False,
        "branches": True,
        "many branches": False,
        "spilled": False,
        "announced": False,
    }
    asked = replace(logs["branches"], closing=RolloutComplete(rollout_id="r", builder="per_request"))
    assert is_quick(asked, chosen)
    chain = replace(logs["branches"], entries=logs["branches"].entries[:2])
    assert result_tokens_max(chain) < result_tokens_max(chain, builder="per_request")
