"""Looks at everything a worker depends on, and says of each whether it is in order and what mends it.

What it reads it reads as a worker would: the ledger's verdict comes from :func:`freezepoint.restore.restore` itself, so that
what a start would refuse is refused here in the same words.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from freezepoint.core.partition import PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError, ConfigurationError, MissingTopicError
from freezepoint.restore import restore
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Broker, Check, Extent, TopicFinding, Verdict
from freezepoint.wording import agreeing, counted
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.ledger import PROGRESS_KEY
from freezepoint_schemas.topics import Topic, topic_specs

POLL_S: Final = 0.2
POLL_RECORDS: Final = 1_000
LOOK_S_MAX: Final = 20.0
"""How long records behind the ledger are looked for: it is their age that counts, not all of them."""

LAG_S_WARN: Final = 60.0
CLOCK_S_WARN: Final = 5.0
FREE_BYTES_WANTED: Final = 1024**3
APPLY: Final = "freezepoint topics apply"
RUN: Final = "freezepoint run (one worker for each partition at most), or see why it does not keep up: its log, /status"


async def examine(settings: Settings, *, probe_clock: bool = False) -> AsyncIterator[Check]:
    """Every check in order. It ends early where nothing further can be seen.

    :param probe_clock: measure the broker's clock by a record that is never committed; takes the right to write tokens.
    """
    async with connect(settings) as broker:
        found = await broker.examine(settings.worker.group)
        for check in found.checks:
            yield check
        yield _spool(settings)
        if not found.usable:
            return
        complete = True
        async for check in _topics(broker, settings):
            complete &= check.verdict != "fail"
            yield check
        if complete:
            async for check in _ledger(broker, settings):
                yield check
        if probe_clock:
            yield await _clock(broker)


def _spool(settings: Settings) -> Check:
    """Where open rollouts go that do not fit the memory budget."""
    folder = settings.worker.spool_folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        return Check("spool", "fail", f"worker.spool_folder {folder} is no folder", f"mkdir -p {folder}")
    free = shutil.disk_usage(folder).free
    text = f"{free / 1024**2:,.0f} MiB free in {folder}"
    if free < min(FREE_BYTES_WANTED, settings.worker.spool_bytes_max):
        return Check("spool", "warn", text, "export FREEZEPOINT_WORKER__SPOOL_FOLDER=a folder with more room")
    return Check("spool", "ok", text)


async def _topics(broker: Broker, settings: Settings) -> AsyncIterator[Check]:
    admin = broker.admin()
    try:
        partitions = await admin.partitions(Topic.TOKENS)
        findings = await admin.check(topic_specs(broker.names, partitions))
    except MissingTopicError as error:
        yield Check("topics", "fail", str(error), APPLY)
        return
    except ConfigurationError as error:  # a worker needs no right to read configurations
        yield Check("topics", "warn", str(error), "grant DescribeConfigs as above")
        return
    except BrokerError as error:
        yield Check("topics", "fail", str(error), "look at the brokers' logs")
        return
    for finding in findings:
        yield _topic(finding)
    yield await _retention(broker, settings)


def _topic(finding: TopicFinding) -> Check:
    if finding.warns:
        return Check(finding.topic, "warn", finding.message, "kafka-configs.sh, unless it is meant")
    verdict: Verdict = "ok" if finding.ok else "fail" if finding.spoils else "warn"
    return Check(finding.topic, verdict, finding.message, None if finding.ok else APPLY)


async def _retention(broker: Broker, settings: Settings) -> Check:
    kept_ms = (await broker.admin().retention(Topic.TOKENS)).milliseconds
    wanted_ms = settings.worker.rollout_timeout_s * 1000
    if kept_ms is None or kept_ms > wanted_ms:
        return Check("retention", "ok", "tokens are kept longer than a rollout may be idle")
    message = (
        f"tokens are kept for {kept_ms / 3.6e6:g} h, a rollout may be idle for {wanted_ms / 3.6e6:g} h: it would lose "
        "records before it ends (input_expired)"
    )
    return Check("retention", "warn", message, f"{APPLY}, or lower FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S")


# ------------------------------------------------------------------------------------------------------ the ledger


@dataclass(slots=True)
class _Seen:
    """A partition as far as it was looked at: the facts that its fold is made from."""

    partition: int
    partition_count: int
    extent: Extent
    latest: dict[bytes | None, InputRecord] = field(default_factory=dict)
    records: dict[int, InputRecord] = field(default_factory=dict)
    committed: int | None = None
    recorded: int | None = None

    @property
    def log_start(self) -> int:
        return self.extent.first

    @property
    def log_end(self) -> int:
        return self.extent.end

    @property
    def ledger(self) -> Sequence[InputRecord]:
        return list(self.latest.values())

    async def record_at(self, offset: int) -> InputRecord | None:
        return self.records.get(offset)

    async def first(self) -> int:
        return self.extent.first


async def _ledger(broker: Broker, settings: Settings) -> AsyncIterator[Check]:
    """The ledger read and judged, and from it how far the work has come."""
    try:
        topic_id = await broker.admin().identity(Topic.TOKENS)
        extents = await broker.extents(Topic.TOKENS)
        seen = {partition: _Seen(partition, len(extents), extent) for partition, extent in extents.items()}
        await _read_offsets(broker, settings.worker.group, seen)
        await _read_ledger(broker, seen)
        extents = await broker.extents(
            Topic.TOKENS
        )  # workers went on: what they recorded lies before the end
        for found in seen.values():
            found.extent = extents[found.partition]
        applied = {partition: _applied_offset(found) for partition, found in seen.items()}
        await _read_tokens(broker, seen, applied)
    except (BrokerError, ConfigurationError) as error:
        yield Check(
            "ledger", "fail", str(error), "grant the rights above, or see why the broker does not answer"
        )
        return
    cores: dict[int, PartitionCore] = {}
    for found in seen.values():
        try:
            name = broker.names[Topic.TOKENS]
            cores[found.partition] = await restore(found, settings.worker, name, topic_id=topic_id)
        except ConfigurationError as error:
            subject = f"{broker.names[Topic.LEDGER]}[{found.partition}]"
            yield Check(subject, "fail", str(error), "as it says; the ledger is never mended by hand")
    if len(cores) == len(seen):
        yield _decided(broker, cores)
    yield _lag(broker, seen, cores)
    yield _stamps(seen)


async def _read_offsets(broker: Broker, group: str, seen: Mapping[int, _Seen]) -> None:
    """What may not be read is passed over here: the group's own check says so."""
    with suppress(ConfigurationError):
        for partition, held in (await broker.offsets(group)).items():
            seen[partition].committed, seen[partition].recorded = held.committed, held.recorded


async def _read_ledger(broker: Broker, seen: Mapping[int, _Seen]) -> None:
    reader = await broker.reader(Topic.LEDGER)
    try:
        while not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                seen[record.partition].latest[record.key] = record
    finally:
        await reader.close()


def _applied_offset(found: _Seen) -> int:
    """-1 without a progress record that can be read; restoring will tell why."""
    record = found.latest.get(PROGRESS_KEY)
    try:
        return codec.decode_progress(record.value).applied_offset if record and record.value else -1
    except DecodeError:
        return -1


async def _read_tokens(broker: Broker, seen: Mapping[int, _Seen], applied: Mapping[int, int]) -> None:
    """Of each partition the last applied record, and the first one behind it."""
    waited = {partition for partition, found in seen.items() if found.extent.end > applied[partition]}
    start = {partition: max(0, offset) for partition, offset in applied.items()}
    reader = await broker.reader(Topic.TOKENS, start=start)
    try:
        until = time.monotonic() + LOOK_S_MAX
        while waited and time.monotonic() < until and not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                found = seen[record.partition]
                if record.partition in waited:
                    found.records[record.offset] = record
                if record.offset > applied[record.partition]:
                    waited.discard(record.partition)
    finally:
        await reader.close()


def _decided(broker: Broker, cores: Mapping[int, PartitionCore]) -> Check:
    decided = [entry for core in cores.values() for entry in core.book.decided.values()]
    waiting = sum(entry.first_offset >= 0 for entry in decided)
    message = f"{counted(len(cores), 'partition')} readable; {counted(len(decided), 'rollout')} known, {waiting} of them open"
    return Check(broker.names[Topic.LEDGER], "ok", message)


def _lag(broker: Broker, seen: Mapping[int, _Seen], cores: Mapping[int, PartitionCore]) -> Check:
    """Offsets are counted, some of which markers and aborted records take; how old the first record is decides."""
    unread = oldest_ms = 0
    behind = list(_behind(seen, cores))
    for offsets, timestamp_ms in behind:
        unread += offsets
        oldest_ms = min(oldest_ms or timestamp_ms, timestamp_ms)
    name = f"lag on {broker.names[Topic.TOKENS]}"
    if not behind:
        return Check(name, "ok", "everything is applied")
    age_s = max(0.0, time.time() - oldest_ms / 1000)
    message = (
        f"{counted(unread, 'record')} in {counted(len(behind), 'partition')} {agreeing(unread, 'is', 'are')} not applied, the "
        f"oldest is {age_s:.0f} s old"
    )
    late = age_s > LAG_S_WARN
    return Check(name, "warn" if late else "ok", message, RUN if late else None)


def _behind(seen: Mapping[int, _Seen], cores: Mapping[int, PartitionCore]) -> Iterator[tuple[int, int]]:
    """Of each partition with something unread: how many offsets, and when the first record was appended."""
    for partition, core in cores.items():
        found = seen[partition]
        first = min((offset for offset in found.records if offset > core.applied_offset), default=None)
        if first is not None:
            yield found.extent.end - first, found.records[first].timestamp_ms


def _stamps(seen: Mapping[int, _Seen]) -> Check:
    """Without writing anything, only a clock that is ahead of ours can be seen."""
    newest_ms = max(
        (record.timestamp_ms for found in seen.values() for record in found.records.values()), default=0
    )
    return _clock_check("clock (by records)", newest_ms / 1000 - time.time(), "no record is from the future")


async def _clock(broker: Broker) -> Check:
    subject = "clock (measured)"
    try:
        ahead_s, error_s = await broker.clock_ahead_s()
    except (BrokerError, ConfigurationError) as error:
        return Check(
            subject, "warn", f"could not be measured: {error}", "grant Write on the tokens topic to who asks"
        )
    fine = f"differs from ours by {abs(ahead_s):.3f} s, give or take {error_s:.3f} s"
    return _clock_check(subject, ahead_s, fine, both_ways=True)


def _clock_check(subject: str, ahead_s: float, fine: str, *, both_ways: bool = False) -> Check:
    if ahead_s <= CLOCK_S_WARN and not (both_ways and -ahead_s > CLOCK_S_WARN):
        return Check(subject, "ok", fine)
    way = "ahead of" if ahead_s > 0 else "behind"
    message = f"the broker's clock is {abs(ahead_s):.0f} s {way} this machine's: ages that are shown are wrong by as much"
    return Check(subject, "warn", message, "timedatectl set-ntp true (on the broker and here)")
