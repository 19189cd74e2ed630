"""The choke point: every row of CONTRACT.md's "What bad input gets", lives, replays and the watermark."""

from __future__ import annotations

import orjson
import pytest

from freezepoint.core.effects import OVERSIZED_KEPT_BYTES
from freezepoint_schemas import codec, parts
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import (
    ERROR_CLASS,
    ERROR_MESSAGE,
    ERROR_OFFSET,
    ERROR_PARTITION,
    ERROR_TOPIC,
    ORIGINAL_PART,
    ORIGINAL_SIZE,
    PART,
    header,
)
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from tests.events import (
    Bench,
    cancelled,
    cancelled_call,
    clear,
    complete,
    entry,
    id_on_partition,
    incomplete,
    intent,
    record,
    records_of,
)

GOOD = entry("r", "c1", [1, 2], [3])


def reasons_after(*events: InputEvent) -> list[Reason]:
    bench = Bench()
    results = bench.run(records_of(events))
    assert len(results) == 1
    return results[0].reasons


def test_one_call_becomes_one_unmasked_result() -> None:
    bench = Bench()
    (result,) = bench.run(
        records_of([GOOD, complete("r", n_calls=1, reward=0.5, group_id="g", group_size=4)])
    )
    assert not result.mask_sample
    assert result.reasons == []
    assert (result.reward, result.group_id, result.group_size) == (0.5, "g", 4)
    assert (result.snapshot.first_offset, result.snapshot.freeze_offset) == (0, 1)
    assert result.traces[0].token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", Reason.UNDECODABLE_RECORD),
        (b"", Reason.UNDECODABLE_RECORD),
        (b"\xff\xfe", Reason.UNDECODABLE_RECORD),
        (b"[]", Reason.UNDECODABLE_RECORD),
        (b"null", Reason.UNDECODABLE_RECORD),
        (b'{"event": "surprise"}', Reason.UNDECODABLE_RECORD),
        (b'{"event": 7}', Reason.UNDECODABLE_RECORD),
        (b'{"event": "call_intent"}', Reason.INVALID_ENTRY),
        (b'{"prompt_token_ids": [1], "model_call_id": "x"}', Reason.INVALID_ENTRY),
        (b'{"event": "call_intent", "model_call_id": "x", "schema_version": 2}', Reason.UNSUPPORTED_SCHEMA),
        (b'{"event": "call_intent", "model_call_id": "x", "rollout_id": "other"}', Reason.FOREIGN_RECORD),
        (b'{"event": "call_intent", "model_call_id": "x", "rollout_id": 7}', Reason.FOREIGN_RECORD),
    ],
)
def test_a_lost_record_is_a_dead_letter_and_masks_its_rollout_alone(value: bytes, reason: Reason) -> None:
    bench = Bench()
    other: list[InputEvent] = [entry("s", "c1", [7], [8]), complete("s")]
    headers = (("trace", b"t1"),)
    bench.run(
        [
            record(0, "r", GOOD),
            record(1, "r", value, headers=headers),
            record(2, "r", complete("r")),
            record(3, "s", other[0]),
            record(4, "s", other[1]),
        ]
    )
    masked, fine = bench.results
    assert (masked.rollout_id, masked.reasons) == ("r", [reason])
    assert masked.traces[0].token_ids.tolist() == [1, 2, 3]
    assert (fine.rollout_id, fine.reasons) == ("s", [])
    (letter,) = bench.dead_letters
    assert letter.reason == reason
    assert (letter.record.key, letter.record.value) == (b"r", value)
    found = {
        name: header(letter.record.headers, name) for name in (ERROR_TOPIC, ERROR_PARTITION, ERROR_OFFSET)
    }
    assert found == {ERROR_TOPIC: b"rollout-tokens", ERROR_PARTITION: b"0", ERROR_OFFSET: b"1"}
    assert header(letter.record.headers, ERROR_CLASS) == reason.encode()
    assert header(letter.record.headers, ERROR_MESSAGE)
    assert header(letter.record.headers, "trace") == b"t1"


@pytest.mark.parametrize(
    "key", [None, b"", b"a/b", b"../x", b"!progress", b"\xff", b"a" * 256, "\u00e9".encode()]
)
def test_a_record_without_a_rollout_id_is_a_dead_letter_and_opens_no_rollout(key: bytes | None) -> None:
    bench = Bench()
    bench.run([record(0, key, GOOD), record(1, key, None)])
    assert [letter.reason for letter in bench.dead_letters] == [DeadLetterReason.INVALID_KEY] * 2
    assert not bench.core.open
    assert bench.core.watermark() == 2


def test_the_key_names_a_body_without_rollout_id() -> None:
    body = orjson.loads(codec.encode_event(GOOD))
    del body["rollout_id"]
    bench = Bench()
    (result,) = bench.run([record(0, "r", orjson.dumps(body)), record(1, "r", complete("r"))])
    assert (result.rollout_id, result.reasons) == ("r", [])


def test_a_record_on_another_partition_is_a_dead_letter_and_masks_nothing() -> None:
    bench = Bench(partition=1, partition_count=4)
    stranger, resident = id_on_partition(2, 4), id_on_partition(1, 4)
    bench.run(
        [
            record(0, stranger, entry(stranger, "c", [1], [2]), partition=1),
            record(1, resident, entry(resident, "c", [1], [2]), partition=1),
            record(2, resident, complete(resident), partition=1),
        ]
    )
    assert [letter.reason for letter in bench.dead_letters] == [DeadLetterReason.WRONG_PARTITION]
    assert [(result.rollout_id, result.reasons) for result in bench.results] == [(resident, [])]


def test_a_repeat_is_ignored_whatever_its_encoding() -> None:
    bench = Bench()
    packed = codec.encode_event(GOOD, packed=True)
    (result,) = bench.run(
        [record(0, "r", GOOD), record(1, "r", packed), record(2, "r", complete("r", n_calls=1))]
    )
    assert result.reasons == []
    assert bench.core.counters["duplicate"] == 1


def test_another_payload_under_the_same_call_id_masks_and_the_first_is_kept() -> None:
    other = entry("r", "c1", [1, 2], [9])
    bench = Bench()
    (result,) = bench.run(records_of([GOOD, other, complete("r")]))
    assert result.reasons == [Reason.CONFLICTING_ENTRY]
    assert result.traces[0].token_ids.tolist() == [1, 2, 3]


def test_what_comes_after_the_freeze_is_late_and_the_result_stands() -> None:
    bench = Bench()
    late: list[InputEvent] = [
        entry("r", "c2", [1, 2, 3], [4]),
        intent("r", "c3"),
        incomplete("r"),
        cancelled_call("r", "c4"),
        GOOD,
    ]
    bench.run(records_of([GOOD, complete("r"), *late]))
    assert len(bench.results) == 1
    assert [letter.reason for letter in bench.dead_letters] == [DeadLetterReason.LATE_AFTER_FREEZE] * len(
        late
    )


def test_a_second_complete_or_cancellation_is_ignored_and_counted() -> None:
    bench = Bench()
    bench.run(records_of([GOOD, complete("r"), complete("r"), cancelled("r")]))
    assert len(bench.results) == 1
    assert not bench.dead_letters
    assert bench.core.counters["ignored_after_freeze"] == 2


def test_a_complete_without_any_record_is_masked() -> None:
    assert reasons_after(complete("r")) == [Reason.NO_RECORDS]


def test_a_value_above_the_limit_leaves_its_first_bytes_and_its_size() -> None:
    bench = Bench(record_bytes_max=100_000)
    value = b"x" * 100_001
    (result,) = bench.run(
        [record(0, "r", GOOD), record(1, "r", value), record(2, "r", complete("r", n_calls=2))]
    )
    assert result.reasons == [Reason.ROLLOUT_TOO_LARGE]
    (letter,) = bench.dead_letters
    assert letter.record.value == value[:OVERSIZED_KEPT_BYTES]
    assert header(letter.record.headers, ORIGINAL_SIZE) == b"100001"


@pytest.mark.parametrize("limits", [{"bytes_max": 200}, {"entries_max": 2}])
def test_a_rollout_above_its_limits_is_masked_and_its_payload_dropped(limits: dict[str, int]) -> None:
    bench = Bench(**limits)
    calls = [entry("r", f"c{number}", [number], [number]) for number in range(3)]
    events: list[InputEvent] = [intent("r", "c9"), *calls, complete("r", n_calls=3, reward=1.0)]
    (result,) = bench.run(records_of(events))
    assert result.reasons == [Reason.ROLLOUT_TOO_LARGE]
    assert result.reward == 1.0
    assert result.traces == []


def test_evidence_of_lost_calls_masks() -> None:
    assert reasons_after(GOOD, intent("r", "c2"), complete("r")) == [Reason.DANGLING_INTENT]
    assert reasons_after(GOOD, incomplete("r", "c2"), complete("r")) == [Reason.CAPTURE_INCOMPLETE]
    assert reasons_after(GOOD, complete("r", n_calls=2)) == [Reason.CALL_COUNT_MISMATCH]
    assert (
        reasons_after(intent("r", "c1"), GOOD, intent("r", "c2"), cancelled_call("r", "c2"), complete("r"))
        == []
    )
    assert reasons_after(GOOD, intent("r", "c1"), complete("r")) == []


def test_a_cancelled_rollout_is_published_masked() -> None:
    bench = Bench()
    (result,) = bench.run(records_of([GOOD, cancelled("r", group_id="g", group_size=2)]))
    assert result.reasons == [Reason.ROLLOUT_CANCELLED]
    assert (result.group_id, result.group_size) == ("g", 2)


def test_a_clear_begins_a_new_life() -> None:
    bench = Bench()
    events: list[InputEvent] = [GOOD, clear("r"), entry("r", "c2", [5], [6]), complete("r", n_calls=1)]
    (result,) = bench.run(records_of(events))
    assert result.reasons == []
    assert result.traces[0].token_ids.tolist() == [5, 6]
    assert result.snapshot.first_offset == 2


def test_a_tombstone_is_a_clear() -> None:
    bench = Bench()
    (result,) = bench.run([record(0, "r", GOOD), record(1, "r", None), record(2, "r", complete("r"))])
    assert result.reasons == [Reason.NO_RECORDS]


def test_each_life_has_its_own_result_in_order() -> None:
    bench = Bench()
    events: list[InputEvent] = [
        GOOD,
        complete("r"),
        clear("r"),
        entry("r", "c2", [5], [6]),
        complete("r"),
        complete("r"),
    ]
    first, second = bench.run(records_of(events))
    assert first.traces[0].token_ids.tolist() == [1, 2, 3]
    assert second.traces[0].token_ids.tolist() == [5, 6]


def test_a_clear_with_a_group_opens_the_life_and_its_group_is_used_when_the_complete_has_none() -> None:
    bench = Bench()
    bench.run(records_of([clear("r", group_id="g", group_size=3, metadata={"seed": 1})]))
    assert bench.core.watermark() == 0
    bench.crash()
    (result,) = bench.run(
        records_of([clear("r", group_id="g", group_size=3, metadata={"seed": 1}), complete("r")])
    )
    assert (result.group_id, result.group_size, result.metadata) == ("g", 3, {"seed": 1})


def split(value: bytes, size: int) -> list[tuple[bytes, tuple[tuple[str, bytes], ...]]]:
    return [(part, ((PART, name.encode()),)) for name, part in parts.split(value, size)]


def test_split_records_come_together_in_any_order_and_count_from_their_first_part() -> None:
    pieces = split(codec.encode_event(GOOD), 50)
    assert len(pieces) > 3
    shuffled = [pieces[2], pieces[0], pieces[2], *pieces[3:], pieces[1]]
    bench = Bench()
    bench.feed(record(offset, "r", part, headers=headers) for offset, (part, headers) in enumerate(shuffled))
    assert bench.core.watermark() == 0
    (result,) = bench.run([record(100, "r", complete("r", n_calls=1))])
    assert result.reasons == []
    assert result.snapshot.first_offset == 0


def test_a_missing_part_masks_and_a_late_repeat_of_some_parts_does_not() -> None:
    pieces = split(codec.encode_event(GOOD), 50)
    for sent, expected in ((pieces[:-1], [Reason.NO_RECORDS]), ([*pieces, *pieces[:2]], [])):
        bench = Bench()
        bench.feed(record(offset, "r", part, headers=headers) for offset, (part, headers) in enumerate(sent))
        (result,) = bench.run([record(100, "r", complete("r"))])
        assert (Reason.CAPTURE_INCOMPLETE in result.reasons) == bool(expected)


@pytest.mark.parametrize(
    "name", [b"", b"x:0:1", b"0" * 32 + b":1:1", b"0" * 32 + b":0:2:3", b"0" * 32 + b":0:1"]
)
def test_a_bad_part_is_a_dead_letter_that_is_no_part_itself(name: bytes) -> None:
    bench = Bench()
    (result,) = bench.run([record(0, "r", b"half", headers=((PART, name),)), record(1, "r", complete("r"))])
    assert Reason.UNDECODABLE_RECORD in result.reasons
    (letter,) = bench.dead_letters
    assert header(letter.record.headers, PART) is None
    assert header(letter.record.headers, ORIGINAL_PART) == name


def test_parts_above_the_limit_mask_and_hold_no_memory() -> None:
    bench = Bench(record_bytes_max=1_000)
    pieces = split(b"x" * 5_000, 400)
    bench.feed(record(offset, "r", part, headers=headers) for offset, (part, headers) in enumerate(pieces))
    assert bench.core.open["r"].parts.pending_bytes == 0
    (result,) = bench.run([record(100, "r", complete("r"))])
    assert result.reasons == [Reason.ROLLOUT_TOO_LARGE]


def test_the_watermark_is_the_lowest_offset_a_replay_needs() -> None:
    bench = Bench()
    bench.feed(records_of([entry("a", "c", [1], [2]), entry("b", "c", [1], [2]), complete("b")]))
    assert bench.core.watermark() == 0
    bench.commit()
    assert bench.core.watermark() == 0
    bench.feed([record(3, "a", complete("a"))])
    assert bench.core.watermark() == 0
    bench.commit()
    assert bench.core.watermark() == 4
    bench.feed([record(4, "a", b"garbage"), record(5, "c", entry("c", "c", [1], [2]))])
    assert bench.core.watermark() == 4
    bench.commit()
    assert bench.core.watermark() == 5


def test_a_clear_holds_the_watermark_until_it_is_recorded() -> None:
    bench = Bench()
    bench.run(records_of([GOOD, complete("r")]))
    bench.feed([record(2, "r", clear("r"))])
    assert bench.core.watermark() == 2
    bench.commit()
    assert bench.core.watermark() == 3


def test_a_clear_that_overtakes_its_freeze_is_not_recorded_before_it() -> None:
    """Else a replay would take the first life's records for late ones."""
    bench = Bench()
    stream = records_of([GOOD, complete("r"), clear("r"), entry("r", "c2", [5], [6]), complete("r")])
    bench.feed(stream)
    bench.commit(0)
    bench.crash()
    bench.feed(stream)
    bench.commit(1)
    bench.crash()
    bench.run(stream)
    assert [result.traces[0].token_ids.tolist() for result in bench.results] == [[1, 2, 3], [5, 6]]
    assert not bench.dead_letters


def test_published_dead_letters_are_not_repeated_but_still_mask() -> None:
    bench = Bench()
    stream = [record(0, "r", GOOD), record(1, "r", b"garbage"), record(2, "r", complete("r"))]
    bench.feed(stream[:2])
    bench.commit()
    bench.crash()
    (result,) = bench.run(stream)
    assert result.reasons == [Reason.UNDECODABLE_RECORD]
    assert len(bench.dead_letters) == 1


def test_records_lost_to_retention_mask_the_open_lives_they_belonged_to() -> None:
    bench = Bench()
    bench.run(records_of([GOOD, entry("s", "c1", [1], [2])]))
    bench.crash()
    bench.core.next_offset = 1
    bench.core.expire(1)
    bench.run(
        [
            record(1, "s", entry("s", "c1", [1], [2])),
            record(2, "r", complete("r")),
            record(3, "s", complete("s")),
        ]
    )
    assert [(result.rollout_id, result.reasons) for result in bench.results] == [
        ("r", [Reason.INPUT_EXPIRED]),
        ("s", []),
    ]


def test_a_rollout_that_may_have_begun_in_what_was_never_read_says_so_when_calls_are_missing() -> None:
    """Within one timeout of the cut, and only where the count of calls does not match."""
    bench = Bench(rollout_timeout_s=0.1)
    bench.run(records_of([GOOD, complete("r")]))
    bench.crash()
    bench.core.next_offset = 10
    bench.core.expire(10)
    assert bench.core.unread_offsets == 8
    call = ("c2", [1], [2])
    begun, whole, dispatched, late = (entry(name, *call) for name in ("begun", "whole", "dispatched", "late"))
    early = records_of([begun, whole, clear("dispatched", group_id="g"), dispatched], 10)
    bench.run(early)
    bench.carry()
    bench.crash()
    rest = [
        complete("begun", n_calls=2),
        complete("whole", n_calls=1),
        complete("dispatched", n_calls=2),
        complete("nothing", n_calls=1),
    ]
    bench.run([*early, *records_of(rest, 20), *records_of([late, complete("late", n_calls=2)], 111)])
    mismatch = Reason.CALL_COUNT_MISMATCH
    assert {result.rollout_id: set(result.reasons) for result in bench.results} == {
        "r": set(),
        "begun": {mismatch, Reason.INPUT_EXPIRED},
        "whole": set(),
        "dispatched": {mismatch},
        "nothing": {mismatch, Reason.INPUT_EXPIRED},
        "late": {mismatch},
    }


def test_without_a_gap_no_time_is_after_one() -> None:
    """Records of files have no time."""
    bench = Bench()
    stream = [
        record(0, "r", entry("r", "c1", [1], [2])),
        record(1, "r", complete("r", n_calls=2)),
    ]
    bench.run([item._replace(timestamp_ms=0) for item in stream])
    assert bench.results[0].reasons == [Reason.CALL_COUNT_MISMATCH]


def test_progress_names_the_last_record_applied_by_any_owner_with_its_own_time() -> None:
    """An owner that publishes before it has replayed so far must not pair an older offset with that record's time: the
    next one would take the log for another one."""
    stream = records_of([entry("r", "c", [1], [2]), clear("s"), entry("s", "c", [1], [2])])
    bench = Bench()
    bench.run(stream)
    for fed in (0, 1, 2):
        bench.crash()
        bench.run(stream[:fed])
        progress = bench.progress
        assert progress is not None
        assert (progress.watermark, progress.applied_offset) == (0, 2)
        assert progress.applied_timestamp_ms == stream[2].timestamp_ms


def test_records_between_two_clears_are_not_late_in_a_replay() -> None:
    """The ledger keeps the first clear after a freeze: by the last one alone, what came before it would look late."""
    stream = [
        record(0, "other", b"garbage"),
        *records_of([GOOD, complete("r"), clear("r")], start=1),
        record(4, "r", b"garbage"),
        *records_of([entry("r", "c2", [5], [6]), clear("r"), entry("r", "c3", [7], [8])], start=5),
    ]
    steady, shaken = Bench(), Bench()
    steady.run(stream)
    shaken.feed(stream)
    shaken.commit(2)
    shaken.crash()
    shaken.run([*stream, record(8, "r", complete("r"))])
    letters = [(letter.offset, letter.reason) for letter in steady.dead_letters]
    assert letters == [(0, Reason.UNDECODABLE_RECORD), (4, Reason.UNDECODABLE_RECORD)]
    assert [(letter.offset, letter.reason) for letter in shaken.dead_letters] == letters
    assert [result.traces[0].token_ids.tolist() for result in shaken.results] == [[1, 2, 3], [7, 8]]
