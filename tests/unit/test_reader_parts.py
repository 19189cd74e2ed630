"""Options, staleness, and results put together from parts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from freezepoint.core.records import InputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.reader import BadResultError, DeliveryId, TrajectoryReader
from freezepoint.reader.options import start_at
from freezepoint.reader.results import ResultDecoder
from freezepoint.reader.trajectory import Lag, StalenessRule
from freezepoint.settings import Settings
from freezepoint.transport.ports import StartAt
from freezepoint.transport.splitting import split_record
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result
from tests.results import output, result, trace, trajectory


def records(made: Result, *, first_offset: int = 0, record_bytes_max: int = 1_000_000) -> list[InputRecord]:
    return [
        InputRecord(0, first_offset + number, 0, part.key, part.value, part.headers)
        for number, part in enumerate(split_record(output(made), record_bytes_max))
    ]


def large(rollout_id: str) -> Result:
    return result(rollout_id, metadata={"text": "x" * 1_000})


def test_a_split_result_begins_at_its_first_part() -> None:
    decoder = ResultDecoder()
    parts = records(large("a"), first_offset=5, record_bytes_max=900)
    other = records(result("b"), first_offset=50)
    assert len(parts) > 3
    assert [decoder.take(part) for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert decoder.first_open(0) == 5
    whole = decoder.take(other[0])
    assert whole is not None
    assert (whole.first_offset, whole.offset) == (50, 50)
    read = decoder.take(parts[-1])
    assert read is not None
    assert read.result.rollout_id == "a"
    assert (read.first_offset, read.offset) == (5, parts[-1].offset)
    assert read.size_bytes == len(codec.encode_result(read.result))
    assert decoder.first_open(0) is None


def test_a_result_without_its_first_parts_is_said_once_and_skipped() -> None:
    decoder = ResultDecoder()
    parts = records(large("a"), record_bytes_max=900)[1:]
    with pytest.raises(BadResultError, match=r"offset 1: the parts before number 1 of \d+ are not there"):
        decoder.take(parts[0])
    assert [decoder.take(part) for part in parts[1:]] == [None] * (len(parts) - 1)
    assert decoder.first_open(0) is None
    again = [decoder.take(part) for part in records(large("a"), record_bytes_max=900)]
    assert again[-1] is not None, "the same bytes, whole this time"


def test_parts_above_the_limit_are_skipped() -> None:
    decoder = ResultDecoder(result_bytes_max=1_000)
    found = []
    errors = 0
    for part in records(large("a"), record_bytes_max=900):
        try:
            found.append(decoder.take(part))
        except BadResultError:
            errors += 1
    assert errors == 1
    assert not any(found)


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"{}", None])
def test_what_is_no_result(value: bytes | None) -> None:
    with pytest.raises(BadResultError, match="partition 0, offset 3"):
        ResultDecoder().take(InputRecord(0, 3, 0, b"r", value))


def test_a_header_that_names_no_part() -> None:
    with pytest.raises(BadResultError, match="part header"):
        ResultDecoder().take(InputRecord(0, 0, 0, b"r", b"x", (("freezepoint-part", b"?"),)))


def test_lags() -> None:
    rule = StalenessRule(lag_max=2)
    spans = [(0, 1), (1, 2)]

    def lag(versions: list[int | str | None], current: int | None) -> Lag:
        return rule.lag(trajectory(result("r", traces=[trace([1, 2], spans, versions=versions)])), current)

    assert lag([7, 8], 9) == Lag(2)
    assert lag([6, 8], 9) == Lag(3, stale=True)
    assert lag([9, 9], 5) == Lag(-4)
    assert lag(["a", 6], 9) == Lag(3, unknown=True, stale=True)
    assert lag(["a", None], 9) == Lag(None, unknown=True)
    assert lag([7, 8], None) == Lag(None)
    assert StalenessRule().lag(trajectory(result("r", version=1)), 100) == Lag(99)


def test_the_delivery_id_names_the_frozen_life() -> None:
    made = trajectory(result("run.7-0", freeze_offset=41))
    assert made.delivery_id == DeliveryId("run.7-0", 0, 41)
    assert str(made.delivery_id) == "run.7-0@0:41"


def test_starts() -> None:
    assert start_at("stored", ignore_stored=False) == StartAt("earliest")
    assert start_at("latest", ignore_stored=True) == StartAt("latest", ignore_stored=True)
    assert start_at(datetime(2030, 1, 1, tzinfo=UTC), ignore_stored=False) == StartAt(1_893_456_000_000)
    assert start_at(1.5, ignore_stored=False) == StartAt(1_500)


@pytest.mark.parametrize(
    "wrong",
    [
        {"broker": "redis://x"},
        {"broker": "kafka://h:99999"},
        {"topic_prefix": "a/b"},
        {"group": ""},
        {"start": "newest"},
        {"start": -1},
        {"start": datetime(2030, 1, 1)},  # noqa: DTZ001 - that is what is wrong with it
        {"run": "a/b"},
        {"delivery": "everything"},
        {"on_stale": "drop"},
        {"max_staleness": -1},
    ],
)
def test_wrong_arguments_are_said_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        TrajectoryReader(**wrong)  # type: ignore[arg-type]


def test_a_reader_that_was_never_used_has_nothing_to_close() -> None:
    reader = TrajectoryReader(settings=Settings(broker="sqlite:////nowhere/x.db")).blocking()
    reader.commit()
    reader.close()
    with pytest.raises(ConfigurationError, match="closed"):
        next(iter(reader))
    assert reader.counts.read == 0
