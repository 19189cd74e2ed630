"""A worker on the wrong topic stops; a poison pill stops nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from freezepoint.errors import ConfigurationError
from freezepoint.guard import DeadLetterGuard
from freezepoint_schemas.reasons import DeadLetterReason, Reason


def feed(guard: DeadLetterGuard, reasons: Sequence[Reason | DeadLetterReason | None]) -> None:
    for reason in reasons:
        if reason is not None:
            guard.letter(reason)
        guard.record("topic[0]")


def test_mostly_garbage_stops_the_worker_and_says_why() -> None:
    with pytest.raises(ConfigurationError, match="wrong_partition"):
        feed(DeadLetterGuard(0.5, 10), [None] * 4 + [DeadLetterReason.WRONG_PARTITION] * 6)


def test_half_garbage_late_records_and_old_garbage_do_not() -> None:
    guard = DeadLetterGuard(0.5, 10)
    feed(guard, [None] * 5 + [Reason.UNDECODABLE_RECORD] * 5)
    feed(guard, [DeadLetterReason.LATE_AFTER_FREEZE] * 10)
    feed(guard, [Reason.ROLLOUT_TOO_LARGE] * 10)
    feed(guard, [Reason.INVALID_ENTRY] * 5 + [None] * 5)
