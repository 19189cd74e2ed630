"""Which brokers do: what the worker asks of a broker, compared with what the broker says that it answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Versions = Mapping[int, tuple[int, int]]
"""Of each request, by its number: the oldest and the newest version that a broker answers."""


@dataclass(frozen=True, slots=True)
class Need:
    """A request in the version from which on it does what we rely on, and the release of Kafka that brought it."""

    api_key: int
    version: int
    what: str
    release: str


WORKING: Final = (
    Need(0, 3, "transactional records", "0.11"),
    Need(1, 4, "reading only what is committed", "0.11"),
    Need(2, 2, "the end of what is committed, and offsets by time", "0.11"),
    Need(3, 4, "asking for a topic without creating it", "0.11"),
    Need(10, 1, "finding a transaction's coordinator", "0.11"),
    Need(11, 1, "a rebalance timeout of its own", "0.10.1"),
    Need(22, 0, "idempotent and transactional producers", "0.11"),
    Need(24, 0, "transactions", "0.11"),
    Need(26, 0, "ending transactions", "0.11"),
)
"""Without one of these no worker, sink or reader can do its work."""

OPERATING: Final = (
    Need(32, 0, "reading topic configurations", "0.11"),
    Need(19, 4, "creating topics with the broker's own replication", "2.4"),
    Need(44, 0, "setting single topic configurations", "2.3"),
    Need(3, 8, "telling a user's rights", "2.3"),
)
"""Without one of these, commands for operators (``topics``, ``doctor``) can do less."""

_MARKS: Final = ((72, "3.7"), (66, "3.0"), (60, "2.8"), (50, "2.7"), (45, "2.4"), (44, "2.3"), (22, "0.11"))
_PRODUCE: Final = 0
_OLDEST_OF_4: Final = 3
"""Kafka 4.0 answers no older Produce requests (KIP-896)."""


def missing(versions: Versions, needs: tuple[Need, ...]) -> list[Need]:
    """What of it this broker does not answer."""
    return [
        need for need in needs if need.api_key not in versions or versions[need.api_key][1] < need.version
    ]


def refusal(versions: Versions) -> str | None:
    """Why no work is possible with such a broker."""
    lacking = missing(versions, WORKING)
    if not lacking:
        return None
    wanted = ", ".join(need.what for need in lacking)
    return (
        f"the broker ({release(versions)}) is too old: it lacks {wanted}. Update it to Apache Kafka 2.4 or newer "
        "(0.11 is the oldest that a worker can work with)"
    )


def release(versions: Versions) -> str:
    """About which release of Kafka answers so; other brokers claim the requests of one."""
    if versions.get(_PRODUCE, (0, 0))[0] >= _OLDEST_OF_4:
        return "Kafka 4.0 or newer"
    found = next((name for key, name in _MARKS if key in versions), None)
    return "older than Kafka 0.11" if found is None else f"Kafka {found} or newer"
