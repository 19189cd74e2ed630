"""Record headers of the contract."""

from __future__ import annotations

PART = "freezepoint-part"
"""``<id>:<index>:<count>`` on each part of a split record; id is the whole value's xxh3-128 in hex."""

ERROR_TOPIC = "__connect.errors.topic"
ERROR_PARTITION = "__connect.errors.partition"
ERROR_OFFSET = "__connect.errors.offset"
ERROR_CLASS = "__connect.errors.exception.class.name"
ERROR_MESSAGE = "__connect.errors.exception.message"
"""Kafka Connect's dead-letter headers; the class name is the reason code."""

ORIGINAL_SIZE = "freezepoint-original-size"
"""On a dead letter that holds only the first bytes of a value: the value's size in bytes."""

Headers = tuple[tuple[str, bytes], ...]


def header(headers: Headers, name: str) -> bytes | None:
    """The last value of that name, as Kafka's own clients read it."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None
