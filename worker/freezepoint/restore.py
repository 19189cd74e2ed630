"""From a lease to a partition's fold: what the ledger says, and where to start reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from freezepoint.core.carry import load_life
from freezepoint.core.ledger import Decided, LedgerBook
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.rollout import LogLimits
from freezepoint.errors import ConfigurationError
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import PartitionFacts
from freezepoint.wording import counted
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY, ProgressRecord


async def restore(
    lease: PartitionFacts,
    settings: WorkerSettings,
    topic_name: str,
    counters: Counter[str] | None = None,
    topic_id: str | None = None,
) -> PartitionCore:
    """The fold of the leased partition; reading starts at its ``next_offset``.

    :param counters: where it counts what happens, shared by all partitions.
    :param topic_id: what the topic is now, where the broker tells.

    :raises ConfigurationError: the ledger is not this topic's or group's, or of a newer release: working on would
        swallow or repeat results.
    """
    book, progress, chunks = _read_ledger(lease, topic_name)
    if progress is not None:
        where = f"{topic_name}[{lease.partition}]"
        refuse_foreign(progress, where, topic_name, lease.partition_count, settings.group, topic_id)
        if not await _same_log(lease, progress):
            raise recreated(where, f"offset {progress.applied_offset} differs")
    else:
        _refuse_lost(lease, topic_name)
    start = max(progress.watermark if progress else 0, lease.committed or 0, lease.log_start)
    come_to = max(start, lease.recorded or 0)
    if come_to > lease.log_end:
        raise ConfigurationError(
            f"{topic_name}[{lease.partition}] ends at offset {lease.log_end}, but work had come to {come_to}: the topic was "
            "recreated. Delete the ledger topic and the consumer group's offsets too, or use a new topic prefix"
        )
    core = PartitionCore(
        PartitionConfig(
            topic_name=topic_name,
            partition=lease.partition,
            partition_count=lease.partition_count,
            group=settings.group,
            record_bytes_max=settings.record_bytes_max,
            limits=LogLimits(settings.rollout_bytes_max, settings.rollout_entries_max),
            rollout_timeout_s=settings.rollout_timeout_s,
        ),
        book=book,
        next_offset=start,
        counters=Counter() if counters is None else counters,
    )
    if progress is not None:
        core.dead_letters_through = progress.dead_letters_through
        core.applied_offset = progress.applied_offset
        core.applied_timestamp_ms = progress.applied_timestamp_ms
        core.clock.now = progress.clock_seconds
        core.clock.marks = list(progress.clock_marks)
        core.gap_until_ms = progress.gap_until_ms
    core.topic_id = topic_id or (progress.topic_id if progress else None)
    _restore_carried(core, chunks)
    core.expire(lease.log_start)
    return core


def _refuse_lost(lease: PartitionFacts, topic_name: str) -> None:
    """For a ledger that tells no progress: nothing may show that one has.

    A ledger that has expired, on a partition where nothing came for long, is none that was lost: no record is left that it
    speaks of. The offset alone tells nothing at either end of the log: an owner proves itself by committing the log's start, and
    at the end there is nothing to read again.

    :raises ConfigurationError: it had told some, of records that are still there.
    """
    come_to = lease.recorded
    if come_to is None and lease.committed is not None and lease.committed < lease.log_end:
        come_to = lease.committed
    if come_to is not None and lease.log_start < come_to <= lease.log_end:
        raise ConfigurationError(
            f"the ledger of {topic_name}[{lease.partition}] has lost what it knew: it tells no progress, and the group had come to "
            f"offset {come_to} of {lease.log_end}. What was published would be published again. Use a new "
            "topic prefix; or, to have everything published anew that is in the topic, delete the consumer group's offsets"
        )


def _restore_carried(core: PartitionCore, chunks: Mapping[bytes, bytes]) -> None:
    """Lives that were carried into the ledger go on from there.

    :raises ConfigurationError: the ledger lost some of it, and its records are not read again.
    """
    for rollout_id, decided in core.book.decided.items():
        carried = decided.carried
        if carried is None:
            continue
        try:
            found = [chunks[key] for key in carried.keys(rollout_id)]
            life = load_life(rollout_id, found, core.config.limits, core.config.record_bytes_max)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"the ledger has lost what it carried of rollout {rollout_id} ({type(error).__name__}): was its topic "
                "altered? Its cleanup.policy must be compact,delete: freezepoint topics check"
            ) from None
        core.restore(life, carried)


def _read_ledger(
    lease: PartitionFacts, topic_name: str
) -> tuple[LedgerBook, ProgressRecord | None, dict[bytes, bytes]]:
    """Decisions by rollout id, the progress, and carried chunks by key."""
    book, progress = LedgerBook(), None
    chunks: dict[bytes, bytes] = {}
    for record in lease.ledger:
        if record.value is None or record.key is None:
            continue
        try:
            if record.key == PROGRESS_KEY:
                progress = codec.decode_progress(record.value)
            elif CARRY_MARK in record.key:
                chunks[record.key] = record.value
            else:
                book.decided[record.key.decode("ascii")] = Decided.of(codec.decode_ledger(record.value))
        except (DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the ledger of {topic_name}[{lease.partition}] has a record this release cannot read at offset "
                f"{record.offset} ({error}): run the release that wrote it, or a newer one"
            ) from None
    return book, progress, chunks


def refuse_foreign(
    progress: ProgressRecord,
    where: str,
    topic_name: str,
    partition_count: int,
    group: str,
    topic_id: str | None,
) -> None:
    """:raises ConfigurationError: the ledger whose last progress this is serves another group, or another topic."""
    if progress.group != group:
        raise ConfigurationError(
            f"{where} is worked by group {progress.group!r}, this worker is of {group!r}: one ledger serves "
            "one group. Set worker.group, or use other topics"
        )
    if progress.partition_count != partition_count:
        raise ConfigurationError(
            f"{topic_name} had {counted(progress.partition_count, 'partition')} and has {partition_count}: ids would move "
            "between partitions. Use a new topic prefix with the wanted count"
        )
    if topic_id is not None and progress.topic_id not in (None, topic_id):
        raise recreated(where, f"topic id {topic_id}, not {progress.topic_id}")


def recreated(where: str, differs: str) -> ConfigurationError:
    """The topic is not the one that the ledger speaks of."""
    return ConfigurationError(
        f"{where} is not the log the ledger speaks of ({differs}): the topic was "
        "recreated. Delete the ledger topic and the consumer group's offsets too, or use a new topic prefix"
    )


async def _same_log(lease: PartitionFacts, progress: ProgressRecord) -> bool:
    """Whether the last applied record is still the same one, or has only expired."""
    if progress.applied_offset < lease.log_start:
        return True
    if progress.applied_offset >= lease.log_end:
        return False
    record = await lease.record_at(progress.applied_offset)
    if record is None:  # perhaps it expired since the lease was acquired
        return progress.applied_offset < await lease.first()
    return record.timestamp_ms == progress.applied_timestamp_ms
