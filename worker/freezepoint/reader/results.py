"""Results off the trajectories topic: put together, decoded, in the order of the log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from freezepoint.core.records import InputRecord
from freezepoint.errors import InputError
from freezepoint.transport.ports import Reader
from freezepoint_schemas import codec
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.parts import PartAssembler, PartError, PartHeader
from freezepoint_schemas.results import Result

RESULT_BYTES_MAX = 1 << 30
POLL_S = 0.5
POLL_RECORDS = 200


class BadResultError(InputError):
    """A record of the trajectories topic is no result that this library reads; the message says where it lies."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A result and where it lies: ``first_offset`` and ``offset`` are its first and last part's, equal for a whole one.
    ``size_bytes``: of its JSON."""

    result: Result
    partition: int
    offset: int
    first_offset: int
    size_bytes: int


@dataclass(slots=True)
class _Open:
    """A value whose first parts are here."""

    first_offset: int
    assembler: PartAssembler


class ResultDecoder:
    """Records in, results out.

    The parts of a result are written in one transaction and in order, so that a value that begins in its middle lost its
    beginning to retention, or lies around the point where reading began: it is reported once and skipped.
    """

    def __init__(self, result_bytes_max: int = RESULT_BYTES_MAX) -> None:
        self._result_bytes_max = result_bytes_max
        self._open: dict[int, dict[str, _Open]] = {}
        self._torn: dict[int, set[str]] = {}

    def take(self, record: InputRecord) -> ReadResult | None:
        """The result that this record is or completes; None where more parts are to come, or none matter any more.

        :raises BadResultError: it is none, or a part of none. What it said is then forgotten.
        """
        try:
            found = self._whole(record)
            if found is None:
                return None
            value, first_offset = found
            result = codec.decode_result(value)
        except InputError as error:
            raise BadResultError(
                f"record at partition {record.partition}, offset {record.offset}: {error}"
            ) from None
        return ReadResult(result, record.partition, record.offset, first_offset, len(value))

    def first_open(self, partition: int) -> int | None:
        """The lowest offset there of a value that is not complete yet."""
        return min((value.first_offset for value in self._open.get(partition, {}).values()), default=None)

    def forget(self, partition: int) -> None:
        """Reading of the partition begins anew."""
        self._open.pop(partition, None)
        self._torn.pop(partition, None)

    def _whole(self, record: InputRecord) -> tuple[bytes, int] | None:
        raw = header(record.headers, PART)
        if raw is None or record.value is None:
            return record.value or b"", record.offset
        part = PartHeader.parse(raw)
        if self._is_torn(record.partition, part):
            return None
        values = self._open.setdefault(record.partition, {})
        value = values.setdefault(part.value_id, _Open(record.offset, PartAssembler(self._result_bytes_max)))
        try:
            whole = value.assembler.add(part, record.value, record.offset)
        except InputError:
            del values[part.value_id]
            self._skip(record.partition, part)
            raise
        if whole is None:
            return None
        del values[part.value_id]
        return whole, value.first_offset

    def _is_torn(self, partition: int, part: PartHeader) -> bool:
        """Whether to pass over the part. :raises PartError: for the first one of a value without a beginning."""
        if part.value_id in self._torn.get(partition, ()):
            self._skip(partition, part)
            return True
        if part.index and part.value_id not in self._open.get(partition, {}):
            self._skip(partition, part)
            raise PartError(f"the parts before number {part.index} of {part.count} are not there (any more)")
        return False

    def _skip(self, partition: int, part: PartHeader) -> None:
        """Say nothing more of this value's parts up to the last one."""
        torn = self._torn.setdefault(partition, set())
        if part.index == part.count - 1:
            torn.discard(part.value_id)
        else:
            torn.add(part.value_id)


class ResultReader:
    """Results in the order of the log, partition by partition, without a group.

    ``on_bad`` hears of records that are no results, which are then skipped; without it the first one is raised.
    """

    def __init__(
        self,
        reader: Reader,
        on_bad: Callable[[BadResultError], None] | None = None,
        result_bytes_max: int = RESULT_BYTES_MAX,
    ) -> None:
        self._reader = reader
        self._on_bad = on_bad
        self._decoder = ResultDecoder(result_bytes_max)

    async def results(self, *, follow: bool = False) -> AsyncGenerator[ReadResult, None]:
        """Everything that is committed; with ``follow`` also what comes later, without an end.

        :raises BadResultError: see ``on_bad``.
        :raises BrokerError: the broker failed.
        """
        while follow or not await self._reader.at_end():
            for record in await self._reader.poll(POLL_S, POLL_RECORDS):
                result = self._take(record)
                if result is not None:
                    yield result

    def _take(self, record: InputRecord) -> ReadResult | None:
        try:
            return self._decoder.take(record)
        except BadResultError as error:
            if self._on_bad is None:
                raise
            self._on_bad(error)
            return None
