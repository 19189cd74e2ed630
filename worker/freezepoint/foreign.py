"""Whether the ledger is this worker's at all. Looked at before it joins: acquiring takes a partition from its owner, and a
worker that is then refused has only disturbed somebody who was at work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from freezepoint.restore import refuse_foreign
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import Transport
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.ledger import PROGRESS_KEY, ProgressRecord
from freezepoint_schemas.topics import Topic

TAIL_OFFSETS: Final = 50
"""Where a partition's last progress record is looked for: it is the last record of every transaction. What lies before that
is read when the partition is acquired, and judged then."""
POLL_S: Final = 0.2
POLL_RECORDS: Final = 1_000


async def refuse_foreign_ledger(transport: Transport, settings: WorkerSettings, topic_id: str | None) -> None:
    """By what the ledger says of itself. Whether the log still is the one it speaks of, where the broker tells no topic's id,
    only the log shows: restoring compares.

    :raises ConfigurationError: the ledger is another group's or another topic's.
    :raises BrokerError: it cannot be read.
    """
    name = transport.names[Topic.TOKENS]
    partitions = await transport.admin().partitions(Topic.TOKENS)
    for partition, progress in sorted((await _last_progress(transport)).items()):
        refuse_foreign(progress, f"{name}[{partition}]", name, partitions, settings.group, topic_id)


async def _last_progress(transport: Transport) -> Mapping[int, ProgressRecord]:
    """By partition, where it is among the last records and can be read."""
    extents = await transport.extents(Topic.LEDGER)
    tails = {
        partition: max(extent.first, extent.end - TAIL_OFFSETS)
        for partition, extent in extents.items()
        if extent.end > extent.first
    }
    found: dict[int, ProgressRecord] = {}
    if not tails:
        return found
    reader = await transport.reader(Topic.LEDGER, partitions=sorted(tails), start=tails)
    try:
        while not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                if record.key == PROGRESS_KEY and record.value is not None:
                    try:
                        found[record.partition] = codec.decode_progress(record.value)
                    except DecodeError:
                        found.pop(record.partition, None)  # of a newer release: restoring says so
    finally:
        await reader.close()
    return found
