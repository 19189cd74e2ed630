"""From a ledger to a fold, and what is refused: a ledger that speaks of another log, group or number of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from freezepoint.core.records import InputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.restore import restore
from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import PROGRESS_KEY, ProgressRecord

GROUP = "group"
APPLIED, STAMP = 9, 1_000


@dataclass
class Leased:
    """A lease as ``restore`` sees one. ``stamps``: append times by offset."""

    ledger: Sequence[InputRecord] = ()
    log_start: int = 0
    log_end: int = 20
    committed: int | None = None
    recorded: int | None = None
    partition: int = 0
    partition_count: int = 1
    stamps: dict[int, int] = field(default_factory=lambda: {APPLIED: STAMP})
    expired_since: int = 0

    async def record_at(self, offset: int) -> InputRecord | None:
        return InputRecord(0, offset, self.stamps[offset], b"r", b"{}") if offset in self.stamps else None

    async def first(self) -> int:
        return self.log_start + self.expired_since


def progress(**fields: object) -> list[InputRecord]:
    made = ProgressRecord.model_validate(
        {
            "partition_count": 1,
            "group": GROUP,
            "watermark": 5,
            "applied_offset": APPLIED,
            "applied_timestamp_ms": STAMP,
            "dead_letters_through": 4,
            **fields,
        }
    )
    return [InputRecord(0, 0, 0, PROGRESS_KEY, codec.encode_ledger(made))]


async def restored(lease: Leased, topic_id: str | None = None) -> int:
    core = await restore(lease, WorkerSettings(group=GROUP), "tokens", topic_id=topic_id)
    return core.next_offset


@pytest.mark.parametrize(
    ("lease", "start"),
    [
        (Leased(), 0),
        (Leased(log_start=3), 3),
        (Leased(committed=2, log_start=2), 2),
        (Leased(committed=2, log_start=4), 4),
        (Leased(committed=20), 20),
        (Leased(committed=2, recorded=2, log_start=2), 2),
        (Leased(committed=2, recorded=9, log_start=9), 9),
        (Leased(progress(), committed=0, recorded=10), 5),
        (Leased(progress()), 5),
        (Leased(progress(), committed=7), 7),
        (Leased(progress(), log_start=12), 12),
        (Leased(progress(), stamps={}, expired_since=APPLIED + 1), 5),
    ],
    ids=[
        "nothing",
        "truncated",
        "proved",
        "proved and cut",
        "all done",
        "nothing recorded yet",
        "expired with its ledger",
        "recorded",
        "ledger",
        "both",
        "cut",
        "cut just now",
    ],
)
async def test_reading_starts_at_the_latest_of_what_is_known(lease: Leased, start: int) -> None:
    assert await restored(lease) == start


@pytest.mark.parametrize(
    ("lease", "reason"),
    [
        (Leased(progress(group="another")), "one ledger serves one group"),
        (Leased(progress(partition_count=2)), "had 2 partitions and has 1"),
        (Leased(progress(), log_end=3), "was recreated"),
        (Leased(progress(), log_end=8), "was recreated"),
        (Leased(progress(), stamps={APPLIED: STAMP + 1}), "was recreated"),
        (Leased(progress(), stamps={}, expired_since=APPLIED), "was recreated"),
        (Leased(committed=7), "has lost what it knew"),
        (Leased(committed=0, recorded=1), "has lost what it knew.*come to offset 1 of 20"),
        (Leased(committed=3, recorded=9, log_start=3), "has lost what it knew.*come to offset 9 of 20"),
        (Leased(committed=20, recorded=20), "has lost what it knew"),
        (Leased(committed=0, recorded=21), "had come to 21: the topic was recreated"),
        (Leased([InputRecord(0, 0, 0, PROGRESS_KEY, b'{"schema_version": 2}')]), "cannot read"),
    ],
    ids=[
        "group",
        "partitions",
        "short",
        "shorter than read",
        "other record",
        "no record",
        "no ledger",
        "no ledger, open from the start on",
        "no ledger, open from where the log was cut",
        "no ledger, all done",
        "no ledger, and a short log",
        "newer",
    ],
)
async def test_another_ledger_is_refused(lease: Leased, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await restored(lease)


async def test_a_topic_with_another_id_is_refused_whatever_is_in_it() -> None:
    """Filled again beyond what was read, and even with the same append time, it looks like the old one."""
    with pytest.raises(ConfigurationError, match=r"topic id new, not old.*was recreated"):
        await restored(Leased(progress(topic_id="old")), topic_id="new")


@pytest.mark.parametrize(("before", "now"), [("old", "old"), (None, "new"), ("old", None)])
async def test_an_id_nobody_knew_or_tells_refuses_nothing(before: str | None, now: str | None) -> None:
    assert await restored(Leased(progress(topic_id=before)), topic_id=now) == 5


async def test_the_id_is_written_down_and_kept_where_the_broker_stops_telling_it() -> None:
    core = await restore(Leased(progress(topic_id="old")), WorkerSettings(group=GROUP), "tokens")
    (record,) = core.take([])
    assert codec.decode_progress(record.value or b"").topic_id == "old"
