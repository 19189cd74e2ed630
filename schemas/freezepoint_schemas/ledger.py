"""Ledger records: what is decided about each rollout id, and how far a partition has come."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from freezepoint_schemas.events import SCHEMA_VERSION
from freezepoint_schemas.reasons import Reason

PROGRESS_KEY = b"!progress"
"""Key of a partition's progress record; ``!`` is outside the alphabet of rollout ids."""


CARRY_MARK = b"!"
"""Between a rollout id and ``<generation>.<chunk>`` in the key of a carried chunk."""


class Carried(BaseModel):
    """An open life's log was written into the ledger, in ``chunks`` under ``<rollout_id>!<generation>.<chunk>``: a replay
    need not see its records at or below the offset ``through``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    through: int
    generation: int
    chunks: int

    def keys(self, rollout_id: str) -> list[bytes]:
        """The keys of its chunks, in order."""
        return [
            rollout_id.encode("ascii") + CARRY_MARK + f"{self.generation}.{chunk}".encode("ascii")
            for chunk in range(self.chunks)
        ]


class LedgerRecord(BaseModel):
    """What is decided about one rollout id.

    ``freeze_offset``: of its last frozen life, -1 while none froze. ``clear_offset``: of the first clear after
    that freeze, -1 without. ``first_offset``: of its open life, -1 without. ``carried``: where the open life's log was
    carried to, if it was. The others speak of the last frozen life.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = SCHEMA_VERSION
    freeze_offset: int = -1
    clear_offset: int = -1
    first_offset: int = -1
    snapshot_id: str | None = None
    outcome: Literal["delivered", "masked"] | None = None
    reasons: list[Reason] = Field(default_factory=list)
    carried: Carried | None = None


class ProgressRecord(BaseModel):
    """How far one partition has come; written with every transaction.

    ``watermark``: where a replay starts. ``applied_offset``: the last record folded in, with its append time in
    milliseconds. ``dead_letters_through``: every dead letter at or below this offset is published.
    ``clock_seconds``: how long the partition has been worked on and caught up. ``clock_marks``: (offset, clock) pairs
    in order, each saying that records below the offset had been applied by then; they place replayed records.
    ``gap_until_ms``: records were lost to retention before they were read; of ids first seen up to this append time, in
    milliseconds, some may be among them. 0 without such a gap. ``topic_id``: of the tokens topic, where the broker tells
    it: a topic deleted and created again has another one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = SCHEMA_VERSION
    partition_count: int
    group: str
    watermark: int
    applied_offset: int
    applied_timestamp_ms: int
    dead_letters_through: int
    clock_seconds: float = 0.0
    clock_marks: list[tuple[int, float]] = Field(default_factory=list)
    gap_until_ms: int = 0
    topic_id: str | None = None
