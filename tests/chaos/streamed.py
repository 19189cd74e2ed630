"""The check of more than the checker could hold: one result at a time, against its rollout made once more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freezepoint.core.build import build_result
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.results import Result
from tests.chaos.fold import Life
from tests.chaos.load import Place
from tests.chaos.tails import Line, Tail, Wholes
from tests.polling import poll_until_async


@dataclass(frozen=True)
class Remade:
    """A rollout's records as they were published, and where its first and its last one lie."""

    calls: Sequence[TokenEntry]
    closing: RolloutComplete
    first: Place
    last: Place


async def compare(tail: Tail, remake: Callable[[str], Remade], count: int, timeout_s: float) -> Counter[str]:
    """Read so many result records (at least: all there are), each let go once it is compared. ``results``: rollouts that
    have one; ``duplicates``, ``content``, ``torn``: what is wrong."""
    found: Counter[str] = Counter()
    seen: set[str] = set()
    wholes = Wholes()

    async def all_there() -> bool:
        await tail.pull()
        lines, tail.lines = tail.lines, []
        for line in lines:
            value = wholes.put(line)
            if value is None:
                continue
            result = codec.decode_result(value)
            found["duplicates"] += result.rollout_id in seen
            seen.add(result.rollout_id)
            found["content"] += not await asyncio.to_thread(_equal, line, result, remake(result.rollout_id))
        return len(seen) >= count

    await poll_until_async(all_there, timeout_s, f"{count} results of {tail.topic}")
    found["results"], found["torn"] = len(seen), len(wholes.torn)
    return found


def _equal(line: Line, result: Result, remade: Remade) -> bool:
    life = Life(result.rollout_id, *remade.first)
    for call in remade.calls:
        life.write(call)
    expected = codec.encode_result(build_result(life.freeze(remade.closing, remade.last[1])))
    return line.partition == life.partition and codec.encode_result(result) == expected
