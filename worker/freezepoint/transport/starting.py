"""Where a subscription begins in a partition: one rule for every transport."""

from __future__ import annotations

from freezepoint.errors import ConfigurationError
from freezepoint.transport.ports import Extent, StartAt, Started


def resume_at(stored: int, extent: Extent, where: str) -> Started:
    """The start from a stored offset. ``where`` names group, topic and partition.

    :raises ConfigurationError: the topic ends before it, so it is not the topic that was read.
    """
    if stored > extent.end:
        raise ConfigurationError(
            f"{where}: the stored offset {stored} lies beyond the end {extent.end}: was the topic deleted and created "
            "again? Read with another group, or once with ignore_stored=True"
        )
    return Started(max(stored, extent.first), expired=max(0, extent.first - stored))


class StoredOffsets:
    """What one consumer knows of the offsets its group stores, by partition.

    It tells whether somebody else has owned a partition in between: the group then has an offset beyond all that this
    consumer ever asked it to store.
    """

    def __init__(self, start: StartAt) -> None:
        self.start = start
        self._asked_max: dict[int, int] = {}
        self._overwritten: set[int] = set()

    def asked(self, partition: int, offset: int) -> None:
        """Note that storing was asked for, whatever becomes of it."""
        self._asked_max[partition] = max(offset, self._asked_max.get(partition, offset))

    def started(self, partition: int, offset: int) -> None:
        """Note that a delivery begins anew at a stored offset."""
        self._asked_max[partition] = offset
        self._overwritten.add(partition)

    def is_ours(self, partition: int, stored: int | None) -> bool:
        """Whether nobody but this consumer can have stored it."""
        return stored is None or stored <= self._asked_max.get(partition, -1)

    def is_honoured(self, partition: int) -> bool:
        """Whether to begin at the offset that the group has stored."""
        return not self.start.ignore_stored or partition in self._overwritten
