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

ORIGINAL_PART = "freezepoint-original-part"
"""On a dead letter that is one part of a split record: its part header, so that it is not taken for a part itself."""

REPLAYED = "freezepoint-replayed"
"""``<topic>:<partition>:<offset>`` on a record that was put back from the dead letters: where it lay when it was set aside."""

Headers = tuple[tuple[str, bytes], ...]


def header(headers: Headers, name: str) -> bytes | None:
    """The last value of that name, as Kafka's own clients read it."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


def without(headers: Headers, name: str) -> Headers:
    """The headers but those of that name."""
    return tuple((key, value) for key, value in headers if key != name)
