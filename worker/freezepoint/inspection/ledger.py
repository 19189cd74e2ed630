"""What the workers' ledger says of one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from freezepoint.core.ledger import Decided
from freezepoint.core.records import InputRecord
from freezepoint.transport.ports import Transport
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY
from freezepoint_schemas.topics import Topic

POLL_S = 0.5
POLL_RECORDS = 500


@dataclass(frozen=True, slots=True)
class Ledger:
    """``decided``: of the rollout. ``applied_offset``: how far its partition has been worked on, -1 where never.
    ``chunks``: what was carried of its open life, by key. ``topic_id``: what the tokens topic was then, where workers knew."""

    decided: Decided = field(default_factory=Decided)
    applied_offset: int = -1
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)
    topic_id: str | None = None


async def read_ledger(transport: Transport, partition: int, rollout_id: str) -> Ledger:
    """Read the ledger's partition to its end; only what is of that rollout is kept.

    :raises BrokerError: the broker failed.
    """
    reader = await transport.reader(Topic.LEDGER, partitions=[partition])
    ledger = Ledger()
    try:
        while not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                ledger = with_record(ledger, rollout_id, record)
    finally:
        await reader.close()
    return ledger


def with_record(ledger: Ledger, rollout_id: str, record: InputRecord) -> Ledger:
    """What is said of the rollout, one record of the ledger later."""
    key, value, own = record.key or b"", record.value, rollout_id.encode("ascii")
    if key == own:
        return replace(ledger, decided=Decided() if value is None else Decided.of(codec.decode_ledger(value)))
    if key == PROGRESS_KEY and value is not None:
        progress = codec.decode_progress(value)
        return replace(ledger, applied_offset=progress.applied_offset, topic_id=progress.topic_id)
    if key.startswith(own + CARRY_MARK):
        chunks = {name: chunk for name, chunk in ledger.chunks.items() if name != key}
        return replace(ledger, chunks=chunks if value is None else chunks | {key: value})
    return ledger
