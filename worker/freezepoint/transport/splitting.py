"""Splits records above a topic's limit, for every writer of every transport; reading them back is ``PartAssembler``'s."""

from __future__ import annotations

from collections.abc import Iterator

from freezepoint.core.records import OutputRecord
from freezepoint.errors import RecordTooLargeError
from freezepoint_schemas.headers import PART
from freezepoint_schemas.parts import split
from freezepoint_schemas.topics import Topic

RECORD_OVERHEAD_BYTES = 512
"""Room for the batch and record framing and for the part header."""


def split_record(record: OutputRecord, record_bytes_max: int) -> Iterator[OutputRecord]:
    """The record, or its parts, each within ``record_bytes_max`` (the topic's ``max.message.bytes``).

    All parts carry the record's own headers and key. A ledger record is never split: the ledger keeps one record of a
    key, so all parts but the last would go.

    :raises RecordTooLargeError: key and headers alone leave no room, or it is a record that is never split.
    """
    room = room_for_parts(record, record_bytes_max)
    if room is None or record.value is None:
        yield record
        return
    for header, part in split(record.value, room):
        yield OutputRecord(
            record.topic, record.key, part, (*record.headers, (PART, header.encode())), record.partition
        )


def room_for_parts(record: OutputRecord, record_bytes_max: int) -> int | None:
    """How many bytes of the value each part may have; None: the record need not be split.

    :raises RecordTooLargeError: as :func:`split_record`.
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
