"""What the broker forgets: the group's offsets, and the log itself."""

from __future__ import annotations

import asyncio

import orjson

from freezepoint_schemas.topics import Topic
from tests.chaos.checker import Claims
from tests.chaos.fold import Truncation
from tests.chaos.load import Sent, tiny
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.events import complete, entry


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


@scenario(environment={"FREEZEPOINT_WORKER__PROGRESS_INTERVAL_MS": "200"})
async def log_truncated(stage: Stage) -> None:
    """log truncated past the watermark."""
    affected = [f"affected-{number}" for number in range(20)]
    unread = [f"unread-{number}" for number in range(20)]
    later = [f"later-{number}" for number in range(20)]
    stage.fleet.start("worker")
    await stage.fleet.until_acquired(stage.partitions)
    await stage.publish(60)
    await stage.send(*_calls(affected, "c1"))
    await stage.settle()
    stage.fleet.kill("worker")
    await stage.send(*_calls(affected, "c2"), *_calls(unread, "c1"))
    cut = await stage.tails[Topic.TOKENS].ends()
    applied = {number: held.applied_offset + 1 for number, held in (await stage.progress()).items()}
    await stage.tails[Topic.TOKENS].pull()
    await stage.send(*_calls(later, "c1"), *_calls(unread, "c2"), *_calls(affected, "c3"))
    await stage.broker.delete_records(stage.names[Topic.TOKENS], cut)
    await stage.publish(60, tiny(stage.profile()))
    await stage.send(*(Sent.of(complete(name, n_calls=2)) for name in unread))
    await stage.send(*(Sent.of(complete(name, n_calls=3)) for name in affected))
    await stage.send(*(Sent.of(complete(name, n_calls=1)) for name in later))
    stage.fleet.start("worker")
    await stage.settle(stage.tally.closed + 60)
    claims = Claims(
        truths=stage.tally.truths,
        truncations={number: Truncation(start, frozenset(affected)) for number, start in cut.items()},
        excused=unread,
    )
    reasons = await _reasons(stage)
    stage.report.equal("affected, masked input_expired", _count(reasons, affected), len(affected))
    stage.report.equal("begun unread, masked input_expired", _count(reasons, unread), len(unread))
    others = sum("input_expired" in own for name, own in reasons.items() if name not in {*affected, *unread})
    stage.report.equal("others touched", others, 0)
    gap = sum(cut[number] - applied.get(number, 0) for number in cut)
    told = sum(line.fields.get("unread_offsets", 0) for line in stage.fleet.lines())
    stage.report.equal("unread gap reported, in offsets", told, gap)
    await stage.conclude(claims)


def _calls(names: list[str], call_id: str) -> list[Sent]:
    return [Sent.of(entry(name, call_id, [len(name), int(call_id[1:])], [7, 8])) for name in names]


async def _reasons(stage: Stage) -> dict[str, list[str]]:
    found = [orjson.loads(line.value or b"") for line in await stage.results()]
    return {result["rollout_id"]: result.get("reasons", []) for result in found}


def _count(reasons: dict[str, list[str]], names: list[str]) -> int:
    return sum("input_expired" in reasons.get(name, ()) for name in names)
