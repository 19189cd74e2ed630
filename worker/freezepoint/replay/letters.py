"""Dead letters put back onto the tokens topic, after what made them was mended.

A record that is put back carries the header ``freezepoint-replayed`` with the topic, partition and offset that it had when
it was set aside. Before anything is sent the tokens topic is read from there on, and what is found in it is not put back
again, whoever put it back and however that run ended. So a second run puts back nothing twice, as long as
the records behind the letter's own are still there: where retention has removed some, nothing can be proved, and
the letter stays where it is. Two runs at the same time do not see each other, and may put back the same record; a
worker then finds a repeat and ignores it.

Nor is anything put back that would do harm or nothing: into a rollout that was frozen since (it would be late, and the
result stands; ``freezepoint replay ID`` rebuilds it), or one that was cleared since (it belongs to a life that is over).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import orjson

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.replay.clears import is_clear
from freezepoint.source.ledger_view import LedgerView
from freezepoint.source.reading import is_frozen
from freezepoint.transport.ports import Broker, Extent, Producer
from freezepoint_schemas import headers
from freezepoint_schemas.errors import InputError
from freezepoint_schemas.headers import Headers, header
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.topics import Topic, is_rollout_id, partition_for, rollout_id_of_key

POLL_S: Final = 0.2
POLL_RECORDS: Final = 500
SEND_RECORDS: Final = 200
SEND_BYTES: Final = 8 * 1024 * 1024
DEADLINE_S: Final = 60.0
LETTER_BYTES_MAX: Final = 2**40
"""No limit but memory: a worker's own has let it through."""

_OURS: Final = frozenset(
    {
        headers.ERROR_TOPIC,
        headers.ERROR_PARTITION,
        headers.ERROR_OFFSET,
        headers.ERROR_CLASS,
        headers.ERROR_MESSAGE,
        headers.REPLAYED,
        headers.PART,
        headers.ORIGINAL_PART,
    }
)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which letters: of these reasons and rollouts, all where none is named. ``rekey``: a record without a usable key takes
    the rollout id in its body for one."""

    reasons: frozenset[str] = frozenset()
    rollout_ids: frozenset[str] = frozenset()
    rekey: bool = False

    def take(self, letter: _Letter) -> bool:
        return (not self.reasons or letter.reason in self.reasons) and (
            not self.rollout_ids or letter.rollout_id in self.rollout_ids
        )


class Why(StrEnum):
    """Why a letter is not put back."""

    ALREADY = "it was put back before"
    FROZEN = "its rollout is frozen and the result stands: freezepoint replay ID rebuilds it"
    CLEARED = "its rollout was cleared since: it belongs to a life that is over"
    TRUNCATED = "only its first bytes were kept"
    PARTS = "some of its parts are not among the letters"
    NO_KEY = "it has no rollout id for a key; --rekey takes the body's"
    UNPROVED = "records since it was set aside have expired: whether it was put back before cannot be told"
    FOREIGN = "it comes from another topic"


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one letter; ``why`` is None where it is put back. ``origin``: topic, partition and offset of the record."""

    origin: str
    rollout_id: str | None
    reason: str
    why: Why | None


@dataclass(frozen=True, slots=True)
class _Letter:
    """What of a dead letter decides, without its value."""

    topic: str
    partition: int
    offset: int
    reason: str
    rollout_id: str | None
    truncated: bool
    lacks_parts: bool = False

    @property
    def origin(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"

    def home(self, count: int) -> int | None:
        """Where its record belongs, None without a rollout id."""
        return None if self.rollout_id is None else partition_for(self.rollout_id.encode("ascii"), count)


async def put_back(broker: Broker, filters: Filters, *, dry_run: bool = False) -> AsyncGenerator[Fate]:
    """Every letter that the filters take, in the order of their topic, with what becomes of it.

    A fate is yielded when it is settled: that of a record that is put back once it is durable.

    :raises BrokerError: the broker failed; the next run goes on where this one ended.
    """
    letters: list[_Letter] = []
    async with aclosing(_read(broker, filters)) as found:
        async for letter, _ in found:
            letters.append(letter)
    if not letters:
        return
    fates = await _decide(broker, letters)
    if dry_run:
        for letter in letters:
            yield _fate(letter, fates)
        return
    producer = await broker.producer()
    try:
        async with aclosing(_send(broker, producer, filters, fates)) as settled:
            async for fate in settled:
                yield fate
    finally:
        await producer.close()


def _fate(letter: _Letter, fates: Mapping[str, Why | None]) -> Fate:
    return Fate(letter.origin, letter.rollout_id, letter.reason, fates[letter.origin])


async def _send(
    broker: Broker, producer: Producer, filters: Filters, fates: Mapping[str, Why | None]
) -> AsyncGenerator[Fate]:
    """The topic is read once more, so that no value is held for longer than it takes to send it."""
    batch: list[tuple[_Letter, OutputRecord]] = []
    async with aclosing(_read(broker, filters)) as found:
        async for letter, record in found:
            if letter.origin not in fates:
                continue  # set aside since
            if fates[letter.origin] is not None:
                yield _fate(letter, fates)
                continue
            batch.append((letter, record))
            if len(batch) >= SEND_RECORDS or sum(record.size for _, record in batch) > SEND_BYTES:
                await producer.send([record for _, record in batch])
                for sent, _ in batch:
                    yield _fate(sent, fates)
                batch = []
    await producer.send([record for _, record in batch])
    for sent, _ in batch:
        yield _fate(sent, fates)


# ------------------------------------------------------------------------------------------------------- reading


async def _read(broker: Broker, filters: Filters) -> AsyncGenerator[tuple[_Letter, OutputRecord]]:
    """The letters the filters take, each with its record as it would be put back."""
    reader = await broker.reader(Topic.DEAD_LETTERS)
    letters, values = _Wholes(headers.PART), _Wholes(headers.ORIGINAL_PART)
    try:
        while not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                whole = letters.take(record)
                value = None if whole is None else values.take(whole)
                letter = None if value is None else _letter(value, filters)
                if value is not None and letter is not None and filters.take(letter):
                    yield letter, _again(letter, value)
    finally:
        await reader.close()
    for rest in values.incomplete():
        letter = _letter(rest, filters)
        if letter is not None and filters.take(letter):
            yield replace(letter, lacks_parts=True), _again(letter, rest)


@dataclass(slots=True)
class _Wholes:
    """Puts together what was split: a letter above its topic's limit (its ``part_header`` is the contract's own), or a
    record that was set aside part by part. The whole has the place and the headers of its first part."""

    part_header: str
    _first: dict[tuple[int, bytes | None, str], InputRecord] = field(default_factory=dict)
    _assemblers: dict[tuple[int, bytes | None, str], PartAssembler] = field(default_factory=dict)

    def take(self, record: InputRecord) -> InputRecord | None:
        """The record itself where it is no part, or the whole that it completes."""
        raw = header(record.headers, self.part_header)
        if raw is None or record.value is None or header(record.headers, headers.ORIGINAL_SIZE) is not None:
            return record
        try:
            part = PartHeader.parse(raw)
            place = (record.partition, record.key, part.value_id)
            first = self._first.setdefault(place, record)
            assembler = self._assemblers.setdefault(place, PartAssembler(LETTER_BYTES_MAX))
            value = assembler.add(part, record.value, record.offset)
        except InputError:
            return None
        if value is None:
            return None
        del self._first[place], self._assemblers[place]
        return first._replace(value=value)

    def incomplete(self) -> Iterable[InputRecord]:
        """The first part of each value that lacks some."""
        return self._first.values()


def _letter(record: InputRecord, filters: Filters) -> _Letter | None:
    """None for what is no letter of a worker's."""
    found = {name: header(record.headers, name) or b"" for name in _OURS}
    try:
        topic, reason = found[headers.ERROR_TOPIC].decode(), found[headers.ERROR_CLASS].decode()
        partition, offset = int(found[headers.ERROR_PARTITION]), int(found[headers.ERROR_OFFSET])
    except ValueError:
        return None
    rollout_id = rollout_id_of_key(record.key)
    if rollout_id is None and filters.rekey:
        rollout_id = _named_in(record.value)
    return _Letter(
        topic=topic,
        partition=partition,
        offset=offset,
        reason=reason,
        rollout_id=rollout_id,
        truncated=header(record.headers, headers.ORIGINAL_SIZE) is not None,
    )


def _named_in(value: bytes | None) -> str | None:
    try:
        body: Any = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return None
    named = body.get("rollout_id") if isinstance(body, dict) else None
    return named if isinstance(named, str) and is_rollout_id(named) else None


def _again(letter: _Letter, record: InputRecord) -> OutputRecord:
    """As it came, with where it lay; its key decides the partition."""
    key = record.key if letter.rollout_id is None else letter.rollout_id.encode("ascii")
    mark = (headers.REPLAYED, letter.origin.encode())
    return OutputRecord(Topic.TOKENS, key, record.value, (*_own_headers(record.headers), mark))


def _own_headers(given: Headers) -> Headers:
    return tuple((name, value) for name, value in given if name not in _OURS)


# ------------------------------------------------------------------------------------------------------ deciding


@dataclass(slots=True)
class _Since:
    """What the tokens topic says of the letters' records, and what came after them."""

    first_ms: dict[int, int] = field(default_factory=dict)
    """By partition: the append time of the first record that was read."""
    origin_ms: dict[str, int] = field(default_factory=dict)
    marks: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By origin: the parts that were put back, 0 for a whole record."""
    counts: dict[str, int] = field(default_factory=dict)
    clears: defaultdict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By rollout id: offset and append time of its clears, on its own partition."""

    def is_there(self, letter: _Letter) -> bool:
        """Whether it was put back, with all its parts if it was split for it."""
        found = self.marks.get(letter.origin)
        return found is not None and len(found) == self.counts[letter.origin]


async def _decide(broker: Broker, letters: Sequence[_Letter]) -> dict[str, Why | None]:
    extents = await broker.extents(Topic.TOKENS)
    tokens = broker.names[Topic.TOKENS]
    since = await _look(broker, [letter for letter in letters if letter.topic == tokens], extents)
    reader = await broker.reader(Topic.LEDGER)
    try:
        ledger = LedgerView(reader, broker.names, DEADLINE_S)
        await ledger.refresh()
    finally:
        await reader.close()
    return {
        letter.origin: Why.FOREIGN if letter.topic != tokens else _why_not(letter, since, ledger, extents)
        for letter in letters
    }


def _why_not(letter: _Letter, since: _Since, ledger: LedgerView, extents: Mapping[int, Extent]) -> Why | None:
    home = letter.home(len(extents))
    if letter.rollout_id is None or home is None or letter.truncated or letter.lacks_parts:
        return Why.TRUNCATED if letter.truncated else Why.PARTS if letter.lacks_parts else Why.NO_KEY
    if since.is_there(letter):
        return Why.ALREADY
    if not _is_proved(letter, home, since, extents):
        return Why.UNPROVED
    if _is_cleared(letter, home, since):
        return Why.CLEARED
    return Why.FROZEN if is_frozen(ledger.decided(home, letter.rollout_id)) else None


def _is_proved(letter: _Letter, home: int, since: _Since, extents: Mapping[int, Extent]) -> bool:
    """Whether all is still there that could have been put back: everything behind the letter's own record."""
    first = extents[home].first
    if letter.partition == home:
        return first <= letter.offset + 1
    origin_ms = since.origin_ms.get(letter.origin)
    return origin_ms is not None and (first == 0 or since.first_ms.get(home, origin_ms + 1) <= origin_ms)


def _is_cleared(letter: _Letter, home: int, since: _Since) -> bool:
    clears = since.clears.get(letter.rollout_id or "", ())
    if letter.partition == home:
        return any(offset > letter.offset for offset, _ in clears)
    return any(stamp_ms >= since.origin_ms[letter.origin] for _, stamp_ms in clears)


async def _look(broker: Broker, letters: Sequence[_Letter], extents: Mapping[int, Extent]) -> _Since:
    """Read the tokens topic from where the first of the letters lay, and the partitions they belong to from where that is
    provable."""
    since = _Since()
    origins = {(letter.partition, letter.offset): letter.origin for letter in letters}
    ids = {letter.rollout_id for letter in letters}
    start = _starts(letters, len(extents))
    if not start:
        return since
    reader = await broker.reader(Topic.TOKENS, partitions=sorted(start), start=start)
    try:
        while not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                since.first_ms.setdefault(record.partition, record.timestamp_ms)
                origin = origins.get((record.partition, record.offset))
                if origin is not None:
                    since.origin_ms[origin] = record.timestamp_ms
                _note(since, record, ids, len(extents))
    finally:
        await reader.close()
    return since


def _starts(letters: Iterable[_Letter], count: int) -> dict[int, int]:
    start: dict[int, int] = {}
    for letter in letters:
        home = letter.home(count)
        if letter.partition < count:
            start[letter.partition] = min(letter.offset, start.get(letter.partition, letter.offset))
        if home is not None and home != letter.partition:
            start[home] = 0
    return start


def _note(since: _Since, record: InputRecord, ids: set[str | None], count: int) -> None:
    mark = header(record.headers, headers.REPLAYED)
    if mark is not None:
        origin = mark.decode("utf-8", "replace")
        index, parts = _place(record)
        since.marks[origin].add(index)
        since.counts[origin] = parts
    rollout_id = rollout_id_of_key(record.key)
    if rollout_id is None or rollout_id not in ids or record.key is None:
        return
    if partition_for(record.key, count) == record.partition and is_clear(rollout_id, record):
        since.clears[rollout_id].append((record.offset, record.timestamp_ms))


def _place(record: InputRecord) -> tuple[int, int]:
    raw = header(record.headers, headers.PART)
    try:
        part = None if raw is None else PartHeader.parse(raw)
    except InputError:
        part = None
    return (0, 1) if part is None else (part.index, part.count)
