"""Open logs are not looked through for cycles, and cycles go all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from freezepoint import collector
from freezepoint.collector import collect_all, short_pauses
from freezepoint_schemas import codec
from tests.events import Bench, entry, record
from tests.polling import poll_until_async


@pytest.fixture(autouse=True)
def _nothing_is_set_aside() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def whole_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def open_rollouts(count: int) -> Bench:
    """A partition with so many of them open, of ten calls each."""
    values = [
        codec.encode_event(entry("r", f"c{call}", [1, 2], [3], output_items=[{"content": [{"text": "x"}]}]))
        for call in range(10)
    ]
    bench = Bench()
    bench.feed(
        record(10 * number + call, f"r{number}", value.replace(b'"r"', b'"r%d"' % number))
        for number in range(count)
        for call, value in enumerate(values)
    )
    assert len(bench.core.open) == count
    return bench


async def test_growing_logs_bring_no_whole_collection() -> None:
    gc.freeze()
    gc.collect()  # so that what else is in this process delays nothing
    before = whole_collections()
    looked_through = open_rollouts(1_500)
    assert whole_collections() > before  # or what follows would not show anything
    async with short_pauses():
        before, held = whole_collections(), gc.get_freeze_count()
        set_aside = open_rollouts(1_500)
        assert whole_collections() == before
        assert gc.get_freeze_count() - held > 1_500 * 10
    assert looked_through.core.open.keys() == set_aside.core.open.keys()


async def test_what_was_set_aside_goes_with_its_last_reference() -> None:
    async with short_pauses():
        life = Bench()
        gone = weakref.ref(life)
        gc.collect()
        assert gc.get_freeze_count()
        del life
        assert gone() is None


async def test_an_old_cycle_goes_with_the_next_whole_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "WHOLE_INTERVAL_S_MIN", 0.01)
    monkeypatch.setattr(collector, "WHOLE_SHARE", 1.0)
    async with short_pauses():
        knot = Knot()
        gc.collect(1)
        gone = weakref.ref(knot)
        del knot
        gc.collect(1)
        assert gone() is not None  # young collections do not look there

        async def is_gone() -> bool:
            return gone() is None

        await poll_until_async(is_gone, 10, "the cycle goes")


async def test_the_collector_is_left_as_it_was_found() -> None:
    callbacks = list(gc.callbacks)
    with pytest.raises(asyncio.CancelledError):
        async with short_pauses():
            raise asyncio.CancelledError
    async with short_pauses(), short_pauses():
        pass
    assert gc.callbacks == callbacks
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as the command does with its modules
    async with short_pauses():
        pass
    assert gc.get_freeze_count() > 0
    assert collect_all() > 0
