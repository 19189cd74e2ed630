"""A rollout that never completes holds back nobody, and no restart reads everything that came since."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import xxhash

from freezepoint.core.carry import dump_life, load_life
from freezepoint.core.rollout import LogLimits, RolloutLog
from freezepoint_schemas import codec, parts
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import PART
from freezepoint_schemas.parts import PartAssembler, PartError, PartHeader
from freezepoint_schemas.reasons import Reason
from tests.events import (
    Bench,
    cancelled_call,
    clear,
    comparable,
    complete,
    entry,
    incomplete,
    intent,
    record,
    records_of,
)

LIMITS = LogLimits(1 << 20, 100)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def carried(life: RolloutLog) -> RolloutLog:
    return load_life(life.rollout_id, dump_life(life, []), LIMITS, 1 << 20)


def test_a_life_goes_on_from_what_was_carried() -> None:
    bench = Bench()
    calls: list[InputEvent] = [
        entry("r", "c1", [1], [2], routed_experts=[[[1]], [[2]]], policy_version=3),
        entry("r", "c2", [1, 2, 3], [4], output_items=[{"a": None, "b": [1.5, "x"]}]),
    ]
    notes: list[InputEvent] = [intent("r", "c3"), cancelled_call("r", "c3"), incomplete("r", "c4", "why")]
    bench.feed(records_of([clear("r", group_id="g", group_size=2), *calls, *notes]))
    bench.feed([record(9, "r", b"garbage")])
    bench.commit()
    again = carried(bench.core.open["r"])
    closing = complete("r", n_calls=2)
    before, after = (life.freeze(closing, 0, 10) for life in (bench.core.open["r"], again))
    assert plain([codec.encode_event(event) for event in after.entries]) == [
        codec.encode_event(event) for event in before.entries
    ]
    for name in ("intents", "cancelled", "marks", "faults", "dispatch", "first_offset"):
        assert getattr(after, name) == getattr(before, name)
    assert again.last_offset == 9


def test_a_carried_life_still_knows_repeats_conflicts_and_parts() -> None:
    value = codec.encode_event(entry("r", "c2", [1, 2], [3]))
    pieces = [(part, ((PART, name.encode()),)) for name, part in parts.split(value, 60)]
    stream = [
        record(0, "r", entry("r", "c1", [1], [2])),
        record(1, "r", pieces[0][0], headers=pieces[0][1]),
        record(2, "r", entry("r", "c1", [1], [2])),
        *(
            record(3 + number, "r", part, headers=headers)
            for number, (part, headers) in enumerate(pieces[1:])
        ),
        record(50, "r", entry("r", "c1", [1], [9])),
        record(51, "r", complete("r", n_calls=2)),
    ]
    expected = Bench().run(stream)
    for stop in range(1, len(stream)):
        bench = Bench()
        bench.feed(stream[:stop])
        bench.commit()
        bench.carry()
        bench.crash()
        bench.run(stream)
        assert plain([comparable(result) for result in bench.results]) == plain(
            [comparable(result) for result in expected]
        )
    assert expected[0].reasons == [Reason.CONFLICTING_ENTRY]


def test_an_oversized_life_stays_oversized() -> None:
    life = RolloutLog("r", 0, LogLimits(10, 100), PartAssembler(100))
    life.write(entry("r", "c1", [1], [2]), 100)
    again = carried(life)
    assert again.oversized
    assert again.freeze(complete("r", n_calls=1), 0, 1).faults == {Reason.ROLLOUT_TOO_LARGE}


def digest(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)


REFUSED = {
    "a whole that its id does not name": [(PartHeader(digest(b"other"), 0, 1), b"x")],
    "another content": [(PartHeader(digest(b"xy"), 0, 2), b"x"), (PartHeader(digest(b"xy"), 0, 2), b"z")],
    "another count": [(PartHeader(digest(b"xy"), 0, 2), b"x"), (PartHeader(digest(b"xy"), 0, 3), b"x")],
    "too large a value": [(PartHeader(digest(b"large"), 0, 2), b"x" * 5_000)],
}


@pytest.mark.parametrize("bytes_max", [300, 600, 900, 1_200, 5_000])
@pytest.mark.parametrize("name", REFUSED)
def test_after_a_refused_part_a_life_is_what_is_carried_of_it(name: str, bytes_max: int) -> None:
    """Limits that only the next record enforced would be enforced by carrying, and the next record be read otherwise."""
    limits, value_bytes_max = LogLimits(bytes_max, 100), 2_000
    life = RolloutLog("r", 0, limits, PartAssembler(value_bytes_max))
    for number in range(3):
        life.add_part(PartHeader(digest(b"%d" % number), 0, 1), b"%d" % number, number)
    for header, part in REFUSED[name]:
        with contextlib.suppress(PartError):
            life.add_part(header, part, 10)
        again = load_life("r", dump_life(life, []), limits, value_bytes_max)
        assert dump_life(again, []) == dump_life(life, [])
        assert again.parts.held_bytes == life.parts.held_bytes


@pytest.mark.parametrize("others", [50, 500])
def test_the_replay_stays_bounded_however_old_the_oldest_rollout_is(others: int) -> None:
    """The figure: bytes behind the watermark, with one rollout open since the beginning."""
    limit, bench, offset = 4_000, Bench(), 1
    bench.feed([record(0, "stuck", entry("stuck", "c", [1], [2]))])
    since: dict[int, int] = {0: bench.core.fed_bytes}
    furthest = 0
    for number in range(others):
        for event in (entry(f"r{number}", "c", [1], [2]), complete(f"r{number}")):
            bench.feed([record(offset, event.rollout_id, event)])
            offset += 1
            since[offset] = bench.core.fed_bytes
        for life in bench.core.overdue(limit):
            for output in bench.core.carry(life, []):
                bench._write(output)
        bench.commit()
        assert bench.progress is not None
        furthest = max(furthest, bench.core.fed_bytes - since[bench.progress.watermark])
    assert furthest <= 2 * limit
    assert len(bench.results) == others
    assert bench.carried_chunks() == 1
    bench.crash()
    bench.run([record(offset, "stuck", complete("stuck", n_calls=1))])
    assert bench.results[-1].reasons == []
    assert bench.results[-1].snapshot.first_offset == 0
    assert bench.carried_chunks() == 0


def test_what_was_carried_outlives_the_log_it_came_from() -> None:
    bench = Bench()
    bench.feed(records_of([entry("kept", "c", [1], [2]), entry("lost", "c", [1], [2])]))
    bench.commit()
    for output in bench.core.carry(bench.core.open["kept"], []):
        bench._write(output)
    bench.commit()
    bench.crash()
    bench.core.next_offset = 2
    bench.core.expire(2)
    bench.run([record(2, "kept", complete("kept")), record(3, "lost", complete("lost"))])
    assert {result.rollout_id: result.reasons for result in bench.results} == {
        "kept": [],
        "lost": [Reason.INPUT_EXPIRED],
    }


def test_a_carried_life_whose_later_records_are_lost_is_masked_and_holds_no_memory() -> None:
    bench = Bench()
    bench.feed(records_of([entry("r", "c1", [1], [2])]))
    bench.carry()
    bench.feed(records_of([entry("r", "c2", [1], [2]), entry("s", "c1", [1], [2])], start=1))
    bench.commit()
    bench.crash()
    assert bench.core.memory_bytes > 0
    bench.core.expire(5)
    assert bench.core.memory_bytes == 0
    (result,) = bench.run(records_of([complete("r", n_calls=2)], start=5))
    assert "input_expired" in result.reasons


def test_a_clear_forgets_what_was_carried() -> None:
    bench = Bench()
    bench.feed(records_of([entry("r", "c", [1], [2])]))
    bench.commit()
    bench.carry()
    assert bench.carried_chunks() == 1
    bench.run([record(1, "r", clear("r"))])
    assert bench.carried_chunks() == 0
    bench.crash()
    assert not bench.core.open


def test_a_carried_life_does_not_draw_the_watermark_past_what_is_still_to_be_replayed() -> None:
    """After a restart it holds an offset ahead of reading. A transaction before reading came there said that nothing
    below it was needed, and the next restart began without the records of other lives."""
    stream = records_of([entry("a", "c", [1], [2]), entry("b", "c", [1], [2]), entry("a", "d", [1, 2], [3])])
    bench = Bench()
    bench.feed(stream)
    life = bench.core.open["a"]
    for output in [*bench.core.carry(life, []), *bench.core.take([])]:
        bench._write(output)
    bench.crash()
    assert bench.core.next_offset == 1
    bench.commit()
    assert bench.core.watermark() == 1
    bench.crash()
    results = bench.run([*stream, record(3, "b", complete("b")), record(4, "a", complete("a", n_calls=2))])
    assert [(result.rollout_id, result.reasons) for result in results] == [("b", []), ("a", [])]


def test_a_clear_takes_the_carried_life_with_it_when_a_replay_sees_it_again() -> None:
    """The clear is in the ledger already when the life before it, whose dead letter was not published, is carried."""
    stream = [
        record(0, "a", b"garbage"),
        record(1, "a", entry("a", "first", [1], [2])),
        record(2, "a", None),
        record(3, "a", entry("a", "second", [1], [2])),
        record(4, "a", complete("a")),
    ]
    bench = Bench()
    bench.feed(stream[:3])
    bench.commit(0)
    bench.crash()
    bench.feed(stream[:2])
    bench.commit()
    bench.carry()
    assert bench.carried_chunks() == 1
    for item in stream[2:4]:
        bench.run([item])
        bench.crash()
    assert bench.carried_chunks() == 0
    (result,) = bench.run(stream)
    assert [span.call_id for trace in result.traces for span in trace.spans] == ["second"]
    assert [letter.offset for letter in bench.dead_letters] == [0]


def test_a_dead_letter_of_a_carried_life_survives_its_clear() -> None:
    """Only the carried log knows the first part of the value that turns out to be garbage."""
    pieces = [(part, ((PART, name.encode()),)) for name, part in parts.split(b"garbage", 4)]
    stream = [
        record(0, "b", entry("b", "slow", [1], [2])),
        record(1, "a", pieces[0][0], headers=pieces[0][1]),
        record(2, "b", complete("b")),
        record(3, "a", pieces[1][0], headers=pieces[1][1]),
        record(4, "a", None),
        record(5, "a", entry("a", "second", [1], [2])),
    ]
    bench = Bench()
    bench.feed(stream[:2])
    bench.carry()
    bench.feed(stream)
    bench.commit(0)  # the build of b is slow: nothing behind it is published
    assert bench.core.dirty is False
    bench.crash()
    (_, result) = bench.run([*stream, record(6, "a", complete("a"))])
    assert [span.call_id for trace in result.traces for span in trace.spans] == ["second"]
    assert [(letter.offset, letter.reason) for letter in bench.dead_letters] == [
        (3, Reason.UNDECODABLE_RECORD)
    ]
    assert bench.carried_chunks() == 0
