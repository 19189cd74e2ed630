"""Reads results: committed records of the trajectories topic, put together and decoded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from freezepoint.core.records import InputRecord
from freezepoint.errors import InputError
from freezepoint.transport.ports import Reader
from freezepoint_schemas import codec
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.results import Result

RESULT_BYTES_MAX = 1 << 30
POLL_S = 0.5
POLL_RECORDS = 200


class BadResultError(InputError):
    """A record of the trajectories topic is no result that this library reads; the message says where it lies."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A result and where it lies: ``offset`` is its record's, or its last part's."""

    result: Result
    partition: int
    offset: int


@dataclass(slots=True)
class ResultReader:
    """Results in the order of the log, partition by partition.

    ``on_bad`` hears of records that are no results, which are then skipped; without it the first one is raised.
    """

    reader: Reader
    on_bad: Callable[[BadResultError], None] | None = None
    result_bytes_max: int = RESULT_BYTES_MAX
    _parts: dict[tuple[int, bytes | None], PartAssembler] = field(default_factory=dict)

    async def results(self, *, follow: bool = False) -> AsyncGenerator[ReadResult, None]:
        """Everything that is committed; with ``follow`` also what comes later, without an end.

        :raises BadResultError: see ``on_bad``.
        :raises BrokerError: the broker failed.
        """
        while follow or not await self.reader.at_end():
            for record in await self.reader.poll(POLL_S, POLL_RECORDS):
                result = self._take(record)
                if result is not None:
                    yield ReadResult(result, record.partition, record.offset)

    def _take(self, record: InputRecord) -> Result | None:
        """The result that this record is or completes."""
        try:
            value = self._whole(record)
            return None if value is None else codec.decode_result(value)
        except InputError as error:
            bad = BadResultError(f"record at partition {record.partition}, offset {record.offset}: {error}")
            if self.on_bad is None:
                raise bad from None
            self.on_bad(bad)
            return None

    def _whole(self, record: InputRecord) -> bytes | None:
        raw = header(record.headers, PART)
        if raw is None or record.value is None:
            return record.value
        part = PartHeader.parse(raw)
        place = (record.partition, record.key)
        assembler = self._parts.setdefault(place, PartAssembler(self.result_bytes_max))
        whole = assembler.add(part, record.value, record.offset)
        if not assembler.incomplete:  # all parts of a result come in one transaction: nothing can follow
            del self._parts[place]
        return whole
