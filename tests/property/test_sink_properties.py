"""Whatever a sink is given, in whatever form it writes it: the worker makes the same of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from freezepoint.errors import BrokerUnavailableError
from freezepoint_schemas.events import TokenEntry
from tests.events import Bench, comparable, entry
from tests.memory_transport import memory_sink

TOKENS = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def rollouts(draw: st.DrawFn) -> list[TokenEntry]:
    """Calls that continue one another, fork, begin anew, repeat prompts and ids."""
    calls: list[TokenEntry] = []
    for number in range(draw(st.integers(1, 8))):
        if calls and draw(st.integers(0, 6)) == 0:
            calls.append(draw(st.sampled_from(calls)))
            continue
        parent = draw(st.sampled_from([None, *calls]))
        start: list[int] = []
        if parent is not None:
            start = [*parent.prompt_token_ids.tolist(), *parent.generation_token_ids.tolist()]
        prompt = [*start, *draw(TOKENS)]
        calls.append(entry("r", f"c{number}", prompt, draw(TOKENS), created_at=float(number)))
    return calls


def written(calls: list[TokenEntry], batches: list[int], failures: set[int], **options: Any) -> Bench:
    """A bench with what a sink published of these calls: so many at a time side by side, and put again on failure."""

    async def put_all() -> list[Any]:
        with memory_sink(**options) as (sink, broker):

            async def put(number: int) -> None:
                if number in failures:
                    broker.down = True
                    with contextlib.suppress(BrokerUnavailableError):
                        await sink.put(calls[number])
                    broker.down = False
                await sink.put(calls[number])

            position, sizes = 0, iter(batches * len(calls))
            while position < len(calls):
                size = next(sizes)
                if failures & set(range(position, position + size)):
                    size = 1
                await asyncio.gather(*map(put, range(position, min(position + size, len(calls)))))
                position += size
            await sink.complete("r")
            return broker.records()

    bench = Bench()
    bench.run(asyncio.run(put_all()))
    return bench


@settings(max_examples=150, deadline=None)
@given(
    rollouts(),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sets(st.integers(0, 7)),
    st.integers(500, 20_000),
)
def test_by_reference_and_whole_give_the_same_result(
    calls: list[TokenEntry], batches: list[int], failures: set[int], cache_bytes: int
) -> None:
    whole = written(calls, [1], set(), wire="json", by_reference=False)
    referring = written(calls, batches, failures, reference_cache_bytes=cache_bytes)
    assert not referring.dead_letters
    assert [comparable(result) for result in referring.results] == [
        comparable(result) for result in whole.results
    ]
    assert len(whole.results) == 1
