"""What a topic's configuration must be, compared with what it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freezepoint_schemas.topics import Topic, TopicSpec

RETENTION = "retention.ms"
RETENTION_BYTES = "retention.bytes"
CLEANUP = "cleanup.policy"
UNLIMITED = "-1"

WHY = {
    (Topic.TOKENS, CLEANUP): "compaction would destroy rollouts: all their records share a key",
    (Topic.TOKENS, "message.timestamp.type"): "idle time is counted by the broker's clock",
    (Topic.LEDGER, RETENTION): "it must outlive the tokens it speaks of",
    (Topic.LEDGER, RETENTION_BYTES): "size must not shorten it below the tokens' own",
}

EARLY = {
    Topic.TOKENS: "rollouts that are open then are masked",
    Topic.TRAJECTORIES: "trainers lose results that they have not read",
    Topic.DEAD_LETTERS: "dead letters go before anybody looked",
}
"""What it costs when size shortens a topic."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One configuration value that does not do."""

    key: str
    actual: str | None
    needed: str
    why: str | None

    @property
    def text(self) -> str:
        reason = f" ({self.why})" if self.why else ""
        return f"{self.key} is {self.actual}, needs {self.needed}{reason}"


def differences(spec: TopicSpec, actual: Mapping[str, str], needs: Mapping[str, str]) -> list[Difference]:
    """What of ``needs`` the topic's ``actual`` configuration does not satisfy."""
    return [
        Difference(key, actual.get(key), needed, WHY.get((spec.topic, key)))
        for key, needed in needs.items()
        if not _satisfies(key, actual.get(key), needed)
    ]


def cautions(spec: TopicSpec, actual: Mapping[str, str]) -> list[str]:
    """What is allowed and may cost records all the same."""
    size = limit(actual, RETENTION_BYTES)
    if size is None or spec.topic not in EARLY:
        return []
    return [
        f"{RETENTION_BYTES} is {size}: a partition that grows beyond it loses its oldest records whatever {RETENTION} says; "
        f"{EARLY[spec.topic]}. Is {UNLIMITED} meant?"
    ]


def limit(actual: Mapping[str, str], key: str) -> int | None:
    """A limit of the configuration; None where there is none."""
    value = int(actual.get(key, UNLIMITED))
    return value if value >= 0 else None


def needs(
    spec: TopicSpec, specs: Sequence[TopicSpec], configs: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """The configuration a topic needs, given what the tokens topic has: an operator may keep tokens longer than asked,
    and the ledger must then be kept longer by as much."""
    needed = dict(spec.config)
    if spec.topic is not Topic.LEDGER:
        return needed
    needed[RETENTION_BYTES] = UNLIMITED
    tokens = next((other for other in specs if other.topic is Topic.TOKENS), None)
    if tokens is None or RETENTION not in needed or RETENTION not in tokens.config:
        return needed
    actual_ms = configs.get(tokens.name, {}).get(RETENTION, tokens.config[RETENTION])
    if UNLIMITED in (actual_ms, needed[RETENTION]):
        needed[RETENTION] = UNLIMITED
    else:
        beyond_ms = int(actual_ms) - int(tokens.config[RETENTION])
        needed[RETENTION] = str(int(needed[RETENTION]) + max(0, beyond_ms))
    return needed


def _satisfies(key: str, actual: str | None, needed: str) -> bool:
    """Retention is a minimum: an operator's longer one is right, and shortening it would delete records."""
    if actual is None:
        return False
    if key == RETENTION:
        return actual == UNLIMITED or (needed != UNLIMITED and int(actual) >= int(needed))
    if key == CLEANUP:
        return _policies(actual) == _policies(needed)
    return actual.lower() == needed.lower()


def _policies(text: str) -> set[str]:
    return {policy.strip().lower() for policy in text.split(",") if policy.strip()}
