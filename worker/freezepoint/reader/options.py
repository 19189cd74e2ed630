"""What a reader is told to do, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias, get_args

from freezepoint.errors import ConfigurationError
from freezepoint.reader.trajectory import DeliveryId, StalenessRule
from freezepoint.training.delivery import DeliveryName
from freezepoint.transport.ports import StartAt
from freezepoint_schemas.topics import is_rollout_id

Start: TypeAlias = Literal["stored", "earliest", "latest"] | datetime | float
"""A number is in seconds since the epoch."""

CurrentVersion: TypeAlias = int | Callable[[], int] | None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """See ``TrajectoryReader``."""

    group: str
    start: StartAt
    prefix: str
    yield_masked: bool
    delivery: DeliveryName | None
    current_version: CurrentVersion
    staleness: StalenessRule
    seen: Callable[[DeliveryId], bool] | None
    follow: bool

    def version_now(self) -> int | None:
        """The trainer's current policy version. :raises ConfigurationError: it is no whole number."""
        version = self.current_version() if callable(self.current_version) else self.current_version
        if version is not None and not isinstance(version, int):
            raise ConfigurationError(f"current_version must give a whole number, not {version!r}")
        return version


def start_at(start: Start, *, ignore_stored: bool) -> StartAt:
    """:raises ConfigurationError: no such start, or a time without a time zone."""
    match start:
        case "stored" | "earliest":
            return StartAt("earliest", ignore_stored)
        case "latest":
            return StartAt("latest", ignore_stored)
        case datetime() if start.tzinfo is None:
            raise ConfigurationError(
                "start is a time without a time zone: use datetime(..., tzinfo=timezone.utc)"
            )
        case datetime():
            return StartAt(max(0, int(start.timestamp() * 1000)), ignore_stored)
        case int() | float() if start >= 0:
            return StartAt(int(start * 1000), ignore_stored)
    raise ConfigurationError(
        f"start must be 'stored', 'earliest', 'latest', a datetime or seconds since the epoch, not {start!r}"
    )


def run_prefix(run: str | None) -> str:
    """What the ids of a run begin with. :raises ConfigurationError: no id can begin so."""
    if run is None:
        return ""
    if not is_rollout_id(run):
        raise ConfigurationError(
            f"run {run!r} cannot begin a rollout id: letters, digits, '.', '_' and '-' can"
        )
    return f"{run}."


def checked_group(group: str) -> str:
    """:raises ConfigurationError: it is empty."""
    if not group:
        raise ConfigurationError("group is empty: name a consumer group")
    return group


def checked_delivery(delivery: str | None) -> DeliveryName | None:
    """:raises ConfigurationError: there is no such delivery."""
    for name in get_args(DeliveryName):
        if delivery == name:
            found: DeliveryName = name
            return found
    if delivery is None:
        return None
    raise ConfigurationError(f"delivery must be one of {', '.join(get_args(DeliveryName))}, not {delivery!r}")


def staleness_rule(max_staleness: int | None, on_stale: str) -> StalenessRule:
    """:raises ConfigurationError: an unknown word, or a maximum below 0."""
    if on_stale not in ("tag", "skip"):
        raise ConfigurationError("on_stale must be 'tag' or 'skip'")
    if max_staleness is not None and max_staleness < 0:
        raise ConfigurationError("max_staleness must be at least 0")
    return StalenessRule(max_staleness, on_stale == "skip")
