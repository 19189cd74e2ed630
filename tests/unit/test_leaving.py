"""When a broker counts as gone, and what a stop gives up."""

from __future__ import annotations

import asyncio

import pytest

from freezepoint import leaving
from freezepoint.errors import BrokerUnavailableError
from freezepoint.leaving import cut_short_by, silence


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LOOK_S", 0.001)
    monkeypatch.setattr(leaving, "PROMPT_S", 0.01)


async def test_a_broker_is_silent_when_it_fails_or_hangs_for_long() -> None:
    async def fails() -> None:
        raise BrokerUnavailableError("gone")

    for ask in (fails, asyncio.Event().wait):
        await asyncio.wait_for(silence(ask, 0.05), 5)


async def test_one_answer_in_time_is_enough() -> None:
    asked = 0

    async def sometimes() -> None:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise BrokerUnavailableError("another broker of the cluster is restarted")

    listening = asyncio.create_task(silence(sometimes, 0.2))
    done, _ = await asyncio.wait({listening}, timeout=0.5)
    assert not done
    assert asked > 2
    listening.cancel()
    await asyncio.wait({listening})


async def test_a_stop_gives_up_what_hangs_and_goes_on_after_it() -> None:
    stop, steps = asyncio.Event(), []
    stop.set()
    async with cut_short_by(stop):
        steps.append("begun")
        await asyncio.Event().wait()
        steps.append("never")
    assert steps == ["begun"]


async def test_without_a_stop_errors_and_timeouts_pass() -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with cut_short_by(asyncio.Event()):
            raise TimeoutError("mine")
    async with cut_short_by(asyncio.Event()):
        await asyncio.sleep(0)
