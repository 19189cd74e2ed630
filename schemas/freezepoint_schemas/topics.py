"""Topics, keys and the partitioner: which record goes where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

ROLLOUT_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$"
ROLLOUT_ID_BYTES_MAX = 255
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class Topic(StrEnum):
    """The logical topics; :class:`TopicNames` gives their names on a broker."""

    TOKENS = "tokens"
    TRAJECTORIES = "trajectories"
    LEDGER = "ledger"
    DEAD_LETTERS = "dead_letters"


_DEFAULT_NAMES = {
    Topic.TOKENS: "rollout-tokens",
    Topic.TRAJECTORIES: "rollout-trajectories",
    Topic.LEDGER: "rollout-ledger",
    Topic.DEAD_LETTERS: "rollout-dead-letters",
}


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Logical topic -> name on the broker; the prefix renames all of them."""

    prefix: str = ""

    def __getitem__(self, topic: Topic) -> str:
        return self.prefix + _DEFAULT_NAMES[topic]

    def all(self) -> dict[Topic, str]:
        return {topic: self[topic] for topic in Topic}


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic needs: its partitions and the configuration freezepoint relies on."""

    topic: Topic
    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


_DAY_MS = 24 * 60 * 60 * 1000


def topic_specs(names: TopicNames, partitions: int) -> list[TopicSpec]:
    """The four topics with the configuration they need.

    The tokens topic is never compacted (all records of a rollout share a key) and stamps append time; the ledger has
    the tokens topic's partition numbers and is kept longer than the tokens it speaks of.
    """
    return [
        TopicSpec(
            Topic.TOKENS,
            names[Topic.TOKENS],
            partitions,
            {
                "cleanup.policy": "delete",
                "message.timestamp.type": "LogAppendTime",
                "retention.ms": str(7 * _DAY_MS),
            },
        ),
        TopicSpec(
            Topic.TRAJECTORIES,
            names[Topic.TRAJECTORIES],
            partitions,
            {"cleanup.policy": "delete", "retention.ms": str(7 * _DAY_MS)},
        ),
        TopicSpec(
            Topic.LEDGER,
            names[Topic.LEDGER],
            partitions,
            {"cleanup.policy": "compact,delete", "retention.ms": str(15 * _DAY_MS)},
        ),
        TopicSpec(
            Topic.DEAD_LETTERS,
            names[Topic.DEAD_LETTERS],
            partitions,
            {"cleanup.policy": "delete", "retention.ms": str(15 * _DAY_MS)},
        ),
    ]


def rollout_id_of_key(key: bytes | None) -> str | None:
    """The rollout id a record's key names, or None where the key is missing or no valid rollout id."""
    return None if key is None or len(key) > ROLLOUT_ID_BYTES_MAX else _rollout_id(key)


@lru_cache(maxsize=1 << 16)  # a rollout's records come by the hundred, its key is looked at once
def _rollout_id(key: bytes) -> str | None:
    try:
        text = key.decode("ascii")
    except UnicodeDecodeError:
        return None
    return text if is_rollout_id(text) else None


def is_rollout_id(text: str) -> bool:
    """Whether this is a valid rollout id (``ROLLOUT_ID_PATTERN``)."""
    return _ROLLOUT_ID.fullmatch(text) is not None


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 of the bytes, unsigned (MurmurHash2 by Austin Appleby, seed 0x9747b28c)."""
    mix, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    value = 0x9747B28C ^ length
    whole = length & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * mix & mask
        word = (word ^ (word >> 24)) * mix & mask
        value = (value * mix & mask) ^ word
    if length > whole:
        value = (value ^ int.from_bytes(data[whole:], "little")) * mix & mask
    value = (value ^ (value >> 13)) * mix & mask
    return value ^ (value >> 15)


@lru_cache(maxsize=1 << 16)  # a rollout's records come by the hundred, its key is hashed once
def partition_for(key: bytes, partition_count: int) -> int:
    """The partition of a key under Kafka's default partitioner."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count
