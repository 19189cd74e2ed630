"""What a tracer is told of rollouts. Nothing is imported for it and nothing is kept unless tracing is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Verdict
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import RolloutLog
from freezepoint_schemas.headers import Headers


class PartitionTracer(Protocol):
    """One lease's rollouts: a span for each published result. What is never published leaves none."""

    def read(self, record: InputRecord) -> None:
        """A record is about to be folded in."""
        ...

    def froze(self, log: FrozenLog) -> None:
        """A rollout froze: its span begins."""
        ...

    def folded(self, record: InputRecord, still_open: Mapping[str, RolloutLog]) -> None:
        """The record is folded in; nothing needs to be known of a life that is not open any more."""
        ...

    def publishing(self, log: FrozenLog, verdict: Verdict) -> Headers:
        """Its result is on its way, with these headers."""
        ...

    def published(self, log: FrozenLog) -> None:
        """Its result is committed: the span ends."""
        ...


class RolloutTracer(Protocol):
    """Makes the tracers of partitions, and hands over what it has at the end."""

    def partition(self, topic: str, partition: int, group: str) -> PartitionTracer: ...

    def close(self) -> None:
        """Export what is left; takes seconds at most."""
        ...
