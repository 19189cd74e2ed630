"""What the broker forgets: the group's offsets, and the log itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from freezepoint_schemas.topics import Topic
from tests.chaos.checker import Claims
from tests.chaos.fold import Truncation
from tests.chaos.load import Sent, tiny
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.events import complete, entry

OFTEN = {"FREEZEPOINT_WORKER__PROGRESS_INTERVAL_MS": "200"}
ROLLOUT_TIMEOUT_S = 6 * 60 * 60.0
FETCH_WAIT_S = 1.0


@scenario(share=0.3)
async def offsets_deleted(stage: Stage) -> None:
    """group offsets deleted, or expired while the ledger lives."""
    async with stage.load():
        for _ in range(3):
            stage.fleet.start_many(2)
            await stage.fleet.until_acquired(stage.partitions)
            await asyncio.sleep(stage.seconds / 3)
            for name in list(stage.fleet.workers):
                stage.fleet.kill(name)
            await stage.broker.delete_group(stage.group)
    stage.fleet.start_many(2)
    await stage.settle()
    await stage.conclude()


@scenario(environment=OFTEN)
async def log_truncated(stage: Stage) -> None:
    """log truncated past the watermark."""
    stage.fleet.start("worker")
    await stage.fleet.until_acquired(stage.partitions)
    lost = _Lost()
    await _begin(stage, lost)
    stage.fleet.kill("worker")
    claims = await _cut(stage, lost)
    stage.fleet.start("worker")
    await _finish(stage, lost, claims)


@scenario(environment=OFTEN)
async def log_truncated_running(stage: Stage) -> None:
    """Beside the table: log truncated while the worker is up, behind what it has read and ahead of it."""
    worker = stage.fleet.start("worker", supervised=False)
    await stage.fleet.until_acquired(stage.partitions)
    behind = [f"behind-{number}" for number in range(20)]
    await stage.send(*_calls(behind, "c1"))
    await stage.until_applied()
    ends = await stage.tails[Topic.TOKENS].ends()
    await stage.tails[Topic.TOKENS].pull()
    await stage.broker.delete_records(stage.names[Topic.TOKENS], ends)
    await stage.send(*_calls(behind, "c2"), *(Sent.of(complete(name, n_calls=2)) for name in behind))
    await stage.settle(len(behind))
    expired = sum("input_expired" in reasons for reasons in (await _reasons(stage)).values())
    stage.report.equal("cut behind the worker: masked input_expired", expired, 0)
    lost = _Lost()
    await _begin(stage, lost, before=len(behind))
    worker.send(signal.SIGSTOP)
    await asyncio.sleep(FETCH_WAIT_S)  # what it has asked for is answered with nothing
    claims = await _cut(stage, lost)
    worker.send(signal.SIGCONT)
    await _finish(stage, lost, claims, before=len(behind))


@dataclass(frozen=True)
class _Lost:
    """Rollouts around a cut: with records read before it, begun in what nobody read, begun after it."""

    affected: tuple[str, ...] = tuple(f"affected-{number}" for number in range(20))
    unread: tuple[str, ...] = tuple(f"unread-{number}" for number in range(20))
    later: tuple[str, ...] = tuple(f"later-{number}" for number in range(20))


async def _begin(stage: Stage, lost: _Lost, before: int = 0) -> None:
    await stage.publish(60)
    await stage.send(*_calls(lost.affected, "c1"))
    await stage.settle(stage.tally.closed + before)


async def _cut(stage: Stage, lost: _Lost) -> Claims:
    """While the worker is away: records that nobody reads, the cut behind them, and everything's end."""
    applied = {number: held.applied_offset + 1 for number, held in (await stage.progress()).items()}
    await stage.send(*_calls(lost.affected, "c2"), *_calls(lost.unread, "c1"))
    cut = await stage.tails[Topic.TOKENS].ends()
    await stage.tails[Topic.TOKENS].pull()
    await stage.send(*_calls(lost.later, "c1"), *_calls(lost.unread, "c2"), *_calls(lost.affected, "c3"))
    await stage.broker.delete_records(stage.names[Topic.TOKENS], cut)
    await stage.publish(60, tiny(stage.profile()))
    for names, calls in ((lost.unread, 2), (lost.affected, 3), (lost.later, 1)):
        await stage.send(*(Sent.of(complete(name, n_calls=calls)) for name in names))
    return Claims(
        truths=stage.tally.truths,
        truncations={
            number: Truncation(start, frozenset(lost.affected), applied.get(number, 0), ROLLOUT_TIMEOUT_S)
            for number, start in cut.items()
        },
    )


async def _finish(stage: Stage, lost: _Lost, claims: Claims, before: int = 0) -> None:
    await stage.settle(stage.tally.closed + 60 + before)
    reasons = await _reasons(stage)
    for figure, names in (("affected", lost.affected), ("begun unread", lost.unread)):
        found = sum("input_expired" in reasons.get(name, ()) for name in names)
        stage.report.equal(f"{figure}, masked input_expired", found, len(names))
    named = {*lost.affected, *lost.unread}
    others = sum("input_expired" in own for name, own in reasons.items() if name not in named)
    stage.report.equal("others touched", others, 0)
    gap = sum(cut.log_start - cut.unread_from for cut in claims.truncations.values())
    told = sum(line.fields["unread_offsets"] for line in stage.fleet.lines("records_expired_unread"))
    stage.report.equal("unread gap reported, in offsets", told, gap)
    await stage.conclude(claims)


def _calls(names: Sequence[str], call_id: str) -> list[Sent]:
    return [Sent.of(entry(name, call_id, [len(name), int(call_id[1:])], [7, 8])) for name in names]


async def _reasons(stage: Stage) -> dict[str, list[str]]:
    found = [orjson.loads(line.value or b"") for line in await stage.results()]
    return {result["rollout_id"]: result.get("reasons", []) for result in found}
