"""Splits records above a topic's limit, for every writer of every transport; reading them back is ``PartAssembler``'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from freezepoint.core.effects import OVERSIZED_KEPT_BYTES
from freezepoint.core.records import OutputRecord
from freezepoint.errors import RecordTooLargeError
from freezepoint_schemas.headers import (
    ERROR_CLASS,
    ERROR_MESSAGE,
    ERROR_OFFSET,
    ERROR_PARTITION,
    ERROR_TOPIC,
    ORIGINAL_SIZE,
    PART,
    header,
)
from freezepoint_schemas.parts import split
from freezepoint_schemas.topics import Topic

RECORD_OVERHEAD_BYTES = 512
"""Room for the batch and record framing and for the part header."""
KEY_KEPT_BYTES = 255
"""How much of a key a shortened dead letter keeps: every rollout id fits."""
_TOLD = (ERROR_TOPIC, ERROR_PARTITION, ERROR_OFFSET, ERROR_CLASS, ERROR_MESSAGE)


@dataclass(frozen=True, slots=True)
class Measured:
    """A record that can be sent. ``room``: how many bytes of its value each part may have; None: it goes in one."""

    record: OutputRecord
    room: int | None

    def parts(self) -> Iterator[OutputRecord]:
        """The record, or its parts, each made when its turn comes. All carry the record's own headers and key."""
        record = self.record
        if self.room is None or record.value is None:
            yield record
            return
        for place, part in split(record.value, self.room):
            yield OutputRecord(
                record.topic, record.key, part, (*record.headers, (PART, place.encode())), record.partition
            )


def measured(record: OutputRecord, record_bytes_max: int) -> Measured:
    """The record against the limit of each part, ``record_bytes_max`` (the topic's ``max.message.bytes``).

    A ledger record is never split: the ledger keeps one record of a key, so all parts but the last would go.

    :raises RecordTooLargeError: key and headers alone leave no room, or it is a record that is never split.
    """
    fitted = _fitted(record, record_bytes_max)
    return Measured(fitted, _room_for_parts(fitted, record_bytes_max))


def split_record(record: OutputRecord, record_bytes_max: int) -> Iterator[OutputRecord]:
    """Its parts, see :func:`measured`."""
    return measured(record, record_bytes_max).parts()


def _fitted(record: OutputRecord, record_bytes_max: int) -> OutputRecord:
    """A dead letter whose key and headers take most of the room is shortened: it says what was set aside and where it lies,
    and holds the first bytes of its key and value. A producer chose them, and must not stop the worker; parts with no room
    but for a few bytes each would be many. Every other record is returned as it is."""
    beside_value = record.size - len(record.value or b"")
    if record.topic is not Topic.DEAD_LETTERS or beside_value <= record_bytes_max // 2:
        return record
    size = header(record.headers, ORIGINAL_SIZE) or str(len(record.value or b"")).encode()
    told = ((name, header(record.headers, name) or b"") for name in _TOLD)
    return replace(
        record,
        key=record.key and record.key[:KEY_KEPT_BYTES],
        value=record.value and record.value[: min(OVERSIZED_KEPT_BYTES, record_bytes_max // 4)],
        headers=((ORIGINAL_SIZE, size), *told),
    )


def _room_for_parts(record: OutputRecord, record_bytes_max: int) -> int | None:
    """See :class:`Measured`.

    :raises RecordTooLargeError: as :func:`measured`.
    """
    if record.size + RECORD_OVERHEAD_BYTES <= record_bytes_max or not record.value:
        return None
    if record.topic is Topic.LEDGER:
        raise RecordTooLargeError(
            f"a ledger record of {record.size} bytes is above the limit of {record_bytes_max}"
        )
    if record.whole:
        raise RecordTooLargeError(
            f"a clear of {record.size} bytes is above the limit of {record_bytes_max}, and never split: "
            "shorten its metadata"
        )
    room = record_bytes_max - RECORD_OVERHEAD_BYTES - (record.size - len(record.value))
    if room < 1:
        raise RecordTooLargeError(
            f"key and headers leave no room below the limit of {record_bytes_max} bytes"
        )
    return room
