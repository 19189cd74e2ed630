"""Time-outs by the partition's own clock: idle while looked at, and only then."""

from __future__ import annotations

from freezepoint.core.effects import Freeze
from freezepoint.core.idle import MARKS_PER_TIMEOUT, IdleClock
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from tests.events import Bench, clear, complete, entry, record, records_of

HOUR = 3_600.0


def test_an_idle_rollout_is_published_masked_and_its_late_complete_is_counted() -> None:
    bench = Bench(rollout_timeout_s=HOUR)
    bench.feed(records_of([entry("r", "c", [1], [2]), entry("s", "c", [1], [2])]))
    bench.waiting += bench.core.time_out(HOUR / 2)
    bench.feed([record(2, "s", entry("s", "c2", [1, 2], [3]))])
    bench.waiting += bench.core.time_out(HOUR * 0.6)
    bench.commit()
    (result,) = bench.results
    assert (result.rollout_id, result.reasons, result.snapshot.freeze_offset) == (
        "r",
        [Reason.ROLLOUT_TIMEOUT],
        2,
    )
    assert result.traces[0].token_ids.tolist() == [1, 2]
    bench.run([record(3, "r", complete("r")), record(4, "r", entry("r", "c2", [1, 2], [3]))])
    assert len(bench.results) == 1
    assert bench.core.counters["ignored_after_freeze"] == 1
    assert [letter.reason for letter in bench.dead_letters] == [DeadLetterReason.LATE_AFTER_FREEZE]
    assert set(bench.core.open) == {"s"}


def test_a_time_out_that_was_not_committed_gives_way_to_the_complete() -> None:
    bench = Bench(rollout_timeout_s=HOUR)
    stream = records_of([entry("r", "c", [1], [2]), complete("r")])
    bench.feed(stream[:1])
    bench.commit()
    assert [type(effect) for effect in bench.core.time_out(2 * HOUR)] == [Freeze]
    bench.crash()
    (result,) = bench.run(stream)
    assert result.reasons == []


def test_restarts_and_outages_time_nothing_out() -> None:
    """The clock stands while nobody works, and a replay puts records back where they were on it."""
    bench = Bench(rollout_timeout_s=HOUR)
    stream = records_of([entry("r", "c", [1], [2])])
    for _ in range(20):
        bench.crash()
        bench.feed(stream)
        assert not bench.core.time_out(HOUR / 25)
        bench.commit()
    assert bench.core.clock.now > HOUR / 2
    assert [type(effect) for effect in bench.core.time_out(HOUR / 2)] == [Freeze]


def test_a_replayed_record_is_placed_in_its_favour_and_not_by_more_than_a_mark() -> None:
    clock = IdleClock(HOUR)
    applied: dict[int, float] = {}
    for offset in range(2_000):
        clock.advance(7.0)
        applied[offset] = clock.now
        clock.mark(offset + 1)
    assert len(clock.marks) <= MARKS_PER_TIMEOUT + 3
    again = IdleClock(HOUR, clock.now, list(clock.marks))
    for offset, at in applied.items():
        placed = again.placed(offset)
        assert placed >= at
        if clock.now - at < HOUR:
            assert placed - at <= HOUR / MARKS_PER_TIMEOUT + 7.0


def test_the_dispatch_of_a_rollout_that_never_began_times_out_with_its_group() -> None:
    bench = Bench(rollout_timeout_s=HOUR)
    bench.feed(records_of([clear("r", group_id="g", group_size=2)]))
    bench.waiting += bench.core.time_out(2 * HOUR)
    bench.commit()
    (result,) = bench.results
    assert (result.group_id, result.group_size) == ("g", 2)
    assert Reason.ROLLOUT_TIMEOUT in result.reasons
