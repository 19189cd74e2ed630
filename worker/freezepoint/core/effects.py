"""What the core asks the worker to do, in offset order."""

from __future__ import annotations

from dataclasses import dataclass

from freezepoint.core.frozen import FrozenLog
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint_schemas.headers import (
    ERROR_CLASS,
    ERROR_MESSAGE,
    ERROR_OFFSET,
    ERROR_PARTITION,
    ERROR_TOPIC,
    ORIGINAL_PART,
    ORIGINAL_SIZE,
    PART,
)
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import Topic

OVERSIZED_KEPT_BYTES = 64 * 1024
"""How much of a value above the worker's record limit its dead letter keeps."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Build this log and publish its result; until that is committed the watermark stays at ``held_offset``."""

    log: FrozenLog
    held_offset: int

    @property
    def offset(self) -> int:
        return self.log.freeze_offset


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Publish this dead letter."""

    offset: int
    reason: Reason | DeadLetterReason
    record: OutputRecord


Effect = Freeze | DeadLetter


def dead_letter(
    source: InputRecord,
    topic_name: str,
    reason: Reason | DeadLetterReason,
    message: str,
    *,
    truncate: bool = False,
) -> DeadLetter:
    """The dead letter of a record: raw key, value and headers, and Kafka Connect's headers that say what and where.

    :param topic_name: the tokens topic's name on the broker.
    :param truncate: keep only the first bytes of the value, and its size in a header.
    """
    value = source.value
    extra: tuple[tuple[str, bytes], ...] = ()
    if truncate and value is not None:
        extra = ((ORIGINAL_SIZE, str(len(value)).encode()),)
        value = value[:OVERSIZED_KEPT_BYTES]
    headers = (
        *((ORIGINAL_PART if name == PART else name, content) for name, content in source.headers),
        *extra,
        (ERROR_TOPIC, topic_name.encode()),
        (ERROR_PARTITION, str(source.partition).encode()),
        (ERROR_OFFSET, str(source.offset).encode()),
        (ERROR_CLASS, reason.value.encode()),
        (ERROR_MESSAGE, message.encode()),
    )
    record = OutputRecord(Topic.DEAD_LETTERS, source.key, value, headers)
    return DeadLetter(source.offset, reason, record)
