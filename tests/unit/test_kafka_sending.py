"""Records to the client: cut into parts one by one, and looked at before the first of them is sent."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import RecordTooLargeError
from freezepoint.transport.kafka.sending import in_parts
from freezepoint_schemas.headers import ORIGINAL_SIZE, header
from freezepoint_schemas.topics import Topic

LIMIT = 100_000


@dataclass(frozen=True)
class Limits:
    """A cluster, as far as parts are concerned."""

    limit: int = LIMIT

    def record_bytes_max(self, _topic: Topic) -> int:
        return self.limit


def parts_of(records: list[OutputRecord], limits: Any = Limits()) -> Any:
    return in_parts(records, limits)


def test_parts_are_made_when_they_are_asked_for() -> None:
    size = 20_000_000
    records = [OutputRecord(Topic.TRAJECTORIES, b"r", bytes(size)), OutputRecord(Topic.LEDGER, b"r", b"{}")]
    tracemalloc.start()
    try:
        found = [(part.topic, len(part.value or b"")) for part in parts_of(records)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(length for _, length in found) == size + 2
    assert max(length for _, length in found) < LIMIT
    assert found[-1] == (Topic.LEDGER, 2)
    assert peak < size / 10


def test_a_record_that_cannot_be_cut_is_refused_before_anything_is_sent() -> None:
    fine = OutputRecord(Topic.TRAJECTORIES, b"r", b"{}")
    with pytest.raises(RecordTooLargeError):
        parts_of([fine, OutputRecord(Topic.LEDGER, b"r", bytes(2 * LIMIT))])


def test_headers_that_leave_little_room_do_not_make_many_parts() -> None:
    """They are a producer's choice, and every part would carry them."""
    much = (("h", bytes(LIMIT - 1_000)),)
    parts = list(parts_of([OutputRecord(Topic.DEAD_LETTERS, b"r", bytes(10 * LIMIT), much)]))
    (part,) = parts
    assert header(part.headers, ORIGINAL_SIZE) == str(10 * LIMIT).encode()
    assert part.size < LIMIT


@pytest.mark.parametrize("share", [0, 0.4])
def test_a_dead_letter_with_room_for_its_value_is_whole(share: float) -> None:
    many = (("h", bytes(int(share * LIMIT))),)
    parts = list(parts_of([OutputRecord(Topic.DEAD_LETTERS, b"r", bytes(3 * LIMIT), many)]))
    assert sum(len(part.value or b"") for part in parts) == 3 * LIMIT
    assert all(part.headers[:1] == many for part in parts)
