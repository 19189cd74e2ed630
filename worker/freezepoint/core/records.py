"""Records as the core reads and writes them, without any client's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from freezepoint_schemas.headers import Headers
from freezepoint_schemas.topics import Topic


class InputRecord(NamedTuple):
    """One record as read from a partition. ``timestamp_ms`` is the broker's append time."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One record to write. Without ``partition`` the key decides (Kafka's default partitioner). ``whole``: it means what
    it means only in one piece, and is never split."""

    topic: Topic
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    whole: bool = False

    @property
    def size(self) -> int:
        """Payload bytes: key, value and headers."""
        return (
            len(self.key or b"")
            + len(self.value or b"")
            + sum(len(name) + len(value) for name, value in self.headers)
        )
