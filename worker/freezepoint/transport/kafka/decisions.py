"""What a transaction's coordinator has decided, and whether the partitions were told.

A commit or an abort is decided in the coordinator's log; a marker then tells it to each partition. Kafka 4.3.0 to 4.4.0 take a
partition that has no leader at that moment, as when a broker or a whole cluster comes back from a crash, for a deleted one, and
tell it nothing. The records there stay undecided until the next marker of the same producer, which may say the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from aiokafka import errors as kafka
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

from freezepoint.transport.kafka.wire import if_answered


class _Answer(Response):  # type: ignore[misc] # the client is untyped
    API_KEY = 65
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "transactions",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", CompactString("utf-8")),
                ("state", CompactString("utf-8")),
                ("timeout_ms", Int32),
                ("start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                (
                    "topics",
                    CompactArray(
                        ("topic", CompactString("utf-8")),
                        ("partitions", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TransactionState(RequestStruct):  # type: ignore[misc] # the client is untyped
    """Asks a coordinator how the last transaction of an id stands (KIP-664)."""

    FLEXIBLE_VERSION = True
    API_KEY = 65
    API_VERSION = 0
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(("transactional_ids", CompactArray(CompactString("utf-8"))), ("tags", TaggedFields))

    @classmethod
    def of(cls, transactional_id: str) -> TransactionState:
        return cls([transactional_id], {})

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        """:raises IncompatibleBrokerVersion: brokers do not tell before Kafka 3.0."""
        return if_answered(self, versions, "tell how transactions stand (Kafka 3.0 can)")


_UNKNOWN_ID: Final = 105


class Decision(Enum):
    """What the partitions of an id's last transaction are to be told."""

    COMMIT = auto()
    ABORT = auto()
    OPEN = auto()
    """Nothing yet: it will be aborted by whoever fences its producer, unless a commit comes first."""
    FORGOTTEN = auto()
    """A producer has started since, and begun nothing; or there never was one."""


_DECISIONS: Final = {
    "Ongoing": Decision.OPEN,
    "PrepareCommit": Decision.COMMIT,
    "CompleteCommit": Decision.COMMIT,
    "PrepareAbort": Decision.ABORT,
    "CompleteAbort": Decision.ABORT,
    "PrepareEpochFence": Decision.ABORT,
}


def decision_in(answer: Any) -> Decision:
    """:raises KafkaError: it is no answer to the question."""
    ((code, _, state, *_),) = answer.transactions
    if code == _UNKNOWN_ID:
        return Decision.FORGOTTEN
    error = kafka.for_code(code)
    if error is not kafka.NoError:
        raise error()
    return _DECISIONS.get(state, Decision.FORGOTTEN)
