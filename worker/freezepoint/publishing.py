"""Publishes events: files of them, single ones, and simulated load. Everything in order, nothing held in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from freezepoint.core.records import OutputRecord
from freezepoint.errors import InputError
from freezepoint.lines import LineError, Source
from freezepoint.simulate import Simulated, Truth
from freezepoint.transport.ports import Producer
from freezepoint.wording import counted
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import (
    CaptureIncomplete,
    InputEvent,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.topics import Topic, is_rollout_id

BATCH_RECORDS = 500
BATCH_BYTES = 4 * 1024 * 1024
_CLOSING = frozenset({"rollout_complete", "rollout_cancelled", "rollout_clear"})


@dataclass(slots=True)
class BatchPublisher:
    """Publishes in the order of :meth:`put`: one batch is in flight while the next one fills, never more.

    Use it as a context manager; leaving it normally waits until everything is durable. ``records`` and ``bytes``
    count what is. ``on_durable`` is called when they grow.
    """

    producer: Producer
    records_max: int = BATCH_RECORDS
    bytes_max: int = BATCH_BYTES
    on_durable: Callable[[], None] | None = None
    records: int = 0
    bytes: int = 0
    _batch: list[OutputRecord] = field(default_factory=list)
    _batch_bytes: int = 0
    _flight: asyncio.Task[None] | None = None

    async def put(self, record: OutputRecord) -> None:
        """Take one record; waits while two batches are under way.

        :raises BrokerError: an earlier batch failed.
        """
        self._batch.append(record)
        self._batch_bytes += record.size
        if len(self._batch) >= self.records_max or self._batch_bytes >= self.bytes_max:
            await self._depart()

    async def flush(self) -> None:
        """Return once everything taken is durable. :raises BrokerError: it cannot be made so."""
        if self._batch:
            await self._depart()
        await self._land()

    async def _depart(self) -> None:
        await self._land()
        batch, self._batch = self._batch, []
        size, self._batch_bytes = self._batch_bytes, 0
        self._flight = asyncio.create_task(self._send(batch, size))

    async def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            await flight

    async def _send(self, batch: Sequence[OutputRecord], size: int) -> None:
        await self.producer.send(batch)
        self.records += len(batch)
        self.bytes += size
        if self.on_durable is not None:
            self.on_durable()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.flush()
        elif self._flight is not None:  # what failed first is what people have to hear of
            await asyncio.wait({self._flight})


def record_of(event: InputEvent, *, packed: bool = False) -> OutputRecord:
    """The record that publishes an event."""
    return OutputRecord(
        Topic.TOKENS,
        event.rollout_id.encode("ascii"),
        codec.encode_event(event, packed=packed),
        whole=isinstance(event, RolloutClear),
    )


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class Published:
    """What became durable, how many lines were skipped, and how many rollouts therefore got no complete event."""

    records: int
    rollouts: int
    bytes: int
    skipped: int
    withheld: int = 0


async def publish_files(
    publisher: BatchPublisher,
    files: Sequence[Source],
    *,
    complete: bool = False,
    on_bad: Callable[[LineError], None] | None = None,
    on_position: Callable[[int, int], None] | None = None,
) -> Published:
    """Publish every line as it stands, keyed by the rollout it names, in the order given.

    :param complete: add the complete event after each rollout's last line, unless that line ends or clears it. The rollouts of
        a file with a skipped line that may have been anybody's get none: it may have been a call of theirs.
    :param on_bad: hears of lines that name no rollout, which are then skipped; without it the first one is raised,
        once all lines before it are durable. A damaged line in which a rollout can still be read masks that one
        (``capture_incomplete``).
    :param on_position: hears the number of the file and how many of its bytes have been read.
    :raises LineError: a line names no valid rollout.
    :raises BrokerError: a batch failed.
    """
    ends, withheld = _ends(files) if complete else ({}, set())
    rollouts: set[str] = set()
    skipped = 0
    for number, file in enumerate(files):
        for line in file.lines(_of_file(number, on_position)):
            try:
                body = line.body()
                rollout_id = line.rollout_id(body)
            except LineError as error:
                if on_bad is None:
                    await publisher.flush()
                    raise LineError(
                        f"{error} (the {counted(publisher.records, 'record before it is', 'records before it are')} published)"
                    ) from None
                on_bad(error)
                skipped += 1
                damaged = line.damaged_rollout()
                if damaged is None:
                    continue
                rollout_id = damaged
                lost = f"{line.where} is damaged"
                await publisher.put(record_of(CaptureIncomplete(rollout_id=rollout_id, reason=lost)))
            else:
                whole = codec.event_name(body) == "rollout_clear"
                key = rollout_id.encode("ascii")
                await publisher.put(OutputRecord(Topic.TOKENS, key, line.raw, whole=whole))
            rollouts.add(rollout_id)
            if ends.get(rollout_id) == (number, line.number):
                await publisher.put(record_of(RolloutComplete(rollout_id=rollout_id)))
    await publisher.flush()
    return Published(publisher.records, len(rollouts), publisher.bytes, skipped, len(withheld))


def _of_file(number: int, on_position: Callable[[int, int], None] | None) -> Callable[[int], None] | None:
    return None if on_position is None else lambda position: on_position(number, position)


def _ends(files: Sequence[Source]) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Rollout id -> number of the file and of the line after which its complete event is due, and who gets none.

    Its last record of any kind, not its last entry: what came after a freeze would be too late. A rollout that its
    own last line ends or clears needs none.
    """
    last: dict[str, tuple[int, int] | None] = {}
    withheld: set[str] = set()
    for number, file in enumerate(files):
        seen: set[str] = set()
        is_doubtful = False
        for line in file.lines():
            body: dict[str, Any] = {}
            try:
                body = line.body()
                rollout_id = line.rollout_id(body)
            except LineError:  # publishing comes upon it again and says so
                damaged = line.damaged_rollout()
                if damaged is None:
                    is_doubtful = True
                    continue
                rollout_id = damaged
            seen.add(rollout_id)
            last[rollout_id] = None if codec.event_name(body) in _CLOSING else (number, line.number)
        if is_doubtful:
            withheld |= seen
    due = {rollout_id: place for rollout_id, place in last.items() if place is not None}
    return {name: place for name, place in due.items() if name not in withheld}, withheld & due.keys()


# ----------------------------------------------------------------------------------------------------- single events


def events_for(rollout_ids: Iterable[str], name: str, fields: dict[str, Any]) -> list[InputEvent]:
    """The same event for each of the rollouts; fields that are None are left out.

    :raises InputError: an id or a field is not what the contract allows.
    """
    given = {key: value for key, value in fields.items() if value is not None}
    return [_event(rollout_id, name, given) for rollout_id in rollout_ids]


def _event(rollout_id: str, name: str, fields: dict[str, Any]) -> InputEvent:
    if not is_rollout_id(rollout_id):
        raise InputError(
            f"{rollout_id[:80]!r} is no valid rollout id: letters, digits, '.', '_' and '-', at most 255, "
            "beginning with a letter or digit"
        )
    try:
        return codec.event_from_object(rollout_id, {"event": name, **fields})
    except DecodeError as error:
        raise InputError(str(error)) from None


async def publish_events(producer: Producer, events: Iterable[InputEvent]) -> int:
    """Publish the events and return their number once they are durable."""
    async with BatchPublisher(producer) as publisher:
        for event in events:
            await publisher.put(record_of(event))
    return publisher.records


# --------------------------------------------------------------------------------------------------------------- load


async def publish_simulated(
    publisher: BatchPublisher,
    simulated: Iterable[Simulated],
    *,
    rate: float = 0,
    packed: bool = False,
    on_truth: Callable[[Truth], None] | None = None,
) -> None:
    """Publish simulated rollouts at ``rate`` calls a second (0: as fast as they become durable).

    Behind its schedule it publishes in larger batches and never more than two; ahead of it, it waits.
    """
    began = time.monotonic()
    calls = 0
    for item in simulated:
        if rate and isinstance(item.event, TokenEntry):
            await _keep_pace(publisher, began + calls / rate)
            calls += 1
        await publisher.put(record_of(item.event, packed=packed))
        if item.truth is not None and on_truth is not None:
            on_truth(item.truth)
    await publisher.flush()


async def _keep_pace(publisher: BatchPublisher, due: float) -> None:
    if time.monotonic() < due:
        await publisher.flush()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
