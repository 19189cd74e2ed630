"""What a trainer is handed: one result under the delivery it chose, or a group of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from freezepoint.errors import InputError
from freezepoint.reader.acks import Claim
from freezepoint.training.arrays import TraceArrays, to_arrays, to_response, whole_version
from freezepoint.training.delivery import View
from freezepoint_schemas.events import Reward
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result, Trace


class DeliveryId(NamedTuple):
    """Equal for a repeat of the same result, and for nothing else. Store it with what was made durable, and a repeat after
    a restart is known."""

    rollout_id: str
    partition: int
    freeze_offset: int

    @classmethod
    def of(cls, result: Result) -> DeliveryId:
        """``partition`` is the token partition that the rollout was frozen on."""
        return cls(result.rollout_id, result.snapshot.partition, result.snapshot.freeze_offset)

    def __str__(self) -> str:
        return f"{self.rollout_id}@{self.partition}:{self.freeze_offset}"


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the policy has moved on since a result was sampled.

    ``versions``: current version minus that of its oldest sampled token; None where no current version was given or none is
    known of the result. ``unknown``: some sampled token has no whole-numbered version. ``stale``: above the maximum.
    """

    versions: int | None = None
    unknown: bool = False
    stale: bool = False


NO_LAG = Lag()


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One result as this reader delivers it. It must be acknowledged: ``reader.ack(trajectory)``.

    ``result``: the record itself. ``view``: it under the reader's delivery. ``partition``, ``offset``: where its last record
    lies. ``lag``: by ``policy_version``, judged when it was handed out.
    """

    result: Result
    view: View
    partition: int
    offset: int
    size_bytes: int = field(repr=False)
    claim: Claim = field(repr=False)
    lag: Lag = NO_LAG

    @property
    def rollout_id(self) -> str:
        return self.result.rollout_id

    @property
    def delivery_id(self) -> DeliveryId:
        return DeliveryId.of(self.result)

    @property
    def traces(self) -> Sequence[Trace]:
        """Those to train on: the main one, or with all_traces all of them."""
        return self.view.traces

    @property
    def masked(self) -> bool:
        """Not to be trained on."""
        return self.view.masked

    @property
    def reasons(self) -> Sequence[Reason]:
        """Why it is masked, under the reader's delivery."""
        return self.view.reasons

    @property
    def stale(self) -> bool:
        return self.lag.stale

    @property
    def group_id(self) -> str | None:
        return self.result.group_id

    @property
    def reward(self) -> Reward | None:
        return self.result.reward

    @property
    def metadata(self) -> Any:
        return self.result.metadata

    def to_arrays(
        self,
        trace: Trace | str | None = None,
        *,
        writable: bool = True,
        float_type: Literal["float32", "float64"] = "float32",
    ) -> TraceArrays:
        """One of :attr:`traces`, by its role; without one the only one. See :func:`freezepoint.training.to_arrays`.

        :raises InputError: there is no such trace under the reader's delivery, or none was named and there are several.
        """
        return to_arrays(self.result, self._trace(trace), writable=writable, float_type=float_type)

    def to_response(self, trace: Trace | str | None = None) -> dict[str, Any]:
        """The reference's form: without ``trace`` the result's whole dictionary, whose response is the main trace's as it was
        published, and masked where the reader's delivery masks it too; else that one of :attr:`traces` as a response.

        :raises InputError: no such trace.
        """
        if trace is not None:
            return to_response(self.result, self._trace(trace))
        form = to_response(self.result)
        return form | {"mask_sample": form["mask_sample"] or self.masked}

    def _trace(self, trace: Trace | str | None) -> Trace:
        if isinstance(trace, Trace):
            return trace
        found = [candidate for candidate in self.traces if trace is None or candidate.role == trace]
        if len(found) == 1:
            return found[0]
        roles = ", ".join(candidate.role for candidate in self.traces) or "none at all"
        lacks = "no trace" if trace is None else f"no trace {trace!r}"
        wanted = "several traces, and none was named" if found else lacks
        raise InputError(
            f"rollout {self.rollout_id} has {wanted}; under {self.view.delivery} it has: {roles}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """The rollouts of one prompt, sorted by id. It must be acknowledged as a whole: ``reader.ack(group)``.

    ``results``: those to train on; ``masked`` and ``stale``: those that count towards the group and are not (with
    ``yield_masked``, or ``on_stale="tag"``, they stand in ``results`` instead). ``expected``: the group's size, None where
    nobody said. ``complete``: every rollout has a result here. ``late``: results of a group handed out before.
    """

    group_id: str | None
    results: tuple[Trajectory, ...]
    masked: tuple[Trajectory, ...]
    stale: tuple[Trajectory, ...]
    expected: int | None
    missing: int | None
    complete: bool
    late: bool = False
    superseded: tuple[Trajectory, ...] = field(default=(), repr=False)
    """Results of earlier lives of rollouts in this group; acknowledged with it."""

    @property
    def members(self) -> tuple[Trajectory, ...]:
        """All rollouts that are here, trained on or not."""
        return tuple(
            sorted((*self.results, *self.masked, *self.stale), key=lambda member: member.delivery_id)
        )

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """When a result is too old. ``lag_max`` None: never."""

    lag_max: int | None = None
    skip: bool = False

    def lag(self, trajectory: Trajectory, current: int | None) -> Lag:
        """The result's lag behind the current version."""
        spans = [span for trace in trajectory.traces for span in trace.spans if span.end > span.start]
        versions = [whole_version(span.policy_version) for span in spans]
        known = [version for version in versions if version is not None]
        unknown = len(known) < len(versions)
        if current is None or not known:
            return Lag(None, unknown)
        behind = current - min(known)
        return Lag(behind, unknown, self.lag_max is not None and behind > self.lag_max)
