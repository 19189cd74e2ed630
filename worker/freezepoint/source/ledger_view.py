"""What the workers have decided, read from the ledger as it grows: it says where in a partition a rollout may lie."""

from __future__ import annotations

import time
from collections import defaultdict

from freezepoint.core.ledger import Decided
from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.transport.ports import Reader
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY
from freezepoint_schemas.topics import Topic, TopicNames

POLL_S = 0.05
POLL_RECORDS = 1_000


class LedgerView:
    """The first refresh reads the whole ledger, the later ones what came since. Holds some 200 bytes a rollout id."""

    def __init__(self, reader: Reader, names: TopicNames, deadline_s: float) -> None:
        self._reader = reader
        self._name = names[Topic.LEDGER]
        self._deadline_s = deadline_s
        self._decided: defaultdict[int, dict[str, Decided]] = defaultdict(dict)
        self._watermarks: dict[int, int] = {}

    async def refresh(self) -> None:
        """Read to the end of now.

        :raises BrokerUnavailableError: nothing came for ``deadline_s``.
        """
        moved_at = time.monotonic()
        while not await self._reader.at_end():
            for record in await self._reader.poll(POLL_S, POLL_RECORDS):
                self._take(record)
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > self._deadline_s:
                raise BrokerUnavailableError(f"nothing more of {self._name} came for {self._deadline_s:g} s")

    def _take(self, record: InputRecord) -> None:
        if record.key is None or CARRY_MARK in record.key[1:]:
            return  # a piece of a carried log says nothing here
        if record.key == PROGRESS_KEY and record.value is not None:
            self._watermarks[record.partition] = codec.decode_progress(record.value).watermark
        elif record.value is None:
            self._decided[record.partition].pop(record.key.decode("ascii", "replace"), None)
        else:
            decided = Decided.of(codec.decode_ledger(record.value))
            self._decided[record.partition][record.key.decode("ascii", "replace")] = decided

    def decided(self, partition: int, rollout_id: str) -> Decided:
        return self._decided[partition].get(rollout_id, Decided())

    def watermark(self, partition: int) -> int:
        """Nothing that is open, or not worked on yet, lies below it."""
        return self._watermarks.get(partition, 0)
