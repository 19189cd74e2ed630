"""Parts, marks and intents that never become anything: what an open rollout holds is limited, and it still ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import xxhash

from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import LogLimits, RolloutLog
from freezepoint.core.watermark import Watermark
from freezepoint.errors import RecordTooLargeError
from freezepoint.publishing import record_of
from freezepoint.transport.splitting import split_record
from freezepoint_schemas import codec, parts
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import PART
from freezepoint_schemas.parts import PartAssembler, PartError, PartHeader
from freezepoint_schemas.reasons import Reason
from tests.events import Bench, cancelled_call, clear, complete, entry, incomplete, intent, record

BYTES_MAX = 50_000
GOOD = entry("r", "c1", [1, 2], [3])


def part_record(offset: int, header: PartHeader, part: bytes) -> InputRecord:
    return record(offset, "r", part, headers=((PART, header.encode()),))


def split_records(event: InputEvent, start: int, size: int = 40) -> list[InputRecord]:
    value = codec.encode_event(event)
    return [part_record(start + header.index, header, part) for header, part in parts.split(value, size)]


def lone_parts(count: int, content: bytes = b"x", of: int = 2) -> Iterator[InputRecord]:
    """First parts of values whose other parts never come."""
    for number in range(count):
        header = PartHeader(xxhash.xxh3_128_hexdigest(str(number).encode()), 0, of)
        yield part_record(number, header, content)


def whole_parts(count: int) -> Iterator[InputRecord]:
    """The same intent in ever another spelling, each as a value of one part."""
    for number in range(count):
        value = codec.encode_event(intent("r", "c1")) + b" " * number
        yield part_record(number, PartHeader(xxhash.xxh3_128_hexdigest(value), 0, 1), value)


def large_parts(count: int) -> Iterator[InputRecord]:
    return lone_parts(count // 100, b"x" * 5_000)


def events(make: Callable[[int], InputEvent]) -> Callable[[int], Iterator[InputRecord]]:
    return lambda count: (record(number, "r", make(number)) for number in range(count))


@pytest.mark.parametrize(
    "flood",
    [
        lone_parts,
        whole_parts,
        large_parts,
        events(lambda number: intent("r", f"c{number}")),
        events(lambda number: cancelled_call("r", f"c{number}")),
        events(lambda number: incomplete("r", reason="x" * 100 + str(number))),
    ],
    ids=["lone parts", "whole values", "large parts", "intents", "cancelled calls", "marks"],
)
def test_what_an_open_rollout_holds_is_limited_whatever_it_is_sent(
    flood: Callable[[int], Iterator[InputRecord]],
) -> None:
    bench = Bench(bytes_max=BYTES_MAX, record_bytes_max=20_000)
    bench.feed([record(0, "r", GOOD)])
    for item in flood(2_000):
        bench.feed([record(item.offset + 1, "r", item.value, headers=item.headers)])
        life = bench.core.open["r"]
        assert life.held_bytes <= BYTES_MAX + 1_000
        assert len(life.parts._whole) <= 1_001
    (result,) = bench.run([record(10_000, "r", complete("r", reward=0.5))])
    assert Reason.ROLLOUT_TOO_LARGE in result.reasons
    assert result.reward == 0.5
    assert result.traces == []


@pytest.mark.parametrize("position", ["after", "around"])
def test_a_rollout_that_grew_too_large_is_closed_by_an_event_in_parts(position: str) -> None:
    """It is the last thing that is heard of it: without it the rollout would stay open."""
    closing = split_records(complete("r", reward=0.5, metadata={"text": "x" * 100}), start=10)
    flood = [record(number, "r", entry("r", f"c{number}", [number], [1])) for number in range(5)]
    if position == "around":
        flood = [record(20 + number, "r", item.value) for number, item in enumerate(flood)]
        closing = [
            *closing[:2],
            *(record(40 + item.offset, "r", item.value, headers=item.headers) for item in closing[2:]),
        ]
    bench = Bench(entries_max=3)
    stream = sorted([*flood, *closing], key=lambda item: item.offset)
    (result,) = bench.run(stream)
    assert result.reasons == [Reason.ROLLOUT_TOO_LARGE]
    assert (result.reward, result.metadata) == (0.5, {"text": "x" * 100})


def test_marks_of_a_rollout_that_grew_too_large_still_say_that_something_is_missing() -> None:
    calls: list[InputEvent] = [entry("r", f"c{number}", [number], [1]) for number in range(3)]
    orders: list[list[InputEvent]] = [[incomplete("r"), *calls], [*calls, incomplete("r", reason="other")]]
    outcomes = []
    for order in orders:
        bench = Bench(entries_max=2)
        bench.feed(record(number, "r", event) for number, event in enumerate(order))
        (result,) = bench.run([record(9, "r", complete("r"))])
        outcomes.append((result.reasons, result.snapshot.id, result.snapshot.version))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [Reason.CAPTURE_INCOMPLETE, Reason.ROLLOUT_TOO_LARGE]


def test_what_an_assembler_holds_is_counted_right() -> None:
    random = Random(7)
    values = [random.randbytes(random.randrange(1, 200)) for _ in range(30)]
    pieces = [piece for value in values for piece in parts.split(value, random.randrange(1, 60))]
    for _ in range(50):
        assembler = PartAssembler(value_bytes_max=150)
        log = RolloutLog("r", 0, LogLimits(random.choice([1 << 30, 4_000]), 10), assembler)
        for offset in range(200):
            header, part = random.choice(pieces)
            if random.random() < 0.05:
                part = b"other"
            with contextlib.suppress(PartError):
                log.add_part(header, part, offset)
            expected = sum(pending.held_bytes for pending in assembler._pending.values())
            assert assembler.held_bytes == expected + 512 * len(assembler._whole)
            assert assembler.held_bytes >= assembler.pending_bytes


def test_a_watermark_under_one_long_rollout_does_not_remember_all_that_came_after() -> None:
    watermark = Watermark()
    watermark.hold(0)
    for offset in range(1, 50_000):
        watermark.hold(offset)
        if offset > 10:
            watermark.release(offset - 10)
    assert len(watermark._heap) < 2_000
    assert watermark.lowest(99) == 0
    watermark.release(0)
    assert watermark.lowest(99_999) == 49_990


@pytest.mark.parametrize("fields", [{}, {"group_id": "g", "metadata": {"text": "x" * 100}}])
def test_a_clear_in_parts_clears_nothing_and_masks(fields: dict[str, Any]) -> None:
    """Its parts would lie on both sides of it. A replay that begins between them never saw it, and took the parts for
    an incomplete value of the next life; after a freeze they were late, and so was that whole life."""
    pieces = split_records(clear("r", **fields), start=1)
    bench = Bench()
    (result,) = bench.run([record(0, "r", GOOD), *pieces, record(50, "r", complete("r"))])
    assert result.reasons == [Reason.INVALID_ENTRY]
    assert result.snapshot.first_offset == 0
    assert [letter.offset for letter in bench.dead_letters] == [pieces[-1].offset]


def test_a_clear_is_never_split_where_it_is_published() -> None:
    with pytest.raises(RecordTooLargeError, match="metadata"):
        list(split_record(record_of(clear("r", metadata="x" * 2_000)), 1_500))
    assert len(list(split_record(record_of(complete("r", metadata="x" * 2_000)), 1_500))) == 3
    assert len(list(split_record(record_of(clear("r", metadata="x" * 500)), 1_500))) == 1
